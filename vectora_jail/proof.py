"""The host's half of the proof at hello: read the worker's own /proc and compare it with the plan.

The worker is non-dumpable, and still readable here: the backend owns the user namespace it lives in (or is root).
Source: proc(5), namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vectora_jail.plan import JailPlan

__all__ = ["prove"]

_NAMESPACES = ("user", "mnt", "pid", "ipc", "uts", "cgroup")
_WALLS = ("dumpable", "no_new_privs", "rlimits")


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}


def _own_answer(plan: JailPlan, walls: dict[str, Any]) -> list[str]:
    """Compare what the worker says it has applied."""
    wrong = [
        f"{name}: {os.strerror(walls[name]) if isinstance(walls.get(name), int) else 'not answered'}"
        for name in _WALLS
        if walls.get(name) != 0
    ]
    if plan.seccomp is not None:
        if walls.get("seccomp") != 0:
            wrong.append(f"syscall filter: {os.strerror(int(walls.get('seccomp') or 5))}")
        if walls.get("probe_syscall") != 1:
            wrong.append(
                f"a denied syscall was answered with {walls.get('probe_syscall')!r} instead of EPERM"
            )
    if plan.landlock is not None and walls.get("landlock") != 0:
        wrong.append(f"Landlock: {os.strerror(int(walls.get('landlock') or 5))}")
    if walls.get("probe_write") == 0:
        wrong.append("a write outside the grants succeeded")
    return wrong


def prove(plan: JailPlan, pid: int, hello: dict[str, Any]) -> list[str]:
    """Return every difference between the plan and what the kernel says of process `pid`; empty is proved.

    Raises OSError when /proc does not show the worker.
    """
    walls = hello.get("walls")
    wrong = _own_answer(plan, walls if isinstance(walls, dict) else {})
    status = _status(pid)
    if status.get("NoNewPrivs") != "1":
        wrong.append("no_new_privs is not set")
    if plan.seccomp is not None and status.get("Seccomp") != "2":
        wrong.append(f"seccomp mode is {status.get('Seccomp')}")
    for caps in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        # The bounding set of a jail without a user namespace cannot be emptied by an ordinary user, and without
        # any capability and with no_new_privs nothing can be gained from it.
        if plan.isolation != "bwrap" and caps == "CapBnd":
            continue
        if plan.isolation != "bwrap" and os.geteuid() == 0:
            continue
        if int(status.get(caps, "1"), 16):
            wrong.append(f"{caps} is {status.get(caps)}")
    if plan.isolation == "bwrap":
        names = _NAMESPACES if plan.network_mode == "host" else (*_NAMESPACES, "net")
        for name in names:
            if os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}"):
                wrong.append(f"the {name} namespace is the host's own")
        with open(f"/proc/{pid}/uid_map", encoding="ascii") as file:
            uid_map = file.read().split()
        if uid_map != [str(plan.uid), str(plan.uid), "1"] and uid_map[:1] != [str(plan.uid)]:
            wrong.append(f"uid map is {' '.join(uid_map)}")
    uid = status.get("Uid", "").split()
    if uid != [str(plan.uid)] * 4:
        wrong.append(f"uids are {' '.join(uid)} instead of {plan.uid}")
    return wrong
