"""Ordinary work inside the default jail: what works outside works inside, on a real project.

Each case is a shell command that must end with 0 and, where it says so, print something. The network is off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

pytestmark = pytest.mark.kernel

NO_TTY = subprocess.DEVNULL

# name, program that must exist outside, command, what stdout must contain
SIMPLE = [
    ("git_status", "git", "git status --short && git log --oneline && git diff --stat", "first"),
    ("python_venv", "python3", "python3 -m venv --without-pip v && v/bin/python -c 'print(6*7)'", "42"),
    (
        "multiprocessing",
        "python3",
        "python3 -c 'import multiprocessing as m; print(sum(m.Pool(4).map(abs, range(10))))'",
        "45",
    ),
    (
        "sqlite",
        "python3",
        "python3 -c \"import sqlite3; c=sqlite3.connect('d.db'); c.execute('create table t(a)'); "
        "c.execute('insert into t values(7)'); c.commit(); print(c.execute('select a from t').fetchone())\"",
        "(7,)",
    ),
    (
        "threads",
        "python3",
        "python3 -c 'import threading as t; [x.start() for x in [t.Thread(target=print) for _ in range(20)]]'",
        "",
    ),
    (
        "asyncio",
        "python3",
        "python3 -c 'import asyncio,threading;l=asyncio.new_event_loop();"
        "threading.Thread(target=l.run_forever,daemon=True).start();print(asyncio.run_coroutine_threadsafe(asyncio.sleep(0,result=42),l).result(timeout=3))'",
        "42",
    ),
    (
        "unix_socket",
        "python3",
        "python3 -c \"import socket as s; a=s.socket(s.AF_UNIX); a.bind('x.sock'); a.listen(); b=s.socket(s.AF_UNIX); "
        "b.connect('x.sock'); c,_=a.accept(); b.sendall(b'hi'); print(c.recv(9))\"",
        "hi",
    ),
    (
        "loopback",
        "python3",
        "python3 -c \"import socket as s; a=s.create_server(('127.0.0.1',0)); "
        "b=s.create_connection(a.getsockname()); c,_=a.accept(); b.sendall(b'hi'); print(c.recv(9))\"",
        "hi",
    ),
    (
        "semaphore",
        "python3",
        "python3 -c 'import multiprocessing as m; s=m.Semaphore(2); s.acquire(); print(\"sem\")'",
        "sem",
    ),
    (
        "shared_memory",
        "python3",
        "python3 -c 'from multiprocessing import shared_memory as s; a=s.SharedMemory(create=True,size=4096); "
        "a.buf[0]=9; b=s.SharedMemory(a.name); print(b.buf[0]); b.close(); a.close(); a.unlink()'",
        "9",
    ),
    (
        "reserve_16_gib",
        "python3",
        "python3 -c 'import ctypes as c; l=c.CDLL(None); l.mmap.restype=c.c_void_p; "
        "p=l.mmap(None, c.c_size_t(16<<30), 0, 0x4022, -1, c.c_long(0)); print(16 if p != 2**64-1 else p)'",
        "16",
    ),
    (
        "pty",
        "python3",
        "python3 -c 'import pty,os;m,s=pty.openpty();print(os.ttyname(s))'",
        "/dev/pts/",
    ),
    (
        "make",
        "make",
        "printf 'all: a b c d\\na b c d:\\n\\t@sleep 0.05; echo $@ > $@\\n' > Makefile && make -j4 && ls a b c d",
        "a",
    ),
    (
        "gcc",
        "gcc",
        "printf '#include <stdio.h>\\nint main(void){puts(\"built\");}\\n' > m.c && gcc -O2 -g m.c -o m && ./m",
        "built",
    ),
    (
        "cargo",
        "cargo",
        "cargo init --vcs none --name demo c -q && cd c && cargo build --offline -q && ./target/debug/demo",
        "Hello, world!",
    ),
    (
        "go",
        "go",
        "mkdir g && cd g && printf 'module demo\\ngo 1.18\\n' > go.mod && "
        "printf 'package main\\nfunc main() { println(\"go runs\") }\\n' > m.go && go build -o d . && ./d 2>&1",
        "go runs",
    ),
    ("node", "node", "node -e 'console.log(typeof fetch, 6*7)'", "42"),
    (
        "npm_test",
        "npm",
        'printf \'{"name":"d","version":"1.0.0","scripts":{"test":"node -e 0 && echo npm-ok"}}\' > package.json '
        "&& npm test",
        "npm-ok",
    ),
    ("java", "java", "java -version 2>&1 && echo java-ok", "java-ok"),
    (
        "javac",
        "javac",
        "printf 'class M { public static void main(String[] a) { System.out.println(\"javac-ok\"); } }' > M.java && "
        "javac M.java && java M",
        "javac-ok",
    ),
    ("perl", "perl", "perl -MPOSIX -e 'print floor(42.9), \"\\n\"'", "42"),
    (
        "vim",
        "vim",
        "printf 'one\\n' > t.txt && vim -es -u NONE -c '%s/one/two/' -c wq t.txt; cat t.txt",
        "two",
    ),
    ("tmux", "tmux", "tmux -f /dev/null new-session -d -s s 'sleep 5' && tmux ls && tmux kill-server", "s:"),
    ("script", "script", "script -qec 'echo from-a-pty' /dev/null", "from-a-pty"),
    ("ssh_config", "ssh", "ssh -G localhost > /dev/null && echo ssh-ok", "ssh-ok"),
    ("locale", "locale", "locale > /dev/null && echo locale-ok", "locale-ok"),
    ("timezone", "date", "TZ=Asia/Tokyo date +%Z", "JST"),
    ("getent", "getent", "getent passwd $(id -u)", ":"),
    ("mktemp", "mktemp", "f=$(mktemp) && echo x > $f && cat $f", "x"),
    ("nproc", "nproc", "nproc", ""),
    ("ps", "ps", "ps -e | head -3", ""),
    ("strace_version", "strace", "strace -V | head -1", "strace"),
    (
        "dev_nodes",
        "sh",
        "echo x > /dev/null; head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c; ls -l /dev/fd/0",
        "4",
    ),
    ("reopen_stdout", "sh", "echo a > /dev/stdout; echo b | tee /dev/stderr", "a"),
    (
        "hard_links",
        "git",
        "echo a > a.txt && ln a.txt b.txt && cp -l a.txt c.txt && git clone -q . /tmp/cl && echo ok",
        "ok",
    ),
    (
        "rename_between_directories",
        "sh",
        "mkdir a b && echo 1 > a/f && mv a/f b/f && ln b/f a/g && mkdir c && mv b/f c/ && echo ok",
        "ok",
    ),
    ("private_home", "sh", "echo x > ~/.newdot && cat ~/.newdot", "x"),
    ("symlinks_and_modes", "sh", "ln -s a l; touch a; chmod 640 a; stat -c %a a; readlink l", "640"),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "program", "command", "wanted"), SIMPLE, ids=[row[0] for row in SIMPLE])
def test_works_as_outside(git_ws, open_jail, name, program, command, wanted):
    """Assert that an ordinary tool ends with 0 in the default jail and prints what it prints outside."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    jail = open_jail(git_ws)
    result = jail.exec(command, timeout=100)
    assert result.exit_code == 0, result.text
    assert wanted in result.stdout_text


