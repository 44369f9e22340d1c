"""Looking at a host: links followed once, tools without secrets, a builder that nobody planted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vectora_jail import hostsystem
from vectora_jail.bwrap import find_bwrap, untrusted_reason
from vectora_jail.errors import WorkerSpawnError
from vectora_jail.paths import look, reachable_by
from vectora_jail.policy import Network, Policy
from vectora_jail.probe import collect_facts, user_of
from vectora_jail.sensitive import sensitive_paths
from vectora_jail.toolchains import find_toolchains


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """Make an executable file and its parents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def tools(home: Path, environ: dict[str, str], workspace: Path | None = None, granted: tuple[Path, ...] = ()):
    """Return what is found as {name: set of paths relative to the home}, and the raw result."""
    found = find_toolchains(
        {k.encode(): v.encode() for k, v in environ.items()},
        bytes(home),
        bytes(workspace or home / "ws"),
        [bytes(path) for path in granted],
        sensitive_paths(bytes(home)),
        look,
        lambda _: True,
    )
    return {
        tool.name: {os.path.relpath(os.fsdecode(fact.path), home) for fact in tool.paths}
        for tool in found.homes
    }, found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return an empty home directory, without links in its name."""
    path = Path(os.path.realpath(tmp_path)) / "home"
    path.mkdir()
    return path


# ---- paths ----


def test_links_are_followed_and_named(tmp_path: Path):
    """Assert that a path over two links leads to the object, and both links are reported with their text."""
    top = Path(os.path.realpath(tmp_path))
    (top / "real").mkdir()
    (top / "one").symlink_to("real")
    (top / "two").symlink_to(top / "one")
    links: list[tuple[bytes, bytes]] = []
    fact = look(bytes(top / "two"), links)
    assert (fact.path, fact.kind) == (bytes(top / "real"), "dir")
    assert fact.ino == (top / "real").stat().st_ino
    assert links == [(bytes(top / "two"), bytes(top / "one")), (bytes(top / "one"), b"real")]


def test_what_is_not_there_never_raises(tmp_path: Path):
    """Assert that loops, missing names and files on the way are kinds and no exceptions."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    for name in (b"loop", b"dangling", b"absent", b"file/x", b"a/../b"):
        assert look(bytes(tmp_path) + b"/" + name).kind == "missing"
    os.mkfifo(tmp_path / "fifo")
    assert look(bytes(tmp_path / "fifo")).kind == "fifo"
    assert look(b"/").path == b"/"


def test_dots_go_through_links_as_the_kernel_does(tmp_path: Path):
    """Assert that `link/..` is the parent of the link's target."""
    top = Path(os.path.realpath(tmp_path))
    (top / "a" / "b").mkdir(parents=True)
    (top / "link").symlink_to("a/b")
    assert look(bytes(top / "link") + b"/..").path == bytes(top / "a")


def test_reachable_by_modes(tmp_path: Path):
    """Assert that a closed directory above a file keeps a stranger out, and its owner not."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "f").write_text("")
    (closed / "f").chmod(0o644)
    assert not reachable_by(bytes(closed / "f"), 4242, {4242})


# ---- tools ----


def test_links_of_a_path_directory_bring_their_installation(home: Path):
    """Assert that a link of ~/.local/bin is shown with its directory, and nothing beside (BC-119)."""
    program(home / ".local/opt/t/bin/tool")
    (home / ".local/opt/t/lib").mkdir()
    (home / ".local/opt/other").mkdir()
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to("../opt/t/bin/tool")
    (home / ".ssh").mkdir()
    shown, _ = tools(home, {"PATH": f"{home}/.local/bin"})
    assert shown == {"path": {".local/bin"}, "links": {".local/opt/t"}}


def test_cargo_is_shown_without_its_token(home: Path):
    """Assert that cargo's programs and rustup are shown, and never the file with the registry token."""
    program(home / ".cargo/bin/cargo")
    (home / ".cargo/credentials.toml").write_text("token")
    (home / ".cargo/registry").mkdir()
    (home / ".rustup/toolchains").mkdir(parents=True)
    shown, _ = tools(home, {"PATH": f"{home}/.cargo/bin"})
    assert shown["cargo"] == {".cargo/bin"}
    assert shown["cargo-cache"] == {".cargo/registry"}
    assert shown["rustup"] == {".rustup"}


