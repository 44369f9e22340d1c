"""Masks and protections in a running jail, while the host edits the same tree."""

from __future__ import annotations

import os
import random
import subprocess
import time

import pytest

pytest.importorskip("vectora_jail._native", reason="the shim is not built")
from vectora_jail._shim import ffi, lib
from vectora_jail._tree import Tree
from vectora_jail.masks import split_patterns

pytestmark = pytest.mark.kernel
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main"]
OFF, CONFIG, READ_ONLY = 0, 1, 2


def spec(ws, *masks, git=READ_ONLY, floor=(), **more):
    """The description of a tree with one writable grant."""
    rules = split_patterns(floor, masks, workspace=os.fsencode(ws))
    return {
        "roots": [[os.fsencode(ws), True]],
        "workspace": os.fsencode(ws),
        "masks": [[r.pattern, r.negate, r.floor] for r in rules],
        "mask_paths": [],
        "protect": [],
        "git": git,
        **more,
    }


class Watched:
    """A jail with a watched tree; `sees` is what a command in it could read."""

    def __init__(self, agent, ws, tree):
        self.agent, self.ws, self.tree = agent, ws, tree

    def sync(self):
        return self.tree.sync()

    def settle(self):
        """The end of a call: sync, audit, and the lock of what is complete now."""
        self.tree.sync()
        buffer, size = ffi.new("uint8_t **"), ffi.new("size_t *")
        assert lib.vj_tree_git_audit(self.tree._t, 1, buffer, size) == 0
        lib.vj_free(buffer[0])
        self.tree.sync()

    def report(self):
        return self.tree.report()

    def masks(self):
        return {os.fsdecode(os.path.relpath(p, os.fsencode(self.ws))) for p in self.report()["masks"]}

    def sees(self, name):
        """The content of a file inside, "" for an empty or absent one."""
        code = (
            f"out = open({str(self.ws / name)!r}).read() if os.path.isfile({str(self.ws / name)!r}) else ''"
        )
        return self.agent.run(code)

    def sees_anywhere(self):
        """Everything that can be read below the workspace, as one text."""
        code = f"""
out = ''
for top, _, files in os.walk({str(self.ws)!r}):
    for name in files:
        try:
            out += open(os.path.join(top, name), errors='replace').read(200)
        except OSError:
            pass
out = out[:50000]
"""
        return self.agent.run(code)

    def writes(self, name, text="evil"):
        """True when a command inside could write there, else the errno."""
        got = self.agent.run(
            f"f = open({str(self.ws / name)!r}, 'w'); f.write({text!r}); f.close(); out = True"
        )
        return got if got is True else got["errno"]

    def runs(self, *command, cwd="."):
        """Exit status and output of a command inside."""
        code = f"""
import subprocess
r = subprocess.run({list(command)!r}, cwd={str(self.ws / cwd)!r}, stdin=subprocess.DEVNULL,
    capture_output=True, text=True, timeout=20,
    env=dict(PATH='/usr/bin:/bin', HOME='/scratch', GIT_AUTHOR_NAME='t', GIT_COMMITTER_NAME='t',
    GIT_AUTHOR_EMAIL='t@t', GIT_COMMITTER_EMAIL='t@t', GIT_EDITOR='true', GIT_SEQUENCE_EDITOR='true'))
out = (r.returncode, (r.stdout + r.stderr)[-2000:])
"""
        return self.agent.run(code)


@pytest.fixture
def watched(jail):
    """Start a jail with the tree's covers in place: `watched(ws, ".env", git=…)`."""
    trees = []

    def make(ws, *masks, attach=True, **more):
        agent = jail(ws)
        tree = Tree(spec(ws, *masks, **more))
        trees.append(tree)
        tree.scan()
        results = agent.enter(["private"], *[list(op) for op in tree.ops()])
        assert set(results) <= {0}
        if attach:
            tree.attach(agent.started.mntns_fd, agent.started.userns_fd)
            tree.sync()
        return Watched(agent, ws, tree)

    yield make
    for tree in trees:
        tree.close()


