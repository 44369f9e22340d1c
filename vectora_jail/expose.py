"""Servers of a jail on a port of this host: `jail.expose(8000)`.

The worker connects inside and passes the socket out; bytes are copied by the shared network thread. A port on the
host's loopback is open to every local user, so it lives no longer than the jail and can be closed earlier.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from ._waiting import SyncWaiter, drive
from .egress_io import Stream
from .egress_lane import network_loop
from .egress_pump import PROCESS_SLOTS, pump
from .errors import WorkerDiedError

if TYPE_CHECKING:
    from ._life import JailLife
    from ._waiting import Waiter
    from .worker import Worker

__all__ = ["Exposed", "connect", "expose"]


async def connect(worker: Worker, waiter: Waiter, port: Any) -> socket.socket:
    """Return a socket that is connected to a server on `port` of the jail's loopback.

    Raises:
        ConnectionRefusedError: nothing listens there. TimeoutError: it does not accept.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        msg = f"port must be from 1 to 65535, not {port!r}"
        raise ValueError(msg)
    reply, fd = await worker.request(waiter, {"op": "connect", "port": port}, timeout=10.0)
    if "error" in reply:
        if fd >= 0:
            os.close(fd)
        number = reply.get("errno")
        raise OSError(number if type(number) is int else 5, f"port {port} of the jail: {reply['error']}")
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise worker.died("it sent something that is no socket", kill=True) from None
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise worker.died("it sent something that is no TCP connection", kill=True)
    sock.setblocking(False)
    return sock


class Exposed:
    """A port of this host's loopback that leads to a server in a jail."""

    def __init__(self, worker: Worker, port: int) -> None:
        self._worker = worker
        self._inner = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(), network_loop())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._worker.alive:
                try:
                    peer, _ = await asyncio.wait_for(loop.sock_accept(self._server), 1.0)
                except (TimeoutError, asyncio.TimeoutError):
                    continue
                task = loop.create_task(self._serve(peer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()

    async def _serve(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        inner: socket.socket | None = None
        try:
            inner = await loop.run_in_executor(
                None, lambda: drive(connect(self._worker, SyncWaiter(), self._inner))
            )
            await pump(Stream(peer, loop), Stream(inner, loop), PROCESS_SLOTS)
        except (OSError, WorkerDiedError):
            return  # the caller sees its connection end
        finally:
            peer.close()
            if inner is not None:
                inner.close()

    def close(self) -> None:
        """Close the port and every connection through it."""
        self._accepting.cancel()


async def expose(life: JailLife, waiter: Waiter, port: int, *, listen: bool = True) -> int | socket.socket:
    """Return a port of 127.0.0.1 that leads to `port` inside, or with `listen=False` one connected socket."""
    worker = await life.ready()
    first = await connect(worker, waiter, port)
    if not listen:
        return first
    first.close()
    exposed = Exposed(worker, port)
    worker.on_close.append(exposed.close)
    return exposed.port
