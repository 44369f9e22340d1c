"""Landlock as data: which rights each kernel knows, and the one set that a worker puts on itself.

Inside bwrap it is the second answer to "which files" should a mount be wrong; where namespaces cannot be had
it is the only wall around files. What a kernel does not know is left out of what is handled, and `gaps` says
what that costs. Sources: landlock(7), Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vectora_jail.mounts import Mount

__all__ = [
    "CLASSES",
    "FILE_RIGHTS",
    "NEWEST_ABI",
    "Access",
    "Ruleset",
    "gaps",
    "mount_rules",
    "rights",
    "ruleset",
    "standalone_rules",
    "table",
    "unheld",
]

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER = 1 << 13  # ABI 2, Linux 5.19: rename and link between directories
TRUNCATE = 1 << 14  # ABI 3, Linux 6.2
IOCTL_DEV = 1 << 15  # ABI 5, Linux 6.10: ioctl on devices
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1  # ABI 4, Linux 6.7
SCOPE_ABSTRACT_UNIX, SCOPE_SIGNAL = 1 << 0, 1 << 1  # ABI 6, Linux 6.12

NEWEST_ABI = 7
"""The newest interface that this table has judged (7, Linux 6.15, adds log flags only)."""

_FS_SINCE = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}

FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""What a rule on anything but a directory may carry: landlock_add_rule(2) answers EINVAL to the rest."""

Access = Literal["ro", "rw", "exec", "list", "proc", "rw_dev", "file_ro", "file_rw"]

CLASSES: dict[Access, int] = {
    "ro": READ_FILE | READ_DIR | EXECUTE,
    # Devices cannot be made: a jail has no CAP_MKNOD, and needs no whiteouts.
    "rw": (1 << 13) - 1 & ~(MAKE_CHAR | MAKE_BLOCK) | REFER | TRUNCATE,
    "exec": READ_FILE | EXECUTE,
    "list": READ_DIR,
    # Ordinary programs write /proc/self/{oom_score_adj,comm …}, by `>` too, which asks for TRUNCATE.
    "proc": READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE,
    "rw_dev": READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV,
    "file_ro": READ_FILE | EXECUTE,
    "file_rw": READ_FILE | EXECUTE | WRITE_FILE | TRUNCATE,
}
"""Access class → rights. The worker drops what a file cannot carry (`FILE_RIGHTS`): "ro" serves files too."""


@dataclass(frozen=True, slots=True)
class Ruleset:
    """What the worker puts on itself, and what may be said of it in a report."""

    table: dict[str, Any] | None
    """The map of `hello`: handled_fs, handled_net, scoped, rules; None without Landlock."""
    cmd_scope: int
    """Scopes that each command puts on itself; 0 inside bwrap, where pid 1 is beyond signals anyway."""
    state: Literal["on", "partial", "off"]
    detail: str


def rights(abi: int) -> int:
    """Return every file system right that a kernel with this ABI handles."""
    return sum(added for since, added in _FS_SINCE.items() if since <= abi)


def table(
    rules: Iterable[tuple[bytes, Access]], abi: int, *, deny_network: bool = False
) -> dict[str, Any] | None:
    """Return the map for a kernel with this ABI, one rule a path, or None where there is no Landlock (ABI 0).

    `deny_network` handles TCP without allowing any of it; only for a jail without a network namespace, where
    commands must not reach the host's loopback either.
    """
    if abi < 1:
        return None
    handled = rights(abi)
    merged: dict[bytes, int] = {}
    for path, access in rules:
        merged[path] = merged.get(path, 0) | CLASSES[access] & handled
    return {
        "handled_fs": handled,
        "handled_net": BIND_TCP | CONNECT_TCP if deny_network and abi >= 4 else 0,
        "scoped": SCOPE_ABSTRACT_UNIX | SCOPE_SIGNAL if abi >= 6 else 0,
        "rules": [[path, access] for path, access in sorted(merged.items()) if access],
    }


