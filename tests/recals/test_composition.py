"""With everything else people use: checkpoint, save_on_cpu, itself, grad modes, changing steps and settings."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from parity.harness import Call, Case, check, weighted_sum
from recals.scenarios import Stories, grads, held, leaf, told, trained
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from recals_exp.recals import Recals, recals_with_rngs

stories = Stories()


def mlp(width: int = 8, depth: int = 3, dropout: float = 0.2) -> nn.Sequential:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))]
    return nn.Sequential(*layers)


def deep(x: Tensor) -> Tensor:
    return (x.sin().exp() * x.cos()).tanh().sin()


# -- checkpoint and save_on_cpu ------------------------------------------------------------------------------------------


@stories
def checkpoint_inside(call: Call) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = mlp(), mlp(), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.first, self.norm(x), use_reentrant=False)
            x = checkpoint(self.second, x.exp(), use_reentrant=False).sin()
            return checkpoint_sequential(self.second, 3, x, use_reentrant=False).exp()

    return trained(call, Model(), torch.randn(4, 8))


@stories
def reentrant_checkpoint_inside(call: Call) -> Any:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        return checkpoint(model, x.sin(), use_reentrant=True).exp().cos()

    for _ in range(2):
        call(fn, torch.randn(4, 8).requires_grad_()).sum().backward()
    return held(model)


@stories
def checkpoint_outside(call: Call) -> Any:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        return call(model, x.sin()).exp()

    for _ in range(2):
        checkpoint(fn, leaf(4, 8), use_reentrant=False).sum().backward()
    return held(model)


@stories
def reentrant_checkpoint_outside(call: Call) -> Any:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        return call(model, x.sin()).exp()

    for _ in range(2):
        checkpoint(fn, leaf(4, 8), use_reentrant=True).sum().backward()
    return held(model)


@stories
def checkpoint_that_chooses_by_op(call: Call) -> Any:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    model = mlp()
    contexts = partial(create_selective_checkpoint_contexts, choose)

    def fn(x: Tensor) -> Tensor:
        return checkpoint(model, deep(x), use_reentrant=False, context_fn=contexts).exp().cos()

    with warnings.catch_warnings():  # torch says that what it keeps by op is kept beside the hooks, so beside the limit
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context")
        return [told(call, fn, leaf(4, 8)) for _ in range(2)], held(model)


@stories(droppable=False, bites=False)
def save_on_cpu_inside(call: Call) -> Any:
    """The inner hooks take everything: what they copied is theirs, and nothing is left for this cache."""

    def fn(x: Tensor) -> Tensor:
        with save_on_cpu():
            return deep(deep(x))

    return told(call, fn, leaf(8))


@stories
def save_on_cpu_inside_a_part(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = deep(x)
        with save_on_cpu():
            y = deep(y)
        return deep(y)

    return told(call, fn, leaf(8))


@stories
def save_on_cpu_outside(call: Call) -> Any:
    model = mlp()
    for _ in range(2):
        with save_on_cpu():
            y = call(model, leaf(4, 8).sin())
            out = deep(y)
        out.sum().backward()
    return held(model)


@stories
def other_hooks_inside(call: Call) -> Any:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tensor.numel())
        return tensor.to(torch.float64)

    def fn(x: Tensor) -> Tensor:
        y = deep(x)
        with saved_tensors_hooks(pack, lambda tensor: tensor.to(torch.float32)):
            y = deep(y)
        return deep(y)

    return told(call, fn, leaf(8)), packed


# -- itself --------------------------------------------------------------------------------------------------------------


@stories
def one_inside_itself(call: Call) -> Any:
    model = mlp()

    def inner(x: Tensor) -> Tensor:
        return call(model, deep(x))

    def outer(x: Tensor) -> Tensor:
        return deep(call(inner, deep(x)))

    return told(call, outer, leaf(4, 8)), held(model)


@stories
def another_one_inside(call: Call) -> Any:
    other = recals_with_rngs(64)
    model = mlp(4)

    def fn(x: Tensor) -> Tensor:
        return deep(other(model, deep(x)))

    seen = told(call, fn, leaf(4, 4))
    assert other.stats.cached_bytes == 0
    return seen, held(model)


@stories
def inside_another_one(call: Call) -> Any:
    other = recals_with_rngs(64)
    model = mlp(4)

    def fn(x: Tensor) -> Tensor:
        return deep(call(model, deep(x)))

    seen = told(other, fn, leaf(4, 4))
    assert other.stats.cached_bytes == 0
    return seen, held(model)


@stories
def layer_by_layer(call: Call) -> Any:
    layers = nn.ModuleList([*mlp(), nn.BatchNorm1d(8), nn.ReLU(inplace=True), *mlp()])
    for _ in range(3):
        x = torch.randn(4, 8)
        for layer in layers:
            x = call(layer, x)
        weighted_sum(x).backward()  # type: ignore[union-attr]
    return held(layers)


@stories
def layer_by_layer_with_ops_between(call: Call) -> Any:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    x = start = leaf(4, 8)
    for layer in layers:
        x = call(layer, x) + x
        x = x.tanh()
        x = call(torch.exp, x).sin()
    return grads(x, start, *layers.parameters())


@stories
def in_place_across_calls(call: Call) -> Any:
    x = leaf(8)
    y = call(lambda x: x.sin().exp(), x)
    y = call(lambda y: y.mul_(2).add_(1), y.cos())
    y = call(lambda y: (y * y).tanh(), y)
    y = call(torch.relu_, y + 0)
    return grads(call(lambda y: y.exp().sin(), y), x)


@stories(raises=RuntimeError)
def value_of_an_earlier_call_changed_by_a_later_one(call: Call) -> Any:
    x = leaf(8)
    y = call(lambda x: x.sin().exp(), x)
    z = call(lambda y: (y * y).cos().exp(), y)
    call(lambda y: y.mul_(2), y.detach())
    return grads(z, x)


@stories
def outputs_of_one_call_through_many(call: Call) -> Any:
    """Values of one call are leaves of the next; the bytes of the first must not be needed from the second."""
    x = leaf(8)
    first = call(lambda x: (deep(x), x.sin().exp()), x)
    second = call(lambda a, b: (deep(a) * b, a.exp()), *first)
    third = call(lambda a, b: deep(a * b), *second)
    del first, second
    return grads(third, x)


# -- grad modes and changing steps ---------------------------------------------------------------------------------------


@stories
def validation_between_steps(call: Call) -> Any:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        model.train()
        optimizer.zero_grad()
        weighted_sum(call(model, torch.randn(4, 8))).backward()  # type: ignore[union-attr]
        optimizer.step()
        model.eval()
        context = (torch.no_grad, torch.inference_mode, torch.enable_grad)[step]
        with context():
            seen.append(call(model, torch.randn(4, 8)).detach().clone())
    return seen, held(model)


@stories
def grad_modes_inside(call: Call) -> Any:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model(x).exp()
            with torch.enable_grad():
                y = model(x.sin())
        with torch.inference_mode():
            scale = float(model(x).abs().mean())
        with torch.set_grad_enabled(False):
            mask = torch.sigmoid(y)
        return (y * target).exp() * mask * scale

    return told(call, fn, leaf(4, 8)), held(model)


@stories
def inference_tensors_as_inputs(call: Call) -> Any:
    with torch.inference_mode():
        x = torch.randn(4, 8).exp()
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        return layer(x.clone().sin()).exp().cos()

    return grads(call(fn, x), *layer.parameters())


@stories(raises=RuntimeError, bites=False)
def inference_tensor_saved(call: Call) -> Any:
    with torch.inference_mode():
        x = torch.randn(4, 8)
    return call(nn.Linear(8, 8), x)


@stories
def called_under_no_grad(call: Call) -> Any:
    model = mlp()
    with torch.no_grad():
        quiet = call(model, torch.randn(4, 8))
    with torch.no_grad():
        partly = call(torch.enable_grad()(model), leaf(4, 8))
    return quiet, partly, trained(call, model, torch.randn(4, 8))


@stories
def shapes_that_change_every_step(call: Call) -> Any:
    model = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 2, 3, padding=1), nn.Tanh())
    for rows, length in ((1, 5), (3, 9), (2, 4), (3, 9), (1, 17)):
        weighted_sum(call(model, torch.randn(rows, 2, length))).backward()  # type: ignore[union-attr]
    return held(model)


@stories
def model_that_changes_its_path(call: Call) -> Any:
    first, second = mlp(), mlp()

    def fn(x: Tensor, step: int) -> Tensor:
        if step % 2:
            x = first(x)
        for _ in range(step):
            x = second(x).exp().tanh()
        return deep(x)

    for step in (2, 1, 3, 0, 2):
        loss = weighted_sum(call(fn, leaf(4, 8), step))
        assert loss is not None
        loss.backward()
    return held(first, second)


@stories
def weights_swapped_and_copied(call: Call) -> Any:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    for _ in range(3):
        with torch.no_grad():
            goal = call(average, torch.randn(4, 8))
        (call(model, torch.randn(4, 8)) - goal).square().sum().backward()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                fast.sub_(0.1 * fast.grad)  # type: ignore[operator]
                fast.grad = None
                slow.lerp_(fast, 0.1)
    return held(model, average)


@stories
def model_rebuilt_between_steps(call: Call) -> Any:
    seen = []
    for width in (4, 8, 4):
        model = mlp(width)
        seen.append(trained(call, model, torch.randn(3, width), steps=1))
        del model
    return seen


# -- settings ------------------------------------------------------------------------------------------------------------


def _native_part(call: Call) -> Any:
    conv = nn.Conv2d(3, 4, 3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        with torch.backends.mkldnn.flags(enabled=False):
            y = conv(y).tanh()
        return conv(y[:, :3]).exp().sin()

    x = leaf(2, 3, 16, 16)
    return grads(call(fn, x), x, *conv.parameters())


@stories
def kernels_chosen_around_a_part(call: Call) -> Any:
    return _native_part(call)


@stories
def kernels_chosen_around_forward(call: Call) -> Any:
    conv, x = nn.Conv2d(3, 4, 3), leaf(2, 3, 16, 16)
    with torch.backends.mkldnn.flags(enabled=False):
        out = call(lambda x: conv(conv(x.sin()).tanh()[:, :3]).exp().sin(), x)
    return grads(out, x, *conv.parameters())


@stories
def kernels_chosen_after_global_flags_were_frozen(call: Call) -> Any:
    """As test suites freeze them: the setters of ``torch.backends`` refuse then."""
    flags, allowed = torch.backends.disable_global_flags.__globals__, "__allow_nonbracketed_mutation_flag"
    before = flags[allowed]
    torch.backends.disable_global_flags()
    try:
        return _native_part(call)
    finally:
        flags[allowed] = before


@stories
def precision_set_for_one_backend(call: Call) -> Any:
    """The legacy getter of the matmul precision raises then."""
    weight, x = leaf(64, 64), leaf(64, 64)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        out = call(lambda x: ((x.sin() @ weight).exp() @ weight).tanh().sin(), x)
        matmul.fp32_precision = "ieee"
        return grads(out, x, weight)
    finally:
        matmul.fp32_precision = before


@stories
def precision_chosen_around_a_part(call: Call) -> Any:
    weight, x = leaf(64, 64), leaf(64, 64)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        with torch.backends.mkldnn.flags(enabled=True, fp32_precision="bf16"):
            y = (y @ weight).tanh()
        return (y @ weight).exp().sin()

    return grads(call(fn, x), x, weight)


@stories
def default_dtype_changed_around_a_part(call: Call) -> Any:
    numbers = torch.arange(1, 9)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        torch.set_default_dtype(torch.float64)
        try:
            y = (y * (numbers / 3)).exp() * torch.ones(8)
        finally:
            torch.set_default_dtype(torch.float32)
        return (y * (numbers / 7)).cos().sin()

    return told(call, fn, leaf(8))


@stories
def threads_changed_before_backward(call: Call) -> Any:
    """Batch norm adds up in other orders on other numbers of threads."""
    threads = torch.get_num_threads()
    x = leaf(300, 300)
    try:
        torch.set_num_threads(2)
        out = call(
            lambda x: F.batch_norm(
                F.batch_norm(x.sin(), None, None, training=True).exp(), None, None, training=True
            ).cos(),
            x,
        )
        torch.set_num_threads(1)
        out.sum().backward()
    finally:
        torch.set_num_threads(threads)
    return x.grad


# -- scripts -------------------------------------------------------------------------------------------------------------


@stories
def scripted_and_traced_parts(call: Call) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit")
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
        scripted, traced = torch.jit.script(layers), torch.jit.trace(layers, torch.randn(4, 8))
        for _ in range(3):  # the first runs are profiled and then compiled, to other bits
            traced(scripted(torch.randn(4, 8))).sum().backward()
        layers.zero_grad()
        for _ in range(2):
            call(lambda x: traced(scripted(x.sin()).exp().cos()).exp().cos(), torch.randn(4, 8)).sum().backward()
    return held(layers)


@stories.each()
def test_composition(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


def test_what_an_inner_call_wrote_is_cache_of_the_outer_one() -> None:
    def cached(inner: Call, recals: Recals) -> int:
        weight, shift = leaf(8, 8), torch.ones(8)

        def outer(x: Tensor) -> Tensor:
            hidden = (x @ weight).sin().clone()
            inner(lambda hidden: hidden.add_(shift), hidden)  # saves nothing
            return ((hidden * weight).exp() * hidden).tanh()

        out = recals(outer, torch.randn(8, 8))
        held = recals.stats.cached_bytes
        del out
        assert not recals.sessions
        return held

    recals = recals_with_rngs(None, policy="fifo")
    assert cached(recals, recals) == cached(lambda fn, *args: fn(*args), recals) > 0
