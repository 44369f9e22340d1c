"""A plan as text for people and as plain values for programs; variables by name only, data by size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vectora_jail.mounts import bwrap_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from vectora_jail.mounts import Mount
    from vectora_jail.plan import JailPlan

__all__ = ["plan_json", "plan_text"]

_RESOURCES = {
    0: "cpu",
    1: "fsize",
    3: "stack",
    4: "core",
    6: "nproc",
    7: "nofile",
    8: "memlock",
    11: "sigpending",
    12: "msgqueue",
    13: "nice",
    14: "rtprio",
}


def _text(path: bytes | None) -> str:
    """Return a path for people; bytes that are no text, and line breaks, as escapes."""
    if path is None:
        return ""
    shown = path.decode("utf-8", "backslashreplace")
    return shown if shown.isprintable() else repr(os.fsdecode(path))[1:-1]


def _mount(mount: Mount) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": mount.kind, "dest": _text(mount.dest), "why": mount.why}
    if mount.source is not None:
        found["source"] = _text(mount.source)
    if mount.kind == "tmpfs":
        found["size"] = mount.size
    if mount.kind == "data":
        found["bytes"] = len(mount.data)
    if mount.kind in ("tmpfs", "dir", "data"):
        found["perms"] = f"{mount.perms:04o}"
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def command_line(plan: JailPlan) -> list[str]:
    """Return bubblewrap's command line, its descriptors numbered as at the start."""
    if plan.bwrap is None:
        return []
    args, _ = bwrap_arguments(plan.mounts, plan.bwrap)
    return [
        _text(plan.bwrap.path),
        *(_text(arg) for arg in args),
        "--",
        "/run/vectora-jail/worker",
        "--fd",
        "3",
    ]


def plan_json(plan: JailPlan) -> dict[str, Any]:
    """Return everything that is decided, as JSON's own types."""
    limits = plan.limits
    return {
        "workspace": _text(plan.workspace),
        "uid": plan.uid,
        "gid": plan.gid,
        "isolation": plan.isolation,
        "hostname": _text(plan.hostname),
        "home": _text(plan.home),
        "arch": plan.arch,
        "policy_digest": plan.policy_digest,
        "layers": [{"name": x.name, "state": x.state, "detail": x.detail} for x in plan.layers],
        "hazards": [{"kind": kind, "text": text} for kind, text in plan.hazards],
        "mounts": [_mount(mount) for mount in plan.mounts],
        "masks": _plain(plan.tree["masks"]),
        "masked_paths": _plain(plan.tree["mask_paths"]),
        "protected": _plain(plan.tree["protect"]),
        "protect_git": {0: "off", 1: "config", 2: "read-only"}[plan.tree["git"]],
        "environment": sorted(_text(pair.partition(b"=")[0]) for pair in plan.env),
        "dropped_environment": list(plan.dropped_env),
        "toolchains": [{"name": name, "path": _text(path)} for name, path in plan.toolchains],
        "network": {
            "mode": plan.network_mode,
            "listen": _plain(getattr(plan.egress, "listen", ())),
            "proxy_only": _plain(getattr(plan.egress, "proxy_only", ())),
        },
        "limits": {
            "memory": limits.memory,
            "pids": limits.pids,
            "disk": limits.disk,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "cpus": limits.cpus,
            "rlimits": {
                _RESOURCES.get(r.resource, str(r.resource)): [r.soft, r.hard] for r in plan.cmd_rlimits
            },
        },
        "seccomp": {"bytes": len(plan.seccomp or b""), "sha256": plan.seccomp_digest},
        "landlock": None
        if plan.landlock is None
        else {key: len(value) if key == "rules" else value for key, value in plan.landlock.items()},
        "enter": _plain(plan.enter_ops),
        "command": command_line(plan),
    }


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


_HEADINGS: tuple[tuple[str, Callable[[Mount], bool]], ...] = (
    ("Read and write", lambda m: m.kind == "rw"),
    ("Read only", lambda m: m.kind == "ro" and m.why != "system"),
    ("Private and empty", lambda m: m.kind == "tmpfs" and m.why == "private"),
    ("System, read only", lambda m: m.kind == "ro" and m.why == "system"),
    ("Devices", lambda m: m.kind == "devices"),
)


def plan_text(plan: JailPlan) -> str:
    """Return a page that says what a jail of this workspace is."""
    lines = [
        f"Jail of {_text(plan.workspace)}",
        f"  isolation {plan.isolation}, uid {plan.uid}, gid {plan.gid}, network {plan.network_mode}",
        f"  policy {plan.policy_digest[:16]}",
        "",
        "Walls",
    ]
    width = max(len(layer.name) for layer in plan.layers)
    lines += [f"  {x.name:<{width}}  {x.state:<7}  {x.detail}".rstrip() for x in plan.layers]
    for title, wanted in _HEADINGS:
        found = [mount for mount in plan.mounts if wanted(mount)]
        if found:
            lines += ["", title]
            lines += [f"  {_text(m.dest)}{_note(m)}" for m in found]
    copied = [m for m in plan.mounts if m.kind == "data" and m.dest.startswith(b"/etc/")]
    if copied:
        lines.append(f"  and {len(copied)} small files of /etc, copied")
    lines += ["", "Masks", *_or_none(_rule(*rule) for rule in plan.tree["masks"])]
    lines += ["", "Sensitive paths covered", *_or_none(_text(path) for path in plan.tree["mask_paths"])]
    git = {0: "off", 1: "config", 2: "read-only"}[plan.tree["git"]]
    lines += ["", f"Protected (git: {git})", *_or_none(_text(path) for path in plan.tree["protect"])]
    names = " ".join(sorted(_text(pair.partition(b"=")[0]) for pair in plan.env))
    lines += ["", "Environment", f"  {names}", f"  dropped: {' '.join(plan.dropped_env) or 'nothing'}"]
    if plan.hazards:
        lines += ["", "To know", *(f"  {kind}: {text}" for kind, text in plan.hazards)]
    return "\n".join(lines) + "\n"


def _note(mount: Mount) -> str:
    if mount.kind == "tmpfs":
        return f"  ({_size(mount.size)})"
    return "" if mount.why in ("grant", "system") else f"  ({mount.why})"


def _rule(pattern: bytes, negate: bool, floor: bool) -> str:
    return f"{'!' if negate else ''}{_text(pattern)}{'  (always)' if floor else ''}"


def _or_none(items: Any) -> list[str]:
    return [f"  {item}" for item in items] or ["  none"]
