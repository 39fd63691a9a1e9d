"""Bindings do what the overloads they stand for do: the same dispatcher entry, the same arguments, bits, strides and aliases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recals.scenarios import grads, leaf, views_and_norms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recals_exp.meters.parity import same_bits
from recals_exp.recals import recals_with_rngs
from recals_exp.recals.bindings import QUICK, quickest
from recals_exp.recals.replay import flat_tensors

MATRIX, OTHER, WEIGHT = torch.rand(4, 6) + 0.5, torch.rand(4, 6) + 0.5, torch.nn.Parameter(torch.rand(6, 4))
STRIDED = (torch.rand(6, 4) + 0.5).t()
BATCH, IMAGE = torch.rand(2, 4, 6), torch.rand(2, 4, 8, 8)
KERNEL = torch.nn.Parameter(torch.rand(8, 4, 3, 3))
HEADS = torch.rand(2, 2, 5, 4)
PIECES = [MATRIX, STRIDED, MATRIX.double(), MATRIX.bfloat16(), WEIGHT, torch.rand(())]
PAIRS = [
    (MATRIX, OTHER),
    (MATRIX, 2),
    (MATRIX, 0.1),
    (2, MATRIX),
    (STRIDED, MATRIX.double()),
    (WEIGHT, True),
    (MATRIX, 2j),
    (MATRIX, 2**40),
]

SAMPLES: dict[str, Sequence[tuple[Any, ...]]] = {
    "mm.default": [(MATRIX, WEIGHT), (STRIDED, WEIGHT), (WEIGHT, MATRIX)],
    "bmm.default": [(BATCH, BATCH.transpose(1, 2))],
    "addmm.default": [(torch.rand(4), MATRIX, WEIGHT), (torch.rand(4, 4), STRIDED, WEIGHT)],
    "baddbmm.default": [(torch.rand(2, 4, 4), BATCH, BATCH.transpose(1, 2))],
    "convolution.default": [
        (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (IMAGE, KERNEL, torch.rand(8), [2, 2], [0, 1], [1, 1], False, [0, 0], 1),
        (torch.rand(2, 8, 5, 5), KERNEL, None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ],
    "embedding.default": [(WEIGHT, torch.tensor([[0, 5], [3, 3]])), (WEIGHT, torch.tensor([1]), 2, True)],
    "add.Tensor": PAIRS,
    "sub.Tensor": [pair for pair in PAIRS if pair[1] is not True],
    "mul.Tensor": PAIRS,
    "div.Tensor": PAIRS,
    "rsub.Scalar": [(MATRIX, 1), (MATRIX, 0.5, 2)],
    "neg.default": [(piece,) for piece in PIECES],
    "pow.Tensor_Scalar": [(piece, exponent) for piece in PIECES for exponent in (2, 0.5, -1)],
    **{
        f"{name}.default": [(piece,) for piece in PIECES]
        for name in ("tanh", "sigmoid", "relu", "gelu", "silu", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "abs", "clone")
    },
    "native_layer_norm.default": [(MATRIX, [6], None, None, 1e-5), (BATCH, [4, 6], MATRIX, OTHER, 1e-6)],
    "native_group_norm.default": [(IMAGE, None, None, 2, 4, 64, 2, 1e-5), (IMAGE, torch.rand(4), torch.rand(4), 2, 4, 64, 4, 1e-5)],
    "_softmax.default": [(MATRIX, -1, False), (STRIDED, 0, False)],
    "_log_softmax.default": [(MATRIX, 1, False)],
    "max_pool2d_with_indices.default": [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], True)],
    "avg_pool2d.default": [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1], True, False)],
    "_adaptive_avg_pool2d.default": [(IMAGE, [1, 1]), (IMAGE, [3, 2])],
    "sum.default": [(piece,) for piece in PIECES],
    "sum.dim_IntList": [(MATRIX, [0]), (STRIDED, [0, 1], True), (MATRIX, [-1]), (MATRIX, None, True), (MATRIX, [])],
    "mean.default": [(piece,) for piece in PIECES],
    "mean.dim": [(MATRIX, [0]), (STRIDED, [0, 1], True), (MATRIX, None, True)],
    "_scaled_dot_product_flash_attention_for_cpu.default": [(HEADS, HEADS, HEADS), (HEADS, HEADS, HEADS, 0.0, True)],
    "masked_fill.Scalar": [(MATRIX, MATRIX > 1, float("-inf")), (MATRIX, MATRIX > 1, 0)],
    "native_batch_norm.default": [
        (IMAGE, torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4), True, 0.1, 1e-5),
        (IMAGE, None, None, None, None, True, 0.1, 1e-5),
        (IMAGE, torch.rand(4), None, torch.rand(4), torch.rand(4), False, 0.0, 1e-5),
    ],
    "native_dropout.default": [(MATRIX, 0.3, True), (MATRIX, 0.3, False), (MATRIX, 0.5, None)],
    "bernoulli_.float": [(MATRIX, 0.3), (MATRIX,)],
    "add_.Tensor": [(MATRIX, OTHER), (MATRIX, 1), (MATRIX, 0.5), (torch.tensor(3), 1)],
    "mul_.Tensor": [(MATRIX, OTHER), (MATRIX, 2), (MATRIX, 0.5)],
    "relu_.default": [(-MATRIX,)],
    "t.default": [(MATRIX,), (WEIGHT,), (torch.rand(3),)],
    "transpose.int": [(BATCH, 0, 2), (BATCH, -1, 1)],
    "permute.default": [(BATCH, [2, 0, 1])],
    "view.default": [(BATCH, [8, 6]), (BATCH, [-1]), (torch.rand(()), [])],
    "expand.default": [(torch.rand(4, 1), [4, 3]), (torch.rand(4), [2, -1])],
    "unsqueeze.default": [(MATRIX, 0), (MATRIX, -1)],
    "squeeze.dim": [(torch.rand(4, 1), 1), (MATRIX, 0)],
    "select.int": [(MATRIX, 0, 1), (MATRIX, -1, -1)],
    "unbind.int": [(MATRIX,), (MATRIX, 1)],
    "split.Tensor": [(MATRIX, 3, 1), (MATRIX, 3)],
    "split_with_sizes.default": [(MATRIX, [1, 5], 1)],
}  # fmt: skip


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, types, _described(args), kwargs))
        return func(*args, **(kwargs or {}))


def _described(args: Any) -> list[Any]:
    return [(arg.shape, arg.stride(), arg.dtype, type(arg)) if isinstance(arg, Tensor) else arg for arg in args]


def overload(name: str) -> Any:
    base, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), which)


class Outcome:
    """All that a run of an op does, with copies of its arguments."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        args = tuple(_copy(arg) if isinstance(arg, Tensor) else arg for arg in args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        torch.manual_seed(7)
        with torch._C._AutoDispatchBelowAutograd(), Log() as log:
            out = run(*args)
        self.dispatched = log.seen
        self.results = flat_tensors(out)
        self.layout = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t._version, type(t)) for t in self.results]
        self.aliases = [
            [t.untyped_storage()._cdata == a.untyped_storage()._cdata for a in tensors] for t in self.results
        ]
        self.arguments = tensors
        self.versions = [t._version for t in tensors]
        self.generator = torch.get_rng_state()


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor.detach())
    return torch.nn.Parameter(copy) if type(tensor) is torch.nn.Parameter else copy


