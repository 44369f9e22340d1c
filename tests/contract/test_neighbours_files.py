"""The other routes to a file: file calls beside commands, streams and terminals, at every level, after a restart."""

from __future__ import annotations

import errno
import os
import signal
import subprocess

import pytest

from vectora_jail import Policy

pytestmark = pytest.mark.kernel
SECRET = "S3CRET-neighbour"
LEVELS = {
    "default": {},
    "lockdown": {"lockdown": True},
    "read-only": {"level": "read-only"},
    "read-all": {"read": "all"},
}


@pytest.fixture(params=LEVELS)
def level(request):
    """The settings of a policy that decide how much can be seen and written."""
    return LEVELS[request.param]


def _listing(path):
    return sorted(os.path.join(where, name) for where, dirs, files in os.walk(path) for name in dirs + files)


def test_bc_01_absent_masks_stay_absent(ws, open_jail, level):
    """Assert that a mask over nothing makes nothing: while programs run, after calls, after a killed worker."""
    jail = open_jail(ws, policy=Policy(mask=(".env", ".vectora", "sub/secret"), **level))
    process = jail.spawn("sleep 60")
    terminal = jail.open_terminal(["sleep", "60"])
    jail.exec("ls -A; cat .env")
    assert _listing(ws) == []
    for name in (".env", "sub/.env", ".vectora", "sub/secret"):
        with pytest.raises(PermissionError, match="the policy masks this name"):
            jail.write_file(name, "x", make_parents=True)
    assert _listing(ws) == []
    os.kill(jail.report.pid, signal.SIGKILL)
    terminal.close()
    process.close()
    assert _listing(ws) == []


def test_bc_03_masked_directory_by_the_file_calls(ws, open_jail, level):
    """Assert that no file call writes to, empties, moves or reads a masked directory."""
    hidden = ws / "hidden"
    hidden.mkdir()
    (hidden / "k").write_text(SECRET)
    jail = open_jail(ws, policy=Policy(mask=("hidden",), **level))
    for call in (
        lambda: jail.write_file("hidden/new", "x"),
        lambda: jail.write_file("hidden/k", "x"),
        lambda: jail.edit_file("hidden/k", "S", "x"),
        lambda: jail.make_dir("hidden/d"),
        lambda: jail.rename("hidden", "shown"),
        lambda: jail.rename("hidden/k", "k"),
        lambda: jail.remove("hidden/k"),
        lambda: jail.remove("hidden", recursive=True),
        lambda: jail.read_file("hidden/k"),
        lambda: jail.stat("hidden/k"),
    ):
        with pytest.raises(OSError):
            call()
    assert jail.list_dir("hidden") == []
    assert _listing(ws) == [str(hidden), str(hidden / "k")]


def test_bc_05_09_no_route_shows_a_masked_file(ws, open_jail, level):
    """Assert that neither copies, archives, links nor /proc names show a masked file, by any kind of call."""
    for name in (".env", "packages/a/.env", "packages/a/b/c/.env", "real/.env"):
        (ws / name).parent.mkdir(parents=True, exist_ok=True)
        (ws / name).write_text(SECRET)
    (ws / "link").symlink_to("real")
    (ws / "plain.txt").symlink_to("packages/a/.env")
    os.link(ws / "real" / ".env", ws / "hard.txt")
    (ws / "by-proc").symlink_to(f"/proc/self/root{ws}/real")
    jail = open_jail(ws, policy=Policy(mask=("**/.env",), **level))
    line = (
        "cat .env packages/a/.env packages/a/b/c/.env link/.env real/.env plain.txt hard.txt by-proc/.env;"
        " cp -rL . /tmp/c; grep -r S3CRET . /tmp/c; tar c . | grep -a S3CRET; head -c 100 /proc/1/root$PWD/.env; true"
    )
    for round_ in range(2):
        assert SECRET not in jail.exec(line).text
        assert SECRET not in jail.exec(line, cwd="packages").text
        assert SECRET not in "".join(chunk.text for chunk in jail.stream(line))
        terminal = jail.open_terminal(["sh", "-c", line])
        terminal.wait(30)
        assert SECRET.encode() not in terminal.scrollback()[0]
        terminal.close()
        for name in (
            ".env",
            b".env",
            "link/.env",
            "plain.txt",
            "hard.txt",
            "by-proc/.env",
            f"/proc/1/root{ws}/.env",
        ):
            assert jail.read_file(name) == b""
        if not round_:
            jail._life.stop()


def test_bc_13_a_repository_made_by_every_route(ws, open_jail):
    """Assert that no way to run a command leaves a hook or an exec key for the host, and each is reported."""
    (ws / "hook").write_text("#!/bin/sh\n")
    (ws / "hook").chmod(0o755)
    jail = open_jail(ws)
    line = (
        "mkdir {0} && cd {0} && git init -q && cp ../hook .git/hooks/pre-commit; git config core.fsmonitor x"
    )
    with jail.shell() as shell:
        for name, run in {
            "exec": jail.exec,
            "stream": lambda text: list(jail.stream(text)),
            "spawn": lambda text: jail.spawn(text).wait(20),
            "terminal": lambda text: jail.open_terminal(["sh", "-c", text]).wait(20),
            "shell": shell.run,
        }.items():
            run(line.format(name))
            git = ws / name / ".git"
            assert (git / "HEAD").exists(), name
            assert not (git / "hooks" / "pre-commit").exists(), name
            config = git / "config"
            assert not config.exists() or "fsmonitor" not in config.read_text(), name
            told = [hazard for hazard in jail.report.hazards if f"/{name}/.git/" in hazard.text]
            assert {hazard.kind for hazard in told} == {"git_redirect"}, name


