"""Cuts, profiles and layouts."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from pipeline.ranks import UNet
from torch import Tensor, nn

from recals_exp.models.gpt import gpt
from recals_exp.models.vision import resnet18, resnet50
from recals_exp.pipeline.balance import all_bounds, best_bounds, worst_cost
from recals_exp.pipeline.layout import LayoutSpec, build_pipeline, format_layout, plan_layout, stage_cost
from recals_exp.pipeline.profile import Profile, UnitCost, profile_units
from recals_exp.pipeline.units import find_units
from recals_exp.recals import recals_with_rngs


def unit(name: str, seconds: float, state: int, saved: int) -> UnitCost:
    key = abs(hash(name))
    return UnitCost(name, seconds, 2 * seconds, ((key, state),), ((key, saved),), saved)


# -- the best cut -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_best_cut_is_that_of_exhaustive_search(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 11)
    costs = [[draw.random() for _ in range(n)] for _ in range(4)]  # a stage may make a unit dearer
    for stages in range(1, min(n, 4) + 1):

        def cost(first: int, last: int, stage: int) -> float:
            return sum(costs[stage][first:last])

        found = best_bounds(n, stages, cost)
        assert worst_cost(found, cost) == min(worst_cost(bounds, cost) for bounds in all_bounds(n, stages))


def test_stages_that_cannot_fit_are_avoided() -> None:
    def cost(first: int, last: int, stage: int) -> float:
        return float("inf") if stage == 0 and last - first > 1 else last - first

    assert best_bounds(5, 2, cost) == (0, 1, 5)
    with pytest.raises(ValueError, match="2 units cannot make 3 stages"):
        best_bounds(2, 3, cost)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 0.25])
@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize("name", ["resnet50", "gpt"])
def test_balance_finds_the_best_cut_of_real_models(name: str, balance: str, budget: Any, profiles: Any) -> None:
    profile, units, example = profiles(name)
    for n in (2, 3):
        spec = LayoutSpec(n_stages=n, balance=balance, budgets=(budget,), n_micro_batches=4)
        layout = plan_layout(units, spec, example, profile=profile)
        cost = stage_cost(profile, balance, (budget,) * n, (4,) * n)
        best = min(worst_cost(bounds, cost) for bounds in all_bounds(len(units.names), n))
        assert worst_cost(layout.bounds, cost) <= 1.05 * best
        told = [s.time_s if balance == "time" else s.memory_bytes for s in layout.stages]
        assert max(told) == pytest.approx(best)


@pytest.fixture(scope="module")
def profiles() -> Any:
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            torch.manual_seed(0)
            if name == "gpt":
                model, x = gpt(65, 32, depth=6, width=64, heads=4), torch.randint(65, (4, 32))
            else:
                model, x = resnet50(3, 10), torch.randn(2, 3, 64, 64)
            units = find_units(model, (x,))
            made[name] = profile_units(units, (x,), repeats=1), units, (x,)
        return made[name]

    return make


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_counts_what_is_shared_once_and_agrees_with_the_engine() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    model[4].weight = model[0].weight
    x = torch.randn(4, 8)
    profile = profile_units(find_units(model), (x,), optimizer_states=1.0, repeats=1)
    parameter = (8 * 8 * 2 + 8 * 3) * 4
    assert profile.state_bytes(0, 5) == 3 * parameter  # itself, its gradient, one optimizer state
    assert profile.state_bytes(0, 1) + profile.state_bytes(1, 5) > profile.state_bytes(0, 5)
    assert profile.saved_bytes(0, 5) == recals_with_rngs(-1).analyze(model, x).total_bytes
    assert profile.rows == 4
    assert all(cost.forward_s > 0 for cost in profile.units)


def test_profiling_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(4, 4)
    x = torch.randn(6, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    profile_units(find_units(model), (x,), repeats=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[0].bias.grad is None


# -- units ------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """No chain: a skip, and code between the submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).relu() + x


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.conv(x), 1))


