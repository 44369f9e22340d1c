"""Where control groups may be made, on trees of plain files; what is written into them and read from them."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.unit.host import host
from vectora_jail import cgroups
from vectora_jail.cgroupplace import Place, find_place
from vectora_jail.limits import PIDS_SLACK, held_layers, plan_limits
from vectora_jail.policy import Limits, Policy

MIB = 1 << 20


class Tree:
    """A /proc and a control group tree in a directory."""

    def __init__(self, root):
        self.root = root
        self.proc = root / "proc"
        self.proc.mkdir()
        self.mounts = []

    def place(self, mode="auto", *, euid=0):
        text = "".join(
            f"{number} 1 0:{number} / {point} rw - {kind} {kind} rw,{options}\n"
            for number, (kind, point, options) in enumerate(self.mounts, 30)
        )
        (self.proc / "mountinfo").write_text(text)
        return find_place(mode, proc=os.fsencode(self.proc), euid=euid)

    def v1(self, **paths):
        for name, path in paths.items():
            self.mounts.append(("cgroup", self.root / name, name))
            group = self.root / name / path.strip("/")
            group.mkdir(parents=True)
            (group / "cgroup.procs").touch()
        lines = [f"{number}:{name}:{path}\n" for number, (name, path) in enumerate(paths.items(), 1)]
        (self.proc / "cgroup").write_text("".join(lines) + "0::/\n")

    def v2(self, own, **groups):
        self.mounts.append(("cgroup2", self.root / "v2", "nsdelegate"))
        for name, (able, on, procs) in groups.items():
            directory = self.root / "v2" / name.replace("__", "/")
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "cgroup.controllers").write_text(able)
            (directory / "cgroup.subtree_control").write_text(on)
            (directory / "cgroup.procs").write_text(procs)
            (directory / "cgroup.type").write_text("domain\n")
        (self.proc / "cgroup").write_text(f"0::{own}\n")


@pytest.fixture
def tree(tmp_path):
    """An empty host."""
    return Tree(tmp_path)


def test_nothing_is_mounted(tree):
    """Assert that a host without control groups has no place, and says why."""
    (tree.proc / "cgroup").write_text("0::/\n")
    place = tree.place()
    assert (place.version, place.controllers) == (0, frozenset())
    assert "mounted" in place.reason


def test_version_1_takes_only_what_nobody_else_made(tree):
    """Assert that root uses the hierarchies in which it is in no group, and its own groups when told so."""
    tree.v1(memory="/service/x", pids="/", cpu="/")
    place = tree.place()
    assert place.parents == (
        ("pids", os.fsencode(tree.root / "pids")),
        ("cpu", os.fsencode(tree.root / "cpu")),
    )
    assert "memory group" in place.reason
    own = tree.place("own")
    assert dict(own.parents)["memory"] == os.fsencode(tree.root / "memory/service/x")
    assert tree.place("off").parents == ()


def test_version_2_wants_a_delegated_subtree(tree):
    """Assert that a user's own scope is divided when nobody else lives in it, and not otherwise."""
    pid = os.getpid()
    tree.v2("/scope", scope=("cpu memory pids\n", "", f"{pid}\n"))
    place = tree.place(euid=1000)
    scope = os.fsencode(tree.root / "v2/scope")
    assert (place.version, place.controllers, place.move) == (2, {"memory", "pids", "cpu"}, scope)
    (tree.root / "v2/scope/cgroup.procs").write_text(f"{pid}\n1\n")
    place = tree.place(euid=1000)
    assert place.parents == ()
    assert "other processes" in place.reason


def test_version_2_with_the_backend_in_a_leaf(tree):
    """Assert that jails become siblings of a backend that was put into a leaf of a delegated group."""
    tree.v2(
        "/unit/backend", unit=("memory pids", "memory pids", ""), unit__backend=("memory pids", "", "1\n")
    )
    place = tree.place(euid=1000)
    unit = os.fsencode(tree.root / "v2/unit")
    assert place.parents == (("memory", unit), ("pids", unit))
    assert place.move == b""


def test_root_does_not_divide_a_group_that_nobody_gave_it(tree):
    """Assert that root leaves a version 2 group without the mark of delegation alone."""
    tree.v2("/unit", unit=("memory pids", "", f"{os.getpid()}\n"))
    assert tree.place(euid=0).parents == ()
    assert tree.place("own", euid=0).controllers == {"memory", "pids"}


