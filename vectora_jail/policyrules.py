"""What a whole policy must fulfil: no contradiction in itself, and nothing beyond the consents of a ceiling.

Pure. Paths are compared as written (`lexical_path`); what symlinks make of them is asked again with
`path_consented` when the plan has resolved them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vectora_jail.errors import Problem
from vectora_jail.policykeys import GIT_LEVELS, ISOLATIONS, LEVELS, NETWORK_MODES, PRESETS
from vectora_jail.policytext import NOWHERE, lexical_path, quote, split_target, unescape_path

if TYPE_CHECKING:
    from vectora_jail.policy import Ceiling, Policy

__all__ = ["contradictions", "exceeds", "is_below", "path_consented", "resolved_excess"]


def is_below(path: str, top: str) -> bool:
    """Return whether an absolute, normalised `path` is `top` or inside it."""
    return path == top or path.startswith(top.rstrip("/") + "/")


def path_consented(path: str, consented: Iterable[str], *, workspace: str, home: str) -> bool:
    """Return whether an absolute path lies inside the workspace or inside one of the ceiling's paths."""
    if is_below(path, workspace):
        return True
    return any(is_below(path, lexical_path(item, workspace, home)) for item in consented)


def contradictions(policy: Policy) -> list[Problem]:
    """Return what is wrong with the combination of valid values."""
    return [*_path_conflicts(policy), *_backend_conflicts(policy), *_lockdown_conflicts(policy)]


def _path_conflicts(policy: Policy) -> Iterator[Problem]:
    readable = {posixpath.normpath(unescape_path(path)): path for path in policy.ro_paths}
    for index, path in enumerate(policy.rw_paths):
        clean = posixpath.normpath(unescape_path(path))
        if clean in readable:
            yield Problem(
                f"rw_paths[{index}]",
                found=f"{quote(path)}, which is also in ro_paths",
                expected="each path in one of the two lists",
                hint="the deepest path decides, the same path cannot"
                + (", rw_paths = [] grants none" * (clean == ".")),
            )
    for name in policy.env.set:
        if name in policy.env.pass_:
            yield Problem(
                f"env.set.{name}", found="a name that is also in pass", expected="each name in one of the two"
            )


def _backend_conflicts(policy: Policy) -> Iterator[Problem]:
    ssh, modal, docker = policy.ssh, policy.modal, policy.docker
    if policy.backend == "ssh" and not ssh.host:
        yield Problem("ssh.host", found="nothing", expected='"[user@]host[:port]", because backend = "ssh"')
    user, _, port = split_target(ssh.host) if ssh.host else ("", "", 0)
    if user and ssh.user and user != ssh.user:
        yield Problem("ssh.user", found=quote(ssh.user), expected=f"{quote(user)}, as in ssh.host")
    if port and ssh.port and port != ssh.port:
        yield Problem("ssh.port", found=str(ssh.port), expected=f"{port}, as in ssh.host")
    if modal.image and modal.image_id:
        yield Problem("modal.image_id", found="both image and image_id", expected="one of the two")
    if modal.gpu and policy.no_gpu:
        yield Problem("modal.gpu", found=quote(modal.gpu), expected="no gpu, because no_gpu = true")
    if docker.tls_dir and not docker.host:
        yield Problem("docker.tls_dir", found=quote(docker.tls_dir), expected="docker.host beside it")


def _lockdown_conflicts(policy: Policy) -> Iterator[Problem]:
    if not policy.lockdown:
        return
    hint = "lockdown refuses every ambiguity"
    if not policy.enabled:
        yield Problem("enabled", found="false", expected="true, because lockdown = true", hint=hint)
    refused = (
        ("level", policy.level == "danger-full-access", quote(policy.level)),
        ("network.mode", policy.network.mode == "host", '"host"'),
        ("network.unix", bool(policy.network.unix), "host sockets"),
        ("limits.preset", policy.preset == "unlimited", '"unlimited"'),
        ("seccomp.allow", bool(policy.seccomp.allow), "an exception from the deny list"),
        ("protect_git", policy.protect_git != "read-only", quote(policy.protect_git)),
        ("docker.seccomp", policy.docker.seccomp != "default", quote(policy.docker.seccomp)),
        ("ssh.isolation", policy.ssh.isolation == "host", '"host"'),
        ("lockdown", bool(policy.sensitive_exceptions), "true with sensitive_exceptions in the ceiling"),
    )
    for key, is_refused, found in refused:
        if is_refused:
            yield Problem(key, found=found, expected="none of it under lockdown", hint=hint)


