"""Mixed integer programs in plain words, solved by HiGHS through SciPy. The only module that imports SciPy, and only when asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NODE_LIMIT = 50
"""Branch-and-bound nodes: the programs here are solved at the first few, or are too symmetric (long uniform chains) to be solved at
all; a count of nodes stops at the same place on every machine, a clock does not."""


class SolverMissing(ImportError):
    """SciPy is not installed."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found."""

    x: NDArray[np.float64] | None  # None: infeasible, or nothing found in time
    cost: float  # of x; inf without one
    bound: float  # no solution costs less; -inf if unknown, inf if infeasible
    gap_pct: float  # (cost - bound) / cost, percent; inf without a solution


class Program:
    """Minimise a sum of costs over variables in [low, 1], subject to sums being at least or at most a number."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._low: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self._cost)

    def variable(self, cost: float, *, low: float = 0.0, integral: bool = False) -> int:
        """A new variable; returns its index."""
        self._cost.append(cost)
        self._low.append(low)
        self._integral.append(integral)
        return len(self._cost) - 1

    def at_least(self, number: float, terms: Mapping[int, float]) -> None:
        """sum factor * variable >= number."""
        self._constraint(number, np.inf, terms)

    def at_most(self, number: float, terms: Mapping[int, float]) -> None:
        """sum factor * variable <= number."""
        self._constraint(-np.inf, number, terms)

    def _constraint(self, least: float, most: float, terms: Mapping[int, float]) -> None:
        row = len(self._least)
        for column, factor in terms.items():
            self._rows.append(row)
            self._columns.append(column)
            self._factors.append(factor)
        self._least.append(least)
        self._most.append(most)

    def solve(
        self,
        *,
        capped: tuple[Mapping[int, float], float] | None = None,
        integral: bool = True,
        relative_gap: float = 1e-4,
        time_limit_s: float = 60.0,
        node_limit: int = _NODE_LIMIT,
    ) -> Solution:
        """Solve; ``capped`` adds one more at-most constraint for this call only. The time limit is a last resort."""
        if not self._cost:
            return Solution(np.zeros(0), 0.0, 0.0, 0.0)
        optimize, sparse = _scipy()
        rows, columns, factors = list(self._rows), list(self._columns), list(self._factors)
        least, most = list(self._least), list(self._most)
        if capped is not None:
            # Bytes in units of the cap: numbers near 1 keep the solver's tolerances meaningful.
            terms, number = capped
            unit = max(number, 1.0)
            rows += [len(least)] * len(terms)
            columns += terms.keys()
            factors += [factor / unit for factor in terms.values()]
            least.append(-np.inf)
            most.append(number / unit)
        matrix = sparse.coo_matrix((factors, (rows, columns)), shape=(len(least), self.size)).tocsr()
        result = optimize.milp(
            np.array(self._cost),
            constraints=optimize.LinearConstraint(matrix, least, most) if least else (),
            integrality=np.array(self._integral, dtype=int) if integral else None,
            bounds=optimize.Bounds(np.array(self._low), np.ones(self.size)),
            options={"time_limit": time_limit_s, "mip_rel_gap": relative_gap, "node_limit": node_limit},
        )
        x = result.x
        cost = float(result.fun) if x is not None else np.inf
        dual = getattr(result, "mip_dual_bound", None)
        if result.status == 2:  # infeasible
            return Solution(None, np.inf, np.inf, np.inf)
        bound = (cost if result.status == 0 else -np.inf) if not integral or dual is None else float(dual)
        gap_pct = 100.0 * max(0.0, cost - bound) / cost if np.isfinite(cost) and cost > 0 else 0.0
        return Solution(x, cost, bound, gap_pct if x is not None else np.inf)


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise SolverMissing(
            "bounds and plans are computed by HiGHS through SciPy, which is not installed; "
            "run 'pip install scipy', or use policy='dtr', which needs no solver"
        ) from error
    return optimize, sparse
