"""Harming processes outside: the backend, the worker, another user's program."""

# ruff: noqa: E501 - a program reads better in one line

from __future__ import annotations

from technique import Technique


def _process(name: str, program: str, check: str = "", **more: object) -> Technique:
    return Technique(name, "processes", program, seen="host" if check else "output", check=check, **more)  # type: ignore[arg-type]


_DEAD = "not w.victim_alive()"
_PAUSED = "w.victim_state() in 'Tt'"
_OVER = "must not be done to the test's own session"

TECHNIQUES = [
    _process("kill a host process", "import os; os.kill(VICTIM, 9)", _DEAD),
    _process("stop a host process", "import os; os.kill(VICTIM, 19)", _PAUSED),
    _process("kill by pidfd", "import os, signal; signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)", _DEAD),
    _process("signal by descriptor owner",
             "import fcntl, os, signal\n"
             "r, x = os.pipe(); fcntl.fcntl(r, fcntl.F_SETSIG if hasattr(fcntl, 'F_SETSIG') else 10, 9)\n"
             "fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM)\n"
             "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\n"
             "os.write(x, b'x')", _DEAD),
    _process("queue a signal", "import ctypes; si = (ctypes.c_int * 32)(); si[0] = 9; si[2] = -1\n"
             "call('rt_sigqueueinfo', VICTIM, 9, si)", _DEAD),
    _process("trace a host process", "import os; call('ptrace', 16, VICTIM, 0, 0) == 0 and won('attached')"),
    _process("lower a host process's limits",
             "import ctypes; call('prlimit64', VICTIM, 7, (ctypes.c_uint64 * 2)(3, 3), 0)", "w.victim_nofile() == 3"),
    _process("renice a host process", "import os; os.setpriority(os.PRIO_PROCESS, VICTIM, 19)", "w.victim_nice() == 19"),
    _process("pin a host process", "import os; os.sched_setaffinity(VICTIM, {0})", "w.victim_cpus() == {0}"),
    _process("idle class for a host process",
             "import os; os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))", "w.victim_policy() == 5"),
    _process("idle io class for a host process", "call('ioprio_set', 1, VICTIM, 3 << 13)", "w.victim_ioprio() >> 13 == 3"),
    _process("oom score of a host process", "open(f'/proc/{VICTIM}/oom_score_adj', 'w').write('1000')",
             "w.read(f'/proc/{w.victim}/oom_score_adj') == '1000\\n'"),
    _process("take descriptors of a host process",
             "import os\nfd = os.pidfd_open(VICTIM)\n"
             "for n in range(3, 20):\n"
             "    got = call('pidfd_getfd', fd, n, 0)\n"
             "    if got >= 0 and NONCE_PREFIX in os.pread(got, 100, 0).decode('latin-1'): won('descriptor')"),
    _process("enter a host process's namespaces",
             "import os\nfd = os.open(f'/proc/{VICTIM}/ns/mnt', os.O_RDONLY)\n"
             "call('setns', fd, 0) == 0 and won('entered')", root_only=True),
    _process("kill everything in sight", "import os\n"
             "for n in os.listdir('/proc'):\n"
             "    if n.isdigit() and int(n) == VICTIM: os.kill(int(n), 9)", _DEAD),
    _process("write a host process's memory",
             "maps = [l.split()[0].split('-')[0] for l in open(f'/proc/{VICTIM}/maps') if 'rw-p' in l]\n"
             "f = open(f'/proc/{VICTIM}/mem', 'r+b', 0); f.seek(int(maps[0], 16)); b = f.read(1)\n"
             "f.seek(int(maps[0], 16)); f.write(b); won('written')"),
]  # fmt: skip
