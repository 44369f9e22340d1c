"""The worker by itself: requests in, replies out, nothing left behind; without a jail and as pid 1."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import BASE_ENV, HELLO, NULL, PYTHON, Lane, Worker, build_worker, descriptors, gone, pack

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


# ---- hello and ping ----


def test_hello_names_the_walls(worker: Worker) -> None:
    """Assert that hello answers with pid, architecture and the errno of every wall that it was asked for."""
    assert worker.hello["pid"] == (1 if worker.bwrap else worker.process.pid)
    assert worker.hello["arch"] in ("x86_64", "aarch64")
    walls = worker.hello["walls"]
    assert walls["dumpable"] == walls["no_new_privs"] == walls["rlimits"] == 0
    assert walls["seccomp"] is None
    assert walls["landlock"] is None


def test_nothing_is_served_before_hello(binary: Path) -> None:
    """Assert that any other request before hello is EPROTO and that hello still works afterwards, once."""
    worker = Worker(binary)
    assert worker.call("ping")["errno"] == 71
    assert "walls" in worker.call("hello", version=1, env=[], cwd=b"/")
    assert worker.call("hello", version=1)["errno"] == 114
    assert "error" not in worker.call("ping")
    worker.close()


def test_the_nonce_comes_back(binary: Path) -> None:
    """Assert that hello repeats the nonce and refuses another protocol version."""
    worker = Worker(binary)
    assert worker.call("hello", version=99)["errno"] == 93
    assert worker.call("hello", version=1, nonce=b"0123456789abcdef")["nonce"] == b"0123456789abcdef"
    worker.close()


def test_the_probe_tells_what_is_not_denied(binary: Path, tmp_path: Path) -> None:
    """Assert that the probe child reports a write that succeeded as 0 and removes what it made."""
    target = tmp_path / "probe"
    worker = Worker(binary, hello={"probe": {"write": bytes(target), "syscall": 39}})
    assert worker.hello["walls"]["probe_write"] == 0
    assert worker.hello["walls"]["probe_syscall"] == 0
    assert not target.exists()
    worker.close()


def test_landlock_and_seccomp_are_applied(binary: Path, tmp_path: Path) -> None:
    """Assert that the ruleset and the filter bind every command, and that the probe child sees both deny."""
    allowed, denied = tmp_path / "in", tmp_path / "out"
    allowed.mkdir()
    denied.mkdir()
    # Return EPERM for getpgid (121 on x86_64, 155 on aarch64), else allow.
    number = 121 if os.uname().machine == "x86_64" else 155
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = b"".join(
        c.to_bytes(2, "little") + bytes([jt, jf]) + k.to_bytes(4, "little") for c, jt, jf, k in code
    )
    hello = {
        "env": BASE_ENV,
        "cwd": bytes(tmp_path),
        "seccomp": program,
        "landlock": {
            "handled_fs": 0x1FFF,
            "handled_net": 0,
            "scoped": 0,
            "rules": [[b"/", 0xD], [bytes(allowed), 0x1FFF], [b"/dev/null", 0x1FFF], [b"/missing", 0x1FFF]],
        },
        "probe": {"write": bytes(denied / "p"), "syscall": number},
    }
    worker = Worker(binary, hello=hello)
    if worker.hello["landlock_abi"] == 0:
        worker.close()
        pytest.skip("no Landlock here")
    walls = worker.hello["walls"]
    assert (walls["landlock"], walls["seccomp"]) == (0, 0)
    assert (walls["probe_write"], walls["probe_syscall"]) == (13, 1)
    assert worker.exec(["sh", "-c", "echo x > in/a"])["exit_code"] == 0
    assert worker.exec(["sh", "-c", "echo x > out/a"])["exit_code"] != 0
    assert (allowed / "a").exists()
    assert not (denied / "a").exists()
    worker.close()


def test_a_worker_that_calls_in(binary: Path, tmp_path: Path) -> None:
    """Assert that with `--socket` the worker connects to a listener, and ends with that connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        listener.settimeout(10)
        process = subprocess.Popen([str(binary), "--socket", str(tmp_path / "s")])
        lane = Lane(listener.accept()[0])
    lane.send({"op": "hello", "id": 1, "version": 1})
    assert lane.receive()["version"] == 1
    lane.sock.close()
    assert process.wait(10) == 0


