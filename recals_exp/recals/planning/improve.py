"""Local search on exact schedules: hold what is re-run, where there is room or where it pays more than what is there.

Why after a planner: every planner rounds (segments, memory levels, one level), and leaves room that only the exact schedule
shows. Each move here is judged by unrolling it, so the result is never worse than what came in.

Moves
1. *Fill*: an op re-run at miss e ran before, at a miss i < e or in forward. Holding its outputs from i to e saves it and all
   that only it needed in that rebuild (the ops it dominates). Taken in order of cost saved per byte while there is room in
   every place between i and e.
2. *Exchange*: where there is no room, the holdings that save least per byte make place, if together they save less.
3. *Shake*: a random re-run op is held against the odds, or holdings around a random place are let go of; then 1 and 2. Kept if it
   costs no more (iterated local search).

Work is counted in ops and fetches visited, not in seconds, and the random numbers are seeded: the same input gives the same plan on
any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import FORWARD, Problem
from .unroll import Holding, Schedule, Until, Wishes, unroll

_ROOT = -1
_WORK_PER_UNROLL = 50  # fixed part, in visits
_LONGEST_PATH = 16  # ops climbed in a dominator tree to find a clash; a missed one only makes an estimate worse
_MOST_KNOWN = 20_000
_SHAKE_SIZES = (1, 1, 2, 3, 5, 8, 13)
_FORCE_SHARE = 0.6
_FORCE_NOISE = 0.7  # standard deviation of the logarithm of a holding's worth

_Wished = dict[int, set[int]]
_Ends = dict[tuple[int, int], int]


@dataclass(slots=True)
class _Candidate:
    """Hold the outputs of an op from ``first_place`` to the miss that re-runs it."""

    values: tuple[int, ...]
    nbytes: int
    gain: float  # cost saved
    begin: int  # time
    first_place: int
    miss: int  # index
    fetch: int  # its fetch
    op: int


@dataclass(slots=True)
class _Rebuild:
    """One miss as a dominator tree of ops; its root stands for the targets."""

    parent: dict[int, int]
    gain: dict[int, float]  # cost of the op and all it dominates
    made: dict[int, list[int]]  # op -> values it made


class Improver:
    """Improves schedules of one problem until ``work`` ops and fetches have been visited."""

    def __init__(self, problem: Problem, work: int) -> None:
        self.problem, self.capacity = problem, problem.capacity
        self.work_left = work
        self.known: dict[tuple[object, ...], _Rebuild] = {}  # most misses are the same from one schedule to the next
        # Schedules closer than this cost the same: rounding must not look like progress.
        self.epsilon = 1e-9 * problem.record.step_cost

    def polish(self, schedule: Schedule) -> Schedule:
        """Moves 1 and 2 until neither helps."""
        best = self._fill_up(schedule)
        tried: set[tuple[int, int]] = set()
        while self.work_left > 0:
            better = self._exchange(best, tried)
            if better is None:
                break
            best = better
        return best

    def shake(self, schedule: Schedule, seed: int = 0) -> Schedule:
        """Move 3 until the work is used up."""
        rng = random.Random(seed)
        best = schedule
        while self.work_left > 0:
            holdings = [h for h in best.holdings if h.last_use > h.begin]
            if not holdings or best.cost <= self.epsilon:
                break
            kicked = self._force(best, rng) if rng.random() < _FORCE_SHARE else None
            trial = self.polish(self._unroll(*(kicked or self._let_go(best, holdings, rng))))
            if trial.cost <= best.cost + self.epsilon:
                best = trial
        return best

    def _let_go(self, schedule: Schedule, holdings: list[Holding], rng: random.Random) -> tuple[_Wished, _Ends]:
        place = rng.randrange(-1, len(schedule.misses))
        near = [h for h in holdings if h.first_place <= place <= h.last_place] or holdings
        near.sort(key=lambda h: (self.problem.producer[h.value], h.value, h.begin))
        size = min(len(near), rng.choice(_SHAKE_SIZES))
        start = rng.randrange(len(near))
        return _without(schedule, near[start : start + size] if rng.random() < 0.5 else rng.sample(near, size))

    def _force(self, schedule: Schedule, rng: random.Random) -> tuple[_Wished, _Ends] | None:
        candidates, _ = self._candidates(schedule)
        if not candidates:
            return None
        (candidate,) = rng.choices(candidates, weights=[c.gain for c in candidates])
        losses = [(loss * math.exp(rng.gauss(0.0, _FORCE_NOISE)), 0.0, h) for loss, _, h in self._losses(schedule)]
        losses.sort(key=lambda item: (item[0], item[2].value, item[2].begin))
        victims = self._victims(schedule.free, losses, candidate)
        if victims is None:
            return None
        wishes, until = _without(schedule, victims)
        _add(wishes, until, candidate)
        return wishes, until

    def _unroll(self, wishes: Wishes, until: Until) -> Schedule:
        schedule = unroll(self.problem, wishes, until)
        visited = self.problem.n_fetches + len(schedule.holdings) + sum([len(miss.made) for miss in schedule.misses])
        self.work_left -= visited + _WORK_PER_UNROLL
        return schedule

    # -- move 1 ----------------------------------------------------------------------------------------------------

    def _fill_up(self, schedule: Schedule) -> Schedule:
        """Fill until nothing fits any more."""
        share = 1.0
        while self.work_left > 0:
            candidates, rebuilds = self._candidates(schedule)
            taken = self._fitting(schedule, candidates, rebuilds)
            if not taken:
                return schedule
            taken = taken[: max(1, round(share * len(taken)))]
            wishes, until = schedule.wishes(), schedule.until()
            for candidate in taken:
                _add(wishes, until, candidate)
            filled = self._unroll(wishes, until)
            if filled.cost < schedule.cost - self.epsilon:
                schedule = filled
            elif len(taken) == 1:
                return schedule
            else:
                share /= 4  # estimates clashed: take fewer at once
        return schedule

    def _candidates(self, schedule: Schedule) -> tuple[list[_Candidate], list[_Rebuild]]:
        """Every op re-run, with what holding its outputs would save; most per byte first."""
        nbytes, saved, misses = self.problem.nbytes, self.problem.saved, schedule.misses
        ran_at: dict[int, int] = {}  # op -> last miss that ran it
        found: list[_Candidate] = []
        rebuilds: list[_Rebuild] = []
        for index, miss in enumerate(misses):
            key = (miss.value, miss.hold, *miss.made)
            rebuild = self.known.get(key)
            if rebuild is None:
                rebuild = self.known[key] = self._dominators(miss.value, miss.hold, miss.made, miss.ops)
                self.work_left -= 2 * len(miss.ops)
            rebuilds.append(rebuild)
            for op in miss.ops:
                values = rebuild.made[op]
                size = sum([nbytes[v] for v in values])
                place = ran_at.get(op, -1)
                ran_at[op] = index
                gain = rebuild.gain[op]
                if place < 0 and not all(saved[v] for v in values):
                    continue  # forward holds saved values only
                if size <= self.capacity and gain > 0:
                    begin = misses[place].fetch if place >= 0 else FORWARD
                    found.append(_Candidate(tuple(values), size, gain, begin, place, index, miss.fetch, op))
            self.work_left -= len(miss.ops)
        if len(self.known) > _MOST_KNOWN:
            self.known.clear()
        found.sort(key=lambda c: (-c.gain / (c.nbytes + 1), c.miss - c.first_place, c.miss, c.op))
        return found, rebuilds

    def _dominators(self, missed: int, hold: tuple[int, ...], made: list[int], ops: list[int]) -> _Rebuild:
        producer, inputs, cost = self.problem.producer, self.problem.inputs, self.problem.cost
        rebuilt = set(made)
        made_by: dict[int, list[int]] = {op: [] for op in ops}
        for v in made:
            made_by[producer[v]].append(v)
        parent = {producer[v]: _ROOT for v in (missed, *hold)}
        depth = {_ROOT: 0}
        for op in reversed(ops):  # readers before what they read
            depth[op] = depth[parent[op]] + 1
            for u in inputs[op]:
                if u in rebuilt:
                    below = producer[u]
                    above = parent.get(below)
                    if above is None:
                        parent[below] = op
                    elif above != _ROOT:
                        parent[below] = _meet(parent, depth, above, op)
        gain = {op: cost[op] for op in ops}
        for op in ops:
            above = parent[op]
            if above != _ROOT:
                gain[above] += gain[op]
        return _Rebuild(parent, gain, made_by)

    def _fitting(self, schedule: Schedule, candidates: list[_Candidate], rebuilds: list[_Rebuild]) -> list[_Candidate]:
        """Candidates that fit together, greedily; at most one on each path of a dominator tree."""
        free = schedule.free.copy()
        taken: list[_Candidate] = []
        above: list[set[int]] = [set() for _ in rebuilds]  # ops with a chosen one below them, or chosen
        chosen: list[set[int]] = [set() for _ in rebuilds]
        for c in candidates:
            if free[c.miss] < c.nbytes or free[c.first_place + 1] < c.nbytes or c.op in above[c.miss]:
                continue
            span = free[c.first_place + 1 : c.miss + 1]
            if int(span.min()) < c.nbytes:
                continue
            parent, picked, marked = rebuilds[c.miss].parent, chosen[c.miss], above[c.miss]
            op, path = c.op, [c.op]
            while (op := parent[op]) != _ROOT and op not in picked and len(path) < _LONGEST_PATH:
                path.append(op)
            if op in picked:
                continue
            picked.add(c.op)
            marked.update(path)
            span -= c.nbytes
            taken.append(c)
        self.work_left -= len(candidates) // 2
        return taken

    # -- move 2 ----------------------------------------------------------------------------------------------------

    def _exchange(self, schedule: Schedule, tried: set[tuple[int, int]]) -> Schedule | None:
        """The first exchange that pays, or None."""
        candidates, _ = self._candidates(schedule)
        losses = self._losses(schedule)
        candidates.sort(key=lambda c: (-c.gain, c.miss, c.op))
        for c in candidates:
            if self.work_left <= 0:
                return None
            if (c.op, c.fetch) in tried:
                continue
            victims = self._victims(schedule.free, losses, c)
            if victims is None:
                continue
            tried.add((c.op, c.fetch))
            wishes, until = _without(schedule, victims)
            _add(wishes, until, c)
            trial = self._unroll(wishes, until)
            if trial.cost < schedule.cost + c.gain:
                trial = self._fill_up(trial)
            if trial.cost < schedule.cost - self.epsilon:
                return trial
        return None

    def _victims(
        self, free: NDArray[np.int64], losses: list[tuple[float, float, Holding]], c: _Candidate
    ) -> list[Holding] | None:
        """The cheapest holdings per byte whose leaving makes room for ``c``; None if they save as much as it does."""
        low, high = c.first_place, c.miss - 1  # places
        excess = c.nbytes - free[low + 1 : high + 2]
        most = int(excess.max())
        victims: list[Holding] = []
        lost = 0.0
        for _, loss, holding in losses:
            if most <= 0:
                break
            first, last = max(holding.first_place, low) - low, min(holding.last_place, high) - low
            self.work_left -= 1
            if first > last or holding.value in c.values or int(excess[first : last + 1].max()) <= 0:
                continue
            lost += loss
            if lost >= c.gain:
                return None
            victims.append(holding)
            excess[first : last + 1] -= self.problem.nbytes[holding.value]
            most = int(excess.max())
        return victims if most <= 0 else None

    def _losses(self, schedule: Schedule) -> list[tuple[float, float, Holding]]:
        """(cost saved per byte, cost saved, holding), least per byte first: what rebuilding it at its first use would cost."""
        problem = self.problem
        spans: dict[int, list[tuple[int, int]]] = {}
        for holding in schedule.holdings:
            spans.setdefault(holding.value, []).append((holding.begin, holding.last_use))
        rebuilt_at = {miss.fetch: set(miss.made) for miss in schedule.misses}
        losses = []
        for holding in schedule.holdings:
            use = holding.first_use
            there = rebuilt_at.get(use, ())
            cost = 0.0
            seen = {holding.value}
            stack = [holding.value]
            while stack:
                op = problem.producer[stack.pop()]
                cost += problem.cost[op]
                self.work_left -= 1
                for u in problem.inputs[op]:
                    if u not in seen and u not in there:
                        seen.add(u)
                        if not any(begin < use <= last for begin, last in spans.get(u, ())):
                            stack.append(u)
            losses.append((cost / (problem.nbytes[holding.value] + 1), cost, holding))
        losses.sort(key=lambda item: (item[0], item[2].value, item[2].begin))
        return losses


def _without(schedule: Schedule, victims: list[Holding]) -> tuple[_Wished, _Ends]:
    """The schedule's wishes without some of its holdings."""
    wishes = schedule.wishes()
    for holding in victims:
        wishes.get(holding.begin, set()).discard(holding.value)
    return wishes, schedule.until()


def _add(wishes: _Wished, until: _Ends, c: _Candidate) -> None:
    wishes.setdefault(c.begin, set()).update(c.values)
    for v in c.values:
        until[v, c.begin] = max(until.get((v, c.begin), c.fetch), c.fetch)


def _meet(parent: Mapping[int, int], depth: Mapping[int, int], a: int, b: int) -> int:
    """The deepest op that dominates both."""
    while a != b:
        if depth[a] >= depth[b]:
            a = parent[a]
        else:
            b = parent[b]
    return a
