"""Start, death, replacement and end of workers; managers; forks; nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import vectora_jail
from vectora_jail import Jail, JailManager, Policy, WorkerDiedError

pytestmark = pytest.mark.kernel


def wait_for(condition, seconds=5.0):
    """Poll until the condition holds; the bound is generous, the poll is short."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())


def workers_of(pid: int) -> list[int]:
    """Return bwrap monitors that are children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            if int(text.rpartition(") ")[2].split()[1]) == pid and "(bwrap)" in text:
                found.append(int(entry.name))
    return found


def test_death_under_a_call(jail):
    """Assert that a killed worker ends the call in flight within a second, with the cause, and the next call works."""
    jail.exec("true")
    pid = jail.report.pid
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError, match="signal 9") as caught:
        jail.exec("sleep 30")
    assert time.monotonic() - begin < 1.2
    assert caught.value.outcome == "unknown"
    assert jail.exec("echo new").stdout == b"new\n"
    assert jail.report.pid != pid


def test_stopped_worker(jail):
    """Assert that a worker that somebody stops is noticed, ended and replaced."""
    jail.exec("true")
    pid = jail.report.pid
    threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP)).start()
    with pytest.raises(WorkerDiedError, match="stopped"):
        jail.exec("sleep 30")
    assert jail.exec("echo new").stdout == b"new\n"


def test_close_ends_everything(ws):
    """Assert that close leaves no process, and that a closed jail says so."""
    jail = Jail.open(ws, policy=Policy())
    jail.spawn(["sleep", "604"])
    pid = jail.report.pid
    jail.close()
    assert wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
    with pytest.raises(WorkerDiedError, match="closed"):
        jail.exec("true")
    jail.close()


def test_nothing_left_when_the_backend_is_killed(ws):
    """Assert that SIGKILL of the backend ends all its jails within a second or two (BC-27)."""
    code = (
        "import sys, time\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from vectora_jail import Jail, Policy\n"
        f"jails = [Jail.open({str(ws)!r}, policy=Policy()).start() for _ in range(5)]\n"
        "for jail in jails: jail.spawn(['sleep', '605'])\n"
        "print(*(jail.report.pid for jail in jails), flush=True)\n"
        "time.sleep(60)\n"
    )
    backend = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in backend.stdout.readline().split()]
        assert len(pids) == 5
    finally:
        backend.kill()
        backend.wait()
        backend.stdout.close()
    assert wait_for(lambda: not any(_alive(pid) for pid in pids))


def test_backend_killed_at_any_moment(ws):
    """Assert that a backend killed while a jail starts leaves no worker (BC-27)."""
    code = (
        "import sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from vectora_jail import Jail, Policy\n"
        "import vectora_jail.jail, vectora_jail.planning, vectora_jail.backends.local\n"
        f"jail = Jail.open({str(ws)!r}, policy=Policy())\n"
        "print('go', flush=True)\n"
        "jail.exec('sleep 60')\n"
    )
    for n in range(12):
        backend = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        backend.stdout.readline()
        time.sleep(n * 0.012)  # the moment is the subject, not a wait for luck
        children = workers_of(backend.pid)
        backend.kill()
        backend.wait()
        backend.stdout.close()
        assert wait_for(lambda gone=children: not any(_alive(pid) for pid in gone))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_started_from_a_thread_that_ends(ws, open_jail):
    """Assert that a jail outlives the thread that started it."""
    jail = open_jail(ws)
    thread = threading.Thread(target=jail.start)
    thread.start()
    thread.join()
    time.sleep(0.3)  # a parent-death signal that followed the thread would come now
    assert jail.alive
    assert jail.exec("echo ok").stdout == b"ok\n"


def test_fork_of_the_backend(ws, open_jail):
    """Assert that a forked child neither uses nor kills the parent's jail."""
    jail = open_jail(ws)
    jail.exec("true")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            jail.exec("true")
        except WorkerDiedError as exc:
            code = 0 if exc.code in ("forked", "closed") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert jail.exec("echo parent").stdout == b"parent\n"


