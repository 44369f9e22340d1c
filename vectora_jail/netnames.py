"""One spelling for every network target, and what kind of address it is (pure, no lookups).

Everything that a client inside a jail can write as a host (a name in any case, with a trailing dot, in
Unicode; an address in any form that ``inet_aton(3)`` or RFC 4291 reads) becomes one canonical text before
any rule is asked. What has no single reading is refused, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Literal, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network
AddressKind = Literal[
    "public", "private", "loopback", "link-local", "metadata", "multicast", "unspecified", "reserved"
]

#: Kinds that no rule can ever grant: connecting to them means the host itself, everybody, or nobody.
NEVER_KINDS: frozenset[str] = frozenset({"unspecified", "multicast", "reserved"})

#: Longest host name in characters, without the final dot (RFC 1035, 2.3.4).
MAX_NAME = 253

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_HEX, _OCTAL, _DECIMAL = re.compile(r"0x[0-9a-f]+"), re.compile(r"0[0-7]+"), re.compile(r"0|[1-9][0-9]*")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
# IDNA2003 and IDNA2008 map these four to different names: no reading is the right one.
_DEVIATIONS = frozenset("ß\u1e9eς\u200c\u200d")


class TargetError(ValueError):
    """A host or port that has no single meaning; ``reason`` says why, without the text itself."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Host:
    """A host in canonical form: a lower-case ASCII name, or an address with its text as the name."""

    name: str
    address: Address | None = None

    def authority(self, port: int) -> str:
        """Give ``name:port``, with brackets around an IPv6 address."""
        if isinstance(self.address, IPv6Address):
            return f"[{self.name}]:{port}"
        return f"{self.name}:{port}"


def normalise_host(host: str | bytes) -> Host:
    """Reduce any spelling of a host to its canonical one; raises TargetError when it has none."""
    text = _decode(host)
    if text.startswith("["):
        if not text.endswith("]") or ":" not in text:
            raise TargetError("brackets hold an IPv6 address and nothing else")
        text = text[1:-1]
        return address_host(_parse_ipv6(text))
    if not text.isascii():
        text = _to_ascii(text)
    text = text.lower()
    _refuse_characters(text)
    if ":" in text:
        return address_host(_parse_ipv6(text))
    text = text.removesuffix(".")
    if not text:
        raise TargetError("the host is empty")
    if len(text) > MAX_NAME:
        raise TargetError(f"a host name has at most {MAX_NAME} characters")
    labels = text.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise TargetError("a label of the name is empty, too long, or has a hyphen at its end or start")
    if _NUMERIC.fullmatch(labels[-1]):
        return address_host(_parse_inet_aton(labels))
    return Host(text)


def address_host(address: Address) -> Host:
    """Make the host of an address; an IPv4-mapped IPv6 address is the IPv4 address (it connects to it)."""
    plain = plain_address(address)
    return Host(str(plain), plain)


def plain_address(address: Address) -> Address:
    """Give the address that a connection would really use: IPv4 for ``::ffff:a.b.c.d``."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_port(text: str | bytes) -> int:
    """Read a port as plain decimal digits, 1 to 65535; raises TargetError."""
    digits = text.decode("latin-1") if isinstance(text, bytes) else text
    if not _PORT.fullmatch(digits) or int(digits) > 65535:
        raise TargetError("a port is a decimal number from 1 to 65535")
    return int(digits)


def parse_authority(text: str | bytes, default_port: int | None = None) -> tuple[Host, int]:
    """Split ``host:port``, ``[v6]:port`` or, with a default port, a host alone; raises TargetError."""
    string = _decode(text)
    if "@" in string:
        raise TargetError("user information in a target is refused")
    if string.startswith("["):
        host, bracket, rest = string.partition("]")
        host += bracket
        if rest and not rest.startswith(":"):
            raise TargetError("only a port may follow the brackets")
        port = rest[1:] if rest else None
    elif string.count(":") > 1:
        raise TargetError("an IPv6 address with a port needs brackets")
    else:
        host, colon, after = string.partition(":")
        port = after if colon else None
    if port is None:
        if default_port is None:
            raise TargetError("the port is missing")
        return normalise_host(host), default_port
    return normalise_host(host), parse_port(port)


def classify_address(address: Address) -> AddressKind:
    """Tell what kind of address this is; one that carries an IPv4 address is at best of the latter's kind.

    Sources: IANA special-purpose address registries, RFC 6890, the providers' pages for metadata services.
    The table is our own because ``ipaddress.is_private`` changed its answers between Python releases.
    """
    plain = plain_address(address)
    kind = _table_kind(plain)
    if kind == "public" and isinstance(plain, IPv6Address):
        for inner in embedded_ipv4(plain):
            inner_kind = _table_kind(inner)
            if inner_kind != "public":
                return inner_kind
    return kind


def special_network(address: Address) -> Network | None:
    """Give the special-purpose range that decides the address's kind, or None for a public address."""
    plain = plain_address(address)
    for network, kind in _SPECIAL:
        if plain in network:
            return None if kind == "public" else network
    return None