def test_nothing_is_shown_that_nobody_needs(home: Path):
    """Assert that a tool home which neither PATH nor a variable names stays outside."""
    (home / ".nvm/versions").mkdir(parents=True)
    program(home / ".cargo/bin/cargo")
    assert tools(home, {"PATH": "/usr/bin"})[0] == {}
    assert tools(home, {"PATH": "/usr/bin", "NVM_DIR": f"{home}/.nvm"})[0] == {"nvm": {".nvm"}}


def test_the_home_directory_itself_is_never_a_tool(home: Path):
    """Assert that PATH entries which are the home, above it or secret are left out by name."""
    program(home / "run")
    (home / ".ssh").mkdir()
    shown, found = tools(home, {"PATH": f"{home}:{home.parent}:{home}/.ssh:/"})
    assert shown == {}
    assert bytes(home) in found.left_out
    assert bytes(home / ".ssh") in found.left_out


def test_a_directory_that_holds_a_secret_is_left_out(home: Path):
    """Assert that a PATH directory above a credential is not shown whole."""
    program(home / ".config/gcloud/../tool")
    (home / ".config/gcloud").mkdir(exist_ok=True)
    shown, found = tools(home, {"PATH": f"{home}/.config"})
    assert shown == {}
    assert bytes(home / ".config") in found.left_out


def test_an_unknown_installation_comes_whole(home: Path):
    """Assert that PATH's `node/bin` brings `node/lib`, and `~/bin` only itself."""
    program(home / "tools/node/bin/node")
    (home / "tools/node/lib").mkdir()
    program(home / "bin/x")
    (home / "lib").mkdir()
    shown, _ = tools(home, {"PATH": f"{home}/tools/node/bin:{home}/bin"})
    assert shown == {"path": {"tools/node", "bin"}}


def test_linked_programs_of_node_come_with_their_packages(home: Path):
    """Assert that `node_modules/.bin` on PATH brings the packages that its links lead into, as one mount."""
    program(home / "x/node_modules/tsc/bin/tsc")
    (home / "x/node_modules/.bin").mkdir()
    (home / "x/node_modules/.bin/tsc").symlink_to("../tsc/bin/tsc")
    shown, _ = tools(home, {"PATH": f"{home}/x/node_modules/.bin"})
    assert shown == {"path": {"x/node_modules"}}


def test_links_to_everywhere_do_not_make_a_start_slow(home: Path):
    """Assert that link targets beyond a number are left out by name instead of being mounted one by one."""
    (home / ".local/bin").mkdir(parents=True)
    for number in range(100):
        program(home / f"proj{number}/tool")
        (home / f".local/bin/t{number}").symlink_to(home / f"proj{number}/tool")
    shown, found = tools(home, {"PATH": f"{home}/.local/bin"})
    assert len(shown["links"]) == 64
    assert len(found.left_out) == 36


def test_venv_of_the_workspace_brings_its_interpreter(home: Path):
    """Assert that `.venv/bin/python` shows the interpreter's home, when it is one that is known."""
    program(home / ".pyenv/versions/3.12/bin/python3.12")
    (home / "ws/.venv/bin").mkdir(parents=True)
    (home / "ws/.venv/bin/python").symlink_to("python3.12")
    (home / "ws/.venv/bin/python3.12").symlink_to(home / ".pyenv/versions/3.12/bin/python3.12")
    shown, _ = tools(home, {"PATH": "/usr/bin"}, granted=(home / "ws",))
    assert shown == {"pyenv": {".pyenv"}}


