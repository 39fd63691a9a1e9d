"""The trade-off as a picture. Matplotlib stands here and in `step_figures`, nowhere else.

Drawn with `Figure` objects and the Agg canvas: no global state, no window, no interactive backend.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from recals_exp.records import RunResult, documented_overhead_pct

MIB = 1024**2
COLORS = ("#0b6fb8", "#d1542b", "#2f8f4e", "#8b4fb0", "#a5781b", "#3aa3a0", "#b8447a", "#5c5f2a")
GREY = "#6b6b6b"


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element with text as text. `name` keeps the ids of several in one page apart."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Title": name})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def tradeoff_png(series: Mapping[str, Sequence[RunResult]], title: str) -> bytes:
    """`tradeoff_figure` as the bytes of a PNG file."""
    return png(tradeoff_figure(series, title))


def tradeoff_figure(series: Mapping[str, Sequence[RunResult]], title: str) -> Figure:
    """Measured overhead over the documented curve, and peak memory, against the budget."""
    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    overhead, memory = figure.subplots(1, 2)
    figure.suptitle(title)
    points = {name: _points(results) for name, results in series.items()}
    budgets = [percent for line in points.values() for percent, _ in line]
    _draw_documented(overhead, min(budgets, default=12.5))
    for index, (name, line) in enumerate(points.items()):
        color = COLORS[index % len(COLORS)]
        _draw_overhead(overhead, line, color, name if len(points) > 1 else "")
        _draw_memory(memory, line, color, name if len(points) > 1 else "")
    _finish(overhead, "overhead over a plain step (%)", "What the budget costs")
    _finish(memory, "peak memory of a step (MiB)", "What the budget saves")
    memory.set_ylim(bottom=0)
    if not budgets:
        for axes in (overhead, memory):
            axes.text(0.5, 0.5, "no finished job", transform=axes.transAxes, ha="center", color=GREY)
    return figure


@dataclass(frozen=True)
class Curve:
    """One line of the predicted trade-off; all sequences are by rising budget."""

    name: str  # of a policy, or "bound"
    budget_pct: tuple[float, ...]
    overhead_pct: tuple[float, ...]
    peak_bytes: tuple[int, ...] = ()  # (): it has none
    knee_pct: float | None = None  # budget at its knee


def prediction_png(curves: Sequence[Curve], title: str) -> bytes:
    """Predicted overhead over the documented curve and above the bound, and predicted peaks: the bytes of a PNG file."""
    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    overhead, memory = figure.subplots(1, 2)
    figure.suptitle(title)
    _draw_documented(overhead, min((x for curve in curves for x in curve.budget_pct), default=12.5))
    for index, curve in enumerate(curves):
        color = COLORS[index % len(COLORS)] if curve.peak_bytes else GREY
        style = "-" if curve.peak_bytes else ":"
        overhead.plot(
            curve.budget_pct, curve.overhead_pct, style, marker="o", markersize=3.5, color=color, label=curve.name
        )
        if curve.peak_bytes:
            peaks = [nbytes / MIB for nbytes in curve.peak_bytes]
            memory.plot(curve.budget_pct, peaks, marker="o", markersize=3.5, color=color, label=curve.name)
        if curve.knee_pct is not None:
            at = curve.budget_pct.index(curve.knee_pct)
            overhead.plot(
                curve.knee_pct, curve.overhead_pct[at], "o", markersize=9, markerfacecolor="none", color=color
            )
    _finish(overhead, "predicted overhead over a plain step (%)", "What a budget will cost (ring: knee)")
    _finish(memory, "predicted peak memory of a step (MiB)", "What a budget will save")
    memory.set_ylim(bottom=0)
    return png(figure)


def _points(results: Sequence[RunResult]) -> list[tuple[float, RunResult]]:
    found = [(100 * fraction, result) for result in results if (fraction := result.budget_fraction()) is not None]
    return sorted(found, key=lambda point: point[0])


def _draw_documented(axes: Axes, lowest_pct: float) -> None:
    start = max(0.5, 0.9 * lowest_pct)
    percents = [start * (100 / start) ** (i / 300) for i in range(301)]
    axes.plot(
        percents,
        [documented_overhead_pct(min(1.0, percent / 100)) for percent in percents],
        color=GREY,
        linestyle="--",
        label="documented: (1/b $-$ 1)/6, FIFO, equal layers",
    )


def _draw_overhead(axes: Axes, line: Sequence[tuple[float, RunResult]], color: str, name: str) -> None:
    prefix = f"{name}: " if name else ""
    flops = [(x, r.recompute_flops_pct) for x, r in line if r.recompute_flops_pct is not None]
    if flops:
        axes.plot(
            *zip(*flops, strict=True),
            marker="s",
            markersize=8,
            markerfacecolor="none",
            color=color,
            linestyle="none",
            label=f"{prefix}FLOPs re-run (exact)",
        )
    timed = [
        (
            x,
            r.time_overhead_pct,
            r.time_overhead_pct - r.time_overhead_low_pct,
            r.time_overhead_high_pct - r.time_overhead_pct,
        )
        for x, r in line
        if r.time_overhead_pct is not None
        and r.time_overhead_low_pct is not None
        and r.time_overhead_high_pct is not None
    ]
    if timed:
        x, y, low, high = zip(*timed, strict=True)
        axes.errorbar(
            x,
            y,
            yerr=(low, high),
            fmt="o",
            markersize=4.5,
            capsize=4,
            color=color,
            label=f"{prefix}time, median of pairs and its 95 % interval",
        )


def _draw_memory(axes: Axes, line: Sequence[tuple[float, RunResult]], color: str, name: str) -> None:
    prefix = f"{name}: " if name else ""
    lines: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("peak_memory_plain_bytes", {"linestyle": "--", "alpha": 0.6}, "plain"),
        ("peak_memory_bytes", {"marker": "o", "markersize": 4.5}, "under the budget"),
        (
            "cache_peak_bytes",
            {"marker": "v", "markersize": 4.5, "linestyle": ":", "alpha": 0.8},
            "activation cache alone",
        ),
    )
    for column, style, label in lines:
        drawn = [(x, value / MIB) for x, r in line if (value := getattr(r, column)) is not None]
        if drawn:
            axes.plot(*zip(*drawn, strict=True), color=color, label=f"{prefix}{label}", **style)


def _finish(axes: Axes, ylabel: str, title: str) -> None:
    axes.set_xlabel("budget: cache limit (% of what the model caches)")
    axes.set_ylabel(ylabel)
    axes.set_xlim(0, 105)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
