"""Faults that users met in systems like this one, each kept as a test that carries the case's name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vectora_jail import Jail, JailManager, Policy, PolicyError, WorkerSpawnError

pytestmark = pytest.mark.kernel
SECRET = "S3CRET-case"


def test_bc_05_globs_reach_nested_files(ws, open_jail, monkeypatch):
    """Assert that a recursive mask hides every match, whatever the backend's and the call's directory."""
    deep = ws / "packages" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    for where in (ws, ws / "packages" / "a", deep):
        (where / ".env").write_text(SECRET)
    monkeypatch.chdir(ws / "packages")
    jail = open_jail(ws, policy=Policy(mask=("**/.env",)))
    command = "cat .env packages/a/.env packages/a/b/c/.env a/.env"
    for cwd in (None, "packages", str(deep)):
        assert SECRET not in jail.exec(command, cwd=cwd).text


def test_bc_07_mask_beats_a_grant(ws, open_jail):
    """Assert that a masked file inside a read-only grant is hidden, in any order of the lists."""
    (ws / "secret.txt").write_text(SECRET)
    (ws / "ok.txt").write_text("fine")
    jail = open_jail(ws, policy=Policy(rw_paths=(), ro_paths=(".",), mask=(str(ws / "secret.txt"),)))
    assert jail.exec("cat secret.txt ok.txt").stdout == b"fine"
    assert jail.exec("echo x > new").exit_code != 0


def test_bc_15_bad_cwd_does_not_poison(git_ws, open_jail):
    """Assert that a worktree made after the start is usable or one clear error, and later calls work."""
    (git_ws / ".vectora").mkdir()
    jail = open_jail(git_ws, policy=Policy(ro_paths=(".vectora",)))
    jail.exec("true")
    where = git_ws / ".vectora" / "worktrees" / "b1"
    subprocess.run(
        ["git", "-C", str(git_ws), "worktree", "add", "-q", str(where)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    assert jail.exec("pwd", cwd=where).stdout == os.fsencode(where) + b"\n"
    assert jail.exec("pwd").stdout == os.fsencode(git_ws) + b"\n"


def test_bc_35_io_uring_has_an_errno(jail):
    """Assert that io_uring is refused with an errno, never with a signal."""
    code = "import ctypes as c; l=c.CDLL(None,use_errno=True); p=c.create_string_buffer(128); "
    code += "print(l.syscall(425, 1, p), c.get_errno())"
    result = jail.exec(["python3", "-c", code])
    assert result.exit_code == 0
    assert result.stdout_text.split()[0] == "-1"
    assert result.stdout_text.split()[1] in ("1", "38")


def test_bc_37_terminal_injection(jail):
    """Assert that TIOCSTI and TIOCLINUX are refused in every spelling, also on a terminal of the jail."""
    code = (
        "import ctypes as c; l=c.CDLL(None,use_errno=True)\n"
        "for r in (0x5412, 0x5412|1<<32, 0x541C, 0x541C|1<<40):\n"
        "    print(l.syscall(16, 0, c.c_ulong(r), c.create_string_buffer(b'x')), c.get_errno())\n"
    )
    terminal = jail.open_terminal(["python3", "-c", code])
    assert terminal.wait(10).exit_code == 0
    text = terminal.scrollback()[0].decode()
    assert text.split() == ["-1", "1"] * 4, text
    terminal.close()


def test_bc_43_rename_between_directories(ws, open_jail):
    """Assert that renames and links work between old and new directories of one writable root."""
    (ws / "a").mkdir()
    (ws / "b").mkdir()
    (ws / "a" / "f").write_text("x")
    result = open_jail(ws).exec("mv a/f b/f && ln b/f a/g && mkdir c && mv b/f c/ && mv c d && ls d")
    assert (result.exit_code, result.stdout) == (0, b"f\n")


def test_bc_47_certificates_by_link(jail):
    """Assert that as many CA certificates are loaded inside as outside."""
    code = "import ssl; print(len(ssl.create_default_context().get_ca_certs()), bool(ssl.get_default_verify_paths()))"
    outside = subprocess.run(
        ["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert jail.exec(["/usr/bin/python3", "-c", code]).stdout_text == outside.stdout


def test_bc_49_foreign_temporary_directory(ws, open_jail, tmp_path, monkeypatch):
    """Assert that names somebody else has made in TMPDIR and XDG_RUNTIME_DIR are not used."""
    for name in ("vectora", "vectora-jail"):
        (tmp_path / name).symlink_to("/etc")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = sorted(os.listdir(tmp_path))
    assert open_jail(ws).exec("echo ok").stdout == b"ok\n"
    assert sorted(os.listdir(tmp_path)) == before


def test_bc_51_long_paths(tmp_path, open_jail, monkeypatch):
    """Assert that a deep workspace and a long TMPDIR do not matter, and sockets can be bound in TMPDIR inside."""
    place = tmp_path / ("w" * 120) / ("x" * 120)
    place.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("t" * 150)))
    code = "import os, socket; s=socket.socket(socket.AF_UNIX); s.bind(os.environ['TMPDIR'] + '/s'); print('bound')"
    jail = open_jail(place)
    assert jail.exec(["python3", "-c", code]).stdout == b"bound\n"
    assert len(jail.exec("echo -n $TMPDIR").stdout) <= 40


@pytest.mark.root
def test_bc_55_nested_mounts_are_read_only_too(ws, open_jail, tmp_path):
    """Assert that a mount below a read-only grant is read-only inside, also one that is made later."""
    place = tmp_path / "ro"
    (place / "sub").mkdir(parents=True)
    (place / "later").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "t", str(place / "sub")], check=True)
    try:
        jail = open_jail(ws, policy=Policy(ro_paths=(str(place),)))
        jail.exec("true")
        subprocess.run(["mount", "-t", "tmpfs", "t", str(place / "later")], check=True)
        try:
            assert jail.exec(f"touch {place}/sub/x").exit_code != 0
            assert jail.exec(f"touch {place}/later/x").exit_code != 0
            assert jail.exec(f"touch {place}/y").exit_code != 0
            assert not any((place / name).exists() for name in ("sub/x", "later/x", "y"))
        finally:
            subprocess.run(["umount", str(place / "later")], check=True)
    finally:
        subprocess.run(["umount", str(place / "sub")], check=True)


def test_bc_57_gpu_switch(ws, open_jail):
    """Assert that no_gpu hides every node and blanks the variables; without it a host without a GPU is no error."""
    jail = open_jail(ws)
    assert jail.exec("ls /dev/nvidia* /dev/dri /dev/kfd 2>/dev/null").stdout == b""
    assert jail.exec('echo "$CUDA_VISIBLE_DEVICES-$NVIDIA_VISIBLE_DEVICES"').stdout == b"-void\n"
    assert (
        open_jail(ws, policy=Policy(no_gpu=False)).exec("test -d /sys/class && echo sys").stdout == b"sys\n"
    )


def test_bc_59_one_precedence(ws):
    """Assert that enabled = false in the workspace's file is obeyed, and only that file counts."""
    from vectora_jail import SandboxDisabled

    (ws / "vectora.toml").write_text("[sandbox]\nenabled = true\n")
    (ws / "sub").mkdir()
    (ws / "sub" / "vectora.toml").write_text("[sandbox]\nenabled = false\n")
    with JailManager() as jails:
        assert jails.get(ws).exec("echo in", cwd="sub").stdout == b"in\n"
        with pytest.raises(SandboxDisabled):
            jails.get(ws / "sub")


