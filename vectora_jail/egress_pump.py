"""Moving bytes between a decided pair of sockets, each direction to its own end of file.

A direction begins on the loop with receive and send. One that carries megabytes moves to a thread of its
own which splices them through a pipe (`splice(2)`), and comes back when it goes quiet. The thread is not
shared: a jail that clears O_NONBLOCK on its duplicate can make splice block, and then blocks nothing but
its own transfer.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Awaitable, Callable

from vectora_jail.egress_io import CHUNK, Stream, in_thread, wait_ready

#: Bytes in one direction after which it is worth a thread.
SPLICE_AFTER = 4 << 20
#: How long the second direction of a half-closed pair may stay silent, in seconds.
HALF_CLOSED_IDLE_S = 600.0

_PIPE_SIZE = 1 << 20
_QUIET_MS = 1000
# A direction stays this many chunks on the loop before others get their turn.
_TURN = 2


class SpliceSlots:
    """How many directions may hold a thread at once; what finds no slot stays on the loop, only slower."""

    def __init__(self, total: int, parent: SpliceSlots | None = None) -> None:
        self._left = total
        self._parent = parent
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one slot if there is one."""
        with self._lock:
            if self._left <= 0 or (self._parent is not None and not self._parent.take()):
                return False
            self._left -= 1
            return True

    def give(self) -> None:
        """Give a slot back."""
        with self._lock:
            self._left += 1
        if self._parent is not None:
            self._parent.give()


#: Shared by all jails of this process; each jail has a small number of its own above it.
PROCESS_SLOTS = SpliceSlots(8 if hasattr(os, "splice") else 0)


async def pump(
    left: Stream, right: Stream, slots: SpliceSlots, gate: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Copy both ways until both ends have ended; an error in one direction ends both and is raised.

    Bytes that either stream has buffered go first. ``gate`` runs before the first byte from left to right,
    while the other direction already flows (a server may speak first); what it raises ends both.
    """
    scratch = bytearray(CHUNK)

    async def gated() -> None:
        if gate is not None:
            await gate()
        await _copy(left, right, slots, scratch)

    there = asyncio.ensure_future(gated())
    back = asyncio.ensure_future(_copy(right, left, slots, scratch))
    try:
        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        while not (there.done() and back.done()):
            ended = there if there.done() else back
            if ended.exception() is not None:
                break
            before = left.sent, right.sent, left.received, right.received
            await asyncio.wait((there, back), timeout=HALF_CLOSED_IDLE_S, return_when=asyncio.ALL_COMPLETED)
            if before == (left.sent, right.sent, left.received, right.received):
                break
    finally:
        for task in (there, back):
            if not task.done():
                # Wakes a thread that sits in splice; the task itself waits for that thread.
                for stream in (left, right):
                    _shutdown(stream.sock)
                task.cancel()
        results = await asyncio.gather(there, back, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


async def _copy(source: Stream, sink: Stream, slots: SpliceSlots, scratch: bytearray) -> None:
    loop = source.loop
    while source.buffer:
        await sink.write(await source.read())
    moved = turn = 0
    view = memoryview(scratch)
    while True:
        try:
            count = source.sock.recv_into(scratch, CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            turn = 0
            await wait_ready(loop, source.sock, write=False)
            continue
        if count == 0:
            break
        source.received += count
        # The scratch buffer is shared by all directions: nothing may wait between receive and this send.
        taken = sink.send_now(view[:count])
        if taken < count:
            await sink.write(bytes(view[taken:count]))
            turn = 0
        moved += count
        turn += 1
        if moved >= SPLICE_AFTER and slots.take():
            moved = 0
            if await _splice(source, sink, slots):
                break
        elif turn >= _TURN:
            turn = 0
            await asyncio.sleep(0)
    sink.shutdown_write()


async def _splice(source: Stream, sink: Stream, slots: SpliceSlots) -> bool:
    """Move one direction on a thread until it ends (True) or falls quiet (False)."""
    stop = threading.Event()
    counted = [0]
    work = asyncio.ensure_future(
        in_thread(_splice_blocking, source.sock.fileno(), sink.sock.fileno(), stop, counted)
    )
    try:
        return await asyncio.shield(work)
    finally:
        stop.set()
        if not work.done():
            # The descriptors must stay open until the thread has let go of their numbers.
            for stream in (source, sink):
                _shutdown(stream.sock)
            await asyncio.wait((work,))
            work.exception()
        source.received += counted[0]
        sink.sent += counted[0]
        slots.give()


def _splice_blocking(source: int, sink: int, stop: threading.Event, counted: list[int]) -> bool:
    # splice has no MSG_NOSIGNAL; a blocked signal of this thread ends with it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        size = _enlarge(write_end)
        flags = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
        readable, writable = select.poll(), select.poll()
        readable.register(source, select.POLLIN | select.POLLRDHUP)
        writable.register(sink, select.POLLOUT)
        while not stop.is_set():
            try:
                count = os.splice(source, write_end, size, flags=flags)
            except BlockingIOError:
                if not readable.poll(_QUIET_MS):
                    return False
                continue
            if count == 0:
                return True
            while count:
                try:
                    gone = os.splice(read_end, sink, count, flags=flags)
                except BlockingIOError:
                    writable.poll(_QUIET_MS)
                    if stop.is_set():
                        return True
                    continue
                count -= gone
                counted[0] += gone
        return True
    finally:
        os.close(read_end)
        os.close(write_end)


def _enlarge(pipe: int) -> int:
    import fcntl

    try:
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    except OSError:
        return 64 * 1024  # the user's pipe pages are used up: the default size works