@pytest.mark.parametrize("last", ["write", "rename"])
def test_bc_13_a_repository_made_by_file_calls(ws, open_jail, last):
    """Assert that a repository written file by file runs nothing on the host once its last call returned."""
    jail = open_jail(ws)
    for name in ("objects", "refs/heads", "hooks"):
        jail.make_dir(f"r/.git/{name}", parents=True)
    jail.write_file("r/.git/hooks/pre-commit", "#!/bin/sh\n", mode=0o755)
    text = f"[core]\nrepositoryformatversion = 0\nfsmonitor = touch {ws}/ran\n"
    try:
        if last == "write":
            jail.write_file("r/.git/HEAD", "ref: refs/heads/main\n")
            jail.write_file("r/.git/config", text)
        else:
            jail.write_file("config", text)
            jail.rename("config", "r/.git/config")
            jail.write_file("HEAD", "ref: refs/heads/main\n")
            jail.rename("HEAD", "r/.git/HEAD")
    except OSError as exc:
        assert exc.errno in (errno.EROFS, errno.EXDEV, errno.EBUSY)  # protected meanwhile
    subprocess.run(["git", "-C", str(ws / "r"), "status"], capture_output=True, timeout=30, check=False)
    assert not (ws / "ran").exists()
    assert not (ws / "r" / ".git" / "hooks" / "pre-commit").exists()
    assert {hazard.kind for hazard in jail.report.hazards} == {"git_redirect"}


@pytest.mark.parametrize("git", ["read-only", "config"])
def test_bc_45_renames_by_the_file_calls(git_ws, open_jail, git):
    """Assert that no file call puts something under a protected or masked name, or takes one away."""
    jail = open_jail(git_ws, policy=Policy(mask=(".env",), protect_git=git))
    before = (git_ws / ".git" / "config").read_bytes()
    hooks = sorted(os.listdir(git_ws / ".git" / "hooks"))
    jail.write_file("q", "evil")
    for call in (
        lambda: jail.rename("q", ".git/config"),
        lambda: jail.rename("q", ".git/hooks/pre-commit"),
        lambda: jail.rename("q", ".env"),
        lambda: jail.rename(".env", "shown"),
        lambda: jail.rename(".git", "moved"),
        lambda: jail.rename(".git/hooks", "moved"),
        lambda: jail.remove(".git", recursive=True),
        lambda: jail.remove(".env"),
        lambda: jail.write_file(".git/hooks/pre-commit", "x"),
        lambda: jail.write_file(".git/hooks/a/b", "x", make_parents=True),
        lambda: jail.edit_file(".git/config", "core", "x"),
    ):
        with pytest.raises(OSError):
            call()
    assert (git_ws / ".git" / "config").read_bytes() == before
    assert sorted(os.listdir(git_ws / ".git" / "hooks")) == hooks
    assert (git_ws / ".env").read_text() == "TOKEN=top-secret\n"
    done = subprocess.run(["git", "-C", str(git_ws), "fsck"], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("grants", "inner", "outer"),
    [
        ({"ro_paths": ("d",)}, False, False),
        ({"ro_paths": ("d/sub",)}, False, True),
        ({"rw_paths": (".", "d/sub"), "ro_paths": ("d",)}, True, False),
        ({"protect": ("d",)}, False, False),
        ({"level": "read-only"}, False, False),
    ],
)
def test_bc_55_the_deepest_grant_decides_for_both_routes(ws, open_jail, grants, inner, outer):
    """Assert that commands and file calls agree on what nested grants allow, and no granted place is moved away."""
    (ws / "d" / "sub").mkdir(parents=True)
    jail = open_jail(ws, policy=Policy(**grants))
    for place, allowed in (("d/sub", inner), ("d", outer)):
        assert (jail.exec(f"touch {place}/by-command").exit_code == 0) == allowed
        if allowed:
            jail.write_file(f"{place}/by-call", "x")
        else:
            with pytest.raises(OSError, match="Read-only"):
                jail.write_file(f"{place}/by-call", "x")
    with pytest.raises(OSError):
        jail.rename("d/sub", "elsewhere")
    assert jail.exec("mv d/sub elsewhere").exit_code != 0
    assert (ws / "d" / "sub").is_dir()


@pytest.mark.root
def test_directories_of_other_users_do_not_stop_root(ws, open_jail):
    """Assert that a jail of root starts beside closed directories of others with masked files, and hides them."""
    for name, secret in (("data", ".env"), ("repo", ".git/config"), ("plain", "x")):
        path = ws / name / secret
        path.parent.mkdir(parents=True)
        path.write_text(SECRET)
        for place in (path, path.parent, ws / name):
            os.chown(place, 12345, 12345)
        (ws / name).chmod(0o700)
    jail = open_jail(ws)
    assert SECRET not in jail.exec("cat */.env */.git/config */x").text
    assert jail.exec("echo x > data/new").exit_code != 0
    (ws / "data").chmod(0o755)  # opened later by its owner: still hidden
    assert SECRET not in jail.exec("cat data/.env").text
