"""The predicted curve: against the engine that runs it, against the bound, and against measured bytes."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn

from recals_exp import records
from recals_exp.recals import CacheLimitError, Prediction, Recals, TapeRecord, format_prediction, recals_with_rngs
from recals_exp.recals.graph import Value
from recals_exp.recals.planning.checker import check
from recals_exp.recals.planning.planner import make_plan
from recals_exp.recals.policies import Planned
from recals_exp.recals.prediction import (
    Bounds,
    documented_overhead_pct,
    knee,
    predict,
    predicted_overhead_pct,
    profile_call,
)
from recals_exp.recals.record import OpRecord, ValueRecord
from recals_exp.recals.simulate import following, simulate
from recals_exp.recals.step_memory import LiveBytes, StepMemory, step_memory
from recals_exp.recals.trace import Trace

BATCH, WIDTH = 128, 64


class Net(nn.Module):
    """Blocks with a skip, in-place dropout and statistics: values of several sizes, flows past several ops."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.BatchNorm1d(2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
                nn.Tanh(),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, WIDTH)


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(BATCH, WIDTH)
    profile = profile_call(recals_with_rngs(-1), model, (x,), {})
    return predict(profile, [0.25, 0.5, 0.75, 1.0], effort=0.02)


# -- the curve ---------------------------------------------------------------------------------------------------------


def test_rows_stand_by_policy_then_budget(prediction: Prediction) -> None:
    assert [(row.policy, row.budget) for row in prediction.rows] == [
        (policy, pytest.approx(budget, rel=1e-4))
        for policy in ("fifo", "dtr", "planned")
        for budget in (0.25, 0.5, 0.75, 1.0)
    ]
    for row in prediction.rows:
        assert row.cache_limit_bytes == pytest.approx(row.budget * prediction.cache_total_bytes, rel=1e-4)
        assert row.documented_overhead_pct == records.documented_overhead_pct(row.budget)


