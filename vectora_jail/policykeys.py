"""Every key of `[sandbox]` and every field of the ceiling, as data: what it takes, whose consent it needs.

The readers (`policyvalues`, `policyfile`), the reference and the text of `init` (`policydocs`) walk these
tables, so a key exists in one place only. Defaults are those of the classes in `policy.py`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BACKENDS",
    "CEILING_KEYS",
    "FLAT_ALIASES",
    "GIT_LEVELS",
    "ISOLATIONS",
    "KEYS",
    "LEVELS",
    "NETWORK_MODES",
    "PRESETS",
    "TABLES",
    "Key",
    "key_named",
]

# Each from the narrowest to the widest: a ceiling admits its own value and everything before it.
LEVELS = ("read-only", "workspace-write", "danger-full-access")
NETWORK_MODES = ("none", "allowlist", "host")
GIT_LEVELS = ("read-only", "config", "off")
PRESETS = ("conservative", "moderate", "generous", "unlimited")
ISOLATIONS = ("bwrap", "landlock", "auto", "host")
BACKENDS = ("local", "docker", "ssh", "modal")

WEEK_S = 7 * 24 * 3600
TIB_MB = 1024 * 1024


class Key(NamedTuple):
    """One key: its dotted name below `sandbox`, its kind (a checker of `policyvalues`), range and consent."""

    name: str
    kind: str
    doc: str
    ceiling: str = ""
    """Field of `Ceiling` that bounds it; `""`: free to ask for."""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0

    @property
    def table(self) -> str:
        """Return the sub-table that holds the key, `""` for `[sandbox]` itself."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """Return the key's name inside its table."""
        return self.name.rpartition(".")[2]

    @property
    def attr(self) -> str:
        """Return the name of the dataclass field that holds it (`pass` is a word of Python)."""
        return "pass_" if self.leaf == "pass" else self.leaf

    @property
    def expected(self) -> str:
        """Return what the key takes, in words."""
        if self.kind == "choice":
            return " or ".join(f'"{choice}"' for choice in self.choices)
        if self.kind in ("int", "number"):
            noun = "an integer" if self.kind == "int" else "a number"
            return f"{noun} from {self.low:g} to {self.high:.0f}"
        return _EXPECTED[self.kind]


_EXPECTED = {
    "bool": "true or false",
    "text": "a non-empty string",
    "name": "a name (letters, digits, `.`, `_`, `-`)",
    "path": "a path",
    "paths": "a list of paths",
    "masks": "a list of gitignore patterns",
    "globs": "a list of strings",
    "names": "a list of names",
    "choices": "a list of names",
    "envnames": "a list of environment variable names (or globs)",
    "vars": "a table of strings",
    "rules": 'a list of "host:port" rules',
    "hosts": 'a table of name = "address"',
    "sshhost": '"[user@]host[:port]"',
}

