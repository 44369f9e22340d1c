"""What the user allows, as frozen values: `Policy`, its tables, and the `Ceiling` that bounds a file.

A policy made here is valid: a wrong value raises `PolicyError` with every problem. Paths stay as written;
they are resolved once, when the plan is made. Nothing here touches the file system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

from vectora_jail.errors import PolicyError, Problem, SandboxDisabled
from vectora_jail.policykeys import KEYS
from vectora_jail.policytables import (
    DEFAULT_MASK,
    Ceiling,
    DockerPolicy,
    EnvPolicy,
    Limits,
    ModalPolicy,
    Network,
    SeccompPolicy,
    SshPolicy,
    settle,
)
from vectora_jail.sensitive import SENSITIVE_HOME as SENSITIVE_PATHS

__all__ = [
    "DEFAULT_MASK",
    "HARMLESS_ENV",
    "LIMIT_PRESETS",
    "SENSITIVE_PATHS",
    "Ceiling",
    "DockerPolicy",
    "EnvPolicy",
    "LimitValues",
    "Limits",
    "MaskEntry",
    "ModalPolicy",
    "Network",
    "Policy",
    "Problem",
    "SeccompPolicy",
    "SshPolicy",
]

HARMLESS_ENV = ("CI", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "EDITOR", "VISUAL", "PAGER")
"""Names that `[sandbox.env] pass` may take without the ceiling's consent."""

_DIGEST_VERSION = 1


class LimitValues(NamedTuple):
    """The limits that hold in the end; 0 means that there is none."""

    memory_mb: int
    pids: int
    disk_mb: int
    cpu_s: int
    wall_s: int
    cpus: float = 0


LIMIT_PRESETS: Mapping[str, LimitValues] = {
    "conservative": LimitValues(512, 64, 1024, 60, 120),
    "moderate": LimitValues(2048, 256, 4096, 300, 600),
    "generous": LimitValues(8192, 1024, 16384, 0, 3600),
    "unlimited": LimitValues(0, 0, 0, 0, 0),
}

_OPT_IN = {
    "no_vectora_toml": "there is no vectora.toml; `vectora-jail init` writes one",
    "no_sandbox_table": "vectora.toml has no [sandbox] table",
    "sandbox_disabled_in_config": "vectora.toml says enabled = false",
}

_LEVEL_PRESET = {
    "read-only": "conservative",
    "workspace-write": "moderate",
    "danger-full-access": "unlimited",
}


class MaskEntry(NamedTuple):
    """One mask pattern without its `!`; a floor entry cannot be re-included by a later one."""

    pattern: str
    negate: bool = False
    floor: bool = False


# Both are recognised by identity: "the caller said nothing about the network".
_DEFAULT_NETWORK = Network()
_DANGER_NETWORK = Network(mode="host")


