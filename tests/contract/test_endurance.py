"""Ten thousand calls on one worker: nothing grows, on either side."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.slow]


def rss(pid) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


@pytest.mark.timeout(180)
def test_ten_thousand_calls(jail):
    """Assert that descriptors, threads and resident memory stay flat over 10,000 calls (U-13)."""
    for _ in range(500):
        jail.exec(["/bin/true"])
    pid = jail.report.pid
    jail.read_file("/etc/passwd")
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), rss("self"), rss(pid)
    for n in range(10_000):
        assert jail.exec(["/bin/true"]).exit_code == 0
        if n % 50 == 0:
            jail.read_file("/etc/passwd")
    after = len(os.listdir("/proc/self/fd")), threading.active_count(), rss("self"), rss(pid)
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] - before[2] < 4096
    assert after[3] - before[3] < 256
    assert jail.exec("ls /proc | grep -c '^[0-9]'").stdout_text.strip() in ("3", "4")
