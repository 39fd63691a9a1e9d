"""The conformance suite: every strategy gives the plain step, on every model here, under every limit it takes.

A strategy is tested by being listed in `STRATEGIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp import strategies
from recals_exp.meters.parity import check_parity
from recals_exp.meters.steps import TrainStep
from recals_exp.recals import POLICIES, recals_with_rngs
from recals_exp.strategies import STRATEGIES, BoundStrategy, Strategy, make_strategy

CPU = torch.device("cpu")


def chain() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 4))


def noisy() -> nn.Module:
    """Batch norm and dropout: hidden writes and random numbers."""
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 4),
    )


class Residual(nn.Module):
    """Skips, a parameter used twice, and one used never."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.unused = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.inner(self.norm(x)).sigmoid()
        return self.head(x)


MODELS: list[Callable[[], nn.Module]] = [chain, noisy, Residual]


def cases() -> list[Any]:
    """Every strategy with every policy it can take, and every budget that means something to it."""
    found = []
    for name in sorted(STRATEGIES):
        policies = sorted(POLICIES) if make_strategy(name).policy != "none" else ["none"]
        fractions = (None, 1.0, 0.5) if make_strategy(name).uses_budget else (None,)
        found += [
            pytest.param(name, policy, fraction, id=f"{name}-{policy}-{fraction or 'no limit'}")
            for policy in policies
            for fraction in fractions
        ]
    return found


def strategy_of(name: str, policy: str) -> Strategy:
    return make_strategy(name, policy if policy != "none" else "fifo")


def step_of(build: Callable[[], nn.Module]) -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = build()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), nn.functional.cross_entropy, CPU
    )
    return step, (torch.randn(12, 16), torch.arange(12) % 4)


def limit_of(step: TrainStep, x: Tensor, fraction: float | None) -> int | None:
    if fraction is None:
        return None
    total, unit_max = recals_with_rngs(-1).analyze(step.model, x)
    return max(int(fraction * total), unit_max)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_a_step_is_the_plain_step(
    name: str, policy: str, fraction: float | None, build: Callable[[], nn.Module]
) -> None:
    step, batch = step_of(build)
    limit = limit_of(step, batch[0], fraction)
    bound: list[BoundStrategy] = []

    def bind(model: nn.Module) -> BoundStrategy:
        bound.append(strategy_of(name, policy).bind(model, limit))
        return bound[-1]

    record = check_parity(step, bind, batch, seed=1)
    assert record.differences == ()
    assert bound[0].limit_bytes == limit
    stats = bound[0].stats
    if stats is not None:
        assert stats.cached_bytes == 0  # backward gave everything back
        assert limit is None or stats.peak_cached_bytes <= limit
        assert (stats.dropped_values > 0) == (fraction == 0.5)  # else the low budget proved nothing


@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_training_is_plain_training(name: str, policy: str, fraction: float | None) -> None:
    plain_step, batch = step_of(noisy)
    torch.manual_seed(3)
    plain = [plain_step(plain_step.model, *batch).loss.item() for _ in range(5)]
    step, batch = step_of(noisy)
    bound = strategy_of(name, policy).bind(step.model, limit_of(step, batch[0], fraction))
    torch.manual_seed(3)
    assert [step(bound, *batch).loss.item() for _ in range(5)] == plain
    assert plain[-1] < plain[0]
    for (key, a), b in zip(plain_step.model.state_dict().items(), step.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_arguments_and_results_pass_through(name: str, policy: str, fraction: float | None) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, scale: float, extra: Any = None) -> dict[str, Any]:
            return {"y": x * scale, "extra": extra}

    bound = strategy_of(name, policy).bind(Model(), None if fraction is None else 2**20)
    marker = object()
    out = bound(torch.ones(2, requires_grad=True), scale=3.0, extra=marker)
    assert out["extra"] is marker
    assert torch.equal(out["y"], torch.full((2,), 3.0))


@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_binding_leaves_the_model_as_it_is(name: str, policy: str, fraction: float | None) -> None:
    step, batch = step_of(noisy)
    keys = list(step.model.state_dict())
    identities = [id(parameter) for parameter in step.model.parameters()]
    strategy = strategy_of(name, policy)
    limit = limit_of(step, batch[0], fraction)
    one, other = strategy.bind(step.model, limit), strategy.bind(step.model, limit)
    step(one, *batch)
    assert list(step.model.state_dict()) == keys
    assert [id(parameter) for parameter in step.model.parameters()] == identities
    if other.stats is not None:
        assert other.stats.peak_cached_bytes == 0  # independent accounts
        assert one.stats is not None
        assert one.stats.peak_cached_bytes > 0
        one.reset_stats()
        assert one.stats is not None
        assert one.stats.peak_cached_bytes == 0


def test_classes_are_abstract_or_final() -> None:
    classes = [
        kind for _, kind in inspect.getmembers(strategies, inspect.isclass) if kind.__module__ == strategies.__name__
    ]
    assert len(classes) >= 6
    for kind in classes:
        assert inspect.isabstract(kind) != getattr(kind, "__final__", False), kind
        assert not any(getattr(base, "__final__", False) for base in kind.__mro__[1:]), kind


def test_every_name_is_its_strategy() -> None:
    assert {name: make_strategy(name).name for name in STRATEGIES} == {name: name for name in STRATEGIES}
    assert {"none", "recals"} <= set(STRATEGIES)


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"strategy='magic' does not exist; there are: none, recals"):
        make_strategy("magic")
    with pytest.raises(ValueError, match=r"policy='magic' does not exist; there are: .*fifo"):
        make_strategy("recals", "magic")
    with pytest.raises(ValueError, match=r"strategy='none' does not know the option magic; it takes none"):
        make_strategy("none", magic=1)
    with pytest.raises(
        ValueError, match=r"strategy='recals' does not know the options magic, more; it takes audit, gpu_dev"
    ):
        make_strategy("recals", more=1, magic=1)


def test_no_strategy_holds_no_limit() -> None:
    with pytest.raises(ValueError, match=r"cannot hold a limit, but got 5 bytes: use strategy=recals"):
        make_strategy("none").bind(chain(), 5)
