"""The record of one run: plain frozen data, written as `result.json`, read back exactly.

Everything a report, a table or a figure shows is read from these records and from nothing else, so a sweep can be
reported on another machine, later, or while it is still going on.

Rules the code follows:

1. Units stand in the names: `_bytes` (whole bytes), `_s` (seconds), `_pct` (percent, 16.7 means 16.7 %), `_flops`
   (floating-point operations). Nothing is stored in GiB or ms; those are for printing.
2. `None` means "not measured", with the reason in `status` and `error`. It never stands for zero.
3. JSON is exact: floats are written in their shortest round-tripping form, NaN and infinities are refused, unknown
   and missing keys are errors that list all of them at once.
4. `COLUMNS` is the one place that says what a report shows and in which order. A new column is appended here and is a
   field of `RunResult`; a test checks the two agree.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recals_exp.codec import build, leaves, plain
from recals_exp.stagerecords import StagesRecord

FORMAT_VERSION = 5
"""Raised when a field is added, removed or changes its meaning."""

RESULT_FILE = "result.json"
"""The record's name in a job's folder."""

OK = "ok"
FAILED = "failed"
RUNNING = "running"
STATUSES = (OK, FAILED, RUNNING)
"""`running` is what a job writes when it starts; a record that still says so later is that of a killed job."""

COLUMNS: tuple[str, ...] = (
    "job",
    "status",
    "model",
    "dataset",
    "pipeline",
    "policy",
    "budget",
    "cache_total_bytes",
    "cache_limit_bytes",
    "cache_peak_bytes",
    "step_time_plain_s",
    "step_time_s",
    "time_overhead_pct",
    "time_overhead_low_pct",
    "time_overhead_high_pct",
    "recompute_flops_pct",
    "documented_overhead_pct",
    "peak_memory_plain_bytes",
    "peak_memory_bytes",
    "gradients_identical",
    "error",
    "predicted_overhead_pct",
    "bound_overhead_pct",
    "bubble_pct",
    "bubble_ideal_pct",
    "strategy",
    "samples_per_s",
    "speed_vs_plain",
    "batch_size",
)
"""The columns of every report, in order (rule 4)."""


@dataclass(frozen=True)
class PhaseTimes:
    """Where a step's time goes. Medians over the measured pairs, so they need not add up to the median step."""

    forward_s: float  # the model's forward call and the loss
    backward_s: float  # loss.backward(), recomputation included
    optimizer_s: float  # optimizer.step() and clearing the gradients


@dataclass(frozen=True)
class TimingRecord:
    """Step times in interleaved pairs (plain, under the strategy), each step from the same weights, batch and random
    state.
    """

    warmup_steps: int  # steps of each kind before the first pair, not recorded
    plain_s: tuple[float, ...]  # one whole plain step per pair
    wrapped_s: tuple[float, ...]  # its partner under the strategy
    ratios: tuple[float, ...]  # wrapped / plain, per pair
    interval_coverage_pct: float  # what the interval really covers: the 95 % asked for or, with few pairs, less
    plain: PhaseTimes
    wrapped: PhaseTimes | None  # None where phases overlap: a pipeline over processes
    backward_forward_ratio: float  # backward_s / forward_s of the plain step: 2 in the documented model
    expected_overhead_pct: (
        float | None
    )  # FIFO's overhead given the measured phases; None where FIFO's formula does not apply
    losses_identical: bool  # in every pair, both steps gave the same loss bits


@dataclass(frozen=True)
class MemoryRecord:
    """Peaks of one training step (forward, backward, optimizer).

    `peak_memory_*_bytes` of the run = resident_bytes + step_peak_*_bytes: the allocator's live bytes at their
    highest.
    """

    method: str  # how the step peak was read
    resident_bytes: int  # live throughout: parameters, buffers, optimizer state, the batch; each storage once
    step_peak_plain_bytes: int  # highest live bytes above the step's start, plain
    step_peak_bytes: int  # the same under the strategy
    process_method: str  # how the process peak was read
    process_start_plain_bytes: int  # resident set of the process when the plain step starts
    process_peak_plain_bytes: int  # its highest resident set during that step
    process_start_bytes: int  # the same under the strategy
    process_peak_bytes: int
    resident_plain_bytes: int | None = None  # of the plain step, where it holds others: a pipeline over processes


@dataclass(frozen=True)
class FlopsRecord:
    """FLOPs of whole steps, counted by `torch.utils.flop_counter` (matrix products, convolutions, attention; nothing
    else).
    """

    plain_flops: int
    wrapped_flops: int
    recomputed_flops: int  # wrapped - plain
    engine_recomputed_flops: int | None  # what the strategy says it re-ran in that step; None if it does not say
    overhead_pct: float | None  # recomputed / plain; None if the plain step has no countable FLOPs


