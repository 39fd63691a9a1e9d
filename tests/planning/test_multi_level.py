"""The parts of the planner: homes of fetches, cuts, borders, laziness, and the recursion against Revolve."""

from __future__ import annotations

import pytest
from planning.records import gpt_like, random_dag, resnet_like, unet_like, uniform_chain

from recals_exp.recals.planning.bound import revolve_optimum
from recals_exp.recals.planning.improve import Improver
from recals_exp.recals.planning.multi_level import MultiLevel
from recals_exp.recals.planning.problem import FORWARD, Problem
from recals_exp.recals.planning.segments import build_segments, choose_cuts
from recals_exp.recals.planning.single_level import single_level_wishes
from recals_exp.recals.planning.unroll import tighten, unroll


@pytest.mark.parametrize(("slots", "extra"), [(32, 0), (16, 0), (8, 0), (4, 5)])
def test_recursion_is_revolves_on_uniform_chains(slots: int, extra: int) -> None:
    problem = Problem(uniform_chain(64), slots * 100)
    tables = MultiLevel(problem, build_segments(problem, choose_cuts(problem, 64)), levels=slots * 25)
    wishes = tables.wishes(slots * 25)
    assert wishes is not None
    assert unroll(problem, wishes).cost == pytest.approx(revolve_optimum(63, slots), abs=extra + 1e-6)


def test_fetch_of_a_result_and_of_an_input_have_their_own_homes() -> None:
    problem = Problem(uniform_chain(3), 200)
    # backward: linear 3 asks for y2 as its input, tanh 2 for y2 as its result, then the same for y1
    assert [problem.record.ops[home].name for home in problem.fetch_home] == ["linear", "tanh", "linear", "tanh"]
    assert problem.fetch_home == [4, 3, 2, 1]


def test_unet_border_holds_a_skip_only_where_it_is_read() -> None:
    problem = Problem(unet_like(2), 1000)
    tables = build_segments(problem, list(range(len(problem.cost) + 1)))
    cat = max(op for op, record in enumerate(problem.record.ops) if record.name == "cat")
    skip = problem.record.ops[cat].inputs[0]
    made = problem.record.values[skip].producer
    assert skip in tables.border[cat, cat + 3]
    middle = (made + cat) // 2
    assert skip not in tables.border[middle, middle + 2]


def test_cuts_avoid_wide_places() -> None:
    problem = Problem(gpt_like(4), 20_000)
    cuts = choose_cuts(problem, 5)
    assert len(cuts) == 6
    # the narrowest places are between blocks, right before an op that reads nothing but the residual stream
    assert {problem.record.ops[c].name for c in cuts[1:-1]} <= {"layer_norm", "linear"}


def test_reduced_problem_leaves_out_what_is_cheap_from_the_rest() -> None:
    record = resnet_like((1, 1, 1, 1))
    problem = Problem(record, record.cache_total_bytes // 2)
    price = 0.5 * record.forward_cost / record.cache_total_bytes
    reduced = problem.reduced(price)
    lazy = set(problem.fetches_of) - set(reduced.fetches_of)
    assert 0 < len(lazy) < len(problem.fetches_of)
    assert set(reduced.fetches_of) <= set(problem.fetches_of)
    for value in lazy:
        matters = set(reduced.fetches_of)
        inputs = [tuple(u for u in op if u not in matters) for op in problem.inputs]
        assert _rebuild_cost(problem.producer, inputs, problem.cost, value) <= price * problem.nbytes[value] + 1e-9
    assert set(reduced.fetch_time) <= set(range(problem.n_fetches))


def test_small_change_is_always_held() -> None:
    record = gpt_like(2)
    problem = Problem(record, record.cache_total_bytes // 4)
    assert problem.small
    assert all(record.values[v].nbytes == 4 for v in problem.small)
    assert problem.capacity == record.cache_total_bytes // 4 - 4 * len(problem.small)


def test_fusing_keeps_the_cost_of_every_rebuild() -> None:
    for seed in range(10):
        record = random_dag(seed, pinned_share=0.0)
        problem = Problem(record, 0)
        for value in problem.fetches_of:
            fused = _rebuild_cost(problem.producer, problem.inputs, problem.cost, value)
            whole = _rebuild_cost(
                problem.producer, [op.inputs for op in record.ops], [op.cost for op in record.ops], value
            )
            assert fused == pytest.approx(whole)


def _rebuild_cost(producer, inputs, cost, value: int) -> float:
    ops, stack = set(), [value]
    while stack:
        op = producer[stack.pop()]
        if op >= 0 and op not in ops:
            ops.add(op)
            stack += inputs[op]
    return sum(cost[op] for op in ops)


def test_unroll_waits_for_a_miss_and_keeps_the_limit() -> None:
    problem = Problem(uniform_chain(6), 300)
    y = {layer: 2 * layer for layer in range(1, 7)}
    schedule = unroll(problem, {FORWARD: {y[4], y[5]}, 0: {y[1], y[2], y[3]}})
    (miss,) = schedule.misses
    assert miss.value == y[3]
    assert miss.hold == (y[1], y[2], y[3])
    assert schedule.cost == pytest.approx(3.0)
    crowded = unroll(problem, {FORWARD: set(y.values())})
    assert crowded.keep == (y[3], y[4], y[5])  # the latest first; the output is not cache
    assert crowded.kept_bytes == 300


def test_single_level_reruns_every_dropped_layer_once() -> None:
    problem = Problem(uniform_chain(64), 3200)
    wishes = single_level_wishes(problem, 8)
    assert wishes is not None
    # 3,200 bytes less the 800 of the stage that is rebuilt: 24 kept, plus what is kept of the last stage
    assert tighten(problem, wishes).cost == pytest.approx(31.0, abs=1.0)
    assert single_level_wishes(Problem(uniform_chain(64), 200), 4) is None


def test_improver_never_makes_it_worse_and_fills_room() -> None:
    record = gpt_like(3)
    problem = Problem(record, record.cache_total_bytes // 2)
    lazy = unroll(problem, {})
    improved = Improver(problem, 200_000).polish(lazy)
    assert improved.cost < lazy.cost / 5
    shaken = Improver(problem, 200_000).shake(improved, seed=1)
    assert shaken.cost <= improved.cost
