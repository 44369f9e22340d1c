"""The head of one HTTP/1 request to the proxy, read strictly: one meaning or none (pure).

Two readers that disagree about where a request ends are how a second one is smuggled past the first. So
everything that RFC 9112 lets a recipient tolerate (folded lines, bare line feeds, both lengths, a repeated
Host) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vectora_jail.netnames import Host, TargetError, parse_authority

#: Longest head in bytes; curl and browsers stay below 16 KiB.
MAX_HEAD = 64 * 1024
_MAX_HEADERS = 200

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):([\t\x20-\x7e\x80-\xff]*)")
_ABSOLUTE = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)")
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})


class BadRequest(Exception):
    """A head that is refused: ``status`` is the answer's, ``reason`` is told to the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Head:
    """One request: its target is a host and a port; ``path`` is empty for CONNECT."""

    method: bytes
    host: Host
    port: int
    path: bytes
    minor: int
    headers: tuple[tuple[bytes, bytes], ...]
    """Names as the client wrote them."""

    def values(self, name: bytes) -> list[bytes]:
        """List the values of a header, its name in lower case."""
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def has_body(self) -> bool:
        """Tell whether a body follows the head."""
        return bool(self.values(b"transfer-encoding")) or self.values(b"content-length") not in ([], [b"0"])

    @property
    def websocket(self) -> bool:
        """Tell whether the client asks to change to the WebSocket protocol."""
        return [value.lower() for value in self.values(b"upgrade")] == [b"websocket"]


def parse_head(raw: bytes) -> Head:
    """Parse the bytes of one head, with its empty line; raises BadRequest."""
    lines = raw[:-4].split(b"\r\n")
    if any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines):
        raise BadRequest(400, "a bare carriage return, line feed or NUL in the request's head")
    found = _REQUEST_LINE.fullmatch(lines[0])
    if not found:
        raise BadRequest(400, "malformed request line")
    method, target, minor = found[1], found[2], int(found[3])
    if len(lines) - 1 > _MAX_HEADERS:
        raise BadRequest(431, "too many headers")
    headers = tuple(_field(line) for line in lines[1:])
    _check_framing(headers, minor)
    host, port, path = _target(method, target)
    _check_host(headers, minor == 1 and bool(path), host, port)
    return Head(method, host, port, path, minor, headers)


def _field(line: bytes) -> tuple[bytes, bytes]:
    if line[:1] in (b" ", b"\t"):
        raise BadRequest(400, "folded headers are refused")
    found = _FIELD.fullmatch(line)
    if not found:
        raise BadRequest(400, "malformed header")
    name, value = found[1], found[2].strip(b" \t")
    if b"_" in name and name.lower().replace(b"_", b"-") in _FRAMING:
        raise BadRequest(400, "a header that others could read as the message's length or host")
    return name, value


def _check_framing(headers: tuple[tuple[bytes, bytes], ...], minor: int) -> None:
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    if lengths and codings:
        raise BadRequest(400, "both Content-Length and Transfer-Encoding")
    if len(lengths) > 1 or len(codings) > 1:
        raise BadRequest(400, "the message's length is given twice")
    if lengths and not re.fullmatch(rb"0|[1-9][0-9]{0,17}", lengths[0]):
        raise BadRequest(400, "Content-Length is no plain number")
    if codings and (codings[0].lower() != b"chunked" or minor == 0):
        raise BadRequest(400, "only the transfer coding chunked of HTTP/1.1 is understood")


def _target(method: bytes, target: bytes) -> tuple[Host, int, bytes]:
    try:
        if method == b"CONNECT":
            return (*parse_authority(target), b"")
        found = _ABSOLUTE.fullmatch(target)
        if not found:
            raise BadRequest(403, "a proxy is asked with an absolute http:// address or CONNECT")
        scheme = found[1].lower()
        if scheme == b"https":
            raise BadRequest(403, "https goes through CONNECT")
        if scheme != b"http":
            raise BadRequest(403, f"{scheme.decode()} is not offered: http, https by CONNECT and SOCKS5 are")
        path = found[3] or b"/"
        return (*parse_authority(found[2], 80), path if path.startswith(b"/") else b"/" + path)
    except TargetError as error:
        raise BadRequest(403, error.reason) from None


def _check_host(headers: tuple[tuple[bytes, bytes], ...], required: bool, host: Host, port: int) -> None:
    values = [value for name, value in headers if name.lower() == b"host"]
    if len(values) > 1:
        raise BadRequest(400, "more than one Host")
    if not values:
        if required:
            raise BadRequest(400, "HTTP/1.1 needs a Host")
        return
    try:
        # A Host without a port is taken to mean the target's: what is sent on is written anew from the
        # target.
        named, named_port = parse_authority(values[0], port)
    except TargetError as error:
        raise BadRequest(403, f"the Host header is refused: {error.reason}") from None
    if (named, named_port) != (host, port):
        raise BadRequest(403, f"the Host header is not the target {host.authority(port)}")
