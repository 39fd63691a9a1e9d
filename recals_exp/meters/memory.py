"""The peak of one step: what the allocator had live, and what the process had resident.

Why two: the allocator's peak is exact and repeats to the byte, but sees tensors only. The process's resident set is
what an out-of-memory killer looks at; it also holds scratch memory of libraries and what malloc has not given back,
and is noisy.

Rules the code follows:

1. The allocator's peak of a step is the highest number of live bytes above those at the step's start, from the first
   operation of forward to the end of the optimizer. Adding the bytes that are alive throughout (parameters, buffers,
   optimizer state, batch; each storage once) gives the peak that is reported. It is the same definition on every
   device, and does not depend on what else a process holds.
2. CPU: every allocation and release is an event of torch's profiler (`profile_memory`), summed up in order of time.
   Operators' own temporaries are in it. Accelerators: their allocator keeps the peak itself (`max_memory_allocated`).
3. The process's peak is taken in another step, which carries no profiler. Before it, free memory goes back to the
   system.
4. Neither is ever taken in a timed step.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recals_exp.meters.device import synchronize
from recals_exp.meters.heap import return_free_memory
from recals_exp.meters.steps import Forward, StartingState, TrainStep, unique_storage_bytes
from recals_exp.recals.step_memory import quiet_profiler
from recals_exp.records import MemoryRecord

CPU_METHOD = "torch profiler memory events"
ACCELERATOR_METHOD = "torch.accelerator.max_memory_allocated"


def measure_memory(
    step: TrainStep, state: StartingState, wrapped: Forward, batch: tuple[Tensor, Tensor]
) -> MemoryRecord:
    """Peaks of a plain step and of a step under the strategy, each from the same state."""
    peaks: dict[str, int] = {}
    process: dict[str, ProcessPeak] = {}
    for name, forward in (("plain", step.model), ("wrapped", wrapped)):

        def one_step(forward: Forward = forward) -> None:
            step(forward, *batch)

        state.restore()
        peaks[name] = step_peak_bytes(one_step, step.device)
        state.restore()
        process[name] = process_peak(one_step)
    state.restore()
    return MemoryRecord(
        method=CPU_METHOD if step.device.type == "cpu" else ACCELERATOR_METHOD,
        resident_bytes=unique_storage_bytes(step.resident_tensors(*batch)),
        step_peak_plain_bytes=peaks["plain"],
        step_peak_bytes=peaks["wrapped"],
        process_method=process["wrapped"].method,
        process_start_plain_bytes=process["plain"].start_bytes,
        process_peak_plain_bytes=process["plain"].peak_bytes,
        process_start_bytes=process["wrapped"].start_bytes,
        process_peak_bytes=process["wrapped"].peak_bytes,
    )


def step_peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Highest live bytes during `run()` above those at its start (rules 1 and 2)."""
    gc.collect()
    if device.type == "cpu":
        live = peak = 0
        for change in allocation_events(run):
            live += change
            peak = max(peak, live)
        return peak
    synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    start = torch.accelerator.memory_allocated(device)
    run()
    synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - start


def allocation_events(run: Callable[[], None]) -> list[int]:
    """Bytes taken (positive) and given back (negative) on the CPU while `run()` runs, in order of time.

    Memory taken before and given back inside is not seen. A step gives back nothing of the kind: it starts without
    gradients.
    """
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto = profiler.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in kineto.events() if is_cpu_memory(event)]
    changes.sort(key=lambda change: change[0])  # stable: events of one nanosecond stay as they came
    return [nbytes for _, nbytes in changes]


def is_cpu_memory(event: object) -> bool:
    """Whether an event of the profiler is memory taken or given back on the CPU."""
    return event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU  # type: ignore[attr-defined]


# -- the process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessPeak:
    """The resident set around one call."""

    start_bytes: int
    peak_bytes: int
    method: str


def process_peak(run: Callable[[], None], interval_s: float = 0.002) -> ProcessPeak:
    """The highest resident set of this process during `run()` (rule 3).

    Linux resets and keeps the peak itself. Where that is not allowed, and elsewhere, a thread looks every
    `interval_s`.
    """
    gc.collect()
    return_free_memory()
    if _reset_high_water_mark():
        start = resident_bytes()
        run()
        return ProcessPeak(start, max(start, _status_bytes("VmHWM")), "VmHWM")
    start = resident_bytes()
    with _Sampler(interval_s) as sampler:
        run()
    return ProcessPeak(
        start, max(start, sampler.peak_bytes, resident_bytes()), f"resident set sampled every {1000 * interval_s:g} ms"
    )


def resident_bytes() -> int:
    """The resident set of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class _Sampler:
    """A thread that looks at the resident set until told to stop."""

    def __init__(self, interval_s: float) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="resident-set-sampler", daemon=True)

    def _look(self) -> None:
        while not self._done.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()


def _reset_high_water_mark() -> bool:
    """Ask Linux to start VmHWM anew; False where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")
