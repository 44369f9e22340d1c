"""Interactive terminals: a real PTY made inside the jail, its master passed out by descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import termios
import time
from typing import TYPE_CHECKING, Any, Final

from ._faces import blocking
from ._ring import Ring
from .process import _Started

if TYPE_CHECKING:
    from ._core import Commands
    from ._lanes import Lane
    from ._waiting import Waiter
    from .plan import JailPlan
    from .results import ExecResult
    from .worker import Worker

SCROLLBACK: Final = 256 * 1024
"""Bytes of output that a reconnecting reader can still get."""
SIZE_MAX: Final = 4096


def shell_of(plan: JailPlan) -> bytes:
    """Return the shell that the jail's environment names."""
    return next((item[6:] for item in plan.env if item.startswith(b"SHELL=")), b"/bin/sh")


def check_size(rows: Any, cols: Any) -> None:
    """Raise ValueError unless a terminal can have that size."""
    for name, value in (("rows", rows), ("cols", cols)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= SIZE_MAX:
            msg = f"{name} must be a whole number from 1 to {SIZE_MAX}, not {value!r}"
            raise ValueError(msg)


class AsyncTerminal(_Started):
    """A terminal session inside the jail, for asyncio; `Terminal` is the same for threads."""

    def __init__(self, worker: Worker, lane: Lane, number: int, waiter: Waiter, argv: list[bytes]) -> None:
        super().__init__(worker, lane, number, waiter, argv)
        self._master = -1
        self._ring = Ring(SCROLLBACK)
        self._read_at = 0
        self._reading = 0
        self._eof = False

    def fileno(self) -> int:
        """Return the PTY master's descriptor, for a caller that copies bytes itself (`vectora-jail shell`)."""
        return self._master

    async def write(self, data: bytes | str) -> None:
        """Type `data`; waits while the program does not read (bounded by the kernel's queue)."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        view = memoryview(raw)
        while view:
            if self._master < 0 or self._eof:
                raise BrokenPipeError("the terminal is closed")
            try:
                view = view[os.write(self._master, view[:4096]) :]
            except BlockingIOError:
                # The line discipline echoes what is typed: with nobody reading, both directions would stand still.
                self._pump()
                await self._waiter.writable(self._master, 0.2)
            except OSError as exc:
                if exc.errno == errno.EIO:
                    raise BrokenPipeError("the terminal is closed") from None
                raise

    def _pump(self, *, hold: bool = True) -> bool:
        """Move what has come into the scrollback; False at end of file. EIO is how a PTY master says it (pty(7))."""
        while not self._eof and self._master >= 0:
            try:
                data = os.read(self._master, 65536)
            except BlockingIOError:
                return True
            except OSError as exc:
                if exc.errno != errno.EIO:
                    raise
                data = b""
            if not data:
                self._eof = True
                return False
            self._ring.add(data)
            if hold and self._ring.end - self._read_at > SCROLLBACK // 2:
                return True  # somebody has to read before more is taken: back-pressure on the program
        return False

    async def read(self, max_bytes: int = 65536, timeout: float | None = None) -> bytes:
        """Return the next output, `b""` only at end of file.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            more = self._pump()
            data, self._read_at = self._ring.since(self._read_at, max_bytes)
            if data or not more:
                return data
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                msg = f"no output within {timeout} s"
                raise TimeoutError(msg)
            self._reading += 1
            try:
                await self._waiter.readable(self._master, left)
            finally:
                self._reading -= 1

    def scrollback(self, cursor: int = 0, max_bytes: int = SCROLLBACK) -> tuple[bytes, int]:
        """Return the output from `cursor` on, as far as it is kept, and the cursor for the next time."""
        self._pump()
        return self._ring.since(cursor, max_bytes)

    async def resize(self, rows: int, cols: int) -> None:
        """Change the window's size; the foreground processes get SIGWINCH (ioctl_tty(2), TIOCSWINSZ)."""
        check_size(rows, cols)
        if self._master >= 0:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait until the session's leader ended and return how; what nobody has read stays in the scrollback.

        Raises:
            TimeoutError: it did not end within `timeout` seconds. WorkerDiedError: the jail ended.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        seen, pause = -1, 0.0
        while True:
            if not self._reading:  # nobody takes the output: the program must not stop because of that
                self._pump(hold=False)
            last, seen = seen, self._ring.end
            pause = 0.001 if last != seen else min(0.1, pause * 2)
            left = pause if limit is None else min(pause, limit - time.monotonic())
            try:
                return await self._wait(max(0.0, left))
            except TimeoutError:
                if limit is not None and time.monotonic() >= limit:
                    msg = f"the terminal's program did not end within {timeout} s"
                    raise TimeoutError(msg) from None

    async def signal(self, signo: int) -> None:
        """Send a signal to the session's leader."""
        await self._tell({"op": "signal", "signo": int(signo), "tree": False})

    async def kill(self) -> None:
        """Kill everything that runs in the terminal."""
        await self._tell({"op": "kill"})

    async def close(self) -> None:
        """Hang up: the session gets SIGHUP, what stays is killed."""
        master, self._master = self._master, -1
        if master >= 0:
            os.close(master)
        await self._end(5.0)


async def open_terminal(
    commands: Commands,
    command: Any = None,
    *,
    rows: int = 24,
    cols: int = 80,
    cwd: Any = None,
    env: Any = None,
) -> AsyncTerminal:
    """Open a terminal (see `Jail.open_terminal`)."""
    check_size(rows, cols)
    worker = await commands.life.ready()
    plan = worker.running.plan
    if command is None:
        command = [shell_of(plan)]
    changes = {"TERM": "xterm-256color", **(env or {})}
    prepared = commands.prepare(worker, "terminal", command, cwd=cwd, env=changes, limit_time=False)
    prepared.close()
    prepared.message["rows"], prepared.message["cols"] = rows, cols
    lane = worker.borrow()
    terminal = AsyncTerminal(worker, lane, prepared.message["id"], commands.waiter, prepared.argv)

    def send(to: Lane) -> None:
        data, body = worker.packed(prepared.message)
        try:
            to.post(data, [body] if body >= 0 else [])
        finally:
            if body >= 0:
                os.close(body)

    master = await terminal.start(send, prepared.cwd)
    if master < 0 or not os.isatty(master):
        if master >= 0:
            os.close(master)
        raise worker.died("it sent something that is no terminal", kill=True)
    os.set_blocking(master, False)
    terminal._master = master  # noqa: SLF001 — its own constructor's rest
    commands.life.touch()
    return terminal


class Terminal:
    """A terminal session inside the jail: a real PTY with job control, resize and scrollback."""

    def __init__(self, core: AsyncTerminal) -> None:
        """Wrap what `Jail.open_terminal` has opened."""
        self._core = core

    write = blocking("_core", AsyncTerminal.write)
    read = blocking("_core", AsyncTerminal.read)
    resize = blocking("_core", AsyncTerminal.resize)
    signal = blocking("_core", AsyncTerminal.signal)
    kill = blocking("_core", AsyncTerminal.kill)
    wait = blocking("_core", AsyncTerminal.wait)
    close = blocking("_core", AsyncTerminal.close)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the PTY master's descriptor, for a caller that copies bytes itself."""
        return self._core.fileno()

    def scrollback(self, cursor: int = 0, max_bytes: int = SCROLLBACK) -> tuple[bytes, int]:
        """Return the output from `cursor` on, as far as it is kept, and the cursor for the next time."""
        return self._core.scrollback(cursor, max_bytes)

    @property
    def pid(self) -> int:
        """The session's leader inside the jail."""
        return self._core.pid

    @property
    def alive(self) -> bool:
        """Whether the session's leader runs."""
        return self._core.alive
