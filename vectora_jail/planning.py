"""From a workspace and its policy to a plan: the one place that reads the host and then builds."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .facts import HostFacts
    from .plan import JailPlan
    from .policy import Policy

__all__ = ["make_plan"]

_plans: deque[tuple[Policy, HostFacts, JailPlan]] = deque(maxlen=8)


def make_plan(workspace: str, policy: Policy, options: Mapping[str, Any] | None = None) -> JailPlan:
    """Read the facts that this policy needs and return the plan; blocks for some milliseconds.

    Args:
        workspace: Absolute path.
        policy: Enabled and not refused.
        options: The embedder's `backend_options`: `bwrap` is an explicit path.

    Raises:
        PolicyError, UnsupportedPolicy, WorkerSpawnError: the plan cannot stand here, with the reason.
    """
    from .plan import build_plan
    from .probe import collect_facts

    facts = collect_facts(os.fsencode(workspace), policy, bwrap=(options or {}).get("bwrap"))
    # A plan follows from these two alone, so equal ones need no second building.
    for seen, known, plan in reversed(_plans):
        if known == facts and seen == policy:
            return plan
    plan = build_plan(policy, facts)
    _plans.append((policy, facts, plan))
    return plan
