"""Limits: presets to rlimits, what the report says of each, sizes of private file systems."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.host import host, user
from vectora_jail.limits import (
    CORE,
    CPU,
    FSIZE,
    NOFILE,
    NOFILE_MAX,
    NOFILE_RESERVE,
    NPROC,
    PIDS_SLACK,
    inodes,
    nofile_limit,
    plan_limits,
    tmpfs_sizes,
)
from vectora_jail.policy import Limits, Policy

MIB = 1 << 20


def limits(policy: Policy | None = None, **changes):
    """Return the plan's limits and the commands' rlimits by resource."""
    isolation = changes.pop("isolation", "bwrap")
    made = plan_limits(policy or Policy(), host(**changes), isolation=isolation)
    return made, {r.resource: (r.soft, r.hard) for r in made.cmd_rlimits}


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [
        ("conservative", (512 * MIB, 64, 1024 * MIB, 60, 120)),
        ("moderate", (2048 * MIB, 256, 4096 * MIB, 300, 600)),
        ("generous", (8192 * MIB, 1024, 16384 * MIB, 0, 3600)),
        ("unlimited", (0, 0, 0, 0, 0)),
    ],
)
def test_presets(preset, numbers):
    """Assert the table of the documentation, in bytes."""
    made, _ = limits(Policy(limits=Limits(preset=preset)))
    assert (made.memory, made.pids, made.disk, made.cpu_s, made.wall_s) == numbers


def test_overrides_replace_single_numbers():
    """Assert that one number can be changed without the rest of the preset."""
    made, _ = limits(Policy(limits=Limits(preset="conservative", pids=7)))
    assert (made.pids, made.memory) == (7, 512 * MIB)


def test_rlimits_of_a_command():
    """Assert that no core is written, CPU time has a second of grace, and one file holds the disk limit."""
    _, found = limits(Policy(limits=Limits(preset="conservative")))
    assert found[CORE] == (0, 0)
    assert found[CPU] == (60, 61)
    assert found[FSIZE] == (1024 * MIB, 1024 * MIB)
    assert found[NPROC] == (64 + PIDS_SLACK, 64 + PIDS_SLACK)


def test_unlimited_sets_only_what_protects_the_backend():
    """Assert that "unlimited" still keeps cores off and descriptors below the backend's."""
    _, found = limits(Policy(limits=Limits(preset="unlimited")))
    assert found[CORE] == (0, 0)
    assert NOFILE in found
    assert not {CPU, FSIZE, NPROC} & set(found)


def test_nproc_is_for_ordinary_users_with_their_own_namespace():
    """Assert that uid 0 (exempt) and a jail without a user namespace get no RLIMIT_NPROC."""
    root = user(0, b"/root")
    assert NPROC not in limits(user=root)[1]
    assert NPROC not in limits(isolation="landlock")[1]
    states = {layer.name: layer.state for layer in limits(user=root)[0].layers}
    assert states["limit:pids"] == "partial"


def test_the_worker_keeps_its_processes():
    """Assert that the worker itself is bound by neither pids, CPU time nor file size."""
    made, _ = limits()
    assert {r.resource for r in made.worker_rlimits}.isdisjoint({NPROC, CPU, FSIZE})


def test_every_limit_names_its_holder():
    """Assert that the report has a line for each limit, off where none was asked for."""
    made, _ = limits(Policy(limits=Limits(preset="generous", cpus=2)))
    states = {layer.name: layer.state for layer in made.layers}
    assert states == {
        "limit:memory": "partial",
        "limit:pids": "on",
        "limit:disk": "partial",
        "limit:cpu": "off",
        "limit:wall": "on",
        "limit:cpus": "partial",
    }
    assert all(layer.detail for layer in made.layers)


@given(st.integers(1, 1 << 31), st.integers(0, 1 << 31))
def test_descriptors_stay_below_the_backends(soft, more):
    """Assert that a jail's limit stays 512 below the backend's where there is room, and never above it."""
    value = nofile_limit(soft, soft + more)
    assert 1 <= value <= min(soft, NOFILE_MAX)
    if soft >= 2 * NOFILE_RESERVE:
        assert value <= soft - NOFILE_RESERVE


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_private_file_systems_fit_the_machine(memory, total):
    """Assert that all sizes together are neither more than the limit nor half the machine."""
    sizes = tmpfs_sizes(memory, total)
    parts = (sizes.tmp, sizes.home, sizes.shm, sizes.var_tmp)
    assert all(part >= 4096 and part % 4096 == 0 for part in parts)
    floor = 64 * MIB
    if memory:
        assert sum(parts) <= max(memory, floor)
    if total:
        assert sum(parts) <= max(total // 2, floor)


def test_inodes_follow_the_size():
    """Assert that a tmpfs of 10 MiB cannot hold millions of empty files."""
    assert inodes(1 << 30) == 65_536
    assert inodes(10 * MIB) == 1_024
