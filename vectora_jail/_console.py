"""Connect the user's terminal with one inside the jail: raw mode, resize, exit status."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .jail import Jail
    from .terminal import Terminal

FALLBACK = os.terminal_size((80, 24))


def _size(fd: int) -> os.terminal_size:
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return FALLBACK
    return size if size.lines and size.columns else FALLBACK


def interact(jail: Jail, command: Sequence[str] | None) -> int:
    """Run the user's shell (or a command) on a PTY of the jail until it ends; return its exit code.

    Without a terminal on stdin the bytes are passed on as they are.
    """
    stdin, stdout = sys.stdin.fileno(), sys.stdout.fileno()
    interactive = os.isatty(stdin)
    size = _size(stdout)
    term = os.environ.get("TERM", "xterm-256color")
    terminal = jail.open_terminal(command, rows=size.lines, cols=size.columns, env={"TERM": term})
    saved = termios.tcgetattr(stdin) if interactive else None

    def resized(*_: Any) -> None:
        now = _size(stdout)
        with contextlib.suppress(OSError):
            terminal.resize(now.lines, now.columns)

    before = signal.signal(signal.SIGWINCH, resized)
    try:
        if interactive:
            tty.setraw(stdin)
        _copy(terminal, stdin, stdout)
        return terminal.wait(10).exit_code
    finally:
        signal.signal(signal.SIGWINCH, before)
        if saved is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, saved)
        terminal.close()


def _copy(terminal: Terminal, stdin: int, stdout: int) -> None:
    master = terminal.fileno()
    sources = [master, stdin]
    while True:
        ready, _, _ = select.select(sources, [], [], 1.0)
        if stdin in ready:
            typed = os.read(stdin, 4096)
            if typed:
                with contextlib.suppress(BrokenPipeError):
                    terminal.write(typed)
            else:
                sources.remove(stdin)
                with contextlib.suppress(BrokenPipeError):
                    terminal.write(b"\x04")  # end of file, as the line discipline spells it
        with contextlib.suppress(TimeoutError):
            while True:
                data = terminal.read(timeout=0)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(stdout, view) :]
