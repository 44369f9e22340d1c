"""Many workspaces, one jail each: shared by concurrent callers, bounded in number, ended when idle."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._waiting import AsyncWaiter, SyncWaiter
from .jail import AsyncJail, Jail, make_life

if TYPE_CHECKING:
    from ._life import JailLife
    from ._waiting import Waiter
    from .policy import Ceiling, Policy

__all__ = ["AsyncJailManager", "JailManager"]

J = TypeVar("J", Jail, AsyncJail)
TICK_S = 1.0
IDLE_DEFAULT_S = 300.0


class _Registry(Generic[J]):
    """The jails of one manager by workspace, and when to end them. Pure bookkeeping under one short lock."""

    def __init__(
        self,
        ceiling: Ceiling | None,
        max_workers: int,
        idle_timeout_s: float | None,
        options: dict[str, Any] | None,
    ) -> None:
        if max_workers < 1:
            msg = f"max_workers must be at least 1, not {max_workers}"
            raise ValueError(msg)
        self.ceiling = ceiling
        self.max_workers = max_workers
        self.idle_timeout_s = idle_timeout_s
        self.options = options
        self.jails: dict[tuple[str, str], J] = {}
        self.lock = threading.Lock()
        self.closed = False
        self.started = 0
        self.evicted = 0
        self.pid = os.getpid()

    def key(self, workspace: Any, policy: Policy | None) -> tuple[str, str]:
        """Return what makes two requests the same jail."""
        path = os.path.realpath(os.fsdecode(workspace))
        return path, policy.digest if policy is not None else ""

    def life(self, workspace: Any, policy: Policy | None, waiter: Waiter) -> JailLife:
        """Make the life of a new jail."""
        life = make_life(
            os.path.realpath(os.fsdecode(workspace)),
            policy,
            self.ceiling,
            waiter,
            required=True,
            backend_options=self.options,
        )
        life._on_start = self._count_start  # noqa: SLF001 — set once, before anybody else sees the life
        return life

    def _count_start(self, life: JailLife) -> None:
        """Make room for the worker that has just started: the longest idle one goes."""
        self.started += 1
        kept: set[int] = set()
        while True:
            with self.lock:
                running = [jail._life for jail in self.jails.values() if jail._life.worker is not None]  # noqa: SLF001
                if len(running) <= self.max_workers:
                    return
                idle = [one for one in running if one is not life and id(one) not in kept and not one.busy]
                if not idle:
                    return  # all are at work: the limit is exceeded rather than a call killed
                oldest = min(idle, key=lambda one: one.last_used)
            if oldest.stop_idle():
                self.evicted += 1
            else:
                kept.add(id(oldest))  # a call came first

    def idle_after(self, life: JailLife) -> float:
        """Return the seconds after which an idle worker of this jail ends."""
        if self.idle_timeout_s is not None:
            return self.idle_timeout_s
        return float(life.policy.idle_timeout_s) if life.policy is not None else IDLE_DEFAULT_S

    def reap(self) -> int:
        """End workers that were idle for long enough; return how many still run."""
        now = time.monotonic()
        with self.lock:
            lives = [jail._life for jail in self.jails.values()]  # noqa: SLF001
        for life in lives:
            life.sweep_retired()
            if not life.busy and now - life.last_used > self.idle_after(life):
                life.stop_idle()
        return sum(life.worker is not None for life in lives)

    def check_open(self) -> None:
        """Raise RuntimeError once the manager is closed or in the child of a fork."""
        if self.closed:
            msg = "the manager is closed"
            raise RuntimeError(msg)
        if self.pid != os.getpid():
            msg = (
                "this manager belongs to the process that forked: make a JailManager of your own in the child"
            )
            raise RuntimeError(msg)

    def stats(self) -> dict[str, Any]:
        """Return counts and one line a jail."""
        now = time.monotonic()
        with self.lock:
            jails = dict(self.jails)
        rows = []
        for (workspace, _), jail in jails.items():
            life = jail._life  # noqa: SLF001
            worker = life.worker
            rows.append(
                {
                    "workspace": workspace,
                    "pid": worker.running.pid if worker else None,
                    "alive": jail.alive,
                    "calls": len(worker.calls) if worker else 0,
                    "idle_s": round(now - life.last_used, 3),
                    "starts": life.starts,
                }
            )
        return {
            "workers": sum(row["pid"] is not None for row in rows),
            "max_workers": self.max_workers,
            "started": self.started,
            "evicted": self.evicted,
            "jails": rows,
        }

    def reload(self, workspace: Any) -> None:
        """Trust the workspace's policy file as it is now, also when it appeared while a jail was alive."""
        path = os.path.realpath(os.fsdecode(workspace))
        with self.lock:
            lives = [jail._life for (where, _), jail in self.jails.items() if where == path]  # noqa: SLF001
        for life in lives:
            life.reload()

    def refuse_disabled(self, workspace: Any) -> None:
        """Raise SandboxDisabled or PolicyError for a workspace that did not opt in, or not properly."""
        from .policyfile import load_policy

        path = os.path.realpath(os.fsdecode(workspace))
        load_policy(path, ceiling=self.ceiling).ensure_usable(path)

    def take_all(self) -> list[J]:
        """Close the registry and return what it held."""
        with self.lock:
            self.closed = True
            jails = list(self.jails.values())
            self.jails.clear()
        return jails


