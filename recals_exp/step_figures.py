"""One step as pictures: what it holds moment by moment, and what each layer makes it hold."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from recals_exp.details import Layer, StepDetails, Timeline
from recals_exp.figures import COLORS, GREY, MIB

MOST_LAYERS = 24
MOST_LINES = 5  # of the timeline, beside the plain step's


def timeline_figure(jobs: Mapping[str, StepDetails], title: str) -> Figure | None:
    """Live bytes over one step: plain, and under each job's strategy. None if no job has a timeline.

    The x axis is how far a step is, phase by phase, as steps of unequal length could not be compared otherwise: forward, backward
    and optimizer each take the share that they take of the plain step.
    """
    drawn = {name: job for name, job in jobs.items() if job.plain is not None and job.wrapped is not None}
    if not drawn:
        return None
    figure = Figure(figsize=(11, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    first = next(iter(drawn.values()))
    assert first.plain is not None
    shares = _phase_shares(first.plain)
    lines: dict[str, tuple[Timeline | None, int]] = {"plain": (first.plain, first.resident_bytes)}
    shown = _spread_by_peak(drawn)
    if len(shown) < len(drawn):
        title += f": {len(shown)} of {len(drawn)} jobs, from the lowest peak to the highest"
    lines |= {name: (job.wrapped, job.resident_bytes) for name, job in shown.items()}
    for index, (name, (timeline, resident_bytes)) in enumerate(lines.items()):
        assert timeline is not None
        x = [100 * _progress(timeline, time_s, shares) for time_s in timeline.times_s]
        y = [(resident_bytes + nbytes) / MIB for nbytes in timeline.live_bytes]
        color = GREY if index == 0 else COLORS[(index - 1) % len(COLORS)]
        axes.step(x, y, where="post", color=color, linewidth=1.8 if index == 0 else 1.3, label=name)
        if index == 0:
            axes.fill_between(x, y, step="post", color=color, alpha=0.12)
    axes.axhline(first.resident_bytes / MIB, color=GREY, linestyle=":", linewidth=1)
    start = 0.0
    for phase, share in zip(("forward", "backward", "optimizer"), shares, strict=True):
        if start:
            axes.axvline(100 * start, color=GREY, linewidth=0.8, alpha=0.6)
        if share > 0.03:
            axes.text(
                100 * (start + share / 2), 1.0, phase, transform=axes.get_xaxis_transform(), va="bottom", ha="center"
            )
        start += share
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("progress through the step (%); each phase as wide as it is in the plain step")
    axes.set_ylabel("live memory (MiB); dotted: resident")
    axes.set_title(title, pad=22)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="best")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _spread_by_peak(jobs: Mapping[str, StepDetails]) -> dict[str, StepDetails]:
    """At most `MOST_LINES` jobs, evenly from the lowest peak to the highest, in their own order."""
    if len(jobs) <= MOST_LINES:
        return dict(jobs)

    def peak(name: str) -> int:
        job = jobs[name]
        assert job.wrapped is not None
        return job.resident_bytes + job.wrapped.peak_bytes

    by_peak = sorted(jobs, key=peak)
    chosen = {by_peak[round(i * (len(by_peak) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)}
    return {name: job for name, job in jobs.items() if name in chosen}


def _phase_shares(timeline: Timeline) -> tuple[float, float, float]:
    total = timeline.forward_s + timeline.backward_s + timeline.optimizer_s
    return timeline.forward_s / total, timeline.backward_s / total, timeline.optimizer_s / total


def _progress(timeline: Timeline, time_s: float, shares: tuple[float, float, float]) -> float:
    """How far the step is, in [0, 1], its phases stretched to `shares`."""
    done, begun = 0.0, 0.0
    for length, share in zip((timeline.forward_s, timeline.backward_s, timeline.optimizer_s), shares, strict=True):
        if time_s <= begun + length:
            return done + share * (max(0.0, time_s - begun) / length if length else 1.0)
        done, begun = done + share, begun + length
    return 1.0


def layers_figure(layers: tuple[Layer, ...], title: str) -> Figure | None:
    """What autograd saves for each layer, in order of first use; the smallest together. None if nothing is saved."""
    saved = [layer for layer in layers if layer.cached_bytes]
    if not saved:
        return None
    shown = sorted(range(len(saved)), key=lambda i: -saved[i].cached_bytes)[:MOST_LAYERS]
    rest = sum(layer.cached_bytes for i, layer in enumerate(saved) if i not in set(shown))
    bars = [(f"{saved[i].name} ({saved[i].kind})", saved[i].cached_bytes) for i in sorted(shown)]
    if rest:
        bars.append((f"{len(saved) - len(shown)} smaller layers", rest))
    total = sum(layer.cached_bytes for layer in saved)
    figure = Figure(figsize=(11, 1.2 + 0.24 * len(bars)), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in bars], [nbytes / MIB for _, nbytes in bars], color=COLORS[0], height=0.72)
    for row, (_, nbytes) in enumerate(bars):
        axes.text(nbytes / MIB, row, f" {100 * nbytes / total:.1f} %", va="center", fontsize=8, color=GREY)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("saved for backward in a plain step (MiB)")
    axes.set_title(title)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
