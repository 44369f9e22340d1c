"""The Landlock ruleset as data, for every kernel interface there is."""

from __future__ import annotations

import pytest

from vectora_jail import landlock
from vectora_jail.landlock import CLASSES, FILE_RIGHTS, gaps, rights, ruleset, table, unheld
from vectora_jail.mounts import Mount

MOUNTS = (
    Mount("ro", b"/usr", b"/usr"),
    Mount("symlink", b"/lib", b"usr/lib"),
    Mount("tmpfs", b"/tmp", size=1 << 20, perms=0o1777),
    Mount("tmpfs", b"/run", size=1 << 20, perms=0o555),
    Mount("data", b"/etc/passwd", data=b"x"),
    Mount("proc", b"/proc"),
    Mount("dev", b"/dev"),
    Mount("devices", b"/dev/dri", b"/dev/dri"),
    Mount("rw", b"/w", b"/w"),
    Mount("ro", b"/w/docs", b"/w/docs"),
    Mount("ro-remount", b"/"),
)


def rules(
    abi: int, *, isolation: str = "bwrap", network: str = "none", uid0: bool = False
) -> dict[bytes, int]:
    """Return path → rights."""
    made = ruleset(MOUNTS, abi, isolation=isolation, network=network, uid0=uid0).table
    assert made is not None
    return dict(made["rules"])


@pytest.mark.parametrize(
    ("abi", "count", "net", "scoped"),
    [
        (1, 13, 0, 0),
        (2, 14, 0, 0),
        (3, 15, 0, 0),
        (4, 15, 3, 0),
        (5, 16, 3, 0),
        (6, 16, 3, 3),
        (7, 16, 3, 3),
        (12, 16, 3, 3),
    ],
)
def test_each_abi_handles_what_it_knows(abi: int, count: int, net: int, scoped: int) -> None:
    """Assert that each interface gets its own rights, network and scopes and nothing that it would refuse."""
    made = ruleset(MOUNTS, abi, isolation="landlock", network="none")
    assert made.table is not None
    assert rights(abi).bit_count() == count
    assert made.table["handled_fs"] == rights(abi)
    assert (made.table["handled_net"], made.table["scoped"]) == (net, scoped)
    assert all(access & ~rights(abi) == 0 and access for _, access in made.table["rules"])


def test_no_landlock_is_reported() -> None:
    """Assert that ABI 0 gives no table and says why."""
    made = ruleset(MOUNTS, 0, isolation="bwrap", network="none")
    assert (made.table, made.state) == (None, "off")
    assert table([(b"/", "ro")], 0) is None


def test_second_wall_repeats_the_mounts() -> None:
    """Assert that inside bwrap each mount has the rights of its kind and nothing else is writable."""
    got = rules(7)
    assert got[b"/usr"] == CLASSES["ro"] == got[b"/run"] == got[b"/etc/passwd"]
    assert got[b"/w"] == got[b"/tmp"] == got[b"/dev/shm"] == CLASSES["rw"]
    assert got[b"/dev"] == got[b"/dev/dri"] == CLASSES["rw_dev"]
    assert got[b"/proc"] == CLASSES["proc"]
    assert got[b"/"] == landlock.READ_DIR
    assert rules(7, uid0=True)[b"/proc"] == CLASSES["ro"]
    assert ruleset(MOUNTS, 7, isolation="bwrap", network="none").state == "on"
    assert ruleset(MOUNTS, 7, isolation="bwrap", network="none").cmd_scope == 0


def test_writable_paths_can_refer_and_truncate() -> None:
    """Assert that a writable root has everything but devices: REFER, TRUNCATE, sockets, pipes, links."""
    missing = rights(7) & ~CLASSES["rw"]
    assert missing == landlock.MAKE_CHAR | landlock.MAKE_BLOCK | landlock.IOCTL_DEV


def test_landlock_alone_keeps_the_host_closed() -> None:
    """Assert that without namespaces neither /, nor writes to /proc, terminals or shared memory are open."""
    got = rules(7, isolation="landlock")
    assert b"/" not in got
    assert got[b"/proc"] == CLASSES["ro"]
    assert not {b"/dev", b"/dev/pts", b"/dev/shm", b"/dev/ptmx", b"/tmp"} & set(got)
    assert got[b"/dev/null"] == CLASSES["rw_dev"]
    assert set(got) == {b"/usr", b"/w", b"/w/docs", b"/proc", b"/dev/null", b"/dev/zero", b"/dev/full"} | {
        b"/dev/random",
        b"/dev/urandom",
        b"/dev/tty",
    }
    made = ruleset(MOUNTS, 7, isolation="landlock", network="none")
    assert made.cmd_scope == landlock.SCOPE_SIGNAL
    assert made.state == "partial"
    assert "/w/docs" in made.detail
    assert unheld(MOUNTS) == [(b"/w/docs", b"/w")]
    open_net = ruleset(MOUNTS, 7, isolation="landlock", network="host").table
    assert open_net is not None
    assert open_net["handled_net"] == 0


def test_own_network_namespace_keeps_loopback() -> None:
    """Assert that inside bwrap TCP is not handled: servers of the jail's own loopback must work."""
    made = ruleset(MOUNTS, 7, isolation="bwrap", network="none").table
    assert made is not None
    assert made["handled_net"] == 0


def test_one_rule_a_path() -> None:
    """Assert that two classes of one path are one rule with both rights."""
    made = table([(b"/x", "list"), (b"/x", "exec"), (b"/a", "ro")], 7)
    assert made is not None
    assert made["rules"] == [[b"/a", CLASSES["ro"]], [b"/x", landlock.READ_DIR | CLASSES["exec"]]]


def test_file_classes_carry_file_rights_only() -> None:
    """Assert that the classes for files hold no right that only a directory may have."""
    assert (CLASSES["file_ro"] | CLASSES["file_rw"]) & ~FILE_RIGHTS == 0


def test_gaps_name_what_is_missing() -> None:
    """Assert that each older interface admits to more."""
    counts = [len(gaps(abi, landlock_only=True)) for abi in range(1, 8)]
    assert counts == sorted(counts, reverse=True)
    assert "signals" in " ".join(gaps(5, landlock_only=True))
    assert gaps(3, landlock_only=False) == ()
