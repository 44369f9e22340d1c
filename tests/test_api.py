"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import vectora_jail

HEAVY = (
    "asyncio",
    "dataclasses",
    "socket",
    "subprocess",
    "tomllib",
    "logging",
    "msgpack",
    "cffi",
    "ctypes",
    "inspect",
)
PROMISED = [
    "AsyncJailManager",
    "JailManager",
    "Jail",
    "AsyncJail",
    "Policy",
    "Ceiling",
    "ExecResult",
    "Terminal",
    "parse_policy",
    "load_policy",
    "host_capabilities",
    "JailError",
    "PolicyError",
    "SandboxDisabled",
    "WorkerSpawnError",
    "WorkerDiedError",
    "UnsupportedPolicy",
]


def test_import_is_light():
    """Assert that importing the package loads none of the heavy modules."""
    code = f"import sys, vectora_jail; print([m for m in {HEAVY!r} if m in sys.modules])"
    root = str(Path(vectora_jail.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.strip() == "[]"


def test_threads_need_no_asyncio():
    """Assert that the blocking face works without asyncio being loaded."""
    root = str(Path(vectora_jail.__file__).parent.parent)
    code = f"import sys; sys.path[:0] = {[root, *sys.path]!r}; from vectora_jail import JailManager; "
    code += "print('asyncio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "False"


def test_exported_names():
    """Assert that every promised name is there, the list is sorted, and each name loads."""
    assert set(PROMISED) <= set(vectora_jail.__all__)
    assert list(vectora_jail.__all__) == sorted(vectora_jail.__all__)
    for name in vectora_jail.__all__:
        assert getattr(vectora_jail, name) is not None
    assert set(vectora_jail.__all__) <= set(dir(vectora_jail))
