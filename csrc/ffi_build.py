"""Describe the shim to cffi: API mode, stable ABI, one extension from all C files that stand outside a jail.

Each `NAME.cdef` lies beside the `NAME.c` whose functions it declares; the two are found together, so a part
of the shim is added by adding its two files (and its header to shim.h).
"""

from __future__ import annotations

import os
from pathlib import Path
from sysconfig import get_config_var

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "build/gen"  # setup.py writes image_hash.h there before the shim is compiled

# cffi's generated file is not ours to clean: only the loud classes apply to the extension as a whole.
SHIM_WARNINGS = ["-Wall", "-Wextra", "-Wformat=2", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]


def relative(pattern: str) -> list[str]:
    """Files below the project's root that match, as setuptools wants them: relative and sorted."""
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(pattern))


sources = [*relative("csrc/*.c"), *relative("csrc/core/*.c"), *relative("worker/msg.c")]
headers = [*relative("csrc/*.h"), *relative("csrc/core/*.h"), *relative("worker/*.h")]
cdefs = [c for c in [*relative("csrc/*.cdef"), *relative("csrc/core/*.cdef")] if c[:-4] + "c" in sources]

ffi = FFI()
for cdef in cdefs:
    ffi.cdef((ROOT / cdef).read_text(encoding="utf-8"))
ffi.set_source(
    "vectora_jail._shim",
    '#include "shim.h"',
    sources=sources,
    include_dirs=["csrc", "csrc/core", "worker", GENERATED],
    depends=[*headers, *cdefs, f"{GENERATED}/image_hash.h"],
    py_limited_api=not get_config_var("Py_GIL_DISABLED"),  # free-threaded builds have no stable ABI
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-g0",
        "-fvisibility=hidden",
        "-fstack-protector-strong",
        *SHIM_WARNINGS,
        *(["-Werror"] if os.environ.get("VJ_WERROR") == "1" else []),
    ],
    extra_link_args=["-pthread", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack"],
)
