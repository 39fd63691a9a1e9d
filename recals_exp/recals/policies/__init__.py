"""Policies: what to hold, what to drop, what to rebuild together. Abstract (``Policy``) or final (all others)."""

from __future__ import annotations

from .base import Policy, StepPolicy, WatchingPolicy
from .dtr import Dtr
from .fifo import Fifo
from .planned import Planned

POLICIES: dict[str, type[Policy]] = {Fifo.name: Fifo, Dtr.name: Dtr, Planned.name: Planned}
"""Every policy by name: what ``policy=`` accepts, and what the conformance suite runs over."""


def make_policy(policy: str | Policy) -> Policy:
    """A policy by name, or the object given.

    Raises:
        ValueError: an unknown name; lists those that exist.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r} is not known; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()


__all__ = ["POLICIES", "Dtr", "Fifo", "Planned", "Policy", "StepPolicy", "WatchingPolicy", "make_policy"]
