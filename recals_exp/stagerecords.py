"""What each stage of a pipeline did in one step: the part of a job's record that only pipelines have.

The rules of ``records`` hold: plain frozen data, units in the names, None for what was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageRecord:
    """One stage in one recorded step."""

    stage: int
    process: int  # the rank it ran on; 0 in one process
    device: str
    units: tuple[str, ...]  # of the model, in the order they run
    budget: str  # as asked for: "0.25", "512MiB", "none"
    micro_batches_held: int  # the most it has between forward and backward at once
    cache_limit_bytes: int | None  # None: no limit
    cache_peak_bytes: int | None  # highest cached bytes in the step; None without a budget
    forward_s: float
    backward_s: float  # recomputation included
    recompute_s: float
    recompute_pct: float  # of the stage's time without it
    busy_s: float  # forward and backward
    bubble_pct: float  # of the step, in which the stage's worker did nothing
    peak_memory_bytes: int | None  # StagesRecord.memory_method says of what


@dataclass(frozen=True)
class StagesRecord:
    """All stages of a pipeline, and the step as a whole."""

    schedule: str  # "in order", "threads", or one over processes such as "1f1b"
    processes: int  # of one pipeline
    replicas: int
    n_micro_batches: int  # of one pipeline; the time steps of a rate-coded model
    step_s: float  # from the first start to the last end
    bubble_pct: float  # the idle share of all workers
    bubble_scheduled_pct: float  # the same on paper: equal stages, a backward of two forwards
    bubble_ideal_pct: float  # (n-1)/(m+n-1) for n workers and m micro-batches
    memory_method: str
    stages: tuple[StageRecord, ...]
