"""Assert that the engine reaches granted targets only, by any door, and stays responsive."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import hashlib
import os
import socket
import ssl
import struct
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vectora_jail import egress_dial, egress_grants, egress_io
from vectora_jail.egress import Egress, EgressOptions
from vectora_jail.egress_io import DescriptorError, Stream, check_descriptor, close_shared
from vectora_jail.netplan import plan_names, proxy_environment
from vectora_jail.netrules import NetRules, RuleError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and splice of Linux")


class World:
    """An engine behind a real listener, servers, and a resolver that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.requests: list[bytes] = []
        self.closed = 0
        self.cleanup: list = []
        self.tasks: set[asyncio.Task] = set()
        self.port = 0
        self.egress: Egress

    async def resolve(self, name: str, port: int) -> list[str]:
        self.asked.append(name)
        return []

    async def listen(self, handler, address: str = "127.0.0.1") -> int:
        server = await asyncio.start_server(handler, address, 0, backlog=1024)
        self.cleanup.append(server)
        return server.sockets[0].getsockname()[1]

    async def http_server(self) -> int:
        async def handler(reader, writer):
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    lower = head.lower()
                    body = b""
                    if b"content-length:" in lower:
                        body = await reader.readexactly(
                            int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                        )
                    elif b"transfer-encoding: chunked" in lower:
                        body = await reader.readuntil(b"0\r\n\r\n")
                    self.requests.append(head + body)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nserved")
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        return await self.listen(handler)

    async def start(self, allow=(), deny=(), **keywords) -> None:
        options = keywords.pop("options", EgressOptions(request_timeout_s=2.0))
        hosts = {
            text.split(":")[0]: "127.0.0.1" for text in allow if text.endswith(".test") or ".test:" in text
        }
        hosts = {name: address for name, address in hosts.items() if not name.startswith("*")}
        rules = NetRules.build(allow, deny, keywords.pop("hosts", hosts), private_addresses=True)
        keywords.setdefault("resolver", self.resolve)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        plan = replace(plan_names(rules), proxy_port=self.port)

        def on_closed() -> None:
            self.closed += 1

        self.egress = Egress(rules, plan=plan, options=options, on_closed=on_closed, **keywords)
        self.spawn(self.accept(listener))
        self.cleanup.append(listener)

    async def accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            self.spawn(self.egress.serve(sock)).set_name("serve")

    def spawn(self, work) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def tunnel(self, target: str):
        reader, writer = await self.connect()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        return reader, writer, await reader.readuntil(b"\r\n\r\n")

    async def say(self, raw: bytes) -> bytes:
        """Send bytes and read all that comes back."""
        reader, writer = await self.connect()
        writer.write(raw)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def run(self, *command: str, env=None) -> tuple[int, bytes]:
        clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**clean, **(env or {})},
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        return process.returncode or 0, out

    async def idle(self) -> None:
        """Wait until the engine has ended every connection."""
        serving = [task for task in self.tasks if task.get_name() == "serve"]
        await asyncio.gather(*serving, return_exceptions=True)

    async def close(self) -> None:
        await self.egress.close()
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for thing in self.cleanup:
            thing.close()


@asynccontextmanager
async def world(*allow: str, deny=(), **keywords):
    w = World()
    await w.start(allow, deny, **keywords)
    try:
        yield w
    finally:
        await w.close()


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def deny_reasons(w: World) -> list[str]:
    return [attempt.reason for attempt in w.egress.attempts_since() if attempt.action == "deny"]


