"""Git in a jail: three levels, ordinary work, planted redirects, and what the host does to the tree meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vectora_jail import PolicyError, safe_git_env

pytestmark = pytest.mark.kernel
NAMES = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main"]
ALLOW_FILE = ["-c", "protocol.file.allow=always"]
INNER = {f"GIT_{who}_{what}": "t@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    """The audit store of these tests lies in their own directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def git(where, *arguments, check=True, env=None):
    """Run git on the host, as a person would."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *NAMES, *ALLOW_FILE, "-C", str(where), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env=env or environment,
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


@pytest.fixture
def repository(ws):
    """A repository with three commits on main and one on `other`."""
    git(ws, "init", "-q")
    for name in ("one", "two", "three"):
        (ws / name).write_text(name)
        git(ws, "add", name)
        git(ws, "commit", "-qm", name)
    git(ws, "branch", "other", "HEAD~1")
    return ws


@pytest.fixture
def worktree(ws, tmp_path):
    """A linked worktree as the workspace; its repository lies beside it."""
    main = tmp_path / "main"
    main.mkdir()
    git(main, "init", "-q")
    (main / "one").write_text("one")
    git(main, "add", "one")
    git(main, "commit", "-qm", "x")
    git(main, "commit", "-qm", "y", "--allow-empty")
    ws.rmdir()
    git(main, "worktree", "add", "-q", str(ws))
    return ws


@pytest.fixture
def submodule(repository, tmp_path):
    """A repository with a submodule `sub`."""
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    for name in ("x", "y"):
        (inner / name).write_text(name)
        git(inner, "add", name)
        git(inner, "commit", "-qm", name)
    git(repository, "submodule", "add", "-q", str(inner), "sub")
    git(repository, "commit", "-qm", "sub")
    return repository


def kinds(result):
    return {violation.rule for violation in result.violations}


# ---- ordinary work ----


WORK = """set -e
git status --short
echo 1 >a; git add a; git commit -qm a
git branch b; git checkout -q b; echo 2 >b; git add b; git commit -qm b
git checkout -q -; git checkout -q -b c; echo 3 >c; git add c; git commit -qm c
git rebase -q b
echo 4 >>a; git stash -q; git stash pop -q; git commit -qam d
git gc -q 2>/dev/null
git worktree list >/dev/null
git log --oneline | wc -l
"""


def test_config_level_lets_git_work(repository, open_jail):
    """Assert that add, commit, branch, rebase, stash, gc and worktree list work, and trip nothing."""
    jail = open_jail(repository, protect_git="config")
    result = jail.exec(WORK, env=INNER, timeout=50)
    assert result.exit_code == 0, result.text
    assert int(result.stdout) == 3 + 4
    assert result.violations == ()
    assert git(repository, "log", "-1", "--format=%s").strip() == "d"
    assert git(repository, "fsck", "--no-progress", check=False) is not None


def test_config_level_in_a_worktree(worktree, open_jail):
    """Assert that the same works in a linked worktree, whose repository lies outside the workspace."""
    jail = open_jail(worktree, protect_git="config")
    result = jail.exec(WORK, env=INNER, timeout=50)
    assert result.exit_code == 0, result.text
    assert result.violations == ()
    assert git(worktree, "log", "-1", "--format=%s").strip() == "d"


def test_config_level_in_a_submodule(submodule, open_jail):
    """Assert that the same works in a submodule and the repository around it can record it."""
    jail = open_jail(submodule, protect_git="config")
    result = jail.exec(WORK, cwd="sub", env=INNER, timeout=50)
    assert result.exit_code == 0, result.text
    result = jail.exec("git add sub && git commit -qm moved && git submodule status", env=INNER)
    assert result.exit_code == 0, result.text
    assert result.violations == ()


def test_levels(repository, open_jail):
    """Assert what each level allows: reading always, commits in config, everything in off."""
    write = "git -c user.name=t -c user.email=t commit -q --allow-empty -m x"
    config = "git config core.fsmonitor /tmp/x"
    for level, commits, configures in (
        ("read-only", False, False),
        ("config", True, False),
        ("off", True, True),
    ):
        jail = open_jail(repository, protect_git=level)
        assert jail.exec("git status --short && git log --oneline -1").exit_code == 0, level
        assert (jail.exec(write).exit_code == 0) is commits, level
        assert (jail.exec(config).exit_code == 0) is configures, level
        assert (jail.exec("mv .git .g2").exit_code == 0) is False or level == "off"
        jail.close()


def test_bc_11_a_worktree_can_be_read(worktree, open_jail):
    """Assert that a linked worktree, whose `.git` is a file, works read-only (BC-11)."""
    result = open_jail(worktree).exec("ls && git status --short && git log -1 --oneline")
    assert result.exit_code == 0, result.text
    assert open_jail(worktree).exec("echo x > .git; mv .git .g; rm -f .git; test -f .git").exit_code == 0
    assert (worktree / ".git").read_text().startswith("gitdir: ")


# ---- what an agent plants ----

RUNS = "touch {mark}"


def plant_commondir(ws, mark):
    evil = ws / "evil"
    return (
        f"cp -r .git {evil}; git --git-dir={evil} config core.fsmonitor '{RUNS.format(mark=mark)}';"
        f" echo {evil} > .git/commondir",
        ["status"],
    )


def plant_worktree_config(ws, mark):
    return f"printf '[core]\\n\\tfsmonitor = {RUNS.format(mark=mark)}\\n' > .git/config.worktree", ["status"]


def plant_todo(ws, mark):
    del ws
    return (
        "git rebase -q HEAD~1 -x false 2>/dev/null; "
        f"printf 'exec {RUNS.format(mark=mark)}\\n' > .git/rebase-merge/git-rebase-todo; true",
        ["rebase", "--continue"],
    )


def plant_alternates(ws, mark):
    del mark
    return f"mkdir -p {ws}/o; echo {ws}/o > .git/objects/info/alternates", None


def plant_module(ws, mark):
    del ws
    return (
        "rm -rf /tmp/m; cp -r .git /tmp/m; "
        f"git --git-dir=/tmp/m config core.fsmonitor '{RUNS.format(mark=mark)}'; "
        "rm -rf .git/modules; mkdir -p .git/modules; mv /tmp/m .git/modules/m",
        ["--git-dir=.git/modules/m", "--work-tree=.", "status"],
    )


@pytest.mark.parametrize(
    "plant", [plant_commondir, plant_worktree_config, plant_todo, plant_alternates, plant_module]
)
def test_a_planted_redirect_does_not_reach_the_host(repository, open_jail, tmp_path, plant):
    """Assert that what makes the host's git run a program works without the jail, and is gone after a call in it."""
    mark = tmp_path / "pwned"
    command, trigger = plant(repository, mark)
    git(repository, "config", "extensions.worktreeConfig", "true")
    jail = open_jail(repository, protect_git="config")
    result = jail.exec(command, env=INNER, timeout=30)
    assert result.exit_code == 0, result.text
    planted = {v.rule for v in result.violations}
    if (
        plant is plant_alternates and not planted
    ):  # the directory is locked as a whole, so nothing was written
        assert not (repository / ".git/objects/info/alternates").exists()
        return
    assert planted == {"git_redirect"}, result.violations
    assert [hazard.kind for hazard in jail.report.hazards].count("git_redirect") == len(result.violations)
    stored = list((tmp_path / "state").rglob("*-*-*"))
    assert stored
    assert all(os.stat(path.parent).st_mode & 0o077 == 0 for path in stored)
    if trigger:
        git(repository, *trigger, check=False)
        assert not mark.exists()
    jail.close()
    if trigger:  # and outside a jail the same does reach it
        subprocess.run(
            ["sh", "-c", command],
            check=False,
            cwd=repository,
            capture_output=True,
            timeout=30,
            env={**os.environ, **INNER},
        )
        git(repository, *trigger, check=False)
        assert mark.exists()


