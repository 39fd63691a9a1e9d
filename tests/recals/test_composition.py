"""With everything else people use: checkpoint, save_on_cpu, itself, other modes, torch.func, torch.compile, changing steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity.harness import Call, Case, check, weighted_sum
from recals.scenarios import Stories, grads, held, leaf, told, trained
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from recals_exp.recals import RecalsWarning, UnsupportedError, recals_with_rngs

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


# -- modes and subclasses ------------------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # autograd's own housekeeping
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@stories
def dispatch_mode_around_forward(call: Call) -> Any:
    x = leaf(8)
    with Counts() as mode:
        out = call(deep, x)
    return grads(out, x), mode.seen


@stories
def dispatch_mode_inside(call: Call) -> Any:
    seen: list[str] = []

    def fn(x: Tensor) -> Tensor:
        y = deep(x)
        with Counts() as mode:
            y = deep(y)
        seen.extend(mode.seen)
        return deep(y)

    return told(call, fn, leaf(8)), seen


@stories
def dispatch_mode_around_the_step(call: Call) -> Any:
    x = leaf(8)
    with Counts():
        return grads(call(deep, x), x)


@stories
def function_mode_and_subclass(call: Call) -> Any:
    from torch.overrides import BaseTorchFunctionMode

    class Named(Tensor):
        pass

    def fn(x: Tensor) -> Tensor:
        y = deep(x.as_subclass(Named))
        with BaseTorchFunctionMode():
            return deep(y)

    x = leaf(8)
    out = call(fn, x)
    assert type(out) is Named
    return out.as_subclass(Tensor), grads(out.as_subclass(Tensor), x)


@stories(bites=False)
def subclass_with_its_own_dispatch(call: Call) -> Any:
    """What autograd saves of it is the wrapper, which has no storage: the program's own, outside of the cache."""
    from torch.testing._internal.two_tensor import TwoTensor

    weight = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()

    def fn(x: Tensor) -> Tensor:
        y = torch.mm(x.sin(), weight).tanh()
        return (y.exp() * y).sin().exp().tanh().cos()

    out = call(fn, torch.randn(4, 8))
    out.sum().backward()
    assert weight.grad is not None
    return weight.grad.a, weight.grad.b


@stories
def parametrized_by_hand(call: Call) -> Any:
    model = mlp(dropout=0.0)
    weights = {name: (value.detach() * 2).requires_grad_() for name, value in model.named_parameters()}

    def fn(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).exp().sin()

    return grads(call(fn, torch.randn(4, 8)), *weights.values())


# -- torch.func ----------------------------------------------------------------------------------------------------------


@stories
def vmap_inside(call: Call) -> Any:
    model = mlp(dropout=0.0)

    def fn(x: Tensor) -> Tensor:
        y = torch.func.vmap(lambda row: model(row).exp(), in_dims=1, out_dims=1)(x)
        return torch.func.vmap(torch.mm)(y[None], y.t()[None]).sin()

    return told(call, fn, leaf(8, 5).t().contiguous().t().detach().requires_grad_()), held(model)


@stories
def vmap_outside(call: Call) -> Any:
    x = leaf(3, 8)
    out = torch.func.vmap(lambda row: call(deep, row))(x)
    return grads(out, x), told(call, deep, leaf(8))


@stories
def forward_mode_outside(call: Call) -> Any:
    from torch.autograd import forward_ad

    x = leaf(8)
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", ".*torch.jit.script")  # said by torch on first use
        dual = forward_ad.make_dual(x, torch.ones(8))
        out, tangent = forward_ad.unpack_dual(call(deep, dual))
        assert tangent is not None
        tangent = tangent.detach().clone()
        seen = grads(out, x)
    return seen, tangent


# -- settings ------------------------------------------------------------------------------------------------------------


