"""Without bwrap, Landlock is the only wall: it says so, holds what it claims, and refuses the rest."""

from __future__ import annotations

import os
import socket

import pytest

from vectora_jail import Jail, Policy, UnsupportedPolicy, WorkerSpawnError

pytestmark = pytest.mark.kernel

NO_BWRAP = {"bwrap": "/nonexistent/bwrap"}
OPEN_POLICY = {"mask": (), "protect_git": "off"}


@pytest.fixture
def weak(ws):
    """A jail that Landlock alone holds."""
    with Jail.open(ws, policy=Policy(**OPEN_POLICY), backend_options=NO_BWRAP) as jail:
        yield jail


@pytest.mark.root
def test_root_is_refused(ws):
    """Assert that root gets no jail without a user namespace."""
    with pytest.raises(WorkerSpawnError, match="bwrap"):
        Jail.open(ws, policy=Policy(**OPEN_POLICY), backend_options=NO_BWRAP).start()


def test_lockdown_is_refused(ws):
    """Assert that lockdown never falls back."""
    policy = Policy(lockdown=True, mask=())
    with pytest.raises((WorkerSpawnError, UnsupportedPolicy)):
        Jail.open(ws, policy=policy, backend_options=NO_BWRAP).start()


@pytest.mark.user
def test_works_and_says_so(ws, weak):
    """Assert that commands and file calls work and the report calls it Landlock."""
    assert weak.exec("echo hi > f; cat f; id -u").stdout_text.split() == ["hi", str(os.getuid())]
    weak.write_file("g", b"data")
    assert (ws / "g").read_bytes() == b"data"
    assert weak.report.isolation == "landlock"
    assert {layer.name for layer in weak.report.degraded} >= {"mounts"}
    assert weak.exec("mktemp").exit_code == 0


@pytest.mark.user
def test_what_it_claims(ws, weak, tmp_path):
    """Assert: no read or write outside the grants, no TCP or UDP, no signal to worker or backend."""
    (tmp_path / "secret").write_text("SECRET")
    assert "SECRET" not in weak.exec(f"cat {tmp_path}/secret; cat ../secret").text
    weak.exec(f"echo x > {tmp_path}/mark")
    assert not (tmp_path / "mark").exists()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0vj-ll-{os.getpid()}")
    abstract.listen()
    code = (
        "import socket, os\n"
        "def t(f):\n"
        "    try: f(); print('DID')\n"
        "    except OSError as e: print('no', e)\n"
        "t(lambda: socket.create_connection(('127.0.0.1', 9), 1))\n"
        "t(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)))\n"
        f"t(lambda: socket.socket(socket.AF_UNIX).connect('\\0vj-ll-{os.getpid()}'))\n"
        f"t(lambda: os.kill({os.getpid()}, 0))\n"
        f"t(lambda: os.kill({weak.report.pid}, 9))\n"
        f"t(lambda: open('/proc/{os.getpid()}/environ').read())\n"
        f"t(lambda: open('/proc/{weak.report.pid}/mem', 'rb').read(1))\n"
    )
    result = weak.exec(["python3", "-c", code])
    abstract.close()
    assert "DID" not in result.stdout_text
    assert len(result.stdout_text.splitlines()) == 7, result.text
    assert weak.exec("echo alive").stdout == b"alive\n"


@pytest.mark.user
def test_tree_is_killed_without_a_pid_namespace(weak):
    """Assert that a timeout ends daemons too, by their tag."""
    mark = f"sleep {700 + os.getpid() % 100}.5"
    weak.exec(f"setsid {mark} & {mark}", timeout=0.3)
    assert mark not in weak.exec("ps -eo args | grep -v grep | grep -v 'ps -eo'").stdout_text


@pytest.mark.user
def test_masks_are_refused(ws):
    """Assert that a mask inside a grant is refused, not ignored."""
    (ws / ".env").write_text("SECRET")
    with pytest.raises(UnsupportedPolicy, match="mask|mount"):
        Jail.open(ws, policy=Policy(), backend_options=NO_BWRAP).start()
