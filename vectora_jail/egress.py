"""The allowlist's engine on the host side: every connection that a jail's worker accepted is served here.

A connection arrives as a descriptor. Its own local address tells the door: the proxy (SOCKS5 or HTTP by the
first byte), or an address of 127.77/16 or localhost that stands for one target of the rules. Each target is
decided by name, asked for where a callback is given, resolved, judged again by address, connected, and then
only bytes move.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vectora_jail.egress_dial import Attempt, DialError, Door, Resolver, Route, dial, system_resolver
from vectora_jail.egress_grants import Asker, Grants, OnRequest, Request
from vectora_jail.egress_http import serve_http
from vectora_jail.egress_io import (
    DescriptorError,
    EndOfStream,
    LimitExceeded,
    Stream,
    check_descriptor,
    close_shared,
)
from vectora_jail.egress_pump import PROCESS_SLOTS, SpliceSlots, pump
from vectora_jail.egress_socks import (
    HOST_UNREACHABLE,
    NOT_ALLOWED,
    SUCCEEDED,
    SocksError,
    read_request,
    reply,
)
from vectora_jail.egress_tls import ALERT_UNRECOGNIZED_NAME, read_hello
from vectora_jail.netnames import Host, TargetError, normalise_host
from vectora_jail.netplan import EgressPlan, plan_names
from vectora_jail.netrules import Decision, NetRules, Rule, parse_rule

__all__ = ["Attempt", "Egress", "EgressOptions", "Request"]

#: Connections of one jail that may be open at once: the credit that the worker gets to begin with.
WINDOW = 512
# Attempts kept for those who ask later; the audit log has got each of them at once.
_KEPT = 4096
# Directions of one jail that may be spliced at once.
_SPLICES = 2


class _Refused(Exception):
    """The tunnel's own bytes break a rule (`strict_sni`)."""


@dataclass(frozen=True, slots=True)
class EgressOptions:
    """What a jail's policy and its manager decide about the engine; times in seconds."""

    strict_sni: bool = True
    window: int = WINDOW
    request_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    ask_timeout_s: float = 120.0


