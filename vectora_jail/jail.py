"""What callers hold: `Jail` for threads, `AsyncJail` for asyncio; one implementation, two ways to wait."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ._core import Commands
from ._faces import awaitable, blocking
from ._files import Files
from ._life import FilePolicy, FixedPolicy, JailLife
from ._stream import AsyncStream, Stream, StreamCore
from ._waiting import AsyncWaiter, SyncWaiter, drive
from .errors import UnsupportedPolicy
from .process import AsyncProcess, Process, spawn
from .results import Hazard, JailReport
from .shell import AsyncShell, Shell, open_shell
from .terminal import AsyncTerminal, Terminal, open_terminal

if TYPE_CHECKING:
    from ._command import Command, Environment, Path
    from ._waiting import Waiter
    from .plan import JailPlan
    from .policy import Ceiling, Policy
    from .results import ExecResult
    from .worker import Worker

__all__ = ["AsyncJail", "Jail"]


def make_life(
    workspace: str | os.PathLike[str] | bytes,
    policy: Policy | None,
    ceiling: Ceiling | None,
    waiter: Waiter,
    *,
    required: bool = False,
    backend_options: dict[str, Any] | None = None,
) -> JailLife:
    """Return the life of a jail for a workspace; nothing is started."""
    path = os.path.abspath(os.fsdecode(workspace))
    if "\0" in path:
        msg = "the workspace's path holds a NUL byte"
        raise ValueError(msg)
    source = FixedPolicy(policy) if policy is not None else FilePolicy(path, ceiling, required=required)
    return JailLife(path, source, waiter, backend_options=backend_options)


class _Base:
    """What both faces share."""

    def __init__(self, life: JailLife) -> None:
        self._life = life
        self._commands = Commands(life, life.waiter)
        self._files = Files(life, life.waiter)

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace on this host."""
        return self._life.workspace

    @property
    def inner_root(self) -> str:
        """The workspace's path inside the jail."""
        plan = self._life.plan
        return os.fsdecode(plan.workspace) if plan is not None else self._life.workspace

    @property
    def policy(self) -> Policy | None:
        """The policy that the current worker was started with; None before the first start."""
        return self._life.policy

    @property
    def plan(self) -> JailPlan | None:
        """The plan of the current worker; None before the first start."""
        return self._life.plan

    @property
    def alive(self) -> bool:
        """Whether a worker runs now; the next call starts one when there is none."""
        worker = self._life.worker
        return worker is not None and worker.alive and not worker.check()

    @property
    def report(self) -> JailReport:
        """What is really enforced now; `isolation` is "none" and no layer is listed before the first start."""
        worker = self._life.worker
        if worker is None or not worker.alive:
            return JailReport(isolation="none")
        return make_report(worker, self._life)


def make_report(worker: Worker, life: JailLife) -> JailReport:
    """Return the report of a running worker."""
    running = worker.running
    plan = running.plan
    tree = running.tree_report()
    hazards = [Hazard(kind, text) for kind, text in plan.hazards]
    planted = getattr(life.source, "planted", False) or tree.get("planted")
    if planted:
        hazards.append(
            Hazard("policy_planted", "vectora.toml appeared while the jail was alive: it is not read")
        )
    if not tree.get("complete", True):
        hazards.append(Hazard("mask_scan", f"not all names were looked at: {tree['reason']}"))
    elif tree.get("watch") == "rescan":
        hazards.append(Hazard("mask_watch", f"later changes are seen at the next call: {tree['reason']}"))
    hazards += tree.get("redirects", [])
    hazards += [Hazard(kind, _text(path)) for path, kind in tree.get("hazards", [])]
    return JailReport(
        isolation=plan.isolation,
        layers=plan.layers,
        masks=tuple(_text(path) for path in tree.get("masks", [])),
        masked_by_history=tuple(_text(path) for path in tree.get("history", [])),
        protected=tuple(_text(path) for path in tree.get("protected", [])),
        hazards=tuple(hazards),
        dropped_env=plan.dropped_env,
        policy_digest=plan.policy_digest,
        proof=running.proof,
        pid=running.pid,
    )


