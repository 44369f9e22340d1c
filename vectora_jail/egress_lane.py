"""The lane on which a worker hands its accepted connections over, and the thread on which they are served.

All jails of a process share one network thread with one event loop, so that neither face of the library
lends its caller's loop to a jail. The worker accepts only while it holds credit: a few connections ahead,
never more than the jail's window, and beyond a small base only while the process has descriptors to spare.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from vectora_jail import wire
from vectora_jail.egress import Attempt, Egress, EgressOptions
from vectora_jail.egress_dial import Resolver, system_resolver
from vectora_jail.egress_grants import OnRequest, bridged
from vectora_jail.netplan import EgressPlan, Listen
from vectora_jail.netrules import NetRules, Rule, parse_rule

#: Credit given ahead. The lane's socket buffer holds that many events even when this thread is late.
AHEAD = 32
#: Connections that every jail may have, however many descriptors the others use.
BASE = 8

_ANSWER_S = 5.0
_MESSAGES_A_TURN = 32
_REQUEST = 1  # the lane carries one request, repeated for further listeners

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def network_loop() -> asyncio.AbstractEventLoop:
    """Give the event loop of the network thread; it starts with the first jail that needs it."""
    global _loop, _thread  # noqa: PLW0603 - one thread a process
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="vectora-jail-egress", daemon=True)
            _thread.start()
            atexit.register(_end_thread, _loop, _thread)
        return _loop


def _end_thread(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if loop is not _loop:
        return  # the loop of a parent process
    loop.call_soon_threadsafe(loop.stop)
    thread.join(1)
    if not thread.is_alive():
        loop.close()


def _after_fork() -> None:
    """In the child of a fork there is no network thread: its jails are the parent's."""
    global _loop, _lock, _pool  # noqa: PLW0603
    _loop = _pool = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class CreditPool:
    """Connections beyond their base that all jails may have together; used on the network thread only."""

    def __init__(self, total: int) -> None:
        self.left = total
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, wanted: Callable[[], None]) -> bool:
        """Take one; when there is none, ``wanted`` is called once one comes back."""
        if self.left > 0:
            self.left -= 1
            return True
        if wanted not in self._waiting:
            self._waiting.append(wanted)
        return False

    def give(self) -> None:
        """Give one back, to the jail that waits longest."""
        self.left += 1
        while self._waiting and self.left > 0:
            self._waiting.popleft()()


