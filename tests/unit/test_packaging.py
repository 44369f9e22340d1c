"""What a build must produce: static programs, their hashes in the shim, the same in a wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vectora_jail.errors import WorkerSpawnError

native = pytest.importorskip("vectora_jail._native", reason="the shim is not built")

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path(native.__file__).parent
ARCH = native.native_arch()
PROGRAMS = ("worker", "launcher")
in_tree = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


def program_headers(image: bytes) -> list[int]:
    """Types of the program headers of a 64-bit little-endian ELF image, elf(5)."""
    assert image[:6] == b"\x7fELF\x02\x01"
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    return [struct.unpack_from("<I", image, offset + i * size)[0] for i in range(count)]


def shim_hash(program: str) -> str:
    """Return the hash that the shim was compiled with."""
    return native.ffi.string(native.lib.vj_image_hash(program.encode(), ARCH.encode())).decode()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_are_static_and_executable(program):
    """Assert that no dynamic loader is asked for, the run bit is set and `--version` answers."""
    path = PACKAGE / f"vectora-jail-{program}-{ARCH}"
    types = program_headers(path.read_bytes())
    assert 3 not in types  # PT_INTERP
    assert 2 not in types  # PT_DYNAMIC
    assert path.stat().st_mode & 0o111 == 0o111
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout.startswith(f"vectora-jail-{program} ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_stack_is_not_executable(program):
    """Assert that PT_GNU_STACK is there without PF_X."""
    image = (PACKAGE / f"vectora-jail-{program}-{ARCH}").read_bytes()
    (offset,) = struct.unpack_from("<Q", image, 32)
    (size,) = struct.unpack_from("<H", image, 54)
    index = program_headers(image).index(0x6474E551)
    assert struct.unpack_from("<I", image, offset + index * size + 4)[0] & 1 == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_shim_knows_the_bytes_beside_it(program):
    """Assert that the hash in the shim is that of the file in the package."""
    image = (PACKAGE / f"vectora-jail-{program}-{ARCH}").read_bytes()
    assert shim_hash(program) == hashlib.sha256(image).hexdigest()
    assert native.lib.vj_image_hash(program.encode(), b"riscv64") == native.ffi.NULL


def test_an_image_is_sealed_and_fresh():
    """Assert that each use gets its own offset on bytes that nobody can change any more."""
    first, second = native.worker_image(), native.worker_image()
    try:
        assert os.read(first, 4) == b"\x7fELF"
        assert os.lseek(second, 0, os.SEEK_CUR) == 0
        assert os.fstat(first).st_ino == os.fstat(second).st_ino
        with pytest.raises(OSError, match="Operation not permitted"):
            os.truncate(f"/proc/self/fd/{first}", 0)
        with (
            pytest.raises(OSError, match="Operation not permitted"),
            open(f"/proc/self/fd/{first}", "r+b") as file,
        ):
            file.write(b"x")
            file.flush()
    finally:
        os.close(first)
        os.close(second)


def test_a_changed_program_is_refused(tmp_path, monkeypatch):
    """Assert that one changed byte, or a missing file, is an error with the remedy, never a start."""
    name = f"vectora-jail-worker-{ARCH}"
    image = bytearray((PACKAGE / name).read_bytes())
    image[-1] ^= 1
    monkeypatch.setattr(native, "_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(native, "_images", {})
    with pytest.raises(WorkerSpawnError) as missing:
        native.worker_image()
    assert missing.value.code == "worker_missing"
    (tmp_path / name).write_bytes(image)
    with pytest.raises(WorkerSpawnError) as changed:
        native.worker_image()
    assert changed.value.code == "worker_hash"
    assert "pip install -e ." in changed.value.hint
    with pytest.raises(WorkerSpawnError) as foreign:
        native.worker_image("riscv64")
    assert foreign.value.code == "worker_missing"


def test_sources_of_binds_are_found_by_counting(tmp_path):
    """Assert that only sources are staged, not a value that looks like an option or what may be missing."""
    here = bytes(tmp_path)
    args = [
        b"--setenv",
        b"--bind",
        b"x",
        b"--clearenv",
        b"--ro-bind",
        here,
        b"/a",
        b"--ro-bind-try",
        here + b"/no",
    ]
    args += [b"/b", b"--size", b"5", b"--tmpfs", b"/t", b"--bind", here, b"/c"]
    out, fds = native.stage_sources(args)
    try:
        assert out == [
            *(b"--setenv", b"--bind", b"x", b"--clearenv", b"--ro-bind", b"/tmp/0", b"/a"),
            *(b"--size", b"5", b"--tmpfs", b"/t", b"--bind", b"/tmp/1", b"/c"),
        ]
        assert [os.fstat(fd).st_ino for fd in fds] == [tmp_path.stat().st_ino] * 2
    finally:
        for fd in fds:
            os.close(fd)


def load_setup():
    """Import setup.py's functions without running a build."""
    import setuptools

    spec = importlib.util.spec_from_file_location("vj_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    original = setuptools.setup
    setuptools.setup = lambda **_: None
    try:
        spec.loader.exec_module(module)
    finally:
        setuptools.setup = original
    return module


@in_tree
def test_a_dynamic_program_is_noticed():
    """Assert that the build's own check refuses a program with a loader, and what is no program at all."""
    setup = load_setup()
    assert setup.is_static((PACKAGE / f"vectora-jail-worker-{ARCH}").read_bytes())
    assert not setup.is_static(Path(sys.executable).resolve().read_bytes())
    assert not setup.is_static(b"#!/bin/sh\n")
    assert setup.architecture(Path(sys.executable).resolve().read_bytes()) == ARCH
    assert setup.architecture(b"#!/bin/sh\n") == ""


@in_tree
def test_the_environment_chooses_the_compiler(monkeypatch):
    """Assert the order: VJ_ZIG (both architectures), VJ_WORKER_CC, musl-gcc, else one line of advice."""
    setup = load_setup()
    for name in ("VJ_ZIG", "VJ_WORKER_CC", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(setup.shutil, "which", lambda name: "/x" if name == "musl-gcc" else None)
    assert setup.compilers() == {ARCH: ["musl-gcc"]}
    monkeypatch.setattr(setup.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="apt install musl-tools"):
        setup.compilers()
    monkeypatch.setenv("VJ_WORKER_CC", "clang -static")
    assert setup.compilers() == {ARCH: ["clang", "-static"]}
    monkeypatch.setattr(setup, "target", lambda _: "aarch64-linux-gnu")
    assert setup.compilers() == {"aarch64": ["clang", "-static"]}
    monkeypatch.setenv("VJ_ZIG", "/a/python -m ziglang")
    assert setup.compilers()["aarch64"] == [
        "/a/python",
        "-m",
        "ziglang",
        "cc",
        "-target",
        "aarch64-linux-musl",
    ]


@in_tree
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_wheel_carries_both_programs(tmp_path):
    """Assert that a wheel has static programs with run bits, the abi3 tag and matching hashes."""
    pytest.importorskip("build", reason="the build package is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, "."],
        cwd=copy_sources(tmp_path / "tree"),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if "No module named" in done.stderr or "Missing dependencies" in done.stdout + done.stderr:
        pytest.skip("build dependencies are not installed")
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        shim = archive.read("vectora_jail/_shim.abi3.so")
        for program in PROGRAMS:
            info = archive.getinfo(f"vectora_jail/vectora-jail-{program}-{ARCH}")
            assert info.external_attr >> 16 & 0o777 == 0o755
            image = archive.read(info)
            assert 3 not in program_headers(image)
            assert hashlib.sha256(image).hexdigest().encode() in shim
        record = next(n for n in archive.namelist() if n.endswith("RECORD"))
        assert f"vectora-jail-worker-{ARCH},sha256=" in archive.read(record).decode()
        assert not [n for n in archive.namelist() if n.startswith(("tests/", "csrc/", "worker/"))]


@in_tree
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_in_tree_build_keeps_shim_and_programs_a_pair(tmp_path):
    """Assert that `build_ext --inplace` after an edit renews the program and the shim's hash."""
    tree = copy_sources(tmp_path / "tree")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, capture_output=True, timeout=110, check=True)
    name = tree / "vectora_jail" / f"vectora-jail-worker-{ARCH}"
    before = name.read_bytes()
    main = tree / "worker" / "main.c"
    main.write_text(main.read_text().replace("vectora-jail-worker ", "vectora-jail-worker  "))
    subprocess.run(command, cwd=tree, capture_output=True, timeout=110, check=True)
    assert name.read_bytes() != before
    assert (
        hashlib.sha256(name.read_bytes()).hexdigest().encode()
        in (tree / "vectora_jail" / "_shim.abi3.so").read_bytes()
    )


def copy_sources(target: Path) -> Path:
    """Copy what a build needs, without earlier results."""
    import shutil

    results = shutil.ignore_patterns("*.so", "vectora-jail-*", "__pycache__")
    for folder in ("csrc", "worker", "vectora_jail"):
        shutil.copytree(ROOT / folder, target / folder, ignore=results)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)
    return target