def host_git(ws, *arguments):
    subprocess.run([*GIT, "-C", str(ws), *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def repository(ws):
    """A repository with a tracked file, a masked file and a masked directory."""
    (ws / "sec").mkdir(exist_ok=True)
    (ws / "sec" / "k").write_text("K0")
    (ws / ".env").write_text("S0")
    (ws / "a.txt").write_text("tracked\n")
    (ws / ".gitignore").write_text(".env*\nsec\nold\n")
    host_git(ws, "init", "-q")
    host_git(ws, "add", "a.txt", ".gitignore")
    host_git(ws, "commit", "-qm", "one")
    host_git(ws, "branch", "other")
    return ws


def test_bc_121_replaced_files_stay_hidden(watched, repository):
    """Assert that no replacement of a masked or protected object on the host shows or opens it (BC-121)."""
    ws = repository
    jail = watched(ws, ".env", "sec", git=CONFIG)

    def check(label):
        jail.sync()
        seen = jail.sees_anywhere()
        assert not any(secret in seen for secret in ("S0", "S2", "S3", "K0", "K4")), label
        assert jail.writes(".git/config") != True, label  # noqa: E712 - True or an errno
        assert jail.writes(".git/hooks/pre-commit") != True, label  # noqa: E712

    check("start")
    (ws / "e2").write_text("S2")
    jail.sync()
    os.rename(ws / "e2", ws / ".env")
    check("rename over")
    os.unlink(ws / ".env")
    (ws / ".env").write_text("S3")
    check("delete and create")
    os.rename(ws / "sec", ws / "old")
    (ws / "sec").mkdir()
    (ws / "sec" / "k").write_text("K4")
    check("directory swapped")
    assert b"/old" in b"".join(jail.report()["history"])
    host_git(ws, "config", "user.name", "x")
    check("git config")
    subprocess.run(["rm", "-rf", ws / ".git/hooks"], check=True)
    (ws / ".git/hooks").mkdir()
    check("hooks made again")
    host_git(ws, "checkout", "-q", "other")
    check("checkout")
    assert "evil" not in (ws / ".git/config").read_text()
    assert not (ws / ".git/hooks/pre-commit").exists()


def test_running_call_is_covered_within_50_ms(watched, ws):
    """Assert that the watcher hides a replaced secret from a running call, and print the worst window."""
    (ws / ".env").write_text("nonce-start")
    jail = watched(ws, ".env")
    worst = 0.0
    for i in range(40):
        (ws / "new").write_text(f"nonce-{i}")
        begin = time.monotonic()
        os.rename(ws / "new", ws / ".env")
        while "nonce" in jail.sees(".env"):
            assert time.monotonic() - begin < 2
        worst = max(worst, time.monotonic() - begin)
    print(f"worst window {worst * 1000:.1f} ms")
    assert worst < 0.2  # 50 ms on an idle machine; this one is shared


def test_what_appears_is_masked_before_the_next_call(watched, ws):
    """Assert that new files, directories, links, leavings and hard links are hidden by the next sync."""
    (ws / "base").write_text("SECRET hard")
    jail = watched(ws, ".env", "*.pem", "**/.ssh/**")
    (ws / "d/e/.ssh").mkdir(parents=True)
    (ws / "d/e/.ssh/id").write_text("SECRET ssh")
    (ws / "d/e/.env").write_text("SECRET env")
    (ws / "d/e/.env~").write_text("SECRET backup")
    (ws / "d/.k.pem.swp").write_text("SECRET swap")
    jail.sync()
    assert "SECRET ssh" not in jail.sees_anywhere()
    os.link(ws / "base", ws / "k.pem")
    jail.sync()
    (ws / "plain").write_text("SECRET target")
    os.symlink("plain", ws / "l.pem")
    jail.sync()
    assert "SECRET" not in jail.sees_anywhere()
    assert {"base", "k.pem", "plain", "d/e/.ssh", "d/e/.env~", "d/.k.pem.swp"} <= jail.masks()
    os.link(ws / "d/e/.env", ws / "later")
    jail.sync()
    assert jail.sees("later") == ""
    os.rename(ws / "d", ws / "moved")
    jail.sync()
    assert "SECRET" not in jail.sees_anywhere()


def test_a_moved_parent_does_not_show(watched, ws):
    """Assert that an anchored mask hides its object also after the agent renamed the directory above."""
    (ws / "conf").mkdir()
    (ws / "conf" / "key").write_text("SECRET")
    jail = watched(ws, "/conf/key")
    assert jail.agent.run(f"os.rename({str(ws / 'conf')!r}, {str(ws / 'gone')!r}); out = 1") == 1
    assert jail.sees("gone/key") == ""
    jail.sync()
    assert jail.sees("gone/key") == ""
    assert jail.report()["history"] == [os.fsencode(ws / "gone/key")]
    (ws / "conf").mkdir()
    (ws / "conf" / "key").write_text("SECRET again")
    jail.sync()
    assert "SECRET" not in jail.sees_anywhere()


def test_an_agents_symlink_does_not_move_the_cover(watched, ws):
    """Assert that a directory swapped for a symlink neither opens the secret nor covers its target."""
    (ws / "d").mkdir()
    (ws / "d" / "env").write_text("SECRET")
    jail = watched(ws, "env")
    jail.agent.run(
        f"os.rename({str(ws / 'd')!r}, {str(ws / 'd2')!r}); os.symlink('/usr/bin', {str(ws / 'd')!r})"
    )
    (ws / "new").write_text("SECRET 2")
    os.rename(ws / "new", ws / "d2" / "env")
    jail.sync()
    assert jail.sees("d2/env") == ""
    assert jail.agent.run("out = os.stat('/usr/bin/env').st_size > 0") is True


@pytest.mark.parametrize("level", [CONFIG, READ_ONLY])
def test_git_stays_where_it_is(watched, repository, level):
    """Assert that `.git` cannot be renamed or replaced from inside and the host's git still works."""
    jail = watched(repository, ".env", git=level)
    for code in (
        "os.rename(W + '/.git', W + '/x')",
        "os.rmdir(W + '/.git')",
        "os.rename(W + '/a.txt', W + '/.git')",
    ):
        assert "errno" in jail.agent.run(f"W = {str(repository)!r}; {code}"), code
    assert jail.runs("git", "status", "--short")[0] == 0
    assert jail.runs("git", "log", "-1", "--oneline")[0] == 0
    host_git(repository, "config", "core.abbrev", "8")
    host_git(repository, "commit", "--allow-empty", "-qm", "host")
    jail.sync()
    assert jail.writes(".git/config") != True  # noqa: E712
    assert jail.runs("git", "log", "-1", "--oneline")[0] == 0


def test_config_level_lets_the_agent_commit(watched, repository):
    """Assert that add, commit, branch, stash, rebase, gc and worktree list work at the config level."""
    jail = watched(repository, ".env", "sec", git=CONFIG)
    (repository / "a.txt").write_text("more\n")
    for command in (
        "git add -A",
        "git commit -qm two",
        "git checkout -q -b topic",
        "git commit -q --allow-empty -m three",
        "git branch -v",
        "git checkout -q other",
        "git commit -q --allow-empty -m four",
        "git rebase -q topic",
        "git gc -q",
        "git worktree list",
        "git fsck",
    ):
        status, text = jail.runs(*command.split())
        assert status == 0, (command, text)
        jail.sync()
    jail.agent.run(f"open({str(repository / 'a.txt')!r}, 'w').write('stash me')")
    assert jail.runs("git", "stash")[0] == 0
    assert jail.runs("git", "stash", "pop")[0] == 0
    for name in (".git/hooks/pre-commit", ".git/config", ".git/info/attributes"):
        assert jail.writes(name) != True, name  # noqa: E712


def test_a_process_that_waits_in_a_masked_directory_sees_nothing(watched, ws):
    """Assert that who entered a directory before it was covered reads nothing that the host puts there later."""
    (ws / "sec").mkdir()
    jail = watched(ws, "sec")
    os.rename(ws / "sec", ws / "old")
    code = f"W = {str(ws)!r}; os.makedirs(W + '/t/deep'); os.chdir(W + '/t'); os.rename(W + '/t', W + '/sec'); out = 1"
    assert jail.agent.run(code) == 1
    jail.sync()
    assert jail.agent.run(f"out = os.listdir({str(ws / 'sec')!r})") == []
    for number in range(3):
        (ws / "sec/key").write_text(f"SECRET {number}")
        (ws / f"sec/deep/key{number}").write_text("SECRET")
        jail.sync()
        assert jail.agent.run("out = open('key').read()") == ""
        assert jail.agent.run(f"out = open('deep/key{number}').read()") == ""
        assert jail.agent.run(f"out = os.listdir({str(ws / 'sec')!r})") == []
        (ws / "sec/key").unlink()
    assert jail.masks() == {"sec", "old"}


def test_a_repository_that_appears_pins_nothing_that_hides_later_covers(watched, ws):
    """Assert that a process that stood in a directory before a repository appeared below it sees later covers."""
    (ws / "a").mkdir()
    jail = watched(ws, ".env", git=CONFIG)
    jail.agent.run(f"os.chdir({str(ws / 'a')!r}); out = 1")
    for number in range(20):  # the watch never locks what a running command is still making
        assert jail.runs("git", "init", "-q", f"nested{number or ''}", cwd="a") == (0, "")
    jail.settle()
    for name in ("a/.env", "a/nested/.env"):
        (ws / name).write_text("SECRET")
    jail.sync()
    assert jail.agent.run("out = open('.env').read() + open('nested/.env').read()") == ""
    assert jail.writes("a/nested/.git/config") != True  # noqa: E712


def test_a_policy_file_that_comes_back_is_planted(watched, ws):
    """Assert that a policy file that appears after the host removed it is told, whoever made it."""
    (ws / "vectora.toml").write_text("# host\n")
    jail = watched(ws)
    (ws / "vectora.toml").unlink()
    jail.sync()
    assert jail.report()["planted"] == []
    jail.agent.run(
        f"W = {str(ws)!r}; open(W + '/x', 'w').close(); os.rename(W + '/x', W + '/vectora.toml'); out = 1"
    )
    jail.sync()
    assert jail.report()["planted"] == [os.fsencode(ws / "vectora.toml")]


def test_policy_file_is_protected_also_when_it_appears(watched, ws):
    """Assert that vectora.toml cannot be written inside, also when replaced; a planted one is told."""
    jail = watched(ws)
    assert jail.report()["planted"] == []
    assert jail.writes("vectora.toml", "[sandbox]\n") is True
    jail.sync()
    assert jail.report()["planted"] == [os.fsencode(ws / "vectora.toml")]
    assert jail.writes("vectora.toml") != True  # noqa: E712
    (ws / "v2").write_text("# host\n")
    os.rename(ws / "v2", ws / "vectora.toml")
    jail.sync()
    assert jail.writes("vectora.toml") != True  # noqa: E712
    assert (ws / "vectora.toml").read_text() == "# host\n"


def test_a_policy_file_that_the_jail_wrote_to_is_told(watched, ws):
    """Assert that a write, or an open writer, between arrival and protection makes the policy file a raced one."""
    (ws / "vectora.toml").write_text("# host 0\n")
    jail = watched(ws)
    for number in (1, 2):
        (ws / "new").write_text(f"# host {number}\n")
        os.rename(ws / "new", ws / "vectora.toml")
        jail.sync()
        assert jail.report()["policy_raced"] is False
    (ws / "new").write_text("# host 3\n")
    jail.agent.run(f"import builtins; builtins.kept = open({str(ws / 'new')!r}, 'a'); out = 1")
    os.rename(ws / "new", ws / "vectora.toml")
    jail.sync()
    assert jail.report()["policy_raced"] is True
    jail.agent.run("import builtins; builtins.kept.close(); out = 1")
    (ws / "new").write_text("# host 4\n")
    os.rename(ws / "new", ws / "vectora.toml")
    jail.sync()
    assert jail.report()["policy_raced"] is False


def test_what_host_tools_run_is_a_hazard(watched, ws):
    """Assert that files that appear and that tools of the host run by themselves are reported, older ones are not."""
    (ws / ".envrc").write_text("old")
    jail = watched(ws)
    jail.agent.run(
        f"os.makedirs({str(ws / '.vscode')!r}); open({str(ws / '.vscode/tasks.json')!r}, 'w'); out = 1"
    )
    jail.agent.run(f"[os.makedirs({str(ws / 'bare')!r} + '/' + n) for n in ('objects', 'refs')]; out = 1")
    jail.agent.run(f"open({str(ws / 'bare/HEAD')!r}, 'w'); out = 1")
    jail.sync()
    hazards = {os.fsdecode(os.path.relpath(p, os.fsencode(ws))): kind for p, kind in jail.report()["hazards"]}
    assert hazards == {".vscode/tasks.json": "host_runs", "bare": "host_runs"}


def test_without_watches_every_sync_walks_again(watched, ws):
    """Assert that a tree that may not watch says so and still hides what appeared before each call."""
    (ws / "a/b").mkdir(parents=True)
    jail = watched(ws, ".env", max_watches=1)
    assert jail.report()["watch"] == "rescan"
    assert "watch" in jail.report()["reason"]
    for i in range(3):
        (ws / "n").write_text(f"SECRET {i}")
        os.rename(ws / "n", ws / "a/b/.env")
        jail.sync()
        assert jail.sees("a/b/.env") == ""


def test_a_new_jail_remembers_what_was_covered(jail, watched, ws):
    """Assert that an object covered under an old name is covered by the next jail of the workspace too."""
    (ws / "sec").mkdir()
    (ws / "sec/k").write_text("SECRET")
    first = watched(ws, "/sec")
    os.rename(ws / "sec", ws / "old")
    first.sync()
    known = first.report()["known"]
    first.agent.close()
    second = watched(ws, "/sec", known=known)
    assert second.sees("old/k") == ""
    assert os.fsencode(ws / "old") in second.report()["history"]


def test_storm(watched, ws):
    """Assert that after each of many random host edits the next call sees no secret at all."""
    generator = random.Random(7)
    (ws / "d").mkdir()
    (ws / "sec").mkdir()
    jail = watched(ws, ".env", "sec", "*.pem")

    def put(path, number):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"NONCE-{number}")

    def rename_over(i):
        target = generator.choice([ws / ".env", ws / "d/.env", ws / "k.pem"])
        put(target.with_name(target.name + ".tmp1"), i)
        os.rename(target.with_name(target.name + ".tmp1"), target)

    def create(i):
        target = generator.choice([ws / ".env", ws / "d/.env", ws / "d/k.pem"])
        target.unlink(missing_ok=True)
        put(target, i)

    def swap(i):
        (ws / "sec").mkdir(exist_ok=True)
        put(ws / "sec/k", i)
        os.rename(ws / "sec", ws / f"old{i}")
        put(ws / "sec/k", i)

    def link(i):
        put(ws / "d/.env", i)
        os.link(ws / "d/.env", ws / f"hard{i}")

    def tree(i):
        os.makedirs(ws / f"t{i}/a/b")
        put(ws / f"t{i}/a/b/.env", i)

    def move(i):
        os.rename(ws / "d", ws / f"d{i}")
        put(ws / "d/.env", i)

    acts = [rename_over, create, swap, link, tree, move]
    times = []
    for i in range(150):
        generator.choice(acts)(i)
        begin = time.monotonic()
        jail.sync()
        times.append(time.monotonic() - begin)
        assert "NONCE" not in jail.sees_anywhere(), i
    times.sort()
    print(f"sync after a change: p50 {times[75] * 1000:.2f} ms, worst {times[-1] * 1000:.2f} ms")


FIGHT = """
import builtins, threading, time
W = {ws!r}
def fight():
    while not builtins.stop:
        for a, b in (("d", "e"), ("e", "f"), ("f", "d")):
            try:
                os.rename(W + "/" + a, W + "/" + b)
                os.symlink("/usr", W + "/" + a)
                os.unlink(W + "/" + a)
            except OSError:
                pass
        time.sleep({pause})
builtins.stop = False
builtins.fighter = threading.Thread(target=fight)
builtins.fighter.start()
out = 1
"""


@pytest.mark.parametrize("pause", [0.001, 0])
def test_an_agent_that_moves_the_directory_all_the_time(watched, ws, pause):
    """Assert that a secret saved into a directory that never stands still is covered, or the call is refused."""
    (ws / "d/sub").mkdir(parents=True)
    inside = os.open(ws / "d/sub", os.O_RDONLY | os.O_DIRECTORY)
    jail = watched(ws, ".env", "*.pem")
    assert jail.agent.run(FIGHT.format(ws=str(ws), pause=pause)) == 1
    held = refused = 0
    try:
        for i in range(40):
            name = (".env", "k.pem", ".env~")[i % 3]
            number = os.open("new", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=inside)
            os.write(number, b"NONCE")
            os.close(number)
            os.rename("new", name, src_dir_fd=inside, dst_dir_fd=inside)
            try:
                jail.sync()
            except BlockingIOError:
                refused += 1
                continue
            assert "NONCE" not in jail.sees_anywhere(), (i, held, refused)
            held += 1
    finally:
        jail.agent.run("import builtins; builtins.stop = True; builtins.fighter.join(); out = 1")
        os.close(inside)
    print(f"pause {pause}: {held} covered, {refused} refused")
    jail.sync()
    assert "NONCE" not in jail.sees_anywhere()
    assert pause == 0 or held > 20


def test_a_forked_child_has_no_part_in_the_watch(watched, ws):
    """Assert that a tree is refused in a forked child, which can close it at once, and works on in the parent."""
    jail = watched(ws, ".env")
    child = os.fork()
    if child == 0:
        try:
            jail.tree.sync()
        except ChildProcessError:
            jail.tree.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    (ws / ".env").write_text("SECRET")
    jail.sync()
    assert jail.sees(".env") == ""


def test_events_that_another_tree_drained_are_served(watched, ws, tmp_path):
    """Assert that a busy workspace's calls do not take away the events of a quiet one with a running command."""
    (tmp_path / "other").mkdir()
    quiet, busy = watched(ws, ".env"), watched(tmp_path / "other", ".env")
    worst = 0.0
    for number in range(20):
        (ws / "new").write_text(f"SECRET {number}")
        begin = time.monotonic()
        os.rename(ws / "new", ws / ".env")
        busy.sync()
        while "SECRET" in quiet.sees(".env"):
            busy.sync()
        worst = max(worst, time.monotonic() - begin)
    assert worst < 0.5


def test_sync_without_change_is_cheap(watched, ws):
    """Assert that a sync with nothing queued costs a few microseconds at most."""
    jail = watched(ws, ".env")
    jail.sync()
    begin = time.perf_counter()
    for _ in range(2000):
        jail.tree.sync()
    each = (time.perf_counter() - begin) / 2000
    print(f"sync: {each * 1e6:.2f} us")
    assert each < 50e-6