def _text(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, (bytes, str)) else str(path)


class Jail(_Base):
    """One workspace's jail. Thread-safe; calls from several threads run side by side in one worker."""

    @classmethod
    def open(
        cls,
        workspace: str | os.PathLike[str] | bytes,
        policy: Policy | None = None,
        ceiling: Ceiling | None = None,
        *,
        backend_options: dict[str, Any] | None = None,
    ) -> Jail:
        """Return a jail without a manager. Its worker starts with the first action (or the `with` block).

        Without `policy` the workspace's `vectora.toml` is read, and the defaults are used where it has no
        `[sandbox]`: who asks for a jail gets one.

        Raises:
            PolicyError: with the first action, when the file is refused or exceeds the ceiling.
        """
        return cls(make_life(workspace, policy, ceiling, SyncWaiter(), backend_options=backend_options))

    exec = blocking("_commands", Commands.exec)
    read_file = blocking("_files", Files.read_file)
    read_text = blocking("_files", Files.read_text)
    write_file = blocking("_files", Files.write_file)
    edit_file = blocking("_files", Files.edit_file)
    stat = blocking("_files", Files.stat)
    list_dir = blocking("_files", Files.list_dir)
    make_dir = blocking("_files", Files.make_dir)
    remove = blocking("_files", Files.remove)
    rename = blocking("_files", Files.rename)

    def start(self) -> Jail:
        """Start the worker now instead of with the first action."""
        drive(self._life.ready())
        return self

    @property
    def report(self) -> JailReport:
        """What is really enforced; starts the worker when there is none."""
        return make_report(drive(self._life.ready()), self._life)

    def stream(self, command: Command, **options: Any) -> Stream:
        """Run a command and iterate over its output as it comes; `.result` at the end.

        Options: `cwd`, `env`, `stdin`, `timeout`, `merge_stderr` and `leftovers`, as `exec`. Nothing is dropped: a
        caller that reads slowly slows the command down.
        """
        return Stream(StreamCore(self._commands, command, options))

    def spawn(
        self,
        command: Command,
        *,
        cwd: Path | None = None,
        env: Environment | None = None,
        merge_stderr: bool = False,
    ) -> Process:
        """Start a program that outlives the call, not the jail: no time limit, its own stdin, a ring of output."""
        return Process(drive(spawn(self._commands, command, cwd=cwd, env=env, merge_stderr=merge_stderr)))

    def open_terminal(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: Path | None = None,
        env: Environment | None = None,
    ) -> Terminal:
        """Open a real terminal inside the jail (default: the user's shell)."""
        return Terminal(drive(open_terminal(self._commands, command, rows=rows, cols=cols, cwd=cwd, env=env)))

    def shell(self, *, cwd: Path | None = None, env: Environment | None = None) -> Shell:
        """Start a bash whose directory, variables and functions last from call to call."""
        return Shell(drive(open_shell(self._commands, cwd=cwd, env=env)))

    def git(self, arguments: list[str], **options: Any) -> ExecResult:
        """Run git inside the jail, where no hook of the tree reaches the host (options as `exec`)."""
        return self.exec(["git", *arguments], **options)

    def allow(self, rule: str, ttl: float | None = None) -> None:
        """Let this jail reach one more target (`host:port`, `localhost:port` …) for `ttl` seconds."""
        drive(_allow(self._life, rule, ttl))

    def expose(self, port: int, *, listen: bool = True) -> Any:
        """Return a port of this host's loopback that leads to `port` inside, or one connected socket."""
        from .expose import expose

        return drive(expose(self._life, self._life.waiter, port, listen=listen))

    def ping(self) -> None:
        """Ask the worker for a sign of life."""
        drive(_ping(self._life))

    def close(self) -> None:
        """End the worker and everything in the jail."""
        self._life.close()

    def __enter__(self) -> Jail:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _allow(life: JailLife, rule: str, ttl: float | None = None) -> None:
    """Let this jail reach one more target (`host:port`, `localhost:port` …) for `ttl` seconds, or until it ends.

    Raises:
        UnsupportedPolicy: its network is not an allowlist. ValueError: no rule. OSError(EADDRINUSE): a program in
        the jail has that port.
    """
    worker = await life.ready()
    door = worker.running.door
    if door is None:
        raise UnsupportedPolicy(
            "grants at run time need an allowlist",
            layer="network",
            code="network_mode",
            hint='set network.mode = "allowlist", also with an empty list',
        )
    await life.waiter.run(lambda: door.allow(rule, ttl))


