"""Every limit ends what breaks it and says so; the worker answers the next call, a neighbour notices nothing."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from vectora_jail import Jail, Policy
from vectora_jail.cgroupplace import find_place
from vectora_jail.cgroups import PIDS_SLACK
from vectora_jail.policy import Limits

pytestmark = pytest.mark.kernel

MIB = 1 << 20
PYTHON = ["python3", "-S", "-c"]
# Each fork takes a byte out of a pipe, so that a broken limit cannot take the host along.
BOMB = """
import os, sys, time
r, w = os.pipe()
os.write(w, b"x" * int(sys.argv[1]))
os.close(w)
while os.read(r, 1):
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
time.sleep(100)
"""
# One MB a millisecond at most: the rate at which the overshoot is promised.
HOLD = "import os, sys, time\nMB = 1 << 20\nmost = int(sys.argv[1])\ndef pause(n=1): time.sleep(n / 1000)\n"
HOGS = {
    "malloc": HOLD + "a = [(bytearray(b'x' * MB), pause()) for _ in range(most)]\ntime.sleep(100)",
    "memfd": HOLD
    + "fd = os.memfd_create('x')\nfor _ in range(most): os.write(fd, b'x' * MB), pause()\ntime.sleep(100)",
    # the sizes of all private places together are the limit: memory that is held beside them is over it
    "tmpfs": HOLD
    + """
