"""Build the two static programs of the package before the shim that carries their hashes.

`build_worker` compiles `vectora-jail-worker-<arch>` and `vectora-jail-launcher-<arch>`, checks that they are
static, and writes `build/gen/image_hash.h`; `build_ext` runs it first, in every way a build can start (wheel,
`-e .`, `build_ext --inplace`). The environment chooses the compiler:

    VJ_ZIG="/abs/python -m ziglang"   both architectures, reproducible (releases)
    VJ_WORKER_CC="compiler flags"     this architecture
    (none)                            musl-gcc, or cc where that makes musl programs, or `cc -static`
    VJ_WORKER=/path VJ_LAUNCHER=/path ready-made programs (for distributions that strip ELF files)
    VJ_WERROR=1                       warnings are errors (CI)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from sysconfig import get_config_var
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

GENERATED = Path("build/gen/image_hash.h")
PROGRAMS = ("worker", "launcher")
NATIVE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
FLAGS = [
    "-std=gnu11", "-Os", "-static", "-s", "-pthread",
    "-ffunction-sections", "-fdata-sections", "-fstack-protector-strong",
    "-Wl,--gc-sections", "-Wl,--fatal-warnings", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack",
    "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wformat=2",
    "-Wstrict-prototypes", "-Wmissing-prototypes",
    "-Icsrc", "-Icsrc/core", "-Iworker",
]  # fmt: skip
PT_INTERP = 3
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine, elf(5)


def sources(program: str) -> list[str]:
    """The C files of one program, found by place: a new file needs no entry here."""
    worker = sorted(Path("worker").glob("*.c"))
    if program == "worker":
        return ["worker/main.c", *(str(p) for p in worker if p.name not in ("main.c", "launcher.c"))]
    core = sorted(Path("csrc/core").glob("*.c"))
    return ["worker/launcher.c", *map(str, core), "worker/msg.c"]


def is_static(elf: bytes) -> bool:
    """True for a 64-bit little-endian ELF image without PT_INTERP, i.e. one that needs no dynamic loader."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return False
    (offset,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    types = [struct.unpack_from("<I", elf, offset + i * size)[0] for i in range(count)]
    return PT_INTERP not in types


def architecture(elf: bytes) -> str:
    """Name of the machine that an ELF image is for, "" for another one."""
    return MACHINES.get(struct.unpack_from("<H", elf, 18)[0], "") if elf[:4] == b"\x7fELF" else ""


def target(compiler: list[str]) -> str:
    """The compiler's own word for what it makes (x86_64-linux-musl), "" when it has none."""
    try:
        out = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return out.stdout.strip()


def compilers() -> dict[str, list[str]]:
    """{architecture: compiler command}; SystemExit with the one line to type when there is none."""
    if zig := os.environ.get("VJ_ZIG"):
        # -Os also keeps zig from adding UBSan traps; PIE needs both halves or the result is dynamic
        cc = [*shlex.split(zig), "cc"]
        return {a: [*cc, "-target", f"{a}-linux-musl"] for a in ("x86_64", "aarch64")}
    if own := os.environ.get("VJ_WORKER_CC"):
        command = shlex.split(own)
        arch = target(command).partition("-")[0]  # a cross compiler says so
        return {arch if arch in MACHINES.values() else NATIVE: command}
    if shutil.which("musl-gcc"):
        return {NATIVE: ["musl-gcc"]}
    cc = (os.environ.get("CC") or get_config_var("CC") or "cc").split()[0]
    if not shutil.which(cc):
        raise SystemExit("vectora-jail: no static C compiler: apt install musl-tools")
    if "musl" not in target([cc]):
        print(
            "vectora-jail: warning: no musl compiler, the worker is linked with glibc: it starts three times "
            "slower and is thirty times larger (apt install musl-tools)",
            file=sys.stderr,
        )
    return {NATIVE: [cc]}


class BuildWorker(Command):
    """Compile the static programs, write the header with their hashes (setuptools' SubCommand protocol)."""

    description = "compile the worker and the launcher (static C programs)"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """Setuptools calls this first."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """Where the package is being put together."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def in_tree(self) -> bool:
        """Beside the sources? For `-e .` and for `build_ext --inplace`: shim and programs stay a pair."""
        ext = self.get_finalized_command("build_ext")
        return bool(self.editable_mode or ext.inplace or getattr(ext, "editable_mode", False))

    def targets(self) -> dict[tuple[str, str], Path]:
        """{(program, architecture): path of the result}."""
        root = Path() if self.in_tree() else Path(self.build_lib or ".")
        where = root / "vectora_jail"
        return {(p, a): where / f"vectora-jail-{p}-{a}" for a in compilers() for p in PROGRAMS}

    def run(self) -> None:
        """Compile, check, hash."""
        commands = compilers()
        hashes = {}
        for (program, arch), path in self.targets().items():
            image = self.image(program, arch, commands[arch])
            if not is_static(image) or architecture(image) != arch:
                raise SystemExit(
                    f"vectora-jail: {program} for {arch} is not a static 64-bit program: {commands[arch]}"
                )
            self.place(path, image)
            if arch == NATIVE:
                self.try_out(path)
            hashes[program, arch] = hashlib.sha256(image).hexdigest()
        self.write_header(hashes)

    def image(self, program: str, arch: str, compiler: list[str]) -> bytes:
        """The bytes of one program: ready-made by VJ_WORKER / VJ_LAUNCHER, or compiled."""
        ready = os.environ.get(f"VJ_{program.upper()}") if arch == NATIVE else None
        if ready:
            return Path(ready).read_bytes()
        out = Path(self.get_finalized_command("build").build_temp) / f"{program}-{arch}-{os.getpid()}"
        out.parent.mkdir(parents=True, exist_ok=True)
        strict = ["-Werror"] if os.environ.get("VJ_WERROR") == "1" else []
        command = [*compiler, *FLAGS, *strict, *sources(program), "-o", str(out)]
        self.announce(shlex.join(command), level=2)
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"vectora-jail: compiling {program} for {arch} failed: {shlex.join(command)}")
        image = out.read_bytes()
        out.unlink()
        return image

    @staticmethod
    def place(path: Path, image: bytes) -> None:
        """Write with the run bit, by rename: a process that reads the old file meanwhile reads all of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(image)
        temporary.chmod(0o755)
        temporary.replace(path)

    @staticmethod
    def try_out(path: Path) -> None:
        """A program that does not answer `--version` here would fail at every start instead."""
        done = subprocess.run(
            [str(path.resolve()), "--version"], capture_output=True, timeout=10, check=False
        )
        if done.returncode != 0:
            raise SystemExit(
                f"vectora-jail: {path.name} --version ends with {done.returncode}: {done.stderr!r}"
            )

    @staticmethod
    def write_header(hashes: dict[tuple[str, str], str]) -> None:
        """One line an image; untouched when nothing changed, so that the shim is not rebuilt."""
        lines = [f'\t{{"{p}", "{a}", "{h}"}}, \\' for (p, a), h in sorted(hashes.items())]
        text = "\n".join(
            ["/* made by setup.py build_worker */", "#define VJ_IMAGE_HASHES \\", *lines, "\t{0, 0, 0}", ""]
        )
        if not GENERATED.exists() or GENERATED.read_text(encoding="utf-8") != text:
            GENERATED.parent.mkdir(parents=True, exist_ok=True)
            GENERATED.write_text(text, encoding="utf-8")

    def get_outputs(self) -> list[str]:
        """What the wheel's RECORD lists."""
        return [str(p) for p in self.targets().values()]

    def get_output_mapping(self) -> dict[str, str]:
        """No file of the source tree is copied."""
        return {}

    def get_source_files(self) -> list[str]:
        """What the sdist must contain."""
        return [str(p) for d in ("worker", "csrc", "csrc/core") for p in sorted(Path(d).glob("*.[ch]"))]


class BuildExt(build_ext):
    """The shim; its header of hashes exists before its compiler starts, whichever command was typed."""

    def run(self) -> None:
        """Two builds in one tree wait for each other: shim and programs must be of one moment."""
        GENERATED.parent.mkdir(parents=True, exist_ok=True)
        with open(GENERATED.parent / ".lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.run_command("build_worker")
            super().run()


class Build(build):
    """`build` with the programs among its parts, so that editable installs and RECORD know of them."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_worker", None)]


if platform.python_implementation() != "CPython":
    raise SystemExit("vectora-jail: CPython only (the shim uses the stable ABI)")

setup(
    cmdclass={"build": Build, "build_ext": BuildExt, "build_worker": BuildWorker},
    cffi_modules=["csrc/ffi_build.py:ffi"],
    zip_safe=False,
    options={} if get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