@dataclass(frozen=True, slots=True)
class Policy:
    """One workspace's policy; made by the caller it is enabled and bounded by nothing but its own rules.

    Raises:
        PolicyError: a value or a combination is wrong.
    """

    enabled: bool = True
    backend: str = "local"
    level: str = "workspace-write"
    read: str = "restricted"
    rw_paths: tuple[str, ...] = (".",)
    ro_paths: tuple[str, ...] = ()
    mask: tuple[str, ...] = DEFAULT_MASK
    mask_add: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    protect_git: str = "read-only"
    no_gpu: bool = True
    lockdown: bool = False
    idle_timeout_s: int = 300
    env: EnvPolicy = EnvPolicy()  # noqa: RUF009 - frozen
    network: Network = _DEFAULT_NETWORK
    """`mode` is what holds: "none" under lockdown; "host" at danger-full-access where nothing is said."""
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    seccomp: SeccompPolicy = SeccompPolicy()  # noqa: RUF009 - frozen
    docker: DockerPolicy = DockerPolicy()  # noqa: RUF009 - frozen
    ssh: SshPolicy = SshPolicy()  # noqa: RUF009 - frozen
    modal: ModalPolicy = ModalPolicy()  # noqa: RUF009 - frozen
    ceiling: Ceiling | None = None
    """The consents under which a file was read; None: the caller's own policy, which nothing bounds."""
    refused: bool = False
    """Nothing may run: every action raises PolicyError. Such a policy counts as enabled."""
    problems: tuple[Problem, ...] = ()
    source: str = field(default="", compare=False)
    """The file that it was read from."""
    reason: str = field(default="", compare=False)
    """Why it is not enabled: `no_vectora_toml`, `no_sandbox_table` or `sandbox_disabled_in_config`."""
    identity: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    """What `policyfile.file_identity` said of the file when it was read."""
    _digest: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.refused:
            return
        problems = [*_wrong_tables(self), *settle(self, tuple(key for key in KEYS if not key.table))]
        if not problems:
            self._settle_network()
            from vectora_jail.policyrules import contradictions

            problems = contradictions(self)
        if problems:
            raise PolicyError(problems=problems)
        if self.lockdown and self.network.mode != "none":
            object.__setattr__(self, "network", replace(self.network, mode="none"))

    def _settle_network(self) -> None:
        danger = self.level == "danger-full-access"
        if danger and self.network is _DEFAULT_NETWORK:
            object.__setattr__(self, "network", _DANGER_NETWORK)
        elif not danger and self.network is _DANGER_NETWORK:
            object.__setattr__(self, "network", _DEFAULT_NETWORK)

    @classmethod
    def disabled(cls, reason: str, source: str = "", ceiling: Ceiling | None = None) -> Policy:
        """Return the policy of a workspace that did not opt in; `with_(enabled=True)` enables it."""
        return cls(enabled=False, reason=reason, source=source, ceiling=ceiling)

    @classmethod
    def refuse(cls, problems: tuple[Problem, ...], source: str = "") -> Policy:
        """Return a policy under which nothing runs, because of `problems`."""
        return cls(enabled=True, refused=True, problems=problems, source=source)

    def with_(self, **changes: Any) -> Policy:
        """Return a copy with other values, checked again. Raises PolicyError."""
        return replace(self, **changes)

    def ensure_usable(self, workspace: str = "") -> Policy:
        """Return the policy itself when a jail may be started with it.

        Raises:
            PolicyError: it is refused.
            SandboxDisabled: the workspace did not opt in.
        """
        if self.refused:
            raise PolicyError(problems=self.problems)
        if not self.enabled:
            raise SandboxDisabled(workspace=workspace, code=self.reason, hint=_OPT_IN.get(self.reason, ""))
        return self

    @property
    def write_paths(self) -> tuple[str, ...]:
        """Return the paths that are granted for writing at this level (none at read-only)."""
        return () if self.level == "read-only" else self.rw_paths

    @property
    def read_paths(self) -> tuple[str, ...]:
        """Return the paths that are granted for reading only at this level."""
        return (*self.rw_paths, *self.ro_paths) if self.level == "read-only" else self.ro_paths

    @property
    def mask_entries(self) -> tuple[MaskEntry, ...]:
        """Return every mask in the order in which it counts: the ceiling's floor first, `!` taken off."""
        floor = self.ceiling.mask_floor if self.ceiling else ()
        own = (*self.mask, *self.mask_add)
        return (
            *(MaskEntry(pattern, floor=True) for pattern in floor),
            *(MaskEntry(pattern.removeprefix("!"), pattern.startswith("!")) for pattern in own),
        )

    @property
    def sensitive_exceptions(self) -> tuple[str, ...]:
        """Return the sensitive paths that the ceiling leaves open."""
        return self.ceiling.sensitive_exceptions if self.ceiling else ()

    @property
    def preset(self) -> str:
        """Return the name of the preset of limits that holds."""
        return self.limits.preset or ("conservative" if self.lockdown else _LEVEL_PRESET[self.level])

    @property
    def limit_values(self) -> LimitValues:
        """Return the limits that hold, presets and overrides together; 0 means none."""
        asked = {name: getattr(self.limits, name) for name in LimitValues._fields}
        return LIMIT_PRESETS[self.preset]._replace(**{k: v for k, v in asked.items() if v is not None})

    @property
    def digest(self) -> str:
        """Return a stable SHA-256 (hex) of everything that the policy says, whatever file it came from."""
        if not self._digest:
            import hashlib
            import json

            text = json.dumps([_DIGEST_VERSION, _plain(self)], sort_keys=True, separators=(",", ":"))
            object.__setattr__(self, "_digest", hashlib.sha256(text.encode()).hexdigest())
        return self._digest

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain data for JSON (what `digest` covers)."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _wrong_tables(policy: Policy) -> Iterator[Problem]:
    """Yield a problem for each table that is not of its class (`Policy(network={...})`)."""
    for name, kind in _TABLE_CLASSES.items():
        value = getattr(policy, name)
        if not isinstance(value, kind) and not (name == "ceiling" and value is None):
            yield Problem(
                name, found=f"a value of type {type(value).__name__}", expected=f"a {kind.__name__}"
            )


_TABLE_CLASSES: dict[str, type] = {
    "env": EnvPolicy,
    "network": Network,
    "limits": Limits,
    "seccomp": SeccompPolicy,
    "docker": DockerPolicy,
    "ssh": SshPolicy,
    "modal": ModalPolicy,
    "ceiling": Ceiling,
}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.compare}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
