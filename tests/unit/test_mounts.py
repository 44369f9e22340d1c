"""The list of mounts: what shows, what never does, and that no order of any list matters."""

from __future__ import annotations

import posixpath
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.host import HOME, SYSTEM, WORKSPACE, host, path, user
from vectora_jail.errors import UnsupportedPolicy
from vectora_jail.facts import PathFact, SystemEntry, ToolHome
from vectora_jail.mountplan import View, home_path, plan_mounts
from vectora_jail.mounts import (
    COVER_DIR,
    COVER_FILE,
    PRIVATE_ROOT,
    WORKER_PATH,
    BwrapLaunch,
    Mount,
    bwrap_arguments,
    by_place,
    depth,
    is_below,
    nearest,
    shows,
    visible,
)

LAUNCH = BwrapLaunch(b"/usr/bin/bwrap")
NAMES = st.sampled_from(
    [b"a", b"b", b".ssh", b".aws", b"c d", b"\xff", b"new\nline", b".env", b"src", b"-rf"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: HOME + b"/" + b"/".join(parts))
OUTSIDE = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: b"/srv/" + b"/".join(parts))


def at(mounts):
    return by_place(mounts)


def test_parents_come_before_what_lies_in_them():
    """Assert that every mount comes after all mounts above it, read-only remounts apart."""
    mounts = [m for m in plan_mounts(host(), View()) if m.kind != "ro-remount"]
    seen: set[bytes] = set()
    places = {m.dest for m in mounts}
    for mount in mounts:
        assert all(above in seen for above in places if is_below(mount.dest, above, strict=True))
        seen.add(mount.dest)


def test_root_and_dev_end_read_only():
    """Assert that the last operations make /run/vectora-jail, /dev and / read-only, in that order."""
    kinds = [(m.kind, m.dest) for m in plan_mounts(host(), View())[-3:]]
    assert kinds == [("ro-remount", PRIVATE_ROOT), ("ro-remount", b"/dev"), ("ro-remount", b"/")]


def test_every_tmpfs_has_a_size():
    """Assert that no tmpfs is left at half of the machine's memory."""
    for view in (View(), View(read="all"), View(level="danger-full-access"), View(gpu=True)):
        facts = host(
            top=(SystemEntry(b"/usr", "bind"), SystemEntry(b"/sys", "bind"), SystemEntry(b"/var", "bind")),
            sys_hidden=(b"/sys/firmware",),
        )
        assert all(m.size > 0 for m in plan_mounts(facts, view) if m.kind == "tmpfs")


def test_private_places():
    """Assert that /tmp, $HOME, /run and /dev/shm are private, and /tmp is open to all inside."""
    found = at(plan_mounts(host(), View()))
    for place, perms in (
        (b"/tmp", 0o1777),
        (b"/var/tmp", 0o1777),
        (HOME, 0o700),
        (b"/run", 0o755),
        (b"/dev/shm", 0o1777),
    ):
        assert (found[place].kind, found[place].perms) == ("tmpfs", perms)
    assert found[COVER_FILE].perms == 0o444
    assert found[COVER_DIR].kind == "dir"
    assert found[WORKER_PATH].perms == 0o555


def test_workspace_inside_a_private_place_shows():
    """Assert that a workspace below the private home or /tmp is bound over it."""
    for workspace in (WORKSPACE, b"/tmp/ws", b"/var/tmp/ws", b"/dev/shm/ws"):
        found = at(plan_mounts(host(workspace=path(workspace), rw=(path(workspace),)), View()))
        assert found[workspace].kind == "rw"
        assert shows(found, workspace + b"/x")
        assert not shows(found, posixpath.dirname(workspace) + b"/other")


def test_read_only_level_grants_no_write():
    """Assert that nothing of the host is writable at level read-only."""
    assert not [m for m in plan_mounts(host(), View(level="read-only")) if m.kind in ("rw", "devices")]


