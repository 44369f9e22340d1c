"""The jail itself: the coroutine core that both faces share (`jail.py` has the faces).

Nothing here blocks or suspends except through the waiter it was given.
"""

from __future__ import annotations

import errno
import os
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from . import _lanes, wire
from ._command import command_fields, describe, environment_list, path_bytes, stdin_source, timeout_ms
from ._lanes import CAPTURE_ERR, CAPTURE_OUT, DATA, DONE, FEED, MERGE, NEED_INPUT, PENDING, ChannelClosed
from ._native import sealed_memfd
from ._waiting import MAX_SLICE_MS
from .errors import CommandFailed, WorkerDiedError
from .results import ExecResult, Usage, Violation

if TYPE_CHECKING:
    from ._command import Command, Environment, Path
    from ._lanes import Lane
    from ._life import JailLife
    from ._waiting import Waiter
    from .backends import Running
    from .egress_lane import EgressDoor
    from .worker import Worker

MAX_OUTPUT: Final = 16 * 1024 * 1024
"""Bytes kept of each stream unless the caller says otherwise."""
FEED_CHUNK: Final = 256 * 1024
STREAM: Final = _lanes.STREAM
_now = monotonic


class Prepared:
    """An exec-like request that is ready to be sent, with the descriptors it needs until then."""

    __slots__ = ("argv", "cwd", "fds", "message", "opened", "seconds", "stdin_bytes", "stdin_iter", "wall_ms")

    def __init__(self) -> None:
        self.argv: list[bytes] = []
        self.cwd = b""
        self.message: dict[str, Any] = {}
        self.fds = [-1, -1, -1, -1]
        self.opened: list[int] = []
        self.seconds: float | None = None
        self.wall_ms = 0
        """The policy's own limit of time, when it is what ends the call."""
        self.stdin_bytes: bytes | None = None
        self.stdin_iter: Any = None

    def close(self) -> None:
        """Close what was opened for the request; the worker has its own copies."""
        for fd in self.opened:
            os.close(fd)
        self.opened.clear()


def usage_of(reply: dict[str, Any]) -> Usage:
    """Read the usage map of a reply."""
    raw = reply.get("usage")
    if type(raw) is not dict:
        return Usage()
    integer = wire.integer
    return Usage(
        wall=integer(raw, "wall_us") / 1e6,
        user=integer(raw, "user_us") / 1e6,
        system=integer(raw, "sys_us") / 1e6,
        max_rss=integer(raw, "max_rss"),
        read=integer(raw, "read"),
        written=integer(raw, "written"),
        processes=integer(raw, "procs"),
    )


def violations_of(reply: dict[str, Any]) -> tuple[Violation, ...]:
    """Read the violations of a reply; at most 64 are kept."""
    raw = reply.get("violations")
    if not raw:
        return ()
    if type(raw) is not list or not all(type(item) is dict for item in raw):
        msg = "the worker sent violations that are no list of maps"
        raise wire.ProtocolError(msg)
    out = []
    for item in raw[:64]:
        what = wire.text(item, "what")
        kind = wire.text(item, "kind")
        limited = "limit" in item
        hint = {
            "memory": "memory_mb",
            "pids": "pids",
            "disk": "disk_mb",
            "cpu": "cpu_s",
            "wall": "wall_s",
        }.get(what)
        out.append(
            Violation(
                kind,
                what,
                limit=wire.integer(item, "limit") if limited else None,
                observed=wire.integer(item, "observed") if "observed" in item else None,
                rule=f"limits.{hint}" if hint else "",
                hint=f"raise {hint} in [sandbox.limits]" if hint else "",
            )
        )
    return tuple(out)


def result_of(
    reply: dict[str, Any], argv: list[bytes], cwd: bytes, running: Running | None = None
) -> ExecResult:
    """Turn the reply to an exec into a result; of a failed one `running` tells what the kernel has enforced.

    Raises:
        OSError: the command never started because of its directory or its size (chdir(2), execve(2)).
    """
    if running is not None and reply.get("exit_code"):
        _note_enforced(reply, running)
    exec_errno = wire.integer(reply, "exec_errno", 0, 4095)
    stderr = b""
    if exec_errno:
        if wire.text(reply, "stage") == "cwd":
            raise OSError(exec_errno, os.strerror(exec_errno), os.fsdecode(cwd))
        if exec_errno == errno.E2BIG:
            raise OSError(exec_errno, "the arguments and the environment are larger than the kernel takes")
        if exec_errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE):
            raise OSError(exec_errno, f"the jail cannot start another command: {os.strerror(exec_errno)}")
        stderr = f"vectora-jail: {describe(argv)}: {os.strerror(exec_errno)}\n".encode(
            "utf-8", "surrogateescape"
        )
    return ExecResult(
        exit_code=wire.integer(reply, "exit_code", 0, 255),
        stderr=stderr,
        timed_out=wire.flag(reply, "timed_out"),
        signal=wire.integer(reply, "signal", 0, 64),
        usage=usage_of(reply),
        violations=violations_of(reply),
        leftovers_killed=wire.integer(reply, "leftovers"),
    )


