"""What the policy does not grant cannot be reached: each attack succeeds outside and fails inside.

Every attack runs as a shell command. Without the jail it must show the secret or leave its mark, in the same test.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from vectora_jail import Policy

pytestmark = pytest.mark.kernel
SECRET = "S3CRET-nonce"


def outside(command: str, cwd) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, capture_output=True, text=True, timeout=20, check=False
    )
    return done.stdout + done.stderr


@pytest.fixture
def place(tmp_path):
    """A host directory with a secret, and a workspace with masked ones."""
    host = tmp_path / "host"
    host.mkdir()
    (host / "secret").write_text(SECRET)
    ws = tmp_path / "ws"
    (ws / "deep" / "er").mkdir(parents=True)
    (ws / "sec").mkdir()
    for path in (ws / ".env", ws / "deep" / "er" / ".env", ws / "key.pem", ws / "sec" / "k"):
        path.write_text(SECRET)
    os.link(ws / ".env", ws / "hard")
    (ws / "soft").symlink_to(".env")
    (ws / "real").mkdir()
    (ws / "real" / ".env").write_text(SECRET)
    (ws / "link").symlink_to("real")
    (ws / "ok.txt").write_text("fine")
    return ws


MASKED = {
    "cat": "cat .env",
    "nested": "cat deep/er/.env",
    "pem": "cat key.pem",
    "directory": "cat sec/k; grep -r . sec",
    "hard_link": "cat hard",
    "symlink": "cat soft",
    "symlinked_parent": "cat link/.env real/.env",
    "proc_root": "cat /proc/self/root$PWD/.env",
    "proc_cwd": "cat /proc/self/cwd/.env",
    "new_hard_link": "ln .env x1; cat x1; rm -f x1",
    "copy": "cp .env x2; cat x2; rm -f x2",
    "rename": "cp -p .env .env.keep; mv .env x3 && cat x3 && mv x3 .env; rm -f .env.keep",
    "parent_renamed": "mv deep moved && cat moved/er/.env; mv moved deep",
    "descriptor": "exec 9<.env; cat <&9",
    "tar": "tar cf - . | grep -a S3CRET | head -1",
    "python_mmap": "python3 -c 'import mmap;f=open(\".env\");print(mmap.mmap(f.fileno(),0,prot=1)[:])'",
    "openat_dotdot": "cd deep/er && cat ../../.env",
    "find_exec": "find . -name .env -exec cat {} +",
    "grep": "grep -rh S3CRET .",
    "sendfile": "python3 -c 'import os;f=os.open(\".env\",0);os.sendfile(1,f,0,99)'",
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_content(place, open_jail, name):
    """Assert that a masked file or directory shows nothing by any route that shows it outside."""
    command = MASKED[name]
    assert SECRET in outside(command, place)
    jail = open_jail(place, policy=Policy(mask=(".env", "*.pem", "sec")))
    assert SECRET not in jail.exec(["bash", "-c", command]).text
    assert jail.exec("cat ok.txt").stdout == b"fine"


UNGRANTED = {
    "read": "cat {host}/secret",
    "dotdot": "cat ../host/secret",
    "proc_root": "cat /proc/self/root{host}/secret",
    "planted_symlink": "ln -s {host}/secret s; cat s; rm -f s",
    "proc_of_others": "for p in /proc/[0-9]*; do cat $p/root{host}/secret $p/cwd/../host/secret; done 2>/dev/null",
}


@pytest.mark.parametrize("name", UNGRANTED)
def test_ungranted_content(place, open_jail, tmp_path, name):
    """Assert that a path that nobody granted cannot be read by any route that shows it outside."""
    command = UNGRANTED[name].format(host=tmp_path / "host")
    assert SECRET in outside(command, place)
    assert SECRET not in open_jail(place).exec(["bash", "-c", command]).text


WRITES = {
    "write": "echo x > {host}/mark",
    "symlink": "ln -s {host}/mark m; echo x > m; rm -f m",
    "directory_symlink": "ln -s {host} d; echo x > d/mark; rm -f d",
    "mkdir": "mkdir {host}/mark",
    "rename": "touch m; mv m {host}/mark",
    "link": "ln ok.txt {host}/mark",
    "mknod": "mkfifo {host}/mark",
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_outside(place, open_jail, tmp_path, name):
    """Assert that nothing appears outside the grants by any route that works outside a jail."""
    mark = tmp_path / "host" / "mark"
    command = WRITES[name].format(host=tmp_path / "host")
    outside(command, place)
    assert mark.exists()
    mark.rmdir() if mark.is_dir() else mark.unlink()
    open_jail(place).exec(["bash", "-c", command])
    assert not mark.exists()


PROTECTED = {
    "append": "echo evil >> vectora.toml",
    "replace": "echo evil > x; mv x vectora.toml",
    "unlink": "rm -f vectora.toml",
    "link_over": "echo evil > x; ln -f x vectora.toml",
    "hook": "echo evil > .git/hooks/pre-commit",
    "config": "echo evil >> .git/config",
    "git_config": "git config core.fsmonitor evil",
    "move_git": "mv .git .g2",
    "rename_into": "echo evil > x && mv x .git/hooks/pre-commit",
    "chmod": "chmod 777 vectora.toml",
    "truncate": "truncate -s 0 vectora.toml",
    "commondir": "echo evil > .git/commondir",
    "index": "git add -A",
}


@pytest.mark.parametrize("name", PROTECTED)
def test_protected(git_ws, open_jail, name):
    """Assert that the policy file and the git directory cannot be changed, by any route that works outside (BC-45)."""

    def state():
        out = []
        for root, _, files in sorted(os.walk(git_ws / ".git")):
            out += [(f, Path(root, f).read_bytes()) for f in sorted(files)]
        path = git_ws / "vectora.toml"
        mode = path.stat().st_mode if path.exists() else None
        return out, (git_ws / ".git").exists(), path.read_text() if path.exists() else None, mode

    (git_ws / "vectora.toml").write_text("[sandbox]\n")
    before = state()
    jail = open_jail(git_ws, policy=Policy())
    jail.exec(["bash", "-c", PROTECTED[name]])
    assert state() == before
    jail.close()
    outside(PROTECTED[name], git_ws)
    assert state() != before


def test_file_calls_follow_no_planted_link(place, open_jail, tmp_path):
    """Assert that file calls see what commands see: planted links lead nowhere on the host (BC-89)."""
    host = tmp_path / "host"
    jail = open_jail(place)
    jail.exec(f"ln -s {host}/secret w1; ln -s {host}/new w2; ln -s {host} d; ln -s /etc/passwd w3")
    for path in ("w1", "d/secret"):
        with pytest.raises(OSError):
            jail.read_file(path)
    for path in ("w1", "w2", "d/x", "w3"):
        with pytest.raises(OSError):
            jail.write_file(path, b"evil")
    assert sorted(os.listdir(host)) == ["secret"]
    assert (host / "secret").read_text() == SECRET


def test_link_swapped_in_a_race(place, open_jail, tmp_path):
    """Assert that 500 writes through a name that flips between directory and link never leave the workspace (BC-89)."""
    host = tmp_path / "host"
    jail = open_jail(place)
    process = jail.spawn(
        f"while :; do mkdir d2; rmdir d2; ln -s {host} d2; rm d2; mkdir d2; rm -rf d2; done 2>/dev/null"
    )
    for _ in range(500):
        try:
            jail.write_file("d2/x", b"evil")
        except OSError:
            continue
    process.kill()
    assert sorted(os.listdir(host)) == ["secret"]


def test_nothing_is_made_on_the_host(ws, open_jail):
    """Assert that masks of absent names leave nothing behind, during and after (BC-01)."""
    before = sorted(os.listdir(ws))
    jail = open_jail(ws, policy=Policy(mask=(".env", ".vectora", "**/*.pem")))
    process = jail.spawn(["sleep", "5"])
    assert sorted(os.listdir(ws)) == before
    process.kill()
    os.kill(jail.report.pid, 9)
    while jail.alive:
        pass
    jail.exec("true")
    assert sorted(os.listdir(ws)) == before


def test_masked_directory_takes_no_writes(place, open_jail):
    """Assert that a masked directory is empty and read-only for commands and file calls (BC-03)."""
    jail = open_jail(place, policy=Policy(mask=("sec",)))
    assert jail.exec("echo x > sec/new").exit_code != 0
    assert jail.exec("ls -A sec").stdout == b""
    with pytest.raises(OSError):
        jail.write_file("sec/new2", b"x")
    assert os.listdir(place / "sec") == ["k"]


def test_many_masks(ws, open_jail):
    """Assert that 1,200 masked files are all hidden and the start still works (BC-61)."""
    for n in range(1200):
        (ws / f"{n}.env").write_text(SECRET)
    jail = open_jail(ws, policy=Policy(mask=("*.env",)))
    assert SECRET not in jail.exec("cat *.env").text
    assert len(jail.report.masks) >= 1200


def test_host_network_is_not_there(ws, open_jail):
    """Assert that a host service on loopback, an abstract socket and a socket in /tmp cannot be reached (BC-33)."""
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0vj-{os.getpid()}")
    abstract.listen()
    path = f"/tmp/vj-{os.getpid()}.sock"
    named = socket.socket(socket.AF_UNIX)
    named.bind(path)
    named.listen()
    accepted = []
    for server in (tcp, abstract, named):
        server.settimeout(20)

    def accept(server):
        try:
            server.accept()[0].close()
            accepted.append(server)
        except OSError:
            return

    code = (
        "import socket,sys\n"
        f"where = [('127.0.0.1', {tcp.getsockname()[1]}), '\\0vj-{os.getpid()}', '{path}']\n"
        "for kind, where in zip((socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX), where):\n"
        "    s=socket.socket(kind)\n"
        "    try: s.connect(where); print('connected')\n"
        "    except OSError as e: print('refused [', e)\n"
    )
    try:
        threads = [threading.Thread(target=accept, args=(s,)) for s in (tcp, abstract, named)]
        for thread in threads:
            thread.start()
        done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, timeout=20, check=True)
        assert done.stdout.count("connected") == 3
        for thread in threads:
            thread.join()
        result = open_jail(ws).exec(["python3", "-c", code])
        assert result.stdout_text.count("refused [") == 3, result.text
    finally:
        for server in (tcp, abstract, named):
            server.close()
        os.unlink(path)


def test_interfaces(jail):
    """Assert that only lo exists inside and getifaddrs works."""
    result = jail.exec(["python3", "-c", "import socket; print(socket.if_nameindex())"])
    assert result.stdout_text.strip() == "[(1, 'lo')]"


def test_setuid_bits_cannot_be_left(ws, open_jail):
    """Assert that no set-id bit can be left on a host file."""
    jail = open_jail(ws)
    jail.exec("touch f; chmod 4755 f; chmod u+s f; mkdir -m 2777 d; install -m 4755 f g; cp f h; chmod g+s h")
    for name in ("f", "g", "h", "d"):
        if (ws / name).exists():
            assert (ws / name).stat().st_mode & 0o6000 == 0
    jail.write_file("w", b"x", mode=0o4755)
    assert (ws / "w").stat().st_mode & 0o6000 == 0


def test_sensitive_home(tmp_path, open_jail, monkeypatch):
    """Assert that keys below the home directory are hidden, also when all reads are granted."""
    home = tmp_path / "home"
    for name in (
        ".ssh/id",
        ".aws/credentials",
        ".netrc",
        ".config/gcloud/key",
        ".kube/config",
        ".docker/config.json",
    ):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
    ws = home / "ws"
    ws.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for policy in (Policy(), Policy(read="all"), Policy(rw_paths=(str(home),)), Policy(level="read-only")):
        jail = open_jail(ws, policy=policy)
        text = jail.exec(f"grep -r S3CRET {home} ~ 2>/dev/null; cat {home}/.netrc").text
        assert SECRET not in text, policy


def test_uid0_cannot_reach_the_kernel(jail):
    """Assert that kernel settings cannot be written from inside, whoever the jail's user is."""
    script = (
        "for f in kernel/core_pattern kernel/modprobe vm/swappiness; do "
        'v=$(cat /proc/sys/$f); echo "$v" > /proc/sys/$f && echo WROTE; done'
    )
    assert "WROTE" not in jail.exec(script).text
    assert "WROTE" not in jail.exec("echo b > /proc/sysrq-trigger && echo WROTE").text


def test_worker_cannot_be_touched(jail):
    """Assert that commands can neither signal, trace, read nor cripple the worker."""
    code = (
        "import os,resource,ctypes\n"
        "def t(f):\n"
        "    try: f(); print('DID')\n"
        "    except (OSError, ValueError) as e: print('no', e)\n"
        "t(lambda: open('/proc/1/environ','rb').read())\n"
        "t(lambda: open('/proc/1/mem','rb').read(1))\n"
        "t(lambda: os.readlink('/proc/1/fd/3') and open('/proc/1/fd/3'))\n"
        "t(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3,3)))\n"
        "t(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))\n"
        "t(lambda: os.sched_setaffinity(1, {0}))\n"
    )
    result = jail.exec(["python3", "-c", code])
    assert "DID" not in result.stdout_text, result.stdout_text
    jail.exec("kill -9 1; kill -STOP 1; kill -TERM -1 2>/dev/null; true", timeout=5)
    assert jail.exec("echo ok").stdout == b"ok\n"
