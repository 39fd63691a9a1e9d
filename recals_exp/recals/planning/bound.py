"""What no plan can beat: a lower bound per limit, and Revolve's optimum for uniform chains.

The bound is a mixed integer program over one moment, the end of forward. keep_v in {0, 1}: value v is held then; rerun_o in
[0, 1]: op o re-runs at least once afterwards. Minimise sum rerun_o cost_o subject to

1. every value that backward asks for is held or re-made: keep_v + rerun_producer(v) >= 1;
2. every input of a re-run op is held or re-made:         keep_u + rerun_producer(u) >= rerun_o;
3. the limit holds at that moment:                        sum keep_v bytes_v <= limit.

Whatever a policy does afterwards satisfies 1 to 3, so no policy costs less. For a fixed price per byte the program is a minimum
cut, which is why its relaxation is nearly tight and HiGHS takes a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..record import SOURCE, TapeRecord
from .plan import PlanError
from .solver import Program

_INTEGRAL_UP_TO = 12_000
"""Variables up to which values are kept whole or not at all; above, the relaxation (a slightly lower bound) is solved."""

_RELATIVE_GAP = 1e-3
_SAFETY = 1e-6  # relative: HiGHS keeps its constraints to about this


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound on the cost of re-run ops within a limit."""

    limit_bytes: int
    rerun_cost: float  # in the record's cost unit
    overhead_pct: float  # of a plain step
    gap_pct: float  # how far the solver's best solution is above the bound, percent of that solution
    integral: bool  # False: the relaxation was solved
    keep: tuple[int, ...]  # the solver's best solution, ascending; a good start for a plan, not a plan


class BoundModel:
    """The program of one record; solve it for as many limits as needed."""

    def __init__(self, record: TapeRecord) -> None:
        self.record = record
        values, ops = record.values, record.ops
        given = [v.producer == SOURCE or v.external for v in values]
        self.asked = sorted({v for kind, v in record.backward_events if kind == "fetch" and not given[v]})
        self.program = program = Program()
        self.keep: dict[int, int] = {}
        rerun: dict[int, int] = {}
        scale = record.forward_cost or 1.0
        stack = list(self.asked)
        seen = set(stack)
        freed = {v for kind, v in record.forward_events if kind == "free"}
        while stack:  # values and ops that may matter
            v = stack.pop()
            pinned = values[v].pinned
            self.keep[v] = program.variable(0.0, low=1.0 if pinned and v not in freed else 0.0, integral=True)
            op = values[v].producer
            if not pinned and op not in rerun:
                rerun[op] = program.variable(ops[op].cost / scale)
                for u in ops[op].inputs:
                    if not given[u] and u not in seen:
                        seen.add(u)
                        stack.append(u)
        for v in self.asked:
            if not values[v].pinned:
                program.at_least(1.0, {self.keep[v]: 1.0, rerun[values[v].producer]: 1.0})
        for op, variable in rerun.items():
            for u in ops[op].inputs:
                if not given[u] and not values[u].pinned:
                    program.at_least(0.0, {self.keep[u]: 1.0, rerun[values[u].producer]: 1.0, variable: -1.0})
        self.held = {variable: float(values[v].nbytes) for v, variable in self.keep.items()}
        self.pinned_bytes = sum(values[v].nbytes for v in self.keep if values[v].pinned and v not in freed)
        self.scale = scale

    def solve(self, limit_bytes: int, *, integral: bool = True, time_limit_s: float = 60.0) -> Bound:
        """The bound within ``limit_bytes``."""
        if self.pinned_bytes > limit_bytes:
            raise PlanError(
                f"the limit of {limit_bytes} bytes is below the {self.pinned_bytes} bytes that cannot be rebuilt and must "
                f"be held; raise the limit to at least {self.pinned_bytes} bytes"
            )
        integral = integral and self.program.size <= _INTEGRAL_UP_TO
        solution = self.program.solve(
            capped=(self.held, float(limit_bytes)),
            integral=integral,
            relative_gap=_RELATIVE_GAP,
            time_limit_s=time_limit_s,
        )
        cost = max(0.0, solution.bound * self.scale * (1 - _SAFETY)) if np.isfinite(solution.bound) else 0.0
        x = solution.x
        keep = () if x is None else tuple(sorted(v for v, variable in self.keep.items() if x[variable] > 0.5))
        return Bound(limit_bytes, cost, self.record.overhead_pct(cost), solution.gap_pct, integral, keep)


def lower_bound(record: TapeRecord, limit_bytes: int, *, time_limit_s: float = 60.0) -> Bound:
    """No plan, and no policy, re-runs less within ``limit_bytes``."""
    return BoundModel(record).solve(limit_bytes, time_limit_s=time_limit_s)


def revolve_optimum(length: int, slots: int) -> int:
    """Least number of re-runs for a uniform chain: Revolve's optimum, by dynamic programming.

    The chain makes values 1 .. ``length``, each from the one before it and the first from a source; backward asks for
    them last to first. ``slots`` of them may be held. A value that is asked for and not held is at hand until the next
    miss (`plan.py`, rule 4): Revolve's working memory. A chain of L layers whose output stays alive asks for L - 1 values.
    """
    if length < 0 or slots < 0:
        raise ValueError(f"a chain's length and slots are at least 0, got {length} and {slots}")
    slots = min(slots, length)
    # [c, l]: c slots, l values. kept: straight after forward; rebuilt: none of them is held, run through all; gaps: the
    # same once the run is paid for. In each, k is the first value held, counted from the left.
    kept, rebuilt, gaps = (np.zeros((slots + 1, length + 1), dtype=np.int64) for _ in range(3))
    for c in range(slots + 1):
        for n in range(1, length + 1):
            gaps[c, n] = rebuilt[c, n - 1]  # hold none: the last value is at hand
            if c and n > 1:  # hold k in 1 .. n-1, then do the n-k to its right, then the k-1 to its left
                gaps[c, n] = min(gaps[c, n], (gaps[c - 1, n - 1 : 0 : -1] + rebuilt[c, : n - 1]).min())
            rebuilt[c, n] = n + gaps[c, n]
            kept[c, n] = rebuilt[c, n]
            if c:
                kept[c, n] = min(kept[c, n], (kept[c - 1, n - 1 :: -1] + rebuilt[c, :n]).min())
    return int(kept[slots, length])
