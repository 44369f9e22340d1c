"""From the limits of a policy to rlimits, sampler numbers and the sizes of private file systems.

Numbers of the resources are Linux's own and the same on x86-64 and aarch64, getrlimit(2). RLIMIT_AS is left
alone: Go, Java and V8 reserve address space that they never use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vectora_jail.mountplan import TmpfsSizes

if TYPE_CHECKING:
    from vectora_jail.facts import HostFacts
    from vectora_jail.policy import Policy

__all__ = ["PIDS_SLACK", "Layer", "LimitPlan", "Rlimit", "held_layers", "plan_limits", "tmpfs_sizes"]

CPU, FSIZE, STACK, CORE, NPROC, NOFILE, MEMLOCK, SIGPENDING, MSGQUEUE, NICE, RTPRIO = (
    0,
    1,
    3,
    4,
    6,
    7,
    8,
    11,
    12,
    13,
    14,
)

INFINITY = (1 << 64) - 1
NOFILE_MAX = 65_536
NOFILE_RESERVE = 512
"""Descriptors between a jail's limit and the backend's own: those in flight are counted per user and
compared with the sender's limit (ETOOMANYREFS), unix(7)."""
NOFILE_MIN = 256
PIDS_SLACK = 64
"""Tasks between the sampler's limit, which ends the call, and the kernel's, at which only its forks fail."""
_MIB = 1 << 20
_STACK = 8 * _MIB
_MEMLOCK = 8 * _MIB
_MSGQUEUE = 204_800  # a quarter of the usual 800 KiB a user
_SIGPENDING = 4_096
_INODE_BYTES = 16 * 1024
_INODES_MIN = 1_024


class Rlimit(NamedTuple):
    """One setrlimit(2): the resource's number, soft and hard."""

    resource: int
    soft: int
    hard: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One wall as the report names it."""

    name: str
    state: str
    """`on`, `partial` or `off`."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LimitPlan:
    """All numbers of one jail; 0 means no limit."""

    memory: int
    """Bytes of resident memory of the whole jail."""
    pids: int
    disk: int
    """Bytes written by the whole jail."""
    cpu_s: float
    """CPU seconds of one call's tree."""
    wall_s: float
    """Seconds of one call."""
    cpus: float
    cmd_rlimits: tuple[Rlimit, ...]
    worker_rlimits: tuple[Rlimit, ...]
    layers: tuple[Layer, ...]

    @property
    def sampler(self) -> dict[str, int]:
        """Return what the worker watches."""
        return {"memory": self.memory, "pids": self.pids, "disk": self.disk}


def nofile_limit(soft: int, hard: int) -> int:
    """Return RLIMIT_NOFILE of a jail under a backend that has `soft` and `hard`."""
    room = min(soft, hard) - NOFILE_RESERVE
    return max(min(room, NOFILE_MAX), min(NOFILE_MIN, soft))


