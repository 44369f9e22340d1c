"""The last output of a program, kept for readers that come later."""

from __future__ import annotations

from typing import Final

RING: Final = 1024 * 1024
"""Bytes of output that are kept of each stream for readers that come later."""


class Ring:
    """The last bytes of a stream, addressed by a cursor that counts from its beginning."""

    __slots__ = ("_data", "end", "limit")

    def __init__(self, limit: int = RING) -> None:
        self.limit = limit
        self.end = 0
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Append and forget what no longer fits."""
        self._data += data
        self.end += len(data)
        if len(self._data) > self.limit:
            del self._data[: len(self._data) - self.limit]

    def since(self, cursor: int, max_bytes: int) -> tuple[bytes, int]:
        """Return up to `max_bytes` from `cursor` on (or from the oldest byte kept) and the next cursor."""
        start = self.end - len(self._data)
        at = max(0, min(cursor, self.end) - start)
        data = bytes(self._data[at : at + max_bytes])
        return data, start + at + len(data)
