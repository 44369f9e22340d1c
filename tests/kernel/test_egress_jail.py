"""Assert that commands of a real jail reach what the rules name, by both doors, and nothing else."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import BASE_ENV, NULL, PYTHON, Worker, build_worker

from vectora_jail.egress_lane import BASE, EgressDoor
from vectora_jail.netplan import plan_names
from vectora_jail.netrules import NetRules

pytestmark = pytest.mark.kernel
PIN = "127.0.0.1"
PORT = 43999


@pytest.fixture
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker, compiled once for the session."""
    target = tmp_path_factory.getbasetemp() / "vectora-jail-worker-egress"
    return target if target.exists() else build_worker(target)


@pytest.fixture
def jailed(binary: Path) -> Iterator[Worker]:
    """A worker with a network namespace of its own."""
    started = Worker(binary, bwrap=True, hello={"env": BASE_ENV, "cwd": b"/tmp"})
    yield started
    started.close()


@pytest.fixture
def service() -> Iterator[int]:
    """A host service that answers each line with the same in capitals."""
    listener = socket.create_server((PIN, 0), backlog=1024)

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream, suppress(OSError):
            for line in stream:
                stream.write(line.upper())
                stream.flush()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def netns_of(worker: Worker) -> tuple[int, int]:
    """The network namespace of the worker behind bubblewrap, as its parent sees it."""
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    status = os.stat(f"/proc/{children[0]}/ns/net")
    return status.st_dev, status.st_ino


def open_door(worker: Worker, allow: list[str], **keywords: object) -> EgressDoor:
    names = {text.split(":")[0]: PIN for text in allow if ".test" in text}
    rules = NetRules.build(allow, hosts=names, private_addresses=True)
    netns = keywords.pop("jail_netns", netns_of(worker))
    return EgressDoor.open(worker.lane().sock, rules, plan_names(rules), jail_netns=netns, **keywords)


ASK = (
    "import socket, sys\n"
    "s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)\n"
    "s.sendall(sys.argv[3].encode().decode('unicode_escape').encode('latin-1'))\n"
    "s.shutdown(1)\n"
    "sys.stdout.buffer.write(b''.join(iter(lambda: s.recv(999), b'')))\n"
)


def ask(worker: Worker, address: str, port: int, say: str) -> bytes:
    reply, out = worker.output([PYTHON, "-c", ASK, address, str(port), say])
    assert reply["signal"] == 0, reply
    return out


def test_both_doors_of_a_real_jail(jailed: Worker, service: int) -> None:
    """Assert that a name's address, localhost and the proxy lead to the service, and other targets nowhere."""
    door = open_door(jailed, [f"a.test:{service}", f"localhost:{service}"])
    try:
        for address in ("127.77.0.1", "127.0.0.1", "::1"):
            assert ask(jailed, address, service, "hello\\n") == b"HELLO\n"
        proxy = door.egress.plan.proxy_port
        connect = f"CONNECT {{}}:{service} HTTP/1.1\\r\\n\\r\\nhello\\n"
        assert ask(jailed, PIN, proxy, connect.format("a.test")).endswith(b"\r\n\r\nHELLO\n")
        for other in ("b.test", "127.0.0.2", "169.254.169.254"):
            assert b" 403 " in ask(jailed, "::1", proxy, connect.format(other))
        assert [attempt.door for attempt in door.attempts_since()] == ["names"] * 3 + ["connect"] * 4
    finally:
        door.close()


def test_a_descriptor_of_another_namespace_is_refused(jailed: Worker, service: int) -> None:
    """Assert that a connection which is not of the expected network namespace is closed unserved."""
    status = os.stat("/proc/self/ns/net")
    door = open_door(jailed, [f"localhost:{service}"], jail_netns=(status.st_dev, status.st_ino))
    try:
        assert b"HELLO" not in ask(jailed, PIN, service, "hello\\n")
        assert "namespace" in door.attempts_since()[0].reason
    finally:
        door.close()


