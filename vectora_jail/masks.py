"""What a policy's mask patterns mean: rules for the tree watch, and a matcher for absent names.

Pure: nothing here looks at a file system. Patterns follow gitignore(5); a *floor* rule cannot be undone by a
negation, and a rule that begins with two slashes is matched against the absolute path. The compiled matcher
(csrc/core/gitignore.c) does the same work for the walk; a test holds the two, and git itself, equal.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["MaskRule", "MaskSet", "leaving_of", "match_pattern", "normalise", "split_patterns"]

PATTERN_MAX = 1024  # bytes of one pattern, as in csrc/core/gitignore.h
RULES_MAX = 4096
_SPECIAL = frozenset(b"*?[\\")
_CLASSES: dict[bytes, Callable[[int], bool]] = {
    b"alnum": lambda c: c < 128 and chr(c).isalnum(),
    b"alpha": lambda c: c < 128 and chr(c).isalpha(),
    b"blank": lambda c: c in b" \t",
    b"cntrl": lambda c: c < 32 or c == 127,
    b"digit": lambda c: c in b"0123456789",
    b"graph": lambda c: 32 < c < 127,
    b"lower": lambda c: 97 <= c <= 122,
    b"print": lambda c: 32 <= c < 127,
    b"punct": lambda c: 32 < c < 127 and not chr(c).isalnum(),
    b"space": lambda c: c in b" \t\n\v\f\r",
    b"upper": lambda c: 65 <= c <= 90,
    b"xdigit": lambda c: c in b"0123456789abcdefABCDEF",
}


@dataclass(frozen=True, slots=True)
class MaskRule:
    """One gitignore rule: the pattern without its `!`; floor rules win over every negation."""

    pattern: bytes
    negate: bool = False
    floor: bool = False


def normalise(
    text: str | bytes, *, workspace: bytes, home: bytes = b"", floor: bool = False
) -> tuple[MaskRule, ...]:
    """Turn one pattern of a policy into rules; one that could be meant relative or absolute becomes both.

    `./x`, `a//b` and `a/../b` are resolved by name (git would silently match nothing), `~/x` is below `home`,
    and an absolute path below the workspace is taken literally up to there, whatever glob characters the
    workspace's own name holds. Raises ValueError for a pattern that could never match: empty, malformed, NUL,
    too long.
    """
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    body = _trim(raw)
    negate = body.startswith(b"!")
    body = body[negate:]
    if b"\0" in body:
        raise ValueError("a mask pattern holds a NUL byte")
    if floor and negate:
        raise ValueError("a negation cannot be part of the mask floor")
    patterns = list(_spellings(body, workspace, home))
    for pattern in patterns:
        _check(pattern)
        if pattern.startswith(b"//") and (workspace + b"/").startswith(pattern[1:].rstrip(b"/") + b"/"):
            raise ValueError("a mask pattern names the whole workspace")
    return tuple(MaskRule(p, negate, floor) for p in patterns)


def _trim(raw: bytes) -> bytes:
    """Drop trailing spaces that no backslash keeps, as gitignore(5) says."""
    while raw.endswith(b" ") and not raw.endswith(b"\\ "):
        raw = raw[:-1]
    return raw


def _spellings(body: bytes, workspace: bytes, home: bytes) -> Iterator[bytes]:
    if body == b"~" or body.startswith(b"~/"):
        if not home:
            raise ValueError("a mask pattern begins with ~ and the home directory is not known")
        yield from _absolute(home, body[1:], workspace)
    elif body.startswith(b"/"):
        below = _below(body, workspace)
        if below is not None:
            yield below
            return
        clean = _clean(body)
        yield clean
        yield b"/" + clean
    elif {b".", b".."} & set(body.split(b"/")):
        is_dir = body.endswith((b"/", b"/.", b"/.."))
        joined = posixpath.normpath(workspace + b"/" + body) + b"/" * is_dir
        below = _below(joined, workspace)
        yield below if below is not None else b"/" + joined
    else:
        yield _clean(body)


def _absolute(base: bytes, rest: bytes, workspace: bytes) -> Iterator[bytes]:
    joined = base.rstrip(b"/") + rest
    below = _below(joined, workspace)
    if below is not None:
        yield below
    else:
        yield b"//" + _escape(base.strip(b"/")) + _clean(rest)


def _below(path: bytes, workspace: bytes) -> bytes | None:
    """The anchored pattern for an absolute path below the workspace, None for one that is not."""
    prefix = workspace.rstrip(b"/") + b"/"
    if not path.startswith(prefix) or not path[len(prefix) :].strip(b"/"):
        return None
    return b"/" + _clean(path[len(prefix) :]).lstrip(b"/")


def _clean(body: bytes) -> bytes:
    while b"//" in body:
        body = body.replace(b"//", b"/")
    return body


def _escape(literal: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in _SPECIAL else bytes([c]) for c in literal)


def _check(pattern: bytes) -> None:
    if not pattern.strip(b"/") or pattern.strip(b"/") == b".":
        raise ValueError("a mask pattern names nothing (or the whole workspace)")
    if len(pattern) > PATTERN_MAX:
        raise ValueError(f"a mask pattern is longer than {PATTERN_MAX} bytes")
    _tokens(_Parsed.of(pattern).text)


def split_patterns(
    floor: Iterable[str | bytes], patterns: Iterable[str | bytes], *, workspace: bytes, home: bytes = b""
) -> tuple[MaskRule, ...]:
    """The rules of the ceiling's floor, then those of the policy. Raises ValueError with the pattern."""
    rules: list[MaskRule] = []
    for is_floor, group in ((True, floor), (False, patterns)):
        for text in group:
            try:
                rules.extend(normalise(text, workspace=workspace, home=home, floor=is_floor))
            except ValueError as problem:
                raise ValueError(f"{problem}: {text!r}") from None
    if len(rules) > RULES_MAX:
        raise ValueError(f"more than {RULES_MAX} mask rules")
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class _Parsed:
    text: bytes
    dir_only: bool
    basename: bool
    absolute: bool
    floating: bool

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, pattern: bytes) -> _Parsed:
        absolute = len(pattern) > 2 and pattern.startswith(b"//")
        text = pattern[1:] if absolute else pattern
        dir_only = len(text) > 1 and text.endswith(b"/")
        text = text[:-1] if dir_only else text
        basename = b"/" not in text
        text = text.removeprefix(b"/") if not basename else text
        floating = not absolute and not basename and len(text) > 3 and text.startswith(b"**/")
        return cls(text, dir_only, basename, absolute, floating)