# ---- exec ----


def test_exit_codes(worker: Worker) -> None:
    """Assert that codes, signals, 127 and 126 come back as the contract names them."""
    assert worker.exec(["true"])["exit_code"] == 0
    assert worker.exec(["sh", "-c", "exit 7"])["exit_code"] == 7
    killed = worker.exec(["sh", "-c", "kill -TERM $$"])
    assert (killed["exit_code"], killed["signal"]) == (143, 15)
    missing = worker.exec(["no-such-command"])
    assert (missing["exit_code"], missing["exec_errno"], missing["stage"]) == (127, 2, "exec")
    forbidden = worker.exec(["/etc/passwd"])
    assert (forbidden["exit_code"], forbidden["exec_errno"]) == (126, 13)
    nowhere = worker.exec(["true"], cwd=b"/no/such/directory")
    assert (nowhere["exec_errno"], nowhere["stage"]) == (2, "cwd")
    assert worker.exec([""])["exit_code"] == 127


def test_environment_and_directory(worker: Worker) -> None:
    """Assert that a command has the base environment or exactly its own, and its working directory."""
    assert worker.output(["env"])[1].split() == BASE_ENV
    assert worker.output(["/usr/bin/env"], env=[b"X=1 2", b"Y="])[1] == b"X=1 2\nY=\n"
    assert worker.output(["pwd"])[1] == b"/tmp\n"
    assert worker.output(["pwd"], cwd=b"/usr")[1] == b"/usr\n"
    assert worker.exec(["true"], env=[b"PATH=/nonexistent"])["exit_code"] == 127
    assert worker.exec(["true"], env=[b"PATH=/nonexistent:/usr/bin:/bin"])["exit_code"] == 0


def test_limits_of_a_command(binary: Path) -> None:
    """Assert that a command has exactly the limits it should have, inherited or its own, and the worker its own."""
    limits = [
        [4, 0, 0],
        [7, 100, 200],
        [8, 65536, 65536],
        [1, 1 << 20, 1 << 20],
        [12, 4096, 8192],
        [3, 1 << 22, 1 << 23],
    ]
    hello = {
        "env": BASE_ENV,
        "cwd": b"/tmp",
        "cmd_rlimits": limits,
        "worker_rlimits": [[7, 300, 300], [4, 0, 0]],
    }
    worker = Worker(binary, hello=hello)
    assert worker.hello["walls"]["rlimits"] == 0
    script = "import resource; print([resource.getrlimit(r) for r in (4, 7, 8, 1, 12, 3)])"
    assert worker.output([PYTHON, "-c", script])[1].decode().strip() == str([(s, h) for _, s, h in limits])
    text = Path(f"/proc/{worker.process.pid}/limits").read_text()
    assert next(line for line in text.splitlines() if "open files" in line).split()[3:5] == ["300", "300"]
    assert next(line for line in text.splitlines() if "file size" in line).split()[3] == "unlimited"
    worker.close()


def test_arguments_travel_unchanged(worker: Worker) -> None:
    """Assert that any byte but NUL reaches the command, in order; a NUL is refused."""
    arguments = [bytes(range(1, 256)), b"", "é".encode(), b"a b", b"x" * 5000]
    reply, output = worker.output(["printf", "%s\\n", *arguments])
    assert reply["exit_code"] == 0
    assert output == b"".join(argument + b"\n" for argument in arguments)
    assert worker.exec([b"echo", b"a\0b"])["errno"] == 22


def test_a_command_is_born_clean(worker: Worker) -> None:
    """Assert that a command has default signals, three descriptors and a process group of its own."""
    script = (
        "grep -E '^Sig(Blk|Ign|Pnd)' /proc/self/status; ls /proc/self/fd;"
        " [ $(ps -o pgid= $$) = $$ ] && echo own"
    )
    output = worker.output(["sh", "-c", script])[1].decode().split()
    values = [output[i + 1] for i in (0, 2, 4)]
    assert all(int(value, 16) == 0 for value in values)
    assert output[6:] == ["0", "1", "2", "3", "own"]


