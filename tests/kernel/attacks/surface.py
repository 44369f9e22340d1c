"""Kernel surface that no build tool needs: each call gets through to the kernel outside and is refused inside."""

# ruff: noqa: E501 - a program reads better in one line

from __future__ import annotations

from technique import Technique


def _surface(name: str, program: str, **more: object) -> Technique:
    return Technique(name, "surface", program, **more)  # type: ignore[arg-type]


def _reaches(name: str, call: str, **more: object) -> Technique:
    """Return a technique that has won when the kernel answers with anything but the two ways of refusing."""
    return _surface(name, f"r = {call}\nif r not in (-1, -38): won(r)", **more)


TECHNIQUES = [
    _surface("user namespace by unshare", "call('unshare', 0x10000000) == 0 and won('namespace')"),
    _surface("user namespace by clone", "import os\n"
             "r = call('clone', 0x10000000 | 17, 0, 0, 0, 0)\n"
             "if r == 0: os._exit(0)\n"
             "if r > 0: won('namespace')"),
    _surface("user namespace by clone3", "import ctypes, os\n"
             "a = (ctypes.c_uint64 * 11)(); a[0] = 0x10000000; a[4] = 17\n"
             "r = call('clone3', a, 88)\n"
             "if r == 0: os._exit(0)\n"
             "if r > 0: won('namespace')"),
    _surface("namespaces by int 0x80", "import ctypes, mmap\n"
             "m = mmap.mmap(-1, 4096, prot=7)\n"
             "m.write(bytes.fromhex('53 b8 36 01 00 00 bb 00 00 00 10 cd 80 5b c3'.replace(' ', '')))\n"
             "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
             "f() == 0 and won('namespace by the 32-bit table')"),
    _reaches("x32 call numbers", "call(0x40000000 | 39)", outside="most kernels are built without x32"),
    _reaches("mount", "call('mount', b'none', b'/nonexistent', b'tmpfs', 0, 0)", root_only=True),
    _reaches("new mount interface", "call('fsopen', b'tmpfs', 0)", root_only=True),
    _reaches("bpf program", "call('bpf', 0, 0, 0)", root_only=True),
    _reaches("performance counters", "call('perf_event_open', 0, 0, -1, -1, 0)"),
    _reaches("page faults in user space", "call('userfaultfd', 1)"),
    _reaches("io_uring", "call('io_uring_setup', 1, BUFFER)"),
    _reaches("keyrings", "call('keyctl', 0, -3, 0)"),
    _reaches("keys", "call('add_key', b'user', b'vj-attack', b'x', 1, -2)"),
    _reaches("kernel modules", "call('init_module', 0, 0, b'')", root_only=True, outside="needs a kernel with modules"),
    _reaches("another kernel", "call('kexec_load', 0, 999, 0, 0)", root_only=True, outside="needs a kernel with kexec"),
    _reaches("open_by_handle_at", "call('open_by_handle_at', -1, 0, 0)", root_only=True),
    _reaches("the kernel's log", "call('syslog', 10, 0, 0)", root_only=True),
    _reaches("the clock", "call('clock_settime', 999, 0)", outside="the kernel checks the clock first or the right first"),
    _reaches("file system watch", "call('fanotify_init', 0, 0)", root_only=True),
    _surface("executable personality", "call('personality', 0x0400000) >= 0 and won('READ_IMPLIES_EXEC')"),
    _surface("typing into a terminal", "import fcntl, pty, termios\n"
             "m, s = pty.openpty()\nfcntl.ioctl(s, termios.TIOCSTI, b'x'); won('typed')",
             outside="kernels without legacy_tiocsti refuse it to all but the terminal's owner"),
    _reaches("typing with high bits set", "(lambda s: call('ioctl', s, 0x5412 | 1 << 32, BUFFER))(__import__('pty').openpty()[1])",
             outside="kernels without legacy_tiocsti refuse it"),
    _reaches("line disciplines", "(lambda s: call('ioctl', s, 0x5423, b'\\x0d\\0\\0\\0'))(__import__('pty').openpty()[1])"),
    _surface("packet socket", "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); won('packets')", root_only=True),
    _surface("raw socket", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); won('raw')", root_only=True),
    _surface("kernel crypto socket", "import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); won('alg')",
             outside="needs the kernel's module"),
    _surface("vsock to the hypervisor", "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); won('vsock')",
             outside="needs the kernel's module"),
    _surface("set-id program", "import os, subprocess\n"
             "if any(l.startswith('NoNewPrivs:\\t0') for l in open('/proc/self/status')): won('set-id works')"),
    _surface("capabilities", "[won(l) for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapBnd'))"
             " and int(l.split()[1], 16)]", root_only=True),
    _reaches("memory outside any limit", "call('memfd_secret', 0)", outside="succeeds where the kernel has it"),
    _reaches("namespaces of others", "call('listmount', BUFFER, BUFFER, 1, 0)", outside="from Linux 6.8"),
]  # fmt: skip
