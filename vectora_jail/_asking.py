"""`vectora-jail probe`: try a read, a write, a connection or a syscall in a real jail and say what decides."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from .jail import Jail

if TYPE_CHECKING:
    from .plan import JailPlan
    from .policy import Policy

_SYSCALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
rc = libc.syscall(int(sys.argv[1]), *([ctypes.c_long(-1)] * 6))
e = ctypes.get_errno() if rc == -1 else 0
print(os.strerror(e))
sys.exit(1 if e in (1, 38) else 0)
"""


class Answer(NamedTuple):
    """One question's answer."""

    allowed: bool
    text: str


def _covering(plan: JailPlan, path: bytes) -> str:
    """Return which part of the plan decides about a path."""
    from ._files import refuses
    from .mounts import nearest

    if refuses(plan, path):
        return "a mask covers it"
    if any(path == p or path.startswith(p + b"/") for p in plan.tree["protect"]):
        return "it is protected"
    mount = nearest(plan.mounts, path)
    if mount is None:
        return "nothing grants it"
    return f"{mount.kind} {os.fsdecode(mount.dest)} ({mount.why})" if mount.why else f"{mount.kind} mount"


def ask(workspace: str, policy: Policy, args: Any) -> list[Answer]:
    """Return one answer for each `--read`, `--write`, `--connect` and `--syscall`."""
    answers: list[Answer] = []
    with Jail.open(workspace, policy=policy) as jail:
        plan = jail.plan
        assert plan is not None  # noqa: S101 — the jail has been started
        for path in args.read:
            done = jail.exec(
                ["/bin/sh", "-c", 'exec 3<"$1" && { [ -d "$1" ] || head -c1 <&3 >/dev/null; }', "sh", path]
            )
            answers.append(_path_answer(plan, "read", path, done))
        for path in args.write:
            script = (
                'if [ -d "$1" ]; then [ -w "$1" ]; elif [ -e "$1" ]; then : >>"$1"; '
                'else [ -w "$(dirname "$1")" ]; fi'
            )
            done = jail.exec(["/bin/sh", "-c", script, "sh", path])
            answers.append(_path_answer(plan, "write", path, done))
        for target in args.connect:
            host, _, port = target.rpartition(":")
            code = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"
            done = jail.exec(["python3", "-c", code, host or target, port if host else "443"])
            state = "allowed" if done.ok else "denied"
            answers.append(
                Answer(done.ok, f"connect {target}: {state} — network mode is {plan.network_mode!r}")
            )
        answers += [_syscall_answer(jail, plan, name) for name in args.syscall]
    return answers


def _path_answer(plan: JailPlan, what: str, path: str, done: Any) -> Answer:
    from ._files import refuses

    full = os.path.normpath(os.path.join(plan.workspace, os.fsencode(path)))
    # An empty cover can be read: that is no access to what lies below it.
    ok = done.ok and not refuses(plan, full)
    return Answer(ok, f"{what} {path}: {'allowed' if ok else 'denied'} — {_covering(plan, full)}")


def _syscall_answer(jail: Jail, plan: JailPlan, name: str) -> Answer:
    from ._syscall_numbers import numbers

    number = int(name) if name.isdigit() else numbers(plan.arch).get(name)
    if number is None:
        msg = f"no syscall is called {name!r} on {plan.arch}"
        raise ValueError(msg)
    done = jail.exec(["python3", "-c", _SYSCALL, str(number)])
    state = "allowed" if done.ok else "denied"
    return Answer(done.ok, f"syscall {name}: {state} — {done.stdout_text.strip()}")
