"""Reaching the host's sockets, names and neighbours with `network.mode = "none"`."""

# ruff: noqa: E501 - a program reads better in one line

from __future__ import annotations

from technique import Technique


def _net(name: str, program: str, **more: object) -> Technique:
    more.setdefault("seen", "host")
    more.setdefault("check", "w.contacted()")
    return Technique(name, "network", program, **more)  # type: ignore[arg-type]


TECHNIQUES = [
    _net("tcp to the host", "import socket; socket.create_connection(('127.0.0.1', PORT), 2).send(b'hi')"),
    _net("tcp over IPv6", "import socket; socket.create_connection(('::1', PORT6), 2).send(b'hi')"),
    _net("udp to the host", "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hi', ('127.0.0.1', UDP))"),
    _net("mapped address", "import socket; s = socket.socket(socket.AF_INET6); s.settimeout(2);"
         " s.connect(('::ffff:127.0.0.1', PORT)); s.send(b'hi')"),
    _net("tcp fast open", "import socket; s = socket.socket(); s.settimeout(2);"
         " s.sendto(b'hi', 0x20000000, ('127.0.0.1', PORT))"),
    _net("the host's other address", "import socket; s = socket.socket(); s.settimeout(2); s.connect((ADDRESS, PORT_ANY)); s.send(b'hi')",
         outside="succeeds where the host has an address beside loopback"),
    _net("unix socket in a directory", "import socket; s = socket.socket(socket.AF_UNIX); s.connect(UNIX); s.send(b'hi')"),
    _net("unix socket by proc", "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/proc/self/root' + UNIX); s.send(b'hi')"),
    _net("unix datagram", "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'hi', UNIX_DGRAM)"),
    _net("abstract unix socket", "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + ABSTRACT); s.send(b'hi')"),
    _net("listen for the host", "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', FREE_PORT)); s.listen();"
         " won('listening'); s.settimeout(1.5)\n"
         "try: s.accept()\n"
         "except OSError: pass", check="w.connected_while_running", seen="host"),
    _net("interfaces of the host", "import socket; [won(n) for _, n in socket.if_nameindex() if n != 'lo']", seen="output",
         check="", outside="succeeds where the host has an interface beside loopback"),
    _net("sockets of the host", "print(open('/proc/net/tcp').read(), open('/proc/self/net/unix').read())\n"
         "text = open('/proc/self/net/unix').read()\nif UNIX in text or ABSTRACT in text: won('seen')", seen="output", check="",
         landlock=False),
    _net("io_uring to the host", "import ctypes\nr = call('io_uring_setup', 4, BUFFER)\nif r >= 0: won('a ring: it connects past any filter')",
         seen="output", check=""),
]  # fmt: skip