held = [bytearray(b'x' * MB) for _ in range(most // 8)]
for place in ('/tmp', '/var/tmp', '/dev/shm', os.environ['HOME']):
    try:
        fd = os.open(place + '/fill', os.O_WRONLY | os.O_CREAT)
        for _ in range(most): os.write(fd, b'x' * MB), pause()
    except OSError as error:
        print(place, error)
time.sleep(100)
""",
    "many": HOLD
    + """
for _ in range(24):
    if os.fork() == 0:
        a = [(bytearray(b'x' * MB), pause(24)) for _ in range(most // 24)]
        time.sleep(100)
time.sleep(100)
""",
}


# Root can have a group where an ordinary user has none to make one in: then the ids differ, and the mark says why.
GROUP = pytest.param("group", marks=[pytest.mark.root] if os.geteuid() == 0 else [])


@pytest.fixture(params=["sampler", *([GROUP] if find_place().parents else [])])
def mode(request):
    """Without control groups, and with them where this process was given some."""
    return {"group": "auto", "sampler": "off"}[request.param]


@pytest.fixture
def limited(ws):
    """Open jails on one workspace: `limited(mode, memory_mb=…)`."""
    opened = []

    def make(mode="auto", **limits):
        policy = Policy(limits=Limits(**limits))
        opened.append(Jail.open(ws, policy=policy, backend_options={"cgroup": mode}))
        opened[-1].exec("true")
        return opened[-1]

    yield make
    for jail in opened:
        jail.close()


class Neighbour:
    """Another jail that answers all the while; its slowest answer is kept."""

    def __init__(self, workspace: Path):
        self.jail = Jail.open(workspace, policy=Policy())
        self.worst = 0.0
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while not self._stop.wait(0.02):
            began = time.monotonic()
            try:
                assert self.jail.exec(["true"]).exit_code == 0
            except BaseException as error:  # noqa: BLE001 - it is the test's to judge
                self.failed.append(error)
                return
            self.worst = max(self.worst, time.monotonic() - began)

    def __enter__(self):
        self.jail.exec("true")
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join(20)
        self.jail.close()


@pytest.fixture
def neighbour(tmp_path):
    """A jail that must not notice what happens in the others."""
    path = tmp_path / "neighbour"
    path.mkdir()
    with Neighbour(path) as found:
        yield found
    assert not found.failed, found.failed


def limit_of(result, what):
    """Return the one violation of a limit, which must be this one and name its key."""
    found = [violation for violation in result.violations if violation.kind == "limit"]
    assert [violation.what for violation in found] == [what], (
        result.exit_code,
        result.violations,
        result.text,
    )
    key = {"memory": "memory_mb", "disk": "disk_mb", "cpu": "cpu_s"}.get(what, what)
    assert key in found[0].hint
    assert found[0].rule == f"limits.{key}"
    return found[0]


def answers(jail):
    """Assert that the jail takes the next call at once, and that nothing of the last one is left."""
    began = time.monotonic()
    assert jail.exec(["true"]).exit_code == 0
    took = time.monotonic() - began
    assert took < 1.0
    while int(left := jail.exec("ls /proc | grep -c '^[0-9]'").stdout) > 5:
        assert time.monotonic() - began < 5.0, left
        time.sleep(0.02)
    return took


def say(record_property, **numbers):
    """Print numbers and keep them in the report."""
    print(" ".join(f"{name}={value}" for name, value in numbers.items()))
    for name, value in numbers.items():
        record_property(name, value)


@pytest.mark.parametrize("hog", list(HOGS))
def test_memory(limited, mode, hog, neighbour, record_property):
    """Assert that memory ends the call that takes it, however it is held, not far beyond the limit."""
    limit = 160
    jail = limited(mode, memory_mb=limit, pids=64, wall_s=15)
    pid = jail.report.pid
    began = time.monotonic()
    result = jail.exec([*PYTHON, HOGS[hog], "480"])
    took = time.monotonic() - began
    violation = limit_of(result, "memory")
    assert not result.timed_out
    over = violation.observed / MIB - limit
    next_call = answers(jail)
    say(
        record_property,
        hog=hog,
        mode=mode,
        seconds=round(took, 2),
        over_mb=round(over),
        next_ms=round(next_call * 1e3, 1),
        neighbour_ms=round(neighbour.worst * 1e3),
    )
    assert violation.limit == limit * MIB
    assert over <= (256 if hog == "many" else 128)  # two dozen compete with the worker for the processors
    assert jail.report.pid == pid, "it was the worker that ended"


def test_fork_bomb(limited, mode, neighbour, record_property):
    """Assert that processes that multiply end with their call, and that the next call is answered at once."""
    jail = limited(mode, pids=48, memory_mb=1024, wall_s=15)
    pid = jail.report.pid
    began = time.monotonic()
    result = jail.exec([*PYTHON, BOMB, "900"])
    took = time.monotonic() - began
    violation = limit_of(result, "pids")
    assert not result.timed_out
    next_call = answers(jail)
    say(
        record_property,
        mode=mode,
        seconds=round(took, 2),
        observed=violation.observed,
        peak=result.usage.processes,
        next_ms=round(next_call * 1e3, 1),
        neighbour_ms=round(neighbour.worst * 1e3),
    )
    assert violation.limit == 48
    assert jail.report.pid == pid


def test_threads_count(limited, mode):
    """Assert that threads are tasks: a call of one process and many threads ends as well."""
    jail = limited(mode, pids=30, wall_s=15)
    script = (
        "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(100,)).start()"
    )
    result = jail.exec([*PYTHON, script])
    assert limit_of(result, "pids").observed > 30
    answers(jail)


def test_processes_cannot_pass_the_kernels_limit(limited, identity, mode):
    """Assert that behind the sampler the kernel stops a burst of processes, where it can."""
    jail = limited(mode, pids=20, wall_s=15)
    # stopped at once, so that the sampler sees them late: what was born is counted by the parent
    script = "i=0; while [ $i -lt 300 ]; do sleep 50 & i=$((i+1)); done 2>/dev/null; wait"
    result = jail.exec(["bash", "-c", script])
    limit_of(result, "pids")
    if identity == "user" or mode == "auto":  # the kernel exempts uid 0 from RLIMIT_NPROC
        assert result.usage.processes <= 20 + PIDS_SLACK + 2, result


@pytest.mark.parametrize("how", ["one_file", "many_files", "python"])
def test_disk(limited, mode, how, ws, record_property):
    """Assert that writing ends at the limit: one file by its size, many by their sum."""
    jail = limited(mode, disk_mb=48, wall_s=15)
    script = {
        "one_file": "exec dd if=/dev/zero of=big bs=1M count=400",
        "many_files": "i=0; while [ $i -lt 100 ]; do dd if=/dev/zero of=f$i bs=1M count=4 conv=fsync; i=$((i+1)); done",
        "python": "exec python3 -S -c \"f = open('p', 'wb')\nfor _ in range(400): f.write(b'x' * (1 << 20))\"",
    }[how]
    result = jail.exec(script)
    written = sum(path.stat().st_size for path in ws.iterdir())
    say(record_property, how=how, mode=mode, written_mb=written // MIB, exit_code=result.exit_code)
    assert result.exit_code not in (0, 124)
    assert written <= (48 + 128) * MIB
    if how == "python" and not result.violations:
        assert b"File too large" in result.stderr  # it ignores the signal and gets the errno
    else:
        assert limit_of(result, "disk").limit == 48 * MIB
    answers(jail)


@pytest.mark.parametrize("setsid", ["", "setsid "])
def test_processor_time(limited, mode, setsid, record_property):
    """Assert that spinners end by the call's processor time, in sessions of their own too."""
    jail = limited(mode, cpu_s=1, wall_s=15)
    spin = f"{setsid}sh -c 'while :; do :; done' &"
    began = time.monotonic()
    result = jail.exec(f"{spin} {spin} wait")
    violation = limit_of(result, "cpu")
    say(
        record_property,
        mode=mode,
        setsid=bool(setsid),
        seconds=round(time.monotonic() - began, 2),
        observed_ms=violation.observed,
    )
    assert violation.observed < 2500
    answers(jail)


def test_wall_time(limited):
    """Assert that a call ends at `wall_s`, and says so as a timeout."""
    jail = limited(wall_s=1)
    began = time.monotonic()
    result = jail.exec("setsid sleep 100 & sleep 100")
    assert (result.timed_out, result.exit_code) == (True, 124)
    assert 0.9 < time.monotonic() - began < 4
    answers(jail)


def test_descriptors(limited):
    """Assert that a command gets EMFILE at its own limit, and the worker and its other calls go on."""
    jail = limited()
    script = (
        "import os\nn = 0\ntry:\n  while n < 200000: os.open('/dev/null', 0); n += 1\n"
        "except OSError as error: print(error.errno, n)\n"
    )
    errno, count = jail.exec([*PYTHON, script]).stdout.split()
    assert (int(errno), int(count) < 66_000) == (24, True)
    answers(jail)


def test_output_flood(limited, neighbour, record_property):
    """Assert that a flood of output costs the backend no more than its cap, and ends with the call."""
    jail = limited(wall_s=2)
    result = jail.exec("yes & yes >&2", max_output=100_000)
    assert result.timed_out
    assert len(result.stdout) <= 100_000
    assert len(result.stderr) <= 100_000
    say(
        record_property,
        dropped_mb=(result.dropped_stdout + result.dropped_stderr) // MIB,
        neighbour_ms=round(neighbour.worst * 1e3),
    )
    assert result.dropped_stdout > 0
    answers(jail)


def test_calls_beside_it_live(limited, mode):
    """Assert that the call that breaks a limit ends and a modest one in the same jail does not."""
    jail = limited(mode, memory_mb=160, pids=48, wall_s=15)
    results = []
    modest = threading.Thread(target=lambda: results.append(jail.exec("sleep 3; echo done")))
    modest.start()
    limit_of(jail.exec([*PYTHON, HOGS["malloc"], "400"]), "memory")
    limit_of(jail.exec([*PYTHON, BOMB, "400"]), "pids")
    modest.join(15)
    assert [result.stdout for result in results] == [b"done\n"]


@pytest.mark.parametrize(
    ("tool", "command", "expected"),
    [
        ("python3", "python3 -c 'print(6 * 7)'", "42"),
        ("node", "node -e 'console.log(6 * 7)'", "42"),
        (
            "java",
            "printf 'class A { public static void main(String[] a) { System.out.println(6 * 7); } }' > A.java"
            " && java A.java",
            "42",
        ),
        (
            "go",
            "printf 'package main\\nfunc main() { println(6 * 7) }' > a.go && go run a.go 2>&1",
            "42",
        ),
    ],
)
def test_runtimes_work_within_512_mb(limited, tool, command, expected, record_property):
    """Assert that the runtimes start and compile with 512 MB, 128 tasks and no limit on address space."""
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} on this host")
    jail = limited(memory_mb=512, pids=128, wall_s=50)
    if jail.exec(["sh", "-c", f"command -v {tool}"]).exit_code:
        pytest.skip(f"{tool} is not visible inside")
    result = jail.exec(command)
    say(record_property, tool=tool, seconds=round(result.duration, 2), max_rss_mb=result.max_rss // MIB)
    assert (result.exit_code, result.stdout_text.strip()) == (0, expected), result
    assert not result.violations


def test_cpus(limited, mode):
    """Assert that `nproc` tells the number of processors of the policy."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor only")
    jail = limited(mode, cpus=1)
    assert jail.exec("nproc").stdout == b"1\n"
    layer = next(layer for layer in jail.report.layers if layer.name == "limit:cpus")
    assert layer.state == (
        "on" if "control group" in layer.detail and "no control" not in layer.detail else "partial"
    )


@pytest.mark.root
def test_groups_are_made_and_removed(limited, ws):
    """Assert that a jail lives in groups of its own while it runs, and that they are gone after it."""
    parents = dict(find_place().parents)
    if "pids" not in parents:
        pytest.skip(f"no pids group can be made: {find_place().reason}")
    jail = limited(pids=40)
    mine = [
        name for name in os.listdir(parents["pids"]) if name.startswith(b"vectora-jail-%d-" % os.getpid())
    ]
    lines = Path(f"/proc/{jail.report.pid}/cgroup").read_bytes()
    assert [name for name in mine if name in lines]
    layer = next(layer for layer in jail.report.layers if layer.name == "limit:pids")
    assert "control group v" in layer.detail
    jail.close()
    left = os.listdir(parents["pids"])
    assert not [name for name in mine if name in left]


@pytest.mark.root
def test_groups_of_dead_backends_are_swept(tmp_path):
    """Assert that an empty group of a backend that has ended is removed, and a living one's stays."""
    from vectora_jail.cgroups import sweep

    parents = dict(find_place().parents)
    if "pids" not in parents:
        pytest.skip(f"no pids group can be made: {find_place().reason}")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    dead = os.path.join(parents["pids"], b"vectora-jail-%d-999999" % child)
    alive = os.path.join(parents["pids"], b"vectora-jail-%d-999999" % os.getpid())
    os.mkdir(dead)
    os.mkdir(alive)
    try:
        assert sweep(parents["pids"]) >= 1
        assert not os.path.exists(dead)
        assert os.path.exists(alive)
    finally:
        os.rmdir(alive)
