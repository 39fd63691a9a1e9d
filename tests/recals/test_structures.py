"""Whatever goes in and comes out, whatever shape memory has, and whoever hooks in: the call is the plain call."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from parity.harness import Call, Case, check, weighted_sum
from recals.scenarios import Stories, grads, held, leaf, parameter_grads, told, trained
from torch import Tensor, nn

stories = Stories()


# -- arguments and results -----------------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None
    scale: float = 1.5
    name: str = "batch"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Result:
    logits: Tensor
    hidden: list[Tensor]
    nothing: None
    extra: dict[str, Any]


@stories
def structured_arguments_and_results(call: Call) -> Any:
    layer = nn.Linear(8, 8)

    def fn(batch: Batch, pair: Pair, *rest: Any, options: dict[str, Any], flag: bool = False) -> Any:
        assert flag
        assert rest == (3, None, "text")
        y = layer(batch.x.sin()).tanh()
        if batch.mask is not None:
            y = y.masked_fill(batch.mask, 0.0)
        z = (y * pair.first).exp() * options["scale"]
        return Result(z, [y, z.sin(), batch.x], None, {"pair": Pair(z.cos(), None), "n": 7, "same": batch}), (), {}

    x, y = leaf(4, 8), leaf(4, 8)
    mask = torch.rand(4, 8) > 0.5
    out = call(fn, Batch(x, mask), Pair(y, None), 3, None, "text", options={"scale": leaf(1)}, flag=True)
    result = out[0]
    assert type(result) is Result
    assert result.hidden[2] is x
    loss = weighted_sum((result.logits, result.hidden[:2], result.extra["pair"]))
    return grads(loss, x, y), parameter_grads(layer)


@stories
def results_that_are_no_tensors(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    results = [call(fn) for fn in (lambda: None, lambda: 3, lambda: "text", lambda: (), lambda: object)]
    return results, trained(call, model, torch.randn(4, 8))


@stories
def one_output_twice_and_its_views(call: Call) -> Any:
    def fn(x: Tensor) -> Any:
        y = x.sin().exp().cos().tanh().sin()
        return y, y, y[1], y.t(), y.detach(), x

    x = leaf(4, 4)
    out = call(fn, x)
    assert out[0] is out[1]
    assert out[5] is x
    return out, grads(out[:4], x)


@stories
def closures_bound_methods_partials_and_classes(call: Call) -> Any:
    from functools import partial

    class Thing:
        def __init__(self, x: Tensor) -> None:
            self.made = (x.sin().exp() * x).cos()

        def method(self, x: Tensor) -> Tensor:
            return (x.sin().exp() * self.made).cos()

    x, y = leaf(8), leaf(8)
    thing = call(Thing, x)
    first = call(thing.method, y)
    second = call(partial(torch.add, alpha=2), first.sin().exp(), y)
    third = call(torch.nn.functional.gelu, second)
    return grads(thing.made.sum() + third.sum(), x, y)


@stories
def keywords_named_like_the_engines_own(call: Call) -> Any:
    def fn(*, fn: Tensor, self: Tensor, call: Tensor, args: Tensor, kwargs: Tensor) -> Tensor:
        return (fn.sin() * self.exp()).cos() * (call.tanh() * args.sin()).exp() * kwargs

    tensors = [leaf(8) for _ in range(5)]
    names = ("fn", "self", "call", "args", "kwargs")
    return grads(call(fn, **dict(zip(names, tensors, strict=True))), *tensors)


@stories
def generator_functions(call: Call) -> Any:
    """A generator's body runs after the call returned: nothing to record, and nothing broken."""

    def fn(x: Tensor) -> Any:
        for _ in range(3):
            x = x.sin().exp().cos().tanh().sin()
            yield x

    x = leaf(8)
    lazy = list(call(fn, x))
    made = call(lambda x: list(fn(x)), x)
    return grads(lazy, x), grads(made, x)


# -- weights and inputs --------------------------------------------------------------------------------------------------


