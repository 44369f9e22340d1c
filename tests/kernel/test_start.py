"""The start of a jail: what the child gets, what is left after every kind of failure, who may die when."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from vectora_jail.errors import WorkerSpawnError

native = pytest.importorskip("vectora_jail._native", reason="the shim is not built")
pytestmark = pytest.mark.kernel
needs_root = pytest.mark.root


def descriptors():
    return sorted(int(n) for n in os.listdir("/proc/self/fd"))


def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            found += file.read().split()
    return found


def dead(pidfd, seconds=5.0):
    return bool(select.select([pidfd], [], [], seconds)[0])


def status_of(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


@pytest.fixture
def clean():
    """Assert that the test leaves neither a descriptor nor a child, dead or alive."""
    native.register_launcher()
    os.close(native.launcher_image())  # the sealed images are kept for the life of the process
    os.close(native.worker_image())
    before, alive = descriptors(), children()
    yield
    assert descriptors() == before
    assert children() == alive


def script(tmp_path, text):
    path = tmp_path / "builder"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return bytes(path)


def test_what_is_returned_is_the_jail(jail):
    """Assert that pids, pidfds and namespaces belong to bwrap and to its child."""
    agent = jail()
    started = agent.started
    assert int(status_of(started.pid)["PPid"]) == started.monitor_pid
    assert int(status_of(started.monitor_pid)["PPid"]) == os.getpid()
    assert status_of(started.pid)["NSpid"].split()[-1] == "1"
    own = os.stat("/proc/self/ns/mnt")
    assert os.fstat(started.mntns_fd).st_ino == os.stat(f"/proc/{started.pid}/ns/mnt").st_ino != own.st_ino
    assert started.userns_fd >= 0
    assert os.fstat(started.userns_fd).st_ino != os.stat("/proc/self/ns/user").st_ino
    for fd in (started.monitor_fd, started.pidfd, started.mntns_fd, started.userns_fd):
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_every_mount_is_made_when_start_returns(jail, tmp_path):
    """Assert that the worker's program runs at once: bwrap tells its pid long before it mounts."""
    names = [b"/scratch/d%d" % i for i in range(60)]
    options = [x for name in names for x in (b"--ro-bind", b"/usr/bin", name)]
    started = jail(options=options).started
    with open(f"/proc/{started.pid}/mountinfo", encoding="ascii") as file:
        assert file.read().count(" /scratch/d") == 60
    assert status_of(started.pid)["Name"].startswith("python")


def test_only_the_promised_descriptors_cross(jail):
    """Assert that the worker sees 0 to 3 and nothing that the backend has open, inheritable or not."""
    leaks = [os.open("/etc/passwd", os.O_RDONLY) for _ in range(20)]
    try:
        os.set_inheritable(leaks[3], True)
        os.set_inheritable(leaks[19], True)
        agent = jail()
        seen = agent.run("""
out = {}
for n in os.listdir("/proc/self/fd"):
    try:
        out[int(n)] = os.readlink("/proc/self/fd/" + n)
    except OSError:
        pass
""")
        assert sorted(seen) == [0, 1, 2, 3]
        assert seen[0] == seen[1] == "/dev/null"
        assert seen[2].startswith("pipe:")
        assert seen[3].startswith("socket:")
    finally:
        for fd in leaks:
            os.close(fd)


