"""The memory of one step as a picture."""

from __future__ import annotations

from recals_exp.details import StepDetails, Timeline
from recals_exp.step_figures import MOST_LINES, timeline_figure


def details(peak: int) -> StepDetails:
    line = Timeline(times_s=(0.0, 1.0, 2.0), live_bytes=(0, peak, 0), forward_s=1.0, backward_s=1.0, optimizer_s=0.5)
    return StepDetails((), 1000, line, line)


def test_of_many_jobs_the_lines_span_all_peaks_and_the_title_says_how_many() -> None:
    jobs = {f"job {i}": details(1000 * i) for i in range(1, 11)}
    figure = timeline_figure(jobs, "Memory")
    assert figure is not None
    (axes,) = figure.axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(names) == MOST_LINES + 1
    assert {"plain", "job 1", "job 10"} <= set(names)
    assert axes.get_title() == "Memory: 5 of 10 jobs, from the lowest peak to the highest"
    few = timeline_figure(dict(list(jobs.items())[:MOST_LINES]), "Memory")
    assert few is not None
    assert few.axes[0].get_title() == "Memory"
