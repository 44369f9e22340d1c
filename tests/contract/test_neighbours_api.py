"""The public names, keywords, attributes and messages, as somebody finds them who has read only the documentation."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import socket
import subprocess
import sys

import pytest

import vectora_jail
from vectora_jail import (
    AsyncJail,
    AsyncJailManager,
    Jail,
    JailManager,
    Network,
    Policy,
    PolicyError,
    SandboxDisabled,
    WorkerSpawnError,
    load_policy,
    parse_policy,
    parse_policy_text,
)

pytestmark = pytest.mark.kernel

KEYWORDS = {
    "exec": "command cwd env stdin timeout max_output merge_stderr leftovers check",
    "read_file": "path offset limit",
    "read_text": "path",
    "write_file": "path data mode make_parents if_unchanged",
    "edit_file": "path old new",
    "list_dir": "path",
    "stat": "path",
    "make_dir": "path",
    "remove": "path",
    "rename": "path to",
    "stream": "command",
    "spawn": "command cwd env",
    "open_terminal": "command rows cols cwd env",
    "shell": "",
    "git": "arguments",
    "allow": "rule ttl",
    "expose": "port",
    "close": "",
}


@pytest.mark.parametrize("face", [Jail, AsyncJail])
def test_every_call_takes_its_keywords(face):
    """Assert that both faces have every documented call with its keywords."""
    for name, words in KEYWORDS.items():
        found = set(inspect.signature(getattr(face, name)).parameters)
        assert set(words.split()) <= found, name
    assert {"workspace", "policy", "ceiling"} <= set(inspect.signature(face.open).parameters)
    for name in ("workspace", "inner_root", "policy", "alive", "report"):
        assert isinstance(inspect.getattr_static(face, name), property)


@pytest.mark.parametrize("face", [JailManager, AsyncJailManager])
def test_managers_take_their_keywords(face):
    """Assert that both managers have the documented arguments and calls."""
    found = set(inspect.signature(face).parameters)
    assert {"ceiling", "max_workers", "idle_timeout_s", "backend_options"} <= found
    for name in ("get", "stats", "reload", "close"):
        assert callable(getattr(face, name))


def test_every_exported_name_exists():
    """Assert that every exported name can be imported and every error pickles with its attributes."""
    for name in vectora_jail.__all__:
        assert getattr(vectora_jail, name) is not None
    error = WorkerSpawnError("m", code="c", layer="l", hint="h", stage="s", errno=2)
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == "m (stage s, No such file or directory); hint: h"


def test_results_and_reports_have_their_attributes(jail):
    """Assert that results, chunks, entries and the report carry what the documentation names."""
    result = jail.exec("echo out; echo err >&2")
    names = "exit_code stdout stderr text stdout_text stderr_text timed_out signal truncated duration cpu_time max_rss"
    for name in (*names.split(), "violations", "dropped_stdout", "dropped_stderr", "usage"):
        getattr(result, name)
    for name in ["wall", "user", "system", "max_rss", "read", "written", "processes"]:
        assert getattr(result.usage, name) >= 0
    report = jail.report
    for name in [
        "layers",
        "degraded",
        "masks",
        "hazards",
        "dropped_env",
        "policy_digest",
        "isolation",
        "proof",
        "pid",
    ]:
        getattr(report, name)
    assert {layer.state for layer in report.layers} <= {"on", "partial", "off"}
    assert all(layer.name and isinstance(layer.detail, str) for layer in report.layers)
    assert all(layer.detail for layer in report.degraded)  # with a reason


def test_stat_of_either_kind(jail, ws):
    """Assert that `if_unchanged` takes what stat, write_file and os.stat return, and refuses anything else."""
    written = jail.write_file("f", "1")
    jail.write_file("f", "22", if_unchanged=written)
    for stale in (written, jail.stat("/etc/hostname"), os.stat(ws)):
        with pytest.raises(OSError, match="Stale"):
            jail.write_file("f", "333", if_unchanged=stale)
    jail.write_file("f", "4", if_unchanged=os.stat(ws / "f"))
    jail.write_file("f", "5", if_unchanged=jail.stat("f"))
    with pytest.raises(TypeError, match="if_unchanged is tuple"):
        jail.write_file("f", "6", if_unchanged=(1, 2, 3))
    assert (ws / "f").read_text() == "5"


def test_environment_that_is_none(jail):
    """Assert that an environment given as a list is a TypeError that says what is expected."""
    with pytest.raises(TypeError, match="env is list, not a mapping"):
        jail.exec("true", env=["A=1"])


def test_why_a_workspace_is_disabled(ws):
    """Assert that SandboxDisabled tells the three reasons apart, by code and in words."""
    path = ws / "vectora.toml"
    for text, code, word in (
        (None, "no_vectora_toml", "no vectora.toml"),
        ("[other]\n", "no_sandbox_table", "no .sandbox. table"),
        ("[sandbox]\nenabled = false\n", "sandbox_disabled_in_config", "enabled = false"),
    ):
        if text is not None:
            path.write_text(text)
        with JailManager() as jails, pytest.raises(SandboxDisabled, match=word) as caught:
            jails.get(ws)
        assert (caught.value.code, caught.value.workspace) == (code, str(ws.resolve()))


def test_a_policy_that_is_no_file(ws):
    """Assert that a FIFO or a directory in the policy's place is refused, named once and never opened."""
    path = ws / "vectora.toml"
    for make, word in ((os.mkfifo, "a FIFO"), (os.mkdir, "a directory")):
        make(path)
        with pytest.raises(PolicyError) as caught:
            load_policy(ws)
        assert str(caught.value) == f"{path}: found {word}; expected a regular file"
        assert parse_policy(path).refused
        with pytest.raises(PolicyError):
            Jail.open(ws).exec("true")
        (os.unlink if word == "a FIFO" else os.rmdir)(path)


