"""The local backend: bubblewrap for the skeleton, the entering child for the rest, the worker as pid 1.

The order is the contract (`docs/security.md`): plan, bwrap, entering child, hello, hardening, proof, first request.
Nothing untrusted runs before the last.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack

from vectora_jail import _native, wire
from vectora_jail._lanes import DONE, ChannelClosed, Lane
from vectora_jail._tree import Tree
from vectora_jail.cgroupplace import MODES
from vectora_jail.cgroups import make_group, spread
from vectora_jail.errors import UnsupportedPolicy, WorkerSpawnError
from vectora_jail.limits import held_layers
from vectora_jail.mounts import bwrap_arguments
from vectora_jail.proof import prove
from vectora_jail.results import Violation
from vectora_jail.treestore import carried, forget_empty, spec_with, violation_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vectora_jail.cgroups import Group
    from vectora_jail.egress_lane import EgressDoor
    from vectora_jail.plan import JailPlan

__all__ = ["LocalBackend", "make"]

HELLO_TIMEOUT_S = 10.0


class LocalRunning:
    """One jail on this host."""

    proof = "full"

    def __init__(
        self,
        plan: JailPlan,
        started: _native.Started,
        channel: int,
        tree: Tree,
        owner: tuple[int, int] | None,
    ) -> None:
        self.plan = plan
        self.channel = channel
        self.owner = owner
        self.hello: dict[str, Any] = {}
        self._started = started
        self._tree = tree
        self._group: Group | None = None
        self.door: EgressDoor | None = None
        """The way out of an allowlist; None without one."""
        self._closed = False
        self._status: int | None = None
        self.spec: Mapping[str, Any] = plan.tree
        """What the tree was made from."""
        self._appeared = 0
        self._carried = carried(plan.workspace)

    @property
    def pid(self) -> int | None:
        """The worker's pid on this host."""
        return self._started.pid

    def enter(self, ops: Sequence[Sequence[Any]]) -> list[int]:
        """Apply mount operations inside."""
        packed = msgpack.packb(ops, use_bin_type=True)
        return _native.enter(self._started.mntns_fd, self._started.userns_fd, packed)

    def sync(self) -> None:
        """Bring masks and protections up to date."""
        self._appeared = self._tree.begin()

    def audit(self, *, idle: bool) -> tuple[Violation, ...]:
        """Move what a call left for the host's git away, cover what it made under masked names, and tell.

        Args:
            idle: Nothing else runs in the jail: repositories that appeared are locked by the next `sync`.
        """
        if self._closed:
            return ()
        try:
            found, fresh = self._tree.end(self._appeared, idle=idle)
        except OSError:
            return ()  # the next call's sync finds the same and is refused
        if not found and not fresh:
            return ()
        self._carried.add(found)
        violations = [violation_of(finding) for finding in found]
        if fresh:
            violations += self._masked(fresh)
        return tuple(violations)

    def _masked(self, fresh: int) -> list[Violation]:
        """Return the covers that were made during a call, at most 64."""
        paths = self._tree.report()["appeared"][self._appeared :][: min(fresh, 64)]
        self._appeared += fresh
        hint = "a mask covers this name: what was written there is hidden now, also from the command"
        return [Violation("path", os.fsdecode(path), rule="masked_new", hint=hint) for path in paths]

    def tree_report(self) -> dict[str, Any]:
        """Return what is covered now."""
        return {} if self._closed else {**self._tree.report(), "redirects": list(self._carried.hazards)}

    def limit_events(self) -> list[dict[str, Any]]:
        """Return the limits that the kernel has enforced since the last look, as violations of a reply."""
        return [] if self._group is None else self._group.events()

    def hold(self, group: Group | None) -> None:
        """Put the worker, and with it all that it will start, under the limits that its control groups hold."""
        spread(self._started.pid, self.plan.limits.cpus)
        if group is None:
            return
        self._group = group
        try:
            group.add(self._started.pid)
        except OSError:  # ended already, which hello tells better; or not ours to move: the sampler remains
            group.remove()
            self._group = None
            return
        layers = held_layers(self.plan.layers, self.plan.limits, group.version, group.held)
        self.plan = replace(self.plan, layers=layers)

    def health(self) -> str:
        """Return why the worker does not run, `""` while it does."""
        if self._closed:
            return _ending(self._status)
        try:
            with open(f"/proc/{self._started.pid}/stat", "rb") as file:
                state = file.read().rpartition(b") ")[2][:1]
        except OSError:
            state = b"Z"
        if state in (b"T", b"t"):
            return "stopped by a signal"
        if state in (b"Z", b"X"):
            self._status = _native.reap(self._started, 1.0)
            return _ending(self._status)
        return ""

    def close(self) -> None:
        """Kill the jail, wait for it, free descriptors and watches."""
        if self._closed:
            return
        self._closed = True
        if self.door is not None:
            self.door.close()
        status = _native.reap(self._started, 2.0)
        if status is not None:
            self._status = status
        self._started.close()
        self._leave()
        self._tree.close()
        if self._group is not None:
            self._group.remove()
        if self.plan.scratch:
            shutil.rmtree(self.plan.scratch, ignore_errors=True)

    def _leave(self) -> None:
        """Look for what the last call left, and keep what the next worker of the workspace has to know."""
        try:
            self._carried.add(self._tree.end(self._appeared, idle=True)[0])
            self._carried.keep(self.spec, self._tree.report()["known"])
        except OSError:
            pass
        forget_empty(self.spec)

    def forget(self) -> None:
        """Close descriptors in the child of a fork."""
        self._closed = True
        if self.door is not None:
            self.door.close()
        self._started.close()


