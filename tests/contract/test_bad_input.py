"""A caller's mistakes: each is an error that says what and where, and leaves the jail usable."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from vectora_jail import (
    EditConflict,
    Jail,
    JailManager,
    Policy,
    PolicyError,
    SandboxDisabled,
    WorkerSpawnError,
)

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        ([], ValueError, "empty"),
        ([""], ValueError, "empty"),
        (["a\0b"], ValueError, "NUL"),
        ("a\0b", ValueError, "NUL"),
        (["echo", 5], TypeError, r"command\[1\]"),
        (5, TypeError, "sequence"),
        (b"ls", TypeError, "string"),
        (None, TypeError, "sequence"),
        (["echo", "x" * 140_000], OSError, "131071"),
    ],
    ids=["no-argv", "empty-name", "nul-argv", "nul-text", "number", "int", "bytes", "none", "long-argument"],
)
def test_bad_command(jail, command, error, text):
    """Assert that a command that cannot be one is refused before anything starts."""
    with pytest.raises(error, match=text):
        jail.exec(command)
    assert jail.exec("echo still here").stdout == b"still here\n"


def test_two_megabytes_of_arguments(jail):
    """Assert that what the kernel cannot take is OSError(E2BIG), not a dead worker."""
    with pytest.raises(OSError) as caught:
        jail.exec(["true", *["x" * 1000] * 9000])
    assert caught.value.errno == errno.E2BIG
    assert jail.exec(["printf", "%s", *["y" * 1000] * 500]).stdout == b"y" * 500_000


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan")])
def test_bad_timeout(jail, timeout):
    """Assert that a timeout must be a positive number."""
    with pytest.raises((ValueError, TypeError), match="timeout"):
        jail.exec("true", timeout=timeout)


def test_bad_cwd(jail, ws):
    """Assert that a missing or outside directory is the usual OSError with its name."""
    for cwd in ("missing", "/srv/not-granted", "a\0b"):
        with pytest.raises((FileNotFoundError, ValueError)) as caught:
            jail.exec("true", cwd=cwd)
        if isinstance(caught.value, OSError):
            assert caught.value.filename == cwd
    (ws / "sub").mkdir()
    assert jail.exec("pwd", cwd="sub").stdout == os.fsencode(ws / "sub") + b"\n"
    (ws / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        jail.exec("true", cwd="file")


def test_bad_environment(jail):
    """Assert that names and values that no environment can hold are refused."""
    for env in ({"A=B": "1"}, {"": "1"}, {"A": "x\0"}, {"A": 5}):
        with pytest.raises((ValueError, TypeError)):
            jail.exec("true", env=env)


def test_read_file_of_what_is_no_file(jail, ws):
    """Assert that directories, FIFOs, devices and missing or unreadable files end at once with the right errno."""
    (ws / "dir").mkdir()
    os.mkfifo(ws / "fifo")
    (ws / "link").symlink_to("nowhere")
    (ws / "loop").symlink_to("loop")
    cases = {
        "dir": errno.EISDIR,
        "fifo": errno.EINVAL,
        "/dev/zero": errno.EINVAL,
        "missing": errno.ENOENT,
        "link": errno.ENOENT,
        "loop": errno.ELOOP,
        "/etc/shadow": errno.ENOENT,
        "dir/x/y": errno.ENOENT,
    }
    for path, number in cases.items():
        with pytest.raises(OSError) as caught:
            jail.read_file(path)
        assert caught.value.errno == number, path
        assert caught.value.filename == path


def test_read_file_of_a_sparse_terabyte(jail, ws):
    """Assert that a part of an enormous file is read in bounded time and memory."""
    with open(ws / "huge", "wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - 3)
        file.write(b"end")
    assert jail.read_file("huge", offset=(1 << 40) - 3) == b"end"
    assert jail.read_file("huge", limit=10) == bytes(10)


def test_read_proc(jail):
    """Assert that files of /proc are read bounded."""
    assert b"MemTotal:" in jail.read_file("/proc/meminfo")
    for name in ("mem", "environ", "maps", "status", "auxv"):
        with pytest.raises(PermissionError):  # the worker itself, which answers the call
            jail.read_file(f"/proc/self/{name}", offset=0)


def test_offset_and_limit(jail, ws):
    """Assert that offset and limit cut as expected, over and under the size of one message."""
    data = os.urandom(300_000)
    (ws / "d").write_bytes(data)
    for offset, limit in ((0, None), (10, 20), (299_990, 100), (400_000, 5), (5, 200_000), (0, 0)):
        end = None if limit is None else offset + limit
        assert jail.read_file("d", offset=offset, limit=limit) == data[offset:end]
    with pytest.raises(ValueError, match="negative"):
        jail.read_file("d", offset=-1)


def test_write_file(jail, ws):
    """Assert that a write is whole, keeps mode and symlink, and says what it did."""
    jail.write_file("a/b/c.txt", "text", make_parents=True)
    assert (ws / "a/b/c.txt").read_text() == "text"
    path = ws / "script"
    path.write_text("old")
    path.chmod(0o750)
    (ws / "link").symlink_to("script")
    big = os.urandom(3_000_000)
    written = jail.write_file("link", big)
    assert path.read_bytes() == big
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert (ws / "link").is_symlink()
    assert written.size == len(big)
    jail.write_file("new", b"", mode=0o600)
    assert stat.S_IMODE((ws / "new").stat().st_mode) == 0o600
    assert sorted(p.name for p in ws.iterdir()) == ["a", "link", "new", "script"]


def test_write_file_refused(jail, ws):
    """Assert that a write that cannot be done is the right OSError and changes nothing."""
    (ws / "dir").mkdir()
    (ws / "there").write_text("old")
    for path, number in (("dir", errno.EISDIR), ("no/such/dir/f", errno.ENOENT), ("/usr/bin/x", errno.EROFS)):
        with pytest.raises(OSError) as caught:
            jail.write_file(path, b"x")
        assert caught.value.errno == number, path
    with pytest.raises(FileExistsError):
        jail.write_file("there", b"new", exclusive=True)
    assert (ws / "there").read_text() == "old"


def test_write_if_unchanged(jail, ws):
    """Assert that a conditional write sees somebody else's save."""
    (ws / "f").write_text("one")
    seen = jail.stat("f")
    (ws / "f").write_text("three")
    with pytest.raises(OSError) as caught:
        jail.write_file("f", b"two", if_unchanged=seen)
    assert caught.value.errno == errno.ESTALE
    assert (ws / "f").read_text() == "three"


