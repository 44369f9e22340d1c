"""A few seconds of a backend's day: many callers, crashes and restarts, every answer checked, nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.timeout(120)
def test_soak():
    """Assert that twenty seconds of everything at once give no wrong answer and leave nothing behind."""
    command = [sys.executable, str(SOAK), "--minutes", "0.33", "--workspaces", "20", "--max-workers", "17"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing wrong, nothing left" in done.stdout
