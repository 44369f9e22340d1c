"""A small client of the worker's protocol for the tests: one process, its lanes, calls and descriptors."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

SOURCES = Path(__file__).resolve().parents[2] / "worker"
NULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
BASE_ENV = [b"PATH=/usr/local/bin:/usr/bin:/bin", b"BASE=1"]
HELLO = {"env": BASE_ENV, "cwd": b"/tmp", "worker_rlimits": [[7, 256, 256]]}
BWRAP = [
    *("bwrap", "--unshare-all", "--unshare-user", "--as-pid-1", "--cap-drop", "ALL"),
    *("--die-with-parent", "--new-session", "--ro-bind", "/", "/"),
    *("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
]


def build_worker(target: Path) -> Path:
    """Compile the worker from the tree, or take the one that ``VJ_TEST_WORKER`` names."""
    given = os.environ.get("VJ_TEST_WORKER")
    if given:
        return Path(given)
    compiler = shutil.which("musl-gcc") or shutil.which("cc") or "gcc"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c")) if path.name != "launcher.c"]
    command = [compiler, "-std=gnu11", "-static", "-Os", "-Wall", "-Wextra", *sources, "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    return target


def pack(message: dict[str, Any]) -> bytes:
    """Return the message as msgpack bytes."""
    packed = msgpack.packb(message)
    assert isinstance(packed, bytes)
    return packed


class Lane:
    """One SEQPACKET socket to the worker; replies time out after ten seconds."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(10)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one request with its descriptors."""
        socket.send_fds(self.sock, [pack(message)], list(fds))

    def receive(self) -> dict[str, Any]:
        """Return one reply; EOFError when the worker closed the lane."""
        reply, fds = self.receive_fds()
        for fd in fds:
            os.close(fd)
        return reply

    def receive_fds(self) -> tuple[dict[str, Any], list[int]]:
        """Return one reply and the descriptors that came with it."""
        data, fds, _flags, _address = socket.recv_fds(self.sock, 65536, 8)
        if not data:
            raise EOFError
        reply = msgpack.unpackb(data)
        assert isinstance(reply, dict)
        return reply, list(fds)


class Worker(Lane):
    """A worker of its own, in no jail or as pid 1 of a plain bubblewrap."""

    def __init__(self, binary: Path, *, bwrap: bool = False, hello: dict[str, Any] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        command = [str(binary)]
        if bwrap:
            command = [*BWRAP, "--ro-bind", str(binary), "/tmp/worker", "--", "/tmp/worker"]
        self.process = subprocess.Popen([*command, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self.bwrap = bwrap
        self.ids = 0
        self.lanes: list[Lane] = []
        if hello is not None:
            self.hello = self.call("hello", version=1, **hello)

    def next_id(self) -> int:
        """Return a number that no call of this worker had."""
        self.ids += 1
        return self.ids

    def call(
        self, op: str, *, fds: Sequence[int] = (), lane: Lane | None = None, **keys: Any
    ) -> dict[str, Any]:
        """Send one request and return its reply."""
        lane = lane or self
        number = self.next_id()
        lane.send({"op": op, "id": number, **keys}, fds)
        reply = lane.receive()
        assert reply["id"] == number, reply
        return reply

    def begin(self, op: str, *, fds: Sequence[int], lane: Lane | None = None, **keys: Any) -> int:
        """Send a request that is answered later and return its id."""
        number = self.next_id()
        (lane or self).send({"op": op, "id": number, **keys}, fds)
        return number

    def exec(
        self, command: Sequence[str | bytes], *, lane: Lane | None = None, **keys: Any
    ) -> dict[str, Any]:
        """Run a command whose streams are ``/dev/null``."""
        return self.call("exec", command=command, fds=[NULL, NULL, NULL], lane=lane, **keys)

    def output(self, command: Sequence[str | bytes], **keys: Any) -> tuple[dict[str, Any], bytes]:
        """Run a command and return its reply and what it wrote to both streams."""
        read, write = os.pipe()
        try:
            number = self.begin("exec", command=command, fds=[NULL, write, write], **keys)
        finally:
            os.close(write)
        reply = self.receive()
        assert reply["id"] == number, reply
        with open(read, "rb") as stream:
            return reply, stream.read()

    def lane(self) -> Lane:
        """Add a lane to the worker and return our end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            reply = self.call("lane", fds=[theirs.fileno()])
        assert "error" not in reply, reply
        self.lanes.append(Lane(ours))
        return self.lanes[-1]

    def pids(self) -> list[int]:
        """Return the host's numbers of every live process below the worker, zombies left out."""
        return [pid for pid in descendants(self.process.pid) if state(pid) not in ("Z", "X", "")]

    def worker_pid(self) -> int:
        """Return the host's number of the worker itself."""
        if not self.bwrap:
            return self.process.pid
        return next(pid for pid in descendants(self.process.pid) if pid != self.process.pid)

    def close(self) -> int:
        """Close the main lane and return the exit status."""
        for lane in [self, *self.lanes]:
            lane.sock.close()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise


def state(pid: int) -> str:
    """Return the state letter of a process, or nothing when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def descendants(root: int) -> list[int]:
    """Return every process below this one, in the order of a walk."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{root}/task/{root}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable


def gone(worker: Worker, deadline: float = 1.0) -> bool:
    """Return whether no command lives within the deadline (the worker itself may)."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if set(worker.pids()) <= {worker.worker_pid()}:
            return True
        time.sleep(0.005)
    return False


def descriptors(worker: Worker) -> int:
    """Return how many descriptors the worker has open; always 0 for a user, who cannot see into it.

    There the limit that every worker of the tests gets shows what leaks.
    """
    try:
        return len(os.listdir(f"/proc/{worker.worker_pid()}/fd"))
    except PermissionError:
        return 0
