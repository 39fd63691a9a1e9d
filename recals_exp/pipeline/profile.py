"""What each unit of a model costs: time, and the bytes a device must hold for it. Plain data, measured once.

Rules:

1. Each unit runs forward and backward by itself, on micro-batch inputs that the units before it made, some times over; the
   times are medians. The model, its buffers and the generators are as before afterwards.
2. Memory that several units use is counted once for a stage that holds them all: parameters that are tied, activations
   that one unit makes and the next one saves too. So parameters and saved values are listed with their identity, and a
   stage's bytes are those of the union.
3. Saved values are what autograd keeps for backward, by storage and without parameters, buffers and the model's inputs.
4. A gradient and the optimizer's state are counted with each trained parameter: ``optimizer_states`` of its size (SGD 0,
   momentum 1, Adam 2).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from recals_exp.pipeline.budget import undone
from recals_exp.pipeline.placed import stage_tensors
from recals_exp.pipeline.stage import INPUT, read_takes
from recals_exp.pipeline.units import Units

Piece = tuple[int, int]  # (identity, bytes)


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit, for one micro-batch."""

    name: str
    forward_s: float
    backward_s: float
    state: tuple[Piece, ...]  # parameters and buffers, with the gradient and optimizer state of each (rule 4)
    saved: tuple[Piece, ...]  # what autograd keeps (rule 3)
    output_bytes: int  # what it hands on

    @property
    def step_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Profile:
    """All units of a model."""

    units: tuple[UnitCost, ...]
    rows: int  # of the micro-batch it was measured with

    def time_s(self, first: int, last: int) -> float:
        """Forward and backward of the units from ``first`` up to but not including ``last``."""
        return sum(unit.step_s for unit in self.units[first:last])

    def state_bytes(self, first: int, last: int) -> int:
        """Parameters with what is kept beside them, each once."""
        return _union(unit.state for unit in self.units[first:last])

    def saved_bytes(self, first: int, last: int) -> int:
        """What autograd keeps for one micro-batch, each value once."""
        return _union(unit.saved for unit in self.units[first:last])


def _union(parts: Iterable[Iterable[Piece]]) -> int:
    return sum(dict(piece for part in parts for piece in part).values())


def profile_units(units: Units, example: tuple[Any, ...], optimizer_states: float = 2.0, repeats: int = 3) -> Profile:
    """Measure a model's units with the positional inputs of one micro-batch, on the device where it is."""
    stages = units.stages(range(len(units.names) + 1))
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    ignored = {_storage(tensor) for tensor in (*units.model.parameters(), *units.model.buffers(), *leaves)}
    gradients = [(parameter, parameter.grad) for parameter in units.model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None  # backward would add to it in place
    results: list[Any] = []
    costs = []
    identity: dict[Any, int] = {}
    alive: list[Any] = []  # an identity is good only while its storage lives
    devices = {tensor.device for tensor in units.model.parameters() if tensor.device.type != "cpu"}
    try:
        with undone(units.model), torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
            for index, stage in enumerate(stages):
                inputs = [
                    (example if len(example) > 1 else example[0])
                    if source.stage == INPUT and source.item is None
                    else source.pick(example if source.stage == INPUT else results[source.stage])
                    for source in read_takes(stage.takes, index)
                ]
                saved: dict[Any, int] = {}

                def keep(tensor: Tensor, saved: dict[Any, int] = saved) -> Tensor:
                    key = _storage(tensor)
                    if key not in ignored:
                        alive.append(tensor.detach())
                        saved[key] = tensor.untyped_storage().nbytes()
                    return tensor

                forward_s, backward_s, result = _measure(stage.module, inputs, keep, repeats)
                results.append(result)
                costs.append(
                    UnitCost(
                        units.names[index],
                        forward_s,
                        backward_s,
                        tuple(_state_pieces(stage.module, optimizer_states, identity)),
                        tuple((identity.setdefault(key, len(identity)), nbytes) for key, nbytes in saved.items()),
                        sum(leaf.nbytes for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)),
                    )
                )
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return Profile(tuple(costs), leaves[0].shape[0] if leaves and leaves[0].ndim else 1)


def _measure(
    module: Callable[..., Any], inputs: Sequence[Any], keep: Callable[[Tensor], Tensor], repeats: int
) -> tuple[float, float, Any]:
    """Median seconds of forward and of backward, and the result, detached."""
    forward, backward = [], []
    result: Any = None
    for turn in range(repeats):
        copies = pytree.tree_map_only(Tensor, _fresh, list(inputs))
        if turn == 0:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                result = module(*_spread(copies))
            copies = pytree.tree_map_only(Tensor, _fresh, list(inputs))
        _wait()
        start = time.perf_counter()
        out = module(*_spread(copies))
        _wait()
        forward.append(time.perf_counter() - start)
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        seeds = [torch.ones_like(leaf) for leaf in outputs]
        _wait()
        start = time.perf_counter()
        if outputs:
            torch.autograd.backward(outputs, seeds)
        _wait()
        backward.append(time.perf_counter() - start)
    detached = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), result)
    return statistics.median(forward), statistics.median(backward), detached


def _spread(inputs: Sequence[Any]) -> Sequence[Any]:
    return inputs[0] if len(inputs) == 1 and type(inputs[0]) is tuple else inputs


class _Fresh(torch.autograd.Function):
    """A value with a history that ends here, in the memory of another: like a result of the unit before."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _fresh(tensor: Tensor) -> Tensor:
    """An input that wants a gradient if ``tensor`` does, shares its memory, and may be changed in place."""
    if not tensor.requires_grad:
        return tensor
    fresh: Tensor = _Fresh.apply(torch.zeros((), requires_grad=True), tensor.detach())
    return fresh


def _state_pieces(module: Any, optimizer_states: float, identity: dict[Any, int]) -> Iterable[Piece]:
    for tensor in stage_tensors(module):
        copies = 2 + optimizer_states if tensor.requires_grad else 1
        yield identity.setdefault(_storage(tensor), len(identity)), round(tensor.nbytes * copies)


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
