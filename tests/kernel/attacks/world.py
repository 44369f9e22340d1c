"""The host that a technique attacks: a workspace, secrets, sockets and a victim, all of them the test's own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from vectora_jail.syscalls import numbers

PYTHON = "/usr/bin/python3"
ARCH = os.uname().machine
PREFIX = "nonce-"

PRELUDE = """
import ctypes as _c
AT_FDCWD = -100
BUFFER = _c.create_string_buffer(4096)
_libc = _c.CDLL(None, use_errno=True)
_libc.syscall.restype = _c.c_long
def won(text): print("WON", text, flush=True)
def attempt(function, *args):
    try: return function(*args)
    except (OSError, ValueError) as error: return error
def call(name, *args):
    number = name if isinstance(name, int) else NUMBERS[name]
    given = [_c.c_long(a) if isinstance(a, int) else a for a in args]
    result = _libc.syscall(_c.c_long(number), *given)
    return -_c.get_errno() if result == -1 else result
print("STARTED", flush=True)
"""

VICTIM = """
import os, sys, time
held = os.environ["HELD"]
f = open(sys.argv[1])
print("ready", flush=True)
time.sleep(120)
"""


def program_text(world: World, program: str) -> str:
    """Return the whole program: the world's names, the helpers, the technique."""
    names = set(re.findall(r"call\('(\w+)'", program))
    table = {name: numbers(ARCH)[name] for name in names if name in numbers(ARCH)}
    head = "".join(f"{key} = {value!r}\n" for key, value in {**world.names(), "NUMBERS": table}.items())
    return head + PRELUDE + program


