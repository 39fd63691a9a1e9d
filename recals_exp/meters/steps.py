"""The training step that everything is measured on, and the state it starts from.

Why not a trainer: a meter must run the same step again and again, plain and under a strategy, from one state, with
the clock at the borders of its phases and nowhere else.

Rules the code follows:

1. A step starts with no gradients and ends with none; clearing them belongs to the optimizer phase. What a step
   leaves behind is what it started with, so peaks of steps compare.
2. A state is restored in place: the parameters stay the same objects for the optimizer and for whoever wrapped the
   model.
3. The forward phase is the model's call and the loss; only the call goes through the strategy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recals_exp.meters.device import seed_everything, synchronize
from recals_exp.records import PhaseTimes

Forward = Callable[..., Any]
"""Calls a model: the model itself, or the model under a strategy."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step gave."""

    loss: Tensor  # detached, on its device: reading it would wait for the device
    phases: PhaseTimes
    step_s: float


class TrainStep:
    """One training step of one model on a given batch. Called with the way to call the model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Tensor], Tensor],
        device: torch.device,
        autocast: str | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.device = device
        self.autocast_dtype: torch.dtype | None = getattr(torch, autocast) if autocast else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def compute_loss(self, forward: Forward, x: Tensor, target: Tensor) -> tuple[Any, Tensor]:
        """The output and the loss, ready for backward."""
        with self.autocast():
            output = forward(x)
            return output, self.loss_fn(output, target)

    def __call__(self, forward: Forward, x: Tensor, target: Tensor) -> StepOutcome:
        device = self.device
        synchronize(device)
        start = time.perf_counter()
        output, loss = self.compute_loss(forward, x, target)
        synchronize(device)
        forward_done = time.perf_counter()
        loss.backward()
        synchronize(device)
        backward_done = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        end = time.perf_counter()
        del output
        phases = PhaseTimes(forward_done - start, backward_done - forward_done, end - backward_done)
        return StepOutcome(loss.detach(), phases, end - start)

    def resident_tensors(self, *batch: Tensor) -> Iterator[Tensor]:
        """What is alive before, during and after every step: parameters, buffers, optimizer state, the batch."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for entries in self.optimizer.state.values():
            yield from (value for value in entries.values() if isinstance(value, Tensor))
        yield from batch


class _Tensors(Protocol):
    """A model, or the part of one that a process has."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...


class Restorable(Protocol):
    """What a state is taken of: a `TrainStep`, for example."""

    @property
    def model(self) -> _Tensors: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


class StartingState:
    """Weights, buffers, optimizer state and seed that every measured step starts from.

    The copies are kept on the CPU, so that measuring takes no memory of the accelerator. State that a model keeps in
    Python attributes is not covered: it moves on, as it does in training.
    """

    def __init__(self, step: Restorable, seed: int) -> None:
        self._seed = seed
        self._optimizer = step.optimizer
        with torch.no_grad():
            tensors = [*step.model.parameters(), *step.model.buffers()]
            self._tensors = [(tensor, _copy_to_cpu(tensor)) for tensor in tensors]
            self._optimizer_state = {
                owner: {
                    key: _copy_to_cpu(value) if isinstance(value, Tensor) else value for key, value in entries.items()
                }
                for owner, entries in step.optimizer.state.items()
            }

    def restore(self) -> None:
        """Back to the start, in place (rule 2)."""
        with torch.no_grad():
            for tensor, saved in self._tensors:
                tensor.copy_(saved)
            # what the optimizer began to keep only later was not part of the start
            for owner in [owner for owner in self._optimizer.state if owner not in self._optimizer_state]:
                del self._optimizer.state[owner]
            for owner, entries in self._optimizer_state.items():
                live = self._optimizer.state[owner]
                for key, saved in entries.items():
                    if isinstance(saved, Tensor) and isinstance(live.get(key), Tensor):
                        live[key].copy_(saved)
                    else:
                        live[key] = saved
        self._optimizer.zero_grad(set_to_none=True)
        seed_everything(self._seed)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def unique_storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the tensors' storages, each storage once and in full. A tensor without one (sparse) counts its parts."""
    seen: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            seen[str(part.device), storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    raise ValueError(
        f"a tensor of layout {tensor.layout} is not supported among parameters, buffers and batches: "
        "use strided or sparse_coo"
    )