_Token = tuple[str, bytes | frozenset[int] | None]


@lru_cache(maxsize=1024)
def _tokens(text: bytes) -> tuple[_Token, ...]:
    """Read a pattern: byte, any, set, star (in a name), tree (any text), treeslash (nothing, or text/)."""
    out: list[_Token] = []
    literal = next((i for i, c in enumerate(text) if c in _SPECIAL), len(text))
    out.extend(("byte", text[i : i + 1]) for i in range(literal))
    i = literal
    while i < len(text):
        c = text[i : i + 1]
        if c == b"*":
            begin = i
            while text[i : i + 1] == b"*":
                i += 1
            # git takes the first wildcard of a pattern as the beginning of a path part
            whole = i - begin > 1 and (begin == literal or text[begin - 1 : begin] == b"/")
            if whole and text[i : i + 1] == b"/":
                out.append(("treeslash", None))
                i += 1
            elif whole and (i == len(text) or text[i : i + 2] == b"\\/"):
                out.append(("tree", None))
            else:
                out.append(("star", None))
        elif c == b"?":
            out.append(("any", None))
            i += 1
        elif c == b"[":
            chars, i = _bracket(text, i)
            out.append(("set", chars))
        else:
            if c == b"\\":
                i += 1
                c = text[i : i + 1]
                if not c:
                    raise ValueError("a mask pattern ends in a backslash")
            out.append(("byte", c))
            i += 1
    return tuple(out)


