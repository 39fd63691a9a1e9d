"""The records of sweeps: found below their folders, and put into curves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recals_exp import records
from recals_exp.records import FAILED, RunResult
from recals_exp.repeats import find_points

SERIES_COLUMNS = ("model", "dataset", "pipeline", "strategy", "policy")
"""What makes two jobs points of one curve."""


def find_results(folders: Sequence[Path]) -> list[RunResult]:
    """The records below the folders, ordered by series, then budget whatever their status. Each file counts once.

    One that cannot be read is a record too, with the reason as its error.

    Where jobs of several sweeps have one name, that of the sweep's folder stands before it.
    """
    return [result for result, _ in find_jobs(folders)]


def find_jobs(folders: Sequence[Path]) -> list[tuple[RunResult, Path]]:
    """The same, each with its folder."""
    paths: dict[Path, None] = {}
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"there is no folder {folder}: give the folder of a sweep, or of a job")
        for path in [folder] if folder.is_file() else sorted(folder.rglob(records.RESULT_FILE)):
            paths[path.resolve()] = None
    found = [(_load_or_failed(path), path.parent) for path in paths]
    count = Counter(result.job for result, _ in found)
    named = [
        (dataclasses.replace(result, job=f"{path.parent.name}/{result.job}") if count[result.job] > 1 else result, path)
        for result, path in found
    ]
    return sorted(named, key=lambda job: _order(job[0]))


def _load_or_failed(path: Path) -> RunResult:
    try:
        return records.load(path)
    except (ValueError, OSError) as error:
        unknown: dict[str, Any] = dict.fromkeys(
            ("model", "dataset", "pipeline", "policy", "budget", "strategy", "device"), "unknown"
        )
        reason = f"unreadable record: {records.describe_error(error)}"
        return RunResult(job=path.parent.name, status=FAILED, error=reason, batch_size=0, seed=0, **unknown)


def _order(result: RunResult) -> tuple[Any, ...]:
    fraction = result.budget_fraction()
    series = tuple(getattr(result, column) for column in SERIES_COLUMNS)
    return (*series, fraction is None, fraction or 0.0, result.budget, result.job)


def group_series(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The finished jobs by curve, repeats merged. A name holds only what tells the curves apart."""
    finished = [point.merged for point in find_points(results)]
    varying = [column for column in SERIES_COLUMNS if len({getattr(result, column) for result in finished}) > 1]
    series: dict[str, list[RunResult]] = {}
    for result in finished:
        name = " ".join(str(getattr(result, column)) for column in varying or ("model", "policy"))
        series.setdefault(name, []).append(result)
    return series