@dataclass(frozen=True)
class CacheRecord:
    """The engine's own account of one measured step."""

    unit_max_bytes: int  # largest cache of one leaf layer
    peak_cached_bytes: int
    peak_working_bytes: int  # the most that replays held beside the cache
    pinned_bytes: int  # cannot be rebuilt, always held
    dropped_bytes: int
    dropped_values: int
    recomputed_bytes: int  # of the saved values that were rebuilt
    recomputed_ops: int
    replays: int


@dataclass(frozen=True)
class ParityRecord:
    """One step under the strategy against a plain one, on copies of the model: same weights, batch, random state."""

    outputs_identical: bool
    loss_identical: bool
    gradients_identical: bool
    buffers_identical: bool
    generators_identical: bool  # torch (CPU and accelerator), Python's and NumPy's, after backward
    differences: tuple[str, ...]  # what differs, by name, with the largest difference
    plain_reproducible: bool | None  # after a difference: does plain equal plain here? None if that was not needed


@dataclass(frozen=True)
class TrainingRecord:
    """Real training under the strategy."""

    losses: tuple[float, ...]  # one per step, before that step's update
    first_loss: float
    last_loss: float
    wall_s: float
    accuracy_pct: float | None = None  # of the held-out samples, after training; None if none are held out
    plain_accuracy_pct: float | None = None  # the same after plain training on the same batches
    equals_plain: bool | None = None  # every loss, weight and buffer of that training is the same, to the last bit


@dataclass(frozen=True)
class StrategyRecord:
    """What the strategy says of itself, and what it was applied to."""

    needs: str
    changes: str  # beside time and memory
    blocks: tuple[str, ...]  # names of the modules it treats one by one; empty: the model as a whole


@dataclass(frozen=True)
class BaselineRecord:
    """The strategy against its own baseline: the same machinery without the memory saving (compiled code)."""

    name: str
    step_time_s: float  # median, of the baseline
    time_overhead_pct: float  # of the strategy over this baseline: 100 * (median of the pairs' time ratios - 1)
    peak_memory_bytes: int  # of a step under the baseline
    gradients_identical: bool  # the strategy's to the baseline's, to the last bit


@dataclass(frozen=True)
class BatchSearchRecord:
    """How the largest batch within plain's peak was found; the record's own fields are of the step at that batch."""

    plain_batch_size: int  # whose plain step sets the peak, and is the partner of the timed pairs
    target_peak_bytes: int
    too_large: int | None  # the smallest batch that was seen not to fit; None: all that were tried fit
    tries: tuple[tuple[int, ...], ...]  # (batch size, peak in bytes; 0: out of memory) in the order of measuring


