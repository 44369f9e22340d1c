"""Control groups: one group a jail where this process may make some, the kernel's own wall behind the sampler.

The sampler ends a call at its limit; the group sees to it that nothing gets far beyond. `cgroupplace` says where.

Sources: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/{memory,pids}.rst of the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Final

from vectora_jail.cgroupplace import find_place, names_in, read_file
from vectora_jail.limits import PIDS_SLACK

if TYPE_CHECKING:
    from vectora_jail.cgroupplace import Place
    from vectora_jail.limits import LimitPlan

__all__ = ["Group", "make_group", "spread", "sweep"]

PERIOD_US: Final = 100_000
QUOTA_MIN_US: Final = 1_000
REMOVE_S: Final = 0.5
_NAME: Final = re.compile(rb"vectora-jail-(\d+)-\d+\Z")
_BACKEND_LEAF: Final = b"vectora-jail-backend"

_numbers = itertools.count(1)
_turns = itertools.count()
_lock = threading.Lock()
_swept: set[bytes] = set()


def _write(path: bytes, value: bytes) -> None:
    """Write in one write(2), which is how the kernel takes a value."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)


def _rmdir(path: bytes) -> None:
    """Remove a group: its files are the kernel's and go with it."""
    os.rmdir(path)


def sweep(parent: bytes) -> int:
    """Remove the empty groups of backends that have ended and return how many; never ends a process.

    Their jails have died with them. A group that still holds processes is left: the number of its owner may mean
    nothing in this pid namespace.
    """
    removed = 0
    try:
        names = os.listdir(parent)
    except OSError:
        return 0
    for name in names:
        found = _NAME.match(name)
        if not found:
            continue
        try:
            os.kill(int(found.group(1)), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(parent, name))
                removed += 1
        except OSError:
            continue
    return removed


class Group:
    """The control groups of one jail, one directory a hierarchy."""

    def __init__(self, place: Place, limits: LimitPlan) -> None:
        """Make the groups that these limits need; raises OSError and leaves nothing behind."""
        self.version = place.version
        self._dirs: dict[str, bytes] = {}
        self._made: list[bytes] = []
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        wanted = {"memory": limits.memory, "pids": limits.pids, "cpu": limits.cpus}
        name = b"vectora-jail-%d-%d" % (os.getpid(), next(_numbers))
        try:
            for controller, parent in place.parents:
                if not wanted[controller]:
                    continue
                path = os.path.join(parent, name)
                if path not in self._made:
                    os.mkdir(path, 0o755)
                    self._made.append(path)
                self._dirs[controller] = path
                self._set(controller, path)
        except OSError:
            self.remove()
            raise
        self._seen = self._counts()

    @property
    def held(self) -> frozenset[str]:
        """The controllers that hold a limit of this jail."""
        return frozenset(self._dirs)

    @property
    def directories(self) -> tuple[bytes, ...]:
        """What was made for this jail."""
        return tuple(self._made)

    def _set(self, controller: str, path: bytes) -> None:
        limits, v2 = self._limits, self.version == 2
        if controller == "memory":
            size = b"%d" % limits.memory
            if v2:
                _write(path + b"/memory.max", size)
                _optional(path + b"/memory.swap.max", b"0")
                # Not memory.oom.group: the worker lives here too and must outlive its commands.
            else:
                _write(path + b"/memory.limit_in_bytes", size)
                _optional(path + b"/memory.memsw.limit_in_bytes", size)
        elif controller == "pids":
            _write(path + b"/pids.max", b"%d" % (limits.pids + PIDS_SLACK))
        else:
            quota = b"%d" % max(QUOTA_MIN_US, int(limits.cpus * PERIOD_US))
            if v2:
                _write(path + b"/cpu.max", quota + b" %d" % PERIOD_US)
            else:
                _write(path + b"/cpu.cfs_period_us", b"%d" % PERIOD_US)
                _write(path + b"/cpu.cfs_quota_us", quota)

    def add(self, pid: int) -> None:
        """Move a process here with all that it will start; raises OSError."""
        for path in self._made:
            _write(path + b"/cgroup.procs", b"%d" % pid)

    def _counts(self) -> dict[str, int]:
        """Return how often the kernel has enforced each limit."""
        found: dict[str, int] = {}
        memory, pids = self._dirs.get("memory"), self._dirs.get("pids")
        if memory is not None:
            name = b"/memory.events" if self.version == 2 else b"/memory.oom_control"
            found["memory"] = _field(read_file(memory + name), b"oom_kill")
        if pids is not None:
            found["pids"] = _field(read_file(pids + b"/pids.events"), b"max")
        return found

    def usage(self) -> dict[str, int]:
        """Return what the group uses and the most that it used, in bytes and tasks; what is not counted is absent."""
        names = (
            {"memory": b"memory.current", "memory_peak": b"memory.peak"}
            if self.version == 2
            else {"memory": b"memory.usage_in_bytes", "memory_peak": b"memory.max_usage_in_bytes"}
        ) | {"pids": b"pids.current", "pids_peak": b"pids.peak"}
        found = {}
        for key, name in names.items():
            path = self._dirs.get(key.partition("_")[0])
            value = read_file(path + b"/" + name).strip() if path is not None else b""
            if value.isdigit():
                found[key] = int(value)
        return found

    def events(self) -> list[dict[str, object]]:
        """Return the limits that the kernel has enforced since the last look, as a reply's violations.

        The counters are the jail's: of calls side by side the first that asks is told.
        """
        with self._lock:
            if self._closed:
                return []
            now, before = self._counts(), self._seen
            self._seen = now
        risen = [name for name, count in now.items() if count > before.get(name, 0)]
        if not risen:
            return []
        limits = {"memory": self._limits.memory, "pids": self._limits.pids + PIDS_SLACK}
        usage = self.usage()
        return [
            {
                "kind": "limit",
                "what": name,
                "limit": limits[name],
                "observed": usage.get(f"{name}_peak", limits[name]),
            }
            for name in risen
        ]

    def remove(self) -> None:
        """Remove the groups; waits a moment for the last process in them to be gone. May be called twice."""
        with self._lock:
            self._closed = True
            made, self._made = self._made, []
        deadline = time.monotonic() + REMOVE_S
        for path in made:
            if self.version == 2:
                _optional(path + b"/cgroup.kill", b"1")
            while True:
                try:
                    _rmdir(path)
                except OSError as exc:
                    if exc.errno == errno.EBUSY and time.monotonic() < deadline:
                        time.sleep(0.002)
                        continue
                break


