"""What a persistent shell keeps when its bash is replaced: read from one bash, written as a program for the next.

The text comes from inside the jail. It is only ever given back to a shell of the same jail, never run on the host.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["FINISH", "quote", "restoring"]

FINISH: Final = (
    rb"""__vj() { \builtin printf '%d\n' "$1" >&201 || \builtin exit; { \builtin declare -p; """
    rb"""\builtin printf '\0'; \builtin declare -f; \builtin declare -Fx; \builtin alias -p; """
    rb"""\builtin umask -p; \builtin printf '\0'; } >&201; """
    rb"""{ \builtin : ; } >&203 2>&202 && \builtin printf 1 >&201 || \builtin printf 0 >&201; }; """
    rb"""\builtin readonly -f __vj"""
    b"\n"
)
"""Defines what ends each call: it writes the exit code and a line feed, then, while the host goes on already, the
variables, NUL, functions, aliases and the umask, NUL, and whether the caller's streams are still there, `1` or `0`.
A function, because bash reads its program byte by byte: 0.3 µs each. Options are in BASHOPTS and SHELLOPTS, read-only
variables that `declare -p` prints; the directory is in PWD."""

_PIECE: Final = re.compile(
    rb"""[^"'\\\n$]+ | \$'[^'\\]*(?:\\.[^'\\]*)*' | "[^"\\]*(?:\\.[^"\\]*)*" | '[^']*' | \\. | \$""",
    re.DOTALL | re.VERBOSE,
)
_DECLARED: Final = re.compile(rb"declare -([-A-Za-z]+) ([A-Za-z_][A-Za-z0-9_]*)")
_OWN: Final = re.compile(
    rb"BASH.*|COMP_.*|DIRSTACK|EPOCH(?:REALTIME|SECONDS)|E?UID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|RANDOM"
    rb"|SECONDS|SHELLOPTS|SHLVL|SRANDOM|READLINE_.*|_"
)
"""Variables that bash itself sets."""
_NOT_KEPT: Final = (b"errexit", b"noexec", b"monitor", b"posix")

_OPTIONS: Final = rb"""
for REPLY in ${BASHOPTS//:/ }; do [[ :%(shopt)s: == *:$REPLY:* ]] || \builtin shopt -u $REPLY; done
for REPLY in %(shopt_words)s; do \builtin shopt -s $REPLY; done
"""


def quote(text: bytes) -> bytes:
    """Return the text as one word for a shell."""
    return b"'" + text.replace(b"'", rb"'\''") + b"'"


def _statements(text: bytes) -> list[bytes]:
    """Split what `declare -p` printed; a value may hold line feeds inside quotes."""
    found, start, at = [], 0, 0
    while at < len(text):
        if text[at] == 0x0A:
            found.append(text[start:at])
            at += 1
            start = at
            continue
        piece = _PIECE.match(text, at)
        at = piece.end() if piece else at + 1
    return found


def restoring(variables: bytes, rest: bytes, base: tuple[bytes, ...]) -> bytes:
    """Return the program that gives a new bash the state of an old one.

    Args:
        variables: What `declare -p` printed.
        rest: Functions, aliases and the umask.
        base: The environment that the new bash starts with, `NAME=value`.
    """
    kept: list[bytes] = []
    names: set[bytes] = set()
    options: dict[bytes, bytes] = {b"BASHOPTS": b"", b"SHELLOPTS": b""}
    last: list[bytes] = []
    for statement in _statements(variables):
        declared = _DECLARED.match(statement)
        if declared is None:
            continue
        flags, name = declared.groups()
        names.add(name)
        if name in options:
            options[name] = statement.partition(b"=")[2].strip(b'"')
        if b"r" in flags or _OWN.fullmatch(name):
            continue
        (last if name in (b"IFS", b"REPLY") else kept).append(statement)
    gone = [item.partition(b"=")[0] for item in base if item.partition(b"=")[0] not in names]
    unset = [name for name in gone if re.fullmatch(rb"[A-Za-z_][A-Za-z0-9_]*", name)]
    shopt, shell = (
        [word for word in options[name].split(b":") if re.fullmatch(rb"[a-z_-]+", word)]
        for name in (b"BASHOPTS", b"SHELLOPTS")
    )
    return b"\n".join(
        [
            *([b"\\builtin unset -v " + b" ".join(unset)] if unset else []),
            _OPTIONS % {b"shopt": b":".join(shopt), b"shopt_words": b" ".join(shopt)},
            rb"\builtin eval " + quote(rest),
            rb"\builtin eval " + quote(b"\n".join(kept)),
            rb'\builtin cd -- "$PWD"',
            # again: cd has set OLDPWD, and the shell's own options may split or expand words
            *(item for item in kept if item.startswith(b"declare -x OLDPWD=")),
            *(rb"\builtin set -o " + word for word in shell if word not in _NOT_KEPT),
            rb"\builtin eval " + quote(b"\n".join(last)) if last else b"",
            b"",
        ]
    )