def test_nothing_of_the_backends_state_crosses(jail, tmp_path):
    """Assert that signals, mask, environment, umask, directory and process group are not inherited."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    os.environ["VJ_TEST_SECRET"] = "1"
    old_umask = os.umask(0)
    try:
        agent = jail()
        monitor = status_of(agent.started.monitor_pid)
        inside = agent.run("out = (dict(os.environ), os.umask(0), os.getcwd())")
    finally:
        os.umask(old_umask)
        del os.environ["VJ_TEST_SECRET"]
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGUSR1, before)
    assert "VJ_TEST_SECRET" not in inside[0]
    assert inside[1:] == (0o22, "/")
    ignored_by_python = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    worker = status_of(agent.started.pid)
    assert int(worker["SigIgn"], 16) & ~ignored_by_python == 0
    assert int(worker["SigBlk"], 16) == 0
    assert int(monitor["SigIgn"], 16) == 0
    with open(f"/proc/{agent.started.monitor_pid}/environ", "rb") as file:
        assert file.read() == b""
    assert os.getpgid(agent.started.monitor_pid) == agent.started.monitor_pid


def test_reap_tells_how_it_ended_and_leaves_nothing(jail, clean):
    """Assert that a killed jail is gone, monitor and worker, with bwrap's report of signal 9."""
    agent = jail()
    pid = agent.started.pid
    status = agent.close()
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGKILL
    assert not os.path.exists(f"/proc/{pid}")


def test_what_bwrap_says_becomes_the_error(jail, clean):
    """Assert that a missing source is named, with the code and the wall that it concerns."""
    with pytest.raises(WorkerSpawnError, match="/does/not/exist") as caught:
        jail(options=[b"--ro-bind", b"/does/not/exist", b"/x"])
    assert (caught.value.code, caught.value.layer) == ("mount_source", "mounts")


def test_an_unknown_option_is_an_error(jail, clean):
    """Assert that bwrap's refusal before it starts anything is reported with its words."""
    with pytest.raises(WorkerSpawnError, match="Unknown option --no-such-thing") as caught:
        jail(options=[b"--no-such-thing"])
    assert caught.value.code == "bwrap"


def test_a_worker_that_cannot_be_executed_is_named(jail, clean):
    """Assert that an exec that fails after all mounts were made is told apart from the mounts."""
    with pytest.raises(WorkerSpawnError, match="execvp") as caught:
        jail(options=[b"--tmpfs", b"/usr"])
    assert (caught.value.code, caught.value.layer) == ("worker_exec", "worker")


def test_a_missing_bwrap_is_an_error(jail, clean, tmp_path):
    """Assert that exec's own errno comes back and names the remedy."""
    with pytest.raises(WorkerSpawnError) as caught:
        jail(bwrap=bytes(tmp_path / "nothing"))
    assert (caught.value.code, caught.value.stage, caught.value.errno) == ("bwrap_missing", "exec", 2)


def test_a_hanging_builder_is_killed_with_its_children(jail, clean, tmp_path):
    """Assert that a bwrap that never tells a pid is given up at the deadline, and nobody survives it."""
    builder = script(tmp_path, f"sleep 1000 &\necho $! > {tmp_path}/child\nwait")
    began = time.monotonic()
    with pytest.raises(WorkerSpawnError) as caught:
        jail(bwrap=builder, deadline_s=0.4)
    assert (caught.value.code, caught.value.stage) == ("timeout", "pid from bwrap")
    assert time.monotonic() - began < 4
    child = int((tmp_path / "child").read_text())
    while time.monotonic() - began < 8 and not ended(child):
        time.sleep(0.01)  # killed, and on a busy machine not yet gone
    assert ended(child)


def ended(pid):
    try:
        return status_of(pid)["State"].startswith("Z")
    except OSError:
        return True


def test_a_bwrap_that_stops_between_pid_and_worker_is_killed(jail, clean):
    """Assert that a set-up that blocks (here on a pipe nobody writes) ends at the deadline."""
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(WorkerSpawnError) as caught:
            jail(options=[b"--ro-bind-data", b"11", b"/scratch/x"], extra_fds=[read_end], deadline_s=0.5)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert (caught.value.code, caught.value.stage) == ("timeout", "bwrap's set-up")


@pytest.mark.parametrize("pid", ["1", "$$", "$PPID", "999999"])
def test_a_pid_that_is_not_its_child_is_refused(jail, clean, tmp_path, pid):
    """Assert that the pid of another process is never taken for the worker."""
    builder = script(tmp_path, f"printf '{{\"child-pid\": %s\\n}}\\n' {pid} >&5\nsleep 30")
    with pytest.raises(WorkerSpawnError) as caught:
        jail(bwrap=builder, deadline_s=3)
    assert caught.value.stage == "identity of the worker"


