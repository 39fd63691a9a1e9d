"""Recorded ops, and their arguments: all that a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from .costs import MOST_SIGNATURES, Meta, OpCost, op_cost
from .errors import SourceChangedError
from .graph import Op, Value

if TYPE_CHECKING:
    from .ambient import Ambient
    from .facts import OpFacts
    from .randomness import RandomState


class Ref:
    """A tensor argument of a recorded op: where its bytes are and how they are read."""

    __slots__ = ("dtype", "is_complex", "is_conj", "is_neg", "offset", "size", "stride", "value")

    def __init__(self, value: Any, tensor: Tensor) -> None:
        self.value: Value = value
        self.dtype = dtype = tensor.dtype
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.is_complex = is_complex = dtype.is_complex
        self.is_conj = is_complex and tensor.is_conj()
        self.is_neg = tensor.is_neg()

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """The argument again, over ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = torch._conj(tensor)
        if self.is_neg:
            tensor = torch._neg_view(tensor)
        return tensor


class Constant:
    """A tensor argument without a storage of its own (sparse, nested, a wrapper subclass): kept whole.

    A write to it moves its version counter, and is refused at replay.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def meta(self) -> Meta:
        nested = self._tensor.is_nested
        return (
            Meta((self._tensor.numel(),), self._tensor.itemsize)
            if nested
            else _meta(self._tensor.shape, self._tensor.dtype)
        )

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            what = f"[{self._tensor.layout} {list(self._tensor.shape)}]"
            raise SourceChangedError(
                f"a tensor {what} that a dropped value is rebuilt from was modified in place after forward read it (version "
                f"{self._tensor._version}, expected {self._version}). Run backward first, or raise the cache limit.",
                what=what,
            )
        return self._tensor


class TensorOp(Op):
    """One recorded aten op: all a replay needs.

    Attributes:
        func: the operator overload. args, kwargs: its arguments, tensors as ``Ref``.
        written: the values whose bytes the op writes.
        rng: generator and its state before the op, for random ops (rule 6).
        ambient: the global settings in force (rule 7).
    """

    __slots__ = ("_cost", "ambient", "args", "facts", "func", "grad_mode", "kwargs", "outs")

    rng: RandomState | None = None
    written: tuple[Value, ...] = ()
    is_complex: bool = False

    def __init__(
        self,
        seq: int,
        inputs: tuple[Value, ...],
        func: Any,
        facts: OpFacts,
        args: list[Any],
        kwargs: dict[str, Any],
        ambient: Ambient,
        grad_mode: bool,  # some kernels look at it even below autograd (oneDNN's RNN keeps its workspace only then)
    ) -> None:
        self.seq = seq
        self.inputs = inputs
        self.func = func
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.ambient = ambient
        self.grad_mode = grad_mode
        self.outs: Sequence[tuple[torch.Size, torch.dtype]] = ()  # of the results, for the cost model

    def full_cost(self) -> OpCost:
        """FLOPs, bytes moved and seconds on the nominal machine; no clock is read."""
        try:
            return self._cost
        except AttributeError:
            outs = [_meta(*out) for out in self.outs]
            out = outs[0] if self.facts.returns_tensor and outs else outs  # formulas tell a tensor from a list of one
            try:
                self._cost: OpCost = op_cost(self.func, _metas(self.args), _metas(self.kwargs), out)
            except Exception:
                # An estimate: a formula that does not know some layout must not fail a step.
                self._cost = OpCost(0, sum(out.nbytes for out in outs), 0.0)
            return self._cost

    def flops(self) -> int:
        """As ``full_cost`` has them, once per signature: replays count what they run."""
        if self.kwargs:
            return self.full_cost().flops
        key: list[Any] = []
        for arg in self.args:
            kind = type(arg)
            if kind is Ref:
                key.append(arg.size)
            elif kind is list or kind is tuple:
                if arg and type(arg[0]) is not int:  # of tensors
                    return self.full_cost().flops
                key.append(tuple(arg))
            elif kind is Constant:
                return self.full_cost().flops
            else:
                key.append(arg)
        known, signature = self.facts.flops, tuple(key)
        flops = known.get(signature)
        if flops is None:
            flops = self.full_cost().flops
            if len(known) < MOST_SIGNATURES:
                known[signature] = flops
        return flops

    def cost(self) -> float:
        return self.full_cost().seconds

    def name(self) -> str:
        return str(self.func)


class PeculiarOp(TensorOp):
    """An op that writes its arguments, draws random numbers, or works on complex numbers."""

    __slots__ = ("is_complex", "rng", "written")

    rng: RandomState | None
    written: tuple[Value, ...]
    is_complex: bool


def _meta(size: torch.Size, dtype: torch.dtype) -> Meta:
    return Meta(tuple(size), dtype.itemsize)


def _metas(item: Any) -> Any:
    if type(item) is Ref:
        return _meta(item.size, item.dtype)
    if type(item) is Constant:
        return item.meta()
    if type(item) is list:
        return [_metas(part) for part in item]
    if type(item) is dict:
        return {key: _metas(part) for key, part in item.items()}
    return item


def refs_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Ref]:
    """The tensor arguments in recorded arguments, in order."""
    found: list[Ref] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        kind = type(arg)
        if kind is Ref:
            found.append(arg)
        elif kind is list:
            found.extend(part for part in arg if type(part) is Ref)
    return found