@pytest.fixture
def plain_files(monkeypatch):
    """Let groups be directories of plain files: what the kernel would make is made on the first write."""

    def write(path, value):
        with open(path, "wb") as file:
            file.write(value)

    monkeypatch.setattr(cgroups, "_write", write)
    monkeypatch.setattr(cgroups, "_rmdir", shutil.rmtree)


def limits(**changes):
    """Return the limits of a policy."""
    return plan_limits(Policy(limits=Limits(**changes)), host())


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            1,
            {
                "memory.limit_in_bytes": b"%d" % (64 * MIB),
                "memory.memsw.limit_in_bytes": b"%d" % (64 * MIB),
                "pids.max": b"%d" % (10 + PIDS_SLACK),
                "cpu.cfs_period_us": b"100000",
                "cpu.cfs_quota_us": b"150000",
            },
        ),
        (
            2,
            {
                "memory.max": b"%d" % (64 * MIB),
                "memory.swap.max": b"0",
                "pids.max": b"%d" % (10 + PIDS_SLACK),
                "cpu.max": b"150000 100000",
            },
        ),
    ],
)
@pytest.mark.usefixtures("plain_files")
def test_what_is_written(tmp_path, version, expected):
    """Assert the files of a group, the process in it, and that nothing is left after it."""
    top = os.fsencode(tmp_path)
    place = Place(version, tuple((name, top) for name in ("memory", "pids", "cpu")))
    group = cgroups.Group(place, limits(memory_mb=64, pids=10, cpus=1.5))
    group.add(4711)
    (directory,) = group.directories
    assert os.path.basename(directory).startswith(b"vectora-jail-%d-" % os.getpid())
    found = {
        name: (tmp_path / os.fsdecode(directory) / name).read_bytes()
        for name in os.listdir(os.fsdecode(directory))
    }
    assert found == {**expected, "cgroup.procs": b"4711"}
    assert group.held == {"memory", "pids", "cpu"}
    group.remove()
    group.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("version", "memory", "peak"),
    [(1, "memory.oom_control", "memory.max_usage_in_bytes"), (2, "memory.events", "memory.peak")],
)
@pytest.mark.usefixtures("plain_files")
def test_events(tmp_path, version, memory, peak):
    """Assert that a rise of the kernel's counters is told once, with the limit and the peak."""
    top = os.fsencode(tmp_path)
    group = cgroups.Group(Place(version, (("memory", top), ("pids", top))), limits(memory_mb=64, pids=10))
    (directory,) = map(os.fsdecode, group.directories)
    files = tmp_path / directory
    assert group.events() == []
    (files / memory).write_text("low 0\noom_kill 1\n")
    (files / peak).write_text(f"{64 * MIB}\n")
    (files / "pids.events").write_text("max 0\n")
    expected = {"kind": "limit", "what": "memory", "limit": 64 * MIB, "observed": 64 * MIB}
    assert group.events() == [expected]
    assert group.events() == []
    (files / "pids.events").write_text("max 9\n")
    assert [event["what"] for event in group.events()] == ["pids"]
    group.remove()
    assert group.events() == []


def test_a_group_that_cannot_be_made_leaves_nothing(tmp_path):
    """Assert that a file that does not exist fails the group and removes its directory."""
    with pytest.raises(OSError, match=r"memory\.max"):
        cgroups.Group(Place(2, (("memory", os.fsencode(tmp_path)),)), limits(memory_mb=64))
    assert os.listdir(tmp_path) == []


def test_layers_name_a_group_only_where_it_holds():
    """Assert that the report's layers change for the limits that a group holds, and for no other."""
    made = limits(memory_mb=64, pids=10, cpus=2)
    layers = {layer.name: layer for layer in held_layers(made.layers, made, 1, frozenset(("pids", "cpu")))}
    assert "control group v1" in layers["limit:pids"].detail
    assert layers["limit:cpus"].state == "on"
    assert layers["limit:memory"].state == "partial"
    assert "control group" not in layers["limit:memory"].detail


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="one processor only")
def test_spread():
    """Assert that a process is put on as many processors as its policy says, and left alone without a number."""
    ours = os.sched_getaffinity(0)
    try:
        cgroups.spread(os.getpid(), 0)
        assert os.sched_getaffinity(0) == ours
        cgroups.spread(os.getpid(), 0.5)
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, ours)
