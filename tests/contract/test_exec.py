"""What `exec` promises: exit codes, streams, timeouts, ends; on the local backend."""

from __future__ import annotations

import hashlib
import os
import threading
import time

import pytest

from vectora_jail import CommandFailed

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("command", "code", "signal"),
    [
        ("exit 0", 0, 0),
        ("exit 255", 255, 0),
        ("kill -9 $$", 137, 9),
        ("kill -TERM $$", 143, 15),
        (["/no/such"], 127, 0),
        (["no-such-program"], 127, 0),
        (["/etc/passwd"], 126, 0),
        (["/etc"], 126, 0),
    ],
    ids=["zero", "255", "kill", "term", "missing", "not-on-path", "not-executable", "directory"],
)
def test_exit_codes(jail, command, code, signal):
    """Assert that the end of a command is told exactly: own code, 128+n, 127, 126 (BC-69)."""
    result = jail.exec(command)
    assert (result.exit_code, result.signal, result.timed_out) == (code, signal, False)
    if code in (126, 127):
        assert "vectora-jail:" in result.stderr_text


def test_argv_is_passed_as_it_is(jail):
    """Assert that a list is run without a shell, bytes and odd characters included."""
    arguments = ["a b", "*", "$HOME", "'", '"', "new\nline", b"\xff\xfe", ""]
    result = jail.exec(["printf", "%s\\0", *arguments])
    assert result.stdout.split(b"\0")[:-1] == [os.fsencode(a) for a in arguments]


@pytest.mark.parametrize(
    "text",
    [
        "cat <<EOF\nhello\nEOF",
        "cat <<'X'\n__END__ $(echo no) sentinel\nX\n",
        "echo a # comment",
        "echo a \\",
        "if true; then",
        "echo 'unbalanced",
        "printf '%s' \"$0\"",
    ],
)
def test_command_text_reaches_the_shell_byte_for_byte(jail, text):
    """Assert that the shell sees exactly the caller's text: same output and code as outside (BC-71)."""
    import subprocess

    outside = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=False)
    inside = jail.exec(text)
    assert (inside.exit_code, inside.stdout, inside.stderr) == (
        outside.returncode,
        outside.stdout,
        outside.stderr,
    )


def test_command_string_longer_than_an_argument(jail):
    """Assert that a script of 300 KiB runs as written."""
    text = "# " + "x" * 300_000 + "\necho end; exit 7\n"
    result = jail.exec(text)
    assert (result.exit_code, result.stdout) == (7, b"end\n")


def test_partial_output_is_kept_at_a_timeout(jail):
    """Assert that a timeout ends the tree, says so, and keeps what was written (BC-25)."""
    result = jail.exec("echo one; echo two >&2; sleep 60", timeout=0.5)
    assert result.timed_out
    assert (result.exit_code, result.stdout, result.stderr) == (124, b"one\n", b"two\n")
    assert 0.4 < result.duration < 5


def test_a_daemon_does_not_outlive_its_call(jail):
    """Assert that setsid, double fork and ignored signals do not save a process from the end of its call (BC-17)."""
    jail.exec(
        "setsid sh -c 'trap \"\" TERM HUP INT; sleep 600' >/dev/null 2>&1 & (setsid sleep 601 &) ; sleep 60",
        timeout=0.5,
    )
    assert "sleep" not in jail.exec("ps -eo args").stdout_text


def test_leftovers_that_hold_the_pipe_do_not_delay(jail):
    """Assert that `cmd &` with the output still open returns at once."""
    begin = time.monotonic()
    result = jail.exec("sleep 600 & echo done")
    assert result.stdout == b"done\n"
    assert time.monotonic() - begin < 5
    assert result.leftovers_killed >= 1


def test_leftovers_keep(jail):
    """Assert that with leftovers="keep" a background process lives on, and ends with the jail."""
    jail.exec("setsid sleep 602 >/dev/null 2>&1 &", leftovers="keep")
    assert "sleep 602" in jail.exec("ps -eo args").stdout_text


def test_neighbour_is_untouched(jail):
    """Assert that the end of one call does not touch another call or a spawned process."""
    process = jail.spawn(["sleep", "30"])
    results = []
    thread = threading.Thread(target=lambda: results.append(jail.exec("sleep 1.2; echo alive")))
    thread.start()
    for _ in range(20):
        jail.exec("setsid sleep 600 & true")
        jail.exec("sleep 60", timeout=0.02)
    thread.join()
    assert results[0].stdout == b"alive\n"
    assert process.alive
    process.kill()
    assert process.wait(5).signal == 9


def test_stdin(jail):
    """Assert that stdin is /dev/null by default, and bytes, text, a file or an iterable when given (BC-19, BC-73)."""
    assert jail.exec("cat; echo rc=$?").stdout == b"rc=0\n"
    assert jail.exec("cat", stdin=b"\x00\xffbytes").stdout == b"\x00\xffbytes"
    assert jail.exec("cat", stdin="text").stdout == b"text"
    assert jail.exec("cat", stdin=iter([b"a", "b", b"c" * 100_000])).stdout == b"ab" + b"c" * 100_000
    big = os.urandom(8 << 20)
    assert jail.exec("sha256sum", stdin=big).stdout_text.split()[0] == hashlib.sha256(big).hexdigest()
    read_end, write_end = os.pipe()
    os.write(write_end, b"from a pipe")
    os.close(write_end)
    assert jail.exec("cat", stdin=read_end).stdout == b"from a pipe"
    os.close(read_end)


