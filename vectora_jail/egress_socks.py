"""SOCKS5 as far as a jail needs it: no authentication, CONNECT, names resolved here (RFC 1928).

BIND and UDP ASSOCIATE are answered "command not supported": they would open what no rule names.
"""

from __future__ import annotations

import socket

from vectora_jail.egress_io import Stream

SUCCEEDED = 0
GENERAL_FAILURE = 1
NOT_ALLOWED = 2
HOST_UNREACHABLE = 4
REFUSED = 5
COMMAND_NOT_SUPPORTED = 7
ADDRESS_NOT_SUPPORTED = 8


class SocksError(Exception):
    """The client does not speak SOCKS5 or asks for what is not offered; ``answer`` is to be sent."""

    def __init__(self, reason: str, answer: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer


def reply(code: int) -> bytes:
    """Give the answer to a request; the bound address is left empty, it would tell the host's topology."""
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))


async def read_request(stream: Stream) -> tuple[bytes, int]:
    """Shake hands and read the target as (host bytes, port); raises SocksError, EndOfStream."""
    version, count = await stream.read_exactly(2)
    if version != 5:
        raise SocksError("not SOCKS5")
    methods = await stream.read_exactly(count)
    if 0 not in methods:
        raise SocksError("the client offers no method without authentication", b"\x05\xff")
    await stream.write(b"\x05\x00")
    version, command, reserved, kind = await stream.read_exactly(4)
    if version != 5 or reserved != 0:
        raise SocksError("malformed SOCKS5 request", reply(GENERAL_FAILURE))
    if kind == 1:
        host = socket.inet_ntop(socket.AF_INET, await stream.read_exactly(4)).encode()
    elif kind == 4:
        host = socket.inet_ntop(socket.AF_INET6, await stream.read_exactly(16)).encode()
    elif kind == 3:
        host = await stream.read_exactly((await stream.read_exactly(1))[0])
    else:
        raise SocksError("unknown SOCKS5 address type", reply(ADDRESS_NOT_SUPPORTED))
    port = int.from_bytes(await stream.read_exactly(2), "big")
    if command != 1:
        raise SocksError("only CONNECT is offered", reply(COMMAND_NOT_SUPPORTED))
    return host, port
