"""A plan's mounts and environment under the real bwrap: tools work inside, ungranted things are not there.

The worker, the filter and the live masks have tests of their own; here bwrap starts the command itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from vectora_jail.bwrap import bwrap_facts
from vectora_jail.mounts import bwrap_arguments
from vectora_jail.plan import JailPlan, build_plan
from vectora_jail.policy import Network, Policy
from vectora_jail.probe import collect_facts

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not bwrap_facts().works, reason="needs bwrap with user namespaces"),
]

ROOT = os.geteuid() == 0
USER = 4242
OWN = "own"
WHO = [OWN, pytest.param("other", marks=pytest.mark.root)]
"""Whose workspace it is: the caller's, or somebody else's to whom root changes."""


class Jail:
    """A workspace and its plan; `run` starts bwrap once for each command."""

    def __init__(self, workspace: Path, who: str, policy: Policy | None = None, **environ: str) -> None:
        self.workspace = workspace
        self.foreign = who == "other"
        if self.foreign:
            for path in (workspace, *workspace.rglob("*")):
                os.chown(path, USER, USER, follow_symlinks=False)
        env = {
            **({} if "PATH" in environ else os.environb),
            **{name.encode(): os.fsencode(value) for name, value in environ.items()},
        }
        facts = collect_facts(bytes(workspace), policy or Policy(), environ=env)
        self.plan: JailPlan = build_plan(policy or Policy(), facts)

    def run(self, command: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a shell command inside, by way of bwrap's own child."""
        plan = self.plan
        assert plan.bwrap is not None
        with contextlib.ExitStack() as stack:
            worker = stack.enter_context(open("/bin/true", "rb"))
            base = 700
            args, blobs = bwrap_arguments(plan.mounts, plan.bwrap, fd_base=base)
            args = [arg for arg in args if arg != b"--as-pid-1"]
            for pair in plan.env:
                args += [b"--setenv", *pair.split(b"=", 1)]
            args += [b"--chdir", plan.workspace]
            fds = [stack.enter_context(memory(b"\0".join(args) + b"\0")), worker.fileno()]
            fds += [stack.enter_context(memory(blob)) for blob in blobs]
            numbers = range(base - 2, base - 2 + len(fds))
            for fd, number in zip(fds, numbers, strict=True):
                os.dup2(fd, number)
                stack.callback(os.close, number)
            identity = {"user": USER, "group": USER, "extra_groups": []} if self.foreign else {}
            return subprocess.run(
                [plan.bwrap.path, "--args", str(base - 2), "--", "/bin/sh", "-c", command],
                pass_fds=tuple(numbers),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=timeout,
                check=False,
                **identity,
            )