KEYS: tuple[Key, ...] = (
    Key("enabled", "bool", "Whether this workspace is jailed."),
    Key("backend", "choice", "Where the jail runs.", "backends", BACKENDS),
    Key("level", "choice", "What may be written; see Levels.", "level", LEVELS),
    Key(
        "read",
        "choice",
        '"restricted": the system, `rw_paths` and `ro_paths`; "all": everything but the sensitive paths '
        '(needs "/" among the consented paths).',
        "outside_paths",
        ("restricted", "all"),
    ),
    Key("rw_paths", "paths", "Paths that can be read and written.", "outside_paths"),
    Key("ro_paths", "paths", "Paths that can be read.", "outside_paths"),
    Key("mask", "masks", "What reads as empty, by gitignore rules; replaces the default list.", "mask_floor"),
    Key("mask_add", "masks", "Patterns appended to `mask`.", "mask_floor"),
    Key("protect", "paths", "Paths that stay read-only although they lie inside `rw_paths`."),
    Key("protect_git", "choice", "How much of `.git` stays read-only.", "git", GIT_LEVELS),
    Key("no_gpu", "bool", "Whether the GPU's device nodes are kept out.", "gpu"),
    Key("lockdown", "bool", "Whether every ambiguity refuses the start."),
    Key("idle_timeout_s", "int", "Seconds without a call after which the worker ends.", low=1, high=WEEK_S),
    Key("env.pass", "envnames", "Names taken over from the backend's environment.", "env_pass"),
    Key("env.set", "vars", "Variables set inside, taken literally."),
    Key("network.mode", "choice", "What the network inside is.", "network", NETWORK_MODES),
    Key("network.allow", "rules", "Targets that can be reached in mode allowlist.", "private_addresses"),
    Key("network.deny", "rules", "Targets that cannot be reached; beats `allow`."),
    Key("network.hosts", "hosts", "Names pinned to an address.", "private_addresses"),
    Key("network.strict_sni", "bool", "Whether TLS to a host must name that host."),
    Key("network.unix", "paths", "Host sockets that are bound into the jail.", "unix_sockets"),
    Key("limits.preset", "choice", "Named set of limits; see Presets.", "limits", PRESETS),
    Key("limits.memory_mb", "int", "Resident memory of the jail, MB.", "limits", low=16, high=64 * TIB_MB),
    Key("limits.pids", "int", "Processes and threads of the jail.", "limits", low=1, high=4_194_304),
    Key("limits.disk_mb", "int", "Bytes written by the jail, MB.", "limits", low=1, high=1024 * TIB_MB),
    Key("limits.cpu_s", "int", "CPU seconds of one call.", "limits", low=1, high=WEEK_S),
    Key("limits.wall_s", "int", "Wall-clock seconds of one call.", "limits", low=1, high=WEEK_S),
    Key("limits.cpus", "number", "Processors that the jail may use at once.", low=0.01, high=4096),
    Key("seccomp.deny", "names", "System calls added to the built-in deny list."),
    Key("seccomp.allow", "names", "System calls taken off the built-in deny list.", "seccomp_allow"),
    Key("docker.image", "text", "Image of the container.", "images"),
    Key("docker.pull", "choice", "Whether a missing image is pulled.", "images", ("never", "missing")),
    Key("docker.host", "text", "Address of the daemon.", "docker_hosts"),
    Key(
        "docker.tls_dir",
        "path",
        "Directory with ca.pem, cert.pem and key.pem for that daemon.",
        "docker_hosts",
    ),
    Key(
        "docker.helper", "bool", "Whether a privileged helper container may make the masks.", "docker_helper"
    ),
    Key("docker.seccomp", "choice", "The daemon's own filter.", "docker_seccomp", ("default", "unconfined")),
    Key("docker.volume", "name", "Volume of the daemon that holds the workspace.", "docker_volumes"),
    Key("ssh.host", "sshhost", "The remote host.", "remote_hosts"),
    Key("ssh.port", "int", "Its port.", "remote_hosts", low=1, high=65535),
    Key("ssh.user", "name", "The account there.", "remote_hosts"),
    Key("ssh.path", "path", "The workspace's path there (absolute, or below `~`)."),
    Key("ssh.key", "name", "Name of a key in the embedder's `ssh_keys` mapping; never a path."),
    Key("ssh.sync", "choice", "Which way files are copied.", choices=("none", "push", "pull", "both")),
    Key("ssh.isolation", "choice", "Which walls the remote must have.", "ssh_isolation", ISOLATIONS),
    Key("ssh.keepalive_s", "int", "Seconds between signs of life.", low=1, high=3600),
    Key("modal.app", "name", "Name of the app.", "modal_apps"),
    Key("modal.environment", "name", "Modal environment of the app.", "modal_apps"),
    Key("modal.image", "text", "Image by registry tag."),
    Key("modal.image_id", "name", "Image by id, instead of `image`."),
    Key("modal.apt", "names", "Debian packages built into the image."),
    Key("modal.pip", "globs", "Python packages built into the image."),
    Key("modal.cpu", "number", "Processors.", low=0.125, high=1024),
    Key("modal.memory_mb", "int", "Memory, MB.", "limits", low=128, high=TIB_MB),
    Key("modal.gpu", "text", "GPU type (needs `no_gpu = false`).", "gpu"),
    Key("modal.region", "name", "Cloud region."),
    Key("modal.timeout_s", "int", "Longest life of the sandbox, seconds.", low=10, high=24 * 3600),
    Key(
        "modal.idle_timeout_s",
        "int",
        "Seconds without work after which Modal ends it.",
        low=10,
        high=24 * 3600,
    ),
    Key("modal.volume", "name", "Modal volume that holds the workspace.", "modal_volumes"),
    Key("modal.secrets", "names", "Names of Modal secrets.", "modal_secrets"),
    Key("modal.sync", "choice", "Which way files are copied.", choices=("none", "push", "pull", "both")),
)