def test_deepest_grant_wins():
    """Assert that nested grants alternate by depth and not by list."""
    a, b, c = (path(WORKSPACE + tail) for tail in (b"", b"/vendor", b"/vendor/mine"))
    found = at(plan_mounts(host(rw=(a, c), ro=(b,)), View()))
    assert [nearest(found, p.path + b"/x").kind for p in (a, b, c)] == ["rw", "ro", "rw"]


def test_doubles_cost_no_mount():
    """Assert that a grant which the one above already gives makes no mount of its own."""
    inner = path(WORKSPACE + b"/deep/er")
    found = at(plan_mounts(host(rw=(path(WORKSPACE), inner)), View()))
    assert inner.path not in found
    assert nearest(found, inner.path).kind == "rw"


def test_home_as_workspace_is_granted_as_it_is():
    """Assert that a workspace which is the home directory is no private tmpfs."""
    found = at(plan_mounts(host(workspace=path(HOME), rw=(path(HOME),)), View()))
    assert found[HOME].kind == "rw"


def test_home_inside_a_writable_grant_stays_the_users():
    """Assert that a home inside a writable grant is not hidden, inside a read-only one it is private."""
    inside = replace(user(), home=path(WORKSPACE + b"/home"))
    assert WORKSPACE + b"/home" not in at(plan_mounts(host(user=inside), View()))
    readable = host(user=inside, rw=(), ro=(path(WORKSPACE),))
    assert at(plan_mounts(readable, View()))[WORKSPACE + b"/home"].kind == "tmpfs"


@pytest.mark.parametrize("home", [b"/", b"/usr/games", b"/nonexistent", b"/bin", b"/tmp", b"/run", b"/etc/x"])
def test_a_home_that_cannot_be_private_is_moved(home):
    """Assert that no tmpfs is ever put over the root or a system directory because a user lives there."""
    facts = host(user=user(home=home))
    assert home_path(facts, View()) == b"/home/u"
    assert home_path(facts, View(read="all")) == b"/tmp/home"
    found = at(plan_mounts(facts, View()))
    assert found[b"/home/u"].kind == "tmpfs"
    assert home not in found or found[home].why != "private" or home in (b"/tmp", b"/run")


def test_merged_usr_links_are_made_again():
    """Assert that links of the root directory are links inside."""
    found = at(plan_mounts(host(), View()))
    assert (found[b"/lib64"].kind, found[b"/lib64"].source) == ("symlink", b"usr/lib64")
    assert visible(found, b"/bin/sh")


def test_identity_files_are_synthetic():
    """Assert that passwd and group name the user, root and nobody, and no lookup leaves for a socket."""
    found = at(plan_mounts(host(), View()))
    assert found[b"/etc/passwd"].data.split(b"\n")[1] == b"u:x:1000:1000::/home/u:/bin/bash"
    assert b"root:x:0:0:" in found[b"/etc/passwd"].data
    assert b"nogroup:x:65534:" in found[b"/etc/group"].data
    assert b"passwd: files\n" in found[b"/etc/nsswitch.conf"].data
    assert b"127.0.0.1\tlocalhost" in found[b"/etc/hosts"].data


def test_root_is_named_once():
    """Assert that root's own passwd has one entry for uid 0."""
    data = at(plan_mounts(host(user=user(0, b"/root")), View()))[b"/etc/passwd"].data
    assert data.count(b":x:0:") == 1


def test_pinned_hosts():
    """Assert that names with an address stand in /etc/hosts."""
    found = at(plan_mounts(host(), View(hosts=((b"db.test", b"10.0.0.5"),))))
    assert b"10.0.0.5\tdb.test\n" in found[b"/etc/hosts"].data


