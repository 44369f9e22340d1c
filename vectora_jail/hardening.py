"""What the entering child does in every new jail before anything else, and what it hides of /proc. Pure.

Order matters: the tree is made private first (a mount that the host makes later would appear inside
otherwise), limits of the jail's own user namespace are lowered while /proc/sys is still writable, then it
closes. Sources: mount_namespaces(7), proc(5), namespaces(7) `/proc/sys/user`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vectora_jail.limits import inodes
from vectora_jail.mounts import by_place, is_below, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vectora_jail.facts import HostFacts
    from vectora_jail.mounts import Mount

__all__ = ["base_ops"]

_READ_ONLY = (
    b"/proc/sysrq-trigger",
    b"/proc/irq",
    b"/proc/bus",
    b"/proc/fs",
    b"/proc/acpi",
    b"/proc/scsi",
    b"/proc/asound",
    b"/proc/driver",
)
_COVERED_FOR_ROOT = [
    "kcore",
    "kmsg",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "slabinfo",
    "vmallocinfo",
    "timer_list",
    "sched_debug",
    "pagetypeinfo",
    "keys",
    "key-users",
    "mtrr",
    "kallsyms",
    "iomem",
    "ioports",
    "config.gz",
    "latency_stats",
]
"""uid 0 without any capability still owns every root-owned file of procfs."""

_OWN_FOR_ROOT = (b"oom_score_adj", b"autogroup", b"clear_refs", b"coredump_filter", b"sched")
"""Of /proc/1: with these, commands of a uid-0 jail could make the worker die first or run last."""

_INSTANCES = 16
_WATCHES_MAX = 65_536


def base_ops(
    facts: HostFacts, mounts: Iterable[Mount], *, low_ports: bool = False
) -> tuple[tuple[Any, ...], ...]:
    """Return the operations, in order; each is (name, arguments…) of csrc/core/livemount.h.

    `low_ports`: the worker listens on the ports of an allowlist, also below 1024, in the jail's own network.
    """
    ops: list[tuple[Any, ...]] = [("private",)]
    if low_ports:
        ops.append(("network",))
        ops.append(("sysctl", "net/ipv4/ip_unprivileged_port_start", "0"))
    for name, value in facts.sysctls:
        wanted = _lowered(name, value)
        if wanted < value:
            ops.append(("sysctl", name, str(wanted)))
    ops.append(("ro", b"/proc/sys", False))
    ops += [("ro", path, True) for path in _READ_ONLY]
    if facts.user.uid == 0:
        ops += [
            ("cover", b"/proc/" + name.encode()) for name in _COVERED_FOR_ROOT if name in facts.proc_names
        ]
        ops += [("ro", b"/proc/1/" + name, True) for name in _OWN_FOR_ROOT]
    for mount in mounts:
        if mount.kind == "tmpfs" and mount.why == "private" and mount.perms & 0o200 and mount.size > 1 << 20:
            ops.append(("inodes", mount.dest, inodes(mount.size)))
    ops += [("pin", path) for path in _above_read_only(tuple(mounts))]
    # bwrap opens its sources by name: a command of another jail of this workspace may have swapped one for a link
    # since the plan was made, and then something else is mounted.
    ops += [("same", m.dest, *m.identity) for m in mounts if m.is_bind and m.identity != (0, 0)]
    return tuple(ops)


def _above_read_only(mounts: tuple[Mount, ...]) -> list[bytes]:
    """Return the directories between a read-only grant and the writable one around it, parents first.

    Renamed, they would take the read-only place to a name that the next jail knows as writable.
    """
    places = by_place(mounts)
    found = set()
    for mount in mounts:
        around = nearest(places, mount.dest, strict=True)
        if mount.kind != "ro" or mount.why != "grant" or around is None or around.kind != "rw":
            continue
        path = mount.dest.rpartition(b"/")[0]
        while is_below(path, around.dest, strict=True):
            found.add(path)
            path = path.rpartition(b"/")[0]
    return sorted(found)


def _lowered(name: str, value: int) -> int:
    """Return the value that a jail's own user namespace gets for a limit of `/proc/sys/user`."""
    if name == "user/max_inotify_instances":
        return min(value, _INSTANCES)
    if name == "user/max_inotify_watches":
        return min(value // 16, _WATCHES_MAX)
    return 0
