"""What autograd saves goes to the host's memory in forward and comes back in backward.

The copying is PyTorch's own (`torch.autograd.graph.save_on_cpu`, pinned where there is an accelerator, so that the way back
overlaps with computing). Beside it only this: parameters and buffers stay where they are. They are alive anyway, so that moving
them, which `save_on_cpu` alone does, costs time and saves nothing.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from recals_exp.strategies.strategy import NO_BUDGET, BoundStrategy, Strategy, Terms, refuse_limit


@final
class OffloadStrategy(Strategy):
    """`save_on_cpu` around the model."""

    name = "offload"
    budget_kind = NO_BUDGET

    @property
    def terms(self) -> Terms:
        return Terms(
            needs="an accelerator with memory of its own: on the CPU there is nowhere to move to, and nothing is saved",
            changes="nothing; host memory takes what the device gives up",
            exact_gradients=True,
            exact_buffers=True,
        )

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        refuse_limit(self.name, limit)
        return _OffloadedModel(model)


@final
class _OffloadedModel(BoundStrategy):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pinned = any(parameter.device.type != "cpu" for parameter in self._model.parameters())
        mover: Any = save_on_cpu(pin_memory=pinned)
        resident = {
            tensor.untyped_storage().data_ptr()
            for tensors in (self._model.parameters(), self._model.buffers())
            for tensor in tensors
            if tensor.layout is torch.strided
        }

        def pack(tensor: Tensor) -> Any:
            if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in resident:
                return tensor
            return mover.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else mover.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return self._model(*args, **kwargs)
