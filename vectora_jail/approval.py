"""Advice on command lines: allow, ask or forbid, and how to run it. Containment never depends on it.

Rules of the user decide first (strictest of those that match), then what the session trusts, then what is
known about the commands themselves. A line is split into every command it would run; the strictest of their
answers counts; what cannot be parsed with certainty is `ask`, never `allow`.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vectora_jail.approvalrules import Rule, Rules
from vectora_jail.commandsafety import downloads, interprets, judge
from vectora_jail.shellparse import Simple, Unparsed, Word, parse_line

__all__ = ["Decision", "Rule", "Rules", "Session", "Trust", "decide"]

Action = Literal["allow", "ask", "forbid"]
Sandbox = Literal["jailed", "jailed+grants", "raw"]

_STRICT = {"allow": 0, "ask": 1, "forbid": 2}
_MAX_SCRIPTS = 4  # lines inside lines
# Programs that are of little use without the network.
_PROGRAMS = "curl wget pip pip3 npm npx yarn pnpm cargo gem bundle go apt apt-get ssh scp rsync"
_NETWORK = frozenset(_PROGRAMS.split())


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a command: ``rule`` names what decided, ``commands`` what the line would run."""

    action: Action
    sandbox: Sandbox = "jailed"
    reason: str = ""
    rule: str = ""
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Trust:
    """One approval of a session, keyed on argv words and never on a joined line."""

    kind: Literal["exact", "prefix", "pattern"]
    words: tuple[str, ...]
    expires: float | None = None

    def matches(self, argv: Sequence[str]) -> bool:
        """Tell whether an argv falls under this approval."""
        if self.kind == "exact":
            return tuple(argv) == self.words
        if self.kind == "prefix":
            return tuple(argv[: len(self.words)]) == self.words
        return len(argv) == len(self.words) and all(
            fnmatch.fnmatchcase(word, pattern) for word, pattern in zip(argv, self.words, strict=True)
        )


class Session:
    """Approvals that last as long as this object, or shorter; nothing is written anywhere."""

    def __init__(self) -> None:
        self._trusted: dict[tuple[str, tuple[str, ...]], Trust] = {}

    def trust(
        self,
        command: Sequence[str],
        kind: Literal["exact", "prefix", "pattern"] = "exact",
        ttl: float | None = None,
    ) -> Trust:
        """Approve an argv (a sequence of words), for ``ttl`` seconds or for the session."""
        if isinstance(command, (str, bytes)) or not command:
            raise ValueError("trust takes the words of a command, not a line")
        if kind not in ("exact", "prefix", "pattern"):
            raise ValueError(f"unknown kind of trust {kind!r}")
        if kind == "pattern" and any(char in command[0] for char in "*?["):
            raise ValueError("a pattern names its program")
        entry = Trust(kind, tuple(command), None if ttl is None else _now() + ttl)
        self._trusted[kind, entry.words] = entry
        return entry

    def forget(self, entry: Trust) -> bool:
        """Take an approval back; whether there was one."""
        return self._trusted.pop((entry.kind, entry.words), None) is not None

    def amendments(self) -> tuple[Trust, ...]:
        """List what is approved now, for review."""
        now = _now()
        for key, entry in tuple(self._trusted.items()):
            if entry.expires is not None and entry.expires <= now:
                del self._trusted[key]
        return tuple(self._trusted.values())

    def find(self, argv: Sequence[str]) -> Trust | None:
        """Give the approval that an argv falls under, an exact one first."""
        found = [entry for entry in self.amendments() if entry.matches(argv)]
        return min(found, key=lambda entry: entry.kind != "exact", default=None)


def decide(
    command: str | Sequence[str], *, rules: Rules | None = None, session: Session | None = None
) -> Decision:
    """Decide a command line (a text, run by a shell) or an argv (a sequence of words)."""
    if isinstance(command, str):
        return _decide_line(command, rules, session, 0)
    words = tuple(command)
    if not words:
        return Decision("ask", reason="an empty command")
    if any("\0" in word for word in words):
        return Decision("ask", reason="NUL in a word", commands=(words,))
    return _decide_one(Simple(tuple(Word(word) for word in words)), rules, session, 0)


