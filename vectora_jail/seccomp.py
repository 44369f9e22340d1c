"""From the deny list to the bytes that the worker hands to seccomp(2), with an assembler of our own.

No library is needed: rules are turned into classic BPF (bpf(2) "classic",
Documentation/userspace-api/seccomp_filter) by the hundred lines below, for any list and for both
architectures on either; libseccomp serves the tests as an oracle. The filters of the shipped list lie ready
in `_filters.py`, made by `python -m vectora_jail.seccomp --generate`.

The program first checks the architecture, then finds the number in a binary tree whose likely leaves lie
high, so that a call costs a handful of instructions instead of one for each entry; a call that the tree
allows without a look at its arguments costs none at all from Linux 5.11 on, which remembers such numbers
(`seccomp_cache_prepare`).
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from vectora_jail._bpf import AND, BPF_MAXINSNS, JEQ, JGE, JSET, LD, Assembler, disassemble

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vectora_jail.policy import Policy
    from vectora_jail.syscalls import Check, Rule

__all__ = [
    "VARIANTS",
    "Filter",
    "compile_rules",
    "filter_for",
    "generate",
    "modes_of",
    "precompiled",
]

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
RET_ALLOW, RET_ERRNO, RET_NOTIFY, RET_KILL = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
X32_BIT, NO_CALL = 0x40000000, 0xFFFFFFFF
EPERM, ENOSYS = 1, 38
NR, ARCH, ARGS = 0, 4, 16  # offsets in struct seccomp_data; both architectures are little-endian

# How often a call whose arguments are looked at is made, against 1 for any other range of numbers.
_WEIGHTS = {
    "openat": 400,
    "ioctl": 100,
    "open": 50,
    "fcntl": 20,
    "clone": 20,
    "socket": 20,
    "prlimit64": 10,
    "fchmod": 5,
    "chmod": 5,
}

State = Literal["on", "partial", "off"]


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter and what may be said of it in a report."""

    program: bytes
    """Array of `struct sock_filter`, 8 bytes each; empty when there is none."""
    digest: str
    """SHA-256 of the program, 64 hex digits; `""` when there is none."""
    state: State
    """`partial` when rules of the shipped list were taken off, `off` on an architecture without one."""
    detail: str


def _check(asm: Assembler, check: Check, true: int, false: int) -> int:
    low = ARGS + 8 * check.arg
    if check.op == "set64":
        high = asm.then(asm.branch(JSET, 0xFFFFFFFF, true, false), LD, low + 4)
        return asm.then(asm.branch(JSET, 0xFFFFFFFF, true, high), LD, low)
    if check.op in ("ne", "none"):
        true, false = false, true
    if check.op in ("any", "none"):
        return asm.then(
            asm.branch(JSET, check.mask, asm.past_load(true, low), asm.past_load(false, low)), LD, low
        )
    if check.mask != 0xFFFFFFFF:
        return asm.then(asm.then(asm.branch(JEQ, check.value, true, false), AND, check.mask), LD, low)
    return asm.then(
        asm.branch(JEQ, check.value, asm.past_load(true, low), asm.past_load(false, low)), LD, low
    )


def _block(asm: Assembler, rules: Sequence[Rule], notify: bool) -> int:
    """Emit what decides about one call by its arguments; the first rule that applies answers."""
    label = asm.ret(RET_ALLOW)
    for rule in reversed(rules):
        hit = asm.ret(_answer(rule, notify))
        if not rule.when:
            label = hit
        for alternative in reversed(rule.when):
            miss, label = label, hit
            for check in reversed(alternative):
                label = _check(asm, check, label, miss)
    return label


def _answer(rule: Rule, notify: bool) -> int:
    return RET_NOTIFY if notify and not rule.quiet and rule.errno == EPERM else RET_ERRNO | rule.errno


def _tree(asm: Assembler, leaves: Sequence[tuple[int, int, int]]) -> int:
    """Emit the search over `(first number, label, weight)`, sorted, split where the weights balance."""
    if len(leaves) == 1:
        return leaves[0][1]
    total, left = sum(weight for _, _, weight in leaves), leaves[0][2]
    split = 1
    while split < len(leaves) - 1 and abs(total - 2 * (left + leaves[split][2])) <= abs(total - 2 * left):
        left += leaves[split][2]
        split += 1
    above = _tree(asm, leaves[split:])
    below = _tree(asm, leaves[:split])
    return asm.branch(JGE, leaves[split][0], above, below)


