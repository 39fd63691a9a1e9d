"""The stages of pipelines for people: a table for the terminal, and rows as CSV. Like ``report`` it reads records only."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from recals_exp import html_page
from recals_exp.records import RunResult
from recals_exp.stagerecords import StageRecord

STAGES_FILE = "stages.csv"
COLUMNS = ("job", "schedule", "n_micro_batches", *(item.name for item in dataclasses.fields(StageRecord)))
"""Of `STAGES_FILE`: one row for each stage of each job; bytes, seconds and percent."""


def format_stages_csv(results: Sequence[RunResult]) -> str:
    """All stages of all jobs as CSV; an empty field is a value that was not measured."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        if result.stages is not None:
            for stage in result.stages.stages:
                own = [_csv_field(getattr(stage, item.name)) for item in dataclasses.fields(StageRecord)]
                writer.writerow([result.job, result.stages.schedule, result.stages.n_micro_batches, *own])
    return buffer.getvalue()


def _csv_field(value: Any) -> Any:
    if value is None:
        return ""
    return " ".join(value) if isinstance(value, tuple) else value


def stages_table(results: Sequence[RunResult], width: int | None = None) -> Table:
    """One line for each stage: who did what in one step. Columns that do not fit the width are left out."""
    shown = list(_CELLS)
    table = _table(results, shown)
    for heading in _DISPENSABLE:
        if width is None or Measurement.get(_WIDE, _WIDE.options, table).maximum <= width:
            break
        shown.remove(heading)
        table = _table(results, shown)
    return table


def stages_page(results: Sequence[RunResult]) -> list[html_page.Block]:
    """The same for the report's page; empty if no job was a pipeline."""
    fields = {"busy": "busy_s", "cache\nlimit": "cache_limit_bytes", "cache\npeak": "cache_peak_bytes"}
    fields |= {"recompute\n%": "recompute_pct", "bubble\n%": "bubble_pct", "peak\nmemory": "peak_memory_bytes"}
    rows = []
    for result in results:
        for stage in () if result.stages is None else result.stages.stages:
            texts = {heading: cell(result, stage) for heading, cell in _CELLS.items()}
            rows.append(
                tuple(
                    html_page.Cell(text, getattr(stage, fields[heading]) if heading in fields else text)
                    for heading, text in texts.items()
                )
            )
    if not rows:
        return []
    headings = tuple(heading.replace("\n", " ") for heading in _CELLS)
    numbers = frozenset(heading.replace("\n", " ") for heading in fields)
    return ["Each stage of each pipeline in one step:", html_page.Table(headings, tuple(rows), numbers, "stages-table")]


def _table(results: Sequence[RunResult], shown: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in shown:
        is_text = heading in ("job", "schedule", "stage", "process", "budget")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for result in results:
        for stage in () if result.stages is None else result.stages.stages:
            table.add_row(*(_CELLS[heading](result, stage) for heading in shown))
    return table


_CELLS: Mapping[str, Callable[[Any, StageRecord], str]] = {
    "job": lambda result, stage: result.job,
    "schedule": lambda result, stage: result.stages.schedule,
    "stage": lambda result, stage: str(stage.stage),
    "process": lambda result, stage: str(stage.process),
    "budget": lambda result, stage: stage.budget,
    "busy": lambda result, stage: f"{1000 * stage.busy_s:.1f} ms",
    "recompute\n%": lambda result, stage: f"{stage.recompute_pct:.1f}",
    "bubble\n%": lambda result, stage: f"{stage.bubble_pct:.1f}",
    "cache\nlimit": lambda result, stage: _mib(stage.cache_limit_bytes),
    "cache\npeak": lambda result, stage: _mib(stage.cache_peak_bytes),
    "peak\nmemory": lambda result, stage: _mib(stage.peak_memory_bytes),
}
_DISPENSABLE = ("cache\nlimit", "process", "schedule", "recompute\n%", "job")  # in this order, where it is narrow
_WIDE = Console(file=io.StringIO(), width=10_000)


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1024**2:.1f} MiB"
