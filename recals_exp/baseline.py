"""A strategy against its own baseline: compiled code with a budget against compiled code without.

Against plain eager PyTorch such a strategy shows two things at once, what compiling gives and what saving memory costs. The own
baseline tells them apart: same machinery, same bits expected, measured in interleaved pairs of its own.
"""

from __future__ import annotations

import statistics

from torch import Tensor

from recals_exp.meters.memory import step_peak_bytes
from recals_exp.meters.parity import check_parity
from recals_exp.meters.steps import StartingState, TrainStep, unique_storage_bytes
from recals_exp.meters.timing import measure_pairs
from recals_exp.records import BaselineRecord
from recals_exp.strategies import BoundStrategy, Strategy


def compare_with_baseline(
    step: TrainStep,
    state: StartingState,
    strategy: Strategy,
    bound: BoundStrategy,
    limit: float | None,
    batch: tuple[Tensor, Tensor],
    seed: int,
    warmup_steps: int,
    pairs: int,
) -> BaselineRecord | None:
    """None where the strategy's baseline is plain eager PyTorch. `bound` is the strategy on the step's model."""
    baseline = strategy.own_baseline()
    if baseline is None:
        return None
    parity = check_parity(
        step,
        lambda model: strategy.bind(model, limit),
        batch,
        seed,
        baseline=lambda model: baseline.bind(model, None),
    )
    without = baseline.bind(step.model, None)
    for _ in range(max(1, warmup_steps)):  # the first compiles
        state.restore()
        step(without, *batch)
    state.restore()
    resident_bytes = unique_storage_bytes(step.resident_tensors(*batch))
    step_bytes = step_peak_bytes(lambda: _discard(step(without, *batch)), step.device)
    timing = measure_pairs(step, state, bound, batch, pairs, baseline=without)
    return BaselineRecord(
        name=f"{baseline.name} without saving",
        step_time_s=statistics.median(timing.plain_s),
        time_overhead_pct=100 * (statistics.median(timing.ratios) - 1),
        peak_memory_bytes=resident_bytes + step_bytes,
        gradients_identical=parity.gradients_identical,
    )


def _discard(_: object) -> None:
    pass
