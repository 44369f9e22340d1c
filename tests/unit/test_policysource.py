"""What stands in place of `vectora.toml`, whose file it is, who can write to it; the user's own ceiling."""

from __future__ import annotations

import errno
import os
import stat
from types import SimpleNamespace

import pytest

from vectora_jail import policysource
from vectora_jail.errors import PolicyError
from vectora_jail.policy import Ceiling
from vectora_jail.policyfile import file_identity, load_ceiling, load_policy, parse_policy


def write(directory, text, name="vectora.toml", mode=0o644):
    path = directory / name
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


def test_a_file_is_read_and_remembered(tmp_path):
    """Assert that a policy knows its file and the state that the file had."""
    path = write(tmp_path, '[sandbox]\nro_paths = ["docs"]\n')
    policy = load_policy(tmp_path)
    assert policy.ro_paths == ("docs",)
    assert policy.source == str(path)
    assert policy.identity == file_identity(os.stat(path))
    assert load_policy(os.fsencode(tmp_path)) == policy
    with pytest.raises(PolicyError) as error:
        write(tmp_path, "[sandbox]\nx = 1\n")
        load_policy(tmp_path)
    assert str(error.value).startswith(f"{path}:2: x: found an unknown key")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (lambda path: os.symlink("/dev/zero", path), "a character device"),
        (lambda path: os.symlink("gone", path), "a dangling link"),
        (lambda path: os.symlink("vectora.toml", path), "cannot be opened"),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make, found):
    """Assert that a FIFO, directory, device, dangling or looping link in its place is refused, unopened."""
    make(str(tmp_path / "vectora.toml"))
    policy = parse_policy(tmp_path / "vectora.toml")
    assert policy.refused
    assert found in policy.problems[0].found


def test_a_huge_file_is_refused(tmp_path):
    """Assert that a file over 1 MiB is refused, and one of exactly that size is read."""
    write(tmp_path, "#" * policysource.MAX_FILE)
    assert parse_policy(tmp_path / "vectora.toml").reason == "no_sandbox_table"
    write(tmp_path, "#" * (policysource.MAX_FILE + 1))
    assert "over 1 MiB" in parse_policy(tmp_path / "vectora.toml").problems[0].found


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    """Assert that a file which cannot be opened, or not be read, is refused with the kernel's reason."""
    path = write(tmp_path, "")

    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for call in ("read", "open", "stat"):
        monkeypatch.setattr(policysource.os, call, denied)
        policy = parse_policy(path)
        monkeypatch.undo()
        assert policy.refused, call
        assert "Permission denied" in policy.problems[0].found


@pytest.mark.parametrize(("mode", "who"), [(0o664, "its group"), (0o646, "everybody"), (0o666, "everybody")])
def test_bc_117_a_file_that_others_can_write_is_refused(tmp_path, mode, who):
    """Assert that group- or world-writable is refused with the command that repairs it."""
    path = write(tmp_path, "[sandbox]\n", mode=mode)
    policy = parse_policy(path)
    assert policy.refused
    assert who in policy.problems[0].found
    assert policy.problems[0].hint == "chmod go-w vectora.toml"


def test_bc_117_a_file_of_another_uid_is_refused(tmp_path, monkeypatch):
    """Assert that a project file of neither the workspace's owner, root nor the backend is refused."""
    path = write(tmp_path, "[sandbox]\n")
    info = os.stat(path)
    fields = {name: getattr(info, name) for name in dir(info) if name.startswith("st_")}
    monkeypatch.setattr(policysource.os, "fstat", lambda _: SimpleNamespace(**{**fields, "st_uid": 12345}))
    policy = parse_policy(path)
    assert policy.refused
    assert "a file of uid 12345" in policy.problems[0].found
    monkeypatch.setattr(policysource.os, "fstat", lambda _: SimpleNamespace(**{**fields, "st_uid": 0}))
    assert not parse_policy(path).refused


