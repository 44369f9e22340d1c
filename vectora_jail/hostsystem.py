"""Which parts of the system a jail sees: directories to bind, links to make again, small files to copy.

`/etc` is chosen by name. What is not world-readable is never taken, nor what looks as if it held a
credential: a jail of root would read it otherwise. Copies belong to the jail's own user, so that ssh
accepts its configuration. Sources: hier(7), file-hierarchy(7), findings on other jails' lists.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from vectora_jail.facts import SystemEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ETC_SECRETS",
    "etc_secrets",
    "home_entries",
    "home_files",
    "root_entries",
    "run_entries",
    "sys_hidden",
    "system_entries",
]

_DIRECTORIES = (
    b"/usr",
    b"/nix/store",
    b"/nix/var/nix/profiles",
    b"/gnu/store",
    b"/opt",
    b"/run/current-system",
    b"/run/opengl-driver",
    b"/sys/devices/system/cpu",
    b"/sys/devices/system/node",
    b"/var/cache/fontconfig",
    b"/var/lib/texmf",
    b"/var/lib/alternatives",
    b"/home/linuxbrew/.linuxbrew",
)
_MERGED = (b"/bin", b"/sbin", b"/lib", b"/lib32", b"/lib64", b"/libx32")

_ETC_FILES = frozenset(
    (
        b"bash.bashrc bashrc "
        b"debian_version environment fedora-release gai.conf gitattributes "
        b"gitconfig host.conf inputrc krb5.conf ld-musl-aarch64.path ld-musl-x86_64.path "
        b"ld.so.cache ld.so.conf locale.alias locale.conf localtime "
        b"lsb-release magic magic.mime mime.types "
        b"npmrc os-release pip.conf profile protocols redhat-release resolv.conf "
        b"screenrc services shells system-release timezone tmux.conf vimrc zprofile zshenv "
        b"zshrc"
    ).split()
)
_ETC_DIRECTORIES = frozenset(
    (
        b"alternatives bash_completion.d crypto-policies emacs env.d fonts "
        b"glvnd ImageMagick-6 ImageMagick-7 jvm ld.so.conf.d maven mercurial OpenCL "
        b"openmpi opt paths.d perl pki profile.d R ssl static terminfo texmf vim vulkan xdg xml zsh"
    ).split()
)
_ETC_PATTERN = re.compile(
    rb"(?:java|python|ruby|php|node|gcc|llvm|clang|lua|ghc|ld-musl|dotnet|erlang|mono)[\w.+-]*\Z"
)
_ETC_COPIED_DIRECTORIES = (b"/etc/ssh/ssh_config.d", b"/etc/gitconfig.d")
_ETC_COPIED_FILES = (b"/etc/ssh/ssh_config", b"/etc/java/java.conf")

# fmt: off
ETC_SECRETS = (
    "shadow", "shadow-", "gshadow", "gshadow-", "sudoers", "sudoers.d", "sudo.conf",
    "ssh/ssh_host_*_key", "ssl/private", "pki/tls/private", "pki/private", "ssl/certs/private",
    "krb5.keytab", "security/opasswd", ".pwd.lock", "ppp/*-secrets", "wireguard", "openvpn", "ipsec.d",
    "ipsec.secrets", "NetworkManager/system-connections", "wpa_supplicant", "docker/key.json",
    "kubernetes", "rancher", "apt/auth.conf", "apt/auth.conf.d", "letsencrypt/archive",
    "letsencrypt/live", "letsencrypt/keys", "fstab.d", "cifs-credentials", "samba/private",
    "postfix/sasl_passwd", "postfix/sasl_passwd.db", "exim4/passwd.client", "mysql/debian.cnf",
    "msmtprc", "polkit-1/localauthority", "swtpm-localca.conf", "libvirt", "vault.d", "credstore",
    "credstore.encrypted",
)
# fmt: on
"""Below /etc; covered wherever the whole of /etc shows."""

_HOME_FILES = (
    b".gitconfig",
    b".config/git/config",
    b".config/git/ignore",
    b".config/git/attributes",
    b".config/go/env",
    b".hgrc",
    b".inputrc",
    b".editorconfig",
)

_COPY_MAX = 16 * 1024
"""A copy costs each jail its size in memory, a bind costs each start 0.15 ms."""

_COPIED_NAMES_MAX = 5
"""Names in a directory that is copied file by file."""
_LOOKS_SECRET = re.compile(
    rb"(?i)://[^/\s:@]+:[^/\s@]+@|_authtoken|_auth\s*=|password\s*[=:]\s*\S|passwd\s*=\s*\S|api[_-]?key\s*=|secret\s*=\s*\S"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_SYS_HIDDEN = (
    b"/sys/firmware",
    b"/sys/kernel/debug",
    b"/sys/kernel/security",
    b"/sys/kernel/tracing",
    b"/sys/fs/fuse",
)
_LISTED_MAX = 400
"""Names of one directory that are bound one by one; beyond, the directory is bound whole."""


def system_entries() -> tuple[SystemEntry, ...]:
    """Return what every jail with restricted reads sees of the system."""
    entries: list[SystemEntry] = []
    for path in _MERGED:
        entries += _as_is(path)
    for path in _DIRECTORIES:
        if os.path.isdir(path):
            real = os.path.realpath(path)
            if real != path:
                entries.append(
                    SystemEntry(path, "symlink", os.readlink(path) if os.path.islink(path) else real)
                )
                continue
            entries.append(SystemEntry(path, "bind", path))
    entries += _etc()
    return tuple(entries)


def _as_is(path: bytes) -> list[SystemEntry]:
    try:
        found = os.lstat(path)
    except OSError:
        return []
    if stat.S_ISLNK(found.st_mode):
        return [SystemEntry(path, "symlink", os.readlink(path))]
    return [SystemEntry(path, "bind", path)] if stat.S_ISDIR(found.st_mode) else []


def _etc() -> list[SystemEntry]:
    entries: list[SystemEntry] = []
    for name in _names(b"/etc"):
        path = b"/etc/" + name
        try:
            found = os.lstat(path)
        except OSError:
            continue
        known = name in _ETC_FILES or name in _ETC_DIRECTORIES or _ETC_PATTERN.match(name) is not None
        if not known:
            continue
        if stat.S_ISLNK(found.st_mode):
            entries += _etc_link(path)
        elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o005 == 0o005:
            entries += _directory(path)
        elif stat.S_ISREG(found.st_mode):
            entries += _copy(path, path)
    for directory in _ETC_COPIED_DIRECTORIES:
        for name in _names(directory):
            entries += _copy(directory + b"/" + name, directory + b"/" + name)
    for path in _ETC_COPIED_FILES:
        entries += _copy(path, path)
    entries.append(SystemEntry(b"/etc/machine-id", "data", data=b"0" * 31 + b"1\n"))
    return entries


def _etc_link(path: bytes) -> list[SystemEntry]:
    """Make a link of /etc again where its target shows, else put what it leads to in its place."""
    target = os.path.realpath(path)
    if target.startswith((b"/usr/", b"/etc/", b"/nix/store/", b"/gnu/store/", b"/opt/")):
        return [SystemEntry(path, "symlink", os.readlink(path))]
    return _copy(path, target)


def _directory(path: bytes) -> list[SystemEntry]:
    """Copy a directory of few small files, which costs less than a mount; bind any other."""
    names = _names(path)
    if len(names) > _COPIED_NAMES_MAX:
        return [SystemEntry(path, "bind", path)]
    entries = [SystemEntry(path, "dir", perms=0o755)]
    for name in names:
        place = path + b"/" + name
        try:
            found = os.lstat(place)
        except OSError:
            return [SystemEntry(path, "bind", path)]
        if stat.S_ISLNK(found.st_mode):
            entries.append(SystemEntry(place, "symlink", os.readlink(place)))
        elif stat.S_ISREG(found.st_mode):
            perms = 0o555 if found.st_mode & 0o100 else 0o444
            entries += [replace(entry, perms=perms) for entry in _copy(place, place)]
        elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o005 == 0o005:
            entries += _directory(place)
    return (
        entries if sum(entry.kind == "bind" for entry in entries) == 0 else [SystemEntry(path, "bind", path)]
    )


_read: dict[bytes, tuple[tuple[int, ...], bytes | None]] = {}
"""What `_copy` has read, by place and identity; None: it looked like a secret."""


def _copy(path: bytes, source: bytes, *, world: bool = True) -> list[SystemEntry]:
    try:
        found = os.stat(source)
    except OSError:
        return []
    if not stat.S_ISREG(found.st_mode) or (world and not found.st_mode & 0o004):
        return []
    if found.st_size > _COPY_MAX:
        return [SystemEntry(path, "bind", source)]
    identity = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
    known = _read.get(source)
    if known is None or known[0] != identity:
        data = _content(source)
        known = _read[source] = (identity, None if data is None or _LOOKS_SECRET.search(data) else data)
    return [] if known[1] is None else [SystemEntry(path, "data", data=known[1])]


def _content(source: bytes) -> bytes | None:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.read(descriptor, _COPY_MAX) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _names(directory: bytes) -> list[bytes]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def root_entries() -> tuple[SystemEntry, ...]:
    """Return what `/` holds, for a view of the whole host; what cannot be entered is left out."""
    return _listed(b"/", skip=(b"proc", b"dev", b"run"), links=True)


def run_entries() -> tuple[SystemEntry, ...]:
    """Return what `/run` holds."""
    return _listed(b"/run", skip=(b"vectora-jail",), links=True)


def home_entries(home: bytes, sensitive: Iterable[bytes]) -> tuple[SystemEntry, ...]:
    """Return what a home directory holds, its secrets and its caches left out."""
    secrets = frozenset(sensitive)
    found = _listed(home, skip=(b".cache",), links=True)
    return tuple(entry for entry in found if entry.path not in secrets)


def home_files(home: bytes) -> tuple[SystemEntry, ...]:
    """Return copies of the user's settings that commands need, as far as they hold no secret."""
    entries: list[SystemEntry] = []
    for name in _HOME_FILES:
        path = home + b"/" + name
        entries += [
            replace(entry, perms=0o644) for entry in _copy(path, path, world=False) if entry.kind == "data"
        ]
    return tuple(entries)


def _listed(directory: bytes, skip: tuple[bytes, ...], *, links: bool) -> tuple[SystemEntry, ...]:
    entries: list[SystemEntry] = []
    names = _names(directory)
    if len(names) > _LISTED_MAX:
        return (SystemEntry(directory, "bind", directory),)
    for name in names:
        if name in skip:
            continue
        path = (b"" if directory == b"/" else directory) + b"/" + name
        try:
            found = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISLNK(found.st_mode):
            if links:
                entries.append(SystemEntry(path, "symlink", os.readlink(path)))
        elif os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0)):
            entries.append(SystemEntry(path, "bind", path))
    return tuple(entries)


def etc_secrets() -> tuple[bytes, ...]:
    """Return the secrets of /etc that exist here."""
    from glob import glob

    return tuple(sorted({os.fsencode(path) for name in ETC_SECRETS for path in glob(f"/etc/{name}")}))


def sys_hidden() -> tuple[bytes, ...]:
    """Return the directories of /sys that tell about the machine's firmware and kernel, present here."""
    return tuple(path for path in _SYS_HIDDEN if os.path.isdir(path))
