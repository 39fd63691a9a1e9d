"""The tape cut into segments at its narrow places, and what each range of segments needs, costs and holds.

Letters: segment ``k`` = ops in [cuts[k], cuts[k+1]); range [s, t) = segments s .. t-1; D(s, t) = the values whose fetch has its
home in the range; B(s, t) = the values made before the range that D(s, t) or its rebuild reads (the *border*).

    ops      |---- s ----|---- s+1 ---|---- .. ---|---- t-1 ---|
    forward  -> B(s,t) crosses here, everything in D(s,t) can be rebuilt from it
    backward                                        <- runs this way

Rules
1. A cut falls where the fewest bytes cross within its window, so that long skips and wide inner places cost little.
2. A border is exact for its own range: a skip that the range does not read is not in it.
3. Values alive across the right end of a range (fetched on both sides) are taken as there: the right side held them.
4. The first value that a rebuilt range is asked for need not be held: it stays at hand until the next miss (`plan.py`, rule 4).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import FORWARD, Problem


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep a segment from its (re-)run until its backward: hold ``keep``, rebuild the rest when it comes."""

    keep: tuple[int, ...]  # values made in the segment and asked for there
    kept: tuple[tuple[int, int], ...]  # (bytes, next segment that asks too) of each
    run_cost: float  # re-running the segment for `keep` and the border to its right
    last_run_cost: float  # the same without that border: nothing to the right needs it
    rest: tuple[int, ...]  # rebuilt in one go at the first miss; () = each by itself at its fetch
    rest_bytes: int
    rest_cost: float
    reads: tuple[int, ...]  # what rebuilding the rest reads of the left border
    unasked_bytes: int  # ... and backward itself never asks for

    def keep_bytes(self, t: int) -> int:
        """Bytes of ``keep`` in a range that ends at ``t``, without what the border to the right holds anyway."""
        return sum([nbytes for nbytes, next_asked in self.kept if next_asked >= t])


@dataclass(slots=True)
class Segments:
    """Tables over ranges; index [s, t] with s < t <= n."""

    n: int
    cuts: list[int]  # n + 1 op positions
    first_fetch: list[int]  # [k]: first fetch (in backward order) whose home is in a segment <= k
    border: dict[tuple[int, int], tuple[int, ...]]  # B(s, t)
    rebuild_cost: NDArray[np.float64]  # [s, t]: re-running what D(s, t) needs, once, from B(s, t)
    needed_bytes: NDArray[np.float64]  # [s, t]: bytes of D(s, t) made inside the range, without those of rules 3 and 4
    through_cost: NDArray[np.float64]  # [k]: re-running what later segments need of segment k
    border_growth: dict[
        tuple[int, int], NDArray[np.float64]
    ]  # (s', t) -> [s]: bytes of B(s', t) made at or after segment s
    asked_growth: dict[tuple[int, int], NDArray[np.float64]]  # the same, of the values of D(s', t) only
    spared: dict[tuple[int, int], int]  # the value of rule 4, where there is one
    home_segment: list[int]  # [fetch]: the segment whose backward asks
    made_in: list[int]  # [value]: segment that makes it
    asked_in: list[tuple[int, ...]]  # [value]: segments whose backward asks for it, ascending
    own: list[tuple[int, ...]]  # [k]: values made in segment k and asked for there first (in forward order)

    def alive_across(self, t: int) -> set[int]:
        """Values made before segment ``t`` and asked for on both sides of its left end (rule 3)."""
        return {
            v
            for v, asked in enumerate(self.asked_in)
            if len(asked) > 1 and self.made_in[v] < t and asked[0] < t <= asked[-1]
        }

    def needed(self, s: int, t: int) -> list[int]:
        """The values to hold when the whole range is rebuilt at once (rules 3 and 4)."""
        across = self.alive_across(t)
        spared = self.spared.get((s, t))
        return [
            v
            for k in range(s, t)
            for v in self.made_by(k)
            if self.asked_in[v][0] < t and v not in across and v != spared
        ]

    def asked_border(self, s: int, t: int) -> list[int]:
        """The part of the border that the backward of the range asks for."""
        return [] if s >= t else [v for v in self.border[s, t] if any(s <= k < t for k in self.asked_in[v])]

    def made_by(self, k: int) -> list[int]:
        """Values made in segment ``k`` that backward asks for."""
        return self._made_by[k]

    _made_by: list[list[int]]