def _bracket(text: bytes, start: int) -> tuple[frozenset[int], int]:
    i = start + 1
    negated = text[i : i + 1] in (b"!", b"^")
    i += negated
    chars: set[int] = set()
    low: int | None = None
    first = True
    while True:
        if i >= len(text):
            raise ValueError("a mask pattern has a bracket that is not closed")
        c = text[i]
        if c == 0x5D and not first:
            break
        first = False
        if text[i : i + 2] == b"[:":
            end = text.find(b"]", i + 2)
            if end < 0:
                raise ValueError("a mask pattern has a bracket that is not closed")
            if end > i + 2 and text[end - 1 : end] == b":":
                test = _CLASSES.get(text[i + 2 : end - 1])
                if test is None:
                    raise ValueError("a mask pattern names an unknown character class")
                chars.update(k for k in range(256) if test(k))
                low, i = None, end + 1
                continue
        if c == 0x2D and low is not None and i + 1 < len(text) and text[i + 1] != 0x5D:
            i += 1
            if text[i] == 0x5C:
                i += 1
            if i >= len(text):
                raise ValueError("a mask pattern has a bracket that is not closed")
            chars.update(range(low, text[i] + 1))
            low, i = None, i + 1
            continue
        if c == 0x5C:
            i += 1
            if i >= len(text):
                raise ValueError("a mask pattern has a bracket that is not closed")
            c = text[i]
        chars.add(c)
        low, i = c, i + 1
    result = frozenset(range(256)) - chars if negated else frozenset(chars)
    return result - {0x2F}, i + 1


def _fold(data: bytes) -> bytes:
    return bytes(c + 32 if 65 <= c <= 90 else c for c in data)


def match_pattern(
    pattern: bytes, path: bytes, *, is_dir: bool, fold: bool = False, absolute: bytes = b""
) -> bool:
    """Whether one rule's pattern matches this one path (no parents). `path` is relative to the workspace.

    Time is bounded by len(pattern) times len(path): the pattern may come from a hostile file.
    """
    rule = _Parsed.of(pattern)
    if (rule.dir_only and not is_dir) or not rule.text:
        return False
    text = path.rpartition(b"/")[2] if rule.basename else absolute.lstrip(b"/") if rule.absolute else path
    tokens = _tokens(rule.text)
    # rows[k]: can the first i bytes of the text be what the first k tokens match?
    row = [True] + [False] * len(tokens)
    for k, (kind, _) in enumerate(tokens):
        row[k + 1] = row[k] and kind in ("star", "tree", "treeslash")
    previous_rows = [row]
    for i, byte in enumerate(text):
        before, row = row, [False] * (len(tokens) + 1)
        for k, (kind, value) in enumerate(tokens):
            if kind == "byte":
                wanted = value if isinstance(value, bytes) else b""
                one = bytes([byte])
                hit = before[k] and (one == wanted or (fold and _fold(one) == _fold(wanted)))
            elif kind == "any":
                hit = before[k] and byte != 0x2F
            elif kind == "set":
                members = value if isinstance(value, frozenset) else frozenset()
                hit = (
                    before[k]
                    and byte != 0x2F
                    and (byte in members or (fold and bool(_cases(byte) & members)))
                )
            elif kind == "star":
                hit = row[k] or (before[k + 1] and byte != 0x2F)
            elif kind == "tree":
                hit = row[k] or before[k + 1]
            else:  # nothing at all, or any text that ends with this slash
                hit = row[k] or (byte == 0x2F and any(earlier[k] for earlier in previous_rows))
            row[k + 1] = hit
        previous_rows.append(row)
        if i > 65536:
            raise ValueError("a path is too long to be matched")
    return row[-1]


