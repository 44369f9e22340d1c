"""Where each key of a TOML document stands: a line scanner beside tomllib, which keeps no positions.

It reads broken documents too, never raises and is linear in the text. It decides nothing about the policy: it
places messages, finds keys nested deeper than `MAX_PARTS` (on which tomllib is slower than quadratic: 20,000
parts of a dotted key take seconds), and tells whether a broken file looks as if it spoke of a sandbox.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

__all__ = ["MAX_PARTS", "KeyPath", "Scan", "looks_like_sandbox", "near_miss", "scan"]

MAX_PARTS = 64
"""Parts of one dotted key or header; a policy needs three."""

KeyPath = tuple[str | int, ...]
"""Names from the root; a number is a position in a list."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BASIC = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_LITERAL = re.compile(r"'([^'\n]*)'")
_LONG_BASIC = re.compile(r'\\.|"""', re.DOTALL)
_LONG_LITERAL = re.compile("'''")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_SHORT = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}


class Scan(NamedTuple):
    """What the scanner found."""

    lines: dict[KeyPath, int]
    """1-based line where each key, table and list element first stands."""
    deep: int
    """Line of a key with more than `MAX_PARTS` parts, 0 when there is none."""

    def line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of its nearest parent that has one; 0 when nothing is known."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return 0


def scan(text: str) -> Scan:
    """Return the line of every key; of a broken document, of what could be made out."""
    return _Scanner(text).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.ends = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[KeyPath, int] = {}
        self.deep = 0

    def run(self) -> Scan:
        text, pos = self.text, 0
        table: KeyPath = ()
        while True:
            pos = self._match(_SPACE, pos)
            if pos >= len(text):
                return Scan(self.lines, self.deep)
            if text[pos] == "[":
                start = pos
                pos = self._match(_BLANK, pos + (2 if text.startswith("[[", pos) else 1))
                key, pos = self._key(pos)
                if key:
                    table = key
                    self._note(key, start)
                pos = self._line_end(pos)
                continue
            start = pos
            key, pos = self._key(pos)
            if not key or not text.startswith("=", pos):
                pos = self._line_end(max(pos, start))
                continue
            self._note(table + key, start)
            pos = self._line_end(self._value(table + key, pos + 1))

    def _match(self, pattern: re.Pattern[str], pos: int) -> int:
        found = pattern.match(self.text, pos)
        return found.end() if found else pos

    def _line_of(self, pos: int) -> int:
        return bisect_right(self.ends, pos - 1) + 1

    def _line_end(self, pos: int) -> int:
        end = self.text.find("\n", pos)
        return len(self.text) if end < 0 else end + 1

    def _note(self, path: KeyPath, pos: int) -> None:
        """Store the line of `path` and, where they have none yet, of its parents."""
        line = self._line_of(pos)
        if len(path) > MAX_PARTS:
            self.deep = self.deep or line
            path = path[:MAX_PARTS]
        while path and path not in self.lines:
            self.lines[path] = line
            path = path[:-1]

    def _key(self, pos: int) -> tuple[KeyPath, int]:
        """Read a dotted key at `pos`; returns its parts (none: no key here) and the position after it."""
        parts: list[str] = []
        start = pos
        while True:
            pos = self._match(_BLANK, pos)
            for pattern in (_BARE, _BASIC, _LITERAL):
                found = pattern.match(self.text, pos)
                if found:
                    break
            else:
                return (), start
            if len(parts) <= MAX_PARTS:
                parts.append(
                    found.group()
                    if pattern is _BARE
                    else _decode(found[1])
                    if pattern is _BASIC
                    else found[1]
                )
            pos = self._match(_BLANK, found.end())
            if not self.text.startswith(".", pos):
                return tuple(parts), pos
            pos += 1

    def _value(self, path: KeyPath, pos: int) -> int:
        """Walk over one value, noting what inline tables and lists hold; returns the position after it."""
        text = self.text
        stack: list[tuple[KeyPath, int]] = []  # open containers; the number counts list elements, -1: a table
        pos = self._match(_BLANK, pos)
        here = path
        while True:
            if pos >= len(text):
                return pos
            opening = text[pos]
            if opening in "[{" and len(stack) < MAX_PARTS:
                stack.append((here, 0 if opening == "[" else -1))
                pos += 1
            else:
                pos = self._scalar(pos)
            # after an opening bracket or a value: close what closes, then find the next value
            while stack:
                container, count = stack[-1]
                pos = self._match(_SPACE, pos)
                if text.startswith(",", pos):
                    pos = self._match(_SPACE, pos + 1)
                if pos >= len(text):
                    return pos
                if text[pos] in "]}":
                    stack.pop()
                    pos += 1
                    continue
                if count < 0:
                    start = pos
                    key, pos = self._key(pos)
                    if not key or not text.startswith("=", pos):
                        return pos
                    here = container + key
                    self._note(here, start)
                    pos = self._match(_BLANK, pos + 1)
                else:
                    here = (*container, count)
                    stack[-1] = (container, count + 1)
                    self._note(here, pos)
                break
            if not stack:
                return pos

    def _scalar(self, pos: int) -> int:
        text = self.text
        for quotes in ('"""', "'''"):
            if text.startswith(quotes, pos):
                return self._long_string(quotes, pos + 3)
        for pattern in (_BASIC, _LITERAL):
            found = pattern.match(text, pos)
            if found:
                return found.end()
        end = self._match(_SCALAR, pos)
        return end if end > pos else pos + 1  # a stray character: always go forward

    def _long_string(self, quotes: str, pos: int) -> int:
        for found in (_LONG_BASIC if quotes == '"""' else _LONG_LITERAL).finditer(self.text, pos):
            if found.group() == quotes:
                end = found.end()
                # up to two quotes of the text itself may stand before the closing three
                for _ in range(2):
                    end += self.text.startswith(quotes[0], end)
                return end
        return len(self.text)


def _decode(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        short, long, letter = match.groups()
        try:
            return chr(int(short or long, 16)) if short or long else _SHORT.get(letter, letter)
        except (ValueError, OverflowError):
            return "\ufffd"

    return _ESCAPE.sub(one, text) if "\\" in text else text


_INVISIBLE = re.compile("[\0\ufeff\u200b\u2060]")
_SANDBOX_LINE = re.compile(r"""\s*(?:\[\[?\s*["']?sandbox|["']?sandbox["']?\s*[=.])""", re.IGNORECASE)
_HEADING = re.compile(r"""\s*\[\[?\s*["']?([A-Za-z0-9_-]+)""")
_ESCAPED_KEY = re.compile(r'\s*(?:\[\[?\s*)?"[^"]*\\[uU]')


def looks_like_sandbox(text: str) -> int:
    """Return the line at which a broken document seems to speak of a sandbox, 0 when none does."""
    clean = _INVISIBLE.sub("", text)
    for number, line in enumerate(re.split(r"\r\n|[\n\r\v\f\x85\u2028\u2029]", clean), 1):
        if _SANDBOX_LINE.match(line) or _ESCAPED_KEY.match(line):
            return number
        heading = _HEADING.match(line)
        if heading and near_miss(heading[1]):
            return number
    return 0


def near_miss(name: str) -> bool:
    """Return whether a top-level key is a misspelt `sandbox`."""
    if name == "sandbox":
        return False
    folded = re.sub(r"[\s_-]", "", name).lower()
    if not 5 <= len(folded) <= 11:
        return False
    if folded == "sandbox":
        return True
    from difflib import SequenceMatcher

    return SequenceMatcher(None, folded, "sandbox", autojunk=False).ratio() >= 0.8
