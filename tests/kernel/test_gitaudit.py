"""Git redirects and exec lines that an agent plants: moved away and told at the end of a call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("vectora_jail._native", reason="the shim is not built")
import msgpack

from vectora_jail._shim import ffi, lib
from vectora_jail._tree import Tree

pytestmark = pytest.mark.kernel
OFF, CONFIG, READ_ONLY = 0, 1, 2
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main"]
EVIL = '[core]\n\tfsmonitor = "touch /tmp/pwn"\n'


def git(where, *arguments, check=True):
    environment = {"PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        [*GIT, "-C", str(where), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


@pytest.fixture
def repository(ws):
    """A repository with two commits, a branch, and a linked worktree inside."""
    git(ws, "init", "-q")
    for name in ("one", "two"):
        (ws / name).write_text(name)
        git(ws, "add", name)
        git(ws, "commit", "-qm", name)
    git(ws, "worktree", "add", "-q", "wt")
    return ws


@pytest.fixture
def tree(tmp_path):
    """Make a scanned tree with an audit store: no jail is needed, the audit works on the host's side."""
    store = tmp_path / "store"
    store.mkdir()
    trees = []

    def make(ws, level=CONFIG):
        made = Tree(
            {
                "roots": [[os.fsencode(ws), True]],
                "workspace": os.fsencode(ws),
                "git": level,
                "audit": os.fsencode(store),
            }
        )
        trees.append(made)
        made.scan()
        made.sync()
        return made

    make.store = store
    yield make
    for made in trees:
        made.close()


def audit(tree, idle=1):
    """What an audit after a sync finds: [(path, kind, text, moved)]."""
    tree.sync()
    buffer, size = ffi.new("uint8_t **"), ffi.new("size_t *")
    found = lib.vj_tree_git_audit(tree._t, idle, buffer, size)
    assert found >= 0
    try:
        rows = msgpack.unpackb(bytes(ffi.buffer(buffer[0], size[0])), raw=False)
    finally:
        lib.vj_free(buffer[0])
    assert all(row[4] == 0 for row in rows)
    return [(os.fsdecode(p), kind, text.decode(), moved) for p, kind, text, moved, _ in rows]


def planted(ws, name, text):
    path = ws / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        (".git/commondir", "/evil\n", "commondir"),
        (".git/config.worktree", EVIL, "config"),
        (".git/objects/info/alternates", "/evil/objects\n", "alternates"),
        (".git/rebase-merge/git-rebase-todo", "pick 123 x\nexec touch /tmp/pwn\n", "todo"),
        (".git/sequencer/todo", "  x touch /tmp/pwn\n", "todo"),
        (".git/worktrees/wt/config.worktree", EVIL, "config"),
    ],
)
def test_a_planted_redirect_is_moved_away(repository, tree, name, text, kind):
    """Assert that what makes the host's git run or read something else is taken out and reported, once."""
    watch = tree(repository)
    assert audit(watch) == []
    path = planted(repository, name, text)
    ((found, what, shown, moved),) = audit(watch)
    assert (found, what) == (str(path), kind)
    assert shown.split()[-1] in text
    assert not path.exists()
    assert Path(os.fsdecode(moved)).read_text() == text
    assert audit(watch) == []
    assert git(repository, "status", "--short") is not None


def test_an_exec_line_added_in_place_is_found(repository, tree):
    """Assert that a todo list that was harmless at the last audit is read again at the next."""
    path = planted(repository, ".git/rebase-merge/git-rebase-todo", "pick 123 x\n")
    watch = tree(repository)
    assert audit(watch) == []
    with open(path, "a") as todo:
        todo.write("exec id\n")
    assert [row[1] for row in audit(watch)] == ["todo"]


