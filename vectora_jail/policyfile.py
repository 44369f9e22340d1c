"""`vectora.toml` → `Policy`: strict keys, exact types, fail closed; and the user's own file → `Ceiling`.

The result is `enabled=False` (no file, no `sandbox` in it, `enabled = false`), or valid, or `refused=True`
with every problem. A file that cannot be read is refused, and so is one that speaks of a sandbox and does not
parse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vectora_jail.errors import PolicyError, Problem
from vectora_jail.policy import (
    Ceiling,
    DockerPolicy,
    EnvPolicy,
    Limits,
    ModalPolicy,
    Network,
    Policy,
    SeccompPolicy,
    SshPolicy,
)
from vectora_jail.policykeys import (
    CEILING_KEYS,
    FLAT_ALIASES,
    ISOLATIONS,
    KEYS,
    LEVELS,
    PRESETS,
    TABLES,
    key_named,
)
from vectora_jail.policyrules import exceeds
from vectora_jail.policysource import MAX_FILE, BrokenError, file_identity, parse_toml, read_file
from vectora_jail.policytext import describe, quote, suggestion
from vectora_jail.tomllines import KeyPath, Scan, near_miss

if TYPE_CHECKING:
    from typing import TypeAlias

    PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

__all__ = [
    "FILE_NAME",
    "MAX_FILE",
    "default_ceiling_path",
    "file_identity",
    "load_ceiling",
    "load_policy",
    "parse_policy",
    "parse_policy_text",
]

FILE_NAME = "vectora.toml"


_CLASSES: dict[str, type] = {
    "env": EnvPolicy,
    "network": Network,
    "limits": Limits,
    "seccomp": SeccompPolicy,
    "docker": DockerPolicy,
    "ssh": SshPolicy,
    "modal": ModalPolicy,
}


def parse_policy(
    path: PathLike, *, ceiling: Ceiling | None = None, workspace: PathLike | None = None
) -> Policy:
    """Read a policy file; never raises.

    Args:
        path: The file.
        ceiling: The consents; None: the defaults of `Ceiling`.
        workspace: The directory that it governs; None: the one that holds the file.
    """
    source = ""
    try:
        name = os.fsdecode(path)
        source = name
        root = os.fsdecode(workspace) if workspace is not None else os.path.dirname(os.path.abspath(name))
        read = read_file(name, root)
        if read is None:
            return Policy.disabled("no_vectora_toml", name, ceiling or Ceiling())
        policy = parse_policy_text(read.data, source=name, ceiling=ceiling, workspace=os.path.abspath(root))
        return replace(policy, identity=read.identity)
    except PolicyError as error:
        return Policy.refuse(error.problems, source)
    except Exception as error:  # noqa: BLE001 - fail closed
        return Policy.refuse((_unreadable(source, error),), source)


def load_policy(workspace: PathLike, *, ceiling: Ceiling | None = None) -> Policy:
    """Read the policy of a workspace; it may be disabled.

    Raises:
        PolicyError: the policy is refused; `problems` says why.
    """
    policy = parse_policy(
        os.path.join(os.fsdecode(workspace), FILE_NAME), ceiling=ceiling, workspace=workspace
    )
    if policy.refused:
        raise PolicyError(problems=policy.problems)
    return policy


def parse_policy_text(
    text: str | bytes, *, source: str = FILE_NAME, ceiling: Ceiling | None = None, workspace: str = ""
) -> Policy:
    """Read the text of a policy file; never raises. Without `workspace` only relative paths lie inside it."""
    bounds = ceiling or Ceiling()
    try:
        try:
            document, places = parse_toml(text)
        except BrokenError as broken:
            if not broken.sandbox:
                return Policy.disabled("no_sandbox_table", source, bounds)
            problem = Problem("", broken.line, broken.found, broken.expected, broken.hint, source)
            return Policy.refuse((problem,), source)
        reader = _Reader(places, source, bounds, workspace)
        return reader.policy(document)
    except PolicyError as error:
        return Policy.refuse(error.problems, source)
    except Exception as error:  # noqa: BLE001 - fail closed
        return Policy.refuse((_unreadable(source, error),), source)


def default_ceiling_path() -> str:
    """Return the path of the user's own ceiling file."""
    return os.path.join(os.path.expanduser("~"), ".config", "vectora-jail", "ceiling.toml")