async def _ping(life: JailLife) -> None:
    worker = await life.ready()
    await worker.request(life.waiter, {"op": "ping"}, timeout=5.0)


class AsyncJail(_Base):
    """The same for asyncio: everything that can wait is a coroutine, attributes never wait."""

    @classmethod
    def open(
        cls,
        workspace: str | os.PathLike[str] | bytes,
        policy: Policy | None = None,
        ceiling: Ceiling | None = None,
        *,
        backend_options: dict[str, Any] | None = None,
    ) -> AsyncJail:
        """Return a jail without a manager (see `Jail.open`); `async with` starts its worker."""
        return cls(make_life(workspace, policy, ceiling, AsyncWaiter(), backend_options=backend_options))

    exec = awaitable("_commands", Commands.exec)
    read_file = awaitable("_files", Files.read_file)
    read_text = awaitable("_files", Files.read_text)
    write_file = awaitable("_files", Files.write_file)
    edit_file = awaitable("_files", Files.edit_file)
    stat = awaitable("_files", Files.stat)
    list_dir = awaitable("_files", Files.list_dir)
    make_dir = awaitable("_files", Files.make_dir)
    remove = awaitable("_files", Files.remove)
    rename = awaitable("_files", Files.rename)

    async def start(self) -> AsyncJail:
        """Start the worker now instead of with the first action."""
        await self._life.ready()
        return self

    def stream(self, command: Command, **options: Any) -> AsyncStream:
        """Run a command and iterate over its output as it comes; `.result` at the end.

        Options: `cwd`, `env`, `stdin`, `timeout`, `merge_stderr` and `leftovers`, as `exec`. Nothing is dropped: a
        caller that reads slowly slows the command down.
        """
        return AsyncStream(StreamCore(self._commands, command, options))

    async def spawn(
        self,
        command: Command,
        *,
        cwd: Path | None = None,
        env: Environment | None = None,
        merge_stderr: bool = False,
    ) -> AsyncProcess:
        """Start a program that outlives the call, not the jail."""
        return await spawn(self._commands, command, cwd=cwd, env=env, merge_stderr=merge_stderr)

    async def open_terminal(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: Path | None = None,
        env: Environment | None = None,
    ) -> AsyncTerminal:
        """Open a real terminal inside the jail (default: the user's shell)."""
        return await open_terminal(self._commands, command, rows=rows, cols=cols, cwd=cwd, env=env)

    async def shell(self, *, cwd: Path | None = None, env: Environment | None = None) -> AsyncShell:
        """Start a bash whose directory, variables and functions last from call to call."""
        return await open_shell(self._commands, cwd=cwd, env=env)

    async def git(self, arguments: list[str], **options: Any) -> ExecResult:
        """Run git inside the jail, where no hook of the tree reaches the host (options as `exec`)."""
        return await self.exec(["git", *arguments], **options)

    async def allow(self, rule: str, ttl: float | None = None) -> None:
        """Let this jail reach one more target (`host:port`, `localhost:port` …) for `ttl` seconds."""
        await _allow(self._life, rule, ttl)

    async def expose(self, port: int, *, listen: bool = True) -> Any:
        """Return a port of this host's loopback that leads to `port` inside, or one connected socket."""
        from .expose import expose

        return await expose(self._life, self._life.waiter, port, listen=listen)

    async def ping(self) -> None:
        """Ask the worker for a sign of life."""
        await _ping(self._life)

    async def close(self) -> None:
        """End the worker and everything in the jail."""
        await self._life.waiter.run(self._life.close)

    async def __aenter__(self) -> AsyncJail:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