def _decide_line(text: str, rules: Rules | None, session: Session | None, depth: int) -> Decision:
    if depth > _MAX_SCRIPTS:
        return Decision("ask", reason="lines inside lines, too deep to follow")
    try:
        line = parse_line(text)
    except Unparsed as unparsed:
        return Decision("ask", reason=f"not understood: {unparsed.reason}")
    if not line.commands and not line.functions:
        return Decision("ask", reason="no command in it")
    answers = [_decide_one(simple, rules, session, depth) for simple in line.commands]
    if line.functions:
        # A function may carry the name of a harmless command.
        answers.append(Decision("ask", reason=f"defines the function {line.functions[0]}"))
        if any(simple.argv[0] in line.functions and simple.after_pipe for simple in line.commands):
            answers.append(Decision("forbid", reason="a function that pipes into itself"))
    if line.assigns:
        answers.append(Decision("ask", reason=f"sets the variable {line.assigns[0]}"))
    for earlier, later in zip(line.commands, line.commands[1:], strict=False):
        if later.after_pipe and downloads(earlier.argv) and interprets(later.argv):
            answers.append(Decision("forbid", reason=f"{later.argv[0]} runs what {earlier.argv[0]} fetches"))
    commands = tuple(command for answer in answers for command in answer.commands)
    return _strictest(answers, commands)


def _strictest(answers: Sequence[Decision], commands: tuple[tuple[str, ...], ...]) -> Decision:
    worst = max(answers, key=lambda answer: _STRICT[answer.action])
    order = ("raw", "jailed+grants", "jailed")
    # Of several commands the whole line runs in one place: never wider than what every one of them may have.
    sandbox = max((answer.sandbox for answer in answers), key=order.index)
    if worst.sandbox == "jailed+grants" and worst.action != "allow":
        sandbox = worst.sandbox
    return Decision(worst.action, sandbox, worst.reason, worst.rule, commands)


def _decide_one(simple: Simple, rules: Rules | None, session: Session | None, depth: int) -> Decision:
    argv = simple.argv
    judgement = judge(argv, [word.static for word in simple.words])
    inside = [_decide_line(script, rules, session, depth + 1) for script in judgement.scripts]
    commands: tuple[tuple[str, ...], ...] = (argv, *(found for answer in inside for found in answer.commands))
    extra = _surroundings(simple)
    answer = _by_rule(simple, rules) or _by_trust(simple, session, judgement.verdict == "harms")
    if answer is None:
        if judgement.verdict == "harms":
            answer = Decision("forbid", reason=judgement.reason)
        elif judgement.verdict == "reads":
            answer = Decision("allow", reason=judgement.reason, rule="known to read")
        else:
            grants: Sandbox = "jailed+grants" if argv[0] in _NETWORK else "jailed"
            answer = Decision("ask", grants, judgement.reason)
        answers = [answer, *inside, *extra]
    else:
        # Somebody has spoken about this argv. Harm inside it still counts, unless these very words were meant.
        worse = [found for found in inside if found.action == "forbid"]
        answers = [answer, *([] if answer.rule.startswith("trust exact ") else worse), *extra]
    return _strictest(answers, commands)


def _surroundings(simple: Simple) -> list[Decision]:
    found: list[Decision] = []
    for word in simple.writes:
        if word.text.startswith(("/dev/sd", "/dev/nvme", "/dev/vd", "/dev/hd", "/dev/mem")):
            found.append(Decision("forbid", reason=f"writes to the device {word.text}"))
        found.append(Decision("ask", reason=f"writes {word.text}"))
    if simple.assigns:
        found.append(Decision("ask", reason=f"runs with another {simple.assigns[0]}"))
    return found


def _by_rule(simple: Simple, rules: Rules | None) -> Decision | None:
    if rules is None:
        return None
    matching = [rule for rule in rules.rules if rule.matches(simple.argv, simple.static)]
    if not matching:
        return None
    rule = max(matching, key=lambda found: _STRICT[found.action])
    return Decision(rule.action, rule.sandbox, rule.reason or f"the rule {rule.shown}", rule.shown)


def _by_trust(simple: Simple, session: Session | None, harms: bool) -> Decision | None:
    if session is None or not simple.static:
        return None
    entry = session.find(simple.argv)
    if entry is None or (harms and entry.kind != "exact"):
        return None
    return Decision(
        "allow", reason="approved in this session", rule=f"trust {entry.kind} {' '.join(entry.words)}"
    )


def _now() -> float:
    """Give seconds since boot, those asleep included: an approval ends while the lid is closed."""
    clock: Any = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(clock) if clock is not None else time.monotonic()