def load_ceiling(path: PathLike | None = None) -> Ceiling:
    """Read a ceiling file: the fields of `Ceiling` as top-level keys. It may be a symlink to anywhere.

    Args:
        path: The file; None: `~/.config/vectora-jail/ceiling.toml`, or the defaults where there is none.

    Raises:
        PolicyError: it cannot be read, others may write to it, or a key is wrong.
    """
    name = default_ceiling_path() if path is None else os.fsdecode(path)
    read = read_file(name, None)
    if read is None:
        if path is None:
            return Ceiling()
        raise PolicyError(problems=[Problem("", found="no such file", expected="a ceiling file", file=name)])
    try:
        document, places = parse_toml(read.data)
    except BrokenError as broken:
        problem = Problem("", broken.line, broken.found, broken.expected, broken.hint, name)
        raise PolicyError(problems=[problem]) from None
    known = [key.name for key in CEILING_KEYS]
    problems = [
        Problem(
            key, places.line((key,)), "an unknown key", "a field of the ceiling", suggestion(key, known), name
        )
        for key in document
        if key not in known
    ]
    try:
        ceiling = Ceiling(**{key: value for key, value in document.items() if key in known})
    except PolicyError as error:
        problems += [
            problem._replace(file=name, line=places.line(_path_of(problem.key))) for problem in error.problems
        ]
    if problems:
        raise PolicyError(problems=problems)
    return ceiling


def _path_of(key: str) -> KeyPath:
    """Return the path of a problem's key: `rw_paths[2]` → ("rw_paths", 2)."""
    path: list[str | int] = []
    for table in ("network.hosts.", "env.set."):  # what follows is one name, whatever dots it has
        if key.startswith(table):
            return (*table.split(".")[:2], key[len(table) :])
    for part in key.split("."):
        name, bracket, index = part.partition("[")
        path.append(name)
        if bracket:
            path.append(int(index.rstrip("]")))
    return tuple(path)