def test_a_body_in_a_memfd(worker: Worker) -> None:
    """Assert that a request of a megabyte in a sealed memfd runs, and that a bad one is refused."""
    arguments = [b"%06d" % number for number in range(90_000)]
    keys = {"command": [b"printf", b"%s", *arguments]}
    reply = body_call(worker, pack(keys | {"op": "exec", "id": 77}))
    assert reply["exit_code"] == 0, reply
    assert body_call(worker, b"\xc1" * 100)["errno"] == 74
    assert body_call(worker, b"")["errno"] == 22


def body_call(worker: Worker, body: bytes) -> dict[str, object]:
    """Send an exec whose map lies in a memfd."""
    fd = os.memfd_create("body", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, body)
        worker.send({"op": "exec", "id": 77, "body": True}, [NULL, NULL, NULL, fd])
    finally:
        os.close(fd)
    return worker.receive()


def test_a_status_pipe_takes_the_reply(worker: Worker) -> None:
    """Assert that with `status` the reply comes on the fourth descriptor."""
    import msgpack

    read, write = os.pipe()
    worker.begin("exec", command=["sh", "-c", "exit 5"], status=True, fds=[NULL, NULL, NULL, write])
    os.close(write)
    with open(read, "rb") as stream:
        assert msgpack.unpackb(stream.read())["exit_code"] == 5
    assert "error" not in worker.call("ping")


def test_a_script_is_descriptor_three(worker: Worker) -> None:
    """Assert that with `script` the fourth descriptor is number 3 of the command."""
    fd = os.memfd_create("script")
    os.write(fd, b"exit 9\n")
    reply = worker.call("exec", command=["sh", "/proc/self/fd/3"], script=True, fds=[NULL, NULL, NULL, fd])
    os.close(fd)
    assert reply["exit_code"] == 9


def test_little_output_in_the_reply(worker: Worker) -> None:
    """Assert that with a cap and no descriptors the reply carries the output, bounded, in one message."""
    script = "echo out; head -c 100000 /dev/zero >&2; exit 3"
    reply = worker.call("exec", command=["sh", "-c", script], cap=1 << 20)
    assert (reply["exit_code"], reply["stdout"], reply["dropped_stdout"]) == (3, b"out\n", 0)
    assert len(reply["stderr"]) + reply["dropped_stderr"] == 100_000
    assert len(pack(reply)) < 65_536


# ---- the end of a call ----


def test_daemons_end_with_their_call(worker: Worker) -> None:
    """Assert that setsid, double fork and an empty environment do not save a daemon."""
    script = "setsid sleep 100 & (setsid env -i /bin/sleep 100 </dev/null >/dev/null 2>&1 &) & exit 3"
    reply = worker.exec(["sh", "-c", script])
    assert reply["exit_code"] == 3
    assert reply["leftovers"] >= 1
    assert gone(worker, 0.2)


def test_a_timeout_ends_the_tree(worker: Worker) -> None:
    """Assert that a timeout answers 124 with every daemon dead, and not much later than asked."""
    begin = time.monotonic()
    reply = worker.exec(
        ["sh", "-c", "setsid sh -c 'trap \"\" TERM; sleep 100 & sleep 100' & sleep 100"], timeout_ms=200
    )
    took = time.monotonic() - begin
    assert (reply["exit_code"], reply["timed_out"]) == (124, True)
    assert 0.2 <= took < 1.0
    assert gone(worker, 0.2)


def test_a_neighbour_is_untouched(worker: Worker) -> None:
    """Assert that the end of one call leaves the daemons of a call that still runs alone."""
    lane = worker.lane()
    number = worker.begin("exec", lane=lane, command=["sh", "-c", "setsid sleep 101 & wait"], fds=[NULL] * 3)
    while len(worker.pids()) < (3 if worker.bwrap else 2):
        time.sleep(0.002)
    before = set(worker.pids())
    for _ in range(5):
        assert worker.exec(["sh", "-c", "setsid sleep 102 & exit 0"])["exit_code"] == 0
        assert worker.exec(["sleep", "50"], timeout_ms=20)["timed_out"]
    assert set(worker.pids()) == before
    worker.send({"op": "cancel", "id": number})
    assert lane.receive()["signal"] == 9
    assert gone(worker, 0.2)


