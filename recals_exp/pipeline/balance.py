"""The best contiguous cut: which units make which stage, so that the worst stage is as good as it can be.

Exact, by dynamic programming over (stage, last unit): the best cut of the first j units into k stages is some best cut of the
first i units into k-1 stages, followed by the stage of units i to j. Costs may depend on the stage (budgets, devices, and
micro-batches in flight differ), so n units and s stages take n^2 s / 2 costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

StageCost = Callable[[int, int, int], float]  # (first unit, last unit + 1, stage) -> cost; inf = does not fit


def best_bounds(n_units: int, n_stages: int, cost: StageCost) -> tuple[int, ...]:
    """The bounds 0 < ... < n_units whose costliest stage is cheapest; the earliest such bounds if there are several."""
    check_counts(n_units, n_stages)
    # best[j]: the least worst cost of the first j units in the stages so far; back[k][j]: where the last of them starts
    best = [0.0 if j == 0 else math.inf for j in range(n_units + 1)]
    back: list[list[int]] = []
    for stage in range(n_stages):
        following = [math.inf] * (n_units + 1)
        starts = [-1] * (n_units + 1)
        for last in range(stage + 1, n_units - (n_stages - stage - 1) + 1):
            for first in range(stage, last):
                if starts[last] != -1 and best[first] >= following[last]:
                    continue
                worst = max(best[first], cost(first, last, stage))
                if starts[last] == -1 or worst < following[last]:
                    following[last], starts[last] = worst, first
        best = following
        back.append(starts)
    bounds = [n_units]
    for starts in reversed(back):
        bounds.append(starts[bounds[-1]])
    return tuple(reversed(bounds))


def worst_cost(bounds: tuple[int, ...], cost: StageCost) -> float:
    """The cost of the costliest stage."""
    return max(cost(first, last, stage) for stage, (first, last) in enumerate(itertools.pairwise(bounds)))


def all_bounds(n_units: int, n_stages: int) -> Iterator[tuple[int, ...]]:
    """Every contiguous cut; there are (n-1 choose s-1)."""
    check_counts(n_units, n_stages)
    for inner in itertools.combinations(range(1, n_units), n_stages - 1):
        yield (0, *inner, n_units)


def check_counts(n_units: int, n_stages: int) -> None:
    """Every stage needs a unit."""
    if not 1 <= n_stages <= n_units:
        raise ValueError(
            f"{n_units} units cannot make {n_stages} stages: use between 1 and {n_units} stages, or name smaller units"
        )