class _Reader:
    """Turns one parsed document into a policy, and gives every problem its place."""

    def __init__(self, places: Scan, source: str, ceiling: Ceiling, workspace: str) -> None:
        self.places = places
        self.source = source
        self.ceiling = ceiling
        self.workspace = workspace
        self.aliases: dict[str, str] = {}
        self.problems: list[Problem] = []

    def policy(self, document: Mapping[str, Any]) -> Policy:
        """Return the policy. Raises PolicyError with all problems."""
        for name in document:
            if near_miss(name):
                self._problem((name,), name, quote(name), '"sandbox"', "did you mean [sandbox]?")
        if "sandbox" not in document:
            self._raise()
            return Policy.disabled("no_sandbox_table", self.source, self.ceiling)
        table = document["sandbox"]
        if not isinstance(table, dict):
            hint = (
                "write [sandbox] with one pair of brackets" if isinstance(table, list) else "write [sandbox]"
            )
            self._problem(("sandbox",), "sandbox", describe(table), "one table", hint)
            self._raise()
        values = self._values(table)
        policy = self._build(values)
        self._raise()
        assert policy is not None  # noqa: S101 - without a problem there is a policy
        policy = self._narrow(policy, values)
        self.problems += map(self._placed, exceeds(policy, self.ceiling, workspace=self.workspace))
        self._raise()
        return policy

    def _values(self, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the known keys by table (`""` for the top), noting unknown and doubly given ones."""
        values: dict[str, dict[str, Any]] = {name: {} for name in ("", *TABLES)}
        for name, value in table.items():
            if name in TABLES:
                if not isinstance(value, dict):
                    self._problem(("sandbox", name), name, describe(value), f"a table [sandbox.{name}]")
                    continue
                for leaf, item in value.items():
                    self._take(values, f"{name}.{leaf}", item, ("sandbox", name, leaf))
            else:
                self._take(values, FLAT_ALIASES.get(name, name), value, ("sandbox", name))
                if name in FLAT_ALIASES:
                    self.aliases[FLAT_ALIASES[name]] = name
        return values

    def _take(self, values: dict[str, dict[str, Any]], name: str, value: Any, path: KeyPath) -> None:
        key = key_named(name)
        if key is None:
            group = name.rpartition(".")[0]
            known = [item.leaf for item in KEYS if item.table == group] + (
                [] if group else [*TABLES, *FLAT_ALIASES]
            )
            hint = suggestion(str(path[-1]), known) or _elsewhere(str(path[-1]))
            where = f"a key of [sandbox{'.' if group else ''}{group}]"
            self._problem(path, name, "an unknown key", where, hint)
        elif key.attr in values[key.table]:
            self._problem(path, name, f"the same setting as {path[-1]}", "one of the two spellings")
        else:
            values[key.table][key.attr] = value

    def _build(self, values: dict[str, dict[str, Any]]) -> Policy | None:
        tables: dict[str, Any] = {}
        broken = bool(self.problems)
        for name, kind in _CLASSES.items():
            if not values[name]:
                continue
            try:
                tables[name] = kind(**values[name])
            except PolicyError as error:
                self.problems += map(self._placed, error.problems)
                broken = True
        try:
            policy = Policy(**values[""], **tables, ceiling=self.ceiling, source=self.source)
        except PolicyError as error:
            found = [self._placed(item) for item in error.problems]
            # what contradicts a table that is broken itself may be no contradiction
            self.problems += [item for item in found if not broken or _path_of(item.key)[0] in values[""]]
            return None
        if not policy.enabled:
            return replace(policy, reason="sandbox_disabled_in_config")
        return policy

    def _narrow(self, policy: Policy, values: dict[str, dict[str, Any]]) -> Policy:
        """Lower what the file left open to the ceiling: a default asks for nothing, it cannot exceed it."""
        bounds = self.ceiling
        top, ssh = values[""], values["ssh"]
        if "level" not in top and _wider(policy.level, bounds.level, LEVELS):
            policy = replace(policy, level=bounds.level)
        if "preset" not in values["limits"] and _wider(policy.preset, bounds.limits, PRESETS):
            policy = replace(policy, limits=replace(policy.limits, preset=bounds.limits))
        if "isolation" not in ssh and _wider(policy.ssh.isolation, bounds.ssh_isolation, ISOLATIONS):
            policy = replace(policy, ssh=replace(policy.ssh, isolation=bounds.ssh_isolation))
        return policy

    def _problem(self, path: KeyPath, key: str, found: str, expected: str, hint: str = "") -> None:
        line = self.places.line(path)
        self.problems.append(Problem(key, line, found, expected, hint, self.source))

    def _placed(self, problem: Problem) -> Problem:
        """Return the problem with its file and line, its key as the file spells it."""
        key = problem.key
        bare = key.partition("[")[0]
        spelt = self.aliases.get(bare, bare)
        return problem._replace(
            key=spelt + key[len(bare) :],
            file=self.source,
            line=self.places.line(("sandbox", *_path_of(spelt + key[len(bare) :]))),
        )

    def _raise(self) -> None:
        if self.problems:
            raise PolicyError(problems=sorted(self.problems, key=lambda problem: problem.line))


def _wider(value: str, bound: str, order: tuple[str, ...]) -> bool:
    return order.index(value) > order.index(bound)


def _elsewhere(leaf: str) -> str:
    """Return where a key belongs that stands in the wrong table, `""` when there is no such key."""
    places = [f"[sandbox{'.' * bool(key.table)}{key.table}]" for key in KEYS if key.leaf == leaf]
    return f"it belongs to {' or '.join(places)}" if places else ""


def _unreadable(source: str, error: Exception) -> Problem:
    return Problem("", found=f"{type(error).__name__}: {error}", expected="a policy file", file=source)