def test_localhost_can_be_granted_while_the_jail_runs(jailed: Worker, service: int) -> None:
    """Assert that a grant opens the port inside, its end closes it, and a taken port is EADDRINUSE."""
    door = open_door(jailed, [])
    try:
        assert b"refused" in ask(jailed, PIN, service, "hello\\n")
        door.allow(f"localhost:{service}", ttl=60)
        assert ask(jailed, "::1", service, "hello\\n") == b"HELLO\n"
        door.revoke(f"localhost:{service}")
        assert b"HELLO" not in ask(jailed, PIN, service, "hello\\n")
        door.allow(f"localhost:{service}")
        assert ask(jailed, PIN, service, "hello\\n") == b"HELLO\n"
        with pytest.raises(OSError) as caught:
            door.allow(f"localhost:{door.egress.plan.proxy_port}")
        assert caught.value.errno == errno.EADDRINUSE
        script = f"import socket,time\ns=socket.create_server(('127.0.0.1',{PORT}))\n"
        script += "print(1,flush=True)\ntime.sleep(99)"
        read, write = os.pipe()
        jailed.begin("exec", lane=jailed.lane(), command=[PYTHON, "-c", script], fds=[NULL, write, NULL])
        assert os.read(read, 2)
        os.close(read)
        os.close(write)
        with pytest.raises(OSError) as caught:
            door.allow(f"localhost:{PORT}")
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        door.close()


FLOOD = (
    "import socket, sys\n"
    "s = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20) for _ in range(200)]\n"
    "for x in s:\n"
    "    x.sendall(b'hello\\n')\n"
    "    assert x.recv(99) == b'HELLO\\n'\n"
    "    x.close()\n"
)


def test_a_flood_waits_inside_and_a_neighbour_is_served(jailed: Worker, binary: Path, service: int) -> None:
    """Assert that 200 connections at once are served by a window of 20, and the backend keeps its descriptors."""
    from vectora_jail.egress import EgressOptions

    neighbour = Worker(binary, bwrap=True, hello={"env": BASE_ENV, "cwd": b"/tmp"})
    door = open_door(jailed, [f"localhost:{service}"], options=EgressOptions(window=20))
    other = open_door(neighbour, [f"localhost:{service}"])
    try:
        before = len(os.listdir("/proc/self/fd"))
        lane = jailed.lane()
        jailed.begin("exec", lane=lane, command=[PYTHON, "-c", FLOOD, str(service)], fds=[NULL] * 3)
        time.sleep(0.2)
        begin = time.monotonic()
        assert ask(neighbour, PIN, service, "hello\\n") == b"HELLO\n"
        assert time.monotonic() - begin < 2
        assert len(os.listdir("/proc/self/fd")) < before + 100
        assert door.egress.live <= 20
        assert lane.receive()["exit_code"] == 0
        assert len(door.attempts_since()) == 200
    finally:
        other.close()
        door.close()
        neighbour.close()


def test_the_end_of_the_worker_ends_the_door(jailed: Worker, service: int) -> None:
    """Assert that a dead jail leaves no connection, and that closing twice is fine."""
    broken: list[str] = []
    door = open_door(jailed, [f"localhost:{service}"], on_broken=broken.append)
    lane = jailed.lane()
    script = f"import socket,time\ns=socket.create_connection(('127.0.0.1',{service}))\ntime.sleep(99)"
    jailed.begin("exec", lane=lane, command=[PYTHON, "-c", script], fds=[NULL] * 3)
    deadline = time.monotonic() + 5
    while not door.egress.live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert door.egress.live == 1
    jailed.process.kill()
    while door.egress.live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert door.egress.live == 0
    assert broken == []
    door.close()
    door.close()


def test_the_base_is_smaller_than_any_window() -> None:
    """Assert that every jail may have some connections whatever the others hold."""
    assert 0 < BASE < 32
