"""Every technique, twice: it succeeds without the jail, and fails with it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import network
import processes
import protocol
import secrets_
import surface
import world as world_module
import writes
from technique import CATEGORIES, Technique

TECHNIQUES = [
    technique
    for module in (secrets_, writes, processes, surface, network, protocol)
    for technique in module.TECHNIQUES
]

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(60)]


def test_the_suite_is_large_enough() -> None:
    """Assert that there are at least 80 distinct techniques, and enough of each category."""
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES) >= 80
    assert len({technique.program + technique.check + technique.later for technique in TECHNIQUES}) == len(
        TECHNIQUES
    )
    counts = Counter(technique.category for technique in TECHNIQUES)
    assert {name: counts[name] for name in CATEGORIES if counts[name] < CATEGORIES[name]} == {}


def succeeded(technique: Technique, world: world_module.World, jail: object = None) -> bool:
    """Return whether the last run reached its end."""
    if technique.seen == "leak":
        return world.leaked()
    if technique.seen == "output":
        return "WON" in world.output
    return bool(eval(technique.check, {"w": world, "jail": jail}))


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda t: f"{t.category}:{t.name}".replace(" ", "-"))
def test_attack(technique: Technique, place: str, jail) -> None:
    """Assert that a technique succeeds outside (or why it cannot) and fails inside."""
    uid = 1000 if place == "bwrap-owner" else os.getuid()
    if technique.outside == "succeeds":
        world = world_module.World(uid)
        try:
            exec(technique.prepare, {"w": world})
            exec(technique.later, {"w": world})
            world.note_files()
            world.run_outside(technique.program, technique.during)
            assert succeeded(technique, world), f"the attack itself does not work: {world.output}"
        finally:
            world.close()
    world = world_module.World(uid)
    try:
        exec(technique.prepare, {"w": world})
        made = jail(world, technique.policy)
        world.note_worker(made)
        exec(technique.later, {"w": world})
        world.note_files()
        world.run_inside(made, technique.program, technique.during)
        assert "STARTED" in world.output, f"the attack never ran: {world.output}"
        assert not succeeded(technique, world, made), world.output
    finally:
        world.close()
