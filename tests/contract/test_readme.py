"""What README and docs show is run: every Python block, every policy, every command line named there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vectora_jail
from vectora_jail import parse_policy_text

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(ws, number):
    """Assert that a Python block of the README runs as it stands (on a workspace of its own)."""
    code = blocks("python")[number].replace("/srv/ws/42", str(ws))
    package = str(Path(vectora_jail.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_policy_blocks_are_valid():
    """Assert that every policy that the README shows is accepted under the default ceiling."""
    for text in blocks("toml"):
        policy = parse_policy_text(text)
        assert policy.enabled
        assert not policy.refused, policy.problems


def test_promised_tests_exist():
    """Assert that every file that the README names is there."""
    named = re.findall(r"`((?:tests|docs|benchmarks)/[\w/.]+\.(?:py|md))`", README)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_policy_reference_is_current():
    """Assert that docs/policy.md is what the key table says."""
    from vectora_jail.policydocs import reference

    assert (ROOT / "docs" / "policy.md").read_text(encoding="utf-8").strip() == reference().strip()
