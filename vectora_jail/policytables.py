"""The tables of `[sandbox]` and the `Ceiling`, as frozen values that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vectora_jail.errors import PolicyError, Problem
from vectora_jail.policykeys import CEILING_KEYS, KEYS, Key
from vectora_jail.policytext import FrozenMap, split_target
from vectora_jail.policyvalues import check_value

__all__ = [
    "DEFAULT_MASK",
    "Ceiling",
    "DockerPolicy",
    "EnvPolicy",
    "Limits",
    "ModalPolicy",
    "Network",
    "SeccompPolicy",
    "SshPolicy",
    "settle",
]

DEFAULT_MASK = (".env", "**/*.pem", "**/.ssh/**", "**/.aws/**")


def settle(value: object, keys: tuple[Key, ...]) -> list[Problem]:
    """Check the fields of a frozen value and store their settled form; unset ones (None, "") stay."""
    problems: list[Problem] = []
    for key in keys:
        given = getattr(value, key.attr)
        if given is None or (given == "" and key.attr in _UNSET):
            continue
        settled, found = check_value(key, given)
        problems += found
        if not found:
            object.__setattr__(value, key.attr, settled)
    return problems


# Fields whose empty string means "not set"; everywhere else an empty string is a mistake.
_UNSET = frozenset(
    {"preset", "image", "image_id", "host", "tls_dir", "volume", "user", "path", "key", "app", "environment"}
    | {"gpu", "region"}
)


def _check_table(value: object, table: str) -> None:
    problems = settle(value, tuple(key for key in KEYS if key.table == table))
    if problems:
        raise PolicyError(problems=problems)


@dataclass(frozen=True, slots=True)
class EnvPolicy:
    """`[sandbox.env]`: what the cleaned environment gets back."""

    pass_: tuple[str, ...] = ()
    """Names or globs taken over from the backend's environment (`pass` in the file)."""
    set: Mapping[str, str] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        _check_table(self, "env")


@dataclass(frozen=True, slots=True)
class Network:
    """`[sandbox.network]`."""

    mode: str = "none"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    hosts: Mapping[str, str] = field(default_factory=FrozenMap)
    strict_sni: bool = True
    unix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_table(self, "network")


@dataclass(frozen=True, slots=True)
class Limits:
    """`[sandbox.limits]` as asked for; `Policy.limit_values` has the numbers that hold."""

    preset: str = ""
    """`""`: the level's (conservative under lockdown)."""
    memory_mb: int | None = None
    pids: int | None = None
    disk_mb: int | None = None
    cpu_s: int | None = None
    wall_s: int | None = None
    cpus: float | None = None

    def __post_init__(self) -> None:
        _check_table(self, "limits")


@dataclass(frozen=True, slots=True)
class SeccompPolicy:
    """`[sandbox.seccomp]`: changes of the built-in deny list, by system call name."""

    deny: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_table(self, "seccomp")


@dataclass(frozen=True, slots=True)
class DockerPolicy:
    """`[sandbox.docker]`."""

    image: str = "python:3.13-slim"
    pull: str = "never"
    host: str = ""
    tls_dir: str = ""
    helper: bool = False
    seccomp: str = "default"
    volume: str = ""

    def __post_init__(self) -> None:
        _check_table(self, "docker")


@dataclass(frozen=True, slots=True)
class SshPolicy:
    """`[sandbox.ssh]`."""

    host: str = ""
    port: int | None = None
    user: str = ""
    path: str = ""
    key: str = ""
    sync: str = "none"
    isolation: str = "auto"
    keepalive_s: int = 15

    def __post_init__(self) -> None:
        _check_table(self, "ssh")

    @property
    def target(self) -> tuple[str, str, int]:
        """Return (user, host, port) from `host`, `user` and `port` together; `""` for the default user."""
        if not self.host:
            return self.user, "", self.port or 22
        user, host, port = split_target(self.host)
        return user or self.user, host, port or self.port or 22


@dataclass(frozen=True, slots=True)
class ModalPolicy:
    """`[sandbox.modal]`."""

    app: str = ""
    environment: str = ""
    image: str = ""
    image_id: str = ""
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    cpu: float | None = None
    memory_mb: int | None = None
    gpu: str = ""
    region: str = ""
    timeout_s: int | None = None
    idle_timeout_s: int | None = None
    volume: str = ""
    secrets: tuple[str, ...] = ()
    sync: str = "none"

    def __post_init__(self) -> None:
        _check_table(self, "modal")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a policy *file* may ask for at most; the backend or the user writes it, never the repository.

    Lists of names and addresses take shell globs (`"*"`: any).
    """

    backends: tuple[str, ...] = ("local",)
    remote_hosts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    outside_paths: tuple[str, ...] = ()
    outside_ro_paths: tuple[str, ...] = ()
    level: str = "workspace-write"
    network: str = "allowlist"
    private_addresses: bool = False
    unix_sockets: tuple[str, ...] = ()
    seccomp_allow: tuple[str, ...] = ()
    gpu: bool = True
    env_pass: tuple[str, ...] = ()
    mask_floor: tuple[str, ...] = DEFAULT_MASK
    sensitive_exceptions: tuple[str, ...] = ()
    git: str = "read-only"
    limits: str = "generous"
    weak_isolation: bool = False
    unsandboxed: bool = False
    docker_hosts: tuple[str, ...] = ()
    docker_helper: bool = False
    docker_seccomp: str = "default"
    docker_volumes: tuple[str, ...] = ()
    ssh_isolation: str = "auto"
    modal_apps: tuple[str, ...] = ()
    modal_volumes: tuple[str, ...] = ()
    modal_secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = settle(self, CEILING_KEYS)
        if problems:
            raise PolicyError(
                "the ceiling is wrong: " + "\n".join(str(problem) for problem in problems), problems=problems
            )
