"""One call of a pipeline: the grid of (stage, micro-batch) cells and the values that travel between them.

The rules are those of ``module.py``; this file executes them. A cell is run by the caller's thread (`PipelineRun.in_order`)
or by a stage's own (``workers.py``); the bookkeeping of values is the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from recals_exp.pipeline.batch import MicroBatch
from recals_exp.pipeline.devices import Mover
from recals_exp.pipeline.stage import Source, Stage, StageObserver


class PipelineRun:
    """One call: every (stage, micro-batch) cell of it, and the values between them."""

    def __init__(
        self,
        stages: Sequence[Stage],
        micro_batches: Sequence[MicroBatch],
        mover: Mover,
        observer: StageObserver | None,
        budgeted: bool = True,
    ) -> None:
        self.stages = stages
        self.micro_batches = micro_batches
        self._mover = mover
        self.recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self._observer = observer
        self._budgeted = budgeted
        self._lock = threading.Lock()  # the stages may run on threads
        self._values: dict[tuple[int, int], Any] = {}  # (stage, micro-batch) -> result, until its last reader has it
        self._carried: dict[tuple[int, str, torch.device], Any] = {}  # keyword values already taken to a device
        self._readers = [0] * len(stages)
        for stage in stages:
            for source in set(stage.sources):
                if source.stage >= 0:
                    self._readers[source.stage] += 1
        self._readers[-1] += 1  # the caller
        self._left: dict[tuple[int, int], int] = {}

    def in_order(self) -> list[Any]:
        """All cells on this thread, micro-batch by micro-batch (rule 2)."""
        outputs = []
        for index in range(len(self.micro_batches)):
            for stage in self.stages:
                self.cell(stage, index)
            outputs.append(self.take(len(self.stages) - 1, index))
        return outputs

    def cell(self, stage: Stage, index: int) -> Any:
        """Run one stage on one micro-batch and return its result; its inputs must be there."""
        with self.placed(stage, index):
            return self.compute(stage, index, *self.inputs(stage, index))

    @contextmanager
    def placed(self, stage: Stage, index: int) -> Iterator[None]:
        """Name the cell in an exception that passes (rule 8)."""
        try:
            yield
        except Exception as error:
            name_place(
                error, f"in stage {stage.index} ({stage.name}) at micro-batch {index} of {len(self.micro_batches)}"
            )
            raise

    def inputs(self, stage: Stage, index: int) -> tuple[Sequence[Any], dict[str, Any]]:
        """The positional and keyword arguments of a cell, on the stage's device."""
        micro_batch = self.micro_batches[index]
        args = stage.spread(self._mover.move(self._sources(stage, index, micro_batch), stage.device))
        kwargs = {
            name: self._carry(index, name, value, stage.device)
            for name, value in micro_batch.kwargs.items()
            if stage.takes_keyword(name)
        }
        return args, kwargs

    def compute(self, stage: Stage, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the stage, under its budget where gradients are recorded (rule 7), and keep the result for its readers."""
        under_budget = self.recording and self._budgeted
        recals = stage.budget.recals if under_budget else None
        if recals is None and under_budget and stage.budget.is_fraction:
            recals = stage.budget.resolve(stage.module, tuple(args), kwargs, len(self.micro_batches))
        if self._observer is not None and self.recording:
            result = self._observer.run(stage, index, recals, args, kwargs)
        elif recals is None:
            result = stage.module(*args, **kwargs)
        else:
            result = recals(stage.module, *args, **kwargs)
        if self._readers[stage.index]:
            self._left[stage.index, index] = self._readers[stage.index]
            self._values[stage.index, index] = result
        return result

    def take(self, stage: int, index: int) -> Any:
        """A stage's result; forgotten here when its last reader has taken it."""
        with self._lock:
            value = self._values[stage, index]
            self._left[stage, index] -= 1
            if not self._left[stage, index]:
                del self._values[stage, index], self._left[stage, index]
            return value

    def _sources(self, stage: Stage, index: int, micro_batch: MicroBatch) -> list[Any]:
        taken = {source.stage: self.take(source.stage, index) for source in _unique(stage.sources) if source.stage >= 0}
        inputs: list[Any] = []
        for source in stage.sources:
            if source.stage < 0:
                inputs.append(micro_batch.value if source.item is None else micro_batch.args[source.item])
            else:
                inputs.append(source.pick(taken[source.stage]))
        return inputs

    def _carry(self, index: int, name: str, value: Any, device: torch.device) -> Any:
        # a value that is passed whole is the same object for each micro-batch, and travels once
        whole = index if value is not self.micro_batches[0].kwargs[name] else 0
        key = (whole, name, device)
        with self._lock:
            if key not in self._carried:
                self._carried[key] = self._mover.move(value, device)
            return self._carried[key]


def name_place(error: BaseException, place: str) -> None:
    """Add where it happened to an exception, without changing its type, arguments or traceback (rule 8)."""
    note = f"This was raised {place}."
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # Python 3.10 has no notes: the message is the only text that is shown
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:]) if error.args else (note,)


def _unique(sources: Sequence[Source]) -> Iterator[Source]:
    seen: set[int] = set()
    for source in sources:
        if source.stage not in seen:
            seen.add(source.stage)
            yield source
