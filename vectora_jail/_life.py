"""When a jail's worker starts, is replaced and ends: one at a time for each workspace.

A worker is started on the first action; replaced when it died, when the policy changed, when the workspace's
directory is another one; and given up for a while after repeated failures. Nothing is ever replayed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ._lanes import Seen
from .errors import PolicyError, WorkerDiedError, WorkerSpawnError
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._waiting import Waiter
    from .plan import JailPlan
    from .policy import Ceiling, Policy

DEATHS_MAX: Final = 5
"""Workers that may die within DEATHS_WINDOW_S seconds before starts are refused for COOL_DOWN_S."""
DEATHS_WINDOW_S: Final = 10.0
COOL_DOWN_S: Final = 5.0
BACK_OFF_S: Final = (0.0, 0.0, 0.05, 0.2, 0.5)

POLICY_FILE: Final = "vectora.toml"


def _identity(path: str | bytes) -> tuple[int, ...] | None:
    """Return what changes when a file is saved or replaced, None when it is absent."""
    try:
        st = os.stat(path)
    except FileNotFoundError:
        return None
    return st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns, st.st_size


class FixedPolicy:
    """A policy given by the caller: the whole policy, no file is read."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def load(self) -> Policy:
        """Return the policy."""
        return self.policy

    def watched(self) -> None:
        """Return the file behind it: there is none."""

    def changed(self) -> bool:
        """Return whether the source differs from what was loaded last: never."""
        return False


class FilePolicy:
    """The workspace's own file, read again when it was saved."""

    def __init__(self, workspace: str, ceiling: Ceiling | None, *, required: bool) -> None:
        self.workspace = workspace
        self.ceiling = ceiling
        self.required = required
        """Refuse a workspace that did not opt in; without it the defaults are used."""
        self.path = os.path.join(workspace, POLICY_FILE)
        self._seen: tuple[int, ...] | None = None
        self._loaded = False
        self.planted = False
        """The file appeared while a jail was alive, so that it may be the agent's: it is ignored."""
        self.raced: tuple[int, ...] | None = None
        """A state of the file that a command may have written: it is refused."""
        self._policy: Policy | None = None

    def load(self) -> Policy:
        """Read the file. Raises PolicyError, SandboxDisabled."""
        from .policy import Policy
        from .policyfile import load_policy

        # The worker that saw the file appear may be gone: what it was started with still holds.
        if self._policy is not None and (self.planted or (self._seen is None and _identity(self.path))):
            self.planted = True
            return self._policy
        if self.raced is not None and self.raced == _identity(self.path):
            raise _race(self.path)
        for _ in range(3):
            before = _identity(self.path)
            policy = load_policy(self.workspace, ceiling=self.ceiling)
            if _identity(self.path) == before:
                break
        else:
            raise PolicyError(f"{self.path} changes while it is read", code="policy_race")
        self._seen, self._loaded, self.planted = before, True, False
        if not policy.enabled and not self.required:
            self._policy = Policy(ceiling=policy.ceiling)
        else:
            self._policy = policy.ensure_usable(self.workspace)
        return self._policy

    def watched(self) -> tuple[str, tuple[int, ...] | None]:
        """Return the file and its identity when it was read."""
        return self.path, self._seen

    def changed(self) -> bool:
        """Return whether the file was saved since it was read; a file that newly appeared is not trusted."""
        now = _identity(self.path)
        if now == self._seen:
            return False
        if self._seen is None:
            self.planted = True
            return False
        return True

    @property
    def trusting(self) -> bool:
        """Whether `reload` was asked for: the next load reads the file, whoever made it."""
        return self._seen == ()

    def reload(self) -> None:
        """Trust the file as it is now."""
        self._seen = ()
        self.planted = False
        self.raced = None


def _race(path: str) -> PolicyError:
    return PolicyError(
        f"{path} was replaced while a command could still write to it: it is not read",
        code="policy_race",
        hint="save the file again",
    )


