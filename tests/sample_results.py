"""Records as a sweep would leave them, made by hand: report and writers are tested without running a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from recals_exp import records
from recals_exp.records import (
    BaselineRecord,
    BatchSearchRecord,
    CacheRecord,
    EnvironmentRecord,
    FlopsRecord,
    MemoryRecord,
    ParityRecord,
    PhaseTimes,
    RunResult,
    StrategyRecord,
    TimingRecord,
    TrainingRecord,
)
from recals_exp.stagerecords import StageRecord, StagesRecord

MIB = 1024**2
BASELINE = BaselineRecord("compile without saving", 0.25, 24.0, 90 * MIB, True)
BATCH_SEARCH = BatchSearchRecord(8, 100 * MIB, 20, ((8, 50 * MIB), (20, 101 * MIB)))


def finished(fraction: float, **changes: Any) -> RunResult:
    """A finished job of a uniform chain at this budget, with FIFO's documented figures and a little noise."""
    total = 64 * MIB
    limit = int(fraction * total)
    documented = records.documented_overhead_pct(fraction)
    plain = PhaseTimes(forward_s=0.1, backward_s=0.2, optimizer_s=0.01)
    ratios = tuple(1 + (documented + noise) / 100 for noise in (-1.5, -0.5, 0.25, 0.5, 1.0, 2.0, 3.0))
    fields: dict[str, Any] = {
        "job": f"budget={fraction}",
        "status": records.OK,
        "model": "mlp_chain",
        "dataset": "digits",
        "pipeline": "none",
        "policy": "fifo",
        "budget": f"{fraction:g}",
        "cache_total_bytes": total,
        "cache_limit_bytes": limit,
        "cache_peak_bytes": limit - 17,
        "step_time_plain_s": 0.31,
        "step_time_s": 0.31 * (1 + documented / 100),
        "time_overhead_pct": documented + 0.5,
        "time_overhead_low_pct": documented - 1.5,
        "time_overhead_high_pct": documented + 3.0,
        "recompute_flops_pct": documented + 0.25,
        "documented_overhead_pct": documented,
        "peak_memory_plain_bytes": 100 * MIB,
        "peak_memory_bytes": 100 * MIB - total + limit,
        "gradients_identical": True,
        "predicted_overhead_pct": documented + 0.125,
        "bound_overhead_pct": documented / 2,
        "bubble_pct": 25.5,
        "bubble_ideal_pct": 20.0,
        "strategy": "recals",
        "samples_per_s": 32 / (0.31 * (1 + documented / 100)),
        "speed_vs_plain": 1 / (1 + (documented + 0.5) / 100),
        "batch_size": 32,
        "device": "cpu",
        "seed": 0,
        "threads": 1,
        "timing": TimingRecord(
            warmup_steps=1,
            plain_s=(0.31,) * 7,
            wrapped_s=tuple(0.31 * ratio for ratio in ratios),
            ratios=ratios,
            interval_coverage_pct=98.4375,
            plain=plain,
            wrapped=dataclasses.replace(plain, backward_s=0.2 + 0.31 * documented / 100),
            backward_forward_ratio=2.0,
            expected_overhead_pct=records.expected_overhead_pct(fraction, plain),
            losses_identical=True,
        ),
        "memory": MemoryRecord(
            "torch profiler memory events", 20 * MIB, 80 * MIB, 80 * MIB - total + limit, "VmHWM", 1, 2, 3, 4
        ),
        "flops": FlopsRecord(3000, 3000 + int(30 * documented), int(30 * documented), int(30 * documented), documented),
        "cache": CacheRecord(MIB, limit - 17, MIB, 0, total - limit, 10, total - limit, 10, 3),
        "parity": ParityRecord(True, True, True, True, True, (), None),
        "training": TrainingRecord((2.3, 1.9, 0.1 + 0.2), 2.3, 0.1 + 0.2, 1.25, 91.5, 91.5, True),
        "stages": StagesRecord(
            "1f1b",
            2,
            1,
            4,
            0.5,
            25.5,
            20.0,
            20.0,
            "torch profiler memory events",
            (
                StageRecord(
                    0, 0, "cpu", ("a", "b"), "0.25", 2, 4 * MIB, 4 * MIB, 0.1, 0.3, 0.1, 33.3, 0.4, 20.0, 50 * MIB
                ),
                StageRecord(1, 1, "cpu", ("c",), "none", 1, None, None, 0.1, 0.2, 0.0, 0.0, 0.3, 40.0, None),
            ),
        ),
        "planning_s": 0.75,
        "strategy_says": StrategyRecord("an eager model", "nothing", ("blocks.0", "blocks.1")),
        "environment": EnvironmentRecord(
            "3.12.1", "Linux", "a processor", 2, 8 * 1024 * MIB, None, {"torch": "2.14.1"}, None
        ),
        "config": {"budget": f"{fraction:g}", "model": {"name": "mlp_chain", "kwargs": {"depth": 8}}, "autocast": None},
        "started_at": "2030-01-01T00:00:00+00:00",
        "wall_s": 4.5,
    }
    return RunResult(**{**fields, **changes})


def failed(
    job: str = "budget=0.001", error: str = "CacheLimitError: limit 1 B, needed 2 B", **changes: Any
) -> RunResult:
    """A job that raised before anything was measured."""
    fields: dict[str, Any] = {
        "job": job,
        "status": records.FAILED,
        "model": "mlp_chain",
        "dataset": "digits",
        "pipeline": "none",
        "policy": "fifo",
        "budget": "0.001",
        "error": error,
        "strategy": "recals",
        "device": "cpu",
        "batch_size": 32,
        "seed": 0,
    }
    return RunResult(**{**fields, **changes})


def save_sweep(folder: Path, results: list[RunResult]) -> Path:
    """One job folder per record."""
    for result in results:
        records.save(result, folder / result.job)
    return folder
