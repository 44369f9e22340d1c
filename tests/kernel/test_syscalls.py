"""The shipped deny list against the running kernel, entry by entry, and ordinary programs under it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vectora_jail import seccomp
from vectora_jail.syscalls import NEWEST, Check, Rule, numbers, select

if TYPE_CHECKING:
    from collections.abc import Callable

ARCH = os.uname().machine
SOURCE = Path(__file__).with_name("try_syscall.c")
BAD = 0xFFFF_FFFF_FFFF_F000  # no pointer of user space, no descriptor, no process

pytestmark = [
    pytest.mark.skipif(ARCH not in seccomp.AUDIT_ARCH, reason=f"no filter for {ARCH}"),
    pytest.mark.timeout(120),
]

Calls = list[tuple[str, int, tuple[int, ...]]]


@pytest.fixture(scope="session")
def try_syscall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the static helper once."""
    compiler = next((cc for cc in ("musl-gcc", "gcc", "cc") if shutil.which(cc)), None)
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("try") / "try_syscall"
    subprocess.run(
        [compiler, "-static", "-O2", "-std=gnu11", "-Wall", "-Werror", str(SOURCE), "-o", str(target)],
        check=True,
        timeout=60,
    )
    return target


@pytest.fixture
def attempt(try_syscall: Path, tmp_path: Path) -> Callable[[bytes, Calls], list[str]]:
    """Return a function that makes calls under a filter (`b""`: none) and returns their outcomes."""

    def run(program: bytes, calls: Calls) -> list[str]:
        (tmp_path / "filter").write_bytes(program)
        lines = "".join(f"{abi} {nr:x} {' '.join(f'{a:x}' for a in args)}\n" for abi, nr, args in calls)
        made = subprocess.run(
            [try_syscall, tmp_path / "filter" if program else "-"],
            input=lines,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outcomes = made.stdout.splitlines()
        assert len(outcomes) == len(calls), made.stderr
        return outcomes

    return run


def _value(check: Check, *, fits: bool) -> int:
    """Return one value for which the check is true, or false."""
    if check.op == "eq":
        return check.value if fits else check.value ^ (check.mask & -check.mask)
    if check.op == "ne":
        return check.value ^ 1 if fits else check.value
    if check.op == "any":
        return check.mask & -check.mask if fits else 0
    return BAD if fits else 0


def _arguments(alternative: tuple[Check, ...], broken: Check | None = None) -> list[int]:
    args = [BAD] * 6
    for check in alternative:
        args[check.arg] = _value(check, fits=check is not broken)
    return args


def _expected(rules: tuple[Rule, ...], name: str, args: list[int]) -> int:
    def holds(check: Check) -> bool:
        low = args[check.arg] & 0xFFFFFFFF & check.mask
        return {"eq": low == check.value, "ne": low != check.value, "any": low != 0}.get(
            check.op, args[check.arg] != 0
        )

    for rule in rules:
        if rule.name == name and (not rule.when or any(all(map(holds, a)) for a in rule.when)):
            return rule.errno
    return 0


@pytest.mark.parametrize("modes", seccomp.VARIANTS, ids=lambda modes: "+".join(sorted(modes)))
def test_every_entry_is_refused_by_the_kernel(
    modes: frozenset[str], attempt: Callable[[bytes, Calls], list[str]]
) -> None:
    """Assert that each alternative of each rule gets its errno, with garbage in upper halves too."""
    rules = select(modes, keep_set_id=True)
    calls: Calls = []
    wanted = []
    for rule in rules:
        if rule.name not in numbers(ARCH):
            continue
        for alternative in rule.when or ((),):
            args = _arguments(alternative)
            dirty = list(args)
            for check in alternative:
                if check.op != "set64":
                    dirty[check.arg] |= 0xABCD_0000_0000_0000
            for form in (args, dirty):
                calls.append(("n", numbers(ARCH)[rule.name], tuple(form)))
                wanted.append((rule.key, str(-_expected(rules, rule.name, form))))
    got = attempt(seccomp.precompiled(ARCH, modes), calls)
    assert [(key, outcome) for (key, _), outcome in zip(wanted, got, strict=True)] == wanted


# What keeps a call that gets through from doing anything: CLONE_THREAD without CLONE_SIGHAND is invalid.
_HARMLESS = {("clone", 0): 0x00010000}


def test_changed_arguments_reach_the_kernel(attempt: Callable[[bytes, Calls], list[str]]) -> None:
    """Assert that an argument rule stops at its arguments: with one changed, the kernel itself answers."""
    modes = seccomp.VARIANTS[0]
    rules = select(modes, keep_set_id=True)
    calls: Calls = []
    keys = []
    for rule in rules:
        for alternative in rule.when:
            for broken in alternative:
                args = _arguments(alternative, broken)
                args[broken.arg] = _HARMLESS.get((rule.name, broken.arg), args[broken.arg])
                if rule.name in numbers(ARCH) and not _expected(rules, rule.name, args):
                    calls.append(("n", numbers(ARCH)[rule.name], tuple(args)))
                    keys.append(rule.key)
    got = dict(zip(keys, attempt(seccomp.precompiled(ARCH, modes), calls), strict=True))
    assert len(got) > 20
    # An ordinary user gets EPERM for some of them from the kernel itself.
    assert got == dict(zip(keys, attempt(b"", calls), strict=True))
    assert got["openat.setid"] == got["fchmodat.setid"] == str(-errno.EFAULT)
    assert got["fchmod.setid"] == got["ioctl.tiocsti"] == str(-errno.EBADF)


@pytest.mark.root  # an ordinary user gets EPERM from most of these anyway
def test_entries_succeed_in_reaching_the_kernel_without_a_filter(
    attempt: Callable[[bytes, Calls], list[str]],
) -> None:
    """Assert that it is the filter that refuses: without it calls reach the kernel's own checks."""
    names = (
        "mount umount2 pivot_root chroot open_tree move_mount fsopen fspick unshare setns init_module"
        " kexec_load swapon acct process_vm_readv pidfd_getfd bpf perf_event_open keyctl name_to_handle_at"
        " settimeofday clock_settime"
    )
    calls: Calls = [("n", numbers(ARCH)[name], (BAD,) * 6) for name in names.split()]
    for name, outcome in zip(names.split(), attempt(b"", calls), strict=True):
        assert outcome != str(-errno.EPERM), name
        assert outcome.startswith("-"), (name, outcome)


@pytest.mark.skipif(ARCH != "x86_64", reason="x32 and int 0x80 are of x86-64")
def test_other_abis_are_closed(attempt: Callable[[bytes, Calls], list[str]]) -> None:
    """Assert that x32 numbers get EPERM and int 0x80 is killed, and that the filter is what does it."""
    calls: Calls = [
        ("x", 39, ()),
        ("x", 165, (BAD,) * 6),
        ("x", 520, ()),
        ("i", 20, ()),
        ("i", 21, (BAD,) * 6),
    ]
    free = attempt(b"", calls)
    assert free[0] == str(-errno.ENOSYS) or int(free[0]) > 0
    assert attempt(seccomp.precompiled(ARCH, seccomp.VARIANTS[0]), calls) == [
        *[str(-errno.EPERM)] * 3,
        *[f"signal {signal.SIGSYS:d}"] * 2,
    ]


def test_calls_not_judged_do_not_exist(attempt: Callable[[bytes, Calls], list[str]]) -> None:
    """Assert that numbers above the newest known call answer ENOSYS and that -1 stays harmless."""
    calls: Calls = [("n", nr, (BAD,) * 6) for nr in (NEWEST + 1, 512, 547, 1000, 0x3FFFFFFF, 0xFFFFFFFF)]
    assert attempt(seccomp.precompiled(ARCH, seccomp.VARIANTS[0]), calls) == [str(-errno.ENOSYS)] * 6


@pytest.fixture
def under(try_syscall: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a shell command under the default filter."""

    def run(
        command: str, modes: frozenset[str] = seccomp.VARIANTS[0], program: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "filter").write_bytes(program or seccomp.precompiled(ARCH, modes))
        return subprocess.run(
            [try_syscall, tmp_path / "filter", "--exec", "/bin/sh", "-ec", command],
            capture_output=True,
            text=True,
            timeout=110,
            cwd=tmp_path,
            check=False,
        )

    return run


_PROGRAMS = {
    "git": "git init -q r && cd r && echo x > f && git add f"
    " && git -c user.name=a -c user.email=a@b commit -qm m"
    " && git gc -q",
    "python": "python3 -c 'import threading, asyncio, os; t = threading.Thread(target=print); t.start();"
    " t.join(); asyncio.run(asyncio.sleep(0)); os.sched_getaffinity(0)'",
    "cp-p": "echo x > a && chmod 750 a && cp -p a b && cp -a a c",
    "cp-r": "cp -r setgid copied",
    "tar": "mkdir d o && echo x > d/f && chmod 755 d/f && tar cf t d && tar xpf t -C o && test -x o/d/f",
    "install": "echo x > a && install -m 755 a b && mkdir -m 1777 t && test -k t",
    "node": "node -e 'require(\"os\").networkInterfaces(); setTimeout(() => console.log(1), 1)'",
    "java": "java -version",
    "go": "go version && HOME=$PWD go env GOROOT",
    "rustc": "echo 'fn main(){}' > m.rs && rustc m.rs -o m && ./m",
    "gcc": "echo 'int main(void){return 0;}' > m.c && gcc m.c -o m && ./m",
    "gdb": "gdb -nx -batch -ex 'print 1+1'",
    "tmux": "tmux -S s -f /dev/null new-session -d 'sleep 5' && tmux -S s ls && tmux -S s kill-server",
    "make": "printf 'all: a b\\na b:\\n\\techo $@\\n' > Makefile && make -j4",
    "bash": "bash -c 'ulimit -n 64; nice -n 5 true; echo hi | cat'",
    "taskset": "taskset -c 0 true && ionice -c 3 true && prlimit --nofile=60 true",
    "script": "script -qc 'stty size' /dev/null < /dev/null",
    "perl": "perl -e 'use Socket; socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, 0) or die'",
    "ssh": "ssh -V",
    "dd": "dd if=/dev/zero of=f bs=64k count=4 && truncate -s 1M f && fallocate -l 2M g",
}


@pytest.mark.parametrize("name", sorted(_PROGRAMS))
def test_ordinary_programs_work(
    name: str, under: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Assert that what developers run works under the default filter."""
    tool = name.partition("-")[0]
    (tmp_path / "setgid").mkdir()
    (tmp_path / "setgid").chmod(0o2775)  # as /usr/local is on Debian: a plain copy of it must not fail
    if shutil.which("python3" if tool == "python" else tool) is None:
        pytest.skip(f"no {tool} here")
    made = under(_PROGRAMS[name])
    assert made.returncode == 0, made.stdout + made.stderr


def test_set_id_bits_cannot_be_left(
    under: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Assert that no call leaves a set-id file behind, and that each does without a filter."""
    script = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def t(f, *a):
    try: f(*a)
    except OSError: pass
open("f", "w").close()
t(os.chmod, "f", 0o4755); t(os.chmod, "f", 0o2755)
fd = os.open("f", os.O_RDWR); t(os.fchmod, fd, 0o6755)
t(os.open, "g", os.O_CREAT | os.O_WRONLY, 0o4755)
t(os.mknod, "h", 0o104755)
t(os.mkdir, "i", 0o6755)
libc.creat(b"j", 0o4755)
libc.syscall(452, -100, b"f", 0o4755, 0)
how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o4755, 0)
libc.syscall(437, -100, b"k", how, 24)
print([n for n in sorted(os.listdir(".")) if os.stat(n).st_mode & 0o6000])
"""
    (tmp_path / "x.py").write_text(script)
    plain = tmp_path / "plain"
    plain.mkdir()
    free = subprocess.run(
        ["python3", "../x.py"], cwd=plain, capture_output=True, text=True, timeout=30, check=True
    )
    assert free.stdout == "['f', 'g', 'h', 'j', 'k']\n"  # a directory's bits are dropped by the kernel itself
    made = under("mkdir jail && cd jail && python3 ../x.py")
    assert (made.stdout, made.returncode) == ("[]\n", 0), made.stderr


def test_fallbacks_of_openat2_and_clone3(under: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Assert that libc and tools meet ENOSYS for clone3 and openat2 and go on."""
    made = under(
        'python3 -c \'import subprocess, threading; subprocess.run(["true"], check=True);'
        ' ts = [threading.Thread(target=len, args=("",)) for _ in range(8)];'
        " [t.start() for t in ts]; [t.join() for t in ts]'"
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.skipif(shutil.which("gdb") is None or shutil.which("strace") is None, reason="no gdb and strace")
def test_debuggers_work_with_ptrace_allowed(under: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Assert that `allow = ["ptrace"]` is enough for strace and gdb, ASLR switched off included."""
    program = seccomp.compile_rules(
        select(seccomp.VARIANTS[0], allow=frozenset({"ptrace"}), keep_set_id=True), ARCH
    )
    command = (
        "strace -f -e trace=execve true 2>&1 | grep -q execve && gdb -nx -batch -ex run --args true 2>&1"
    )
    assert under("strace true").returncode != 0
    made = under(command, program=program)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "exited normally" in made.stdout
    assert "randomization" not in made.stdout


def test_no_kill_for_ordinary_denials(
    under: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Assert that denied calls (BC-35: io_uring, BC-37: TIOCSTI) return errnos and never end the program."""
    calls = [
        ("io_uring_setup", 1, 0),
        ("ioctl", 0, 0x5412, 0),
        ("ioctl", 0, 0x5412 | 1 << 32, 0),
        ("ioctl", 0, 0x541C, 0),
        ("mount", 0, 0, 0, 0, 0),
    ]
    lines = [f"e({numbers(ARCH)[name]}, {', '.join(map(str, args))})" for name, *args in calls]
    (tmp_path / "x.py").write_text(
        "import ctypes, errno\n"
        "c = ctypes.CDLL(None, use_errno=True).syscall\n"
        "def e(*a):\n"
        "    print(errno.errorcode[ctypes.get_errno()] if c(*map(ctypes.c_long, a)) < 0 else 0)\n"
        + "\n".join(lines)
    )
    made = under("python3 x.py")
    assert made.stdout.split() == ["ENOSYS", "EPERM", "EPERM", "EPERM", "EPERM"], made.stderr
