"""File calls: they run in the jail and see what a command would see."""

from __future__ import annotations

import errno
import os
from time import monotonic
from typing import TYPE_CHECKING, Any

from . import wire
from ._command import path_bytes
from ._native import sealed_memfd
from .errors import EditConflict
from .results import DirEntry, FileStat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._command import Path
    from ._life import JailLife
    from ._waiting import Waiter
    from .masks import MaskSet
    from .plan import JailPlan
    from .worker import Worker

READ_MAX = 1 << 40
"""Bytes that one read may ask for."""
DECISIONS_MAX = 4096
"""Names whose answer from the masks is kept; the answer depends on nothing but the policy and the name."""
WHOLE_MAX = 1 << 30
"""Bytes that a read without `limit` takes: a sparse file of terabytes must not take the backend's memory."""
_TYPES = frozenset(("file", "dir", "link", "fifo", "socket", "char", "block", "unknown"))


def _raise(reply: dict[str, Any], path: Path) -> None:
    number = wire.integer(reply, "errno", 0, 4095) or errno.EIO
    said = wire.text(reply, "error")
    text = os.strerror(number)
    raise OSError(number, said if said and said != text else text, os.fsdecode(path))


class Files:
    """The file calls of one jail."""

    def __init__(self, life: JailLife, waiter: Waiter) -> None:
        self.life = life
        self.waiter = waiter

    async def _ask(
        self,
        message: dict[str, Any],
        path: Path,
        fds: Sequence[int] = (),
        *,
        keep_fd: bool = False,
        worker: Worker | None = None,
    ) -> tuple[dict[str, Any], int]:
        life = self.life
        if worker is None:
            worker = await life.ready()
        reply, fd = await worker.request(self.waiter, message, fds=fds)
        life.last_used = monotonic()
        if fd >= 0 and not keep_fd:
            os.close(fd)
            fd = -1
        if "error" in reply:
            if fd >= 0:
                os.close(fd)
            _raise(reply, path)
        return reply, fd

    async def read_file(self, path: Path, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return a regular file's bytes, from `offset`, at most `limit` of them.

        Raises:
            OSError: with errno and filename, as open(2) and read(2) inside the jail say.
        """
        if offset < 0 or (limit is not None and limit < 0):
            msg = "offset and limit must not be negative"
            raise ValueError(msg)
        message: dict[str, Any] = {"op": "read_file", "path": path_bytes(path)}
        if offset:
            message["offset"] = offset
        if limit is not None:
            message["limit"] = min(limit, READ_MAX)
        reply, fd = await self._ask(message, path, keep_fd=True)
        if fd < 0:
            return wire.blob(reply, "content")
        try:
            return await self.waiter.run(lambda: _read_descriptor(fd, offset, limit, path))
        finally:
            os.close(fd)

    async def read_text(self, path: Path, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return a file's text; line endings stay as they are."""
        return (await self.read_file(path)).decode(encoding, errors)

    async def write_file(
        self,
        path: Path,
        data: bytes | str,
        *,
        mode: int | None = None,
        make_parents: bool = False,
        if_unchanged: FileStat | os.stat_result | None = None,
        exclusive: bool = False,
        fsync: bool = False,
    ) -> FileStat:
        """Replace a file's content as a whole, or create it, and return what it is then.

        The old content stays until the new is complete (rename(2)); a hard-linked file and a file that is granted by
        itself are written in place. Mode, symlink and extended attributes are kept.

        Args:
            path: Where.
            data: The whole content; text is written as UTF-8.
            mode: Permission bits of a new file (default 0o666 less the umask), or the new ones of an old file.
            make_parents: Make missing directories.
            if_unchanged: Only when the file still is what this `stat` (or os.stat) says, else OSError(ESTALE).
            exclusive: Only when nothing is there, else FileExistsError.
            fsync: Wait until it is on the disk.
        """
        content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        raw = path_bytes(path)
        message: dict[str, Any] = {"op": "write_file", "path": raw}
        if mode is not None:
            message["mode"] = mode
        if make_parents:
            message["make_parents"] = True
        if exclusive:
            message["exclusive"] = True
        if fsync:
            message["fsync"] = True
        if if_unchanged is not None:
            message["if_unchanged"] = _identity(if_unchanged)
        worker = await self.life.ready()
        self._refuse_masked(raw, path)
        body = -1
        try:
            if len(content) + len(raw) <= wire.INLINE_MAX:
                message["content"] = content
                fds: list[int] = []
            else:
                body = await self.waiter.run(lambda: sealed_memfd("vectora-jail-content", content))
                message["body"] = True  # beside a path: the content is the descriptor
                fds = [body]
            reply, _ = await self._ask(message, path, fds, worker=worker)
        finally:
            if body >= 0:
                os.close(body)
        worker.settle(0)  # like a command's: what the file is for the host's git is moved before we return
        return FileStat(
            type="file",
            mode=wire.integer(reply, "mode", 0, 0o7777),
            size=wire.integer(reply, "size"),
            mtime_ns=wire.integer(reply, "mtime_ns"),
            uid=-1,
            gid=-1,
            nlink=1,
            ino=wire.integer(reply, "ino", 0, 2**64 - 1),
            dev=0,
        )

    def _refuse_masked(self, raw: bytes, path: Path) -> None:
        """Refuse to create a name that a mask covers: a mount can forbid only what exists."""
        plan = self.life.plan
        if plan is not None and refuses(plan, raw):
            raise PermissionError(errno.EACCES, "the policy masks this name", os.fsdecode(path))

    async def edit_file(
        self, path: Path, old: str | bytes, new: str | bytes, *, replace_all: bool = False
    ) -> FileStat:
        """Replace the one place where `old` stands by `new`; every other byte stays as it is.

        Raises:
            EditConflict: `old` stands nowhere, or more than once (unless `replace_all`); nothing was written.
            OSError: as read_file and write_file; ESTALE when somebody else saved the file in between.
        """
        before = old.encode("utf-8", "surrogateescape") if isinstance(old, str) else bytes(old)
        after = new.encode("utf-8", "surrogateescape") if isinstance(new, str) else bytes(new)
        if not before:
            msg = "the text to replace is empty"
            raise ValueError(msg)
        seen = await self.stat(path)
        content = await self.read_file(path)
        count = content.count(before)
        if count == 0 and b"\n" in before and b"\r\n" in content and b"\r\n" not in before:
            # A caller that reads lines does not see the carriage returns of a DOS file.
            before, after = (
                before.replace(b"\n", b"\r\n"),
                after.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"),
            )
            count = content.count(before)
        if count == 0 or (count > 1 and not replace_all):
            what = "stands nowhere in" if count == 0 else f"stands {count} times in"
            raise EditConflict(
                f"the text to replace {what} {os.fsdecode(path)}; nothing was written",
                matches=count,
                hint="read the file again" if count == 0 else "give more context so that it stands once",
            )
        return await self.write_file(path, content.replace(before, after), if_unchanged=seen)

    async def stat(self, path: Path, *, follow_symlinks: bool = True) -> FileStat:
        """Return what the jail sees of a path (stat(2), or lstat(2))."""
        reply, _ = await self._ask({"op": "stat", "path": path_bytes(path), "follow": follow_symlinks}, path)
        kind = wire.text(reply, "type")
        if kind not in _TYPES:
            msg = f"the worker sent {kind!r} as a file type"
            raise wire.ProtocolError(msg)
        wide = 2**64 - 1
        return FileStat(
            type=kind,
            mode=wire.integer(reply, "mode", 0, 0o7777777),
            size=wire.integer(reply, "size"),
            mtime_ns=wire.integer(reply, "mtime_ns", -(2**63)),
            uid=wire.integer(reply, "uid"),
            gid=wire.integer(reply, "gid"),
            nlink=wire.integer(reply, "nlink"),
            ino=wire.integer(reply, "ino", 0, wide),
            dev=wire.integer(reply, "dev", 0, wide),
        )

    async def list_dir(self, path: Path = ".") -> list[DirEntry]:
        """Return a directory's entries, sorted by name."""
        reply, fd = await self._ask({"op": "list_dir", "path": path_bytes(path)}, path, keep_fd=True)
        if fd >= 0:
            try:
                data = await self.waiter.run(lambda: _read_descriptor(fd, 0, None, path))
            finally:
                os.close(fd)
            reply = wire.decode(data)
        raw = reply.get("entries")
        if type(raw) is not list:
            msg = "the worker sent no list of entries"
            raise wire.ProtocolError(msg)
        out = []
        for item in raw:
            if (
                type(item) is not list
                or len(item) != 2
                or type(item[0]) is not bytes
                or item[1] not in _TYPES
            ):
                msg = "the worker sent a malformed directory entry"
                raise wire.ProtocolError(msg)
            out.append(DirEntry(os.fsdecode(item[0]), item[1]))
        out.sort(key=lambda entry: entry.name)
        return out

    async def make_dir(
        self, path: Path, *, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Make a directory (mkdir(2)), with its parents if asked."""
        raw = path_bytes(path)
        await self.life.ready()
        self._refuse_masked(raw, path)
        await self._ask(
            {"op": "make_dir", "path": raw, "mode": mode, "parents": parents, "exist_ok": exist_ok}, path
        )

    async def remove(self, path: Path, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a whole tree. Links are never followed."""
        await self._ask({"op": "remove", "path": path_bytes(path), "recursive": recursive}, path)

    async def rename(self, path: Path, to: Path, *, replace: bool = True) -> None:
        """Rename a file or directory (rename(2)); without `replace` an existing target is FileExistsError."""
        raw = path_bytes(to)
        worker = await self.life.ready()
        self._refuse_masked(raw, to)
        message = {"op": "rename", "path": path_bytes(path), "to": raw, "replace": replace}
        await self._ask(message, path, worker=worker)
        worker.settle(0)


def _identity(seen: Any) -> list[int]:
    if isinstance(seen, os.stat_result):
        return [seen.st_size, seen.st_mtime_ns, seen.st_ino]
    if not isinstance(seen, FileStat):
        msg = f"if_unchanged is {type(seen).__name__}, not what stat() or write_file() returned"
        raise TypeError(msg)
    return [seen.size, seen.mtime_ns, seen.ino]


def refuses(plan: JailPlan, raw: bytes) -> bool:
    """Return whether the policy masks this name, which need not exist."""
    key = plan.policy_digest, plan.workspace
    decided = _decisions.get((key, raw))
    if decided is None:
        if len(_decisions) >= DECISIONS_MAX:
            _decisions.clear()
        decided = _decisions[key, raw] = _refuses(plan, key, raw)
    return decided


def _refuses(plan: JailPlan, key: tuple[str, bytes], raw: bytes) -> bool:
    from .masks import MaskRule, MaskSet

    mask_set = _mask_sets.get(key)
    if mask_set is None:
        tree = plan.tree
        rules = tuple(MaskRule(*rule) for rule in tree["masks"])
        mask_set = _mask_sets[key] = MaskSet(rules, tuple(tree["mask_paths"]), plan.workspace)
    return mask_set.refuses(os.path.normpath(os.path.join(plan.workspace, raw)))


_mask_sets: dict[tuple[str, bytes], MaskSet] = {}
_decisions: dict[tuple[tuple[str, bytes], bytes], bool] = {}


def _read_descriptor(fd: int, offset: int, limit: int | None, path: Path) -> bytes:
    """Read a descriptor that an untrusted worker has sent: a regular file only, by position, never mapped.

    The jail may truncate or grow the file meanwhile; what is there up to the size seen first is returned.
    """
    import stat

    st = os.fstat(fd)
    if not stat.S_ISREG(st.st_mode):
        raise OSError(errno.EINVAL, "the worker sent something that is no regular file", os.fsdecode(path))
    want = max(0, st.st_size - offset)
    if limit is None and want > WHOLE_MAX:
        raise OSError(
            errno.EFBIG, f"{want} bytes at once; read it in pieces with offset and limit", os.fsdecode(path)
        )
    if limit is not None:
        want = min(want, limit)
    chunks = []
    at = offset
    while want > 0:
        piece = os.pread(fd, min(want, 1 << 30), at)
        if not piece:
            break
        chunks.append(piece)
        at += len(piece)
        want -= len(piece)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