def test_bc_79_identity_map(git_ws, open_jail):
    """Assert that the uid is the host's own, ssh takes its configuration, and git owns its repository."""
    jail = open_jail(git_ws)
    assert jail.exec("id -u").stdout_text.strip() == str(os.getuid())
    result = jail.exec("git status --short; echo rc=$?; ssh -G localhost >/dev/null; echo rc=$?")
    assert result.stdout_text.count("rc=0") == 2, result.text


def test_bc_83_link_that_is_pointed_elsewhere(tmp_path, identity):
    """Assert that a workspace reached by a symlink that moves gets the jail of where it points now."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("one")
    with JailManager() as jails:
        jails.get(link, Policy()).exec("touch here1")
        link.unlink()
        link.symlink_to("two")
        jails.get(link, Policy()).exec("touch here2")
    assert os.listdir(tmp_path / "one") == ["here1"]
    assert os.listdir(tmp_path / "two") == ["here2"]


def test_bc_111_debuggers(ws, open_jail):
    """Assert that ptrace is off by default, a switch allows it among the jail's own processes, never on the worker."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    assert open_jail(ws).exec("strace -f true").exit_code != 0
    from vectora_jail.policy import SeccompPolicy

    jail = open_jail(ws, policy=Policy(seccomp=SeccompPolicy(allow=("ptrace",))))
    assert jail.exec("strace -f true 2>&1 | grep -c execve").stdout_text.strip() == "1"
    assert jail.exec("strace -p 1 -o /dev/null & sleep 0.3; kill $!; wait $!", timeout=10).exit_code != 0
    assert jail.exec("echo alive").stdout == b"alive\n"


