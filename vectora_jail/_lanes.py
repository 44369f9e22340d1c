"""Lanes: one request at a time on one socket to a worker, through the native hot path (`csrc/channel.h`)."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, Final

from vectora_jail._shim import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

PENDING: Final = 0
DONE: Final = 1
DATA: Final = 2
NEED_INPUT: Final = 3

CAPTURE_OUT: Final = 1
CAPTURE_ERR: Final = 2
MERGE: Final = 4
STREAM: Final = 8
FEED: Final = 16

NO_FDS: Final = (-1, -1, -1, -1)
_NO_FDS: Final = ffi.new("int[4]", NO_FDS)


class ChannelClosed(Exception):
    """The worker's end of a lane is closed, or what it sent broke the protocol (`reason`)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DescriptorQuota(Exception):
    """The kernel refused to pass a descriptor: too many are in flight for this user (unix(7), ETOOMANYREFS)."""


def _raise(rc: int) -> None:
    if rc == -errno.EPIPE:
        raise ChannelClosed("the worker closed its channel")
    if rc == -errno.EPROTO:
        raise ChannelClosed("the worker sent a message that is cut off or carries too many descriptors")
    if rc == -errno.ETOOMANYREFS:
        raise DescriptorQuota
    if rc == -errno.EAGAIN:
        raise ChannelClosed("the worker has stopped reading its channel")
    raise OSError(-rc, os.strerror(-rc))


def hung_up(fd: int) -> bool:
    """Whether the other end of a socket is closed."""
    return bool(lib.vj_hung_up(fd))


class Seen:
    """What a worker was started for, so that one native call tells whether all of it still holds (`csrc/seen.h`)."""

    __slots__ = ("_c", "_keep")

    def __init__(
        self,
        channel: int,
        directory: tuple[str, int, int],
        file: tuple[str, tuple[int, ...] | None] | None = None,
    ) -> None:
        """Remember a socket, a directory (path, device, inode) and a file.

        Args:
            channel: Our end of the worker's socket; valid as long as the worker is alive.
            directory: Path, device and inode.
            file: Path, and device, inode, mtime_ns, ctime_ns and size; None where it did not exist.
        """
        self._c = c = ffi.new("struct vj_seen *")
        self._keep = [ffi.new("char[]", os.fsencode(directory[0]))]
        c.channel, c.dir = channel, self._keep[0]
        _, c.dir_dev, c.dir_ino = directory
        if file is not None:
            self._keep.append(ffi.new("char[]", os.fsencode(file[0])))
            c.file = self._keep[1]
            if file[1] is not None:
                c.file_there = 1
                c.file_dev, c.file_ino, c.file_mtime_ns, c.file_ctime_ns, c.file_size = file[1]

    def changed(self) -> int:
        """Return 0 while everything is as it was."""
        what: int = lib.vj_look(self._c)
        return what


