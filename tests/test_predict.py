"""The price of budgets from the command line: files, the knee, and a limit that makes a measured peak fit."""

from __future__ import annotations

import csv
import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from recals_exp import __main__ as cli
from recals_exp import config, records
from recals_exp.config import TerminalFilter
from recals_exp.estimates import load_estimates
from recals_exp.predict import TargetPeakError, fit_limit, fit_plan
from recals_exp.recals import StepPlan, TapeRecord, recals_with_rngs
from recals_exp.recals.prediction import profile_call
from recals_exp.recals.simulate import following
from recals_exp.runconfig import Budget, ConfigError, PartSpec, RunConfig
from recals_exp.runner import run

CHAIN = PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 8, "width": 64})
DIGITS = PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 8, "channels": 1})
MIB = 1024**2


def config_of(budget: Any, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "model": CHAIN,
        "dataset": DIGITS,
        "optimizer": PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
        "budget": budget if isinstance(budget, Budget) else Budget.parse(budget),
        "batch_size": 512,
        "policy": "fifo",
        "device": "cpu",
        "threads": 1,
        "train_steps": 1,
        "warmup_steps": 1,
        "timing_pairs": 1,
    }
    return RunConfig(**{**fields, **changes})


# -- a limit for a peak ----------------------------------------------------------------------------------------------


def _peak(limit: int) -> int:
    return 40 * MIB + max(limit, 10 * MIB)


