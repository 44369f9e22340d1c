"""What a failed start is called: the numbers of the C header, the words of bwrap, the remedy."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from vectora_jail._spawnerrors import STAGES, enter_error, start_error

HEADER = Path(__file__).resolve().parent.parent.parent / "csrc" / "core" / "start.h"


@pytest.mark.skipif(not HEADER.exists(), reason="needs the source tree")
def test_every_stage_of_the_shim_has_a_name():
    """Assert that the table and `enum vj_stage` number the same steps."""
    text = HEADER.read_text(encoding="utf-8")
    body = re.search(r"enum vj_stage \{(.*?)\};", text, re.DOTALL).group(1)
    names = re.findall(r"VJ_STAGE_([A-Z]+)", body)
    assert sorted(STAGES) == list(range(len(names)))
    assert names[5:8] == ["EXEC", "STAGING", "BWRAP"]
    assert (STAGES[5][0], STAGES[7][0]) == ("exec", "bwrap")


@pytest.mark.parametrize(
    ("said", "code", "layer"),
    [
        ("bwrap: Can't find source path /x: No such file or directory", "mount_source", "mounts"),
        ("bwrap: Creating new namespace failed: Operation not permitted", "userns", "userns"),
        ("bwrap: No permissions to create new namespace, likely because …", "userns", "userns"),
        ("bwrap: setting up uid map: Permission denied", "userns", "userns"),
        (
            "bwrap: cannot open /proc/sys/user/max_user_namespaces: Read-only file system",
            "disable_userns",
            "userns",
        ),
        ("bwrap: execvp /run/vectora-jail/worker: Exec format error", "worker_exec", "worker"),
        ("bwrap: Exceeded maximum number of arguments 9000", "too_many_mounts", "mounts"),
        ("bwrap: something new", "bwrap", "mounts"),
        ("", "bwrap", "mounts"),
    ],
)
def test_what_bwrap_says_has_a_meaning(said, code, layer):
    """Assert that bwrap's messages give a stable code, the wall, and its own words in the text."""
    error = start_error(7, 0, said)
    assert (error.code, error.layer, error.stage) == (code, layer, "bwrap")
    assert said in str(error)
    assert bool(error.hint) == (code != "bwrap")


def test_time_and_absence_have_codes():
    """Assert that a deadline and a missing bwrap are told apart from other failures."""
    assert start_error(8, errno.ETIMEDOUT, "").code == "timeout"
    assert start_error(5, errno.ENOENT, "").code == "bwrap_missing"
    assert start_error(3, errno.EAGAIN, "").code == "spawn"
    assert "stage 99" in str(start_error(99, 0, ""))


def test_entering_has_hints():
    """Assert that the usual reasons name what to do."""
    assert "5.12" in enter_error(errno.ENOSYS).hint
    assert enter_error(errno.EIO).hint == ""
    assert enter_error(errno.EIO).code == "enter"
