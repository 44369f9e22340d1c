"""From policy and facts to the mounts of one jail: pure, parents first, whatever the order of lists.

Two rules decide everything here. The deepest path wins: a mount comes after all mounts above it. What
nobody granted is not there: the root is an empty tmpfs that ends read-only. bwrap 0.8 needs 0.15 ms and
more for each bind (it reads mountinfo again), 0.03 ms for a copied file: the small files of /etc are
copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vectora_jail.mounts import (
    COVER_DIR,
    COVER_FILE,
    PRIVATE_ROOT,
    WORKER_PATH,
    Mount,
    depth,
    is_below,
    is_secret,
    nearest,
    visible,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vectora_jail.facts import HostFacts, PathFact, SystemEntry

__all__ = ["NO_GRANT", "TmpfsSizes", "View", "home_path", "plan_mounts"]

NO_GRANT = (b"/proc", b"/sys", b"/dev", PRIVATE_ROOT)
"""Places that no grant may name, nor anything below them (`/dev/shm/…` may be granted)."""

_SYSTEM = (
    b"/usr",
    b"/bin",
    b"/sbin",
    b"/lib",
    b"/lib32",
    b"/lib64",
    b"/libx32",
    b"/etc",
    b"/proc",
    b"/sys",
    b"/dev",
)
_SYS_HIDDEN = (
    b"/sys/firmware",
    b"/sys/kernel/debug",
    b"/sys/kernel/security",
    b"/sys/kernel/tracing",
    b"/sys/fs/fuse",
)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TmpfsSizes:
    """Bytes of every writable tmpfs."""

    tmp: int = 512 * _MIB
    home: int = 512 * _MIB
    shm: int = 256 * _MIB
    var_tmp: int = 128 * _MIB
    run: int = 16 * _MIB


@dataclass(frozen=True, slots=True)
class View:
    """What the policy says about the file system, apart from the paths themselves."""

    level: str = "workspace-write"
    read: str = "restricted"
    gpu: bool = False
    lockdown: bool = False
    git: str = "read-only"
    """`protect_git` of the policy."""
    offline: bool = True
    """No network: caches of toolchains are shown read-only instead of being private and writable."""
    hostname: bytes = b"vectora"
    own_hosts: bool = True
    """Whether /etc/hosts is the jail's own; the host's where its network is shared."""
    hosts: tuple[tuple[bytes, bytes], ...] = ()
    """(name, address) pairs for /etc/hosts."""
    exceptions: frozenset[bytes] = frozenset()
    """Sensitive paths that the ceiling allows."""
    sizes: TmpfsSizes = TmpfsSizes()

    @property
    def full(self) -> bool:
        """Return whether the whole host is granted."""
        return self.level == "danger-full-access"


def home_path(facts: HostFacts, view: View) -> bytes:
    """Return `$HOME` of the jail: the user's own, or another place where that cannot be private."""
    home, there = facts.user.home.path, facts.user.home.kind == "dir"
    if view.full:
        return home if there else b"/tmp"
    unfit = home in (b"/", b"/tmp", b"/run", b"/nonexistent") or any(is_below(home, top) for top in _SYSTEM)
    if home != b"/" and any(is_below(home, grant.path) for grant in facts.rw):
        return home
    if view.read == "all" and (unfit or not there):
        return b"/tmp/home"
    return b"/home/" + (facts.user.name.encode() or b"user") if unfit else home


class _Layout:
    """Mounts by place; a later `put` at the same place replaces the earlier one."""

    def __init__(self) -> None:
        self.at: dict[bytes, Mount] = {}

    def put(self, kind: str, dest: bytes, **values: object) -> None:
        self.at[dest] = Mount(kind, dest, **values)  # type: ignore[arg-type]

    def bind(self, kind: str, fact: PathFact, why: str) -> None:
        old = self.at.get(fact.path)
        if old is not None and old.kind == "rw" and kind == "ro" and old.why == "grant":
            return  # a toolchain inside a writable grant stays writable
        self.put(kind, fact.path, source=fact.path, identity=(fact.dev, fact.ino), why=why)


def plan_mounts(facts: HostFacts, view: View) -> tuple[Mount, ...]:
    """Return the mounts of a jail, parents first, the read-only remounts last."""
    layout = _Layout()
    if view.full:
        _whole_host(layout, facts, writable=True)
    elif view.read == "all":
        _whole_host(layout, facts, writable=False)
    else:
        _system(layout, facts.system)
    _private(layout, facts, view)
    if view.read != "all" and not view.full:
        _synthetic(layout, facts, view)
        _toolchains(layout, facts, view)
        if not view.lockdown:
            _system(layout, facts.home_files)
    _grants(layout, facts, view)
    _links(layout, facts)
    _pseudo(layout, facts, view)
    kept = _without_secrets(layout.at, facts, view)
    _homes_above(kept, facts)
    return (*_with_parents(_without_doubles(kept)), *_last(view))


