"""What a caller may pass as command, environment, directory and stdin, turned into the fields of a request."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from .wire import ARG_STRLEN_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
    Command: TypeAlias = str | Sequence[Path]
    Environment: TypeAlias = Mapping[str, str | None]

SHELL = b"/bin/sh"


def path_bytes(path: Path, what: str = "path") -> bytes:
    """Return a path as the bytes that go to the kernel.

    Raises:
        TypeError: it is no path. ValueError: it is empty or holds a NUL.
    """
    raw = os.fsencode(path)
    if not raw:
        msg = f"{what} is empty"
        raise ValueError(msg)
    if b"\0" in raw:
        msg = f"{what} holds a NUL byte: {path!r}"
        raise ValueError(msg)
    return raw


def _argument(value: object, index: int) -> bytes:
    if not isinstance(value, (str, bytes, os.PathLike)):
        msg = f"command[{index}] is {type(value).__name__}, not str, bytes or a path"
        raise TypeError(msg)
    raw = os.fsencode(value)
    if b"\0" in raw:
        msg = f"command[{index}] holds a NUL byte"
        raise ValueError(msg)
    if len(raw) >= ARG_STRLEN_MAX:
        raise OSError(
            errno.E2BIG, f"command[{index}] has {len(raw)} bytes; one argument holds {ARG_STRLEN_MAX - 1}"
        )
    return raw


def command_fields(command: Any) -> tuple[list[bytes], bytes | None]:
    """Return argv, and the script's text when a command string is too long for one argument.

    A string is run by `/bin/sh -c` exactly as written; beyond 128 KiB `sh` reads it from a descriptor.

    Raises:
        TypeError, ValueError: not a command. OSError(E2BIG): one argument is too long (execve(2)).
    """
    if isinstance(command, str):
        text = command.encode("utf-8", "surrogateescape")
        if b"\0" in text:
            msg = "the command holds a NUL byte"
            raise ValueError(msg)
        if len(text) < ARG_STRLEN_MAX:
            return [SHELL, b"-c", text], None
        return [SHELL, b"/proc/self/fd/3"], text
    if isinstance(command, (bytes, bytearray)) or not hasattr(command, "__iter__"):
        msg = f"a command is a string (run by sh -c) or a sequence of arguments, not {type(command).__name__}"
        raise TypeError(msg)
    argv = [_argument(value, index) for index, value in enumerate(command)]
    if not argv or not argv[0]:
        msg = "the command is empty"
        raise ValueError(msg)
    return argv, None


def environment_list(base: Iterable[bytes], changes: Mapping[Any, Any]) -> list[bytes]:
    """Return the whole environment of one call: the jail's own with the caller's changes (None removes a name).

    Raises:
        TypeError, ValueError: a name or a value that no environment can hold.
    """
    if not hasattr(changes, "items"):
        msg = f"env is {type(changes).__name__}, not a mapping of names to text or None"
        raise TypeError(msg)
    merged: dict[bytes, bytes] = dict(item.partition(b"=")[::2] for item in base)
    for name, value in changes.items():
        if not isinstance(name, (str, bytes)) or not (
            value is None or isinstance(value, (str, bytes, os.PathLike))
        ):
            msg = f"env[{name!r}] must map a name to text or None"
            raise TypeError(msg)
        key = os.fsencode(name)
        if not key or b"=" in key or b"\0" in key:
            msg = f"{name!r} is no name for an environment variable"
            raise ValueError(msg)
        if value is None:
            merged.pop(key, None)
            continue
        raw = os.fsencode(value)
        if b"\0" in raw:
            msg = f"env[{name!r}] holds a NUL byte"
            raise ValueError(msg)
        merged[key] = raw
    return [key + b"=" + raw for key, raw in merged.items()]


def timeout_ms(timeout: float | None, wall_s: float | None) -> int:
    """Return a call's limit in milliseconds (0: none): the caller's, never more than the policy's.

    Raises:
        TypeError, ValueError: not a positive number.
    """
    if timeout is None:
        return int(wall_s * 1000) if wall_s else 0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        msg = f"timeout is {type(timeout).__name__}, not a number of seconds"
        raise TypeError(msg)
    if not timeout > 0:
        msg = f"timeout must be positive, not {timeout}"
        raise ValueError(msg)
    seconds = min(float(timeout), wall_s) if wall_s else float(timeout)
    return max(1, int(min(seconds, 1e9) * 1000))


def describe(argv: Sequence[bytes]) -> str:
    """Return the program's name for a message."""
    return os.fsdecode(argv[0])


def stdin_source(stdin: Any) -> tuple[int, bytes | None, Any]:
    """Return (descriptor or -1, bytes or None, iterator or None) for the `stdin` argument of a call.

    Raises:
        TypeError: it is none of bytes, str, a descriptor, a file, an iterable.
    """
    if stdin is None:
        return -1, None, None
    if isinstance(stdin, str):
        return -1, stdin.encode("utf-8", "surrogateescape"), None
    if isinstance(stdin, (bytes, bytearray, memoryview)):
        return -1, bytes(stdin), None
    if isinstance(stdin, int) and not isinstance(stdin, bool):
        return stdin, None, None
    if hasattr(stdin, "fileno"):
        return stdin.fileno(), None, None
    if hasattr(stdin, "__aiter__"):
        return -1, None, stdin.__aiter__()
    if hasattr(stdin, "__iter__"):
        return -1, None, iter(stdin)
    msg = f"stdin is {type(stdin).__name__}: pass bytes, a descriptor, a file or an iterable of bytes"
    raise TypeError(msg)
