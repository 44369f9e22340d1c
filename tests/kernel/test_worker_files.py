"""File calls through a live worker: inline, by descriptor, in a thread, and over a stream."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from worker_client import BASE_ENV, Worker, build_worker, descriptors

pytestmark = pytest.mark.kernel


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Worker]:
    """A worker without a jail whose working directory is the test's own."""
    target = tmp_path_factory.getbasetemp() / "vectora-jail-worker-files"
    binary = target if target.exists() else build_worker(target)
    started = Worker(binary, hello={"env": BASE_ENV, "cwd": bytes(tmp_path)})
    yield started
    started.close()


def test_a_small_file_travels_in_the_message(worker: Worker, tmp_path: Path) -> None:
    """Assert that write_file and read_file carry little content inside their messages."""
    reply = worker.call("write_file", path=b"a", content=b"hello")
    assert reply["ok"] is True
    assert (tmp_path / "a").read_bytes() == b"hello"
    assert worker.call("read_file", path=b"a")["content"] == b"hello"
    assert worker.call("read_file", path=b"missing")["errno"] == 2


def test_a_large_file_travels_by_descriptor(worker: Worker, tmp_path: Path) -> None:
    """Assert that more than the inline limit comes, and goes, as a descriptor, and none is left open."""
    data = os.urandom(1 << 20)
    before = descriptors(worker)
    body = os.memfd_create("content", os.MFD_ALLOW_SEALING)
    os.write(body, data)
    reply = worker.call("write_file", path=b"big", body=True, fds=[body])
    os.close(body)
    assert reply["ok"] is True
    assert (tmp_path / "big").read_bytes() == data
    worker.send({"op": "read_file", "id": 5, "path": b"big"})
    reply, fds = worker.receive_fds()
    assert reply["fd"] is True
    assert os.pread(fds[0], 1 << 21, 0) == data
    os.close(fds[0])
    worker.call("ping")
    assert descriptors(worker) <= before + 1  # the event descriptor of the threads


def test_a_long_listing_is_a_map_in_a_memfd(worker: Worker, tmp_path: Path) -> None:
    """Assert that a directory too large for one message is listed completely."""
    (tmp_path / "d").mkdir()
    names = {f"file-with-a-long-name-{number:06d}" for number in range(3000)}
    for name in names:
        (tmp_path / "d" / name).touch()
    worker.send({"op": "list_dir", "id": 6, "path": b"d"})
    reply, fds = worker.receive_fds()
    assert reply["fd"] is True
    listing = msgpack.unpackb(os.pread(fds[0], 1 << 22, 0))
    os.close(fds[0])
    assert {name.decode() for name, _kind in listing["entries"]} == names


def test_a_slow_call_delays_nobody(worker: Worker, tmp_path: Path) -> None:
    """Assert that pings are answered while a large tree is removed, and the removal is complete."""
    for directory in range(40):
        (tmp_path / "tree" / str(directory)).mkdir(parents=True)
        for number in range(100):
            (tmp_path / "tree" / str(directory) / str(number)).touch()
    lane = worker.lane()
    lane.send({"op": "remove", "id": 7, "path": b"tree", "recursive": True})
    worst = 0.0
    for _ in range(20):
        begin = time.monotonic()
        worker.call("ping")
        worst = max(worst, time.monotonic() - begin)
    assert "error" not in lane.receive()
    assert not (tmp_path / "tree").exists()
    assert worst < 0.2


def test_many_slow_calls_at_once(worker: Worker, tmp_path: Path) -> None:
    """Assert that more listings than threads are all answered, and that a dropped lane harms nothing."""
    lanes = [worker.lane() for _ in range(30)]
    for number, lane in enumerate(lanes):
        lane.send({"op": "list_dir", "id": number, "path": bytes(tmp_path)})
    lanes[3].sock.close()
    for number, lane in enumerate(lanes):
        if number != 3:
            assert lane.receive()["id"] == number
    assert "error" not in worker.call("ping")