def test_problems_are_complete():
    """Assert that a problem names key, line, what was found and expected, and a hint."""
    policy = parse_policy_text('[sandbox]\nmasks = ["x"]\nrw_paths = "x"\n')
    assert (policy.enabled, policy.refused) == (True, True)
    first, second = policy.problems
    assert (first.key, first.line, first.hint) == ("masks", 2, 'did you mean "mask"?')
    assert (second.key, second.line, second.expected) == ("rw_paths", 3, "a list of paths")
    assert second.found and second.hint


def _cli(ws, *args):
    return subprocess.run(
        [sys.executable, "-m", "vectora_jail", args[0], "-w", str(ws), *args[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )


def test_probe_of_masked_paths(ws):
    """Assert that an empty cover is no access, whether its name exists or not, and that a question is needed."""
    (ws / ".env").write_text("S=1\n")
    (ws / "a").mkdir()
    (ws / "plain").write_text("x")
    for name in (".env", "a/.env"):
        for what in ("--read", "--write"):
            done = _cli(ws, "probe", what, name)
            assert (done.returncode, "denied — a mask covers it" in done.stdout) == (1, True), done
    assert _cli(ws, "probe", "--read", "plain", "--write", "new").returncode == 0
    asked = _cli(ws, "probe")
    assert (asked.returncode, "--read" in asked.stderr) == (2, True)


def test_run_reports_violations_as_objects(ws):
    """Assert that `run --json` gives every field of a violation and keeps the command's exit code."""
    (ws / "vectora.toml").write_text("[sandbox]\n[sandbox.limits]\nwall_s = 1\n")
    done = _cli(ws, "run", "--json", "--", "sh", "-c", "echo one; sleep 60")
    out = json.loads(done.stdout)
    assert (done.returncode, out["exit_code"], out["stdout"], out["timed_out"]) == (124, 124, "one\n", True)
    assert [(one["kind"], one["what"], one["limit"]) for one in out["violations"]] == [
        ("limit", "wall", 1000)
    ]


def test_read_all_beside_sockets_that_nobody_reaches(ws, open_jail, tmp_path, identity):
    """Assert that host sockets below closed directories neither stop a `read = "all"` jail nor can be reached."""
    closed = tmp_path / "closed"
    closed.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(closed / "s"))
        server.listen()
        server.setblocking(False)
        if identity == "root":
            os.chown(closed, 12345, 12345)
        closed.chmod(0o700)
        jail = open_jail(ws, policy=Policy(read="all"))
        code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        assert jail.exec(["python3", "-c", code, str(closed / "s")]).exit_code == 1
        with pytest.raises(BlockingIOError):
            server.accept()


def test_grants_need_an_allowlist(ws, open_jail):
    """Assert that `allow` on a jail without an allowlist says what to set, and works on an empty one."""
    with pytest.raises(vectora_jail.UnsupportedPolicy, match="allowlist") as caught:
        open_jail(ws).allow("pypi.org:443", ttl=600)
    assert (caught.value.layer, caught.value.code) == ("network", "network_mode")
    open_jail(ws, policy=Policy(network=Network(mode="allowlist"))).allow("pypi.org:443", ttl=600)
