"""Who attacks, and in which jail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

OTHER = 1000
"""An ordinary user for the jail of a root backend whose workspace belongs to somebody else."""


@pytest.fixture(params=["bwrap", "bwrap-owner", "landlock"])
def place(request: pytest.FixtureRequest) -> str:
    """Return the kind of jail: as the caller, of root for another user's workspace, or Landlock alone."""
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what exists for one identity only, and leave out what is not claimed without namespaces."""
    keep, gone = [], []
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        technique, where = values.get("technique"), values.get("place")
        if technique is None or where is None:
            keep.append(item)
            continue
        if where == "bwrap-owner" or technique.root_only:
            item.add_marker(pytest.mark.root)  # only root's jails change their user
        if where == "landlock":
            item.add_marker(pytest.mark.user)  # a jail of root needs namespaces
        unclaimed = where != "bwrap" and technique.root_only  # their attacker is no root outside either
        unclaimed |= where == "landlock" and not technique.landlock
        (gone if unclaimed else keep).append(item)
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = keep


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
