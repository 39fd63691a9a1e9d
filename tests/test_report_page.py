"""`report.html`: what it says, that it loads nothing, and that a real browser shows and sorts it."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from sample_results import MIB, failed, finished, save_sweep

from recals_exp import details, report
from recals_exp.answers import QUESTION_FILE, answer
from recals_exp.cautions import cautions
from recals_exp.details import Layer, StepDetails, Timeline, thinned
from recals_exp.records import CacheRecord
from recals_exp.repeats import find_points, mean_interval

STEP = StepDetails(
    (Layer("unit1.tanh", "Tanh", 3 * MIB), Layer("head <script>", "Linear", MIB)),
    20 * MIB,
    Timeline(1.0, 2.0, 0.1, (0.0, 0.5, 1.5, 3.0), (0, 40 * MIB, 80 * MIB, 0)),
    Timeline(1.0, 3.0, 0.1, (0.0, 0.5, 2.5, 4.0), (0, 20 * MIB, 40 * MIB, 0)),
)
MARKUP = failed("budget=<b>", "ValueError: <script>alert(1)</script> & more")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = save_sweep(tmp_path / "sweep", [finished(0.5), finished(0.125), failed(), finished(0.25), MARKUP])
    for name in ("budget=0.5", "budget=0.25"):
        details.save(STEP, folder / name)
    (folder / QUESTION_FILE).write_text("does it <pay>?\n")
    report.write_report([folder])
    return folder


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_answer_names_what_to_choose_and_its_cost() -> None:
    results = [finished(0.125), finished(0.5), finished(0.75), failed()]
    assert answer(results) == (
        "mlp_chain: budget 0.125 needs the least memory: the step peaks at 44.0 MiB where plain takes 100.0 MiB (56 % less), "
        "for 117.2 % more time [115.2, 119.7]. Within 10 % more time the best is budget 0.75: 16 % less memory for 6.1 % more "
        "time [4.1, 8.6]. Gradients are those of plain PyTorch to the last bit. "
        "The losses of all 3 training steps are the same in all 3 jobs, to the last bit."
    )
    assert "Nothing that was measured saves memory within 10 % more time" in answer([finished(0.125)])
    same = finished(0.5, peak_memory_bytes=100 * MIB)
    assert answer([same]) == "mlp_chain: nothing that was measured lowers the peak of a step (100.0 MiB)."
    assert answer([failed()]) == "No job has finished a measurement yet."
    several = answer([finished(0.5), finished(0.5, model="gpt", gradients_identical=False)])
    assert several.startswith("mlp_chain: budget 0.5 needs")
    assert " gpt: budget 0.5 needs" in several
    assert "Gradients differ in 1 jobs." in several


def test_repeats_are_merged_with_their_interval() -> None:
    repeats = [
        finished(0.5, job=f"s{seed}", seed=seed, time_overhead_pct=value) for seed, value in enumerate((16, 18, 20))
    ]
    one, three = find_points([finished(0.25), *repeats, failed()])
    assert one.merged == finished(0.25)
    merged = three.merged
    assert merged.job == "s0 and 2 more"
    assert merged.time_overhead_pct == 18
    # Student's t with two degrees of freedom: 4.303 * 2 / sqrt(3)
    assert merged.time_overhead_high_pct == pytest.approx(18 + 4.968, abs=0.01)
    assert mean_interval([1.0]) == (None, None)
    table = report.format_table([finished(0.25), *repeats])
    assert (
        "s0 and 2 more (3 repeats): time overhead 18.0 % on average, 95 % interval [13.0, 23.0], from 16.0 to 20.0"
        in table
    )
    (curve,) = report.group_series([finished(0.25), *repeats]).values()
    assert len(curve) == 2


def test_repeats_have_their_figures_too(tmp_path: Path) -> None:
    folder = save_sweep(tmp_path, [finished(0.5, job=f"s{seed}", seed=seed) for seed in range(2)])
    for job in ("s0", "s1"):
        details.save(STEP, folder / job)
    assert set(report.write_report([folder]).figures_png) == {"tradeoff", "memory_timeline", "layers"}


def test_cautions() -> None:
    good = finished(0.5)
    assert cautions([good, finished(0.25)]) == []
    assert good.timing is not None
    timing = dataclasses.replace(good.timing, plain_s=(0.3, 0.3, 0.3, 0.3, 0.3, 0.4, 0.4))
    idle = CacheRecord(MIB, 1, 1, 0, 0, 0, 0, 0, 0)
    bad = finished(
        0.5,
        timing=timing,
        time_overhead_low_pct=0.0,
        time_overhead_high_pct=40.0,
        cache=idle,
        notes=("timed beside others",),
    )
    drift, noise, dropped, note = cautions([bad])
    assert "plain steps became 33 % slower while it was timed" in drift
    assert "noisy: the overhead of 17.2 % is known to within 20 points only" in noise
    assert "nothing was dropped" in dropped
    assert note == "budget=0.5: timed beside others"
    (between,) = cautions([good, finished(0.25, step_time_plain_s=0.5)])
    assert "a plain step took 310.0 ms in budget=0.5 and 500.0 ms in budget=0.25" in between


def test_details_are_read_as_they_were_written(tmp_path: Path) -> None:
    details.save(STEP, tmp_path)
    assert details.load(tmp_path) == STEP
    assert details.load(tmp_path / "nowhere") is None
    (tmp_path / details.DETAILS_FILE).write_text("{")
    assert details.load(tmp_path) is None


def test_a_thinned_timeline_keeps_its_peak_and_its_end() -> None:
    live = [(17 * i) % 101 for i in range(5000)]
    live[3333] = 1000
    times, kept = thinned([float(i) for i in range(5000)], live, most=100)
    assert len(kept) <= 101
    assert times == sorted(times)
    assert max(kept) == 1000
    assert times[-1] == 4999


def test_the_page_loads_nothing_and_escapes(sweep: Path) -> None:
    text = (sweep / "report.html").read_text()
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["'](?!#)[^"']*["']""", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    )
    assert "@import" not in text
    assert "<script>alert" not in text
    assert "Does it &lt;pay&gt;?" in text
    for name in ("tradeoff", "memory_timeline", "layers"):
        assert (sweep / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (sweep / f"{name}.svg").read_text().startswith("<svg")


# -- in a browser ------------------------------------------------------------------------------------------------------


def column(page: Any, table: str, name: str) -> list[str]:
    return page.evaluate(
        """([table, name]) => {
            const t = document.getElementById(table), heads = Array.from(t.tHead.rows[0].cells, c => c.textContent);
            return Array.from(t.tBodies[0].rows, row => row.cells[heads.indexOf(name)].textContent);
        }""",
        [table, name],
    )


def test_the_page_in_a_real_browser(sweep: Path) -> None:
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        requests: list[str] = []
        faults: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto((sweep / "report.html").as_uri())
        assert page.title() == "Memory against recomputation: mlp_chain, digits, fifo"
        assert "budget 0.125 needs the least memory" in page.inner_text("#answer")
        assert "CacheLimitError: limit 1 B, needed 2 B" in page.inner_text("#failed")
        assert "<script>alert(1)</script> & more" in page.inner_text("#failed")
        assert "torch" in page.inner_text("#environment")
        drawn = page.locator("svg")
        assert drawn.count() == 3
        for figure in drawn.all():
            box = figure.bounding_box()
            assert box["width"] > 400
            assert box["height"] > 100
        assert "under the budget" in page.locator("#figures svg").text_content()

        before = column(page, "results-table", "budget")
        page.click("#results-table th:has-text('peak_memory_bytes')")
        ascending = [text for text in column(page, "results-table", "peak_memory_bytes") if text != "-"]
        assert ascending == ["44.0 MiB", "52.0 MiB", "68.0 MiB"]
        page.click("#results-table th:has-text('peak_memory_bytes')")
        descending = column(page, "results-table", "peak_memory_bytes")
        assert descending == ["68.0 MiB", "52.0 MiB", "44.0 MiB", "-", "-"], "what was not measured stays last"
        assert sorted(before) == sorted(column(page, "results-table", "budget"))
        assert column(page, "layers-table", "layer") == ["unit1.tanh", "head <script>"]
        page.click("#jobs summary >> nth=0")
        assert '"budget": "0.125"' in page.inner_text("#jobs details >> nth=0")
        assert not faults
        assert all(url.startswith("file:") for url in requests)
        if target := os.environ.get("RECALS_EXP_SCREENSHOTS"):  # for a look by eye
            page.screenshot(path=f"{target}/report.png", full_page=True)


def test_the_answer_says_whether_training_went_the_same_way() -> None:
    same = answer([finished(0.25), finished(0.5)])
    assert same.endswith("The losses of all 3 training steps are the same in all 2 jobs, to the last bit.")
    other = dataclasses.replace(finished(0.5).training, losses=(2.3, 1.9, 0.3))
    assert answer([finished(0.25), finished(0.5, training=other)]).endswith("Losses of training differ between jobs.")
    assert "training" not in answer([finished(0.25), finished(0.5, training=None)])
    assert "training" not in answer([finished(0.25), finished(0.5, gradients_identical=False, training=other)])