@pytest.mark.parametrize("level", [CONFIG, READ_ONLY])
def test_bc_13_a_planted_repository_is_disabled(ws, tree, level):
    """Assert that hooks and exec keys of a new repository are moved away, and it works on (BC-13)."""
    watch = tree(ws, level)
    git(ws, "init", "-q")
    assert audit(watch, idle=0) == []
    watch.sync()
    assert watch.report()["protected"] == []  # whoever makes it may not be ready
    hook = planted(ws, ".git/hooks/post-checkout", "#!/bin/sh\ntouch /tmp/pwn\n")
    hook.chmod(0o755)
    git(ws, "config", "core.fsmonitor", "/tmp/x")
    kinds = {row[1]: row for row in audit(watch)}
    assert set(kinds) == {"hook", "config"}
    assert "core.fsmonitor = /tmp/x" in kinds["config"][2]
    assert not hook.exists()
    assert "fsmonitor" not in git(ws, "config", "--list", "--local", check=False)
    assert git(ws, "status", "--short") == ""
    assert os.fsencode(ws / ".git") in watch.report()["gits"]
    watch.sync()
    assert watch.report()["protected"]


def test_a_new_module_and_worktree_are_looked_at(repository, tree):
    """Assert that a new module with exec keys and a worktree of another common directory are found."""
    watch = tree(repository)
    evil = repository / "evil"
    git(repository, "init", "-q", "--bare", str(evil))
    shutil.copytree(evil, repository / ".git/modules/deep/x")
    planted(repository, ".git/modules/deep/x/config", EVIL)
    shutil.copytree(repository / ".git/worktrees/wt", repository / ".git/worktrees/y")
    planted(repository, ".git/worktrees/y/commondir", str(evil) + "\n")
    found = {(os.path.relpath(path, repository), kind) for path, kind, _, _ in audit(watch)}
    assert found == {(".git/modules/deep/x/config", "config"), (".git/worktrees/y/commondir", "commondir")}


def test_bc_93_a_new_pointer_file_is_followed(repository, tree):
    """Assert that a `.git` file that appears leads the audit to the git directory that it names (BC-93)."""
    watch = tree(repository)
    git(repository, "init", "-q", "--bare", str(repository / "evil"))
    planted(repository, "evil/config", EVIL)
    planted(repository, "sub/.git", f"gitdir: {repository}/evil\n")
    assert [(os.path.relpath(row[0], repository), row[1]) for row in audit(watch)] == [
        ("evil/config", "config")
    ]


def test_ordinary_git_work_is_left_alone(repository, tree):
    """Assert that worktrees, a rebase that waits, a stash and sparse checkout trip nothing."""
    watch = tree(repository)
    git(repository, "worktree", "add", "-q", "wt2")
    git(repository, "checkout", "-q", "-b", "topic", "HEAD~1")
    (repository / "two").write_text("conflict")
    git(repository, "add", "two")
    git(repository, "commit", "-qm", "conflict")
    git(repository, "rebase", "main", check=False)
    assert (repository / ".git/rebase-merge").exists() or (repository / ".git/rebase-apply").exists()
    assert audit(watch) == []
    git(repository, "rebase", "--abort")
    git(repository, "sparse-checkout", "set", "src", check=False)
    assert audit(watch) == []


def test_the_hosts_configuration_is_not_touched(repository, tree):
    """Assert that hooks and settings of a repository that was there before stay the host's business."""
    planted(repository, ".git/hooks/pre-commit", "#!/bin/sh\n").chmod(0o755)
    git(repository, "config", "core.editor", "vi")
    watch = tree(repository)
    git(repository, "config", "core.pager", "less")
    planted(repository, ".git/hooks/pre-push", "#!/bin/sh\n")
    assert audit(watch) == []
    assert (repository / ".git/hooks/pre-push").exists()


def test_a_symlink_does_not_lead_the_audit_out(repository, tree, tmp_path):
    """Assert that a symlink in place of a directory of git moves nothing that lies elsewhere."""
    outside = tmp_path / "outside"
    planted(outside, "git-rebase-todo", "exec make\n")
    watch = tree(repository)
    os.symlink(outside, repository / ".git/rebase-merge")
    buffer, size = ffi.new("uint8_t **"), ffi.new("size_t *")
    watch.sync()
    assert lib.vj_tree_git_audit(watch._t, 1, buffer, size) >= 0
    lib.vj_free(buffer[0])
    assert (outside / "git-rebase-todo").exists()


def test_an_audit_store_inside_the_grant_is_refused(ws):
    """Assert that a store that the agent could reach is no store."""
    with pytest.raises(OSError, match="Invalid argument"):
        Tree(
            {
                "roots": [[os.fsencode(ws), True]],
                "workspace": os.fsencode(ws),
                "git": 1,
                "audit": os.fsencode(ws / "a"),
            }
        )
