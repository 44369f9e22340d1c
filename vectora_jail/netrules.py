"""Network rules: what `[sandbox.network]` allows, decided on the name before anything is looked up (pure).

Deny beats allow and beats run-time grants. A rule about addresses never makes a *name* reachable, but a
deny rule about addresses also refuses a name that resolves there. What no rule names is "ask": refused
unless somebody is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_network
from types import MappingProxyType
from typing import Literal

from vectora_jail.netnames import (
    NEVER_KINDS,
    Address,
    Host,
    TargetError,
    classify_address,
    embedded_ipv4,
    normalise_host,
    plain_address,
    special_network,
)
from vectora_jail.netsyntax import DEFAULT_PORTS, LOOPBACKS, Rule, RuleError, parse_pin, parse_rule, within

__all__ = [
    "DEFAULT_PORTS",
    "Decision",
    "NetRules",
    "Rule",
    "RuleError",
    "Verdict",
    "address_ok",
    "find_conflicts",
    "parse_pin",
    "parse_rule",
]

Action = Literal["allow", "deny", "ask"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say about one target: ``rule`` decided, ``rule_needed`` would allow it (if any can)."""

    action: Action
    reason: str
    rule: str = ""
    rule_needed: str = ""
    host: Host | None = None
    port: int = 0
    pin: Address | None = None
    """The address that `hosts` gives this name: connect there and ask no resolver."""
    matched: Rule | None = field(default=None, repr=False)

    @property
    def target(self) -> str:
        """Give the canonical ``host:port``, or an empty text when the host had no meaning."""
        return self.host.authority(self.port) if self.host else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a resolved address may be connected to; true or false by itself."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class NetRules:
    """The rules of one jail; `decide` and `address_ok` are all that the proxy asks."""

    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    hosts: Mapping[str, Address] = field(default_factory=lambda: MappingProxyType({}))
    private_addresses: bool = False

    @classmethod
    def build(
        cls,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        hosts: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        private_addresses: bool = False,
    ) -> NetRules:
        """Parse all rules; raises RuleError for the first that is wrong."""
        return cls(
            tuple(parse_rule(text) for text in allow),
            tuple(parse_rule(text, deny=True) for text in deny),
            MappingProxyType(dict(parse_pin(name, address) for name, address in dict(hosts).items())),
            private_addresses,
        )

    def decide(self, host: str | bytes, port: int, grants: Sequence[Rule] = ()) -> Decision:
        """Decide a target by its name alone: no lookup, and no exception for what a client wrote."""
        try:
            target = normalise_host(host)
        except TargetError as error:
            return Decision("deny", error.reason)
        if not 0 < port < 65536:
            return Decision("deny", "a port is a number from 1 to 65535", host=target)
        pin = self.hosts.get(target.name)
        known = pin if pin is not None else target.address
        needed = _rule_needed(target, port)

        def decision(action: Action, reason: str, rule: Rule | None = None, needed: str = "") -> Decision:
            return Decision(action, reason, str(rule or ""), needed, target, port, pin, rule)

        if target.name.endswith(".localhost"):
            return decision("deny", "names below localhost are the jail's own")
        refused = self._denied_by(target, known, port)
        if refused is not None:
            return decision("deny", f"refused by the deny rule {refused}", refused)
        failed: tuple[Verdict, Rule] | None = None
        for rule in (*self.allow, *grants):
            if not rule.matches(target, port):
                continue
            verdict = self.address_ok(known, rule, pin, port) if known is not None else Verdict(True)
            if verdict:
                return decision("allow", f"allowed by {rule}", rule)
            failed = failed or (verdict, rule)
        if failed is not None:
            return decision("deny", failed[0].reason, failed[1])
        if target.address in LOOPBACKS:
            return decision("deny", "this is the host's own loopback", needed=needed)
        if known is not None:
            exact = Rule(needed, "address", "", ip_network(known), ())
            verdict = address_ok(known, exact, pin, self.private_addresses)
            if not verdict:
                return decision("deny", verdict.reason)
        return decision("ask", f"{target.authority(port)} is not in [sandbox.network] allow", needed=needed)

    def address_ok(self, address: Address, rule: Rule | None, pin: Address | None, port: int) -> Verdict:
        """Judge the address of a target, literal or resolved; deny rules about addresses count too."""
        denied = self._address_denied(address, port)
        if denied is not None:
            return Verdict(False, f"the address {address} is refused by the deny rule {denied}")
        return address_ok(address, rule, pin, self.private_addresses)

    def _address_denied(self, address: Address, port: int) -> Rule | None:
        for candidate in _readings(address):
            for rule in self.deny:
                if rule.ports and port not in rule.ports:
                    continue
                if rule.covers(candidate) or (rule.kind == "localhost" and candidate.is_loopback):
                    return rule
        return None

    def _denied_by(self, target: Host, known: Address | None, port: int) -> Rule | None:
        for rule in self.deny:
            if rule.matches(target, port):
                return rule
        return self._address_denied(known, port) if known is not None else None


