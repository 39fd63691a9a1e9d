"""Random ops of every sort (rule 6): a re-run draws the same numbers, and no generator ends anywhere but where it should."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity.harness import Call, Case, check
from recals.scenarios import Stories, grads, held, leaf, told, trained
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recals_exp.recals import recals_with_rngs

stories = Stories()


# -- samplers ------------------------------------------------------------------------------------------------------------


@stories
def every_dropout(call: Call) -> Any:
    layers = nn.ModuleList([nn.Dropout(0.3), nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)])

    def fn(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x.sin()).exp()
        images = F.dropout2d(x[:, :, :, None], 0.3).cos() * F.dropout3d(x[:, :, :, None, None], 0.3)[..., 0]
        return F.dropout(images, 0.3, inplace=True).tanh()

    return told(call, fn, leaf(2, 3, 4))


@stories
def noise_made_from_sizes(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin() * torch.randn(8, 8) + torch.rand(8, 8).exp() * x
        z = y * torch.randint(1, 5, (8, 8)) + torch.normal(0.0, 1.0, (8, 8)) * y
        return z[torch.randperm(8)].exp() * torch.bernoulli(torch.full((8, 8), 0.5))

    return told(call, fn, leaf(8, 8))


@stories
def noise_like_a_tensor(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin() * torch.randn_like(x) + torch.rand_like(x).exp() * x
        z = y * torch.randint_like(x, 1, 5) + y.detach().bernoulli(0.5) * y.cos()
        return z * torch.normal(x.detach(), x.detach().abs() + 0.1)

    return told(call, fn, leaf(8, 8))


@stories
def memory_filled_at_random(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        for fill in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "random_"):
            noise = getattr(torch.empty(8, 8), fill)()
            y = (y * noise.clamp(-2, 2)).sin()
        return y * torch.empty(8, 8).geometric_(0.5) * torch.zeros(8, 8).bernoulli_(0.5)

    return told(call, fn, leaf(8, 8))


@stories
def part_of_a_value_filled_at_random(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y[2:4].normal_()
        y[:, 1].bernoulli_(0.5)
        z = torch.zeros(8, 8)
        z[::2].uniform_()
        return (y * z).exp() * y

    return told(call, fn, leaf(8, 8))


@stories
def distributions(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        rate = x.exp() + 0.5
        normal = torch.distributions.Normal(x.sin(), rate).rsample()
        gamma = torch.distributions.Gamma(rate, rate).rsample()
        beta = torch.distributions.Beta(rate, rate + 1).rsample()
        dirichlet = torch.distributions.Dirichlet(rate).rsample()
        counts = torch.poisson(rate.detach()) + torch.binomial(torch.full((8, 8), 10.0), torch.rand(8, 8))
        picked = torch.multinomial(rate.detach(), 3)
        return (normal * gamma.sin() * beta * dirichlet * counts).gather(1, picked) * F.gumbel_softmax(x.cos())[:, :3]

    return told(call, fn, leaf(8, 8))


@stories
def random_pooling_and_leaks(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        pooled = F.fractional_max_pool2d(x.sin(), 2, output_size=6)
        return F.rrelu(pooled, training=True).exp() * F.gumbel_softmax(pooled, hard=True, dim=-1)

    return told(call, fn, leaf(1, 2, 9, 9))


@stories
def attention_with_dropout(call: Call) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def fn(x: Tensor) -> Tensor:
        y = layer(x.sin()).tanh()
        return F.scaled_dot_product_attention(y, y.cos(), y.exp(), dropout_p=0.3)

    return told(call, fn, leaf(2, 5, 8)), trained(call, layer, torch.randn(2, 5, 8))


@stories
def recurrent_dropout(call: Call) -> Any:
    layer = nn.GRU(4, 6, num_layers=3, dropout=0.4)
    return told(call, lambda x: layer(x.sin())[0].exp(), leaf(5, 2, 4)), held(layer)


@stories
def stochastic_depth_and_masks_by_comparison(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            if torch.rand(()).item() > 0.5:
                x = x.sin().exp()
            x = torch.where(torch.rand(8, 8) > 0.5, x.cos(), x.tanh())
        return x * (torch.rand(8, 1) > 0.2)

    return told(call, fn, leaf(8, 8))


@stories
def under_no_grad(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.randn(8, 8).exp()
            mask = F.dropout(torch.ones(8, 8), 0.5)
        return (x.sin() * noise).exp() * mask

    return told(call, fn, leaf(8, 8))


@stories
def vmapped(call: Call) -> Any:
    def one(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).exp() * torch.randn(4)

    def fn(x: Tensor) -> Tensor:
        return torch.vmap(one, randomness="different")(x.cos()) * torch.vmap(one, randomness="same")(x.sin())

    return told(call, fn, leaf(3, 4))


# -- generators ----------------------------------------------------------------------------------------------------------


@stories
def private_generators(call: Call) -> Any:
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * torch.randn(8, 8, generator=first)
        z = y.exp() * torch.rand(8, 8, generator=second) + torch.empty(8, 8).normal_(generator=first) * y
        return (z * torch.bernoulli(torch.full((8, 8), 0.5), generator=second)).exp() * torch.randn(8, 8)

    results = [told(call, fn, leaf(8, 8)) for _ in range(2)]
    return results, first.get_state(), second.get_state()


@stories
def private_generator_moved_before_backward(call: Call) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = leaf(8, 8)
    out = call(lambda x: (x.sin() * torch.randn(8, 8, generator=generator)).exp().cos(), x)
    generator.manual_seed(99)
    drawn = torch.randn(3, generator=generator)
    gradient = grads(out, x)
    return gradient, drawn, torch.randn(3, generator=generator)


@stories
def private_generator_gone_before_backward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return (x.sin() * torch.randn(8, 8, generator=generator)).exp().cos()

    return told(call, fn, leaf(8, 8))


@stories
def seeded_inside(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5)
        torch.manual_seed(3)
        z = F.dropout(y.exp(), 0.5)
        with torch.random.fork_rng():
            torch.manual_seed(4)
            z = F.dropout(z.cos(), 0.5)
        state = torch.get_rng_state()
        z = F.dropout(z.sin(), 0.5)
        torch.set_rng_state(state)
        return F.dropout(z.exp(), 0.5)

    return told(call, fn, leaf(8, 8)), torch.rand(2)


@stories
def seeded_between_forward_and_backward(call: Call) -> Any:
    x = leaf(8, 8)
    out = call(lambda x: F.dropout(F.dropout(x.sin(), 0.5).exp(), 0.5).cos(), x)
    torch.manual_seed(77)
    gradient = grads(out, x)
    return gradient, torch.rand(3)


@stories
def drawn_in_backward(call: Call) -> Any:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.exp() * torch.rand_like(x)

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5)
        y.register_hook(lambda grad: grad * torch.rand_like(grad))
        return Noisy.apply(F.dropout(Noisy.apply(y), 0.5)).sin()

    return told(call, fn, leaf(8, 8)), torch.rand(3)


@stories
def checkpoint_re_runs_among_replays(call: Call) -> Any:
    def block(x: Tensor) -> Tensor:
        return F.dropout(x.exp().sin(), 0.5)

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5)
        y = checkpoint(block, y, use_reentrant=False)
        return F.dropout(y.cos(), 0.5).exp()

    return told(call, fn, leaf(8, 8)), torch.rand(3)


@stories
def two_backwards_of_one_draw(call: Call) -> Any:
    x = leaf(8, 8)
    out = call(lambda x: F.dropout(F.dropout(x.sin(), 0.5).exp(), 0.5).sin(), x)
    first = grads(out, x, retain_graph=True)
    torch.rand(5)
    return first, grads(out, x), torch.rand(3)


@stories
def double_backward_through_dropout(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x.sin(), 0.5).exp(), 0.5).sin()

    x = leaf(8, 8)
    out = call(fn, x)
    (gradient,) = grads(out, x, create_graph=True)
    assert gradient is not None
    return gradient, grads(gradient.square(), x), torch.rand(2)


# -- Python and NumPy ----------------------------------------------------------------------------------------------------


@stories
def python_and_numpy(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            if random.random() > 0.5:
                x = x.sin()
            x = (x * random.gauss(0, 1)).exp().tanh()
            x = x * torch.from_numpy(np.random.rand(8, 8)).float() + torch.tensor(
                np.random.randn(8), dtype=torch.float32
            )
            x = x[torch.tensor(random.sample(range(8), 8))]
        return x.cos()

    return told(call, fn, leaf(8, 8)), random.random(), np.random.rand()


@stories
def private_python_and_numpy_generators(call: Call) -> Any:
    rng, generator = random.Random(3), np.random.default_rng(4)

    def fn(x: Tensor) -> Tensor:
        y = (x.sin() * rng.random()).exp()
        return (y * torch.from_numpy(generator.random((8, 8))).float()).sin() * y

    return told(call, fn, leaf(8, 8)), rng.random(), generator.random()


@stories
def quasi_random(call: Call) -> Any:
    engine = torch.quasirandom.SobolEngine(8, scramble=True, seed=3)

    def fn(x: Tensor) -> Tensor:
        return (x.sin() * engine.draw(8)).exp() * engine.draw(8)

    return [told(call, fn, leaf(8, 8)) for _ in range(2)]


# -- not saved by the caller's wish ---------------------------------------------------------------------------------------


@stories(options={"gpu_devices": "none"})
def no_generator_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5).cos()
        noise = torch.empty(8, 8).normal_()
        z = torch.zeros(8, 8)
        z[0].uniform_()
        y = (y * z).exp()
        return (F.dropout(y, 0.5) * noise).cos() * torch.randperm(8)

    return told(call, fn, leaf(8, 8)), torch.rand(2)


@stories(options={"gpu_devices": "cuda"})
def only_accelerator_generators_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        return F.rrelu(F.dropout(x.sin(), 0.5).exp(), training=True).cos()

    return told(call, fn, leaf(8, 8)), torch.rand(2)


@stories.each()
def test_random(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


def test_masks_are_rebuilt_not_held_when_generators_are_saved() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(6):
            x = F.dropout(x.sin(), 0.5)
        return x

    counted = {}
    for devices in ("all", "none"):
        recals = recals_with_rngs(-1, devices, policy="fifo")
        out = recals(fn, leaf(64, 64))
        counted[devices] = recals.stats.pinned_bytes
        del out
    mask_bytes = 64 * 64
    assert counted["all"] == 0
    assert counted["none"] >= 6 * mask_bytes


class _FailsLate(TorchDispatchMode):
    """Lets a random op draw, then raises in its place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            raise MemoryError("no memory in this replay")
        return out


def test_a_replay_that_fails_puts_the_generator_back() -> None:
    recals = recals_with_rngs(64 * 64 * 4)
    x = leaf(64, 64)
    out = recals(lambda x: F.dropout(F.dropout(x.sin(), 0.5).exp(), 0.5).sin().cos(), x)
    state = torch.get_rng_state()
    with _FailsLate(), pytest.raises(MemoryError, match="no memory in this replay"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