def test_links_of_the_workspace_open_nothing_else(home: Path):
    """Assert that a venv link which the agent planted cannot ask for a directory of the host."""
    program(home / "private/bin/python")
    (home / "ws/.venv/bin").mkdir(parents=True)
    (home / "ws/.venv/bin/python").symlink_to(home / "private/bin/python")
    (home / "ws/bin").mkdir()
    (home / "ws/bin/evil").symlink_to(home / "private/bin/python")
    shown, _ = tools(home, {"PATH": f"{home}/ws/bin:{home}/ws/.venv/bin"}, granted=(home / "ws",))
    assert shown == {}


def test_tools_inside_a_grant_stay_as_granted(home: Path):
    """Assert that a tool home inside the workspace is not bound read-only over it."""
    program(home / "ws/.cargo/bin/cargo")
    environ = {"PATH": f"{home}/ws/.cargo/bin", "CARGO_HOME": f"{home}/ws/.cargo"}
    assert tools(home, environ, granted=(home / "ws",))[0] == {}


# ---- system ----


def test_etc_is_taken_by_name_and_without_secrets():
    """Assert that nothing which is not world-readable is taken from /etc, and never a password file."""
    entries = {entry.path: entry for entry in hostsystem.system_entries()}
    for name in (b"shadow", b"gshadow", b"sudoers", b"passwd", b"ssh", b"crontab", b"fstab"):
        assert b"/etc/" + name not in entries
    for entry in entries.values():
        if entry.path.startswith(b"/etc/") and entry.kind == "bind":
            assert os.stat(entry.target).st_mode & 0o004
    assert b"/usr" in entries


@pytest.mark.parametrize(
    "text",
    [
        "index-url = https://user:t0ken@host/simple\n",
        "//registry/:_authToken=abc\n",
        "password = hunter2\n",
        "-----BEGIN OPENSSH PRIVATE KEY-----\n",
    ],
)
def test_copies_that_look_like_a_credential_are_not_made(tmp_path: Path, text: str):
    """Assert that a settings file of the home directory with a secret in it stays outside."""
    (tmp_path / ".gitconfig").write_text("[user]\n\tname = A\n")
    assert [e.path for e in hostsystem.home_files(bytes(tmp_path))] == [bytes(tmp_path / ".gitconfig")]
    (tmp_path / ".gitconfig").write_text("[user]\n" + text)
    assert hostsystem.home_files(bytes(tmp_path)) == ()


def test_a_fifo_in_place_of_a_settings_file_does_not_block(tmp_path: Path):
    """Assert that planning never waits for a pipe that nobody writes."""
    os.mkfifo(tmp_path / ".gitconfig")
    assert hostsystem.home_files(bytes(tmp_path)) == ()


# ---- bwrap ----