def _optional(path: bytes, value: bytes) -> None:
    """Write a file that not every kernel has (swap accounting, cgroup.kill before 5.14)."""
    with contextlib.suppress(OSError):
        _write(path, value)


def _field(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _hand_down(place: Place) -> None:
    """Version 2: leave the group for a leaf of its own and switch controllers on for its children."""
    parent = place.parents[0][1]
    if place.move:
        leaf = os.path.join(place.move, _BACKEND_LEAF)
        with contextlib.suppress(FileExistsError):
            os.mkdir(leaf, 0o755)
        _write(leaf + b"/cgroup.procs", b"%d" % os.getpid())
    on = names_in(parent + b"/cgroup.subtree_control")
    for name, _ in place.parents:
        if name not in on:
            _write(parent + b"/cgroup.subtree_control", b"+" + name.encode())


def make_group(limits: LimitPlan, mode: str = "auto") -> Group | None:
    """Return new groups that hold what of these limits can be held here, None when nothing can.

    Groups that backends have left behind are swept when this process makes its first. Raises nothing: without a
    group the worker's sampler and the rlimits hold the limits, as the report says.
    """
    if not (limits.memory or limits.pids or limits.cpus):
        return None
    try:
        with _lock:
            place = find_place(mode)
            if not place.parents:
                return None
            for parent in {directory for _, directory in place.parents} - _swept:
                sweep(parent)
                _swept.add(parent)
            if place.version == 2:
                _hand_down(place)
        group = Group(place, limits)
    except OSError:
        return None
    return group if group.held else None


def spread(pid: int, cpus: float) -> None:
    """Let a process and what it starts run on so many processors, so that `nproc` tells the policy's number.

    A command can widen that again (sched_setaffinity(2)): only a `cpu` group bounds it. Jails take turns over the
    processors of the backend. Does nothing without a limit, or when it is no smaller than what there is.
    """
    ours = sorted(os.sched_getaffinity(0))
    count = max(1, math.ceil(cpus))
    if not cpus or count >= len(ours):
        return
    first = next(_turns) * count
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, {ours[(first + index) % len(ours)] for index in range(count)})
