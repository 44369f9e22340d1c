"""The plan: decided without a file system, complete, and refused where a named wall cannot stand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.unit.host import HOME, WORKSPACE, bwrap, host, path, user
from vectora_jail.doctor import doctor, exit_code
from vectora_jail.errors import PolicyError, UnsupportedPolicy, WorkerSpawnError
from vectora_jail.facts import BwrapFacts, PathFact, SystemEntry, Trial
from vectora_jail.mounts import by_place
from vectora_jail.plan import build_plan
from vectora_jail.policy import Ceiling, Limits, Network, Policy, SeccompPolicy

NO = Trial(ok=False, reason="No permissions to create new namespace", fix="sysctl -w x=1")
NO_NAMESPACES = bwrap(userns=NO, proc=NO, net=NO, disable_userns=NO)
BARE = Policy(mask=(), protect_git="off")


def layers(plan):
    return {layer.name: layer.state for layer in plan.layers}


def test_equal_input_gives_an_equal_plan():
    """Assert that a plan is a value: the same policy and facts give the same one, hash included."""
    one, two = build_plan(Policy(), host()), build_plan(Policy(), host())
    assert one == two
    assert hash(one) == hash(two)
    assert one.to_json() == two.to_json()


def test_plan_of_a_common_workspace():
    """Assert the outline of a default jail."""
    plan = build_plan(Policy(), host())
    assert (plan.isolation, plan.network_mode, plan.uid) == ("bwrap", "none", 1000)
    assert plan.bwrap is not None
    assert plan.bwrap.path == b"/usr/bin/bwrap"
    assert not plan.bwrap.share_net
    assert plan.seccomp
    assert plan.landlock is not None
    assert plan.policy_digest == Policy().digest
    assert layers(plan)["mounts"] == layers(plan)["userns"] == layers(plan)["landlock"] == "on"


def test_hello_carries_everything_the_worker_applies():
    """Assert the keys of the first message and that its paths are bytes."""
    hello = build_plan(Policy(), host()).hello()
    assert hello["cwd"] == WORKSPACE
    assert all(isinstance(pair, bytes) and b"=" in pair for pair in hello["env"])
    assert hello["pid1"] is True
    assert hello["probe"]["syscall"] == 165
    assert hello["limits"] == {"memory": 2048 << 20, "pids": 256, "disk": 4096 << 20}
    assert [4, 0, 0] in hello["cmd_rlimits"]
    assert len(hello["seccomp"]) % 8 == 0


def test_enter_ops_close_proc_in_order():
    """Assert that the tree is private first, and sysctls are lowered before /proc/sys closes."""
    ops = build_plan(Policy(), host()).enter_ops
    names = [op[0] for op in ops]
    assert ops[0] == ("private",)
    assert names.index("ro") > max(i for i, name in enumerate(names) if name == "sysctl")
    assert ("ro", b"/proc/sys", False) in ops
    assert ("sysctl", "user/max_inotify_instances", "16") in ops
    assert ("sysctl", "user/max_inotify_watches", "12000") in ops
    assert not [op for op in ops if op[0] == "cover"]
    bounded = {op[1] for op in ops if op[0] == "inodes"}
    assert bounded == {b"/tmp", b"/var/tmp", b"/run", b"/dev/shm", HOME}


def test_root_sees_less_of_proc():
    """Assert that a uid-0 jail has the files covered that uid 0 could read without any capability."""
    ops = build_plan(Policy(), host(user=user(0, b"/root"))).enter_ops
    assert {op[1] for op in ops if op[0] == "cover"} == {b"/proc/kmsg", b"/proc/kcore", b"/proc/keys"}
    assert ("ro", b"/proc/1/oom_score_adj", True) in ops


def test_tree_specification():
    """Assert what the watch is told: grants, masks with the floor, secrets that show, protections, git."""
    ceiling = Ceiling(mask_floor=(".env",), outside_paths=("/srv/x",))
    policy = Policy(mask=("!.env.example", "*.key"), ceiling=ceiling, protect=("conf",))
    facts = host(
        workspace=path(HOME), rw=(path(HOME),), ro=(path(b"/srv/x"),), protect=(path(HOME + b"/conf"),)
    )
    tree = build_plan(policy, facts).tree
    assert tree["workspace"] == HOME
    assert sorted(tree["roots"]) == [[HOME, True], [b"/srv/x", False]]
    assert [b".env", False, True] in tree["masks"]
    assert [b".env.example", True, False] in tree["masks"]
    assert HOME + b"/.ssh" in tree["mask_paths"]
    assert b"/etc/ssl/private" in tree["mask_paths"]
    assert b"/etc/shadow" not in tree["mask_paths"]
    assert {HOME + b"/vectora.toml", HOME + b"/conf"} <= set(tree["protect"])
    assert tree["git"] == 2


def test_secrets_outside_every_bind_need_no_cover():
    """Assert that a private home needs no cover over what it does not hold."""
    assert not [p for p in build_plan(Policy(), host()).tree["mask_paths"] if p.startswith(HOME)]


def test_a_root_directory_grant_is_refused():
    """Assert that `/` cannot be granted, with the way to read everything in the hint."""
    with pytest.raises(PolicyError, match="root directory"):
        build_plan(Policy(), host(rw=(path(b"/"),)))


@pytest.mark.parametrize("place", [b"/proc", b"/dev", b"/sys/kernel", b"/run/vectora-jail/x", b"/run"])
def test_the_jails_own_places_are_refused(place):
    """Assert that a grant cannot replace what the jail has of its own."""
    with pytest.raises(PolicyError, match="belongs to the jail itself"):
        build_plan(Policy(), host(ro=(path(place),)))


def test_same_place_twice_is_refused_by_where_it_leads():
    """Assert that one directory under two names cannot be granted in two ways."""
    alias = PathFact(b"/srv/alias", WORKSPACE, "dir")
    with pytest.raises(PolicyError, match="both in rw_paths and in ro_paths"):
        build_plan(Policy(), host(ro=(alias,)))


def test_devices_and_sockets_cannot_be_granted_as_paths():
    """Assert that a grant is a directory or a file."""
    with pytest.raises(PolicyError, match="is a device"):
        build_plan(Policy(), host(rw=(path(b"/srv/dev", "device"),)))


def test_workspace_in_a_secret_place_is_refused():
    """Assert that `~/.ssh` is no workspace unless the ceiling says so."""
    place = path(HOME + b"/.ssh")
    facts = host(workspace=place, rw=(place,))
    with pytest.raises(PolicyError, match="no jail sees") as caught:
        build_plan(Policy(), facts)
    assert caught.value.code == "policy_ceiling"
    consent = Policy(ceiling=Ceiling(sensitive_exceptions=("~/.ssh",)))
    assert by_place(build_plan(consent, facts).mounts)[place.path].kind == "rw"


def test_missing_grant_is_a_hazard_and_refused_under_lockdown():
    """Assert that what is not there is reported, and nothing ambiguous under lockdown."""
    facts = host(ro=(PathFact(b"/srv/gone", b"/srv/gone", "missing"),))
    assert ("path_missing", "'/srv/gone' is missing: nothing is granted there") in build_plan(
        Policy(), facts
    ).hazards
    with pytest.raises(PolicyError, match="do not exist"):
        build_plan(Policy(lockdown=True), facts)


# ---- hosts that cannot ----


@pytest.mark.parametrize(
    ("facts", "code", "says"),
    [
        (BwrapFacts(reason="bubblewrap is not installed"), "bwrap_missing", "not installed"),
        (NO_NAMESPACES, "userns", "No permissions"),
        (bwrap(proc=NO), "proc", "fresh /proc"),
        (bwrap(net=NO), "netns", "network namespaces"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(facts, code, says):
    """Assert that a default policy is refused with the missing part, its reason and what helps."""
    with pytest.raises(UnsupportedPolicy, match=says) as caught:
        build_plan(Policy(), host(bwrap=facts))
    assert caught.value.code == code
    assert caught.value.hint
    with pytest.raises(WorkerSpawnError) as caught_root:
        build_plan(BARE, host(bwrap=facts, user=user(0, b"/root")))
    assert caught_root.value.code == code


def test_host_network_needs_no_network_namespace():
    """Assert that a policy with the host's network starts where network namespaces are refused."""
    policy = Policy(network=Network(mode="host"))
    plan = build_plan(policy, host(bwrap=bwrap(net=NO)))
    assert plan.bwrap is not None
    assert plan.bwrap.share_net
    assert layers(plan)["network"] == "off"