def _system(layout: _Layout, entries: Iterable[SystemEntry], kind: str = "ro") -> None:
    for entry in entries:
        if entry.kind == "bind":
            layout.put(kind, entry.path, source=entry.target or entry.path)
        elif entry.kind == "symlink":
            layout.put("symlink", entry.path, source=entry.target)
        elif entry.kind == "data":
            layout.put("data", entry.path, data=entry.data, perms=entry.perms)
        else:
            layout.put("dir", entry.path, perms=entry.perms)


def _whole_host(layout: _Layout, facts: HostFacts, *, writable: bool) -> None:
    """Bind what the root directory holds, name by name: the root itself stays ours."""
    kind = "rw" if writable else "ro"
    for entry in facts.top:
        if entry.path == b"/tmp" and not writable:
            continue
        _system(layout, (entry,), "ro" if entry.path == b"/sys" else kind)
    if writable:
        _system(layout, facts.run_top, kind)
    else:
        _system(layout, facts.home_top)
    if not writable and any(entry.path == b"/sys" for entry in facts.top):
        _hide_in_sys(layout, facts)


def _hide_in_sys(layout: _Layout, facts: HostFacts) -> None:
    for path in facts.sys_hidden:
        if path in _SYS_HIDDEN:
            layout.put("tmpfs", path, size=4096, perms=0o555)


def _private(layout: _Layout, facts: HostFacts, view: View) -> None:
    sizes = view.sizes
    layout.put("tmpfs", b"/run", size=sizes.run, perms=0o755, why="private")
    runtime = b"/run/user/%d" % facts.user.uid
    if not view.full:
        layout.put("dir", b"/run/user", perms=0o755, why="private")
        layout.put("dir", runtime, perms=0o700, why="private")
        layout.put("dir", b"/run/lock", perms=0o1777, why="private")
        layout.put("tmpfs", b"/tmp", size=sizes.tmp, perms=0o1777, why="private")
        if view.read != "all" or facts.has_var_tmp:
            layout.put("tmpfs", b"/var/tmp", size=sizes.var_tmp, perms=0o1777, why="private")
        if view.read != "all":
            layout.put("symlink", b"/var/run", source=b"/run", why="private")
        home = home_path(facts, view)
        layout.put("tmpfs", home, size=sizes.home, perms=0o700, why="private")
    layout.put("tmpfs", PRIVATE_ROOT, size=_MIB, perms=0o755, why="private")
    layout.put("data", WORKER_PATH, perms=0o555, why="worker")
    layout.put("data", COVER_FILE, perms=0o444, why="private")
    layout.put("dir", COVER_DIR, perms=0o555, why="private")


