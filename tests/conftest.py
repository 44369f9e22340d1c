"""Shared fixtures: who we are, workspaces, jails; and the rule that CI skips nothing that can run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

IDENTITY_DIRS = ("kernel", "contract", "ordinary")
SKIPS = Path(__file__).parent / "skips.txt"


def pytest_addoption(parser):
    parser.addoption("--identity", choices=("root", "user"), default="root" if os.geteuid() == 0 else "user")
    parser.addoption(
        "--ids", default="", help="write the ids of the tests that ran, with their identity marks"
    )


def _of_jail(path) -> bool:
    return any(part in IDENTITY_DIRS for part in Path(str(path)).parts)


def pytest_generate_tests(metafunc):
    """Put `[root]` or `[user]` into the ids of everything that runs a jail."""
    if _of_jail(metafunc.module.__file__):
        if "identity" not in metafunc.fixturenames:
            metafunc.fixturenames.append("identity")
        metafunc.parametrize("identity", [metafunc.config.getoption("--identity")], scope="session")


def pytest_collection_modifyitems(config, items):
    identity = config.getoption("--identity")
    keep, gone = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"root", "user"}
        (gone if marks and identity not in marks and _of_jail(item.path) else keep).append(item)
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = keep
    path = config.getoption("--ids")
    if path:
        lines = []
        for item in items:
            marks = {mark.name for mark in item.iter_markers()} & {"root", "user"}
            lines.append(f"{item.nodeid}\t{''.join(sorted(marks))}\n")
        Path(path).write_text("".join(lines), encoding="utf-8")


def _allowed_skips() -> list[str]:
    lines = SKIPS.read_text(encoding="utf-8").splitlines() if SKIPS.exists() else []
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skip is a failure unless its test stands in skips.txt with a reason."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("VJ_MUST_WORK") == "1" and not hasattr(report, "wasxfail"):
        name = item.nodeid.partition("[")[0]
        if not any(name.endswith(allowed) for allowed in _allowed_skips()):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI without a line in tests/skips.txt: {report.longrepr}"


@pytest.fixture
def ws(tmp_path):
    """A workspace: an empty directory of the calling user, not below the place that jails make private."""
    path = tmp_path / "ws"
    path.mkdir()
    return path


@pytest.fixture
def git_ws(ws):
    """A workspace with a small git repository, a secret and a commit."""
    (ws / "src").mkdir()
    (ws / "src" / "app.py").write_text("print('hello')\n")
    (ws / ".env").write_text("TOKEN=top-secret\n")
    (ws / ".gitignore").write_text(".env\n")
    git = [
        "git",
        "-C",
        str(ws),
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@localhost",
        "-c",
        "init.defaultBranch=main",
    ]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True, timeout=30)
    return ws


@pytest.fixture
def open_jail():
    """Open jails that are closed at the end of the test: `open_jail(ws, policy=…)`."""
    from vectora_jail import Jail, Policy

    opened = []

    def make(workspace, policy=None, **changes):
        jail = Jail.open(workspace, policy=policy or Policy(**changes))
        opened.append(jail)
        return jail

    yield make
    for jail in opened:
        jail.close()


@pytest.fixture
def jail(ws, open_jail):
    """A jail with the default policy on an empty workspace."""
    return open_jail(ws)
