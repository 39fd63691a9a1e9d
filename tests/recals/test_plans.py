"""Plans of a ``Recals``: made by another process, known again, saved, loaded, shown; and costs that are measured."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recals_exp.recals import PlansError, Recals, TapeRecord, format_plan, recals_with_rngs
from recals_exp.recals.planning.checker import check
from recals_exp.recals.planning.worker import WorkerError, plan_in_process
from recals_exp.recals.policies import Planned
from recals_exp.recals.policies.planned import default_planner
from recals_exp.recals.simulate import following, plan_of, simulate
from recals_exp.recals.trace import Trace

WIDTH = 32


class Net(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, WIDTH)


def third(net: nn.Module, x: Tensor) -> int:
    total, _ = recals_with_rngs(-1).analyze(net, x)
    return total // 3


def gradients(recals: Recals | None, net: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    (recals(net, x) if recals else net(x)).square().sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def followed(recals: Recals) -> int:
    policy = recals.cache.policy
    assert isinstance(policy, Planned)
    return policy.steps_followed


def assert_plain(recals: Recals, net: nn.Module, x: Tensor) -> None:
    for a, b in zip(gradients(None, net, x), gradients(recals, net, x), strict=True):
        assert torch.equal(a, b)


# -- in another process ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_other_process_makes_the_same_plan(net: Net, x: Tensor) -> None:
    record = recals_with_rngs(-1).profile(net, x)
    limit = record.cache_total_bytes // 3
    assert plan_in_process(record, limit) == default_planner(record, limit)


@pytest.mark.slow
def test_a_process_that_fails_says_why(net: Net, x: Tensor) -> None:
    record = recals_with_rngs(-1).profile(net, x)
    with pytest.raises(WorkerError, match=r"the planning process ended with 1: [\s\S]*PlanError"):
        plan_in_process(record, -1)


@pytest.mark.parametrize("layers", [6, 100])  # planned in a thread, by a process
def test_the_interpreter_waits_for_its_planners(tmp_path: Path, layers: int) -> None:
    """A thread that comes back from C++ code when there is no interpreter any more would abort the process."""
    script = f"""
        import threading
        import torch
        from torch import nn
        from recals_exp.recals import recals_with_rngs
        from recals_exp.recals.policies import planned

        def default_planner(record, limit_bytes, make_plan=planned.default_planner):
            busy = torch.randn(2000, 2000)
            for _ in range(20):
                busy @ busy
            return make_plan(record, limit_bytes)

        planned.default_planner = default_planner
        net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range({layers})))
        x = torch.randn(8, 16)
        recals = recals_with_rngs(recals_with_rngs(-1).analyze(net, x).total_bytes // 3, policy=planned.Planned())
        while not any(thread.name == planned._THREAD for thread in threading.enumerate()):
            recals(net, x).sum().backward()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_no_process_outlives_the_interpreter(tmp_path: Path) -> None:
    """The planner is at work when the script ends: a clean exit, and nothing left behind."""
    script = """
        import torch
        from torch import nn
        from recals_exp.recals import recals_with_rngs
        from recals_exp.recals.planning import worker
        net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(100)))
        x = torch.randn(8, 16)
        recals = recals_with_rngs(recals_with_rngs(-1).analyze(net, x).total_bytes // 3)
        while not worker._running:
            recals(net, x).sum().backward()
        print(next(iter(worker._running)).pid)
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(int(done.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the planning process is still there")


# -- plans as data -----------------------------------------------------------------------------------------------------


def test_saved_plans_are_followed_in_another_object(net: Net, x: Tensor, tmp_path: Path) -> None:
    limit = third(net, x)
    first = recals_with_rngs(limit, policy=Planned(waits=True))
    assert_plain(first, net, x)
    assert len(first.plans) == 1
    first.save_plans(tmp_path / "plans.json")

    def no_planner(record: TapeRecord, limit_bytes: int) -> None:
        raise AssertionError("planned again")

    second = recals_with_rngs(limit, policy=Planned(no_planner))  # type: ignore[arg-type]
    assert second.load_plans(tmp_path / "plans.json") == first.plans
    assert_plain(second, net, x)
    assert followed(second) == 0  # the step is known once it has run
    assert_plain(second, net, x)
    assert followed(second) == 1


def test_a_plan_for_more_room_is_not_followed(net: Net, x: Tensor, tmp_path: Path) -> None:
    limit = third(net, x)
    first = recals_with_rngs(limit, policy=Planned(waits=True))
    first.plan(net, x)
    first.save_plans(tmp_path / "plans.json")
    second = recals_with_rngs(limit // 2, policy=Planned(waits=True))
    second.load_plans(tmp_path / "plans.json")
    assert_plain(second, net, x)
    assert second.plans[0].plan.limit_bytes <= limit // 2
    assert_plain(second, net, x)
    assert followed(second) == 1
    assert second.stats.peak_cached_bytes <= limit // 2


def test_planning_ahead_is_what_training_would_plan(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(third(net, x), policy=Planned(waits=True))
    ahead = recals.plan(net, x)
    assert recals.plans == (ahead,)
    for _ in range(2):
        assert_plain(recals, net, x)
    assert recals.plans == (ahead,)  # the step of training has the same signature
    assert followed(recals) == 1


def test_a_plan_is_shown_by_layer(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(third(net, x), policy="planned")
    text = format_plan(recals.plan(net, x), depth=2)
    lines = text.splitlines()
    assert "% of a step; no plan costs less than" in lines[1]
    assert sorted(line.split()[0] for line in lines[4:]) == ["Net", *(f"blocks.{i}" for i in range(5)), "layer"]
    shown = sum(float(line.split()[-1]) for line in lines[5:])
    assert shown == pytest.approx(recals.plans[0].plan.overhead_pct, abs=0.05)


def test_what_makes_no_plans_says_so(net: Net, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy='fifo' makes no plans; use recals_with_rngs"):
        recals_with_rngs("1MiB", policy="fifo").save_plans(tmp_path / "plans.json")
    with pytest.raises(ValueError, match="nothing to plan without a cache limit"):
        recals_with_rngs(None).plan(net, x)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PlansError, match=r"other\.json does not hold saved plans"):
        recals_with_rngs("1MiB").load_plans(tmp_path / "other.json")


# -- steps with pinned bytes -------------------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """Writes over a buffer that an earlier op has read: its old content cannot be made again and is pinned."""

    scale: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.ones(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        with torch.no_grad():
            self.scale.mul_(0.5)
        return self.net(x)


def test_a_step_with_pinned_bytes_is_planned(net: Net, x: Tensor) -> None:
    model = Overwriting(net)
    limit = third(model, x)
    recals = recals_with_rngs(limit, policy=Planned(waits=True))
    for _ in range(3):
        plain = copy.deepcopy(model)
        expected = gradients(None, plain, x)
        recals.reset_stats()
        for a, b in zip(expected, gradients(recals, model, x), strict=True):
            assert torch.equal(a, b)
        assert recals.stats.peak_cached_bytes <= limit
    assert followed(recals) == 2
    (step,) = recals.plans
    assert step.plan.limit_bytes == limit - x.nbytes


def test_plans_of_a_step_with_pinned_bytes_keep_the_limit(net: Net, x: Tensor) -> None:
    record = recals_with_rngs(-1).profile(Overwriting(net), x)
    assert record.pinned_bytes == x.nbytes
    limit = record.cache_total_bytes // 3
    for policy in ("fifo", "dtr"):
        check(record, plan_of(record, limit - record.pinned_bytes, policy))  # raises where it does not
    plan = default_planner(record, limit - record.pinned_bytes)
    assert simulate(record, limit, following(record, plan)).peak_cached_bytes <= limit


def test_a_trace_keeps_nothing_alive(net: Net, x: Tensor) -> None:
    recals = recals_with_rngs(None)
    recals.cache.trace = trace = Trace()
    recals(net, x)  # the graph is gone at once, and with it the tape
    assert len(trace) > 0
    assert not recals.registry


def test_an_overwritten_version_does_not_outlive_its_handles() -> None:
    """Its guard is an alias with data: kept, it held the storage until the last handle of the whole step died."""
    storages: list[weakref.ref[object]] = []
    is_gone: list[bool] = []

    def cell(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).sin()
        h.register_hook(lambda _: is_gone.append(storages[0]() is None))  # backward is through with what follows
        both = h @ w
        storages.append(weakref.ref(both.untyped_storage()))
        a, b = both.unsafe_chunk(2, 1)  # as LSTM cells do: each part counts its own versions
        return a.sigmoid_() * b.tanh_()

    out = recals_with_rngs(None)(cell, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True))
    out.sum().backward()  # with the output alive, and with it the tape
    assert is_gone == [True]


# -- measured costs ----------------------------------------------------------------------------------------------------


def test_measured_costs(net: Net, x: Tensor) -> None:
    torch.manual_seed(2)
    state = torch.get_rng_state()
    recals = recals_with_rngs(-1)
    record = recals.profile(net, x)
    measured = recals.profile(net, x, costs="measured")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert (measured.cost_unit, measured.signature) == ("s", record.signature)
    assert all(op.cost > 0 for op in measured.ops)
    assert [op.model_cost for op in measured.ops] == [op.cost for op in record.ops]
    assert 0 < sum(op.cost for op in measured.ops) < 10 * measured.step_cost
    assert TapeRecord.from_json(measured.to_json()) == measured
    limit = record.cache_total_bytes // 3
    for policy in ("fifo", "dtr"):  # they decide by the model, as in the engine; only the price is another
        assert simulate(measured, limit, policy).rerun_ops == simulate(record, limit, policy).rerun_ops


def test_a_plan_by_measured_costs_keeps_what_the_engine_takes(net: Net, x: Tensor) -> None:
    record = recals_with_rngs(-1).profile(net, x)
    costs = {"forward_cost": 3.0, "backward_cost": 5.0, "recording_cost": 0.5, "drop_cost": 0.25}
    measured = replace(record, cost_unit="s", **costs)
    policy = Planned(waits=True, measured=measured)
    recals = recals_with_rngs(third(net, x), policy=policy)
    for _ in range(2):
        gradients(recals, net, x)
    (plan,) = policy.plans()
    assert plan.record.cost_unit == "s"
    assert {name: getattr(plan.record, name) for name in costs} == costs


def test_unknown_costs_are_refused(net: Net, x: Tensor) -> None:
    for ask in (recals_with_rngs(-1).profile, recals_with_rngs(-1).predict):
        with pytest.raises(ValueError, match="costs='guessed' is not known; there are: model, measured"):
            ask(net, x, costs="guessed")
