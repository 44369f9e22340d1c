"""One network rule: its text, its parts, what it matches (pure).

Forms: ``host``, ``host:port``, ``*.domain``, ``ip``, ``cidr``, ``localhost:port``; IPv6 with a port in
brackets. An ``allow`` rule without a port means 80 and 443, a ``deny`` rule without one means every port.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any, Literal

from vectora_jail.netnames import (
    NEVER_KINDS,
    Address,
    Host,
    Network,
    TargetError,
    classify_address,
    normalise_host,
    parse_port,
    plain_address,
    special_network,
)

#: Ports of an allow rule that names none.
DEFAULT_PORTS = (80, 443)
#: The two addresses that a `localhost:port` rule stands for.
LOOPBACKS: tuple[Address, ...] = (IPv4Address("127.0.0.1"), IPv6Address("::1"))

RuleKind = Literal["host", "below", "address", "network", "localhost"]


class RuleError(ValueError):
    """A rule or pin that means nothing or can never match: ``text``, ``problem`` and, maybe, ``hint``."""

    def __init__(self, text: str, problem: str, hint: str = "") -> None:
        super().__init__(f"network rule {text!r}: {problem}" + (f"; {hint}" if hint else ""))
        self.text = text
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Rule:
    """One parsed rule; ``str()`` gives its canonical text."""

    text: str
    kind: RuleKind
    name: str = ""
    """The canonical host name, or the domain below which names match; empty for rules about addresses."""
    network: Network | None = None
    ports: tuple[int, ...] = DEFAULT_PORTS
    """Empty means every port (deny rules only)."""

    def __str__(self) -> str:
        return self.text

    @property
    def needs_private(self) -> bool:
        """Tell whether the rule asks for addresses that need the ceiling's ``private_addresses``."""
        if self.network is None:
            return False
        first = self.network.network_address
        if self.kind == "address":
            return classify_address(first) != "public"
        special = special_network(first)
        return special is not None and within(self.network, special)

    def matches(self, host: Host, port: int) -> bool:
        """Tell whether a canonical target falls under this rule."""
        if self.ports and port not in self.ports:
            return False
        if self.kind == "host":
            return host.name == self.name
        if self.kind == "below":
            return host.address is None and host.name.endswith("." + self.name)
        if self.kind == "localhost":
            return host.name == "localhost" or host.address in LOOPBACKS
        return host.address is not None and self.covers(host.address)

    def covers(self, address: Address) -> bool:
        """Tell whether a rule about addresses names this one."""
        return self.network is not None and plain_address(address) in self.network


def parse_rule(text: Any, *, deny: bool = False) -> Rule:
    """Parse one rule of `allow` or `deny`; raises RuleError with what is wrong and what to write instead."""
    if not isinstance(text, str):
        raise RuleError(repr(text), "a rule is a text")
    if not text:
        raise RuleError(text, "a rule cannot be empty")
    if text == "*" or text.startswith("*:"):
        raise RuleError(text, "a rule for everything is no rule", 'that is mode = "host"')
    if "://" in text:
        rest = text.split("://", 1)[1].split("/", 1)[0]
        raise RuleError(text, "a rule is a host and a port, not a URL", f'write "{rest}"' if rest else "")
    if "@" in text:
        raise RuleError(text, "user information has no place in a rule")
    host_text, port_text = _split_port(text)
    ports: tuple[int, ...] = () if deny else DEFAULT_PORTS
    if port_text is not None:
        try:
            ports = (parse_port(port_text),)
        except TargetError as error:
            raise RuleError(text, error.reason, "one rule for each port") from None
    suffix = f":{ports[0]}" if port_text is not None else ""
    if "/" in host_text:
        return _network_rule(text, host_text, suffix, ports)
    wildcard = host_text.startswith("*.")
    try:
        host = normalise_host(host_text[2:] if wildcard else host_text)
    except TargetError as error:
        hint = 'a "*" stands only before the first dot' if "*" in host_text else ""
        raise RuleError(text, error.reason, hint) from None
    if host.address is not None:
        if wildcard:
            raise RuleError(text, "nothing is below an address, this can never match")
        return _address_rule(text, host.address, host_text, suffix, ports)
    if host.name == "localhost":
        if wildcard:
            raise RuleError(text, "names below localhost are the jail's own, this can never match")
        if port_text is None and not deny:
            raise RuleError(text, "localhost needs its port", 'write "localhost:5432"')
        return Rule("localhost" + suffix, "localhost", "localhost", None, ports)
    if host.name.endswith(".localhost"):
        raise RuleError(text, "names below localhost are the jail's own, this can never match")
    if wildcard:
        return Rule(f"*.{host.name}{suffix}", "below", host.name, None, ports)
    return Rule(host.name + suffix, "host", host.name, None, ports)


