"""The ruleset on the running kernel: what a domain made from our rules can and cannot do."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vectora_jail import landlock
from vectora_jail.landlock import FILE_RIGHTS, table
from vectora_jail.syscalls import numbers

if TYPE_CHECKING:
    from pathlib import Path

ARCH = os.uname().machine
NUMBER = numbers(ARCH) if ARCH in ("x86_64", "aarch64") else {}
libc = ctypes.CDLL(None, use_errno=True)


def kernel_abi() -> int:
    """Return the ABI of the running kernel, 0 when it has none."""
    if not NUMBER:
        return 0
    return max(0, libc.syscall(NUMBER["landlock_create_ruleset"], None, 0, 1))


ABI = kernel_abi()
pytestmark = [pytest.mark.skipif(ABI < 1, reason="no Landlock here"), pytest.mark.timeout(30)]

CHILD = """
import ctypes, errno, fcntl, json, os, pty, socket, struct, sys, termios
made, code, create, add, restrict = json.loads(sys.argv[1])
c = ctypes.CDLL(None, use_errno=True)
def ok(r):
    if r < 0: raise OSError(ctypes.get_errno(), "landlock")
    return r
attr = struct.pack("=QQQ", made["handled_fs"], made["handled_net"], made["scoped"])
size = 24 if made["scoped"] else 16 if made["handled_net"] else 8
fd = ok(c.syscall(create, attr, size, 0))
for path, access in made["rules"]:
    f = os.open(path, os.O_PATH)
    if not os.path.isdir(path): access &= FILE_RIGHTS
    if access: ok(c.syscall(add, fd, 1, struct.pack("=Qi", access, f), 0))
    os.close(f)
ok(c.prctl(38, 1, 0, 0, 0))
ok(c.syscall(restrict, fd, 0))
def e(f, *a, **k):
    try: f(*a, **k); return 0
    except OSError as error: return error.errno
out = None
exec(code)
print(json.dumps(out))
""".replace("FILE_RIGHTS", str(FILE_RIGHTS))


def confined(rules: list[tuple[bytes, landlock.Access]], code: str, *, deny_network: bool = False) -> object:
    """Run Python code under the ruleset and return what it left in `out`."""
    import json

    made = table(
        [(b"/usr", "ro"), (b"/lib", "ro"), (b"/lib64", "ro"), *rules], ABI, deny_network=deny_network
    )
    assert made is not None
    made["rules"] = [[os.fsdecode(p), a] for p, a in made["rules"] if os.path.exists(p)]
    calls = [NUMBER[f"landlock_{name}"] for name in ("create_ruleset", "add_rule", "restrict_self")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, json.dumps([made, code, *calls])],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return json.loads(done.stdout)


def test_read_only_and_writable_roots(tmp_path: Path) -> None:
    """Assert that a read-only root refuses every kind of write and a writable one takes them."""
    for name in ("ro", "rw", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("x")
    code = f"""
b = {str(tmp_path)!r}
out = dict(
    ro=[e(open, b + "/ro/f"), e(open, b + "/ro/f", "a"), e(open, b + "/ro/n", "w"), e(os.unlink, b + "/ro/f"),
        e(os.mkdir, b + "/ro/d"), e(os.rename, b + "/ro/f", b + "/rw/g"),
        e(os.link, b + "/ro/f", b + "/rw/l"),
        e(os.symlink, "x", b + "/ro/s"), e(os.mkfifo, b + "/ro/p")],
    rw=[e(open, b + "/rw/n", "w"), e(os.mkdir, b + "/rw/d"), e(os.rename, b + "/rw/n", b + "/rw/d/n"),
        e(os.link, b + "/rw/f", b + "/rw/d/l"), e(os.truncate, b + "/rw/f", 0), e(os.mkfifo, b + "/rw/p"),
        e(os.symlink, "x", b + "/rw/s"), e(os.rmdir, b + "/rw/no"), e(os.unlink, b + "/rw/f")],
    out=[e(open, b + "/out/f"), e(os.listdir, b + "/out"), e(open, b + "/rw/../out/f"),
         e(os.truncate, b + "/out/f", 0)],
)
"""
    got = confined([(bytes(tmp_path / "ro"), "ro"), (bytes(tmp_path / "rw"), "rw")], code)
    assert isinstance(got, dict)
    denied = errno.EACCES
    crossing = errno.EXDEV  # what a directory may give away is not Landlock's denial but a change of rights
    assert got["ro"][0] == 0
    assert all(code in (denied, crossing) for code in got["ro"][1:]), got["ro"]
    assert [code for code in got["rw"] if code] == [errno.ENOENT]
    assert got["out"][:3] == [denied] * 3
    assert got["out"][3] == (denied if ABI >= 3 else 0)


def test_devices(tmp_path: Path) -> None:
    """Assert that /dev/null and a terminal work by their class, and that rules on files are cut."""
    code = """
