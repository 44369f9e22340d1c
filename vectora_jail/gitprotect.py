"""What the `.git` of a workspace asks for: grants outside it, protected paths, pins, and settings that run programs.

Pure: a caller reads the few files (`GitFacts`) and this module decides. The tree watch (csrc/core/treegit.c) does the
same for every nested repository, live; a test holds the two lists of settings equal. Sources: gitrepository-layout(5),
git-config(1), git-worktree(1).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["ConfigEntry", "GitFacts", "GitPlan", "parse_config", "protect", "runs_program"]

_RUNS = frozenset(
    b"""core.sshcommand core.hookspath core.editor core.pager core.askpass core.gitproxy core.alternaterefscommand
    sequence.editor diff.external diff.command diff.textconv merge.driver filter.clean filter.smudge filter.process
    credential.helper gpg.program gpg.defaultkeycommand mergetool.cmd mergetool.path difftool.cmd difftool.path
    browser.cmd browser.path man.cmd man.path guitool.cmd interactive.difffilter include.path includeif.path
    remote.uploadpack remote.receivepack remote.vcs uploadpack.packobjectshook init.templatedir trailer.command
    trailer.cmd tar.command imap.tunnel sendemail.smtpserver sendemail.sendmailcmd sendemail.tocmd sendemail.cccmd
    sendemail.headercmd gc.recentobjectshook web.browser instaweb.httpd protocol.allow archive.command
    receive.procreceiverefs gui.editor fetch.bundleuri""".split()
)
_PLAIN = frozenset((b"true", b"false", b"yes", b"no", b"on", b"off", b"1", b"0", b""))
_LOCKED_DIRS = (b"hooks", b"info")
_LOCKED_FILES = (
    b"config",
    b"config.worktree",
    b"commondir",
    b"gitdir",
    b"objects/info/alternates",
    b"objects/info/http-alternates",
)


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One setting: `section.key` in lower case, its subsection, and its value (None: a bare key, that is true)."""

    name: bytes
    subsection: bytes
    value: bytes | None

    @property
    def full_name(self) -> bytes:
        """The name as `git config` takes it, with the subsection."""
        section, _, key = self.name.partition(b".")
        return b".".join((section, self.subsection, key)) if self.subsection else self.name


def parse_config(text: bytes) -> Iterator[ConfigEntry]:
    """Read the text of a git configuration file; what does not parse is skipped up to the end of its line."""
    section = subsection = b""
    at = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    while at < len(text):
        byte = text[at : at + 1]
        if byte in b" \t\r\n\v\f":
            at += 1
        elif byte in b"#;":
            at = _line_end(text, at)
        elif byte == b"[":
            section, subsection, at = _section(text, at)
        else:
            key = re.compile(rb"[^\s=#;]*").match(text, at)
            end = key.end() if key else at
            name = text[at:end].lower()
            at = _blanks(text, end)
            value: bytes | None = None
            if text[at : at + 1] == b"=":
                value, at = _value(text, at + 1)
            else:
                at = _line_end(text, at)
            if name and section:
                yield ConfigEntry(section + b"." + name, subsection, value)


def _line_end(text: bytes, at: int) -> int:
    end = text.find(b"\n", at)
    return len(text) if end < 0 else end


def _blanks(text: bytes, at: int) -> int:
    while text[at : at + 1] in (b" ", b"\t", b"\r", b"\v", b"\f"):
        at += 1
    return at


def _section(text: bytes, at: int) -> tuple[bytes, bytes, int]:
    """`[section "subsection"]`, or the old `[section.subsection]`."""
    found = re.compile(
        rb'\[\s*([^\]\s."\n]*)(?:\.([^\]\s"\n]*))?[ \t]*(?:"((?:\\.|[^"\\\n])*)")?[ \t]*\]?'
    ).match(text, at)
    if not found:
        return b"", b"", _line_end(text, at)
    quoted = re.sub(rb"\\(.)", rb"\1", found.group(3) or b"")
    return found.group(1).lower(), quoted or (found.group(2) or b"").lower(), found.end()


def _value(text: bytes, at: int) -> tuple[bytes, int]:
    out = bytearray()
    kept, quoted = 0, False
    while at < len(text) and text[at] != 0x0A:
        byte = text[at : at + 1]
        escaped = False
        at += 1
        if byte == b'"':
            quoted = not quoted
            continue
        if not quoted and byte in b"#;":
            at = _line_end(text, at)
            break
        if byte == b"\\" and at < len(text):
            at += text[at : at + 2] == b"\r\n"
            byte, escaped = text[at : at + 1], True
            at += 1
            if byte == b"\n":
                continue
            byte = {b"n": b"\n", b"t": b"\t"}.get(byte, byte)
        blank = byte in b" \t\r\v\f" and not quoted and not escaped
        if blank and not out:
            continue
        out += byte
        kept = kept if blank else len(out)
    return bytes(out[:kept]), at


