"""The report of a sweep, from the jobs' `result.json` files and nothing else.

    python -m recals_exp.report outputs/2030-01-01/12-00-00            # at any time, also while the sweep is going on
    python -m recals_exp.report sweep_a sweep_b --output both          # several sweeps in one report

Written into the sweep's folder (with several: the first, or `--output`): `tradeoff.csv` and `tradeoff.json`; the figures
`tradeoff`, `pareto` (with several strategies or policies), `memory_timeline` and `layers`, each as `.png` and `.svg`; and
`report.html`, which has it all in one file. Exit code 1 if a job failed, 2 if there is nothing to report.

Rules the code follows:

1. Every `result.json` found is a row, whatever its status. One that cannot be read is a row too, with the reason as
   its error.
2. The files have the columns of `records.COLUMNS`, in that order, in bytes, seconds and percent. Only the terminal
   table converts.
3. `format_...` returns text. Only `main` prints.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from recals_exp import details, records
from recals_exp.answers import answer, find_question
from recals_exp.cautions import cautions
from recals_exp.details import StepDetails
from recals_exp.figures import png, svg, tradeoff_figure
from recals_exp.html_page import Figure as PageFigure
from recals_exp.pareto import labels
from recals_exp.pareto_figure import pareto_figure
from recals_exp.records import COLUMNS, FAILED, OK, RunResult
from recals_exp.repeats import find_points, format_repeats
from recals_exp.report_page import PAGE_FILE, Content, format_page
from recals_exp.series import find_jobs, find_results, group_series
from recals_exp.stagereport import STAGES_FILE, format_stages_csv, stages_table
from recals_exp.step_figures import layers_figure, timeline_figure

CSV_FILE = "tradeoff.csv"
JSON_FILE = "tradeoff.json"
FIGURE_FILE = "tradeoff.png"
TIMELINE_NAME, LAYERS_NAME, PARETO_NAME = "memory_timeline", "layers", "pareto"


# -- text and files --------------------------------------------------------------------------------------------------


def format_csv(results: Sequence[RunResult]) -> str:
    """Rows as CSV. An empty field is a value that was not measured; booleans are `true` and `false`."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        writer.writerow([_csv_field(value) for value in result.row().values()])
    return buffer.getvalue()


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def format_json(results: Sequence[RunResult]) -> str:
    """Rows as JSON: a list of objects with the columns as keys; null is a value that was not measured."""
    return json.dumps([result.row() for result in results], indent=2, allow_nan=False) + "\n"


_CONSTANTS = (
    "model",
    "dataset",
    "pipeline",
    "policy",
    "strategy",
)  # said once, in the title, where all jobs share them
_QUIET = ("batch_size",)  # not said at all where all jobs share it
_FOLDED = ("time_overhead_low_pct", "time_overhead_high_pct")  # shown as the interval of time_overhead_pct
_DISPENSABLE = (
    "bubble_ideal_pct",
    "bubble_pct",
    "bound_overhead_pct",
    "predicted_overhead_pct",
    "samples_per_s",
    "cache_total_bytes",
    "peak_memory_plain_bytes",
    "step_time_plain_s",
    "cache_limit_bytes",
    "step_time_s",
    "documented_overhead_pct",
    "speed_vs_plain",
    "cache_peak_bytes",
    "pipeline",
    "dataset",
    "job",
)
"""What a narrow terminal goes without, in this order."""
_ONLY_WHERE_MEASURED = ("bubble_pct", "bubble_ideal_pct")  # pipelines have them
_HEADING_WIDTH = 11


