"""FLOPs of steps that can be counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recals_exp.meters.flops import compare_flops, count_step_flops
from recals_exp.meters.steps import StartingState, TrainStep

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


def test_gradients_of_inputs_alone_are_counted() -> None:
    """The counter's own module tracker refuses this: its hooks ask the engine about leaves, which autograd.grad forbids."""
    from recals_exp.meters.flops import count_flops

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    found = count_flops(lambda: torch.autograd.grad(model(x).sum(), [x]))
    assert found == 4 * (2 * 2 * 4 * 4)  # two layers forward, and the gradients of their inputs
