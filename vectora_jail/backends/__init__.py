"""What a backend is: it turns a plan into a running worker, and nothing else.

Timeouts, caps on output, retries and restarts live above it, once. A backend's library is imported inside the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vectora_jail.egress_lane import EgressDoor
    from vectora_jail.plan import JailPlan
    from vectora_jail.results import Violation

__all__ = ["Backend", "Running", "load_backend"]

BACKENDS = ("local", "docker", "ssh", "modal")


class Running(Protocol):
    """One live jail. `channel` is the main lane's descriptor; the worker has answered hello on it."""

    plan: JailPlan
    channel: int
    pid: int | None
    """The worker as a pid of this host; None where there is none."""
    proof: str
    hello: dict[str, Any]
    """The worker's answer to hello."""
    owner: tuple[int, int] | None
    """uid and gid that pipes are given to, when the jail's user is not ours."""
    door: EgressDoor | None
    """The way out of an allowlist; None without one."""

    def enter(self, ops: Sequence[Sequence[Any]]) -> list[int]:
        """Apply mount operations inside the jail; one errno each, 0 is done."""

    def sync(self) -> None:
        """Bring masks and protections up to date with the tree; raises OSError when one cannot be made."""

    def audit(self, *, idle: bool) -> tuple[Violation, ...]:
        """Handle what a call left in the tree, at its end; `idle`: nothing else runs in the jail. Never raises."""

    def tree_report(self) -> dict[str, Any]:
        """What is masked and protected now."""

    def health(self) -> str:
        """Return `""` while the worker runs, else why it does not (`stopped`, `killed by signal 9` …)."""

    def close(self) -> None:
        """End everything in the jail and free what it used. May be called twice."""

    def forget(self) -> None:
        """Close descriptors only: in the child of a fork the jail belongs to the parent."""


class Backend(Protocol):
    """A way to run workers."""

    name: str

    def start(self, plan: JailPlan) -> Running:
        """Start a worker; blocks for milliseconds to seconds. Raises WorkerSpawnError or UnsupportedPolicy."""


def load_backend(name: str, options: dict[str, Any] | None = None) -> Backend:
    """Return the backend of that name; its module is imported now."""
    from importlib import import_module

    if name not in BACKENDS:
        msg = f"unknown backend {name!r}"
        raise ValueError(msg)
    try:
        module = import_module(f"vectora_jail.backends.{name}")
    except ModuleNotFoundError as exc:
        if exc.name != f"vectora_jail.backends.{name}":
            raise
        from vectora_jail.errors import UnsupportedPolicy

        msg = f"the {name!r} backend is not part of this release"
        raise UnsupportedPolicy(msg, backend=name, code="backend", hint='use backend = "local"') from None
    backend: Backend = module.make(options or {})
    return backend