def embedded_ipv4(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """List the IPv4 addresses that a translator or tunnel would take out of this IPv6 address."""
    value = int(address)
    low = IPv4Address(value & 0xFFFFFFFF)
    found: list[IPv4Address] = []
    if value >> 32 in (0, 0xFFFF, 0xFFFF0000) and value > 1:  # RFC 4291: compatible, mapped; RFC 2765
        found.append(low)
    if value >> 112 == 0x2002:  # RFC 3056, 6to4
        found.append(IPv4Address((value >> 80) & 0xFFFFFFFF))
    if value >> 96 == 0x0064FF9B or value >> 80 == 0x0064FF9B0001:  # RFC 6052 and RFC 8215, NAT64
        found.append(low)
    if value >> 96 == 0x20010000:  # RFC 4380, Teredo: server, and the client's address inverted
        found += [IPv4Address((value >> 64) & 0xFFFFFFFF), IPv4Address((value & 0xFFFFFFFF) ^ 0xFFFFFFFF)]
    if (value >> 32) & 0xFDFFFFFF == 0x00005EFE:  # RFC 5214, ISATAP interface identifier
        found.append(low)
    return tuple(found)


def _decode(host: str | bytes) -> str:
    if isinstance(host, str):
        return host
    try:
        return bytes(host).decode("utf-8")
    except UnicodeDecodeError:
        raise TargetError("the host is not UTF-8") from None


def _refuse_characters(text: str) -> None:
    for char in text:
        if char in "abcdefghijklmnopqrstuvwxyz0123456789.-_:":
            continue
        if char == "\0":
            raise TargetError("NUL in a host is refused")
        if char == "%":
            raise TargetError("percent signs in a host are refused: escapes and zone ids are ambiguous")
        if char == "@":
            raise TargetError("user information in a target is refused")
        if char.isspace():
            raise TargetError("white space in a host is refused")
        raise TargetError(f"the character {char!r} cannot be part of a host")


def _to_ascii(text: str) -> str:
    if any(char in _DEVIATIONS for char in text):
        raise TargetError("this name differs between IDNA 2003 and 2008; write its xn-- form")
    try:
        # The codec maps full-width letters, digits and dots too, so all checks come after it.
        return text.encode("idna").decode("ascii")
    except UnicodeError:
        raise TargetError("the name is not valid IDNA") from None


def _parse_ipv6(text: str) -> IPv6Address:
    _refuse_characters(text.lower())
    try:
        return IPv6Address(text)
    except ValueError:
        raise TargetError("not a valid IPv6 address") from None


def _parse_inet_aton(parts: list[str]) -> IPv4Address:
    """Read the 1 to 4 part forms of inet_aton(3): decimal, 0 for octal, 0x for hexadecimal."""
    if len(parts) > 4:
        raise TargetError("a name cannot end in a number, and this is no IPv4 address")
    values = [_parse_number(part) for part in parts]
    if any(value > 255 for value in values[:-1]) or values[-1] >= 256 ** (5 - len(values)):
        raise TargetError("a part of the IPv4 address is out of range")
    total = values[-1]
    for index, value in enumerate(values[:-1]):
        total |= value << (8 * (3 - index))
    return IPv4Address(total)


def _parse_number(part: str) -> int:
    for pattern, base in ((_HEX, 16), (_OCTAL, 8), (_DECIMAL, 10)):
        if pattern.fullmatch(part):
            return int(part, base)
    raise TargetError("a name cannot end in a number, and this is no IPv4 address")


def _table_kind(address: Address) -> AddressKind:
    for network, kind in _SPECIAL:
        if address in network:
            return kind
    return "public"


# First match decides. 168.63.129.16 (Azure) and 100.100.100.200 (Alibaba) lie in ranges that look ordinary.
_TABLE: tuple[tuple[str, AddressKind], ...] = (
    ("169.254.169.254/32", "metadata"),
    ("169.254.169.253/32", "metadata"),
    ("169.254.169.123/32", "metadata"),
    ("169.254.170.2/32", "metadata"),
    ("169.254.170.23/32", "metadata"),
    ("169.254.0.23/32", "metadata"),
    ("168.63.129.16/32", "metadata"),
    ("100.100.100.200/32", "metadata"),
    ("192.0.0.192/32", "metadata"),
    ("fd00:ec2::254/128", "metadata"),
    ("fd00:ec2::23/128", "metadata"),
    ("fd00:ec2::253/128", "metadata"),
    ("fd20:ce::254/128", "metadata"),
    ("fd00:42::42/128", "metadata"),
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "private"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "private"),
    ("192.88.99.0/24", "reserved"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "private"),
    ("198.51.100.0/24", "private"),
    ("203.0.113.0/24", "private"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "reserved"),
    ("::ffff:0:0:0/96", "reserved"),
    ("64:ff9b:1::/48", "private"),
    ("64:ff9b::/96", "public"),  # then judged by the IPv4 address inside
    ("2001::/23", "reserved"),
    ("2001:db8::/32", "private"),
    ("3fff::/20", "private"),
    ("2000::/3", "public"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
    ("::/0", "reserved"),  # everything outside 2000::/3 is not routed
)
_SPECIAL: tuple[tuple[Network, AddressKind], ...] = tuple((ip_network(text), kind) for text, kind in _TABLE)
