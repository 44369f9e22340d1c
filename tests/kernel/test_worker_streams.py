"""The worker on a byte stream: frames and JSON lines instead of descriptors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import BASE_ENV, build_worker, pack, state

pytestmark = pytest.mark.kernel
MAGIC = b"VJWORK1\n"


class Stream:
    """A worker behind two pipes; frames with a length of four bytes."""

    def __init__(self, binary: Path) -> None:
        self.process = subprocess.Popen(
            [str(binary), "--stream"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        assert self._exactly(len(MAGIC)) == MAGIC
        self.send(op="hello", id=0, version=1, env=BASE_ENV, cwd=b"/tmp", nonce=b"n")
        assert self.receive()["nonce"] == b"n"

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.output.read(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def raw(self, body: bytes) -> None:
        """Send one frame."""
        frame = len(body).to_bytes(4, "big") + body
        while frame:
            frame = frame[self.input.write(frame) :]

    def send(self, **message: Any) -> None:
        """Send one request."""
        self.raw(pack(message))

    def receive(self) -> dict[str, Any]:
        """Return the next frame."""
        message = msgpack.unpackb(self._exactly(int.from_bytes(self._exactly(4), "big")))
        assert isinstance(message, dict)
        return message

    def until_exit(self, number: int, *, credit: bool = True) -> tuple[dict[int, bytes], dict[str, Any]]:
        """Collect the output of one call, acknowledging it, until its last frame."""
        output = {1: b"", 2: b""}
        while True:
            message = self.receive()
            assert message["id"] == number, message
            if message.get("event") == "output":
                output[message["fd"]] += message["data"]
                if credit:
                    self.send(op="credit", id=number, fd=message["fd"], bytes=len(message["data"]))
            elif "exit_code" in message:
                return output, message

    def close(self) -> int:
        """End the stream and return the worker's status."""
        self.input.close()
        self.output.close()
        return self.process.wait(10)


@pytest.fixture
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker, compiled once for the session."""
    target = tmp_path_factory.getbasetemp() / "vectora-jail-worker-streams"
    return target if target.exists() else build_worker(target)


@pytest.fixture
def stream(binary: Path) -> Iterator[Stream]:
    """A worker on frames after its hello."""
    started = Stream(binary)
    yield started
    started.close()


def test_output_comes_before_the_end(stream: Stream) -> None:
    """Assert that both streams arrive as events, whole and in order, and that the exit is the last frame."""
    stream.send(op="exec", id=1, command=["sh", "-c", "echo out; echo err >&2; exit 3"])
    output, end = stream.until_exit(1)
    assert output == {1: b"out\n", 2: b"err\n"}
    assert end["exit_code"] == 3
    stream.send(op="exec", id=2, command=["sh", "-c", "head -c 5000000 /dev/zero; echo x >&2"], merge=True)
    output, end = stream.until_exit(2)
    assert sorted(output[1]) == sorted(b"\0" * 5_000_000 + b"x\n")
    assert output[2] == b""


def test_without_credit_a_call_waits_and_others_do_not(stream: Stream) -> None:
    """Assert that at most the window is sent ahead, and that another call goes on meanwhile."""
    stream.send(op="exec", id=1, command=["head", "-c", "3000000", "/dev/zero"])
    first = 0
    while first < 1 << 20:
        message = stream.receive()
        assert message["event"] == "output"
        first += len(message["data"])
    assert first == 1 << 20
    stream.send(op="exec", id=2, command=["echo", "two"])
    assert stream.until_exit(2)[0][1] == b"two\n"
    stream.send(op="credit", id=1, fd=1, bytes=1 << 20)
    second = stream.receive()
    assert second["id"] == 1
    stream.send(op="credit", id=1, fd=1, bytes=1 << 20)
    output, end = stream.until_exit(1)
    assert first + len(second["data"]) + len(output[1]) == 3_000_000
    assert end["exit_code"] == 0


def test_an_end_waits_for_credit_and_can_be_cancelled(stream: Stream) -> None:
    """Assert that output which is not acknowledged holds the exit back, and that a cancel drops it."""
    stream.send(op="exec", id=1, command=["head", "-c", "1060000", "/dev/zero"])
    got = 0
    while got < 1 << 20:
        got += len(stream.receive()["data"])
    stream.send(op="ping", id=2)
    assert stream.receive() == {"id": 2}
    stream.send(op="cancel", id=1)
    assert stream.receive()["exit_code"] in (0, 137)


def test_input_is_fed_and_acknowledged(stream: Stream) -> None:
    """Assert that stdin arrives in order, is acknowledged as it is taken, and ends with `last`."""
    stream.send(op="exec", id=1, command=["cat"], stdin=True)
    data = os.urandom(600_000)
    stream.send(op="stdin", id=1, data=data[:300_000])
    stream.send(op="stdin", id=1, data=data[300_000:], last=True)
    output, credit = b"", 0
    while True:
        message = stream.receive()
        if message.get("event") == "credit":
            credit += message["bytes"]
        elif message.get("event") == "output":
            output += message["data"]
        else:
            break
    assert output == data
    assert credit == len(data)
    assert message["exit_code"] == 0


def test_input_beyond_the_window_is_an_error(stream: Stream) -> None:
    """Assert that more than a megabyte ahead of the command is ENOBUFS and does not grow the worker."""
    stream.send(op="exec", id=1, command=["sleep", "10"], stdin=True)
    stream.send(op="stdin", id=1, data=b"x" * (1 << 20))
    assert stream.receive()["event"] == "credit"
    stream.send(op="stdin", id=1, data=b"x" * 100_000)
    assert stream.receive()["errno"] == 105
    stream.send(op="cancel", id=1)
    assert stream.until_exit(1)[1]["signal"] == signal.SIGKILL


def test_collected_output_keeps_head_and_tail(stream: Stream) -> None:
    """Assert that with `cap` the reply carries the ends of the output and counts what lies between."""
    stream.send(op="exec", id=1, command=["sh", "-c", "printf 0123456789; printf abcdefghij >&2"], cap=6)
    reply = stream.receive()
    assert (reply["stdout"], reply["dropped_stdout"]) == (b"012789", 4)
    assert (reply["stderr"], reply["dropped_stderr"]) == (b"abchij", 4)


def test_a_terminal_over_the_stream(stream: Stream) -> None:
    """Assert that a terminal's bytes travel both ways, that it is resized and that its end is an exit."""
    stream.send(
        op="terminal", id=1, command=["sh"], rows=40, cols=120, env=[b"PS1=$ ", b"PATH=/usr/bin:/bin"]
    )
    assert stream.receive()["event"] in ("started", "output")
    stream.send(op="resize", id=2, target=1, rows=50, cols=132)
    stream.send(op="stdin", id=1, data=b"stty size; exit 7\n")
    seen, code = b"", None
    while code is None:
        message = stream.receive()
        if message.get("event") == "output":
            seen += message["data"]
        code = message.get("exit_code")
    assert b"50 132" in seen
    assert code == 7


