"""The syscall filter: every rule of the list, on both architectures, through an interpreter."""

from __future__ import annotations

import errno
import itertools
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from vectora_jail import _bpf, seccomp, syscalls
from vectora_jail.errors import PolicyError
from vectora_jail.syscalls import ARCHES, RULES, Check, Rule, numbers, select

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))
from bpf import ALLOW, KILL, NOTIFY, run

HIGH = 0xABCD_EF01_0000_0000


def policy(*, allow: tuple[str, ...] = (), deny: tuple[str, ...] = (), mode: str = "none") -> Any:
    """Return as much of a policy as the filter looks at."""
    return SimpleNamespace(
        seccomp=SimpleNamespace(allow=allow, deny=deny), network=SimpleNamespace(mode=mode)
    )


def build(
    arch: str = "x86_64",
    *,
    allow: tuple[str, ...] = (),
    deny: tuple[str, ...] = (),
    mode: str = "none",
    **facts: bool,
) -> seccomp.Filter:
    """Return a filter with every fact off unless it is named."""
    keys = ("lockdown", "disk_accounting", "landlock_only", "uid0")
    values = {key: facts.get(key, False) for key in keys}
    return seccomp.filter_for(policy(allow=allow, deny=deny, mode=mode), arch=arch, **values)


def satisfying(check: Check) -> list[int]:
    """Return argument values for which the check is true, with garbage above the low half where it may be."""
    if check.op == "eq":
        values = [check.value, check.value | (~check.mask & 0xFFFFFFFF)]
    elif check.op == "ne":
        values = [check.value ^ 1, check.value ^ 0x80000000]
    elif check.op == "any":
        values = [1 << bit for bit in range(32) if check.mask >> bit & 1] + [check.mask, 0xFFFFFFFF]
    else:
        return [1, 1 << 31, 1 << 32, 1 << 63, 0x7FFFDEADBEE0]
    return [*values, *(value | HIGH for value in values)]


def violating(check: Check) -> list[int]:
    """Return argument values for which the check is false."""
    if check.op == "eq":
        return [check.value ^ (check.mask & -check.mask), check.value ^ 1 | HIGH]
    if check.op == "ne":
        return [check.value, check.value | HIGH]
    if check.op == "any":
        return [0, ~check.mask & 0xFFFFFFFF, HIGH]
    return [0]


def holds(check: Check, args: list[int]) -> bool:
    """Evaluate a check the plain way."""
    value = args[check.arg]
    low = value & 0xFFFFFFFF & check.mask
    return {
        "eq": low == check.value, "ne": low != check.value, "any": bool(low), "none": not low,
        "set64": bool(value),
    }[check.op]  # fmt: skip


def expected(rules: tuple[Rule, ...], name: str, args: list[int]) -> str | int:
    """Return what the list says about one call."""
    for rule in rules:
        if rule.name == name and (
            not rule.when
            or any(all(holds(check, args) for check in alternative) for alternative in rule.when)
        ):
            return rule.errno
    return ALLOW


def every_variant() -> Iterator[tuple[str, frozenset[str], bytes]]:
    """Yield every committed program."""
    for arch in ARCHES:
        for modes in seccomp.VARIANTS:
            yield arch, modes, seccomp.precompiled(arch, modes)


def test_every_rule_answers_its_errno() -> None:
    """Assert that each rule refuses each of its alternatives, with garbage in upper halves too."""
    seen = set()
    for arch, modes, program in every_variant():
        for rule in select(modes, keep_set_id=True):
            if rule.name not in numbers(arch):
                continue
            seen.add(rule)
            for alternative in rule.when or ((),):
                args = [0] * 6
                for values in itertools.product(*(satisfying(check) for check in alternative)):
                    for check, value in zip(alternative, values, strict=True):
                        args[check.arg] = value
                    if not all(holds(check, args) for check in alternative):
                        continue  # several checks of one argument: only some values satisfy all
                    got = run(program, numbers(arch)[rule.name], tuple(args), arch).answer
                    assert got == expected(select(modes, keep_set_id=True), rule.name, args), (
                        arch,
                        modes,
                        rule.key,
                        args,
                    )
                    assert got != ALLOW, (arch, modes, rule.key, args)
    assert seen == set(RULES)


