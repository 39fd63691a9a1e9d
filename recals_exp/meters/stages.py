"""The stages of a pipeline in one process: when each worked, and what each held at its peak.

Rules the code follows:

1. Times come from one recorded step, memory from another: the profiler that sees allocations slows a step down.
2. Every allocation belongs to the stage at work when it was made: forward from the stage's call, backward from the first
   gradient of its results. It counts for that stage until it is given back, whoever does so. A stage's peak is the highest sum
   of these, and what it holds throughout: parameters, buffers, optimizer state.
3. With worker threads several stages work at once, and no allocation can be told to belong to one: nothing is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from recals_exp.meters.steps import StartingState, TrainStep, unique_storage_bytes
from recals_exp.pipeline import Event, StageMeasure, forward_orders, ideal_bubble, record, simulate
from recals_exp.pipeline.placed import stage_tensors
from recals_exp.pipeline.stage import Stage
from recals_exp.pipelines import BoundPipeline
from recals_exp.recals import Recals
from recals_exp.recals.step_memory import quiet_profiler
from recals_exp.stagerecords import StageRecord, StagesRecord

METHOD = "what the stage's work allocated (torch profiler), and what it holds throughout"
NOT_MEASURED = "not measured: stages on worker threads allocate at the same time"
_MARK = "pipeline stage "
_NOBODY = -1


def measure_stages(
    step: TrainStep, state: StartingState, bound: BoundPipeline, batch: tuple[Tensor, Tensor]
) -> tuple[StagesRecord, tuple[Event, ...]]:
    """The record of a step's stages, and what ran when in it."""
    pipe = bound.pipe
    state.restore()
    gc.collect()
    bound.reset_stats()
    with record(pipe) as timeline:
        step(bound, *batch)
    threaded = pipe.threads_note == "threads"
    peaks: Mapping[int, int] = {}
    if not threaded:
        state.restore()
        peaks = allocated_peaks(pipe, lambda: step(bound, *batch))
    state.restore()
    resident = [_resident_bytes(stage, step.optimizer) for stage in pipe.stages]
    n_micro_batches = len({event.micro_batch for event in timeline.events if event.kind == "forward"})
    n_stages = len(pipe.stages)
    stages = []
    for stage, place, measure in zip(pipe.stages, bound.layout.stages, timeline.stages(), strict=True):
        recals = stage.budget.recals
        stages.append(
            stage_record(
                measure,
                device=str(stage.device),
                units=place.units,
                budget=place.budget,
                held=n_micro_batches,
                limit_bytes=recals.cache_limit_bytes if isinstance(recals, Recals) else None,
                peak_bytes=None if threaded else resident[stage.index] + peaks.get(stage.index, 0),
            )
        )
    return (
        StagesRecord(
            schedule="threads" if threaded else "in order",
            processes=1,
            replicas=1,
            n_micro_batches=n_micro_batches,
            step_s=span_s(timeline.events),
            bubble_pct=sum(stage.bubble_pct for stage in stages) / n_stages,
            bubble_scheduled_pct=100 * simulate(forward_orders(n_stages, n_micro_batches)).bubble,
            bubble_ideal_pct=100 * ideal_bubble(n_stages, n_micro_batches),
            memory_method=NOT_MEASURED if threaded else METHOD,
            stages=tuple(stages),
        ),
        timeline.events,
    )


def stage_record(
    measure: StageMeasure,
    *,
    device: str,
    units: Sequence[str],
    budget: Any,
    held: int,
    limit_bytes: int | None,
    peak_bytes: int | None,
) -> StageRecord:
    """The library's measure of a stage as a record."""
    return StageRecord(
        stage=measure.stage,
        process=measure.rank,
        device=device,
        units=tuple(units),
        budget="none" if budget is None else "unlimited" if budget == -1 else str(budget),
        micro_batches_held=held,
        cache_limit_bytes=limit_bytes,
        cache_peak_bytes=measure.cache_peak_bytes,
        forward_s=measure.forward_s,
        backward_s=measure.backward_s,
        recompute_s=measure.recompute_s,
        recompute_pct=measure.recompute_pct,
        busy_s=measure.busy_s,
        bubble_pct=100 * measure.bubble,
        peak_memory_bytes=peak_bytes,
    )


def span_s(events: Sequence[Event]) -> float:
    """From the first start to the last end."""
    return max(event.end_s for event in events) - min(event.start_s for event in events) if events else 0.0


# -- memory (rule 2) -------------------------------------------------------------------------------------------------


class _Marks:
    """Leaves a mark in the profile wherever another stage begins to work."""

    def run(self, stage: Stage, micro_batch: int, recals: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        _mark(stage.index)
        result = stage.module(*args, **kwargs) if recals is None else recals(stage.module, *args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(lambda grads: self._backward(stage.index))
        return result

    @staticmethod
    def _backward(stage: int) -> None:
        _mark(stage)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _mark(_NOBODY))


def _mark(stage: int) -> None:
    with record_function(f"{_MARK}{stage}"):
        pass


def allocated_peaks(pipe: Any, run: Callable[[], Any]) -> dict[int, int]:
    """For each stage the most bytes that its work had allocated at once during ``run()``, above what was there before."""
    gc.collect()
    pipe.observe(_Marks())
    try:
        with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        pipe.observe(None)
    devices = {stage.index: stage.device.type for stage in pipe.stages}
    live = dict.fromkeys(devices, 0)
    peaks = dict(live)
    owners: dict[tuple[str, int], int] = {}  # (device, address) -> stage
    current = _NOBODY
    for event in sorted(_flat(profiler.profiler.kineto_results.experimental_event_tree()), key=_start_ns):
        kind, content = event.typed
        if kind == _EventType.Allocation:
            where = (str(content.device), content.ptr)
            if content.alloc_size > 0 and current != _NOBODY and content.device.type == devices[current]:
                owners[where] = current
                live[current] += content.alloc_size
                peaks[current] = max(peaks[current], live[current])
            elif content.alloc_size < 0 and where in owners:
                live[owners.pop(where)] += content.alloc_size
        elif event.name.startswith(_MARK):
            current = int(event.name.removeprefix(_MARK))
    return peaks


def _start_ns(event: Any) -> int:
    return int(event.start_time_ns)


def _flat(events: Sequence[Any]) -> list[Any]:
    """The events of a tree, parents first."""
    found, waiting = [], list(reversed(events))
    while waiting:
        event = waiting.pop()
        found.append(event)
        waiting.extend(reversed(event.children))
    return found


def _resident_bytes(stage: Stage, optimizer: torch.optim.Optimizer) -> int:
    tensors = list(stage_tensors(stage.module))
    kept = [
        value for tensor in tensors for value in optimizer.state.get(tensor, {}).values() if isinstance(value, Tensor)
    ]
    return unique_storage_bytes(iter([*tensors, *kept]))