def test_kept_processes_live_on(worker: Worker) -> None:
    """Assert that with leftovers="keep" a daemon survives later calls and dies with the jail."""
    reply = worker.exec(["sh", "-c", "setsid sleep 103 & exit 0"], leftovers="keep")
    assert (reply["exit_code"], reply["leftovers"]) == (0, 0)
    for _ in range(3):
        worker.exec(["sh", "-c", "sleep 104 & exit 0"])
    kept = set(worker.pids()) - {worker.worker_pid()}
    assert len(kept) == 1
    worker.sock.close()
    worker.process.wait(10)
    assert not Path(f"/proc/{kept.pop()}/exe").exists()


def test_cancel_on_another_lane(worker: Worker) -> None:
    """Assert that a call is cancelled by its id from any lane and still answers itself."""
    lane = worker.lane()
    number = worker.begin("exec", lane=lane, command=["sleep", "100"], fds=[NULL] * 3)
    worker.send({"op": "cancel", "id": number})
    reply = lane.receive()
    assert (reply["id"], reply["exit_code"], reply["signal"]) == (number, 137, 9)
    assert "error" not in worker.call("ping")


def test_the_end_of_a_lane_ends_its_call(worker: Worker) -> None:
    """Assert that closing a lane kills what was started from it and nothing else."""
    lane, other = worker.lane(), worker.lane()
    worker.begin("exec", lane=lane, command=["sleep", "100"], fds=[NULL] * 3)
    kept = worker.begin("exec", lane=other, command=["sleep", "0.5"], fds=[NULL] * 3)
    lane.sock.close()
    reply = other.receive()
    assert (reply["id"], reply["exit_code"]) == (kept, 0)
    assert gone(worker, 0.2)


def test_the_end_of_the_main_lane_ends_everything(worker: Worker) -> None:
    """Assert that the worker and every command end when the host closes the main lane."""
    worker.begin("exec", command=["sh", "-c", "setsid sleep 105 & sleep 105"], fds=[NULL] * 3)
    while len(worker.pids()) < 2:
        time.sleep(0.002)
    pids = worker.pids()
    worker.sock.close()
    worker.process.wait(5)
    end = time.monotonic() + 2
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.005)
    assert not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


# ---- spawn, signals, terminals ----


def test_spawn_tells_its_start_and_its_end(worker: Worker) -> None:
    """Assert that a spawn answers `started` once its exec is known and `exit` at its end."""
    lane = worker.lane()
    number = worker.begin("spawn", lane=lane, command=["sh", "-c", "sleep 0.1; exit 4"], fds=[NULL] * 3)
    started = lane.receive()
    assert (started["id"], started["event"], started["exec_errno"]) == (number, "started", 0)
    assert [job["id"] for job in worker.call("list")["jobs"]] == [number]
    ended = lane.receive()
    assert (ended["id"], ended["event"], ended["exit_code"]) == (number, "exit", 4)
    assert worker.call("list")["jobs"] == []


def test_a_spawn_that_cannot_start(worker: Worker) -> None:
    """Assert that a failed exec is told in `started` and followed by `exit`."""
    lane = worker.lane()
    worker.begin("spawn", lane=lane, command=["no-such-command"], fds=[NULL] * 3)
    assert lane.receive()["exec_errno"] == 2
    assert lane.receive()["exit_code"] == 127


def test_signal_and_kill(worker: Worker) -> None:
    """Assert that a signal reaches the leader or the tree and kill ends it; an unknown target is ESRCH."""
    lane = worker.lane()
    number = worker.begin("spawn", lane=lane, command=["sleep", "100"], fds=[NULL] * 3)
    lane.receive()
    assert "error" not in worker.call("signal", target=number, signo=int(signal.SIGTERM))
    assert lane.receive()["signal"] == 15
    number = worker.begin("spawn", lane=lane, command=["sh", "-c", "setsid sleep 100 & wait"], fds=[NULL] * 3)
    lane.receive()
    assert "error" not in worker.call("signal", target=number, signo=0, tree=True)
    assert "error" not in worker.call("kill", target=number)
    assert lane.receive()["signal"] == 9
    assert gone(worker, 0.2)
    assert worker.call("signal", target=number, signo=9)["errno"] == 3
    assert worker.call("kill", target=12345)["errno"] == 3


