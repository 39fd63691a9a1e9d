"""Autocast (rule 7): its casts are ops like any other, its cache is never in a replay's way, and backward may be anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity.harness import Call, Case, check, weighted_sum
from recals.scenarios import Stories, grads, held, leaf, parameter_grads
from torch import Tensor, nn

from recals_exp.recals import recals_with_rngs

stories = Stories()


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)
    )


def bf16(**kwargs: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **kwargs)


@stories
def around_forward(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)
    with bf16():
        out = call(model, x)
    weighted_sum(out).backward()  # type: ignore[union-attr]
    return out, held(model), x.grad


@stories
def inside_the_call(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)

    def fn(x: Tensor) -> Tensor:
        with bf16():
            return model(x.sin())

    return grads(call(fn, x), x, *model.parameters())


@stories
def around_forward_and_backward(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)
    with bf16():
        loss = weighted_sum(call(model, x))
        assert loss is not None
        loss.backward()
    return held(model), x.grad


@stories
def backward_inside_another(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)
    with bf16():
        loss = weighted_sum(call(model, x))
    assert loss is not None
    with torch.autocast("cpu", torch.float16):
        loss.backward()
    plain_forward = weighted_sum(call(model, x))
    assert plain_forward is not None
    with bf16():
        plain_forward.backward()
    return held(model), x.grad


@stories
def nested_and_disabled_inside(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)

    def fn(x: Tensor) -> Tensor:
        y = model(x)
        with bf16(enabled=False):
            y = F.linear(y.float(), torch.eye(8)).exp()
            with torch.autocast("cpu", torch.float16):
                y = torch.mm(y, torch.eye(8)).float().tanh()
        return torch.mm(y, y.t())

    with bf16():
        out = call(fn, x)
    return grads(out, x, *model.parameters())


@stories
def casts_cached_over_several_calls(call: Call) -> Any:
    """One autocast region, several calls: later ones use the casts of the weights that the first one made."""
    model = mlp()
    with bf16():
        losses = [weighted_sum(call(model, torch.randn(4, 8))) for _ in range(3)]
    for i in (1, 0, 2):
        loss = losses[i]
        assert loss is not None
        loss.backward()
    return held(model)


@stories
def casts_cached_while_graphs_die(call: Call) -> Any:
    model = mlp()
    with bf16():
        for _ in range(3):
            loss = weighted_sum(call(model, torch.randn(4, 8)))
            assert loss is not None
            loss.backward()
            del loss
    return held(model)


@stories
def without_the_cache_of_casts(call: Call) -> Any:
    model = mlp()
    with bf16(cache_enabled=False):
        losses = [weighted_sum(call(model, torch.randn(4, 8))) for _ in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    return held(model)


@stories
def a_weight_used_twice(call: Call) -> Any:
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        return layer(layer(x).tanh()).exp()

    with bf16():
        out = call(fn, leaf(4, 8))
    weighted_sum(out).backward()  # type: ignore[union-attr]
    return parameter_grads(layer)


@stories
def scaled_gradients(call: Call) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = call(model, torch.randn(4, 8)).float().square().mean()
        if step == 2:
            loss = loss * float("inf")  # a step to skip
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return held(model), scaler.state_dict()


@stories
def custom_functions_that_fix_their_dtype(call: Call) -> Any:
    class Fixed(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.mm(x, x)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad @ x.t() + x.t() @ grad

    def fn(x: Tensor) -> Tensor:
        return Fixed.apply(torch.mm(x.sin(), x)).exp()

    x = leaf(4, 4)
    with bf16():
        out = call(fn, x)
    return grads(out, x)


@stories
def switched_per_step(call: Call) -> Any:
    model = mlp()
    for enabled in (True, False, True):
        with bf16(enabled=enabled):
            loss = weighted_sum(call(model, torch.randn(4, 8)))
        assert loss is not None
        loss.backward()
    return held(model)


@stories
def weights_in_half_and_in_double(call: Call) -> Any:
    seen = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = mlp().to(dtype)
        loss = weighted_sum(call(model, torch.randn(4, 8, dtype=dtype)))
        assert loss is not None
        loss.backward()
        seen.append(held(model))
    return seen


@stories
def default_dtype_changed_before_backward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        return (x.sin() * torch.ones(8) * torch.linspace(0, 1, 8) * torch.arange(8.0)).exp() * torch.rand(8)

    x = leaf(8)
    out = call(fn, x)
    loss = weighted_sum(out)
    assert loss is not None
    del out
    torch.set_default_dtype(torch.float64)
    try:
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return x.grad


@stories
def default_device_changed_before_backward(call: Call) -> Any:
    x = leaf(8)
    loss = weighted_sum(call(lambda x: (x.sin() * torch.ones(8) * torch.arange(8.0)).exp() * torch.rand(8), x))
    assert loss is not None
    with torch.device("meta"):
        loss.backward()
    return x.grad


@stories.each()
def test_autocast(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


def test_an_error_inside_leaves_autocast_alone() -> None:
    recals = recals_with_rngs(-1)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            raise KeyError("inside")

    with bf16():
        with pytest.raises(KeyError, match="inside"):
            recals(fn, leaf(4))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
