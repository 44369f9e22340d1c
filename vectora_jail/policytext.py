"""Words about a policy's values: how they are shown, what was meant, how paths and targets are read. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

__all__ = [
    "NAME_PATTERN",
    "NOWHERE",
    "FrozenMap",
    "describe",
    "lexical_path",
    "quote",
    "split_target",
    "suggestion",
    "unescape_path",
]

NOWHERE = "/\x01" * 12
"""A workspace that is not known: deep and unlike any other path, so that `..` never reaches one."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class FrozenMap(dict[str, str]):
    """A dict of strings that never changes, hashes and pickles, so that it can be part of a frozen value."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMap, (dict(self),))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a policy's tables do not change; make a new policy with `with_`")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


def describe(value: object) -> str:
    """Render a value as TOML would write it, shortened, with its type where that is not obvious."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{quote(value)} (a string)"
    if isinstance(value, int):
        # str() of a huge int is slow and, past 4300 digits, an error
        return f"{value} (an integer)" if value.bit_length() < 256 else "an integer of many digits"
    if isinstance(value, float):
        return f"{value} (a float)"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Mapping):
        return "a table"
    return f"a value of type {type(value).__name__}"


def quote(text: str) -> str:
    """Return `text` in double quotes with control characters escaped, at most 80 characters of it."""
    import json

    return json.dumps(text if len(text) <= 80 else text[:77] + "...", ensure_ascii=False)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `did you mean …?` for a misspelt name, or `""`."""
    import difflib

    folded = {item.lower().replace("-", "_"): item for item in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_")[:100], folded, n=1, cutoff=0.6)
    return f"did you mean {quote(folded[close[0]])}?" if close else ""


def unescape_path(path: str) -> str:
    """Return the path that a policy means: `$$` is a literal dollar."""
    return path.replace("$$", "$")


def lexical_path(path: str, workspace: str, home: str) -> str:
    """Return the absolute, normalised form of a policy's path, without looking at the file system."""
    text = unescape_path(path)
    if text == "~" or text.startswith("~/"):
        text = home.rstrip("/") + text[1:] if home.strip("/") else text[1:] or "/"
    joined = posixpath.normpath(posixpath.join(workspace, text))
    return "/" + joined.lstrip("/") if joined.startswith("/") else joined  # POSIX keeps a leading "//"


def split_target(text: str) -> tuple[str, str, int]:
    """Split `[user@]host[:port]` into (user, host, port); `""` and 0 for what is absent.

    Raises:
        ValueError: the text is no such target; the message says why.
    """
    user, at, rest = text.rpartition("@")
    if at and not NAME_PATTERN.fullmatch(user):
        raise ValueError("the user is not a name")
    port = ""
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or ":" not in host or (tail and not tail.startswith(":")):
            raise ValueError("brackets hold an IPv6 address")
        port = tail[1:] if tail else ""
        if tail and not port:
            raise ValueError("the port is missing")
    elif rest.count(":") > 1:
        raise ValueError("an IPv6 address stands in brackets")
    else:
        host, colon, port = rest.partition(":")
        if colon and not port:
            raise ValueError("the port is missing")
    if not re.fullmatch(r"[A-Za-z0-9_.:%][A-Za-z0-9_.:%-]*", host):
        raise ValueError("the host is not a name or an address")
    if port and not (port.isascii() and port.isdigit() and 0 < len(port) < 6 and 0 < int(port) < 65536):
        raise ValueError("the port is not a number from 1 to 65535")
    return user, host, int(port or 0)
