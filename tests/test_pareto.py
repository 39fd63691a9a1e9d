"""The front and the sentence: right by counting, on points made by hand."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from sample_results import MIB, failed, finished, save_sweep

from recals_exp import report
from recals_exp.answers import answer
from recals_exp.cautions import cautions
from recals_exp.pareto import fastest_within, front, labels
from recals_exp.pareto_figure import pareto_figure
from recals_exp.records import BaselineRecord, RunResult


def point(job: str, peak_mib: int, ratio: float, spread: float = 0.01, **changes: Any) -> RunResult:
    fields: dict[str, Any] = {
        "job": job,
        "strategy": job,
        "policy": "none",
        "budget": "none",
        "peak_memory_plain_bytes": 100 * MIB,
        "peak_memory_bytes": peak_mib * MIB,
        "speed_vs_plain": 1 / ratio,
        "time_overhead_pct": 100 * (ratio - 1),
        "time_overhead_low_pct": 100 * (ratio - spread - 1),
        "time_overhead_high_pct": 100 * (ratio + spread - 1),
    }
    return finished(0.5, **{**fields, **changes})


POINTS = [
    point("light", 40, 1.6),
    point("middle", 60, 1.3),
    point("beaten", 70, 1.4),  # middle needs less of both
    point("compiled", 80, 0.7, gradients_identical=False),
    point("large", 100, 1.1),
    failed(),
]


def test_the_front_is_what_nothing_beats() -> None:
    assert [result.job for result in front(POINTS)] == ["light", "middle", "compiled"]
    assert front([failed()]) == []
    assert front([point("no better than plain", 100, 1.1)]) == []


def test_the_sentence_names_the_fastest_that_fits() -> None:
    assert fastest_within(POINTS) == (
        "compiled is the fastest within plain's peak (100.0 MiB): 0.70 x a plain step's time, the fastest with plain's very bits "
        "is large, 1.10 x; middle is the fastest within 75 % of it (75.0 MiB): 1.30 x a plain step's time; light is the fastest "
        "within 50 % of it (50.0 MiB): 1.60 x a plain step's time."
    )
    assert "nothing that was measured is faster than plain within plain's peak" in fastest_within(
        [POINTS[0], POINTS[4]]
    )
    assert "fits within 75 % of it (75.0 MiB): the smallest peak is compiled's, 80.0 MiB." in fastest_within(POINTS[3:])


def test_what_the_measurement_cannot_tell_apart_is_said() -> None:
    near = point("near", 65, 1.32, spread=0.03)
    assert "from near;" in fastest_within([*POINTS, near])


def test_cautions_tell_of_the_own_baseline_and_of_offload_on_a_cpu() -> None:
    own = BaselineRecord("compile without saving", 0.3, 12.5, 90 * MIB, True)
    assert cautions([finished(0.5, baseline=own)])[-1] == (
        "budget=0.5: against its own baseline (compile without saving): +12.5 % time, a peak of 68.0 MiB instead of 90.0 MiB, "
        "gradients the same to the last bit"
    )
    wrong = dataclasses.replace(own, gradients_identical=False)
    assert "gradients NOT the same" in cautions([finished(0.5, baseline=wrong)])[-1]
    assert "offload saves nothing here" in " ".join(cautions([point("offload", 100, 1.0)]))


def test_labels_hold_what_differs() -> None:
    every = [
        point(f"c{k}", 50, 1.2, strategy="checkpoint", config={"strategy_kwargs": {"every": k, "blocks": None}})
        for k in (1, 2)
    ]
    assert labels([*every, finished(0.25)]) == {
        "c1": "checkpoint every=1",
        "c2": "checkpoint every=2",
        "budget=0.25": "recals fifo 0.25",
    }


def test_a_report_of_several_strategies_has_the_picture_and_the_sentence(tmp_path: Path) -> None:
    save_sweep(tmp_path, POINTS)
    written = report.write_report([tmp_path])
    assert "pareto" in written.figures_png
    assert (tmp_path / "pareto.svg").read_text().count("middle") >= 1
    assert "middle is the fastest" in written.texts["answer"]
    assert "middle is the fastest" in (tmp_path / "report.html").read_text()
    assert answer(POINTS[:1]).startswith(
        "mlp_chain: budget none needs the least memory"
    )  # one strategy: the other sentence


def test_one_strategy_and_policy_has_no_such_picture(tmp_path: Path) -> None:
    save_sweep(tmp_path, [finished(0.25), finished(0.5)])
    assert "pareto" not in report.write_report([tmp_path]).figures_png


def test_names_of_points_do_not_overlap() -> None:
    close = [point(f"strategy{index}", 90 + index % 2, 1.5 + 0.01 * index) for index in range(8)]
    figure = pareto_figure(close, labels(close), "")
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    (axes,) = figure.axes
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 8
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
