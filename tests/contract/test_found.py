"""Ways out that a hostile reading has found: each of these once worked."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from vectora_jail import Jail, Policy, PolicyError, WorkerSpawnError


def _private(tmp_path):
    """Return a directory that nobody grants, with a secret in it."""
    place = tmp_path / "private"
    place.mkdir()
    (place / "secret").write_text("SECRET")
    return place


def test_a_source_that_bwrap_found_elsewhere(ws, tmp_path, monkeypatch):
    """Assert that a grant whose source another jail has swapped for a link since the plan stops the start."""
    from vectora_jail.backends.local import LocalBackend

    private = os.fsencode(_private(tmp_path))
    (ws / "vendor").mkdir()
    start = LocalBackend.start

    def followed(self, plan):
        # what bwrap does when it meets the link: the source leads elsewhere, the place is the same
        vendor = os.fsencode(ws / "vendor")
        mounts = tuple(replace(m, source=private) if m.dest == vendor else m for m in plan.mounts)
        return start(self, replace(plan, mounts=mounts))

    monkeypatch.setattr(LocalBackend, "start", followed)
    with pytest.raises(WorkerSpawnError, match="same"), Jail.open(ws, policy=Policy(ro_paths=("vendor",))):
        pass


def test_a_planted_link_widens_no_grant(ws, tmp_path):
    """Assert that a link inside the workspace leads a caller's own grant only to places that the caller names."""
    private = _private(tmp_path)
    with Jail.open(ws, policy=Policy()) as jail:
        jail.exec(["/bin/ln", "-s", str(private), "vendor"], check=True)
    for policy in (Policy(ro_paths=("vendor",)), Policy(rw_paths=(".", "vendor"))):
        with pytest.raises(PolicyError, match="vendor"), Jail.open(ws, policy=policy):
            pass
    with Jail.open(ws, policy=Policy(ro_paths=("vendor", str(private)))) as jail:
        assert jail.exec("cat vendor/secret").stdout == b"SECRET"