def exceeds(policy: Policy, ceiling: Ceiling, *, workspace: str = "", home: str = "") -> list[Problem]:
    """Return a problem for everything that the policy asks for beyond the ceiling, with the consent it needs.

    Args:
        policy: A valid policy.
        ceiling: The consents.
        workspace: Absolute path; without it only relative paths can be told to lie inside.
        home: What `~` stands for; without it the backend's own home directory.
    """
    if not home:
        import os.path

        home = os.path.expanduser("~")
    return list(_Excess(policy, ceiling, workspace or NOWHERE, home).all())


def resolved_excess(
    ceiling: Ceiling,
    grants: Iterable[tuple[str, bytes, bytes]],
    *,
    workspace: bytes,
    home: bytes,
    real: Mapping[bytes, bytes] | None = None,
) -> list[Problem]:
    """Return a problem for every grant that leaves the consented places once its links are followed.

    Args:
        ceiling: The consents.
        grants: (key, as given, without links), the key being `rw_paths`, `ro_paths` or `network.unix`.
        workspace: Absolute path without links.
        home: What `~` stands for in the ceiling.
        real: Where the links of a consented path lead, for those that have any.
    """
    import os

    top, start = os.fsdecode(workspace), os.fsdecode(home)

    def places(items: Iterable[str]) -> list[str]:
        clean = [lexical_path(item, top, start) for item in items]
        return [os.fsdecode((real or {}).get(os.fsencode(item), os.fsencode(item))) for item in clean]

    write = places(ceiling.outside_paths)
    consents = {
        "rw_paths": (write, "outside_paths"),
        "ro_paths": (write + places(ceiling.outside_ro_paths), "outside_paths"),
        "network.unix": (places(ceiling.unix_sockets), "unix_sockets"),
    }
    problems = []
    for key, given, path in grants:
        consented, field = consents[key]
        clean = posixpath.normpath(os.fsdecode(path))
        inside = is_below(clean, top) and key != "network.unix"
        if not inside and not any(
            clean == item if key == "network.unix" else is_below(clean, item) for item in consented
        ):
            problems.append(
                Problem(
                    key,
                    found=f"{quote(os.fsdecode(given))}, which is {quote(clean)}",
                    expected="no host socket" if key == "network.unix" else "a path inside the workspace",
                    hint=f"the ceiling's `{field}` does not consent",
                    ceiling=field,
                )
            )
    return problems


