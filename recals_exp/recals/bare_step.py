"""A step without loss and optimizer, to be run any number of times from the same state: what profiling and timing need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .analysis import module_state_restored
from .facts import all_tensors
from .structure import output_tensors

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
RunStep: TypeAlias = Callable[[Wrap], Any]
"""Runs one whole training step; it calls ``wrap(model)`` where it would call the model, once."""


class BareStep:
    """Forward of ``fn`` and backward from gradients of ones; a `RunStep`, used inside of its ``with`` block.

    Buffers, generators and gradients are put back by ``reset`` and at the end.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        inputs = list(all_tensors((args, kwargs)))
        owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        module = owner if isinstance(owner, nn.Module) else nn.Module()
        state = [*module.parameters(), *module.buffers()]
        tensors = [*inputs, *state]
        cpu = torch.device("cpu")
        self.device = next((t.device for t in chain(state, inputs) if t.device.type != "cpu"), cpu)
        self.resident_bytes = _storage_bytes(tensors, self.device)  # there before the step and throughout
        self._grads: list[tuple[Tensor, Tensor | None]] = [
            (t, t.grad) for t in tensors if t.is_leaf and t.requires_grad
        ]
        self._state = ExitStack()

    def __enter__(self) -> BareStep:
        self.reset()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.close()
        for tensor, grad in self._grads:
            tensor.grad = grad

    def reset(self) -> None:
        """Back to the start: no gradients, and buffers and generators as they were."""
        self._state.close()
        self._state.enter_context(module_state_restored(self._fn))
        for tensor, _ in self._grads:
            tensor.grad = None  # backward would add to it in place

    def __call__(self, wrap: Wrap) -> None:
        with torch.enable_grad():
            out = wrap(self._fn)(*self._args, **self._kwargs)
            roots = [tensor for tensor in output_tensors(out) if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Each storage on ``device`` once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.layout is torch.strided and t.device.type == device.type
    }
    return sum(storages.values())
