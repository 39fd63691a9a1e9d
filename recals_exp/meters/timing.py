"""Step times in interleaved pairs, and what a median of ratios is worth.

Why not time one after the other: on a shared machine the speed drifts by more than what is measured (a case seen:
1.45x taken one after the other, 1.16x in pairs). The two steps of a pair stand next to each other, so the drift
cancels in their ratio; the order within a pair alternates, so being first favours nobody.

Rules the code follows:

1. Nothing is switched on during a timed step: no profiler, no counter, no hooks.
2. The garbage collector runs between steps, never within one. What is alive when the timing starts is frozen
   (`gc.freeze`), so that a collection costs little and looks only at what the steps made. Where the program has
   frozen objects itself, nothing more is: `gc.unfreeze` would thaw the program's, too.
3. Every timed step starts from the same state and batch, so in a pair both must give the same loss bits. That is
   checked.
4. The interval is that of the median itself, from order statistics (binomial with p = 1/2): no distribution is
   assumed, no random number is drawn. With few pairs 95 % cannot be had; the record says what was.
5. What a step frees stays with the process (`heap.py`).
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from recals_exp.meters.heap import freed_memory_kept
from recals_exp.meters.parity import same_bits
from recals_exp.meters.steps import Forward, StartingState, StepOutcome, TrainStep
from recals_exp.records import PhaseTimes, TimingRecord, expected_overhead_pct


@contextmanager
def steady_process() -> Iterator[Callable[[], None]]:
    """Automatic collection off, freed memory kept (rules 2 and 5); yields the function to call between steps."""
    was_enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()

    def collect() -> None:
        gc.collect()

    try:
        with freed_memory_kept():
            yield collect
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def measure_pairs(
    step: TrainStep,
    state: StartingState,
    wrapped: Forward,
    batch: tuple[Tensor, Tensor],
    pairs: int,
    *,
    warmup_steps: int = 0,
    fifo_fraction: float | None = None,
    on_pair: Callable[[int, StepOutcome, StepOutcome], None] = lambda index, plain, wrapped: None,
    baseline: Forward | None = None,
) -> TimingRecord:
    """Time `pairs` pairs, in which the plain step calls the model, or `baseline`.

    `fifo_fraction` is the budget fraction where FIFO's expected overhead applies, else None.
    """
    if pairs < 1:
        raise ValueError(f"timing needs at least one pair; got timing_pairs={pairs}")
    plain_forward = step.model if baseline is None else baseline
    plain_steps: list[StepOutcome] = []
    wrapped_steps: list[StepOutcome] = []

    def run(forward: Forward, outcomes: list[StepOutcome]) -> None:
        state.restore()
        collect()
        outcomes.append(step(forward, *batch))

    losses_identical = True
    with steady_process() as collect:
        for index in range(pairs):
            order: list[tuple[Forward, list[StepOutcome]]] = [(plain_forward, plain_steps), (wrapped, wrapped_steps)]
            for forward, outcomes in order if index % 2 == 0 else reversed(order):
                run(forward, outcomes)
            losses_identical &= same_bits(plain_steps[-1].loss, wrapped_steps[-1].loss)
            on_pair(index, plain_steps[-1], wrapped_steps[-1])
    state.restore()

    plain, under = _median_phases(plain_steps), _median_phases(wrapped_steps)
    ratios = tuple(w.step_s / p.step_s for p, w in zip(plain_steps, wrapped_steps, strict=True))
    return TimingRecord(
        warmup_steps=warmup_steps,
        plain_s=tuple(outcome.step_s for outcome in plain_steps),
        wrapped_s=tuple(outcome.step_s for outcome in wrapped_steps),
        ratios=ratios,
        interval_coverage_pct=100 * median_interval(ratios)[2],
        plain=plain,
        wrapped=under,
        backward_forward_ratio=plain.backward_s / plain.forward_s,
        expected_overhead_pct=None if fifo_fraction is None else expected_overhead_pct(fifo_fraction, plain),
        losses_identical=losses_identical,
    )


def _median_phases(outcomes: Sequence[StepOutcome]) -> PhaseTimes:
    return PhaseTimes(
        statistics.median(outcome.phases.forward_s for outcome in outcomes),
        statistics.median(outcome.phases.backward_s for outcome in outcomes),
        statistics.median(outcome.phases.optimizer_s for outcome in outcomes),
    )


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float, float]:
    """(low, high, coverage it has) for the median: the narrowest symmetric pair of order statistics that covers enough.

    P(x_(k) <= median <= x_(n+1-k)) = 1 - 2 P(Bin(n, 1/2) < k). With n < 6 even smallest to largest covers less than
    95 %: then that is the interval, and the third number says what it covers.
    """
    if not values:
        raise ValueError("the median of no values has no interval")
    ordered = sorted(values)
    n = len(ordered)
    best = 1
    for k in range(1, n // 2 + 1):
        if _covered(n, k) >= coverage:
            best = k
    return ordered[best - 1], ordered[n - best], _covered(n, best)


def _covered(n: int, k: int) -> float:
    """1 - 2 P(Bin(n, 1/2) <= k - 1), in whole numbers until the last division."""
    below = sum(math.comb(n, i) for i in range(k))
    return max(0.0, (2**n - 2 * below) / 2**n)