def test_path_is_never_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Assert that a bwrap which is first on PATH is not the one that is found."""
    fake = program(tmp_path / "bwrap")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bwrap()[0] != bytes(fake)


def test_a_builder_that_others_can_write_is_not_trusted(tmp_path: Path):
    """Assert that owner, mode and every directory above a program are looked at."""
    fake = program(tmp_path / "bwrap")
    assert untrusted_reason(b"bwrap") == "not an absolute path"
    assert untrusted_reason(bytes(fake))  # below a directory that is not root's, or is writable
    assert untrusted_reason(b"/usr") == "/usr is not a regular file"
    assert "No such file" in untrusted_reason(b"/usr/bin/no-such-program")


def test_an_explicit_setting_is_the_only_one(tmp_path: Path):
    """Assert that a setting is used as it is, and a wrong one is no reason to look elsewhere."""
    mine = program(tmp_path / "my-bwrap")
    assert find_bwrap(str(mine)) == (bytes(mine), "")
    assert find_bwrap("relative/bwrap")[0] is None
    path, reason = find_bwrap(str(tmp_path / "absent"))
    assert path is None
    assert "absent" in reason


# ---- facts ----


def test_workspace_that_is_no_directory_is_named(tmp_path: Path):
    """Assert that a missing workspace and a file are refused with what they are."""
    (tmp_path / "f").write_text("")
    for name, says in (("gone", "does not exist"), ("f", "is a file")):
        with pytest.raises(WorkerSpawnError, match=says) as caught:
            collect_facts(bytes(tmp_path / name), Policy())
        assert caught.value.code == "workspace"


def test_facts_of_a_workspace(home: Path):
    """Assert that grants are resolved once, against workspace and home, with `$$` as a literal dollar."""
    workspace = home / "ws"
    (workspace / "a$b").mkdir(parents=True)
    (home / "lib").mkdir()
    (workspace / "link").symlink_to("a$b")
    policy = Policy(rw_paths=("link",), ro_paths=("~/lib", "a$$b/gone"), network=Network(unix=("sock",)))
    facts = collect_facts(bytes(workspace), policy, environ={b"HOME": bytes(home), b"TOKEN": b"x"})
    assert [f.path for f in facts.rw] == [bytes(workspace / "a$b")]
    assert facts.rw[0].ino == (workspace / "a$b").stat().st_ino
    assert [(f.path, f.kind) for f in facts.ro] == [
        (bytes(home / "lib"), "dir"),
        (bytes(workspace / "a$b" / "gone"), "missing"),
    ]
    assert facts.environ_names == (b"HOME", b"TOKEN")
    assert dict(facts.environ) == {b"HOME": bytes(home)}
    assert bytes(home / ".ssh") in facts.sensitive


def test_repository_above_is_found(home: Path):
    """Assert that a workspace in a sub-folder of a repository knows the git directory above."""
    (home / "r/.git").mkdir(parents=True)
    (home / "r/.git/HEAD").write_text("ref: refs/heads/main\n")
    (home / "r/sub").mkdir()
    facts = collect_facts(bytes(home / "r/sub"), Policy(), environ={b"HOME": bytes(home)})
    assert facts.parent_repository is not None
    assert facts.parent_repository.path == bytes(home / "r/.git")


def test_worktree_pointer_must_be_answered(home: Path):
    """Assert that a pointer file brings a git directory only when that directory points back (BC-11)."""
    worktree, git = home / "wt", home / "r/.git"
    (git / "worktrees/wt").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "worktrees/wt/HEAD").write_text("ref: refs/heads/x\n")
    (git / "worktrees/wt/commondir").write_text("../..\n")
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {git}/worktrees/wt\n")
    policy = Policy()
    assert collect_facts(bytes(worktree), policy, environ={}).repository == ()
    (git / "worktrees/wt/gitdir").write_text(f"{worktree}/.git\n")
    assert [f.path for f in collect_facts(bytes(worktree), policy, environ={}).repository] == [bytes(git)]


def test_shell_and_name_are_safe_for_passwd(tmp_path: Path):
    """Assert that a shell with a colon or a line break never reaches the synthetic passwd."""
    odd = program(tmp_path / "a:b")
    user = user_of(look(bytes(tmp_path)), {b"SHELL": bytes(odd), b"HOME": bytes(tmp_path)}, [])
    assert b":" not in user.shell


@pytest.mark.parametrize(
    ("mode", "uid", "groups", "expected"),
    [
        (0o700, 1, (), b"/open/closed/inner/s"),  # the owner
        (0o700, 2, (), b"/open/closed"),
        (0o750, 2, (7,), b"/open/closed/inner/s"),
        (0o705, 2, (7,), b"/open/closed"),  # the group's bits hold for its members
        (0o711, 2, (), b"/open/closed/inner/s"),
    ],
)
def test_outermost_closed_directory(monkeypatch, mode, uid, groups, expected):
    """Assert that a path below a directory that a user may not search stands for that directory."""
    from types import SimpleNamespace

    from vectora_jail import paths

    def stat(path):
        return SimpleNamespace(st_uid=1, st_gid=7, st_mode=mode if path == b"/open/closed" else 0o755)

    monkeypatch.setattr(paths, "os", SimpleNamespace(stat=stat, path=os.path))
    assert paths.outermost_closed(b"/open/closed/inner/s", uid, groups) == expected