def test_write_on_a_full_disk(ws, open_jail):
    """Assert that ENOSPC leaves the old content and no temporary file behind."""
    jail = open_jail(ws)
    target = "/dev/shm/f"
    jail.write_file(target, b"old")
    size = int(jail.exec("df -B1 --output=size /dev/shm | tail -1").stdout)
    jail.exec(f"head -c {size} /dev/zero > /dev/shm/fill", timeout=60)
    with pytest.raises(OSError) as caught:
        jail.write_file(target, b"n" * 3_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert jail.read_file(target) == b"old"
    assert sorted(e.name for e in jail.list_dir("/dev/shm")) == ["f", "fill"]


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"one two three\n", "two", "2", b"one 2 three\n"),
        (b"a\r\nb\r\nc\r\n", "b", "X", b"a\r\nX\r\nc\r\n"),
        (b"a\r\nb\r\nc", "a\nb", "a\nB", b"a\r\nB\r\nc"),
        (b"mixed\r\nlone\rend", "lone", "LONE", b"mixed\r\nLONE\rend"),
        (b"\xef\xbb\xbfbom text", "text", "TEXT", b"\xef\xbb\xbfbom TEXT"),
        (b"latin \xe9 word", "word", "WORD", b"latin \xe9 WORD"),
        (b"no final newline", "final", "FINAL", b"no FINAL newline"),
    ],
    ids=["plain", "crlf", "crlf-lines", "mixed", "bom", "latin1", "no-newline"],
)
def test_edit_changes_only_the_match(jail, ws, before, old, new, after):
    """Assert that an edit touches no other byte, keeps the mode, and leaves a symlink a symlink (BC-91)."""
    path = ws / "real"
    path.write_bytes(before)
    path.chmod(0o640)
    (ws / "link").symlink_to("real")
    jail.edit_file("link", old=old, new=new)
    assert path.read_bytes() == after
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (ws / "link").is_symlink()


def test_edit_conflicts(jail, ws):
    """Assert that zero and two matches are an EditConflict with their number, and nothing is written."""
    (ws / "f").write_text("a b a")
    with pytest.raises(EditConflict) as caught:
        jail.edit_file("f", old="zzz", new="y")
    assert caught.value.matches == 0
    with pytest.raises(EditConflict) as caught:
        jail.edit_file("f", old="a", new="y")
    assert caught.value.matches == 2
    assert (ws / "f").read_text() == "a b a"
    jail.edit_file("f", old="a", new="y", replace_all=True)
    assert (ws / "f").read_text() == "y b y"


def test_edit_keeps_hard_links(jail, ws):
    """Assert that a hard-linked file is edited in place, so that both names show the change (BC-125)."""
    (ws / "a").write_text("one")
    os.link(ws / "a", ws / "b")
    jail.edit_file("b", old="one", new="two")
    assert (ws / "a").read_text() == "two"


def test_directories(jail, ws):
    """Assert that list, make, remove and rename behave like their system calls."""
    jail.make_dir("x/y", parents=True)
    with pytest.raises(FileExistsError):
        jail.make_dir("x")
    jail.make_dir("x", exist_ok=True)
    (ws / "x" / "f").write_text("1")
    with pytest.raises(OSError) as caught:
        jail.remove("x")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EISDIR)
    jail.rename("x/f", "x/g")
    assert [(e.name, e.type) for e in jail.list_dir("x")] == [("g", "file"), ("y", "dir")]
    (ws / "keep").write_text("k")
    with pytest.raises(FileExistsError):
        jail.rename("x/g", "keep", replace=False)
    (ws / "x" / "out").symlink_to("/usr")
    jail.remove("x", recursive=True)
    assert not (ws / "x").exists()
    assert os.path.isdir("/usr/bin")