def test_bc_95_only_the_allowed_name_is_reached_by_curl() -> None:
    """Assert that HTTP, CONNECT, SOCKS, keep-alive, Upgrade and FTP by curl reach A and never B."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start([f"a.test:{port}"])
        proxy = f"http://127.0.0.1:{w.port}"
        a, b = f"http://a.test:{port}/", f"http://b.test:{port}/"
        cases = [
            (["-x", proxy, a], b"served"),
            (["-x", proxy, b], b"403"),
            (["-p", "-x", proxy, a], b"served"),
            (["-p", "-x", proxy, b], b"403"),
            (["-x", f"socks5h://127.0.0.1:{w.port}", a], b"served"),
            (["-x", f"socks5h://127.0.0.1:{w.port}", b], b""),
            (["-x", proxy, a, "-H", f"Host: b.test:{port}"], b"403"),
            (["-x", proxy, a, b], b"served403"),
            (["-x", proxy, b, "-H", "Upgrade: websocket", "-H", "Connection: Upgrade"], b"403"),
            (["-x", proxy, f"ftp://a.test:{port}/"], b"403"),
            (["-x", proxy, "-X", "OPTIONS", "--request-target", "*", a], b"403"),
            (["-x", proxy, "--request-target", "/", a], b"403"),
            (["-x", proxy, "-d", "x" * 5000, a], b"served"),
            (["-x", proxy, "-d", "x" * 5000, "-H", "Transfer-Encoding: chunked", a], b"served"),
            (["-x", proxy, "-d", "x" * 100000, b], b"403"),
        ]
        for arguments, expected in cases:
            _, out = await w.run(
                "curl", "-sS", "-m", "5", "-o", "-", "-w", "%{http_code}%{http_connect}", *arguments
            )
            shown = out.replace(b"vectora-jail", b"")
            assert expected.replace(b"403", b"") in shown, (arguments, out)
            assert (b"403" in shown) == (b"403" in expected), (arguments, out)
        assert all(b"b.test" not in request for request in w.requests)
        assert {a.host for a in w.egress.attempts_since() if a.action == "allow"} == {"a.test"}
        await w.close()

    run(body())


def test_python_urllib_through_the_variables() -> None:
    """Assert that a client which knows the proxy variables is served, or told the rule it needs."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start([f"a.test:{port}"])
        script = (
            "import urllib.request, urllib.error\n"
            f"print(urllib.request.urlopen('http://a.test:{port}/').read().decode())\n"
            f"try: urllib.request.urlopen('http://b.test:{port}/')\n"
            "except urllib.error.HTTPError as e: print(e.code, e.headers['X-Vectora-Jail-Rule-Needed'])\n"
        )
        code, out = await w.run(sys.executable, "-c", script, env=proxy_environment(w.port))
        assert code == 0, out
        assert b"served" in out
        assert f"403 b.test:{port}".encode() in out
        await w.close()

    run(body())


def test_bc_97_a_denied_name_is_never_looked_up() -> None:
    """Assert that no resolver hears of a denied name by any door, and of an allowed one once."""

    async def body() -> None:
        async with world("ok.example:443", "*.zone.example:443", deny=["no.zone.example"]) as w:
            for name in ("secret.b", "no.zone.example", "zone.example", "evil-zone.example", "xn--a.b"):
                assert b" 403 " in await w.say(f"CONNECT {name}:443 HTTP/1.1\r\n\r\n".encode())
                assert b" 403 " in await w.say(
                    f"GET http://{name}/ HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
                )
                socks = b"\x05\x01\0\x05\x01\0\x03" + bytes([len(name)]) + name.encode() + b"\x01\xbb"
                assert (await w.say(socks))[:4] == b"\x05\0\x05\x02"
            assert w.asked == []
            assert b" 502 " in await w.say(b"CONNECT ok.example:443 HTTP/1.1\r\n\r\n")
            assert w.asked == ["ok.example"]

    run(body())


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.text(max_size=30), st.from_regex(r"\A[a-z.]{1,12}\.zone\.example\.?\Z")),
    st.sampled_from([443, 80]),
)
def test_what_is_not_allowed_never_resolves(name: str, port: int) -> None:
    """Assert that the resolver is asked exactly for the names that the rules allow."""
    rules = NetRules.build(["*.zone.example:443"], ["*.a.zone.example", "b.zone.example"])
    asked: list[str] = []

    async def resolver(host: str, _: int) -> list[str]:
        asked.append(host)
        return []

    asyncio.run(Egress(rules, resolver=resolver).open("connect", name, port))
    decision = rules.decide(name, port)
    assert asked == ([decision.host.name] if decision.action == "allow" and decision.host else [])