def choose_cuts(problem: Problem, n_segments: int) -> list[int]:
    """At most ``n_segments`` segments, cut where the fewest bytes cross (rule 1).

    The heaviest segment that makes more than one value backward asks for is cut at its narrowest place until there are
    enough; weight = share of the cost + share of the asked bytes.
    """
    crossing = _crossing_bytes(problem)
    relevant = problem.relevant_ops
    total_cost = sum(problem.cost[op] for op in relevant) or 1.0
    asked_bytes = [sum(problem.nbytes[v] for v in outs if v in problem.fetches_of) for outs in problem.outputs]
    total_bytes = sum(asked_bytes) or 1
    makers = [op for op in relevant if asked_bytes[op]]
    weight = [0.0]
    for op, nbytes in enumerate(asked_bytes):
        share = problem.cost[op] / total_cost if problem.relevant_op[op] else 0.0
        weight.append(weight[-1] + share + nbytes / total_bytes)
    cuts = [0, len(problem.cost)]
    heap = [(-weight[-1], 0, len(problem.cost))]
    while heap and len(cuts) <= n_segments:
        _, low, high = heapq.heappop(heap)
        first, last = bisect_left(makers, low), bisect_left(makers, high) - 1
        if last <= first:
            continue
        # between its first and its last maker, so that both sides make something that is asked for
        middle = (weight[low] + weight[high]) / 2
        at = min(range(makers[first] + 1, makers[last] + 1), key=lambda c: (crossing[c], abs(weight[c] - middle), c))
        cuts.append(at)
        heapq.heappush(heap, (weight[low] - weight[at], low, at))
        heapq.heappush(heap, (weight[at] - weight[high], at, high))
    return sorted(cuts)


def _crossing_bytes(problem: Problem) -> list[int]:
    """[c]: bytes made before op c that an op at or after c reads, or a fetch whose home is at or after c asks for."""
    n_ops = len(problem.cost)
    last_read: dict[int, int] = {}
    for op in problem.relevant_ops:
        for v in problem.inputs[op]:
            last_read[v] = op
    for v, home in zip(problem.fetch_value, problem.fetch_home, strict=True):
        last_read[v] = max(last_read.get(v, 0), home)
    change = [0] * (n_ops + 2)
    for v, last in last_read.items():
        made = problem.producer[v]
        if last > made:  # what backward never asks for weighs double: it would be held for the cut alone
            weight = problem.nbytes[v] * (1 if v in problem.fetches_of else 2)
            change[made + 1] += weight
            change[last + 1] -= weight
    crossing, now = [], 0
    for c in range(n_ops + 1):
        now += change[c]
        crossing.append(now)
    return crossing


def build_segments(problem: Problem, cuts: list[int]) -> Segments:
    """All tables. Cost: one sweep over the tape for every right end."""
    n = len(cuts) - 1
    segment_of_op = [k for k in range(n) for _ in range(cuts[k], cuts[k + 1])]
    made_in = [segment_of_op[p] if p >= 0 else FORWARD for p in problem.producer]
    asked: list[set[int]] = [set() for _ in made_in]
    first_fetch = [problem.n_fetches] * n
    home_segment = [
        max(segment_of_op[home], made_in[v]) for home, v in zip(problem.fetch_home, problem.fetch_value, strict=True)
    ]
    for j in range(problem.n_fetches - 1, -1, -1):
        home = home_segment[j]
        asked[problem.fetch_value[j]].add(home)
        first_fetch[home] = j
    for k in range(1, n):  # a segment without fetches begins where the next one to its left does
        if first_fetch[k] == problem.n_fetches:
            first_fetch[k] = first_fetch[k - 1]
    asked_in = [tuple(sorted(a)) for a in asked]
    made_by: list[list[int]] = [[] for _ in range(n)]
    for v, where in enumerate(asked_in):
        if where:
            made_by[made_in[v]].append(v)
    segments = Segments(
        n=n,
        cuts=cuts,
        first_fetch=first_fetch,
        border={},
        rebuild_cost=np.zeros((n + 1, n + 1)),
        needed_bytes=np.zeros((n + 1, n + 1)),
        through_cost=np.zeros(n),
        border_growth={},
        asked_growth={},
        spared={},
        home_segment=home_segment,
        made_in=made_in,
        asked_in=asked_in,
        own=[tuple(v for v in made_by[k] if asked_in[v][0] == k) for k in range(n)],
        _made_by=made_by,
    )
    asked_by: list[list[int]] = [[] for _ in range(n)]
    for v, where in enumerate(asked_in):
        for k in where:
            asked_by[k].append(v)
    for t in range(1, n + 1):
        _sweep(problem, segments, asked_by, t)
    for k in range(n - 1):
        segments.through_cost[k], _ = _cost_inside(problem, segments, k, segments.border[k + 1, n], ())
    return segments


