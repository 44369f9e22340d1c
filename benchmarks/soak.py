"""Run a backend's day in minutes: many callers on many workspaces, with crashes and restarts, every answer checked.

    python benchmarks/soak.py --minutes 30

Each answer carries a nonce of its own call. At the end nothing may be left: descriptors, threads, processes, zombies,
scratch files, memory. Prints a summary; exits with 1 when an answer was wrong, a call failed without a cause, or
something was left.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vectora_jail import JailManager, Policy, WorkerDiedError, WorkerSpawnError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vectora_jail import Jail

CRASH_PAUSE_S = 1.5
"""Between two crashes of one workspace: more would be refused as a crash loop."""
HANG_S = 40.0
"""No action takes longer, so that a caller at work after this is one that hangs."""
MEMORY_MAX = 24 * 1024 * 1024
"""Bytes by which this process may grow between the middle and the end."""


class WrongAnswer(Exception):
    """An answer that belongs to no call or to another one."""


def expect(found: object, wanted: object) -> None:
    """Raise WrongAnswer unless both are equal."""
    if found != wanted:
        raise WrongAnswer(f"{str(found)[:200]} instead of {str(wanted)[:200]}")


# ---- what callers do: each gets a jail, a nonce and its own random numbers ----


def run_arguments(jail: Jail, nonce: str, dice: random.Random) -> None:
    code = dice.randrange(256)
    result = jail.exec(["sh", "-c", f"echo {nonce}; echo {nonce}e >&2; exit {code}"])
    expect(
        (result.stdout, result.stderr, result.exit_code),
        (f"{nonce}\n".encode(), f"{nonce}e\n".encode(), code),
    )


def run_with_input(jail: Jail, nonce: str, dice: random.Random) -> None:
    data = nonce.encode() * dice.choice((1, 100, 20_000))
    result = jail.exec("cat", stdin=data)
    expect(result.stdout == data, True)


def run_into_timeout(jail: Jail, nonce: str, dice: random.Random) -> None:
    result = jail.exec(f"echo {nonce}; setsid sleep 300 & sleep 300", timeout=dice.uniform(0.05, 0.3))
    expect((result.exit_code, result.timed_out), (124, True))
    expect(result.stdout in (b"", f"{nonce}\n".encode()), True)


def use_files(jail: Jail, nonce: str, dice: random.Random) -> None:
    name = f"f-{nonce}"
    data = nonce.encode() * dice.choice((1, 10, 10_000))
    jail.write_file(name, data)
    expect(jail.read_file(name) == data, True)
    expect(jail.stat(name).size, len(data))
    if len(data) == len(nonce):
        jail.edit_file(name, old=nonce, new=nonce[::-1])
        expect(jail.exec(["cat", name]).stdout, nonce[::-1].encode())
    expect(name in {entry.name for entry in jail.list_dir(".")}, True)
    jail.rename(name, name + "x")
    jail.remove(name + "x")


def read_stream(jail: Jail, nonce: str, dice: random.Random) -> None:
    lines = dice.randrange(1, 50)
    stream = jail.stream(f"for i in $(seq {lines}); do echo {nonce}$i; done")
    got = b"".join(chunk.data for chunk in stream)
    expect(got, b"".join(f"{nonce}{n}\n".encode() for n in range(1, lines + 1)))
    expect(stream.result is not None and stream.result.exit_code, 0)


def leave_stream(jail: Jail, nonce: str, dice: random.Random) -> None:
    del dice
    with jail.stream(f"while :; do echo {nonce}; done") as stream:
        expect(next(stream).data.startswith(nonce.encode()), True)


def use_terminal(jail: Jail, nonce: str, dice: random.Random) -> None:
    del dice
    with jail.open_terminal(["sh", "-c", "stty -echo; echo ready; read x; echo $x; sleep 300"]) as terminal:
        wanted, seen = [b"ready", nonce.encode()], b""
        for word in wanted:
            while word not in seen:
                data = terminal.read(timeout=20)
                if not data:
                    raise BrokenPipeError("the terminal ended")
                seen += data
            if word == b"ready":
                terminal.write(nonce + "\n")


def use_spawn(jail: Jail, nonce: str, dice: random.Random) -> None:
    process = jail.spawn(["sh", "-c", f"echo {nonce}; cat"])
    try:
        data = process.read(timeout=20)
        if not data:
            raise BrokenPipeError("the process ended")
        expect(data, f"{nonce}\n".encode())
        process.write(nonce)
        if dice.random() < 0.5:
            process.close_stdin()
            expect(process.wait(20).stdout, nonce.encode())
    finally:
        process.close()


def use_shell(jail: Jail, nonce: str, dice: random.Random) -> None:
    with jail.shell() as shell:
        shell.run(f"v={nonce}; cd /tmp; f() {{ echo f$v; }}")
        for _ in range(dice.randrange(4)):
            expect(shell.run("f; pwd").stdout, f"f{nonce}\n/tmp\n".encode())
        expect(shell.run("exit 7").exit_code, 7)
        expect(shell.run("f; pwd").stdout, f"f{nonce}\n/tmp\n".encode())


ACTIONS: tuple[tuple[int, Callable[[Jail, str, random.Random], None]], ...] = (
    (30, run_arguments),
    (10, run_with_input),
    (4, run_into_timeout),
    (20, use_files),
    (8, read_stream),
    (3, leave_stream),
    (4, use_terminal),
    (6, use_spawn),
    (5, use_shell),
)


@dataclass
class Tally:
    """What happened; one a caller, added up at the end."""

    times: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Soak:
    """One run."""

    seconds: float
    callers: int
    workspaces: int
    max_workers: int
    seed: int
    root: Path
    tallies: list[Tally] = field(default_factory=list)
    breaks: dict[int, list[float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, jails: JailManager, number: int, end: float) -> None:
        """Be one caller until the end."""
        dice = random.Random(self.seed * 1000 + number)
        tally = Tally()
        self.tallies.append(tally)
        names, weights = [action for _, action in ACTIONS], [weight for weight, _ in ACTIONS]
        while time.monotonic() < end:
            index = dice.randrange(self.workspaces)
            nonce = secrets.token_hex(8)
            action = dice.choices(names, weights)[0]
            start = time.monotonic()
            try:
                jail = jails.get(self.root / f"w{index}", Policy())
                if dice.random() < 0.01:
                    self.break_it(jail, index, tally, dice)
                action(jail, nonce, dice)
            except WrongAnswer as exc:
                tally.wrong.append(f"{action.__name__}: {exc}")
            except (WorkerDiedError, WorkerSpawnError, BrokenPipeError, FileNotFoundError) as exc:
                # A file in the private /tmp, a terminal, a process: all end with their worker.
                if self.broken_since(index, start - 1.0):
                    tally.counts["ended with their worker"] += 1
                else:
                    tally.wrong.append(f"{action.__name__}: {type(exc).__name__} without a cause: {exc}")
            except Exception as exc:  # noqa: BLE001 — whatever it is, the summary tells it
                tally.wrong.append(f"{action.__name__}: {type(exc).__name__}: {exc}")
            else:
                tally.times.setdefault(action.__name__, []).append(time.monotonic() - start)

    def break_it(self, jail: Jail, index: int, tally: Tally, dice: random.Random) -> None:
        """Kill or stop a workspace's worker, not too often."""
        with self.lock:
            before = self.breaks.setdefault(index, [])
            now = time.monotonic()
            if sum(now - at < 10.0 for at in before) >= 3 or (before and now - before[-1] < CRASH_PAUSE_S):
                return
            before.append(now)
        pid = jail.report.pid
        if pid is None:
            return
        if dice.random() < 0.7:
            tally.counts["workers killed"] += 1
            os.kill(pid, signal.SIGKILL)
        else:
            tally.counts["workers closed"] += 1
            jail._life.stop()  # noqa: SLF001 — no public call ends a worker that is at work
        with self.lock:
            before.append(time.monotonic())

    def broken_since(self, index: int, start: float) -> bool:
        """Whether a workspace's worker was broken after `start`."""
        with self.lock:
            return any(at >= start for at in self.breaks.get(index, ()))

    def run(self) -> tuple[list[str], JailManager]:
        """Run all callers; return what grew meanwhile."""
        for index in range(self.workspaces):
            (self.root / f"w{index}").mkdir()
        jails = JailManager(max_workers=self.max_workers, idle_timeout_s=5.0)
        end = time.monotonic() + self.seconds
        threads = [
            threading.Thread(target=self.work, args=(jails, n, end), daemon=True) for n in range(self.callers)
        ]
        for thread in threads:
            thread.start()
        time.sleep(self.seconds / 2)
        middle = resident()
        for thread in threads:
            thread.join(max(0.0, end + HANG_S - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            faulthandler.dump_traceback(all_threads=True)
        grown = resident() - middle
        problems = [f"{len(stuck)} callers hang"] if stuck else []
        if grown > MEMORY_MAX:
            problems.append(f"memory grew by {grown // 1024} KiB in the second half")
        return problems, jails


# ---- what may be left ----


def resident() -> int:
    """Bytes of memory that this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> dict[str, str]:
    """Our open descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def descendants() -> list[str]:
    """Every process below this one, with its name and state."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            before, _, after = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")
        except OSError:
            continue
        state, parent = after.split()[:2]
        parents.setdefault(int(parent), []).append((int(entry), f"{before.partition('(')[2]} {state}"))
    found, todo = [], [os.getpid()]
    while todo:
        for pid, text in parents.get(todo.pop(), ()):
            found.append(text)
            todo.append(pid)
    return found


def left_over(fds: dict[str, str], threads: int) -> list[str]:
    """What is there that was not there before; waits two seconds for it to go."""
    deadline = time.monotonic() + 2.0
    while True:
        problems = []
        if more := descendants():
            problems.append(f"{len(more)} processes are left: {more[:5]}")
        if len(now := descriptors()) > len(fds):
            extra = Counter(value.partition(":")[0] for name, value in now.items() if name not in fds)
            problems.append(f"{len(now) - len(fds)} descriptors are left: {dict(extra)}")
        if threading.active_count() > threads:
            problems.append(f"{threading.active_count() - threads} threads are left")
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.05)


def warm_up(root: Path) -> None:
    """Load everything once, so that what stays for good is there before it is counted."""
    (root / "warm").mkdir()
    dice = random.Random(0)
    with JailManager() as jails:
        jail = jails.get(root / "warm", Policy())
        for _, action in ACTIONS:
            action(jail, secrets.token_hex(8), dice)


def summary(soak: Soak, jails: JailManager, problems: list[str], elapsed: float) -> list[str]:
    """The lines to print."""
    times: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    for tally in soak.tallies:
        counts += tally.counts
        for name, values in tally.times.items():
            times.setdefault(name, []).extend(values)
    total = sum(map(len, times.values()))
    lines = [
        f"{soak.callers} callers, {soak.workspaces} workspaces, {elapsed:.0f} s, seed {soak.seed}",
        f"{total} checked actions, {jails.stats()['started']} workers started, "
        + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
    ]
    for name, values in sorted(times.items()):
        values.sort()
        p50, p99 = values[len(values) // 2] * 1e3, values[len(values) * 99 // 100] * 1e3
        lines.append(f"  {name:18} {len(values):8} times   p50 {p50:8.1f} ms   p99 {p99:8.1f} ms")
    lines += [f"WRONG {text}" for text in problems[:40]]
    lines.append("nothing wrong, nothing left" if not problems else f"{len(problems)} problems")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Soak test of jails; every answer is checked.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--workspaces", type=int, default=50)
    parser.add_argument("--max-workers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="vectora-jail-soak-", dir="/var/tmp"))
    soak = Soak(
        options.minutes * 60, options.callers, options.workspaces, options.max_workers, options.seed, root
    )
    try:
        warm_up(root)
        fds, threads, start = descriptors(), threading.active_count(), time.monotonic()
        problems, jails = soak.run()
        elapsed = time.monotonic() - start
        stats = jails.stats
        jails.close()
        jails.stats = stats  # type: ignore[method-assign] — still readable after close
        problems += left_over(fds, threads)
        problems = [text for tally in soak.tallies for text in tally.wrong] + problems
        # A file whose caller lost its worker; a worker that is killed while it writes leaves the file it wrote to.
        for path in (*root.glob("w*/f-*"), *root.glob("w*/.f-*.vj-*")):
            if soak.breaks.get(int(path.parent.name[1:])):
                path.unlink()
        problems += [f"left in a workspace: {path}" for path in root.glob("w*/*")]
        sys.stdout.write("\n".join(summary(soak, jails, problems, elapsed)) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
