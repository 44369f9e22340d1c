"""The asyncio face: the same jail, cancellation that ends the tree, a loop that is never held up."""

from __future__ import annotations

import asyncio
import time

import pytest

from vectora_jail import AsyncJail, AsyncJailManager, Policy

pytestmark = pytest.mark.kernel


def run(coroutine):
    return asyncio.run(coroutine)


def test_everything_once(ws):
    """Assert that exec, files, streams, spawn and terminals work from a coroutine."""

    async def main():
        async with AsyncJail.open(ws, policy=Policy()) as jail:
            result = await jail.exec("echo out; echo err >&2; exit 3")
            assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
            await jail.write_file("f", b"x" * 200_000)
            assert await jail.read_file("f") == b"x" * 200_000
            await jail.edit_file("f", old="x" * 200_000, new="short")
            assert await jail.read_text("f") == "short"
            chunks = [chunk.data async for chunk in jail.stream("echo 1; sleep 0.1; echo 2")]
            assert chunks == [b"1\n", b"2\n"]
            process = await jail.spawn(["cat"])
            await process.stdin.write(b"hi\n")
            assert await process.read(timeout=5) == b"hi\n"
            await process.stdin.close()
            assert (await process.wait(5)).exit_code == 0
            terminal = await jail.open_terminal(["sh"], rows=10, cols=50)
            await terminal.write(b"stty size; exit 5\n")
            assert (await terminal.wait(5)).exit_code == 5
            assert b"10 50" in terminal.scrollback()[0]
            await terminal.close()
            assert (await jail.exec("cat", stdin=b"bytes" * 50_000)).stdout == b"bytes" * 50_000

    run(main())


def test_many_at_once(ws):
    """Assert that 60 concurrent calls each get their own answer and a slow one holds up none."""

    async def main():
        async with AsyncJail.open(ws, policy=Policy()) as jail:
            slow = asyncio.ensure_future(jail.exec("sleep 1; echo slow"))
            results = await asyncio.gather(*(jail.exec(f"echo {n}; exit {n}") for n in range(60)))
            assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n".encode()) for n in range(60)]
            assert not slow.done()
            assert (await slow).stdout == b"slow\n"

    run(main())


def test_cancel(ws):
    """Assert that cancelling a call kills its tree and leaves the channel in step (U-15)."""

    async def main():
        async with AsyncJail.open(ws, policy=Policy()) as jail:
            for n in range(10):
                task = asyncio.ensure_future(jail.exec("setsid sleep 606 & sleep 607"))
                await asyncio.sleep(0.01 * n)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await jail.exec(f"echo {n}")).stdout == f"{n}\n".encode()
            assert "sleep 60" not in (await jail.exec("ps -eo args")).stdout_text
            for call in (jail.read_file("/etc/passwd"), jail.stat("/"), jail.write_file("x", b"y" * 100_000)):
                task = asyncio.ensure_future(call)
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert (await jail.exec("echo ok")).stdout == b"ok\n"

    run(main())


def test_timeout_of_asyncio(ws):
    """Assert that asyncio.wait_for ends a call like any cancellation."""

    async def main():
        async with AsyncJail.open(ws, policy=Policy()) as jail:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(jail.exec("sleep 608"), 0.2)
            assert "sleep 608" not in (await jail.exec("ps -eo args")).stdout_text

    run(main())


def test_manager(ws):
    """Assert that the asyncio manager shares one worker and closes it."""

    async def main():
        async with AsyncJailManager() as jails:
            got = await asyncio.gather(*(jails.get(ws, Policy()) for _ in range(5)))
            assert len(set(map(id, got))) == 1
            await asyncio.gather(*(jail.exec("true") for jail in got))
            assert jails.stats()["started"] == 1
        assert not got[0].alive

    run(main())


def test_belongs_to_one_loop(ws):
    """Assert that use from another loop is an error that says so."""
    jail = AsyncJail.open(ws, policy=Policy())

    async def use():
        await jail.exec("sleep 0.2")  # long enough that the answer has to be waited for

    try:
        run(use())
        with pytest.raises(RuntimeError, match="another event loop"):
            run(use())
    finally:
        jail._life.close()


def test_the_loop_is_not_held_up(ws):
    """Assert that while starts, calls and large reads are under way the loop goes on turning."""

    async def main():
        gaps = []

        async def tick():
            while True:
                begin = time.perf_counter()
                await asyncio.sleep(0)
                gaps.append(time.perf_counter() - begin)
                await asyncio.sleep(0.001)

        ticker = asyncio.ensure_future(tick())
        async with AsyncJail.open(ws, policy=Policy()) as jail:
            await jail.exec("sleep 0.3")
            await jail.exec("head -c 20000000 /dev/zero")
        ticker.cancel()
        assert len(gaps) > 20
        print(
            f"longest turn of the loop: {max(gaps) * 1e3:.1f} ms, median {sorted(gaps)[len(gaps) // 2] * 1e6:.0f} us"
        )

    run(main())