class JailManager:
    """Jails for a threaded backend. `get` reads the policy; the worker starts with the first action.

    Args:
        ceiling: What policies may ask for; the default allows no more than the workspace itself.
        max_workers: Workers alive at once; beyond it the one that was idle longest ends.
        idle_timeout_s: Seconds after which an idle worker ends; None takes each policy's `idle_timeout_s`.
        backend_options: Passed to the backend (connection factories, key files …).
    """

    def __init__(
        self,
        ceiling: Ceiling | None = None,
        *,
        max_workers: int = 256,
        idle_timeout_s: float | None = None,
        backend_options: dict[str, Any] | None = None,
    ) -> None:
        self._registry: _Registry[Jail] = _Registry(ceiling, max_workers, idle_timeout_s, backend_options)
        self._reaper: threading.Thread | None = None
        self._wake = threading.Event()

    def get(self, workspace: str | os.PathLike[str] | bytes, policy: Policy | None = None) -> Jail:
        """Return the workspace's jail; the same object for everybody who asks.

        Raises:
            SandboxDisabled: the workspace did not opt in. PolicyError: its file is refused.
        """
        registry = self._registry
        registry.check_open()
        key = registry.key(workspace, policy)
        jail = registry.jails.get(key)
        if jail is None:
            if policy is None:
                registry.refuse_disabled(workspace)
            with registry.lock:
                jail = registry.jails.get(key)
                if jail is None:
                    jail = registry.jails[key] = Jail(registry.life(workspace, policy, SyncWaiter()))
            self._start_reaper()
        return jail

    def _start_reaper(self) -> None:
        with self._registry.lock:
            if self._reaper is None:
                self._reaper = threading.Thread(
                    target=self._reap_forever, name="vectora-jail-reaper", daemon=True
                )
                self._reaper.start()

    def _reap_forever(self) -> None:
        while not self._wake.wait(TICK_S):
            self._registry.reap()

    def stats(self) -> dict[str, Any]:
        """Return how many workers run, were started and evicted, and one entry a jail."""
        return self._registry.stats()

    def close_idle(self) -> int:
        """End workers that were idle for long enough now; return how many still run."""
        return self._registry.reap()

    def reload(self, workspace: str | os.PathLike[str] | bytes) -> None:
        """Read the workspace's policy file again with the next call, also one that appeared while a jail lived."""
        self._registry.reload(workspace)

    def close(self) -> None:
        """End every jail. May be called twice."""
        self._wake.set()
        for jail in self._registry.take_all():
            jail.close()
        reaper = self._reaper
        if reaper is not None and reaper is not threading.current_thread():
            reaper.join(5)

    def __enter__(self) -> JailManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncJailManager:
    """The same for asyncio; belongs to the loop of its first await."""

    def __init__(
        self,
        ceiling: Ceiling | None = None,
        *,
        max_workers: int = 256,
        idle_timeout_s: float | None = None,
        backend_options: dict[str, Any] | None = None,
    ) -> None:
        self._registry: _Registry[AsyncJail] = _Registry(
            ceiling, max_workers, idle_timeout_s, backend_options
        )
        self._waiter = AsyncWaiter()
        self._reaper: Any = None

    async def get(self, workspace: str | os.PathLike[str] | bytes, policy: Policy | None = None) -> AsyncJail:
        """Return the workspace's jail; the same object for everybody who asks (see `JailManager.get`)."""
        import asyncio

        registry = self._registry
        registry.check_open()
        loop = self._waiter.loop()
        key = registry.key(workspace, policy)
        jail = registry.jails.get(key)
        if jail is None:
            if policy is None:
                await loop.run_in_executor(None, registry.refuse_disabled, workspace)
            with registry.lock:
                jail = registry.jails.get(key)
                if jail is None:
                    jail = registry.jails[key] = AsyncJail(registry.life(workspace, policy, self._waiter))
            if self._reaper is None:
                self._reaper = asyncio.ensure_future(self._reap_forever())
        return jail

    async def _reap_forever(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            await loop.run_in_executor(None, self._registry.reap)

    def stats(self) -> dict[str, Any]:
        """Return how many workers run, were started and evicted, and one entry a jail."""
        return self._registry.stats()

    def reload(self, workspace: str | os.PathLike[str] | bytes) -> None:
        """Read the workspace's policy file again with the next call, also one that appeared while a jail lived."""
        self._registry.reload(workspace)

    async def close(self) -> None:
        """End every jail. May be called twice."""
        import asyncio

        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
        jails = self._registry.take_all()
        await asyncio.gather(*(jail.close() for jail in jails))

    async def __aenter__(self) -> AsyncJailManager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
