"""The HTTP face of the proxy: CONNECT tunnels, and absolute-form requests sent on one by one.

Each request of a kept-alive connection is decided for itself. What goes upstream is written anew from the
parsed request, with the target as Host, so that the server never sees bytes that were not understood here.
Bodies are framed by h11 (the `network` extra), which is loaded with the first request that is not CONNECT.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from vectora_jail.egress_dial import Door, Route
from vectora_jail.egress_head import MAX_HEAD, BadRequest, Head, parse_head
from vectora_jail.egress_io import EndOfStream, LimitExceeded, Stream
from vectora_jail.egress_pump import SpliceSlots, pump

_TITLES = {
    400: "Bad Request",
    403: "Forbidden",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}
_TITLES |= {502: "Bad Gateway"}
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"te"}
    | {b"trailer", b"upgrade", b"http2-settings"}
)
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})
# Silence between two requests of a connection, or within the body of one, in seconds.
_IDLE_S = 60.0


class Gatekeeper(Protocol):
    """What this face asks of the engine."""

    request_timeout_s: float
    slots: SpliceSlots

    async def open(self, door: Door, host: str | bytes, port: int) -> Route:
        """Decide, resolve and connect."""

    async def tunnel(self, client: Stream, route: Route, greeting: bytes) -> None:
        """Send the greeting to the client, then move bytes both ways until both ends are done."""

    def refuse(self, door: Door, reason: str) -> None:
        """Take down an attempt that has no target."""


def refusal(status: int, reason: str, rule_needed: str = "") -> bytes:
    """Write an answer that ends the connection: what was refused, and the rule that would allow it."""
    lines = [f"vectora-jail: {reason}"]
    extra = ""
    if rule_needed:
        lines.append(f'rule needed: add "{rule_needed}" to allow in [sandbox.network] of vectora.toml')
        extra = f"X-Vectora-Jail-Rule-Needed: {rule_needed}\r\n"
    body = ("\n".join(lines) + "\n").encode("ascii", "backslashreplace")
    head = (
        f"HTTP/1.1 {status} {_TITLES[status]}\r\nContent-Type: text/plain; charset=us-ascii\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{extra}\r\n"
    )
    return head.encode("ascii") + body


def route_refusal(route: Route) -> bytes:
    """Write the answer for a target that cannot be had: 403 by the rules, 502 by the network."""
    return refusal(502 if route.unreachable else 403, route.refusal, route.decision.rule_needed)


async def serve_http(client: Stream, gate: Gatekeeper) -> None:
    """Serve one connection of a client until it ends; raises OSError, EndOfStream, TimeoutError."""
    while True:
        try:
            raw = await asyncio.wait_for(client.read_until(b"\r\n\r\n", MAX_HEAD), gate.request_timeout_s)
            head = parse_head(raw)
        except LimitExceeded:
            gate.refuse("http", "the request's head is too long")
            return await _end(client, refusal(431, "the request's head is too long"))
        except BadRequest as error:
            gate.refuse("http", error.reason)
            return await _end(client, refusal(error.status, error.reason))
        connect = head.method == b"CONNECT"
        route = await gate.open("connect" if connect else "http", head.host.name, head.port)
        if route.upstream is None:
            return await _end(client, route_refusal(route))
        if connect:
            return await gate.tunnel(client, route, b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            keep = await _exchange(client, head, raw, route, route.upstream, gate.slots)
        finally:
            route.upstream.sock.close()
            route.attempt.end(route.upstream.sent, route.upstream.received)
        if not keep:
            return None
        if not client.buffer:
            await asyncio.wait_for(client.fill(), _IDLE_S)


async def _end(client: Stream, answer: bytes) -> None:
    await client.write(answer)
    client.shutdown_write()
    await client.discard(1.0)


async def _exchange(
    client: Stream, head: Head, raw: bytes, route: Route, upstream: Stream, slots: SpliceSlots
) -> bool:
    """Send one request on and its answer back; whether the client may send another."""
    try:
        import h11
    except ImportError:
        answer = "plain http needs the extra vectora-jail[network]; https works without"
        await _end(client, refusal(501, answer))
        return False
    exchange = _Exchange(h11, client, upstream, head, slots)
    try:
        return await exchange.run(raw)
    except (h11.ProtocolError, OSError, EndOfStream) as error:
        route.attempt.reason += f"; ended early: {str(error) or type(error).__name__}"
        if not exchange.answered:
            whose = "the server's answer" if exchange.sent_all else "the request"
            await _end(client, refusal(502 if exchange.sent_all else 400, f"{whose} could not be understood"))
        return False


class _Exchange:
    """One request and its answer: h11 as server towards the client, as client towards the server."""

    def __init__(self, h11: Any, client: Stream, upstream: Stream, head: Head, slots: SpliceSlots) -> None:
        self.h11 = h11
        self.client = client
        self.upstream = upstream
        self.head = head
        self.slots = slots
        self.near = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.far = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self.answered = False
        self.sent_all = False

    async def run(self, raw: bytes) -> bool:
        """Relay both ways; the answer may begin before the request has ended."""
        h11 = self.h11
        self.near.receive_data(raw)
        self.near.next_event()
        target = self.head.host.authority(self.head.port)
        request = h11.Request(
            method=self.head.method,
            target=self.head.path,
            headers=[("Host", target.removesuffix(":80")), *self._forwarded(), *self._connection()],
        )
        await self.upstream.write(self.far.send(request))
        if not self.head.has_body:
            await self._send_body()
            switched = await self._relay_answer()
        else:
            body = asyncio.ensure_future(self._send_body())
            try:
                switched = await self._answer_beside(body)
            finally:
                body.cancel()
                await asyncio.gather(body, return_exceptions=True)
        if switched:
            await self._switch()
            return False
        self.client.buffer[:0] = self.near.trailing_data[0]
        return bool(self.near.our_state is h11.DONE and self.near.their_state is h11.DONE)

    async def _answer_beside(self, body: asyncio.Future[None]) -> bool:
        answer = asyncio.ensure_future(self._relay_answer())
        try:
            await asyncio.wait((answer, body), return_when=asyncio.FIRST_COMPLETED)
            failed = body.exception() if body.done() else None
            # A server that does not want the rest may close while it is sent: its answer still counts.
            if failed is not None and not isinstance(failed, OSError):
                raise failed
            return await answer
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _forwarded(self) -> list[tuple[bytes, bytes]]:
        """Give the headers that travel on: none that are between client and proxy only."""
        named = {
            token.strip().lower() for value in self.head.values(b"connection") for token in value.split(b",")
        }
        drop = (_HOP_BY_HOP | named | {b"host"}) - (_FRAMING - {b"host"})
        return [(name, value) for name, value in self.head.headers if name.lower() not in drop]

    def _connection(self) -> list[tuple[bytes, bytes]]:
        if self.head.websocket:
            return [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        # One request a connection upstream: what a server does with a second one is never in question.
        return [(b"Connection", b"close")]

    async def _send_body(self) -> None:
        h11 = self.h11
        while True:
            event = self.near.next_event()
            if event is h11.NEED_DATA:
                self.near.receive_data(await asyncio.wait_for(self.client.read(), _IDLE_S))
            elif isinstance(event, h11.Data):
                await self.upstream.write(self.far.send(event))
            elif isinstance(event, h11.EndOfMessage):
                await self.upstream.write(self.far.send(h11.EndOfMessage()))
                self.sent_all = True
                return
            else:
                raise EndOfStream

    async def _relay_answer(self) -> bool:
        """Relay the answer; True when both sides have changed to another protocol."""
        h11 = self.h11
        while True:
            event = self.far.next_event()
            if event is h11.NEED_DATA:
                self.far.receive_data(await self.upstream.read())
            elif isinstance(event, h11.InformationalResponse):
                await self._answer(h11.InformationalResponse, event)
                if event.status_code == 101:
                    return True
            elif isinstance(event, h11.Response):
                await self._answer(h11.Response, event)
            elif isinstance(event, h11.Data):
                await self.client.write(self.near.send(event))
            elif isinstance(event, h11.EndOfMessage):
                await self.client.write(self.near.send(h11.EndOfMessage()))
                return False
            else:
                raise EndOfStream

    async def _answer(self, kind: Any, event: Any) -> None:
        chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        drop = _HOP_BY_HOP | ({b"content-length"} if chunked else set())
        headers = [(name, value) for name, value in event.headers.raw_items() if name.lower() not in drop]
        if event.status_code == 101:
            headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        answer = kind(status_code=event.status_code, headers=headers, reason=event.reason)
        data = self.near.send(answer)
        self.answered = kind is self.h11.Response or event.status_code == 101
        await self.client.write(data)

    async def _switch(self) -> None:
        self.client.buffer[:0] = self.near.trailing_data[0]
        self.upstream.buffer[:0] = self.far.trailing_data[0]
        await pump(self.client, self.upstream, self.slots)
