"""The largest batch whose step stays within a fixed peak, and how fast it trains: memory saved, spent on samples.

The peak is that of the plain step at the configured batch size. The batch is found by measuring peaks, never from a model of
them: what is reported fits, and a batch that was seen not to fit lies close above it.

Rules the code follows:

1. Peaks grow with the batch; that is all that is assumed. A straight line through the two nearest measurements says where
   to look next, and the bracket between what fits and what does not keeps it honest.
2. A batch is large enough when one that does not fit is at most `CLOSE` of it away, or one sample.
3. Throughputs compare in interleaved pairs: a plain step at the configured batch size, a step under the strategy at the batch
   found. Ratios are per sample.
4. Running out of memory is not fitting.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recals_exp.meters.parity import check_parity
from recals_exp.meters.steps import StartingState, TrainStep
from recals_exp.meters.timing import median_interval, steady_process
from recals_exp.predict import amid_training, measured_peak_bytes
from recals_exp.records import BatchSearchRecord
from recals_exp.strategies import Strategy, make_strategy

CLOSE = 1 / 32
MOST = 1 << 20  # samples: where the search ends if everything fits
_GROWTH = 4  # at most, from one try to the next

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Found:
    """The largest batch that fits, and the smallest one seen not to fit (None: all that were tried fit)."""

    batch_size: int
    peak_bytes: int
    too_large: int | None
    tries: tuple[tuple[int, int], ...]  # (batch size, peak) in the order of measuring; a peak of 0 is "out of memory"


def largest_batch(target_bytes: int, peak_of: Callable[[int], int | None], start: int, most: int = MOST) -> Found:
    """Search (rules 1 and 2). `peak_of` measures a step's peak at a batch size; None is out of memory.

    Raises:
        ValueError: not even one sample fits.
    """
    tries: dict[int, int | None] = {}
    fits, too_large = 0, most + 1

    def measure(size: int) -> None:
        nonlocal fits, too_large
        tries[size] = peak = peak_of(size)
        if peak is not None and peak <= target_bytes:
            fits = max(fits, size)
        else:
            too_large = min(too_large, size)

    measure(start)
    while too_large - fits > max(1, int(CLOSE * fits)):
        measure(_next(tries, target_bytes, fits, too_large))
    if fits == 0:
        raise ValueError(
            f"not even one sample fits: a step of batch size 1 peaks at {tries[1]} bytes, the target is {target_bytes}; use a "
            "larger batch_size for the plain step that sets it, or a smaller model"
        )
    peak = tries[fits]
    assert peak is not None
    return Found(
        fits, peak, too_large if too_large <= most else None, tuple((size, peak or 0) for size, peak in tries.items())
    )


def _next(tries: dict[int, int | None], target: int, fits: int, too_large: int) -> int:
    """Where the line through the two measurements nearest to the target meets it, within the bracket."""
    known = sorted(((size, peak) for size, peak in tries.items() if peak), key=lambda known: abs(known[1] - target))[:2]
    if len(known) < 2 or known[0][1] == known[1][1]:
        guess = known[0][0] * target // known[0][1] if known else too_large // 2
    else:
        (a, at_a), (b, at_b) = known
        guess = a + round((target - at_a) * (b - a) / (at_b - at_a))
    lowest, highest = fits + 1, min(too_large - 1, _GROWTH * fits if fits else too_large - 1)
    if too_large in tries and fits:  # a guess at the edge again and again would move one side only
        margin = (too_large - fits) // 8
        lowest, highest = lowest + margin, highest - margin
    elif fits:  # where peaks grow in jumps the line may say that nothing is to be gained
        lowest += fits // 4
    return max(lowest, min(guess, highest))


@dataclass(frozen=True)
class BatchSearch:
    """What the search needs of a job."""

    step: TrainStep
    strategy: Strategy
    batch_of: Callable[[int], Batch]  # batch size -> a batch
    limit_of: Callable[[Batch], float | None]  # what the budget means for a batch
    batch_size: int  # of the plain step whose peak must be kept
    seed: int
    pairs: int
    done: Callable[[str], None]

    def run(self) -> dict[str, Any]:
        """The fields of the job's record."""
        step, strategy = self.step, self.strategy
        reference = self.batch_of(self.batch_size)
        with amid_training(step, reference, self.seed) as state:
            plain_peak = measured_peak_bytes(step, state, make_strategy("none"), None, reference)
            found = largest_batch(plain_peak, lambda size: self._peak(state, size), self.batch_size)
            self.done("batch found")
            batch = self.batch_of(found.batch_size)
            limit = self.limit_of(batch)
            parity = check_parity(step, lambda model: strategy.bind(model, limit), batch, self.seed)
            self.done("parity checked")
            plain_s, wrapped_s = self._time(state, limit, batch, reference)
        self.done("timed")
        ratios = [
            (w / found.batch_size) / (p / self.batch_size) for p, w in zip(plain_s, wrapped_s, strict=True)
        ]  # rule 3
        ratio, (low, high, _) = statistics.median(ratios), median_interval(ratios)
        step_time_s = statistics.median(wrapped_s)
        return {
            "batch_size": found.batch_size,
            "peak_memory_plain_bytes": plain_peak,
            "peak_memory_bytes": found.peak_bytes,
            "step_time_plain_s": statistics.median(plain_s),
            "step_time_s": step_time_s,
            "time_overhead_pct": 100 * (ratio - 1),
            "time_overhead_low_pct": 100 * (low - 1),
            "time_overhead_high_pct": 100 * (high - 1),
            "samples_per_s": found.batch_size / step_time_s,
            "speed_vs_plain": 1 / ratio,
            "cache_limit_bytes": int(limit) if limit is not None and strategy.uses_budget else None,
            "gradients_identical": parity.gradients_identical,
            "parity": parity,
            "batch_search": BatchSearchRecord(self.batch_size, plain_peak, found.too_large, found.tries),
        }

    def _peak(self, state: StartingState, size: int) -> int | None:
        batch = self.batch_of(size)
        try:
            return measured_peak_bytes(self.step, state, self.strategy, self.limit_of(batch), batch)
        except torch.OutOfMemoryError:  # rule 4
            return None

    def _time(
        self, state: StartingState, limit: float | None, batch: Batch, reference: Batch
    ) -> tuple[list[float], list[float]]:
        bound = self.strategy.bind(self.step.model, limit)
        order: list[tuple[Any, Batch, list[float]]] = [(self.step.model, reference, []), (bound, batch, [])]
        with steady_process() as collect:
            for index in range(self.pairs + 1):  # the first pair warms up
                for forward, data, times in order if index % 2 else reversed(order):
                    state.restore()
                    collect()
                    seconds = self.step(forward, *data).step_s
                    if index:
                        times.append(seconds)
        return order[0][2], order[1][2]


def format_tries(found: BatchSearchRecord) -> str:
    """The tries in a line, for the log."""
    return ", ".join(
        f"{size}: {peak / 2**20:.1f} MiB" if peak else f"{size}: out of memory" for size, peak in found.tries
    )