@stories
def frozen_parts(call: Call) -> Any:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()
    )
    for part in model[:4]:
        part.requires_grad_(False)
    return trained(call, model, torch.randn(4, 8))


@stories
def parts_unfrozen_between_steps(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    seen = []
    for step in range(3):
        for i, part in enumerate(model):
            part.requires_grad_(i % 3 != step)
        seen.append(trained(call, model, torch.randn(4, 8), steps=1))
    return seen


@stories
def low_rank_adapters(call: Call) -> Any:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + F.linear(F.linear(F.dropout(x, 0.1), self.down), self.up)

    return trained(call, nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.GELU()), torch.randn(4, 8))


@stories
def tied_weights_and_shared_modules(call: Call) -> Any:
    embedding, layer, head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, layer, nn.Tanh(), layer, nn.Tanh(), head, nn.LogSoftmax(-1))
    return trained(call, model, torch.randint(0, 9, (3, 5)))


@stories
def integer_boolean_and_mixed_inputs(call: Call) -> Any:
    embedding = nn.EmbeddingBag(9, 8, mode="sum")

    def fn(tokens: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        y = embedding(tokens).tanh()
        one_hot = F.one_hot(tokens, 9).float().sum(1)
        return torch.where(keep, y.exp(), y.sin()).gather(1, positions).sum(1) * one_hot.exp().sum(1)

    args = torch.randint(0, 9, (4, 3)), torch.rand(4, 8) > 0.5, torch.randint(0, 8, (4, 2))
    return grads(call(fn, *args), embedding.weight)


@stories
def no_input_requires_grad_and_one_output_does_not(call: Call) -> Any:
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x.sin()).exp().cos(), x.exp()

    first, second = call(fn, torch.randn(4, 8))
    return second, grads(first, *layer.parameters())


@stories(droppable=False, bites=False)
def nothing_requires_grad(call: Call) -> Any:
    return [call(lambda x: x.sin().exp(), torch.randn(8)) for _ in range(2)]


@stories
def parameters_made_inside(call: Call) -> Any:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.randn(8, 8).requires_grad_()
        p = nn.Parameter(torch.ones(8))
        return (x.sin() @ w).exp().sum() + (p * x).cos().sum(), w

    x = leaf(4, 8)
    out, w = call(fn, x)
    return grads(out, x, w)


# -- memory in every shape -----------------------------------------------------------------------------------------------


@stories
def channels_last(call: Call) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 3, 2, stride=2), nn.SiLU(), nn.Upsample(scale_factor=2), nn.PixelUnshuffle(2),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # fmt: skip
    return trained(call, model, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))