class _Excess:
    """One comparison of a policy with a ceiling."""

    def __init__(self, policy: Policy, ceiling: Ceiling, workspace: str, home: str) -> None:
        self.policy = policy
        self.ceiling = ceiling
        self.workspace = lexical_path(workspace, "/", home)
        self.home = home

    def all(self) -> Iterator[Problem]:
        policy = self.policy
        yield from self._ordered("level", policy.level, LEVELS, "level")
        yield from self._ordered("protect_git", policy.protect_git, GIT_LEVELS, "git")
        yield from self._ordered("ssh.isolation", policy.ssh.isolation, ISOLATIONS, "ssh_isolation")
        yield from self._ordered(
            "docker.seccomp", policy.docker.seccomp, ("default", "unconfined"), "docker_seccomp"
        )
        danger = "danger-full-access"
        if not policy.level == self.ceiling.level == danger:  # that consent has all of this in it
            yield from self._ordered("network.mode", policy.network.mode, NETWORK_MODES, "network")
            yield from self._paths()
            yield from self._limits()
        yield from self._addresses()
        yield from self._flags()
        yield from self._listed()
        yield from self._backends()

    def _missing(self, key: str, found: str, expected: str, field: str, consent: str = "") -> Problem:
        consent = consent or field
        hint = f"the ceiling's `{field}` does not consent" + (
            f"; it needs {consent}" if consent != field else ""
        )
        return Problem(key, found=found, expected=expected, hint=hint, ceiling=field)

    def _ordered(self, key: str, value: str, order: tuple[str, ...], field: str) -> Iterator[Problem]:
        bound = getattr(self.ceiling, field)
        if order.index(value) > order.index(bound):
            yield self._missing(
                key, quote(value), f"at most {quote(bound)}", field, f"{field} = {quote(value)}"
            )

    def _paths(self) -> Iterator[Problem]:
        policy, ceiling = self.policy, self.ceiling
        readable = (*ceiling.outside_paths, *ceiling.outside_ro_paths)
        groups = (
            ("rw_paths", policy.write_paths, ceiling.outside_paths, "outside_paths"),
            ("rw_paths", policy.rw_paths if not policy.write_paths else (), readable, "outside_paths"),
            ("ro_paths", policy.ro_paths, readable, "outside_paths"),
        )
        for key, paths, consented, field in groups:
            for index, path in enumerate(paths):
                clean = lexical_path(path, self.workspace, self.home)
                if not path_consented(clean, consented, workspace=self.workspace, home=self.home):
                    shown = (
                        quote(path)
                        if path == clean or clean.startswith(NOWHERE[:2])
                        else f"{quote(path)} ({clean})"
                    )
                    yield self._missing(f"{key}[{index}]", shown, "a path inside the workspace", field)
        if policy.read == "all" and "/" not in readable:
            yield self._missing("read", '"all"', '"restricted"', "outside_paths", '"/" in it')
        sockets = {lexical_path(item, self.workspace, self.home) for item in ceiling.unix_sockets}
        for index, path in enumerate(policy.network.unix):
            if lexical_path(path, self.workspace, self.home) not in sockets:
                yield self._missing(f"network.unix[{index}]", quote(path), "no host socket", "unix_sockets")

    def _limits(self) -> Iterator[Problem]:
        from vectora_jail.policy import LIMIT_PRESETS

        bound = LIMIT_PRESETS[self.ceiling.limits]
        if PRESETS.index(self.policy.preset) > PRESETS.index(self.ceiling.limits):
            yield from self._ordered("limits.preset", self.policy.preset, PRESETS, "limits")
        for name, most in zip(bound._fields, bound, strict=True):
            asked = getattr(self.policy.limits, name)
            if most and asked is not None and asked > most:
                yield self._missing(f"limits.{name}", str(asked), f"at most {most}", "limits")
        memory = self.policy.modal.memory_mb
        if bound.memory_mb and memory is not None and memory > bound.memory_mb:
            yield self._missing("modal.memory_mb", str(memory), f"at most {bound.memory_mb}", "limits")

    def _addresses(self) -> Iterator[Problem]:
        network = self.policy.network
        if self.ceiling.private_addresses or not (network.allow or network.hosts):
            return
        from vectora_jail.netnames import classify_address
        from vectora_jail.netrules import parse_pin, parse_rule

        for index, text in enumerate(network.allow):
            if parse_rule(text).needs_private:
                yield self._missing(
                    f"network.allow[{index}]", quote(text), "a public address", "private_addresses"
                )
        for name, address in network.hosts.items():
            if classify_address(parse_pin(name, address)[1]) != "public":
                yield self._missing(
                    f"network.hosts.{name}", quote(address), "a public address", "private_addresses"
                )

    def _flags(self) -> Iterator[Problem]:
        policy, ceiling = self.policy, self.ceiling
        if not policy.no_gpu and not ceiling.gpu:
            yield self._missing("no_gpu", "false", "true", "gpu", "gpu = true")
        if policy.modal.gpu and not ceiling.gpu:
            yield self._missing("modal.gpu", quote(policy.modal.gpu), "no gpu", "gpu", "gpu = true")
        if policy.docker.helper and not ceiling.docker_helper:
            yield self._missing("docker.helper", "true", "false", "docker_helper", "docker_helper = true")

    def _listed(self) -> Iterator[Problem]:
        from vectora_jail.policy import HARMLESS_ENV

        policy, ceiling = self.policy, self.ceiling
        for index, name in enumerate(policy.env.pass_):
            if name not in HARMLESS_ENV and not _covered(name, ceiling.env_pass):
                yield self._missing(f"env.pass[{index}]", quote(name), "a harmless name", "env_pass")
        for index, name in enumerate(policy.seccomp.allow):
            if not _matches(name, ceiling.seccomp_allow):
                yield self._missing(f"seccomp.allow[{index}]", quote(name), "nothing", "seccomp_allow")
        for index, name in enumerate(policy.modal.secrets):
            if not _matches(name, ceiling.modal_secrets):
                yield self._missing(f"modal.secrets[{index}]", quote(name), "nothing", "modal_secrets")
        modal = policy.modal
        app = f"{modal.environment}/{modal.app}" if modal.environment else modal.app
        singles = (
            ("docker.host", policy.docker.host, ceiling.docker_hosts, "docker_hosts"),
            ("docker.volume", policy.docker.volume, ceiling.docker_volumes, "docker_volumes"),
            ("modal.app" if modal.app else "modal.environment", app, ceiling.modal_apps, "modal_apps"),
            ("modal.volume", modal.volume, ceiling.modal_volumes, "modal_volumes"),
        )
        for key, value, allowed, field in singles:
            if value and not _matches(value, allowed):
                yield self._missing(key, quote(value), _one_of(allowed), field)

    def _backends(self) -> Iterator[Problem]:
        from vectora_jail.policy import DockerPolicy

        policy, ceiling = self.policy, self.ceiling
        if policy.backend not in ceiling.backends:
            yield self._missing("backend", quote(policy.backend), _one_of(ceiling.backends), "backends")
        docker = policy.docker
        named = policy.backend == "docker" or docker.image != DockerPolicy().image
        if named and ceiling.images and not _matches(docker.image, ceiling.images):
            yield self._missing("docker.image", quote(docker.image), _one_of(ceiling.images), "images")
        if docker.pull != "never" and not _matches(docker.image, ceiling.images):
            yield self._missing(
                "docker.pull", quote(docker.pull), '"never"', "images", f"{quote(docker.image)} in it"
            )
        if (policy.ssh.host or policy.ssh.user or policy.ssh.port) and not _target_listed(
            policy.ssh.target, ceiling.remote_hosts
        ):
            key = "ssh.host" if policy.ssh.host else "ssh.user" if policy.ssh.user else "ssh.port"
            user, host, port = policy.ssh.target
            shown = f"{user}@{host}:{port}" if user else f"{host}:{port}"
            yield self._missing(key, quote(shown), _one_of(ceiling.remote_hosts), "remote_hosts")


