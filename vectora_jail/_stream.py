"""A command whose output is delivered while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import wire
from ._core import STREAM, _now, overtime, result_of
from ._lanes import CAPTURE_ERR, CAPTURE_OUT, DATA, MERGE, ChannelClosed
from ._waiting import drive
from .errors import WorkerDiedError
from .results import Chunk, ExecResult

if TYPE_CHECKING:
    from ._core import Commands, Prepared
    from ._lanes import Lane
    from .worker import Worker


class StreamCore:
    """The state of one streamed call; started by the first request for a chunk."""

    def __init__(self, commands: Commands, command: Any, options: dict[str, Any]) -> None:
        self._commands = commands
        self._command = command
        self._merge = bool(options.pop("merge_stderr", False))
        self._options = options
        self._worker: Worker | None = None
        self._lane: Lane | None = None
        self._prepared: Prepared | None = None
        self._deadline: float | None = None
        self._pending: list[Chunk] = []
        self.result: ExecResult | None = None

    async def _start(self) -> None:
        commands = self._commands
        self._worker = worker = await commands.life.ready()
        self._prepared = prepared = commands.prepare(worker, "exec", self._command, **self._options)
        worker.enter(prepared.message["id"])
        self._lane = worker.borrow()
        flags = STREAM | CAPTURE_OUT | (MERGE if self._merge else CAPTURE_ERR)
        commands.send(worker, self._lane, prepared, flags, 2)
        self._deadline = None if prepared.seconds is None else _now() + prepared.seconds + 2.0

    async def next_chunk(self) -> Chunk | None:
        """Return the next piece of output, None at the end of the command."""
        if self._pending:
            return self._pending.pop(0)
        if self.result is not None:
            return None
        try:
            if self._lane is None:
                await self._start()
            worker, lane, prepared = self._worker, self._lane, self._prepared
            if worker is None or lane is None or prepared is None:
                msg = "the stream is closed"
                raise ValueError(msg)
            rc = await self._commands.wait(worker, lane, prepared, self._deadline)
            self._pending = [Chunk(which + 1, data) for which in (0, 1) if (data := lane.take_output(which))]
            if rc != DATA:
                self._finish(worker, lane, prepared)
        except (ChannelClosed, wire.ProtocolError) as exc:
            self._release(keep=False)
            assert self._worker is not None  # noqa: S101 — a channel error comes after the start
            raise self._worker.died(str(exc)) from None
        except WorkerDiedError:
            self._release(keep=False)
            raise
        except BaseException:
            await self.close()
            raise
        return self._pending.pop(0) if self._pending else None

    def _finish(self, worker: Worker, lane: Lane, prepared: Prepared) -> None:
        reply = wire.decode(lane.reply())
        wire.expect_id(reply, prepared.message["id"])
        self.result = result_of(reply, prepared.argv, prepared.cwd, worker.running)
        self.result.violations += overtime(self.result, prepared)
        if self.result.stderr:
            self._pending.append(Chunk(2, self.result.stderr))
        self._release(keep=True)

    def _release(self, *, keep: bool) -> None:
        worker, lane, prepared = self._worker, self._lane, self._prepared
        self._lane = None
        if worker is None or lane is None or prepared is None:
            return
        left = worker.settle(prepared.message["id"])
        if left and self.result is not None:
            self.result.violations += left
        self._commands.life.touch()
        if keep:
            worker.give_back(lane)
        else:
            lane.close()

    async def close(self) -> None:
        """Kill the command when it still runs."""
        worker, lane, prepared = self._worker, self._lane, self._prepared
        if worker is None or lane is None or prepared is None:
            return
        if lane.busy:
            await worker.cancel(self._commands.waiter, lane, prepared.message["id"])
        self._release(keep=lane.fd >= 0)


class Stream:
    """Iterator over the output of a running command; `.result` is there at its end."""

    def __init__(self, core: StreamCore) -> None:
        """Wrap a call that starts with the first chunk asked for."""
        self._core = core

    @property
    def result(self) -> ExecResult | None:
        """How the command ended; None while it runs. Its output is in the chunks only."""
        return self._core.result

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        chunk = drive(self._core.next_chunk())
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Kill the command when it still runs."""
        drive(self._core.close())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncStream:
    """The same for asyncio."""

    def __init__(self, core: StreamCore) -> None:
        """Wrap a call that starts with the first chunk asked for."""
        self._core = core

    @property
    def result(self) -> ExecResult | None:
        """How the command ended; None while it runs. Its output is in the chunks only."""
        return self._core.result

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._core.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Kill the command when it still runs."""
        await self._core.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._core.close()
