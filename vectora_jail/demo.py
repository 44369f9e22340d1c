"""The demonstration: the same attempts without and with a jail, really run, and what a call costs.

A sample workspace (a small git repository with tests, a `.env`, a policy) and a stand-in home directory with a key are
made in a temporary directory; "the agent" is a list of commands. Exit 1 when an attack succeeds inside, or fails
outside: then it has shown nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .jail import Jail
from .policyfile import load_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLICY = """\
[sandbox]
enabled = true
mask = [".env", "**/*.pem", "**/.ssh/**", "**/.aws/**"]
"""
CODE = "def add(a, b):\n    return a - b\n"
TEST = """\
import unittest

from calc import add


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
"""
KEY = "-----BEGIN KEY----- demo only, not a real key"
SECRET = "TOKEN=demo-secret"  # noqa: S105 — made up
ROUNDS = 300


class Step(NamedTuple):
    """One thing the agent does."""

    title: str
    attack: bool
    run: Callable[[Side], bool]
    """True when the agent got what it wanted."""


class Side:
    """Where the agent's commands run: on the host or in the jail."""

    def __init__(self, root: Path, jail: Jail | None, port: int) -> None:
        self.root = root
        self.ws = root / ("inside" if jail else "outside")
        self.jail = jail
        self.port = port

    def sh(self, command: str) -> tuple[int, str]:
        """Run a command line; its exit code and output."""
        if self.jail is not None:
            result = self.jail.exec(command, timeout=60)
            return result.exit_code, result.text
        done = subprocess.run(  # noqa: S602 — the unprotected side is the point
            command, shell=True, cwd=self.ws, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr


def _tests(side: Side) -> bool:
    code, text = side.sh("python3 -B -m unittest -q 2>&1")
    return code == 1 and "FAIL" in text


def _edit(side: Side) -> bool:
    if side.jail is not None:
        side.jail.edit_file("calc.py", old="a - b", new="a + b")
    else:
        path = side.ws / "calc.py"
        path.write_text(path.read_text().replace("a - b", "a + b"))
    return side.sh("python3 -B -m unittest -q 2>&1")[0] == 0 and "a + b" in (side.ws / "calc.py").read_text()


def _git(side: Side) -> bool:
    code, text = side.sh("git status --short && git log --oneline | head -1")
    return code == 0 and "calc.py" in text


def _key(side: Side) -> bool:
    return KEY in side.sh(f"cat '{side.root}/home/.ssh/id_ed25519'; cat ~/.ssh/id_* 2>/dev/null")[1]


def _env(side: Side) -> bool:
    return SECRET in side.sh("cat .env; cp .env copy; cat copy; rm -f copy; cat /proc/self/cwd/.env")[1]


def _env_api(side: Side) -> bool:
    if side.jail is None:
        return SECRET in (side.ws / ".env").read_text()
    return SECRET in side.jail.read_file(".env").decode()


def _write_outside(side: Side) -> bool:
    target = side.root / "host-file"
    target.unlink(missing_ok=True)
    side.sh(f"echo owned > '{target}'")
    return target.exists()


def _network(side: Side) -> bool:
    return (
        "hello from the host"
        in side.sh(
            f"python3 -c \"import socket;print(socket.create_connection(('127.0.0.1',{side.port}),2).recv(99))\" 2>&1"
        )[1]
    )


def _hook(side: Side) -> bool:
    hook = side.ws / ".git" / "hooks" / "post-checkout"
    side.sh("printf '#!/bin/sh\\nid\\n' > .git/hooks/post-checkout && chmod +x .git/hooks/post-checkout")
    planted = hook.exists()
    if planted:
        hook.unlink()
    return planted


def _policy(side: Side) -> bool:
    path = side.ws / "vectora.toml"
    side.sh("echo '[sandbox]' > vectora.toml; mv vectora.toml x; echo > vectora.toml")
    changed = not path.is_file() or path.read_text() != POLICY
    if changed:
        path.write_text(POLICY)
    return changed


def _daemon(side: Side) -> bool:
    """Leave a process behind that goes on writing after the command has ended."""
    mark = side.ws / "alive"
    side.sh("setsid sh -c 'while :; do date >> alive; sleep 0.05; done' >/dev/null 2>&1 &")
    time.sleep(0.3)
    size = mark.stat().st_size if mark.exists() else 0
    time.sleep(0.3)
    running = mark.exists() and mark.stat().st_size > size
    if running and side.jail is None:
        _stop_daemon(side.ws)
    return running


def _stop_daemon(where: Path) -> None:
    """End the process that the unprotected side has left, and only that one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                same = (entry / "cwd").resolve() == where.resolve() and b"alive" in (
                    entry / "cmdline"
                ).read_bytes()
            except OSError:
                continue
            if same:
                os.kill(int(entry.name), 9)


STEPS = (
    Step("run the project's tests", False, _tests),
    Step("edit a file so that they pass", False, _edit),
    Step("git status, git log", False, _git),
    Step("read the private key in ~/.ssh", True, _key),
    Step("read .env by command", True, _env),
    Step("read .env by the file call", True, _env_api),
    Step("write a file outside the workspace", True, _write_outside),
    Step("connect to a service on the host", True, _network),
    Step("plant a git hook", True, _hook),
    Step("rewrite the policy", True, _policy),
    Step("leave a process running", True, _daemon),
)


def _make(where: Path) -> None:
    where.mkdir()
    (where / "calc.py").write_text(CODE)
    (where / "test_calc.py").write_text(TEST)
    (where / ".env").write_text(SECRET + "\n")
    (where / ".gitignore").write_text(".env\n__pycache__/\n")
    (where / "vectora.toml").write_text(POLICY)
    git = ["git", "-C", str(where), "-c", "user.name=demo", "-c", "user.email=demo@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "A calculator with a fault"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True, timeout=60)


def _serve() -> Iterator[int]:
    """Answer connections on a free port of the host's loopback until closed."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                peer.sendall(b"hello from the host")

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()


def _attempt(step: Step, side: Side) -> bool | None:
    try:
        return step.run(side)
    except Exception as exc:  # noqa: BLE001 — an attempt that fails is a result of the demonstration
        if not step.attack:
            print(f"  {step.title}: {exc}", file=sys.stderr)
            return None
        return False


def _word(step: Step, got: bool | None) -> str:
    if step.attack:
        return "SUCCEEDS" if got else "blocked"
    return "works" if got else "FAILS"


def _latency(jail: Jail) -> tuple[float, float]:
    """Return the median of `Jail.exec(["/bin/true"])` and of `subprocess.run`, in ms, measured in turns."""
    inside, outside = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jail.exec(["/bin/true"])
        middle = time.perf_counter()
        subprocess.run(["/bin/true"], capture_output=True, check=True)
        inside.append(middle - start)
        outside.append(time.perf_counter() - middle)
    return statistics.median(inside) * 1e3, statistics.median(outside) * 1e3


def main(*, keep: bool = False) -> int:
    """Run the demonstration; 0 when everything went as promised."""
    root = Path(tempfile.mkdtemp(prefix="vectora-jail-demo-"))
    wrong = 0
    try:
        (root / "home" / ".ssh").mkdir(parents=True)
        (root / "home" / ".ssh" / "id_ed25519").write_text(KEY + "\n")
        for name in ("outside", "inside"):
            _make(root / name)
        for port in _serve():
            started = time.perf_counter()
            with Jail.open(root / "inside", policy=load_policy(root / "inside")) as jail:
                start_ms = (time.perf_counter() - started) * 1e3
                report = jail.report
                print(f"jail: {report.isolation}, {len(report.layers)} layers, started in {start_ms:.0f} ms")
                for layer in report.degraded:
                    print(f"  not fully on: {layer.name} ({layer.state}): {layer.detail}")  # type: ignore[attr-defined]
                print(f"\n{'what the agent does':<40} {'without':<10} with the jail")
                print("-" * 66)
                for step in STEPS:
                    outside = _attempt(step, Side(root, None, port))
                    inside = _attempt(step, Side(root, jail, port))
                    fine = bool(outside) and bool(inside) != step.attack
                    wrong += not fine
                    mark = "" if fine else "   <-- not as promised"
                    print(f"{step.title:<40} {_word(step, outside):<10} {_word(step, inside)}{mark}")
                jailed, plain = _latency(jail)
                print(f"\n/bin/true, output captured, median of {ROUNDS}:")
                print(f"  Jail.exec       {jailed:.3f} ms")
                print(f"  subprocess.run  {plain:.3f} ms   ratio {jailed / plain:.2f}")
    finally:
        if keep:
            print(f"\nthe sample workspace is in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    return 1 if wrong else 0