def plain_result(numbers: list[int]) -> ExecResult:
    """Turn the numbers of a common reply, which the native side has checked, into a result."""
    _, code, signal, timed_out, leftovers, wall, user, system, rss, read, written, processes = numbers
    usage = Usage(wall / 1e6, user / 1e6, system / 1e6, rss, read, written, processes)
    return ExecResult(code, b"", b"", timed_out == 1, signal, usage, (), 0, 0, leftovers)


def overtime(result: ExecResult, prepared: Prepared) -> tuple[Violation, ...]:
    """Return the violation of a call that the policy's `wall_s` has ended; the caller's own timeout is none."""
    if not (result.timed_out and prepared.wall_ms):
        return ()
    spent = int(result.duration * 1000)
    rule, hint = "limits.wall_s", "raise wall_s in [sandbox.limits]"
    return (Violation("limit", "wall", limit=prepared.wall_ms, observed=spent, rule=rule, hint=hint),)


def refused_targets(door: EgressDoor, since: int) -> tuple[Violation, ...]:
    """Return what the egress proxy has refused since then, while this call ran."""
    return tuple(
        Violation(
            "network",
            f"{attempt.host}:{attempt.port}",
            rule=attempt.rule or attempt.reason,
            hint=f'add "{attempt.rule_needed}" to allow in [sandbox.network]' if attempt.rule_needed else "",
        )
        for attempt in door.attempts_since(since)
        if attempt.action == "deny"
    )


def _note_enforced(reply: dict[str, Any], running: Running) -> None:
    """Add the limits that the kernel itself has enforced to a reply, unless the worker names them already."""
    ask = getattr(running, "limit_events", None)  # only where the host has control groups
    events = ask() if ask is not None else None
    if not events:
        return
    said = reply.get("violations") or []
    if type(said) is list:
        named = {item.get("what") for item in said if type(item) is dict}
        reply["violations"] = [*said, *(event for event in events if event["what"] not in named)]


