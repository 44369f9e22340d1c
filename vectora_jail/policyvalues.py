"""What one value of a policy may be: exact types, ranges and syntax, each refusal with what to write instead.

Pure and without the file system. A checker gets a `Key` and a value (from TOML or from Python) and returns
the value in its settled form (lists as tuples, tables as `FrozenMap`) and the problems that it found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from vectora_jail.errors import Problem
from vectora_jail.policykeys import Key
from vectora_jail.policytext import (
    NAME_PATTERN,
    NOWHERE,
    FrozenMap,
    describe,
    lexical_path,
    quote,
    split_target,
    suggestion,
    unescape_path,
)

__all__ = ["check_value", "unescape_path"]

PATH_MAX = 4095  # bytes without the final NUL, limits.h
NAME_MAX = 255
LIST_MAX = 10_000

_ENV_NAME = re.compile(r"[^\s=\x00-\x1f\x7f]+")
_DOLLAR_NAME = re.compile(r"(?<!\\)\$[A-Za-z_{(]")
_RESERVED_ENV = "VECTORA_SANDBOX_"

# A grant of one of these would put the host's own view into the jail in place of the jail's.
_NEVER_GRANTED = ("/proc", "/dev", "/sys", "/run/vectora-jail")


Checked = tuple[Any, list[Problem]]


def check_value(key: Key, value: object) -> Checked:
    """Return the settled value and its problems (empty when it is fine)."""
    return _CHECKERS[key.kind](key, value)


def _wrong(key: Key, found: str, expected: str = "", hint: str = "", at: str = "") -> Problem:
    return Problem(key.name + at, found=found, expected=expected or key.expected, hint=hint)


def _bool(key: Key, value: object) -> Checked:
    if isinstance(value, bool):
        return value, []
    hint = ""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        hint = f"write {value.lower()} without quotes"
    elif isinstance(value, int) and value in (0, 1):
        hint = f"write {'true' if value else 'false'}"
    return value, [_wrong(key, describe(value), hint=hint)]


def _number(key: Key, value: object) -> Checked:
    kinds: tuple[type, ...] = (int,) if key.kind == "int" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        hint = "write it without quotes" if isinstance(value, str) and value.isdigit() else ""
        return value, [_wrong(key, describe(value), hint=hint)]
    if not key.low <= value <= key.high:  # type: ignore[operator]  # NaN fails too
        hint = 'preset = "unlimited" lifts limits' if key.table == "limits" and value == 0 else ""
        return value, [_wrong(key, describe(value), hint=hint)]
    return value, []


def _string(key: Key, value: object, at: str = "", expected: str = "") -> list[Problem]:
    """Return the problems that every string may have: wrong type, empty, NUL, too long."""
    if not isinstance(value, str):
        return [_wrong(key, describe(value), expected or "a string", at=at)]
    if not value:
        return [_wrong(key, '""', expected or "a non-empty string", at=at)]
    if "\0" in value:
        return [_wrong(key, f"{quote(value)} with a NUL", "a string without NUL", at=at)]
    if len(value) > 65536:
        return [_wrong(key, f"a string of {len(value)} characters", "at most 65536 characters", at=at)]
    return []


def _choice(key: Key, value: object) -> Checked:
    if isinstance(value, str) and value in key.choices:
        return value, []
    hint = suggestion(value, key.choices) if isinstance(value, str) else ""
    if key.name == "backend" and value == "seatbelt":
        hint = 'on macOS backend = "local" selects Seatbelt'
    return value, [_wrong(key, describe(value), hint=hint)]


def _text(key: Key, value: object) -> Checked:
    problems = _string(key, value)
    if not problems and isinstance(value, str):
        if value.startswith("-"):
            problems.append(_wrong(key, quote(value), "a value that does not begin with -"))
        elif any(ch.isspace() or not ch.isprintable() for ch in value):
            problems.append(_wrong(key, quote(value), "no spaces or control characters"))
    return value, problems


def _name(key: Key, value: object) -> Checked:
    problems = _string(key, value)
    if not problems and not NAME_PATTERN.fullmatch(str(value)):
        hint = "a name in the embedder's ssh_keys, never a path" if key.leaf == "key" else ""
        problems.append(_wrong(key, quote(str(value)), hint=hint))
    return value, problems


def _sshhost(key: Key, value: object) -> Checked:
    problems = _string(key, value)
    if not problems:
        try:
            split_target(str(value))
        except ValueError as error:
            problems.append(_wrong(key, quote(str(value)), hint=str(error)))
    return value, problems


def _path(key: Key, value: object, at: str = "") -> Checked:
    if isinstance(value, (bytes, os.PathLike)):
        value = os.fsdecode(value)
    hint = '"." is the workspace' if value == "" else ""
    problems = _string(key, value, at, "a path")
    if problems:
        return value, [problem._replace(hint=hint) for problem in problems]
    path = str(value)
    problem = _path_syntax(key, path, at)
    if problem is None and key.leaf in ("rw_paths", "ro_paths"):
        problem = _grant_syntax(key, path, at)
    if problem is None and key.name in ("ssh.path", "docker.tls_dir") and not path.startswith(("/", "~")):
        problem = _wrong(key, quote(path), "a path that begins with / or ~/", at=at)
    return path, [problem] if problem else []


def _path_syntax(key: Key, path: str, at: str) -> Problem | None:
    if "$" in path.replace("$$", ""):
        return _wrong(
            key, quote(path), "a path without variables", "names are not expanded; a literal dollar is $$", at
        )
    if path.startswith("~") and path != "~" and not path.startswith("~/"):
        return _wrong(
            key, quote(path), 'a path, "~" or "~/…"', "only the own home directory; a name: ./~…", at
        )
    raw = os.fsencode(path) if not _surrogates(path) else path.encode("utf-8", "surrogatepass")
    if len(raw) > PATH_MAX or any(len(part) > NAME_MAX for part in raw.split(b"/")):
        return _wrong(key, quote(path), f"at most {PATH_MAX} bytes, {NAME_MAX} a name", at=at)
    return None


def _surrogates(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return True
    return False


def _grant_syntax(key: Key, path: str, at: str) -> Problem | None:
    clean = lexical_path(path, NOWHERE, "/home/u")
    writes = key.leaf == "rw_paths"
    if clean == "/":
        hint = (
            'level = "danger-full-access" grants everything' if writes else 'read = "all" grants everything'
        )
        return _wrong(key, f"{quote(path)} (the whole file system)", "a path below /", hint, at)
    for top in _NEVER_GRANTED:
        below = top in ("/proc", "/run/vectora-jail") or (top == "/sys" and writes)
        if clean == top or (below and clean.startswith(top + "/")):
            return _wrong(
                key, f"{quote(path)} (the host's own {top})", "another path", "the jail has its own", at
            )
    return None


def _each(key: Key, value: object, check: Callable[[Key, object, str], Checked]) -> Checked:
    """Check a list, one by one; the problem of an element names its position from 0."""
    if not isinstance(value, (list, tuple)):
        hint = f"write [{quote(value)}]" if isinstance(value, str) else ""
        return value, [_wrong(key, describe(value), hint=hint)]
    if len(value) > LIST_MAX:
        return value, [_wrong(key, f"{len(value)} entries", f"at most {LIST_MAX}")]
    settled, problems = [], []
    for index, item in enumerate(value):
        one, found = check(key, item, f"[{index}]")
        settled.append(one)
        problems += found
    return tuple(settled), problems


def _paths(key: Key, value: object) -> Checked:
    return _each(key, value, _path)


def _masks(key: Key, value: object) -> Checked:
    def check(key: Key, item: object, at: str) -> Checked:
        problems = _string(key, item, at, "a gitignore pattern")
        if not problems and _DOLLAR_NAME.search(str(item)):
            hint = r"names are not expanded; a literal dollar is \$"
            problems.append(_wrong(key, quote(str(item)), "a pattern without variables", hint, at))
        if not problems:
            from vectora_jail.masks import normalise

            try:
                normalise(str(item), workspace=b"/ws", home=b"/home/u", floor=key.leaf == "mask_floor")
            except (ValueError, UnicodeError) as error:
                problems.append(
                    _wrong(key, quote(str(item)), "a gitignore pattern that can match", str(error), at)
                )
        return item, problems

    return _each(key, value, check)


def _globs(key: Key, value: object) -> Checked:
    return _each(key, value, lambda key, item, at: (item, _string(key, item, at)))


def _names(key: Key, value: object) -> Checked:
    def check(key: Key, item: object, at: str) -> Checked:
        problems = _string(key, item, at, "a name")
        name = str(item)
        if not problems and not (
            NAME_PATTERN.fullmatch(name) or (key.name == "seccomp_allow" and name == "*")
        ):
            problems.append(_wrong(key, quote(name), "a name", at=at))
        return item, problems

    return _each(key, value, check)


def _choices(key: Key, value: object) -> Checked:
    def check(key: Key, item: object, at: str) -> Checked:
        if isinstance(item, str) and item in key.choices:
            return item, []
        hint = suggestion(item, key.choices) if isinstance(item, str) else ""
        names = " or ".join(quote(choice) for choice in key.choices)
        return item, [_wrong(key, describe(item), names, hint, at)]

    return _each(key, value, check)


def _env_name(key: Key, item: object, at: str) -> Checked:
    problems = _string(key, item, at, "the name of a variable")
    name = str(item)
    if not problems and not _ENV_NAME.fullmatch(name):
        problems.append(_wrong(key, quote(name), "the name of a variable", "no spaces, no =", at))
    if not problems and name.startswith(_RESERVED_ENV):
        problems.append(_wrong(key, quote(name), "another name", f"{_RESERVED_ENV}* is set by the jail", at))
    return item, problems


def _envnames(key: Key, value: object) -> Checked:
    return _each(key, value, _env_name)


def _table(key: Key, value: object) -> tuple[dict[str, str], list[Problem]] | None:
    """Return the entries that are strings, and a problem for each that is not; None when it is no table."""
    if not isinstance(value, Mapping):
        return None
    entries, problems = {}, []
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            problems.append(_wrong(key, describe(text), "a string", at=f".{name}"))
        elif "\0" in text:
            problems.append(_wrong(key, f"{quote(text)} with a NUL", "a string without NUL", at=f".{name}"))
        else:
            entries[name] = text
    return entries, problems


def _vars(key: Key, value: object) -> Checked:
    table = _table(key, value)
    if table is None:
        return value, [_wrong(key, describe(value))]
    entries, problems = table
    for name in entries:
        problems += _env_name(key, name, f".{name}")[1]
    return FrozenMap(entries), problems


def _hosts(key: Key, value: object) -> Checked:
    from vectora_jail.netrules import RuleError, parse_pin

    table = _table(key, value)
    if table is None:
        return value, [_wrong(key, describe(value))]
    entries, problems = table
    for name, address in entries.items():
        try:
            parse_pin(name, address)
        except RuleError as error:
            hint = "; ".join(part for part in (error.problem, error.hint) if part)
            problems.append(_wrong(key, quote(address), "a name and its address", hint, f".{name}"))
    return FrozenMap(entries), problems


def _rules(key: Key, value: object) -> Checked:
    from vectora_jail.netrules import RuleError, parse_rule

    def check(key: Key, item: object, at: str) -> Checked:
        problems = _string(key, item, at, "a rule")
        if not problems:
            try:
                parse_rule(item, deny=key.leaf == "deny")
            except RuleError as error:
                hint = "; ".join(part for part in (error.problem, error.hint) if part)
                problems.append(
                    _wrong(
                        key, quote(str(item)), '"host", "*.domain", an address or a cidr, ":port"', hint, at
                    )
                )
        return item, problems

    return _each(key, value, check)


_CHECKERS: dict[str, Callable[[Key, object], Checked]] = {
    "bool": _bool,
    "int": _number,
    "number": _number,
    "choice": _choice,
    "choices": _choices,
    "text": _text,
    "name": _name,
    "names": _names,
    "globs": _globs,
    "sshhost": _sshhost,
    "path": _path,
    "paths": _paths,
    "masks": _masks,
    "envnames": _envnames,
    "vars": _vars,
    "rules": _rules,
    "hosts": _hosts,
}