class Lane:
    """A socket to the worker with the native state of the request that is under way on it."""

    __slots__ = ("_c", "_fds", "_out", "_reply", "fd")

    def __init__(self, fd: int) -> None:
        """Take over the descriptor `fd`; `close` closes it."""
        self.fd = fd
        self._c = ffi.new("struct vj_call *")
        self._fds = ffi.new("int[4]")
        lib.vj_call_init(self._c, fd)
        self._out = (self._c.out[0], self._c.out[1])
        self._reply: Any = None

    def exec(
        self,
        request: bytes,
        fds: tuple[int, int, int, int],
        flags: int,
        cap: int,
        owner: tuple[int, int] | None = None,
    ) -> None:
        """Send an exec-like request with the command's descriptors (see `vj_exec`)."""
        c_fds = self._fds
        c_fds[0], c_fds[1], c_fds[2], c_fds[3] = fds
        uid, gid = owner or (-1, -1)
        rc = lib.vj_exec(self._c, request, len(request), c_fds, flags, cap, uid, gid)
        if rc:
            _raise(rc)

    def run(
        self,
        request: bytes,
        fds: tuple[int, int, int, int],
        flags: int,
        cap: int,
        owner: tuple[int, int] | None,
        timeout_ms: int,
    ) -> int:
        """Send an exec-like request and wait for the first thing to happen, as `exec` and `wait` do.

        Raises:
            ChannelClosed, OSError: when `busy` is set then, the command may have run.
        """
        c_fds = _NO_FDS
        if fds != NO_FDS:
            c_fds = self._fds
            c_fds[0], c_fds[1], c_fds[2], c_fds[3] = fds
        uid, gid = owner or (-1, -1)
        rc: int = lib.vj_run(self._c, request, len(request), c_fds, flags, cap, uid, gid, timeout_ms)
        if rc < 0:
            if rc == -errno.EINTR:
                return PENDING
            _raise(rc)
        return rc

    def post(self, request: bytes, fds: Sequence[int] = ()) -> None:
        """Send a request without waiting for its reply."""
        rc = lib.vj_post(self._c, request, len(request), list(fds) if fds else ffi.NULL, len(fds))
        if rc:
            _raise(rc)

    def request(self, request: bytes, fds: Sequence[int] = (), timeout_ms: int = -1) -> int:
        """Send a request and wait for the reply; `DONE` or `PENDING`."""
        rc = lib.vj_request(
            self._c, request, len(request), list(fds) if fds else ffi.NULL, len(fds), timeout_ms
        )
        if rc < 0 and rc != -errno.EINTR:
            _raise(rc)
        return PENDING if rc < 0 else rc

    def wait(self, timeout_ms: int) -> int:
        """Wait for the next thing to happen; a signal ends the wait with `PENDING` so that Python can handle it."""
        rc: int = lib.vj_call_wait(self._c, timeout_ms)
        if rc < 0:
            if rc == -errno.EINTR:
                return PENDING
            _raise(rc)
        return rc

    def step(self) -> int:
        """Do what can be done without waiting."""
        rc: int = lib.vj_call_step(self._c)
        if rc < 0:
            _raise(rc)
        return rc

    def pollfd(self) -> int:
        """Return the one descriptor an event loop has to watch for this request."""
        rc: int = lib.vj_call_pollfd(self._c)
        if rc < 0:
            _raise(rc)
        return rc

    def feed(self, data: bytes, *, last: bool) -> None:
        """Give the command input; only after the native side asked for it (`NEED_INPUT`)."""
        rc = lib.vj_call_feed(self._c, data, len(data), last)
        if rc < 0 and rc != -errno.EPIPE:
            _raise(rc)

    def reply(self) -> bytes:
        """Return the reply's bytes."""
        if self._reply is None:  # allocated by the first reply, where it stays
            self._reply = ffi.buffer(self._c.reply, lib.VJ_REPLY_MAX)
        data: bytes = self._reply[: self._c.reply_len]
        return data

    def plain(self) -> list[int] | None:
        """Return the numbers of a command's common reply in the order of `csrc/plain.h`, None for any other reply."""
        c = self._c
        if not c.plain:
            return None
        numbers: list[int] = ffi.unpack(c.numbers, 12)
        return numbers

    def take_fd(self) -> int:
        """Return the descriptor that came with the reply and hand over its ownership; -1 when there was none."""
        c = self._c
        fd: int = c.reply_fd
        if fd >= 0:
            c.reply_fd = -1
        return fd

    def output(self, which: int) -> tuple[bytes, int]:
        """Return what was kept of stream `which` and how many bytes were dropped between its two halves."""
        s = self._out[which]
        if not s.len:
            return b"", 0
        if not s.dropped:
            return bytes(ffi.buffer(s.data, s.len)), 0
        cap = self._c.cap
        head = cap // 2
        ring = ffi.buffer(s.data, cap)
        at = s.next
        # Until the ring has been filled once, what lies behind `at` is the end of the first `cap` bytes: in order too.
        return bytes(ring[:head]) + bytes(ring[at:cap]) + bytes(ring[head:at]), int(s.dropped)

    def take_output(self, which: int) -> bytes:
        """Return what has come on stream `which` since the last time (`STREAM`)."""
        s = self._out[which]
        if not s.len:
            return b""
        data = bytes(ffi.buffer(s.data, s.len))
        lib.vj_call_drop(self._c, which)
        return data

    def rearm(self) -> None:
        """Expect one more reply to the same request (the end of a process that was started)."""
        self._c.reply_len = 0
        self._c.busy = 1

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._c.busy)

    def close(self) -> None:
        """Free everything; the worker kills what still runs for this lane."""
        if self.fd >= 0:
            lib.vj_call_clear(self._c)
            fd, self.fd = self.fd, -1
            os.close(fd)

    def forget(self) -> None:
        """Close without telling anybody: for the child of a fork, where the lane belongs to the parent."""
        self.close()