@pytest.mark.parametrize("level", ["read-only", "config"])
def test_bc_13_a_planted_repository_is_disabled(ws, open_jail, tmp_path, level):
    """Assert that hooks and exec keys of a repository that the agent makes never reach the host's git (BC-13)."""
    mark = tmp_path / "pwned"
    script = (
        f"git init -q . && printf '#!/bin/sh\\ntouch {mark}' > .git/hooks/post-checkout && "
        f"chmod +x .git/hooks/post-checkout && git config core.fsmonitor 'touch {mark}'"
    )
    jail = open_jail(ws, protect_git=level)
    result = jail.exec(script)
    assert result.exit_code == 0, result.text
    assert {v.what for v in result.violations} >= {f"{ws}/.git/hooks/post-checkout", f"{ws}/.git/config"}
    assert not (ws / ".git/hooks/post-checkout").exists()
    git(ws, "status")
    git(ws, "checkout", "-q", "-b", "x", check=False)
    assert not mark.exists()
    jail.exec("true")
    later = jail.exec(
        f"printf '#!/bin/sh\\ntouch {mark}' > .git/hooks/pre-commit; git config core.fsmonitor x"
    )
    assert "core.fsmonitor=x" not in git(ws, "config", "--list", "--local", check=False), later
    assert not (ws / ".git/hooks/pre-commit").exists()
    jail.close()
    subprocess.run(["sh", "-c", script], check=True, cwd=ws, capture_output=True, timeout=30)
    git(ws, "status", check=False)
    assert mark.exists()


