"""A jail without the library above the shim: bwrap's skeleton and, as its pid 1, an obedient Python."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

native = pytest.importorskip("vectora_jail._native", reason="the shim is not built")

if path := os.environ.get("VJ_TEST_LAUNCHER"):  # another build of the launcher, with sanitizers for example
    with open(path, "rb") as image:
        assert native.lib.vj_set_launcher(image.fileno()) == 0
    native.register_launcher = lambda: None
    native._launcher_set = True

BWRAP = b"/usr/bin/bwrap"
PYTHON = "/usr/bin/python3"
# Reads Python source from its socket, answers with the repr of `out` or of the exception.
AGENT = """
import os, socket, sys
s = socket.socket(fileno=3)
while code := s.recv(60000):
    names = {"os": os, "out": None}
    try:
        exec(code, names)
        answer = repr(names["out"])
    except OSError as error:
        answer = repr({"errno": error.errno})
    except BaseException as error:
        answer = repr({"error": repr(error)})
    s.send(answer.encode())
"""
NAMESPACES = (
    b"--unshare-all --unshare-user --as-pid-1 --cap-drop ALL --clearenv --new-session --die-with-parent"
).split()


class Agent:
    """A started jail and the socket to the Python inside it."""

    def __init__(
        self, workspace: Path, *, options=(), extra_fds=(), stage=None, bwrap=BWRAP, deadline_s=10.0
    ):
        self.workspace = workspace
        self.closed = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        cover = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        args = [*NAMESPACES, b"--size", b"1000000", b"--tmpfs", b"/run", b"--dir", b"/run/vectora-jail/dir"]
        args += [b"--perms", b"0444", b"--file", b"10", b"/run/vectora-jail/file"]
        args += b"--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib".split()
        args += b"--symlink usr/lib64 /lib64 --dir /etc --proc /proc --dev /dev".split()
        args += [b"--size", b"1000000", b"--tmpfs", b"/scratch"]
        args += [b"--bind", bytes(workspace), bytes(workspace), *options, b"--remount-ro", b"/run"]
        self.socket = ours
        self.socket.settimeout(20)
        try:
            self.started = native.start(
                bwrap,
                args,
                [cover, *extra_fds],
                theirs.fileno(),
                stage=stage,
                deadline_s=deadline_s,
                command=(PYTHON.encode(), b"-I", b"-S", b"-c", AGENT.encode()),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(cover)

    def run(self, code: str):
        """Execute code inside; the value of its variable `out`, or {"errno": n}."""
        self.socket.send(code.encode())
        return eval(self.socket.recv(200000), {})

    def enter(self, *ops):
        """Apply ops; one errno each."""
        msgpack = pytest.importorskip("msgpack")
        return native.enter(self.started.mntns_fd, self.started.userns_fd, msgpack.packb(list(ops)))

    def close(self):
        """End the jail and give everything back; the second time does nothing."""
        if self.closed:
            return None
        self.closed = True
        self.socket.close()
        status = native.reap(self.started)
        self.started.close()
        return status


@pytest.fixture
def jail(tmp_path):
    """Return a factory of jails on tmp_path/ws (or another folder); all are ended afterwards."""
    if not os.access(BWRAP, os.X_OK) or not os.access(PYTHON, os.X_OK):
        pytest.skip("needs /usr/bin/bwrap and /usr/bin/python3")
    agents = []

    def make(workspace: Path | None = None, **keywords) -> Agent:
        workspace = workspace or tmp_path / "ws"
        workspace.mkdir(exist_ok=True)
        agents.append(Agent(workspace, **keywords))
        return agents[-1]

    yield make
    for agent in agents:
        with contextlib.suppress(OSError):
            agent.close()
