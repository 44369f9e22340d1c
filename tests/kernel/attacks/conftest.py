"""Who attacks, and in which jail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

OTHER = 1000
"""An ordinary user for the jail of a root backend whose workspace belongs to somebody else."""


@pytest.fixture(params=["bwrap", "bwrap-owner", "landlock"])
def place(request: pytest.FixtureRequest) -> str:
    """Return the kind of jail: as the caller, of root for another user's workspace, or Landlock alone."""
    if request.param == "bwrap-owner" and os.getuid() != 0:
        pytest.skip("only root's jails change their user")
    if request.param == "landlock" and os.getuid() == 0:
        pytest.skip("a jail of root needs namespaces")
    return str(request.param)


@pytest.fixture
def jail(place: str, monkeypatch: pytest.MonkeyPatch):
    """Return a function that opens a jail on a world's workspace."""
    jails = []

    def make(world, changes):
        vectora_jail = pytest.importorskip("vectora_jail.jail")
        policy = pytest.importorskip("vectora_jail.policy")
        monkeypatch.setenv("HOME", world.home)
        values = {"ro_paths": (world.ro,), **changes}
        if place == "landlock":
            planning = pytest.importorskip("vectora_jail.plan")
            monkeypatch.setattr(planning, "choose_isolation", lambda *_args, **_more: "landlock")
            values |= {"mask": (), "protect_git": "off"}
        jails.append(vectora_jail.Jail.open(world.workspace, policy.Policy(**values)))
        return jails[-1]

    yield make
    for made in jails:
        made.close()
