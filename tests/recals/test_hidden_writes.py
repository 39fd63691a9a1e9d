"""Hidden writes (rule 5): running statistics, observers and normalised weights move once per call, never in a replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
import torch.nn.functional as F
from parity.harness import Call, Case, check, weighted_sum
from recals.scenarios import Stories, grads, held, leaf, told, trained
from torch import Tensor, nn

stories = Stories()


def _after_a_cheap_op(layer: nn.Module) -> nn.Module:
    """The layer between ops whose values are droppable."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sin()).exp().tanh()

    return Between()


@stories
def batch_norms(call: Call) -> Any:
    seen = []
    for layer, size in (
        (nn.BatchNorm1d(4), (6, 4)),
        (nn.BatchNorm2d(4), (3, 4, 5, 5)),
        (nn.BatchNorm3d(4), (2, 4, 3, 3, 3)),
    ):
        seen.append(trained(call, _after_a_cheap_op(layer), torch.randn(size)))
    return seen


@stories
def batch_norm_with_cumulative_average(call: Call) -> Any:
    return trained(call, _after_a_cheap_op(nn.BatchNorm1d(4, momentum=None)), torch.randn(6, 4), steps=3)


@stories
def batch_norm_without_statistics_or_weights(call: Call) -> Any:
    layers = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh(), nn.BatchNorm1d(4, affine=False))
    return trained(call, _after_a_cheap_op(layers), torch.randn(6, 4))


@stories
def batch_norm_in_eval(call: Call) -> Any:
    model = _after_a_cheap_op(nn.BatchNorm1d(4))
    before = trained(call, model, torch.randn(6, 4))
    model.eval()
    return before, trained(call, model, torch.randn(6, 4))


@stories
def batch_norm_in_half(call: Call) -> Any:
    model = _after_a_cheap_op(nn.BatchNorm2d(4)).bfloat16()
    return trained(call, model, torch.randn(3, 4, 5, 5, dtype=torch.bfloat16))


@stories
def batch_norm_shared_by_two_places(call: Call) -> Any:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.ReLU(inplace=True))
    return trained(call, model, torch.randn(6, 4))


@stories
def statistics_read_by_the_model(call: Call) -> Any:
    norm = nn.BatchNorm1d(4)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * norm.running_mean.clone() + x
        y = norm(y)
        y = y + norm.running_var.detach()  # the new one
        return norm(y.exp()) * norm.running_mean.clone()

    return [told(call, fn, leaf(6, 4)) for _ in range(2)], held(norm)


@stories
def statistics_in_slices_of_one_buffer(call: Call) -> Any:
    both = torch.stack([torch.zeros(4), torch.ones(4)])

    def fn(x: Tensor) -> Tensor:
        y = F.batch_norm(x.sin(), both[0], both[1], training=True)
        return F.batch_norm(y.exp(), both[0], both[1], training=True).cos()

    return told(call, fn, leaf(6, 4)), both


@stories
def statistics_of_another_class(call: Call) -> Any:
    class Statistics(Tensor):
        pass

    mean, var = torch.zeros(4), torch.ones(4)

    def fn(x: Tensor) -> Tensor:
        y = F.batch_norm(x.sin(), mean.as_subclass(Statistics), var.as_subclass(Statistics), training=True)
        return y.as_subclass(Tensor).exp().tanh()

    return told(call, fn, leaf(6, 4)), mean, var


@stories
def statistics_made_inside(call: Call) -> Any:
    """What they become depends on what they were."""

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        mean, var, filled = y.detach().mean(0), y.detach().var(0), torch.empty(4).fill_(0.5)
        z = F.batch_norm(y, mean, var, training=True).exp() * mean
        return F.batch_norm(z, filled, var, training=True).tanh() * filled * var

    return told(call, fn, leaf(6, 4))


@stories
def statistics_saved_and_then_moved(call: Call) -> Any:
    """Batch norm moves them without moving their version counter: plain PyTorch reads the new ones in backward."""
    norm = nn.BatchNorm1d(4)
    x = leaf(6, 4)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * norm.running_var  # autograd saves the buffer itself
        return norm(y).exp().sin()

    return grads(call(fn, x), x), held(norm)


@stories
def frozen_batch_norm(call: Call) -> Any:
    model = _after_a_cheap_op(nn.BatchNorm1d(4))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = leaf(6, 4)
    return told(call, model, x), held(model)