def test_bc_93_the_pointer_file_stays(worktree, open_jail):
    """Assert that the `.git` file of a worktree can be neither rewritten nor replaced (BC-93)."""
    before = (worktree / ".git").read_text()
    for level in ("read-only", "config"):
        jail = open_jail(worktree, protect_git=level)
        jail.exec(
            "mkdir -p evil; git init -q --bare evil; printf 'gitdir: %s/evil' $PWD > .git; mv .git .g2; rm -f .git;"
            " ln -s evil .git; G=$(git rev-parse --git-dir); echo $PWD/evil > $G/commondir"
        )
        assert (worktree / ".git").read_text() == before
        assert not (worktree / ".git").is_symlink()
        assert not git(worktree, "rev-parse", "--git-common-dir").strip().endswith("evil")
        jail.close()


def test_bc_45_no_rename_into_a_protected_name(repository, open_jail):
    """Assert that rename and link into hooks, config and a masked name are refused (BC-45)."""
    (repository / ".env").write_text("SECRET")
    config = (repository / ".git/config").read_text()
    for level in ("read-only", "config"):
        jail = open_jail(repository, protect_git=level)
        jail.exec(
            "echo evil > x && mv x .git/hooks/pre-commit; echo u > y && ln -f y .env; ln y .env; mv y .env;"
            " echo z > q && mv q .git/config"
        )
        assert not (repository / ".git/hooks/pre-commit").exists()
        assert (repository / ".env").read_text() == "SECRET"
        assert (repository / ".git/config").read_text() == config
        jail.close()


def test_a_redirect_left_by_stream_spawn_and_shell(repository, open_jail):
    """Assert that every way to run a command ends with the same look at git."""
    jail = open_jail(repository, protect_git="config")
    plant = "echo /evil > .git/commondir"
    stream = jail.stream(plant)
    assert list(stream) == []
    assert kinds(stream.result) == {"git_redirect"}
    assert kinds(jail.spawn(["sh", "-c", plant]).wait(10)) == {"git_redirect"}
    with jail.shell() as shell:
        assert kinds(shell.run(plant)) == {"git_redirect"}
    terminal = jail.open_terminal(["sh", "-c", plant])
    assert kinds(terminal.wait(10)) == {"git_redirect"}
    assert not (repository / ".git/commondir").exists()


def test_a_redirect_of_a_worker_that_died(repository, open_jail):
    """Assert that a command that takes its worker along leaves nothing to the host's git."""
    jail = open_jail(repository, protect_git="config")
    process = jail.spawn(["sh", "-c", "echo /evil > .git/commondir; echo done; sleep 60"])
    assert process.read(timeout=10) == b"done\n"
    jail._life.stop()
    assert not (repository / ".git/commondir").exists()
    assert "git_redirect" in [hazard.kind for hazard in jail.report.hazards]


# ---- masks ----


def test_a_masked_name_made_by_the_agent(ws, open_jail):
    """Assert that what a command writes under a masked name is hidden at the end of that call, and told."""
    (ws / ".env.example").write_text("TOKEN=example\n")
    jail = open_jail(ws)
    result = jail.exec("cp .env.example .env; mkdir -p d; cp .env.example d/.env; cat .env")
    assert result.stdout in (b"TOKEN=example\n", b"")  # the watch may have been faster than `cat`
    assert {(v.rule, v.what) for v in result.violations} == {
        ("masked_new", f"{ws}/.env"),
        ("masked_new", f"{ws}/d/.env"),
    }
    after = jail.exec("cat .env d/.env; echo x >> .env")
    assert after.stdout == b""
    assert after.violations == ()
    assert (ws / ".env").read_text() == "TOKEN=example\n"


def test_a_mask_made_by_the_host_is_not_the_agents(ws, open_jail):
    """Assert that a secret that the host writes between two calls is hidden and nobody is blamed."""
    jail = open_jail(ws)
    jail.exec("true")
    (ws / ".env").write_text("S")
    result = jail.exec("cat .env")
    assert (result.stdout, result.violations) == (b"", ())


