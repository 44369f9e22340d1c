"""What a command may try against the worker, its neighbours and the end of its own call."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import HELLO, NULL, PYTHON, Lane, Worker, build_worker, descriptors, gone, state

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker, compiled once for the session."""
    return build_worker(tmp_path_factory.mktemp("worker") / "vectora-jail-worker")


@pytest.fixture(params=["plain", "bwrap"])
def worker(request: pytest.FixtureRequest, binary: Path) -> Iterator[Worker]:
    """A worker after its hello, without a jail and as pid 1."""
    if request.param == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    started = Worker(binary, bwrap=request.param == "bwrap", hello=HELLO)
    assert "error" not in started.hello, started.hello
    yield started
    started.close()


@pytest.fixture
def jailed(binary: Path) -> Iterator[Worker]:
    """A worker that is pid 1: the place for commands that signal everything they can reach."""
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    started = Worker(binary, bwrap=True, hello=HELLO)
    yield started
    started.close()


def test_a_storm_of_stops_never_stops_the_worker(jailed: Worker) -> None:
    """Assert that `kill(-1, SIGSTOP)` in a loop delays no ping and that timeouts still answer."""
    lane = jailed.lane()
    storm = "import os\nos.fork()\nwhile True:\n  os.kill(-1, 19)"
    number = jailed.begin("exec", lane=lane, command=[PYTHON, "-c", storm], fds=[NULL] * 3)
    time.sleep(0.2)
    for _ in range(50):
        begin = time.monotonic()
        assert jailed.exec(["true"], timeout_ms=50)["id"]
        assert time.monotonic() - begin < 1.2
        jailed.call("ping")
    jailed.send({"op": "cancel", "id": number})
    assert lane.receive()["signal"] == 9
    assert gone(jailed)


def test_traceme_is_no_end(worker: Worker) -> None:
    """Assert that a command that makes the worker its tracer is let go, ends by itself, and is reported."""
    script = (
        "import ctypes, os, signal, sys\n"
        "signal.signal(10, lambda *a: None)\n"
        "assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0\n"
        "os.kill(os.getpid(), 10)\n"
        "os._exit(5)\n"
    )
    reply = worker.exec([PYTHON, "-c", script], timeout_ms=5000)
    assert (reply["exit_code"], reply["signal"]) == (5, 0), reply
    assert [violation["what"] for violation in reply["violations"]] == ["ptrace_worker"]
    trace = "import ctypes, os\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\n"
    execute = trace + "os.execv('/bin/sh', ['sh', '-c', 'exit 8'])"
    assert worker.exec([PYTHON, "-c", execute], timeout_ms=5000)["exit_code"] == 8
    fatal = trace + "os.kill(os.getpid(), 15)"
    assert worker.exec([PYTHON, "-c", fatal], timeout_ms=5000)["signal"] == 15
    orphan = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\nimport time\ntime.sleep(0.1)\n{fatal}"
    reply = worker.exec([PYTHON, "-c", orphan], leftovers="keep")
    assert reply["exit_code"] == 0
    assert gone(worker)


def test_the_worker_cannot_be_killed_or_read(jailed: Worker) -> None:
    """Assert that a command can neither end pid 1 by a signal nor open its memory and descriptors."""
    script = (
        "kill -9 1; kill -STOP 1; kill -TERM 1;"
        " for f in mem environ maps fd/3; do cat /proc/1/$f >/dev/null 2>&1 && echo open $f; done; echo done"
    )
    reply, output = jailed.output(["sh", "-c", script])
    assert reply["exit_code"] == 0
    assert output.strip() == b"done"
    assert "error" not in jailed.call("ping")


def test_without_a_pid_namespace_commands_cannot_signal_the_worker(binary: Path) -> None:
    """Assert that a command in its own Landlock scope cannot end the worker, which still ends it."""
    worker = Worker(binary, hello=HELLO | {"cmd_scope": 2})
    if worker.hello["landlock_abi"] < 6:
        worker.close()
        pytest.skip("Landlock here has no scopes")
    script = f"kill -9 {worker.process.pid}; echo $?; setsid sleep 100 & kill -0 $! && echo own"
    reply, output = worker.output(["sh", "-c", script])
    assert output.split()[-2:] == [b"1", b"own"]
    assert reply["exit_code"] == 0
    assert "error" not in worker.call("ping")
    assert gone(worker)
    worker.close()


