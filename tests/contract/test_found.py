"""Ways out that a hostile reading has found: each of these once worked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from vectora_jail import Jail, JailManager, Policy, PolicyError, WorkerDiedError, WorkerSpawnError
from vectora_jail.syscalls import numbers
from vectora_jail.treestore import carried

PYTHON = "/usr/bin/python3"


def _private(tmp_path):
    """Return a directory that nobody grants, with a secret in it."""
    place = tmp_path / "private"
    place.mkdir()
    (place / "secret").write_text("SECRET")
    return place


def test_a_source_that_bwrap_found_elsewhere(ws, tmp_path, monkeypatch):
    """Assert that a grant whose source another jail has swapped for a link since the plan stops the start."""
    from vectora_jail.backends.local import LocalBackend

    private = os.fsencode(_private(tmp_path))
    (ws / "vendor").mkdir()
    start = LocalBackend.start

    def followed(self, plan):
        # what bwrap does when it meets the link: the source leads elsewhere, the place is the same
        vendor = os.fsencode(ws / "vendor")
        mounts = tuple(replace(m, source=private) if m.dest == vendor else m for m in plan.mounts)
        return start(self, replace(plan, mounts=mounts))

    monkeypatch.setattr(LocalBackend, "start", followed)
    with pytest.raises(WorkerSpawnError, match="same"), Jail.open(ws, policy=Policy(ro_paths=("vendor",))):
        pass


def test_a_planted_link_widens_no_grant(ws, tmp_path):
    """Assert that a link inside the workspace leads a caller's own grant only to places that the caller names."""
    private = _private(tmp_path)
    with Jail.open(ws, policy=Policy()) as jail:
        jail.exec(["/bin/ln", "-s", str(private), "vendor"], check=True)
    for policy in (Policy(ro_paths=("vendor",)), Policy(rw_paths=(".", "vendor"))):
        with pytest.raises(PolicyError, match="outside_paths"), Jail.open(ws, policy=policy):
            pass
    with Jail.open(ws, policy=Policy(ro_paths=("vendor", str(private)))) as jail:
        assert jail.exec("cat vendor/secret").stdout == b"SECRET"


PLANT = 'printf \'[sandbox]\\n[sandbox.network]\\nmode = "allowlist"\\nallow = ["example.org"]\\n\' > vectora.toml'


@pytest.mark.parametrize("end", ["idle", "killed"])
def test_a_planted_policy_waits_for_no_restart(ws, end):
    """Assert that a policy file that a command made is not read either when the worker is another one."""
    with Jail.open(ws) as jail:
        jail.exec(PLANT, check=True)
        if end == "idle":
            jail._life.stop()
        else:
            os.kill(jail.report.pid, signal.SIGKILL)
            with contextlib.suppress(WorkerDiedError):
                jail.exec("sleep 5")
        assert jail.exec("echo $VECTORA_SANDBOX_NETWORK_DISABLED").stdout == b"1\n"
        assert any(hazard.kind == "policy_planted" for hazard in jail.report.hazards)


@pytest.mark.parametrize("stop", [False, True])
def test_a_policy_planted_where_the_host_removed_one(ws, stop):
    """Assert that a command cannot slip its own policy file in after the host's was removed, until reload()."""
    (ws / "vectora.toml").write_text("[sandbox]\n")
    with JailManager() as jails:
        jail = jails.get(ws)
        waiting = jail.spawn(f"while [ -e vectora.toml ]; do :; done; {PLANT}; echo done")
        (ws / "vectora.toml").unlink()
        assert waiting.read(timeout=10) == b"done\n"
        if stop:
            jail._life.stop()
        assert jail.exec("echo $VECTORA_SANDBOX_NETWORK_DISABLED").stdout == b"1\n"
        jails.reload(ws)
        assert jail.exec("echo $VECTORA_SANDBOX_NETWORK_DISABLED").stdout == b"\n"


def test_a_policy_that_is_a_link(ws):
    """Assert that a command that replaces a policy file that is a link inside the workspace changes no policy."""
    (ws / "conf").mkdir()
    (ws / "conf" / "policy.toml").write_text('[sandbox]\nmask_add = ["a"]\n')
    (ws / "vectora.toml").symlink_to("conf/policy.toml")
    (ws / "a").write_text("SECRET")
    with Jail.open(ws) as jail:
        jail.exec("echo '[sandbox]' > x; mv -f x vectora.toml", check=True)
        assert jail.exec("cat a").stdout == b""


