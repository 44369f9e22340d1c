"""The exception tree: one root, codes and hints, the same after a process boundary."""

from __future__ import annotations

import errno
import pickle

import pytest

from vectora_jail import errors
from vectora_jail.errors import (
    EditConflict,
    JailError,
    PolicyError,
    Problem,
    SandboxDisabled,
    WorkerDiedError,
    WorkerSpawnError,
)

# CommandFailed is made of a command and its result, not of a message.
CLASSES = [getattr(errors, name) for name in errors.__all__ if name not in ("Problem", "CommandFailed")]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_the_root_a_code_and_a_hint(kind):
    """Assert that every class derives from JailError and carries a code and a hint."""
    error = kind("it failed", code="why", hint="do this")
    assert isinstance(error, JailError)
    assert (error.code, error.hint, error.message) == ("why", "do this", "it failed")
    assert "it failed" in str(error)
    assert "do this" in str(error)
    assert kind("x").code, "a default code"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_pickles(kind):
    """Assert that an error crosses a process pool with everything it carries."""
    error = kind("it failed", code="why", hint="do this")
    error.extra = 7
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.args, vars(copy)) == (error.args, vars(error))


def test_a_failed_command_pickles_with_its_result():
    """Assert that CommandFailed keeps the command and the result over a process boundary."""
    copy = pickle.loads(pickle.dumps(errors.CommandFailed(["false"], None)))
    assert (copy.command, copy.result, copy.code) == (["false"], None, "command_failed")


def test_wrong_input_is_a_value_error():
    """Assert that PolicyError and EditConflict are ValueErrors and the others are not."""
    assert {kind for kind in CLASSES if issubclass(kind, ValueError)} == {PolicyError, EditConflict}


def test_policy_error_prints_each_problem():
    """Assert that a PolicyError's text has a line a problem: file, line, key, found, expected, hint."""
    problems = (
        Problem("rw_paths", 3, '"x" (a string)', "a list of paths", 'write ["x"]', "vectora.toml"),
        Problem("", 0, "a FIFO", "a regular file", "", "vectora.toml"),
    )
    error = PolicyError(problems=problems)
    assert str(error).splitlines() == [
        'vectora.toml:3: rw_paths: found "x" (a string); expected a list of paths (write ["x"])',
        "vectora.toml: found a FIFO; expected a regular file",
    ]
    assert error.problems == problems


def test_missing_consent_has_its_own_code():
    """Assert that only a policy whose every problem is a missing consent has the code policy_ceiling."""
    consent = Problem("backend", found='"ssh"', ceiling="backends")
    assert PolicyError(problems=[consent]).code == "policy_ceiling"
    assert PolicyError(problems=[consent, Problem("x")]).code == "policy"


def test_a_failed_start_names_stage_and_errno():
    """Assert that WorkerSpawnError says at which stage, with which errno, and what to do."""
    error = WorkerSpawnError(
        "bwrap did not start", code="bwrap_missing", stage="exec", errno=errno.ENOENT, hint="install it"
    )
    assert str(error) == "bwrap did not start (stage exec, No such file or directory); hint: install it"


def test_what_is_known_of_a_lost_call():
    """Assert that a call under a dead worker is `unknown` unless more is known."""
    assert WorkerDiedError("gone").outcome == "unknown"
    assert WorkerDiedError("gone", outcome="not_started").outcome == "not_started"


def test_disabled_says_why():
    """Assert that SandboxDisabled names the workspace and keeps the reason as its code."""
    error = SandboxDisabled(workspace="/srv/ws", code="no_vectora_toml")
    assert error.code == "no_vectora_toml"
    assert "/srv/ws" in str(error)
