"""Background processes of a jail: they outlive the call that started them, not the jail."""

from __future__ import annotations

import os
import signal as signal_module
import time
from typing import TYPE_CHECKING, Any

from . import wire
from ._core import result_of
from ._faces import awaitable, blocking
from ._lanes import DONE, ChannelClosed
from ._ring import RING, Ring
from .errors import WorkerDiedError

if TYPE_CHECKING:
    from ._core import Commands
    from ._lanes import Lane
    from ._waiting import Waiter
    from .results import ExecResult
    from .worker import Worker


class _Started:
    """What processes and terminals share: a lane of their own on which the worker reports the end."""

    def __init__(self, worker: Worker, lane: Lane, number: int, waiter: Waiter, argv: list[bytes]) -> None:
        self._worker = worker
        self._lane = lane
        self._number = number
        self._waiter = waiter
        self._argv = argv
        self._result: ExecResult | None = None
        self._error: WorkerDiedError | None = None
        self.pid = 0
        """The process inside the jail."""

    @property
    def id(self) -> int:
        """The number that `list_processes` shows."""
        return self._number

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to end."""
        self._look()
        return self._result is None and self._error is None

    def _look(self) -> None:
        """Take the end of the process when it has been reported; never waits."""
        if self._result is not None or self._error is not None:
            return
        try:
            if self._lane.step() == DONE:
                self._ended()
        except ChannelClosed as exc:
            self._lost(exc.reason)

    def _ended(self) -> None:
        try:
            reply = wire.decode(self._lane.reply())
            wire.expect_id(reply, self._number)
            self._result = result_of(reply, self._argv, b"", self._worker.running)
        except (wire.ProtocolError, OSError) as exc:
            self._lost(str(exc))
            return
        left = self._worker.settle(self._number)
        if left:
            self._result.violations += left
        self._worker.give_back(self._lane)

    def _lost(self, reason: str) -> None:
        self._error = self._worker.died(reason)
        self._worker.calls.discard(self._number)
        self._lane.close()

    async def _wait(self, timeout: float | None) -> ExecResult:
        limit = None if timeout is None else time.monotonic() + timeout
        while self._result is None and self._error is None:
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                msg = f"the process did not end within {timeout} s"
                raise TimeoutError(msg)
            try:
                if await self._waiter.next(self._lane, left) == DONE:
                    self._ended()
                elif (health := self._worker.running.health()) and health != "stopped by a signal":
                    self._lost(health)
            except ChannelClosed as exc:
                self._lost(exc.reason)
        if self._error is not None:
            raise self._error
        assert self._result is not None  # noqa: S101 — for the type checker; the loop above ends no other way
        return self._result

    async def _tell(self, message: dict[str, Any]) -> None:
        if not self.alive:
            return
        await self._worker.request(self._waiter, {**message, "target": self._number}, timeout=5.0)

    async def _end(self, seconds: float) -> None:
        """Kill what still runs; afterwards the lane is free or closed, whatever came of it."""
        try:
            if self.alive:
                await self._tell({"op": "kill"})
                await self._wait(seconds)
        except (TimeoutError, WorkerDiedError):
            pass
        finally:
            if self._result is None and self._error is None:
                self._error = WorkerDiedError("the process was given up", outcome="unknown")
                self._worker.calls.discard(self._number)
                self._lane.close()  # the worker kills what runs for a lane that ends

    async def start(self, send: Any, cwd: bytes = b"") -> int:
        """Send the request, wait for the worker's word that the program runs; return a descriptor or -1.

        Raises:
            OSError: the program or the directory `cwd` cannot be used; it names which.
        """
        self._worker.enter(self._number)
        try:
            return await self._begin(send, cwd)
        except BaseException:
            self._worker.calls.discard(self._number)
            raise

    async def _begin(self, send: Any, cwd: bytes) -> int:
        try:
            send(self._lane)
            while await self._waiter.next(self._lane, 10.0) != DONE:
                if health := self._worker.running.health():
                    raise ChannelClosed(health)
            reply = wire.decode(self._lane.reply())
            wire.expect_id(reply, self._number)
        except (ChannelClosed, wire.ProtocolError) as exc:
            self._lane.close()
            raise self._worker.died(str(exc)) from None
        except BaseException:
            self._lane.close()
            raise
        fd = self._lane.take_fd()
        failed = wire.integer(reply, "exec_errno", 0, 4095)
        if "error" in reply or failed:
            if fd >= 0:
                os.close(fd)
            name = cwd if failed and await self._stage_of_failure() == "cwd" else self._argv[0]
            self._worker.give_back(self._lane)
            number = failed or wire.integer(reply, "errno", 0, 4095)
            raise OSError(number, os.strerror(number), os.fsdecode(name))
        self.pid = wire.integer(reply, "pid")
        # The next reply on this lane is the end of the process.
        self._lane.rearm()
        return fd

    async def _stage_of_failure(self) -> str:
        """Take the end of a program that never ran: left on the lane, the next call would get it for an answer."""
        limit = time.monotonic() + 5.0
        try:
            self._lane.rearm()
            while await self._waiter.next(self._lane, 1.0) != DONE:
                if (health := self._worker.running.health()) or time.monotonic() > limit:
                    raise ChannelClosed(health or "it did not report the end of a failed start")
            reply = wire.decode(self._lane.reply())
            wire.expect_id(reply, self._number)
            return wire.text(reply, "stage")
        except (ChannelClosed, wire.ProtocolError) as exc:
            self._lane.close()
            raise self._worker.died(str(exc)) from None
        except BaseException:
            self._lane.close()
            raise


class AsyncProcess(_Started):
    """A program that runs in the background of an asyncio backend; `Process` is the same for threads."""

    def __init__(self, worker: Worker, lane: Lane, number: int, waiter: Waiter, argv: list[bytes]) -> None:
        super().__init__(worker, lane, number, waiter, argv)
        self._pipes: dict[int, int] = {}
        self._rings = {1: Ring(), 2: Ring()}
        self._read_at = {1: 0, 2: 0}
        self._stdin = -1
        self._taken = False
        self._reading = {1: 0, 2: 0}
        """How many callers wait for output of a stream: it is theirs, `wait` leaves it alone meanwhile."""

    @property
    def stdin(self) -> AsyncStdin:
        """The program's input."""
        return AsyncStdin(self)

    async def write(self, data: bytes | str) -> None:
        """Write all of `data` to the program's stdin; BrokenPipeError when it reads no more."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if self._stdin < 0:
            raise BrokenPipeError("stdin is closed")
        view = memoryview(raw)
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await self._waiter.writable(self._stdin, 1.0)

    async def close_stdin(self) -> None:
        """End the program's input."""
        fd, self._stdin = self._stdin, -1
        if fd >= 0:
            os.close(fd)

    def _pump(self, fd: int) -> bool:
        """Move what has come into the ring; False at end of file."""
        pipe = self._pipes.get(fd, -1)
        while pipe >= 0:
            try:
                data = os.read(pipe, 65536)
            except BlockingIOError:
                return True
            if not data:
                self._pipes.pop(fd)
                os.close(pipe)
                return False
            self._rings[fd].add(data)
        return False

    async def read(self, max_bytes: int = 65536, timeout: float | None = None, fd: int = 1) -> bytes:
        """Return the next output of stream `fd`; `b""` only at its end.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            more = self._pump(fd)
            data, self._read_at[fd] = self._rings[fd].since(self._read_at[fd], max_bytes)
            if data or not more:
                return data
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                msg = f"no output within {timeout} s"
                raise TimeoutError(msg)
            self._reading[fd] += 1
            try:
                await self._waiter.readable(self._pipes[fd], left)
            finally:
                self._reading[fd] -= 1

    def output(self, cursor: int = 0, fd: int = 1, max_bytes: int = RING) -> tuple[bytes, int]:
        """Return what was written from `cursor` on, as far as it is kept, and the cursor for the next time."""
        self._pump(fd)
        return self._rings[fd].since(cursor, max_bytes)

    async def signal(self, signo: int = signal_module.SIGTERM, *, tree: bool = False) -> None:
        """Send a signal to the program, or to all of its processes."""
        await self._tell({"op": "signal", "signo": int(signo), "tree": tree})

    async def kill(self) -> None:
        """Kill the program and everything it started."""
        await self._tell({"op": "kill"})

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for the end and return how it came; output that nobody has read is in the result.

        Raises:
            TimeoutError: it did not end within `timeout` seconds. WorkerDiedError: the jail ended.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        seen, pause = -1, 0.0
        while True:
            for fd, waiting in self._reading.items():
                if not waiting:
                    self._pump(fd)
            last, seen = seen, self._rings[1].end + self._rings[2].end
            pause = 0.001 if last != seen else min(0.2, pause * 2)  # a full pipe stops the program
            left = pause if limit is None else min(pause, limit - time.monotonic())
            if limit is not None and left <= 0 and self.alive:
                msg = f"the process did not end within {timeout} s"
                raise TimeoutError(msg)
            try:
                result = await self._wait(max(0.0, left))
                break
            except TimeoutError:
                continue
        if not self._taken:
            self._taken = True
            result.stdout, result.dropped_stdout = self._rest(1)
            result.stderr, result.dropped_stderr = self._rest(2)
            self._close_pipes()
        return result

    def _rest(self, fd: int) -> tuple[bytes, int]:
        """Return what nobody has read, and how many bytes of it are no longer kept."""
        self._pump(fd)
        before = self._read_at[fd]
        data, self._read_at[fd] = self._rings[fd].since(before, RING)
        return data, self._read_at[fd] - before - len(data)

    def _close_pipes(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def close(self) -> None:
        """Kill what still runs and free the pipes."""
        try:
            await self._end(5.0)
        finally:
            self._close_pipes()


def _pipe_for(owner: tuple[int, int] | None, *, ours_is_read: bool) -> tuple[int, int]:
    """Return (our end, the command's end) of a pipe that belongs to the jail's user."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    ours, theirs = (read_end, write_end) if ours_is_read else (write_end, read_end)
    os.set_blocking(ours, False)
    if owner is not None:
        os.fchown(theirs, *owner)
    return ours, theirs


async def spawn(commands: Commands, command: Any, **options: Any) -> AsyncProcess:
    """Start a program in the background (see `Jail.spawn`)."""
    merge = options.pop("merge_stderr", False)
    worker = await commands.life.ready()
    prepared = commands.prepare(worker, "spawn", command, limit_time=False, merge=merge, **options)
    owner = worker.running.owner
    theirs: list[int] = []
    ours: list[int] = []
    process = None
    try:
        for ours_is_read in (False, True) if merge else (False, True, True):
            mine, other = _pipe_for(owner, ours_is_read=ours_is_read)
            ours.append(mine)
            theirs.append(other)
        prepared.fds[0], prepared.fds[1] = theirs[0], theirs[1]
        prepared.fds[2] = theirs[1] if merge else theirs[2]
        lane = worker.borrow()
        process = AsyncProcess(worker, lane, prepared.message["id"], commands.waiter, prepared.argv)
        await process.start(lambda to: commands.send(worker, to, prepared, 0, 2), prepared.cwd)
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    process._stdin, process._pipes = ours[0], dict(enumerate(ours[1:], 1))  # noqa: SLF001 — its own constructor's rest
    commands.life.touch()
    return process


class Process:
    """A program that runs in the background of a jail."""

    def __init__(self, core: AsyncProcess) -> None:
        """Wrap what `Jail.spawn` has started."""
        self._core = core

    write = blocking("_core", AsyncProcess.write)
    close_stdin = blocking("_core", AsyncProcess.close_stdin)
    read = blocking("_core", AsyncProcess.read)
    signal = blocking("_core", AsyncProcess.signal)
    kill = blocking("_core", AsyncProcess.kill)
    wait = blocking("_core", AsyncProcess.wait)
    close = blocking("_core", AsyncProcess.close)

    @property
    def pid(self) -> int:
        """The process inside the jail."""
        return self._core.pid

    @property
    def id(self) -> int:
        """The number that `list_processes` shows."""
        return self._core.id

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._core.alive

    @property
    def stdin(self) -> Stdin:
        """The program's input."""
        return Stdin(self._core)

    def output(self, cursor: int = 0, fd: int = 1, max_bytes: int = RING) -> tuple[bytes, int]:
        """Return what was written from `cursor` on, as far as it is kept, and the cursor for the next time."""
        return self._core.output(cursor, fd, max_bytes)


class Stdin:
    """The input of a background program, with the methods of a file."""

    def __init__(self, core: AsyncProcess) -> None:
        """Refer to the program's pipe; nothing is opened."""
        self._core = core

    write = blocking("_core", AsyncProcess.write)
    close = blocking("_core", AsyncProcess.close_stdin)

    def flush(self) -> None:
        """Do nothing: every write has reached the pipe when it returns."""


class AsyncStdin:
    """The input of a background program, for asyncio."""

    def __init__(self, core: AsyncProcess) -> None:
        """Refer to the program's pipe; nothing is opened."""
        self._core = core

    write = awaitable("_core", AsyncProcess.write)
    close = awaitable("_core", AsyncProcess.close_stdin)
