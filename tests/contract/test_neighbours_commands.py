"""The other routes by which a command is run: streams, background programs, terminals, the persistent shell."""

from __future__ import annotations

import asyncio
import errno
import threading
import time

import pytest

from vectora_jail import AsyncJail

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("route", ["spawn", "terminal", "shell", "missing", "terminal-missing"])
def test_failed_start_leaves_the_jail_usable(jail, ws, route):
    """Assert that a bad directory or program is an error that names it, and the same worker serves the next calls."""
    jail.exec("true")
    pid = jail.report.pid
    for _ in range(5):
        with pytest.raises(FileNotFoundError) as caught:
            if route == "spawn":
                jail.spawn("true", cwd="no-such-dir")
            elif route == "terminal":
                jail.open_terminal(cwd="no-such-dir")
            elif route == "shell":
                jail.shell(cwd="no-such-dir")
            elif route == "missing":
                jail.spawn(["no-such-program"])
            else:
                jail.open_terminal(["no-such-program"])
        wanted = "no-such-program" if "missing" in route else "no-such-dir"
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, wanted)
        assert jail.exec("echo ok").stdout == b"ok\n"
        jail.write_file("f", "x")
        assert jail.read_file("f") == b"x"
    assert jail.report.pid == pid


def test_failed_start_in_asyncio(ws):
    """Assert that the same holds for asyncio, with many at once."""

    async def main():
        async with AsyncJail.open(ws) as jail:
            pid = jail.report.pid
            calls = [jail.spawn(["no-such-program"]) for _ in range(8)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(one) for one in failed} == {FileNotFoundError}
            done = await asyncio.gather(*(jail.exec(f"echo {n}") for n in range(8)))
            assert [one.stdout for one in done] == [b"%d\n" % n for n in range(8)]
            assert jail.report.pid == pid

    asyncio.run(main())


def test_waiting_for_a_chatty_program(jail):
    """Assert that `wait` drains both streams quickly, keeps the last part and counts what it dropped."""
    started = time.monotonic()
    process = jail.spawn("head -c 8000000 /dev/zero >&2; echo end >&2; echo fin")
    result = process.wait(20)
    assert time.monotonic() - started < 3
    assert (result.exit_code, result.stdout) == (0, b"fin\n")
    assert len(result.stderr) + result.dropped_stderr == 8000004
    assert result.stderr.endswith(b"end\n")
    assert result.truncated


def test_waiting_for_a_chatty_terminal(jail):
    """Assert that a terminal's program does not stop because its caller waits instead of reading."""
    terminal = jail.open_terminal(["sh", "-c", "seq 1 400000; exit 5"])
    assert terminal.wait(20).exit_code == 5
    assert terminal.scrollback()[0].endswith(b"400000\r\n")
    terminal.close()


def test_waiting_twice(jail):
    """Assert that the output is in the result whenever it is asked for."""
    process = jail.spawn("echo out; echo err >&2; exit 3")
    first = process.wait(10)
    second = process.wait(10)
    for result in (first, second):
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


@pytest.mark.parametrize("kind", ["process", "terminal"])
def test_reading_while_another_waits(ws, kind):
    """Assert that a task that waits for the end takes no output from one that reads."""

    async def main():
        async with AsyncJail.open(ws) as jail:
            line = "read x; echo got-$x; sleep 0.3; echo more; sleep 0.2"
            if kind == "process":
                program = await jail.spawn(line)
                write = program.write
            else:
                program = await jail.open_terminal(["sh", "-c", f"stty -echo; echo ready; {line}"])
                write = program.write
                while b"ready" not in await program.read(timeout=10):
                    pass
            end = asyncio.ensure_future(program.wait(10))
            seen = b""

            async def read():
                nonlocal seen
                while data := await program.read(timeout=10):
                    seen += data

            reader = asyncio.ensure_future(read())
            await asyncio.sleep(0.05)
            await write(b"it\n")
            assert (await end).exit_code == 0
            await asyncio.wait_for(reader, 10)
            assert seen.replace(b"\r", b"").split() == [b"got-it", b"more"]

    asyncio.run(main())