def compile_rules(rules: Iterable[Rule], arch: str, *, notify: bool = False) -> bytes:
    """Return the program for `rules` on `arch` ("x86_64", "aarch64").

    Raises KeyError for another architecture, ValueError when the program is longer than the kernel takes.

    With `notify` the calls that would get EPERM are handed to a listener (SECCOMP_RET_USER_NOTIF) instead,
    except those that ordinary programs probe at start.
    """
    from vectora_jail.syscalls import NEWEST, numbers

    table = numbers(arch)
    by_number: dict[int, list[Rule]] = {}
    for rule in rules:
        if rule.name in table and rule.arch in ("", arch):
            by_number.setdefault(table[rule.name], []).append(rule)
    names = {number: name for name, number in table.items()}

    asm = Assembler()
    allow = asm.ret(RET_ALLOW)
    blocks: dict[tuple[tuple[object, ...], ...], int] = {}
    leaves: list[tuple[int, int, int]] = [(0, allow, 1)]

    def leaf(first: int, label: int, weight: int) -> None:
        if leaves[-1][0] == first:
            leaves.pop()
        if not leaves or leaves[-1][1] != label:
            leaves.append((first, label, weight))

    for number in sorted(by_number):
        group = by_number[number]
        content = tuple((rule.errno, rule.when, rule.quiet) for rule in group)
        if content not in blocks:
            blocks[content] = _block(asm, group, notify)
        leaf(number, blocks[content], _WEIGHTS.get(names[number], 1))
        leaf(number + 1, allow, 1)
    leaf(NEWEST + 1, asm.ret(RET_ERRNO | ENOSYS), 1)
    if arch == "x86_64":
        # x32 calls carry this bit; -1 is what a tracer leaves to skip a call, and no call.
        leaf(X32_BIT, asm.ret(RET_ERRNO | EPERM), 1)
        leaf(NO_CALL, allow, 1)

    right = asm.then(_tree(asm, leaves), LD, NR)
    # The one kill: a call of another architecture (int 0x80) means another table of numbers, and nothing to
    # answer to.
    asm.then(asm.branch(JEQ, AUDIT_ARCH[arch], right, asm.ret(RET_KILL)), LD, ARCH)
    program = asm.program()
    if len(program) > 8 * BPF_MAXINSNS:
        msg = f"the filter has {len(program) // 8} instructions, the kernel takes {BPF_MAXINSNS}"
        raise ValueError(msg)
    return program


def modes_of(
    *, lockdown: bool, disk_accounting: bool, landlock_only: bool, host_network: bool
) -> frozenset[str]:
    """Return the names of the rule modes (`Rule.modes`) that these facts switch on."""
    modes = {"landlock" if landlock_only else "bwrap"}
    if lockdown:
        modes.add("lockdown")
    if disk_accounting:
        modes.add("disk")
    if landlock_only and (lockdown or not host_network):
        modes.add("no-inet")
    return frozenset(modes)


def filter_for(
    policy: Policy,
    *,
    arch: str,
    lockdown: bool,
    disk_accounting: bool,
    landlock_only: bool,
    uid0: bool,
) -> Filter:
    """Return the filter of a worker with this policy; cached for each set of arguments.

    `arch` is `os.uname().machine`. `disk_accounting`: the disk limit rests on counting written bytes.
    `landlock_only`: no namespaces. `uid0`: the jail's commands run as uid 0, which keeps the set-id rules on
    even against `allow`.

    Raises PolicyError for a name in `[sandbox.seccomp]` that no architecture has, for an `allow` that names
    nothing on the list, and for any `allow` under lockdown.
    """
    return _filter(
        arch,
        modes_of(
            lockdown=lockdown,
            disk_accounting=disk_accounting,
            landlock_only=landlock_only,
            host_network=policy.network.mode == "host",
        ),
        frozenset(policy.seccomp.allow),
        frozenset(policy.seccomp.deny),
        uid0,
    )


@lru_cache(maxsize=64)
def _filter(
    arch: str, modes: frozenset[str], allow: frozenset[str], deny: frozenset[str], uid0: bool
) -> Filter:
    if arch not in AUDIT_ARCH:
        return Filter(b"", "", "off", f"no syscall filter for {arch}, only for {' and '.join(AUDIT_ARCH)}")
    if not allow and not deny:
        return _describe(precompiled(arch, modes), "on", "default list, precompiled", modes)
    from vectora_jail.syscalls import select

    _refuse_unknown(allow, deny, lockdown="lockdown" in modes)
    changes = [f"denied too: {', '.join(sorted(deny))}"] if deny else []
    changes += [f"taken off: {', '.join(sorted(allow))}"] if allow else []
    program = compile_rules(select(modes, allow=allow, deny=deny, keep_set_id=uid0), arch)
    return _describe(program, "partial" if allow else "on", "default list, " + "; ".join(changes), modes)


def _describe(program: bytes, state: State, detail: str, modes: frozenset[str]) -> Filter:
    if "landlock" in modes:
        detail += (
            "; without namespaces: no unix sockets but pairs, no System V ipc, no affinity of other threads"
        )
    return Filter(program, hashlib.sha256(program).hexdigest(), state, detail)