def test_covers_by_history_survive_a_restart(ws, open_jail):
    """Assert that a secret that the host has renamed away stays hidden in the next worker too."""
    (ws / ".env").write_text("S1")
    jail = open_jail(ws)
    jail.exec("true")
    os.rename(ws / ".env", ws / "plain-name")
    assert jail.exec("cat plain-name").stdout == b""
    jail._life.stop()
    assert jail.exec("cat plain-name").stdout == b""
    assert jail.report.masked_by_history == (f"{ws}/plain-name",)


HOST_EDITS = [
    "echo S2 > e2; mv e2 .env",
    "rm .env; echo S3 > .env",
    "mv sec old; mkdir sec; echo K > sec/k",
    "git config user.name x",
    "rm -rf .git/hooks; mkdir .git/hooks",
    "git -c user.name=t -c user.email=t stash -q -u; git checkout -q other",
]


@pytest.mark.parametrize("level", ["read-only", "config"])
@pytest.mark.parametrize("edit", HOST_EDITS, ids=range(len(HOST_EDITS)))
def test_bc_121_the_host_edits_between_and_during_calls(repository, open_jail, level, edit):
    """Assert that secrets stay hidden and git protected after host edits, also in a running call (BC-121)."""
    (repository / ".gitignore").write_text(".env\nsec\nold\n")
    git(repository, "add", ".gitignore")
    git(repository, "commit", "-qm", "ignore")
    (repository / "change").write_text("for the stash")
    (repository / ".env").write_text("S1")
    (repository / "sec").mkdir()
    (repository / "sec/k").write_text("K")
    jail = open_jail(repository, protect_git=level, mask=(".env", "sec"))
    attack = "cat .env sec/k old/k; echo evil >> .git/config; echo evil > .git/hooks/pre-commit; true"
    run = jail.spawn(["sh", "-c", f"echo up; read go; while read go; do {attack}; echo .; done"])
    assert run.read(timeout=10) == b"up\n"
    terminal = jail.open_terminal(
        ["sh", "-c", "stty -echo; echo up; read go; cat .env sec/k old/k; echo end"]
    )
    assert b"up" in terminal.read(timeout=10)
    environment = {"PATH": os.environ["PATH"], "HOME": str(repository), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(
        ["sh", "-c", edit], check=True, cwd=repository, timeout=30, env=environment, capture_output=True
    )
    assert jail.exec(attack).stdout == b""
    time.sleep(0.06)  # what the contract gives to calls that run already
    run.write(b"\n\n")
    assert run.read(timeout=10) == b".\n"
    terminal.write(b"\n")
    seen = b""
    while b"end" not in seen:
        seen += terminal.read(timeout=10)
    assert not {b"S1", b"S2", b"S3", b"K"} & set(seen.split())
    assert b"evil" not in (repository / ".git/config").read_bytes()
    hook = repository / ".git/hooks/pre-commit"
    assert not hook.exists()


def test_bc_121_the_middle_of_a_sleeping_call(repository, open_jail):
    """Assert that a secret replaced while a command sleeps is hidden when the command reads it (BC-121)."""
    (repository / ".env").write_text("S1")
    jail = open_jail(repository)
    jail.exec("true")
    results = []
    call = threading.Thread(
        target=lambda: results.append(jail.exec("sleep 1; cat .env; echo x >> .git/config"))
    )
    call.start()
    time.sleep(0.3)
    (repository / "e2").write_text("S2")
    os.rename(repository / "e2", repository / ".env")
    git(repository, "config", "user.name", "x")
    call.join(20)
    assert results[0].stdout == b""
    assert "x = " not in (repository / ".git/config").read_text().replace("name = x", "")


def test_bc_123_masked_paths_that_go_away(ws, open_jail):
    """Assert that deleted or changed masked paths never stop the next worker (BC-123)."""
    (ws / ".vectora").mkdir()
    (ws / ".vectora/launch.json").write_text("{}")
    (ws / "cred").write_text("S")
    (ws / "dir").mkdir()
    jail = open_jail(ws, mask=(".vectora/launch.json", "cred", "dir"))
    assert jail.exec("echo ok").stdout == b"ok\n"
    (ws / ".vectora/launch.json").unlink()
    (ws / "cred").unlink()
    (ws / "cred").mkdir()
    (ws / "dir").rmdir()
    os.symlink("/nowhere", ws / "dir")
    jail._life.stop()
    assert jail.exec("echo ok; cat cred/* dir 2>/dev/null; true").stdout == b"ok\n"


def test_bc_125_hard_links_work(ws, open_jail):
    """Assert that links inside the workspace and a clone of it work, and files with two names are edited (BC-125)."""
    (ws / "a.txt").write_text("one\n")
    for lockdown in (False, True):
        jail = open_jail(ws, lockdown=lockdown)
        result = jail.exec("rm -f b.txt c.txt; ln a.txt b.txt && cp -l a.txt c.txt; echo rc=$?")
        assert result.stdout == b"rc=0\n", result.stderr
        assert jail.read_file("b.txt") == b"one\n"
        jail.edit_file("b.txt", old="one", new="two")
        assert jail.read_file("b.txt") == b"two\n"
        jail.write_file("a.txt", b"one\n")
        jail.close()


def test_bc_125_clone(repository, open_jail):
    """Assert that a plain clone out of the protected repository works (BC-125)."""
    result = open_jail(repository).exec(
        "git clone -q . /tmp/cl && git -C /tmp/cl log --oneline -1; echo rc=$?"
    )
    assert result.stdout.endswith(b"rc=0\n"), result.stderr


# ---- git on the host, git inside ----


def test_jail_git(repository, open_jail):
    """Assert that `jail.git` runs inside."""
    jail = open_jail(repository)
    assert jail.git(["rev-parse", "--show-toplevel"]).stdout_text.strip() == str(repository)
    assert jail.git(["log", "-1", "--format=%s"]).stdout == b"three\n"


def test_safe_git_env_runs_nothing(repository, tmp_path):
    """Assert that settings and hooks that run programs do so for a plain git, and not in the safe environment."""
    mark = tmp_path / "pwned"
    for key in (
        "core.fsmonitor",
        "filter.x.clean",
        "diff.x.textconv",
        "core.pager",
        "core.editor",
        "gpg.program",
    ):
        git(repository, "config", key, f"touch {mark}; cat")
    git(repository, "config", "commit.gpgsign", "true")
    (repository / ".gitattributes").write_text("* filter=x diff=x\n")
    for name in ("pre-commit", "post-checkout", "post-commit"):
        hook = repository / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
        hook.chmod(0o755)
    people = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **INNER}
    env = safe_git_env(repository, base=people)
    (repository / "one").write_text("changed")
    for arguments in (
        ["status", "--short"],
        ["diff"],
        ["log", "-p", "-1"],
        ["add", "-A"],
        ["commit", "-qm", "safe"],
        ["checkout", "-q", "other"],
        ["checkout", "-q", "main"],
    ):
        git(repository, *arguments, env=env)
        assert not mark.exists(), arguments
    git(repository, "status")
    assert mark.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".git/commondir", "/evil\n"),
        (".git/objects/info/alternates", "/evil\n"),
        (".git/rebase-merge/git-rebase-todo", "pick 1\nexec id\n"),
        (".git/sequencer/todo", "x id\n"),
        (".git/config.worktree", "[include]\n\tpath = /evil\n"),
        (".git/modules/a/config", "[core]\n\tfsmonitor = id\n"),
    ],
)
def test_safe_git_env_refuses(repository, name, text):
    """Assert that a repository that leads elsewhere is refused with the file's name."""
    path = repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if "modules" in name:
        (path.parent / "HEAD").write_text("ref: refs/heads/main\n")
    path.write_text(text)
    with pytest.raises(PolicyError, match=Path(name).name) as caught:
        safe_git_env(repository)
    assert caught.value.code == "git_unsafe"


def test_safe_git_env_in_a_worktree(worktree, tmp_path):
    """Assert that a worktree is understood, and a pointer that is not answered is refused."""
    assert git(worktree, "log", "-1", "--format=%s", env=safe_git_env(worktree)) == "y\n"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ".git").write_text((worktree / ".git").read_text())
    with pytest.raises(PolicyError, match="does not name it back"):
        safe_git_env(foreign)


def test_safe_git_env_in_a_submodule(submodule):
    """Assert that a submodule is understood."""
    assert git(submodule / "sub", "log", "-1", "--format=%s", env=safe_git_env(submodule / "sub")) == "y\n"


def test_an_unchanged_tree_costs_nothing(repository, open_jail):
    """Assert that the look at the end of a call is far below the cost of one when nothing happened."""
    jail = open_jail(repository, protect_git="config")
    jail.exec("true")
    running = jail._life.worker.running
    best = min(_timed(lambda: running.audit(idle=True)) for _ in range(200))
    sys.stdout.write(f"audit of an unchanged tree: {best * 1e6:.1f} µs\n")
    assert best < 100e-6


def _timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