@contextlib.contextmanager
def memory(data: bytes):
    """Return a descriptor that reads `data`."""
    fd = os.memfd_create("test")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory):
    """Return a directory that an ordinary user can reach, gone afterwards."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="vj-plan-", dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(os.path.realpath(name))


@pytest.fixture(params=WHO)
def jail(request: pytest.FixtureRequest, place: Path) -> Jail:
    """Return a jail of an empty workspace, as root and as an ordinary user."""
    (place / "ws").mkdir()
    return Jail(place / "ws", request.param)


PYTHON = {
    "venv": """
        import subprocess, sys
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "/tmp/v"], check=True)
        sys.exit(subprocess.call(["/tmp/v/bin/python", "-c", "import sys; sys.exit(sys.prefix != '/tmp/v')"]))
    """,
    "multiprocessing": """
        import multiprocessing
        with multiprocessing.Pool(2) as pool:
            print(pool.map(abs, [-1, 2]))
    """,
    "shared_memory": """
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=9)
        memory.unlink()
    """,
    "sqlite": """
        import sqlite3
        base = sqlite3.connect("a.db")
        base.execute("create table t(x)")
        base.commit()
    """,
    "asyncio": """
        import asyncio
        asyncio.run(asyncio.create_subprocess_exec("true"))
    """,
    "unix_socket": """
        import socket
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("s")
        listener.listen()
    """,
    "pty": """
        import os, pty
        assert os.ttyname(pty.openpty()[1]).startswith("/dev/pts/")
    """,
    "prot_none": """
        import mmap
        mmap.mmap(-1, 1 << 34, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    """,
}

SHELL = {
    "true": "/bin/true",
    "python3": "python3 -c 'import ssl, sqlite3, ctypes, json; print(ssl.OPENSSL_VERSION)'",
    "git": """
        git init -q r; cd r
        git -c user.name=a -c user.email=b commit -q --allow-empty -m x
        git log --oneline; git status -s
    """,
    "gcc": "echo 'int main(void){return 0;}' > a.c; gcc -o a a.c; ./a",
    "make": "printf 'all: a b\\na b:\\n\\t@echo $@\\n' > Makefile; make -j2",
    "cargo": "cargo init -q --name x --vcs none c; cd c; cargo build -q --offline; target/debug/x",
    "go": """
        mkdir g; cd g; printf 'package main\\nfunc main(){println(1)}\\n' > m.go
        go mod init x 2>/dev/null; go build -o m; ./m
    """,
    "node": 'node -e \'require("crypto").randomBytes(4); console.log(require("os").cpus().length)\'',
    "npm": """
        mkdir n; cd n
        printf '{"name":"x","version":"1.0.0","scripts":{"test":"node -e 1"}}' > package.json
        npm test
    """,
    "java": "java -version",
    "javac": """
        echo 'class A{public static void main(String[] a){System.out.println(1);}}' > A.java
        javac A.java; java A
    """,
    "perl": 'perl -MPOSIX -e \'print strftime("%Y", localtime), "\\n"\'',
    "vim": "vim -es -u NONE -c 'normal ihello' -c 'wq out.txt'; grep hello out.txt",
    "tmux": "tmux -L t new-session -d 'sleep 5'; tmux -L t ls; tmux -L t kill-server",
    "script": "script -qec true /dev/null",
    "ssh": "ssh -G localhost > /dev/null",
    "locale": "LC_ALL=C.UTF-8 locale charmap | grep -x UTF-8",
    "date": "TZ=Europe/Berlin date +%Z | grep -E 'CET|CEST'",
    "getent": "getent passwd $(id -u); getent group $(id -g)",
    "mktemp": 'mktemp; mktemp -d -p "$TMPDIR"',
    "nproc": "nproc",
    "ps": "ps -e",
    "strace": "strace -V > /dev/null",
    "xz": "echo x | xz -c | xz -dc",
    "df": "df /tmp",
    "hostname": "hostname; uname -n",
}


@pytest.mark.parametrize("who", WHO)
def test_ordinary_tools_work(who: str, place: Path):
    """Assert that each tool which is there outside works inside, for root and for an ordinary user."""
    (place / "ws").mkdir()
    jail = Jail(place / "ws", who)
    path = dict(pair.split(b"=", 1) for pair in jail.plan.env)[b"PATH"].decode()
    commands = {name: f"set -e\n{text}" for name, text in SHELL.items() if shutil.which(name, path=path)}
    for name, text in PYTHON.items():
        commands[name] = f"/usr/bin/python3 - <<'END'\n{textwrap.dedent(text)}\nEND"
    failed = []
    for name, command in commands.items():
        done = jail.run(command, timeout=120)
        if done.returncode:
            failed.append(f"{name}: {done.returncode}\n{done.stdout}{done.stderr}")
    assert not failed, "\n".join(failed)


def test_what_nobody_granted_is_not_there(jail: Jail, place: Path):
    """Assert that the host's files are gone by every spelling, after proof that they are there outside."""
    (place / "secret").write_text("S3CRET")
    (place / "ws/link").symlink_to(place / "secret")
    assert (place / "ws/link").read_text() == "S3CRET"
    names = f"{place}/secret {place}/ws/link ../secret /proc/1/root{place}/secret"
    done = jail.run(f"cat {names}; ls -A / /home /root {place}")
    assert "S3CRET" not in done.stdout
    assert done.stdout.count("secret") == 0
    for path in ("/etc/shadow", "/etc/sudoers", "/var/log", "/boot", "/srv", "/sys/kernel"):
        if os.path.exists(path):
            assert jail.run(f"test -e {path}").returncode == 1, path


def test_nothing_outside_the_grant_can_be_written(jail: Jail):
    """Assert that every place that is not private or granted refuses to be written."""
    places = "/ /etc /usr /usr/bin /dev /run/vectora-jail /run/vectora-jail/dir /proc /sys /opt /var"
    done = jail.run(
        f"for d in {places}; do touch $d/x 2>/dev/null && echo $d; done; touch w && echo granted; ls"
    )
    assert done.stdout.split() == ["granted", "w"]
    done = jail.run(
        "for f in /run/vectora-jail/worker /run/vectora-jail/file /etc/passwd; do : > $f && echo $f; done"
    )
    assert not done.stdout


def test_private_places_are_writable_and_gone_afterwards(jail: Jail):
    """Assert that /tmp, $HOME and /dev/shm take files, and keep none for the next jail."""
    command = (
        'for d in /tmp /var/tmp "$HOME" /dev/shm "$XDG_RUNTIME_DIR" /run/lock; do touch $d/x || echo $d; done'
    )
    assert jail.run(command).stdout == ""
    left = jail.run('ls /tmp/x "$HOME/x" /dev/shm/x 2>/dev/null')
    assert left.stdout == ""
    assert jail.run("stat -c %a /tmp /dev/shm").stdout.split() == ["1777", "1777"]


def test_identity_inside(jail: Jail):
    """Assert that uid and gid are the same inside, with no capability and no way to get one."""
    uid = USER if jail.foreign else os.geteuid()
    done = jail.run("id -u; id -g; grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status; unshare -U true")
    lines = done.stdout.split()
    assert lines[:2] == [str(uid), str(uid if jail.foreign else os.getegid())]
    assert {lines[i + 1] for i, word in enumerate(lines) if word.startswith("Cap")} == {"0" * 16}
    assert done.returncode != 0


def test_only_its_own_processes_and_interface(jail: Jail):
    """Assert that /proc shows the jail alone and the network is a loopback interface alone."""
    done = jail.run(
        "ls -d /proc/[0-9]* | wc -l; ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | wc -l"
    )
    assert int(done.stdout.split()[0]) < 8
    assert done.stdout.split()[-1] == "1"


def test_sizes_hold(jail: Jail):
    """Assert that no private file system is bigger than half of the memory limit."""
    done = jail.run('df -B1 --output=size,target /tmp /dev/shm /run "$HOME" | tail -n +2')
    sizes = {line.split()[1]: int(line.split()[0]) for line in done.stdout.splitlines()}
    assert all(0 < size <= 1 << 30 for size in sizes.values()), sizes


@pytest.mark.parametrize(
    "name",
    [b"a b", b"q*[x]?", "日本 é".encode(), b"-rf", b"new\nline", b"quote'\"$x", b"\xff\xfe", b"n" * 255],
)
def test_any_name_of_a_workspace(place: Path, name: bytes):
    """Assert that the workspace's path is the same bytes inside, whatever they are (BC-53)."""
    workspace = Path(os.fsdecode(bytes(place) + b"/" + name))
    workspace.mkdir()
    jail = Jail(workspace, OWN)
    done = jail.run("pwd; touch ok")
    assert os.fsencode(done.stdout) == bytes(workspace) + b"\n"
    assert (workspace / "ok").exists()


@pytest.mark.root
def test_read_only_grants_are_recursive(place: Path):
    """Assert that a mount below a read-only grant is read-only too (BC-55)."""
    (place / "ws").mkdir()
    (place / "ro/sub").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "t", str(place / "ro/sub")], check=True)
    try:
        jail = Jail(place / "ws", OWN, Policy(ro_paths=(str(place / "ro"),)))
        done = jail.run(f"touch {place}/ro/x {place}/ro/sub/x")
        assert done.stderr.count("Read-only file system") == 2
    finally:
        subprocess.run(["umount", str(place / "ro/sub")], check=True)


