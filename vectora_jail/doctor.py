"""What this host can enforce, what is missing and what fixes it: findings as data.

Pure: `probe.host_facts` does the looking and the trying.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vectora_jail.facts import HostFacts, Trial

__all__ = ["Finding", "capabilities", "doctor", "exit_code"]

_GIVE_GROUP = (
    "start the backend with `systemd-run --scope -p Delegate=yes`, or, where its group is its own, with "
    'backend_options={"cgroup": "own"}'
)


class Finding(NamedTuple):
    """One thing that a jail on this host has or lacks."""

    name: str
    state: str
    """`on`, `partial` or `off`."""
    detail: str
    fix: str = ""
    """What makes it better, a command where there is one."""
    needed: bool = False
    """Whether no jail with masks can be built without it."""


def doctor(facts: HostFacts) -> tuple[Finding, ...]:
    """Return the findings, the most important first."""
    bwrap = facts.bwrap
    found: list[Finding] = []
    if bwrap.path is None:
        from vectora_jail.bwrap import missing_fix

        found.append(Finding("bubblewrap", "off", bwrap.reason, missing_fix(), needed=True))
    else:
        kind = ", set-uid root" if bwrap.setuid else ""
        found.append(
            Finding("bubblewrap", "on", f"{bwrap.path.decode(errors='replace')} {bwrap.version}{kind}")
        )
        found.append(_tried("user namespaces", bwrap.userns, needed=True))
        found.append(_tried("own /proc", bwrap.proc, needed=True))
        found.append(_tried("network namespaces", bwrap.net))
        nested = bwrap.disable_userns
        found.append(
            Finding("nested user namespaces off", "on", "disabled by bwrap")
            if nested.ok
            else Finding(
                "nested user namespaces off", "partial", f"by filter and sysctl only: {nested.reason}"
            )
        )
    found += (
        _live_mounts(facts),
        _landlock(facts),
        _seccomp(facts),
        _memory(facts),
        _pids(facts),
        _descriptors(facts),
    )
    found += _groups(facts)
    return tuple(found)


def _tried(name: str, trial: Trial, *, needed: bool = False) -> Finding:
    if trial.ok:
        return Finding(name, "on", "tried", needed=needed)
    return Finding(name, "off", trial.reason, trial.fix, needed=needed)


def _live_mounts(facts: HostFacts) -> Finding:
    version = ".".join(map(str, facts.kernel))
    if facts.kernel >= (5, 12):
        return Finding("masks that follow the tree", "on", f"Linux {version}")
    return Finding(
        "masks that follow the tree",
        "partial",
        f"Linux {version} has no mount_setattr",
        "Linux 5.12 or newer",
    )


def _landlock(facts: HostFacts) -> Finding:
    if facts.landlock_abi:
        return Finding("Landlock", "on", f"ABI {facts.landlock_abi}")
    if facts.kernel >= (5, 13):
        return Finding(
            "Landlock", "off", "not among this kernel's security modules", "boot with lsm=landlock,…"
        )
    return Finding("Landlock", "off", "this kernel has none", "Linux 5.13 or newer")


def _seccomp(facts: HostFacts) -> Finding:
    if facts.arch in ("x86_64", "aarch64"):
        return Finding("syscall filter", "on", f"ready for {facts.arch}")
    return Finding("syscall filter", "off", f"there is none for {facts.arch}")


def _memory(facts: HostFacts) -> Finding:
    groups = facts.cgroup
    if "memory" in groups.controllers:
        return Finding("memory limit", "on", f"control group v{groups.version}, and sampled by the worker")
    return Finding(
        "memory limit",
        "partial",
        f"sampled by the worker; no control group: {groups.reason or 'none are mounted'}",
        _GIVE_GROUP,
    )


def _pids(facts: HostFacts) -> Finding:
    groups = facts.cgroup
    if "pids" in groups.controllers:
        return Finding("process limit", "on", f"control group v{groups.version}, and counted by the worker")
    if facts.user.uid:
        return Finding("process limit", "on", "RLIMIT_NPROC in the jail's user namespace")
    return Finding(
        "process limit",
        "partial",
        "counted by the worker: the kernel exempts uid 0 from RLIMIT_NPROC",
        f"run as an ordinary user, or {_GIVE_GROUP}",
    )


def _descriptors(facts: HostFacts) -> Finding:
    soft, hard = facts.nofile
    if soft >= 4096:
        return Finding("open files", "on", f"{soft} (hard {hard})")
    fix = (
        "the manager raises it by itself"
        if hard >= 4096
        else "ulimit -Hn 65536 (LimitNOFILE= in a systemd unit)"
    )
    return Finding("open files", "partial", f"{soft} (hard {hard}): enough for about {soft // 5} jails", fix)


def _groups(facts: HostFacts) -> list[Finding]:
    risky = [
        name for _, name in facts.user.groups if name in ("docker", "lxd", "disk", "sudo", "wheel", "libvirt")
    ]
    if not risky:
        return []
    text = f"jails keep {', '.join(risky)}: an ordinary user cannot drop supplementary groups"
    return [Finding("groups", "partial", text, "run the backend as a user without them")]


def exit_code(findings: tuple[Finding, ...]) -> int:
    """Return 0: everything is on, 1: something is degraded, 2: no jail with masks can be built."""
    if any(finding.needed and finding.state == "off" for finding in findings):
        return 2
    return 1 if any(finding.state != "on" for finding in findings) else 0


def capabilities(facts: HostFacts) -> dict[str, object]:
    """Return the findings as plain values."""
    return {
        "kernel": ".".join(map(str, facts.kernel)),
        "arch": facts.arch,
        "uid": facts.user.uid,
        "landlock_abi": facts.landlock_abi,
        "findings": [finding._asdict() for finding in doctor(facts)],
    }