def test_the_total_is_what_analyze_says(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(-1)
    profile = profile_call(recals, net, (x,), {})
    analysis = recals.analyze(net, x)
    assert profile.cache_total_bytes == analysis.total_bytes
    assert profile.smallest_limit_bytes == analysis.smallest_limit_bytes


def test_no_policy_is_below_the_bound_and_planned_is_best(prediction: Prediction) -> None:
    for fifo, dtr, planned in zip(*map(prediction.curve, ("fifo", "dtr", "planned")), strict=True):
        assert fifo.bound_overhead_pct == dtr.bound_overhead_pct == planned.bound_overhead_pct
        assert planned.bound_overhead_pct <= planned.predicted_overhead_pct + 1e-9
        assert planned.predicted_overhead_pct <= min(fifo.predicted_overhead_pct, dtr.predicted_overhead_pct) + 1e-9
    costs = [row.predicted_overhead_pct for row in prediction.curve("planned")]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0
    assert costs[-1] == 0


@pytest.mark.parametrize("policy", ["fifo", "dtr", "planned"])
@pytest.mark.parametrize("budget", [0.25, 0.5])
def test_the_engine_drops_and_reruns_what_was_predicted(net: Net, x: Tensor, policy: str, budget: float) -> None:
    record = recals_with_rngs(-1).profile(net, x)
    limit = int(budget * simulate(record, None, "fifo").peak_cached_bytes)
    plan = make_plan(record, limit, effort=0.02).plan
    expected = simulate(record, limit, following(record, plan) if policy == "planned" else policy)
    chosen = Planned(lambda *_: plan, waits=True) if policy == "planned" else policy
    recals = recals_with_rngs(limit, policy=chosen, audit="off")
    for _ in range(2 if policy == "planned" else 1):  # planned: the first step is watched, the second follows the plan
        recals.reset_stats()
        recals(net, x).backward(torch.ones(BATCH, 10))
    stats = recals.stats
    assert stats.recomputed_ops == len(expected.rerun_ops) > 0
    assert (stats.dropped_values, stats.dropped_bytes) == (expected.dropped_values, expected.dropped_bytes)
    assert stats.peak_cached_bytes == expected.peak_cached_bytes
    assert stats.replays == expected.replays


def test_a_simulated_plan_costs_what_the_judge_says(net: Net, x: Tensor) -> None:
    record = recals_with_rngs(-1).profile(net, x)
    limit = record.cache_total_bytes // 3
    plan = make_plan(record, limit, effort=0.02).plan
    assert simulate(record, limit, following(record, plan)).overhead_pct == pytest.approx(
        check(record, plan).overhead_pct
    )


def test_budgets_in_bytes_and_as_fractions_are_the_same_points(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(-1)
    total = recals.analyze(net, x).total_bytes
    by_bytes = recals.predict(net, x, budgets=[total // 2, f"{total}B"], policies=["fifo"])
    by_fraction = recals.predict(net, x, budgets=[0.5, 1.0], policies=["fifo"])
    assert by_bytes.rows == by_fraction.rows


def test_the_bound_without_need_is_nothing(prediction: Prediction) -> None:
    bounds = Bounds(prediction.profile.record)
    assert bounds.overhead_pct(prediction.cache_total_bytes) == 0
    assert bounds.overhead_pct(prediction.cache_total_bytes // 4) > 0


# -- the peak ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "dtr"])
@pytest.mark.parametrize("budget", [0.25, 0.5, 1.0])
def test_the_peak_is_that_of_a_real_step(net: Net, x: Tensor, policy: str, budget: float) -> None:
    profile = profile_call(recals_with_rngs(-1), net, (x,), {})
    limit = int(budget * profile.cache_total_bytes)
    predicted = profile.memory.peak_bytes(profile.record, limit, policy) - profile.memory.resident_bytes
    live = LiveBytes(torch.device("cpu"))
    recals = recals_with_rngs(limit, policy=policy, audit="off")
    with live.watching():
        recals(net, x).backward(torch.ones(BATCH, 10))
    measured = max(live.until_next)
    assert predicted == pytest.approx(measured, rel=0.05)


def test_what_a_node_has_in_hand_is_there_until_it_frees() -> None:
    """Autograd unpacks all saved values of a node; the cache may drop the first to make room for the second."""
    made = tuple(ValueRecord(100, producer, True, layer="") for producer in range(2))
    record = TapeRecord(
        signature="two",
        torch_version=torch.__version__,
        device="cpu",
        cost_unit="model",
        values=made,
        ops=(OpRecord("first", "", 1.0, 0, (), (0,)), OpRecord("second", "", 1.0, 0, (), (1,))),
        forward_events=(("op", 0), ("save", 0), ("op", 1), ("save", 1)),
        backward_events=(("fetch", 1), ("fetch", 0), ("free", 1), ("free", 0)),
        forward_cost=2.0,
        backward_cost=4.0,
    )
    memory = StepMemory(1000, 0, (0,) * 8, (0, 0, 0, 0, 0, 50, 0, 0))  # the node itself takes 50 once it has both
    assert memory.peak_bytes(record, None, "fifo") == 1250
    assert memory.peak_bytes(record, 100, "fifo") == 1250  # both are in the node's hands, though one fits the cache


def test_the_peak_falls_with_the_budget(prediction: Prediction) -> None:
    for policy in prediction.policies:
        first, *_, last = prediction.curve(policy)
        cut = last.cache_limit_bytes - first.cache_limit_bytes
        assert first.peak_memory_bytes < last.peak_memory_bytes - cut / 3


def test_resident_bytes_are_parameters_buffers_and_inputs(net: Net, x: Tensor) -> None:
    profile = profile_call(recals_with_rngs(-1), net, (x,), {})
    tensors = [*net.parameters(), *net.buffers(), x]
    assert profile.memory.resident_bytes == sum(tensor.nbytes for tensor in tensors)


def test_marks_of_another_step_are_refused(prediction: Prediction) -> None:
    live = LiveBytes(torch.device("cpu"))
    trace = Trace(live.mark)
    with live.watching():
        value = Value(None, 0, 8)
        trace.append(("free", value, ""))
        trace += [("free", value, ""), ("free", value, "")]
    assert len(live.at_mark) == len(trace) == 3
    with pytest.raises(RuntimeError, match=r"the step left 3 marks for the \d+ events of its record"):
        step_memory(prediction.profile.record, live, 0)


def test_live_bytes_lie_between_their_marks() -> None:
    live = LiveBytes(torch.device("cpu"))
    with live.watching():
        kept = torch.empty(1000, dtype=torch.uint8)
        live.mark()
        passing = torch.empty(500, dtype=torch.uint8)
        del passing
        live.mark()
        del kept
    assert live.at_mark == [1000, 1000]
    assert live.until_next == [1000, 1500, 0]  # only after allocations is a peak looked for


# -- the knee ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0.1, 100.0), (0.2, 20.0), (0.5, 10.0), (1.0, 0.0)], 1),
        ([(0.1, 100.0), (0.2, 85.0), (0.5, 10.0), (1.0, 0.0)], 2),
        ([(0.1, 50.0), (0.55, 25.0), (1.0, 0.0)], 0),  # a straight line: nothing gained by more
        ([(0.1, 0.0), (0.5, 0.0), (1.0, 0.0)], 0),  # costs nothing anywhere
        ([(0.5, 3.0)], 0),
    ],
)
def test_the_knee_is_farthest_below_the_chord(points: list[tuple[float, float]], expected: int) -> None:
    assert knee(points) == expected


def test_no_points_no_knee() -> None:
    with pytest.raises(ValueError, match="a curve without points has no knee"):
        knee([])


def test_the_documented_curve_is_that_of_the_reports() -> None:
    for budget in (0.1, 0.25, 1.0):
        assert documented_overhead_pct(budget) == records.documented_overhead_pct(budget)


# -- what stays as it was, what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["profile", "predict"])
def test_the_model_is_left_as_it_was(net: Net, x: Tensor, method: str) -> None:
    net(x).sum().backward()
    before = copy.deepcopy(net.state_dict())
    grads = [parameter.grad for parameter in net.parameters()]
    contents = [grad.clone() for grad in grads if grad is not None]
    generator = torch.get_rng_state()
    recals: Recals = recals_with_rngs("1KiB")
    if method == "predict":
        recals.predict(net, x, budgets=[1.0], policies=["fifo"])
    else:
        recals.profile(net, x)
    assert recals.stats.cached_bytes == 0
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is grad for parameter, grad in zip(net.parameters(), grads, strict=True))
    assert all(torch.equal(grad, content) for grad, content in zip(grads, contents, strict=True) if grad is not None)
    assert torch.equal(torch.get_rng_state(), generator)


def test_profiles_of_one_step_share_their_signature_and_round_trip(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(-1)
    first, second = recals.profile(net, x), recals.profile(net, x)
    assert first == second
    assert TapeRecord.from_json(first.to_json()) == first
    assert recals.profile(net, x[: BATCH // 2]).signature != first.signature


def test_a_budget_below_what_works_is_refused_with_what_works(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(-1)
    with pytest.raises(CacheLimitError, match=r"'1KiB' is a cache limit of 1024 bytes, the smallest .* is 65536 bytes"):
        recals.predict(net, x, budgets=["1KiB"], policies=["fifo"])


def test_standard_budgets_below_what_works_are_left_out_and_named(x: Tensor) -> None:
    prediction = recals_with_rngs(-1).predict(Net(1), x, policies=["fifo"])
    assert prediction.refused
    assert max(prediction.refused) < min(row.budget for row in prediction.rows)
    assert "below it, so not shown: 10 %" in format_prediction(prediction)


@pytest.mark.parametrize("budget", [0, 0.0, -0.5, 1.5, True])
def test_a_budget_that_is_none_is_refused(prediction: Prediction, budget: float) -> None:
    with pytest.raises(ValueError, match=r"is not allowed: use a fraction in \(0, 1\]"):
        predict(prediction.profile, [budget], ["fifo"])


@pytest.mark.parametrize("policies", [["lifo"], []])
def test_an_unknown_policy_is_refused_with_those_there_are(prediction: Prediction, policies: list[str]) -> None:
    with pytest.raises(ValueError, match="use one or more of dtr, fifo, planned"):
        predict(prediction.profile, [1.0], policies)
    with pytest.raises(ValueError, match="'lifo' is not in this prediction; there are: fifo, dtr, planned"):
        prediction.curve("lifo")


def test_the_table_says_every_column_the_knees_and_the_limits(prediction: Prediction) -> None:
    head, *rows, knees, sizes = format_prediction(prediction).splitlines()
    for name in ("budget", "limit", "documented", "fifo", "dtr", "planned", "bound", "peak, planned"):
        assert name in head
    assert len(rows) == 4
    assert knees.startswith("knee: fifo ")
    assert "the smallest limit that works is 64.0 KiB" in sizes
    assert dataclasses.astuple(prediction.knee("fifo")) in [dataclasses.astuple(row) for row in prediction.rows]


@pytest.mark.parametrize("policy", ["fifo", "dtr"])
def test_measured_costs_count_what_the_engine_takes(prediction: Prediction, policy: str) -> None:
    profile = prediction.profile
    step = profile.record.step_cost
    record = dataclasses.replace(profile.record, recording_cost=0.05 * step, drop_cost=0.001 * step)
    limit = int(0.3 * prediction.cache_total_bytes)
    done = simulate(profile.record, limit, policy)
    assert done.engine_pct == 0.0  # the model knows nothing of it
    assert done.dropped_values > 0
    expected = done.overhead_pct + 5 + 0.1 * done.dropped_values
    assert predicted_overhead_pct(record, limit, policy) == pytest.approx(expected)
    assert predicted_overhead_pct(record, None, policy) == pytest.approx(5)
    (row,) = predict(dataclasses.replace(profile, record=record), [limit / prediction.cache_total_bytes], [policy]).rows
    assert row.predicted_overhead_pct == pytest.approx(expected)
    assert row.bound_overhead_pct == pytest.approx(Bounds(profile.record).overhead_pct(row.cache_limit_bytes) + 5)


def test_a_plan_at_hand_is_predicted_as_it_is(prediction: Prediction) -> None:
    record = prediction.profile.record
    limit = int(0.4 * prediction.cache_total_bytes)
    plan = make_plan(record, limit, effort=0.1).plan
    assert predicted_overhead_pct(record, limit, "planned", plan) == pytest.approx(plan.overhead_pct)


def test_a_record_without_the_cost_of_dropping_is_read(prediction: Prediction) -> None:
    data = json.loads(prediction.profile.record.to_json())
    del data["drop_cost"]
    assert TapeRecord.from_json(json.dumps(data)) == prediction.profile.record
