"""The short calls under pytest-benchmark: `pytest benchmarks/test_calls.py --benchmark-only`.

For figures to quote use `table.py`, which measures in turns; this is for comparing two states of the code
(`--benchmark-save`, `--benchmark-compare`).
"""

from __future__ import annotations

import os
import subprocess

import pytest

from vectora_jail import Jail, Policy


@pytest.fixture(scope="module")
def jail(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "small").write_bytes(b"x" * 4096)
    with Jail.open(workspace, policy=Policy()) as jail:
        yield jail


@pytest.mark.benchmark(group="true")
def test_exec(benchmark, jail):
    """`/bin/true`, output captured, in the jail."""
    benchmark(jail.exec, ["/bin/true"])


@pytest.mark.benchmark(group="true")
def test_subprocess_run(benchmark, jail):
    """The same without a jail."""
    benchmark(subprocess.run, ["/bin/true"], capture_output=True, cwd=jail.workspace)


@pytest.mark.benchmark(group="ping")
def test_ping(benchmark, jail):
    """An empty request."""
    benchmark(jail.ping)


@pytest.mark.benchmark(group="files")
def test_read(benchmark, jail):
    """4 KiB through the jail."""
    benchmark(jail.read_file, "small")


@pytest.mark.benchmark(group="files")
def test_write(benchmark, jail):
    """4 KiB, atomically, through the jail."""
    benchmark(jail.write_file, "written", b"x" * 4096)


@pytest.mark.benchmark(group="files")
def test_path_read(benchmark, jail):
    """4 KiB without a jail."""

    def read() -> None:
        with open(os.path.join(jail.workspace, "small"), "rb") as file:
            file.read()

    benchmark(read)


@pytest.mark.benchmark(group="start")
def test_start(benchmark, jail):
    """A whole jail, from nothing to the first answer."""
    benchmark.pedantic(
        lambda made: made.start(),
        setup=lambda: ((Jail.open(jail.workspace, policy=Policy()),), {}),
        teardown=lambda made: made.close(),
        rounds=20,
    )
