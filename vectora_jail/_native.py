"""Start, enter and end a jail through the C shim; −errno and stages become exceptions.

Only the modules named `_native…` import the shim. All calls block, bounded by a deadline, without the GIL.
Sources: clone(2), execveat(2), pidfd_open(2), memfd_create(2), bwrap(1).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vectora_jail._shim import ffi, lib
from vectora_jail._spawnerrors import enter_error, start_error
from vectora_jail.errors import WorkerSpawnError

__all__ = [
    "WORKER_COMMAND",
    "StagePlan",
    "Started",
    "enter",
    "launcher_image",
    "reap",
    "start",
    "worker_image",
]

WORKER_COMMAND: Final = (b"/run/vectora-jail/worker", b"--fd", b"3")
"""What bwrap executes inside, on the socket that it inherits as descriptor 3."""

DATA_FD: Final = 10
"""Number of the first data descriptor in the child (`VJ_FD_DATA`)."""

STAGE_ROOT: Final = b"/tmp"  # a tmpfs in the launcher's own mount namespace, not the host's /tmp

_BIND_OPTIONS: Final = frozenset(
    {b"--bind", b"--bind-try", b"--ro-bind", b"--ro-bind-try", b"--dev-bind", b"--dev-bind-try"}
)
# Options of bwrap whose number of values is not one: a source is found by counting.
_TWO_VALUES: Final = frozenset(
    b"--" + name
    for name in (
        b"setenv",
        b"file",
        b"bind-data",
        b"ro-bind-data",
        b"symlink",
        b"chmod",
        b"bind-fd",
        b"ro-bind-fd",
    )
)
_NO_VALUES: Final = frozenset(
    b"--unshare-" + name
    for name in (b"all", b"user", b"user-try", b"ipc", b"pid", b"net", b"uts", b"cgroup", b"cgroup-try")
) | {
    b"--share-net",
    b"--disable-userns",
    b"--assert-userns-disabled",
    b"--clearenv",
    b"--new-session",
    b"--die-with-parent",
    b"--as-pid-1",
}


@dataclass(frozen=True, slots=True)
class Started:
    """A jail whose worker runs and waits for its first message; its holder owns the descriptors."""

    monitor_pid: int
    """bwrap, a child of this process (without bwrap: the worker itself)."""
    monitor_fd: int
    """pidfd of the monitor."""
    pid: int
    """The worker, as a pid of this host."""
    pidfd: int
    """pidfd of the worker."""
    mntns_fd: int
    """Its mount namespace; −1 without bwrap."""
    userns_fd: int
    """The user namespace that owns the mount namespace; −1 when that is our own."""

    def close(self) -> None:
        """Close the descriptors; the jail itself is ended by `reap`. Call once."""
        for fd in (self.monitor_fd, self.pidfd, self.mntns_fd, self.userns_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Whose jail it is when a backend of root serves a workspace of somebody else."""

    uid: int
    gid: int


# ---- images ----

_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
_lock = threading.Lock()
_images: dict[tuple[str, str], int] = {}
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8  # no more seals, no shrinking, no growing, no writing: fcntl(2)
_MFD_ALLOW_SEALING: Final = 0x2
_MFD_EXEC: Final = 0x10  # Linux 6.3; before, every memfd is executable


def native_arch() -> str:
    """Return this machine's architecture as the programs are named after it (`x86_64`, `aarch64`)."""
    machine = platform.machine()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def worker_image(arch: str | None = None) -> int:
    """Return a new read-only descriptor, at offset 0, of the worker's sealed bytes; the caller closes it.

    Raises:
        WorkerSpawnError: code `worker_hash` when the file is not the one this shim was built with,
            `worker_missing` when this build has none for `arch`.
    """
    return _fresh("worker", arch or native_arch())


def launcher_image(arch: str | None = None) -> int:
    """Return the same for the launcher."""
    return _fresh("launcher", arch or native_arch())


def _fresh(program: str, arch: str) -> int:
    with _lock:
        sealed = _images.get((program, arch))
        if sealed is None:
            sealed = _images[program, arch] = _seal(program, arch)
    # its own description: bwrap reads from the offset, and two starts must not share one
    return os.open(f"/proc/self/fd/{sealed}", os.O_RDONLY | os.O_CLOEXEC)