@stories
def channels_last_in_3d(call: Call) -> Any:
    model = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 2, 1), nn.Tanh())
    x = torch.randn(1, 2, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    return trained(call, model.to(memory_format=torch.channels_last_3d), x)  # type: ignore[call-overload]


@stories
def odd_strides(call: Call) -> Any:
    def fn(x: Tensor) -> Any:
        y = x.sin()
        z = y[::2, 1::3].t().exp()
        w = y.expand(3, 6, 9).permute(2, 0, 1)[1:4] * 2
        flipped = y.flip(0).unfold(1, 3, 2)
        return z * z, (w * w).cos(), flipped.tanh() * flipped, y.t()[3:].exp().diagonal() * 2

    return told(call, fn, leaf(6, 9))


@stories
def strides_kept_by_ops_and_lost_by_others(call: Call) -> Any:
    def fn(x: Tensor) -> Any:
        y = x.t().sin()
        return (
            (y * y).exp(),
            y.contiguous().cos().exp(),
            torch.empty_like(y).copy_(y).exp() * y,
            (y @ y.t()).tanh().sin(),
        )

    out = call(fn, x := leaf(6, 9))
    return out, grads(out, x)


@stories
def storage_offsets_and_padding(call: Call) -> Any:
    whole = torch.randn(100)

    def fn(x: Tensor) -> Tensor:
        y = torch.zeros(64).as_strided((4, 4), (10, 2), 5)
        y.copy_(x.sin())
        return (y.exp() * whole[7:23].view(4, 4)).cos() * y

    return told(call, fn, leaf(4, 4))


@stories
def empty_and_scalar_tensors(call: Call) -> Any:
    def fn(x: Tensor, nothing: Tensor) -> Any:
        y = (x.sin() * 3).exp()
        z = torch.cat([nothing.sin().exp(), y[None]]) * torch.zeros(0, 5).sum()
        return (
            y * y,
            z.cos(),
            (nothing.exp() * nothing).sum() + y.tanh(),
            torch.zeros(3, 0).exp() @ torch.ones(0, 2) * y,
        )

    x, nothing = torch.randn(()).requires_grad_(), torch.randn(0).requires_grad_()
    return told(call, fn, x, nothing)


@stories
def every_real_dtype(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        total = x.sin().exp()
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
            total = (total.to(dtype).sin() * total.to(dtype)).exp()
        return total * (total > 0).to(torch.int8).to(torch.uint8).sum().to(torch.int64)

    return told(call, fn, leaf(8))


@stories
def complex_networks(call: Call) -> Any:
    layer = nn.Linear(8, 8, dtype=torch.complex64)

    def fn(x: Tensor) -> Tensor:
        y = torch.fft.fft(layer(torch.fft.rfft(x, n=14).conj())).exp()
        return torch.fft.irfft(y, n=14) * y.abs().sum() * torch.view_as_real(y)[..., 1].sum() * y.imag.cos().sum()

    x = leaf(4, 14)
    return grads(call(fn, x), x, *layer.parameters())


@stories
def sparse_embedding_gradients(call: Call) -> Any:
    embedding = nn.Embedding(9, 8, sparse=True)
    return trained(call, nn.Sequential(embedding, nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.tensor([[1, 2, 1]]))


@stories
def sparse_products(call: Call) -> Any:
    adjacency = torch.eye(6).roll(1, 0).to_sparse()

    def fn(x: Tensor) -> Tensor:
        y = torch.sparse.mm(adjacency, x.sin()).tanh()
        return torch.sparse.mm(adjacency, y.exp()).cos() * y

    return told(call, fn, leaf(6, 4))


@stories
def sparse_tensors_made_inside(call: Call) -> Any:
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])

    def fn(values: Tensor, x: Tensor) -> Tensor:
        graph = torch.sparse_coo_tensor(indices, values.sin().exp(), (3, 3))
        y = torch.sparse.mm(graph, x.cos()).tanh().exp()
        return torch.sparse.mm(graph, y).sin()

    return told(call, fn, leaf(3), leaf(3, 4))


@stories
def sparse_gradient_of_a_dense_leaf(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().to_sparse()
        return (torch.sparse.sum(y * 2, dim=1).to_dense().exp() + y.to_dense().cos().sum(1)).sin()

    return told(call, fn, leaf(3, 4))


@stories
def padded_sequences(call: Call) -> Any:
    lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True, proj_size=3)

    def fn(x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x.sin(), [6, 4, 2], batch_first=True)
        out, (h, c) = lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].exp(), h.cos(), c.sin()

    x = leaf(3, 6, 4)
    return grads(call(fn, x), x, *lstm.parameters())


