"""Doors of the jail's loopback: accepted and connected sockets by descriptor, and the program for ssh."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import BASE_ENV, NULL, PYTHON, Lane, Worker, build_worker

pytestmark = pytest.mark.kernel
PORT = 43128


@pytest.fixture
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker, compiled once for the session."""
    target = tmp_path_factory.getbasetemp() / "vectora-jail-worker-forward"
    return target if target.exists() else build_worker(target)


@pytest.fixture
def jailed(binary: Path) -> Iterator[Worker]:
    """A worker with a network namespace of its own."""
    started = Worker(binary, bwrap=True, hello={"env": BASE_ENV, "cwd": b"/tmp"})
    yield started
    started.close()


def accepted(lane: Lane) -> tuple[dict[str, object], socket.socket]:
    """Return the next accepted connection of a lane."""
    event, fds = lane.receive_fds()
    assert event["event"] == "accepted", event
    return event, socket.socket(fileno=fds[0])


CLIENT = (
    "import socket\n"
    "s = socket.create_connection(('{}', {}), 5)\n"
    "s.sendall(b'hello')\n"
    "print(s.recv(99).decode())"
)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.77.0.9", "::1"])
def test_a_connection_comes_out_by_descriptor(jailed: Worker, address: str) -> None:
    """Assert that the host talks to a command's connection and knows where it was accepted."""
    lane = jailed.lane()
    lane.send({"op": "egress", "id": 9, "listen": [[address, PORT]], "credit": 4})
    assert lane.receive() == {"id": 9, "bound": [0]}
    read, write = os.pipe()
    command = [PYTHON, "-c", CLIENT.format(address, PORT)]
    number = jailed.begin("exec", command=command, fds=[NULL, write, write])
    os.close(write)
    event, connection = accepted(lane)
    assert (event["id"], event["addr"], event["port"]) == (9, address, PORT)
    with connection:
        connection.settimeout(5)
        assert connection.recv(99) == b"hello"
        connection.sendall(b"hi there")
    assert jailed.receive()["id"] == number
    with open(read, "rb") as stream:
        assert stream.read() == b"hi there\n"


def test_only_the_loopback_can_be_bound(jailed: Worker) -> None:
    """Assert that other addresses, taken ports and nonsense are told one by one, and the rest is bound."""
    lane = jailed.lane()
    listen = [["0.0.0.0", PORT], ["127.0.0.1", PORT], ["127.0.0.1", PORT], ["name", PORT], ["127.0.0.1", 0]]
    lane.send({"op": "egress", "id": 9, "listen": listen, "credit": 1})
    assert lane.receive()["bound"] == [99, 0, 98, 22, 22]


def test_without_credit_connections_wait(jailed: Worker) -> None:
    """Assert that no more connections come out than there is credit, which brings the waiting ones."""
    lane = jailed.lane()
    lane.send({"op": "egress", "id": 9, "listen": [["127.0.0.1", PORT]], "credit": 2})
    lane.receive()
    script = (
        "import socket, time\n"
        f"a = [socket.create_connection(('127.0.0.1', {PORT}), 5) for _ in range(200)]\n"
        "time.sleep(100)\n"
    )
    caller = jailed.lane()
    jailed.begin("exec", lane=caller, command=[PYTHON, "-c", script], fds=[NULL] * 3)
    kept = [accepted(lane)[1] for _ in range(2)]
    lane.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        lane.receive()
    lane.sock.settimeout(10)
    assert "error" not in jailed.call("ping")
    lane.send({"op": "credit", "id": 9, "n": 198})
    kept += [accepted(lane)[1] for _ in range(198)]
    for connection in kept:
        connection.close()


def test_a_dropped_lane_frees_its_ports(jailed: Worker) -> None:
    """Assert that the end of a lane ends its listeners."""
    for _ in range(3):
        lane = jailed.lane()
        lane.send({"op": "egress", "id": 9, "listen": [["127.0.0.1", PORT], ["::1", PORT]], "credit": 1})
        assert lane.receive()["bound"] == [0, 0]
        lane.sock.close()
        jailed.call("ping")


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_connect_reaches_a_server_inside(jailed: Worker, family: str) -> None:
    """Assert that a server on either loopback is found, and that a closed port is ECONNREFUSED."""
    caller, lane = jailed.lane(), jailed.lane()
    assert jailed.call("connect", port=PORT + 1)["errno"] == 111
    script = (
        "import socket\n"
        f"s = socket.create_server(('{family}', {PORT + 1}), family={10 if ':' in family else 2})\n"
        "print('up', flush=True)\n"
        "c = s.accept()[0]\n"
        "c.sendall(b'inside')\n"
    )
    read, write = os.pipe()
    jailed.begin("exec", lane=caller, command=[PYTHON, "-c", script], fds=[NULL, write, write])
    os.close(write)
    with open(read, "rb") as stream:
        assert stream.readline() == b"up\n"
    lane.send({"op": "connect", "id": 3, "port": PORT + 1})
    reply, fds = lane.receive_fds()
    assert reply == {"id": 3}
    with socket.socket(fileno=fds[0]) as connection:
        connection.settimeout(5)
        assert connection.recv(99) == b"inside"
    assert caller.receive()["exit_code"] == 0


def proxy(server: socket.socket, answer: bytes, seen: list[bytes]) -> None:
    """Serve one CONNECT and echo what comes through the tunnel."""
    with contextlib.suppress(OSError):
        connection = server.accept()[0]
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            seen.append(head)
            connection.sendall(answer)
            while data := connection.recv(4096):
                connection.sendall(data)


@pytest.mark.parametrize("granted", [True, False])
def test_the_program_for_ssh(binary: Path, *, granted: bool) -> None:
    """Assert that `--connect` asks the proxy for a tunnel and copies both ways, and tells a refusal."""
    answer = b"HTTP/1.1 200 OK\r\n\r\nfirst " if granted else b"HTTP/1.1 403 not in the policy\r\n\r\n"
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=proxy, args=(server, answer, seen))
        thread.start()
        env = {"https_proxy": f"http://127.0.0.1:{server.getsockname()[1]}"}
        command = [str(binary), "--connect", "example.test:22"]
        ran = subprocess.run(command, input=b"echo me", capture_output=True, env=env, timeout=10, check=False)
        thread.join(5)
    assert seen == [b"CONNECT example.test:22 HTTP/1.1\r\nHost: example.test:22\r\n\r\n"]
    if granted:
        assert (ran.returncode, ran.stdout) == (0, b"first echo me")
    else:
        assert ran.returncode == 1
        assert b"403 not in the policy" in ran.stderr
