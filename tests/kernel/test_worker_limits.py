"""Limits that the worker holds by looking: memory, processes and written bytes of the whole jail."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import BASE_ENV, NULL, PYTHON, Worker, build_worker, gone

pytestmark = pytest.mark.kernel
MIB = 1 << 20


@pytest.fixture
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker, compiled once for the session."""
    target = tmp_path_factory.getbasetemp() / "vectora-jail-worker-limits"
    return target if target.exists() else build_worker(target)


@pytest.fixture(params=["plain", "bwrap"])
def limited(request: pytest.FixtureRequest, binary: Path, tmp_path: Path) -> Iterator[Any]:
    """Start a worker with these limits, without a jail or as pid 1."""
    started: list[Worker] = []

    def start(**limits: int) -> Worker:
        cwd = b"/tmp" if request.param == "bwrap" else bytes(tmp_path)
        hello = {"env": BASE_ENV, "cwd": cwd, "limits": {"memory": 0, "pids": 0, "disk": 0} | limits}
        started.append(Worker(binary, bwrap=request.param == "bwrap", hello=hello))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def limit_of(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the one limit that a reply reports."""
    found = [violation for violation in reply.get("violations", []) if violation["kind"] == "limit"]
    assert len(found) == 1, reply
    assert isinstance(found[0], dict)
    return found[0]


def test_the_largest_call_ends_over_the_memory_limit(limited: Any) -> None:
    """Assert that the call that holds too much memory is killed and says why, and its neighbour lives."""
    worker = limited(memory=96 * MIB)
    lane = worker.lane()
    neighbour = worker.begin("exec", lane=lane, command=["sleep", "1.5"], fds=[NULL] * 3)
    hog = "import time\na = bytearray(200 << 20)\na[::4096] = b'x' * len(a[::4096])\ntime.sleep(100)"
    reply = worker.exec([PYTHON, "-c", hog], timeout_ms=20_000)
    assert (reply["exit_code"], reply["signal"], reply["timed_out"]) == (137, 9, False)
    violation = limit_of(reply)
    assert (violation["what"], violation["limit"]) == ("memory", 96 * MIB)
    assert violation["observed"] > 96 * MIB
    assert lane.receive()["id"] == neighbour
    assert worker.exec(["true"])["exit_code"] == 0


def test_what_forks_share_counts_once(limited: Any) -> None:
    """Assert that ten forks of a process of 40 MiB stay below a limit of 150 MiB."""
    worker = limited(memory=150 * MIB)
    script = (
        "import os, time\na = b'x' * (40 << 20)\nchildren = [os.fork() for _ in range(3)]\ntime.sleep(0.5)\n"
    )
    assert worker.exec([PYTHON, "-c", script], timeout_ms=20_000)["exit_code"] == 0


def test_memory_in_a_memfd_counts(limited: Any) -> None:
    """Assert that memory that no process maps is found through its descriptor."""
    worker = limited(memory=64 * MIB)
    script = (
        "import os, time\n"
        "fd = os.memfd_create('x')\n"
        "for _ in range(150): os.write(fd, b'x' * (1 << 20))\n"
        "time.sleep(100)\n"
    )
    reply = worker.exec([PYTHON, "-c", script], timeout_ms=20_000)
    assert reply["timed_out"] is False
    assert limit_of(reply)["what"] == "memory"


def test_too_many_processes(limited: Any) -> None:
    """Assert that a call with more processes than the limit is killed with all of them."""
    worker = limited(pids=30)
    script = "import os, time\nfor _ in range(60):\n  if os.fork() == 0: time.sleep(100)\ntime.sleep(100)"
    reply = worker.exec([PYTHON, "-c", script], timeout_ms=20_000)
    assert reply["timed_out"] is False
    assert limit_of(reply)["what"] == "pids"
    assert gone(worker)


def test_a_process_cannot_hide_in_a_later_call(limited: Any) -> None:
    """Assert that one that takes the tag of a younger call is killed, so that it does not outlive its own."""
    worker = limited(memory=2048 * MIB)
    first, second = worker.lane(), worker.lane()
    script = (
        "import ctypes, os, sys\n"
        "tag = int(sys.stdin.readline())\n"
        "assert ctypes.CDLL(None).setrlimit(15, (ctypes.c_uint64 * 2)(tag, tag)) == 0\n"
        "print('hidden', flush=True)\n"
        "import time; time.sleep(100)\n"
    )
    tell, ask = os.pipe()
    read, write = os.pipe()
    worker.begin("exec", lane=first, command=[PYTHON, "-c", script], fds=[tell, write, write])
    time.sleep(0.1)  # the age that tells them apart is counted in hundredths of a second
    young = "import resource, time; print(resource.getrlimit(15)[1], flush=True); time.sleep(3)"
    worker.begin("exec", lane=second, command=[PYTHON, "-c", young], fds=[NULL, write, write])
    for fd in (tell, write):
        os.close(fd)
    with open(read, "rb") as stream, open(ask, "wb", buffering=0) as pen:
        pen.write(stream.readline())
        assert stream.readline() == b"hidden\n"
    assert first.receive()["signal"] == 9
    reply = second.receive()
    assert reply["exit_code"] == 0
    assert [violation["what"] for violation in reply["violations"]] == ["tag_forged"]


@pytest.mark.parametrize("limited", ["plain"], indirect=True)
@pytest.mark.parametrize("auto_reap", [False, True])
def test_written_bytes(limited: Any, tmp_path: Path, *, auto_reap: bool) -> None:
    """Assert that short writers are added up, and found by the file system where nobody reaps them."""
    worker = limited(disk=8 * MIB)
    script = (
        "import os, signal, time\n"
        f"if {auto_reap}: signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for number in range(40):\n"
        "  pid = os.fork()\n"
        "  if pid == 0:\n"
        "    f = os.open(str(number), 65); os.write(f, os.urandom(1 << 20)); os.fsync(f)\n"
        "    os._exit(0)\n"
        "  time.sleep(0.02)\n"
        "  if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL: os.waitpid(pid, 0)\n"
        "time.sleep(100)\n"
    )
    reply = worker.exec([PYTHON, "-c", script], timeout_ms=20_000)
    assert reply["timed_out"] is False, sum(path.stat().st_size for path in tmp_path.iterdir())
    assert limit_of(reply)["what"] == "disk"


@pytest.mark.parametrize("how", ["daemons", "short"])
def test_processor_time_counts_for_the_whole_tree(limited: Any, how: str) -> None:
    """Assert that spinners in sessions of their own, and a stream of short ones, end by the call's time."""
    worker = limited()
    spin = "while :; do :; done"
    scripts = {
        "daemons": f"for i in 1 2 3; do setsid sh -c '{spin}' & done; wait",
        "short": "while :; do (i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done); done",
    }
    reply = worker.exec(["sh", "-c", scripts[how]], cpu_ms=1500, timeout_ms=15_000)
    assert reply["timed_out"] is False
    violation = limit_of(reply)
    assert (violation["what"], violation["limit"]) == ("cpu", 1500)
    assert 1500 < violation["observed"] < 2500
    assert gone(worker)


def test_usage_tells_of_the_tree(limited: Any) -> None:
    """Assert that the peak of processes and memory of a call's tree is in its usage."""
    worker = limited(memory=2048 * MIB)
    script = (
        "import os, time\n"
        "a = bytearray(b'x' * (60 << 20))\n"
        "for _ in range(5):\n"
        "  if not os.fork(): time.sleep(0.3); os._exit(0)\n"
        "time.sleep(0.4)\n"
    )
    usage = worker.exec([PYTHON, "-c", script])["usage"]
    assert usage["procs"] >= 6
    assert usage["max_rss"] > 60 * MIB


def test_short_calls_are_not_looked_at(limited: Any) -> None:
    """Assert that limits leave a hundred quick calls alone."""
    worker = limited(memory=512 * MIB, pids=100, disk=512 * MIB)
    assert all(worker.exec(["true"])["exit_code"] == 0 for _ in range(100))