def test_rebinding_is_refused_and_the_checked_address_is_the_one_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert that private addresses behind a public name are refused, and mixed answers filtered."""
    connected: list[str] = []

    async def fake_connect(address, port, seconds):
        connected.append(str(address))
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(egress_dial, "_connect", fake_connect)
    answers = {
        "evil.example": ["127.0.0.1"],
        "six.example": ["::ffff:127.0.0.1", "64:ff9b::7f00:1", "fe80::1%eth0", "2002:7f00:1::"],
        "meta.example": ["169.254.169.254"],
        "mixed.example": ["10.0.0.1", "1.1.1.1", "1.1.1.1", "169.254.169.254"],
    }

    async def body() -> None:
        async def resolver(name: str, _: int) -> list[str]:
            return answers[name]

        egress = Egress(NetRules.build(list(answers), private_addresses=True), resolver=resolver)
        for name in answers:
            route = await egress.open("connect", name, 443)
            assert route.upstream is None
            assert route.unreachable == (name == "mixed.example"), route
        assert connected == ["1.1.1.1"]

    run(body())


def test_the_doors_of_names_lead_to_their_targets() -> None:
    """Assert that a name's own address leads to its target, and other addresses lead nowhere."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start([f"a.test:{port}", f"localhost:{port}"])
        assert w.egress.plan.doors["127.77.0.1", port] == ("a.test", port)
        for address, expected in (("127.77.0.1", b"served"), ("127.77.0.9", b"")):
            listener = socket.create_server((address, port))
            listener.setblocking(False)
            accept = w.spawn(w.accept(listener))
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
            with suppress(ConnectionError):
                assert (await reader.read(1000)).endswith(expected)
            writer.close()
            accept.cancel()
            await asyncio.gather(accept, return_exceptions=True)
            listener.close()
        ours, theirs = socket.socketpair()
        task = w.spawn(w.egress.serve(theirs, ("::1", port)))
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.read(1000)).endswith(b"served")
        writer.close()
        await task
        assert "no rule stands behind" in deny_reasons(w)[0]
        await w.close()

    run(body())


def hello_for(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


@pytest.mark.parametrize(
    ("name", "strict", "passes"),
    [
        ("a.test", True, True),
        ("b.test", True, False),
        (None, True, False),
        ("b.test", False, True),
        ("A.TEST", True, True),
    ],
)
def test_strict_sni(name: str | None, strict: bool, passes: bool) -> None:
    """Assert that TLS in a tunnel must name its target, and that not a byte of other TLS gets out."""

    async def body() -> None:
        w = World()
        got = bytearray()
        hello = hello_for(name)

        async def server(reader, writer):
            while data := await reader.read(4096):
                got.extend(data)
                if len(got) == len(hello):
                    writer.write(b"from the server")
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"], options=EgressOptions(strict_sni=strict, request_timeout_s=2.0))
        reader, writer, _ = await w.tunnel(f"a.test:{port}")
        writer.write(hello[:3])
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(hello[3:])
        answer = await asyncio.wait_for(reader.read(100), 5)
        if passes:
            assert answer == b"from the server"
            assert bytes(got) == hello
        else:
            assert answer == bytes((21, 3, 1, 0, 2, 2, 112))
            assert await reader.read() == b""
            assert bytes(got) == b""
            assert "strict_sni" in deny_reasons(w)[0]
        writer.close()
        await w.close()

    run(body())


def test_a_server_that_speaks_first_is_heard_under_strict_sni() -> None:
    """Assert that holding the client's first bytes back does not hold the server's greeting back."""

    async def body() -> None:
        w = World()

        async def server(reader, writer):
            writer.write(b"SSH-2.0-server\r\n")
            writer.write(b"echo " + await reader.readline())
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])
        reader, writer, _ = await w.tunnel(f"a.test:{port}")
        assert await asyncio.wait_for(reader.readline(), 5) == b"SSH-2.0-server\r\n"
        writer.write(b"SSH-2.0-client\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b"echo SSH-2.0-client\r\n"
        writer.close()
        await w.close()

    run(body())


def test_half_close_keeps_the_other_direction() -> None:
    """Assert that a server which answers only after end of file is heard to its end, and sees that end."""

    async def body() -> None:
        w = World()

        async def server(reader, writer):
            data = await reader.read()
            writer.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + b"y" * 1_000_000)
            await writer.drain()
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])
        sent = os.urandom(300_000)
        reader, writer, _ = await w.tunnel(f"a.test:{port}")
        writer.write(sent)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer[:64] == hashlib.sha256(sent).hexdigest().encode()
        assert len(answer) == 65 + 1_000_000
        writer.close()
        await w.idle()
        attempt = w.egress.attempts_since()[0]
        assert (attempt.sent, attempt.received, attempt.ended) == (300_000, 1_000_065, True)
        await w.close()

    run(body())


