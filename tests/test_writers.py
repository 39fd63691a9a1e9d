"""What lands in the event files, read back from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_results import MIB, failed, finished
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams_metadata

from recals_exp import report, writers
from recals_exp.records import COLUMNS
from recals_exp.writers import (
    BUDGET_TAG,
    METRIC_TAGS,
    RunWriter,
    budget_step,
    hyperparameters,
    tradeoff_tag,
    write_tradeoff,
)


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_every_metric_is_a_column_and_its_tag_names_the_unit() -> None:
    assert set(METRIC_TAGS) <= set(COLUMNS)
    for column, tag in METRIC_TAGS.items():
        unit = {"pct": "(%)", "bytes": "(MiB)", "s": "(s)", "identical": "(0 or 1)"}[column.rpartition("_")[2]]
        assert tag.endswith(unit)
    assert len(set(METRIC_TAGS.values())) == len(METRIC_TAGS)


def test_a_job_writes_its_curves_and_its_outcome_in_its_own_folder(tmp_path: Path) -> None:
    result = finished(0.25)
    assert result.timing is not None
    with RunWriter(tmp_path) as writer:
        for step, loss in enumerate([2.0, 1.5, 1.25]):
            writer.training_step(step, loss, 0.5, 3 * MIB)
        writer.pairs(result.timing)
        writer.result(result)
    assert all(path.is_file() for path in tmp_path.iterdir())  # add_hparams would have made a second run
    events = read(tmp_path)
    assert scalars(events, "training/loss") == [(0, 2.0), (1, 1.5), (2, 1.25)]
    assert scalars(events, "training/cache_peak (MiB)") == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert [step for step, _ in scalars(events, "pairs/time_overhead (%)")] == list(range(7))
    assert scalars(events, METRIC_TAGS["cache_limit_bytes"]) == [(0, 16.0)]
    assert scalars(events, METRIC_TAGS["gradients_identical"]) == [(0, 1.0)]
    assert scalars(events, METRIC_TAGS["time_overhead_pct"]) == [(0, pytest.approx(50.5))]


@pytest.mark.parametrize("result", [finished(0.25), failed()], ids=["ok", "failed"])
def test_every_job_announces_the_same_hyperparameters_and_metrics(result: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.result(result)
    events = read(tmp_path)

    def content(tag: str) -> bytes:
        return events.SummaryMetadata(tag).plugin_data.content

    experiment = hparams_metadata.parse_experiment_plugin_data(content(hparams_metadata.EXPERIMENT_TAG))
    start = hparams_metadata.parse_session_start_info_plugin_data(content(hparams_metadata.SESSION_START_INFO_TAG))
    end = hparams_metadata.parse_session_end_info_plugin_data(content(hparams_metadata.SESSION_END_INFO_TAG))
    assert [info.name for info in experiment.hparam_infos] == list(hyperparameters(finished(0.5)))
    assert [info.name.tag for info in experiment.metric_infos] == list(METRIC_TAGS.values())
    assert sorted(start.hparams) == sorted(hyperparameters(finished(0.5)))
    assert start.hparams["budget"].string_value == result.budget
    assert start.hparams["model"].string_value == "mlp_chain"
    assert start.hparams["batch_size"].number_value == 32
    assert end.status == (1 if result.status == "ok" else 2)  # STATUS_SUCCESS, STATUS_FAILURE


def test_a_failed_job_writes_its_reason_and_no_metric(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.result(failed())
    tags = read(tmp_path).Tags()
    assert tags["scalars"] == []
    assert "error/text_summary" in tags["tensors"]


def sweep_series() -> dict[str, Any]:
    return report.group_series([finished(0.75), finished(0.125), finished(0.5), finished(0.25), failed()])


def test_the_tradeoff_is_one_run_over_the_budget_in_percent(tmp_path: Path) -> None:
    png = _png()
    run = write_tradeoff(tmp_path, sweep_series(), png)
    assert run == tmp_path / "tradeoff"
    events = read(run)
    assert scalars(events, BUDGET_TAG) == [(13, 12.5), (25, 25.0), (50, 50.0), (75, 75.0)]
    documented = scalars(events, tradeoff_tag("documented_overhead_pct"))
    assert documented == [
        (13, pytest.approx(116.667, abs=0.001)),
        (25, 50.0),
        (50, pytest.approx(16.667, abs=0.001)),
        (75, pytest.approx(5.556, abs=0.001)),
    ]
    for column in ("recompute_flops_pct", "time_overhead_pct", "time_overhead_low_pct", "time_overhead_high_pct"):
        assert [step for step, _ in scalars(events, tradeoff_tag(column))] == [13, 25, 50, 75]
    assert [value for _, value in scalars(events, tradeoff_tag("peak_memory_bytes"))] == [44.0, 52.0, 68.0, 84.0]
    (image,) = events.Images(writers.FIGURE_TAG)
    assert image.encoded_image_string == png
    assert (image.width, image.height) == (1320, 576)


def test_writing_the_tradeoff_again_replaces_it(tmp_path: Path) -> None:
    write_tradeoff(tmp_path, sweep_series(), _png())
    run = write_tradeoff(tmp_path, report.group_series([finished(0.5)]), _png())
    assert scalars(read(run), BUDGET_TAG) == [(50, 50.0)]


def test_several_series_are_runs_below_the_tradeoff(tmp_path: Path) -> None:
    series = report.group_series([finished(0.5), finished(0.25), finished(0.5, model="gpt", dataset="a/b")])
    run = write_tradeoff(tmp_path, series, _png())
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["gpt-a-b", "mlp_chain-digits"]
    assert scalars(read(run / "mlp_chain-digits"), BUDGET_TAG) == [(25, 25.0), (50, 50.0)]
    assert read(run).Tags()["images"] == [writers.FIGURE_TAG]


def test_what_is_no_png_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the bytes of a PNG file"):
        write_tradeoff(tmp_path, sweep_series(), b"GIF89a  ")


@pytest.mark.parametrize(("percent", "step"), [(12.5, 13), (12.4, 12), (50.0, 50), (0.4, 0), (100.0, 100)])
def test_budgets_are_rounded_half_up_on_the_axis(percent: float, step: int) -> None:
    assert budget_step(percent) == step


def _png() -> bytes:
    from recals_exp.figures import tradeoff_png

    return tradeoff_png(sweep_series(), "a title")
