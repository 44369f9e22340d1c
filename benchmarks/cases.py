"""What the table measures: each function returns rows of one group, whose ways were measured in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turns import Way, async_turns, cpu_times, turns

from vectora_jail import AsyncJail, Jail, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
TRUE = "/bin/true"
KIB4 = b"x" * 4096


@dataclass
class Row:
    """One line of the table: ours against theirs, with a bound of the ratio."""

    what: str
    ours: Way
    against: str
    theirs: Way
    goal: float | None = None
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        """Our median by theirs (for rates: the rates)."""
        return self.ours.p(0.5) / self.theirs.p(0.5)


@dataclass
class Bench:
    """A workspace with a jail, the small programs, and how many rounds to make."""

    workspace: Path
    tools: Path
    rounds: int

    def open(self) -> Jail:
        """Return a started jail on the workspace with every default layer."""
        return Jail.open(self.workspace, policy=Policy()).start()


def build(tools: Path) -> None:
    """Compile the small programs."""
    cc = os.environ.get("CC", "cc")
    subprocess.run([cc, "-O2", "-pthread", "-o", tools / "pace", HERE / "pace.c"], check=True)
    flags = ["-O2", "-static", "-nostdlib", "-ffreestanding"]
    subprocess.run([cc, *flags, "-o", tools / "nothing", HERE / "nothing.c"], check=True)


@contextlib.contextmanager
def floor(tools: Path, program: str) -> Iterator[Way]:
    """The floor program for one binary: it measures itself and tells."""
    with subprocess.Popen(
        [tools / "pace", "floor", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        into, out = process.stdin, process.stdout
        assert into is not None
        assert out is not None

        def call() -> float:
            into.write(b"x")
            number: float = struct.unpack("d", out.read(8))[0]
            return number

        yield Way("floor", call, [process.pid])
        into.close()


def _run(argv: list[str], cwd: Path, **more: Any) -> Callable[[], None]:
    def call() -> None:
        if subprocess.run(argv, check=False, capture_output=True, cwd=cwd, **more).returncode:
            raise RuntimeError(argv)

    return call


def _exec(jail: Jail, argv: list[str]) -> Callable[[], None]:
    def call() -> None:
        if not jail.exec(argv).ok:
            raise RuntimeError(argv)

    return call


def commands(bench: Bench) -> list[Row]:
    """The call itself: /bin/true and a program that costs nothing to start."""
    rows = []
    shutil.copy(bench.tools / "nothing", bench.workspace / "nothing")
    for program, name, goal in ((TRUE, "`true`", 0.80), ("./nothing", "a program without libc", 0.65)):
        path = TRUE if program == TRUE else str(bench.workspace / "nothing")
        with bench.open() as jail, floor(bench.tools, path) as least:
            ours = Way("Jail.exec", _exec(jail, [program]), [jail.report.pid or 0])
            theirs = Way("subprocess.run", _run([program], bench.workspace))
            turns([ours, theirs, least], bench.rounds)
            cpu_times([ours, theirs, least], min(400, bench.rounds))
        rows.append(Row(f"exec: {name}", ours, "`subprocess.run(capture_output=True)`", theirs, goal))
        rows.append(Row(f"exec: {name}", ours, "floor: vfork + execve + wait in C", least, 1.10))
    return rows


def asyncio_commands(bench: Bench) -> list[Row]:
    """The same from an event loop, one at a time."""
    ours, theirs = Way("AsyncJail.exec", lambda: None), Way("create_subprocess_exec", lambda: None)

    async def both() -> None:
        pipe = asyncio.subprocess.PIPE

        async def plain() -> None:
            process = await asyncio.create_subprocess_exec(
                TRUE, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=bench.workspace
            )
            await process.communicate()

        async with AsyncJail.open(bench.workspace, policy=Policy()) as jail:

            async def jailed() -> None:
                await jail.exec([TRUE])

            await async_turns([(ours, jailed), (theirs, plain)], bench.rounds)

    asyncio.run(both())
    return [Row("async exec: `true`", ours, "`create_subprocess_exec` + `communicate`", theirs, 0.80)]


def shell(bench: Bench) -> list[Row]:
    """A builtin in the persistent shell."""
    (bench.workspace / "src").mkdir(exist_ok=True)
    line = "cd src; echo hi; cd .."
    with bench.open() as jail, jail.shell() as sh:

        def ours_call() -> None:
            if sh.run(line).stdout != b"hi\n":
                raise RuntimeError(line)

        ours = Way("shell.run", ours_call, [jail.report.pid or 0])
        theirs = Way("subprocess.run", _run(["/bin/sh", "-c", line], bench.workspace))
        turns([ours, theirs], bench.rounds // 2)
        cpu_times([ours, theirs], min(200, bench.rounds))
    return [Row("builtin in the persistent shell", ours, "`subprocess.run` of `sh -c`", theirs, 0.12)]


def ping(bench: Bench) -> list[Row]:
    """An empty request beside a bare echo over the same kind of socket, both from Python."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with bench.open() as jail, subprocess.Popen([bench.tools / "pace", "echo"], stdin=other) as process, mine:
        other.close()

        def bare() -> None:
            mine.send(b"0123456789abc")
            mine.recv(64)

        ours = Way("Jail.ping", jail.ping, [jail.report.pid or 0])
        theirs = Way("echo", bare, [process.pid])
        turns([ours, theirs], bench.rounds)
        cpu_times([ours, theirs], bench.rounds)
        mine.close()
    return [Row("ping", ours, "`send` + `recv` with an echo program", theirs, 1.5)]