@pytest.mark.parametrize(
    "predicted",
    [_peak, lambda limit: _peak(limit) // 2, lambda limit: 2 * _peak(limit), lambda limit: round(0.96 * _peak(limit))],
    ids=["right", "too low", "too high", "a little too low"],
)
@pytest.mark.parametrize("target", [60 * MIB, 80 * MIB, 120 * MIB])
def test_the_peak_lands_just_below_its_target(target: int, predicted: Callable[[int], int]) -> None:
    fit = fit_limit(target, _peak, predicted, MIB, 100 * MIB)
    assert 0.95 * target <= fit.peak_bytes <= target
    assert fit.peak_bytes == _peak(fit.limit_bytes)
    assert fit.tries[-1][1] >= 0
    if predicted is _peak:
        assert len(fit.tries) == 1  # a right prediction is measured once


def test_a_peak_in_steps_is_fitted_by_the_largest_limit_that_keeps_it() -> None:
    def steps(limit: int) -> int:
        return 40 * MIB if limit < 33 * MIB else 90 * MIB

    fit = fit_limit(80 * MIB, steps, lambda limit: 50 * MIB + limit, MIB, 100 * MIB)
    assert fit.peak_bytes == 40 * MIB
    assert 25 * MIB < fit.limit_bytes < 33 * MIB


def test_with_room_for_everything_nothing_is_dropped() -> None:
    assert fit_limit(500 * MIB, _peak, _peak, MIB, 100 * MIB).limit_bytes == 100 * MIB
    assert fit_limit(500 * MIB, _peak, lambda limit: 9 * _peak(limit), MIB, 100 * MIB).limit_bytes == 100 * MIB


@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_an_impossible_target_is_refused_with_the_smallest_peak(factor: float) -> None:
    with pytest.raises(
        TargetPeakError, match=r"smallest feasible peak of this step is 52428800 bytes \(50.0 MiB\)"
    ) as e:
        fit_limit(45 * MIB, _peak, lambda limit: round(factor * _peak(limit)), MIB, 100 * MIB)
    assert (e.value.target_bytes, e.value.smallest_bytes) == (45 * MIB, 50 * MIB)


@pytest.mark.parametrize("more", [0, 40_000])
def test_a_plan_aims_lower_by_what_is_measured_more(more: int) -> None:
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())])
    profile = profile_call(recals_with_rngs(-1), model, (torch.randn(256, 32),), {})
    record = profile.record

    def measured(limit: int, plans: Sequence[StepPlan]) -> int:
        policy: Any = following(record, plans[0].plan) if plans else "fifo"
        return profile.memory.peak_bytes(record, limit if plans else None, policy) + more

    most = measured(0, ())
    target = most - 4 * 256 * 32 * 4
    fit = fit_plan(target, profile, measured, profile.smallest_limit_bytes, effort=0.05)
    assert fit.peak_bytes <= target
    assert fit.plan is not None
    assert fit.plan.plan.overhead_pct > 0
    assert len(fit.tries) == (1 if not more else 2)
    room = fit_plan(most, profile, measured, profile.smallest_limit_bytes)
    assert (room.limit_bytes, room.plan, room.peak_bytes) == (profile.cache_total_bytes, None, most)
    with pytest.raises(TargetPeakError, match=r"the smallest feasible peak of this step is \d+ bytes") as e:
        fit_plan(most // 4, profile, measured, profile.smallest_limit_bytes, effort=0.05)
    assert most // 4 < e.value.smallest_bytes < target


# -- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "dtr", "planned"])
def test_a_target_for_the_peak_is_met_by_the_measured_step(tmp_path: Path, policy: str) -> None:
    plain = run(config_of(None), tmp_path / "plain").peak_memory_bytes
    tight = run(config_of("128KiB", policy=policy), tmp_path / "tight").peak_memory_bytes
    assert plain is not None
    assert tight is not None
    target = (plain + tight) // 2
    result = run(config_of(Budget("peak", target), policy=policy), tmp_path / "target")
    assert result.status == records.OK, result.error
    assert result.peak_memory_bytes is not None
    assert 0.95 * target <= result.peak_memory_bytes <= target
    assert result.budget == f"peak<={target}B"
    assert result.gradients_identical is True

    impossible = run(config_of(Budget("peak", tight // 2), policy=policy), tmp_path / "impossible")
    assert impossible.status == records.FAILED
    smallest = re.search(r"the smallest feasible peak of this step is (\d+) bytes", impossible.error or "")
    assert smallest is not None
    if policy == "planned":  # it has no one limit for the whole step, and gets lower
        assert tight // 2 < int(smallest[1]) <= tight
    else:
        assert int(smallest[1]) == tight


def test_the_knee_is_a_limit_of_the_curve(tmp_path: Path) -> None:
    result = run(config_of("knee"), tmp_path)
    assert result.status == records.OK, result.error
    fraction = result.budget_fraction()
    assert fraction is not None
    assert 0.1 < fraction < 1
    assert result.budget == "knee"


def test_predicted_and_bound_stand_beside_what_was_measured(tmp_path: Path) -> None:
    for policy, options in (("fifo", {}), ("dtr", {}), ("planned", {"waits": True})):
        result = run(config_of(0.3, policy=policy, policy_kwargs=options), tmp_path / policy)
        assert result.status == records.OK, result.error
        assert result.predicted_overhead_pct is not None
        assert result.bound_overhead_pct is not None
        assert 0 < result.bound_overhead_pct <= result.predicted_overhead_pct + 1e-6
        # the model of costs counts bytes moved too, which FLOPs leave out; in so small a chain they matter
        assert result.recompute_flops_pct == pytest.approx(result.predicted_overhead_pct, rel=0.25)
    for unlimited in (config_of(None), config_of(None, strategy="none")):
        result = run(unlimited, tmp_path / unlimited.strategy)
        expected = None if unlimited.strategy == "none" else 0.0
        assert (result.predicted_overhead_pct, result.bound_overhead_pct) == (expected, expected)
    assert {"predicted_overhead_pct", "bound_overhead_pct"} <= set(records.COLUMNS)


def test_prediction_leaves_training_as_it_is(tmp_path: Path) -> None:
    """The profiled step learns, and is undone: the losses are those of training that was never interrupted."""
    losses = [run(config_of(budget, train_steps=3), tmp_path / str(budget)).training for budget in (None, "knee", 0.5)]
    assert losses[0] is not None
    assert all(training is not None and training.losses == losses[0].losses for training in losses)


@pytest.mark.usefixtures("root_logging", "config_store")
def test_mode_predict_writes_the_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["model.depth=5", "model.width=16", "dataset.image_size=4", "batch_size=32", "threads=1"]
    assert cli.main(["mode=predict", *sizes, "hydra.run.dir=job"]) == cli.OK
    out, err = capsys.readouterr()
    with (tmp_path / "job/prediction.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("policy", "budget", "cache_limit_bytes", "predicted_overhead_pct", "bound_overhead_pct"),
        *("documented_overhead_pct", "peak_memory_bytes"),
    ]
    assert {row["policy"] for row in rows} == {"fifo", "dtr", "planned"}
    assert float(rows[-1]["budget"]) == 1
    assert (tmp_path / "job/prediction.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert records.load(tmp_path / "job").status == records.OK
    assert out.startswith((tmp_path / "job/prediction.txt").read_text())
    assert "knee: fifo" not in err  # not twice on a terminal
    assert "knee: fifo" in (tmp_path / "job/recals_exp.log").read_text()
    assert "job/prediction.csv, job/prediction.png, job/prediction.txt, job/result.json" in out


@pytest.mark.usefixtures("root_logging", "config_store")
def test_mode_analyze_prints_and_logs_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["mode=analyze", "model.depth=3", "batch_size=32", "threads=1", "hydra.run.dir=job"]) == cli.OK
    out = capsys.readouterr().out
    for text in (out, (tmp_path / "job/recals_exp.log").read_text()):
        assert "unit3.tanh" in text
        assert "smallest limit 50.0 KiB" in text
    assert not (tmp_path / "job/prediction.csv").exists()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("root_logging", "config_store")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["budget=0.5", "target_peak=6GiB"],
            "budget=0.5 and target_peak=6GiB are both given, and each says what may be",
        ),
        (["target_peak=lots"], "target_peak=lots is not a size (cannot read the size 'lots'"),
        (["target_peak=0"], "target_peak=0 is not above 0: use the peak of a whole step, a size with its unit such as"),
        (["target_peak=1GiB", "mode=predict"], "target_peak with mode=predict is not allowed: it is met by measuring"),
        (["target_peak=1GiB", "strategy=none"], "budget peak<=1GiB with strategy=none is not allowed: plain PyTorch"),
        (
            ["budget=knee", "strategy=none"],
            "budget knee with strategy=none is not allowed: plain PyTorch holds no limit",
        ),
        (["budget=elbow"], "budget=elbow is neither a fraction nor a size"),
    ],
)
def test_bad_combinations_say_what_is_allowed(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == cli.NOT_UNDERSTOOD
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_default_budget_gives_way_to_a_target() -> None:
    assert config._budget("auto", None) == Budget.parse(0.5)
    assert config._budget(None, None) == Budget()
    assert config._budget("auto", "6GiB") == Budget("peak", 6 * 1024**3)
    assert str(Budget.parse("knee")) == "knee"
    with pytest.raises(ConfigError, match="target_peak=-1 is not a size"):
        config._budget("auto", -1)
    for budget in (Budget("knee"), Budget("peak", 5)):
        with pytest.raises(ValueError, match="follows from a profiled step"):
            budget.limit_bytes(100)


@pytest.mark.parametrize(("name", "options"), [("dtr", {}), ("planned", {"waits": True})])
def test_the_policies_files_name_them(name: str, options: dict[str, Any]) -> None:
    assert OmegaConf.load(config.conf_dir() / f"policy/{name}.yaml") == {"name": name, **options}


def test_what_is_printed_is_kept_from_the_terminal_only() -> None:
    record = logging.makeLogRecord({"msg": "table"})
    assert TerminalFilter().filter(record)
    record.printed = True
    assert not TerminalFilter().filter(record)


# -- measured costs --------------------------------------------------------------------------------------------------


@pytest.fixture
def recording_is_7_pct(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_measured_costs(recals: Any, record: TapeRecord, *_: Any) -> TapeRecord:
        return dataclasses.replace(record, cost_unit="s", recording_cost=0.07 * record.step_cost)

    monkeypatch.setattr("recals_exp.recals.prediction.with_measured_costs", with_measured_costs)


@pytest.mark.usefixtures("recording_is_7_pct")
@pytest.mark.parametrize(("costs", "expected"), [("model", 0.0), ("measured", 7.0)])
@pytest.mark.parametrize("budget", [None, 1.0])
def test_a_step_in_which_nothing_is_dropped_costs_what_recording_costs(
    tmp_path: Path, budget: float | None, costs: str, expected: float
) -> None:
    result = run(config_of(budget, costs=costs), tmp_path)
    assert result.status == records.OK, result.error
    assert result.predicted_overhead_pct == pytest.approx(expected)
    assert result.bound_overhead_pct == pytest.approx(expected)


@pytest.mark.usefixtures("recording_is_7_pct")
@pytest.mark.parametrize("costs", ["model", "measured"])
def test_an_estimate_counts_recording_once(tmp_path: Path, costs: str) -> None:
    config = config_of(0.5, costs=costs, mode="dry_run", train_steps=100_000)
    assert run(config, tmp_path).status == records.OK
    (estimate,) = load_estimates(tmp_path).values()
    assert estimate.overhead_pct is not None
    recording = 1.3 if costs == "model" else 1.0  # a guess, unless it was measured
    wrapped_s = estimate.step_s * recording * (1 + estimate.overhead_pct / 100)
    assert estimate.job_s == pytest.approx(config.train_steps * wrapped_s, rel=0.02)