def test_changed_arguments_are_allowed() -> None:
    """Assert that an argument rule lets a call pass once each of its checks is broken."""
    for arch, modes, program in every_variant():
        rules = select(modes, keep_set_id=True)
        for rule in rules:
            if rule.name not in numbers(arch):
                continue
            for alternative in rule.when:
                for broken in alternative:
                    for value in violating(broken):
                        args = [0] * 6
                        for check in alternative:
                            args[check.arg] = satisfying(check)[0]
                        args[broken.arg] = value
                        got = run(program, numbers(arch)[rule.name], tuple(args), arch).answer
                        assert got == expected(rules, rule.name, args), (arch, modes, rule.key, args)


def test_unlisted_calls_are_allowed() -> None:
    """Assert that every call that the list does not name passes, whatever its arguments."""
    for arch, modes, program in every_variant():
        listed = {rule.name for rule in select(modes, keep_set_id=True)}
        for name, number in numbers(arch).items():
            if name not in listed:
                assert run(program, number, (2**64 - 1,) * 6, arch).answer == ALLOW, (arch, modes, name)


def test_random_calls_agree_with_the_list() -> None:
    """Assert that 20,000 random calls get what the list says."""
    rng = random.Random(1)
    interesting = [
        0,
        1,
        2,
        3,
        10,
        16,
        17,
        40,
        0x5412,
        0x2000000,
        0o4755,
        0o2000,
        0o100,
        0o20000000,
        0xFFFFFFFF,
        HIGH,
    ]
    for arch, modes, program in every_variant():
        rules = select(modes, keep_set_id=True)
        table = list(numbers(arch).items())
        for _ in range(1000):
            name, number = rng.choice(table)
            args = [
                rng.choice(interesting) | (rng.getrandbits(64) if rng.random() < 0.2 else 0) for _ in range(6)
            ]
            assert run(program, number, tuple(args), arch).answer == expected(rules, name, args), (
                arch,
                name,
                args,
            )


def test_unknown_and_foreign_numbers() -> None:
    """Assert that x32 gets EPERM, calls not judged ENOSYS, -1 passes, another architecture is killed."""
    for arch, _modes, program in every_variant():
        assert run(program, syscalls.NEWEST, (), arch).answer != errno.ENOSYS or "listns" not in numbers(arch)
        for number in (syscalls.NEWEST + 1, 512, 547, 1000, 0x3FFFFFFF):
            assert run(program, number, (), arch).answer == errno.ENOSYS
        above = errno.EPERM if arch == "x86_64" else errno.ENOSYS
        for number in (0x40000000, 0x40000000 | 59, 0x40000000 | 520, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE):
            assert run(program, number, (), arch).answer == above
        if arch == "x86_64":
            assert run(program, -1, (), arch).answer == ALLOW
        for other in ("i386", "arm", "aarch64" if arch == "x86_64" else "x86_64"):
            for number in (0, 1, 21, 101, 435):
                assert run(program, number, (), other).answer == KILL


def test_no_kill_but_for_the_architecture() -> None:
    """Assert that a program holds exactly one kill, and that it is the answer to a foreign architecture."""
    for _arch, _modes, program in every_variant():
        returns = [program[at + 4 : at + 8] for at in range(0, len(program), 8) if program[at] == _bpf.RET]
        assert returns.count(seccomp.RET_KILL.to_bytes(4, "little")) == 1


def test_required_calls_are_denied() -> None:
    """Assert that what every sandbox denies gets EPERM here, and clone3 and io_uring ENOSYS."""
    names = (
        "ptrace mount umount2 pivot_root unshare setns bpf init_module finit_module delete_module "
        "kexec_load kexec_file_load perf_event_open userfaultfd reboot process_vm_readv "
        "process_vm_writev kcmp pidfd_getfd open_tree move_mount fsopen fsconfig fsmount fspick "
        "mount_setattr open_by_handle_at add_key request_key keyctl swapon swapoff acct quotactl "
        "settimeofday clock_settime adjtimex clock_adjtime syslog vhangup fanotify_init chroot "
        "open_tree_attr statmount listmount quotactl_fd process_madvise name_to_handle_at "
    )
    for arch in ARCHES:
        program = build(arch).program
        for name in names.split():
            assert run(program, numbers(arch)[name], (0,) * 6, arch).answer == errno.EPERM, name
        for name in ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"):
            assert run(program, numbers(arch)[name], (), arch).answer == errno.ENOSYS


