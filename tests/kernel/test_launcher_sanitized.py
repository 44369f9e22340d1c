"""The entering child once more, compiled with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.kernel, pytest.mark.slow, pytest.mark.timeout(240)]
# The sanitizers' defaults, because the launcher runs with an empty environment.
OPTIONS = """
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }
"""


@pytest.mark.skipif(not (ROOT / "worker/launcher.c").exists(), reason="needs the source tree")
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_no_sanitizer_complains(tmp_path):
    """Assert that all tests of the entering child pass with a launcher that ends at the first bad access."""
    launcher = tmp_path / "launcher"
    (tmp_path / "options.c").write_text(OPTIONS)
    sources = [*sorted((ROOT / "csrc/core").glob("*.c")), ROOT / "worker/msg.c", ROOT / "worker/launcher.c"]
    flags = [
        "-std=gnu11",
        "-O1",
        "-g",
        "-pthread",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    includes = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/core", "worker")]
    command = ["gcc", *flags, *includes, *sources, tmp_path / "options.c", "-o", launcher]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "asan" in built.stderr and built.returncode != 0:
        pytest.skip("gcc has no sanitizer libraries here")
    assert built.returncode == 0, built.stderr
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_command, f"--basetemp={tmp_path / 'inner'}", str(Path(__file__).with_name("test_enter.py"))],
        cwd=ROOT,
        env={**os.environ, "VJ_TEST_LAUNCHER": str(launcher)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