def test_a_large_transfer_is_exact_both_ways() -> None:
    """Assert that 48 MiB each way at once, spliced, arrive byte for byte, and no slot stays taken."""

    async def body() -> None:
        w = World()
        size = 48 << 20
        block = os.urandom(1 << 20)

        async def server(reader, writer):
            async def send():
                for _ in range(size >> 20):
                    writer.write(block)
                    await writer.drain()

            sending = asyncio.ensure_future(send())
            digest, count = hashlib.sha256(), 0
            while count < size:
                data = await reader.read(1 << 20)
                digest.update(data)
                count += len(data)
            await sending
            writer.write(digest.digest())
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])
        reader, writer, _ = await w.tunnel(f"a.test:{port}")

        async def up():
            for _ in range(size >> 20):
                writer.write(block)
                await writer.drain()

        sending = asyncio.ensure_future(up())
        digest, count = hashlib.sha256(), 0
        while count < size:
            data = await reader.read(1 << 20)
            digest.update(data)
            count += len(data)
        await sending
        want = hashlib.sha256()
        for _ in range(size >> 20):
            want.update(block)
        assert digest.digest() == want.digest()
        assert await reader.read() == want.digest()
        writer.close()
        await w.idle()
        assert w.egress.attempts_since()[0].received == size + 32
        assert w.egress.slots.take()
        assert w.egress.slots.take()
        await w.close()

    run(body())


def test_u_23_five_hundred_connections_at_once() -> None:
    """Assert that 500 tunnels at once work, give their credit back, and leave no descriptor."""

    async def body() -> None:
        w = World()

        async def server(reader, writer):
            writer.write(b"pong " + await reader.readline())
            await writer.drain()
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        started = asyncio.Event()
        open_ = 0

        async def one(number: int) -> None:
            nonlocal open_
            reader, writer, answer = await w.tunnel(f"a.test:{port}")
            assert b" 200 " in answer
            open_ += 1
            if open_ == 500:
                assert w.egress.live == 500
                started.set()
            await started.wait()
            writer.write(b"%d\n" % number)
            assert await reader.read() == b"pong %d\n" % number
            writer.close()

        slow = await loop_latency(asyncio.gather(*(one(number) for number in range(500))))
        assert slow < 1.0
        await w.idle()
        await asyncio.sleep(0.05)
        assert w.closed == 500
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        await w.close()

    run(body())


async def loop_latency(work) -> float:
    """Wait for the work and give the longest time that the loop did not come round, in seconds."""
    task = asyncio.ensure_future(work)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await task
    return longest