@stories
def kernels_chosen_around_a_part(call: Call) -> Any:
    conv = nn.Conv2d(3, 4, 3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        with torch.backends.mkldnn.flags(enabled=False):
            y = conv(y).tanh()
        return conv(y[:, :3]).exp().sin()

    x = leaf(2, 3, 16, 16)
    return grads(call(fn, x), x, *conv.parameters())


@stories
def kernels_chosen_around_forward(call: Call) -> Any:
    conv, x = nn.Conv2d(3, 4, 3), leaf(2, 3, 16, 16)
    with torch.backends.mkldnn.flags(enabled=False):
        out = call(lambda x: conv(conv(x.sin()).tanh()[:, :3]).exp().sin(), x)
    return grads(out, x, *conv.parameters())


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
        out = call(lambda x: F.batch_norm(F.batch_norm(x.sin(), None, None, training=True).exp(), None, None, training=True).cos(), x)
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


# -- seen from outside ---------------------------------------------------------------------------------------------------


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_parts_run_eagerly_and_say_so_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    with _fresh_compiler():
        model[2] = torch.compile(model[2], backend="eager")
        recals = recals_with_rngs(4 * 8 * 4)
        model.zero_grad()
        with pytest.warns(RecalsWarning, match="compile") as said:
            for _ in range(3):
                model.zero_grad()
                recals(model, x).sum().backward()
        assert len([warning for warning in said if issubclass(warning.category, RecalsWarning)]) == 1
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))  # type: ignore[arg-type]
    assert recals.stats.recomputed_values > 0


def test_flop_counter_counts_what_is_run_again() -> None:
    model, x = mlp(16, 4, dropout=0.0), torch.randn(8, 16)
    with FlopCounterMode(display=False) as plain:
        model(x).sum().backward()
    recals = recals_with_rngs(8 * 16 * 4)
    with FlopCounterMode(display=False) as wrapped:
        recals(model, x).sum().backward()
    assert recals.stats.recomputed_flops > 0
    assert wrapped.get_total_flops() == plain.get_total_flops() + recals.stats.recomputed_flops


@pytest.mark.filterwarnings("ignore")
@pytest.mark.xfail(
    raises=TypeError,
    reason="torch 2.14 traces the gradient of `torch.cond` with the dispatch modes of the program active, and fails by itself "
    "under any of them, one that does nothing included ('object of type bool has no len()')",
)
def test_cond_keeps_its_gradients() -> None:
    x = leaf(8)

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        z = torch.cond(y.sum() > 0, lambda y: y.exp(), lambda y: y.cos(), (y,))
        return (z * y).tanh().sin()

    with _fresh_compiler():
        expected = grads(fn(x), x)
        for limit in (-1, 64):
            found = grads(recals_with_rngs(limit)(fn, x), x)
            assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]


def test_profiler_around_a_step() -> None:
    x = leaf(8)
    expected = grads(deep(x), x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found = grads(recals_with_rngs(32)(deep, x), x)
    assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian, "vjp"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_reverse_transforms_of_torch_func_are_refused_with_the_way_out(transform: Any, inside: bool) -> None:
    """torch.func turns saved-tensor hooks off for its own gradients and says so badly; torch.func.vmap and jvp work."""
    recals = recals_with_rngs(-1)
    x = torch.randn(4)

    def energy(x: Tensor) -> Tensor:
        return deep(x).sum()

    def gradient(fn: Any, x: Tensor) -> Any:
        return torch.func.vjp(fn, x) if transform == "vjp" else transform(fn)(x)

    with pytest.raises(UnsupportedError, match=r"torch\.func") as raised:
        if inside:
            recals(lambda x: gradient(energy, x), x)
        else:
            gradient(lambda x: recals(energy, x), x)
    assert isinstance(raised.value, RuntimeError)
    assert torch.equal(recals(deep, x.requires_grad_()), deep(x))


def test_hooks_disabled_by_the_program_are_refused_with_its_own_words() -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks in my house"),
        pytest.raises(RuntimeError, match="no hooks in my house"),
    ):
        recals_with_rngs(-1)(deep, leaf(4))