def test_a_sequential_is_opened_but_not_where_it_has_hooks() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    assert find_units(model).names == ("0", "1.0", "1.1")
    inner.register_forward_hook(lambda module, args, out: out * 2)
    assert find_units(model).names == ("0", "1")


def test_named_units_are_held_to_the_model() -> None:
    flat, x = Flat(), torch.randn(4, 1, 4, 4)
    pipe, _ = build_pipeline(flat, LayoutSpec(n_stages=2, units=("conv", "flatten", "head"), split_size=2), x)
    assert torch.equal(pipe(x), torch.cat([flat(piece) for piece in x.split(2)]))
    for units, message in (
        (("conv", "haed"), "no submodule 'haed'; it has: conv, head"),
        (("conv",), "leave out the parameters head.weight, head.bias"),
        ((), "names nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            find_units(flat, (x,), units)
    with pytest.raises(ValueError, match="do not compute what the model computes"):
        find_units(Odd(), (torch.randn(2, 4),), ("a", "b"))
    with pytest.raises(ValueError, match="give an example input to trace it with"):
        find_units(Odd())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("name", ["odd", "resnet18", "gpt", "unet"])
def test_traced_models_equal_the_plain_loop(name: str, budget: Any) -> None:
    torch.manual_seed(0)
    model: nn.Module = {
        "odd": Odd,
        "resnet18": lambda: resnet18(3, 5),
        "gpt": lambda: gpt(17, 6, depth=3, width=16, heads=2, dropout=0.2),
        "unet": UNet,
    }[name]()
    x = {
        "odd": lambda: torch.randn(8, 4),
        "resnet18": lambda: torch.randn(8, 3, 32, 32),
        "gpt": lambda: torch.randint(17, (8, 6)),
        "unet": lambda: torch.randn(8, 2, 8, 8),
    }[name]()
    plain = copy.deepcopy(model)
    n = 2 if name == "odd" else 3
    pipe, layout = build_pipeline(model, LayoutSpec(n_stages=n, budgets=(budget,), split_size=2), x)
    assert sum(len(stage.units) for stage in layout.stages) == layout.bounds[-1]
    assert list(pipe.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        outs = []
        for net in (pipe, plain):
            torch.manual_seed(1)
            out = pipe(x) if net is pipe else torch.cat([plain(piece) for piece in x.split(2)])
            out.square().mean().backward()
            outs.append((out, torch.get_rng_state()))
        assert torch.equal(outs[0][0], outs[1][0])
        assert torch.equal(outs[0][1], outs[1][1])
        for (key, one), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), key
        for key, value in plain.state_dict().items():
            assert torch.equal(pipe.state_dict()[key], value), key
    pipe.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(pipe(x[:3], 1), torch.cat([plain(piece) for piece in x[:3].split(1)]))
    pipe.load_state_dict(copy.deepcopy(plain).double().state_dict())
    pipe.double()
    assert all(stage.tensors() for stage in pipe.stages)
    if name != "gpt":
        assert pipe(x.double()).dtype == torch.float64


def test_a_traced_stage_refuses_modes_it_was_not_traced_in() -> None:
    model = nn.ModuleDict({"a": nn.Dropout(0.5)})
    net = Drops()
    pipe, _ = build_pipeline(net, LayoutSpec(n_stages=2), torch.randn(4, 4))
    net.one.eval()
    with pytest.raises(ValueError, match="its modules are in neither as a whole"):
        pipe(torch.randn(4, 4))
    pipe.train()
    pipe(torch.randn(4, 4))
    del model


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.lin, self.two = nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.lin(self.one(x)))) + x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.sum() > 0 else x


def test_what_cannot_be_traced_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"Branch cannot be traced by torch.export .*list its submodules"):
        find_units(Branch(), (torch.randn(4, 4),))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).view(int(x.shape[0]), 2, 2).flatten(1)) if x.shape[0] == 2 else x


