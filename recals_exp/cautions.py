"""What a reader must know before believing a row of the report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from recals_exp.keys import config_key
from recals_exp.records import OK, RunResult

NOISY_PCT = 5.0
"""Half an interval of the overhead wider than this, and than a quarter of the overhead, is said to be wide."""

DRIFT = 0.2
"""Plain steps that got slower or faster by more than this share are said to have drifted."""

_NOT_OF_THE_BASELINE = ("budget", "policy", "policy_kwargs", "strategy", "strategy_kwargs", "seed", "timing_pairs")


def cautions(results: Sequence[RunResult]) -> list[str]:
    """One line each, by job; what is said of several jobs in the same words is said once; last what lies between jobs."""
    said: dict[str, list[str]] = {}
    for result in results:
        for text in _of_job(result):
            said.setdefault(text, []).append(result.job)
    lines = [f"{jobs[0]}{f' and {len(jobs) - 1} more' if jobs[1:] else ''}: {text}" for text, jobs in said.items()]
    return lines + list(_between_jobs(results))


def _of_job(result: RunResult) -> Iterator[str]:
    parity, timing, limit = result.parity, result.timing, result.cache_limit_bytes
    if parity is not None and parity.differences:
        blame = " (plain does not reproduce itself here either)" if parity.plain_reproducible is False else ""
        more = f" and {len(parity.differences) - 1} more" if len(parity.differences) > 1 else ""
        yield f"not the plain step{blame}: {parity.differences[0]}{more}"
    if timing is not None:
        if not timing.losses_identical:
            yield "the losses of a timed pair differ"
        if timing.interval_coverage_pct < 95:
            yield f"{len(timing.ratios)} pairs, so its interval covers {timing.interval_coverage_pct:.3g} %, not 95 %"
        if (change := _drift(timing.plain_s)) is not None:
            yield (
                f"plain steps became {abs(change):.0f} % {'slower' if change > 0 else 'faster'} while it was timed: something "
                "else used the machine"
            )
    overhead, low, high = result.time_overhead_pct, result.time_overhead_low_pct, result.time_overhead_high_pct
    if overhead is not None and low is not None and high is not None:
        half = (high - low) / 2
        if half > max(NOISY_PCT, abs(overhead) / 4):
            yield f"noisy: the overhead of {overhead:.1f} % is known to within {half:.0f} points only; more timing_pairs may help"
    if limit is not None and result.cache_peak_bytes is not None and result.cache_peak_bytes > limit:
        yield f"cached {result.cache_peak_bytes} bytes, above its limit of {limit}"
    if (
        result.strategy == "recals"
        and limit is not None
        and result.cache is not None
        and not result.cache.dropped_values
    ):
        yield f"nothing was dropped: a limit of {limit} bytes holds all that the step caches"
    if result.strategy == "offload" and result.device == "cpu" and result.status == OK:
        yield "on the CPU there is no other memory to move to: offload saves nothing here"
    own = result.baseline
    if own is not None and result.peak_memory_bytes is not None:
        bits = "the same" if own.gradients_identical else "NOT the same"
        yield (
            f"against its own baseline ({own.name}): {own.time_overhead_pct:+.1f} % time, a peak of "
            f"{result.peak_memory_bytes / 2**20:.1f} MiB instead of {own.peak_memory_bytes / 2**20:.1f} MiB, gradients {bits} to "
            "the last bit"
        )
    yield from result.notes


def _drift(times_s: Sequence[float]) -> float | None:
    """By how much percent the last third is slower than the first, where that is more than `DRIFT`."""
    third = len(times_s) // 3
    if third < 2:
        return None
    change = statistics.median(times_s[-third:]) / statistics.median(times_s[:third]) - 1
    return 100 * change if abs(change) > DRIFT else None


def _between_jobs(results: Sequence[RunResult]) -> Iterator[str]:
    baselines: dict[str, list[RunResult]] = {}
    for result in results:
        if result.status == OK and result.step_time_plain_s is not None and result.config:
            baselines.setdefault(config_key(result.config, without=_NOT_OF_THE_BASELINE), []).append(result)
    for group in baselines.values():
        by_time = sorted((result.step_time_plain_s or 0.0, result.job) for result in group)
        (fast_s, fast), (slow_s, slow) = by_time[0], by_time[-1]
        if fast_s and slow_s / fast_s - 1 > DRIFT:
            yield (
                f"the baseline drifted between jobs: a plain step took {1000 * fast_s:.1f} ms in {fast} and "
                f"{1000 * slow_s:.1f} ms in {slow}; compare overheads, which are of pairs, not step times"
            )
