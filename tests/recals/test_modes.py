"""Beside other dispatch modes, subclasses, transforms of torch.func, compiled and scripted parts, profilers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity.harness import Call, Case, check
from recals.scenarios import Stories, grads, held, leaf, told
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recals_exp.recals import Recals, RecalsWarning, UnsupportedError, recals_with_rngs

stories = Stories()


def mlp(width: int = 8, depth: int = 3, dropout: float = 0.2) -> nn.Sequential:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))]
    return nn.Sequential(*layers)


def deep(x: Tensor) -> Tensor:
    return (x.sin().exp() * x.cos()).tanh().sin()


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


def _smoothed_losses(x: Tensor, call: Call, kind: torch.dtype | None = None) -> list[Any]:
    """Weighted means with label smoothing over targets of which some are ignored: ATen adds the weights otherwise in a mode."""
    found = []
    for classes in range(3, 40):
        target = torch.arange(16) % classes
        weight = torch.rand(classes)

        def loss(y: Tensor) -> Tensor:
            logits = deep(y)[:, :classes]  # noqa: B023
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is not None):
                logits = logits if kind is None else logits.to(kind)
                return nn.functional.cross_entropy(logits, target, weight, label_smoothing=0.1, ignore_index=1)  # noqa: B023

        found.append((call(loss, x), classes))
    for out, _ in found:
        out.backward()
    return [found, x.grad]


@stories
def smoothed_cross_entropy(call: Call) -> Any:
    return _smoothed_losses(leaf(16, 40), call)


@stories
def smoothed_cross_entropy_of_low_precision_under_autocast(call: Call) -> Any:
    return _smoothed_losses(leaf(16, 40), call, torch.bfloat16)


@stories
def smoothed_cross_entropy_under_a_mode_of_the_program(call: Call) -> Any:
    with Counts() as mode:
        return _smoothed_losses(leaf(16, 40), call), bool(mode.seen)


@stories
def smoothed_cross_entropy_of_batched_weights(call: Call) -> Any:
    targets, weights = torch.arange(48).view(3, 16) % 5, torch.rand(3, 5)

    def fn(y: Tensor) -> Tensor:
        logits = deep(y)

        def loss(target: Tensor, weight: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, target, weight, label_smoothing=0.1, ignore_index=1)

        return deep(torch.func.vmap(loss)(targets, weights))

    return told(call, fn, leaf(16, 5))


@stories
def smoothing_out_of_range(call: Call) -> Any:
    target, weight = torch.arange(16) % 5, torch.rand(5)
    x = leaf(16, 5)
    deeper = call(deep, x)
    with pytest.raises(RuntimeError, match=r"label_smoothing must be between 0\.0 and 1\.0"):
        call(lambda y: nn.functional.cross_entropy(deep(y), target, weight, label_smoothing=1.5), x)
    return grads(deeper, x)


def test_what_recording_replaces_is_put_back() -> None:
    before = torch._C._nn.cross_entropy_loss
    recals = recals_with_rngs(-1)
    inside = recals(lambda x: (x.sin(), torch._C._nn.cross_entropy_loss), torch.ones(2, requires_grad=True))[1]
    assert inside is not before
    assert torch._C._nn.cross_entropy_loss is before
    with pytest.raises(ZeroDivisionError):
        recals(lambda x: x / 0 if 1 // 0 else x, torch.ones(2, requires_grad=True))
    assert torch._C._nn.cross_entropy_loss is before


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


@stories.each()
def test_modes(case: Case, policy: str, budget: str) -> None:
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
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RecalsWarning)
            for _ in range(3):
                model.zero_grad()
                recals(model, x).sum().backward()
        (warning,) = [warning for warning in said if warning.category is RecalsWarning]
        assert "compile" in str(warning.message)
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))  # type: ignore[arg-type]
    assert recals.stats.recomputed_values > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_called_from_compiled_code_nothing_inside_is_compiled() -> None:
    frames = []
    for depth in (2, 8):
        model, x = mlp(8, depth, dropout=0.0), torch.randn(4, 8)
        (model(x * 2).sum() * 3).backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        recals = recals_with_rngs(4 * 8 * 4)

        def step(x: Tensor, model: nn.Module = model, recals: Recals = recals) -> None:
            (recals(model, x * 2).sum() * 3).backward()

        with _fresh_compiler():
            torch._dynamo.utils.counters.clear()
            compiled = torch.compile(step, backend="eager")
            for _ in range(2):
                model.zero_grad()
                compiled(x)
            frames.append(torch._dynamo.utils.counters["frames"]["total"])
        found = [parameter.grad for parameter in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))  # type: ignore[arg-type]
        assert recals.stats.recomputed_values > 0
    assert 0 < frames[0] == frames[1]  # as many for two layers as for eight: pieces of ``step`` alone


def test_flop_counter_counts_what_is_run_again() -> None:
    model, x = mlp(16, 4, dropout=0.0), torch.randn(8, 16)
    with FlopCounterMode(display=False) as plain:
        model(x).sum().backward()
    recals = recals_with_rngs(8 * 16 * 4)
    with FlopCounterMode(display=False) as wrapped:
        recals(model, x).sum().backward()
    assert recals.stats.recomputed_flops > 0
    assert wrapped.get_total_flops() == plain.get_total_flops() + recals.stats.recomputed_flops


def test_flops_differ_by_more_than_the_sizes_of_tensors() -> None:
    """Convolutions of the same arguments but their stride, and matrix products of tensors in a list."""
    filters, matrix = torch.randn(4, 4, 3, requires_grad=True), torch.randn(16, 16, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        coarse = [torch.tanh(functional.conv1d(x, filters, stride=stride)) for stride in (1, 2, 3, 2, 1)]
        fine = torch.linalg.multi_dot([torch.tanh(matrix), torch.tanh(matrix), torch.tanh(matrix)])
        return torch.stack([torch.tanh(part).sum() for part in [*coarse, fine]]).sum()

    x = torch.randn(2, 4, 30, requires_grad=True)
    with FlopCounterMode(display=False) as plain:
        forward(x).backward()
    recals = recals_with_rngs(16 * 16 * 4, policy="fifo")
    for _ in range(2):
        recals.reset_stats()
        with FlopCounterMode(display=False) as wrapped:
            recals(forward, x).backward()
        assert recals.stats.recomputed_flops > 0
        assert wrapped.get_total_flops() == plain.get_total_flops() + recals.stats.recomputed_flops


def test_a_replay_does_not_make_python_forget_what_it_has_said() -> None:
    """``warnings.catch_warnings`` does: what it says once per place, it says again afterwards."""
    model, x = mlp(16, 4, dropout=0.0), torch.randn(8, 16)
    recals = recals_with_rngs(8 * 16 * 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        filters = list(warnings.filters)
        for _ in range(2):
            recals(model, x).sum().backward()
            warnings.warn("once per place", stacklevel=1)
        assert warnings.filters == filters
    assert recals.stats.recomputed_values > 0
    assert [str(warning.message) for warning in said] == ["once per place"]


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


@pytest.mark.filterwarnings("ignore:.*torch.jit")
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

    def wrapped(x: Tensor) -> Any:
        return recals(lambda x: gradient(energy, x), x) if inside else gradient(lambda x: recals(energy, x), x)

    with pytest.raises(UnsupportedError, match=r"torch\.func") as raised:
        wrapped(x)
    assert isinstance(raised.value, RuntimeError)
    assert torch.equal(recals(deep, x.requires_grad_()), deep(x))


def test_hooks_disabled_by_the_program_are_refused_with_its_own_words() -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks in my house"),
        pytest.raises(RuntimeError, match="no hooks in my house"),
    ):
        recals_with_rngs(-1)(deep, leaf(4))
