"""A fabricated host for tests of the pure parts: no file system, no kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vectora_jail.facts import BwrapFacts, HostFacts, PathFact, SystemEntry, ToolHome, Trial, UserFact
from vectora_jail.sensitive import sensitive_paths

HOME = b"/home/u"
WORKSPACE = b"/home/u/src/ws"
YES = Trial(ok=True)

SYSTEM = (
    SystemEntry(b"/usr", "bind", b"/usr"),
    SystemEntry(b"/bin", "symlink", b"usr/bin"),
    SystemEntry(b"/lib64", "symlink", b"usr/lib64"),
    SystemEntry(b"/etc/ssl", "bind", b"/etc/ssl"),
    SystemEntry(b"/etc/resolv.conf", "data", data=b"nameserver 10.0.0.1\n"),
    SystemEntry(b"/etc/localtime", "symlink", b"/usr/share/zoneinfo/Etc/UTC"),
)


def path(name: bytes, kind: str = "dir", ino: int = 7) -> PathFact:
    """Return something that exists at `name`."""
    return PathFact(name, name, kind, 1, ino, 1000, 1000)


def user(uid: int = 1000, home: bytes = HOME, groups: tuple[tuple[int, str], ...] = ()) -> UserFact:
    """Return an ordinary user, or root."""
    return UserFact(uid, uid, "root" if uid == 0 else "u", b"/bin/bash", path(home), groups)


def bwrap(**changes: Any) -> BwrapFacts:
    """Return a bubblewrap with which everything works."""
    facts = BwrapFacts(
        b"/usr/bin/bwrap",
        version="0.8.0",
        options=frozenset(("--disable-userns", "--as-pid-1")),
        userns=YES,
        net=YES,
        proc=YES,
        disable_userns=YES,
    )
    return replace(facts, **changes)


def host(**changes: Any) -> HostFacts:
    """Return the facts of a common host and of a workspace below the user's home."""
    who = changes.get("user", user())
    facts = HostFacts(
        workspace=path(WORKSPACE),
        user=who,
        backend_uid=who.uid,
        rw=(path(WORKSPACE),),
        system=SYSTEM,
        toolchains=(ToolHome("pyenv", (path(HOME + b"/.pyenv"),)),),
        sensitive=sensitive_paths(who.home.path),
        etc_secrets=(b"/etc/shadow", b"/etc/ssl/private"),
        environ=((b"PATH", HOME + b"/.pyenv/shims:/usr/bin:/opt/none/bin"), (b"LANG", b"de_DE.UTF-8")),
        environ_names=(b"AWS_SECRET_ACCESS_KEY", b"LANG", b"PATH"),
        timezone=b"Europe/Berlin",
        kernel=(6, 18),
        landlock_abi=7,
        bwrap=bwrap(),
        memory_total=16 << 30,
        nofile=(4096, 65536),
        sysctls=(("user/max_inotify_instances", 128), ("user/max_inotify_watches", 192_000)),
        proc_names=frozenset(("kmsg", "kcore", "keys", "sys", "meminfo")),
        scratch=b"/run/user/1000",
    )
    return replace(facts, **changes)
