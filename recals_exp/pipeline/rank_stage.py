"""One stage on a rank: under its budget, with borders that torch's engine can cut at, seeds and a record of what ran when.

The rules are those of ``distributed.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils import _pytree as pytree

from recals_exp.pipeline.budget import StageBudget
from recals_exp.pipeline.run import name_place
from recals_exp.pipeline.timeline import Event, timed_replays


class RankStage(nn.Module):
    """One stage on a rank: its module under its budget, with borders (rule 6)."""

    def __init__(self, index: int, name: str, module: nn.Module, budget: StageBudget, in_flight: int) -> None:
        super().__init__()
        self.index = index
        self.name = name
        self.module = module
        self.budget = budget
        self.in_flight = in_flight

    def forward(self, *inputs: Any) -> Any:
        inputs = tuple(Border.apply(value) if has_gradient(value) else value for value in inputs)
        recals = self.budget.recals
        if torch.is_grad_enabled() and recals is None and self.budget.is_fraction:
            recals = self.budget.resolve(self.module, inputs, {}, self.in_flight)
        out = self.module(*inputs) if recals is None else recals(self.module, *inputs)
        return pytree.tree_map_only(Tensor, lambda value: Border.apply(value) if has_gradient(value) else value, out)


class Border(torch.autograd.Function):
    """The same numbers in the same memory (if that is contiguous), as a tensor that is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class StageOwner(Protocol):
    """What a stage asks of the pipeline it belongs to."""

    @property
    def recording(self) -> bool: ...

    events: list[Event]
    place: str  # "rank 1 of 2", for messages
    global_rank: int
    n_micro_batches: int

    def seed_cell(self, stage: int, micro_batch: int) -> None: ...


class EventStage(PipelineStage):
    """torch's stage, with seeds (rule 3), names in errors, and a record of what ran when."""

    def __init__(self, owner: StageOwner, module: RankStage, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._owner = owner
        self._rank_stage = module

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._owner.seed_cell(self._rank_stage.index, fwd_chunk_id)
        with self._recorded("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._recorded("backward" if kwargs.get("full_backward", True) else "backward_input", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._recorded("backward_weight", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def _recorded(self, kind: str, micro_batch: int) -> Iterator[None]:
        stage = self._rank_stage
        start = time.perf_counter()

        def replayed(start_s: float, end_s: float) -> None:
            self._owner.events.append(
                Event("recompute", stage.index, micro_batch, start_s, end_s, self._owner.global_rank)
            )

        try:
            with timed_replays(stage.budget.recals if self._owner.recording else None, replayed):
                yield
        except Exception as error:
            name_place(
                error,
                f"in the {kind.replace('_', ' ')} of stage {stage.index} ({stage.name}) at micro-batch {micro_batch} of "
                f"{self._owner.n_micro_batches}, on {self._owner.place}",
            )
            raise
        if self._owner.recording:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            end = time.perf_counter()
            self._owner.events.append(Event(kind, stage.index, micro_batch, start, end, self._owner.global_rank))


def has_gradient(value: Any) -> bool:
    """Whether it is a tensor that wants a gradient."""
    return isinstance(value, Tensor) and value.requires_grad