@pytest.mark.parametrize("who", WHO)
def test_levels(place: Path, who: str):
    """Assert that read-only writes nothing of the host, and read = "all" reads it but not its secrets."""
    (place / "ws").mkdir()
    jail = Jail(place / "ws", who, Policy(level="read-only"))
    assert jail.run("touch x").returncode != 0
    assert jail.run('touch /tmp/x "$HOME/x"').returncode == 0
    jail = Jail(place / "ws", who, Policy(read="all"))
    done = jail.run(
        'head -c 4 /var/lib/dpkg/status; touch /srv/x; touch y "$HOME/z" && echo wrote; ls -A ~/.ssh'
    )
    assert done.stdout == "Packwrote\n" or not os.path.exists("/var/lib/dpkg/status"), done.stderr
    assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr
    assert not [m for m in jail.plan.mounts if m.kind == "rw" and m.dest != bytes(place / "ws")]


@pytest.mark.parametrize("who", WHO)
def test_full_access_makes_nothing_on_the_host(place: Path, who: str):
    """Assert that danger-full-access writes where the user may, and leaves no mount point behind."""
    (place / "ws").mkdir()
    before = sorted(os.listdir("/")), sorted(os.listdir("/run"))
    policy = Policy(level="danger-full-access", network=Network(mode="host"))
    jail = Jail(place / "ws", who, policy)
    done = jail.run(
        "touch x /tmp/vj-plan-full-$$ && rm /tmp/vj-plan-full-$$ && : > /dev/null && python3 -V; ls /run/vectora-jail"
    )
    assert done.returncode == 0, done.stderr
    assert "worker" in done.stdout
    assert (place / "ws/x").exists()
    assert (sorted(os.listdir("/")), sorted(os.listdir("/run"))) == before


