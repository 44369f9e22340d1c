"""JailPlan: everything that one jail of one workspace will be, decided before anything is started. Pure.

`build_plan` takes a policy and the facts of a host and touches nothing: equal input gives an equal plan,
which can be printed (`explain`), compared and tested without a kernel. What the policy asks for and this
host cannot enforce is an error here, never a weaker jail; what is only missing belt and braces is a layer
that says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vectora_jail.environment import build_environment
from vectora_jail.hardening import base_ops
from vectora_jail.limits import Layer, LimitPlan, Rlimit, plan_limits, tmpfs_sizes
from vectora_jail.mountplan import View, home_path, plan_mounts
from vectora_jail.mounts import BwrapLaunch, Mount, by_place, is_below, nearest, visible
from vectora_jail.planchecks import (
    absolute,
    choose_isolation,
    hazards,
    namespace_layers,
    refuse_grants,
    refuse_under_lockdown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vectora_jail.facts import HostFacts
    from vectora_jail.policy import Ceiling, Policy

__all__ = ["HOSTNAME", "JailPlan", "Layer", "build_plan"]

HOSTNAME = b"vectora"
SCAN_ENTRIES = 2_000_000
SCAN_MS = 60_000
WATCHES_MAX = 262_144


@dataclass(frozen=True, slots=True)
class JailPlan:
    """What will be enforced for one workspace, complete."""

    workspace: bytes
    uid: int
    gid: int
    isolation: str
    """`bwrap`, or `landlock` where namespaces cannot be had."""
    bwrap: BwrapLaunch | None
    hostname: bytes
    mounts: tuple[Mount, ...]
    enter_ops: tuple[tuple[Any, ...], ...]
    """What the entering child does before the tree's own operations, in order (csrc/core/livemount.h)."""
    tree: Mapping[str, Any] = field(hash=False)
    """Specification for the tree watch (csrc/core/treewatch.h)."""
    env: tuple[bytes, ...]
    dropped_env: tuple[str, ...]
    home: bytes
    seccomp: bytes | None
    seccomp_digest: str
    landlock: Mapping[str, Any] | None = field(hash=False)
    cmd_scope: int
    """Landlock scopes that each command takes on by itself; 0 with a pid namespace."""
    limits: LimitPlan
    network_mode: str
    egress: Any
    """The listeners and names of an allowlist (`netplan.EgressPlan`), None without one."""
    layers: tuple[Layer, ...]
    hazards: tuple[tuple[str, str], ...]
    """(kind, text): what the jail cannot change and a person should know."""
    toolchains: tuple[tuple[str, bytes], ...]
    """(name, path) of what was shown of the user's tools."""
    policy_digest: str
    arch: str
    net_rules: Any = field(default=None, hash=False)
    """What decides about a target (`netrules.NetRules`), None without an allowlist."""
    scratch: bytes = b""
    """Without namespaces: the directory that the backend makes for temporary files (mode 0700)."""

    @property
    def wall_s(self) -> float:
        """Seconds that one call may take; 0: no limit."""
        return self.limits.wall_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds that one call may use; 0: no limit."""
        return self.limits.cpu_s

    @property
    def cmd_rlimits(self) -> tuple[Rlimit, ...]:
        """What each command's process sets before exec."""
        return self.limits.cmd_rlimits

    @property
    def worker_rlimits(self) -> tuple[Rlimit, ...]:
        """What the worker sets for itself."""
        return self.limits.worker_rlimits

    @property
    def degraded(self) -> tuple[Layer, ...]:
        """Layers that are not fully on."""
        return tuple(layer for layer in self.layers if layer.state != "on")

    def hello(self) -> dict[str, Any]:
        """Return the worker's first message, its op and id apart."""
        return {
            "version": 1,
            "env": list(self.env),
            "cwd": self.workspace,
            "lease": 0,
            "worker_rlimits": [list(limit) for limit in self.worker_rlimits],
            "cmd_rlimits": [list(limit) for limit in self.cmd_rlimits],
            "seccomp": self.seccomp,
            "landlock": None if self.landlock is None else dict(self.landlock),
            "cmd_scope": self.cmd_scope,
            "pid1": self.isolation == "bwrap",
            "umask": 0o022,
            "probe": {"write": b"/.vectora-jail-probe", "syscall": _PROBE_SYSCALL[self.arch]}
            if self.seccomp is not None
            else {"write": b"/.vectora-jail-probe"},
            "limits": self.limits.sampler,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values; the environment by name only, data by size."""
        from vectora_jail.explain import plan_json

        return plan_json(self)

    def explain(self) -> str:
        """Return the plan as text for people."""
        from vectora_jail.explain import plan_text

        return plan_text(self)


_PROBE_SYSCALL = {"x86_64": 165, "aarch64": 40}  # mount(2): denied by every list, harmless with bad pointers


def build_plan(
    policy: Policy,
    facts: HostFacts,
    *,
    ceiling: Ceiling | None = None,
    sandbox_type: str = "local",
) -> JailPlan:
    """Return the plan of a jail of `facts.workspace` under `policy`.

    Args:
        policy: Enabled and not refused.
        facts: What this host has, from `probe.collect_facts` for the same policy.
        ceiling: Consents, when the policy was not read under one; it bounds nothing here.
        sandbox_type: Marker for `VECTORA_SANDBOX_TYPE`.

    Raises:
        PolicyError: the policy names what can never be granted. UnsupportedPolicy: a wall that the policy
        names cannot stand on this host. WorkerSpawnError: no isolation at all can be had here; `code` says
        which part is missing, `hint` what helps.
    """
    consents = policy.ceiling or ceiling
    isolation = choose_isolation(policy, facts, weak=consents is None or consents.weak_isolation)
    network = policy.network.mode
    allowed = frozenset(absolute(path, facts) for path in (consents.sensitive_exceptions if consents else ()))
    refuse_grants(policy, facts, allowed)
    egress, net_rules = _egress(policy, network, private=consents is None or consents.private_addresses)
    limits = plan_limits(policy, facts, isolation=isolation)
    view = View(
        level=policy.level,
        read="restricted" if policy.lockdown else policy.read,
        gpu=not policy.no_gpu,
        lockdown=policy.lockdown,
        git=policy.protect_git,
        offline=network == "none",
        hostname=HOSTNAME,
        own_hosts=network != "host",
        hosts=_hosts(policy, egress),
        exceptions=allowed,
        sizes=tmpfs_sizes(limits.memory, facts.memory_total),
    )
    mounts = plan_mounts(facts, view)
    scratch = b""
    home, tmpdir = home_path(facts, view), b"/tmp"
    if isolation == "landlock":
        scratch = _scratch(policy, facts)
        home, tmpdir = scratch + b"/home", scratch + b"/tmp"
        mounts = _without_namespaces(mounts, scratch)
    places = by_place(mounts)
    writable = sorted(m.dest for m in mounts if m.kind == "rw" and m.why == "grant")
    environment = build_environment(
        policy,
        facts,
        visible=lambda path: visible(places, path),
        home=home,
        sandbox_type=sandbox_type,
        network_off=network == "none",
        writable=writable,
        extra=egress.environment if egress is not None else None,
        tmpdir=tmpdir,
    )
    seccomp, digest, seccomp_layer = _seccomp(policy, facts, limits, isolation)
    landlock, scope, landlock_layer = _landlock(facts, mounts, isolation, network)
    layers = (
        *namespace_layers(facts, isolation, network),
        seccomp_layer,
        landlock_layer,
        Layer(
            "environment", "on", f"{len(environment.variables)} variables, {len(environment.dropped)} dropped"
        ),
        *limits.layers,
    )
    plan = JailPlan(
        workspace=facts.workspace.path,
        uid=facts.user.uid,
        gid=facts.user.gid,
        isolation=isolation,
        bwrap=_launch(facts, network) if isolation == "bwrap" else None,
        hostname=HOSTNAME,
        mounts=mounts,
        enter_ops=base_ops(facts, mounts, low_ports=egress is not None) if isolation == "bwrap" else (),
        tree=_tree(policy, facts, mounts, allowed),
        env=environment.variables,
        dropped_env=environment.dropped,
        home=home,
        seccomp=seccomp,
        seccomp_digest=digest,
        landlock=landlock,
        cmd_scope=scope,
        limits=limits,
        network_mode=network,
        egress=egress,
        layers=layers,
        hazards=hazards(policy, facts, allowed, isolation),
        toolchains=_shown_tools(facts, mounts),
        policy_digest=policy.digest,
        arch=facts.arch,
        net_rules=net_rules,
        scratch=scratch,
    )
    if policy.lockdown:
        refuse_under_lockdown(policy, plan)
    return plan


def _scratch(policy: Policy, facts: HostFacts) -> bytes:
    """Return a place for temporary files that no other workspace and no other policy has."""
    from hashlib import sha256

    name = sha256(facts.workspace.path + b"\0" + policy.digest.encode()).hexdigest()[:24]
    return facts.scratch + b"/vectora-jail-%d-%s" % (facts.user.uid, name.encode())


def _launch(facts: HostFacts, network: str) -> BwrapLaunch:
    path = facts.bwrap.path or b""
    return BwrapLaunch(
        path, HOSTNAME, share_net=network == "host", disable_userns=facts.bwrap.disable_userns.ok
    )


def _egress(policy: Policy, network: str, *, private: bool) -> tuple[Any, Any]:
    if network != "allowlist":
        return None, None
    from vectora_jail.netplan import plan_names
    from vectora_jail.netrules import NetRules

    rules = NetRules.build(
        policy.network.allow,
        policy.network.deny,
        policy.network.hosts,
        private_addresses=private,
    )
    return plan_names(rules), rules


def _hosts(policy: Policy, egress: Any) -> tuple[tuple[bytes, bytes], ...]:
    lines = [line.split() for line in (egress.hosts_lines if egress is not None else ())]
    found = {name.encode(): address.encode() for address, *names in lines for name in names}
    if egress is None and policy.network.mode == "host":
        found.update(
            {name.encode(): str(address).encode() for name, address in dict(policy.network.hosts).items()}
        )
    return tuple(sorted(found.items()))


def _without_namespaces(mounts: Iterable[Mount], scratch: bytes) -> tuple[Mount, ...]:
    """Return what of a view Landlock alone can hold: rights on the host's own paths, nothing private."""
    kept = [mount for mount in mounts if mount.is_bind]
    kept += [
        Mount("ro", m.dest, m.dest, why=m.why)
        for m in mounts
        if m.kind == "data" and m.dest.startswith(b"/etc/")
    ]
    kept.append(Mount("rw", scratch, scratch, why="private"))
    kept += [Mount("proc", b"/proc"), Mount("dev", b"/dev")]
    return tuple(sorted(kept, key=lambda m: (m.dest.count(b"/"), m.dest)))


def _tree(
    policy: Policy,
    facts: HostFacts,
    mounts: tuple[Mount, ...],
    exceptions: frozenset[bytes],
) -> dict[str, Any]:
    """Return what the tree watch has to cover, protect and look at."""
    from vectora_jail.masks import split_patterns

    workspace, home = facts.workspace.path, facts.user.home.path
    floor = policy.ceiling.mask_floor if policy.ceiling is not None else ()
    rules = split_patterns(floor, (*policy.mask, *policy.mask_add), workspace=workspace, home=home)
    roots = [[m.dest, m.kind == "rw"] for m in mounts if m.is_bind and m.why in ("grant", "repository")]
    secrets = (*facts.sensitive, *facts.etc_secrets)
    places = by_place(mounts)
    hidden = {path for path in secrets if path not in exceptions and _inside_bind(places, path)}
    hidden.update(path for path in facts.sockets if _shown_by_default(places, path))
    protect = {workspace + b"/vectora.toml", *(fact.path for fact in facts.protect)}
    return {
        "workspace": workspace,
        "roots": roots,
        "masks": [[rule.pattern, rule.negate, rule.floor] for rule in rules],
        "mask_paths": sorted(hidden),
        "protect": sorted(protect),
        "git": {"off": 0, "config": 1, "read-only": 2}[policy.protect_git],
        "max_entries": SCAN_ENTRIES,
        "max_ms": SCAN_MS,
        "max_watches": WATCHES_MAX,
        "uid0": int(facts.user.uid == 0),
    }


def _shown_by_default(places: Mapping[bytes, Mount], path: bytes) -> bool:
    above = nearest(places, path)
    return above is not None and above.is_bind and above.why not in ("grant", "socket")


def _inside_bind(places: Mapping[bytes, Mount], path: bytes) -> bool:
    above = nearest(places, path)
    return above is not None and above.is_bind


def _seccomp(
    policy: Policy, facts: HostFacts, limits: LimitPlan, isolation: str
) -> tuple[bytes | None, str, Layer]:
    from vectora_jail.seccomp import filter_for

    made = filter_for(
        policy,
        arch=facts.arch,
        lockdown=policy.lockdown,
        disk_accounting=bool(limits.disk),
        landlock_only=isolation == "landlock",
        uid0=facts.user.uid == 0,
    )
    return made.program or None, made.digest, Layer("seccomp", made.state, made.detail)


def _landlock(
    facts: HostFacts, mounts: tuple[Mount, ...], isolation: str, network: str
) -> tuple[dict[str, Any] | None, int, Layer]:
    from vectora_jail.landlock import ruleset

    # one rule for /etc as a whole: what lies there is what was chosen, and nothing of it is writable
    seen = [m for m in mounts if not (m.kind in ("data", "ro") and is_below(m.dest, b"/etc", strict=True))]
    if len(seen) < len(mounts) and isolation == "bwrap":
        mounts = (*seen, Mount("ro", b"/etc"))
    made = ruleset(mounts, facts.landlock_abi, isolation=isolation, network=network, uid0=facts.user.uid == 0)
    table = None if made.table is None else dict(made.table)
    return table, made.cmd_scope, Layer("landlock", made.state, made.detail)


def _shown_tools(facts: HostFacts, mounts: Iterable[Mount]) -> tuple[tuple[str, bytes], ...]:
    shown = {m.dest for m in mounts if m.why.startswith("toolchain")}
    return tuple(
        (home.name, fact.path) for home in facts.toolchains for fact in home.paths if fact.path in shown
    )