def ruleset(mounts: Iterable[Mount], abi: int, *, isolation: str, network: str, uid0: bool = True) -> Ruleset:
    """Return the ruleset of a jail with these mounts on a kernel with this ABI (0: none).

    `isolation` is "bwrap" or "landlock", `network` the mode of the plan. `uid0` (assumed unless denied) makes
    /proc read-only: files of /proc and /proc/sys that belong to root would be writable without any
    capability.
    """
    mounts = tuple(mounts)
    alone = isolation == "landlock"
    if alone:
        rules = standalone_rules(
            read=[mount.dest for mount in mounts if mount.kind == "ro"],
            write=[mount.dest for mount in mounts if mount.kind == "rw"],
        )
    else:
        rules = mount_rules(mounts, uid0=uid0)
    made = table(rules, abi, deny_network=alone and network != "host")
    if made is None:
        return Ruleset(None, 0, "off", "this kernel has none (5.13), or it is not among its security modules")
    missing = list(gaps(abi, landlock_only=alone))
    if alone:
        missing += [
            f"{os.fsdecode(inner)!r} is writable, for {os.fsdecode(outer)!r} above it is"
            for inner, outer in unheld(mounts)
        ]
    return Ruleset(
        made,
        SCOPE_SIGNAL if alone and abi >= 6 else 0,
        "partial" if missing else "on",
        "; ".join((f"ABI {abi}, {len(made['rules'])} rules", *missing)),
    )


def unheld(mounts: Iterable[Mount]) -> list[tuple[bytes, bytes]]:
    """Return (read-only path, writable path above it): Landlock never takes a right away below."""
    mounts = tuple(mounts)
    return [
        (inner.dest, outer.dest)
        for inner in mounts
        for outer in mounts
        if inner.kind == "ro" and outer.kind == "rw" and inner.dest.startswith(outer.dest.rstrip(b"/") + b"/")
    ]


def mount_rules(mounts: Iterable[Mount], *, uid0: bool) -> list[tuple[bytes, Access]]:
    """Return the rules that repeat a jail's mounts, for the second wall inside bwrap.

    Listing is allowed everywhere: what is not granted does not exist there, and `ls /` must work. As uid 0
    /proc is read-only: files of /proc and /proc/sys that belong to root would be writable without any
    capability.
    """
    found: list[tuple[bytes, Access]] = [(b"/", "list")]
    for mount in mounts:
        if mount.kind in ("ro", "data", "rw"):
            found.append((mount.dest, "rw" if mount.kind == "rw" else "ro"))
        elif mount.kind == "devices":
            found.append((mount.dest, "rw_dev"))
        elif mount.kind == "tmpfs":
            found.append((mount.dest, "rw" if mount.perms & 0o200 else "ro"))
        elif mount.kind == "proc":
            found.append((mount.dest, "ro" if uid0 else "proc"))
        elif mount.kind == "dev":
            found.append((mount.dest, "rw_dev"))
            found.append((mount.dest.rstrip(b"/") + b"/shm", "rw"))
            # By itself, for the host's name of the same node: `cat /dev/stdin` opens what the caller has passed.
            found.append((mount.dest.rstrip(b"/") + b"/null", "file_rw"))
    return found


_DEVICES = (b"null", b"zero", b"full", b"random", b"urandom", b"tty")


def standalone_rules(*, read: Iterable[bytes], write: Iterable[bytes]) -> list[tuple[bytes, Access]]:
    """Return the rules of a jail without namespaces, from the paths of the host that it may read and write.

    /proc is the host's: readable (Landlock itself keeps a domain out of the memory, environment and
    descriptors of processes outside it), never writable, for /proc/PID/oom_score_adj of the backend belongs
    to the same user. /dev/pts and /dev/shm are left out: the user's own terminals and other programs' memory
    are there.
    """
    found: list[tuple[bytes, Access]] = [(path, "ro") for path in read]
    found += [(path, "rw") for path in write]
    found.append((b"/proc", "ro"))
    found += [(b"/dev/" + name, "rw_dev") for name in _DEVICES]
    return found


def gaps(abi: int, *, landlock_only: bool) -> tuple[str, ...]:
    """Return what this ABI cannot hold, a clause each for the report; empty when the wall is whole."""
    if abi < 1:
        return ("the kernel has no Landlock (5.13)",)
    missing = []
    if abi < 2:
        missing.append("ABI 1 forbids every rename and link between directories (5.19)")
    if abi < 3:
        missing.append("truncate(2) is not covered (6.2)")
    if landlock_only:
        if abi < 4:
            missing.append("TCP is held by the syscall filter alone (6.7)")
        if abi < 6:
            missing.append("signals to processes outside are not covered (6.12)")
        missing.append("mode, owner, times and attributes of files outside the grants can be changed")
        missing.append("names and sizes outside the grants can be asked for one by one (stat)")
    return tuple(missing)
