"""The environment for a backend that has to run git on the host in a workspace that an agent could write to.

git runs programs that a repository names: hooks, fsmonitor, filters, diff drivers. `jail.git()` runs git inside, which
is the safe way. Where it has to be outside, this environment switches off every such setting of the repository's own
configuration and of the user's, and refuses a repository that leads elsewhere (git-config(1), gitrepository-layout(5)).
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from .errors import PolicyError
from .gitprotect import parse_config, runs_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["safe_git_env"]

CONFIG_MAX: Final = 1024 * 1024
MODULES_MAX: Final = 1000
_ALWAYS: Final = (
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.sshCommand", "false"),
    ("core.gitProxy", "none"),
    ("core.askPass", ""),
    ("core.attributesFile", "/dev/null"),
    ("credential.helper", ""),
    ("diff.ignoreSubmodules", "all"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("protocol.ext.allow", "never"),
    ("protocol.file.allow", "user"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("commit.gpgSign", "false"),
    ("tag.gpgSign", "false"),
    ("log.showSignature", "false"),
    ("safe.bareRepository", "explicit"),
)
_FIXED: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GIT_PAGER": "cat",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "GIT_SSH_COMMAND": "false",
    "GIT_NO_LAZY_FETCH": "1",
}
_KEPT: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")


def _harmless(name: bytes) -> str | None:
    """Return the value that switches a setting off: nothing for a filter, a program that fails for what must not run.

    None: several values add up, so that no later one helps; `protocol.ext.allow` stops those.
    """
    section, _, key = name.partition(b".")
    if name in (b"remote.url", b"remote.pushurl", b"url.insteadof", b"protocol.allow"):
        return None
    if section == b"filter" or name in (b"credential.helper", b"fetch.bundleuri"):
        return ""
    if section == b"pager" or key == b"textconv":
        return "cat"
    return "none" if name == b"submodule.update" else "false"


def _refuse(path: str, why: str) -> PolicyError:
    return PolicyError(
        f"git must not run on the host here: {path} {why}",
        code="git_unsafe",
        hint="run it inside with jail.git([...]), or look at the file and remove it",
    )


def _text(path: str) -> bytes | None:
    """Return a file's bytes, None when there is none; refuse what is no plain file of a sane size."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise _refuse(path, f"cannot be read as a plain file ({exc.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_size > CONFIG_MAX:
            raise _refuse(path, "is no plain file of at most 1 MiB")
        return file.read(CONFIG_MAX)


def _pointed(path: str, prefix: bytes = b"") -> str | None:
    """Return where a pointer file leads, as an absolute path without links."""
    text = _text(path)
    if text is None:
        return None
    if not text.startswith(prefix):
        raise _refuse(path, "is no pointer to a git directory")
    target = os.fsdecode(text[len(prefix) :].strip())
    return os.path.realpath(os.path.join(os.path.dirname(path), target))


def _git_directory(workspace: str) -> tuple[str, str]:
    """Return the git directory and the common one. Raises PolicyError for one that does not answer."""
    own = os.path.join(workspace, ".git")
    try:
        mode = os.lstat(own).st_mode
    except FileNotFoundError:
        raise _refuse(own, "does not exist") from None
    if stat.S_ISLNK(mode):
        raise _refuse(own, "is a symlink")
    if stat.S_ISDIR(mode):
        if os.path.lexists(os.path.join(own, "commondir")):
            raise _refuse(os.path.join(own, "commondir"), "sends git to another repository")
        return own, own
    gitdir = _pointed(own, b"gitdir: ") or ""
    common = _pointed(os.path.join(gitdir, "commondir"))
    if common is None:  # a submodule: its configuration names the work tree
        for entry in parse_config(_text(os.path.join(gitdir, "config")) or b""):
            if entry.name == b"core.worktree":
                back = os.path.realpath(os.path.join(gitdir, os.fsdecode(entry.value or b"")))
                if back == os.path.realpath(workspace):
                    return gitdir, gitdir
        raise _refuse(own, f"names {gitdir}, which does not name it back")
    if _pointed(os.path.join(gitdir, "gitdir")) != os.path.realpath(own):
        raise _refuse(own, f"names {gitdir}, which does not name it back")
    if os.path.dirname(os.path.dirname(gitdir)) != common:
        raise _refuse(os.path.join(gitdir, "commondir"), "sends git to another repository")
    return gitdir, common


