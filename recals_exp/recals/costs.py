"""What an op costs: a FLOP and byte model, stable from run to run.

Why a model and not a clock: times differ from run to run, and a plan made from noise changes from run to run. A roofline on a
nominal machine (time = the slower of arithmetic and memory traffic, plus a fixed cost per op) is exact about what plans
depend on, the ratio of a matrix product to an elementwise op. `calibrate` fits the machine when the ratio matters more
than reproducibility; measured per-op times are the engine's own, on request.

Rules
1. FLOPs come from torch's own registry (`torch.utils.flop_counter.flop_registry`), so that they agree with `FlopCounterMode`;
   fused CPU attention and fused RNN layers, which the registry lacks, are counted here with the same conventions.
2. Bytes moved = every tensor read once and every tensor written once, dense.
3. No tensor data is touched: arguments may be tensors, fake tensors or `Meta`.
4. An op that only makes a view costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_CALIBRATION_SIZE = 1024  # side of the square matrices
_CALIBRATION_BYTES = 1 << 26
_CALIBRATION_RUNS = 5


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape and element size: all that a cost needs to know of a tensor."""

    shape: tuple[int, ...]
    itemsize: int  # bytes per element

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Machine:
    """The constants of the roofline."""

    name: str
    flops_per_s: float  # 4-byte and wider elements
    narrow_flops_per_s: float  # 2-byte and narrower elements
    bytes_per_s: float
    op_s: float  # fixed cost of an op: launch, dispatch


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op's cost; ``seconds`` is on the machine it was asked for."""

    flops: int
    nbytes: int  # read and written
    seconds: float


NOMINAL = Machine("nominal", flops_per_s=1e13, narrow_flops_per_s=4e13, bytes_per_s=1e12, op_s=2e-6)
"""Between a CPU (about 5 to 10 FLOP per byte) and an accelerator (15 and more): 10 FLOP per byte."""

_FLOPS: dict[tuple[torch._ops.OpOverload, str], int] = {}
MOST_SIGNATURES = 100_000  # whose FLOPs are known; a program whose shapes never repeat must not grow for ever

_FREE = OpCost(0, 0, 0.0)


def op_cost(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Any,
    machine: Machine = NOMINAL,
) -> OpCost:
    """Cost of one call of an aten op, from shapes alone (rule 3).

    ``args``, ``kwargs`` and ``outputs`` are what the op was called with and what it gave, each tensor as a tensor or as a `Meta`.
    """
    if _is_view(func):
        return _FREE
    read = list(_metas([*args, *kwargs.values()]))
    written = list(_metas([outputs]))
    flops = op_flops(func, args, kwargs, outputs)
    nbytes = sum(meta.nbytes for meta in read) + sum(meta.nbytes for meta in written)
    widest = max((meta.itemsize for meta in written), default=4)
    peak_flops_per_s = machine.narrow_flops_per_s if widest <= 2 else machine.flops_per_s
    seconds = machine.op_s + max(flops / peak_flops_per_s, nbytes / machine.bytes_per_s)
    return OpCost(flops, nbytes, seconds)


def op_flops(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """FLOPs of one call as `FlopCounterMode` counts them; 0 for an op without a formula (rule 1)."""
    packet = func.overloadpacket
    own = OWN_FORMULAS.get(packet.__name__)
    formula = flop_registry.get(packet)
    if own is None and formula is None:
        return 0
    shapes = [_shapes(arg) for arg in args]
    if own is not None and formula is None:
        return own(shapes)
    assert formula is not None
    named = {name: _shapes(value) for name, value in kwargs.items()}
    out = _shapes(outputs)
    # Once per signature: torch's formulas map trees, which leaves cyclic garbage.
    key = (func, repr((shapes, named, out)))
    known = _FLOPS.get(key)
    if known is not None:
        return known
    try:
        found = int(formula(*shapes, **named, out_val=out))
        if len(_FLOPS) < MOST_SIGNATURES:
            _FLOPS[key] = found
        return found
    except AttributeError:
        # Formulas registered with get_raw=True read tensors (jagged lengths); shapes of dense tensors serve all others.
        if all(isinstance(leaf, Meta) for leaf in _leaves([*args, *kwargs.values()]) if hasattr(leaf, "shape")):
            return 0
        return int(formula(*args, **kwargs, out_val=outputs))


def calibrate(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Machine:
    """A `Machine` with this device's constants: the best of a few runs of a matrix product, a copy and a tiny op."""
    device = torch.device(device)
    side = _CALIBRATION_SIZE
    flops = 2 * side**3
    rates: dict[int, float] = {}
    for itemsize, kind in ((4, torch.float32), (2, torch.bfloat16)):
        a = torch.ones(side, side, device=device, dtype=kind)
        rates[itemsize] = flops / _best_s(partial(torch.matmul, a, a), device)
    source = torch.zeros(_CALIBRATION_BYTES // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device)
    small = torch.zeros(1, device=device)
    op_s = _best_s(lambda: small.add(1), device)
    return Machine(
        name=f"calibrated-{device.type}",
        flops_per_s=rates[4],
        narrow_flops_per_s=max(rates[2], 1.0),
        bytes_per_s=2 * _CALIBRATION_BYTES / copy_s,
        op_s=op_s,
    )


def _best_s(run: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_CALIBRATION_RUNS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@cache
def _is_view(func: torch._ops.OpOverload) -> bool:
    """Every result aliases an argument and nothing is written."""
    schema = func._schema
    if not schema.returns or schema.is_mutable:
        return False
    return all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _leaves(tree: Iterable[Any]) -> Iterator[Any]:
    for item in tree:
        if isinstance(item, (list, tuple)) and not isinstance(item, torch.Size):
            yield from _leaves(item)
        else:
            yield item


def _metas(tree: Iterable[Any]) -> Iterator[Meta]:
    for leaf in _leaves(tree):
        if isinstance(leaf, Meta):
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            yield Meta(tuple(leaf.shape), leaf.element_size())


def _shapes(item: Any) -> Any:
    if isinstance(item, Meta):
        return torch.Size(item.shape)
    if isinstance(item, torch.Tensor):
        return item.shape
    if isinstance(item, (list, tuple)) and not isinstance(item, torch.Size):
        return type(item)(_shapes(part) for part in item)
    return item


def _cpu_attention_flops(shapes: list[Any]) -> int:
    return int(sdpa_flop_count(shapes[0], shapes[1], shapes[2]))


def _rnn_layer_flops(shapes: list[Any]) -> int:
    """One fused layer: every time step and row meets every weight matrix once."""
    steps_and_rows = prod(shapes[0][:-1])
    weights = [shape for shape in _leaves(shapes[1:5]) if isinstance(shape, torch.Size) and len(shape) == 2]
    return 2 * steps_and_rows * sum(prod(shape) for shape in weights)


# By the name of an aten packet: from the shapes of the arguments.
OWN_FORMULAS: dict[str, Callable[[list[Any]], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention_flops,
    "mkldnn_rnn_layer": _rnn_layer_flops,
    "_cudnn_rnn": _rnn_layer_flops,
    "miopen_rnn": _rnn_layer_flops,
}
