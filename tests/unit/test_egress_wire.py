"""Assert that the first bytes of a connection have one meaning or none: HTTP heads and TLS hellos."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectora_jail.egress_head import BadRequest, parse_head
from vectora_jail.egress_http import refusal
from vectora_jail.egress_tls import read_hello


def head(*lines: bytes, end: bytes = b"\r\n\r\n") -> bytes:
    return b"\r\n".join(lines) + end


HOST = b"Host: a.test"
GET = b"GET http://a.test/ HTTP/1.1"

REFUSED = {
    "no Host": (400, head(GET)),
    "two Hosts": (400, head(GET, HOST, HOST)),
    "Host of another": (403, head(GET, b"Host: b.test")),
    "Host with another port": (403, head(GET, b"Host: a.test:81")),
    "Host with user": (403, head(GET, b"Host: u@a.test")),
    "empty Host": (403, head(GET, b"Host:")),
    "both lengths": (400, head(GET, HOST, b"Content-Length: 5", b"Transfer-Encoding: chunked")),
    "length twice": (400, head(GET, HOST, b"Content-Length: 5", b"Content-Length: 5")),
    "length list": (400, head(GET, HOST, b"Content-Length: 5, 5")),
    "length signed": (400, head(GET, HOST, b"Content-Length: +5")),
    "length hex": (400, head(GET, HOST, b"Content-Length: 0x5")),
    "length padded": (400, head(GET, HOST, b"Content-Length: 05")),
    "length negative": (400, head(GET, HOST, b"Content-Length: -1")),
    "coding twice": (400, head(GET, HOST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "coding list": (400, head(GET, HOST, b"Transfer-Encoding: gzip, chunked")),
    "coding identity": (400, head(GET, HOST, b"Transfer-Encoding: identity")),
    "coding x": (400, head(GET, HOST, b"Transfer-Encoding: xchunked")),
    "coding vt": (400, head(GET, HOST, b"Transfer-Encoding: \x0bchunked")),
    "coding in 1.0": (400, head(b"GET http://a.test/ HTTP/1.0", HOST, b"Transfer-Encoding: chunked")),
    "space before colon": (400, head(GET, HOST, b"Transfer-Encoding : chunked")),
    "underscore length": (400, head(GET, HOST, b"Content_Length: 5")),
    "fold": (400, head(GET, HOST, b"X: a", b" b")),
    "folded coding": (400, head(GET, HOST, b"Transfer-Encoding:", b" chunked")),
    "fold in first header": (400, head(GET, b" x", HOST)),
    "bare LF": (400, head(GET, HOST + b"\nX: y")),
    "bare CR": (400, head(GET, HOST + b"\rX: y")),
    "NUL": (400, head(GET, HOST, b"X: a\0b")),
    "no colon": (400, head(GET, HOST, b"garbage")),
    "HTTP/2": (400, head(b"GET http://a.test/ HTTP/2.0", HOST)),
    "HTTP/0.9": (400, head(b"GET http://a.test/")),
    "two spaces": (400, head(b"GET  http://a.test/ HTTP/1.1", HOST)),
    "tab": (400, head(b"GET\thttp://a.test/\tHTTP/1.1", HOST)),
    "leading empty line": (400, head(b"", GET, HOST)),
    "space in target": (400, head(b"GET http://a.test/ x HTTP/1.1", HOST)),
    "raw bytes in target": (400, head(b"GET http://a.test/\xff HTTP/1.1", HOST)),
    "origin form": (403, head(b"GET / HTTP/1.1", HOST)),
    "asterisk": (403, head(b"OPTIONS * HTTP/1.1", HOST)),
    "https form": (403, head(b"GET https://a.test/ HTTP/1.1", HOST)),
    "ftp": (403, head(b"GET ftp://a.test/ HTTP/1.1", HOST)),
    "user in target": (403, head(b"GET http://u:p@a.test/ HTTP/1.1", HOST)),
    "backslash": (403, head(b"GET http://b.test\\@a.test/ HTTP/1.1", HOST)),
    "fragment": (403, head(b"GET http://a.test/#x HTTP/1.1", HOST)),
    "bad port": (403, head(b"GET http://a.test:080/ HTTP/1.1", HOST)),
    "percent": (403, head(b"GET http://a%2etest/ HTTP/1.1", HOST)),
    "CONNECT without port": (403, head(b"CONNECT a.test HTTP/1.1", HOST)),
    "CONNECT with path": (403, head(b"CONNECT a.test:443/x HTTP/1.1", HOST)),
    "CONNECT other Host": (403, head(b"CONNECT a.test:443 HTTP/1.1", b"Host: b.test:443")),
    "CONNECT URL": (403, head(b"CONNECT http://a.test:443 HTTP/1.1", HOST)),
    "too many headers": (431, head(GET, HOST, *[b"X: y"] * 200)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bc_95_smuggling_shapes_are_refused(name: str) -> None:
    """Assert that a head with two possible readings, or of another form, is answered with its status."""
    status, raw = REFUSED[name]
    with pytest.raises(BadRequest) as caught:
        parse_head(raw)
    assert caught.value.status == status
    assert refusal(status, caught.value.reason).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("raw", "target", "path"),
    [
        (head(GET, HOST), "a.test:80", b"/"),
        (head(b"GET HTTP://A.Test.:80 HTTP/1.1", b"host: a.test"), "a.test:80", b"/"),
        (head(b"GET http://a.test?q=1 HTTP/1.1", HOST), "a.test:80", b"/?q=1"),
        (head(b"GET http://a.test:8080/x HTTP/1.1", b"Host: a.test:8080"), "a.test:8080", b"/x"),
        (head(b"GET http://a.test:8080/x HTTP/1.1", HOST), "a.test:8080", b"/x"),
        (head(b"GET http://[::1]:8080/x HTTP/1.1", b"Host: [0::1]:8080"), "[::1]:8080", b"/x"),
        (head(b"GET http://a.test/ HTTP/1.0"), "a.test:80", b"/"),
        (head(b"CONNECT a.test:443 HTTP/1.1", b"Host: a.test:443"), "a.test:443", b""),
        (head(b"CONNECT a.test:443 HTTP/1.1", HOST), "a.test:443", b""),
        (head(b"CONNECT a.test:443 HTTP/1.1"), "a.test:443", b""),
        (head(b"CONNECT 0x7f.1:443 HTTP/1.0"), "127.0.0.1:443", b""),
    ],
)
def test_ordinary_heads_are_understood(raw: bytes, target: str, path: bytes) -> None:
    """Assert that what real clients send is read, with its canonical target."""
    parsed = parse_head(raw)
    assert (parsed.host.authority(parsed.port), parsed.path) == (target, path)


@given(st.binary(max_size=200), st.integers(0, 60))
def test_heads_never_crash_the_reader(noise: bytes, position: int) -> None:
    """Assert that arbitrary bytes inside a head are understood or refused, nothing else."""
    good = head(GET, HOST, b"Content-Length: 5")[:-4]
    try:
        parsed = parse_head(good[:position] + noise + good[position:] + b"\r\n\r\n")
    except BadRequest:
        return
    assert len(parsed.values(b"host")) <= 1
    assert not (parsed.values(b"content-length") and parsed.values(b"transfer-encoding"))


def client_hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def test_a_real_hello_gives_its_name() -> None:
    """Assert that the hello of a real TLS library gives the name it was made with, or none."""
    assert read_hello(client_hello("pypi.org")).server_name == b"pypi.org"
    nameless = read_hello(client_hello(None))
    assert (nameless.state, nameless.server_name) == ("hello", None)


def test_a_hello_is_partial_until_its_last_byte() -> None:
    """Assert that every proper prefix waits for more, and that bytes behind the hello change nothing."""
    data = client_hello("a.test")
    assert {read_hello(data[:count]).state for count in range(len(data))} == {"partial"}
    assert read_hello(data + b"\x14\x03\x03rest").server_name == b"a.test"


@pytest.mark.parametrize("size", [1, 3, 4, 5, 20, 100, 300])
def test_a_hello_in_many_records_is_reassembled(size: int) -> None:
    """Assert that the name is found although records cut the hello into pieces (a known way past filters)."""
    data = client_hello("hidden.test")
    body = data[5:]
    cut = b"".join(
        data[:3] + len(body[i : i + size]).to_bytes(2, "big") + body[i : i + size]
        for i in range(0, len(body), size)
    )
    if len(body) <= 60 * size:
        assert read_hello(cut).server_name == b"hidden.test"
    else:
        assert read_hello(cut).state == "bad"
    assert read_hello(cut[:-1]).state in ("partial", "bad")


def hello(*extensions: bytes, tail: bytes = b"") -> bytes:
    joined = b"".join(extensions)
    body = (
        b"\x03\x03"
        + bytes(32)
        + b"\0"
        + b"\0\x02\x13\x01"
        + b"\x01\0"
        + len(joined).to_bytes(2, "big")
        + joined
        + tail
    )
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def sni(name: bytes, kind: int = 0) -> bytes:
    entry = bytes((kind,)) + len(name).to_bytes(2, "big") + name
    content = len(entry).to_bytes(2, "big") + entry
    return b"\0\0" + len(content).to_bytes(2, "big") + content


@pytest.mark.parametrize(
    "data",
    [
        hello(sni(b"a.test"), sni(b"b.test")),
        hello(sni(b"")),
        hello(sni(b"a.test", kind=1)),
        hello(sni(b"a.test"), tail=b"x"),
        hello(sni(b"a.test") + b"\0"),
        hello(b"\0\0\0\x09\0\x09\0\0\x06a.test"),
        b"\x16\x03\x01\0\0",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\0\x04\x02\0\0\0",
        b"\x16\x03\x01\0\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\0\x01\x01\x17\x03\x01\0\x01x",
        b"\x80\x2e\x01\x03\x01" + bytes(40),
    ],
)
def test_a_broken_hello_is_refused(data: bytes) -> None:
    """Assert that a handshake with two names, none that fits, or impossible lengths is refused."""
    assert read_hello(data).state == "bad"


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x\r\n", b"GET / HTTP/1.1\r\n", b"\x16\x02", b"\0\0\0\x08\x04\xd2\x16\x2f", b"\x05"]
)
def test_other_protocols_are_plain(data: bytes) -> None:
    """Assert that protocols which are not TLS are told apart by their first bytes."""
    assert read_hello(data).state == "plain"


@given(st.binary(max_size=300), st.integers(0, 400))
def test_the_hello_reader_is_total(noise: bytes, position: int) -> None:
    """Assert that any bytes at any place give one of the four answers, also when read byte by byte."""
    good = hello(sni(b"a.test"))
    assert read_hello(noise).state in ("plain", "partial", "hello", "bad")
    assert read_hello(good[:position] + noise).state in ("plain", "partial", "hello", "bad")
