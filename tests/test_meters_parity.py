"""Parity is about bits; each way of being different is found and named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp.meters.parity import check_parity, same_bits
from recals_exp.meters.steps import TrainStep

CPU = torch.device("cpu")


class Net(nn.Module):
    """Dropout, running statistics, an unused parameter, Python-held state, and a record as output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.zeros(2))
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        return {"logits": self.body(x) * self.calls, "calls": self.calls}


def step_and_batch() -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Net()

    def loss(output: dict[str, Any], target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output["logits"], target)

    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, CPU)
    return step, (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


def check(bind: Callable[[nn.Module], Callable[..., Any]]) -> Any:
    step, batch = step_and_batch()
    return check_parity(step, bind, batch, seed=3)


def test_the_model_itself_is_identical_and_untouched() -> None:
    step, batch = step_and_batch()
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    record = check_parity(step, lambda model: model, batch, seed=3)
    assert record.differences == ()
    assert record.plain_reproducible is None
    assert record.outputs_identical
    assert record.loss_identical
    assert record.gradients_identical
    assert record.buffers_identical
    assert record.generators_identical
    assert all(torch.equal(before[name], tensor) for name, tensor in step.model.state_dict().items())
    assert step.model.calls == 0


def with_gradient_hook(model: Any) -> Any:
    model.body[4].weight.register_hook(lambda grad: grad * (1 + 2**-20))
    return model


def with_missing_gradient(model: Any) -> Any:
    model.body[0].bias.requires_grad_(False)
    return model


def with_extra_buffer_update(model: Any) -> Any:
    def call(x: Tensor) -> Any:
        output = model(x)
        model.body[1].num_batches_tracked.add_(1)
        return output

    return call


def with_extra_draw(draw: Callable[[], Any]) -> Callable[[Any], Any]:
    def bind(model: Any) -> Any:
        def call(x: Tensor) -> Any:
            output = model(x)
            draw()
            return output

        return call

    return bind


def with_other_output(model: Any) -> Any:
    return lambda x: {**model(x), "calls": 2}


@pytest.mark.parametrize(
    ("bind", "part", "message"),
    [
        (with_gradient_hook, "gradients_identical", r"gradient of body\.4\.weight differs: largest difference"),
        (
            with_missing_gradient,
            "gradients_identical",
            r"gradient of body\.0\.bias differs: plain a tensor \(8,\), .* None",
        ),
        (
            with_extra_buffer_update,
            "buffers_identical",
            r"buffer body\.1\.num_batches_tracked differs: largest difference 1 ",
        ),
        (with_extra_draw(lambda: torch.rand(1)), "generators_identical", "generator torch cpu differs"),
        (with_extra_draw(random.random), "generators_identical", "generator python differs"),
        (with_other_output, "outputs_identical", "output 1 differs: plain 1, under the strategy 2"),
    ],
)
def test_each_kind_of_difference_is_found_and_named(bind: Any, part: str, message: str) -> None:
    record = check(bind)
    assert len(record.differences) == 1
    assert re.search(message, record.differences[0]), record.differences
    fields = ("outputs_identical", "loss_identical", "gradients_identical", "buffers_identical", "generators_identical")
    assert [name for name in fields if not getattr(record, name)] == [part]
    assert record.plain_reproducible is True


def test_a_model_that_does_not_repeat_itself_is_not_blamed_on_the_strategy() -> None:
    counter = iter(range(1000))

    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * next(counter)

    model = Restless()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, target: out.sum(), CPU)
    record = check_parity(step, lambda model: model, (torch.ones(2, 3), torch.zeros(2)), seed=0)
    assert not record.gradients_identical
    assert record.plain_reproducible is False


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.ones(2, 3), torch.ones(3, 2).t(), True),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.empty(0), torch.empty(0), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (None, None, True),
        (None, torch.ones(1), False),
    ],
)
def test_same_bits(a: Tensor | None, b: Tensor | None, same: bool) -> None:
    assert same_bits(a, b) is same
    assert same_bits(b, a) is same
