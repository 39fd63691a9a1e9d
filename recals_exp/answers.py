"""The question of a report, and its answer in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recals_exp.pareto import fastest_within, labels
from recals_exp.records import OK, RunResult

QUESTION_FILE = "question.txt"
"""In a sweep's folder: what its experiment asks."""

QUESTION = "How much memory does a training step need with less of it held for backward, and what does that cost?"
CHEAP_PCT = 10.0
"""Overhead that many would pay without asking."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SUBJECT = ("model", "dataset", "pipeline", "batch_size")
_CHOICE = ("strategy", "policy", "budget")


def find_question(folders: Sequence[Path]) -> str:
    """What the experiments of the sweeps ask, or the general question."""
    asked: dict[str, None] = {}
    for folder in folders:
        for path in sorted(folder.rglob(QUESTION_FILE)) if folder.is_dir() else ():
            asked[path.read_text(encoding="utf-8").strip()] = None
    return " ".join(text[0].upper() + text[1:] for text in asked if text) or QUESTION


def answer(results: Sequence[RunResult]) -> str:
    """What to choose, and what it costs, for each model that was measured. Compared are peaks of a whole step."""
    if searched := [result for result in results if result.status == OK and result.batch_search is not None]:
        return _of_batches(searched)
    measured = [result for result in results if result.status == OK and _saving_pct(result) is not None]
    if not measured:
        return "No job has finished a measurement yet." if results else "There are no jobs."
    subjects: dict[tuple[str, ...], list[RunResult]] = {}
    varying = [name for name in _SUBJECT if len({getattr(result, name) for result in measured}) > 1]
    for result in measured:
        subjects.setdefault(tuple(str(getattr(result, name)) for name in varying or _SUBJECT[:1]), []).append(result)
    return " ".join(_of_subject(" ".join(subject), group) for subject, group in subjects.items())


def _of_batches(results: Sequence[RunResult]) -> str:
    """What fits into a peak, for each model and plain batch size."""
    names = labels(results)
    groups: dict[tuple[str, int], list[RunResult]] = {}
    for result in results:
        assert result.batch_search is not None
        groups.setdefault((result.model, result.batch_search.plain_batch_size), []).append(result)
    sentences = []
    for (model, plain), group in groups.items():
        largest = max(group, key=lambda result: result.batch_size)
        fastest = max(group, key=lambda result: result.speed_vs_plain or 0.0)
        sentences.append(
            f"{model}: within the peak of a plain step at batch size {plain} ({_size(largest.peak_memory_plain_bytes)}) the "
            f"largest batch is {largest.batch_size}, under {names[largest.job]}; the best throughput is "
            f"{fastest.samples_per_s or 0:.1f} samples/s, {fastest.speed_vs_plain or 0:.2f} x plain's, under "
            f"{names[fastest.job]} at batch size {fastest.batch_size}."
        )
    return " ".join(sentences)


def _of_subject(subject: str, results: Sequence[RunResult]) -> str:
    if len({result.strategy for result in results}) > 1 and (sentence := fastest_within(results)):
        return f"{subject}: {sentence}"
    choices = [name for name in _CHOICE if len({getattr(result, name) for result in results}) > 1] or ["budget"]
    best = max(results, key=lambda result: (_saving_pct(result) or 0.0, -(result.time_overhead_pct or 0.0)))
    if (_saving_pct(best) or 0.0) < 0.5:
        return (
            f"{subject}: nothing that was measured lowers the peak of a step ({_size(best.peak_memory_plain_bytes)})."
        )
    sentence = (
        f"{subject}: {_name(best, choices)} needs the least memory: the step peaks at {_size(best.peak_memory_bytes)} where plain "
        f"takes {_size(best.peak_memory_plain_bytes)} ({_saving_pct(best):.0f} % less), for {_cost(best)}"
    )
    cheap = [r for r in results if (r.time_overhead_pct or 0.0) <= CHEAP_PCT and (_saving_pct(r) or 0.0) >= 0.5]
    if best not in cheap and cheap:
        other = max(cheap, key=lambda result: _saving_pct(result) or 0.0)
        sentence += (
            f". Within {CHEAP_PCT:.0f} % more time the best is {_name(other, choices)}: {_saving_pct(other):.0f} % less memory "
            f"for {_cost(other)}"
        )
    elif best not in cheap:
        sentence += f". Nothing that was measured saves memory within {CHEAP_PCT:.0f} % more time"
    wrong = sum(result.gradients_identical is False for result in results)
    exact = "Gradients are those of plain PyTorch to the last bit" if not wrong else f"Gradients differ in {wrong} jobs"
    return f"{sentence}. {exact}.{_learning(results)}"


def _learning(results: Sequence[RunResult]) -> str:
    """Whether training went the same way in all jobs, where it should."""
    losses = [result.training.losses for result in results if result.training is not None]
    same_task = len({(len(found), result.seed) for found, result in zip(losses, results, strict=False)}) == 1
    if (
        len(losses) < 2
        or len(losses) < len(results)
        or not same_task
        or not all(r.gradients_identical for r in results)
    ):
        return ""
    if len(set(losses)) == 1:
        return f" The losses of all {len(losses[0])} training steps are the same in all {len(losses)} jobs, to the last bit."
    return " Losses of training differ between jobs."


def _saving_pct(result: RunResult) -> float | None:
    if result.peak_memory_bytes is None or not result.peak_memory_plain_bytes:
        return None
    return 100 * (1 - result.peak_memory_bytes / result.peak_memory_plain_bytes)


def _name(result: RunResult, choices: Sequence[str]) -> str:
    return " ".join(f"budget {result.budget}" if name == "budget" else str(getattr(result, name)) for name in choices)


def _cost(result: RunResult) -> str:
    overhead, low, high = result.time_overhead_pct, result.time_overhead_low_pct, result.time_overhead_high_pct
    if overhead is None:
        return "a cost in time that was not measured"
    interval = "" if low is None or high is None else f" [{low:.1f}, {high:.1f}]"
    return f"{abs(overhead):.1f} % {'more' if overhead >= 0 else 'less'} time{interval}"


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "an unknown peak"
    size, unit = next((pair for pair in _UNITS if nbytes >= pair[0]), _UNITS[-1])
    return f"{nbytes / size:.1f} {unit}"
