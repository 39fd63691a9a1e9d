"""FLOPs of steps that can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recals_exp.meters.flops import compare_flops, count_step_flops
from recals_exp.meters.steps import StartingState, TrainStep
from recals_exp.recals import recals_with_rngs

CPU = torch.device("cpu")


def chain_step(depth: int = 4, width: int = 16) -> tuple[TrainStep, tuple[torch.Tensor, torch.Tensor]]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, CPU)
    return step, (torch.randn(8, width), torch.zeros(8, dtype=torch.int64))


def test_a_chain_counts_three_products_a_layer_less_the_first_input_gradient() -> None:
    step, batch = chain_step()
    product = 2 * 8 * 16 * 16
    assert count_step_flops(step, StartingState(step, 0), step.model, batch) == (3 * 4 - 1) * product


def test_recomputation_is_counted_exactly() -> None:
    step, batch = chain_step()
    state = StartingState(step, 0)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return step.model[2:](checkpoint(step.model[:2], x, use_reentrant=False))

    plain = count_step_flops(step, state, step.model, batch)
    wrapped = count_step_flops(step, state, checkpointed, batch)
    record = compare_flops(plain, wrapped, engine_recomputed=None)
    # non-reentrant checkpoint stops early: only the first of two layers has to run again, for the second's input
    assert record.recomputed_flops == 2 * 8 * 16 * 16
    assert record.overhead_pct == pytest.approx(100 / 11)


def test_attention_on_the_cpu_is_counted_forward_and_backward() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x * self.scale
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    model = Attention()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, target: out.sum(), CPU)
    counted = count_step_flops(step, StartingState(step, 0), model, (torch.randn(2, 3, 8, 16), torch.zeros(2)))
    product = 2 * (2 * 3) * 8 * 8 * 16  # q k^T, and the same for the weighted sum
    assert counted == (2 + 5) * product  # backward: recomputed scores and four gradients


def test_a_step_without_countable_operations_has_no_percentage() -> None:
    assert compare_flops(0, 0, 0).overhead_pct is None
    assert compare_flops(100, 150, 49).overhead_pct == 50.0


class _Last(nn.Module):
    """An LSTM's output at the last time step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)[:, -1]


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for stride in (1, 2, 1):
        layers += [nn.Conv2d(4, 4, 3, stride=stride, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 4, 3), nn.Tanh(), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "shape"),
    [(_convolutions, (4, 4, 12, 12)), (_Attention, (4, 16, 16)), (_Last, (4, 16, 16))],
    ids=["convolutions", "attention", "lstm"],
)
def test_the_engine_counts_what_the_meter_counts(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, CPU)
    batch = (torch.randn(shape), torch.zeros(4, dtype=torch.int64))
    state = StartingState(step, 0)
    plain = count_step_flops(step, state, model, batch)
    total, _ = recals_with_rngs(-1).analyze(model, batch[0])
    recals = recals_with_rngs(total // 2, policy="fifo")
    for _ in range(2):
        recals.reset_stats()
        wrapped = count_step_flops(step, state, lambda x: recals(model, x), batch)
        assert wrapped - plain == recals.stats.recomputed_flops > 0


def test_rnn_layers_are_counted_forward_and_backward() -> None:
    model = _Last()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, CPU)
    counted = count_step_flops(
        step, StartingState(step, 0), model, (torch.randn(4, 16, 16), torch.zeros(4, dtype=torch.int64))
    )
    forward = 3 * 2 * 4 * 16 * (4 * 16 * (16 + 16))  # layers, rows, time steps, gates
    assert counted == 3 * forward


def test_gradients_of_inputs_alone_are_counted() -> None:
    """The counter's own module tracker refuses this: its hooks ask the engine about leaves, which autograd.grad forbids."""
    from recals_exp.meters.flops import count_flops

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    found = count_flops(lambda: torch.autograd.grad(model(x).sum(), [x]))
    assert found == 4 * (2 * 2 * 4 * 4)  # two layers forward, and the gradients of their inputs