def parse_pin(name: Any, address: Any) -> tuple[str, Address]:
    """Parse one entry of `hosts`: a name and the address it stands for; raises RuleError."""
    label = f"{name} = {address}"
    if not isinstance(name, str) or not isinstance(address, str):
        raise RuleError(label, "hosts maps a name to an address, both texts")
    try:
        host = normalise_host(name)
    except TargetError as error:
        raise RuleError(label, error.reason) from None
    if host.address is not None:
        raise RuleError(label, "only a name can be pinned")
    if host.name == "localhost" or host.name.endswith(".localhost"):
        raise RuleError(
            label, "localhost cannot be pinned", 'allow "localhost:PORT" reaches the host\'s service'
        )
    try:
        pinned = normalise_host(address).address
    except TargetError as error:
        raise RuleError(label, error.reason) from None
    if pinned is None:
        raise RuleError(label, "a name is pinned to an address, not to another name")
    if str(pinned) != address.lower().strip("[]"):
        raise RuleError(label, "this spelling of an address is easily misread", f'write "{pinned}"')
    if classify_address(pinned) in NEVER_KINDS:
        raise RuleError(label, f"a {classify_address(pinned)} address can never be reached")
    return host.name, pinned


def within(inner: Network, outer: Network) -> bool:
    """Tell whether one range lies wholly inside the other."""
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and inner[0] in outer


def _split_port(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        inside, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in inside or (rest and not rest.startswith(":")):
            raise RuleError(
                text, "brackets hold an IPv6 address and only a port may follow", 'write "[fd00::1]:443"'
            )
        return inside, rest[1:] if rest else None
    if text.count(":") > 1:
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _network_rule(text: str, host_text: str, suffix: str, ports: tuple[int, ...]) -> Rule:
    head = host_text.split("/", 1)[0]
    if not (":" in head or head.replace(".", "").isdigit()):
        raise RuleError(text, "a rule has no path", f'write "{head}"')
    try:
        network = ip_network(host_text, strict=False)
    except ValueError:
        raise RuleError(text, "this is no address range", 'write "10.0.0.0/8" or "fd00::/8"') from None
    if str(network) != host_text.lower():
        raise RuleError(text, "the range has bits beyond its prefix or a rare spelling", f'write "{network}"')
    if network.version == 6 and network.overlaps(ip_network("::ffff:0:0/96")) and network.prefixlen > 0:
        raise RuleError(text, "IPv4-mapped ranges are matched as IPv4", "write the IPv4 range")
    if network.num_addresses == 1:
        raise RuleError(text, "a range of one is an address", f'write "{network.network_address}"')
    shown = f"[{network}]{suffix}" if suffix and network.version == 6 else f"{network}{suffix}"
    if classify_address(network.network_address) in NEVER_KINDS and network.prefixlen >= 8:
        raise RuleError(text, "these addresses can never be reached")
    return Rule(shown, "network", "", network, ports)


def _address_rule(text: str, address: Address, written: str, suffix: str, ports: tuple[int, ...]) -> Rule:
    if written.lower() != str(address):
        raise RuleError(text, "this spelling of an address is easily misread", f'write "{address}"')
    kind = classify_address(address)
    if kind in NEVER_KINDS:
        raise RuleError(text, f"a {kind} address can never be reached")
    shown = f"[{address}]{suffix}" if suffix and address.version == 6 else f"{address}{suffix}"
    return Rule(shown, "address", "", ip_network(address), ports)
