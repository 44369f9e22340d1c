"""Read from this host everything that one plan needs, by looking and by trying.

Nothing is opened for writing and nothing is made. What is tried for real (bwrap, its namespaces) is tried
once a process. Sources: landlock(7), cgroups(7), user_namespaces(7), proc(5).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vectora_jail import hostkernel as kernel
from vectora_jail import hostsystem
from vectora_jail.bwrap import bwrap_facts
from vectora_jail.environment import CERTIFICATE_VARIABLES, select_environ
from vectora_jail.errors import WorkerSpawnError
from vectora_jail.facts import HostFacts, PathFact, UserFact
from vectora_jail.hostkernel import read_small
from vectora_jail.paths import look, outermost_closed, reachable_by
from vectora_jail.policyvalues import unescape_path
from vectora_jail.sensitive import sensitive_paths
from vectora_jail.toolchains import find_toolchains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vectora_jail.policy import Ceiling, Policy

__all__ = ["collect_facts", "host_capabilities", "host_facts", "user_of"]

_CERTIFICATES = (
    b"/etc/ssl/cert.pem",
    b"/etc/ssl/certs/ca-certificates.crt",
    b"/etc/ssl/ca-bundle.pem",
    b"/etc/pki/tls/cert.pem",
    b"/etc/pki/tls/certs/ca-bundle.crt",
    b"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    b"/usr/lib/ssl/cert.pem",
    b"/usr/local/share/ca-certificates",
)
_LOCALE_VARIABLES = (b"LOCPATH", b"LOCALE_ARCHIVE", b"TERMINFO", b"TZDIR")


def collect_facts(
    workspace: bytes,
    policy: Policy,
    *,
    environ: Mapping[bytes, bytes] | None = None,
    ceiling: Ceiling | None = None,
    bwrap: bytes | str | None = None,
    abi: Callable[[], int] = kernel.landlock_abi,
) -> HostFacts:
    """Return the facts for a jail of `workspace` under `policy`, started by this process.

    Args:
        workspace: Absolute path; links are followed once, here.
        policy: What is granted decides what is looked at.
        environ: The backend's environment; None reads the process's own.
        ceiling: Unused so far; consents decide in the plan.
        bwrap: The embedder's explicit choice, see `bwrap.find_bwrap`.
        abi: Asks the kernel for its Landlock version (the shim's function where it is loaded).

    Raises:
        WorkerSpawnError: code `workspace` when there is no such directory, or it cannot be entered.
    """
    del ceiling
    env = dict(os.environb) if environ is None else dict(environ)
    links: list[tuple[bytes, bytes]] = []
    place = look(workspace, links)
    _require_directory(place)
    user = user_of(place, env, links)
    grants = {
        name: tuple(_resolve(path, place.path, user.home.path, links) for path in paths)
        for name, paths in (
            ("rw", policy.rw_paths),
            ("ro", policy.ro_paths),
            ("protect", policy.protect),
            ("unix", policy.network.unix),
        )
    }
    whole = policy.read == "all" or policy.level == "danger-full-access"
    sensitive = _sensitive(user, whole=whole)
    granted = [fact.path for name in ("rw", "ro") for fact in grants[name] if fact.exists]
    foreign = user.uid != os.geteuid()
    groups = {user.gid} if foreign else {user.gid, *(gid for gid, _ in user.groups)}
    tools = find_toolchains(
        env,
        user.home.path,
        place.path,
        granted,
        sensitive,
        look,
        lambda path: reachable_by(path, user.uid, groups),
    )
    certificates = _certificates(env, links, (place.path, *granted))
    parent, repository = _repositories(place.path, granted)
    return HostFacts(
        workspace=place,
        user=user,
        backend_uid=os.geteuid(),
        links=tuple(sorted({*links, *tools.links})),
        system=() if whole else hostsystem.system_entries(),
        top=hostsystem.root_entries() if whole else (),
        home_top=hostsystem.home_entries(user.home.path, sensitive) if policy.read == "all" else (),
        hosts_file=read_small(b"/etc/hosts"),
        has_var_tmp=os.path.isdir(b"/var/tmp"),
        home_files=() if whole or foreign else hostsystem.home_files(user.home.path),
        run_top=hostsystem.run_entries() if policy.level == "danger-full-access" else (),
        toolchains=tools.homes,
        tools_left_out=tools.left_out,
        certificates=certificates,
        sensitive=sensitive,
        etc_secrets=hostsystem.etc_secrets(),
        sockets=_sockets(user.uid, groups) if policy.read == "all" else (),
        sys_hidden=hostsystem.sys_hidden(),
        parent_repository=parent,
        repository=repository,
        environ=tuple(sorted(select_environ(env, policy).items())),
        environ_names=tuple(sorted(env)),
        timezone=_timezone(env),
        arch=os.uname().machine,
        kernel=kernel.kernel_version(),
        landlock_abi=abi(),
        bwrap=bwrap_facts(bwrap, uid=user.uid if foreign else None, gid=user.gid if foreign else None),
        gpu=() if policy.no_gpu else kernel.gpu_nodes(),
        cgroup=kernel.cgroup_facts(),
        memory_total=kernel.memory_total(),
        nofile=kernel.nofile(),
        sysctls=kernel.sysctls(),
        proc_names=kernel.proc_names(),
        watch_note=kernel.watch_note(place.path),
        scratch=kernel.scratch_root(env, user.uid),
        **grants,
    )


def host_facts(bwrap: bytes | str | None = None) -> HostFacts:
    """Return the facts of this host without a workspace: what `doctor` judges."""
    from vectora_jail.policy import Policy

    return collect_facts(b"/", Policy(rw_paths=(), mask=()), bwrap=bwrap)


def host_capabilities() -> dict[str, object]:
    """Return what this host can enforce, as plain values; tries bwrap for real, once a process."""
    from vectora_jail.doctor import capabilities

    return capabilities(host_facts())


def _require_directory(place: PathFact) -> None:
    shown = os.fsdecode(place.given)
    if place.kind == "dir":
        return
    reason = {"missing": "does not exist", "unreadable": "cannot be reached"}.get(
        place.kind, f"is a {place.kind}"
    )
    raise WorkerSpawnError(
        f"the workspace {shown!r} {reason}",
        code="workspace",
        layer="mounts",
        stage="plan",
        hint="name a directory",
    )


def _resolve(path: str, workspace: bytes, home: bytes, links: list[tuple[bytes, bytes]]) -> PathFact:
    text = os.fsencode(unescape_path(path))
    if text == b"~" or text.startswith(b"~/"):
        text = home + text[1:]
    return look(os.path.join(workspace, text), links)


def _sensitive(user: UserFact, *, whole: bool) -> tuple[bytes, ...]:
    """Return the sensitive paths of the user, and those that other homes have where a jail sees those too."""
    own = sensitive_paths(user.home.path, *_spelled(user.home))
    if not whole:
        return own
    import pwd

    homes = {
        os.path.realpath(os.fsencode(entry.pw_dir)) for entry in pwd.getpwall() if entry.pw_uid != user.uid
    }
    others = [home for home in homes if home.count(b"/") >= 1 and os.path.isdir(home)]
    theirs = [path for path in sensitive_paths(*others) if os.path.lexists(path)]
    return tuple(sorted({*own, *theirs}))


def _spelled(home: PathFact) -> tuple[bytes, ...]:
    return (home.given,) if home.given != home.path else ()


def user_of(workspace: PathFact, env: Mapping[bytes, bytes], links: list[tuple[bytes, bytes]]) -> UserFact:
    """Return who the jail runs as: root gives itself up for a workspace of somebody else."""
    import grp
    import pwd

    uid = os.geteuid()
    foreign = uid == 0 and workspace.uid != 0
    if foreign:
        uid = workspace.uid
    try:
        entry = pwd.getpwuid(uid)
        name, gid, home, shell = (
            entry.pw_name,
            entry.pw_gid,
            os.fsencode(entry.pw_dir),
            os.fsencode(entry.pw_shell),
        )
    except KeyError:
        name, gid, home, shell = f"user{uid}", workspace.gid if foreign else os.getegid(), b"/", b"/bin/sh"
    if not foreign:
        gid = os.getegid()
        asked = env.get(b"HOME", b"")
        home = asked if asked.startswith(b"/") else home
        chosen = env.get(b"SHELL", b"")
        shell = chosen if chosen.startswith(b"/") else shell
    groups: list[tuple[int, str]] = []
    for number in [] if foreign else os.getgroups():
        if number == gid:
            continue
        try:
            groups.append((number, grp.getgrgid(number).gr_name))
        except KeyError:
            groups.append((number, str(number)))
    safe = name if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", name) else f"user{uid}"
    usable = shell if os.access(shell, os.X_OK) and b":" not in shell and b"\n" not in shell else b"/bin/sh"
    return UserFact(uid, gid, safe, usable, look(home or b"/", links), tuple(sorted(groups)))


def _sockets(uid: int, groups: set[int]) -> tuple[bytes, ...]:
    found = {outermost_closed(path, uid, groups) for path in kernel.listening_sockets()}
    return tuple(sorted(found))


def _certificates(
    env: Mapping[bytes, bytes], links: list[tuple[bytes, bytes]], granted: Iterable[bytes]
) -> tuple[PathFact, ...]:
    """Return certificate files and locale archives that lie outside what a jail shows anyway."""
    writable = tuple(granted)  # where a link inside these leads a command may have chosen
    named = [
        env[name]
        for name in (*CERTIFICATE_VARIABLES, *_LOCALE_VARIABLES)
        if env.get(name, b"").startswith(b"/")
    ]
    found: dict[bytes, PathFact] = {}
    for path in (*_CERTIFICATES, *named):
        met: list[tuple[bytes, bytes]] = []
        fact = look(path, met)
        if fact.kind not in ("file", "dir") or fact.path.count(b"/") < 2:
            continue
        if any(link == top or link.startswith(top + b"/") for link, _ in met for top in writable):
            continue
        if not fact.mode & 0o004 or (fact.kind == "file" and os.path.getsize(fact.path) > 16 << 20):
            continue
        links += met
        found.setdefault(fact.path, fact)
    return tuple(found[path] for path in sorted(found))


def _repositories(workspace: bytes, granted: Iterable[bytes]) -> tuple[PathFact | None, tuple[PathFact, ...]]:
    """Return the `.git` above the workspace, and the git directories that its own `.git` file names."""
    own = look(os.path.join(workspace, b".git"))
    if own.kind == "file":
        return None, _pointed(own.path, granted)
    if own.exists:
        return None, ()
    place = workspace
    while place != b"/":
        place = os.path.dirname(place)
        fact = look(os.path.join(place, b".git"))
        if fact.kind == "dir" and os.path.exists(os.path.join(fact.path, b"HEAD")):
            return (fact if fact.uid in (os.geteuid(), look(workspace).uid) else None), ()
        if fact.exists:
            return None, ()
    return None, ()


def _pointed(pointer: bytes, granted: Iterable[bytes]) -> tuple[PathFact, ...]:
    """Return what a pointer file of git names, if it names back: the file may be the agent's."""
    text = read_small(pointer)
    if not text.startswith(b"gitdir:"):
        return ()
    named = look(os.path.join(os.path.dirname(pointer), text[7:].strip()))
    if named.kind != "dir" or not os.path.isfile(os.path.join(named.path, b"HEAD")):
        return ()
    back = read_small(os.path.join(named.path, b"gitdir")).strip()  # worktree
    common = read_small(os.path.join(named.path, b"commondir")).strip()
    facts = []
    if back and os.path.realpath(os.path.join(named.path, back)) == pointer and common:
        top = look(os.path.join(named.path, common))
        # a worktree's git directory lies in the common one: without that a command could name any repository
        if os.path.dirname(named.path) == os.path.join(top.path, b"worktrees"):
            facts.append(top)
    elif b"/modules/" in named.path and not back:  # submodule: the git directory of the repository around it
        worktree = re.search(
            rb"(?m)^\s*worktree\s*=\s*(.+)$", read_small(os.path.join(named.path, b"config"))
        )
        text = worktree.group(1).strip() if worktree else b""
        if text and os.path.realpath(os.path.join(named.path, text)) == os.path.dirname(pointer):
            facts.append(named)
    inside = tuple(granted)
    return tuple(
        fact
        for fact in facts
        if fact.kind == "dir"
        and fact.uid in (os.geteuid(), look(pointer).uid)
        and os.path.isfile(os.path.join(fact.path, b"HEAD"))
        and not any(fact.path == top or fact.path.startswith(top + b"/") for top in inside)
    )


def _timezone(env: Mapping[bytes, bytes]) -> bytes:
    if b"TZ" in env:
        return env[b"TZ"]
    target = os.path.realpath(b"/etc/localtime")
    found = re.search(rb"/zoneinfo/([A-Za-z0-9_+/-]+)\Z", target)
    return found.group(1) if found else b""
