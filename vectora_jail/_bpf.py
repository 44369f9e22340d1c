"""A small assembler for classic BPF, and its reverse; knows nothing of system calls.

Sources: Documentation/networking/filter.rst, `struct sock_filter` in linux/filter.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AND", "BPF_MAXINSNS", "JA", "JEQ", "JGE", "JSET", "LD", "RET", "Assembler", "disassemble"]

LD, RET, JA, JEQ, JGE, JSET, AND = 0x20, 0x06, 0x05, 0x15, 0x35, 0x45, 0x54
BPF_MAXINSNS = 4096
"""The longest program that the kernel takes."""


class Assembler:
    """Writes a program from end to beginning: every jump goes forward, so that its target is always known.

    A label is the distance of an instruction from the end of the program.
    """

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int]] = []  # last instruction first
        self._returns: dict[int, int] = {}

    def emit(self, code: int, k: int, jt: int = 0, jf: int = 0) -> int:
        """Put one instruction in front of all others and return its label."""
        self._code.append((code, jt, jf, k))
        return len(self._code) - 1

    def ret(self, value: int) -> int:
        """Return the label of an instruction that ends the program with `value`."""
        label = self._returns.get(value)
        if label is None:
            label = self._returns[value] = self.emit(RET, value)
        return label

    def jump(self, target: int) -> int:
        """Make the next instruction in line continue at `target`; return its label."""
        if target == len(self._code) - 1:
            return target
        code, _, _, k = self._code[target]
        return self.emit(RET, k) if code == RET else self.emit(JA, len(self._code) - target - 1)

    def then(self, label: int, code: int, k: int) -> int:
        """Emit an instruction that goes on at `label`."""
        self.jump(label)
        return self.emit(code, k)

    def past_load(self, label: int, offset: int) -> int:
        """Return `label`, or what follows it when it only loads what the accumulator holds already."""
        return label - 1 if self._code[label] == (LD, 0, 0, offset) else label

    def branch(self, code: int, k: int, true: int, false: int) -> int:
        """Emit a comparison that goes to one of two labels, by way of a long jump where 255 do not reach."""
        if true == false:
            return true
        for _ in range(2):
            if len(self._code) - true - 1 > 255:
                true = self.jump(true)
            if len(self._code) - false - 1 > 255:
                false = self.jump(false)
        here = len(self._code)
        return self.emit(code, k, here - true - 1, here - false - 1)

    def program(self) -> bytes:
        """Return the bytes, first instruction first."""
        return b"".join(
            code.to_bytes(2, "little") + bytes((jt, jf)) + k.to_bytes(4, "little")
            for code, jt, jf, k in reversed(self._code)
        )


def disassemble(program: bytes) -> str:
    """Return the program as text, one instruction a line, for people who want to read what is enforced."""
    forms: Mapping[int, str] = {
        LD: "ld [{k}]", RET: "ret {k:#x}", JA: "ja {ja}", AND: "and {k:#x}",
        JEQ: "jeq {k:#x} ? {t} : {f}", JGE: "jge {k} ? {t} : {f}", JSET: "jset {k:#x} ? {t} : {f}",
    }  # fmt: skip
    lines = []
    for at in range(len(program) // 8):
        code = int.from_bytes(program[at * 8 : at * 8 + 2], "little")
        jt, jf = program[at * 8 + 2 : at * 8 + 4]
        k = int.from_bytes(program[at * 8 + 4 : at * 8 + 8], "little")
        lines.append(f"{at:4} " + forms[code].format(k=k, ja=at + 1 + k, t=at + 1 + jt, f=at + 1 + jf))
    return "\n".join(lines)