def test_a_worker_that_is_told_to_go_takes_its_commands_along(binary: Path) -> None:
    """Assert that SIGTERM to a worker without a pid namespace ends every command before it."""
    worker = Worker(binary, hello=HELLO)
    worker.begin("exec", command=["sh", "-c", "setsid sleep 100 & sleep 100"], fds=[NULL] * 3)
    while len(worker.pids()) < 3:
        time.sleep(0.002)
    pids = worker.pids()
    worker.process.terminate()
    assert worker.process.wait(5) == 0
    assert [pid for pid in pids if state(pid) not in ("Z", "X", "")] == []
    worker.close()


def test_a_forged_tag_is_killed_and_reported(worker: Worker) -> None:
    """Assert that a process that lowers its tag to a number that no call has is ended and named."""
    script = (
        "import os, resource, time\n"
        "done, ready = os.pipe()\n"
        "if os.fork(): os.read(done, 1); os._exit(0)\n"
        "os.setsid()\n"
        "RTTIME = 15\n"
        "import ctypes\n"
        "limit = (ctypes.c_uint64 * 2)(12345, 12345)\n"
        "assert ctypes.CDLL(None).setrlimit(RTTIME, limit) == 0\n"
        "os.write(ready, b'x')\n"
        "time.sleep(100)\n"
    )
    reply = worker.exec([PYTHON, "-c", script])
    assert [violation["what"] for violation in reply["violations"]] == ["tag_forged"]
    assert gone(worker, 0.3)


def test_two_workers_without_a_pid_namespace_leave_each_other_alone(binary: Path) -> None:
    """Assert that neither the end of a call nor the end of a worker touches another worker's commands."""
    one, two = Worker(binary, hello=HELLO), Worker(binary, hello=HELLO)
    number = one.begin("exec", command=["sh", "-c", "setsid sleep 3 & sleep 1; exit 5"], fds=[NULL] * 3)
    while len(one.pids()) < 3:
        time.sleep(0.002)
    before = set(one.pids())
    assert two.exec(["sh", "-c", "setsid sleep 100 & exit 0"])["leftovers"] == 1
    two.begin("exec", command=["sleep", "100"], fds=[NULL] * 3)
    two.close()
    assert set(one.pids()) == before
    reply = one.receive()
    assert (reply["id"], reply["exit_code"], reply["leftovers"]) == (number, 5, 1)
    one.close()


def test_a_tag_cannot_be_raised(worker: Worker) -> None:
    """Assert that a command cannot take its tag off, as root neither."""
    script = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.setrlimit(15, (ctypes.c_uint64 * 2)(2**64 - 1, 2**64 - 1)) == -1\n"
    )
    assert worker.exec([PYTHON, "-c", script])["exit_code"] == 0


def test_a_fork_bomb_ends_with_its_call(jailed: Worker) -> None:
    """Assert that a call that forks without end is over soon after its timeout, and a neighbour lives on."""
    lane = jailed.lane()
    neighbour = jailed.begin("exec", lane=lane, command=["sleep", "100"], fds=[NULL] * 3)
    script = (
        "import os\n"
        "for _ in range(200):\n"
        "  if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True:\n"
        "      if os.fork(): os._exit(0)\n"
    )
    begin = time.monotonic()
    reply = jailed.exec([PYTHON, "-c", script], timeout_ms=300)
    assert reply["exit_code"] in (0, 124)
    assert time.monotonic() - begin < 2.5
    assert "error" not in jailed.call("ping")
    jailed.send({"op": "cancel", "id": neighbour})
    assert lane.receive()["signal"] == 9
    assert gone(jailed, 2)


def test_lanes_are_bounded(worker: Worker) -> None:
    """Assert that lanes come and go without a trace."""
    worker.lane()  # the first ones make the set that lanes are waited for in
    counts = []
    for _ in range(4):
        lanes: list[Lane] = [worker.lane() for _ in range(100)]
        for lane in lanes:
            worker.call("ping", lane=lane)
        for lane in lanes:
            lane.sock.close()
        for _ in range(10):  # the ends of lanes are seen some at a time
            worker.call("ping")
        counts.append(descriptors(worker))
    assert counts == counts[:1] * 4


def test_cpu_time_is_bounded(worker: Worker) -> None:
    """Assert that a busy loop over its processor time ends, by the kernel's limit or the worker's, and says why."""
    reply = worker.exec(["sh", "-c", "while :; do :; done"], cpu_ms=1000, timeout_ms=8000)
    assert reply["signal"] in (signal.SIGXCPU, signal.SIGKILL)
    assert reply["timed_out"] is False
    assert reply["violations"][0]["what"] == "cpu"