def files(bench: Bench, *, pinned: bool) -> list[Row]:
    """Small and large reads, small writes."""
    small, large = bench.workspace / "small", bench.workspace / "large"
    small.write_bytes(KIB4)
    large.write_bytes(os.urandom(1 << 20) * 100)

    def by_os() -> None:
        fd = os.open(small, os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 8192)
        os.close(fd)

    def write() -> None:
        temporary = bench.workspace / ".written.tmp"
        with open(temporary, "wb") as file:
            file.write(KIB4)
        os.rename(temporary, bench.workspace / "written")

    with bench.open() as jail:
        pids = [jail.report.pid or 0]
        read = Way("Jail.read_file", lambda: jail.read_file("small") and None, pids)
        path = Way("Path.read_bytes", lambda: small.read_bytes() and None)
        raw = Way("os.open/read/close", by_os)
        written = Way("Jail.write_file", lambda: jail.write_file("written", KIB4) and None, pids)
        python = Way("write + rename", write)
        turns([read, path, raw, written, python], bench.rounds)
        cpu_times([read, path, raw, written, python], bench.rounds)
        big = Way("Jail.read_file", lambda: jail.read_file("large") and None, pids)
        plain = Way("Path.read_bytes", lambda: large.read_bytes() and None)
        turns([big, plain], max(10, bench.rounds // 50), warm=2)
    large.unlink()
    bound = 2.0 if pinned else 7.0
    return [
        Row("`read_file`, 4 KiB", read, "`Path.read_bytes`", path, bound),
        Row("`read_file`, 4 KiB", read, "`os.open`, `os.read`, `os.close`", raw),
        Row("`write_file`, 4 KiB, atomic", written, "write a temporary file and rename it", python, 3.0),
        Row("`read_file`, 100 MiB", big, "`Path.read_bytes`", plain, 1.02),
    ]


def _bwrap(jail: Jail) -> tuple[list[bytes], Callable[[], object], list[int]]:
    """The jail's own mounts, namespaces and filter as one bwrap command line, and what rewinds its files."""
    from vectora_jail._native import sealed_memfd, worker_image
    from vectora_jail.mounts import bwrap_arguments

    plan = jail.plan
    assert plan is not None
    assert plan.bwrap is not None
    first = 300
    args, blobs = bwrap_arguments(plan.mounts, plan.bwrap, fd_base=first + 1)
    opened = [worker_image(), *(sealed_memfd("blob", blob) for blob in blobs)]
    opened.append(sealed_memfd("filter", plan.seccomp or b""))
    numbers = [os.dup2(fd, first + i, inheritable=True) for i, fd in enumerate(opened)]
    for fd in opened:
        os.close(fd)
    argv = [plan.bwrap.path, *args, b"--chdir", plan.workspace]
    if plan.seccomp:
        argv += [b"--seccomp", b"%d" % numbers[-1]]
    return argv, lambda: [os.lseek(fd, 0, os.SEEK_SET) for fd in numbers], numbers


def starts(bench: Bench) -> list[Row]:
    """A bwrap for each call with the same mounts and filter; and the start of a jail beside it."""
    rows = []
    with bench.open() as jail:
        argv, rewind, numbers = _bwrap(jail)
        call = _run([*argv, b"--", TRUE.encode()], bench.workspace, pass_fds=numbers)  # type: ignore[list-item]
        ours = Way("Jail.exec", _exec(jail, [TRUE]), [jail.report.pid or 0])
        theirs = Way("bwrap", call, setup=rewind)
        turns([ours, theirs], max(30, bench.rounds // 10))
        cpu_times([ours, theirs], max(20, bench.rounds // 20))
        rows.append(Row("exec: `true`", ours, "bwrap a call, the same policy", theirs, 1 / 15))

        made: list[Jail] = []

        def end() -> None:
            while made:
                made.pop().close()

        start = Way("Jail.start", lambda: made.append(bench.open()), setup=end)
        again = Way("bwrap", call, setup=rewind)
        turns([start, again], max(30, bench.rounds // 20))
        end()
        cpu_times([start, again], 20)
        end()
        rows.append(Row("start to the first answer", start, "bwrap … `true`, the same mounts", again, 1.1))
        for fd in numbers:
            os.close(fd)
    return rows


def rates(bench: Bench) -> list[Row]:
    """Calls a second of eight callers on one jail, beside eight threads of the floor program."""
    callers, seconds = 8, 0.5 if bench.rounds < 1000 else 1.5
    with bench.open() as jail:

        def ours_call() -> float:
            counts = [0] * callers
            end = time.monotonic() + seconds

            def loop(number: int) -> None:
                while time.monotonic() < end:
                    jail.exec([TRUE])
                    counts[number] += 1

            threads = [threading.Thread(target=loop, args=(n,)) for n in range(callers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(counts) / seconds

        def theirs_call() -> float:
            argv = [bench.tools / "pace", "crowd", str(callers), str(seconds), TRUE]
            return float(subprocess.run(argv, capture_output=True, check=True).stdout)

        ours, theirs = Way("Jail.exec", ours_call), Way("floor", theirs_call)
        turns([ours, theirs], 5, warm=1)
    return [
        Row(
            "`true`, calls a second, 8 callers",
            ours,
            "8 threads of the floor",
            theirs,
            0.8,
            more_is_better=True,
        )
    ]


def work(bench: Bench) -> list[Row]:
    """Real programs inside and outside."""
    ws = bench.workspace
    (ws / "hello.c").write_text('#include <stdio.h>\n#include <stdlib.h>\nint main(void){puts("hello");}\n')
    subprocess.run(["git", "init", "-q", ws], check=True)
    jobs = [
        ("compile a C file", ["cc", "-O2", "-c", "-o", "hello.o", "hello.c"], 20),
        ("`git status`", ["git", "status", "--short"], 10),
        ("`python3 -c pass`", ["python3", "-Sc", "pass"], 10),
    ]
    rows = []
    with bench.open() as jail:
        for what, argv, share in jobs:
            if shutil.which(argv[0]) is None or not jail.exec(argv).ok:
                continue
            ours = Way("inside", _exec(jail, argv), [jail.report.pid or 0])
            theirs = Way("outside", _run(argv, ws))
            turns([ours, theirs], max(30, bench.rounds // share // 2))
            rows.append(Row(f"work: {what}", ours, "`subprocess.run`", theirs, 1.02))
    return rows


def memory(bench: Bench, many: int = 20) -> tuple[int, int]:
    """Return the PSS in bytes of each of `many` idle jails (worker and monitor), and of a lone one."""

    def pss(pid: int) -> int:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024

    def both(jail: Jail) -> int:
        worker = jail.report.pid or 0
        stat = Path(f"/proc/{worker}/stat").read_text()
        return pss(worker) + pss(int(stat.rpartition(") ")[2].split()[1]))

    with contextlib.ExitStack() as stack:
        jails = [stack.enter_context(bench.open())]
        alone = both(jails[0])
        jails += [stack.enter_context(bench.open()) for _ in range(many - 1)]
        return sum(map(both, jails)) // many, alone
