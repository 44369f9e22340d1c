"""Attacks on the worker, on its answers and on whoever reads them: there is no worker outside to try them on."""

# ruff: noqa: E501 - a program reads better in one line

from __future__ import annotations

from technique import Technique

_NONE = "there is no worker outside"


def _protocol(name: str, program: str, check: str = "w.worker_harmed(jail)", **more: object) -> Technique:
    return Technique(name, "protocol", program, seen="host", check=check, outside=_NONE, **more)  # type: ignore[arg-type]


TECHNIQUES = [
    _protocol("every signal to the worker", "import os\nfor n in range(1, 65): attempt(os.kill, 1, n)\nattempt(os.kill, -1, 9)"),
    _protocol("stop storm", "import os, time\n"
              "if os.fork() == 0:\n"
              "    end = time.time() + 1\n"
              "    while time.time() < end: attempt(os.kill, -1, 19)"),
    _protocol("trace the worker", "import os\ncall('ptrace', 16, 1, 0, 0) == 0 and won('attached')", "'WON' in w.output"),
    _protocol("make the worker the tracer", "import os\ncall('ptrace', 0, 0, 0, 0)\nos.kill(os.getpid(), 19)",
              "w.worker_harmed(jail)"),
    _protocol("memory and secrets of the worker", "for n in ('environ', 'mem', 'maps', 'auxv', 'stack', 'syscall', 'io'):\n"
              "    try: f = open('/proc/1/' + n, 'rb'); f.read(1); won(n)\n"
              "    except OSError: pass", "'WON' in w.output", landlock=False),
    _protocol("descriptors of the worker", "import os\n"
              "for n in range(64):\n"
              "    try: os.open(f'/proc/1/fd/{n}', os.O_RDWR); won(n)\n"
              "    except OSError: pass", "'WON' in w.output", landlock=False),
    _protocol("take the worker's socket", "import os\nfd = attempt(os.pidfd_open, 1)\n"
              "for n in range(64):\n"
              "    if isinstance(fd, int) and call('pidfd_getfd', fd, n, 0) >= 0: won(n)", "'WON' in w.output"),
    _protocol("limits and priority of the worker", "import ctypes, os\n"
              "for limit in range(16): call('prlimit64', 1, limit, (ctypes.c_uint64 * 2)(3, 3), 0)\n"
              "attempt(os.setpriority, 0, 1, 19); attempt(os.setpriority, 2, os.getuid(), 19)\n"
              "attempt(os.setpgid, 0, 1); attempt(os.setpriority, 1, 0, 19)\n"
              "attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)); attempt(os.sched_setaffinity, 1, {0})\n"
              "call('ioprio_set', 1, 1, 3 << 13)"),
    _protocol("oom score of the worker", "attempt(lambda: open('/proc/1/oom_score_adj', 'w').write('1000'))\n"
              "attempt(lambda: open('/proc/1/autogroup', 'w').write('19'))"),
    _protocol("forged replies on every descriptor", "import os\n"
              "forged = bytes.fromhex('83a2696401a9657869745f636f646500a67369676e616c00')\n"
              "for n in range(0, 64):\n"
              "    if n not in (1, 2): attempt(os.write, n, forged)\n"
              "os._exit(7)", "w.result.exit_code != 7 or w.worker_harmed(jail)"),
    _protocol("a daemon that outlives its call", "import os, time\n"
              "if os.fork() == 0:\n"
              "    os.setsid()\n"
              "    if os.fork(): os._exit(0)\n"
              "    for n in range(3): os.close(n)\n"
              "    time.sleep(300)", "w.runs(jail, 'time.sleep(300)')"),
    _protocol("a daemon without environment and name", "import os, time\n"
              "if os.fork() == 0:\n"
              "    os.setsid()\n"
              "    if os.fork(): os._exit(0)\n"
              "    os.execve('/bin/sleep', ['vj-left-over', '300'], {})", "w.runs(jail, 'vj-left-over')"),
    _protocol("output held open", "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(300)", "w.took > 10"),
    _protocol("replace the worker's program", "for p in ('/run/vectora-jail/worker', '/proc/1/exe'):\n"
              "    try: open(p, 'r+b').write(b'x'); won(p)\n"
              "    except OSError: pass", "'WON' in w.output"),
    _protocol("write the covers", "import os\n"
              "for p in ('/run/vectora-jail/file', '/run/vectora-jail/dir/x'):\n"
              "    try: open(p, 'w').write('x'); won(p)\n"
              "    except OSError: pass", "'WON' in w.output"),
    _protocol("a pipe in place of a file", "import os; os.mkfifo('f')", "not w.refused(jail.read_file, w.workspace + '/f')"),
    _protocol("an endless file", "import os; os.symlink('/dev/zero', 'z')", "not w.refused(jail.read_file, w.workspace + '/z')"),
    _protocol("a file of a tebibyte", "pass", "not w.refused(jail.read_file, w.workspace + '/big')",
              prepare="w.sparse('big', 1 << 40)"),
    _protocol("the worker's memory by the file call", "import os; os.symlink('/proc/self/mem', 'm'); os.symlink('/proc/1/environ', 'v')",
              "not all(w.refused(jail.read_file, w.workspace + p) for p in ('/m', '/v'))"),
    _protocol("a symlink under a file call that writes", "import os; os.symlink(OUT + '/target', 'l')",
              "w.refused(jail.write_file, w.workspace + '/l', b'x') and False or w.read(w.out + '/target') != 'before'"),
    _protocol("a flood of output", "import os\nb = b'x' * 65536\nfor _ in range(2000): os.write(1, b)",
              "len(w.result.stdout) > 64 << 20 or w.worker_harmed(jail)"),
    _protocol("every descriptor and pipe", "import os\n"
              "held = []\n"
              "try:\n"
              "    while True: held.append(os.pipe())\n"
              "except OSError: pass\n"
              "import time; time.sleep(0.2)"),
    Technique("all watches of the user", "protocol",
              "import ctypes, time\nlibc = ctypes.CDLL(None)\nfor _ in range(300): libc.inotify_init()\ntime.sleep(0.5)",
              seen="host", during="w.watches_gone()", check="w.seen", landlock=False,
              outside="would starve every other test of this user"),
    Technique("all descriptors in flight", "protocol",
              "import os, resource, socket, time\n"
              "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
              "held = []\n"
              "attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (hard, hard))\n"
              "try:\n"
              "    for _ in range(100000):\n"
              "        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); held.append((a, b))\n"
              "        a.setblocking(False)\n"
              "        socket.send_fds(a, [b'x'], [0] * 250)\n"
              "except OSError: pass\n"
              "time.sleep(0.5)",
              seen="host", during="w.no_descriptor_travels()", check="w.seen",
              outside="root is exempt from the limit"),
]  # fmt: skip