def plan_limits(policy: Policy, facts: HostFacts, *, isolation: str = "bwrap") -> LimitPlan:
    """Return the limits of a jail and which mechanism holds each."""
    values = policy.limit_values
    memory, pids, disk = values.memory_mb * _MIB, values.pids, values.disk_mb * _MIB
    cpu_s, wall_s, cpus = float(values.cpu_s), float(values.wall_s), float(values.cpus)
    nofile = nofile_limit(*facts.nofile)
    command = [
        Rlimit(CORE, 0, 0),
        Rlimit(NOFILE, nofile, nofile),
        Rlimit(STACK, _STACK, INFINITY),
        Rlimit(MEMLOCK, _MEMLOCK, _MEMLOCK),
        Rlimit(SIGPENDING, _SIGPENDING, _SIGPENDING),
        Rlimit(MSGQUEUE, _MSGQUEUE, _MSGQUEUE),
        Rlimit(NICE, 0, 0),
        Rlimit(RTPRIO, 0, 0),
    ]
    if disk:
        command.append(Rlimit(FSIZE, disk, disk))
    if cpu_s:
        whole = max(1, int(-(-cpu_s // 1)))
        command.append(Rlimit(CPU, whole, whole + 1))
    counted = facts.user.uid != 0 and isolation == "bwrap"
    if pids and counted:
        command.append(Rlimit(NPROC, pids + PIDS_SLACK, pids + PIDS_SLACK))
    worker = (Rlimit(CORE, 0, 0), Rlimit(NOFILE, nofile, nofile), Rlimit(MEMLOCK, _MEMLOCK, _MEMLOCK))
    layers = _layers(facts, memory, pids, disk, cpu_s, wall_s, cpus, counted=counted)
    return LimitPlan(memory, pids, disk, cpu_s, wall_s, cpus, tuple(sorted(command)), worker, layers)


def _layers(
    facts: HostFacts,
    memory: int,
    pids: int,
    disk: int,
    cpu_s: float,
    wall_s: float,
    cpus: float,
    *,
    counted: bool,
) -> tuple[Layer, ...]:
    """Say for each limit what holds it; `partial` where a command can get past it for a while."""
    exempt = (
        "the kernel exempts uid 0 from RLIMIT_NPROC"
        if facts.user.uid == 0
        else "no user namespace of its own"
    )
    found = (
        ("memory", memory, "partial", f"{memory // _MIB} MB resident, sampled by the worker"),
        (
            "pids",
            pids,
            "on" if counted else "partial",
            f"{pids} tasks, sampled; RLIMIT_NPROC in the jail's own user namespace at {pids + PIDS_SLACK}"
            if counted
            else f"{pids} tasks, counted by the worker ({exempt})",
        ),
        ("disk", disk, "partial", f"{disk // _MIB} MB written, sampled; one file: RLIMIT_FSIZE"),
        ("cpu", cpu_s, "partial", f"{cpu_s:g} s a call, sampled; one process: RLIMIT_CPU"),
        ("wall", wall_s, "on", f"{wall_s:g} s a call, held by the worker"),
        ("cpus", cpus, "partial", f"{cpus:g}, advice only: no control group holds it"),
    )
    return tuple(
        Layer(f"limit:{name}", state if value else "off", detail if value else "none asked for")
        for name, value, state, detail in found
        if value or name != "cpus"
    )


def held_layers(
    layers: tuple[Layer, ...], limits: LimitPlan, version: int, held: frozenset[str]
) -> tuple[Layer, ...]:
    """Return the layers of a jail some of whose limits a control group of this version really holds."""
    group = f"control group v{version}"
    text = {
        "limit:memory": (
            "memory",
            f"{limits.memory // _MIB} MB, page cache too, {group}; sampled by the worker",
        ),
        "limit:pids": ("pids", f"{limits.pids} tasks, sampled; {group} at {limits.pids + PIDS_SLACK}"),
        "limit:cpus": ("cpu", f"{limits.cpus:g}, {group}"),
    }
    return tuple(
        Layer(layer.name, "on", text[layer.name][1])
        if layer.name in text and text[layer.name][0] in held
        else layer
        for layer in layers
    )


def tmpfs_sizes(memory: int, memory_total: int) -> TmpfsSizes:
    """Return the sizes of the private file systems for a memory limit (0: none) and so much RAM.

    Together they may hold the memory limit, and no more than half of the machine.
    """
    budget = memory or memory_total // 2 or 2048 * _MIB
    if memory_total:
        budget = min(budget, memory_total // 2)
    budget = max(budget, 64 * _MIB)
    eighth = budget // 8
    return TmpfsSizes(
        tmp=_page(eighth * 2),
        home=_page(eighth * 3),
        shm=_page(eighth * 2),
        var_tmp=_page(eighth),
        run=8 * _MIB,
    )


def _page(size: int) -> int:
    return size // 4096 * 4096


def inodes(size: int) -> int:
    """Return how many files a tmpfs of `size` bytes may hold: its size does not count what they cost."""
    return max(size // _INODE_BYTES, _INODES_MIN)
