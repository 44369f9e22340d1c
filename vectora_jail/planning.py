"""From a workspace and its policy to a plan: the one place that reads the host and then builds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import JailPlan
    from .policy import Policy

__all__ = ["make_plan"]


def make_plan(workspace: str, policy: Policy) -> JailPlan:
    """Read the facts that this policy needs and return the plan; blocks for some milliseconds.

    Raises:
        PolicyError, UnsupportedPolicy, WorkerSpawnError: the plan cannot stand here, with the reason.
    """
    from .plan import build_plan
    from .probe import collect_facts

    return build_plan(policy, collect_facts(os.fsencode(workspace), policy))
