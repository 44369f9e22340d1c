"""What this kernel and machine are like: versions, limits, control groups, devices."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vectora_jail.facts import CgroupFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["cgroup_facts", "landlock_abi", "read_small"]

_GPU = re.compile(
    rb"(nvidia\d+|nvidiactl|nvidia-uvm|nvidia-uvm-tools|nvidia-modeset|nvidia-caps|dri|kfd|dxg|mali\d+)\Z"
)
_USER_LIMITS = (
    "max_inotify_instances",
    "max_inotify_watches",
    "max_fanotify_groups",
    "max_fanotify_marks",
    # not max_mnt_namespaces: open_tree(OPEN_TREE_CLONE) makes one, and covers made later need it;
    # without a user namespace of its own nobody inside can make one
    "max_user_namespaces",
    "max_net_namespaces",
    "max_pid_namespaces",
    "max_ipc_namespaces",
    "max_uts_namespaces",
    "max_cgroup_namespaces",
    "max_time_namespaces",
)
_REMOTE_FILE_SYSTEMS = frozenset(
    (b"nfs", b"nfs4", b"cifs", b"smb3", b"9p", b"ceph", b"afs", b"virtiofs", b"lustre")
)


def landlock_abi() -> int:
    """Return the kernel's Landlock version, 0 when there is none or it is switched off."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    version = libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, int(version))


def read_small(path: bytes, limit: int = 65_536) -> bytes:
    """Return the beginning of a file, empty when it cannot be read; never blocks on a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, limit)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def kernel_version() -> tuple[int, int]:
    """Return the major and minor version of the running kernel."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def gpu_nodes() -> tuple[bytes, ...]:
    """Return the device nodes of graphics processors."""
    return tuple(sorted(b"/dev/" + name for name in os.listdir(b"/dev") if _GPU.match(name)))


def memory_total() -> int:
    """Return the bytes of RAM, 0 when unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def nofile() -> tuple[int, int]:
    """Return RLIMIT_NOFILE of this process, soft and hard."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _finite(soft), _finite(hard)


def _finite(value: int) -> int:
    return value if 0 <= value < 1 << 31 else 1 << 31


def sysctls() -> tuple[tuple[str, int], ...]:
    """Return the limits of a user namespace that exist here, and their values."""
    found = []
    for name in _USER_LIMITS:
        text = read_small(b"/proc/sys/user/" + name.encode()).strip()
        if text.isdigit():
            found.append((f"user/{name}", int(text)))
    return tuple(found)


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def proc_names() -> frozenset[str]:
    """Return the names of /proc that are no processes."""
    return frozenset(name for name in _listdir("/proc") if not name.isdigit())


def listening_sockets() -> tuple[bytes, ...]:
    """Return the named unix sockets that somebody listens on, proc(5) `/proc/net/unix`."""
    found = set()
    for line in read_small(b"/proc/net/unix", 1 << 22).splitlines()[1:]:
        parts = line.split(None, 7)
        if (
            len(parts) == 8
            and parts[5] == b"01"
            and int(parts[3], 16) & 0x10000
            and parts[7].startswith(b"/")
        ):
            found.add(os.path.realpath(parts[7]))
    return tuple(sorted(path for path in found if os.path.exists(path)))


def cgroup_facts() -> CgroupFacts:
    """Return the control groups that can hold groups for jails."""
    from vectora_jail.cgroupplace import find_place

    place = find_place()
    return CgroupFacts(place.version, place.controllers, place.reason)


def watch_note(workspace: bytes) -> str:
    """Return why a watch of the workspace is not complete, empty when it is."""
    best, kind = b"", b""
    for line in read_small(b"/proc/self/mounts", 1 << 20).splitlines():
        parts = line.split(b" ")
        if len(parts) < 3:
            continue
        top = re.sub(rb"\\(\d{3})", lambda m: bytes([int(m.group(1), 8)]), parts[1])
        if (workspace == top or workspace.startswith(top.rstrip(b"/") + b"/")) and len(top) >= len(best):
            best, kind = top, parts[2]
    if kind in _REMOTE_FILE_SYSTEMS or kind.startswith(b"fuse"):
        return f"the workspace lies on {kind.decode('ascii', 'replace')}: changes made elsewhere are not seen"
    return ""


def scratch_root(env: Mapping[bytes, bytes], uid: int) -> bytes:
    """Return where private temporary directories can be made."""
    runtime = env.get(b"XDG_RUNTIME_DIR", b"")
    if runtime.startswith(b"/") and os.path.isdir(runtime) and os.stat(runtime).st_uid == uid:
        return runtime
    return b"/tmp"
