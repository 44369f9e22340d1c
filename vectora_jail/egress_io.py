"""Reading and writing sockets that a jail may still share, without ever letting it block the loop.

A descriptor that came out of a jail is an open file description the jail can keep a duplicate of:
O_NONBLOCK, SO_LINGER and SO_RCVLOWAT are the jail's to change at any time. So every call here carries
MSG_DONTWAIT, waiting is left to the loop's poll, and a close that could linger happens on a thread of its
own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: Bytes taken from a socket at once.
CHUNK = 256 * 1024
# <linux/sockios.h>: bytes not yet acknowledged by the peer; descriptor of the socket's network namespace
# (4.9).
_SIOCOUTQ = 0x5411
_SIOCGSKNS = 0x894C
# How long a jail that does not read its last bytes keeps the descriptor here, in seconds.
_DRAIN_S = 30.0


class DescriptorError(OSError):
    """A received descriptor is not a plain connected TCP socket of the jail's network namespace."""


class EndOfStream(Exception):
    """The peer closed before the bytes that were waited for had arrived."""


class LimitExceeded(Exception):
    """The peer sent more than the bound before what was waited for."""


def check_descriptor(sock: socket.socket, jail_netns: tuple[int, int] | None) -> None:
    """Refuse whatever is not a connected TCP socket of the jail's network namespace; raises DescriptorError.

    ``jail_netns`` is (st_dev, st_ino) of the namespace; None skips that check, for channels where no
    descriptor of the jail's travels. Sources: socket(7), `SIOCGSKNS` in net/socket.c.
    """
    try:
        domain = sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        protocol = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        sock.getpeername()
    except OSError as error:
        raise DescriptorError(
            error.errno, f"the descriptor is no connected socket: {error.strerror}"
        ) from error
    if domain not in (socket.AF_INET, socket.AF_INET6):
        raise DescriptorError(0, f"the socket's family is {domain}, not inet")
    if kind != socket.SOCK_STREAM or protocol != socket.IPPROTO_TCP or listening:
        raise DescriptorError(0, "the socket is not a connected TCP stream")
    if jail_netns is not None and _netns_of(sock) != jail_netns:
        raise DescriptorError(0, "the socket belongs to another network namespace")


def _netns_of(sock: socket.socket) -> tuple[int, int]:
    import fcntl

    try:
        descriptor = fcntl.ioctl(sock.fileno(), _SIOCGSKNS)
    except OSError as error:  # EPERM: a namespace that we do not own, so not a jail of ours
        raise DescriptorError(error.errno, "the socket's network namespace cannot be seen") from error
    try:
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    finally:
        os.close(descriptor)


async def wait_ready(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, write: bool) -> None:
    """Wait until the loop's poll says that the socket is readable, or writable."""
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    descriptor = sock.fileno()
    if descriptor < 0:
        raise ConnectionResetError("the socket was closed")
    (loop.add_writer if write else loop.add_reader)(descriptor, wake)
    try:
        await future
    finally:
        (loop.remove_writer if write else loop.remove_reader)(descriptor)


class Stream:
    """A byte stream over a shared socket; what was read too far can be given back."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.loop = loop
        self.buffer = bytearray()
        self.received = 0
        self.sent = 0

    async def read(self, limit: int = CHUNK) -> bytes:
        """Take what is buffered, or wait for bytes; empty at end of file."""
        if self.buffer:
            data = bytes(self.buffer[:limit])
            del self.buffer[:limit]
            return data
        return await self._receive(limit)

    async def fill(self) -> None:
        """Wait for more bytes and keep them in the buffer; raises EndOfStream."""
        data = await self._receive(CHUNK)
        if not data:
            raise EndOfStream
        self.buffer += data

    async def _receive(self, limit: int) -> bytes:
        while True:
            try:
                data = self.sock.recv(limit, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await wait_ready(self.loop, self.sock, write=False)
                continue
            self.received += len(data)
            return data

    async def read_exactly(self, count: int) -> bytes:
        """Take exactly this many bytes; raises EndOfStream."""
        while len(self.buffer) < count:
            await self.fill()
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    async def read_until(self, mark: bytes, limit: int) -> bytes:
        """Take bytes up to and with the mark; raises EndOfStream, and LimitExceeded beyond ``limit``."""
        start = 0
        while True:
            found = self.buffer.find(mark, start)
            if found >= 0 and found + len(mark) <= limit:
                return await self.read_exactly(found + len(mark))
            if len(self.buffer) >= limit:
                raise LimitExceeded
            start = max(0, len(self.buffer) - len(mark) + 1)
            await self.fill()

    def send_now(self, data: memoryview | bytes) -> int:
        """Send what fits without waiting; the number of bytes taken."""
        try:
            count = self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        self.sent += count
        return count

    async def write(self, data: bytes | memoryview) -> None:
        """Send everything."""
        view = memoryview(data)
        while view:
            count = self.send_now(view)
            view = view[count:]
            if view and not count:
                await wait_ready(self.loop, self.sock, write=True)

    async def discard(self, seconds: float, limit: int = 1 << 20) -> None:
        """Drop what the peer still sends, so that closing does not reset the answer it has not read."""

        async def drop() -> None:
            left = limit
            while left > 0:
                data = await self.read()
                if not data:
                    return
                left -= len(data)

        try:
            await asyncio.wait_for(drop(), seconds)
        except (asyncio.TimeoutError, OSError):
            pass

    def shutdown_write(self) -> None:
        """Tell the peer that no more bytes follow; the other direction stays open."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # already reset: nobody is left to be told


async def close_shared(sock: socket.socket, *, abort: bool = False) -> None:
    """Close a socket of the jail's without waiting in the kernel, whatever SO_LINGER the jail sets meanwhile.

    With nothing left to acknowledge a close cannot linger. Otherwise the bytes get half a minute; what a
    jail does not read by then is reset, on a thread of its own because only there a hostile linger blocks
    nobody.
    """
    if sock.fileno() < 0:
        return
    try:
        if not abort:
            await _drain(sock)
    finally:
        if _unsent(sock):
            _set_linger(sock, 1)
            threading.Thread(target=sock.close, name="vectora-jail-close", daemon=True).start()
        else:
            _set_linger(sock, 0)
            sock.close()


async def _drain(sock: socket.socket) -> None:
    waited, step = 0.0, 0.001
    while waited < _DRAIN_S and _unsent(sock):
        await asyncio.sleep(step)
        waited += step
        step = min(0.25, step * 2)


def _set_linger(sock: socket.socket, on: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))
    except OSError:
        pass


def _unsent(sock: socket.socket) -> int:
    import fcntl

    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, b"\0\0\0\0"))[0])
    except OSError:
        return 0


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking call on a daemon thread of its own: the loop's shared pool is not the jail's to fill."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function(*args)
        except BaseException as caught:  # noqa: BLE001 - handed to the waiter
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop ended first: nobody waits any more

    threading.Thread(target=run, name="vectora-jail-net", daemon=True).start()
    return await future
