"""Strategies in one picture: the time of a step against its peak memory, and the front of what nothing measured beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from recals_exp.figures import COLORS, GREY, MIB
from recals_exp.pareto import front, measured, time_ratio
from recals_exp.records import RunResult

MARKERS = "osD^vPX*"


def pareto_figure(results: Sequence[RunResult], labels: Mapping[str, str], about: str) -> Figure:
    """Points by job (`labels` names them), coloured by strategy and policy; hollow: not plain's very gradients."""
    figure = Figure(figsize=(9.5, 5.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    points = measured(results)
    texts: list[Annotation] = []
    kinds = list(dict.fromkeys((result.strategy, result.policy) for result in points))
    for index, kind in enumerate(kinds):
        color = COLORS[index % len(COLORS)]
        of_kind = [result for result in points if (result.strategy, result.policy) == kind]
        for result in of_kind:
            x, y = (result.peak_memory_bytes or 0) / MIB, time_ratio(result)
            low, high = result.time_overhead_low_pct, result.time_overhead_high_pct
            if low is not None and high is not None:
                below, above = max(0.0, y - (1 + low / 100)), max(0.0, 1 + high / 100 - y)
                axes.errorbar([x], [y], yerr=[[below], [above]], color=color, alpha=0.45, capsize=2, linewidth=1)
            axes.plot(
                [x],
                [y],
                marker=MARKERS[index % len(MARKERS)],
                linestyle="none",
                color=color,
                markerfacecolor="none" if result.gradients_identical is False else color,
                label=" ".join(part for part in kind if part != "none") or "none" if result is of_kind[0] else None,
            )
            texts.append(
                axes.annotate(
                    labels[result.job], (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7, color=color
                )
            )
    plain = [result.peak_memory_plain_bytes for result in points if result.peak_memory_plain_bytes]
    corners = [((result.peak_memory_bytes or 0) / MIB, time_ratio(result)) for result in front(points)]
    if plain and corners and corners[-1][1] > 1:
        corners.append((max(plain) / MIB, 1.0))  # plain itself is the last one
    axes.step(
        [x for x, _ in corners],
        [y for _, y in corners],
        where="post",
        color=GREY,
        linewidth=1.2,
        zorder=0,
        label="front: nothing measured is better in both",
    )
    if plain:
        axes.plot([max(plain) / MIB], [1.0], marker="*", markersize=13, color="black", linestyle="none", label="plain")
    axes.axhline(1.0, color=GREY, linewidth=0.7, linestyle=":")
    axes.set_xlabel("peak memory of a step (MiB)")
    axes.set_ylabel("time of a step / time of a plain step")
    axes.set_title(f"Time against memory{': ' + about if about else ''} (hollow: not plain's very bits)", fontsize=10)
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])  # room for the names
    axes.grid(alpha=0.3)
    if points:
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.text(0.5, 0.5, "no finished job", transform=axes.transAxes, ha="center", color=GREY)
    _spread(figure, texts)
    return figure


def _spread(figure: Figure, texts: Sequence[Annotation]) -> None:
    """Raise the names that would stand on one another, each just above those that it hits."""
    if not texts:
        return
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    placed: list[Bbox] = []
    for text in sorted(texts, key=lambda text: float(text.xy[1])):
        box = text.get_window_extent(renderer)
        for other in sorted(placed, key=lambda other: other.y0):
            if box.overlaps(other):
                box = box.translated(0, other.y1 + 1 - box.y0)
        placed.append(box)
        raised = 72 / figure.dpi * (box.y0 - text.get_window_extent(renderer).y0)
        text.xyann = (5, 4 + raised)