def test_a_child_in_our_own_namespaces_is_refused(jail, clean, tmp_path):
    """Assert that a builder that builds nothing is not mistaken for a jail."""
    builder = script(tmp_path, "sleep 30 &\nprintf '{\"child-pid\": %s\\n}\\n' $! >&5\nwait")
    with pytest.raises(WorkerSpawnError) as caught:
        jail(bwrap=builder, deadline_s=3)
    assert caught.value.stage == "identity of the worker"


def test_nonsense_instead_of_a_pid_is_refused(jail, clean, tmp_path):
    """Assert that an endless answer on the info descriptor fills a fixed buffer and nothing else."""
    builder = script(tmp_path, "yes child-pid >&5\nsleep 30")
    with pytest.raises(WorkerSpawnError) as caught:
        jail(bwrap=builder, deadline_s=3)
    assert caught.value.stage == "pid from bwrap"


def test_endless_words_are_cut(jail, clean, tmp_path):
    """Assert that megabytes on stderr neither block the builder nor grow the message."""
    builder = script(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x >&2\nexit 3")
    with pytest.raises(WorkerSpawnError) as caught:
        jail(bwrap=builder)
    assert 8000 < len(str(caught.value)) < 9000


def test_no_descriptors_left_is_an_error(jail, clean, tmp_path):
    """Assert that EMFILE at any step of the start leaks nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    codes = set()
    highest = descriptors()[-1]
    try:
        for spare in range(1, 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, hard))
            try:
                jail().close()
            except OSError as error:
                codes.add(error.errno)
            except WorkerSpawnError as error:
                codes.add(error.errno)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert codes <= {0, 24}


def test_a_jail_outlives_the_thread_that_asked_for_it(jail):
    """Assert that the parent-death signal is bound to a thread that never ends."""
    agents = []
    thread = threading.Thread(target=lambda: agents.append(jail()))
    thread.start()
    thread.join()
    assert not dead(agents[0].started.pidfd, 0.3)
    assert agents[0].run("out = 7") == 7


CHILD_PROGRAM = """
import os, sys, time
sys.path[:0] = {path!r}
import importlib.util
spec = importlib.util.spec_from_file_location("kernel_conftest", {conftest!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import pathlib
agent = module.Agent(pathlib.Path({workspace!r}))
print(agent.started.pid, agent.started.monitor_pid, flush=True)
time.sleep(60)
"""


def test_a_jail_dies_with_the_backend(tmp_path):
    """Assert that SIGKILL to the backend ends monitor and worker."""
    (tmp_path / "ws").mkdir()
    conftest = os.path.join(os.path.dirname(__file__), "conftest.py")
    code = CHILD_PROGRAM.format(path=sys.path, conftest=conftest, workspace=str(tmp_path / "ws"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as backend:
        pids = [int(n) for n in backend.stdout.readline().split()]
        fds = [os.pidfd_open(pid) for pid in pids]
        backend.kill()
    try:
        assert len(fds) == 2
        assert all(dead(fd) for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_starts_its_own(jail):
    """Assert that os.fork() leaves a child that can start jails: the starter thread is made anew."""
    jail()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"failed"
        try:
            agent = jail()
            answer = b"%d" % agent.run("out = 21 + 21")
            agent.close()
        finally:
            os.write(write_end, answer)
            os._exit(0)
    os.close(write_end)
    assert select.select([read_end], [], [], 20)[0]
    assert os.read(read_end, 100) == b"42"
    os.close(read_end)
    os.waitpid(pid, 0)


def test_many_threads_start_at_once(jail, clean):
    """Assert that concurrent starts share the starter thread without mixing their jails."""
    agents = []
    errors = []

    def one():
        try:
            agents.append(jail())
        except WorkerSpawnError as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({agent.started.pid for agent in agents}) == 8
    for number, agent in enumerate(agents):
        assert agent.run(f"out = {number}") == number
        agent.close()


def test_a_closed_worker_socket_is_seen(jail):
    """Assert that the socket has no second owner: the worker's end is end-of-file here."""
    agent = jail()
    native.reap(agent.started)
    assert agent.socket.recv(10) == b""


def test_the_worker_alone_without_bwrap(clean):
    """Assert that the landlock-only start executes the sealed image itself and ties its life to ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    started = native.start(None, [], [], theirs.fileno())
    theirs.close()
    assert started.pid == started.monitor_pid
    assert (started.mntns_fd, started.userns_fd) == (-1, -1)
    assert status_of(started.pid)["State"][0] in "SR"
    ours.close()
    assert dead(started.pidfd)  # end-of-file on its only lane
    native.reap(started)
    started.close()


# ---- a workspace of another user (root) ----


@pytest.fixture
def foreign(tmp_path):
    """Return a workspace of uid 12345 below a directory that only root can pass."""
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o700)
    workspace = parent / "ws"
    workspace.mkdir(mode=0o700)
    (workspace / "file").write_text("theirs")
    os.chown(workspace / "file", 12345, 12345)
    os.chown(workspace, 12345, 12345)
    return workspace


@needs_root
@pytest.mark.root
def test_the_owners_identity_is_taken(jail, foreign):
    """Assert that the jail runs as the workspace's owner, without groups, and works below a closed parent."""
    agent = jail(foreign, stage=native.StagePlan(12345, 12345))
    out = agent.run(f"""
open({str(foreign)!r} + "/new", "w").write("x")
out = (os.getuid(), os.getgid(), os.getgroups(), open({str(foreign)!r} + "/file").read())
""")
    assert out == (12345, 12345, [], "theirs")
    info = (foreign / "new").stat()
    assert (info.st_uid, info.st_gid) == (12345, 12345)
    assert status_of(agent.started.monitor_pid)["Uid"].split() == ["12345"] * 4
    assert status_of(agent.started.monitor_pid)["Groups"].strip() == ""


@needs_root
@pytest.mark.root
def test_a_staged_jail_can_be_entered(jail, foreign):
    """Assert that root makes mounts inside the jail of another user."""
    agent = jail(foreign, stage=native.StagePlan(12345, 12345))
    assert agent.enter(["private"], ["cover", str(foreign / "file")], ["pin", str(foreign)]) == [0, 0, 0]
    assert agent.run(f"out = open({str(foreign)!r} + '/file').read()") == ""


@needs_root
@pytest.mark.root
def test_staging_does_not_touch_the_host(jail, foreign):
    """Assert that /tmp of the host and our mount namespace stay as they are."""
    with open("/proc/self/mountinfo", encoding="ascii") as file:
        before = file.read()
    jail(foreign, stage=native.StagePlan(12345, 12345))
    with open("/proc/self/mountinfo", encoding="ascii") as file:
        assert file.read() == before


@needs_root
@pytest.mark.root
def test_a_swapped_source_is_refused(jail, foreign, clean):
    """Assert that a workspace replaced by a link after the plan was made does not become the grant."""
    real = foreign.rename(foreign.with_name("moved"))
    foreign.symlink_to("/root")
    with pytest.raises(WorkerSpawnError, match="without following symlinks") as caught:
        jail(foreign, stage=native.StagePlan(12345, 12345))
    assert caught.value.errno == 40
    assert real.exists()


@needs_root
@pytest.mark.root
def test_a_staged_jail_dies_with_its_monitor(jail, foreign):
    """Assert that the parent-death signal is armed again after the change of identity has cleared it."""
    (agent,) = [jail(foreign, stage=native.StagePlan(12345, 12345))]
    os.kill(agent.started.monitor_pid, signal.SIGKILL)
    assert dead(agent.started.pidfd)
