"""Mounts made inside a running jail: what they do, and what an agent does against them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import time

import pytest

from vectora_jail.errors import WorkerSpawnError

native = pytest.importorskip("vectora_jail._native", reason="the shim is not built")
msgpack = pytest.importorskip("msgpack")
pytestmark = pytest.mark.kernel
needs_root = pytest.mark.root

ESTALE = errno.ESTALE
READ = "out = open({!r}).read()"
SHARED_MOUNTS = """
import ctypes, os, pathlib, sys
sys.path[:0] = {path!r}
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags):
    if libc.mount(source, target, kind, flags, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")
assert libc.unshare(0x20000) == 0
mount(None, b"/", None, 0x4000 | 0x100000)  # MS_REC | MS_SHARED, as systemd leaves it
import importlib.util
spec = importlib.util.spec_from_file_location("kernel_conftest", {conftest!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
work = pathlib.Path({workspace!r})
for name in ("ro/sub", "rw/sub"):
    (work / name).mkdir(parents=True)
grants = [b"--ro-bind", bytes(work / "ro"), bytes(work / "ro")]
grants += [b"--bind", bytes(work / "rw"), bytes(work / "rw")]
agent = module.Agent(work, options=grants)
if {private}:
    assert agent.enter(["private"]) == [0]
for name in ("ro", "rw"):
    mount(b"later", bytes(work / name / "sub"), b"tmpfs", 0)
    (work / name / "sub" / "secret").write_text("of the host")
print([agent.run(f"out = os.listdir({{str(work / name / 'sub')!r}})") for name in ("ro", "rw")])
agent.close()
"""


def mounts_on(agent, path):
    with open(f"/proc/{agent.started.pid}/mountinfo", encoding="ascii") as file:
        return sum(line.split()[4] == str(path) for line in file)


@pytest.fixture
def ws(tmp_path):
    """Return a workspace with a secret file and a secret directory."""
    root = tmp_path / "ws"
    (root / "sec").mkdir(parents=True)
    (root / "sec" / "key").write_text("SECRET-2")
    (root / ".env").write_text("SECRET-1")
    (root / "open").write_text("public")
    return root


def test_a_cover_hides_file_and_directory(jail, ws):
    """Assert that what was readable shows the empty cover, which cannot be written, renamed or removed."""
    agent = jail()
    env, sec = str(ws / ".env"), str(ws / "sec")
    assert agent.run(READ.format(env)) == "SECRET-1"
    assert agent.enter(["private"], ["cover", env], ["cover", sec]) == [0, 0, 0]
    assert agent.run(READ.format(env)) == ""
    assert agent.run(f"out = os.listdir({sec!r})") == []
    assert agent.run(READ.format(str(ws / "open"))) == "public"
    for code, expected in [
        (f"open({env!r}, 'w')", (errno.EROFS, errno.EACCES)),
        (f"os.chmod({env!r}, 0o777)", (errno.EROFS,)),
        (f"os.rename({env!r}, {env!r} + 'x')", (errno.EBUSY,)),
        (f"os.unlink({env!r})", (errno.EBUSY,)),
        (f"os.rmdir({sec!r})", (errno.EBUSY,)),
        (f"os.link({env!r}, {env!r} + 'y')", (errno.EXDEV, errno.EPERM)),
        (f"open({sec!r} + '/new', 'w')", (errno.EROFS,)),
    ]:
        assert agent.run(code)["errno"] in expected, code
    assert (ws / ".env").read_text() == "SECRET-1"


def test_a_cover_is_made_once(jail, ws):
    """Assert that covering again stacks nothing, and that uncovering brings the object back."""
    agent = jail()
    path = ws / ".env"
    assert agent.enter(["cover", str(path)], ["cover", str(path)]) == [0, 0]
    assert mounts_on(agent, path) == 1
    assert agent.enter(["uncover", str(path)]) == [0]
    assert mounts_on(agent, path) == 0
    assert agent.run(READ.format(str(path))) == "SECRET-1"


def test_only_covers_can_be_uncovered(jail, ws):
    """Assert that `uncover` takes away no other mount, and nothing that is no mount."""
    agent = jail()
    ops = [["uncover", str(ws)], ["uncover", str(ws / "open")], ["uncover", "/"], ["uncover", "/proc"]]
    assert agent.enter(*ops) == [errno.EINVAL] * 4


def test_a_cover_is_taken_from_its_own_object_only(jail, ws):
    """Assert that an agent that swaps directories cannot have the cover of another secret removed."""
    agent = jail()
    for name in ("a", "b"):
        (ws / name).mkdir()
        (ws / name / "key").write_text(name)
    paths = [str(ws / name / "key") for name in ("a", "b")]
    info = (ws / "a" / "key").stat()
    assert agent.enter(["cover", paths[0]], ["cover", paths[1]]) == [0, 0]
    swap = "for x, y in (('a', 't'), ('b', 'a'), ('t', 'b')): os.rename(x, y)"
    assert agent.run(f"os.chdir({str(ws)!r})\n{swap}") is None
    assert agent.enter(["uncover", paths[0], info.st_dev, info.st_ino]) == [ESTALE]
    assert agent.enter(["uncover", paths[1], info.st_dev, info.st_ino]) == [0]
    assert [agent.run(READ.format(path)) for path in paths] == ["", "a"]


def test_covers_never_land_elsewhere_in_a_race(jail, ws):
    """Assert that an agent that flips a directory and a link gets no cover on the link's target."""
    agent = jail()
    place = str(ws / "flip")
    agent.run(f"""
import threading
def flip():
    while True:
        for make, unmake in ((lambda: os.symlink("/usr/bin", {place!r}), lambda: os.unlink({place!r})),
                             (lambda: os.rename({place!r} + "2", {place!r}),
                              lambda: os.rename({place!r}, {place!r} + "2"))):
            try:
                make()
            except OSError:
                pass
            try:
                unmake()
            except OSError:
                pass
os.mkdir({place!r} + "2")
open({place!r} + "2/env", "w").close()
threading.Thread(target=flip, daemon=True).start()
""")
    seen = set()
    for _ in range(40):
        seen.update(agent.enter(*[["cover", place + "/env"]] * 50))
    assert mounts_on(agent, "/usr/bin/env") == 0
    assert seen <= {0, errno.ENOENT, errno.ELOOP, ESTALE, errno.EAGAIN}
    assert agent.run("out = os.stat('/usr/bin/env').st_size > 1000") is True


def test_a_saved_file_is_covered_again(jail, ws):
    """Assert that a host's save by rename loses the cover and that the next op puts it on the new object."""
    agent = jail()
    path = ws / ".env"
    assert agent.enter(["private"], ["cover", str(path)]) == [0, 0]
    (ws / "tmp").write_text("SECRET-3")
    (ws / "tmp").rename(path)
    assert agent.run(READ.format(str(path))) == "SECRET-3"
    info = path.stat()
    assert agent.enter(["cover_at", str(path), info.st_dev, info.st_ino]) == [0]
    assert agent.run(READ.format(str(path))) == ""


def test_a_cover_for_another_object_is_refused(jail, ws):
    """Assert that `cover_at` mounts nothing when the name shows another object than the host saw."""
    agent = jail()
    info = (ws / "open").stat()
    path = str(ws / ".env")
    assert agent.enter(["cover_at", path, info.st_dev, info.st_ino]) == [ESTALE]
    assert agent.enter(["cover_at", path]) == [errno.EINVAL]
    assert mounts_on(agent, path) == 0


def test_a_planted_symlink_is_not_followed(jail, ws):
    """Assert that a cover never lands where an agent's link leads, in the last name or in one before it."""
    agent = jail()
    agent.run(f"""
os.rename({str(ws / "sec")!r}, {str(ws / "moved")!r})
os.symlink("/usr/bin", {str(ws / "sec")!r})
os.symlink("/usr/bin/env", {str(ws / "link")!r})
os.symlink("/proc/self/root/usr/bin", {str(ws / "magic")!r})
""")
    targets = [str(ws / "sec" / "env"), str(ws / "link"), str(ws / "magic" / "env"), "/proc/self/root"]
    for op in ("cover", "ro", "pin", "uncover"):
        assert agent.enter(*([op, target] for target in targets)) == [errno.ELOOP] * 4
    assert agent.run("out = os.stat('/usr/bin/env').st_size > 1000") is True
    assert mounts_on(agent, "/usr/bin/env") == 0


def test_relative_and_missing_names(jail, ws):
    """Assert that only absolute names count, and that a missing one is an error unless it may be missing."""
    agent = jail()
    missing = str(ws / "nothing")
    assert agent.enter(["ro", missing, True], ["ro", missing], ["cover", missing], ["cover", "etc"]) == [
        0,
        errno.ENOENT,
        errno.ENOENT,
        errno.EINVAL,
    ]


def test_read_only_holds_below_too(jail, ws):
    """Assert that a protection covers the files below it and leaves its neighbours writable."""
    agent = jail()
    assert agent.enter(["ro", str(ws / "sec")], ["ro", str(ws / "open")]) == [0, 0]
    assert agent.run(f"open({str(ws / 'sec' / 'key')!r}, 'w')") == {"errno": errno.EROFS}
    assert agent.run(f"open({str(ws / 'open')!r}, 'a')") == {"errno": errno.EROFS}
    assert agent.run(READ.format(str(ws / "sec" / "key"))) == "SECRET-2"
    assert agent.run(f"open({str(ws / 'new')!r}, 'w').close()") is None


def test_a_whole_grant_becomes_read_only_in_place(jail, ws):
    """Assert that `ro` on what is a mount already makes that mount read-only instead of a second one."""
    agent = jail()
    assert agent.enter(["ro", str(ws)], ["ro", str(ws)]) == [0, 0]
    assert mounts_on(agent, ws) == 1
    assert agent.run(f"open({str(ws / 'x')!r}, 'w')") == {"errno": errno.EROFS}


def test_a_pin_keeps_the_name(jail, ws):
    """Assert that a pinned directory cannot be renamed or replaced and stays writable, and is pinned once."""
    agent = jail()
    sec = str(ws / "sec")
    assert agent.enter(["pin", sec], ["pin", sec]) == [0, 0]
    assert mounts_on(agent, sec) == 1
    assert agent.run(f"os.rename({sec!r}, {sec!r} + '2')") == {"errno": errno.EBUSY}
    assert agent.run(f"open({sec!r} + '/new', 'w').write('x')") is None
    assert (ws / "sec" / "new").read_text() == "x"


def test_a_protection_inside_a_pin(jail, ws):
    """Assert that pins made first and protections after them, as depth-sorted lists are, hold together."""
    agent = jail()
    hooks = ws / ".git" / "hooks"
    hooks.mkdir(parents=True)
    assert agent.enter(["pin", str(ws / ".git")], ["ro", str(hooks)]) == [0, 0]
    assert agent.run(f"open({str(hooks)!r} + '/pre-commit', 'w')") == {"errno": errno.EROFS}
    assert agent.run(f"open({str(ws / '.git')!r} + '/index', 'w').close()") is None
    assert agent.run(f"os.rename({str(hooks)!r}, {str(hooks)!r} + '2')") == {"errno": errno.EBUSY}


def test_kernel_settings_cannot_be_written(jail, ws):
    """Assert that /proc/sys is read-only; uid 0 without capabilities could write the host's before."""
    agent = jail()
    write = """
value = open("/proc/sys/kernel/core_pattern").read()
open("/proc/sys/kernel/core_pattern", "w").write(value)
out = "written"
"""
    before = agent.run(write)
    assert before == ("written" if os.geteuid() == 0 else {"errno": errno.EACCES})
    assert agent.enter(["private"], ["ro", "/proc/sys"], ["ro", "/proc/sysrq-trigger", True]) == [0, 0, 0]
    assert agent.run(write)["errno"] in {errno.EROFS, errno.EACCES}
    if os.geteuid() == 0:
        assert agent.run(write) == {"errno": errno.EROFS}
    assert agent.run("out = open('/proc/self/oom_score_adj', 'w').write('500')") == 3


@needs_root
@pytest.mark.root
def test_kernel_memory_can_be_covered(jail, ws):
    """Assert that files of /proc can be covered like any other."""
    agent = jail()
    assert agent.enter(["cover", "/proc/timer_list"], ["cover", "/proc/slabinfo"]) == [0, 0]
    assert agent.run("out = open('/proc/timer_list').read(), open('/proc/slabinfo').read()") == ("", "")


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("private", [False, True])
def test_later_mounts_of_the_host_stay_outside(tmp_path, private):
    """Assert that a mount of the host made later shows in a jail with a slave tree, not in a private one."""
    (tmp_path / "ws").mkdir()
    conftest = os.path.join(os.path.dirname(__file__), "conftest.py")
    code = SHARED_MOUNTS.format(
        path=sys.path, conftest=conftest, workspace=str(tmp_path / "ws"), private=private
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == ""
    assert done.stdout.strip() == ("[[], []]" if private else "[['secret'], ['secret']]")


@pytest.mark.parametrize("options", [(), (b"--disable-userns",)])
def test_the_jails_own_limits_are_lowered(jail, ws, options):
    """Assert that sysctls of the owning user namespace bind the jail, nested or not, and stay."""
    agent = jail(options=options)
    ops = [["sysctl", "user/max_inotify_instances", 16], ["sysctl", "user/max_user_namespaces", "0"]]
    assert agent.enter(*ops, ["ro", "/proc/sys"]) == [0, 0, 0]
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
out = [libc.inotify_init1(0) for _ in range(20)].count(-1), libc.unshare(0x10000000), ctypes.get_errno()
"""
    assert agent.run(code) == (4, -1, errno.ENOSPC)
    assert "errno" in agent.run("open('/proc/sys/user/max_inotify_instances', 'w').write('99')")


def test_a_sysctl_name_cannot_leave_its_directory(jail, ws):
    """Assert that `..` and absolute names are refused."""
    agent = jail()
    names = ["../self/oom_score_adj", "/proc/self/oom_score_adj", "user/nothing"]
    answers = agent.enter(*(["sysctl", name, "1"] for name in names))
    assert answers == [errno.EXDEV, errno.EXDEV, errno.ENOENT]


def test_a_tmpfs_gets_an_inode_limit(jail, ws):
    """Assert that `inodes` bounds the number of files on a tmpfs of the jail, and is refused elsewhere."""
    agent = jail()
    assert agent.enter(["inodes", "/scratch", 50], ["inodes", str(ws / "sec"), 50]) == [0, errno.EINVAL]
    code = "for i in range(100): os.mknod(f'/scratch/{i}')"
    assert agent.run(code) == {"errno": errno.ENOSPC}


def test_one_bad_op_stops_no_other(jail, ws):
    """Assert that unknown and malformed ops answer for themselves only."""
    agent = jail()
    path = str(ws / ".env")
    ops = [["nonsense"], ["cover"], ["cover", "x" * 5000], ["cover", "/a\0b"], 7, [], [7, 8], ["cover", path]]
    answers = agent.enter(*ops)
    assert answers[0] == errno.ENOSYS
    assert all(answers[:-1])
    assert answers[-1] == 0
    assert agent.run(READ.format(path)) == ""


@pytest.mark.parametrize(
    "ops", [b"", b"\xc1", b"\x92\x91\xa1x", b"\x90\x90", b"\x80", b"\xdd\xff\xff\xff\xff"]
)
def test_a_malformed_list_does_nothing(jail, ws, ops):
    """Assert that bytes that are no list of ops are an error of the whole call, or an empty list."""
    agent = jail()
    started = agent.started
    if ops == b"":
        assert native.enter(started.mntns_fd, started.userns_fd, ops) == []
        return
    with pytest.raises(WorkerSpawnError) as caught:
        native.enter(started.mntns_fd, started.userns_fd, ops)
    assert (caught.value.code, caught.value.errno) == ("enter", errno.EBADMSG)


def test_wrong_namespaces_are_an_error(jail, ws):
    """Assert that descriptors that are no namespaces, or not the owning one, are named by errno."""
    agent = jail()
    started = agent.started
    ops = msgpack.packb([["private"]])
    with open("/dev/null", "rb") as null, pytest.raises(WorkerSpawnError) as caught:
        native.enter(null.fileno(), started.userns_fd, ops)
    assert caught.value.errno == errno.EINVAL
    if os.geteuid() != 0:
        with pytest.raises(WorkerSpawnError) as caught:
            native.enter(started.mntns_fd, -1, ops)
        assert caught.value.errno == errno.EPERM


def test_a_jail_without_covers_says_so(jail, ws):
    """Assert that a jail whose cover files are hidden answers ENOTCONN instead of leaving the secret open."""
    agent = jail(options=[b"--size", b"4096", b"--tmpfs", b"/run/vectora-jail"])
    assert agent.enter(["cover", str(ws / ".env")]) == [errno.ENOTCONN]


def test_the_deadline_ends_it(jail, ws):
    """Assert that an entering child that takes too long is killed, and leaves no zombie."""
    agent = jail()
    ops = [["private"]] * 400_000
    with pytest.raises(WorkerSpawnError) as caught:
        native.enter(agent.started.mntns_fd, agent.started.userns_fd, msgpack.packb(ops), 0.01)
    assert caught.value.errno == errno.ETIMEDOUT
    assert agent.enter(["private"]) == [0]
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        for pid in file.read().split():
            with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                assert stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_entering_does_not_make_the_backend_undumpable(jail, ws):
    """Assert that the backend keeps its dumpable state: identities change in another program."""
    before = os.stat("/proc/self/stat").st_uid
    agent = jail()
    agent.enter(["private"])
    assert os.stat("/proc/self/stat").st_uid == before
    assert os.access("/proc/self/mem", os.R_OK)
    import ctypes

    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1  # PR_GET_DUMPABLE


def test_twenty_thousand_covers(jail, ws, capsys):
    """Assert that a workspace full of secrets is covered by one child; its time is printed."""
    many = ws / "many"
    many.mkdir()
    for number in range(20_000):
        (many / str(number)).touch()
    agent = jail()
    ops = [["private"], *(["cover", str(many / str(number))] for number in range(20_000))]
    began = time.perf_counter()
    answers = agent.enter(*ops)
    seconds = time.perf_counter() - began
    assert set(answers) == {0}
    began = time.perf_counter()
    assert set(agent.enter(*ops)) == {0}
    again = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n20,000 covers: {seconds:.3f} s, again (all there already): {again:.3f} s")