@pytest.mark.timeout(120)
def test_pip_install_without_index(ws, open_jail):
    """Assert that a virtual environment with pip can be made inside and a local wheel be installed into it."""
    info = "pure-1.0.dist-info"
    with zipfile.ZipFile(ws / "pure-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pure.py", "VALUE = 'pure python'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pure\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"pure.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    jail = open_jail(ws)
    result = jail.exec(
        "/usr/bin/python3 -m venv v && v/bin/pip install --no-index -q ./pure-1.0-py3-none-any.whl && "
        "v/bin/python -c 'import pure; print(pure.VALUE)'",
        timeout=100,
    )
    assert result.exit_code == 0, result.text
    assert "pure python" in result.stdout_text


@pytest.mark.timeout(120)
def test_pytest_with_xdist(ws, open_jail):
    """Assert that pytest with xdist's workers runs inside, from an installation that is granted read-only."""
    from vectora_jail import Policy

    site = sysconfig.get_path("purelib")
    pytest_home = os.path.dirname(os.path.dirname(pytest.__file__))
    (ws / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(8))\ndef test_n(n): assert n >= 0\n"
    )
    jail = open_jail(ws, policy=Policy(ro_paths=tuple({site, pytest_home})))
    result = jail.exec(
        [os.path.realpath(sys.executable), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"],
        env={"PYTHONPATH": f"{pytest_home}:{site}"},
        timeout=100,
    )
    assert result.exit_code == 0, result.text
    assert "8 passed" in result.stdout_text


def test_toolchain_below_home(ws, open_jail, tmp_path, monkeypatch):
    """Assert that a tool of PATH below the home directory runs, with its link target, without secrets (BC-119)."""
    home = tmp_path / "home"
    (home / ".local" / "bin").mkdir(parents=True)
    (home / ".local" / "opt" / "t" / "bin").mkdir(parents=True)
    tool = home / ".local" / "opt" / "t" / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho tool-runs\n")
    tool.chmod(0o755)
    (home / ".local" / "bin" / "tool").symlink_to("../opt/t/bin/tool")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("KEY")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{home}/.local/bin:{os.environ['PATH']}")
    result = open_jail(ws).exec("tool; cat ~/.ssh/id; ls -A ~/.ssh; echo x > ~/.newdot; echo rc=$?")
    assert "tool-runs" in result.stdout_text
    assert "KEY" not in result.text
    assert "rc=0" in result.stdout_text