def test_more_connections_than_the_window_are_closed() -> None:
    """Assert that connections beyond the credit are closed, and each is credited back once."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start([f"a.test:{port}"], options=EgressOptions(window=3))
        held = [await w.tunnel(f"a.test:{port}") for _ in range(3)]
        with suppress(ConnectionError):
            assert await w.say(b"CONNECT a.test:1 HTTP/1.1\r\n\r\n") == b""
        assert "credit" in deny_reasons(w)[0]
        for _, writer, _ in held:
            writer.close()
        await w.close()
        assert w.closed == 4

    run(body())


def test_slow_loris_is_closed_and_holds_up_nobody() -> None:
    """Assert that a request which never completes ends at the deadline and delays nobody."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start([f"a.test:{port}"], options=EgressOptions(request_timeout_s=0.5))

        async def drip(raw: bytes) -> float:
            reader, writer = await w.connect()
            begin = time.monotonic()
            for byte in raw:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if reader.at_eof():
                    break
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            return time.monotonic() - begin

        raws = [b"GET http://a.test/" + b"x" * 200, b"\x05" + b"\xff" * 200, b"C" * 200, b""] * 10
        dripping = asyncio.gather(*(drip(raw) for raw in raws))
        slow = w.spawn(loop_latency(asyncio.sleep(0.6)))
        request = f"GET http://a.test:{port}/ HTTP/1.0\r\n\r\n".encode()
        for _ in range(5):
            assert (await w.say(request)).endswith(b"served")
        # bounds that tell "ended by the deadline" from "never", also on a machine that does other work
        assert max(await dripping) < 20.0
        print(f"loop latency meanwhile: {await slow * 1e3:.1f} ms")
        await w.close()

    run(body())


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"\x04\x01\x00\x50\x00\x00\x00\x01\0", b""),
        (b"\x16\x03\x01\0\0", b""),
        (b"\0", b""),
        (b"\x05\x01\x02", b"\x05\xff"),
        (b"\x05\x01\0\x05\x02\0\x01\x7f\0\0\x01\0\x50", b"\x05\0\x05\x07"),
        (b"\x05\x01\0\x05\x03\0\x01\x7f\0\0\x01\0\x50", b"\x05\0\x05\x07"),
        (b"\x05\x01\0\x05\x01\0\x02\x7f\0\0\x01\0\x50", b"\x05\0\x05\x08"),
        (b"\x05\x01\0\x05\x01\0\x01\x7f\0\0\x01\0\x50", b"\x05\0\x05\x02"),
        (b"\x05\x01\0\x05\x01\0\x04" + bytes(15) + b"\x01\0\x50", b"\x05\0\x05\x02"),
        (b"\x05\x01\0\x05\x01\0\x03\x06a\0test\0\x50", b"\x05\0\x05\x02"),
        (b"GET http://a.test/ HTTP/1.1\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", b"HTTP/1.1 403"),
        (b"X" * 70_000, b"HTTP/1.1 431"),
    ],
)
def test_other_protocols_are_refused(raw: bytes, answer: bytes) -> None:
    """Assert that SOCKS4, BIND, UDP, TLS and nonsense get the right refusal and reach nothing."""

    async def body() -> None:
        async with world("a.test:80") as w:
            got = b""
            with suppress(ConnectionError):
                got = await w.say(raw)
            assert got.startswith(answer)
            assert not answer or got
            assert deny_reasons(w)
            assert w.asked == []

    run(body())