def _ending(status: int | None) -> str:
    """Say how a monitor ended; bwrap answers 128+n for a worker that signal n has killed."""
    if status is None:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by signal {-code}"
    if code > 128:
        return f"killed by signal {code - 128}"
    return f"ended with status {code}"


class LocalBackend:
    """Starts jails on this host with bwrap, or with Landlock alone where the plan says so."""

    name = "local"

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._cgroup = options.get("cgroup", "auto")
        if self._cgroup not in MODES:
            msg = f"backend_options: cgroup is one of {', '.join(MODES)}, not {self._cgroup!r}"
            raise ValueError(msg)

    def start(self, plan: JailPlan) -> LocalRunning:
        """Start one jail.

        Raises:
            WorkerSpawnError: with the stage that failed, the errno and what to do.
        """
        spec = spec_with(plan.tree, plan.workspace)
        tree = Tree(spec)
        try:
            running = self._start(plan, tree)
        except BaseException:
            tree.close()
            forget_empty(spec)
            raise
        running.spec = spec
        return running

    def _start(self, plan: JailPlan, tree: Tree) -> LocalRunning:
        bwrap = plan.bwrap if plan.isolation == "bwrap" else None
        owner = (plan.uid, plan.gid) if plan.uid != os.geteuid() else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data: list[int] = []
        try:
            args: list[bytes] = []
            if bwrap is not None:
                args, blobs = bwrap_arguments(plan.mounts, bwrap, fd_base=_native.DATA_FD + 1)
                data.append(_native.worker_image())
                data.extend(_blob(blob) for blob in blobs)
            tree.scan()
            if bwrap is None:
                _refuse_masks(tree)
                _make_scratch(plan.scratch)
            started = _native.start(
                bwrap.path if bwrap is not None else None,
                args,
                data,
                theirs.fileno(),
                stage=_native.StagePlan(plan.uid, plan.gid) if owner else None,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in data:
                os.close(fd)
        running = LocalRunning(plan, started, ours.detach(), tree, owner)
        try:
            # Moving a process between control groups waits for all processors (an RCU grace period, milliseconds);
            # mounts and hello need not wait for it, the first request does: no command runs before.
            failures: list[BaseException] = []
            holder = threading.Thread(target=self._hold, args=(running, plan, failures))
            holder.start()
            try:
                if bwrap is not None:
                    self._enter(running, plan, tree, started)
                self._hello(running, plan)
            finally:
                holder.join()
            if failures:
                raise failures[0]
            if plan.egress is not None:
                running.door = self._open_door(running, plan)
        except BaseException:
            os.close(running.channel)
            running.close()
            raise
        return running

    def _hold(self, running: LocalRunning, plan: JailPlan, failures: list[BaseException]) -> None:
        """Put the jail under its control groups; what is raised is left in `failures`."""
        try:
            running.hold(make_group(plan.limits, self._cgroup))
        except BaseException as exc:  # noqa: BLE001 — raised again by the caller, in its thread
            failures.append(exc)

    def _open_door(self, running: LocalRunning, plan: JailPlan) -> EgressDoor:
        """Give the worker a lane on which it hands out the connections of an allowlist."""
        from vectora_jail.egress_lane import EgressDoor

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        main = Lane(os.dup(running.channel))
        try:
            main.request(wire.encode({"op": "lane", "id": 1}), [theirs.fileno()], int(HELLO_TIMEOUT_S * 1000))
            return EgressDoor.open(
                ours, plan.net_rules, plan.egress, on_request=self._options.get("on_request")
            )
        except (OSError, ChannelClosed) as exc:
            ours.close()
            raise WorkerSpawnError(
                f"the ports of the allowlist could not be opened: {exc}",
                code="egress",
                layer="network",
                stage="egress",
                errno=getattr(exc, "errno", 0) or 0,
                hint="h11 is needed: pip install 'vectora-jail[network]'",
            ) from None
        finally:
            main.close()
            theirs.close()

    @staticmethod
    def _enter(running: LocalRunning, plan: JailPlan, tree: Tree, started: _native.Started) -> None:
        base = [list(op) for op in plan.enter_ops]
        later = tree.ops()
        results = running.enter([*base, *later])
        for op, err in zip(base, results, strict=False):
            if err:
                raise _op_error(op, err)
        try:
            tree.applied(results[len(base) :])
        except OSError as exc:
            failed = next((op for op, err in zip(later, results[len(base) :], strict=False) if err), ["mask"])
            raise _op_error(failed, exc.errno or 0) from None
        tree.attach(started.mntns_fd, started.userns_fd)

    @staticmethod
    def _hello(running: LocalRunning, plan: JailPlan) -> None:
        lane = Lane(os.dup(running.channel))
        body = -1
        try:
            message = wire.encode({"op": "hello", "id": 1, **plan.hello()})
            fds: list[int] = []
            if len(message) > wire.MESSAGE_MAX:
                body = _blob(message)
                fds = [body]
                message = wire.encode({"op": "hello", "id": 1, "body": True})
            deadline = time.monotonic() + HELLO_TIMEOUT_S
            rc = lane.request(message, fds, int(HELLO_TIMEOUT_S * 1000))
            while rc != DONE and time.monotonic() < deadline:
                rc = lane.wait(500)
            if rc != DONE:
                raise _hello_error("the worker did not answer in time", plan)
            reply = wire.decode(lane.reply())
            wire.expect_id(reply, 1)
        except ChannelClosed as exc:
            health = running.health()
            raise _hello_error(
                f"the worker ended before it answered ({health or exc.reason})", plan
            ) from None
        except wire.ProtocolError as exc:
            raise _hello_error(str(exc), plan) from None
        finally:
            lane.close()
            if body >= 0:
                os.close(body)
        if reply.get("error"):
            raise _hello_error(f"the worker refused: {wire.text(reply, 'error')}", plan)
        if reply.get("version") != wire.VERSION:
            raise _hello_error(f"the worker speaks version {reply.get('version')!r}", plan)
        running.hello = reply
        try:
            wrong = prove(plan, running.pid or 0, reply)
        except (OSError, ValueError) as exc:
            wrong = [f"/proc does not show the worker: {exc}"]
        if wrong:
            raise WorkerSpawnError(
                "the jail is not what the plan says: " + "; ".join(wrong),
                code="proof",
                layer="proof",
                stage="hello",
                hint="`vectora-jail doctor` shows what this host can enforce",
            )


def _refuse_masks(tree: Tree) -> None:
    """Without mounts nothing inside a grant can be hidden: refuse instead of ignoring a mask."""
    found = [path for path in tree.report().get("masks", []) if os.access(path, os.R_OK)]
    if found:
        shown = ", ".join(os.fsdecode(path) for path in found[:3])
        raise UnsupportedPolicy(
            f"Landlock alone cannot hide a path inside a grant: {shown}",
            backend="local",
            layer="mounts",
            code="mask_needs_mounts",
            hint="install bubblewrap, allow user namespaces, or move the masked files out of the grants",
        )


def _make_scratch(scratch: bytes) -> None:
    """Make the directory for temporary files of a jail without private ones; refuse one that is not ours."""
    for path in (scratch, scratch + b"/home", scratch + b"/tmp"):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            st = os.lstat(path)
            if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid() or st.st_mode & 0o077:
                raise WorkerSpawnError(
                    f"{os.fsdecode(path)} is not a private directory of this user",
                    code="scratch",
                    layer="mounts",
                    stage="scratch",
                    hint="remove it",
                ) from None


def _hello_error(message: str, plan: JailPlan) -> WorkerSpawnError:
    return WorkerSpawnError(
        message, code="hello", layer="worker", stage="hello", hint=f"`vectora-jail doctor` ({plan.isolation})"
    )


def _op_error(op: Sequence[Any], err: int) -> WorkerSpawnError:
    what = " ".join(os.fsdecode(part) if isinstance(part, bytes) else str(part) for part in op)
    return WorkerSpawnError(
        f"could not apply “{what}” inside the jail",
        code="enter",
        layer="mounts",
        stage="enter",
        errno=err,
        hint="a path may have vanished or been replaced while the jail started: try again",
    )


def _blob(data: bytes) -> int:
    """Return a sealed memfd at offset 0 with these bytes."""
    fd = _native.sealed_memfd("vectora-jail-data", data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def make(options: dict[str, Any]) -> LocalBackend:
    """Return the backend.

    Options: `bwrap`, an explicit path; `on_request`, asked about targets not listed; `cgroup`, whose control groups
    may be divided (`cgroupplace`).
    """
    return LocalBackend(options)
