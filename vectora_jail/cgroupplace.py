"""Where this process may make control groups for its jails; looks, and changes nothing.

A group has one writer, the one who made it. So a backend uses what was given to it and nothing else: in version 2 a
delegated subtree (owned by its user, or marked `delegate` by systemd) in which it lives itself, in version 1 as root
the hierarchies in which nobody has put it into a group, or its own groups when the embedder says
`backend_options={"cgroup": "own"}`. Everything else is left alone, and the report says that the worker's sampler
holds the limit.

Sources: cgroups(7), Documentation/admin-guide/cgroup-v2.rst of the kernel, systemd's CGROUP_DELEGATION.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONTROLLERS", "MODES", "Place", "find_place", "names_in", "read_file"]

MODES: Final = ("auto", "own", "off")
CONTROLLERS: Final = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process may make groups."""

    version: int = 0
    """1 or 2; 0: nowhere."""
    parents: tuple[tuple[str, bytes], ...] = ()
    """(controller, directory) for each of memory, pids and cpu that can be used."""
    move: bytes = b""
    """Version 2: a group whose only process we are; we leave it for a leaf before controllers are handed down."""
    reason: str = ""
    """Why there is none, or what is missing."""

    @property
    def controllers(self) -> frozenset[str]:
        """Return the names of what can be used."""
        return frozenset(name for name, _ in self.parents)


def read_file(path: bytes) -> bytes:
    """Return a small file's content, nothing when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""


def _unescape(text: bytes) -> bytes:
    return re.sub(rb"\\(\d{3})", lambda m: bytes([int(m.group(1), 8)]), text)


def _mounts(text: bytes) -> list[tuple[bytes, bytes, bytes, frozenset[bytes]]]:
    """Return (type, root, mount point, options) of every control group mount of a mountinfo, proc(5)."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(b" - ")
        fields, kind = left.split(b" "), right.split(b" ")
        if len(fields) > 5 and len(kind) > 2 and kind[0] in (b"cgroup", b"cgroup2"):
            found.append(
                (kind[0], _unescape(fields[3]), _unescape(fields[4]), frozenset(kind[2].split(b",")))
            )
    return found


def _below(mount: tuple[bytes, bytes, bytes, frozenset[bytes]], path: bytes) -> bytes | None:
    """Return the directory that shows group `path`; None when this mount does not show it."""
    _, root, point, _ = mount
    relative = os.path.relpath(path, root)
    if relative == b".." or relative.startswith(b"../"):
        return None
    return os.path.normpath(os.path.join(point, relative))


def _may_write(directory: bytes, *names: bytes) -> bool:
    return all(
        os.access(os.path.join(directory, name) if name else directory, os.W_OK, effective_ids=True)
        for name in (b"", *names)
    )


def _delegated(directory: bytes) -> bool:
    """Whether systemd has marked a group as given away."""
    for name in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name) == b"1":
                return True
    return False


def find_place(mode: str = "auto", *, proc: bytes = b"/proc/self", euid: int | None = None) -> Place:
    """Return where groups for jails may be made; reads only.

    Args:
        mode: `auto`: what was given to this process. `own`: its own groups too, whoever made them. `off`: none.
        proc: Where to read `cgroup` and `mountinfo`.
        euid: The effective user; default: the process's.
    """
    if mode == "off":
        return Place(reason="switched off by backend_options")
    euid = os.geteuid() if euid is None else euid
    mounts = _mounts(read_file(proc + b"/mountinfo"))
    own: dict[bytes, bytes] = {}
    unified: bytes | None = None
    for line in read_file(proc + b"/cgroup").splitlines():
        number, names, path = line.split(b":", 2)
        if number == b"0":
            unified = path
        for name in names.split(b","):
            own[name] = path
    if any(name.encode() in own for name in CONTROLLERS):
        return _version_1(mounts, own, mode, euid)
    tree = next((mount for mount in mounts if mount[0] == b"cgroup2"), None)
    if tree is None or unified is None:
        return Place(reason="no control groups are mounted")
    return _version_2(tree, unified, mode, euid)


def _version_1(
    mounts: list[tuple[bytes, bytes, bytes, frozenset[bytes]]],
    own: Mapping[bytes, bytes],
    mode: str,
    euid: int,
) -> Place:
    parents: list[tuple[str, bytes]] = []
    foreign: list[str] = []
    for name in CONTROLLERS:
        path = own.get(name.encode())
        mount = next((m for m in mounts if m[0] == b"cgroup" and name.encode() in m[3]), None)
        directory = None if path is None or mount is None else _below(mount, path)
        if path is None or directory is None or not _may_write(directory, b"cgroup.procs"):
            continue
        # An ordinary user can write only what was handed over; root can write everything.
        if euid != 0 or path == b"/" or mode == "own" or _delegated(directory):
            parents.append((name, directory))
        else:
            foreign.append(name)
    reason = ""
    if foreign:
        reason = f"the {' and '.join(foreign)} group of this process belongs to whoever made it"
    elif not parents:
        reason = "version 1 is for root"
    return Place(1 if parents else 0, tuple(parents), reason=reason)


def _version_2(
    tree: tuple[bytes, bytes, bytes, frozenset[bytes]], path: bytes, mode: str, euid: int
) -> Place:
    own = _below(tree, path)
    if own is None:
        return Place(reason="the own control group is not visible here")
    controls = (b"cgroup.procs", b"cgroup.subtree_control")
    ours = euid != 0 or mode == "own"
    # The embedder has put us into a leaf, with our jails to be our siblings.
    above = os.path.dirname(own)
    if path != b"/" and _may_write(above, *controls) and (ours or _delegated(above)):
        on = names_in(above + b"/cgroup.subtree_control")
        if on:
            return Place(2, tuple((name, above) for name in CONTROLLERS if name in on))
    if _may_write(own, *controls) and (ours or path == b"/" or _delegated(own)):
        able = names_in(own + b"/cgroup.controllers")
        parents = tuple((name, own) for name in CONTROLLERS if name in able)
        if not parents:
            return Place(reason="no controller is handed down to the own control group")
        # The root of all has no type, and it may hold processes beside groups.
        if not os.path.exists(own + b"/cgroup.type"):
            return Place(2, parents)
        if read_file(own + b"/cgroup.procs").split() == [b"%d" % os.getpid()]:
            return Place(2, parents, move=own)
        return Place(
            reason="the own control group holds other processes: start the backend in one of its own"
        )
    return Place(reason="no subtree is delegated to this process")


def names_in(path: bytes) -> frozenset[str]:
    """Return the words of a file."""
    return frozenset(read_file(path).decode("ascii", "replace").split())