def test_requests_of_one_connection_are_decided_one_by_one() -> None:
    """Assert that pipelined requests are decided singly, and that the server sees a new head."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start([f"a.test:{port}"])

        def get(host: str, extra: str = "") -> bytes:
            return f"GET http://{host}:{port}/p HTTP/1.1\r\nHost: {host}:{port}\r\n{extra}\r\n".encode()

        secret = "Proxy-Authorization: Basic eDp5\r\nConnection: X-Drop, host\r\nX-Drop: 1\r\nX-Keep: 2\r\n"
        answer = await w.say(get("A.test", secret) + get("a.test") + get("b.test") + get("a.test"))
        assert answer.count(b"served") == 2
        assert answer.count(b"403 Forbidden") == 1
        first = w.requests[0].decode()
        assert len(w.requests) == 2
        assert first.startswith("GET /p HTTP/1.1\r\n")
        assert f"Host: a.test:{port}\r\n" in first
        assert "X-Keep" in first
        assert "X-Drop" not in first
        assert "Proxy-" not in first
        smuggled = f"POST http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\n"
        smuggled += "Transfer-Encoding: chunked\r\n\r\n"
        answer = await w.say(smuggled.encode() + b"0\r\n\r\n" + get("b.test"))
        assert (answer.count(b"served"), answer.count(b"403 Forbidden")) == (1, 1)
        for chunk in (
            b"5;x=\n\r\nhello\r\n0\r\n\r\n",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"-1\r\n",
            b"5\r\nhelloX\n",
        ):
            answer = await w.say(smuggled.encode() + chunk)
            assert b"served" not in answer
        await w.close()

    run(body())


def test_answers_of_every_framing_arrive_whole() -> None:
    """Assert that sized, chunked and until-close answers, HEAD, 204, 100, early ones and 101 work."""

    async def body() -> None:
        w = World()

        async def server(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1]
            if path == b"/close":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil close")
            elif path == b"/chunked":
                writer.write(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nT: x\r\n\r\n"
                )
            elif path == b"/head":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            elif path == b"/none":
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            elif path == b"/continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                got = await reader.readexactly(4)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + got)
            elif path == b"/early":
                writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            elif path == b"/ws":
                assert b"upgrade: websocket" in head.lower()
                writer.write(
                    b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nfirst"
                )
                writer.write(await reader.readexactly(4))
            elif path == b"/broken":
                writer.write(b"HTTP/1.1 abc\r\n\r\n")
            await writer.drain()
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])

        async def ask(method: str, path: str, extra: str = "", body: bytes = b"", minor: int = 1) -> bytes:
            raw = f"{method} http://a.test:{port}{path} HTTP/1.{minor}\r\nHost: a.test:{port}\r\n"
            raw += f"{extra}\r\n"
            return await w.say(raw.encode() + body)

        close = "Connection: close\r\n"
        assert b"until close" in await ask("GET", "/close", close)
        assert b"5\r\nhello\r\n0\r\n\r\n" in await ask("GET", "/chunked", close)
        old = await ask("GET", "/chunked", minor=0)
        assert old.endswith(b"\r\n\r\nhello")
        assert b"chunked" not in old.lower()
        assert b"content-length: 1000" in (await ask("HEAD", "/head", close)).lower()
        assert b" 204 " in await ask("GET", "/none", close)
        expect = "Expect: 100-continue\r\nContent-Length: 4\r\n" + close
        answer = await ask("POST", "/continue", expect, b"data")
        assert b" 100 " in answer
        assert answer.endswith(b"data")
        assert b" 413 " in await ask("POST", "/early", "Content-Length: 100000000\r\n", b"x" * 1000)
        upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
        answer = await ask("GET", "/ws", upgrade, b"ping")
        assert b" 101 " in answer
        assert answer.endswith(b"firstping")
        assert b" 502 " in await ask("GET", "/broken", close)
        assert b" 502 " in await ask("GET", "/gone", close)
        await w.close()

    run(body())


def test_grants_end_and_deny_stands_above_them() -> None:
    """Assert that a grant opens its target at once, and cannot be had against a deny rule."""

    async def body() -> None:
        w = World()
        port = await w.http_server()
        await w.start(deny=["bad.test"], hosts={"a.test": "127.0.0.1", "bad.test": "127.0.0.1"})
        request = f"GET http://a.test:{port}/ HTTP/1.0\r\n\r\n".encode()
        assert b" 403 " in await w.say(request)
        w.egress.allow(f"a.test:{port}", ttl=100)
        assert b"served" in await w.say(request)
        assert w.egress.revoke(f"A.test:{port}")
        assert b" 403 " in await w.say(request)
        with pytest.raises(RuleError):
            w.egress.allow("bad.test:80")
        with pytest.raises(RuleError):
            w.egress.allow("a.test", ttl=0)
        with pytest.raises(RuleError):
            Egress(NetRules.build()).allow("10.0.0.1:80")
        await w.close()

    run(body())


def test_a_grant_runs_out_by_the_clock_that_counts_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the end of a grant is taken from seconds since boot, exclusive."""
    clock = [1000.0]
    monkeypatch.setattr(egress_grants, "now", lambda: clock[0])
    egress = Egress(NetRules.build())
    egress.allow("a.example:443", ttl=60)
    egress.allow("b.example:443")
    clock[0] = 1059.9
    assert [str(rule) for rule in egress.grants.rules()] == ["a.example:443", "b.example:443"]
    clock[0] = 1060.0
    assert [str(rule) for rule in egress.grants.rules()] == ["b.example:443"]


def test_somebody_is_asked_once_for_each_target() -> None:
    """Assert that connections share one question, a no is remembered, and an error is a no."""

    async def body() -> None:
        asked: list[str] = []

        async def on_request(request) -> bool:
            asked.append(request.rule_needed)
            await asyncio.sleep(0.05)
            if request.host == "error.test":
                raise RuntimeError
            return request.host == "a.test"

        w = World()
        port = await w.http_server()
        names = ["a.test", "b.test", "error.test"]
        await w.start(hosts=dict.fromkeys(names, "127.0.0.1"), on_request=on_request)

        def get(name: str) -> bytes:
            return f"GET http://{name}:{port}/ HTTP/1.0\r\n\r\n".encode()

        answers = await asyncio.gather(*(w.say(get("a.test")) for _ in range(20)))
        assert all(answer.endswith(b"served") for answer in answers)
        assert asked == [f"a.test:{port}"]
        for name in ("b.test", "b.test", "error.test", "error.test"):
            assert b" 403 " in await w.say(get(name))
        assert asked == [f"{name}:{port}" for name in names]
        assert b" 403 " in await w.say(b"GET http://127.0.0.1/ HTTP/1.0\r\n\r\n")
        assert len(asked) == 3
        await w.close()

    run(body())


