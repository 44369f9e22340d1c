"""What a mount is, what a list of mounts shows, and the same list as bubblewrap's options. Pure.

Options are bytes and travel NUL-separated on a descriptor (`--args`): no shell, no decoding. Source:
bwrap(1).
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vectora_jail.errors import UnsupportedPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "COVER_DIR",
    "COVER_FILE",
    "MAX_ARGUMENTS",
    "PRIVATE_ROOT",
    "WORKER_PATH",
    "BwrapLaunch",
    "Mount",
    "bwrap_arguments",
    "by_place",
    "depth",
    "is_below",
    "is_secret",
    "nearest",
    "shows",
    "visible",
]

PRIVATE_ROOT = b"/run/vectora-jail"
WORKER_PATH = PRIVATE_ROOT + b"/worker"
COVER_FILE = PRIVATE_ROOT + b"/file"
COVER_DIR = PRIVATE_ROOT + b"/dir"

_BINDS = ("ro", "rw", "devices")
MAX_ARGUMENTS = 8_900
"""bwrap 0.8 stops at 9,000 (MAX_ARGS), its own options and the command included."""

_BIND = {"ro": b"--ro-bind", "rw": b"--bind", "devices": b"--dev-bind"}
_PLAIN = {"proc": b"--proc", "dev": b"--dev", "ro-remount": b"--remount-ro"}


@dataclass(frozen=True, slots=True)
class Mount:
    """One step of building the view."""

    kind: str
    """`ro`, `rw`, `devices` (a bind whose device nodes work), `tmpfs`, `dir`, `symlink`, `data`, `proc`,
    `dev` or `ro-remount`."""
    dest: bytes
    source: bytes | None = None
    """Where a bind comes from; what a link says."""
    size: int = 0
    """Bytes that a tmpfs may hold; every tmpfs has one."""
    perms: int = 0o755
    data: bytes = field(default=b"", repr=False)
    identity: tuple[int, int] = (0, 0)
    """(st_dev, st_ino) of the source when the plan was made; (0, 0): not looked at."""
    why: str = "system"
    """`system`, `private`, `toolchain`, `certificates`, `repository`, `grant`, `socket`, `policy`, `gpu`."""

    @property
    def is_bind(self) -> bool:
        """Return whether something of the host shows here."""
        return self.kind in _BINDS


def depth(path: bytes) -> int:
    """Return the number of names in an absolute path; 0 for the root."""
    return 0 if path == b"/" else path.count(b"/")


def is_below(path: bytes, top: bytes, *, strict: bool = False) -> bool:
    """Return whether `path` is `top` or inside it (`strict`: really inside). Both without links."""
    if path == top:
        return not strict
    return path.startswith(top if top == b"/" else top + b"/")


def below_any(path: bytes, tops: Iterable[bytes]) -> bool:
    """Return whether `path` is one of `tops` or inside one; all without links."""
    return (path + b"/").startswith(tuple(top if top == b"/" else top + b"/" for top in tops))


def by_place(mounts: Iterable[Mount]) -> dict[bytes, Mount]:
    """Return the mounts that put something somewhere, by their place."""
    return {mount.dest: mount for mount in mounts if mount.kind != "ro-remount"}


def nearest(
    at: Mapping[bytes, Mount] | tuple[Mount, ...], path: bytes, *, strict: bool = False
) -> Mount | None:
    """Return the mount that decides what shows at `path`: the deepest at it (unless `strict`) or above."""
    if isinstance(at, tuple):
        at = by_place(at)
    if not strict and path in at:
        return at[path]
    while path not in (b"", b"/"):
        path = path[: path.rindex(b"/")]
        found = at.get(path or b"/")
        if found is not None:
            return found
    return None


def shows(at: Mapping[bytes, Mount], path: bytes) -> bool:
    """Return whether the host's object at `path` (without links) can be seen inside at the same place."""
    found = nearest(at, path)
    if found is None:
        return False
    return found.is_bind if found.dest != path else found.kind not in ("tmpfs", "dir")


def visible(at: Mapping[bytes, Mount], path: bytes) -> bool:
    """Return whether what the host has at `path`, perhaps spelled over links, shows inside."""
    for _ in range(40):
        mount = nearest(at, path)
        if mount is None or mount.kind != "symlink":
            return mount is not None and shows(at, path)
        text = mount.source or b""
        base = text if text.startswith(b"/") else posixpath.join(posixpath.dirname(mount.dest), text)
        path = posixpath.normpath(base + path[len(mount.dest) :])
    return False


def is_secret(path: bytes, sensitive: Iterable[bytes], exceptions: Collection[bytes] = ()) -> bool:
    """Return whether `path` is, or lies inside, a sensitive path that has no exception."""
    return below_any(path, (secret for secret in sensitive if secret not in exceptions))


@dataclass(frozen=True, slots=True)
class BwrapLaunch:
    """How bwrap is run for one jail, its mounts apart."""

    path: bytes
    hostname: bytes = b"vectora"
    share_net: bool = False
    disable_userns: bool = True


def bwrap_arguments(
    mounts: Iterable[Mount], launch: BwrapLaunch, fd_base: int = 11
) -> tuple[list[bytes], list[bytes]]:
    """Return all options for a jail, and the files that it reads from descriptors, in order from `fd_base`.

    The worker's image is read from descriptor `fd_base - 1`. `--args`, `--info-fd` and the command are the
    start's.

    Raises:
        UnsupportedPolicy: more options than bwrap takes (code `too_many_mounts`).
    """
    args = _namespace_arguments(launch)
    data: list[bytes] = []
    for mount in mounts:
        if mount.kind in _BIND:
            args += [_BIND[mount.kind], mount.source or mount.dest, mount.dest]
        elif mount.kind == "symlink":
            args += [b"--symlink", mount.source or b"", mount.dest]
        elif mount.kind == "tmpfs":
            args += [b"--perms", b"%04o" % mount.perms, b"--size", b"%d" % mount.size, b"--tmpfs", mount.dest]
        elif mount.kind == "dir":
            args += [b"--perms", b"%04o" % mount.perms, b"--dir", mount.dest]
        elif mount.kind == "data":
            number = fd_base - 1 if mount.dest == WORKER_PATH else fd_base + len(data)
            args += [b"--perms", b"%04o" % mount.perms, b"--file", b"%d" % number, mount.dest]
            if mount.dest != WORKER_PATH:
                data.append(mount.data)
        else:
            args += [_PLAIN[mount.kind], mount.dest]
    if len(args) > MAX_ARGUMENTS:
        raise UnsupportedPolicy(
            f"{len(args)} mount options are more than bwrap takes ({MAX_ARGUMENTS})",
            code="too_many_mounts",
            layer="mounts",
            hint="grant directories instead of many single files",
        )
    return args, data


def _namespace_arguments(launch: BwrapLaunch) -> list[bytes]:
    """Return everything but the mounts; the environment is the worker's business, so bwrap's is empty.

    `--unshare-all` only tries the user namespace, hence `--unshare-user` beside it. `--new-session` also
    takes the jail out of the backend's autogroup, whose nice value a command could change otherwise,
    sched(7).
    """
    args = [b"--unshare-all", b"--unshare-user", b"--as-pid-1", b"--cap-drop", b"ALL", b"--clearenv"]
    args += [b"--new-session", b"--die-with-parent", b"--hostname", launch.hostname]
    if launch.share_net:
        args.append(b"--share-net")
    if launch.disable_userns:
        args.append(b"--disable-userns")
    return args