def test_bc_113_unknown_keys(ws):
    """Assert that misspelt keys, sections and wrong types are refused with the nearest valid name and the line."""
    cases = {
        "[sandbox]\nmasks = ['.env']\n": "mask",
        "[sandbox]\nrw_path = ['.']\n": "rw_paths",
        "[sandbxo]\nenabled = true\n": "sandbox",
        "[sandbox]\nrw_paths = '.'\n": "rw_paths",
        "[sandbox]\nbackend = 'Docker'\n": "docker",
    }
    for text, wanted in cases.items():
        (ws / "vectora.toml").write_text(text)
        with JailManager() as jails, pytest.raises(PolicyError) as caught:
            jails.get(ws)
        assert wanted in str(caught.value), text
        assert "vectora.toml" in str(caught.value)


def test_bc_117_policy_by_link(ws, tmp_path):
    """Assert that a project's policy file that is a link out of the workspace is refused."""
    (tmp_path / "evil.toml").write_text("[sandbox]\nmask = []\n")
    (ws / "vectora.toml").symlink_to(tmp_path / "evil.toml")
    with JailManager() as jails, pytest.raises(PolicyError):
        jails.get(ws)


def test_bc_123_masked_path_is_deleted(ws, open_jail):
    """Assert that deleted or exchanged masked paths never stop a later start."""
    (ws / "d").mkdir()
    for name in ("a", "d/b"):
        (ws / name).write_text(SECRET)
    jail = open_jail(ws, policy=Policy(mask=("a", "d/b")))
    assert SECRET not in jail.exec("cat a d/b").text
    (ws / "a").unlink()
    (ws / "a").mkdir()
    (ws / "a" / "x").write_text(SECRET)
    (ws / "d" / "b").unlink()
    (ws / "d" / "b").symlink_to("/etc/passwd")
    assert jail.exec("echo ok").stdout == b"ok\n"
    os.kill(jail.report.pid, 9)
    while jail.alive:
        pass
    result = jail.exec("echo ok; cat a/x")
    assert result.stdout == b"ok\n"


def test_lockdown(ws, open_jail):
    """Assert that lockdown runs with every wall, without network, and refuses each ambiguity."""
    from vectora_jail.policy import Network, SeccompPolicy

    jail = open_jail(ws, policy=Policy(lockdown=True, network=Network(mode="allowlist")))
    assert jail.exec("echo ok").stdout == b"ok\n"
    assert jail.report.isolation == "bwrap"
    names = {layer.name for layer in jail.report.degraded}
    assert not names & {"mounts", "userns", "seccomp", "landlock", "network", "pidns"}
    for changes in ({"ro_paths": ("gone",)}, {"seccomp": SeccompPolicy(allow=("ptrace",))}):
        with pytest.raises((PolicyError, WorkerSpawnError)):
            Jail.open(ws, policy=Policy(lockdown=True, **changes)).start()


def test_read_only_level(ws, open_jail):
    """Assert that at read-only the workspace cannot be written, and the private places can."""
    (ws / "f").write_text("x")
    jail = open_jail(ws, policy=Policy(level="read-only"))
    assert jail.exec("cat f; echo y > f").stdout == b"x"
    assert (ws / "f").read_text() == "x"
    assert jail.exec("echo t > /tmp/t && echo h > ~/h && cat /tmp/t ~/h").stdout == b"t\nh\n"
    with pytest.raises(OSError):
        jail.write_file("f", b"z")


def test_command_line(ws, tmp_path, identity):
    """Assert that run, check, explain, probe, doctor and init have the exit codes of the contract."""
    root = str(Path(sys.modules["vectora_jail"].__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}

    def cli(*arguments, stdin=subprocess.DEVNULL):
        return subprocess.run(
            [sys.executable, "-m", "vectora_jail", *arguments],
            cwd=ws,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=stdin,
            check=False,
        )

    done = cli("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert cli("check").returncode == 2
    assert cli("init").returncode == 0
    assert cli("init").returncode == 1
    assert cli("check").returncode == 0
    (ws / "vectora.toml").write_text("[sandbox]\nmaks = []\n")
    done = cli("check")
    assert done.returncode == 1
    assert "mask" in done.stderr
    done = cli("run", "--", "true")
    assert done.returncode == 125
    assert "Traceback" not in done.stderr
    (ws / "vectora.toml").write_text("[sandbox]\n")
    assert '"isolation": "bwrap"' in cli("explain", "--json").stdout
    assert cli("explain").returncode == 0
    assert cli("probe", "--read", "/etc/hostname").returncode == 0
    assert cli("probe", "--read", "/etc/shadow").returncode == 1
    assert cli("probe", "--write", "vectora.toml").returncode == 1
    assert cli("probe", "--connect", "127.0.0.1:9").returncode == 1
    assert cli("doctor", "--json").returncode in (0, 1)
    assert cli("run", "-w", str(tmp_path / "gone"), "--", "true").returncode == 125
    assert cli("run", "--json", "--", "echo", "hi").stdout.startswith('{"exit_code": 0')
