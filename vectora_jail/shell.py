"""A persistent shell: one bash whose directory, variables and functions last from call to call.

bash reads its program from a pipe, one line a call; its own three streams are `/dev/null`. The caller's streams lie
on descriptors 201 (status), 202 (stderr) and 203 (stdout), so that neither a prompt nor a sentinel comes into them.
After the status everything that bash and the children it has waited for wrote is in the pipes already. Numbers above
250 would collide with bash's own.
"""

from __future__ import annotations

import os
import signal as signal_module
import time
from typing import TYPE_CHECKING, Any, Final

from ._command import timeout_ms
from ._core import MAX_OUTPUT, _now
from ._faces import blocking
from ._shellbash import Bash, OutOfStep
from ._shellstate import FINISH, quote, restoring
from .errors import CommandFailed
from .process import _pipe_for
from .results import ExecResult, Usage

if TYPE_CHECKING:
    from ._command import Environment, Path
    from ._core import Commands
    from .worker import Worker

PATIENCE_S: Final = 0.2
"""How long a command has to end after one signal before the next, harder one."""
_BOOT: Final = (
    "exec 200<&0 201>&3 202>&2 203>&1 3>&- 204</dev/null <&204 >/dev/null 2>&1; "
    'exec "$BASH" --norc --noprofile /proc/self/fd/200'
)
_FIRST: Final = b"exec 200<&-; BASH_ARGV0=bash\n"
_INTERRUPT: Final = (
    'walk() { local c; for c in $(</proc/"$1"/task/"$1"/children); do walk "$c"; kill -INT "$c"; done; } '
    '2>/dev/null; walk "$1"'
)


def _line(command: bytes, source: bytes | None) -> bytes:
    """Return the program line of one call."""
    stdin = b" <&204" if source is None else b" <" + quote(source)
    return rb"\builtin eval " + quote(command) + b" >&203 2>&202" + stdin + rb'; \__vj "$?"' + b"\n"