def _sweep(problem: Problem, segments: Segments, asked_by: list[list[int]], t: int) -> None:
    """Fill [s, t] for every s, leftwards: each step adds a segment to the range."""
    nbytes, inputs, outputs, costs = problem.nbytes, problem.inputs, problem.outputs, problem.cost
    made_in, asked_in, cuts = segments.made_in, segments.asked_in, segments.cuts
    across = segments.alive_across(t)
    missing: set[int] = set()
    needed_bytes, cost = 0, 0.0
    first, first_value = problem.n_fetches, FORWARD  # rule 4
    for s in range(t - 1, -1, -1):
        missing.update(v for v in asked_by[s] if v not in across)
        for op in range(cuts[s + 1] - 1, cuts[s] - 1, -1):
            made = [v for v in outputs[op] if v in missing]
            if made:
                cost += costs[op]
                missing.difference_update(made)
                missing.update(v for v in inputs[op] if v not in across)
        for v in segments.made_by(s):
            if asked_in[v][0] < t and v not in across:
                needed_bytes += nbytes[v]
                at = next(j for j in problem.fetches_of[v] if segments.home_segment[j] < t)
                if at < first:
                    first, first_value = at, v
        spared = 0
        if first_value != FORWARD and asked_in[first_value][0] >= s:
            spared = nbytes[first_value]
            segments.spared[s, t] = first_value
        segments.border[s, t] = tuple(sorted(missing))
        segments.rebuild_cost[s, t] = cost
        segments.needed_bytes[s, t] = needed_bytes - spared
        growth, asked_growth = np.zeros(s + 1), np.zeros(s + 1)
        for v in missing:
            growth[: made_in[v] + 1] += nbytes[v]
            if any(s <= k < t for k in asked_in[v]):
                asked_growth[: made_in[v] + 1] += nbytes[v]
        segments.border_growth[s, t] = growth
        segments.asked_growth[s, t] = asked_growth


def _cost_inside(
    problem: Problem, segments: Segments, k: int, targets: Iterable[int], there: Container[int]
) -> tuple[float, set[int]]:
    """Re-running what ``targets`` need of segment ``k`` given ``there``: its cost, and what it reads from before."""
    missing = {v for v in targets if v not in there}
    cost = 0.0
    for op in range(segments.cuts[k + 1] - 1, segments.cuts[k] - 1, -1):
        made = [v for v in problem.outputs[op] if v in missing]
        if made:
            cost += problem.cost[op]
            missing.difference_update(made)
            missing.update(v for v in problem.inputs[op] if v not in there)
    return cost, missing


def segment_options(problem: Problem, segments: Segments, k: int, keep_sets: Iterable[Container[int]]) -> list[Option]:
    """The ways to keep segment ``k``: everything, nothing, and its part of each of ``keep_sets``."""
    own = segments.own[k]
    right = segments.border.get((k + 1, segments.n), ())
    across = segments.alive_across(k + 1)
    options: dict[tuple[tuple[int, ...], bool], Option] = {}
    for keep in (own, (), *(tuple(v for v in own if v in chosen) for chosen in keep_sets)):
        if (keep, True) in options:
            continue
        there = {*keep, *across}
        rest = tuple(v for v in own if v not in there)
        kept = tuple(
            (problem.nbytes[v], segments.asked_in[v][1] if len(segments.asked_in[v]) > 1 else segments.n) for v in keep
        )
        run_cost, _ = _cost_inside(problem, segments, k, (*keep, *right), ())
        last_run_cost, _ = _cost_inside(problem, segments, k, keep, across)
        together, read = _cost_inside(problem, segments, k, rest, there)
        unasked_bytes = sum(problem.nbytes[v] for v in read if not any(a >= k for a in segments.asked_in[v]))
        rest_bytes = sum(problem.nbytes[v] for v in rest)
        options[keep, True] = Option(
            keep, kept, run_cost, last_run_cost, rest, rest_bytes, together, tuple(sorted(read)), unasked_bytes
        )
        if rest:
            alone = sum(_cost_inside(problem, segments, k, (v,), there)[0] * len(problem.fetches_of[v]) for v in rest)
            options[keep, False] = Option(
                keep, kept, run_cost, last_run_cost, (), 0, alone, tuple(sorted(read)), unasked_bytes
            )
    return list(options.values())
