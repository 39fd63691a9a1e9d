"""The planner: many candidates, each made exact and improved, the cheapest that keeps the limit.

No single method wins everywhere: the bound's own solution is hard to beat where much is kept, one level of stages in
between, several levels where little is kept, and what is cheap to rebuild should often be left out of all of them. So:

1. candidates: nothing kept, FIFO, the bound's solution at and below the limit, single-level programs at several cuts,
   multi-level recursions at several prices of laziness and several shares of the limit, a plan for a smaller limit, and any
   plan the caller brings (DTR, simulated);
2. each becomes an exact schedule (`unroll`); the better half goes on, twice, with more local search each time (`improve`);
3. the best few are shaken, then the best of them, until the work is used up;
4. the judge (`checker`) interprets the result; it must agree on the cost to rounding.

Work is counted in ops visited, so that a plan depends on the record, the limit and the effort alone. A list of limits is planned
from the smallest to the largest, each starting from the plan before: the curve never rises with the budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..record import TapeRecord
from .bound import Bound, BoundModel
from .ceiling import Ceiling, Totals
from .checker import Verdict, check
from .fifo import fifo_wishes
from .improve import Improver
from .multi_level import MultiLevel
from .plan import Plan, PlanError
from .problem import FORWARD, Problem
from .segments import build_segments, choose_cuts
from .settling import Entry, Work, press, settle, shaken
from .single_level import single_level_wishes
from .unroll import Until, Wishes, tighten, to_plan

_WORK_LEAST, _WORK_MOST = 3_000_000, 8_000_000
"""Ops and fetches visited for one plan at effort 1: about three seconds of one core for a few hundred ops (most), ten for
2,500 and forty for 10,000 (least; fixed costs add to it)."""

_WORK_HALVES_AT_OPS = 500

_BOUND_SHARES = (1.0, 0.85, 0.7, 0.5)  # of the capacity: the rest is left for rebuilding
_STAGES = (4, 8, 16)
_LAZINESS = (0.0, 0.1, 0.5, 0.7)  # price per byte, in units of (forward cost / cache bytes)
_LEVEL_SHARES = (1.0, 0.9, 0.8, 0.7)  # of the capacity
_SEGMENTS, _LEVELS = 64, 200
_BIG_PROGRAM_OPS = 4000  # above: the bound's relaxation, no single-level programs
_HOPELESS_RERUNS = 12  # times the ops of forward
_FIRST_ROUND, _SECOND_ROUND, _SEMIFINAL, _FINAL = 0.2, 0.15, 0.35, 0.3  # shares of the work
_FINALISTS = 3
_SETTLING = 0.02  # of the work, each time a schedule is brought under the ceiling
_PRESSED, _PRESSING = 6, 0.5  # schedules that are pressed, and work for it beside the rest
_PRESSING_POINTS = 0.5  # a lower peak may cost so many percent of a step
_PRESSING_SHARE = 0.05  # ... or this share of the plan's cost


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate plan, as it came and after local search."""

    origin: str
    overhead_pct: float  # made exact
    improved_pct: float | None  # None: it was dropped before local search


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, judged, with its distance to the bound."""

    plan: Plan
    verdict: Verdict
    bound: Bound
    candidates: tuple[Candidate, ...]
    planning_s: float

    @property
    def above_bound_pct(self) -> float:
        """Percent of a step that the plan costs more than the bound."""
        return self.verdict.overhead_pct - self.bound.overhead_pct


def make_plan(
    record: TapeRecord,
    limit_bytes: int,
    *,
    effort: float = 1.0,
    others: Iterable[Plan] = (),
    seed: int = 0,
    ceiling: Ceiling | None = None,
    totals: Totals | None = None,
) -> Planned:
    """The best plan found within ``limit_bytes``.

    Args:
        record: one profiled step.
        limit_bytes: the held set never exceeds this.
        effort: scales the work of the local search.
        others: plans to beat, e.g. DTR's; they must keep the limit.
        seed: of the local search.
        ceiling: the step's peak is held down as well: the plan keeps it, or comes as near as was found.
        totals: the step's peak is pressed as low as comes cheap (without a ceiling).
    """
    return _plan_one(record, limit_bytes, BoundModel(record), list(others), effort, seed, ceiling, totals)


def make_plans(
    record: TapeRecord,
    limits_bytes: Sequence[int],
    *,
    effort: float = 1.0,
    others: dict[int, tuple[Plan, ...]] | None = None,
    seed: int = 0,
    totals: Totals | None = None,
    progress: Callable[[Planned], None] | None = None,
) -> tuple[Planned, ...]:
    """A plan for each limit, in the order given; a larger limit never costs more (see `make_plan`).

    With ``totals`` the step's peaks are pressed as low as comes cheap, and do not rise where the limit falls.
    """
    model = BoundModel(record)
    ascending = sorted(set(limits_bytes))
    done: list[Planned] = []
    for limit_bytes in ascending:
        rivals = list((others or {}).get(limit_bytes, ()))
        if done:
            rivals.append(replace(done[-1].plan, limit_bytes=limit_bytes))
        done.append(_plan_one(record, limit_bytes, model, rivals, effort, seed, None, totals))
        if progress is not None:
            progress(done[-1])
    if totals is not None:
        done = _in_order(record, model, done, others or {}, effort, seed, totals)
    made = dict(zip(ascending, done, strict=True))
    return tuple(made[limit_bytes] for limit_bytes in limits_bytes)


def _in_order(
    record: TapeRecord,
    model: BoundModel,
    planned: list[Planned],
    others: dict[int, tuple[Plan, ...]],
    effort: float,
    seed: int,
    totals: Totals,
) -> list[Planned]:
    """Plans by rising limit whose peaks do not fall and whose costs do not rise."""
    done = list(planned)
    peaks = [max(totals(entry.plan)) for entry in done]
    for i in range(len(done) - 2, -1, -1):
        if peaks[i] <= peaks[i + 1]:
            continue
        limit_bytes = done[i].plan.limit_bytes
        under = Ceiling(peaks[i + 1], totals)
        again = _plan_one(record, limit_bytes, model, list(others.get(limit_bytes, ())), effort, seed, under)
        peak = max(totals(again.plan))
        if peak < peaks[i]:
            done[i], peaks[i] = again, peak
    for i in range(1, len(done)):
        if done[i - 1].verdict.rerun_cost < done[i].verdict.rerun_cost:  # what fits a smaller limit fits this one
            plan = replace(done[i - 1].plan, limit_bytes=done[i].plan.limit_bytes, bound_pct=done[i].plan.bound_pct)
            done[i] = replace(done[i], plan=plan, verdict=done[i - 1].verdict)
    return done


def _plan_one(
    record: TapeRecord,
    limit_bytes: int,
    model: BoundModel,
    rivals: list[Plan],
    effort: float,
    seed: int,
    ceiling: Ceiling | None = None,
    totals: Totals | None = None,
) -> Planned:
    start = time.perf_counter()
    problem = Problem(record, limit_bytes, ceiling=ceiling)
    if problem.rooms is not None:  # programs and recursions know one limit: the most that the ceiling leaves
        most = problem.rooms.most_bytes() + limit_bytes - problem.capacity
        limit_bytes = min(limit_bytes, most)
        problem = Problem(record, limit_bytes, ceiling=ceiling)
    small_enough = len(problem.relevant_ops) <= _BIG_PROGRAM_OPS
    at_most = limit_bytes - problem.capacity + (problem.rooms.kept_bytes() if problem.rooms else problem.capacity)
    bound = model.solve(min(limit_bytes, at_most), integral=small_enough)
    entries = [
        Entry(origin, problem, schedule, schedule.cost)
        for origin, wishes, until in _starts(problem, model, bound, rivals, small_enough)
        for schedule in [tighten(problem, wishes, until)]
    ]
    entries = _not_hopeless(problem, entries)
    work = round(effort * max(_WORK_LEAST, _WORK_MOST / (1 + len(problem.relevant_ops) / _WORK_HALVES_AT_OPS)))
    entries = _round(entries, round(work * _FIRST_ROUND))
    field = _round(entries[: max(1, len(entries) // 4)], round(work * _SECOND_ROUND))
    finalists = field[:_FINALISTS]
    settling = round(work * _SETTLING)
    semifinal = round(work * _SEMIFINAL / len(finalists))
    # followed to the letter, not as a start; a ceiling they need not keep
    judged = [(rival, check(record, rival, limit_bytes)) for rival in rivals] if ceiling is None else []
    if ceiling is None:
        for entry in finalists:
            entry.schedule = Improver(problem, semifinal).shake(entry.schedule, seed)
        best = min(finalists, key=lambda entry: entry.rank)
        best.schedule = Improver(problem, round(work * _FINAL)).shake(best.schedule, seed + 1)
        if totals is not None:
            cost = best.schedule.cost
            dearest = cost + max(_PRESSING_POINTS / 100 * record.step_cost, _PRESSING_SHARE * cost)
            dearest = min([dearest, *(verdict.rerun_cost for _, verdict in judged if verdict.rerun_cost >= cost)])
            others = [entry for entry in entries if entry is not best][:_PRESSED]
            best = press(best, others, totals, dearest, settling, Work(work * _PRESSING))
    else:
        finalists = [settle(entry, ceiling, settling) for entry in finalists]
        finalists = [shaken(entry, ceiling, semifinal, settling, seed) for entry in finalists]
        best = min(finalists, key=lambda entry: entry.rank)
        best = shaken(best, ceiling, round(work * _FINAL), settling, seed + 1)
    was_planned = best.origin.startswith("planned")  # it grew from a rival that was a plan already
    plan = to_plan(problem, best.schedule, best.origin if was_planned else f"planned ({best.origin})")
    verdict = check(record, plan)
    assert abs(verdict.rerun_cost - best.schedule.cost) <= 1e-6 * record.step_cost, (verdict, best.schedule.cost)
    for rival, rival_verdict in judged:
        if rival_verdict.rerun_cost < verdict.rerun_cost:
            plan, verdict = rival, rival_verdict
    plan = replace(
        plan,
        limit_bytes=limit_bytes,
        overhead_pct=verdict.overhead_pct,
        bound_pct=min(bound.overhead_pct, verdict.overhead_pct),
    )
    candidates = tuple(
        Candidate(
            entry.origin,
            record.overhead_pct(entry.first_cost),
            record.overhead_pct(entry.schedule.cost) if entry.improved else None,
        )
        for entry in entries
    )
    return Planned(plan, verdict, bound, candidates, time.perf_counter() - start)


def _round(entries: list[Entry], work: int) -> list[Entry]:
    """Local search on each, with equal work; cheapest first. What one leaves of its work goes to the next."""
    entries = sorted(entries, key=lambda entry: entry.rank)
    seen: set[int] = set()
    left = work
    for index, entry in enumerate(entries):
        cost_key = hash((entry.schedule.cost, entry.schedule.keep, len(entry.schedule.misses)))
        if cost_key in seen:
            continue
        seen.add(cost_key)
        improver = Improver(entry.problem, left // (len(entries) - index))
        given = improver.work_left
        entry.schedule = improver.polish(entry.schedule)
        entry.improved = True
        left -= given - max(improver.work_left, 0)
    return sorted(entries, key=lambda entry: entry.rank)


def _not_hopeless(problem: Problem, entries: list[Entry]) -> list[Entry]:
    """Without starts that re-run so much that repairing them takes the work of all others; at least the cheapest stays."""
    most = _HOPELESS_RERUNS * len(problem.relevant_ops)
    hopeful = [e for e in entries if sum(len(miss.ops) for miss in e.schedule.misses) <= most]
    return hopeful or [min(entries, key=lambda entry: entry.schedule.cost)]


def _starts(
    problem: Problem, model: BoundModel, bound: Bound, rivals: list[Plan], small_enough: bool
) -> Iterator[tuple[str, Wishes, Until | None]]:
    yield "lazy", {}, None
    yield "fifo", fifo_wishes(problem), None
    for rival in rivals:
        yield rival.origin, *_wishes_of(problem, rival)
    for share in _BOUND_SHARES:
        solution = (
            bound
            if share == 1.0
            else model.solve(problem.limit_bytes - round((1 - share) * problem.capacity), integral=False)
        )
        yield f"bound at {share:.0%}", {FORWARD: set(solution.keep)}, None
    if small_enough:
        for stages in _STAGES:
            wishes = single_level_wishes(problem, stages)
            if wishes is not None:
                yield f"single-level, {stages} stages", wishes, None
    average = problem.record.forward_cost / max(problem.record.cache_total_bytes, 1)
    seen: set[int] = set()
    for laziness in _LAZINESS:
        reduced = problem.reduced(laziness * average) if laziness else problem
        if len(reduced.fetches_of) in seen:
            continue
        seen.add(len(reduced.fetches_of))
        segments = build_segments(reduced, choose_cuts(reduced, _SEGMENTS))
        tables = MultiLevel(reduced, segments, _LEVELS, [frozenset(bound.keep)])
        for share in _LEVEL_SHARES:
            wishes = tables.wishes(round(share * _LEVELS))
            if wishes is not None:
                yield f"multi-level, laziness {laziness:g}, {share:.0%}", wishes, None


def _wishes_of(problem: Problem, plan: Plan) -> tuple[dict[int, set[int]], dict[tuple[int, int], int]]:
    """A plan as wishes: its steps at the fetches at which it takes them."""
    wishes: dict[int, set[int]] = {FORWARD: set(plan.keep)}
    until: dict[tuple[int, int], int] = {}
    begin = dict.fromkeys(plan.keep, FORWARD)
    nth: dict[int, int] = {}
    at_hand = -1
    for fetch, value in enumerate(problem.fetch_value):
        if value not in begin and value != at_hand:
            step = plan.step_by_miss.get((value, nth.get(value, 0)))
            nth[value] = nth.get(value, 0) + 1
            at_hand = value
            if step is not None:
                for v in step.discard:
                    if v in begin:
                        until[v, begin.pop(v)] = fetch
                wishes[fetch] = set(step.hold)
                begin.update(dict.fromkeys(step.hold, fetch))
        for v in problem.frees[fetch]:
            begin.pop(v, None)
    return wishes, until


def smallest_limit_bytes(record: TapeRecord) -> int:
    """The smallest limit any plan can keep: what is pinned."""
    low, high = 0, max(record.cache_total_bytes, 1) + sum(v.nbytes for v in record.values if v.pinned)
    while low < high:
        middle = (low + high) // 2
        try:
            Problem(record, middle)
        except PlanError:
            low = middle + 1
        else:
            high = middle
    return low