out = [e(open, "/dev/null", "w"), e(os.listdir, "/proc/self"), e(open, "/proc/self/comm", "w")]
m, s = pty.openpty()
out.append(e(fcntl.ioctl, s, termios.TIOCGWINSZ, b"\\0" * 8))
"""
    rules: list[tuple[bytes, landlock.Access]] = [
        (b"/dev", "rw_dev"),
        (b"/proc", "proc"),
        (b"/dev/null", "rw"),
    ]
    assert confined(rules, code) == [0, 0, 0, 0]
    assert confined([(b"/dev", "rw_dev"), (b"/proc", "ro")], code) == [0, 0, errno.EACCES, 0]


@pytest.mark.skipif(ABI < 4, reason="TCP is handled from ABI 4")
def test_network_denied_without_rules() -> None:
    """Assert that `deny_network` refuses TCP connect and bind."""
    code = """
s = socket.socket(); t = socket.socket()
out = [e(s.bind, ("127.0.0.1", 0)), e(t.connect, ("127.0.0.1", 1))]
"""
    assert confined([], code, deny_network=True) == [errno.EACCES] * 2
    assert confined([], code) == [0, errno.ECONNREFUSED]


@pytest.mark.skipif(ABI < 6, reason="scopes come with ABI 6")
def test_scopes() -> None:
    """Assert that signals and abstract sockets of processes outside are out of reach."""
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0vj-test-%d" % os.getpid())
        listener.listen()
        code = f"""
s = socket.socket(socket.AF_UNIX); t = socket.socket(socket.AF_UNIX); u = socket.socket(socket.AF_UNIX)
t.bind(b"\\0vj-own-%d" % os.getpid()); t.listen()
out = [e(s.connect, b"\\0vj-test-{os.getpid()}"), e(u.connect, b"\\0vj-own-%d" % os.getpid()),
       e(os.kill, {os.getpid()}, 0), e(os.kill, os.getpid(), 0)]
"""
        assert confined([], code) == [errno.EPERM, 0, errno.EPERM, 0]


def test_kernel_takes_every_table(tmp_path: Path) -> None:
    """Assert that this kernel accepts each older table: no right that its ABI does not have."""
    for abi in range(1, ABI + 1):
        made = table([(b"/usr", "ro"), (bytes(tmp_path), "rw")], abi, deny_network=True)
        assert made is not None
        fields = [made["handled_fs"], made["handled_net"], made["scoped"]]
        size = 24 if fields[2] else 16 if fields[1] else 8
        fd = libc.syscall(NUMBER["landlock_create_ruleset"], struct.pack("=QQQ", *fields), size, 0)
        assert fd >= 0, (abi, errno.errorcode[ctypes.get_errno()])
        for path, access in made["rules"]:
            beneath = os.open(path, os.O_PATH)
            assert (
                libc.syscall(NUMBER["landlock_add_rule"], fd, 1, struct.pack("=Qi", access, beneath), 0) == 0
            )
            os.close(beneath)
        os.close(fd)
