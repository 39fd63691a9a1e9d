"""mode=dry_run: what a job would take in time and memory, from one recorded step; nothing is trained.

Rules the code follows:

1. Memory is the engine's prediction (`recals/prediction.py`) for its own policies; for any other strategy it is that of plain
   steps, an upper bound.
2. Time is the number of steps that the job makes, by the time of a plain step, with the predicted recomputation, and `RECORDING`
   for what watching ops costs. Good to a factor of two: machines are busy, and first calls are slow.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from torch import Tensor

from recals_exp.estimates import FILE, TABLE_FILE, Estimate, format_estimates
from recals_exp.meters.memory import step_peak_bytes
from recals_exp.meters.steps import StartingState, TrainStep, unique_storage_bytes
from recals_exp.recals.prediction import Profile, predicted_overhead_pct
from recals_exp.runconfig import RunConfig

RECORDING = 1.3
"""A step under the engine beside a plain one, recomputation apart; with small ops more."""

_PLAIN_STEPS = 9  # of analysis, parity, prediction, memory, FLOPs, timeline
_WRAPPED_STEPS = 7


def measure_estimate(
    config: RunConfig,
    step: TrainStep,
    state: StartingState,
    batch: tuple[Tensor, Tensor],
    profile: Profile | None,
    limit_bytes: int | None,
    so_far_s: float,
) -> Estimate:
    """The estimate of one job. `profile` is None where the strategy is not the engine's; `so_far_s` is what building took."""
    times = []
    for _ in range(3):
        state.restore()
        times.append(step(step.model, *batch).step_s)
    state.restore()
    resident = unique_storage_bytes(step.resident_tensors(*batch))
    plain_bytes = resident + step_peak_bytes(lambda: _discard(step(step.model, *batch)), step.device)
    overhead_pct, peak_bytes = None, plain_bytes
    if profile is not None:
        policy = "dtr" if config.policy == "planned" else config.policy  # a plan takes longer than an estimate may
        overhead_pct = predicted_overhead_pct(profile.record, limit_bytes, policy)
        peak_bytes = profile.memory.peak_bytes(profile.record, limit_bytes, policy)
    step_s = min(times)
    is_measured = profile is not None and profile.record.cost_unit == "s"  # then recording is in the prediction
    wrapped_s = step_s * (1.0 if is_measured else RECORDING) * (1 + (overhead_pct or 0.0) / 100)
    both = config.warmup_steps + config.timing_pairs
    job_s = so_far_s + step_s * (_PLAIN_STEPS + both) + wrapped_s * (_WRAPPED_STEPS + both + config.train_steps)
    return Estimate(step_s, job_s, plain_bytes, peak_bytes, limit_bytes, overhead_pct)


def _discard(_: object) -> None:
    pass


def write_estimate(estimate: Estimate, job: str, folder: Path) -> str:
    """Write the files and return the table."""
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(estimate)) + "\n", encoding="utf-8")
    table = format_estimates({job: estimate})
    (folder / TABLE_FILE).write_text(table + "\n", encoding="utf-8")
    return table
