"""The common reply of a command is read natively; everything else is left to the general decoder."""

from __future__ import annotations

import msgpack
import pytest

from vectora_jail._shim import ffi, lib

USAGE = {"wall_us": 586, "user_us": 246, "sys_us": 3, "max_rss": 135168, "read": 4, "written": 5, "procs": 1}
REPLY = {
    "id": 7,
    "exit_code": 0,
    "signal": 0,
    "timed_out": False,
    "exec_errno": 0,
    "stage": "",
    "leftovers": 2,
    "usage": USAGE,
}


def read(message) -> list[int] | None:
    """Return the numbers, None when the message is not the common reply."""
    data = message if isinstance(message, bytes) else msgpack.packb(message, use_bin_type=True)
    out = ffi.new("int64_t[12]")
    return list(out) if lib.vj_plain_read(data, len(data), out) else None


def test_common_reply_in_any_order():
    """Assert that the numbers of a common reply are found wherever their keys stand."""
    wanted = [7, 0, 0, 0, 2, 586, 246, 3, 135168, 4, 5, 1]
    assert read(REPLY) == wanted
    backwards = dict(reversed(REPLY.items()))
    backwards["usage"] = dict(reversed(USAGE.items()))
    assert read(backwards) == wanted
    assert read({**REPLY, "exit_code": 255, "signal": 64, "timed_out": True})[1:4] == [255, 64, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_code": 256},
        {"exit_code": -1},
        {"exit_code": 1.0},
        {"exit_code": True},
        {"signal": 65},
        {"timed_out": 1},
        {"exec_errno": 2},
        {"stage": "cwd"},
        {"stage": None},
        {"id": "7"},
        {"id": 2**63},
        {"leftovers": [1]},
        {"usage": None},
        {"usage": {**USAGE, "read": -1}},
        {"usage": {**USAGE, "read": 2**64 - 1}},
        {"usage": {**USAGE, "more": 1}},
        {"usage": {"read": 1}},
        {"violations": []},
        {"stdout": b""},
    ],
)
def test_any_other_reply_is_left_alone(changes):
    """Assert that a reply which differs in one field is left to the decoder that says what is wrong."""
    assert read({**REPLY, **changes}) is None


def test_missing_repeated_cut_and_trailing():
    """Assert that a missing key, a key that comes twice, a cut message and bytes behind it are left alone."""
    for key in REPLY:
        assert read({k: v for k, v in REPLY.items() if k != key}) is None
    data = msgpack.packb(REPLY, use_bin_type=True)
    assert read(b"\x89" + data[1:] + b"\xa2id\x07") is None
    assert read(b"\x88" + data[1:].replace(b"\xa6signal", b"\xa2id", 1)) is None
    assert all(read(data[:n]) is None for n in range(len(data)))
    assert read(data + b"\x00") is None
    assert read(b"") is None