def assert_same(first: Outcome, second: Outcome) -> None:
    assert first.dispatched == second.dispatched
    assert first.layout == second.layout
    assert first.aliases == second.aliases
    assert first.versions == second.versions
    assert torch.equal(first.generator, second.generator)
    for ours, theirs in zip(first.results + first.arguments, second.results + second.arguments, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_binding_does_what_its_overload_does(name: str) -> None:
    func = overload(name)
    run = quickest(func)
    assert run is not func._op, f"PyTorch {torch.__version__} has no function {name}"
    for args in SAMPLES[name]:
        expected = Outcome(func._op, args)
        assert [seen[0] for seen in expected.dispatched] == [func]
        assert_same(Outcome(run, args), expected)


def test_others_are_run_by_their_overloads() -> None:
    for func in (torch.ops.aten.cumsum.default, torch.ops.aten.add.Scalar, torch.ops.aten.slice.Tensor):
        assert quickest(func) is func._op


def test_an_overload_of_the_same_name_elsewhere_has_no_binding() -> None:
    with torch.library._scoped_library("recals_bindings", "DEF") as library:
        library.define("tanh(Tensor x) -> Tensor")
        func = torch.ops.recals_bindings.tanh.default
        assert quickest(func) is func._op


def test_recorded_ops_run_by_their_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in replays."""
    ran: list[str] = []

    def counting(func: Any) -> Callable[..., Any]:
        run = quickest(func)

        def counted(*args: Any) -> Any:
            ran.append(str(func))
            return run(*args)

        return counted

    monkeypatch.setattr("recals_exp.recals.facts.quickest", counting)
    recals = recals_with_rngs(4 * 64, policy="fifo", audit="off")
    recals.facts.clear()
    x, weight = leaf(4, 4), leaf(4, 4)
    out = recals(views_and_norms, x, weight)
    forward = len(ran)
    assert ran.count("aten.tanh.default") == ran.count("aten.native_layer_norm.default") == 4
    assert ran.count("aten.t.default") == 4
    grads(out, x, weight)
    assert ran.count("aten.tanh.default") > 4
    assert len(ran) > forward
