"""Assert that a worker which breaks the protocol of its network lane loses the lane, and nothing else is harmed."""

from __future__ import annotations

import os
import socket
import threading
import time
from array import array
from collections.abc import Callable

import msgpack
import pytest

from vectora_jail import egress_lane
from vectora_jail.egress import EgressOptions
from vectora_jail.egress_lane import AHEAD, BASE, CreditPool, EgressDoor
from vectora_jail.netplan import plan_names
from vectora_jail.netrules import NetRules

RULES = NetRules.build(["localhost:5432"])


class FakeWorker:
    """The other end of a lane: answers the first request, then does what a test says."""

    def __init__(self, bound: object = None) -> None:
        self.ours, self.lane = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(5)
        self.bound = bound
        self.request: dict = {}
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        self.request = self.receive()
        bound = [0] * len(self.request["listen"]) if self.bound is None else self.bound
        self.send({"id": self.request["id"], "bound": bound})

    def receive(self) -> dict:
        return msgpack.unpackb(self.ours.recv(65536))

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        data = message if isinstance(message, bytes) else msgpack.packb(message)
        socket.send_fds(self.ours, [data], descriptors)

    def accepted(self, *descriptors: int) -> None:
        self.send({"id": 1, "event": "accepted", "addr": "127.0.0.1", "port": 5432}, descriptors)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_credit_is_given_ahead_and_back_for_each_closed_connection() -> None:
    """Assert that the worker gets some credit at once and one more for each connection, up to the window."""
    worker = FakeWorker()
    door = EgressDoor.open(worker.lane, RULES, plan_names(RULES), options=EgressOptions(window=40))
    try:
        assert worker.request["credit"] == 0
        assert worker.request["listen"][:2] == [["127.0.0.1", 3128], ["::1", 3128]]
        assert worker.receive() == {"op": "credit", "id": 1, "n": AHEAD}
        given = AHEAD
        for _ in range(100):
            near, far = tcp_pair()
            worker.accepted(far.fileno())
            far.close()
            near.close()
            message = worker.receive()
            assert message["op"] == "credit"
            given += message["n"]
        wait_for(lambda: not door.egress.live)
        assert 100 <= given <= 140
    finally:
        door.close()
        worker.ours.close()


@pytest.mark.parametrize(
    "name",
    ["garbage", "list", "no descriptor", "two descriptors", "file", "unasked", "too many", "truncated"],
)
def test_a_worker_that_breaks_the_protocol_loses_its_lane(name: str) -> None:
    """Assert that hostile messages close the lane with a reason, and that no descriptor of theirs stays open."""
    broken: list[str] = []
    worker = FakeWorker()
    door = EgressDoor.open(worker.lane, RULES, plan_names(RULES), on_broken=broken.append)
    worker.receive()
    read, write = os.pipe()
    near, far = tcp_pair()
    before = len(os.listdir("/proc/self/fd"))
    try:
        if name == "garbage":
            worker.send(b"\xc1\xff", (write,))
        elif name == "list":
            worker.send([1, 2], (write,))
        elif name == "no descriptor":
            worker.accepted()
        elif name == "two descriptors":
            worker.accepted(far.fileno(), far.fileno())
        elif name == "file":
            worker.accepted(write)
        elif name == "unasked":
            worker.send({"id": 1, "bound": [0]}, (write,))
        elif name == "truncated":
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [write] * 30))]
            worker.ours.sendmsg([b"\x80"], rights)
        else:
            for _ in range(AHEAD * 40):
                try:
                    worker.accepted(far.fileno())
                except OSError:
                    break
        wait_for(lambda: broken or name == "too many")
        wait_for(lambda: worker.lane.fileno() < 0 or name == "too many")
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before or name == "too many")
    finally:
        door.close()
        for thing in (near, far, worker.ours):
            thing.close()
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("bound", "error"), [([98, 0, 0, 0], 98), ([0], 71), ("x", 32), ([-1, 0, 0, 0], 32), ([0, 0, 13, 0], 13)]
)
def test_a_port_that_cannot_be_bound_is_an_error(bound: object, error: int) -> None:
    """Assert that a door which is not wholly open is not opened, and says which address it was."""
    worker = FakeWorker(bound)
    with pytest.raises(OSError) as caught:
        EgressDoor.open(worker.lane, RULES, plan_names(RULES))
    assert caught.value.errno == error
    assert worker.lane.fileno() < 0
    worker.ours.close()


def test_a_silent_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a worker which never answers does not hold the start for ever."""
    monkeypatch.setattr(egress_lane, "_ANSWER_S", 0.2)
    ours, lane = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(OSError, match="does not open"):
        EgressDoor.open(lane, RULES, plan_names(RULES))
    ours.close()


def test_the_pool_serves_who_waits_longest() -> None:
    """Assert that what comes back to an empty pool goes round, and a jail that is satisfied is passed over."""
    pool = CreditPool(1)
    order: list[str] = []

    def first() -> None:
        order.append("first")

    def second() -> None:
        order.append("second")
        pool.take(second)

    assert pool.take(first)
    assert not pool.take(first)
    assert not pool.take(second)
    assert not pool.take(first)
    pool.give()
    assert order == ["first", "second"]
    assert pool.left == 0


def test_a_jail_without_the_pool_has_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that an exhausted pool leaves each jail a few connections, and comes back when the others end."""
    pool = CreditPool(4)
    monkeypatch.setattr(egress_lane, "_pool", pool)
    doors = []
    for expected in (BASE + 4, BASE):
        worker = FakeWorker()
        doors.append((EgressDoor.open(worker.lane, RULES, plan_names(RULES)), worker))
        assert worker.receive()["n"] == expected
    doors[0][0].close()
    assert doors[1][1].receive()["n"] >= 1
    doors[1][0].close()
    assert pool.left == 4
    for _, worker in doors:
        worker.ours.close()
