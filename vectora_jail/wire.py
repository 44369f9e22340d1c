"""Requests and replies ↔ msgpack, and what a worker is allowed to send.

The worker is not trusted: every reply is decoded with bounds and every field is checked for its type before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgpack

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1
MESSAGE_MAX: Final = 64 * 1024
"""Bytes of one local message; a larger body travels in a sealed memfd."""
INLINE_MAX: Final = 48 * 1024
"""Bytes of file content that travel inside a message."""
ARG_STRLEN_MAX: Final = 128 * 1024
"""Bytes of one argument or environment string, the terminating NUL included (execve(2), MAX_ARG_STRLEN)."""


class ProtocolError(Exception):
    """A reply that a correct worker cannot send."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the msgpack form of a request."""
    packed: bytes = msgpack.packb(message, use_bin_type=True)
    return packed


def decode(data: bytes) -> dict[str, Any]:
    """Return a reply as a map with text keys, or raise ProtocolError."""
    try:
        reply = msgpack.unpackb(data, raw=False, strict_map_key=True, unicode_errors="surrogateescape")
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as exc:
        msg = f"the worker sent bytes that are not msgpack: {exc}"
        raise ProtocolError(msg) from None
    if type(reply) is not dict:
        msg = f"the worker sent a {type(reply).__name__} where a map belongs"
        raise ProtocolError(msg)
    return reply


def expect_id(reply: Mapping[str, Any], wanted: int) -> None:
    """Raise ProtocolError unless the reply belongs to request `wanted`."""
    if reply.get("id") != wanted:
        msg = f"the worker answered request {reply.get('id')!r} where {wanted} was asked"
        raise ProtocolError(msg)


def integer(reply: Mapping[str, Any], key: str, low: int = 0, high: int = 2**63 - 1) -> int:
    """Return an integer field that must lie in low..high."""
    value = reply.get(key, 0)
    if type(value) is not int or not low <= value <= high:
        msg = f"the worker sent {value!r} as {key}"
        raise ProtocolError(msg)
    return value


def flag(reply: Mapping[str, Any], key: str) -> bool:
    """Return a boolean field, False when it is absent."""
    value = reply.get(key, False)
    if type(value) is not bool:
        msg = f"the worker sent {value!r} as {key}"
        raise ProtocolError(msg)
    return value


def text(reply: Mapping[str, Any], key: str) -> str:
    """Return a text field, empty when it is absent; bytes are shown with replacement."""
    value = reply.get(key, "")
    if type(value) is bytes:
        return value.decode("utf-8", "replace")
    if type(value) is not str:
        msg = f"the worker sent {value!r} as {key}"
        raise ProtocolError(msg)
    return value


def blob(reply: Mapping[str, Any], key: str) -> bytes:
    """Return a bytes field, empty when it is absent."""
    value = reply.get(key, b"")
    if type(value) is str:
        return value.encode("utf-8", "surrogateescape")
    if type(value) is not bytes:
        msg = f"the worker sent {value!r} as {key}"
        raise ProtocolError(msg)
    return value