DEEP = """
import os, sys
name = "d" * 250
for _ in range(20):
    if sys.argv[1] == "make":
        os.mkdir(name)
    os.chdir(name)
if sys.argv[1] == "make":
    os.rename(WS + "/conf", "conf")
print(open("conf/.env").read(), end="")
"""


def test_a_secret_moved_deeper_than_a_path_can_name(ws):
    """Assert that what the mask scan cannot reach is hidden from the next jail, and told."""
    (ws / "conf").mkdir()
    (ws / "conf" / ".env").write_text("SECRET")
    program = f"WS = {str(ws)!r}\n{DEEP}"
    with Jail.open(ws, policy=Policy()) as jail:
        assert jail.exec([PYTHON, "-c", program, "make"], check=True).stdout == b""
    carried.__globals__["_carried"].clear()  # as another backend process would start
    with Jail.open(ws, policy=Policy()) as jail:
        assert b"SECRET" not in jail.exec([PYTHON, "-c", program, "read"]).stdout
        assert any(hazard.kind == "mask_scan" for hazard in jail.report.hazards)
        assert jail.exec("mkdir -p a/b && touch a/b/c && ls a/b").stdout == b"c\n"


def test_a_scan_that_stops_hides_the_rest(ws, monkeypatch):
    """Assert that directories that the mask scan had no time for are hidden, not shown without their masks."""
    monkeypatch.setattr("vectora_jail.plan.SCAN_ENTRIES", 40)
    for number in range(30):
        (ws / f"d{number}" / "e").mkdir(parents=True)
        (ws / f"d{number}" / "e" / ".env").write_text("SECRET")
    with Jail.open(ws, policy=Policy()) as jail:
        assert b"SECRET" not in jail.exec("cat d*/e/.env").stdout
        assert any(hazard.kind == "mask_scan" for hazard in jail.report.hazards)


LEASE = """
import fcntl
for command, kind in ((1024, fcntl.F_WRLCK), (1024, fcntl.F_RDLCK), (1 << 32 | 1024, fcntl.F_WRLCK)):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.open(b"vectora.toml", 0)
    print(libc.syscall(NR, ctypes.c_long(fd), ctypes.c_long(command), ctypes.c_long(kind)), ctypes.get_errno())
"""


def test_no_lease_on_a_file_that_the_host_opens(ws):
    """Assert that no command can take a lease, which would make the host's own open of that file wait 45 s."""
    (ws / "vectora.toml").write_text("[sandbox]\n")
    number = numbers(os.uname().machine)["fcntl"]
    with Jail.open(ws) as jail:
        result = jail.exec([PYTHON, "-c", LEASE.replace("NR", str(number))])
        assert result.stdout == b"-1 1\n" * 3
        assert jail.exec("exec 9> lock; flock 9 && echo ok").stdout == b"ok\n"


EVIL = "[core]\n\trepositoryformatversion = 0\n\tfsmonitor = touch pwned\n"


@pytest.mark.parametrize("how", ["link", "directory"])
def test_a_git_directory_behind_a_link(git_ws, how):
    """Assert that a `.git` that is a link cannot be replaced by a repository that runs something on the host."""
    (git_ws / ".git").rename(git_ws / "real")
    (git_ws / ".git").symlink_to("real")
    (git_ws / "evil.txt").write_text(EVIL)
    with Jail.open(git_ws, policy=Policy()) as jail:
        assert jail.exec("echo x >> real/config").exit_code != 0
        jail.exec("cp -r real evil && chmod -R u+w evil && cat evil.txt > evil/config", check=True)
        if how == "link":
            result = jail.exec("ln -s evil new && mv -T new .git", check=True)
        else:
            result = jail.exec("rm .git && mv evil .git", check=True)
        assert any(violation.rule == "git_redirect" for violation in result.violations)
    subprocess.run(["git", "-C", str(git_ws), "status"], capture_output=True, timeout=20, check=False)
    assert not (git_ws / "pwned").exists()