class World:
    """Everything that one run of one technique sees; `close` takes it away again."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.nonce = PREFIX + secrets.token_hex(12)
        self.base = tempfile.mkdtemp(prefix="vj-attack-")
        self.workspace, self.out, self.home, self.ro = (
            f"{self.base}/{name}" for name in ("ws", "outside", "home", "ro")
        )
        self.output = ""
        self.result: Any = None
        self.took = 0.0
        self.connected_while_running = False
        self.seen = False
        self._mounted: list[str] = []
        self._hits = 0
        self._prize = self.nonce
        self._sockets: list[socket.socket] = []
        self.extra = [f"/dev/shm/vj-{self.nonce[-8:]}", f"/tmp/vj-{self.nonce[-8:]}"]
        self._files()
        self._shm()
        self._listen()
        self._start_victim()
        self.note_files()

    # what lies around

    def _files(self) -> None:
        secret = self.nonce + "\n"
        for path, content in {
            f"{self.out}/secret": secret,
            f"{self.out}/target": "before",
            f"{self.ro}/target": "before",
            f"{self.home}/.bashrc": "before",
            f"{self.home}/.ssh/id_ed25519": secret,
            f"{self.home}/.aws/credentials": secret,
            f"{self.workspace}/.env": secret,
            f"{self.workspace}/.env~": secret,
            f"{self.workspace}/deep/er/key.pem": secret,
            f"{self.workspace}/.ssh/id": secret,
            f"{self.workspace}/vectora.toml": "",
            f"{self.workspace}/readme": "hello\n",
            **dict.fromkeys(self.extra, secret),
        }.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).write_text(content)
        os.link(f"{self.workspace}/.env", f"{self.workspace}/alias")
        os.symlink(".env", f"{self.workspace}/pointer")
        subprocess.run(["git", "init", "-q", self.workspace], check=True, timeout=20)
        os.chmod(self.base, 0o755)
        if self.uid != os.getuid():
            for directory, _, files in os.walk(self.base):
                for name in (directory, *(f"{directory}/{file}" for file in files)):
                    os.chown(name, self.uid, self.uid, follow_symlinks=False)
            for path in self.extra:
                os.chown(path, self.uid, self.uid)

    def _shm(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        self.shmid = libc.shmget(0, 4096, 0o1666)
        place = libc.shmat(self.shmid, None, 0)
        ctypes.memmove(place, self.nonce.encode(), len(self.nonce))
        libc.shmdt(ctypes.c_void_p(place))

    def _listen(self) -> None:
        def bound(family: int, kind: int, address: Any) -> socket.socket | None:
            made = socket.socket(family, kind)
            try:
                made.bind(address)
            except OSError:
                made.close()
                return None
            if kind == socket.SOCK_STREAM:
                made.listen()
            self._sockets.append(made)
            threading.Thread(target=self._watch, args=(made, kind), daemon=True).start()
            return made

        self.unix, self.unix_dgram = f"{self.out}/s", f"{self.out}/d"
        self.abstract = f"vj-{self.nonce[-8:]}"
        tcp = bound(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        tcp6 = bound(socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0))
        anywhere = bound(socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0))
        udp = bound(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        bound(socket.AF_UNIX, socket.SOCK_STREAM, self.unix)
        bound(socket.AF_UNIX, socket.SOCK_DGRAM, self.unix_dgram)
        bound(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract)
        for path in (self.unix, self.unix_dgram):
            os.chmod(path, 0o777)
        self.ports = [s.getsockname()[1] if s else 0 for s in (tcp, tcp6, anywhere, udp)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
                self.address = probe.getsockname()[0]
            except OSError:
                self.address = "127.0.0.1"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.free_port = free.getsockname()[1]

    def _watch(self, listener: socket.socket, kind: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                if kind == socket.SOCK_DGRAM:
                    listener.recv(100)
                else:
                    listener.accept()[0].close()
                self._hits += 1

    def _start_victim(self) -> None:
        demote = {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid != os.getuid() else {}
        self._victim = subprocess.Popen(
            [PYTHON, "-I", "-c", VICTIM, f"{self.out}/secret"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={"HELD": self.nonce},
            **demote,
        )
        assert self._victim.stdout is not None
        self._victim.stdout.readline()
        self.victim = self._victim.pid

    def names(self) -> dict[str, Any]:
        """Return the globals of a technique's program; the nonce is not among them."""
        return {
            "W": self.workspace, "OUT": self.out, "HOME": self.home, "RO": self.ro, "NONCE_PREFIX": PREFIX,
            "VICTIM": self.victim, "BACKEND": self.victim, "SHMID": self.shmid, "SHM_FILE": self.extra[0],
            "TMP_FILE": self.extra[1], "PORT": self.ports[0], "PORT6": self.ports[1], "PORT_ANY": self.ports[2],
            "UDP": self.ports[3], "ADDRESS": self.address, "FREE_PORT": self.free_port, "UNIX": self.unix,
            "UNIX_DGRAM": self.unix_dgram, "ABSTRACT": self.abstract,
        }  # fmt: skip

    # the two runs

    def run_outside(self, program: str, during: str = "") -> None:
        """Run a technique as an ordinary process of the jail's user, with what a careless parent would leave it."""
        demote = {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid != os.getuid() else {}
        with open(f"{self.out}/secret") as leaked, self._meanwhile(during):
            os.set_inheritable(leaked.fileno(), True)
            made = subprocess.run(
                [PYTHON, "-I", "-c", program_text(self, program)],
                cwd=self.workspace,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=30,
                close_fds=False,
                env={**os.environ, "VJ_LEAKED": self.nonce},
                check=False,
                **demote,
            )
        self.output = made.stdout + made.stderr

    def run_inside(self, jail: Any, program: str, during: str = "") -> None:
        """Run a technique in the jail, with a secret in the backend's environment and an inheritable descriptor."""
        os.environ["VJ_LEAKED"] = self.nonce
        try:
            with open(f"{self.out}/secret") as leaked, self._meanwhile(during):
                os.set_inheritable(leaked.fileno(), True)
                begin = time.monotonic()
                self.result = jail.exec([PYTHON, "-I", "-c", program_text(self, program)], timeout=25)
                self.took = time.monotonic() - begin
        finally:
            del os.environ["VJ_LEAKED"]
        self.output = self.result.stdout_text[:100_000] + self.result.stderr_text[:100_000]

    @contextlib.contextmanager
    def _meanwhile(self, during: str) -> Any:
        """Dial the program under attack while it runs, as a neighbour on the host would, and look around."""
        stop = threading.Event()

        def dial() -> None:
            while not stop.wait(0.1):
                if during and eval(during, {"w": self}):
                    self.seen = True
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", self.free_port), 0.2).close()
                    self.connected_while_running = True

        thread = threading.Thread(target=dial, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(2)

    # what the checks ask

    def nonce_is(self, text: str) -> None:
        """Make another text the prize of this run."""
        self._prize = text

    def save(self, path: str, *, rename: bool = False) -> None:
        """Write the secret to a file as an editor of the host does, in place or by rename."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        target = path + ".new" if rename else path
        Path(target).write_text(self.nonce + "\n")
        if self.uid != os.getuid():
            os.chown(target, self.uid, self.uid)
        if rename:
            os.rename(target, path)

    def swap(self, path: str) -> None:
        """Rename a directory away and make another one with the same files."""
        shutil.copytree(path, path + ".copy")
        os.rename(path, path + ".old")
        os.rename(path + ".copy", path)

    def mount(self, path: str) -> None:
        """Mount a tmpfs that holds the secret."""
        os.makedirs(path, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "vj", path], check=True, timeout=10
        )
        self._mounted.append(path)
        self.save(f"{path}/late")

    def no_descriptor_travels(self) -> bool:
        """Return whether this process can send no descriptor any more."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                socket.send_fds(ours, [b"x"], [0])
            except OSError:
                return True
        return False

    def sparse(self, name: str, size: int) -> None:
        """Put a file without blocks into the workspace."""
        with open(f"{self.workspace}/{name}", "wb") as file:
            file.truncate(size)
        if self.uid != os.getuid():
            os.chown(f"{self.workspace}/{name}", self.uid, self.uid)

    def note_files(self) -> None:
        """Remember which files the host itself has put into the workspace."""
        self._before = self._inodes()

    def leaked(self) -> bool:
        """Return whether the prize is in the output, or in a file of the workspace that was not there before."""
        if self._prize in self.output:
            return True
        return any(
            self._prize in self.read(path)
            for path, inode in self._inodes().items()
            if inode not in self._before.values()
        )

    def _inodes(self) -> dict[str, int]:
        """Return path → inode of the regular files: a secret that moved is still the same, and still covered."""
        found = {}
        for directory, _, files in os.walk(self.workspace):
            for name in files:
                path = f"{directory}/{name}"
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20:
                        found[path] = status.st_ino
        return found

    def read(self, path: str) -> str:
        """Return a file's text as the host sees it; empty when there is none."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        """Return whether the host sees a name."""
        return os.path.lexists(path)

    def set_id(self, name: str) -> bool:
        """Return whether a set-id file lies in the workspace."""
        path = f"{self.workspace}/{name}"
        return os.path.exists(path) and bool(os.stat(path).st_mode & 0o6000)

    def contacted(self) -> bool:
        """Return whether any of the host's listeners heard something."""
        end = time.monotonic() + 0.3
        while not self._hits and time.monotonic() < end:
            time.sleep(0.01)
        return self._hits > 0

    def victim_alive(self) -> bool:
        """Return whether the victim runs; a signal in flight gets a moment."""
        end = time.monotonic() + 0.2
        while time.monotonic() < end and self._victim.poll() is None:
            time.sleep(0.01)
        return self._victim.poll() is None

    def victim_state(self) -> str:
        """Return the state letter of the victim (proc(5), stat)."""
        return self.read(f"/proc/{self.victim}/stat").rpartition(")")[2].split()[0]

    def victim_nice(self) -> int:
        """Return the victim's nice value."""
        return os.getpriority(os.PRIO_PROCESS, self.victim)

    def victim_nofile(self) -> int:
        """Return the victim's soft limit of descriptors."""
        limits = self.read(f"/proc/{self.victim}/limits")
        return int(limits.partition("Max open files")[2].split()[0])

    def victim_cpus(self) -> set[int]:
        """Return where the victim may run."""
        return os.sched_getaffinity(self.victim)

    def victim_policy(self) -> int:
        """Return the victim's scheduling policy."""
        return os.sched_getscheduler(self.victim)

    def victim_ioprio(self) -> int:
        """Return the victim's io priority (ioprio_get(2))."""
        return int(ctypes.CDLL(None).syscall(numbers(ARCH)["ioprio_get"], 1, self.victim))

    def worker_state(self, jail: Any) -> tuple[Any, ...]:
        """Return what a command could have changed about the worker, as the host sees it."""
        pid = jail.report.pid
        score = self.read(f"/proc/{pid}/oom_score_adj")
        return (
            pid,
            self.read(f"/proc/{pid}/limits"),
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getscheduler(pid),
            tuple(os.sched_getaffinity(pid)),
            score,
        )

    def note_worker(self, jail: Any) -> None:
        """Remember the worker as it was before the attack."""
        self._worker = self.worker_state(jail)

    def worker_harmed(self, jail: Any) -> bool:
        """Return whether the worker is another one, changed, slow, or gives a wrong answer."""
        begin = time.monotonic()
        answers = [(jail.exec(["/bin/sh", "-c", f"echo {n}; exit {n}"]), n) for n in (3, 4)]
        wrong = [r for r, n in answers if r.exit_code != n or r.stdout != b"%d\n" % n]
        return bool(wrong) or time.monotonic() - begin > 5 or self.worker_state(jail) != self._worker

    def runs(self, jail: Any, text: str) -> bool:
        """Return whether a process with this in its command line is left in the jail."""
        seen = jail.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout_text
        return text in seen.replace("tr ", "")

    def refused(self, function: Any, *args: Any) -> bool:
        """Return whether a file call ends with an OSError, soon and without eating memory."""
        begin = time.monotonic()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(self.read("/proc/self/statm").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), limits[1]))
        try:
            function(*args)
        except OSError:
            return time.monotonic() - begin < 5
        except MemoryError:
            return False
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        return False

    def watches_gone(self) -> bool:
        """Return whether the host can make no inotify instance any more."""
        fd = ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC)
        if fd >= 0:
            os.close(fd)
        return bool(fd < 0)

    def close(self) -> None:
        """Take everything away."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.victim, signal.SIGCONT)
            self._victim.kill()
        self._victim.wait(10)
        if self._victim.stdout is not None:
            self._victim.stdout.close()
        for listener in self._sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for path in self._mounted:
            subprocess.run(["umount", "-l", path], check=False, timeout=10)
        ctypes.CDLL(None).shmctl(self.shmid, 0, None)
        for path in self.extra:
            with contextlib.suppress(OSError):
                os.unlink(path)
        shutil.rmtree(self.base, ignore_errors=True)
        if os.path.exists(self.workspace + "2"):
            shutil.rmtree(self.workspace + "2", ignore_errors=True)