@dataclass(frozen=True)
class EnvironmentRecord:
    """What the numbers were measured on."""

    python: str
    platform: str
    processor: str
    cpu_count: int
    memory_bytes: int | None
    accelerator: str | None  # its name, or None
    packages: Mapping[str, str]  # package -> version
    git_commit: str | None  # of this package's checkout, "-dirty" appended when it has changes


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One job. The first fields are the report's columns, in order; the rest is for the reader who asks why."""

    job: str  # the job's folder name
    status: str  # one of STATUSES
    model: str
    dataset: str
    pipeline: str
    policy: str
    budget: str  # as asked for: "0.25", "512MiB", "none"
    cache_total_bytes: int | None = None  # what the model caches without a limit (analysed)
    cache_limit_bytes: int | None = None  # None: no limit
    cache_peak_bytes: int | None = None  # highest cached bytes in a step under the strategy
    step_time_plain_s: float | None = None  # median
    step_time_s: float | None = None  # median
    time_overhead_pct: float | None = None  # 100 * (median of the pairs' time ratios - 1)
    time_overhead_low_pct: float | None = None  # 95 % interval of that median
    time_overhead_high_pct: float | None = None
    recompute_flops_pct: float | None = None  # FLOPs re-run, of a plain step's FLOPs
    documented_overhead_pct: float | None = None  # 100 * (1/b - 1) / 6 at budget fraction b = limit / total
    peak_memory_plain_bytes: int | None = None  # MemoryRecord says what a peak is
    peak_memory_bytes: int | None = None
    gradients_identical: bool | None = None  # every gradient of one step, to the last bit
    error: str | None = None  # one line; the traceback is in the job's log
    predicted_overhead_pct: float | None = None  # ops re-run, percent of a step; measured costs: and the engine itself
    bound_overhead_pct: float | None = None  # no policy costs less within the limit (same unit)
    bubble_pct: float | None = None  # of a pipeline: the idle share of its workers in one step
    bubble_ideal_pct: float | None = None  # (n-1)/(m+n-1) for n workers and m micro-batches
    strategy: str
    samples_per_s: float | None = None  # batch_size / step_time_s
    speed_vs_plain: float | None = None  # 1 / median of the pairs' time ratios, per sample: 2 is twice as fast as plain
    batch_size: int  # of the step under the strategy

    device: str
    seed: int
    threads: int | None = None
    autocast: str | None = None
    timing: TimingRecord | None = None
    memory: MemoryRecord | None = None
    flops: FlopsRecord | None = None
    cache: CacheRecord | None = None
    parity: ParityRecord | None = None
    training: TrainingRecord | None = None
    strategy_says: StrategyRecord | None = None
    batch_search: BatchSearchRecord | None = None
    planning_s: float | None = None  # to plan the step and to price the plan; None for policies that plan nothing
    baseline: BaselineRecord | None = None  # None: the strategy's baseline is plain eager PyTorch
    environment: EnvironmentRecord | None = None
    stages: StagesRecord | None = None  # of a pipeline
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the resolved run configuration
    notes: tuple[str, ...] = ()  # what a reader must know of how it was measured
    started_at: str | None = None  # UTC, ISO 8601
    wall_s: float | None = None  # the whole job
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}; it must be one of {', '.join(STATUSES)}")
        if self.status == FAILED and not self.error:
            raise ValueError(f"job {self.job!r} has status 'failed' but no error; say in one line what happened")

    def row(self) -> dict[str, Any]:
        """The report's row: column -> value."""
        return {column: getattr(self, column) for column in COLUMNS}

    def budget_fraction(self) -> float | None:
        """The limit as a fraction of the analysed total; 1 without a limit, None before the analysis.

        Where the budget is no limit in bytes but a share with a meaning of its own (compiled code), that share.
        """
        if not self.cache_total_bytes:
            return None
        if self.cache_limit_bytes is None:
            return float(self.budget) if self.budget[:1].isdigit() and self.budget[-1:].isdigit() else 1.0
        return min(1.0, self.cache_limit_bytes / self.cache_total_bytes)


def documented_overhead_pct(fraction: float) -> float:
    """The documented cost of a FIFO budget: layers of equal cost, backward = 2 x forward, so +(1/b - 1)/6 of a step."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a budget fraction lies in (0, 1]; got {fraction}")
    return 100 * (1 / fraction - 1) / 6


def fifo_rerun_forwards(fraction: float) -> float:
    """Forwards that FIFO re-runs on a uniform chain, for any budget fraction b.

    Backward finds the newest b of the chain held; each miss then re-runs the chain from its start up to the newest dropped
    value: (1 - b) + (1 - 2b) + ... For a whole number 1/b that is the documented (1/b - 1)/2. In between it is more:
    0.25 at b = 0.75, where the formula gives 0.17 though the dropped quarter must be re-run once at the least.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"a budget fraction lies in (0, 1]; got {fraction}")
    misses = math.ceil(1 / fraction - 1e-9) - 1
    return misses - fraction * misses * (misses + 1) / 2


def expected_overhead_pct(fraction: float, phases: PhaseTimes) -> float:
    """FIFO's cost on a uniform chain given what the phases really take: the re-run forwards, in percent of a plain step."""
    step_s = phases.forward_s + phases.backward_s + phases.optimizer_s
    return 100 * fifo_rerun_forwards(fraction) * phases.forward_s / step_s


def to_json(result: RunResult) -> str:
    """Text that `from_json` turns back into an equal record."""
    try:
        return json.dumps(plain(result), indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        bad = [name for name, value in leaves(result, "") if isinstance(value, float) and not math.isfinite(value)]
        raise ValueError(
            f"a record holds finite numbers only, but {', '.join(bad) or 'a value'} is not: {error}"
        ) from error


def from_json(text: str) -> RunResult:
    """The record written by `to_json`. ValueError says which keys are unknown, missing or of a wrong type."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a result record: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"not a result record: a JSON object is expected, got {type(data).__name__}")
    if data.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(
            f"the record has format_version {data['format_version']!r}, this version reads {FORMAT_VERSION}; "
            "run the job again, or read it with the version that wrote it"
        )
    return build(RunResult, data, "")


def save(result: RunResult, folder: Path) -> Path:
    """Write `folder/result.json`; a reader never sees half a record."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULT_FILE
    partial = folder / f".{RESULT_FILE}.{os.getpid()}"
    partial.write_text(to_json(result), encoding="utf-8")
    partial.replace(path)
    return path


def load(path: Path) -> RunResult:
    """The record in a file, or in a job's folder."""
    if path.is_dir():
        path = path / RESULT_FILE
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def describe_error(error: BaseException) -> str:
    """One line for the `error` column: the kind and the message, without its line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