def test_a_planted_worktree_names_no_other_repository(git_ws, tmp_path):
    """Assert that a worktree that a command has made up brings no repository of the host into the next jail."""
    ws = tmp_path / "other"
    ws.mkdir()
    program = (
        f"mkdir -p g/objects g/refs && echo ref: refs/heads/m > g/HEAD && echo {ws}/.git > g/gitdir &&"
        f"echo {git_ws}/.git > g/commondir && echo gitdir: {ws}/g > .git"
    )
    # outside, because the end of a call would move it away: a backend that was killed has no such end
    subprocess.run(["/bin/sh", "-c", program], cwd=ws, check=True, timeout=10)
    with Jail.open(ws, policy=Policy()) as jail:
        assert jail.exec(["/bin/cat", f"{git_ws}/.git/config"]).exit_code != 0


MOVES = {
    "to .git": "mkdir a && mv conf a/.git",
    "into .git": "mkdir -p a/.git/objects && mv conf a/.git/objects/ab",
    "into refs": "mkdir -p a/.git/refs && mv conf a/.git/refs/heads",
    "bare": "mkdir objects refs && touch HEAD",
}


@pytest.mark.parametrize("how", sorted(MOVES))
def test_a_secret_dressed_up_as_git(git_ws, how):
    """Assert that a secret stays masked and `.git` protected for the next jail, whatever looks like a repository."""
    (git_ws / "conf").mkdir()
    (git_ws / "conf" / ".env").write_text("SECRET")
    (git_ws / "conf" / "key.pem~").write_text("SECRET")
    subprocess.run(["git", "-C", str(git_ws), "branch", "x.pem"], check=True, timeout=20)
    with Jail.open(git_ws, policy=Policy()) as jail:
        jail.exec(MOVES[how], check=True)
    carried.__globals__["_carried"].clear()  # as another backend process would start
    with Jail.open(git_ws, policy=Policy()) as jail:
        assert b"SECRET" not in jail.exec("find . -name .env -o -name 'key.pem*' | xargs cat").stdout
        assert jail.exec("echo > .git/hooks/post-checkout").exit_code != 0
        assert jail.exec("git log --oneline x.pem").stdout.count(b"\n") == 1


@pytest.mark.parametrize(
    ("variable", "place", "link"),
    [
        ("PATH", "bin", "bin"),
        ("PATH", "tools/bin", "tools/bin/tool"),
        ("CARGO_HOME", "cargo", "cargo/bin"),
        ("SSL_CERT_FILE", "cert", "cert"),
    ],
)
def test_a_tool_path_inside_the_workspace_leads_nowhere(ws, tmp_path, monkeypatch, variable, place, link):
    """Assert that a variable that names a place in the workspace lets a planted link bring nothing in."""
    secret = _private(tmp_path) / "secret"
    monkeypatch.setenv(
        variable, f"{ws / place}:{os.environ['PATH']}" if variable == "PATH" else str(ws / place)
    )
    target = secret.parent if link.endswith("bin") else secret
    with Jail.open(ws, policy=Policy()) as jail:
        jail.exec(f"mkdir -p $(dirname {link}) && ln -s {target} {link}", check=True)
    with Jail.open(ws, policy=Policy()) as jail:
        assert jail.exec(["/bin/cat", str(secret)]).exit_code != 0


def test_a_read_only_place_stays_at_its_name(ws):
    """Assert that a read-only grant inside a writable one cannot be renamed to where the next jail could write it."""
    (ws / "a" / "b" / "ro").mkdir(parents=True)
    (ws / "a" / "b" / "ro" / "file").write_text("before")
    policy = Policy(rw_paths=(".",), ro_paths=("a/b/ro",))
    with Jail.open(ws, policy=policy) as jail:
        assert jail.exec("mv a c").exit_code != 0
        assert jail.exec("mv a/b a/c").exit_code != 0
        jail.exec("touch a/new a/b/new && mv a/b/new a/b/other", check=True)
    with Jail.open(ws, policy=policy) as jail:
        jail.exec("find . -name file | while read -r f; do echo after > $f; done")
    assert (ws / "a" / "b" / "ro" / "file").read_text() == "before"