def test_stdin_nobody_reads(jail):
    """Assert that input for a command that reads none is no error and no delay."""
    assert jail.exec("exec <&-; echo ok", stdin=b"x" * 5_000_000).stdout == b"ok\n"


def test_large_output_on_both_streams(jail):
    """Assert that both streams are drained at once, whatever their order and size (BC-21)."""
    result = jail.exec("head -c 8000000 /dev/zero | tr '\\0' e >&2; head -c 5000000 /dev/zero; echo fin")
    assert len(result.stderr) == 8_000_000
    assert len(result.stdout) == 5_000_004


def test_output_cap_keeps_head_and_tail(jail):
    """Assert that beyond the cap the first and the last half are kept and the rest is counted."""
    result = jail.exec("seq 1 200000", max_output=1000)
    whole = "".join(f"{n}\n" for n in range(1, 200001)).encode()
    assert result.truncated
    assert result.stdout == whole[:500] + whole[-500:]
    assert result.dropped_stdout == len(whole) - 1000


def test_bytes_are_lossless(jail):
    """Assert that binary output comes back as it is and text never raises (BC-23)."""
    result = jail.exec("printf '\\377\\376ok\\n'")
    assert result.stdout == b"\xff\xfeok\n"
    assert "ok" in result.stdout_text


def test_merge_keeps_the_order_of_writes(jail):
    """Assert that merged stderr keeps the order of write(2) calls."""
    result = jail.exec("for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done", merge_stderr=True)
    assert result.stdout_text.split() == [x for i in range(1, 6) for x in (f"o{i}", f"e{i}")]
    assert result.stderr == b""


def test_environment_of_one_call(jail, monkeypatch):
    """Assert that a call's changes hold for that call only and that the backend's secrets are not inside (BC-87)."""
    assert jail.exec('echo "$A-$LANG"', env={"A": "1", "LANG": None}).stdout == b"1-\n"
    assert jail.exec('echo "$A"').stdout == b"\n"


def test_backend_secrets_are_nowhere(ws, open_jail, monkeypatch):
    """Assert that no process of the jail shows a secret of the backend's environment (BC-87)."""
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN"):
        monkeypatch.setenv(name, "SK-do-not-leak")
    jail = open_jail(ws)
    text = jail.exec("env; for p in /proc/[0-9]*; do cat $p/environ $p/cmdline; done 2>/dev/null").text
    assert "SK-do-not-leak" not in text
    assert "OPENAI_API_KEY" in jail.report.dropped_env


def test_inherited_descriptors_stay_out(ws, open_jail):
    """Assert that inheritable descriptors of the backend are not inside, in any kind of process (BC-67)."""
    fds = [os.open("/", os.O_RDONLY), os.open("/etc/hostname", os.O_RDONLY)]
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        jail = open_jail(ws)
        assert jail.exec("ls /proc/self/fd").stdout_text.split() == ["0", "1", "2", "3"]
        assert jail.spawn(["ls", "/proc/self/fd"]).wait(5).stdout.split() == [b"0", b"1", b"2", b"3"]
    finally:
        for fd in fds:
            os.close(fd)


def test_signals_and_mask_are_clean(jail):
    """Assert that a command starts with default signals, an empty mask and umask 022."""
    text = jail.exec("grep -E 'Sig(Blk|Ign)' /proc/self/status; umask").stdout_text
    assert text.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16, "0022"]


def test_check(jail):
    """Assert that check=True turns a failure into an exception that holds the result."""
    with pytest.raises(CommandFailed) as caught:
        jail.exec("echo x; exit 3", check=True)
    assert caught.value.result.exit_code == 3
    assert caught.value.result.stdout == b"x\n"


def test_usage(jail):
    """Assert that a result says what the tree used."""
    result = jail.exec(["python3", "-c", "b = bytearray(60 << 20)\nfor i in range(2_000_000): pass"])
    assert result.max_rss > 50 << 20
    assert result.cpu_time > 0.02
    assert result.duration >= result.cpu_time * 0.2


def test_known_codes_while_orphans_die(jail):
    """Assert that no status is ever taken for another's while orphans are reaped (BC-29)."""
    stop = threading.Event()

    def orphans():
        while not stop.is_set():
            jail.exec("(true &) ; (sh -c 'exit 9' &) ; true")

    thread = threading.Thread(target=orphans)
    thread.start()
    try:
        for n in range(200):
            assert jail.exec(f"exit {n % 200}").exit_code == n % 200
    finally:
        stop.set()
        thread.join()


def test_concurrent_calls_get_their_own_answers(jail):
    """Assert that many threads on one worker each get their own answer."""
    wrong = []

    def call(n):
        for i in range(15):
            result = jail.exec(f"echo {n}-{i}; exit {n}")
            if (result.exit_code, result.stdout) != (n, f"{n}-{i}\n".encode()):
                wrong.append((n, i, result))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_stream_delivers_while_running(jail):
    """Assert that output arrives while the command runs and the result comes at the end."""
    stream = jail.stream("for i in 1 2 3; do echo $i; sleep 0.2; done; echo e >&2; exit 4")
    seen, times = [], []
    for chunk in stream:
        seen.append((chunk.fd, chunk.data))
        times.append(time.monotonic())
    assert seen == [(1, b"1\n"), (1, b"2\n"), (1, b"3\n"), (2, b"e\n")]
    assert times[1] - times[0] > 0.1
    assert stream.result.exit_code == 4


def test_stream_closed_early_kills(jail):
    """Assert that leaving a stream kills the command."""
    with jail.stream("echo a; exec sleep 603") as stream:
        assert next(stream).data == b"a\n"
    assert "sleep 603" not in jail.exec("ps -eo args").stdout_text