class Egress:
    """Serves the connections of one jail, on one event loop; what any thread may call says so."""

    def __init__(
        self,
        rules: NetRules,
        *,
        plan: EgressPlan | None = None,
        options: EgressOptions | None = None,
        jail_netns: tuple[int, int] | None = None,
        on_request: OnRequest | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_closed: Callable[[], None] | None = None,
        resolver: Resolver = system_resolver,
    ) -> None:
        self.rules = rules
        self.plan = plan if plan is not None else plan_names(rules)
        self.options = options if options is not None else EgressOptions()
        self.doors = dict(self.plan.doors)
        """Local address of a connection → the target that it stands for."""
        self.request_timeout_s = self.options.request_timeout_s
        self.grants = Grants(rules)
        self.slots = SpliceSlots(_SPLICES, PROCESS_SLOTS)
        self._jail_netns = jail_netns
        self._asker = Asker(on_request, self.options.ask_timeout_s) if on_request is not None else None
        self._on_attempt = on_attempt
        self.on_closed = on_closed
        self._resolver = resolver
        self._attempts: deque[Attempt] = deque(maxlen=_KEPT)
        self._sequence = 0
        self._live: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def live(self) -> int:
        """Tell how many connections are open."""
        return len(self._live)

    @property
    def sequence(self) -> int:
        """Give the number of the last attempt; a call remembers it to ask `attempts_since` at its end."""
        return self._sequence

    def attempts_since(self, sequence: int = 0) -> list[Attempt]:
        """List what was tried after that number, oldest first (at most the last 4,096). From any thread."""
        return [attempt for attempt in tuple(self._attempts) if attempt.sequence > sequence]

    def allow(self, rule: str, ttl: float | None = None) -> Rule:
        """Grant a rule at run time for ``ttl`` seconds asleep or not; raises RuleError. From any thread."""
        return self.grants.add(rule, ttl)

    def revoke(self, rule: str) -> bool:
        """Take a grant back; connections that it opened go on. From any thread."""
        return self.grants.remove(rule)

    async def serve(self, sock: socket.socket, local: tuple[str, int] | None = None) -> None:
        """Serve one accepted connection to its end and close it; never raises for what a jail does.

        ``local`` is the address it was accepted on, for channels that carry bytes instead of descriptors; a
        descriptor is asked itself.
        """
        task = asyncio.current_task()
        abort = True
        try:
            if self._closed or task is None or len(self._live) >= self.options.window:
                self._note("descriptor", None, "more connections than the worker has credit for")
                return
            self._live.add(task)
            await self._serve(sock, local)
            abort = False
        except DescriptorError as error:
            self._note("descriptor", None, error.strerror or str(error))
        except (EndOfStream, LimitExceeded, _Refused):
            abort = False  # an answer may be on its way
        except (OSError, asyncio.TimeoutError):
            pass  # the client's own affair; what was refused is in the records
        except Exception as error:  # noqa: BLE001 - logged; one connection ends
            self._note("descriptor", None, f"internal error: {type(error).__name__}")
            _log_exception("serving a jail's connection failed")
        finally:
            try:
                await close_shared(sock, abort=abort)
            finally:
                if task is not None:
                    self._live.discard(task)
                if self.on_closed is not None:
                    self.on_closed()

    async def close(self) -> None:
        """End every connection; nothing is served afterwards."""
        self._closed = True
        if self._asker is not None:
            self._asker.close()
        tasks = [task for task in self._live if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, sock: socket.socket, local: tuple[str, int] | None) -> None:
        if local is None:
            check_descriptor(sock, self._jail_netns)
            name = sock.getsockname()
            local = (str(name[0]).removeprefix("::ffff:"), int(name[1]))
        client = Stream(sock, asyncio.get_running_loop())
        target = self.doors.get(local)
        if target is not None:
            route = await self.open("names", *target)
            if route.upstream is not None:
                await self.tunnel(client, route, b"")
        elif local[1] == self.plan.proxy_port:
            await self._serve_proxy(client)
        else:
            self._note("descriptor", None, f"no rule stands behind {local[0]}:{local[1]}")

    async def _serve_proxy(self, client: Stream) -> None:
        await asyncio.wait_for(client.fill(), self.request_timeout_s)
        first = client.buffer[0]
        if first == 5:
            await self._serve_socks(client)
        elif chr(first).isascii() and chr(first).isalpha():
            await serve_http(client, self)
        else:
            self._note("http", None, "SOCKS4 is not offered" if first == 4 else "neither HTTP nor SOCKS5")

    async def _serve_socks(self, client: Stream) -> None:
        try:
            host, port = await asyncio.wait_for(read_request(client), self.request_timeout_s)
        except SocksError as error:
            self._note("socks5", None, error.reason)
            await client.write(error.answer)
            return
        route = await self.open("socks5", host, port)
        if route.upstream is None:
            await client.write(reply(HOST_UNREACHABLE if route.unreachable else NOT_ALLOWED))
            return
        await self.tunnel(client, route, reply(SUCCEEDED))

    async def open(self, door: Door, host: str | bytes, port: int) -> Route:
        """Decide a target by its name, ask where that is possible, then resolve, judge and connect."""
        decision = self.rules.decide(host, port, self.grants.rules())
        if decision.action == "ask":
            decision = await self._ask(door, decision)
        if decision.action != "allow":
            attempt = self._note(door, decision, decision.reason)
            return Route(
                decision, attempt, refusal=f"{decision.target or 'the target'} refused: {decision.reason}"
            )
        try:
            sock, address = await dial(self.rules, decision, self._resolver, self.options.connect_timeout_s)
        except DialError as error:
            attempt = self._note(door, decision, error.reason, allowed=not error.forbidden)
            return Route(decision, attempt, refusal=error.reason, unreachable=not error.forbidden)
        attempt = self._note(door, decision, decision.reason, allowed=True, address=str(address), open_=True)
        return Route(decision, attempt, Stream(sock, asyncio.get_running_loop()))

    async def _ask(self, door: Door, decision: Decision) -> Decision:
        if self._asker is None or decision.host is None:
            return decision
        request = Request(door, decision.host.name, decision.port, decision.rule_needed)
        if not await self._asker.ask(request):
            return decision
        # The answer is a grant for this one connection; deny rules and address checks stand above it.
        once = parse_rule(decision.rule_needed)
        return self.rules.decide(decision.host.name, decision.port, (*self.grants.rules(), once))

    async def tunnel(self, client: Stream, route: Route, greeting: bytes) -> None:
        """Send the greeting, then move bytes until both ends are done; TLS is held to the target's name."""
        upstream = route.upstream
        if upstream is None:
            return
        strict = self.options.strict_sni and route.decision.host is not None

        async def gate() -> None:
            await self._check_hello(client, route)

        try:
            await client.write(greeting)
            await pump(client, upstream, self.slots, gate if strict else None)
        finally:
            upstream.sock.close()
            route.attempt.end(upstream.sent, upstream.received)

    async def _check_hello(self, client: Stream, route: Route) -> None:
        """Hold back a client's first bytes until they are no TLS, or TLS for the target."""
        if not client.buffer:
            try:
                await client.fill()  # no deadline: in some protocols the server speaks first
            except EndOfStream:
                return
        deadline = time.monotonic() + self.request_timeout_s
        while (hello := read_hello(bytes(client.buffer))).state == "partial":
            try:
                await asyncio.wait_for(client.fill(), max(0.0, deadline - time.monotonic()))
            except EndOfStream:
                return  # too few bytes for a handshake: let the server say so
        if hello.state == "plain":
            return
        reason = hello.reason if hello.state == "bad" else self._wrong_name(hello.server_name, route.decision)
        if reason:
            self._note(
                "names" if route.attempt.door == "names" else route.attempt.door, route.decision, reason
            )
            client.send_now(ALERT_UNRECOGNIZED_NAME)
            raise _Refused(reason)

    @staticmethod
    def _wrong_name(name: bytes | None, decision: Decision) -> str:
        host = decision.host
        if host is None:
            return "no target"
        if name is None:
            if host.address is not None or host.name == "localhost":
                return ""
            return f"strict_sni: the TLS handshake names no server, not {host.name}"
        if _same_host(name, host):
            return ""
        shown = name.decode("ascii", "backslashreplace")
        return f"strict_sni: the TLS handshake names {shown}, not {host.name}"

    def refuse(self, door: Door, reason: str) -> None:
        """Take down an attempt whose target could not be read."""
        self._note(door, None, reason)

    def _note(
        self,
        door: Door,
        decision: Decision | None,
        reason: str,
        *,
        allowed: bool = False,
        address: str = "",
        open_: bool = False,
    ) -> Attempt:
        self._sequence += 1
        host = decision.host if decision is not None else None
        attempt = Attempt(
            self._sequence,
            time.time(),
            door,
            host.name if host is not None else "",
            decision.port if decision is not None else 0,
            "allow" if allowed else "deny",
            reason,
            decision.rule if decision is not None else "",
            decision.rule_needed if decision is not None else "",
            address,
            ended=not open_,
        )
        self._attempts.append(attempt)
        if self._on_attempt is not None:
            try:
                self._on_attempt(attempt)
            except Exception:  # noqa: BLE001 - the embedder's callback
                _log_exception("on_attempt failed")
        return attempt


def _same_host(name: bytes, host: Host) -> bool:
    try:
        return normalise_host(name) == host
    except TargetError:
        return False


def _log_exception(message: str) -> None:
    import logging

    logging.getLogger("vectora_jail.egress").exception(message)  # noqa: LOG004 - called in handlers
