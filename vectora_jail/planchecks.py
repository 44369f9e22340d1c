"""What a plan refuses, what it reports: grants that cannot be, hosts that cannot hold them, lockdown. Pure.

"The policy forbids" is a PolicyError, "this host cannot" an UnsupportedPolicy or a WorkerSpawnError: never
the same.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vectora_jail.errors import PolicyError, UnsupportedPolicy, WorkerSpawnError
from vectora_jail.limits import Layer
from vectora_jail.mountplan import NO_GRANT
from vectora_jail.mounts import is_below, is_secret
from vectora_jail.policyvalues import unescape_path

if TYPE_CHECKING:
    from vectora_jail.facts import HostFacts
    from vectora_jail.plan import JailPlan
    from vectora_jail.policy import Policy

__all__ = [
    "absolute",
    "choose_isolation",
    "hazards",
    "namespace_layers",
    "refuse_grants",
    "refuse_under_lockdown",
    "why_no_bwrap",
]


_AS_ROOT = frozenset(("docker", "lxd", "incus-admin", "disk", "sudo", "wheel", "libvirt"))
_READERS = frozenset(("adm", "shadow", "kvm", "video", "systemd-journal"))


def choose_isolation(policy: Policy, facts: HostFacts, *, weak: bool) -> str:
    """Return how the jail is built, or raise with the reason why it cannot be."""
    bwrap = facts.bwrap
    needs_net = policy.network.mode != "host"
    if bwrap.works and (bwrap.net.ok or not needs_net):
        if (0, 0) < facts.kernel < (5, 12):
            raise UnsupportedPolicy(
                f"Linux {facts.kernel[0]}.{facts.kernel[1]} cannot mount by descriptor inside a jail",
                backend="local",
                layer="mounts",
                code="kernel",
                hint="Linux 5.12 or newer",
            )
        return "bwrap"
    code, reason, hint = why_no_bwrap(facts)
    if facts.user.uid == 0 or policy.lockdown:
        raise WorkerSpawnError(reason, code=code, layer="userns", stage="plan", hint=hint)
    if facts.landlock_abi == 0:
        raise WorkerSpawnError(
            f"{reason}; and this kernel has no Landlock to fall back to",
            code=code,
            layer="userns",
            stage="plan",
            hint=hint,
        )
    if facts.landlock_abi < 6 and not weak:
        raise WorkerSpawnError(
            f"{reason}; Landlock ABI {facts.landlock_abi} cannot keep a command from killing its worker",
            code=code,
            layer="userns",
            stage="plan",
            hint=f"{hint}; or consent to weak_isolation in the ceiling",
        )
    writable = policy.level != "read-only"
    if policy.mask or policy.mask_add or (writable and (policy.protect or policy.protect_git != "off")):
        raise UnsupportedPolicy(
            f"masks and protections inside grants need mounts, and {reason}",
            backend="local",
            layer="mounts",
            code=code,
            hint=f"{hint}; or use a policy without mask, protect and protect_git",
        )
    return "landlock"


def why_no_bwrap(facts: HostFacts) -> tuple[str, str, str]:
    """Return (code, reason, hint) for the first thing that is missing."""
    bwrap = facts.bwrap
    if bwrap.path is None:
        from vectora_jail.bwrap import missing_fix

        return "bwrap_missing", f"no bubblewrap to build the jail with: {bwrap.reason}", missing_fix()
    for code, name, trial in (
        ("userns", "user namespaces", bwrap.userns),
        ("proc", "a fresh /proc", bwrap.proc),
        ("netns", "network namespaces", bwrap.net),
    ):
        if not trial.ok:
            return (
                code,
                f"{name} cannot be had here: {trial.reason}",
                trial.fix or "see `vectora-jail doctor`",
            )
    return "spawn", "the jail cannot be built here", "see `vectora-jail doctor`"


def absolute(path: str, facts: HostFacts) -> bytes:
    """Return a path of the policy or the ceiling by name: nothing is followed."""
    text = os.fsencode(unescape_path(path))
    if text == b"~" or text.startswith(b"~/"):
        text = facts.user.home.path + text[1:]
    return os.path.normpath(os.path.join(facts.workspace.path, text))


def refuse_grants(policy: Policy, facts: HostFacts, exceptions: frozenset[bytes]) -> None:
    """Refuse what no policy can grant, and the same place granted twice in different ways."""
    both = {f.path for f in facts.rw if f.exists} & {f.path for f in facts.ro if f.exists}
    for path in sorted(both):
        raise PolicyError(f"{_show(path)} is both in rw_paths and in ro_paths", hint="name it once")
    for key, grants in (("rw_paths", facts.rw), ("ro_paths", facts.ro)):
        for grant in grants:
            if not grant.exists:
                continue
            place = grant.path
            if place == b"/":
                raise PolicyError(
                    f"{key}: {_show(grant.given)} is the root directory",
                    hint='grant the directories that are needed, or use read = "all"',
                )
            reserved = any(is_below(place, top) for top in NO_GRANT) and not is_below(
                place, b"/dev/shm", strict=True
            )
            if reserved or any(is_below(top, place, strict=True) for top in NO_GRANT):
                raise PolicyError(
                    f"{key}: {_show(place)} belongs to the jail itself", hint="it has its own there"
                )
            if grant.kind not in ("dir", "file"):
                raise PolicyError(
                    f"{key}: {_show(place)} is a {grant.kind}", hint="grant directories and files"
                )
    _refuse_links_out(policy, facts)
    if is_secret(facts.workspace.path, facts.sensitive, exceptions):
        raise PolicyError(
            f"the workspace {_show(facts.workspace.path)} lies in a place that no jail sees",
            code="policy_ceiling",
            hint="consent to it in the ceiling's sensitive_exceptions",
        )
    if policy.lockdown:
        missing = [f for f in (*facts.rw, *facts.ro, *facts.protect) if not f.exists]
        if missing:
            names = ", ".join(_show(f.given) for f in missing)
            raise PolicyError(f"lockdown: granted or protected paths do not exist: {names}")
        if exceptions:
            raise PolicyError("lockdown admits no exception to the sensitive paths")


def _refuse_links_out(policy: Policy, facts: HostFacts) -> None:
    """Ask the ceiling again once links are followed: a repository may hold a link to anywhere."""
    ceiling = policy.ceiling
    if policy.level == "danger-full-access" and (ceiling is None or ceiling.level == policy.level):
        return
    from vectora_jail.policy import Ceiling
    from vectora_jail.policyrules import resolved_excess

    writing = "ro_paths" if policy.level == "read-only" else "rw_paths"
    keys = ((writing, facts.rw), ("ro_paths", facts.ro), ("network.unix", facts.unix))
    grants = [(key, fact.given, fact.path) for key, found in keys for fact in found if fact.exists]
    if ceiling is None:
        # The caller consents to what it names; where a link inside the workspace leads the agent may have chosen.
        tops = facts.workspace.given, facts.workspace.path
        within = [any(is_below(os.path.normpath(given), top) for top in tops) for _, given, _ in grants]
        named = [os.fsdecode(g[2]) for g, inside in zip(grants, within, strict=True) if not inside]
        grants = [g for g, inside in zip(grants, within, strict=True) if inside and g[0] != "network.unix"]
        ceiling = Ceiling(outside_paths=tuple(name.replace("$", "$$") for name in named))
    excess = resolved_excess(ceiling, grants, workspace=facts.workspace.path, home=facts.user.home.path)
    if excess:
        raise PolicyError(problems=excess)


def _show(path: bytes) -> str:
    return repr(os.fsdecode(path))


def namespace_layers(facts: HostFacts, isolation: str, network: str) -> tuple[Layer, ...]:
    """Return what the report says of the namespaces."""
    if isolation == "landlock":
        return (
            Layer("mounts", "off", "no namespaces here: Landlock decides over the host's own paths"),
            Layer("userns", "off", why_no_bwrap(facts)[1]),
            Layer("pidns", "off", "processes of this user can be seen"),
            Layer(
                "network", "partial" if network != "host" else "on", "inet sockets are denied by the filter"
            ),
        )
    nested = facts.bwrap.disable_userns
    return (
        Layer("mounts", "on", "empty root, read-only at the end"),
        Layer("userns", "on", f"uid {facts.user.uid}, no capabilities"),
        Layer("nested_userns", "on", "disabled by bwrap")
        if nested.ok
        else Layer("nested_userns", "partial", f"filter and sysctl ({nested.reason})"),
        Layer("pidns", "on", "own /proc"),
        Layer("ipc", "on"),
        Layer("uts", "on"),
        Layer(
            "network",
            "off" if network == "host" else "on",
            {
                "none": "no interface but lo",
                "allowlist": "lo, and the proxy of the backend",
                "host": "the host's own",
            }[network],
        ),
    )


def hazards(
    policy: Policy, facts: HostFacts, exceptions: frozenset[bytes], isolation: str
) -> tuple[tuple[str, str], ...]:
    """Return what a person should know, as (kind, text)."""
    found = [
        ("path_missing", f"{_show(fact.given)} is {fact.kind}: nothing is granted there")
        for fact in (*facts.rw, *facts.ro, *facts.protect, *facts.unix)
        if not fact.exists
    ]
    for number, name in facts.user.groups:
        risky = "as good as root: " if name in _AS_ROOT else ""
        if risky or name in _READERS:
            found.append(("group", f"{risky}the jail keeps the supplementary group {name} ({number})"))
    found += [
        ("tool_left_out", f"{_show(path)} on PATH is not shown: it holds a secret or cannot be reached")
        for path in facts.tools_left_out
    ]
    found += [
        ("sensitive_exception", f"{_show(path)} is granted by the ceiling") for path in sorted(exceptions)
    ]
    if facts.watch_note:
        found.append(("watch", facts.watch_note))
    found += [
        ("socket", f"{_show(socket.path)}: its service sees the backend's own user")
        for socket in facts.unix
        if socket.exists
    ]
    if isolation == "landlock" and policy.level != "read-only":
        found.append(("policy_open", "without mounts a command can change the workspace's vectora.toml"))
    if policy.level == "danger-full-access":
        text = "danger-full-access: nothing but the sensitive paths is kept from the agent"
        found.append(("level", text))
    return tuple(found)


def refuse_under_lockdown(policy: Policy, plan: JailPlan) -> None:
    """Refuse every wall that is missing or weaker than it could be, and every switch that weakens one."""
    if policy.seccomp.allow:
        raise PolicyError("lockdown: [sandbox.seccomp] allow is not admitted")
    needed = {"mounts", "userns", "pidns", "network", "seccomp", "landlock"}
    for layer in plan.layers:
        if (
            layer.name in needed
            and layer.state != "on"
            and not (layer.name == "landlock" and plan.landlock is None)
        ):
            raise UnsupportedPolicy(
                f"lockdown: {layer.name} is {layer.state}: {layer.detail}",
                backend="local",
                layer=layer.name,
                code="lockdown",
                hint="see `vectora-jail doctor`",
            )
    if not plan.limits.memory or not plan.limits.pids:
        raise PolicyError(
            "lockdown needs a memory limit and a pid limit", hint='limits.preset = "conservative"'
        )