def test_bc_117_a_link_out_of_the_workspace_is_refused(tmp_path):
    """Assert that a project file may be a link inside the workspace and not one that leaves it."""
    workspace = tmp_path / "ws"
    (workspace / "conf").mkdir(parents=True)
    write(tmp_path, "[sandbox]\n", "evil.toml")
    write(workspace / "conf", '[sandbox]\nlevel = "read-only"\n', "v.toml")
    link = workspace / "vectora.toml"
    link.symlink_to("conf/v.toml")
    assert load_policy(workspace).level == "read-only"
    for target in ("../evil.toml", str(tmp_path / "evil.toml"), "conf/../../evil.toml"):
        link.unlink()
        link.symlink_to(target)
        assert "a link out of the workspace" in parse_policy(link).problems[0].found
    alias = tmp_path / "alias"
    alias.symlink_to(workspace)
    link.unlink()
    link.symlink_to("conf/v.toml")
    assert load_policy(alias).level == "read-only"


@pytest.mark.parametrize("path", ["a\0b", b"a\0b", 42, None])
def test_a_path_that_is_none_is_refused(path):
    """Assert that parse_policy does not raise whatever it is given."""
    assert parse_policy(path).refused


def test_names_that_are_not_utf8_are_fine(tmp_path):
    """Assert that a workspace whose name is not UTF-8 has a policy like any other."""
    workspace = os.path.join(os.fsencode(tmp_path), b"w\xff\n'\"*")
    os.mkdir(workspace)
    with open(os.path.join(workspace, b"vectora.toml"), "w") as file:
        file.write("[sandbox]\nx = 1\n")
    policy = parse_policy(os.path.join(workspace, b"vectora.toml"))
    assert policy.problems[0].key == "x"
    assert len(policy.digest) == 64


# --- the user's own ceiling


def test_a_ceiling_is_read_from_toml(tmp_path):
    """Assert that a ceiling file sets the fields that it names."""
    path = write(tmp_path, 'backends = ["local", "ssh"]\nlevel = "read-only"\ngpu = false\n', "c.toml")
    assert load_ceiling(path) == Ceiling(backends=("local", "ssh"), level="read-only", gpu=False)


def test_bc_117_the_users_own_ceiling_may_be_a_link(tmp_path, monkeypatch):
    """Assert that ~/.config/vectora-jail/ceiling.toml is read through a symlink, and is optional."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_ceiling() == Ceiling()
    (tmp_path / ".config" / "vectora-jail").mkdir(parents=True)
    (tmp_path / "dot").mkdir()
    target = write(tmp_path / "dot", 'network = "host"\n', "c.toml")
    (tmp_path / ".config" / "vectora-jail" / "ceiling.toml").symlink_to(target)
    assert load_ceiling().network == "host"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "backend = []\n",
            'c.toml:1: backend: found an unknown key; expected a field of the ceiling (did you mean "back',
        ),
        ('\nlevel = "x"\n', "c.toml:2: level: found"),
        ('gpu = true\noutside_paths = [\n".",\n1]\n', "c.toml:4: outside_paths[1]: found 1"),
        ("x =\n", "c.toml:1: found text that does not parse"),
    ],
)
def test_a_wrong_ceiling_file_is_an_error(tmp_path, text, part):
    """Assert that a ceiling file is as strict as a policy and names its lines."""
    with pytest.raises(PolicyError) as error:
        load_ceiling(write(tmp_path, text, "c.toml"))
    assert part in str(error.value)


def test_a_ceiling_that_is_missing_or_open_to_others_is_an_error(tmp_path):
    """Assert that an explicit ceiling must exist and be writable by its owner only."""
    with pytest.raises(PolicyError, match="no such file"):
        load_ceiling(tmp_path / "gone.toml")
    with pytest.raises(PolicyError, match="everybody may write"):
        load_ceiling(write(tmp_path, "", "c.toml", 0o666))
    assert stat.S_IMODE(os.stat(tmp_path / "c.toml").st_mode) == 0o666