def _synthetic(layout: _Layout, facts: HostFacts, view: View) -> None:
    user = facts.user
    home = home_path(facts, view)
    shell = user.shell if visible(layout.at, user.shell) else b"/bin/sh"
    own = user.name.encode()
    passwd = [b"%s:x:%d:%d::%s:%s" % (own, user.uid, user.gid, home, shell)]
    group = [b"%s:x:%d:" % (own, user.gid)]
    if user.uid != 0:
        passwd.insert(0, b"root:x:0:0:root:/root:/usr/sbin/nologin")
    if user.gid != 0:
        group.insert(0, b"root:x:0:")
    if user.uid != 65534:
        passwd.append(b"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
    if user.gid != 65534:
        group.append(b"nogroup:x:65534:")
    hosts = [
        b"127.0.0.1\tlocalhost",
        b"::1\tlocalhost ip6-localhost ip6-loopback",
        b"127.0.1.1\t" + view.hostname,
    ]
    if not view.own_hosts and facts.hosts_file:
        hosts = [*facts.hosts_file.rstrip(b"\n").split(b"\n"), b"127.0.1.1\t" + view.hostname]
    hosts += [b"%s\t%s" % (address, name) for name, address in sorted(view.hosts)]
    for name, lines in (
        (b"passwd", passwd),
        (b"group", group),
        (b"hosts", hosts),
        (b"hostname", [view.hostname]),
    ):
        layout.put("data", b"/etc/" + name, data=b"\n".join(lines) + b"\n", perms=0o444)
    # only files: lookups through sssd, nscd or userdb sockets that are not there must not wait for them
    switch = (
        b"passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"
    )
    layout.put("data", b"/etc/nsswitch.conf", data=switch, perms=0o444)
    layout.put("symlink", b"/etc/mtab", source=b"/proc/self/mounts")


def _toolchains(layout: _Layout, facts: HostFacts, view: View) -> None:
    for home in facts.toolchains:
        if home.name.endswith("-cache") and not view.offline:
            continue
        for fact in home.paths:
            if fact.exists:
                layout.bind("ro", fact, f"toolchain: {home.name}")
    for fact in facts.certificates:
        if fact.exists:
            layout.bind("ro", fact, "certificates")


def _grants(layout: _Layout, facts: HostFacts, view: View) -> None:
    # A worktree's common directory must take its commits; what runs code on the host is locked in it by the
    # watch, which finds it over the pointer file. A repository above has no such pointer and stays read-only.
    commits = "rw" if view.git != "read-only" and view.level != "read-only" else "ro"
    parent = "rw" if view.git == "off" and view.level != "read-only" else "ro"
    if not view.full:
        for fact in facts.repository:
            if fact.exists:
                layout.bind(commits, fact, "repository")
        if facts.parent_repository is not None and facts.parent_repository.exists:
            layout.bind(parent, facts.parent_repository, "repository")
    for fact in facts.ro:
        if fact.exists:
            layout.bind("ro", fact, "grant")
    for fact in facts.rw:
        if fact.exists:
            layout.bind("ro" if view.level == "read-only" else "rw", fact, "grant")
    for fact in facts.unix:
        if fact.exists:
            layout.bind("ro", fact, "socket")
    if view.full and facts.workspace.exists:
        layout.bind("rw", facts.workspace, "grant")
    above = nearest(layout.at, facts.workspace.path)
    if above is None or not (above.is_bind or above.dest == facts.workspace.path):
        layout.put("dir", facts.workspace.path)  # not granted itself, and still where commands start


def _links(layout: _Layout, facts: HostFacts) -> None:
    """Make the links over which the paths of a plan were reached, where nothing shows them."""
    for place, text in sorted(facts.links):
        above = nearest(layout.at, place)
        if above is not None and (above.dest == place or above.is_bind or above.kind == "symlink"):
            continue
        if not any(is_below(dest, place) for dest in layout.at):
            layout.put("symlink", place, source=text, why="link")


def _pseudo(layout: _Layout, facts: HostFacts, view: View) -> None:
    layout.put("proc", b"/proc")
    if view.full:
        layout.put("devices", b"/dev", source=b"/dev")
        return
    layout.put("dev", b"/dev")
    layout.put("tmpfs", b"/dev/shm", size=view.sizes.shm, perms=0o1777, why="private")
    if view.gpu:
        for node in facts.gpu:
            layout.put("devices", node, source=node, why="gpu")
        if b"/sys" not in layout.at:
            layout.put("ro", b"/sys", source=b"/sys", why="gpu")
            _hide_in_sys(layout, facts)


def _without_secrets(at: dict[bytes, Mount], facts: HostFacts, view: View) -> dict[bytes, Mount]:
    """Drop every bind that is or lies inside a sensitive path, whoever asked for it."""
    secrets = (*facts.sensitive, *facts.etc_secrets)
    return {
        dest: mount
        for dest, mount in at.items()
        if not (mount.is_bind and is_secret(mount.source or dest, secrets, view.exceptions))
    }


def _homes_above(at: dict[bytes, Mount], facts: HostFacts) -> None:
    """Let a writable grant at or above a private place stand: what lies in it is the user's own."""
    for dest in [place for place, mount in at.items() if mount.kind == "tmpfs" and mount.why == "private"]:
        if dest == PRIVATE_ROOT:
            continue
        for grant in facts.rw:
            mount = at.get(grant.path)
            if mount is not None and mount.kind == "rw" and is_below(dest, grant.path):
                del at[dest]
                break


def _without_doubles(at: dict[bytes, Mount]) -> list[Mount]:
    """Sort parents first; leave out a bind that the one above it already shows with the same rights."""
    kept: dict[bytes, Mount] = {}
    parents = {dest.rpartition(b"/")[0] for dest in at}
    for mount in sorted(at.values(), key=lambda m: (depth(m.dest), m.dest)):
        if mount.kind == "symlink" and _holds(parents, mount.dest):
            continue  # something is mounted below: it is a directory inside
        above = nearest(kept, mount.dest, strict=True)
        if above is not None and above.is_bind:
            if mount.kind == above.kind and mount.source == mount.dest and above.source == above.dest:
                continue
            if mount.kind in ("symlink", "dir") or (mount.kind == "data" and mount.dest.startswith(b"/etc/")):
                continue  # the host's own shows there, and nothing may be made on the host
        kept[mount.dest] = mount
    return list(kept.values())


def _holds(parents: Iterable[bytes], place: bytes) -> bool:
    return any(is_below(parent, place) for parent in parents)


def _with_parents(mounts: list[Mount]) -> list[Mount]:
    """Name the directories that bwrap would make by itself, with a mode of its own choice."""
    at = {mount.dest: mount for mount in mounts}
    for mount in mounts:
        parent = mount.dest.rpartition(b"/")[0]
        while parent and parent not in at:
            above = nearest(at, parent)
            if above is not None and (above.is_bind or above.kind in ("proc", "dev")):
                break
            at[parent] = Mount("dir", parent, perms=0o755, why="parent")
            parent = parent.rpartition(b"/")[0]
    return sorted(at.values(), key=lambda m: (depth(m.dest), m.dest))


def _last(view: View) -> tuple[Mount, ...]:
    # bwrap's remount takes a bind's devices away (MS_NODEV), so the host's own /dev stays as it is
    places = (PRIVATE_ROOT, b"/") if view.full else (PRIVATE_ROOT, b"/dev", b"/")
    return tuple(Mount("ro-remount", dest) for dest in places)
