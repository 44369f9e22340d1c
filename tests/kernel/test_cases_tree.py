"""Cases about files and git, each through the public jail: commands and the file API must agree."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

pytest.importorskip("vectora_jail._native", reason="the shim is not built")
from vectora_jail import Ceiling, Policy

pytestmark = pytest.mark.kernel
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "protocol.file.allow=always"]
COMMIT = "git -c user.name=t -c user.email=t@localhost commit -q --allow-empty -m inside"


def git(where, *arguments):
    subprocess.run([*GIT, "-C", str(where), *arguments], check=True, capture_output=True, timeout=30)


def output(jail, command, **options):
    done = jail.exec(command, **options)
    return (done.stdout + done.stderr).decode(errors="replace")


def reads(jail, path):
    """What the file API shows, an empty text where it refuses."""
    try:
        return jail.read_file(str(path))
    except OSError:
        return ""


def text_of(result):
    data = getattr(result, "content", result)
    return data.decode(errors="replace") if isinstance(data, bytes) else str(data)


@pytest.fixture
def policy():
    """A policy maker whose ceiling permits the git levels and grants outside the workspace."""

    def make(**fields):
        outside = tuple(str(p) for p in fields.pop("outside", ()))
        return Policy(ceiling=Ceiling(git="off", outside_paths=outside), **fields)

    return make


def test_bc_05_nested_files_are_found(ws, open_jail, policy, monkeypatch):
    """Assert that a recursive mask reaches every depth, whatever directory backend and call are in (BC-05)."""
    (ws / "packages/a/b/c").mkdir(parents=True)
    names = (".env", "packages/a/.env", "packages/a/b/c/.env")
    for name in names:
        (ws / name).write_text("TOP")
    monkeypatch.chdir(ws / "packages")
    jail = open_jail(ws, policy=policy(mask=("**/.env",)))
    assert "TOP" not in output(jail, "cat " + " ".join(names))
    assert "TOP" not in output(jail, "cat .env a/.env ../.env", cwd=str(ws / "packages"))
    assert all("TOP" not in text_of(reads(jail, ws / name)) for name in names)


def test_bc_07_a_mask_beats_the_grant_of_its_folder(ws, open_jail, policy):
    """Assert that a masked file inside a read-only grant is hidden and its neighbour is not (BC-07)."""
    (ws / "secret.txt").write_text("TOP")
    (ws / "ok.txt").write_text("FINE")
    made = policy(rw_paths=(), ro_paths=(".",), mask=(f"{ws}/secret.txt",))
    jail = open_jail(ws, policy=made)
    shown = output(jail, f"cat {ws}/secret.txt; cat {ws}/ok.txt")
    assert "TOP" not in shown
    assert "FINE" in shown
    assert "TOP" not in text_of(reads(jail, ws / "secret.txt"))


def test_bc_09_a_linked_directory(ws, open_jail, policy):
    """Assert that a symlinked folder on the way neither shows the secret nor stops commands (BC-09)."""
    (ws / "real").mkdir()
    (ws / "real/.env").write_text("TOP")
    os.symlink("real", ws / "link")
    os.symlink("loop", ws / "loop")
    os.symlink("/nowhere/x.pem", ws / "dangling.pem")
    jail = open_jail(ws, policy=policy(mask=("**/.env", "*.pem", "loop")))
    shown = output(jail, "echo ok; cat link/.env; cat real/.env")
    assert "ok" in shown
    assert "TOP" not in shown
    assert "TOP" not in text_of(reads(jail, ws / "link/.env"))


@pytest.mark.parametrize("place", ["worktree", "repository", "submodule"])
@pytest.mark.parametrize("level", ["read-only", "config"])
def test_bc_11_worktree_repository_submodule(tmp_path, open_jail, policy, place, level):
    """Assert that git reads in every kind of checkout, and commits in it at the level config (BC-11, BC-93)."""
    for name in ("ws", "inner"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "commit", "-q", "--allow-empty", "-m", "x")
    git(tmp_path / "ws", "submodule", "--quiet", "add", str(tmp_path / "inner"), "sub")
    git(tmp_path / "ws", "commit", "-qm", "sub")
    git(tmp_path / "ws", "worktree", "add", "-q", str(tmp_path / "wt"))
    where = {"worktree": tmp_path / "wt", "repository": tmp_path / "ws", "submodule": tmp_path / "ws/sub"}[
        place
    ]
    pointer = (where / ".git").read_text() if (where / ".git").is_file() else ""
    jail = open_jail(where, policy=policy(protect_git=level))
    done = jail.exec("ls && git status --short && git log -1 --oneline")
    assert done.exit_code == 0, done.stderr
    assert (jail.exec(COMMIT).exit_code == 0) is (level == "config")
    jail.exec(
        f"git init -q --bare evil; printf 'gitdir: %s/evil' {where} > .git; mv .git .g2; rm -f .git; ln -s evil .git"
    )
    jail.exec("git config core.fsmonitor /tmp/x; git config --worktree core.pager /tmp/x")
    assert (where / ".git").exists()
    assert not (where / ".git").is_symlink()
    assert not pointer or (where / ".git").read_text() == pointer
    shown = subprocess.run(
        ["git", "-C", where, "config", "--list"], capture_output=True, text=True, check=True, timeout=20
    )
    assert "/tmp/x" not in shown.stdout


def test_bc_43_rename_and_link_inside_one_root(ws, open_jail, policy):
    """Assert that files move and link between directories of a grant (BC-43)."""
    (ws / "a").mkdir()
    (ws / "b").mkdir()
    (ws / "a/f").write_text("x")
    jail = open_jail(ws, policy=policy(mask=(".env",)))
    done = jail.exec("mv a/f b/f && ln b/f a/g && mkdir c && mv b/f c/ && mv c d")
    assert done.exit_code == 0, done.stderr
    assert (ws / "d/f").exists()


def test_bc_123_what_disappears_on_the_host_stops_nothing(ws, open_jail, policy):
    """Assert that a masked or protected path that is deleted or changes its kind breaks no later command (BC-123)."""
    (ws / ".vectora").mkdir()
    (ws / ".vectora/launch.json").write_text("{}")
    (ws / ".cred").write_text("TOP")
    (ws / "locked").write_text("1")
    jail = open_jail(ws, policy=policy(mask=(".vectora/launch.json", ".cred"), protect=("locked",)))
    assert jail.exec("echo ok").stdout == b"ok\n"
    (ws / ".vectora/launch.json").unlink()
    (ws / ".cred").unlink()
    (ws / ".cred").mkdir()
    (ws / ".cred/inner").write_text("TOP")
    (ws / "locked").unlink()
    os.symlink("/etc/hostname", ws / "locked")
    assert jail.exec("echo ok").stdout == b"ok\n"
    assert "TOP" not in output(jail, "cat .cred/inner")
    again = open_jail(ws, policy=policy(mask=(".vectora/launch.json", ".cred"), protect=("locked",)))
    assert again.exec("echo ok").stdout == b"ok\n"


@pytest.mark.parametrize("how", ["rename over", "delete and create", "git checkout"])
def test_bc_121_in_the_middle_of_a_running_call(git_ws, open_jail, policy, how):
    """Assert that a secret replaced while a command sleeps is hidden from it when it wakes up (BC-121)."""
    jail = open_jail(git_ws, policy=policy(mask=(".env",), protect_git="config"))
    seen = []
    call = threading.Thread(
        target=lambda: seen.append(output(jail, "sleep 1; cat .env; echo evil >> .git/config; echo end"))
    )
    call.start()
    time.sleep(0.4)
    if how == "rename over":
        (git_ws / "new").write_text("NONCE")
        os.rename(git_ws / "new", git_ws / ".env")
    elif how == "delete and create":
        (git_ws / ".env").unlink()
        (git_ws / ".env").write_text("NONCE")
    else:
        git(git_ws, "config", "user.name", "someone")
        git(git_ws, "checkout", "-q", "-b", "other")
    call.join(20)
    assert "NONCE" not in seen[0]
    assert "end" in seen[0]
    assert "evil" not in (git_ws / ".git/config").read_text()