def test_landlock_alone_when_the_policy_needs_no_mounts():
    """Assert the fallback: rights on the host's paths, a signal scope a command, no claim of namespaces."""
    plan = build_plan(BARE, host(bwrap=NO_NAMESPACES))
    assert plan.isolation == "landlock"
    assert plan.bwrap is None
    assert plan.enter_ops == ()
    assert plan.cmd_scope
    assert layers(plan)["mounts"] == layers(plan)["userns"] == "off"
    assert layers(plan)["landlock"] == "partial"
    assert plan.scratch.startswith(b"/run/user/1000/vectora-jail-1000-")
    assert b"TMPDIR=" + plan.scratch + b"/tmp" in plan.env
    assert not [m for m in plan.mounts if m.kind in ("tmpfs", "symlink", "dir", "data")]
    assert plan.hello()["pid1"] is False


@pytest.mark.parametrize("change", [{"mask": (".env",)}, {"protect": ("x",)}, {"protect_git": "read-only"}])
def test_landlock_alone_cannot_mask(change):
    """Assert that a mask or a protection inside a grant is refused where only Landlock is left."""
    with pytest.raises(UnsupportedPolicy, match="need mounts"):
        build_plan(BARE.with_(**change), host(bwrap=NO_NAMESPACES, protect=(path(WORKSPACE + b"/x"),)))


