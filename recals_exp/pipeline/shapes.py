"""The tensors that travel between the stages of a pipeline over processes, found without running the model.

torch's engine would find them by a real forward and backward on every rank, under the budgets and with the modules' side
effects. Fake tensors cost no computation and leave no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recals_exp.pipeline.budget import undone
from recals_exp.pipeline.rank_stage import Border, has_gradient
from recals_exp.pipeline.run import name_place
from recals_exp.pipeline.units import CutStage


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def tensor(self) -> Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return empty.requires_grad_(self.requires_grad)


def infer_shapes(model: nn.Module, stages: Sequence[CutStage], args: tuple[Any, ...]) -> list[list[Shape]]:
    """The tensors into the first stage, between all, and out of the last (rule 5)."""
    found = [[Shape(tuple(arg.shape), arg.dtype, arg.requires_grad) for arg in args]]
    with undone(model), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        values: tuple[Any, ...] = tuple(mode.from_tensor(arg) for arg in args)
        for stage in stages:
            try:
                out = stage.module(*(Border.apply(value) if has_gradient(value) else value for value in values))
            except Exception as error:
                name_place(error, f"in stage {stage.name}, run with fake tensors to find the shapes between processes")
                raise
            values = tuple(out) if isinstance(out, (tuple, list)) else (out,)
            odd = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
            if odd and stage is not stages[-1]:
                raise ValueError(
                    f"stage {stage.name} hands on {', '.join(odd)}: only tensors can travel between processes; cut elsewhere"
                )
            found.append([Shape(tuple(v.shape), v.dtype, v.requires_grad) for v in values if isinstance(v, Tensor)])
    return found