def _refuse_unknown(allow: frozenset[str], deny: frozenset[str], *, lockdown: bool) -> None:
    from difflib import get_close_matches

    from vectora_jail.errors import PolicyError, Problem
    from vectora_jail.syscalls import ARCHES, allowable, is_syscall, numbers

    problems = []
    if lockdown and allow:
        problems.append(
            Problem("seccomp.allow", found=repr(sorted(allow)), expected="nothing under lockdown")
        )
    known = {name for arch in ARCHES for name in numbers(arch)}
    for key, names, expected, choices in (
        ("seccomp.deny", {name for name in deny if not is_syscall(name)}, "the name of a system call", known),
        ("seccomp.allow", allow - allowable(), "a system call or rule of the built-in list", allowable()),
    ):
        for name in sorted(names):
            close = get_close_matches(name, choices, 1)
            hint = f"did you mean {close[0]!r}?" if close else ""
            problems.append(Problem(key, found=repr(name), expected=expected, hint=hint))
    if problems:
        raise PolicyError(problems=problems)


VARIANTS: tuple[frozenset[str], ...] = tuple(
    modes_of(lockdown=lockdown, disk_accounting=disk, landlock_only=landlock, host_network=host)
    for lockdown, disk, landlock, host in (
        *((lockdown, disk, False, False) for lockdown in (False, True) for disk in (False, True)),
        *((lockdown, disk, True, False) for lockdown in (False, True) for disk in (False, True)),
        (False, False, True, True),
        (False, True, True, True),
    )
)
"""Every combination of modes that a policy can ask for, in the order of the precompiled programs."""


def precompiled(arch: str, modes: frozenset[str]) -> bytes:
    """Return the committed program of the shipped list for `arch` and one of `VARIANTS`."""
    return _unpacked(arch)[VARIANTS.index(modes)]


@lru_cache(maxsize=2)
def _unpacked(arch: str) -> tuple[bytes, ...]:
    import zlib
    from base64 import b85decode

    from vectora_jail._filters import PACKED

    data = memoryview(zlib.decompress(b85decode(PACKED[arch])))
    programs = []
    while data:
        length = int.from_bytes(data[:2], "little") * 8
        programs.append(bytes(data[2 : 2 + length]))
        data = data[2 + length :]
    return tuple(programs)


def list_digest() -> str:
    """Return the SHA-256 of the shipped list, 64 hex digits: what `_filters.py` was made from."""
    from vectora_jail.syscalls import RULES

    text = "\n".join(
        repr((r.key, r.errno, r.reason, r.when, sorted(r.modes), r.arch, r.fixed, r.quiet)) for r in RULES
    )
    return hashlib.sha256(text.encode()).hexdigest()


def fresh(arch: str) -> list[bytes]:
    """Return what `_unpacked` must be: the shipped list compiled anew, in the order of `VARIANTS`."""
    from vectora_jail.syscalls import select

    return [compile_rules(select(modes, keep_set_id=True), arch) for modes in VARIANTS]


def generate() -> str:
    """Return the text of `_filters.py` for the shipped list."""
    import zlib
    from base64 import b85encode

    lines = [
        '"""Filters of the shipped list: `python -m vectora_jail.seccomp --generate` makes them."""',
        "",
        "from __future__ import annotations",
        "",
        f'LIST_DIGEST = "{list_digest()}"',
        "",
        "PACKED = {",
    ]
    for arch in AUDIT_ARCH:
        raw = b"".join((len(program) // 8).to_bytes(2, "little") + program for program in fresh(arch))
        text = b85encode(zlib.compress(raw, 9)).decode()
        rows = [text[at : at + 96] for at in range(0, len(text), 96)]
        lines += [f'    "{arch}": (', *(f'        "{row}"' for row in rows), "    ),"]
    return "\n".join([*lines, "}", ""])


def committed_is_current() -> bool:
    """Return whether `_filters.py` holds what the list compiles to (zlib versions pack differently)."""
    from vectora_jail._filters import LIST_DIGEST

    return list_digest() == LIST_DIGEST and all(list(_unpacked(arch)) == fresh(arch) for arch in AUDIT_ARCH)


def main(argv: Sequence[str]) -> int:
    """`--generate` writes `_filters.py` anew, `--check` compares it, `--dump ARCH` lists the default."""
    from pathlib import Path

    target = Path(__file__).with_name("_filters.py")
    if argv[:1] == ["--generate"]:
        target.write_text(generate(), encoding="utf-8")
        return 0
    if argv[:1] == ["--check"]:
        return 0 if committed_is_current() else 1
    if argv[:1] == ["--dump"] and argv[1:2] and argv[1] in AUDIT_ARCH:
        sys.stdout.write(disassemble(precompiled(argv[1], VARIANTS[0])) + "\n")
        return 0
    sys.stderr.write(f"{main.__doc__}\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
