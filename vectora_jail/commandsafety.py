"""What single commands are known to do: only read, or harm (pure; advice for approval, never a wall).

``judge`` looks at one argv. Reading commands are known by name *and* arguments (`find -delete`, `sort -o`,
`git -c` are not reading); harmful ones are found behind wrappers too (`env`, `sh -c`, `xargs`, `find
-exec`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from vectora_jail.commandtables import (
    BIN,
    GIT_BAD,
    GIT_READS,
    HARMS,
    INTERPRETERS,
    READS,
    READS_UNLESS,
    SHELLS,
    TRANSPARENT,
    VERSIONS,
    WRAPPERS,
)

Verdict = Literal["reads", "harms", "unknown"]


class Judgement(NamedTuple):
    """A verdict with its reason; ``scripts`` are shell lines that the command would run."""

    verdict: Verdict
    reason: str
    scripts: tuple[str, ...] = ()


Argv = tuple[str, ...]


def judge(argv: Sequence[str], static: Sequence[bool] = (), depth: int = 0) -> Judgement:
    """Judge one argv; ``static`` says which words are known (all, when it is empty)."""
    words = tuple(argv)
    known = tuple(static) or (True,) * len(words)
    if not words or not words[0] or not known[0] or depth > 8:
        return Judgement("unknown", "the command's name is known only when it runs")
    name = words[0].rsplit("/", 1)[-1]
    trusted = words[0] == name or words[0] == _path_of(words[0], name)
    rest = words[1:]
    if name.startswith("mkfs"):
        return Judgement("harms", HARMS["mkfs"])
    if name in HARMS and not (name in ("init", "dd") and not rest):
        return Judgement("harms", f"{name} {HARMS[name]}")
    found = _SPECIAL.get(name)
    if found is not None:
        judgement = found(rest)
        if judgement is not None:
            return judgement
    if name in SHELLS or name in ("eval", "source", ".", "script", "ssh"):
        return _shell(name, rest)
    if name in WRAPPERS:
        return _wrapped(name, rest, known[1:], depth)
    if name == "find":
        for index, word in enumerate(rest):
            if word in ("-exec", "-execdir", "-ok", "-okdir"):
                inner = judge(_until(rest[index + 1 :]), depth=depth + 1)
                if inner.verdict == "harms" or inner.scripts:
                    return Judgement(inner.verdict, f"find runs: {inner.reason}", inner.scripts)
    if not trusted:
        return Judgement("unknown", f"{words[0]} is not a program of the system")
    return _reading(name, rest, all(known))


def _path_of(written: str, name: str) -> str:
    return next((prefix + name for prefix in BIN if written == prefix + name), "")


def _reading(name: str, rest: Argv, static: bool) -> Judgement:
    unknown = Judgement("unknown", f"{name} is not on the list of commands that only read")
    if name == "git":
        return _git_reads(rest, static)
    if name in VERSIONS and rest in (("--version",), ("-V",), ("version",), ("-version",)) and static:
        return Judgement("reads", f"{name} tells its version")
    if name in ("test", "[", "expr") and any("$(" in word or "`" in word for word in rest):
        return Judgement("unknown", f"bash evaluates what stands in an array index of {name}")
    if name in READS:
        return Judgement("reads", f"{name} only reads")
    if not static:
        return Judgement("unknown", f"the arguments of {name} are known only when it runs")
    if name == "env" and not rest:
        return Judgement("reads", "env only prints")
    if name == "hostname" and not rest:
        return Judgement("reads", "hostname only prints")
    if name == "printf" and not (rest and rest[0].startswith("-")):
        return Judgement("reads", "printf only prints")
    if name == "uniq" and len([word for word in rest if not word.startswith("-")]) <= 1:
        return Judgement("reads", "uniq only reads")
    if name == "cd":
        return Judgement("reads", "cd changes nothing but the directory")
    if name == "sed" and _sed_prints(rest):
        return Judgement("reads", "sed -n only prints")
    if name == "date" and any(word[:1] not in ("-", "+") for word in rest):
        return unknown
    if name in READS_UNLESS and not _has(rest, READS_UNLESS[name]):
        return Judgement("reads", f"{name} with these arguments only reads")
    return unknown


def _sed_prints(rest: Argv) -> bool:
    if len(rest) < 2 or rest[0] != "-n" or not re.fullmatch(r"[0-9]+(,([0-9]+|\$))?p", rest[1]):
        return False
    return not any(word.startswith("-") for word in rest[2:])


def _has(words: Argv, options: Sequence[str]) -> bool:
    """Tell whether an option is there: whole, abbreviated, with its value, or (one letter) inside a cluster."""
    for word in words:
        for option in options:
            if option.startswith("--"):
                given = word.split("=", 1)[0]
                if len(given) > 2 and given.startswith("--") and option.startswith(given):
                    return True
            elif len(option) == 2:
                if word.startswith("-") and not word.startswith("--") and option[1] in word[1:]:
                    return True
            elif word == option:
                return True
    return False


def _git_reads(rest: Argv, static: bool) -> Judgement:
    words = list(rest)
    while words and words[0] in ("--no-pager", "-P"):
        words.pop(0)
    if not words or not static:
        return Judgement("unknown", "git with words that are known only when it runs")
    sub, arguments = words[0], tuple(words[1:])
    bad = _has(arguments, GIT_BAD)
    listing = (
        (
            sub == "branch"
            and all(
                word in ("-a", "-r", "-v", "-vv", "--list", "--all", "--show-current") for word in arguments
            )
        )
        or (sub == "remote" and arguments in ((), ("-v",), ("--verbose",)))
        or (sub == "tag" and arguments in ((), ("-l",), ("--list",)))
        or (sub == "stash" and arguments == ("list",))
        or (sub == "config" and arguments[:1] in (("--get",), ("--list",), ("-l",)) and len(arguments) <= 2)
    )
    if not bad and (sub in GIT_READS or listing):
        return Judgement("reads", f"git {sub} only reads")
    return Judgement("unknown", f"git {sub} is not on the list of commands that only read")


def _git_harms(rest: Argv) -> Judgement | None:
    words = list(rest)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if (
            option in ("-c", "-C", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env")
            and words
        ):
            words.pop(0)
    if not words:
        return None
    sub, arguments = words[0], tuple(words[1:])
    if sub == "push":
        pushed = _has(
            arguments, ("--force", "--force-with-lease", "--mirror", "--delete", "--prune", "-f", "-d")
        )
        refs = any(word.startswith(("+", ":")) for word in arguments)
        if pushed or refs:
            return Judgement("harms", "git push rewrites or deletes what others have")
    if sub == "clean" and _has(arguments, ("--force", "-f")):
        return Judgement("harms", "git clean deletes files that nobody else has")
    if sub in ("filter-branch", "filter-repo"):
        return Judgement("harms", f"git {sub} rewrites history")
    if sub == "reset" and _has(arguments, ("--hard",)):
        return Judgement("harms", "git reset --hard throws away changes")
    return None


def _rm(rest: Argv) -> Judgement | None:
    options = rest[: rest.index("--")] if "--" in rest else rest
    recursive = _has(options, ("-r", "-R", "--recursive"))
    force = _has(options, ("-f", "--force"))
    if recursive and force:
        return Judgement("harms", "rm deletes a tree without asking")
    places = {word.rstrip("/*") or "/" for word in rest if not word.startswith("-")}
    if recursive and places & {
        "/",
        "~",
        ".",
        "..",
        "/home",
        "/root",
        "/etc",
        "/usr",
        "/var",
        "$HOME",
        '"$HOME"',
    }:
        return Judgement("harms", "rm deletes a whole place")
    return None


def _modes(rest: Argv) -> Judgement | None:
    if _has(rest, ("-R", "--recursive")) and any(
        word.rstrip("/") in ("", "~", "/etc", "/usr") for word in rest
    ):
        return Judgement("harms", "changes the rights of a whole place")
    return None


def _services(rest: Argv) -> Judgement | None:
    stops = {"poweroff", "reboot", "halt", "kexec", "suspend", "hibernate", "emergency", "rescue", "isolate"}
    return Judgement("harms", "systemctl stops the host") if stops & set(rest) else None


def _kill(rest: Argv) -> Judgement | None:
    return Judgement("harms", "kill ends every process") if "-1" in rest[1:] or rest == ("-1",) else None


def _crontab(rest: Argv) -> Judgement | None:
    return Judgement("harms", "crontab changes what runs later") if not _has(rest, ("-l",)) else None


_SPECIAL: dict[str, Callable[[Argv], Judgement | None]] = {
    "rm": _rm,
    "git": _git_harms,
    "chmod": _modes,
    "chown": _modes,
    "chgrp": _modes,
    "systemctl": _services,
    "kill": _kill,
    "crontab": _crontab,
}


def _shell(name: str, rest: Argv) -> Judgement:
    """Find the line that a shell would run."""
    if name == "eval":
        return Judgement("unknown", "eval runs a line", (" ".join(rest),) if rest else ())
    if name == "ssh":
        return Judgement("unknown", "ssh runs a line on another host")
    for index, word in enumerate(rest):
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word) or (name == "fish" and word == "--command"):
            script = next((later for later in rest[index + 1 :] if not later.startswith(("-", "+"))), "")
            return Judgement("unknown", f"{name} runs a line", (script,))
        if word.startswith("--command="):
            return Judgement("unknown", f"{name} runs a line", (word.partition("=")[2],))
    return Judgement("unknown", f"{name} runs a program that is not seen here")


def _wrapped(name: str, rest: Argv, known: Sequence[bool], depth: int) -> Judgement:
    if name == "env" and not rest:
        return Judgement("reads", "env only prints")
    with_value, positional = WRAPPERS[name]
    index = 0
    changed = False
    while index < len(rest):
        word = rest[index]
        if name == "env" and (word in ("-S", "--split-string") or word.startswith(("-S", "--split-string="))):
            line = " ".join(rest[index:])
            return Judgement(
                "unknown", "env -S runs a line", (re.sub(r"^(-S|--split-string)=?\s*", "", line),)
            )
        if word == "--":
            index += 1
            break
        if word.startswith("-") and len(word) > 1:
            changed = True
            index += 2 if word in with_value else 1
        elif name == "env" and "=" in word:
            changed = True
            index += 1
        else:
            break
    inner, inner_known = rest[index + positional :], tuple(known[index + positional :])
    if not inner:
        return Judgement("unknown", f"{name} without a command")
    if name == "watch" or (name in ("parallel", "trap") and len(inner) >= 1 and " " in inner[0]):
        return Judgement(
            "unknown", f"{name} runs a line", (" ".join(inner) if name == "watch" else inner[0],)
        )
    judgement = judge(inner, inner_known, depth + 1)
    plain = name in TRANSPARENT and (not changed or name in ("timeout", "nice", "stdbuf"))
    if name == "time" and changed:
        plain = False
    if judgement.verdict == "reads" and not plain:
        return Judgement("unknown", f"{name} may change what {inner[0]} does")
    return Judgement(judgement.verdict, judgement.reason, judgement.scripts)


def _until(words: Argv) -> Argv:
    for index, word in enumerate(words):
        if word in (";", "+"):
            return words[:index]
    return words


def downloads(argv: Sequence[str]) -> bool:
    """Tell whether the command fetches something from elsewhere."""
    return bool(argv) and argv[0].rsplit("/", 1)[-1] in (
        "curl",
        "wget",
        "fetch",
        "aria2c",
        "nc",
        "ncat",
        "base64",
        "xxd",
    )


def interprets(argv: Sequence[str]) -> bool:
    """Tell whether the command runs what it reads from its standard input."""
    words = [word.rsplit("/", 1)[-1] for word in argv]
    while words and (words[0] in WRAPPERS or words[0] in ("sudo", "doas") or words[0].startswith("-")):
        words.pop(0)
    return bool(words) and words[0] in INTERPRETERS
