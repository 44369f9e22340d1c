"""A classic BPF interpreter, as seccomp(2) uses it: an independent reading of our programs."""

from __future__ import annotations

import struct
from typing import NamedTuple

ALLOW, KILL, NOTIFY = "allow", "kill", "notify"
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}


class Outcome(NamedTuple):
    """What a filter answers to one call, and how many instructions it took."""

    answer: str | int
    """"allow", "kill", "notify", or an errno number."""
    steps: int


def run(program: bytes, nr: int, args: tuple[int, ...] = (), arch: str = "x86_64") -> Outcome:
    """Run a filter on one call; AssertionError for one that the kernel would refuse (bpf_check_classic)."""
    args = tuple(value & 0xFFFFFFFFFFFFFFFF for value in (*args, 0, 0, 0, 0, 0, 0)[:6])
    data = struct.pack("<IIQ6Q", nr & 0xFFFFFFFF, AUDIT_ARCH[arch], 0x7F0000001000, *args)
    code = list(struct.iter_unpack("<HBBI", program))
    assert 0 < len(code) <= 4096
    accumulator = pc = steps = 0
    while True:
        assert pc < len(code), "ran off the end"
        op, jt, jf, k = code[pc]
        steps += 1
        pc += 1
        if op == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            assert k % 4 == 0
            assert k < 64
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x05:  # BPF_JMP | BPF_JA
            pc += k
        elif op == 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
            pc += jt if accumulator == k else jf
        elif op == 0x25:  # BPF_JMP | BPF_JGT | BPF_K
            pc += jt if accumulator > k else jf
        elif op == 0x35:  # BPF_JMP | BPF_JGE | BPF_K
            pc += jt if accumulator >= k else jf
        elif op == 0x45:  # BPF_JMP | BPF_JSET | BPF_K
            pc += jt if accumulator & k else jf
        elif op == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            accumulator &= k
        elif op == 0x06:  # BPF_RET | BPF_K
            return Outcome(_answer(k), steps)
        else:
            raise AssertionError(f"opcode {op:#x} at {pc - 1}")


def _answer(value: int) -> str | int:
    action = value & 0xFFFF0000
    if action == 0x00050000:
        return value & 0xFFFF
    return {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x7FC00000: NOTIFY}[action]