def test_manager_shares_one_worker(ws):
    """Assert that two first calls at the same moment start one worker, which all callers share."""
    with JailManager() as jails:
        seen = []
        threads = [
            threading.Thread(
                target=lambda: seen.append(
                    jails.get(ws, Policy())
                    .exec("cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/pid")
                    .stdout
                )
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(seen)) == 1
        assert jails.get(ws, Policy()) is jails.get(str(ws), Policy())
        assert jails.stats()["workers"] == 1
        assert jails.stats()["started"] == 1


def test_manager_limits_workers(tmp_path):
    """Assert that beyond max_workers the longest idle worker ends, and its jail starts again when used."""
    places = [tmp_path / f"w{n}" for n in range(4)]
    for place in places:
        place.mkdir()
    with JailManager(max_workers=2) as jails:
        for place in places:
            assert jails.get(place, Policy()).exec("pwd").stdout == os.fsencode(place) + b"\n"
        assert jails.stats()["workers"] == 2
        assert jails.get(places[0], Policy()).exec("echo back").stdout == b"back\n"


def test_manager_reaps_idle_workers(ws):
    """Assert that an idle worker ends after idle_timeout_s and a busy one does not."""
    with JailManager(idle_timeout_s=0.1) as jails:
        jail = jails.get(ws, Policy())
        assert jail.exec("sleep 0.6; echo done").stdout == b"done\n"
        assert wait_for(lambda: jails.close_idle() == 0)
        assert not jail.alive
        assert jail.exec("echo again").stdout == b"again\n"


def test_policy_change_takes_effect_at_the_next_call(ws):
    """Assert that a saved policy file retires the old worker and the next call runs under the new policy."""
    (ws / "a").write_text("SECRET")
    path = ws / "vectora.toml"
    path.write_text("[sandbox]\n")
    with JailManager() as jails:
        jail = jails.get(ws)
        assert jail.exec("cat a").stdout == b"SECRET"
        fresh = ws.parent / "fresh"
        fresh.write_text('[sandbox]\nmask_add = ["a"]\n')
        os.replace(fresh, path)
        assert jail.exec("cat a").stdout == b""
        path.write_text("[sandbox]\nnonsense = 1\n")
        with pytest.raises(vectora_jail.PolicyError, match="nonsense"):
            jail.exec("true")
        path.write_text("[sandbox]\n")
        assert jail.exec("cat a").stdout == b"SECRET"


def test_planted_policy_is_ignored(ws, open_jail):
    """Assert that a policy file that appears while a jail lives is not read, and is reported."""
    jail = Jail.open(ws)
    try:
        jail.exec("echo '[sandbox]' > vectora.toml; echo 'mask = []' >> vectora.toml")
        jail.exec("true")
        assert jail.policy.mask
        assert any(hazard.kind == "policy_planted" for hazard in jail.report.hazards)
    finally:
        jail.close()


def test_repeated_deaths_give_up(ws, open_jail):
    """Assert that a worker that keeps dying is not restarted without end."""
    jail = open_jail(ws)
    codes = []
    for _ in range(8):
        try:
            jail.start()
            os.kill(jail.report.pid, signal.SIGKILL)
            assert wait_for(lambda: not jail.alive)
        except vectora_jail.WorkerSpawnError as exc:
            codes.append(exc.code)
    assert "restart_limit" in codes


def test_no_descriptor_leaks_over_jails(ws):
    """Assert that opening and closing jails, also killed ones, leaves no descriptor or thread behind (BC-63)."""

    def count():
        return len(os.listdir("/proc/self/fd"))

    for _ in range(2):
        with Jail.open(ws, policy=Policy()) as jail:
            jail.exec("true")
    before, threads = count(), threading.active_count()
    for n in range(10):
        with Jail.open(ws, policy=Policy()) as jail:
            jail.exec("true")
            if n % 2:
                os.kill(jail.report.pid, signal.SIGKILL)
    assert count() == before
    assert threading.active_count() == threads


def test_policy_deleted_and_planted(ws):
    """Assert that a policy file that the host deletes and a command makes again is not read until reload()."""
    (ws / "a").write_text("SECRET")
    path = ws / "vectora.toml"
    path.write_text('[sandbox]\nmask_add = ["a"]\n')
    with JailManager() as jails:
        jail = jails.get(ws)
        assert jail.exec("cat a").stdout == b""
        process = jail.spawn(
            "while :; do echo '[sandbox]' > vectora.toml; grep -q mask vectora.toml || "
            "{ [ -s vectora.toml ] && break; }; done 2>/dev/null; echo planted"
        )
        path.unlink()
        assert process.read(timeout=10) == b"planted\n"
        for _ in range(3):
            try:
                assert jail.exec("cat a").stdout == b""
            except vectora_jail.PolicyError as exc:
                assert exc.code == "policy_race"
        path.unlink()
        path.write_text('[sandbox]\nmask_add = ["a"]\n')
        jails.reload(ws)
        assert jail.exec("cat a; echo ok").stdout == b"ok\n"
