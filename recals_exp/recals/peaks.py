"""Plans that look at the peak of the whole step: for a limit, with a peak as low as comes cheap, or for a target of the peak itself.

Both need a profile, which says what the step holds beside its cache (``step_memory.py``); plans that the engine makes in the
background, from a trace, have none and keep a limit only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .plans import StepPlan
from .policies.planned import default_planner
from .prediction import EFFORT, Profile, smallest_limit_bytes, totals_of
from .record import TapeRecord
from .simulate import pinned_bytes, rivals_of

if TYPE_CHECKING:
    from .planning.ceiling import Totals
    from .planning.plan import Plan

_LARGER, _LARGER_UP_TO_OPS, _ROUGH = 1.43, 1000, 0.02  # a limit looked at beside one's own, and the work for it
_HALVINGS = 7
_BY_LIMIT = (1.0, 0.85)  # of the limit with which DTR keeps the target: plans for these are candidates, too


def plan_step(profile: Profile, limit_bytes: int) -> StepPlan | None:
    """The plan for one limit, with a peak as low as comes cheap; None where everything fits, or where the step is refused."""
    record = profile.record
    room = limit_bytes - pinned_bytes(record)
    if limit_bytes < smallest_limit_bytes(record) or record.cache_total_bytes <= room:
        return None
    totals = totals_of(profile)
    return StepPlan(record, _not_above_larger(record, room, default_planner(record, room, totals), totals))


def _not_above_larger(record: TapeRecord, room: int, plan: Plan, totals: Totals) -> Plan:
    """The plan, or one whose peak is no higher than that of a rough plan for a larger limit (on a curve, all are compared)."""
    from .planning.ceiling import Ceiling
    from .planning.planner import make_plan

    larger, peak = round(_LARGER * room), max(totals(plan))
    if larger >= record.cache_total_bytes or len(record.ops) > _LARGER_UP_TO_OPS:
        return plan
    most = max(totals(make_plan(record, larger, effort=_ROUGH, totals=totals).plan))
    if peak <= most:
        return plan
    again = make_plan(record, room, effort=EFFORT, ceiling=Ceiling(most, totals)).plan
    return replace(again, limit_bytes=room) if max(totals(again)) < peak else plan


def plan_for_peak(profile: Profile, target_bytes: int, effort: float = 1.0) -> tuple[StepPlan, int]:
    """The plan that re-runs least while the step's predicted peak is at most ``target_bytes``, and that peak.

    Its cache is not held to one limit: it shrinks as gradients grow. ``plan.limit_bytes`` is the most it holds. A peak above
    the target is the lowest that was found. ``effort``: of planning (`prediction.py`, rule 4).
    """
    from .planning.ceiling import Ceiling
    from .planning.planner import make_plan

    record, totals = profile.record, totals_of(profile)
    pinned = pinned_bytes(record)
    by_limit = _by_limit(profile, target_bytes, effort / 2)
    room = max(profile.cache_total_bytes, profile.smallest_limit_bytes) - pinned
    planned = make_plan(record, room, effort=effort, others=by_limit, ceiling=Ceiling(target_bytes, totals))
    plans = [replace(planned.plan, limit_bytes=planned.verdict.peak_held_bytes), *by_limit]
    peaks = [max(totals(plan)) for plan in plans]
    best = min(range(len(plans)), key=lambda i: (max(0, peaks[i] - target_bytes), plans[i].overhead_pct))
    return StepPlan(record, plans[best]), peaks[best]


def _by_limit(profile: Profile, target_bytes: int, effort: float) -> list[Plan]:
    """Plans for one limit, of about that peak."""
    from .planning.planner import make_plan

    record = profile.record
    pinned = pinned_bytes(record)
    low, high = profile.smallest_limit_bytes, max(profile.cache_total_bytes, profile.smallest_limit_bytes)
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        keeps = profile.memory.peak_bytes(record, middle, "dtr") <= target_bytes
        low, high = (middle, high) if keeps else (low, middle)
    rooms = {max(round(share * low), profile.smallest_limit_bytes) - pinned for share in _BY_LIMIT}
    return [make_plan(record, room, effort=effort, others=rivals_of(record, room)).plan for room in sorted(rooms)]
