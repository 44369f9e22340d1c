"""The C tests of the matcher, the git configuration reader and the tree watch, with sanitizers where there are any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = [found for found in map(shutil.which, ("gcc", "clang", "cc")) if found]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Wmissing-prototypes"]
SOURCES = {
    "test_gitignore": ["csrc/core/gi*.c"],
    "test_gitconfig": ["csrc/core/gitconfig.c"],
    "test_tree": ["csrc/core/tree*.c", "csrc/core/gi*.c", "worker/msg.c"],
}
pytestmark = pytest.mark.skipif(
    not COMPILERS or not sys.platform.startswith("linux"), reason="needs a C compiler and Linux"
)


def build(directory: Path, name: str, *flags: str) -> Path | None:
    """Compile one test program; None where the compiler has no such sanitizer."""
    files = [ROOT / f"tests/c/{name}.c", *(p for g in SOURCES[name] for p in sorted(ROOT.glob(g)))]
    includes = [f"-I{ROOT / place}" for place in ("csrc/core", "worker", "tests/c")]
    command = [COMPILERS[0], "-std=gnu11", "-g", "-O1", "-pthread", *WARNINGS, "-Werror", *flags, *includes]
    out = directory / name
    done = subprocess.run(
        [*command, *files, "-o", out], capture_output=True, text=True, check=False, timeout=150
    )
    if done.returncode and flags and "san" in done.stderr and "cannot find" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("name", SOURCES)
def test_c_program(name, tmp_path):
    """Assert that the program's checks hold and the sanitizers find nothing."""
    program = build(tmp_path, name, "-fsanitize=address,undefined", "-fno-sanitize-recover=all") or build(
        tmp_path, name
    )
    assert program is not None
    environment = {**os.environ, "ROUNDS": "150"}
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