def test_hosts_of_a_shared_network():
    """Assert that names mean what they mean on the host exactly where its network is shared."""
    facts = host(hosts_file=b"10.1.1.1 corp\n")
    assert b"corp" not in at(plan_mounts(facts, View()))[b"/etc/hosts"].data
    shared = at(plan_mounts(facts, View(own_hosts=False, hosts=((b"db", b"10.0.0.5"),))))[b"/etc/hosts"].data
    assert shared.startswith(b"10.1.1.1 corp\n")
    assert shared.endswith(b"10.0.0.5\tdb\n")


def test_links_to_a_grant_are_made_again():
    """Assert that a workspace reached over a link shows under both spellings."""
    facts = host(workspace=path(b"/data/ws"), rw=(path(b"/data/ws"),), links=((b"/srv", b"data"),))
    found = at(plan_mounts(facts, View()))
    assert found[b"/srv"].kind == "symlink"
    assert visible(found, b"/srv/ws/file")


def test_links_never_hide_a_mount():
    """Assert that a link is left out where a mount stands at or below its place, or a bind shows it."""
    links = ((b"/usr/bin/x", b"y"), (b"/home", b"/data/home"), (b"/run", b"/var/run"))
    found = at(plan_mounts(host(links=links), View()))
    assert b"/usr/bin/x" not in found
    assert found[b"/home"].kind == "dir"
    assert found[b"/run"].kind == "tmpfs"


def test_nothing_is_mounted_below_a_link():
    """Assert that a link of the system gives way to a directory where a grant lies below it."""
    for name in (b"/var/run/x", b"/lib64/x", b"/etc/localtime/x"):
        found = at(plan_mounts(host(rw=(path(name),)), View()))
        assert found[name].kind == "rw"
        assert not [m for m in found.values() if m.kind == "symlink" and is_below(name, m.dest)]


def test_toolchain_never_makes_a_grant_read_only():
    """Assert that a tool home which is itself a writable grant stays writable."""
    tool = path(HOME + b"/.pyenv")
    assert at(plan_mounts(host(rw=(tool,)), View()))[tool.path].kind == "rw"


def test_caches_of_tools_only_without_a_network():
    """Assert that registries are read-only without a network and private with one."""
    cache = path(HOME + b"/.cargo/registry")
    facts = host(toolchains=(ToolHome("cargo-cache", (cache,)),))
    assert at(plan_mounts(facts, View(offline=True)))[cache.path].kind == "ro"
    assert cache.path not in at(plan_mounts(facts, View(offline=False)))


def test_git_directories_elsewhere():
    """Assert that a worktree's common directory takes commits when the policy allows them."""
    facts = host(repository=(path(b"/srv/r/.git"),), parent_repository=path(b"/srv/up/.git"))
    kinds = {
        git: [at(plan_mounts(facts, View(git=git)))[p].kind for p in (b"/srv/r/.git", b"/srv/up/.git")]
        for git in ("read-only", "config", "off")
    }
    assert kinds == {"read-only": ["ro", "ro"], "config": ["rw", "ro"], "off": ["rw", "rw"]}
    reading = at(plan_mounts(facts, View(git="off", level="read-only")))
    assert reading[b"/srv/r/.git"].kind == "ro"


def test_gpu_nodes_only_when_asked_for():
    """Assert that the switch is true to its name, and that /sys comes with the nodes."""
    facts = host(gpu=(b"/dev/nvidia0", b"/dev/dri"), sys_hidden=(b"/sys/firmware",))
    without, with_gpu = at(plan_mounts(facts, View())), at(plan_mounts(facts, View(gpu=True)))
    assert b"/dev/nvidia0" not in without
    assert b"/sys" not in without
    assert with_gpu[b"/dev/nvidia0"].kind == "devices"
    assert with_gpu[b"/sys"].kind == "ro"
    assert with_gpu[b"/sys/firmware"].kind == "tmpfs"


