"""One bash of a persistent shell: its pipes, its answers, its end (`shell.py` has what callers hold)."""

from __future__ import annotations

import fcntl
import os
import select
import termios
from array import array
from typing import TYPE_CHECKING, Final

from ._core import _now
from .process import _Started

if TYPE_CHECKING:
    from ._lanes import Lane
    from ._waiting import Waiter
    from .results import ExecResult
    from .worker import Worker

STATE_MAX: Final = 8 * 1024 * 1024
"""Bytes of variables and functions that are kept over a restart."""
DRAIN_MAX: Final = 1024 * 1024
"""What a pipe can hold at most, pipe(7): more than this was not written before the status."""


class Capture:
    """Output up to a cap; beyond it the first and the last half of it."""

    __slots__ = ("_cap", "_head", "_tail", "dropped")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._head = bytearray()
        self._tail: bytearray | None = None
        self.dropped = 0

    def add(self, data: bytes) -> None:
        if self._tail is None:
            self._head += data
            if len(self._head) <= self._cap:
                return
            half = self._cap // 2
            self._tail = self._head[half:]
            del self._head[half:]
        else:
            self._tail += data
        over = len(self._tail) - (self._cap - len(self._head))
        if over > 0:
            del self._tail[:over]
            self.dropped += over

    def value(self) -> bytes:
        return bytes(self._head) + bytes(self._tail or b"")


class OutOfStep(Exception):
    """What came on the status pipe is no answer: a command has closed or used it."""


class Bash(_Started):
    """One bash and its pipes; replaced when a command ends it."""

    def __init__(self, worker: Worker, lane: Lane, number: int, waiter: Waiter, argv: list[bytes]) -> None:
        super().__init__(worker, lane, number, waiter, argv)
        self.program = self.status = -1
        self.streams = [-1, -1]
        self.captures = (Capture(0), Capture(0))
        self.state = (b"", b"")
        self.code: int | None = None
        self.usable = self.ran = True
        """The caller's streams were still there after the last call."""
        self.open = False
        """A call is under way."""
        self._unwritten = 0
        self._due = False
        """The state after the last call has not come whole yet."""
        self._buffer = bytearray()
        self._epoll = select.epoll()

    def adopt(self, ours: list[int]) -> None:
        """Take over our ends of the pipes: program, stdout, stderr, status."""
        self.program, self.streams[0], self.streams[1], self.status = ours
        for fd in (*ours[1:], self._lane.fd):
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def worker(self) -> Worker:
        return self._worker

    def _ended(self) -> None:
        self._epoll.unregister(self._lane.fd)  # the lane is somebody else's from now on
        super()._ended()

    def _lost(self, reason: str) -> None:
        self._epoll.unregister(self._lane.fd)
        super()._lost(reason)

    def begin(self, cap: int) -> None:
        self.captures = (Capture(cap), Capture(cap))
        self.code, self.open = None, True

    def _parse(self) -> None:
        """Read the status pipe: what FINISH wrote after the call before, then the next code and a line feed."""
        buffer = self._buffer
        while buffer:
            if self._due:
                first = buffer.find(0)
                second = buffer.find(0, first + 1) if first >= 0 else -1
                if second < 0 or len(buffer) < second + 2:
                    if len(buffer) > STATE_MAX:
                        raise OutOfStep
                    return
                self.state = (bytes(buffer[:first]), bytes(buffer[first + 1 : second]))
                self.usable = buffer[second + 1] == ord("1")
                del buffer[: second + 2]
                self._due = False
                continue
            end = buffer.find(b"\n", 0, 8)
            if not self.open or not buffer[: max(end, 0)].isdigit():
                raise OutOfStep
            self.code = int(buffer[:end]) & 0xFF
            self.ran = self.usable
            self.open, self._due = False, True
            del buffer[: end + 1]

    def _take_status(self) -> None:
        while self.status >= 0:
            try:
                data = os.read(self.status, 65536)
            except BlockingIOError:
                return
            if not data:
                # Closing alone leaves it in the set while another thread's new child still has a copy, epoll(7).
                self._epoll.unregister(self.status)
                os.close(self.status)
                self.status = -1
                return
            self._buffer += data
            self._parse()
            if len(data) < 65536:
                return

    def salvage(self) -> None:
        """Take the state that a bash which has ended left in the pipe."""
        try:
            self._take_status()
        except OutOfStep:
            self._buffer.clear()

    def drain(self, which: int) -> None:
        """Take what lies in a stream's pipe now."""
        taken, fd = 0, self.streams[which]
        while taken < DRAIN_MAX and fd >= 0:
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not data:
                self._epoll.unregister(fd)
                os.close(fd)
                self.streams[which] = -1
                return
            taken += len(data)
            self.captures[which].add(data)

    async def pump(self, timeout: float) -> None:
        """Handle what comes within `timeout` seconds, or has come already. Raises OutOfStep."""
        if self._waiter.blocking:
            events = self._epoll.poll(timeout)
        else:
            await self._waiter.readable(self._epoll.fileno(), timeout)
            events = self._epoll.poll(0)
        for fd, _ in events:
            if fd == self.status:
                self._take_status()
            elif fd == self._lane.fd:
                self._look()
            else:
                self.drain(self.streams.index(fd))

    def unread(self) -> int:
        """How much of the program bash has not read: its pipe tells, pipe(7), and what could not be written."""
        count = array("i", [0])
        fcntl.ioctl(self.program, termios.FIONREAD, count)
        return count[0] + self._unwritten

    async def give(self, text: bytes) -> None:
        """Write program text; bash may be busy writing to us meanwhile."""
        view = memoryview(text)
        self._unwritten = 0
        while view:
            try:
                view = view[os.write(self.program, view) :]
            except BlockingIOError:
                await self.pump(0)
                if not self.running:
                    self._unwritten = len(view)
                    return
                await self._waiter.writable(self.program, 0.05)
            except BrokenPipeError:
                self._unwritten = len(view)
                return

    @property
    def busy(self) -> bool:
        """Whether a call is under way in a running bash."""
        return self.open and self.running

    @property
    def running(self) -> bool:
        """Whether its end has not been seen."""
        return self._result is None and self._error is None

    async def until(self, deadline: float | None) -> bool:
        """Wait for the call's code or the end of bash; False at the deadline.

        Raises:
            WorkerDiedError: the worker ended. OutOfStep: the status pipe is of no use any more.
        """
        while self.busy:
            left = 0.5 if deadline is None else min(0.5, deadline - _now())
            if left <= 0:
                return False
            await self.pump(left)
            if left >= 0.5 and self.busy:
                health = self._worker.running.health()
                if health and health != "stopped by a signal":
                    self._lost(health)
        if self._error is not None:
            raise self._error
        self.drain(0)
        self.drain(1)
        return True

    @property
    def ended(self) -> ExecResult | None:
        """How bash ended, None while it runs."""
        return self._result

    async def signal(self, signo: int) -> None:
        await self._tell({"op": "signal", "signo": signo, "tree": True})

    async def close(self) -> None:
        """Kill bash with everything that it has started, and close the pipes."""
        try:
            await self._end(2.0)
        finally:
            self.close_pipes()

    def close_pipes(self) -> None:
        self._epoll.close()
        for fd in (self.program, self.status, *self.streams):
            if fd >= 0:
                os.close(fd)
        self.program = self.status = -1
        self.streams = [-1, -1]
