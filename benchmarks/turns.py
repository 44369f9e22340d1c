"""Measure several ways of doing the same thing in shuffled turns, and compare medians.

A busy moment of the machine meets all of them alike, so the ratio of two medians of one run means something where
the figures themselves do not. CPU time is measured apart, in blocks, because it needs many calls to be told at all.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Way:
    """One way of doing it."""

    name: str
    call: Callable[[], float | None]
    """Does it once; may return the microseconds that count, else the whole call counts."""
    pids: Sequence[int] = ()
    """Other processes whose CPU time belongs to it."""
    setup: Callable[[], object] | None = None
    """What comes before each call and does not count."""
    samples: list[float] = field(default_factory=list)
    """Microseconds."""
    cpu: float = float("nan")
    """Microseconds of processor time a call: this process, its children, `pids` and their children."""

    def p(self, part: float) -> float:
        """Return a percentile in microseconds."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def once(way: Way) -> float:
    """Return the microseconds of one call."""
    if way.setup is not None:
        way.setup()
    begin = time.perf_counter_ns()
    said = way.call()
    took = (time.perf_counter_ns() - begin) / 1e3
    return took if said is None else said


def turns(ways: Sequence[Way], rounds: int, *, warm: int | None = None, seed: int = 1) -> None:
    """Fill the samples of each way, one call of each a round in an order that changes."""
    order = list(ways)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds // 20 + 2 if warm is None else warm):
        for way in order:
            once(way)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        shuffle(order)
        for way in order:
            way.samples.append(once(way))


def cpu_times(ways: Sequence[Way], calls: int) -> None:
    """Fill the CPU time of each way from blocks of calls in turns."""
    sums = dict.fromkeys(range(len(ways)), 0.0)
    blocks = 4
    for _ in range(blocks):
        for number, way in enumerate(ways):
            before = _cpu(way)
            for _ in range(max(1, calls // blocks)):
                once(way)
            sums[number] += _cpu(way) - before
    for number, way in enumerate(ways):
        way.cpu = sums[number] * 1e6 / (blocks * max(1, calls // blocks))


def _cpu(way: Way) -> float:
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    for pid in way.pids:
        with open(f"/proc/{pid}/stat", "rb") as file:
            parts = file.read().rpartition(b") ")[2].split()
        used += sum(map(int, parts[11:15])) * TICK  # utime, stime, cutime, cstime: proc(5)
    return used


async def async_turns(
    ways: Sequence[tuple[Way, Callable[[], Awaitable[object]]]], rounds: int, *, seed: int = 1
) -> None:
    """The same for coroutine functions, one at a time."""
    order = list(ways)
    shuffle = random.Random(seed).shuffle
    for number in range(-(rounds // 20) - 2, rounds):
        shuffle(order)
        for way, call in order:
            begin = time.perf_counter_ns()
            await call()
            if number >= 0:
                way.samples.append((time.perf_counter_ns() - begin) / 1e3)
