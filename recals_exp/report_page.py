"""The page of a report: question, answer, cautions, figures, tables, layers, timeline, environment, jobs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from recals_exp.details import StepDetails
from recals_exp.html_page import Block, Cell, Figure, Fold, Section, Table, render
from recals_exp.records import COLUMNS, FAILED, OK, RunResult
from recals_exp.repeats import find_points, format_repeats
from recals_exp.stagereport import stages_page

MIB = 1024**2
_TEXT = ("job", "status", "model", "dataset", "pipeline", "strategy", "policy", "budget", "error")
_CONSTANTS = ("model", "dataset", "pipeline", "strategy", "policy", "batch_size")  # said once where all jobs share them
_FOLDED = ("time_overhead_low_pct", "time_overhead_high_pct")  # shown as the interval of time_overhead_pct
PAGE_FILE = "report.html"


@dataclasses.dataclass(frozen=True)
class Content:
    """What the page is made of, but for the records."""

    title: str
    question: str
    answer: str
    cautions: Sequence[str]
    figures: Sequence[Figure]
    step_figures: Sequence[Figure]
    details: tuple[str, StepDetails] | None  # whose layers are listed


def format_page(results: Sequence[RunResult], content: Content, shown: Callable[[RunResult, str], str]) -> str:
    """The HTML of the page; `shown` is the text of a cell, as in the terminal's table."""
    bad = [result for result in results if result.status != OK]
    count = f"{len(results) - len(bad)} of {len(results)} jobs finished."
    return render(
        content.title,
        [
            Section("answer", "", [content.question, content.answer, count], "answer"),
            Section("failed", "Failed jobs", [tuple(map(_reason, bad))] if bad else [], "failed"),
            Section(
                "cautions", "Before you believe it", [tuple(content.cautions)] if content.cautions else [], "caution"
            ),
            Section("figures", "Memory against time", content.figures),
            Section("results", "Results", [*_results(results, shown), *_repeats(results)]),
            Section("stages", "Stages", stages_page(results)),
            Section("step", "Inside one step", [*content.step_figures, *_layers(content.details)]),
            Section("environment", "Environment", _environment(results)),
            Section("jobs", "Jobs", [_fold(result) for result in results]),
        ],
    )


def _reason(result: RunResult) -> str:
    return f"{result.job}: {result.error or 'still running, or killed'}"


def _results(results: Sequence[RunResult], shown: Callable[[RunResult, str], str]) -> list[Block]:
    columns = [column for column in COLUMNS if column not in _FOLDED]
    columns = [column for column in columns if any(getattr(result, column) is not None for result in results)]
    shared = [
        name for name in columns if name in _CONSTANTS and len({getattr(result, name) for result in results}) == 1
    ]
    columns = [column for column in columns if column not in shared]
    rows = tuple(tuple(_cell(result, column, shown) for column in columns) for result in results)
    same = ", ".join(f"{name} {getattr(results[0], name)}" for name in shared)
    table = Table(tuple(columns), rows, frozenset(columns) - frozenset(_TEXT), "results-table")
    return [f"Everywhere: {same}.", table] if same else [table]


def _cell(result: RunResult, column: str, shown: Callable[[RunResult, str], str]) -> Cell:
    value: Any = getattr(result, column)
    kind = ""
    if column == "status":
        kind = {OK: "ok", FAILED: "bad"}.get(value, "unsure")
    elif column == "gradients_identical" and value is not None:
        kind = "ok" if value else "bad"
    if column == "budget":
        fraction = result.budget_fraction()
        return Cell(value, value if fraction is None else fraction)
    return Cell(shown(result, column), int(value) if isinstance(value, bool) else value, kind)


def _repeats(results: Sequence[RunResult]) -> list[Block]:
    lines = tuple(format_repeats(find_points(results)))
    return ["Repeated points, merged:", lines] if lines else []


def _layers(details: tuple[str, StepDetails] | None) -> list[Block]:
    if details is None:
        return []
    job, step = details
    total = sum(layer.cached_bytes for layer in step.layers) or 1
    rows = tuple(
        (
            Cell(layer.name, number),
            Cell(layer.kind, layer.kind),
            Cell(f"{layer.cached_bytes / MIB:.2f} MiB", layer.cached_bytes),
            Cell(f"{100 * layer.cached_bytes / total:.1f} %", layer.cached_bytes),
        )
        for number, layer in enumerate(step.layers)
    )
    table = Table(("layer", "kind", "saved", "share"), rows, frozenset(("saved", "share")), "layers-table")
    return [f"What autograd saves for each layer in a plain step, each storage once ({job}):", table]


def _environment(results: Sequence[RunResult]) -> list[Block]:
    """One table for each environment that jobs ran in; with several, the jobs are named."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for result in results:
        if result.environment is None:
            continue
        said = {key: value for key, value in dataclasses.asdict(result.environment).items() if key != "packages"}
        if said["memory_bytes"] is not None:
            said["memory_bytes"] = f"{said['memory_bytes'] / 1024**3:.1f} GiB"
        rows = {
            key.removesuffix("_bytes").replace("_", " "): str(value) for key, value in said.items() if value is not None
        }
        rows |= {"device": result.device, "threads": str(result.threads), **result.environment.packages}
        found.setdefault(json.dumps(rows), (rows, []))[1].append(result.job)
    blocks: list[Block] = []
    for rows, jobs in found.values():
        if len(found) > 1:
            blocks.append(f"Jobs {', '.join(jobs)}:")
        cells = tuple((Cell(key, key), Cell(value, value)) for key, value in rows.items())
        blocks.append(Table(("what", "value"), cells))
    return blocks


def _fold(result: RunResult) -> Fold:
    summary = f"{result.job}: {result.status}" + ("" if result.wall_s is None else f", {result.wall_s:.1f} s")
    plain: dict[str, Any] = {"error": result.error, "started_at": result.started_at, "config": result.config}
    if result.training is not None:
        plain["losses"] = result.training.losses
    text = json.dumps(plain, indent=2, default=str)
    return Fold(summary, text, {OK: "ok", FAILED: "bad"}.get(result.status, "unsure"))