class AsyncShell:
    """A bash that lives from call to call, for asyncio; `Shell` is the same for threads."""

    def __init__(self, commands: Commands, cwd: Path | None, env: Environment | None) -> None:
        """Remember how to start; the first call (or `open_shell`) starts bash."""
        self._commands = commands
        self._waiter = commands.waiter
        self._cwd = cwd
        self._env = env
        self._lock = self._waiter.lock()
        self._bash: Bash | None = None
        self._state: tuple[bytes, bytes] | None = None
        self._closed = False
        self._untold = False
        """The shell was replaced and no result has said so."""
        self._inputs = 0

    @property
    def pid(self) -> int:
        """The bash inside the jail; another one after a restart; 0 when there is none now."""
        return self._bash.pid if self._bash is not None else 0

    @property
    def alive(self) -> bool:
        """Whether a bash waits for the next command; without one the next call starts it."""
        return self._bash is not None and self._bash.alive

    async def start(self) -> None:
        """Start bash now."""
        async with self._lock:
            await self._ready()

    async def _ready(self) -> tuple[Bash, bool]:
        """Return a bash in step, in the jail's present worker; and whether it replaces one."""
        if self._closed:
            msg = "the shell is closed"
            raise ValueError(msg)
        worker = await self._commands.life.ready()
        bash = self._bash
        if bash is not None:
            if bash.worker is worker and bash.running and await self._in_step(bash):
                return bash, False
            await self._drop(bash)
        self._bash = await self._launch(worker)
        replaced, self._untold = bash is not None or self._untold, False
        return self._bash, replaced

    @staticmethod
    async def _in_step(bash: Bash) -> bool:
        """Whether bash is as it should be, as far as it has told by now."""
        try:
            await bash.pump(0)
        except OutOfStep:
            return False
        return bash.running and bash.usable

    async def _drop(self, bash: Bash) -> None:
        """End a bash; the state after its last whole call is what the next one starts with."""
        self._bash = None
        bash.salvage()
        if bash.state[0]:
            self._state = bash.state
        await bash.close()

    async def _launch(self, worker: Worker) -> Bash:
        commands = self._commands
        boot = ["bash", "--norc", "--noprofile", "-c", _BOOT]
        prepared = commands.prepare(worker, "spawn", boot, cwd=self._cwd, env=self._env, limit_time=False)
        prepared.message["script"] = True  # a fourth descriptor, 3 of the command
        ours: list[int] = []
        theirs: list[int] = []
        bash = None
        try:
            for ours_is_read in (False, True, True, True):
                mine, other = _pipe_for(worker.running.owner, ours_is_read=ours_is_read)
                ours.append(mine)
                theirs.append(other)
            prepared.fds[:] = theirs
            bash = Bash(worker, worker.borrow(), prepared.message["id"], self._waiter, prepared.argv)
            await bash.start(lambda to: commands.send(worker, to, prepared, 0, 2), prepared.cwd)
            bash.adopt(ours)
        except BaseException:
            if bash is not None:
                bash.close_pipes()
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        base = tuple(prepared.message.get("env") or worker.running.plan.env)
        program = _FIRST
        if self._state is not None:
            bash.state = self._state
            program += rb"\builtin eval " + quote(restoring(*self._state, base)) + b"\n"
        program += FINISH
        try:
            await bash.give(program)
        except BaseException:
            await bash.close()
            raise
        return bash

    async def run(
        self,
        command: str | bytes,
        *,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        max_output: int = MAX_OUTPUT,
        check: bool = False,
    ) -> ExecResult:
        """Run a command line in the shell and return how it ended; calls of several threads come one after the other.

        A command that ends the shell (`exit`, `exec`, `set -e`, a signal) returns that exit code with
        `shell_restarted`; the next call runs in a new bash with the state at the end of the call before: directory,
        variables, functions, aliases, options and umask, but no jobs, traps, read-only variables, errexit or open
        descriptors. A shell that was replaced before the command ran says `shell_restarted` too.

        Args:
            command: Lines for bash.
            timeout: Seconds; can only lower the policy's `wall_s`. At the end of it the command is interrupted, 0.2 s
                later bash itself, then everything in the shell is killed; the exit code is 124.
            stdin: What the command reads; default `/dev/null`.
            max_output: Bytes kept of each stream: the first and the last half of it when there is more.
            check: Raise CommandFailed unless the command ended with 0.

        Raises:
            ValueError: NUL in the command, or the shell is closed. WorkerDiedError, WorkerSpawnError, PolicyError:
            there is no jail.
        """
        text = command.encode("utf-8", "surrogateescape") if isinstance(command, str) else bytes(command)
        if b"\0" in text:
            msg = "the command holds a NUL byte"
            raise ValueError(msg)
        async with self._lock:
            bash, restarted = await self._ready()
            limit = timeout_ms(timeout, bash.worker.running.plan.wall_s)
            source = None if stdin is None else await self._input(bash.worker, stdin)
            try:
                result = await self._call(bash, _line(text, source), limit, max_output)
                if result is None:  # a command before it had closed the streams, so it did not run
                    await self._drop(bash)
                    bash, restarted = (await self._ready())[0], True
                    result = await self._call(bash, _line(text, source), limit, max_output)
            finally:
                self._commands.life.touch()
                if source is not None:
                    await self._forget_input(bash.worker, source)
            result = result or ExecResult(1, shell_restarted=True)
            result.violations += bash.worker.settle(0)
            result.shell_restarted = result.shell_restarted or restarted
        if check and result.exit_code:
            raise CommandFailed(os.fsdecode(text), result)
        return result

    async def _call(self, bash: Bash, line: bytes, limit_ms: int, cap: int) -> ExecResult | None:
        """Give bash one line and wait for its end; None when it could not run the command."""
        start = _now()
        bash.begin(cap)
        lost = timed_out = False
        try:
            await bash.give(line)
            if not await bash.until(start + limit_ms / 1000 if limit_ms else None):
                timed_out = True
                await self._break(bash)
        except OutOfStep:
            lost = True
        except BaseException:
            self._untold = True
            await self._drop(bash)
            raise
        if bash.code is not None and not lost:
            if not bash.ran:
                return None
            result = ExecResult(bash.code, usage=Usage(wall=_now() - start))
        else:
            if bash.ended is not None and bash.unread() >= len(line):
                return None  # it had ended before
            await self._drop(bash)
            ended = bash.ended
            result = ExecResult(1, shell_restarted=True, usage=Usage(wall=_now() - start))
            if ended is not None and not lost:
                result.exit_code, result.signal = ended.exit_code, ended.signal
                result.violations, result.usage = ended.violations, Usage(wall=_now() - start)
        if timed_out:
            result.exit_code, result.timed_out, result.signal = 124, True, 0
        out, err = bash.captures
        result.stdout, result.dropped_stdout = out.value(), out.dropped
        result.stderr, result.dropped_stderr = err.value(), err.dropped
        return result

    async def _break(self, bash: Bash) -> None:
        """End the command under way: its processes first, then bash, each with a moment to obey."""
        await self._interrupt_children(bash)
        if await bash.until(_now() + PATIENCE_S):
            return
        await bash.signal(signal_module.SIGINT)
        if await bash.until(_now() + PATIENCE_S):
            return
        await bash.signal(signal_module.SIGKILL)
        await bash.until(_now() + 2.0)

    async def _interrupt_children(self, bash: Bash) -> None:
        """Send SIGINT to what bash has started, not to bash: it ends from it when it waits for a child."""
        if bash.alive:
            await self._commands.exec(["bash", "-c", _INTERRUPT, "_", str(bash.pid)], timeout=2.0)

    def _calls(self, bash: Bash) -> bool:
        """Whether a command is under way in this bash, and it is still ours."""
        return bash.busy and self._bash is bash

    async def interrupt(self) -> bool:
        """End the command under way in another thread or task, as ^C would; False when there is none.

        Its processes get SIGINT; when the command has not ended 0.2 s later bash gets it too, and 0.2 s later all is
        killed; then the shell restarts with the state before the call.
        """
        bash = self._bash
        if bash is None or not self._calls(bash):
            return False
        await self._interrupt_children(bash)
        for signo in (signal_module.SIGINT, signal_module.SIGKILL):
            until = time.monotonic() + PATIENCE_S
            while self._calls(bash) and time.monotonic() < until:
                await self._waiter.sleep(0.01)
            if not self._calls(bash):
                break
            await bash.signal(signo)
        return True

    async def _input(self, worker: Worker, stdin: bytes | str) -> bytes:
        """Put the input into a file of the jail's private directory: a pipe could not end without being closed."""
        data = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else bytes(stdin)
        env = dict(item.partition(b"=")[::2] for item in worker.running.plan.env)
        self._inputs += 1
        name = f"/.vectora-jail-input-{self.pid}-{id(self):x}-{self._inputs}"
        path = env.get(b"TMPDIR", b"/tmp") + name.encode()
        await self._files().write_file(path, data, mode=0o600)
        return path

    async def _forget_input(self, worker: Worker, path: bytes) -> None:
        if worker.alive:
            try:
                await self._files().remove(path)
            except FileNotFoundError:
                pass

    def _files(self) -> Any:
        from ._files import Files

        return Files(self._commands.life, self._waiter)

    async def close(self) -> None:
        """End bash and everything that it has started."""
        self._closed = True
        bash, self._bash = self._bash, None
        if bash is not None:
            await bash.close()

    async def __aenter__(self) -> AsyncShell:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def open_shell(
    commands: Commands, *, cwd: Path | None = None, env: Environment | None = None
) -> AsyncShell:
    """Start a persistent shell (see `Jail.shell`)."""
    shell = AsyncShell(commands, cwd, env)
    await shell.start()
    return shell


class Shell:
    """A bash whose directory, variables and functions last from call to call. Thread-safe."""

    def __init__(self, core: AsyncShell) -> None:
        """Wrap what `Jail.shell` has started."""
        self._core = core

    run = blocking("_core", AsyncShell.run)
    interrupt = blocking("_core", AsyncShell.interrupt)
    close = blocking("_core", AsyncShell.close)

    @property
    def pid(self) -> int:
        """The bash inside the jail; another one after a restart."""
        return self._core.pid

    @property
    def alive(self) -> bool:
        """Whether a bash waits for the next command; without one the next call starts it."""
        return self._core.alive

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
