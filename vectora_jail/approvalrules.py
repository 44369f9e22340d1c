"""Command rules as a file: prefixes of argv with an action, and examples that are tried when the file is loaded.

::

    [[rule]]
    prefix = ["git", ["push", "fetch"]]     # a list inside means any of these words
    action = "ask"                          # allow | ask | forbid
    sandbox = "jailed+grants"               # jailed (default) | jailed+grants | raw
    reason = "talks to the server"
    match = ["git push origin main"]        # must match, else the file is refused
    not_match = ["git status"]
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vectora_jail.errors import PolicyError, Problem

_KEYS = ("prefix", "action", "sandbox", "reason", "match", "not_match")
_MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Rule:
    """One prefix rule; each place of the prefix is a tuple of words that fit there."""

    prefix: tuple[tuple[str, ...], ...]
    action: Literal["allow", "ask", "forbid"]
    sandbox: Literal["jailed", "jailed+grants", "raw"] = "jailed"
    reason: str = ""

    @property
    def shown(self) -> str:
        """Give the prefix as text."""
        return " ".join("|".join(place) for place in self.prefix)

    def matches(self, argv: Sequence[str], static: bool = True) -> bool:
        """Tell whether an argv begins with this prefix.

        To allow, the words must be known and the program named as in the rule; to ask or forbid, the
        program's own name is enough, wherever it lies.
        """
        if len(argv) < len(self.prefix):
            return False
        if self.action == "allow" and not static:
            return False
        for index, (word, place) in enumerate(zip(argv, self.prefix, strict=False)):
            if word in place:
                continue
            if index == 0 and self.action != "allow" and word.rsplit("/", 1)[-1] in place:
                continue
            return False
        return True


@dataclass(frozen=True, slots=True)
class Rules:
    """A set of rules; of those that match a command the strictest decides."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def load(cls, path: str) -> Rules:
        """Read a TOML file of rules; raises PolicyError with every problem, OSError when it cannot be read."""
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib

        with open(path, "rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise PolicyError(problems=[Problem("", found="a file over 1 MiB", file=str(path))])
        try:
            document = tomllib.loads(data.decode("utf-8"))
        except ValueError as error:
            raise PolicyError(
                problems=[Problem("", found=str(error), expected="TOML", file=str(path))]
            ) from None
        return cls.parse(document, str(path))

    @classmethod
    def parse(cls, document: dict[str, Any], file: str = "") -> Rules:
        """Take rules from a decoded document; raises PolicyError."""
        problems: list[Problem] = []
        found: list[Rule] = []
        unknown = [key for key in document if key != "rule"]
        problems += [Problem(key, found="an unknown key", expected="[[rule]]", file=file) for key in unknown]
        entries = document.get("rule", [])
        if not isinstance(entries, list):
            problems.append(Problem("rule", found="a table", expected="[[rule]]", file=file))
            entries = []
        for index, entry in enumerate(entries):
            where = f"rule[{index}]"
            rule = _rule(entry, where, file, problems)
            if rule is not None:
                found.append(rule)
                problems += _try_examples(rule, entry, where, file)
        if problems:
            raise PolicyError(problems=problems)
        return cls(tuple(found))


def _rule(entry: Any, where: str, file: str, problems: list[Problem]) -> Rule | None:
    before = len(problems)

    def problem(key: str, found: str, expected: str) -> None:
        problems.append(
            Problem(f"{where}.{key}" if key else where, found=found, expected=expected, file=file)
        )

    if not isinstance(entry, dict):
        problem("", repr(entry), "a table")
        return None
    for key in entry:
        if key not in _KEYS:
            problem(key, "an unknown key", "one of " + ", ".join(_KEYS))
    places = [_place(place) for place in entry["prefix"]] if isinstance(entry.get("prefix"), list) else []
    if not places or not all(places):
        problem("prefix", repr(entry.get("prefix")), "a list of words, or of lists of words")
    if entry.get("action") not in ("allow", "ask", "forbid"):
        problem("action", repr(entry.get("action")), "allow, ask or forbid")
    if entry.get("sandbox", "jailed") not in ("jailed", "jailed+grants", "raw"):
        problem("sandbox", repr(entry["sandbox"]), "jailed, jailed+grants or raw")
    if not isinstance(entry.get("reason", ""), str):
        problem("reason", repr(entry["reason"]), "a text")
    for key in ("match", "not_match"):
        if not isinstance(entry.get(key, []), list):
            problem(key, repr(entry[key]), "a list of commands")
    if len(problems) > before:
        return None
    return Rule(tuple(places), entry["action"], entry.get("sandbox", "jailed"), entry.get("reason", ""))


def _place(place: Any) -> tuple[str, ...]:
    words = [place] if isinstance(place, str) else place
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        return ()
    return tuple(words)


def _try_examples(rule: Rule, entry: dict[str, Any], where: str, file: str) -> Iterable[Problem]:
    for key, wanted in (("match", True), ("not_match", False)):
        for example in entry.get(key, []):
            try:
                argv = shlex.split(example) if isinstance(example, str) else [str(word) for word in example]
            except (ValueError, TypeError):
                argv = []
            if not argv or rule.matches(argv) is not wanted:
                yield Problem(
                    f"{where}.{key}",
                    found=repr(example),
                    expected=f"a command that {'matches' if wanted else 'does not match'} {rule.shown}",
                    file=file,
                )