def _one_of(allowed: tuple[str, ...]) -> str:
    return " or ".join(quote(item) for item in allowed) if allowed else "nothing"


def _matches(value: str, allowed: Iterable[str]) -> bool:
    return any(value == item or fnmatchcase(value, item) for item in allowed)


def _covered(asked: str, allowed: Iterable[str]) -> bool:
    """Return whether every name that the glob `asked` matches is matched by one entry of `allowed`, too."""
    fixed = asked
    for special in "*?[":
        fixed = fixed.partition(special)[0]
    if fixed == asked:
        return _matches(asked, allowed)
    # of two globs only the plain case is decidable at a glance: the same text, or a longer prefix
    return any(
        item == asked
        or (item.endswith("*") and not set("*?[") & set(item[:-1]) and fixed.startswith(item[:-1]))
        for item in allowed
    )


def _target_listed(target: tuple[str, str, int], allowed: Iterable[str]) -> bool:
    """Return whether an ssh target is listed (an entry without a user: the default one; no port: 22)."""
    user, host, port = target
    for entry in allowed:
        if entry == "*":
            return True
        name, _, rest = entry.rpartition("@")
        if rest.startswith("["):
            where, _, tail = rest[1:].partition("]")
            number = tail.removeprefix(":") or "22"
        else:
            where, _, number = rest.partition(":")
            number = number or "22"
        if (
            fnmatchcase(user, name)
            and fnmatchcase(host.lower(), where.lower())
            and fnmatchcase(str(port), number)
        ):
            return True
    return False
