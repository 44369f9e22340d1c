"""What calls return: values without behaviour beyond reading them."""

from __future__ import annotations

import os
import stat as stat_module
from dataclasses import dataclass, field

__all__ = ["Chunk", "DirEntry", "ExecResult", "FileStat", "Hazard", "JailReport", "Usage", "Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that the jail refused or ended."""

    kind: str
    """`syscall`, `path`, `network` or `limit`."""
    what: str
    limit: int | None = None
    observed: int | None = None
    rule: str = ""
    hint: str = ""
    """The edit of the policy that would allow it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command's whole tree used."""

    wall: float = 0.0
    """Seconds, monotonic clock."""
    user: float = 0.0
    system: float = 0.0
    max_rss: int = 0
    """Peak resident bytes of the largest process."""
    read: int = 0
    written: int = 0
    """Bytes that reached the block layer (proc(5), io)."""
    processes: int = 0


@dataclass(slots=True)
class ExecResult:
    """How a command ended and what it wrote."""

    exit_code: int
    """The command's own; 128+n for signal n; 127 not found; 126 not executable; 124 after a timeout."""
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    signal: int = 0
    usage: Usage = field(default_factory=Usage)
    violations: tuple[Violation, ...] = ()
    dropped_stdout: int = 0
    """Bytes beyond the cap that were read and thrown away, between the kept head and the kept tail."""
    dropped_stderr: int = 0
    leftovers_killed: int = 0
    """Processes of the command that were still alive at its end."""
    shell_restarted: bool = False
    """Only from a persistent shell: the command ended the shell, the next one gets a new one."""

    @property
    def truncated(self) -> bool:
        """Whether output was dropped."""
        return bool(self.dropped_stdout or self.dropped_stderr)

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.usage.wall

    @property
    def cpu_time(self) -> float:
        """User and system seconds."""
        return self.usage.user + self.usage.system

    @property
    def max_rss(self) -> int:
        """Peak resident bytes of the largest process."""
        return self.usage.max_rss

    @property
    def stdout_text(self) -> str:
        """Stdout as UTF-8, undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Stderr as UTF-8, undecodable bytes replaced."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """Stdout, then stderr, as text."""
        return self.stdout_text + self.stderr_text

    @property
    def ok(self) -> bool:
        """Whether the command ended with 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output of a running command."""

    fd: int
    """1 or 2."""
    data: bytes

    @property
    def text(self) -> str:
        """The bytes as UTF-8, undecodable bytes replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class FileStat:
    """What the jail sees of a path."""

    type: str
    """`file`, `dir`, `link`, `fifo`, `socket`, `char` or `block`."""
    mode: int
    """Permission bits."""
    size: int
    mtime_ns: int
    uid: int
    gid: int
    nlink: int
    ino: int
    dev: int

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.type == "dir"

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.type == "file"

    @property
    def filemode(self) -> str:
        """The mode as `ls -l` shows it."""
        kinds = {"dir": stat_module.S_IFDIR, "link": stat_module.S_IFLNK, "file": stat_module.S_IFREG}
        return stat_module.filemode(self.mode | kinds.get(self.type, 0))


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name of a directory."""

    name: str
    """The name; bytes that are not UTF-8 as surrogates (`os.fsencode` gives them back)."""
    type: str

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.type == "dir"

    @property
    def raw(self) -> bytes:
        """The name as bytes."""
        return os.fsencode(self.name)


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something that the jail cannot change and a person should know."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class JailReport:
    """What is really enforced in a running jail."""

    isolation: str
    """`bwrap`, `landlock`, `container`, `gvisor` or `none`."""
    layers: tuple[object, ...] = ()
    """One `Layer` each: `name`, `state` (on, partial, off), `detail`."""
    masks: tuple[str, ...] = ()
    """Paths that are covered now."""
    masked_by_history: tuple[str, ...] = ()
    """Covered objects that the host has renamed since."""
    protected: tuple[str, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    dropped_env: tuple[str, ...] = ()
    policy_digest: str = ""
    proof: str = ""
    """`full`, `status`, `self` or `remote`: who has verified the walls, and how far."""
    pid: int | None = None

    @property
    def degraded(self) -> list[object]:
        """The layers that are not fully on."""
        return [layer for layer in self.layers if getattr(layer, "state", "") != "on"]
