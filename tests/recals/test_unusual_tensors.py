"""Tensors without ordinary memory, subclasses that watch, settings changed midway, and what is refused at the door."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.harness import Call, Case, check
from recals.scenarios import Stories, grads, leaf, views_and_norms
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from recals_exp.recals import POLICIES, UnsupportedError, recals_with_rngs
from recals_exp.recals.policies import Planned

stories = Stories()


@pytest.fixture(autouse=True, scope="module")
def _warned_once() -> None:
    """PyTorch warns when its forward-mode formulas are compiled, once per process."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        nn.Sequential(nn.Linear(2, 2), nn.Tanh())(forward_ad.make_dual(torch.ones(1, 2), torch.ones(1, 2)))


def quantized(y: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(y.detach(), 0.1, 0, torch.qint8)


@stories
def quantized_in_the_middle(call: Call) -> Any:
    weight = leaf(8, 8)

    def fn(x: Tensor) -> Tensor:
        y = (x @ weight).tanh()
        return (y * quantized(y).dequantize()).tanh().exp()

    return grads(call(fn, torch.randn(8, 8)), weight)


@stories
def quantized_and_written(call: Call) -> Any:
    weight = leaf(8, 8)

    def fn(x: Tensor) -> Tensor:
        y = (x @ weight).tanh()
        target = quantized(y).clone()
        target.copy_(quantized(y * 2))
        return (y * target.dequantize()).tanh().exp()

    return grads(call(fn, torch.randn(8, 8)), weight)


@stories
def forward_mode_inside(call: Call) -> Any:
    """Its formulas make tensors of zeros that have no memory."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def fn(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return value.tanh() * tangent.sin()

    return grads(call(fn, torch.randn(8, 8)), *model.parameters())


@stories
def forward_mode_around(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(8, 8)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(call(model, forward_ad.make_dual(x, torch.ones_like(x))))
        return grads(out.primal.sum() + out.tangent.sum(), *model.parameters())


@stories
def threads_changed_in_the_middle(call: Call) -> Any:
    numbers, scale, threads = torch.randn(300_000), leaf(8, 8), torch.get_num_threads()

    def fn() -> Tensor:
        torch.set_num_threads(4)
        total = (numbers * 1.1).sum() * 1e-3
        torch.set_num_threads(1)
        return (total * scale).tanh().sin().exp()

    try:
        return grads(call(fn), scale)
    finally:
        torch.set_num_threads(threads)


@stories
def denormals_flushed_in_the_middle(call: Call) -> Any:
    tiny, scale = torch.full((8,), 3e-39), torch.full((8,), 1e30, requires_grad=True)

    def fn() -> Tensor:
        torch.set_flush_denormal(True)
        try:
            y = ((tiny * 1.5) * scale * 1e8).tanh()
        finally:
            torch.set_flush_denormal(False)
        return y.sin().exp()

    return grads(call(fn), scale)


@stories.each()
def test_plain_parity(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


@pytest.mark.parametrize("limit", [None, 12])
def test_meta_tensors_made_inside_of_an_audited_call(limit: int | None) -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.device("meta"):
            scale = torch.zeros(3).exp()
        return (scale * x.sin().exp().to("meta")).sin().exp() + torch.ones(3, device="meta")

    recals = recals_with_rngs(limit, audit="first")
    out = recals(fn, leaf(3))
    assert out.is_meta
    assert out.shape == fn(leaf(3)).shape


@pytest.mark.parametrize("limit", [None, 256])
def test_meta_tensors(limit: int | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).to("meta")
    out = recals_with_rngs(limit)(model, torch.randn(3, 4, device="meta"))
    out.sum().backward()
    assert model[0].weight.grad.shape == (4, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_subclass_sees_what_it_sees_plainly(policy: str) -> None:
    seen: list[str] = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    def run(call: Call) -> list[str]:
        x, weight = torch.ones(3, 4).as_subclass(Logged), leaf(4, 4)
        seen.clear()
        call(lambda x: (x @ weight).tanh().sin(), x)
        return list(seen)

    assert run(recals_with_rngs(1000, policy=policy)) == run(lambda fn, *args: fn(*args)) != []


class Loud(Tensor):
    """Changes what some functions give, and tells of all."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        if func in (torch.mul, torch.tanh, torch.t, Tensor.view, torch.ops.aten.mul.Tensor):
            return torch.full((3, 3), 42.0)
        return super().__torch_function__(func, types, args, kwargs or {})


def hooked(x: Tensor) -> Tensor:
    y = (x * x).tanh().exp()
    y.register_hook(lambda grad: grad.as_subclass(Loud))
    return torch.autograd.grad((y * 3).sum(), x, create_graph=True)[0]


def given_as_a_gradient(x: Tensor) -> Tensor:
    y = (x * x).tanh().exp()
    return torch.autograd.grad(y, x, torch.ones(3, 3).as_subclass(Loud), create_graph=True)[0]


def saved_by_a_function(x: Tensor) -> Tensor:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.detach().as_subclass(Loud), x.sin())
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            loud, sine = ctx.saved_tensors
            return grad * loud.as_subclass(Tensor) * 2 + 0 * sine

    return Square.apply(x.tanh()).exp().sin()