@stories
def nested_tensors(call: Call) -> Any:
    layer = nn.Linear(4, 4)

    def fn(a: Tensor, b: Tensor) -> Tensor:
        jagged = torch.nested.as_nested_tensor([a.sin(), b.cos()], layout=torch.jagged)
        y = torch.relu(layer(jagged)) * jagged
        strided = torch.nested.as_nested_tensor([a.cos(), b.sin()])
        z = torch.nested.to_padded_tensor(torch.relu(layer(strided)), 0.0)
        return y.values().exp().sin().cos().sum() * z.exp().sin()

    a, b = leaf(3, 4), leaf(5, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        return grads(call(fn, a, b), a, b, *layer.parameters())


@stories
def compressed_sparse_products(call: Call) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        adjacency = torch.eye(6).roll(1, 0).to_sparse_csr()

        def fn(x: Tensor) -> Tensor:
            y = (adjacency @ x.sin()).tanh()
            return (adjacency @ y.exp()).cos() * y

        return told(call, fn, leaf(6, 4))


@stories(raises=RuntimeError)
def sparse_tensor_changed_before_backward(call: Call) -> Any:
    adjacency = torch.eye(6).roll(1, 0).to_sparse().coalesce()

    def fn(x: Tensor) -> Tensor:
        y = torch.sparse.mm(adjacency, x.sin()).tanh()
        return torch.sparse.mm(adjacency, y.exp()).cos() * y

    x = leaf(6, 4)
    out = call(fn, x)
    adjacency.mul_(2)
    return grads(out, x)


@stories
def factorisations(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        matrix = x.sin() + 3 * torch.eye(4)
        lu, pivots = torch.linalg.lu_factor(matrix)
        solved = torch.linalg.lu_solve(lu, pivots, x.cos())
        q, r = torch.linalg.qr(matrix.exp())
        values, vectors = torch.linalg.eigh(matrix @ matrix.t())
        return solved.sin() * q * r.exp() + values.cos() * vectors.abs()

    return told(call, fn, leaf(4, 4))


# -- hooks ---------------------------------------------------------------------------------------------------------------


@stories
def module_hooks_of_every_kind(call: Call) -> Any:
    fired: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    for name, part in model.named_children():
        part.register_forward_pre_hook(lambda *_, name=name: fired.append(f"pre {name}"))
        part.register_forward_hook(lambda m, args, out, name=name: (fired.append(f"forward {name}"), out * 1.5)[1])
        part.register_forward_hook(lambda *_, name=name: fired.append(f"keywords {name}"), with_kwargs=True)
        part.register_full_backward_pre_hook(lambda m, grad, name=name: fired.append(f"backward pre {name}"))
        part.register_full_backward_hook(
            lambda m, before, after, name=name: (fired.append(f"backward {name}"), tuple(g * 0.5 for g in before))[1]
        )
    model[0].register_forward_pre_hook(lambda m, args: (args[0].sin(),))
    return trained(call, model, leaf(4, 8)), fired


@stories
def tensor_and_node_hooks(call: Call) -> Any:
    fired: list[str] = []

    def say(text: str, factor: float = 1.0) -> Any:
        def hook(*args: Any) -> Any:
            fired.append(text)
            return args[0] * factor if factor != 1.0 else None

        return hook

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(say("tensor", 2.0))
        z = y.exp()
        assert z.grad_fn is not None
        z.grad_fn.register_hook(say("node"))
        z.grad_fn.register_prehook(say("before node"))
        w = z.cos() * z
        w.register_hook(say("last"))
        return w

    x = leaf(8)
    x.register_hook(say("leaf", 3.0))
    x.register_post_accumulate_grad_hook(say("accumulated"))
    for _ in range(2):
        call(fn, x).sum().backward()
    return x.grad, fired


@stories
def optimizer_in_backward(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        call(model, torch.randn(4, 8)).square().sum().backward()
    return held(model)


@stories
def multi_gradient_hooks(call: Call) -> Any:
    seen: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        y, z = x.sin(), x.cos()
        torch.autograd.graph.register_multi_grad_hook((y, z), lambda grads: seen.append([g.clone() for g in grads]))
        return (y.exp() * z.tanh()).sin()

    return told(call, fn, leaf(8)), seen


@stories
def global_module_hooks(call: Call) -> Any:
    fired: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: fired.append(type(m).__name__))
    try:
        return trained(
            call, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
        ), fired
    finally:
        handle.remove()


@stories
def ordered_features_by_name(call: Call) -> Any:
    model = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Tanh(), c=nn.Linear(8, 8), d=nn.Sigmoid()))
    features: dict[str, Tensor] = {}
    for name in ("a", "c"):
        getattr(model, name).register_forward_hook(lambda m, args, out, name=name: features.__setitem__(name, out))
    out = call(model, x := leaf(4, 8))
    seen = grads([out, features["a"].exp(), features["c"].sin()], x, *model.parameters())
    features.clear()
    return seen


@stories.each()
def test_structure(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)