def test_home_as_workspace(place: Path):
    """Assert that a workspace which is $HOME is granted as it is."""
    (place / "home").mkdir()
    (place / "home/notes").write_text("N")
    jail = Jail(place / "home", OWN, HOME=str(place / "home"))
    done = jail.run('cat ~/notes; touch ~/new; echo "$HOME"')
    assert done.stdout == f"N{place}/home\n"
    assert (place / "home/new").exists()


def test_tools_in_the_home_directory(place: Path):
    """Assert that a linked tool of ~/.local/bin runs, secrets do not show, the home is private (BC-119)."""
    home = place / "home"
    (home / ".local/opt/t/bin").mkdir(parents=True)
    (home / ".local/opt/t/lib").mkdir()
    (home / ".local/opt/t/lib/data").write_text("DATA")
    tool = home / ".local/opt/t/bin/tool"
    tool.write_text('#!/bin/sh\ncat "$(dirname "$(readlink -f "$0")")/../lib/data"\n')
    tool.chmod(0o755)
    (home / ".local/bin").mkdir()
    (home / ".local/bin/tool").symlink_to("../opt/t/bin/tool")
    (home / ".cargo/bin").mkdir(parents=True)
    (home / ".cargo/bin/x").write_text("#!/bin/sh\necho X\n")
    (home / ".cargo/bin/x").chmod(0o755)
    (home / ".cargo/credentials.toml").write_text("T0KEN")
    for name in (".ssh", ".aws"):
        (home / name).mkdir()
        (home / name / "key").write_text("S3CRET")
    (home / "ws").mkdir()
    path = f"{home}/.local/bin:{home}/.cargo/bin:/usr/bin:/bin"
    jail = Jail(home / "ws", OWN, HOME=str(home), PATH=path)
    done = jail.run(
        "tool; x; ls -A ~/.ssh ~/.aws; cat ~/.cargo/credentials.toml; echo > ~/.newdot; echo rc=$?"
    )
    assert done.stdout.split() == ["DATAX", "rc=0"]
    assert not (home / ".newdot").exists()
    assert {name for name, _ in jail.plan.toolchains} == {"cargo", "links", "path"}


def test_git_in_a_sub_folder(place: Path):
    """Assert that git works in a workspace that is a sub-folder of a repository, read-only above it."""
    repository = place / "r"
    (repository / "sub").mkdir(parents=True)
    run = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    jail = Jail(repository / "sub", OWN)
    done = jail.run(f"git log --oneline; git status --short; touch {repository}/.git/x")
    assert "first" in done.stdout
    assert "Read-only file system" in done.stderr


def test_git_in_a_worktree(place: Path):
    """Assert that a linked worktree finds its common directory (BC-11)."""
    run = ["git", "-C", str(place / "R"), "-c", "user.name=a", "-c", "user.email=b"]
    (place / "R").mkdir()
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    subprocess.run([*run, "worktree", "add", "-q", str(place / "WT")], check=True)
    done = Jail(place / "WT", OWN).run("ls && git status --short && git log -1 --oneline")
    assert done.returncode == 0, done.stderr


@pytest.mark.root
def test_git_in_a_workspace_of_somebody_else(place: Path):
    """Assert that git works for root's jail of another user's workspace, which runs as that user (BC-79)."""
    (place / "ws").mkdir()
    subprocess.run(["git", "init", "-q", str(place / "ws")], check=True)
    done = Jail(place / "ws", "other").run("git status --short; id -u; stat -c %u .")
    assert done.stdout.split() == [str(USER), str(USER)], done.stderr


def test_certificates_over_two_links(place: Path):
    """Assert that a certificate file which is reached over links out of the system shows inside (BC-47)."""
    (place / "ws").mkdir()
    (place / "share").mkdir()
    (place / "share/ca.crt").write_text("CERT")
    (place / "b").symlink_to("share/ca.crt")
    (place / "a").symlink_to(place / "b")
    jail = Jail(place / "ws", OWN, SSL_CERT_FILE=str(place / "a"))
    assert jail.run('cat "$SSL_CERT_FILE"').stdout == "CERT"


@pytest.mark.root
def test_roots_own_pyenv_works():
    """Assert that tools below root's own closed home directory run for root's jails."""
    shims = [d for d in os.environ.get("PATH", "").split(":") if d.endswith("/.pyenv/shims")]
    if not shims:
        pytest.skip("needs pyenv on PATH")
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        done = Jail(Path(os.path.realpath(name)), OWN).run("command -v python3; python3 -c 'print(1)'")
    assert done.stdout.split() == [f"{shims[0]}/python3", "1"], done.stderr