def test_calls_that_tools_need_are_allowed() -> None:
    """Assert that what shells, debuggers, runtimes and package managers do with filtered calls passes."""
    for arch in ARCHES:
        program, table = build(arch).program, numbers(arch)
        for name, args in (
            ("clone", (0x3D0F00, 0, 0, 0)),  # a thread
            ("clone", (0x4111, 0)),  # vfork
            ("clone", (0x01200011, 0)),  # fork
            ("socket", (1, 0x80801)),
            ("socket", (16, 0x80003, 0)),  # getifaddrs: raw netlink
            ("socket", (16, 0x80003, 15)),  # udev
            ("socket", (2, 1)),
            ("socket", (10, 0x802)),
            ("socketpair", (1, 0x80005)),
            ("prlimit64", (0, 7, 0x7FFF0000, 0)),  # ulimit -n
            ("prlimit64", (1, 7, 0, 0x7FFF0000)),  # reading the limits of pid 1
            ("sched_setaffinity", (0, 128)),
            ("sched_setaffinity", (77, 128)),  # pthread_setaffinity_np
            ("setpriority", (0, 0, 10)),
            ("ioprio_set", (1, 0, 0x4007)),
            ("personality", (0xFFFFFFFF,)),
            ("personality", (0x40000,)),
            ("fchmod", (3, 0o755)),
            ("fchmodat", (-100, 0, 0o1777)),
            ("openat", (-100, 0, 0o1101, 0o666)),
            ("openat", (-100, 0, 0, 0o7777)),  # no creation: the kernel does not look at the mode
            ("mkdirat", (-100, 0, 0o2755)),
            ("ioctl", (0, 0x5401)),
            ("fallocate", (3, 0, 0, 4096)),
            ("seccomp", (1, 0)),
            ("landlock_create_ruleset", ()),
            ("memfd_create", ()),
            ("pidfd_open", (5,)),
        ):
            assert run(program, table[name], args, arch).answer == ALLOW, (arch, name, args)


def test_worker_is_out_of_reach() -> None:
    """Assert that the six calls that cripple pid 1 are refused; without namespaces for any other process."""
    for arch in ARCHES:
        for landlock_only, victims, free in ((False, (1,), (0, 2, 4242)), (True, (1, 2, 4242), (0,))):
            program, table = build(arch, landlock_only=landlock_only).program, numbers(arch)
            for pid in victims:
                for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
                    assert run(program, table[name], (pid | HIGH,), arch).answer == errno.EPERM
                assert run(program, table["setpriority"], (0, pid, 19), arch).answer == errno.EPERM
                assert run(program, table["ioprio_set"], (1, pid, 19), arch).answer == errno.EPERM
            for pid in free:
                assert run(program, table["sched_setaffinity"], (pid,), arch).answer == ALLOW
                assert run(program, table["setpriority"], (0, pid, 19), arch).answer == ALLOW
            for which in (1, 2):
                assert run(program, table["setpriority"], (which, 0, 19), arch).answer == errno.EPERM
                assert run(program, table["ioprio_set"], (which + 1, 0, 19), arch).answer == errno.EPERM
            for limit in (0x7FFF0000, 1 << 32, 1 << 63):
                assert run(program, table["prlimit64"], (1, 7, limit), arch).answer == errno.EPERM


def test_landlock_only_closes_the_network() -> None:
    """Assert that without namespaces no inet, netlink or named unix socket can be made."""
    for arch in ARCHES:
        number = numbers(arch)["socket"]
        for mode, answer in (("none", errno.EPERM), ("host", ALLOW)):
            program = build(arch, landlock_only=True, mode=mode).program
            assert [run(program, number, (family, 1), arch).answer for family in (2, 10, 16)] == [answer] * 3
            assert run(program, number, (1, 1), arch).answer == errno.EPERM
            assert run(program, numbers(arch)["socketpair"], (1, 1), arch).answer == ALLOW
            assert run(program, numbers(arch)["shmget"], (), arch).answer == errno.EPERM
        strict = build(arch, landlock_only=True, lockdown=True, mode="host").program
        assert run(strict, number, (2, 1), arch).answer == errno.EPERM