class Commands:
    """Commands of one jail: exec, and what stream, spawn and terminal share with it."""

    def __init__(self, life: JailLife, waiter: Waiter) -> None:
        self.life = life
        self.waiter = waiter

    def prepare(
        self,
        worker: Worker,
        op: str,
        command: Command,
        *,
        cwd: Path | None = None,
        env: Environment | None = None,
        stdin: Any = None,
        timeout: float | None = None,
        leftovers: str = "kill",
        merge: bool = False,
        limit_time: bool = True,
    ) -> Prepared:
        """Check a caller's arguments and make the request."""
        prepared = Prepared()
        argv, script = command_fields(command)
        message = prepared.message
        message["op"] = op
        message["id"] = worker.next_id()
        message["command"] = argv
        prepared.argv = argv
        plan = worker.running.plan
        if cwd is not None:
            prepared.cwd = message["cwd"] = path_bytes(cwd, "cwd")
        if env:
            message["env"] = environment_list(plan.env, env)
        if limit_time:
            milliseconds = timeout_ms(timeout, plan.wall_s)
            if milliseconds:
                message["timeout_ms"] = milliseconds
                prepared.seconds = milliseconds / 1000
                if plan.wall_s and milliseconds >= int(plan.wall_s * 1000):
                    prepared.wall_ms = milliseconds
            if plan.cpu_s:
                message["cpu_ms"] = int(plan.cpu_s * 1000)
        if leftovers == "keep":
            message["leftovers"] = "keep"
        elif leftovers != "kill":
            msg = f'leftovers is "kill" or "keep", not {leftovers!r}'
            raise ValueError(msg)
        if merge:
            message["merge"] = True
        try:
            if script is not None:
                message["script"] = True
                prepared.fds[3] = sealed_memfd("vectora-jail-script", script)
                prepared.opened.append(prepared.fds[3])
                os.lseek(prepared.fds[3], 0, os.SEEK_SET)
            prepared.fds[0], prepared.stdin_bytes, prepared.stdin_iter = stdin_source(stdin)
        except BaseException:
            prepared.close()
            raise
        return prepared

    def send(
        self, worker: Worker, lane: Lane, prepared: Prepared, flags: int, cap: int, wait_ms: int = 0
    ) -> int:
        """Send a prepared request, whose descriptors are closed here, and wait `wait_ms` for what happens first."""
        try:
            data, body = worker.packed(prepared.message)
            if body >= 0:
                prepared.opened.append(body)
                if prepared.fds[3] >= 0:
                    raise OSError(errno.E2BIG, "a long script and a large environment do not fit one request")
                prepared.fds[3] = body
            if prepared.stdin_bytes is not None or prepared.stdin_iter is not None:
                flags |= FEED
            fds: Any = tuple(prepared.fds)
            owner = worker.running.owner
            if not wait_ms:
                lane.exec(data, fds, flags, cap, owner)
                return PENDING
            return lane.run(data, fds, flags, cap, owner, wait_ms)
        except ChannelClosed as exc:
            raise worker.died(exc.reason, outcome="unknown" if lane.busy else "not_started") from None
        except _lanes.DescriptorQuota:
            raise worker.quota() from None
        finally:
            prepared.close()

    async def feed(self, lane: Lane, prepared: Prepared) -> None:
        """Give the command the next piece of its input."""
        if prepared.stdin_bytes is not None:
            data, prepared.stdin_bytes = prepared.stdin_bytes, None
            lane.feed(data, last=prepared.stdin_iter is None)
            return
        if prepared.stdin_iter is None:
            lane.feed(b"", last=True)
            return
        try:
            if hasattr(prepared.stdin_iter, "__anext__"):
                piece = await prepared.stdin_iter.__anext__()
            else:
                piece = next(prepared.stdin_iter)
        except (StopIteration, StopAsyncIteration):
            lane.feed(b"", last=True)
            return
        if isinstance(piece, str):
            piece = piece.encode("utf-8", "surrogateescape")
        lane.feed(bytes(piece), last=False)

    async def wait(self, worker: Worker, lane: Lane, prepared: Prepared, deadline: float | None) -> int:
        """Wait until the call ended (`DONE`) or wrote something (`DATA`, streams only)."""
        unhealthy = 0
        while True:
            rc = await self.waiter.next(lane, None if deadline is None else deadline - _now())
            if rc in (DONE, DATA):
                return rc
            if rc == NEED_INPUT:
                await self.feed(lane, prepared)
                continue
            if deadline is not None and _now() >= deadline:
                raise worker.died("it did not end the call in time", kill=True)
            health = worker.running.health()
            unhealthy = unhealthy + 1 if health else 0
            if unhealthy > 1 or (health and health != "stopped by a signal"):
                raise worker.died(health, kill=True)

    async def exec(
        self,
        command: Command,
        *,
        cwd: Path | None = None,
        env: Environment | None = None,
        stdin: Any = None,
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
        merge_stderr: bool = False,
        leftovers: str = "kill",
        check: bool = False,
    ) -> ExecResult:
        """Run a command in the jail and return how it ended.

        Args:
            command: A string, run by `sh -c` as written, or a sequence of arguments, run as it is.
            cwd: Directory inside the jail; relative to the workspace. Default: the workspace.
            env: Changes to the jail's environment for this call; None as a value removes the name.
            stdin: bytes, str, a descriptor, a file, or an iterable of bytes. Default: `/dev/null`.
            timeout: Seconds; can only lower the policy's `wall_s`. At the end of it the command's whole tree is
                killed, `timed_out` is set and the output so far is kept.
            max_output: Bytes kept of each stream: the first and the last half of it when there is more.
            merge_stderr: Put stderr into stdout, in the order of the writes.
            leftovers: `"kill"` ends what the command left running, `"keep"` lets it live until the jail closes.
            check: Raise CommandFailed unless the command ended with 0.

        Raises:
            OSError: the directory does not exist, the arguments are too large. WorkerSpawnError, WorkerDiedError,
            PolicyError: there is no jail. ValueError, TypeError: the call makes no sense.
        """
        if max_output < 1:
            msg = f"max_output must be at least 1, not {max_output}"
            raise ValueError(msg)
        worker = await self.life.ready()
        prepared = self.prepare(
            worker, "exec", command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, leftovers=leftovers
        )
        flags = CAPTURE_OUT | MERGE if merge_stderr else CAPTURE_OUT | CAPTURE_ERR
        number = prepared.message["id"]
        door = worker.running.door
        attempts = door.sequence if door is not None else 0
        worker.enter(number)
        try:
            lane = worker.borrow()
            try:
                deadline = None if prepared.seconds is None else _now() + prepared.seconds + 2.0
                wait_ms = MAX_SLICE_MS if self.waiter.blocking else 0
                if self.send(worker, lane, prepared, flags, max_output, wait_ms) != DONE:
                    await self.wait(worker, lane, prepared, deadline)
                plain = lane.plain()
                if plain is not None and plain[0] == number and not plain[1]:
                    result = plain_result(plain)
                else:
                    reply = wire.decode(lane.reply())
                    wire.expect_id(reply, number)
                    result = result_of(reply, prepared.argv, prepared.cwd, worker.running)
            except (ChannelClosed, wire.ProtocolError) as exc:
                lane.close()
                raise worker.died(str(exc)) from None
            except WorkerDiedError:
                lane.close()
                raise
            except BaseException:
                if lane.busy:
                    await worker.cancel(self.waiter, lane, number)
                raise
            else:
                result.stdout, result.dropped_stdout = lane.output(0)
                kept, result.dropped_stderr = lane.output(1)
                if kept:
                    result.stderr = kept + result.stderr
                result.violations += overtime(result, prepared)
                if door is not None and door.sequence != attempts:
                    result.violations += refused_targets(door, attempts)
            finally:
                if lane.fd >= 0:
                    worker.give_back(lane)
        finally:
            left = worker.settle(number)
            self.life.last_used = _now()
        if left:
            result.violations += left
        if check and result.exit_code:
            raise CommandFailed(command, result)
        return result