def _pool_size() -> int:
    """A quarter of the descriptors that this process may open; a connection holds two."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(32, (soft if soft > 0 else 1 << 20) // 8)


_pool: CreditPool | None = None


class EgressDoor:
    """The open doors of one jail. Made by `open`; every public method may be called from any thread."""

    def __init__(self, lane: socket.socket, egress: Egress, on_broken: Callable[[str], None] | None) -> None:
        self.egress = egress
        egress.on_closed = self._closed_one
        self._process = os.getpid()
        self._lane = lane
        self._on_broken = on_broken
        self._ahead = 0
        self._live = 0
        self._answers: deque[asyncio.Future[list[int]]] = deque()
        self._listening: set[Listen] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    @classmethod
    def open(
        cls,
        lane: socket.socket,
        rules: NetRules,
        plan: EgressPlan,
        *,
        options: EgressOptions | None = None,
        jail_netns: tuple[int, int] | None = None,
        on_request: OnRequest | None = None,
        on_request_loop: asyncio.AbstractEventLoop | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_broken: Callable[[str], None] | None = None,
        resolver: Resolver = system_resolver,
    ) -> EgressDoor:
        """Take over a lane, have the worker listen on the plan's addresses, and serve from now on.

        ``on_request`` runs on ``on_request_loop``, without one on a thread of its own; ``on_attempt`` and
        ``on_broken`` (a worker that broke the protocol: its jail should end) run on the network thread.
        Raises OSError with the first address that could not be bound; the lane is closed then.
        """
        egress = Egress(
            rules,
            plan=plan,
            options=options,
            jail_netns=jail_netns,
            on_request=bridged(on_request, on_request_loop) if on_request is not None else None,
            on_attempt=on_attempt,
            resolver=resolver,
        )
        door = cls(lane, egress, on_broken)
        lane.setblocking(False)
        try:
            door._call(door._start(plan.listen))
        except BaseException:
            door.close()
            raise
        return door

    @property
    def sequence(self) -> int:
        """Give the number of the last attempt."""
        return self.egress.sequence

    def attempts_since(self, sequence: int = 0) -> list[Attempt]:
        """List the attempts after that number."""
        return self.egress.attempts_since(sequence)

    def allow(self, rule: str, ttl: float | None = None) -> Rule:
        """Grant a rule for ``ttl`` seconds; a `localhost:port` also gets its listeners inside.

        Raises RuleError, and OSError(EADDRINUSE) when a program of the jail has that port.
        """
        granted = parse_rule(rule)
        if granted.kind == "localhost" and self.egress.plan.proxy_port in granted.ports:
            raise OSError(errno.EADDRINUSE, "the jail's proxy has this port", str(granted))
        self.egress.allow(rule, ttl)
        if granted.kind == "localhost":
            wanted = [(address, port) for port in granted.ports for address in ("127.0.0.1", "::1")]
            try:
                self._call(self._listen([where for where in wanted if where not in self._listening]))
            except BaseException:
                self.egress.revoke(rule)
                raise
            for where in wanted:
                self.egress.doors[where] = ("localhost", where[1])
        return granted

    def revoke(self, rule: str) -> bool:
        """Take a grant back; whether there was one."""
        return self.egress.revoke(rule)

    def close(self) -> None:
        """End every connection and give the lane up; returns when that is done.

        In the child of a fork only its copy of the lane is closed; on the network thread (from `on_broken`) the
        connections end after the callback.
        """
        if os.getpid() != self._process:
            self._lane.close()
        elif threading.current_thread() is _thread:
            self._keep(self._stop())
        else:
            self._call(self._stop())

    @staticmethod
    def _call(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, network_loop()).result(_ANSWER_S + 1)

    # ---- on the network thread ----

    async def _start(self, listen: Sequence[Listen]) -> None:
        asyncio.get_running_loop().add_reader(self._lane.fileno(), self._readable)
        await self._listen(listen)
        self._top_up()

    async def _listen(self, where: Sequence[Listen]) -> None:
        if not where:
            return
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._send({"op": "egress", "id": _REQUEST, "listen": [list(pair) for pair in where], "credit": 0})
        try:
            bound = await asyncio.wait_for(answer, _ANSWER_S)
        except asyncio.TimeoutError:
            self._broken("the worker does not answer")
            raise OSError(errno.ETIMEDOUT, "the worker does not open the jail's network doors") from None
        if len(bound) != len(where):
            self._broken("the worker answered for other listeners")
            raise OSError(errno.EPROTO, "the worker answered for other listeners")
        self._listening.update(pair for pair, number in zip(where, bound, strict=True) if number == 0)
        for (address, port), number in zip(where, bound, strict=True):
            if number:
                raise OSError(number, os.strerror(number), f"{address}:{port} inside the jail")

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._lane.send(wire.encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            self._broken(f"the worker's lane failed: {error.strerror}", quiet=True)

    def _readable(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            if self._ended:
                return
            try:
                data, descriptors, truncated = _receive(self._lane)
            except BlockingIOError:
                return
            except OSError:
                self._broken("the worker's lane failed", quiet=True)
                return
            try:
                self._message(data, descriptors, truncated)
            except (wire.ProtocolError, OSError) as error:
                self._broken(str(error))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _message(self, data: bytes, descriptors: list[int], truncated: bool) -> None:
        """Take one message; descriptors that are kept leave the list."""
        if truncated:
            raise wire.ProtocolError("a message or its descriptors were cut off")
        if not data:
            self._broken("the worker ended", quiet=True)
            return
        message = wire.decode(data)
        if message.get("event") == "accepted":
            if len(descriptors) != 1 or self._ahead <= 0:
                raise wire.ProtocolError("a connection without its descriptor, or beyond the credit")
            sock = socket.socket(fileno=descriptors[0])  # raises for what is no socket
            descriptors.clear()
            self._ahead -= 1
            self._live += 1
            self._keep(self.egress.serve(sock))
            self._top_up()
            return
        bound = message.get("bound")
        if descriptors or not self._answers:
            raise wire.ProtocolError("the worker sent what nobody asked for")
        answer: list[int] | OSError
        if "error" in message:
            number = wire.integer(message, "errno", 0, 4095) or errno.EPROTO
            answer = OSError(number, wire.text(message, "error"))
        elif type(bound) is list and all(type(item) is int and 0 <= item < 4096 for item in bound):
            answer = bound
        else:
            raise wire.ProtocolError("the worker sent listeners that are no list of numbers")
        waiting = self._answers.popleft()
        if waiting.done():
            return
        if isinstance(answer, OSError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _top_up(self) -> None:
        """Give the worker credit until it is far enough ahead, or as far as the window and the pool go."""
        new = 0
        while not self._ended and self._ahead < AHEAD:
            held = self._live + self._ahead
            if held >= self.egress.options.window:
                break
            if held >= BASE and not _shared_pool().take(self._top_up):
                break
            self._ahead += 1
            new += 1
        if new:
            self._send({"op": "credit", "id": _REQUEST, "n": new})

    def _closed_one(self) -> None:
        if self._live + self._ahead > BASE:
            _shared_pool().give()
        self._live -= 1
        self._top_up()

    def _broken(self, reason: str, *, quiet: bool = False) -> None:
        if self._ended:
            return
        self._end()
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(OSError(errno.EPIPE, reason))
        self._answers.clear()
        self._keep(self.egress.close())
        if self._on_broken is not None and not quiet:
            self._on_broken(reason)

    def _end(self) -> None:
        self._ended = True
        asyncio.get_running_loop().remove_reader(self._lane.fileno())
        self._lane.close()
        while self._ahead > 0:
            if self._live + self._ahead > BASE:
                _shared_pool().give()
            self._ahead -= 1

    async def _stop(self) -> None:
        if not self._ended:
            self._end()
        await self.egress.close()


def _shared_pool() -> CreditPool:
    global _pool  # noqa: PLW0603 - made when the limit is known, by the one thread that uses it
    if _pool is None:
        _pool = CreditPool(_pool_size())
    return _pool


def _receive(lane: socket.socket) -> tuple[bytes, list[int], bool]:
    """Receive one message with its descriptors; whether the kernel cut either off (recvmsg(2))."""
    descriptors = array("i")
    data, ancillary, flags, _ = lane.recvmsg(
        16384, socket.CMSG_SPACE(8 * descriptors.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, descriptors.tolist(), bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))