def test_missing_and_unreadable_paths_make_no_mount():
    """Assert that what is not there is left out instead of being made on the host."""
    gone = PathFact(b"/srv/gone", b"/srv/gone", "missing")
    shut = PathFact(b"/srv/shut", b"/srv/shut", "unreadable")
    found = at(plan_mounts(host(rw=(path(WORKSPACE), gone), ro=(shut,), unix=(gone,)), View()))
    assert not {b"/srv/gone", b"/srv/shut"} & set(found)


TOP = tuple(SystemEntry(p, "bind") for p in (b"/usr", b"/etc", b"/home", b"/sys", b"/var", b"/srv"))


def test_read_all_shows_the_host_read_only():
    """Assert that read = "all" shows everything but writes nowhere, with a private home over the host's."""
    home_top = (SystemEntry(HOME + b"/notes", "bind"), SystemEntry(HOME + b"/.gitconfig", "bind"))
    facts = host(top=TOP, home_top=home_top, toolchains=())
    mounts = plan_mounts(facts, View(read="all"))
    found = at(mounts)
    assert found[HOME].kind == "tmpfs"
    assert found[HOME + b"/notes"].kind == "ro"
    assert {m.dest for m in mounts if m.kind == "rw"} == {WORKSPACE}
    assert not [m for m in mounts if m.kind == "data" and m.dest.startswith(b"/etc/")]


def test_full_access_is_never_made_on_the_host():
    """Assert that danger-full-access binds name by name, writable, and keeps /run and / its own."""
    facts = host(top=(*TOP, SystemEntry(b"/tmp", "bind")), run_top=(SystemEntry(b"/run/lock", "bind"),))
    found = at(plan_mounts(facts, View(level="danger-full-access", read="restricted")))
    assert found[b"/run"].kind == "tmpfs"
    assert found[b"/tmp"].kind == "rw"
    assert found[b"/etc"].kind == "rw"
    assert found[b"/sys"].kind == "ro"
    assert found[b"/dev"].kind == "devices"
    assert b"/" not in found
    assert Mount("ro-remount", b"/dev") not in plan_mounts(facts, View(level="danger-full-access"))


@settings(max_examples=60, deadline=None)
@given(
    rw=st.lists(st.one_of(PATHS, OUTSIDE), max_size=5, unique=True),
    ro=st.lists(st.one_of(PATHS, OUTSIDE), max_size=5, unique=True),
    seed=st.integers(0, 2**32 - 1),
    read=st.sampled_from(["restricted", "all"]),
)
def test_order_of_lists_never_matters(rw, ro, seed, read):
    """Assert that shuffled grants, toolchains, links and system entries give the same list of mounts."""
    ro = [p for p in ro if p not in rw]
    facts = host(
        rw=tuple(map(path, rw)),
        ro=tuple(map(path, ro)),
        top=TOP,
        links=((b"/l1", b"srv"), (b"/l2", b"home")),
        toolchains=(ToolHome("a", (path(b"/srv/t"),)), ToolHome("b", (path(HOME + b"/.t"),))),
    )
    shuffle = random.Random(seed).sample
    other = replace(
        facts,
        **{
            name: tuple(shuffle(getattr(facts, name), len(getattr(facts, name))))
            for name in ("rw", "ro", "top", "links", "toolchains", "system")
        },
    )
    assert plan_mounts(facts, View(read=read)) == plan_mounts(other, View(read=read))


@settings(max_examples=60, deadline=None)
@given(grants=st.lists(st.one_of(PATHS, OUTSIDE), max_size=6, unique=True), writable=st.booleans())
def test_no_sensitive_path_is_ever_mounted(grants, writable):
    """Assert that no bind is, or lies inside, a sensitive path, whoever asked for it."""
    facts = host(
        **{"rw" if writable else "ro": tuple(map(path, grants))},
        toolchains=(ToolHome("path", tuple(map(path, grants))),),
        certificates=tuple(map(path, grants)),
        home_top=tuple(SystemEntry(p, "bind") for p in grants),
        top=TOP,
    )
    for view in (View(), View(read="all")):
        for mount in plan_mounts(facts, view):
            if mount.is_bind:
                assert not any(is_below(mount.source, secret) for secret in facts.sensitive)


