"""Text made of the key tables: the reference of the documentation, and what `vectora-jail init` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vectora_jail.policy import HARMLESS_ENV, LIMIT_PRESETS, Ceiling, LimitValues, Policy
from vectora_jail.policykeys import CEILING_KEYS, FLAT_ALIASES, KEYS, TABLES, Key

__all__ = ["default_of", "init_text", "reference"]

_COMMENTED = {
    "limits.memory_mb": "2048",
    "limits.pids": "256",
    "limits.disk_mb": "4096",
    "limits.cpu_s": "300",
    "limits.wall_s": "600",
    "limits.cpus": "2",
    "limits.preset": '"moderate"',
    "network.hosts": '{ "mirror.example" = "93.184.216.34" }',
    "env.set": '{ PYTHONDONTWRITEBYTECODE = "1" }',
}
"""Examples in `init` for keys that have no default of their own."""

_ALWAYS = frozenset({"enabled", "backend", "level", "rw_paths"})

_BACKEND_TABLES = frozenset({"docker", "ssh", "modal"})


def default_of(key: Key) -> Any:
    """Return the default of a policy key, None when there is none."""
    policy = Policy()
    owner = getattr(policy, key.table) if key.table else policy
    value = getattr(owner, key.attr)
    return None if value == "" else value


def toml_value(value: Any) -> str:
    """Return a value of a policy as TOML."""
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_value(name)} = {toml_value(text)}" for name, text in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return str(value)


def init_text() -> str:
    """Return a `[sandbox]` section: on, with every key of the local backend shown and explained."""
    lines = ["[sandbox]"]
    for table in ("", *(name for name in TABLES if name not in _BACKEND_TABLES)):
        if table:
            lines += ["", f"# [sandbox.{table}]"]
        for key in KEYS:
            if key.table == table:
                lines += _init_lines(key)
    return "\n".join(lines) + "\n"


def _init_lines(key: Key) -> Iterator[str]:
    choices = f" ({' | '.join(key.choices)})" if key.choices else ""
    consent = f" [ceiling: {key.ceiling}]" if key.ceiling else ""
    yield f"# {key.doc}{choices}{consent}"
    default = default_of(key)
    value = _COMMENTED.get(key.name) or toml_value(default)
    yield f"{'' if key.name in _ALWAYS else '# '}{key.leaf} = {value}"


def reference() -> str:
    """Return the policy reference as Markdown."""
    lines = [
        "# Policy reference",
        "",
        "Made from the key tables of `vectora_jail.policykeys`; do not edit.",
        "",
        "A key is free to ask for, or bounded by a field of the ceiling that the backend or the user",
        "gives. What exceeds it is refused, and the message names the field.",
    ]
    for table in ("", *TABLES):
        lines += ["", f"## [sandbox{'.' * bool(table)}{table}]", ""]
        lines += ["| key | takes | default | ceiling | |", "|---|---|---|---|---|"]
        for key in KEYS:
            if key.table == table:
                default = default_of(key)
                shown = f"`{toml_value(default)}`" if default is not None else "–"
                consent = f"`{key.ceiling}`" if key.ceiling else "free"
                lines.append(
                    f"| `{key.leaf}` | {_cell(key.expected)} | {shown} | {consent} | {_cell(key.doc)} |"
                )
    flat = ", ".join(
        f"`{alias}` for `[sandbox.{name.replace('.', '] ')}`" for alias, name in FLAT_ALIASES.items()
    )
    harmless = ", ".join(f"`{name}`" for name in HARMLESS_ENV)
    lines += [
        "",
        f"Also accepted in `[sandbox]`: {flat}.",
        "",
        f"`pass` may take without consent: {harmless}.",
    ]
    lines += ["", "## Presets", "", *_presets()]
    lines += ["", "## Ceiling", "", "| field | takes | default | |", "|---|---|---|---|"]
    ceiling = Ceiling()
    for key in CEILING_KEYS:
        default = toml_value(getattr(ceiling, key.name))
        lines.append(f"| `{key.name}` | {_cell(key.expected)} | `{default}` | {_cell(key.doc)} |")
    return "\n".join(lines) + "\n"


def _presets() -> Iterator[str]:
    yield "| | " + " | ".join(f"`{name}`" for name in LimitValues._fields[:5]) + " |"
    yield "|---|---|---|---|---|---|"
    for name, values in LIMIT_PRESETS.items():
        yield f"| {name} | " + " | ".join(str(value or "none") for value in values[:5]) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
