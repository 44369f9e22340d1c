"""The bytes of a policy file and what TOML makes of them; whose file it is and who can write to it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from vectora_jail.errors import PolicyError, Problem
from vectora_jail.tomllines import MAX_PARTS, Scan, looks_like_sandbox, scan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["MAX_FILE", "BrokenError", "FileText", "file_identity", "parse_toml", "read_file"]

MAX_FILE = 1024 * 1024
"""Bytes; a larger file is refused unread."""


class BrokenError(ValueError):
    """A document that is not TOML; `sandbox` tells whether it seems to speak of one."""

    def __init__(self, text: str, line: int, found: str, expected: str = "TOML 1.0", hint: str = "") -> None:
        super().__init__(found)
        where = looks_like_sandbox(text)
        self.sandbox = bool(where)
        self.line = line or where
        self.found, self.expected, self.hint = found, expected, hint


def parse_toml(data: str | bytes) -> tuple[dict[str, Any], Scan]:
    """Parse TOML. Raises BrokenError."""
    if isinstance(data, bytes):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            loose = data.lstrip(b"\xff\xfe\xef\xbb\xbf").decode("latin-1")  # byte order marks
            line = data.count(b"\n", 0, error.start) + 1
            found = f"the byte 0x{data[error.start]:02x}, which is not UTF-8"
            raise BrokenError(loose, line, found, "UTF-8", "save the file as UTF-8") from None
    else:
        text = data
    if text.startswith("\ufeff"):
        raise BrokenError(
            text, 1, "a byte order mark", "UTF-8 without one", "save the file as UTF-8 without BOM"
        )
    places = scan(text)
    if places.deep:
        raise BrokenError(text, places.deep, f"a key of more than {MAX_PARTS} parts", "fewer")
    try:
        return tomllib.loads(text), places
    except RecursionError:
        raise BrokenError(text, 0, "values nested too deep", "fewer levels") from None
    except ValueError as error:
        raise BrokenError(text, _line_in(str(error)), f"text that does not parse ({error})") from None


def _line_in(message: str) -> int:
    """Return the line that tomllib names in its message (`… (at line 3, column 1)`), 0 when it names none."""
    _, found, rest = message.rpartition("(at line ")
    digits = rest.partition(",")[0]
    return int(digits) if found and digits.isdigit() else 0


def file_identity(info: os.stat_result) -> tuple[int, ...]:
    """Return what tells one state of a file from another: device, inode, size, mtime and ctime in ns."""
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class FileText(NamedTuple):
    """What a file held, and its state then."""

    data: bytes
    identity: tuple[int, ...]


def read_file(name: str, workspace: str | None) -> FileText | None:
    """Return the bytes of a policy file, None when there is none.

    `workspace` None: a file of the user's own, which may be a link to anywhere.

    Raises:
        PolicyError: it is there and cannot be used; the message says why.
    """

    def refuse(found: str, expected: str = "a regular file that can be read", hint: str = "") -> PolicyError:
        return PolicyError(problems=[Problem("", 0, found, expected, hint, name)])

    try:
        before = os.stat(name)
        if not stat.S_ISREG(before.st_mode):  # before opening: to open a device can have effects
            raise refuse(_kind(before.st_mode), "a regular file")
        # non-blocking: a FIFO may have taken its place in between
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(name):
            raise refuse("a dangling link", hint="remove it, or restore its target") from None
        return None
    except OSError as error:
        raise refuse(f"a file that cannot be opened ({error.strerror})") from None
    except PolicyError:  # which is a ValueError too
        raise
    except ValueError as error:  # NUL in the name
        raise refuse(str(error), "a path") from None
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise refuse(_kind(info.st_mode), "a regular file")
        for found, expected, hint in _ownership(info, name, workspace, handle):
            raise refuse(found, expected, hint)
        data = b""
        while len(data) <= MAX_FILE:
            chunk = os.read(handle, MAX_FILE + 1 - len(data))
            if not chunk:
                return FileText(data, file_identity(info))
            data += chunk
        raise refuse("a file over 1 MiB", "at most 1 MiB")
    except OSError as error:
        raise refuse(f"a file that cannot be read ({error.strerror})") from None
    finally:
        os.close(handle)


def _ownership(
    info: os.stat_result, name: str, workspace: str | None, handle: int
) -> Iterator[tuple[str, str, str]]:
    """Yield (found, expected, hint) when somebody else could have written the file."""
    trusted = {0, os.geteuid()}
    whose = "the user"
    if workspace is not None:
        trusted.add(os.stat(workspace).st_uid)
        whose = "the workspace's owner"
        if os.path.islink(name):
            try:
                target = os.readlink(f"/proc/self/fd/{handle}")
            except OSError:  # no /proc (macOS)
                target = os.path.realpath(name)
            root = os.path.realpath(workspace)
            if not target.startswith(root.rstrip("/") + "/"):
                yield f"a link out of the workspace ({target})", "a file inside it", "copy the file instead"
    if info.st_uid not in trusted:
        yield (
            f"a file of uid {info.st_uid}",
            f"a file of {whose}",
            f"chown it, or remove {os.path.basename(name)}",
        )
    if info.st_mode & 0o022:
        others = "everybody" if info.st_mode & 0o002 else "its group"
        mode = stat.S_IMODE(info.st_mode)
        yield (
            f"a file that {others} may write to (mode {mode:04o})",
            "a file that only its owner may write to",
            f"chmod go-w {os.path.basename(name)}",
        )


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")