TABLES: tuple[str, ...] = tuple(dict.fromkeys(key.table for key in KEYS if key.table))

FLAT_ALIASES = {"docker_image": "docker.image", "remote_host": "ssh.host", "ssh_key_id": "ssh.key"}
"""Keys of `[sandbox]` itself that Vectora's own files use."""

CEILING_KEYS: tuple[Key, ...] = (
    Key("backends", "choices", "Backends that a file may name.", choices=BACKENDS),
    Key(
        "remote_hosts", "globs", 'SSH targets, "[user@]host[:port]" (no user: the default one; no port: 22).'
    ),
    Key("images", "globs", "Docker images; empty: any local image, none pulled."),
    Key("outside_paths", "paths", "Places outside the workspace that may be granted, with all below them."),
    Key("outside_ro_paths", "paths", "The same, to be read only."),
    Key("level", "choice", "Widest level.", choices=LEVELS),
    Key("network", "choice", "Widest network mode.", choices=NETWORK_MODES),
    Key("private_addresses", "bool", "Whether private and loopback targets may be named."),
    Key("unix_sockets", "paths", "Host sockets that may be bound in."),
    Key("seccomp_allow", "names", "System calls that may be taken off the deny list."),
    Key("gpu", "bool", "Whether the GPU may be asked for."),
    Key("env_pass", "envnames", "Environment names that may be passed, beyond the harmless ones."),
    Key("mask_floor", "masks", "Masks that a file cannot take away."),
    Key("sensitive_exceptions", "paths", "Sensitive paths that are not masked."),
    Key("git", "choice", "Weakest protection of `.git`.", choices=GIT_LEVELS),
    Key("limits", "choice", "Widest limits.", choices=PRESETS),
    Key("weak_isolation", "bool", "Whether a jail without a protected worker is acceptable."),
    Key("unsandboxed", "bool", "Whether a command may be proposed to run outside the jail."),
    Key("docker_hosts", "globs", "Daemon addresses."),
    Key("docker_helper", "bool", "Whether the privileged helper container may be used."),
    Key("docker_seccomp", "choice", "Weakest daemon filter.", choices=("default", "unconfined")),
    Key("docker_volumes", "globs", "Volumes of the daemon."),
    Key("ssh_isolation", "choice", "Weakest remote isolation.", choices=ISOLATIONS),
    Key("modal_apps", "globs", 'Modal apps, "app" or "environment/app".'),
    Key("modal_volumes", "globs", "Modal volumes."),
    Key("modal_secrets", "globs", "Modal secrets."),
)

_BY_NAME = {key.name: key for key in KEYS}


def key_named(name: str) -> Key | None:
    """Return the key with the dotted `name`, or None."""
    return _BY_NAME.get(name)


if __name__ == "__main__":
    from vectora_jail.policydocs import reference

    print(reference())  # noqa: T201 - run as a command