def test_a_trace_that_fixes_the_rows_refuses_others() -> None:
    x = torch.randn(4, 4)
    pipe, _ = build_pipeline(Fixed(), LayoutSpec(n_stages=2, split_size=2), x)
    pipe(x)
    with pytest.raises(ValueError, match="traced for micro-batches of 2 rows and got 1"):
        pipe(x, 1)


# -- layouts ----------------------------------------------------------------------------------------------------------


def chain(n: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({"n_stages": 3}, (0, 2, 4, 6)),
        ({"devices": ["cpu", "cpu"]}, (0, 3, 6)),
        ({"cuts": ["1", "5"]}, (0, 1, 5, 6)),
        ({"cuts": "4"}, (0, 4, 6)),
        ({"balance": [1, 2, 3]}, (0, 1, 3, 6)),
        ({"budgets": [0.5, None], "devices": "cpu"}, (0, 3, 6)),
        ({}, (0, 6)),
    ],
)
def test_ways_to_say_a_layout(options: dict[str, Any], bounds: tuple[int, ...]) -> None:
    if not options and torch.accelerator.is_available():
        pytest.skip("by default there is a stage for each accelerator")
    pipe, layout = build_pipeline(chain(), LayoutSpec.from_mapping(options))
    assert layout.bounds == bounds
    assert len(pipe) == len(bounds) - 1
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in chain().named_parameters()]
    assert pipe(torch.zeros(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "speed"}, "balance='speed' is not known: use even, time, memory"),
        ({"balance": "time", "cuts": ["1"]}, "both say where to cut"),
        ({"n_micro_batches": 2, "split_size": 2}, "both say how to split"),
        ({"device": "cpu"}, "no option device; it has: devices"),
        ({"n_stages": 2, "cuts": ["1", "2"]}, "n_stages says 2, cuts says 3"),
        ({"devices": ["cpu", "cuda:77"]}, "cuda:77.*does not exist on this machine; the devices that exist are: cpu"),
        ({"cuts": ["9"]}, "no unit '9' to cut before; the units are: 0, 1, 2, 3, 4, 5"),
        ({"cuts": ["3", "1"]}, "must rise"),
        ({"balance": [2, 2]}, "adds up to 4 units, but the model has 6"),
        ({"n_stages": 7}, "6 units cannot make 7 stages"),
        ({"n_stages": 2, "balance": "time"}, "needs an example input"),
        ({"n_stages": 2, "budgets": ["much"]}, "is not a stage's budget"),
    ],
)
def test_layouts_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_pipeline(chain(), LayoutSpec.from_mapping(options))


def test_memory_balance_follows_budgets_and_micro_batches_in_flight() -> None:
    profile = Profile(tuple(unit(f"u{k}", 1.0, 10, 100) for k in range(8)), 1)
    model = chain(8)
    units = find_units(model)

    def bounds(**options: Any) -> tuple[int, ...]:
        spec = LayoutSpec(n_stages=2, balance="memory", **options)
        return plan_layout(units, spec, profile=profile).bounds

    assert bounds() == (0, 4, 8)
    assert bounds(budgets=(0.25, None), n_micro_batches=4) == (0, 7, 8)
    assert plan_layout(units, LayoutSpec(n_stages=2, balance="memory"), profile=profile, in_flight=(3, 1)).bounds == (
        0,
        2,
        8,
    )
    assert bounds(budgets=(0, None)) == (0, 7, 8)


def test_a_layout_as_a_table() -> None:
    x = torch.randn(8, 4)
    spec = LayoutSpec(n_stages=2, balance="memory", budgets=(0.5,), n_micro_batches=4)
    _, layout = build_pipeline(chain(), spec, x)
    lines = format_layout(layout).splitlines()
    assert lines[0].split() == ["stage", "device", "units", "time/mb", "state", "activations", "budget"]
    assert len(lines) == 3
    assert "(3)" in lines[1]
    assert lines[1].endswith("0.5")
    assert sum(s.state_bytes for s in layout.stages) == 6 * (16 + 4) * 4 * 4
    assert list(itertools.chain(*(s.units for s in layout.stages))) == [str(k) for k in range(6)]