class JailLife:
    """The worker of one jail, made when it is needed."""

    def __init__(
        self,
        workspace: str,
        source: FixedPolicy | FilePolicy,
        waiter: Waiter,
        *,
        backend_options: dict[str, Any] | None = None,
        on_start: Callable[[JailLife], None] | None = None,
    ) -> None:
        self.workspace = workspace
        self.source = source
        self.waiter = waiter
        self.last_used = time.monotonic()
        self.starts = 0
        self.worker: Worker | None = None
        self.policy: Policy | None = None
        """What the current worker was started with."""
        self._options = backend_options
        self._on_start = on_start
        self._lock = waiter.lock()
        self._ending = threading.Lock()
        self._pid = os.getpid()
        self._root: tuple[int, int] | None = None
        self._plan: JailPlan | None = None
        self._seen: Seen | None = None
        self._deaths: list[float] = []
        self._closed = False
        self._retired: list[Worker] = []

    def touch(self) -> None:
        """Note that the jail was used now."""
        self.last_used = time.monotonic()

    @property
    def closed(self) -> bool:
        """Whether the jail was closed for good."""
        return self._closed

    @property
    def plan(self) -> JailPlan | None:
        """The plan of the current worker, None before the first start."""
        return self._plan

    @property
    def busy(self) -> bool:
        """Whether a call is under way or about to begin."""
        worker = self.worker
        return worker is not None and worker.busy

    def reload(self) -> None:
        """Trust the workspace's policy file as it is now; the next call reads it."""
        if isinstance(self.source, FilePolicy):
            self.source.reload()
            self._seen = None

    async def ready(self) -> Worker:
        """Return a worker that serves the present policy and workspace, starting one where it is needed.

        It is claimed for the caller's next call: nobody ends it as idle before that call is registered.
        """
        worker = await self._current()
        while not worker.claim() and not self._closed:
            await self.waiter.sleep(0.001)  # it was ended, or is about to be, because it was idle
            worker = await self._current()
        try:
            worker.running.sync()
        except OSError as exc:
            raise WorkerDiedError(
                f"a mask or protection could not be renewed: {exc}",
                code="mask_failed",
                outcome="not_started",
                cause=str(exc),
                hint="the call was refused; it can be tried again",
            ) from None
        return worker

    async def _current(self) -> Worker:
        worker = self.worker
        seen = self._seen
        # One native look stands for all that is looked at one by one when it finds a difference.
        same = worker is not None and seen is not None and worker.alive and not seen.changed()
        if worker is None or (not same and (worker.gone() or self._stale())):
            worker = await self._start()
        return worker

    def _stale(self) -> bool:
        try:
            st = os.stat(self.workspace)
        except OSError:
            return True
        return (st.st_dev, st.st_ino) != self._root or self.source.changed()

    async def _start(self) -> Worker:
        if os.getpid() != self._pid:  # the lock may have been held by a thread that the child does not have
            raise WorkerDiedError(
                "this jail belongs to the process that forked",
                code="forked",
                outcome="not_started",
                hint="open a jail of your own in the child",
            )
        async with self._lock:
            if self._closed:
                raise WorkerDiedError(
                    "the jail is closed", code="closed", outcome="not_started", cause="closed"
                )
            worker = self.worker
            if worker is not None and not worker.gone() and not self._stale():
                return worker  # somebody else has started it meanwhile
            if worker is not None and self._ignores_arrival(worker) and worker.alive:
                return worker
            await self._retire(worker)
            await self._back_off()
            worker = await self.waiter.run(self._start_now)
            worker.claim()  # before anybody sees it: other starts look for idle workers to end
            self.worker = worker
            self.starts += 1
            if self._on_start is not None:
                self._on_start(self)
            return worker

    def _ignores_arrival(self, worker: Worker) -> bool:
        """Return whether a changed policy file is not to be read, because it appeared while this jail lived.

        Raises:
            PolicyError: code `policy_race`: the jail may have written to it before it was protected.
        """
        source = self.source
        self._note_arrival(worker)
        if not isinstance(source, FilePolicy) or source.trusting or not source.changed():
            return False
        if source.raced is not None and not source.planted:
            raise _race(source.path)
        return source.planted

    def _note_arrival(self, worker: Worker) -> None:
        """Keep what the worker's watch says of the policy file: the next worker's watch does not know."""
        source = self.source
        if not isinstance(source, FilePolicy) or source.trusting or not source.changed():
            return
        with contextlib.suppress(OSError):
            worker.running.sync()  # also of a dead one: the watch is ours, only covers cannot be made any more
        report = worker.running.tree_report()
        source.planted = source.planted or bool(report.get("planted"))
        source.raced = _identity(source.path) if report.get("policy_raced") else None

    async def _retire(self, worker: Worker | None) -> None:
        """Let a worker's running calls finish and close it then; a dead one is closed at once."""
        self.worker = None
        if worker is None:
            return
        if not worker.alive:
            self._deaths.append(time.monotonic())
            worker.close()
            return
        self._retired = [old for old in self._retired if old.alive and old.busy]
        with self._ending:
            worker.retiring = True
        worker.unclaim()  # our own call goes to the next one
        if worker.busy:
            worker.retired = True
            self._retired.append(worker)
        else:
            await self.waiter.run(worker.close)

    async def _back_off(self) -> None:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < DEATHS_WINDOW_S]
        if len(self._deaths) >= DEATHS_MAX:
            left = self._deaths[-1] + COOL_DOWN_S - now
            if left > 0:
                raise WorkerSpawnError(
                    f"the jail's worker died {len(self._deaths)} times within {DEATHS_WINDOW_S:.0f} s; "
                    f"no new one is started for another {left:.0f} s",
                    code="restart_limit",
                    layer="worker",
                    stage="restart",
                    hint="look at the commands that ran last, or at the memory limit",
                )
        pause = BACK_OFF_S[min(len(self._deaths), len(BACK_OFF_S) - 1)]
        if pause:
            await self.waiter.sleep(pause)

    def _start_now(self) -> Worker:
        """Read the policy, make the plan, start the backend. Blocks for some milliseconds."""
        from .backends import load_backend
        from .planning import make_plan

        policy = self.source.load()
        try:
            st = os.stat(self.workspace)
        except OSError as exc:
            raise workspace_error(self.workspace, exc) from None
        plan = make_plan(self.workspace, policy, self._options)
        backend = load_backend(policy.backend, self._options)
        worker = Worker(backend.start(plan))
        self._root, self._plan, self.policy = (st.st_dev, st.st_ino), plan, policy
        self._seen = Seen(worker.running.channel, (self.workspace, *self._root), self.source.watched())
        return worker

    def sweep_retired(self) -> None:
        """Close retired workers whose last call has ended."""
        for worker in [old for old in self._retired if not old.busy]:
            self._retired.remove(worker)
            worker.close()

    def stop_idle(self) -> bool:
        """End the worker unless a call uses it or is about to; return whether it was ended."""
        with self._ending:  # two at once would undo each other's mark
            worker = self.worker
            if worker is None:
                return False
            worker.retiring = True
            if worker.busy:
                worker.retiring = False
                return False
            self.worker = None
        worker.close()
        return True

    def stop(self) -> None:
        """End the worker; the next call starts a new one."""
        worker, self.worker = self.worker, None
        if worker is not None:
            self._note_arrival(worker)
        for old in (*self._retired, worker):
            if old is not None:
                old.close()
        self._retired.clear()

    def close(self) -> None:
        """End the worker for good."""
        self._closed = True
        self.stop()


def workspace_error(workspace: str, exc: OSError) -> WorkerSpawnError:
    """Return the error for a workspace that cannot be used."""
    missing = exc.errno in (errno.ENOENT, errno.ENOTDIR)
    return WorkerSpawnError(
        f"the workspace {workspace!r} {'does not exist' if missing else 'cannot be read'}",
        code="workspace",
        layer="workspace",
        stage="plan",
        errno=exc.errno or 0,
        hint="create the directory first"
        if missing
        else "the backend's user needs read and search permission",
    )