def _seal(program: str, arch: str) -> int:
    """Read the file once, compare it with the hash inside the shim, keep it where nobody can change it."""
    from hashlib import sha256

    expected = lib.vj_image_hash(program.encode(), arch.encode())
    path = os.path.join(_DIRECTORY, f"vectora-jail-{program}-{arch}")
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise _missing(program, arch, path, error.errno or 0) from error
    if expected == ffi.NULL:
        raise _missing(program, arch, path, 0)
    if sha256(data).hexdigest() != ffi.string(expected).decode():
        raise WorkerSpawnError(
            f"{path} is not the program that this build was made with",
            code="worker_hash",
            layer="worker",
            stage="image",
            hint="rebuild: pip install -e . (or reinstall vectora-jail)",
        )
    return sealed_memfd(f"vectora-jail-{program}", data)


def _missing(program: str, arch: str, path: str, number: int) -> WorkerSpawnError:
    return WorkerSpawnError(
        f"this build has no {program} for {arch}: {path}",
        code="worker_missing",
        layer="worker",
        stage="image",
        errno=number,
        hint="rebuild with a static C compiler: apt install musl-tools, then pip install -e .",
    )


def sealed_memfd(name: str, data: bytes) -> int:
    """Return a memfd with these bytes that nobody can change any more; the offset is at its end."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | _MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _after_fork() -> None:
    """Another thread of the parent may have held the lock; the descriptors are good in the child too."""
    global _lock  # noqa: PLW0603 — a held lock cannot be released by anybody in this process
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


# ---- start ----


def start(
    bwrap: bytes | None,
    args: Sequence[bytes],
    fds: Sequence[int],
    sock: int,
    *,
    deadline_s: float = 10.0,
    stage: StagePlan | None = None,
    command: Sequence[bytes] = WORKER_COMMAND,
) -> Started:
    """Start a jail; return once its worker runs: bwrap's mounts are made, nothing untrusted has run.

    Args:
        bwrap: Path of a trusted bwrap; None executes the worker directly (no namespaces).
        args: bwrap's options without the command and without `--args` and `--info-fd`, which are added here.
            They must contain `--as-pid-1` and `--die-with-parent`. Data descriptor i is number `10 + i`.
        fds: Data descriptors, in order. They stay open here.
        sock: The worker's end of the socket pair. It stays open here: close it, or end-of-file never comes.
        deadline_s: Seconds until everything is killed and given up.
        stage: As root, become this user first; the sources of all binds are opened here and staged, so that
            they may lie below directories which that user cannot pass.
        command: What bwrap executes.

    Raises:
        WorkerSpawnError: with `stage`, `errno`, and what bwrap said.
    """
    argv = [b"bwrap", b"--args", b"4", b"--info-fd", b"5", b"--", *command]
    staged: list[int] = []
    program = -1
    try:
        if bwrap is None:
            program = worker_image()
            argv = [b"vectora-jail-worker", *command[1:]]
        elif stage is not None:
            program = launcher_image()
            first = DATA_FD + len(fds)
            args, staged = stage_sources(args)
            numbers = (stage.uid, stage.gid, os.getpid(), first, len(staged))
            argv = [
                b"vectora-jail-launcher",
                b"stage",
                *(b"%d" % n for n in numbers),
                b"--",
                bwrap,
                *argv[1:],
            ]
        blob = None if bwrap is None else b"".join(arg + b"\0" for arg in args)
        path = bwrap if stage is None else None
        return _start(path, program, argv, blob, [*fds, *staged], sock, deadline_s)
    finally:
        for fd in (program, *staged):
            if fd >= 0:
                os.close(fd)


def _start(
    path: bytes | None,
    program: int,
    argv: Sequence[bytes],
    blob: bytes | None,
    fds: Sequence[int],
    sock: int,
    deadline_s: float,
) -> Started:
    keep = [ffi.new("char[]", arg) for arg in argv]
    name = ffi.NULL if path is None else ffi.new("char[]", path)
    data = ffi.NULL if blob is None else ffi.from_buffer("uint8_t[]", blob or b"\0")
    vector = ffi.new("char *[]", [*keep, ffi.NULL])
    numbers = ffi.new("int[]", list(fds))
    request = ffi.new("struct vj_start_request *")
    request.path, request.exec_fd, request.argv, request.sock = name, program, vector, sock
    request.args, request.args_len = data, len(blob or b"")
    request.fds, request.nfds, request.deadline_ms = numbers, len(fds), _ms(deadline_s)
    started = ffi.new("struct vj_started *")
    error = ffi.new("struct vj_start_error *")
    if lib.vj_start(request, started, error) != 0:
        detail = bytes(ffi.buffer(error.detail, error.detail_len)).decode("utf-8", "replace").strip()
        raise start_error(error.stage, error.err, detail)
    s = started
    return Started(s.monitor_pid, s.monitor_fd, s.pid, s.pidfd, s.mntns_fd, s.userns_fd)


def stage_sources(args: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """Open the source of every bind; return the options with staged names, and the descriptors.

    A source of a `-try` option that does not exist takes its option with it.
    """
    out: list[bytes] = []
    opened: list[int] = []
    i = 0
    try:
        while i < len(args):
            option = args[i]
            if option not in _BIND_OPTIONS:
                n = 1 if option in _NO_VALUES else 3 if option in _TWO_VALUES else 2
                out += args[i : i + n]
                i += n
                continue
            source, dest = args[i + 1 : i + 3]
            i += 3
            fd = _open_source(source, optional=option.endswith(b"-try"))
            if fd is not None:
                out += [option, STAGE_ROOT + b"/%d" % len(opened), dest]
                opened.append(fd)
    except BaseException:
        for number in opened:
            os.close(number)
        raise
    return out, opened


def _open_source(path: bytes, *, optional: bool) -> int | None:
    """Open without following symlinks: the plan resolved the names, a link was put there since."""
    fd = ffi.new("int *")
    err = -lib.vj_open_path(path, fd)
    if err == errno.ENOENT and optional:
        return None
    if err:
        raise start_error(0, err, f"cannot open {os.fsdecode(path)!r} without following symlinks")
    return int(fd[0])


def reap(started: Started, deadline_s: float = 2.0) -> int | None:
    """Kill the worker, wait for its monitor, kill that too if it stays; return its wait status.

    None: somebody else in this process has waited for it, or it did not end in time. Closes nothing.
    """
    status = ffi.new("int *")
    worker = started.pidfd if started.monitor_pid != started.pid else -1
    err = lib.vj_reap(started.monitor_fd, worker, _ms(deadline_s), status)
    return int(status[0]) if err == 0 and status[0] >= 0 else None


# ---- enter ----

_launcher_set = False


def register_launcher() -> None:
    """Give the shim the launcher's sealed image, once; `enter` and the tree watch execute it."""
    global _launcher_set  # noqa: PLW0603 — one image a process, like the starter thread
    if _launcher_set:
        return
    fd = launcher_image()
    try:
        err = lib.vj_set_launcher(fd)
    finally:
        os.close(fd)
    if err:
        raise enter_error(-err)
    _launcher_set = True


def enter(mntns_fd: int, userns_fd: int, ops: bytes, deadline_s: float = 5.0) -> list[int]:
    """Apply a msgpack array of mount ops (csrc/core/livemount.h) in a jail; return an errno an op, 0 = done.

    Raises:
        WorkerSpawnError: code `enter` when the namespaces could not be entered, the list is malformed, or the
            deadline (seconds) ran out: then any part of the ops may have happened.
    """
    register_launcher()
    capacity = len(ops) + 1  # an op has at least one byte
    results = ffi.new("int32_t[]", capacity)
    count = ffi.new("size_t *")
    data = ffi.from_buffer("uint8_t[]", ops or b"\x90")
    length = len(ops) or 1
    err = lib.vj_enter(mntns_fd, userns_fd, data, length, _ms(deadline_s), results, capacity, count)
    if err:
        raise enter_error(-err)
    return list(ffi.unpack(results, count[0]))


def _ms(seconds: float) -> int:
    return max(1, min(int(seconds * 1000), 0x7FFFFFFF))
