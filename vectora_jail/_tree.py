"""The watched tree of one workspace: masks, protections and git, through the shim (`csrc/core/treewatch.h`)."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from vectora_jail._native import register_launcher
from vectora_jail._shim import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Finding", "Tree"]


def _check(rc: int) -> int:
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


class Finding(NamedTuple):
    """A git redirect or exec line that appeared while the jail lived."""

    path: bytes
    kind: str
    """`commondir`, `config`, `hook`, `alternates` or `todo`."""
    text: bytes
    moved: bytes | None
    """Where it lies now, in the audit store."""
    errno: int
    """Why it could not be moved; 0 when it was."""


class Tree:
    """What the host knows about a workspace's granted directories; freed by `close`."""

    __slots__ = ("_closed", "_lock", "_t", "_users")

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Prepare a tree from the plan's specification; nothing is read yet."""
        register_launcher()
        packed = msgpack.packb(spec, use_bin_type=True)
        out = ffi.new("struct vj_tree **")
        _check(lib.vj_tree_new(packed, len(packed), out))
        self._t = out[0]
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def __enter__(self) -> Any:
        """Return the native tree for one call, which keeps it from being freed by another thread."""
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the jail is closed")
            self._users += 1
            return self._t

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._free()

    def scan(self) -> None:
        """Walk the tree once and watch it from now on."""
        with self as tree:
            _check(lib.vj_tree_scan(tree))

    def ops(self) -> list[list[Any]]:
        """Return the mount operations that the present state asks for, in order."""
        ops: list[list[Any]] = self._table(lib.vj_tree_ops)
        return ops

    def applied(self, results: Sequence[int]) -> None:
        """Tell what became of the last `ops`, one errno each; raises OSError when a cover could not be made."""
        with self as tree:
            _check(lib.vj_tree_applied(tree, list(results), len(results)))

    def attach(self, mntns_fd: int, userns_fd: int) -> None:
        """Apply later changes to this jail, before each call and by the shim's watcher."""
        with self as tree:
            _check(lib.vj_tree_attach(tree, mntns_fd, userns_fd))

    def sync(self) -> bool:
        """Handle every event that was queued before this moment; raises OSError when a cover cannot be made."""
        with self as tree:
            return bool(_check(lib.vj_tree_sync(tree)))

    def begin(self) -> int:
        """Do what `sync` does; return how many covers have been made since the scan."""
        appeared = ffi.new("uint64_t *")
        with self as tree:
            _check(lib.vj_tree_begin(tree, appeared))
        return int(appeared[0])

    def end(self, appeared: int, *, idle: bool) -> tuple[list[Finding], int]:
        """Handle what a call left: move redirects and exec lines of git away.

        Args:
            appeared: What `begin` returned.
            idle: Nothing else runs in the jail, so that a repository that appeared is complete and is locked.

        Returns:
            What was found, and how many covers were made since `begin`.
        """
        fresh, buffer, size = ffi.new("uint64_t *"), ffi.new("uint8_t **"), ffi.new("size_t *")
        with self as tree:
            found = _check(lib.vj_tree_end(tree, idle, appeared, fresh, buffer, size))
        if not found:
            return [], int(fresh[0])
        try:
            rows = msgpack.unpackb(
                bytes(ffi.buffer(buffer[0], size[0])), raw=False, unicode_errors="surrogateescape"
            )
        finally:
            lib.vj_free(buffer[0])
        return [Finding(*row) for row in rows], int(fresh[0])

    def report(self) -> dict[str, Any]:
        """Return what is covered and protected now."""
        report: dict[str, Any] = self._table(lib.vj_tree_report)
        return report

    def _table(self, function: Any) -> Any:
        buffer = ffi.new("uint8_t **")
        size = ffi.new("size_t *")
        with self as tree:
            _check(function(tree, buffer, size))
        try:
            return msgpack.unpackb(
                bytes(ffi.buffer(buffer[0], size[0])), raw=False, unicode_errors="surrogateescape"
            )
        finally:
            lib.vj_free(buffer[0])

    def close(self) -> None:
        """Stop watching and free everything, once no call of another thread uses it any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            busy = self._users
        if not busy:
            self._free()

    def _free(self) -> None:
        tree, self._t = self._t, ffi.NULL
        lib.vj_tree_free(tree)
