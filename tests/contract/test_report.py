"""The report says what is really enforced, and the proof is the kernel's own word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vectora_jail import Policy

pytestmark = pytest.mark.kernel

WALLS = {"mounts", "userns", "pidns", "network", "seccomp", "landlock", "environment"}


def test_all_walls_are_on(jail):
    """Assert that with the default policy every wall is on and proved from the host's side."""
    report = jail.report
    layers = {layer.name: layer.state for layer in report.layers}
    assert report.isolation == "bwrap"
    assert report.proof == "full"
    assert set(layers) >= WALLS
    assert {name for name in WALLS if layers[name] != "on"} == set()
    assert [layer.name for layer in report.degraded if not layer.name.startswith("limit")] == []
    assert len(report.policy_digest) == 64


def test_the_kernel_says_the_same(jail):
    """Assert that namespaces, capabilities, no_new_privs and the filter are what the report says."""
    pid = jail.report.pid
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    for caps in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"):
        assert int(status[caps], 16) == 0
    for name in ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup"):
        assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


def test_idle_jail_is_two_processes(jail):
    """Assert that an idle jail is bwrap's monitor and the worker, and nothing else."""
    jail.exec("true")
    worker = jail.report.pid
    monitor = int(Path(f"/proc/{worker}/stat").read_text().rpartition(") ")[2].split()[1])
    assert Path(f"/proc/{monitor}/comm").read_text().strip() == "bwrap"
    children = [
        int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) in (worker, monitor)
    ]
    assert children == [worker]


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


def test_masks_and_protections_are_listed(git_ws, open_jail):
    """Assert that the report lists what is covered and what is protected now."""
    report = open_jail(git_ws).report
    assert str(git_ws / ".env") in report.masks
    assert str(git_ws / ".git") in report.protected


def test_missing_grant_is_a_hazard(ws, open_jail):
    """Assert that a granted path that does not exist is reported, and refused under lockdown."""
    jail = open_jail(ws, policy=Policy(ro_paths=("gone",)))
    assert any("gone" in hazard.text for hazard in jail.report.hazards)


def test_a_report_before_the_start_claims_nothing(ws):
    """Assert that an asyncio jail that has not started reports no wall."""
    from vectora_jail import AsyncJail

    report = AsyncJail.open(ws, policy=Policy()).report
    assert (report.isolation, report.layers, report.pid) == ("none", (), None)