def _modules(common: str) -> Iterator[str]:
    """The git directories of submodules; git clears our environment before it runs in one."""
    for seen, (place, names, files) in enumerate(os.walk(os.path.join(common, "modules"))):
        if seen > MODULES_MAX:
            raise _refuse(place, f"holds more than {MODULES_MAX} directories")
        if "HEAD" in files:
            names[:] = [name for name in names if name == "modules"]
            yield place


def _check_redirects(place: str) -> None:
    for name in ("objects/info/alternates", "objects/info/http-alternates"):
        path = os.path.join(place, name)
        if _text(path):
            raise _refuse(path, "reads objects from elsewhere")
    for name in ("rebase-merge/git-rebase-todo", "rebase-apply/git-rebase-todo", "sequencer/todo"):
        path = os.path.join(place, name)
        words = [line.split(None, 1)[:1] for line in (_text(path) or b"").splitlines()]
        if [b"exec"] in words or [b"x"] in words:
            raise _refuse(path, "holds exec lines")


def safe_git_env(
    workspace: str | os.PathLike[str], *, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment in which the host may run git in a workspace; nothing of the repository is run.

    Only reading commands and commits make sense with it: no hook, filter, pager, editor, credential helper, signature
    or network program runs, submodules are left alone, and the user's own configuration is not read (pass the author
    in `base`). A filter that is switched off shows the file as it lies in the tree; an external diff program that the
    repository names cannot be switched off this way and fails instead: use `git diff --no-ext-diff`.

    Args:
        workspace: Where git will run; its top directory.
        base: Environment to start from; default: a few harmless names of this process's. `GIT_*` names are dropped,
            but for author and committer.

    Raises:
        PolicyError: code `git_unsafe`: the repository leads elsewhere (`commondir`, alternates, a pointer that is not
            answered), includes other configuration, holds exec lines, or a submodule of it runs programs.
    """
    root = os.path.abspath(os.fspath(workspace))
    gitdir, common = _git_directory(root)
    overrides = list(_ALWAYS)
    for place in dict.fromkeys((gitdir, common)):
        _check_redirects(place)
        for name in ("config", "config.worktree"):
            path = os.path.join(place, name)
            for entry in parse_config(_text(path) or b""):
                if entry.name in (b"include.path", b"includeif.path"):
                    raise _refuse(path, "includes other configuration")
                if runs_program(entry) and (value := _harmless(entry.name)) is not None:
                    overrides.append((os.fsdecode(entry.full_name), value))
    for place in _modules(common):
        for entry in parse_config(_text(os.path.join(place, "config")) or b""):
            if runs_program(entry):
                raise _refuse(
                    os.path.join(place, "config"), f"runs a program ({os.fsdecode(entry.full_name)})"
                )
    source = {name: os.environ[name] for name in _KEPT if name in os.environ} if base is None else base
    people = ("GIT_AUTHOR_", "GIT_COMMITTER_")
    env = {
        name: value
        for name, value in source.items()
        if not name.startswith("GIT_") or name.startswith(people)
    }
    # what the repository asks for comes first: the last one wins, and ours must
    overrides = overrides[len(_ALWAYS) :] + list(_ALWAYS)
    env |= _FIXED
    env["GIT_CEILING_DIRECTORIES"] = os.path.dirname(root)
    env["GIT_CONFIG_COUNT"] = str(len(overrides))
    for index, (key, value) in enumerate(overrides):
        env[f"GIT_CONFIG_KEY_{index}"] = key
        env[f"GIT_CONFIG_VALUE_{index}"] = value
    return env
