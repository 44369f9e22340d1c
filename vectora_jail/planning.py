"""From a workspace and its policy to a plan: the one place that reads the host and then builds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .plan import JailPlan
    from .policy import Policy

__all__ = ["make_plan"]


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
    return build_plan(policy, facts)