def test_p4_only_a_connected_tcp_socket_of_the_jail_is_taken() -> None:
    """Assert that listeners, datagram and unix sockets, and those of other namespaces are refused."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagram.connect(("127.0.0.1", 9))
    pair = socket.socketpair()
    fresh = socket.socket()
    try:
        check_descriptor(accepted, None)
        for bad in (listener, datagram, pair[0], fresh):
            with pytest.raises(DescriptorError):
                check_descriptor(bad, None)
        with pytest.raises(DescriptorError):
            check_descriptor(accepted, (1, 1))
        with suppress(PermissionError):
            status = os.stat("/proc/self/ns/net")
            with suppress(DescriptorError):  # EPERM for those who do not own this namespace
                check_descriptor(accepted, (status.st_dev, status.st_ino))
    finally:
        for sock in (listener, client, accepted, datagram, *pair, fresh):
            sock.close()


def test_p4_a_jail_that_clears_o_nonblock_does_not_block_the_loop() -> None:
    """Assert that a shared socket never blocks the loop, whatever its duplicate's holder sets."""

    async def body() -> None:
        w = World()

        async def server(reader, writer):
            writer.write(b"z" * 20_000_000)
            await reader.read()
            writer.close()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])
        near, far = tcp_pair()
        duplicate = socket.socket(fileno=os.dup(far.fileno()))

        async def toggle() -> None:
            for _ in range(300):
                flags = fcntl.fcntl(duplicate.fileno(), fcntl.F_GETFL)
                fcntl.fcntl(duplicate.fileno(), fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1000)
                await asyncio.sleep(0.001)

        serving = w.spawn(w.egress.serve(far, ("127.77.0.1", port)))
        assert await loop_latency(toggle()) < 0.3
        near.close()
        duplicate.close()
        assert await loop_latency(asyncio.wait_for(asyncio.shield(serving), 10)) < 0.3
        await w.close()

    run(body())


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_a_close_never_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that closing with unread bytes and a hostile SO_LINGER returns within its bound."""
    monkeypatch.setattr(egress_io, "_DRAIN_S", 0.2)

    async def body() -> None:
        near, far = tcp_pair()
        stream = Stream(far, asyncio.get_running_loop())
        while stream.send_now(b"x" * 100_000):
            pass
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        begin = time.monotonic()
        assert await loop_latency(close_shared(far)) < 0.15
        assert time.monotonic() - begin < 2
        near.close()

    run(body())


def test_closing_the_engine_ends_every_connection() -> None:
    """Assert that idle and transferring connections end at `close`, and none is served after it."""

    async def body() -> None:
        w = World()

        async def server(reader, writer):
            with suppress(ConnectionError):
                while True:
                    writer.write(b"y" * 1_000_000)
                    await writer.drain()

        port = await w.listen(server)
        await w.start([f"a.test:{port}"])
        idle = await w.connect()
        reader, writer, _ = await w.tunnel(f"a.test:{port}")
        count = 0
        while count < 30_000_000:
            count += len(await reader.read(1 << 20))
        begin = time.monotonic()
        await w.egress.close()
        assert time.monotonic() - begin < 2
        assert w.egress.live == 0
        with suppress(ConnectionError):
            assert await idle[0].read() == b""
        with suppress(ConnectionError):
            assert await w.say(b"CONNECT a.test:1 HTTP/1.1\r\n\r\n") == b""
        for closing in (idle[1], writer):
            closing.close()
        await w.close()

    run(body())


def test_attempts_can_be_asked_for_by_number() -> None:
    """Assert that a call finds what was tried meanwhile, and a failing callback harms nothing."""

    async def body() -> None:
        seen: list[str] = []

        def on_attempt(attempt) -> None:
            seen.append(attempt.host)
            raise RuntimeError

        async with world("a.test:80", on_attempt=on_attempt) as w:
            await w.say(b"CONNECT one.example:443 HTTP/1.1\r\n\r\n")
            mark = w.egress.sequence
            await w.say(b"CONNECT two.example:443 HTTP/1.1\r\n\r\n")
            (attempt,) = w.egress.attempts_since(mark)
            assert (attempt.host, attempt.port, attempt.action, attempt.door) == (
                "two.example",
                443,
                "deny",
                "connect",
            )
            assert attempt.rule_needed == "two.example:443"
            assert seen == ["one.example", "two.example"]

    run(body())