def test_allow_and_deny_change_the_list() -> None:
    """Assert that `allow` takes off a call or one rule, `deny` adds and wins, and the report says partial."""
    shown = build(allow=("ptrace",))
    assert (shown.state, run(shown.program, 101).answer) == ("partial", ALLOW)
    assert "ptrace" in shown.detail
    assert build().state == "on"
    one = build(allow=("socket.alg",)).program
    assert (run(one, 41, (38, 5)).answer, run(one, 41, (40, 1)).answer) == (errno.EAFNOSUPPORT, errno.EPERM)
    assert run(build(allow=("socket",), landlock_only=True).program, 41, (2, 1)).answer == errno.EPERM
    both = build(allow=("ptrace", "io_uring_setup"), deny=("ptrace", "mseal", "connect"))
    assert [run(both.program, nr).answer for nr in (101, 462, 42, 425)] == [errno.EPERM] * 3 + [ALLOW]
    assert run(build("aarch64", deny=("open", "mseal")).program, 462, (), "aarch64").answer == errno.EPERM
    for uid0, answer in ((False, ALLOW), (True, errno.EPERM)):
        program = build(allow=("chmod", "fchmod.setid"), uid0=uid0).program
        assert run(program, 90, (0, 0o4755)).answer == answer
        assert run(program, 91, (0, 0o4755)).answer == answer


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"deny": ("mont",)}, "did you mean 'mount'"),
        ({"allow": ("read",)}, "built-in list"),
        ({"allow": ("ptraec",)}, "did you mean 'ptrace'"),
        ({"allow": ("ptrace",), "lockdown": True}, "nothing under lockdown"),
    ],
)
def test_wrong_changes_are_refused(change: dict[str, Any], text: str) -> None:
    """Assert that a name that nobody has, and any `allow` under lockdown, is a PolicyError that helps."""
    with pytest.raises(PolicyError, match=text):
        build(**change)


def test_other_architecture_is_reported_off() -> None:
    """Assert that an architecture without a table has no filter and says so."""
    assert build("riscv64") == seccomp.Filter(
        b"", "", "off", "no syscall filter for riscv64, only for x86_64 and aarch64"
    )


def test_committed_filters_are_current() -> None:
    """Assert that `_filters.py` holds what the list compiles to today."""
    assert seccomp.committed_is_current(), "run python -m vectora_jail.seccomp --generate"


def test_default_needs_no_list() -> None:
    """Assert that the default filter is made without the list, pyseccomp or ctypes being imported."""
    code = (
        "import sys; from types import SimpleNamespace as N; from vectora_jail.seccomp import filter_for\n"
        "p = N(seccomp=N(allow=(), deny=()), network=N(mode='none'))\n"
        "f = filter_for(p, arch='x86_64', lockdown=True, disk_accounting=True, landlock_only=False,"
        " uid0=False)\n"
        "print(f.state, {'vectora_jail.syscalls', 'pyseccomp', 'ctypes'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert shown.stdout == "on set()\n"


def test_cached_and_distinct() -> None:
    """Assert that equal arguments give the same object, and that each fact changes the program."""
    assert build(deny=("mseal",)) is build(deny=("mseal",))
    programs = {build(**{fact: True}).digest for fact in ("lockdown", "disk_accounting", "landlock_only")}
    assert len(programs | {build().digest}) == 4
    assert build().digest == build(uid0=True).digest


def test_long_lists_reach_every_answer() -> None:
    """Assert that the assembler bridges more than 255 instructions: a list of argument checks."""
    for arch in ARCHES:
        rules = tuple(
            Rule(
                name,
                1 + number % 100,
                "",
                ((Check(0, "eq", number), Check(1, "set64")), (Check(2, "any", mask=1 << 5),)),
            )
            for name, number in numbers(arch).items()
            if number % 2
        )
        program = seccomp.compile_rules(rules, arch)
        assert len(program) // 8 > 1500
        for name, number in numbers(arch).items():
            for args in ([number, 1 << 40, 0], [number, 0, 32], [number, 0, 31], [number + 1, 5, 0]):
                assert run(program, number, tuple(args), arch).answer == expected(
                    rules, name, [*args, 0, 0, 0]
                )


def test_too_long_lists_are_refused() -> None:
    """Assert that a program that the kernel would not take (4,096 instructions) is an error here."""
    checks = tuple(Check(arg, "any", mask=value) for value in range(1, 16) for arg in range(6))
    rules = [
        Rule(name, 1, "", ((*checks, Check(0, "eq", number)),)) for name, number in numbers("x86_64").items()
    ]
    with pytest.raises(ValueError, match="4096"):
        seccomp.compile_rules(rules, "x86_64")


def test_notify_spares_what_programs_probe() -> None:
    """Assert that a notifying filter hands over refusals, except what programs meet at start."""
    modes = seccomp.VARIANTS[0]
    program = seccomp.compile_rules(select(modes, keep_set_id=True), "x86_64", notify=True)
    for name, answer in (
        ("mount", NOTIFY),
        ("unshare", NOTIFY),
        ("clone3", errno.ENOSYS),
        ("keyctl", errno.EPERM),
    ):
        assert run(program, numbers("x86_64")[name]).answer == answer


def test_hot_calls_are_short() -> None:
    """Assert that `openat`, the most frequent call with argument checks, takes at most 10 instructions."""
    for arch in ARCHES:
        program = build(arch).program
        assert run(program, numbers(arch)["openat"], (0, 0, 0), arch).steps <= 10
        steps = [run(program, number, (), arch).steps for number in numbers(arch).values()]
        assert max(steps) <= 30
        assert sum(steps) / len(steps) <= 16


def test_libseccomp_agrees() -> None:
    """Assert that libseccomp makes filters from the same rules that answer the same."""
    pyseccomp = cast("Any", pytest.importorskip("pyseccomp"))
    tokens = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}
    for arch in ARCHES:
        for name, number in numbers(arch).items():
            known = pyseccomp.resolve_syscall(tokens[arch], name)
            assert known in (number, -1), (arch, name)  # -1: newer than this libseccomp
    rng = random.Random(2)
    for arch, modes, program in every_variant():
        theirs = _compile_with_libseccomp(pyseccomp, tokens[arch], select(modes, keep_set_id=True))
        for rule in select(modes, keep_set_id=True):
            number = numbers(arch).get(rule.name, -1)
            if number < 0 or pyseccomp.resolve_syscall(tokens[arch], rule.name) < 0:
                continue
            for alternative in rule.when or ((),):
                for _ in range(10):
                    args = [rng.choice([0, 1, 2, HIGH]) for _ in range(6)]
                    for check in alternative:
                        args[check.arg] = rng.choice(satisfying(check) + violating(check))
                    ours = run(program, number, tuple(args), arch).answer
                    answer = run(theirs, number, tuple(args), arch).answer
                    assert (answer == ALLOW) == (ours == ALLOW), (arch, rule.key, args)
                    assert answer in {ALLOW} | {other.errno for other in RULES if other.name == rule.name}