def runs_program(entry: ConfigEntry) -> bool:
    """Whether git runs a program, or reads more configuration, because of this setting."""
    value = entry.value or b""
    section = entry.name.partition(b".")[0]
    if entry.name == b"core.fsmonitor" or section == b"pager":
        return entry.value is not None and value.lower() not in _PLAIN
    if section == b"alias" or entry.name == b"submodule.update":
        return value.startswith(b"!")
    if entry.name in (b"remote.url", b"remote.pushurl", b"url.insteadof"):
        return value.startswith(b"ext::")
    return entry.name in _RUNS


@dataclass(frozen=True, slots=True)
class GitFacts:
    """What was found at `workspace/.git`, every path without links."""

    workspace: bytes
    kind: str = "absent"
    """`absent`, `dir`, `file` (a pointer of a worktree or submodule) or `symlink`."""
    gitdir: bytes = b""
    """Where it leads; the directory itself for `dir`."""
    common: bytes = b""
    """What the git directory's `commondir` names; empty for an ordinary repository or a submodule."""
    back: bytes = b""
    """The pointer file that a worktree's git directory names, or the work tree that a submodule's config names."""
    complete: bool = True
    """The git directory (and the common one) have a HEAD and belong to the workspace's owner."""
    hooks: bytes = b""
    """Where `hooks` leads when it is a symlink."""
    config: bytes = b""
    """The text of the repository's own configuration."""


@dataclass(frozen=True, slots=True)
class GitPlan:
    """What a plan adds for git. All paths absolute, sorted."""

    grants: tuple[bytes, ...] = ()
    """Directories outside every root that must be bound: read-only, or writable at the level `config`."""
    protected: tuple[bytes, ...] = ()
    """Read-only inside, where they exist."""
    pins: tuple[bytes, ...] = ()
    """Bound onto themselves so that they cannot be renamed away; they stay writable."""
    hazards: tuple[tuple[str, bytes], ...] = ()
    """(kind, path or setting): `git_foreign` a pointer that is not answered, `git_symlink`, `git_exec` a setting."""


def protect(facts: GitFacts, *, level: str, roots: Iterable[bytes]) -> GitPlan:
    """Decide what the top-level `.git` needs at a level (`read-only`, `config`, `off`).

    A pointer file may have been written by an agent: what it names outside the roots is granted only if the git
    directory names this workspace back, has a HEAD and has the same owner.
    """
    if facts.kind == "absent":
        return GitPlan()
    inside = tuple(roots)
    own = facts.workspace.rstrip(b"/") + b"/.git"
    places = tuple(dict.fromkeys(p for p in (facts.gitdir, facts.common) if p))
    answered = facts.kind == "dir" or (facts.complete and facts.back in (own, facts.workspace))
    hazards: list[tuple[str, bytes]] = []
    outside = [p for p in places if not _within(p, inside)]
    if facts.kind != "dir" and outside and not answered:
        hazards.append(("git_foreign", facts.gitdir))
    if facts.kind == "symlink":
        hazards.append(("git_symlink", own))
    hazards += [("git_exec", e.full_name) for e in parse_config(facts.config) if runs_program(e)]
    # the common directory holds the worktree's own one
    top = facts.common or facts.gitdir
    grants = {top} if outside and answered and not _within(top, inside) else set[bytes]()
    if level == "off":
        return GitPlan(tuple(sorted(grants)), hazards=tuple(hazards))
    shown = [p for p in places if _within(p, inside) or _within(p, grants)]
    protected = {own} if facts.kind == "file" else set[bytes]()
    pins: set[bytes] = set()
    for place in shown:
        if level == "read-only":
            protected.add(place)
            continue
        pins.add(place)
        protected.update(place + b"/" + name for name in (*_LOCKED_DIRS, *_LOCKED_FILES))
    protected.update(p for p in (facts.hooks, _hooks_path(facts)) if p and _within(p, inside))
    for path in tuple(protected):
        pins.update(_parents(path, (*inside, *grants)))
    return GitPlan(
        tuple(sorted(grants)), tuple(sorted(protected)), tuple(sorted(pins - protected)), tuple(hazards)
    )


def _hooks_path(facts: GitFacts) -> bytes:
    """`core.hooksPath` as an absolute path; it is relative to the work tree. Empty: not set, or in a home directory."""
    last = b""
    for entry in parse_config(facts.config):
        if entry.name == b"core.hookspath" and not entry.subsection:
            last = entry.value or b""
    if not last or last.startswith(b"~"):
        return b""
    return posixpath.normpath(posixpath.join(facts.workspace, last))


def _within(path: bytes, roots: Iterable[bytes]) -> bool:
    return any(path == r or path.startswith(r.rstrip(b"/") + b"/") for r in roots)


def _parents(path: bytes, roots: Iterable[bytes]) -> Iterator[bytes]:
    """The directories strictly between a path and the deepest root that holds it."""
    holding = max((r for r in roots if _within(path, (r,))), key=len, default=None)
    if holding is None:
        return
    place = posixpath.dirname(path)
    while len(place) > len(holding):
        yield place
        place = posixpath.dirname(place)
