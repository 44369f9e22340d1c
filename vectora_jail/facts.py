"""What one plan has to know about a host: values only, no file system is touched here.

`probe.collect_facts` fills these in on a local host, the launcher's answer does on a remote one, and tests
write them by hand. Paths are absolute bytes; every `path` is fully resolved, so that no component of it is
a symbolic link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "BwrapFacts",
    "CgroupFacts",
    "HostFacts",
    "PathFact",
    "SystemEntry",
    "ToolHome",
    "Trial",
    "UserFact",
]


@dataclass(frozen=True, slots=True)
class PathFact:
    """One path as it was found: where its links lead and what is there."""

    given: bytes
    """Absolute spelling before any link was followed."""
    path: bytes
    """The same place without links; equal to `given` where nothing is there."""
    kind: str = "dir"
    """`dir`, `file`, `socket`, `device`, `fifo`, `missing` or `unreadable`."""
    dev: int = 0
    ino: int = 0
    uid: int = 0
    gid: int = 0
    mode: int = 0o755

    @property
    def exists(self) -> bool:
        """Return whether something is there that this process may look at."""
        return self.kind not in ("missing", "unreadable")


@dataclass(frozen=True, slots=True)
class SystemEntry:
    """One piece of the system that every jail sees: a bind, a link or a small copied file."""

    path: bytes
    kind: str
    """`bind`, `symlink`, `data` or `dir`."""
    target: bytes = b""
    """What a link says, or the place that a bind comes from."""
    data: bytes = field(default=b"", repr=False)
    perms: int = 0o444


@dataclass(frozen=True, slots=True)
class ToolHome:
    """One toolchain outside the system directories, as far as a jail may read it."""

    name: str
    """`pyenv`, `cargo`, `path` (a directory of PATH) or `links` (what such a directory's links lead to)."""
    paths: tuple[PathFact, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of really trying one thing."""

    ok: bool
    reason: str = ""
    """What the kernel or the tool said, one line; empty when it worked."""
    fix: str = ""
    """The command or the setting that would make it work, when one is known."""


@dataclass(frozen=True, slots=True)
class UserFact:
    """The identity that a jail runs with."""

    uid: int
    gid: int
    name: str
    shell: bytes
    home: PathFact
    groups: tuple[tuple[int, str], ...] = ()
    """Supplementary groups, which an ordinary user cannot drop."""


_UNTRIED = Trial(ok=False, reason="not tried")


@dataclass(frozen=True, slots=True)
class BwrapFacts:
    """Where bubblewrap is, what its `--help` lists and what it can really do here."""

    path: bytes | None = None
    reason: str = ""
    """Why there is none, when there is none."""
    version: str = ""
    options: frozenset[str] = frozenset()
    setuid: bool = False
    userns: Trial = _UNTRIED
    net: Trial = _UNTRIED
    proc: Trial = _UNTRIED
    disable_userns: Trial = _UNTRIED

    @property
    def works(self) -> bool:
        """Return whether a jail can be built with it at all."""
        return self.path is not None and self.userns.ok and self.proc.ok


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """Which control groups can hold a limit."""

    version: int = 0
    """0 none, 1 or 2."""
    controllers: frozenset[str] = frozenset()
    """Those of memory, pids and cpu in which this process may make groups for jails."""
    reason: str = ""
    """Why there are none, or what is missing."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything that `plan.build_plan` may know; equal facts and equal policies give equal plans."""

    workspace: PathFact
    user: UserFact
    backend_uid: int = 0
    """Effective uid of the process that starts the jail; differs from the user's only for root."""

    rw: tuple[PathFact, ...] = ()
    ro: tuple[PathFact, ...] = ()
    protect: tuple[PathFact, ...] = ()
    unix: tuple[PathFact, ...] = ()
    links: tuple[tuple[bytes, bytes], ...] = ()
    """(place, text) of every link met while following the paths above."""

    system: tuple[SystemEntry, ...] = ()
    """Restricted reads: the system directories, `/etc` without its secrets, the files behind links."""
    top: tuple[SystemEntry, ...] = ()
    """`read = "all"`: what the root directory holds, `/proc`, `/dev`, `/run`, `/tmp` left out."""
    home_top: tuple[SystemEntry, ...] = ()
    """`read = "all"`: what the home directory holds."""
    has_var_tmp: bool = True
    hosts_file: bytes = field(default=b"", repr=False)
    """The host's own /etc/hosts: what names mean where its network is shared."""
    home_files: tuple[SystemEntry, ...] = ()
    """Restricted reads: settings of git and the like, copied into the private home directory."""
    run_top: tuple[SystemEntry, ...] = ()
    """`danger-full-access`: what `/run` holds."""
    toolchains: tuple[ToolHome, ...] = ()
    tools_left_out: tuple[bytes, ...] = ()
    """Directories of PATH and link targets that no jail sees, because they are or hold a secret."""
    certificates: tuple[PathFact, ...] = ()
    sensitive: tuple[bytes, ...] = ()
    """Paths that no jail sees unless the ceiling names an exception; they need not exist."""
    etc_secrets: tuple[bytes, ...] = ()
    """Files of /etc that hold secrets, present here."""
    sockets: tuple[bytes, ...] = ()
    """`read = "all"`: named sockets that the host listens on; whoever sees one can talk to its service."""
    sys_hidden: tuple[bytes, ...] = ()
    """Directories of /sys that are covered where /sys shows, present here."""
    parent_repository: PathFact | None = None
    """The `.git` of the repository that the workspace is a sub-folder of."""
    repository: tuple[PathFact, ...] = ()
    """Git directories outside the workspace that its own `.git` file names (worktrees, submodules)."""

    environ: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)
    """Only the variables that an environment may take over; the values of all others are never kept."""
    environ_names: tuple[bytes, ...] = ()
    timezone: bytes = b""

    arch: str = "x86_64"
    kernel: tuple[int, int] = (0, 0)
    landlock_abi: int = 0
    bwrap: BwrapFacts = BwrapFacts()
    gpu: tuple[bytes, ...] = ()
    cgroup: CgroupFacts = CgroupFacts()
    memory_total: int = 0
    """Bytes of RAM, 0 when unknown."""
    nofile: tuple[int, int] = (1024, 4096)
    """The backend's own RLIMIT_NOFILE, soft and hard."""
    sysctls: tuple[tuple[str, int], ...] = ()
    """Names below /proc/sys with the host's value, for the per-user-namespace limits that exist here."""
    proc_names: frozenset[str] = frozenset()
    """Top names of /proc that exist here."""
    watch_note: str = ""
    """Why a watch sees local changes only (network or FUSE file system); empty when it sees all."""
    scratch: bytes = b""
    """A directory that the backend may use for temporary files where no private one can be mounted."""