def _compile_with_libseccomp(pyseccomp: Any, token: Any, rules: tuple[Rule, ...]) -> bytes:
    """Compile with one errno a call: libseccomp refuses overlapping rules whose answers differ."""
    import tempfile

    made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    if pyseccomp.system_arch() != token:
        made.remove_arch(pyseccomp.system_arch())
        made.add_arch(token)
    answers: dict[str, int] = {}
    for rule in rules:
        if pyseccomp.resolve_syscall(token, rule.name) < 0:
            continue
        for alternative in rule.when or ((),):
            for terms in _libseccomp_terms(pyseccomp, alternative):
                made.add_rule(pyseccomp.ERRNO(answers.setdefault(rule.name, rule.errno)), rule.name, *terms)
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()


def _libseccomp_terms(pyseccomp: Any, alternative: tuple[Check, ...]) -> list[list[Any]]:
    """Write an alternative as conjunctions of masked comparisons, of which libseccomp takes one an argument.

    "Not one of these values" becomes the list of all bit prefixes that none of the values has.
    """
    masked = pyseccomp.MASKED_EQ
    excluded: dict[int, set[int]] = {}
    terms: list[list[Any]] = [[]]
    for check in alternative:
        if check.op == "eq":
            choices = [pyseccomp.Arg(check.arg, masked, check.mask, check.value)]
        elif check.op == "any":
            bits = [1 << bit for bit in range(32) if check.mask >> bit & 1]
            choices = [pyseccomp.Arg(check.arg, masked, bit, bit) for bit in bits]
        elif check.op == "set64":
            choices = [pyseccomp.Arg(check.arg, pyseccomp.NE, 0)]
        else:
            excluded.setdefault(check.arg, set()).add(check.value)
            continue
        terms = [[*term, choice] for term in terms for choice in choices]
    for arg, values in excluded.items():
        prefixes = {
            (0xFFFFFFFF << bit & 0xFFFFFFFF, (value >> bit ^ 1) << bit)
            for value in values
            for bit in range(32)
        }
        choices = [
            pyseccomp.Arg(arg, masked, mask, prefix)
            for mask, prefix in sorted(prefixes)
            if all(value & mask != prefix for value in values)
        ]
        terms = [[*term, choice] for term in terms for choice in choices]
    return terms