def _products(x: Tensor) -> Tensor:
    y = torch.cat([x, torch.tanh(x * x)])[1:4].t()
    return (y * 3).view(3, 3).exp().sin().tanh().exp().cos()


def scripted(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.script(_products)
    with torch.jit.optimized_execution(False):
        return function(x.as_subclass(Loud))  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", [hooked, given_as_a_gradient, saved_by_a_function, scripted])
def test_a_subclass_in_the_hands_of_autograd_sees_what_it_sees_plainly(
    fn: Callable[[Tensor], Tensor], policy: str
) -> None:
    recals = recals_with_rngs(2 * 36, policy=policy)
    for _ in range(2):  # the first is audited
        found = []
        for call in (lambda fn, *args: fn(*args), recals):
            torch.manual_seed(0)
            x = leaf(3, 3)
            Loud.seen.clear()
            out = call(fn, x)
            (gradient,) = torch.autograd.grad(out.as_subclass(Tensor), x, torch.ones(3, 3))
            found.append((list(Loud.seen), type(out), out.as_subclass(Tensor), gradient, type(gradient)))
        (seen, kind, out, gradient, gradient_kind), (seen2, kind2, out2, gradient2, gradient_kind2) = found
        assert seen == seen2
        assert (kind, gradient_kind) == (kind2, gradient_kind2)
        assert torch.equal(out, out2)
        assert torch.equal(gradient.as_subclass(Tensor), gradient2.as_subclass(Tensor))
    assert recals.stats.recomputed_ops > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scripted", [False, True])
def test_a_function_mode_sees_what_it_sees_plainly(policy: str, scripted: bool) -> None:
    class Logs(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    fn: Callable[..., Tensor] = views_and_norms
    if scripted:  # C++ calls its ops, the mode still in force
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fn = torch.jit.script(views_and_norms)
    recals = recals_with_rngs(4 * 64, policy=Planned(waits=True) if policy == Planned.name else policy)
    for _ in range(4):  # audited, traced, planned
        seen, gradients = [], []
        for call in (lambda fn, *args: fn(*args), recals):
            torch.manual_seed(0)
            x, weight = leaf(4, 4), leaf(4, 4)
            with Logs() as mode, torch.jit.optimized_execution(False):  # else plain's own bits change with the call
                out = call(fn, x, weight)
                run_backward = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
                run_backward(
                    (out,), (torch.ones(4, 4),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            seen.append(mode.seen)
            gradients.append((x.grad, weight.grad))
        assert seen[0] == seen[1] != []
        for plain, ours in zip(*gradients, strict=True):
            assert torch.equal(plain, ours)
    assert recals.stats.recomputed_ops > 0


def test_fake_tensors_are_refused() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
        with pytest.raises(UnsupportedError, match="FakeTensorMode"):
            recals_with_rngs(100)(model, x)


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_have_the_settings_and_an_empty_cache(policy: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
            self.recals = recals_with_rngs(128, "cpu", policy=policy, audit="off")

        def forward(self, x: Tensor) -> Tensor:
            return self.recals(self.layers, x)

    holder, x = Holder(), torch.ones(3, 4)
    out = holder(x)
    for other in (copy.deepcopy(holder), copy.deepcopy(holder.recals), pickle.loads(pickle.dumps(holder.recals))):
        recals = other.recals if isinstance(other, nn.Module) else other
        assert (recals.cache_limit_bytes, recals.policy, recals.audit_when) == (128, policy, "off")
        assert recals.generators.gpu_devices == "cpu"
        assert recals.stats.cached_bytes == 0 < holder.recals.stats.cached_bytes
    out.sum().backward()
    assert recals(holder.layers, x).equal(out)
