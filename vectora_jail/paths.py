"""Follow a path's links one by one, so that a plan knows the place, what is there, and which links led to it.

Looks at the host, from the trusted side; nothing here opens a file's content. Source: path_resolution(7).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from vectora_jail.facts import PathFact

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["look", "outermost_closed", "reachable_by"]

_LINKS_MAX = 40  # as the kernel, path_resolution(7)

_KINDS = {
    stat.S_IFDIR: "dir",
    stat.S_IFREG: "file",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def look(path: bytes, links: list[tuple[bytes, bytes]] | None = None) -> PathFact:
    """Return what is at an absolute path; append (place, text) of every link on the way to `links`.

    Never raises for what it finds: a loop, a missing name or a directory that cannot be passed is in `kind`.
    """
    given = os.path.normpath(path) if b"/../" not in path + b"/" else path
    done = b""
    rest = [name for name in path.split(b"/") if name not in (b"", b".")]
    followed = 0
    while rest:
        name = rest.pop(0)
        if name == b"..":
            done = os.path.dirname(done) if done not in (b"", b"/") else b""
            done = b"" if done == b"/" else done
            continue
        place = done + b"/" + name
        try:
            found = os.lstat(place)
        except OSError as error:
            kind = "missing" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "unreadable"
            return PathFact(given, os.path.normpath(b"/".join((place, *rest))), kind)
        if stat.S_ISLNK(found.st_mode):
            followed += 1
            if followed > _LINKS_MAX:
                return PathFact(given, given, "missing")
            try:
                text = os.readlink(place)
            except OSError:
                return PathFact(given, given, "unreadable")
            if links is not None:
                links.append((place, text))
            if text.startswith(b"/"):
                done = b""
            rest = [part for part in text.split(b"/") if part not in (b"", b".")] + rest
            continue
        done = place
    try:
        found = os.lstat(done or b"/")
    except OSError:
        return PathFact(given, done or b"/", "unreadable")
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
    return PathFact(
        given,
        done or b"/",
        kind,
        found.st_dev,
        found.st_ino,
        found.st_uid,
        found.st_gid,
        stat.S_IMODE(found.st_mode),
    )


def reachable_by(path: bytes, uid: int, groups: Collection[int]) -> bool:
    """Return whether a user may reach and read `path`, by owners and modes alone."""
    place = path
    while True:
        try:
            found = os.stat(place)
        except OSError:
            return False
        directory = stat.S_ISDIR(found.st_mode)
        need = 5 if directory and place == path else 1 if directory else 4
        if _rights(found, uid, groups) & need != need:
            return False
        if place == b"/":
            return True
        place = os.path.dirname(place)


def outermost_closed(path: bytes, uid: int, groups: Collection[int]) -> bytes:
    """Return the outermost directory above `path` that a user may not search, or `path` when there is none.

    Who has no capability in a jail cannot open, and so not cover, what lies below such a directory; the directory
    itself can be covered, and then its mode may change later.
    """
    for end in [i for i, byte in enumerate(path) if byte == 0x2F and i]:
        try:
            found = os.stat(path[:end])
        except OSError:
            return path
        if not _rights(found, uid, groups) & 1:
            return path[:end]
    return path


def _rights(found: os.stat_result, uid: int, groups: Collection[int]) -> int:
    """Return the three bits that hold for a user, and others above them."""
    if uid == found.st_uid:
        return found.st_mode >> 6
    return found.st_mode >> 3 if found.st_gid in groups else found.st_mode