def test_terminal(worker: Worker) -> None:
    """Assert that a terminal is the command's own, has its size, follows a resize and ends with EIO."""
    import fcntl
    import struct
    import termios

    lane = worker.lane()
    script = "trap 'stty size; exit 6' WINCH; tty; stty size; while :; do sleep 0.05; done"
    lane.send({"op": "terminal", "id": 900, "command": ["sh", "-c", script], "rows": 40, "cols": 120})
    started, fds = lane.receive_fds()
    assert (started["event"], started["exec_errno"], len(fds)) == ("started", 0, 1)
    master = fds[0]
    assert struct.unpack("HHHH", fcntl.ioctl(master, termios.TIOCGWINSZ, b"\0" * 8))[:2] == (40, 120)
    seen = b""
    while b"40 120" not in seen:
        seen += os.read(master, 4096)
    assert b"/dev/pts/" in seen
    assert "error" not in worker.call("resize", target=900, rows=50, cols=132)
    seen = b""
    with pytest.raises(OSError, match="Input/output"):
        while True:
            seen += os.read(master, 4096)
    assert b"50 132" in seen
    os.close(master)
    assert lane.receive()["exit_code"] == 6


# ---- bad requests ----


def test_bad_messages_are_answered_and_survived(worker: Worker) -> None:
    """Assert that garbage, wrong types, unknown ops and missing descriptors are answered with errors."""
    for raw in (
        b"",
        b"\xc1",
        b"\x80",
        b"\x93\x01\x02\x03",
        pack({"id": 1}),
        pack({"op": "ping"}),
        os.urandom(500),
    ):
        if raw:
            worker.sock.send(raw)
            assert "error" in worker.receive()
    assert worker.call("nonsense")["errno"] == 38
    assert worker.call("exec", command=["true"])["errno"] == 9
    assert worker.call("exec", command=["true"], fds=[NULL, NULL])["errno"] == 9
    assert worker.call("exec", command=[], fds=[NULL] * 3)["errno"] == 22
    assert worker.call("exec", fds=[NULL] * 3)["errno"] == 22
    assert worker.call("exec", command="true", fds=[NULL] * 3)["errno"] == 74
    assert worker.call("exec", command=["true"], leftovers="maybe", fds=[NULL] * 3)["errno"] == 22
    assert worker.call("lane", fds=[NULL])["errno"] == 88
    worker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    worker.sock.send(b"\xc6" + b"\0" * 70_000)
    assert worker.receive()["errno"] == 90
    assert worker.exec(["true"])["exit_code"] == 0


def test_too_many_descriptors(worker: Worker) -> None:
    """Assert that descriptors beyond the limit are an error, all closed, and the worker stays up."""
    before = descriptors(worker)
    worker.send({"op": "ping", "id": 1}, [NULL] * 20)
    assert worker.receive()["errno"] == 24
    worker.send({"op": "ping", "id": 1}, [NULL] * 3)
    assert "error" not in worker.receive()
    worker.call("ping")  # the reply to the one before went out before its descriptors were closed
    assert descriptors(worker) == before


def test_ten_thousand_calls_grow_nothing(worker: Worker) -> None:
    """Assert that descriptors, memory and processes are the same after ten thousand calls."""

    def resident() -> int:
        status = Path(f"/proc/{worker.worker_pid()}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    lane = worker.lane()
    for _ in range(100):
        worker.exec(["/bin/true"])
    before, memory = descriptors(worker), resident()
    for _ in range(5_000):
        one = worker.begin("exec", command=["/nonexistent"], fds=[NULL] * 3)
        two = worker.begin("exec", lane=lane, command=["/nonexistent"], fds=[NULL] * 3)
        assert worker.receive()["id"] == one
        assert lane.receive()["id"] == two
    assert descriptors(worker) == before
    assert resident() <= memory + 64
    assert gone(worker)


def test_more_calls_than_places(worker: Worker) -> None:
    """Assert that a call above the bound is EAGAIN while control calls go on, and that places come back."""
    numbers = [worker.begin("exec", command=["/bin/sleep", "100"], fds=[NULL] * 3) for _ in range(1024)]
    assert worker.exec(["true"])["errno"] == 11
    assert "error" not in worker.call("ping")
    for number in numbers:
        worker.send({"op": "cancel", "id": number})
        assert worker.receive()["id"] == number
    assert worker.exec(["true"])["exit_code"] == 0
    assert gone(worker, 1)