def test_landlock_alone_protects_what_is_not_writable():
    """Assert that protections need no mounts at level read-only; else the open policy file is a hazard."""
    plan = build_plan(Policy(level="read-only", mask=()), host(bwrap=NO_NAMESPACES))
    assert plan.isolation == "landlock"
    assert "policy_open" not in {kind for kind, _ in plan.hazards}
    assert "policy_open" in {kind for kind, _ in build_plan(BARE, host(bwrap=NO_NAMESPACES)).hazards}


def test_landlock_before_abi_6_needs_consent():
    """Assert that a jail whose commands can kill the worker needs the ceiling's weak_isolation."""
    facts = host(bwrap=NO_NAMESPACES, landlock_abi=5)
    with pytest.raises(WorkerSpawnError, match="killing its worker"):
        build_plan(BARE.with_(ceiling=Ceiling(git="off")), facts)
    plan = build_plan(BARE.with_(ceiling=Ceiling(git="off", weak_isolation=True)), facts)
    assert plan.cmd_scope == 0


def test_an_old_kernel_is_named():
    """Assert that a kernel on which no mask could follow the tree is refused before anything is started."""
    with pytest.raises(UnsupportedPolicy, match=r"Linux 5\.10") as caught:
        build_plan(Policy(), host(kernel=(5, 10)))
    assert caught.value.code == "kernel"


def test_sockets_of_services_are_covered_where_everything_shows():
    """Assert that read = "all" covers the sockets that the host listens on, apart from those in a grant."""
    facts = host(
        top=(SystemEntry(b"/var", "bind"), SystemEntry(b"/home", "bind")),
        sockets=(b"/var/lib/db/sock", WORKSPACE + b"/own.sock", b"/run/docker.sock"),
    )
    hidden = build_plan(Policy(read="all"), facts).tree["mask_paths"]
    assert b"/var/lib/db/sock" in hidden
    assert WORKSPACE + b"/own.sock" not in hidden
    assert b"/run/docker.sock" not in hidden


def test_no_wall_at_all_is_a_start_failure():
    """Assert that without namespaces and without Landlock nothing starts, under any consent."""
    with pytest.raises(WorkerSpawnError, match="no Landlock"):
        build_plan(
            BARE.with_(ceiling=Ceiling(git="off", weak_isolation=True)),
            host(bwrap=NO_NAMESPACES, landlock_abi=0),
        )


def test_missing_landlock_is_reported():
    """Assert that a kernel without Landlock degrades by name."""
    plan = build_plan(Policy(), host(landlock_abi=0))
    assert plan.landlock is None
    assert "landlock" in {layer.name for layer in plan.degraded}


