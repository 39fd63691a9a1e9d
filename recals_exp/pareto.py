"""Strategies side by side: which of the measured points nothing beats, and what is fastest within how much memory.

A point is (peak memory of a whole step, time of a step over a plain one); both are of the same interleaved pairs, so that points
of different jobs compare. A point is on the front if no other needs at most its memory and at most its time, and less of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from recals_exp.records import OK, RunResult

WITHIN = (1.0, 0.75, 0.5)
"""Shares of the plain step's peak for which the fastest is named."""


def measured(results: Sequence[RunResult]) -> list[RunResult]:
    """Those with a place in the picture."""
    return [r for r in results if r.status == OK and r.peak_memory_bytes and r.speed_vs_plain]


def time_ratio(result: RunResult) -> float:
    """Time of a step over a plain step's, per sample."""
    assert result.speed_vs_plain
    return 1 / result.speed_vs_plain


def front(results: Sequence[RunResult]) -> list[RunResult]:
    """The points that nothing beats, by rising memory; neither does the plain step of their own job."""
    kept: list[RunResult] = []
    for result in sorted(measured(results), key=lambda r: (r.peak_memory_bytes or 0, time_ratio(r))):
        if (result.peak_memory_bytes or 0) >= (result.peak_memory_plain_bytes or 0) and time_ratio(result) > 1:
            continue
        if not kept or time_ratio(result) < time_ratio(kept[-1]):
            kept.append(result)
    return kept


def labels(results: Sequence[RunResult]) -> dict[str, str]:
    """Job -> what tells its point from the others: strategy, policy, budget, and options of the strategy that vary."""
    options = {result.job: dict(result.config.get("strategy_kwargs") or {}) for result in results}
    names = {}
    for result in results:
        alike = [options[other.job] for other in results if other.strategy == result.strategy]
        varying = [key for key in options[result.job] if len({str(other.get(key)) for other in alike}) > 1]
        parts = [result.strategy, *([result.policy] if result.policy != "none" else [])]
        parts += [result.budget] if result.budget != "none" else []
        parts += [f"{key}={options[result.job][key]}" for key in varying]
        names[result.job] = " ".join(parts)
    return names


def fastest_within(results: Sequence[RunResult]) -> str:
    """For shares of plain's peak, the fastest that fits; sentences. Says where another cannot be told apart from it."""
    points = [result for result in measured(results) if result.strategy != "none" and result.peak_memory_plain_bytes]
    if not points:
        return ""
    names = labels(results)
    plain_bytes = max(result.peak_memory_plain_bytes or 0 for result in points)
    sentences: list[str] = []
    said = ""
    for share in WITHIN:
        fitting = [result for result in points if (result.peak_memory_bytes or 0) <= share * plain_bytes]
        where = "plain's peak" if share == 1 else f"{100 * share:.0f} % of it"
        where += f" ({share * plain_bytes / 2**20:.1f} MiB)"
        if not fitting:
            smallest = min(points, key=lambda result: result.peak_memory_bytes or 0)
            sentences.append(
                f"nothing that was measured fits within {where}: the smallest peak is {names[smallest.job]}'s, "
                f"{(smallest.peak_memory_bytes or 0) / 2**20:.1f} MiB"
            )
            break
        best, remarks = _fastest(fitting, names)
        if share == 1 and min(map(time_ratio, fitting)) >= 1:
            sentences.append(f"nothing that was measured is faster than plain within {where}")
        elif best == said:
            sentences.append(f"within {where} it is the same")
        else:
            sentences.append(f"{best} is the fastest within {where}: {remarks}")
            said = best
    return "; ".join(sentences) + "."


def _fastest(fitting: Sequence[RunResult], names: dict[str, str]) -> tuple[str, str]:
    """Its name, and what there is to say of it."""
    best = min(fitting, key=time_ratio)
    remarks = [f"{time_ratio(best):.2f} x a plain step's time"]
    high = best.time_overhead_high_pct
    close = [
        names[other.job]
        for other in sorted(fitting, key=time_ratio)
        if other is not best
        and high is not None
        and other.time_overhead_low_pct is not None
        and other.time_overhead_low_pct <= high
    ]
    if close:
        remarks.append(f"not told apart by the measurement from {', '.join(close)}")
    if best.gradients_identical is False:
        exact = [result for result in fitting if result.gradients_identical]
        other = min(exact, key=time_ratio) if exact else None
        remarks.append(
            "no other has plain's very bits"
            if other is None
            else f"the fastest with plain's very bits is {names[other.job]}, {time_ratio(other):.2f} x"
        )
    return names[best.job], ", ".join(remarks)