def format_table(results: Sequence[RunResult], width: int | None = None, color: bool = False) -> str:
    """The table for people: the report's columns by name, values with units, what all jobs share in the title.

    `width` is the terminal's; columns that do not fit are left out and named below (None: as wide as it takes). Under
    the table stand the reason of every job that did not finish, and what a reader must know before believing a row.
    """
    console = Console(
        file=io.StringIO(),
        width=width or 10_000,
        force_terminal=color,
        color_system="standard" if color else None,
        soft_wrap=True,
    )
    shared = [column for column in _CONSTANTS if len({getattr(result, column) for result in results}) == 1]
    quiet = [column for column in _QUIET if len({getattr(result, column) for result in results}) == 1]
    title = ", ".join(f"{column} {getattr(results[0], column)}" for column in shared) if results else "no jobs"
    shown = [
        column
        for column in COLUMNS
        if column not in (*shared, *quiet, *_FOLDED, "error")
        and (column not in _ONLY_WHERE_MEASURED or any(getattr(result, column) is not None for result in results))
    ]
    hidden: list[str] = []
    table = _table(results, shown)
    for column in _DISPENSABLE:
        if width is None or Measurement.get(console, console.options.update(width=10_000), table).maximum <= width:
            break
        if column in shown:
            shown.remove(column)
            hidden.append(column)
            table = _table(results, shown)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    if any(result.stages is not None for result in results):
        console.print(stages_table(results, width))
    if hidden:
        console.print(Text(f"no room here for {', '.join(hidden)}: see {CSV_FILE}", style="dim"))
    for result in results:
        if result.status == records.RUNNING:
            console.print(Text(f"{result.job}: still running, or killed", style="yellow"))
        elif result.status == FAILED:
            console.print(Text(f"{result.job} failed: {result.error}", style="red"))
    for line in (*format_repeats(find_points(results)), *cautions(results)):
        console.print(Text(line, style="yellow"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _table(results: Sequence[RunResult], columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        text = column in ("job", "status", "budget", *_CONSTANTS)
        table.add_column(_heading(column), justify="left" if text else "right", no_wrap=True)
    for result in results:
        table.add_row(*(_cell(result, column) for column in columns))
    return table


def _heading(column: str) -> str:
    """The column's name, broken after underscores so that it stands over narrow values."""
    *parts, last = column.split("_")
    lines = [""]
    for part in [*(f"{part}_" for part in parts), last]:
        if lines[-1] and len(lines[-1] + part) > _HEADING_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines) + (" [95 %]" if column == "time_overhead_pct" else "")


def _cell(result: RunResult, column: str) -> Text:
    value = getattr(result, column)
    if column == "status":
        return Text(value, style={OK: "green", FAILED: "red"}.get(value, "yellow"))
    if value is None:
        no_limit = column == "cache_limit_bytes" and result.status == OK
        return Text("none" if no_limit else "-", style="dim")
    if column == "gradients_identical":
        return Text("yes", style="green") if value else Text("NO", style="bold red")
    if column == "time_overhead_pct":
        low, high = result.time_overhead_low_pct, result.time_overhead_high_pct
        return Text(f"{value:.1f}" if low is None or high is None else f"{value:.1f} [{low:.1f}, {high:.1f}]")
    if column.endswith("_bytes"):
        mib = value / 1024**2  # small ones with their digits: 50 KiB are no "0.0 MiB"
        return Text(f"{mib:.1f} MiB" if mib >= 1 or not mib else f"{mib:.3g} MiB")
    if column == "samples_per_s":
        return Text(f"{value:.1f}")
    if column == "speed_vs_plain":
        return Text(f"{value:.2f}x")
    if column.endswith("_s"):
        return Text(f"{1000 * value:.1f} ms")
    if column.endswith("_pct"):
        return Text(f"{value:.1f}")
    return Text(str(value))


def figure_title(results: Sequence[RunResult]) -> str:
    """What the figure is about: whatever all jobs share."""
    shared = {column: {getattr(result, column) for result in results} for column in ("model", "dataset", "policy")}
    parts = [values.pop() for values in shared.values() if len(values) == 1]
    return "Memory against recomputation" + (f": {', '.join(parts)}" if parts else "")


@dataclass(frozen=True)
class Report:
    """What was written, and what it says."""

    folder: Path
    results: tuple[RunResult, ...]
    figures_png: Mapping[str, bytes]  # by name
    texts: Mapping[str, str]  # the question, the answer, the cautions

    @property
    def figure_png(self) -> bytes:
        """The trade-off."""
        return self.figures_png["tradeoff"]

    @property
    def failed(self) -> int:
        """Jobs that did not finish."""
        return sum(result.status != OK for result in self.results)


def write_report(folders: Sequence[Path], output: Path | None = None) -> Report:
    """Read the records below the folders and write the three files. ValueError if there is no record."""
    results = find_results(folders)
    if not results:
        raise ValueError(
            f"no {records.RESULT_FILE} below {', '.join(map(str, folders))}: has a job been started there?"
        )
    target = output or (folders[0] if folders[0].is_dir() else folders[0].parent)
    target.mkdir(parents=True, exist_ok=True)
    figures = {
        "tradeoff": tradeoff_figure(group_series(results), figure_title(results)),
        **_pareto_figures(results),
        **_step_figures(results, folders),
    }
    (target / CSV_FILE).write_text(format_csv(results), encoding="utf-8")
    (target / JSON_FILE).write_text(format_json(results), encoding="utf-8")
    if any(result.stages is not None for result in results):
        (target / STAGES_FILE).write_text(format_stages_csv(results), encoding="utf-8")
    drawn = {name: (png(figure), svg(figure, name)) for name, figure in figures.items()}
    for name, (picture, vectors) in drawn.items():
        (target / f"{name}.png").write_bytes(picture)
        (target / f"{name}.svg").write_text(vectors, encoding="utf-8")
    (target / PAGE_FILE).write_text(
        _page(results, folders, {name: text for name, (_, text) in drawn.items()}), encoding="utf-8"
    )
    texts = {
        "question": find_question(folders),
        "answer": answer([point.merged for point in find_points(results)] or results),
        "cautions": "\n".join(f"- {line}" for line in (*format_repeats(find_points(results)), *cautions(results))),
    }
    return Report(target, tuple(results), {name: picture for name, (picture, _) in drawn.items()}, texts)


def _pareto_figures(results: Sequence[RunResult]) -> dict[str, Figure]:
    """Time against peak memory, where there is more than one way to compare."""
    points = [point.merged for point in find_points(results)]
    compares_batches = any(result.batch_search is not None for result in points)
    if compares_batches or len({(result.strategy, result.policy) for result in points}) < 2:
        return {}
    shared = {column: {getattr(result, column) for result in points} for column in ("model", "dataset", "batch_size")}
    about = [f"{column} {values.pop()}" for column, values in shared.items() if len(values) == 1]
    return {PARETO_NAME: pareto_figure(points, labels(points), ", ".join(about))}


_CAPTIONS = {
    PARETO_NAME: "Time of a step over a plain one against the step's peak memory; the line joins what nothing measured beats.",
    "tradeoff": "Left: what a budget costs, measured in pairs with its interval, and in operations. Right: what it saves.",
    TIMELINE_NAME: "Live memory through one step, plain and under the budgets; the profiler that watches makes steps slower.",
    LAYERS_NAME: "What autograd saves for each layer.",
}


def _step_figures(results: Sequence[RunResult], folders: Sequence[Path]) -> dict[str, Figure]:
    """The timeline and the layers of the series with the most points, where the jobs left them."""
    found = _details(results, folders)
    if not found:
        return {}
    first = next(iter(found.values()))
    made = {
        TIMELINE_NAME: timeline_figure(found, "Memory of one step"),
        LAYERS_NAME: layers_figure(first.layers, "Memory by layer"),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _details(results: Sequence[RunResult], folders: Sequence[Path]) -> dict[str, StepDetails]:
    """The details of the longest series by job. All its jobs have the same plain step."""
    series = max(group_series(results).values(), key=len, default=[])
    first = {point.merged.job: point.results[0].job for point in find_points(results)}
    paths = {result.job: path for result, path in find_jobs(folders)}
    loaded = {first[result.job]: details.load(paths[first[result.job]]) for result in series}
    return {job: found for job, found in loaded.items() if found is not None}


def _page(results: Sequence[RunResult], folders: Sequence[Path], drawn: Mapping[str, str]) -> str:
    inline = {name: PageFigure(vectors, _CAPTIONS.get(name, "")) for name, vectors in drawn.items()}
    content = Content(
        title=figure_title(results),
        question=find_question(folders),
        answer=answer([point.merged for point in find_points(results)] or results),
        cautions=cautions(results),
        figures=[figure for name, figure in inline.items() if name not in (TIMELINE_NAME, LAYERS_NAME)],
        step_figures=[inline[name] for name in (TIMELINE_NAME, LAYERS_NAME) if name in inline],
        details=next(iter(_details(results, folders).items()), None),
    )
    return format_page(results, content, lambda result, column: _cell(result, column).plain)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recals_exp.report",
        description="Report on one or more sweeps, finished or not, from the result.json files of their jobs.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep's folder, or a job's")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write (default: the first FOLDER)")
    options = parser.parse_args(argv)
    try:
        report = write_report(options.folders, options.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    print(
        format_table(
            report.results, width=max(console.width, 80) if console.is_terminal else None, color=console.is_terminal
        )
    )
    print(f"written: {', '.join(str(report.folder / name) for name in (CSV_FILE, JSON_FILE, FIGURE_FILE, PAGE_FILE))}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
