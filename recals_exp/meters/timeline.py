"""The live bytes of one step over time, for a picture.

The peak that is reported is measured in another step (`memory.py`), whose definition of live bytes this follows: what the
allocator gave out and got back since the step's start. CPU: events of torch's profiler. CUDA: the allocator's own history.
Other accelerators do not tell.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recals_exp.details import Layer, StepDetails, Timeline, thinned
from recals_exp.meters.device import synchronize
from recals_exp.meters.memory import is_cpu_memory
from recals_exp.meters.steps import Forward, StartingState, StepOutcome, TrainStep
from recals_exp.recals import Analysis
from recals_exp.recals.step_memory import quiet_profiler

Events = list[tuple[float, int]]
"""(seconds since the start, bytes taken or given back), in order of time."""


def step_details(
    analysis: Analysis,
    step: TrainStep,
    state: StartingState,
    wrapped: Forward,
    batch: tuple[Tensor, Tensor],
    resident_bytes: int,
) -> StepDetails:
    """The layers, and the timelines of a plain step and of one under the strategy, each from the same state."""
    layers = tuple(Layer(layer.name, layer.module_type, layer.nbytes) for layer in analysis.layers)
    timelines = []
    for forward in (step.model, wrapped):
        state.restore()
        timelines.append(record_timeline(step, forward, batch))
    state.restore()
    return StepDetails(layers, resident_bytes, *timelines)


def record_timeline(step: TrainStep, forward: Forward, batch: tuple[Tensor, Tensor]) -> Timeline | None:
    """One step, watched; None where the device does not tell."""
    watch = {"cpu": _watch_cpu, "cuda": _watch_cuda}.get(step.device.type)
    if watch is None:
        return None
    gc.collect()
    outcomes: list[StepOutcome] = []
    events = watch(lambda: outcomes.append(step(forward, *batch)), step.device)
    live = list(itertools.accumulate(nbytes for _, nbytes in events))
    times_s, live_bytes = thinned([0.0, *(time_s for time_s, _ in events)], [0, *live])
    phases = outcomes[0].phases
    return Timeline(phases.forward_s, phases.backward_s, phases.optimizer_s, tuple(times_s), tuple(live_bytes))


def _watch_cpu(run: Callable[[], None], device: torch.device) -> Events:
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto: Any = list(profiler.profiler.kineto_results.events())
    start_ns = min((event.start_ns() for event in kineto), default=0)
    found = [((event.start_ns() - start_ns) / 1e9, event.nbytes()) for event in kineto if is_cpu_memory(event)]
    return sorted(found, key=lambda event: event[0])


def _watch_cuda(run: Callable[[], None], device: torch.device) -> Events:
    """The allocator keeps its last events with their times, and needs no stack for that."""
    synchronize(device)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000, device=device)
    try:
        run()
        synchronize(device)
        traces = torch.cuda.memory._snapshot(device)["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
    trace = traces[device.index or 0] if len(traces) > 1 else traces[0]
    signs = {"alloc": 1, "free_completed": -1}
    start_us = min((entry["time_us"] for entry in trace), default=0)
    return [
        ((entry["time_us"] - start_us) / 1e6, signs[entry["action"]] * entry["size"])
        for entry in trace
        if entry["action"] in signs
    ]
