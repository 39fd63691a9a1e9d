"""Lower bounds: right on cases small enough for exhaustive search, and Revolve's published figures."""

from __future__ import annotations

import itertools
import sys

import pytest
from planning.records import RecordBuilder, gpt_like, random_dag, uniform_chain

from recals_exp.recals.planning.bound import BoundModel, lower_bound, revolve_optimum
from recals_exp.recals.planning.checker import check
from recals_exp.recals.planning.plan import Plan, PlanError
from recals_exp.recals.planning.planner import make_plan
from recals_exp.recals.planning.solver import Program, SolverMissing


def test_chain_by_hand() -> None:
    # 64 layers ask for 63 values; 16 held leaves 47 to run at least once
    bound = lower_bound(uniform_chain(64), 1600)
    assert bound.rerun_cost == pytest.approx(47, rel=1e-5)
    assert bound.overhead_pct == pytest.approx(100 * 47 / 192, rel=1e-5)
    assert bound.gap_pct == pytest.approx(0.0, abs=0.2)
    assert len(bound.keep) == 16


def _cheapest_by_brute_force(record, limit: int) -> float:
    """What must re-run for the best set of saved values held when forward ends, each op once."""
    asked = sorted({v for kind, v in record.backward_events if kind == "fetch" and not record.values[v].external})
    values = [v for v in range(len(record.values)) if record.values[v].producer >= 0 and not record.values[v].external]
    best = float("inf")
    for size in range(len(values) + 1):
        for keep in itertools.combinations(values, size):
            if sum(record.values[v].nbytes for v in keep) > limit:
                continue
            ops, stack = set(), [v for v in asked if v not in keep]
            while stack:
                op = record.values[stack.pop()].producer
                if op not in ops:
                    ops.add(op)
                    stack += [
                        u
                        for u in record.ops[op].inputs
                        if u not in keep and record.values[u].producer >= 0 and not record.values[u].external
                    ]
            best = min(best, sum(record.ops[op].cost for op in ops))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_exact_on_small_dags(seed: int) -> None:
    record = random_dag(seed, n_ops=6, pinned_share=0.0)
    for share in (0.25, 0.6):
        limit = int(share * record.cache_total_bytes)
        assert lower_bound(record, limit).rerun_cost == pytest.approx(_cheapest_by_brute_force(record, limit), rel=2e-3)


def test_bound_never_rises_with_the_limit_and_vanishes_at_the_total() -> None:
    record = gpt_like(2)
    model = BoundModel(record)
    costs = [model.solve(record.cache_total_bytes * share // 10).rerun_cost for share in range(11)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0.0


def test_relaxation_is_below_the_program() -> None:
    record = gpt_like(2)
    model = BoundModel(record)
    for share in (0.2, 0.5):
        limit = int(share * record.cache_total_bytes)
        relaxed = model.solve(limit, integral=False)
        assert not relaxed.integral
        assert relaxed.rerun_cost <= model.solve(limit).rerun_cost * (1 + 2e-3)


def test_pinned_bytes_above_the_limit_are_refused() -> None:
    b = RecordBuilder()
    (opaque,) = b.op("empty", (), 50, 1.0, saves_outputs=(0,), pinned=True)
    record = b.build(b.op("sum", (opaque,), 1, 1.0)[0])
    with pytest.raises(PlanError, match="limit of 49 bytes is below the 50 bytes that cannot be rebuilt"):
        lower_bound(record, 49)


@pytest.mark.parametrize(("slots", "reruns"), [(32, 30), (16, 46), (8, 63), (4, 109)])
def test_revolve_figures(slots: int, reruns: int) -> None:
    # 15.6 / 24.0 / 32.8 / 56.8 % of a step of 192 at 50 / 25 / 12.5 / 6.25 % of 64 values, two of them always at hand
    assert revolve_optimum(62, slots) == reruns


@pytest.mark.parametrize(("length", "slots"), [(1, 0), (5, 1), (6, 2), (7, 3)])
def test_revolve_optimum_is_reached_and_not_beaten(length: int, slots: int) -> None:
    record = uniform_chain(length + 1)
    planned = make_plan(record, slots * 100, effort=0.1)
    assert planned.verdict.rerun_cost == pytest.approx(revolve_optimum(length, slots))
    assert lower_bound(record, slots * 100).rerun_cost <= revolve_optimum(length, slots) * (1 + 1e-9)


def test_revolve_without_slots_runs_from_the_source_each_time() -> None:
    assert revolve_optimum(5, 0) == 5 + 4 + 3 + 2 + 1
    verdict = check(uniform_chain(6), Plan("chain6", 0, "by hand", (), (), 0.0))
    assert verdict.rerun_cost == pytest.approx(15)
    with pytest.raises(ValueError, match="at least 0, got -1 and 2"):
        revolve_optimum(-1, 2)


def test_missing_scipy_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    program = Program()
    program.variable(1.0)
    with pytest.raises(SolverMissing, match=r"pip install scipy.*policy='dtr'"):
        program.solve()


def test_infeasible_program_says_so() -> None:
    program = Program()
    x = program.variable(1.0, integral=True)
    program.at_least(1.0, {x: 1.0})
    program.at_most(0.0, {x: 1.0})
    solution = program.solve()
    assert solution.x is None
    assert solution.cost == float("inf")