def test_timeouts_say_what_was_asked(jail):
    """Assert that the message of a TimeoutError holds the caller's number of seconds."""
    process = jail.spawn("sleep 60")
    terminal = jail.open_terminal(["sleep", "60"])
    for call in (
        lambda: process.wait(0.25),
        lambda: terminal.wait(0.25),
        lambda: process.read(timeout=0.25),
        lambda: terminal.read(timeout=0.25),
    ):
        with pytest.raises(TimeoutError, match=r"within 0\.25 s"):
            call()
    terminal.close()
    process.close()


@pytest.mark.parametrize(
    "line",
    [
        "setsid sh -c 'sleep 611' >/dev/null 2>&1 & sleep 60",
        "nohup sleep 611 >/dev/null 2>&1 & sleep 60",
        "(setsid sh -c '(sleep 611 &) ; exec sleep 612' &) ; sleep 60",
        "trap '' TERM INT HUP; setsid sh -c \"trap '' TERM; sleep 611\" & sleep 60",
    ],
)
def test_bc_17_daemons_by_every_route(jail, line):
    """Assert that nothing of a command survives the end that its route has: timeout, kill, close."""
    assert jail.exec(line, timeout=0.3).timed_out
    stream = jail.stream(line, timeout=0.3)
    list(stream)
    assert stream.result is not None and stream.result.timed_out
    process = jail.spawn(line)
    process.kill()
    assert process.wait(5).signal == 9
    jail.open_terminal(["sh", "-c", line]).close()
    assert "sleep 61" not in jail.exec("ps -eo args").text


def test_bc_19_no_route_reads_the_backend_stdin(jail):
    """Assert that exec, stream and the persistent shell see the end of file at once, however they ask."""
    with jail.shell() as shell:
        for line in ("cat", "cat /dev/stdin", "cat < /dev/fd/0", "cat <<E\nx\nE\nread y; true"):
            for run in (jail.exec, shell.run, lambda text: _streamed(jail, text)):
                started = time.monotonic()
                result = run(line)
                assert (result.exit_code, result.stderr) == (0, b""), line
                assert time.monotonic() - started < 1


def _streamed(jail, line):
    stream = jail.stream(line, timeout=5)
    list(stream)
    return stream.result


def test_bc_25_output_before_a_limit_of_the_policy(ws, open_jail):
    """Assert that the policy's own time limits keep the output and say which limit it was."""
    from vectora_jail import Limits, Policy

    jail = open_jail(ws, policy=Policy(limits=Limits(wall_s=1)))
    result = jail.exec("echo one; sleep 60")
    assert (result.stdout, result.exit_code, result.timed_out) == (b"one\n", 124, True)
    (violation,) = result.violations
    assert (violation.kind, violation.what, violation.limit) == ("limit", "wall", 1000)
    assert (violation.rule, "wall_s" in violation.hint) == ("limits.wall_s", True)
    stream = jail.stream("echo one; sleep 60", timeout=50)
    assert b"".join(chunk.data for chunk in stream) == b"one\n"
    assert [one.what for one in stream.result.violations] == ["wall"]
    assert jail.exec("sleep 60", timeout=0.2).violations == ()  # the caller's own limit is no refusal


def test_bc_29_codes_of_background_programs(jail):
    """Assert that background programs and calls get their own exit codes while orphans die beside them."""
    wrong, stop = [], threading.Event()

    def orphans():
        while not stop.is_set():
            jail.exec("for i in 1 2 3 4; do (sleep 0.01 &); done; sh -c 'sh -c \"exit 77\" &'")

    def calls(first):
        for code in range(first, first + 20):
            got = jail.spawn(f"(exit 9) & exit {code}").wait(10).exit_code
            if got != code:
                wrong.append((code, got))

    noise = threading.Thread(target=orphans)
    workers = [threading.Thread(target=calls, args=(n,)) for n in (1, 60, 130)]
    noise.start()
    for one in workers:
        one.start()
    for one in workers:
        one.join(60)
    stop.set()
    noise.join(20)
    assert wrong == []