@stories
def instance_and_group_norms(call: Call) -> Any:
    layers = nn.Sequential(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(inplace=True), nn.GroupNorm(2, 4),
        nn.Tanh(), nn.LocalResponseNorm(2), nn.InstanceNorm2d(4), nn.LayerNorm(5), nn.RMSNorm(5),
    )  # fmt: skip
    return trained(call, _after_a_cheap_op(layers), torch.randn(3, 4, 5, 5))


@stories
def sync_batch_norm_without_a_group(call: Call) -> Any:
    return trained(call, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.SyncBatchNorm(4)), torch.randn(6, 4))


@stories
def sync_batch_norm_in_eval(call: Call) -> Any:
    return trained(call, _after_a_cheap_op(nn.SyncBatchNorm(4)).eval(), torch.randn(6, 4))


@stories
def statistics_gathered_as_sync_batch_norm_does(call: Call) -> Any:
    """The arithmetic of ``SyncBatchNorm`` with one replica, by native batch norm's own op."""
    mean, var = torch.zeros(4), torch.ones(4)

    def fn(x: Tensor) -> Tensor:
        y, _, _ = torch.native_batch_norm(x.sin(), None, None, mean, var, True, 0.1, 1e-5)
        z, _, _ = torch.ops.aten._native_batch_norm_legit(y.exp(), None, None, mean, var, True, 0.1, 1e-5)
        return z.cos()

    return told(call, fn, leaf(6, 4)), mean, var


@stories
def fake_quantisation(call: Call) -> Any:
    def quantiser() -> nn.Module:
        return quantization.FakeQuantize(observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    model = nn.Sequential(nn.Linear(4, 6), quantiser(), nn.Tanh(), nn.Linear(6, 4), quantiser())
    return trained(call, model, torch.randn(5, 4), steps=3)


@stories
def fused_fake_quantisation(call: Call) -> Any:
    """One op reads and moves the observer's range: each replay must start from the range that the forward pass found."""
    model = nn.Sequential(
        nn.Linear(4, 6), quantization.FusedMovingAvgObsFakeQuantize(), nn.Tanh(), nn.Linear(6, 4),
        quantization.FusedMovingAvgObsFakeQuantize(), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh(),
    )  # fmt: skip
    for step in range(3):
        weighted_sum(call(model, torch.randn(5, 4) * (step + 1))).backward()  # type: ignore[union-attr]
    return held(model)


@stories
def learnable_fake_quantisation(call: Call) -> Any:
    scale, zero = leaf(1), torch.zeros(1, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        y = torch._fake_quantize_learnable_per_tensor_affine(x.sin(), scale.abs() + 0.1, zero, 0, 255, 0.5)
        return y.exp().cos()

    return told(call, fn, leaf(5, 4))


@stories
def embeddings_with_a_largest_norm(call: Call) -> Any:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    return trained(call, model, torch.tensor([[1, 2, 1], [8, 0, 2]]))


@stories
def embedding_bag_with_a_largest_norm(call: Call) -> Any:
    model = nn.Sequential(nn.EmbeddingBag(9, 4, max_norm=0.5, mode="mean"), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    return trained(call, model, torch.tensor([[1, 2, 1], [8, 0, 2]]))


@stories
def spectral_and_weight_norms(call: Call) -> Any:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(),
        nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(),
    )  # fmt: skip
    return trained(call, model, torch.randn(5, 4), steps=3)


@pytest.mark.filterwarnings("ignore")
@stories
def spectral_norm_of_old(call: Call) -> Any:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    return trained(call, model, torch.randn(5, 4), steps=2)


@stories
def lazy_modules(call: Call) -> Any:
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(4), nn.Tanh())
    return trained(call, model, torch.randn(5, 4), steps=3)


@stories
def counters_and_python_state(call: Call) -> Any:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls, self.trail = 0, []
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.steps += 1
            y = self.layer(x).tanh()
            self.trail.append(float(y.detach().sum()))
            self.mean.lerp_(y.detach().mean(0), 0.1)
            return y.exp() * self.mean.clone() / self.steps.clone()

    model = Counting()
    return trained(call, model, torch.randn(5, 4), steps=3), model.calls, model.trail


@stories
def recurrent_state_in_a_buffer(call: Call) -> Any:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.state = torch.zeros(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.layer(torch.cat([x, self.state], 1)).tanh()
            return self.state.exp().sin()

    model = Cell()
    total = sum(call(model, torch.randn(5, 4)).sum() for _ in range(3))
    total.backward()
    model.state = model.state.detach()
    return total.detach(), held(model), model.state


@stories.each()
def test_hidden_writes(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)
