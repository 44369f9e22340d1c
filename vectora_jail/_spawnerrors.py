"""What a failed start means and what helps: the shim's {stage, errno, text} → WorkerSpawnError. Pure."""

from __future__ import annotations

import errno as e
from typing import Final

from vectora_jail.errors import WorkerSpawnError

__all__ = ["enter_error", "start_error"]

# enum vj_stage of csrc/core/start.h: what is shown, and the wall that is concerned.
STAGES: Final = {
    0: ("stage the sources", "mounts"),
    1: ("prepare descriptors", "worker"),
    2: ("starter thread", "worker"),
    3: ("clone", "worker"),
    4: ("arrange descriptors", "worker"),
    5: ("exec", "worker"),
    6: ("staging for another user", "identity"),
    7: ("bwrap", "mounts"),
    8: ("pid from bwrap", "worker"),
    9: ("identity of the worker", "worker"),
    10: ("bwrap's set-up", "mounts"),
    11: ("namespaces", "userns"),
}
_EXEC: Final = 5
_BWRAP: Final = 7

# (text in bwrap's message, code, layer, hint): the first that matches.
_BWRAP_SAYS: Final = (
    (
        "setting up uid map: Permission denied",
        "userns",
        "userns",
        "unprivileged user namespaces are restricted here (AppArmor), see `vectora-jail doctor`",
    ),
    (
        "max_user_namespaces: Read-only",
        "disable_userns",
        "userns",
        "/proc/sys is read-only here (a container): start without --disable-userns",
    ),
    (
        "namespace",
        "userns",
        "userns",
        "user namespaces are off here: sysctl user.max_user_namespaces or kernel.unprivileged_userns_clone",
    ),
    (
        "Can't find source path",
        "mount_source",
        "mounts",
        "a granted path does not exist or cannot be reached",
    ),
    ("Can't mkdir", "mount_target", "mounts", "the place of a mount lies below a read-only grant"),
    ("execvp", "worker_exec", "worker", "the worker cannot run inside: is it of this architecture?"),
    ("maximum number of arguments", "too_many_mounts", "mounts", "grant directories instead of single files"),
)

_ENTER_HINTS: Final = {
    e.EPERM: "setns(2) or mount(2) is forbidden to this process, by a container's filter for example",
    e.ENOEXEC: "the launcher's image is not registered",
    e.ENOSYS: "live mounts need Linux 5.12",
    e.ETIMEDOUT: "a path in the workspace lies on a file system that hangs",
}


def start_error(stage: int, errno: int, detail: str) -> WorkerSpawnError:
    """Explain a failed start; `detail` is what bwrap or the launcher said."""
    name, layer = STAGES.get(stage, (f"stage {stage}", "worker"))
    code, hint = "spawn", ""
    if errno == e.ETIMEDOUT:
        code, hint = (
            "timeout",
            "the machine is overloaded, or a granted path lies on a file system that hangs",
        )
    elif stage == _EXEC and errno in (e.ENOENT, e.EACCES):
        code, hint = "bwrap_missing", "install bubblewrap, see `vectora-jail doctor`"
    elif stage == _BWRAP:
        code = "bwrap"
        for text, its_code, its_layer, its_hint in _BWRAP_SAYS:
            if text in detail:
                code, layer, hint = its_code, its_layer, its_hint
                break
    message = f"the jail could not be started: {detail}" if detail else "the jail could not be started"
    return WorkerSpawnError(message, code=code, layer=layer, hint=hint, stage=name, errno=errno)


def enter_error(errno: int) -> WorkerSpawnError:
    """Explain why the entering child could not do its work."""
    return WorkerSpawnError(
        "the jail's mounts could not be changed",
        code="enter",
        layer="mounts",
        stage="enter",
        errno=errno,
        hint=_ENTER_HINTS.get(errno, ""),
    )
