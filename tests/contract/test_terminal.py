"""Terminals: a real PTY with job control, resize, signals, end of file, scrollback."""

from __future__ import annotations

import hashlib
import time

import pytest

pytestmark = pytest.mark.kernel


def read_until(terminal, wanted: bytes, seconds: float = 10.0) -> bytes:
    seen = b""
    end = time.monotonic() + seconds
    while wanted not in seen:
        left = end - time.monotonic()
        assert left > 0, seen
        data = terminal.read(timeout=left)
        assert data, seen
        seen += data
    return seen


@pytest.fixture
def bash(jail):
    """A bash at its prompt."""
    with jail.open_terminal(["bash", "--norc", "-i"], env={"PS1": "ready> "}) as terminal:
        read_until(terminal, b"ready> ")
        yield terminal


def test_is_a_terminal(bash):
    """Assert that programs see a terminal of the size asked for, on a private devpts (BC-39)."""
    bash.write(b"tty; stty size; test -t 0 && test -t 1 && echo is-a-tty\n")
    text = read_until(bash, b"\nis-a-tty")
    assert b"/dev/pts/" in text
    assert b"24 80" in text


def test_resize(bash):
    """Assert that a resize reaches the foreground program."""
    bash.write(b"trap 'stty size; echo got-winch' WINCH\n")
    read_until(bash, b"ready> ")
    bash.resize(50, 132)
    bash.write(b"\n")
    assert b"50 132" in read_until(bash, b"got-winch\r\n")


def test_job_control(bash):
    """Assert that ^C, ^Z, fg and background jobs work."""
    bash.write(b"sleep 609\n")
    read_until(bash, b"sleep 609\r\n")
    time.sleep(0.2)  # the program has to be in the foreground before ^C means it
    bash.write(b"\x03")
    read_until(bash, b"ready> ")
    bash.write(b"sleep 610\n")
    read_until(bash, b"sleep 610\r\n")
    time.sleep(0.2)
    bash.write(b"\x1a")
    read_until(bash, b"Stopped")
    bash.write(b"kill -9 %1; wait; echo code=$?\n")
    read_until(bash, b"code=")


def test_password_prompt(bash):
    """Assert that a prompt can switch off the echo."""
    bash.write(b"read -rsp 'Pa''ss: ' p; echo; echo go''t=${#p}\n")
    read_until(bash, b"Pass: ")
    bash.write(b"hidden\n")
    text = read_until(bash, b"got=6")
    assert b"hidden" not in text


def test_end_of_file_and_exit_code(jail):
    """Assert that ^D ends the shell and its code is told; read returns b"" at the end."""
    terminal = jail.open_terminal(["sh", "-c", "cat; exit 7"])
    terminal.write(b"line\n")
    read_until(terminal, b"line\r\nline\r\n")
    terminal.write(b"\x04")
    assert terminal.wait(5).exit_code == 7
    assert terminal.read(timeout=5) == b""
    terminal.close()


def test_read_times_out(bash):
    """Assert that a read without output raises TimeoutError instead of returning nothing."""
    with pytest.raises(TimeoutError):
        bash.read(timeout=0.05)


def test_scrollback(bash):
    """Assert that a reader that comes back gets what it missed, by cursor."""
    bash.write(b"echo on''e\n")
    read_until(bash, b"one\r\n")
    whole, cursor = bash.scrollback()
    assert b"one" in whole
    bash.write(b"echo tw''o\n")
    read_until(bash, b"two\r\n")
    later, _ = bash.scrollback(cursor)
    assert b"two" in later
    assert b"one\r\n" not in later


def test_large_paste(jail):
    """Assert that a megabyte typed in raw mode arrives whole, while another call is answered (BC-73)."""
    data = bytes(range(32, 127)) * 10_526
    data = data[:1_000_000].ljust(1_000_000, b"x")
    terminal = jail.open_terminal(
        ["sh", "-c", "stty raw -echo; echo go; head -c 1000000 | sha256sum; sleep 600"]
    )
    read_until(terminal, b"go")
    terminal.write(data)
    assert jail.exec("echo quick").stdout == b"quick\n"
    assert hashlib.sha256(data).hexdigest().encode() in read_until(terminal, b"-")
    terminal.close()


def test_binary_output(jail):
    """Assert that bytes that are no text pass through a terminal (BC-23)."""
    terminal = jail.open_terminal(
        ["sh", "-c", "stty raw; printf '\\377\\000\\376'; head -c 300000 /dev/urandom | wc -c"]
    )
    assert b"\xff\x00\xfe" in read_until(terminal, b"300000")
    terminal.close()


def test_nothing_runs_after_close(jail):
    """Assert that closing the terminal ends what ran in it."""
    terminal = jail.open_terminal(["bash", "--norc", "-ic", "trap '' HUP; setsid sleep 611 & sleep 612"])
    time.sleep(0.3)
    terminal.close()
    assert "sleep 61" not in jail.exec("ps -eo args").stdout_text


@pytest.mark.parametrize(("rows", "cols"), [(0, 80), (24, -1), (10_000, 80), ("24", 80), (True, 80)])
def test_bad_sizes(jail, rows, cols):
    """Assert that a size that no terminal has is refused."""
    with pytest.raises(ValueError, match="rows|cols"):
        jail.open_terminal(["true"], rows=rows, cols=cols)


def test_missing_shell(jail):
    """Assert that a terminal for a missing program is an OSError that names it."""
    with pytest.raises(FileNotFoundError) as caught:
        jail.open_terminal(["/no/such/shell"])
    assert caught.value.filename == "/no/such/shell"


def test_spawn_lives_until_stopped(jail):
    """Assert that a background server survives calls, answers on loopback, and stops on request (BC-109)."""
    process = jail.spawn(["python3", "-u", "-m", "http.server", "8123", "--bind", "127.0.0.1"])
    assert b"Serving" in process.read(timeout=10)
    fetch = ["python3", "-c", "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/').status)"]
    assert jail.exec(fetch).stdout == b"200\n"
    assert process.alive
    process.kill()
    assert process.wait(5).signal == 9
    assert jail.exec(fetch).exit_code != 0


def test_spawn_output_ring(jail):
    """Assert that output is kept by cursor and a chatty program neither stops nor grows without bound."""
    process = jail.spawn(["sh", "-c", "seq 1 400000; echo end >&2; sleep 1"])
    result = process.wait(20)
    assert result.exit_code == 0
    assert result.stdout.endswith(b"400000\n")
    assert len(result.stdout) <= 1 << 20
    assert result.stderr == b"end\n"


def test_spawn_signal_and_missing(jail):
    """Assert that signals reach a background program and a missing program is an error at once."""
    process = jail.spawn(["sh", "-c", "trap 'exit 42' TERM; echo up; while :; do sleep 0.05; done"])
    assert process.read(timeout=5) == b"up\n"
    process.signal(15)
    assert process.wait(5).exit_code == 42
    with pytest.raises(FileNotFoundError):
        jail.spawn(["/no/such"])