@pytest.mark.parametrize(
    "name",
    [b"a b", b"q*[x]?", "日本 é".encode(), b"-rf", b"new\nline", b"quote'\"$x", b"\xff\xfe", b"n" * 255],
    ids=["space", "glob", "cjk", "option", "newline", "quotes", "not-utf8", "255"],
)
def test_odd_names(tmp_path, open_jail, name):
    """Assert that any name the kernel takes is a workspace and a file: commands, masks, file calls (BC-53)."""
    place = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(place)
    with open(os.path.join(place, b".env"), "wb") as file:
        file.write(b"SECRET")
    jail = open_jail(place, policy=Policy(mask=(".env",)))
    result = jail.exec("pwd; touch ok; cat .env")
    assert result.stdout == place + b"\n"
    assert os.path.exists(os.path.join(place, b"ok"))
    jail.write_file(name + b".f" if len(name) < 250 else b"f", b"data")
    assert jail.read_file(name + b".f" if len(name) < 250 else b"f") == b"data"
    assert os.fsdecode(name + b".f" if len(name) < 250 else b"f") in [e.name for e in jail.list_dir()]


def test_deep_path(jail, ws):
    """Assert that a path of many components works."""
    deep = "/".join(["d"] * 400)
    jail.write_file(deep + "/f", b"deep", make_parents=True)
    assert jail.read_file(deep + "/f") == b"deep"
    jail.remove("d", recursive=True)


def test_workspace_that_is_none(tmp_path, identity):
    """Assert that a missing workspace, a file and an unreadable directory are typed errors that name it."""
    file = tmp_path / "file"
    file.write_text("x")
    for path in (tmp_path / "missing", file):
        with pytest.raises(WorkerSpawnError) as caught:
            Jail.open(path, policy=Policy()).exec("true")
        assert caught.value.code == "workspace"
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="NUL"):
        Jail.open("/tmp/a\0b", policy=Policy())


def test_workspace_removed_and_made_again(tmp_path, open_jail):
    """Assert that a re-made directory gets a new jail and an unlinked one is an error, never a lost write (BC-83)."""
    place = tmp_path / "w"
    place.mkdir()
    jail = open_jail(place)
    jail.exec("touch first")
    os.rename(place, tmp_path / "old")
    with pytest.raises(WorkerSpawnError):
        jail.exec("touch lost")
    place.mkdir()
    jail.exec("touch second")
    assert os.listdir(place) == ["second"]
    assert os.listdir(tmp_path / "old") == ["first"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rw_paths": ("missing",)}, "missing"),
        ({"rw_paths": ("/",)}, "/"),
        ({"rw_paths": ("a",), "ro_paths": ("a",)}, "a"),
        ({"rw_paths": ("x\0y",)}, "NUL"),
        ({"backend": "kubernetes"}, "kubernetes"),
        ({"level": "root"}, "root"),
    ],
    ids=["missing", "root", "both", "nul", "backend", "level"],
)
def test_bad_grants(ws, changes, text):
    """Assert that a grant that cannot be is refused or reported with its name, before anything runs."""
    (ws / "a").mkdir()
    try:
        jail = Jail.open(ws, policy=Policy(**changes))
        jail.exec("true")
    except (PolicyError, WorkerSpawnError) as exc:
        assert text in str(exc)
        return
    with jail:
        assert changes == {"rw_paths": ("missing",)}
        assert any("missing" in hazard.text for hazard in jail.report.hazards)


def test_files_that_ask_for_too_much(ws):
    """Assert that the manager refuses what the ceiling does not allow, and tells an absent opt-in apart."""
    with JailManager() as jails:
        with pytest.raises(SandboxDisabled):
            jails.get(ws)
        (ws / "vectora.toml").write_text('[sandbox]\nrw_paths = ["/etc"]\n')
        with pytest.raises(PolicyError, match="outside_paths"):
            jails.get(ws)
        (ws / "vectora.toml").write_text("[sandbox]\nenabled = false\n")
        with pytest.raises(SandboxDisabled):
            jails.get(ws)
        (ws / "vectora.toml").write_text("[sandbox]\nmasks = []\n")
        with pytest.raises(PolicyError, match="mask"):
            jails.get(ws)


def test_link_out_of_the_workspace_is_no_grant(ws, tmp_path):
    """Assert that a granted name that is a symlink out of the workspace needs the ceiling's consent."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("SECRET")
    (ws / "link").symlink_to(tmp_path / "other")
    (ws / "vectora.toml").write_text('[sandbox]\nrw_paths = [".", "link"]\n')
    with JailManager() as jails, pytest.raises(PolicyError, match="outside_paths"):
        jails.get(ws).exec("cat link/secret")
