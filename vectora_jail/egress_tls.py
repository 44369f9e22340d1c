"""The server name of a TLS ClientHello, read from the first bytes of a connection (pure).

Only what `strict_sni` needs: reassemble the first handshake message over its records, walk to the
extensions, take the host name. Everything malformed is a refusal. Sources: RFC 8446 section 4.1.2 and 5.1,
RFC 6066 section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A ClientHello that is longer (with its record headers) is refused; key shares of today need under 4 KiB.
MAX_HELLO = 32 * 1024
#: The alert "unrecognized_name", fatal, in a record of its own (RFC 6066).
ALERT_UNRECOGNIZED_NAME = bytes((21, 3, 1, 0, 2, 2, 112))

# Clients use one or two; reading again after each byte stays cheap with a bound.
_MAX_RECORDS = 64
_HANDSHAKE = 22
_CLIENT_HELLO = 1


@dataclass(frozen=True, slots=True)
class Hello:
    """What the first bytes are: not TLS, not yet complete, a ClientHello with its name, or broken."""

    state: Literal["plain", "partial", "hello", "bad"]
    server_name: bytes | None = None
    reason: str = ""


def read_hello(data: bytes) -> Hello:
    """Read the beginning of a client's stream; call again with more bytes while the state is `partial`."""
    if not data:
        return Hello("partial")
    if data[0] & 0x80 and len(data) >= 5 and data[2] == _CLIENT_HELLO and data[3] == 3:
        return Hello("bad", reason="an SSLv2 hello names no server")
    if data[0] & 0x80 and len(data) < 5:
        return Hello("partial")
    if data[0] != _HANDSHAKE:
        return Hello("plain")
    if len(data) < 2:
        return Hello("partial")
    if data[1] != 3:
        return Hello("plain")
    message = bytearray()
    position = 0
    for _ in range(_MAX_RECORDS):
        if len(data) - position < 5:
            return _partial(data)
        if data[position] != _HANDSHAKE:
            return Hello("bad", reason="another record interrupts the ClientHello")
        length = int.from_bytes(data[position + 3 : position + 5], "big")
        if not 0 < length <= 1 << 14:
            return Hello("bad", reason="a TLS record of an impossible length")
        message += data[position + 5 : position + 5 + length]
        if message[:1] not in (b"", bytes((_CLIENT_HELLO,))):
            return Hello("bad", reason="the first TLS message is no ClientHello")
        if len(message) >= 4:
            wanted = int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO:
                return Hello("bad", reason="the ClientHello is too long")
            if len(message) - 4 >= wanted:
                return _parse(bytes(message[4 : 4 + wanted]))
        if len(data) - position < 5 + length:
            return _partial(data)
        position += 5 + length
    return Hello("bad", reason="the ClientHello is cut into too many records")


def _partial(data: bytes) -> Hello:
    if len(data) > MAX_HELLO:
        return Hello("bad", reason="the ClientHello is too long")
    return Hello("partial")


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise ValueError("the ClientHello is cut short")
        part = self.data[self.position : end]
        self.position = end
        return part

    def vector(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "big"))

    def more(self) -> bool:
        return self.position < len(self.data)


def _parse(body: bytes) -> Hello:
    try:
        return Hello("hello", _find_name(body))
    except ValueError as error:
        return Hello("bad", reason=str(error))


def _find_name(body: bytes) -> bytes | None:
    cursor = _Cursor(body)
    cursor.take(2 + 32)  # version, random
    cursor.vector(1)  # session id
    cursor.vector(2)  # cipher suites
    cursor.vector(1)  # compression methods
    if not cursor.more():
        return None
    extensions = _Cursor(cursor.vector(2))
    if cursor.more():
        raise ValueError("bytes follow the extensions")
    name: bytes | None = None
    while extensions.more():
        kind = int.from_bytes(extensions.take(2), "big")
        content = extensions.vector(2)
        if kind == 0:
            if name is not None:
                raise ValueError("the server name is given twice")
            name = _server_name(content)
    return name


def _server_name(content: bytes) -> bytes:
    cursor = _Cursor(content)
    names = _Cursor(cursor.vector(2))
    if cursor.more():
        raise ValueError("bytes follow the server names")
    if names.take(1) != b"\0":
        raise ValueError("the server name is no host name")
    name = names.vector(2)
    if names.more():
        raise ValueError("more than one server name")
    if not name:
        raise ValueError("the server name is empty")
    return name