@settings(max_examples=60, deadline=None)
@given(grants=st.lists(st.one_of(PATHS, OUTSIDE), max_size=6, unique=True))
def test_binds_keep_their_names_as_bytes(grants):
    """Assert that names with spaces, line breaks, dashes and invalid UTF-8 reach bwrap as they are."""
    facts = host(rw=tuple(map(path, grants)))
    args, _ = bwrap_arguments(plan_mounts(facts, View()), LAUNCH)
    for mount in plan_mounts(facts, View()):
        if mount.kind == "rw":
            where = [i for i, arg in enumerate(args) if arg == b"--bind" and args[i + 2] == mount.dest]
            assert len(where) == 1
            assert args[where[0] + 1] == mount.source


def test_exception_of_the_ceiling_shows():
    """Assert that a sensitive path is granted when, and only when, the ceiling names it."""
    kube = path(HOME + b"/.kube")
    facts = host(ro=(kube,))
    assert kube.path not in at(plan_mounts(facts, View()))
    assert at(plan_mounts(facts, View(exceptions=frozenset((kube.path,)))))[kube.path].kind == "ro"


def test_data_descriptors_follow_in_order():
    """Assert that each copied file reads its own descriptor, and the worker the one before the first."""
    mounts = plan_mounts(host(), View())
    args, data = bwrap_arguments(mounts, LAUNCH, fd_base=11)
    numbers = {args[i + 2]: int(args[i + 1]) for i, arg in enumerate(args) if arg == b"--file"}
    assert numbers[WORKER_PATH] == 10
    assert sorted(numbers.values()) == list(range(10, 11 + len(data)))
    wanted = {m.dest: m.data for m in mounts if m.kind == "data" and m.dest != WORKER_PATH}
    assert {dest: data[n - 11] for dest, n in numbers.items() if n > 10} == wanted


def test_walls_are_always_among_the_options():
    """Assert the options without which the jail would be weaker than the report says."""
    args, _ = bwrap_arguments((), LAUNCH)
    for option in (b"--unshare-all", b"--unshare-user", b"--as-pid-1", b"--clearenv", b"--new-session"):
        assert option in args
    assert args[args.index(b"--cap-drop") + 1] == b"ALL"
    assert b"--share-net" not in args
    assert b"--share-net" in bwrap_arguments((), replace(LAUNCH, share_net=True))[0]
    assert b"--disable-userns" not in bwrap_arguments((), replace(LAUNCH, disable_userns=False))[0]


def test_too_many_mounts_are_refused_with_their_number():
    """Assert that a plan which bwrap would refuse is refused before, with a hint."""
    mounts = [Mount("ro", b"/srv/%d" % i, b"/srv/%d" % i) for i in range(4000)]
    with pytest.raises(UnsupportedPolicy, match="12011 mount options") as caught:
        bwrap_arguments(mounts, LAUNCH)
    assert caught.value.code == "too_many_mounts"


def test_is_below_compares_names_not_letters():
    """Assert that /a/bc does not lie below /a/b."""
    assert is_below(b"/a/b", b"/a/b")
    assert is_below(b"/a/b/c", b"/a/b", strict=True)
    assert not is_below(b"/a/bc", b"/a/b")
    assert is_below(b"/a", b"/")
    assert not is_below(b"/", b"/", strict=True)
    assert (depth(b"/"), depth(b"/a"), depth(b"/a/b")) == (0, 1, 2)


def test_system_entries_of_the_fixture_show():
    """Assert that restricted reads show the system and nothing beside it."""
    found = at(plan_mounts(host(), View()))
    assert all(entry.path in found for entry in SYSTEM)
    for hidden in (b"/etc/shadow", b"/root", b"/srv", b"/var/log", b"/home/other", HOME + b"/.bashrc"):
        assert not visible(found, hidden)
