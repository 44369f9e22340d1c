"""How a call waits: one coroutine core, two ways to drive it.

The core never blocks and never suspends except through a `Waiter`. The sync face drives the coroutine with `drive`
and a waiter that blocks in C; the async face awaits the same coroutine with a waiter of the running loop.
"""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ._lanes import PENDING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from ._lanes import Lane

T = TypeVar("T")

MAX_SLICE_MS = 500
"""A wait is cut into slices of this many milliseconds, between which the worker's health is looked at."""


class Waiter(Protocol):
    """Everything the core may wait for."""

    @property
    def blocking(self) -> bool:
        """Whether waiting blocks the thread, so that a call may wait in C at once."""

    async def next(self, lane: Lane, timeout: float | None) -> int:
        """Wait until something happened on the lane, or `PENDING` after `timeout` seconds."""

    async def readable(self, fd: int, timeout: float | None) -> bool:
        """Wait until `fd` is readable; False after `timeout` seconds."""

    async def writable(self, fd: int, timeout: float | None) -> bool:
        """Wait until `fd` takes more; False after `timeout` seconds."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run something that blocks for milliseconds."""

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds`."""

    def lock(self) -> Lock:
        """Return a new lock that is held by one caller at a time."""


class Lock(Protocol):
    """A lock that is entered with `async with`."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *exc: Any) -> Any: ...  # noqa: PYI036 — asyncio.Lock fits too


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose waits all block, so that it never suspends, and return its value."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    msg = "BUG: a synchronous call tried to suspend"
    raise RuntimeError(msg)


class _ThreadLock:
    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()


def _poll(fd: int, events: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(None if timeout is None else max(0.0, timeout * 1000)))


class SyncWaiter:
    """Blocks the calling thread, in C and without the GIL."""

    __slots__ = ()
    blocking = True

    async def next(self, lane: Lane, timeout: float | None) -> int:
        return lane.wait(
            MAX_SLICE_MS if timeout is None else min(MAX_SLICE_MS, max(0, int(timeout * 1000 + 0.999)))
        )

    async def readable(self, fd: int, timeout: float | None) -> bool:
        return _poll(fd, select.POLLIN, timeout)

    async def writable(self, fd: int, timeout: float | None) -> bool:
        return _poll(fd, select.POLLOUT, timeout)

    async def run(self, function: Callable[[], T]) -> T:
        return function()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 — this coroutine never suspends

    def lock(self) -> Lock:
        return _ThreadLock()


class AsyncWaiter:
    """Suspends the running task; descriptors are watched by the loop, nothing runs in a thread but starts."""

    __slots__ = ("_loop",)
    blocking = False

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop this object belongs to: the one of its first use."""
        import asyncio

        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            msg = "this object belongs to another event loop: it is bound to the loop of its first await"
            raise RuntimeError(msg)
        return running

    async def next(self, lane: Lane, timeout: float | None) -> int:
        self.loop()
        rc = lane.step()
        if rc != PENDING:
            return rc
        slice_s = MAX_SLICE_MS / 1000
        await self.readable(lane.pollfd(), slice_s if timeout is None else min(slice_s, timeout))
        return lane.step()

    async def readable(self, fd: int, timeout: float | None) -> bool:
        loop = self.loop()
        return await self._watch(fd, timeout, loop.add_reader, loop.remove_reader)

    async def writable(self, fd: int, timeout: float | None) -> bool:
        loop = self.loop()
        return await self._watch(fd, timeout, loop.add_writer, loop.remove_writer)

    async def _watch(self, fd: int, timeout: float | None, add: Any, remove: Any) -> bool:
        loop = self.loop()
        future: asyncio.Future[bool] = loop.create_future()

        def ready(value: bool) -> None:
            if not future.done():
                future.set_result(value)

        # The descriptor is taken off the loop before anybody may close it: a closed and re-used number would never
        # wake the loop again.
        add(fd, ready, True)
        timer = loop.call_later(max(0.0, timeout), ready, False) if timeout is not None else None
        try:
            return await future
        finally:
            remove(fd)
            if timer is not None:
                timer.cancel()

    async def run(self, function: Callable[[], T]) -> T:
        return await self.loop().run_in_executor(None, function)

    async def sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    def lock(self) -> Lock:
        import asyncio

        return asyncio.Lock()
