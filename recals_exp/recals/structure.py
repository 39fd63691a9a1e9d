"""Looking into what a callable takes and returns: nested containers, dataclasses, model outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunction

from .door import call_key


def output_tensors(out: Any) -> list[Tensor]:
    """The tensors in what a model returned."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        parts: Any = out.values()
    elif isinstance(out, (list, tuple)):
        parts = out
    elif dataclasses.is_dataclass(out):
        parts = [getattr(out, field.name, None) for field in dataclasses.fields(out)]
    else:
        return []
    return [tensor for part in parts for tensor in output_tensors(part)]


def step_key(fn: Any, args: Any, kwargs: Any) -> Hashable:
    """What tells one kind of step from another before it runs: the callable, train or eval, the shapes it is given."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    with DisableTorchFunction():  # subclasses and modes of the program's must not notice
        shapes = _shapes(args, kwargs)
    training = owner.training if isinstance(owner, nn.Module) else None
    return (id(call_key(fn)), training, shapes)


def _shapes(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(tensor.shape) if not tensor.is_nested else None, tensor.dtype, tensor.device, tensor.requires_grad)
        for tensor in output_tensors([args, kwargs])
    )
