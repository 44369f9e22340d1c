"""One live worker: its lanes, its calls, its end.

A call borrows a lane, sends, waits for the reply on that lane and gives it back; concurrent calls share nothing but
the pool. The main lane carries what needs no reply of its own (`lane`, `cancel`).
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from . import wire
from ._lanes import DONE, PENDING, ChannelClosed, DescriptorQuota, Lane, hung_up
from ._native import sealed_memfd
from .errors import WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._waiting import Waiter
    from .backends import Running
    from .results import Violation

IDLE_LANES: Final = 16
"""Lanes that are kept for later calls."""
GRACE_S: Final = 2.0
"""How long after its own timeout a call's answer is waited for (the worker keeps the time itself)."""
CANCEL_S: Final = 1.0
CLAIM_S: Final = 5.0

_live: weakref.WeakSet[Worker] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child of a fork the jails belong to the parent: close, and never touch them again."""
    for worker in list(_live):
        worker.forget()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)


class Worker:
    """A running jail and the lanes to it. Thread-safe; never repeats a call by itself."""

    def __init__(self, running: Running) -> None:
        """Take over a worker that has answered hello."""
        self.running = running
        self.calls: set[int] = set()
        """Numbers of the calls, processes and terminals under way."""
        self.retired = False
        self.retiring = False
        """Somebody is about to end this idle worker: `JailLife.stop_idle`."""
        self._claims: dict[int, float] = {}
        self.on_close: list[Callable[[], object]] = []
        self._ids = itertools.count(2)
        self._main = socket.socket(fileno=running.channel)
        self._main_lock = threading.Lock()
        self._audit = getattr(running, "audit", None)  # only where the host sees the tree
        self._idle: deque[Lane] = deque()
        self._died = ""
        self._closed = False
        self._foreign = False
        self._close_lock = threading.Lock()
        _live.add(self)

    # ---- who uses it ----

    def claim(self) -> bool:
        """Keep an idle worker from being ended before the call of this thread is in `calls`; False: it is too late.

        A claim is set first and `retiring` read then, `stop_idle` does it the other way round: one sees the other.
        """
        self._claims[threading.get_ident()] = time.monotonic()
        return not self.retiring and self.alive

    def unclaim(self) -> None:
        """Give up what this thread has claimed."""
        self._claims.pop(threading.get_ident(), None)

    def enter(self, number: int) -> None:
        """Note the beginning of a call."""
        self.calls.add(number)
        self.unclaim()

    @property
    def busy(self) -> bool:
        """Whether a call is under way or about to begin; a claim whose call was refused is forgotten after a while."""
        now = time.monotonic()
        return bool(self.calls) or any(now - at < CLAIM_S for at in list(self._claims.values()))

    # ---- lanes ----

    def next_id(self) -> int:
        """Return a request number that no other request of this worker has."""
        return next(self._ids)

    def give_back(self, lane: Lane) -> None:
        """Return a lane on which nothing is under way."""
        if self._closed or lane.busy or len(self._idle) >= IDLE_LANES:
            lane.close()
        else:
            self._idle.append(lane)
            if not self.alive:  # closed between the look and the append
                self._drop_idle()

    def _new_lane(self) -> Lane:
        if self._closed:
            raise ChannelClosed(self._died or "the jail is closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._post_main({"op": "lane", "id": 0}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Lane(ours.detach())

    def _post_main(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send on the main lane; the replies there interest nobody and are thrown away before the next message."""
        data = wire.encode(message)
        with self._main_lock:
            try:
                self._drain_main()
                # not socket.send_fds: it ignores its flags argument
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
                self._main.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError as exc:
                if exc.errno == errno.ETOOMANYREFS:
                    raise DescriptorQuota from None
                reason = self._died or (
                    "the jail is closed" if self._closed else "the worker closed its channel"
                )
                raise ChannelClosed(reason) from None

    def _drain_main(self) -> None:
        while True:
            try:
                # without room for control data the kernel closes descriptors that nobody asked for
                data = self._main.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise ChannelClosed("the worker closed its channel")

    # ---- requests ----

    def packed(self, message: dict[str, Any]) -> tuple[bytes, int]:
        """Return a request's bytes, and the memfd that carries it when it is too large for one message (else -1)."""
        data = wire.encode(message)
        if len(data) <= wire.MESSAGE_MAX:
            return data, -1
        if len(data) > 16 * 1024 * 1024:
            raise OSError(errno.E2BIG, "the request is larger than 16 MiB")
        body = sealed_memfd("vectora-jail-request", data)
        return wire.encode({"op": message["op"], "id": message["id"], "body": True}), body

    async def request(
        self,
        waiter: Waiter,
        message: dict[str, Any],
        *,
        fds: Sequence[int] = (),
        timeout: float | None = None,
        lane: Lane | None = None,
    ) -> tuple[dict[str, Any], int]:
        """Send a request that starts no command; return its reply and the descriptor that came with it, or -1.

        Raises:
            WorkerDiedError: the worker ended, broke the protocol, or did not answer within `timeout` seconds + 2.
        """
        number = message["id"] = next(self._ids)
        own = lane is None
        data, body = self.packed(message)
        try:
            if body >= 0:
                fds = [*fds, body]
            if lane is None:
                lane = self._lane()
            self.enter(number)
            try:
                if waiter.blocking:
                    rc = lane.request(data, fds, 0 if timeout == 0 else 500)
                else:
                    lane.post(data, fds)
                    rc = PENDING
                if rc != DONE:
                    await self.finish(waiter, lane, timeout)
                reply = wire.decode(lane.reply())
                wire.expect_id(reply, number)
                return reply, lane.take_fd()
            except BaseException as exc:
                # An answer may still come: a lane that is out of step is never used again.
                lane.close()
                if isinstance(exc, (ChannelClosed, wire.ProtocolError)):
                    raise self.died(str(exc)) from None
                if isinstance(exc, DescriptorQuota):
                    raise self.quota() from None
                raise
            finally:
                self.calls.discard(number)
        finally:
            if body >= 0:
                os.close(body)
            if own and lane is not None and lane.fd >= 0:
                self.give_back(lane)

    async def finish(self, waiter: Waiter, lane: Lane, timeout: float | None) -> None:
        """Wait for a reply, looking at the worker's health now and then."""
        limit = None if timeout is None else time.monotonic() + timeout + GRACE_S
        unhealthy = 0
        while await waiter.next(lane, None if limit is None else limit - time.monotonic()) != DONE:
            if limit is not None and time.monotonic() >= limit:
                raise self.died("it did not answer in time", kill=True)
            health = self.running.health()
            unhealthy = unhealthy + 1 if health else 0
            if unhealthy > 1 or (health and health != "stopped by a signal"):
                raise self.died(health, kill=True)

    def _lane(self) -> Lane:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return self._new_lane()
        except ChannelClosed as exc:
            raise self.died(exc.reason, outcome="not_started") from None
        except DescriptorQuota:
            raise self.quota() from None

    def borrow(self) -> Lane:
        """Return a lane for an exec-like request; WorkerDiedError when the worker has gone."""
        return self._lane()

    def post(self, message: dict[str, Any]) -> None:
        """Send a message whose reply nobody waits for; silent when the worker has gone."""
        try:
            self._post_main(message)
        except (ChannelClosed, DescriptorQuota, OSError):
            return

    async def cancel(self, waiter: Waiter, lane: Lane, number: int) -> None:
        """Kill the tree of request `number` and wait at most a second for that; the lane stays usable or is closed."""
        self.post({"op": "cancel", "id": number})
        deadline = time.monotonic() + CANCEL_S
        try:
            while time.monotonic() < deadline:
                rc = await waiter.next(lane, deadline - time.monotonic())
                if rc == DONE:
                    fd = lane.take_fd()
                    if fd >= 0:
                        os.close(fd)
                    return
                for which in (0, 1):
                    lane.take_output(which)
        except ChannelClosed:
            pass
        lane.close()

    def settle(self, number: int) -> tuple[Violation, ...]:
        """Note the end of a call and return what it left in the tree: nothing of it waits for the host's git."""
        self.calls.discard(number)
        audit = self._audit
        return audit(idle=not self.calls) if audit is not None else ()

    # ---- life ----

    @property
    def alive(self) -> bool:
        """Whether calls can be sent: nobody has closed it and its process runs."""
        return not (self._closed or self._foreign or self._died)

    def gone(self) -> bool:
        """Whether the process has ended since the last call; costs one poll(2)."""
        if not self.alive:
            return True
        if not hung_up(self.running.channel):
            return False
        self._died = self.running.health() or "it closed its channel"
        self.close()
        return True

    def check(self) -> str:
        """Return why the process does not run, `""` while it does."""
        return self._died or ("closed" if self._closed else self.running.health())

    def quota(self) -> WorkerDiedError:
        """Return the error for descriptors that the kernel refuses to pass."""
        return WorkerDiedError(
            "too many descriptors of this user are in flight between processes",
            code="fd_quota",
            outcome="not_started",
            hint="raise the soft limit of open files (RLIMIT_NOFILE) of the backend",
        )

    def died(self, reason: str, *, kill: bool = False, outcome: str = "unknown") -> WorkerDiedError:
        """Record that this worker must not be used any more and return the error for the call that noticed."""
        if self._foreign:
            return WorkerDiedError(
                "this jail belongs to the process that forked",
                code="forked",
                outcome="not_started",
                hint="make a JailManager of your own in the child",
            )
        if self._closed and not self._died:
            return WorkerDiedError("the jail was closed", code="closed", outcome=outcome, cause="closed")
        health = ""
        if not kill:
            # The socket closes a moment before the process can be waited for.
            deadline = time.monotonic() + 0.5
            while not (health := self.running.health()) and time.monotonic() < deadline:
                time.sleep(0.002)
        cause = health or reason
        self._died = self._died or cause
        self.close()
        return WorkerDiedError(f"the jail's worker died: {cause}", outcome=outcome, cause=cause)

    def close(self) -> None:
        """End the jail and everything in it. May be called twice, from any thread."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._drop_idle()
        for callback in self.on_close:
            callback()
        self.running.close()
        self._main.close()
        _live.discard(self)

    def _drop_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def forget(self) -> None:
        """Close the descriptors only (in the child of a fork)."""
        self._foreign = self._closed = True
        for lane in self._idle:
            lane.forget()
        self._idle.clear()
        self._main.close()
        self.running.forget()
