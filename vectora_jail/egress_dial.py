"""From a decision to a connected socket: resolve once, judge every address, connect to exactly that one.

Nothing here runs for a name that was refused, so no query for it leaves the host.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from time import monotonic
from typing import Literal

from vectora_jail.egress_io import Stream, in_thread
from vectora_jail.netnames import Address
from vectora_jail.netrules import Decision, NetRules
from vectora_jail.netsyntax import LOOPBACKS

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
Door = Literal["connect", "http", "socks5", "names", "descriptor"]

_RESOLVE_S = 10.0
_ADDRESSES = 8  # at most this many of a name's addresses are tried


@dataclass(slots=True)
class Attempt:
    """One try to reach something, as the audit log and the result of the call see it.

    Made when it was decided; the byte counts and the duration follow when it has ended (`ended`).
    """

    sequence: int
    time: float
    """Seconds since the epoch."""
    door: Door
    host: str
    port: int
    action: Literal["allow", "deny"]
    reason: str
    rule: str = ""
    rule_needed: str = ""
    address: str = ""
    sent: int = 0
    received: int = 0
    duration_s: float = 0.0
    ended: bool = False
    _started: float = field(default_factory=monotonic, repr=False)

    def end(self, sent: int = 0, received: int = 0) -> None:
        """Take down the byte counts of the connection and how long it lived."""
        self.sent += sent
        self.received += received
        self.duration_s = monotonic() - self._started
        self.ended = True


@dataclass(slots=True)
class Route:
    """The answer to one target: a connected upstream, or why there is none."""

    decision: Decision
    attempt: Attempt
    upstream: Stream | None = None
    refusal: str = ""
    unreachable: bool = False
    """True when the rules allow it and the network did not."""


class DialError(Exception):
    """No connection: ``forbidden`` when the rules refuse every address, otherwise the network's fault."""

    def __init__(self, reason: str, *, forbidden: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.forbidden = forbidden


async def system_resolver(name: str, port: int) -> Sequence[str]:
    """Ask the host's resolver, on a thread of its own."""
    found = await in_thread(socket.getaddrinfo, name, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def dial(
    rules: NetRules, decision: Decision, resolver: Resolver, connect_s: float
) -> tuple[socket.socket, Address]:
    """Connect to the target of an allowed decision; raises DialError."""
    addresses = await _addresses(decision, resolver)
    refused = ""
    permitted: list[Address] = []
    for address in addresses:
        verdict = rules.address_ok(address, decision.matched, decision.pin, decision.port)
        if verdict:
            permitted.append(address)
        else:
            refused = refused or verdict.reason
    if not permitted:
        raise DialError(refused or f"{decision.target} has no address", forbidden=bool(refused))
    fault = ""
    for address in permitted[:_ADDRESSES]:
        try:
            return await _connect(address, decision.port, connect_s), address
        except (OSError, asyncio.TimeoutError) as error:
            # The address itself is the host's knowledge: a private one is not told to the jail.
            fault = getattr(error, "strerror", None) or "timed out"
    raise DialError(f"cannot connect to {decision.target}: {fault}")


async def _addresses(decision: Decision, resolver: Resolver) -> list[Address]:
    if decision.host is None:
        raise DialError("no target", forbidden=True)
    if decision.pin is not None:
        return [decision.pin]
    if decision.matched is not None and decision.matched.kind == "localhost":
        return [decision.host.address] if decision.host.address is not None else list(LOOPBACKS)
    if decision.host.address is not None:
        return [decision.host.address]
    try:
        texts = await asyncio.wait_for(resolver(decision.host.name, decision.port), _RESOLVE_S)
    except (OSError, asyncio.TimeoutError, UnicodeError) as error:
        raise DialError(f"cannot resolve {decision.host.name}") from error
    found: list[Address] = []
    for text in texts:
        address = ip_address(text.partition("%")[0])  # a resolver that answers something else is broken
        if address not in found:
            found.append(address)
    return found


async def _connect(address: Address, port: int, seconds: float) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (str(address), port)), seconds)
    except BaseException:
        sock.close()
        raise
    return sock
