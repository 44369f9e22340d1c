"""The C unit tests of the worker's codecs and file calls, and its msgpack against another implementation."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent.parent / "c"
TESTS = ("test_msg", "test_json", "test_files", "test_filetree", "test_storm")
MAKE = shutil.which("make")
pytestmark = [
    pytest.mark.skipif(not MAKE or not sys.platform.startswith("linux"), reason="needs make and Linux"),
    pytest.mark.timeout(180),
]


def compilers() -> list[str]:
    """The C compilers of this host, the sanitizing one first."""
    return [found for found in map(shutil.which, ("clang", "gcc", "cc")) if found]


def sanitizes(compiler: str, directory: Path) -> bool:
    """Whether programs built with both sanitizers run here: the libraries may be missing."""
    source = directory / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [compiler, "-fsanitize=address,undefined", "-o", str(directory / "probe"), str(source)]
    built = subprocess.run(command, capture_output=True, check=False, timeout=60)
    if built.returncode:
        return False
    ran = subprocess.run([str(directory / "probe")], capture_output=True, check=False, timeout=60)
    return ran.returncode == 0


def build(out: Path, compiler: str, *targets: str, sanitize: bool) -> None:
    """Build targets of tests/c into `out`; the compiler's messages become the failure."""
    command = [str(MAKE), "-s", f"OUT={out}", f"CC={compiler}", *(["SANITIZE=1"] if sanitize else [])]
    done = subprocess.run(
        [*command, *(f"{out}/{name}" for name in targets)],
        cwd=HERE, capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the test programs, with sanitizers where this host has them."""
    out = tmp_path_factory.mktemp("c")
    found = compilers()
    if not found:
        pytest.skip("no C compiler")
    chosen = next((cc for cc in found if sanitizes(cc, out)), None)
    build(out, chosen or found[0], *TESTS, "reencode", sanitize=chosen is not None)
    return out


@pytest.mark.parametrize("name", TESTS)
def test_c_units_hold(programs: Path, name: str) -> None:
    """Assert that every check of a C unit test holds, without a report from the sanitizers."""
    done = subprocess.run([programs / name], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


def test_fuzz_targets_accept_their_corpus(tmp_path: Path) -> None:
    """Assert that the fuzz targets build and run their corpus and ten thousand inputs without a finding."""
    clang = shutil.which("clang")
    if not clang:
        pytest.skip("libFuzzer comes with clang")
    probe = tmp_path / "probe.c"
    probe.write_text("int LLVMFuzzerTestOneInput(const char *p, long n) { return 0; }\n")
    linked = subprocess.run(
        [clang, "-fsanitize=fuzzer,address,undefined", "-o", str(tmp_path / "probe"), str(probe)],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    if linked.returncode:
        pytest.skip("no libFuzzer here")
    build(tmp_path, clang, "fuzz_msg", "fuzz_json", sanitize=False)
    for kind in ("msg", "json"):
        found = tmp_path / f"found-{kind}"
        found.mkdir()
        done = subprocess.run(
            [tmp_path / f"fuzz_{kind}", "-runs=10000", "-seed=1", found, HERE / "corpus" / kind],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]


# ---- against another implementation ----

LONG = [b"x" * n for n in (255, 256, 65535, 65536)]
LONG_TEXT = ["x" * n for n in (31, 32, 255, 256, 70000)]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.sampled_from(LONG)
    | st.sampled_from(LONG_TEXT)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=30,
)


class Reencoder:
    """The C program that reads a value and writes it again."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, packed: bytes) -> tuple[int, bytes]:
        """Return the status (0 ok, 1 malformed, 2 too deep or followed by more) and the bytes it wrote."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(struct.pack("=I", len(packed)) + packed)
        self.process.stdin.flush()
        head = self.process.stdout.read(5)
        assert len(head) == 5, f"the program ended: {self.process.wait(5)}"
        status, size = struct.unpack("=BI", head)
        return status, self.process.stdout.read(size)

    def close(self) -> None:
        """End the program and look at its exit status."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        assert self.process.wait(10) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module")
def reencode(programs: Path) -> Iterator[Reencoder]:
    """One running program for all examples."""
    program = Reencoder(programs / "reencode")
    yield program
    program.close()


def depth(value: object) -> int:
    """How many containers lie in each other."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=300, deadline=None)
@given(value=VALUES)
def test_values_are_encoded_as_by_the_reference_library(reencode: Reencoder, value: object) -> None:
    """Assert that every value comes back byte for byte as msgpack-python writes it."""
    packed = msgpack.packb(value)
    assert reencode(packed) == ((0, packed) if depth(value) <= 16 else (2, b""))


@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=64))
def test_malformed_bytes_are_judged_as_by_the_reference_library(reencode: Reencoder, junk: bytes) -> None:
    """Assert that bytes are accepted exactly when msgpack-python reads one value, no extension."""
    status, out = reencode(junk)
    extension: list[int] = []
    unpacker = msgpack.Unpacker(
        strict_map_key=False,
        raw=True,
        object_pairs_hook=list,
        ext_hook=lambda code, _: extension.append(code),
    )
    unpacker.feed(junk)
    try:
        unpacker.unpack()
        whole = unpacker.tell() == len(junk)
    except (msgpack.OutOfData, msgpack.FormatError, msgpack.StackError, ValueError, TypeError):
        assert status in (1, 2) or extension
        return
    if status == 0:
        assert whole and not extension
        assert reencode(out) == (0, out)
    elif not extension:
        assert not whole or _too_deep(junk)


def _too_deep(junk: bytes) -> bool:
    """Whether these bytes could be nested past the limit: every level takes a byte."""
    return sum(0x80 <= byte < 0xA0 or 0xDC <= byte <= 0xDF for byte in junk) > 16


def test_every_prefix_of_a_message_is_refused(reencode: Reencoder) -> None:
    """Assert that a message that was cut anywhere is malformed."""
    packed = msgpack.packb(
        {"id": 1, "argv": [b"x" * 300, "y" * 40], "n": -(2**40), "f": 1.5, "m": {"a": None}}
    )
    assert reencode(packed) == (0, packed)
    for cut in range(len(packed)):
        assert reencode(packed[:cut]) == (1, b"")
    assert reencode(packed + b"\0")[0] == 2


@pytest.mark.skipif(not os.environ.get("CI") and not shutil.which("musl-gcc"), reason="no musl")
def test_sources_build_static_against_musl(tmp_path: Path) -> None:
    """Assert that codecs and file calls build without any kernel header, as the shipped worker is built."""
    musl = shutil.which("musl-gcc")
    if not musl:
        pytest.skip("no musl-gcc")
    build(tmp_path, f"{musl} -static", *TESTS, sanitize=False)
    for name in TESTS:
        subprocess.run([tmp_path / name], check=True, capture_output=True, timeout=120)
