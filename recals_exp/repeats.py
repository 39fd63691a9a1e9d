"""Equal points of a sweep, merged: what differs in nothing but the seed was measured several times."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recals_exp.keys import config_key
from recals_exp.records import OK, RunResult

COVERAGE = 0.95
_IDENTITY = ("model", "dataset", "pipeline", "strategy", "policy", "budget", "batch_size", "device")


@dataclass(frozen=True)
class Point:
    """The finished jobs of one configuration, whatever their seeds."""

    results: tuple[RunResult, ...]

    @property
    def merged(self) -> RunResult:
        """One row for all: times are means, with the interval of the mean overhead; memory is the most that was seen.

        A single job is itself. With several, what belongs to one step of one job (its timing, its parity, ...) is left out.
        """
        first = self.results[0]
        if len(self.results) == 1:
            return first
        low, high = mean_interval(self._values("time_overhead_pct"))
        means = (
            "step_time_plain_s",
            "step_time_s",
            "time_overhead_pct",
            "recompute_flops_pct",
            "samples_per_s",
            "speed_vs_plain",
            "predicted_overhead_pct",
        )
        most = ("peak_memory_plain_bytes", "peak_memory_bytes", "cache_peak_bytes", "cache_total_bytes")
        identical = [result.gradients_identical for result in self.results]
        changed: dict[str, Any] = dict.fromkeys(("timing", "memory", "flops", "cache", "parity", "training"))
        changed |= {name: statistics.fmean(values) for name in means if (values := self._values(name))}
        changed |= {name: int(max(values)) for name in most if (values := self._values(name))}
        changed["job"] = f"{first.job} and {len(self.results) - 1} more"
        changed["time_overhead_low_pct"], changed["time_overhead_high_pct"] = low, high
        changed["gradients_identical"] = None if None in identical else all(identical)
        return dataclasses.replace(first, **changed)

    def _values(self, column: str) -> list[float]:
        return [value for result in self.results if (value := getattr(result, column)) is not None]


def find_points(results: Sequence[RunResult]) -> list[Point]:
    """The finished jobs by configuration, in the order of their first."""
    points: dict[tuple[str, ...], list[RunResult]] = {}
    for result in results:
        if result.status == OK:
            said = tuple(str(getattr(result, name)) for name in _IDENTITY)
            key = config_key(result.config, without=("seed",)) if result.config else result.job
            points.setdefault((key, *said), []).append(result)
    return [Point(tuple(found)) for found in points.values()]


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % interval of the mean (Student's t); None with fewer than two values."""
    if len(values) < 2:
        return None, None
    from scipy.stats import t  # here, as it takes a while and most sweeps have no repeats

    half = float(t.ppf(0.5 + COVERAGE / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def format_repeats(points: Sequence[Point]) -> list[str]:
    """One line for every point that was measured more than once."""
    lines = []
    for point in points:
        if len(point.results) == 1:
            continue
        merged = point.merged
        text = f"{merged.job} ({len(point.results)} repeats)"
        if merged.time_overhead_pct is not None and merged.time_overhead_low_pct is not None:
            values = [result.time_overhead_pct for result in point.results if result.time_overhead_pct is not None]
            text += (
                f": time overhead {merged.time_overhead_pct:.1f} % on average, 95 % interval "
                f"[{merged.time_overhead_low_pct:.1f}, {merged.time_overhead_high_pct:.1f}], "
                f"from {min(values):.1f} to {max(values):.1f}"
            )
        if peaks := [result.peak_memory_bytes for result in point.results if result.peak_memory_bytes is not None]:
            low, high = min(peaks) / 1024**2, max(peaks) / 1024**2
            text += f"; peak {high:.1f} MiB" if low == high else f"; peak {low:.1f} to {high:.1f} MiB"
        lines.append(text)
    return lines