def address_ok(address: Address, rule: Rule | None, pin: Address | None, private_addresses: bool) -> Verdict:
    """Judge an address by its kind: public, or named by a pin or a rule that the ceiling consents to.

    ``rule`` is the allow rule that matched; a ``localhost:port`` rule permits exactly 127.0.0.1 and ::1. A
    cidr permits special addresses only when it lies wholly inside their range (0.0.0.0/0 does not grant
    10.0.0.1), and a metadata service needs its own exact address.
    """
    plain = plain_address(address)
    if pin is not None and plain != plain_address(pin):
        return Verdict(False, f"the name is pinned to {pin}, not {plain}")
    if rule is not None and rule.kind == "localhost":
        return Verdict(plain in LOOPBACKS, "" if plain in LOOPBACKS else f"{plain} is not localhost")
    kind = classify_address(plain)
    if kind == "public":
        return Verdict(True)
    if kind in NEVER_KINDS:
        return Verdict(False, f"the {kind} address {plain} is never reachable")
    if pin is None and rule is not None and rule.network is not None:
        exact = rule.network.num_addresses == 1
        special = special_network(plain)
        inside = special is not None and within(rule.network, special)
        named = rule.covers(plain) and (exact or (inside and kind != "metadata"))
    else:
        named = pin is not None
    if not named:
        return Verdict(False, f"the {kind} address {plain} is refused unless hosts or a rule names it")
    if not private_addresses:
        return Verdict(False, f"the {kind} address {plain} needs the ceiling's private_addresses")
    return Verdict(True)


def find_conflicts(rules: NetRules) -> tuple[tuple[str, str], ...]:
    """List entries that can never match, each with the reason: shadowed allow rules, pins no rule names."""
    found: list[tuple[str, str]] = []
    for rule in rules.allow:
        for denied in rules.deny:
            if _shadows(denied, rule):
                found.append((str(rule), f"the deny rule {denied} refuses all of it"))
                break
    for name in rules.hosts:
        host = Host(name)
        if not any(rule.matches(host, (rule.ports or DEFAULT_PORTS)[0]) for rule in rules.allow):
            found.append((name, "hosts pins this name, but no allow rule names it"))
    return tuple(found)


def _rule_needed(host: Host, port: int) -> str:
    if host.address in LOOPBACKS:
        return f"localhost:{port}"
    return host.authority(port)


def _readings(address: Address) -> tuple[Address, ...]:
    plain = plain_address(address)
    return (plain, *embedded_ipv4(plain)) if isinstance(plain, IPv6Address) else (plain,)


def _shadows(denied: Rule, rule: Rule) -> bool:
    if denied.ports and not set(rule.ports) <= set(denied.ports):
        return False
    if rule.network is not None:
        return denied.network is not None and within(rule.network, denied.network)
    if denied.kind == "below":
        return rule.kind in ("host", "below") and (
            rule.name.endswith("." + denied.name) or (rule.kind == "below" and rule.name == denied.name)
        )
    return denied.kind == rule.kind and denied.name == rule.name