def _cases(byte: int) -> frozenset[int]:
    one = bytes([byte])
    return frozenset((one.lower()[0], one.upper()[0]))


@dataclass(frozen=True, slots=True)
class MaskSet:
    """All mask rules of one jail, in order, and literal paths that are masked whatever the rules say."""

    rules: tuple[MaskRule, ...]
    paths: tuple[bytes, ...] = ()
    workspace: bytes = b"/"

    def spec(self) -> list[tuple[bytes, bool, bool]]:
        """The rules as the tree watch takes them."""
        return [(r.pattern, r.negate, r.floor) for r in self.rules]

    def matches(self, path: bytes, *, is_dir: bool = False, fold: bool = False) -> bool:
        """Whether this absolute path, or a directory above it, is masked by a rule or a literal path."""
        if any(path == p or path.startswith(p.rstrip(b"/") + b"/") for p in self.paths):
            return True
        first = len(self._base(path))
        ends = [i for i in range(first + 1, len(path)) if path[i] == 0x2F]
        above = (self.decide(path[:end], is_dir=True, fold=fold) for end in ends)
        return any(
            r is not None and not r.negate for r in (*above, self.decide(path, is_dir=is_dir, fold=fold))
        )

    def decide(self, path: bytes, *, is_dir: bool, fold: bool = False) -> MaskRule | None:
        """The rule that decides about this very name, no parents: a floor rule, else the last."""
        base = self._base(path)
        inside = base != b"/" or self.workspace == b"/"
        found: MaskRule | None = None
        for rule in self.rules:
            kind = _Parsed.of(rule.pattern)
            if not (inside or kind.basename or kind.absolute or kind.floating):
                continue
            if match_pattern(rule.pattern, path[len(base) :], is_dir=is_dir, fold=fold, absolute=path):
                if rule.floor:
                    return rule
                found = rule
        return found

    def refuses(self, path: bytes, *, fold: bool = False) -> bool:
        """Whether the file API must refuse to create this absolute, normalised path.

        True for a masked file or directory, for anything below one, and for what an editor would leave beside
        a masked file; the name need not exist.
        """
        if self.matches(path, fold=fold) or self.matches(path, is_dir=True, fold=fold):
            return True
        own = self.decide(path, is_dir=False, fold=fold)
        parent, _, name = path.rpartition(b"/")
        for original in leaving_of(name):
            beside = parent + b"/" + original
            rule = self.decide(beside, is_dir=False, fold=fold)
            masked = beside in self.paths or (rule is not None and not rule.negate)
            # a name that a negation gives back is given back, unless the floor holds what it was left by
            if masked and (own is None or rule is None or rule.floor):
                return True
        return False

    def _base(self, path: bytes) -> bytes:
        """What rules are relative to here: the workspace, or the root for a grant that lies elsewhere."""
        workspace = self.workspace.rstrip(b"/") + b"/"
        return workspace if path.startswith(workspace) else b"/"


def leaving_of(name: bytes) -> tuple[bytes, ...]:
    """The names N that `name` may be an editor's leaving of (N~, N.~1~, .N.sw?, #N#, N.bak, N.tmp*, .N.*)."""
    found: list[bytes] = []
    if len(name) < 2:
        return ()
    if name.endswith(b"~"):
        found.append(name[:-1])
        found.extend(name[:i] for i in range(1, len(name) - 2) if name[i : i + 2] == b".~")
    if len(name) > 2 and name.startswith(b"#") and name.endswith(b"#"):
        found.append(name[1:-1])
    if name.endswith(b".bak"):
        found.append(name[:-4])
    if name.startswith(b".") and len(name) > 4 and name[-4:-1] == b".sw":
        found.append(name[:-4])
    found.extend(name[:i] for i in range(1, len(name) - 3) if name[i : i + 4] == b".tmp")
    if name.startswith(b"."):
        found.extend(name[1:i] for i in range(2, len(name) - 1) if name[i : i + 1] == b".")
    return tuple(n for n in found if n)