def test_large_and_bad_frames(stream: Stream) -> None:
    """Assert that a frame of megabytes runs, and that garbage and oversize are answered and survived."""
    arguments = [b"%06d" % number for number in range(100_000)]
    stream.send(op="exec", id=1, command=[b"true", *arguments])
    assert stream.until_exit(1)[1]["exit_code"] == 0
    stream.raw(b"\xc1\xc1")
    assert stream.receive()["errno"] == 74
    stream.input.write((20 << 20).to_bytes(4, "big"))
    assert stream.receive()["errno"] == 90
    for _ in range(20):
        block = bytes(1 << 20)
        while block:
            block = block[stream.input.write(block) :]
    stream.send(op="ping", id=3)
    assert stream.receive() == {"id": 3}


def test_the_end_of_the_stream_ends_everything(binary: Path) -> None:
    """Assert that commands die with the stream although the worker is no pid 1."""
    stream = Stream(binary)
    stream.send(op="exec", id=1, command=["sh", "-c", "setsid sleep 100 & echo $!; wait"])
    pid = int(stream.receive()["data"])
    assert stream.close() == 0
    assert state(pid) in ("Z", "X", "")


def test_the_lease_ends_a_silent_worker(binary: Path) -> None:
    """Assert that a worker whose host says nothing for its lease is gone, and a ping keeps it."""
    worker = subprocess.Popen([str(binary), "--stream"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stdout is not None
    body = pack({"op": "hello", "id": 0, "version": 1, "lease": 1})
    worker.stdin.write(len(body).to_bytes(4, "big") + body)
    worker.stdin.flush()
    assert worker.wait(5) == 0
    worker.stdin.close()
    worker.stdout.close()


def test_json_lines(binary: Path) -> None:
    """Assert that a person's lines are answered without hello, output in the reply, and before the end."""
    requests = [
        {"op": "exec", "id": 1, "command": ["sh", "-c", "echo $A; printf '\\377' >&2; exit 4"]},
        {"op": "nonsense", "id": 2},
        {"op": "exec", "id": 3, "command_b64": ["ZWNobw==", "/w=="]},
    ]
    text = "\n".join(["not json", *map(json.dumps, requests)])
    command, env = [str(binary), "--json"], {"A": "b", "PATH": os.defpath}
    ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=10, check=True, env=env)
    replies = {reply["id"]: reply for reply in map(json.loads, ran.stdout.splitlines())}
    assert replies[None]["errno"] == 74
    assert replies[1]["exit_code"] == 4
    assert (replies[1]["stdout"], replies[1]["stderr_b64"]) == ("b\n", "/w==")
    assert replies[2]["errno"] == 38
    assert replies[3]["stdout_b64"] == "/wo="


def test_files_travel_inside_the_replies(stream: Stream, tmp_path: Path) -> None:
    """Assert that on a stream a large file is read in parts and a long listing comes whole."""
    data = os.urandom(5_000_000)
    (tmp_path / "big").write_bytes(data)
    got = b""
    while len(got) < len(data):
        stream.send(op="read_file", id=1, path=bytes(tmp_path / "big"), offset=len(got))
        reply = stream.receive()
        assert reply["size"] == len(data)
        assert "fd" not in reply
        got += reply["content"]
    assert got == data
    for number in range(3000):
        (tmp_path / f"a-rather-long-name-{number}").touch()
    stream.send(op="list_dir", id=2, path=bytes(tmp_path))
    assert len(stream.receive()["entries"]) == 3001
    stream.send(op="write_file", id=3, path=bytes(tmp_path / "new"), content=data)
    assert stream.receive()["ok"] is True
    assert (tmp_path / "new").read_bytes() == data
