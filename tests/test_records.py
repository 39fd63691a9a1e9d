"""Records: what is written is read back, to the last bit, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

import pytest
from sample_results import BASELINE, BATCH_SEARCH, failed, finished

from recals_exp import records
from recals_exp.records import COLUMNS, PhaseTimes, RunResult

DOCUMENTED_COLUMNS = [
    "job",
    "status",
    "model",
    "dataset",
    "pipeline",
    "policy",
    "budget",
    "cache_total_bytes",
    "cache_limit_bytes",
    "cache_peak_bytes",
    "step_time_plain_s",
    "step_time_s",
    "time_overhead_pct",
    "time_overhead_low_pct",
    "time_overhead_high_pct",
    "recompute_flops_pct",
    "documented_overhead_pct",
    "peak_memory_plain_bytes",
    "peak_memory_bytes",
    "gradients_identical",
    "error",
    "predicted_overhead_pct",
    "bound_overhead_pct",
    "bubble_pct",
    "bubble_ideal_pct",
    "strategy",
    "samples_per_s",
    "speed_vs_plain",
    "batch_size",
]


def test_columns_are_the_documented_ones_and_the_first_fields() -> None:
    assert list(COLUMNS) == DOCUMENTED_COLUMNS
    assert [field.name for field in dataclasses.fields(RunResult)][: len(COLUMNS)] == DOCUMENTED_COLUMNS
    assert list(finished(0.25).row()) == DOCUMENTED_COLUMNS


@pytest.mark.parametrize(
    "result",
    [finished(0.125), finished(1.0), failed(), finished(0.5, baseline=BASELINE, batch_search=BATCH_SEARCH)],
    ids=["budget", "no drop", "failed", "others"],
)
def test_json_round_trip_is_exact(result: RunResult, tmp_path: Path) -> None:
    assert records.from_json(records.to_json(result)) == result
    records.save(result, tmp_path)
    assert records.load(tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]  # nothing half-written stays


def test_sample_fills_every_optional_field() -> None:
    """Else the round trip would prove nothing about the fields left out."""
    empty = [name for name, value in vars(finished(0.5)).items() if value is None]
    assert sorted(empty) == ["autocast", "baseline", "batch_search", "error"]  # two of them in "others" above


def test_whole_numbers_stay_floats_where_the_field_is_one() -> None:
    data = json.loads(records.to_json(finished(0.5, wall_s=4.0)))
    data["wall_s"] = 4
    read = records.from_json(json.dumps(data))
    assert read.wall_s == 4.0
    assert isinstance(read.wall_s, float)


def test_unknown_and_missing_fields_are_all_named() -> None:
    data = json.loads(records.to_json(finished(0.5)))
    data["surprise"] = data["wonder"] = 1
    del data["seed"], data["error"]
    with pytest.raises(
        ValueError, match=r"unknown fields surprise, wonder; missing fields error, seed; .*exactly: job, status"
    ):
        records.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("seed",), "0", r"seed must be of type int, got '0'"),
        (("seed",), True, r"seed must be of type int, got True"),
        (("gradients_identical",), 1, r"gradients_identical must be of type bool, got 1"),
        (("timing", "plain", "forward_s"), None, r"timing\.plain\.forward_s must be of type float, got None"),
        (("timing", "ratios"), 1.0, r"timing\.ratios must be a list, got 1.0"),
        (("timing", "ratios"), [1.0, "x"], r"timing\.ratios\[1\] must be of type float, got 'x'"),
        (("memory",), 3, r"memory must be an object with the fields of MemoryRecord, got 3"),
        (("environment", "packages"), [], r"environment\.packages must be an object, got \[\]"),
        (("status",), "great", r"status is 'great'; it must be one of ok, failed, running"),
        (("format_version",), 99, r"format_version 99, this version reads 5"),
    ],
)
def test_wrong_types_are_refused_by_path(path: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads(records.to_json(finished(0.5)))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        records.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_what_is_no_record_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="not a result record"):
        records.from_json(text)


def test_load_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result\.json: RunResult: missing fields .*"):
        records.load(tmp_path)


def test_numbers_that_are_none_are_refused_by_name() -> None:
    good = finished(0.5)
    assert good.timing is not None
    timing = dataclasses.replace(good.timing, ratios=(float("inf"),))
    bad = dataclasses.replace(good, step_time_s=float("nan"), timing=timing)
    with pytest.raises(ValueError, match=r"finite numbers only, but step_time_s, timing\.ratios\[0\] is not"):
        records.to_json(bad)


def test_a_failed_record_needs_its_reason() -> None:
    with pytest.raises(ValueError, match="status 'failed' but no error"):
        failed(error="")


def test_records_are_frozen_and_their_fields_plain() -> None:
    result = finished(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.status = "ok"  # type: ignore[misc]
    for field in dataclasses.fields(RunResult):
        assert "Tensor" not in str(typing.get_type_hints(RunResult)[field.name])


@pytest.mark.parametrize(("fraction", "overhead"), [(1.0, 0.0), (0.75, 5.6), (0.5, 16.7), (0.25, 50.0), (0.125, 116.7)])
def test_documented_overhead_is_the_documented_one(fraction: float, overhead: float) -> None:
    assert records.documented_overhead_pct(fraction) == pytest.approx(overhead, abs=0.06)


def test_expected_overhead_is_the_documented_one_when_backward_is_twice_forward() -> None:
    assert records.expected_overhead_pct(0.25, PhaseTimes(1.0, 2.0, 0.0)) == pytest.approx(50.0)
    # backward as long as forward: the same forwards weigh more in a shorter step
    assert records.expected_overhead_pct(0.25, PhaseTimes(1.0, 1.0, 0.0)) == pytest.approx(75.0)


@pytest.mark.parametrize(
    ("fraction", "forwards"),
    [(1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.4, 0.8), (1 / 3, 1.0), (0.25, 1.5), (0.125, 3.5)],
)
def test_fifo_reruns_whole_starts_of_the_chain(fraction: float, forwards: float) -> None:
    assert records.fifo_rerun_forwards(fraction) == pytest.approx(forwards)
    # by playing it: 1200 units, the newest of what is left are held, each miss re-runs from the start
    units, left, rerun = 1200, 1200, 0
    held = round(fraction * units)
    while (left := left - held) > 0:
        rerun += left
    assert rerun / units == pytest.approx(forwards, abs=1e-3)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_overhead_of_an_impossible_budget_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
        records.documented_overhead_pct(fraction)
    with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
        records.expected_overhead_pct(fraction, PhaseTimes(1.0, 2.0, 0.0))


def test_budget_fraction() -> None:
    assert finished(0.25).budget_fraction() == 0.25
    assert finished(0.25, cache_limit_bytes=None, budget="none").budget_fraction() == 1.0
    assert finished(0.25, cache_limit_bytes=2**40).budget_fraction() == 1.0
    assert failed().budget_fraction() is None
    shares = {
        text: finished(0.25, cache_limit_bytes=None, budget=text).budget_fraction() for text in ("0.3", "none", "1")
    }
    assert shares == {"0.3": 0.3, "none": 1.0, "1": 1.0}  # compiled code takes a share, and no limit in bytes


def test_errors_become_one_line() -> None:
    assert records.describe_error(ValueError("first\n  second")) == "ValueError: first second"
    assert records.describe_error(KeyError()) == "KeyError"