def test_nested_user_namespaces_by_filter():
    """Assert that a container's bwrap starts without --disable-userns and the report says so."""
    plan = build_plan(Policy(), host(bwrap=bwrap(disable_userns=NO)))
    assert plan.bwrap is not None
    assert not plan.bwrap.disable_userns
    assert layers(plan)["nested_userns"] == "partial"


# ---- lockdown ----


def test_lockdown_runs_where_every_wall_stands():
    """Assert that lockdown starts on a common host, with no network and conservative limits."""
    plan = build_plan(Policy(lockdown=True, network=Network(mode="none")), host())
    assert plan.network_mode == "none"
    assert plan.limits.memory == 512 << 20


@pytest.mark.parametrize(
    "facts",
    [host(bwrap=NO_NAMESPACES), host(bwrap=bwrap(net=NO)), host(landlock_abi=1), host(arch="riscv64")],
)
def test_lockdown_refuses_a_missing_wall(facts):
    """Assert that lockdown starts nothing where a wall is missing or weaker than it could be."""
    with pytest.raises((UnsupportedPolicy, WorkerSpawnError)):
        build_plan(Policy(lockdown=True), facts)


def test_lockdown_needs_limits():
    """Assert that lockdown without a memory and a process limit is refused."""
    with pytest.raises(PolicyError, match="lockdown"):
        build_plan(Policy(lockdown=True, limits=Limits(preset="unlimited")), host())


def test_changed_filter_is_said():
    """Assert that a longer deny list is on, and a shorter one partial."""
    assert layers(build_plan(Policy(seccomp=SeccompPolicy(deny=("sync",))), host()))["seccomp"] == "on"
    assert (
        layers(build_plan(Policy(seccomp=SeccompPolicy(allow=("ptrace",))), host()))["seccomp"] == "partial"
    )


# ---- what people see ----


def test_explain_and_json_show_no_values():
    """Assert that text and JSON name variables and sizes, never contents."""
    facts = host(environ=((b"LANG", b"v4lue"),), environ_names=(b"LANG", b"SECRET"))
    plan = build_plan(Policy(), facts)
    text = plan.explain() + json.dumps(plan.to_json())
    assert "v4lue" not in text
    assert "nameserver" not in text
    assert "SECRET" in text
    assert "/home/u/src/ws" in text
    assert "bwrap" in plan.to_json()["command"][0]


def test_explain_survives_any_name():
    """Assert that names that are no text do not break the page, nor add a line to it."""
    odd = path(b"/srv/\xff\n\x1b[31m")
    text = build_plan(Policy(), host(ro=(odd,))).explain()
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("[31m")]


def test_hazards_name_groups_and_left_out_tools():
    """Assert that groups that cannot be dropped and tools that are not shown are reported."""
    who = user(groups=((998, "docker"), (4, "adm"), (100, "users")))
    found = build_plan(Policy(), host(user=who, tools_left_out=(b"/home/u",))).hazards
    text = "\n".join(f"{kind} {what}" for kind, what in found)
    assert "as good as root" in text
    assert "adm" in text
    assert "users" not in text
    assert "tool_left_out '/home/u'" in text


def test_doctor_judges_facts():
    """Assert the three verdicts, and that what is missing carries its fix."""
    assert exit_code(doctor(host())) == 1  # memory is sampled
    broken = doctor(host(bwrap=NO_NAMESPACES))
    assert exit_code(broken) == 2
    assert "sysctl -w x=1" in {finding.fix for finding in broken}
    gone = doctor(host(bwrap=BwrapFacts(reason="not installed")))
    assert exit_code(gone) == 2
    assert "apt install bubblewrap" in gone[0].fix


def test_planning_imports_nothing_heavy():
    """Assert that the plan's modules load without asyncio, subprocess, logging, ctypes or the shim."""
    code = (
        "import sys, vectora_jail.plan, vectora_jail.probe; "
        "bad = {'asyncio','subprocess','logging','ctypes','cffi','socket','vectora_jail._shim','pyseccomp'} "
        "& set(sys.modules); sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_facts_can_be_replaced_piecewise():
    """Assert that the fixture itself is a value, so that tests do not share state."""
    assert replace(host(), landlock_abi=1) != host()
