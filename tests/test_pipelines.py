"""Pipelines as the framework runs them: from the configuration to the record, in one process and over processes."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from recals_exp import records
from recals_exp.meters.stages import allocated_peaks
from recals_exp.pipeline import ModelPipeline
from recals_exp.pipelinespec import ALLOWED, PipelineSpec
from recals_exp.records import RunResult
from recals_exp.report import write_report
from recals_exp.runconfig import Budget, ConfigError, PartSpec, RunConfig
from recals_exp.runner import run

MIB = 1024**2
DIGITS = PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 8, "channels": 1})


class Uneven(nn.Module):
    """Batch norm, dropout and a skip over the middle; cut by tracing."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True))
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh())
        self.last = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x.flatten(1))
        return self.last(a + self.middle(a))


def config_of(pipeline: PipelineSpec, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "model": PartSpec("uneven", f"{__name__}.Uneven", {}),
        "dataset": DIGITS,
        "optimizer": PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
        "pipeline": pipeline,
        "budget": Budget.parse(0.5),
        "batch_size": 256,
        "device": "cpu",
        "threads": 1,
        "train_steps": 3,
        "warmup_steps": 1,
        "timing_pairs": 2,
    }
    return RunConfig(**{**fields, **changes})


TWO = PipelineSpec("two_stage", devices=("cpu",), n_stages=2, n_micro_batches=4)
OVER = PipelineSpec("distributed", processes=2, n_micro_batches=4)


# -- the specification -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_stages": 0}, r"pipeline.n_stages=0 is not allowed: use a whole number of at least 1, or null"),
        ({"n_micro_batches": True}, "pipeline.n_micro_batches=True is not allowed"),
        ({"balance": "fast"}, r"pipeline.balance='fast' is not allowed: use even, time, memory, or the numbers"),
        ({"balance": [3, 0]}, r"pipeline.balance=\[3, 0\] is not allowed"),
        ({"budgets": [0.5, 7]}, r"pipeline.budgets=\[0.5, 7\] is not allowed: .*fraction in \(0, 1\]"),
        ({"budgets": "knee"}, r"pipeline.budgets=\['knee'\] is not allowed"),
        ({"processes": "some"}, r"pipeline.processes='some' is not allowed: .* auto \(what torchrun started"),
        (
            {"schedule": "2f2b"},
            r"pipeline.schedule='2f2b' is not allowed: use one of gpipe, 1f1b, interleaved1f1b, zbv",
        ),
        ({"timeout_s": 0}, "pipeline.timeout_s=0 is not allowed: use seconds"),
        ({"cuts": "a", "balance": "time"}, r"cuts=\['a'\] and pipeline.balance='time' both say where to cut"),
        ({"n_micro_batches": 2, "split_size": 3}, "both say how to split: set one to null"),
        ({"schedule": "zbv"}, "pipeline.schedule='zbv' is for a pipeline over processes"),
        (
            {"processes": 2, "n_micro_batches": 4, "ragged": True},
            "pipeline.ragged=True is for a pipeline in one process",
        ),
        ({"processes": 2}, "over processes the number of micro-batches must be known"),
        ({"stages": 3, "depth": 4}, "pipeline has no option 'stages', 'depth'; it has name, devices, n_stages"),
        ({"name": "none", "n_stages": 2}, "pipeline.n_stages=2 with pipeline=none"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineSpec.from_mapping({"name": "mine", **options})


def test_all_that_is_wrong_is_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)n_stages=0.*ragged=3.*replicas='x'"):
        PipelineSpec.from_mapping({"name": "mine", "n_stages": 0, "ragged": 3, "replicas": "x"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"budget": Budget("knee")},
            "budget knee with pipeline=two_stage is not allowed, as it is found for one cache",
        ),
        (
            {"strategy": "magic"},
            "strategy=magic with pipeline=two_stage is not allowed: stages run under strategy=recals",
        ),
        ({"mode": "predict"}, "mode=predict with pipeline=two_stage is not allowed"),
        ({"device": "cuda:1", "pipeline": OVER}, "device=cuda:1 with pipeline=distributed is not allowed"),
        ({"autocast": "bfloat16", "pipeline": OVER}, "autocast=bfloat16 with pipeline=distributed is not allowed"),
        (
            {"strategy": "none", "pipeline": dataclasses.replace(TWO, budgets=(0.5,))},
            r"pipeline.budgets=\[0.5\] with strategy=none",
        ),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**{"pipeline": TWO, **changes})


def test_the_schema_of_the_configuration_has_the_same_options() -> None:
    from recals_exp.config import PipelineSettings

    assert [item.name for item in dataclasses.fields(PipelineSettings)] == list(ALLOWED)
    assert PipelineSpec.from_mapping(dataclasses.asdict(PipelineSettings())) == PipelineSpec()


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    run(config_of(TWO), folder / "half")
    run(config_of(dataclasses.replace(TWO, budgets=(0.9, None)), budget=Budget()), folder / "uneven")
    run(config_of(TWO, strategy="none"), folder / "plain")
    return folder


@pytest.fixture(scope="module")
def results(sweep: Path) -> dict[str, RunResult]:
    return {path.name: records.load(path) for path in sweep.iterdir() if path.is_dir()}


def test_a_pipeline_is_the_plain_loop_over_its_micro_batches(results: dict[str, RunResult]) -> None:
    for result in results.values():
        assert result.status == records.OK, result.error
        assert result.parity is not None
        assert result.parity.differences == ()
        assert result.gradients_identical is True
        assert result.timing is not None
        assert result.timing.losses_identical
    learned = {result.training.losses for result in results.values() if result.training}
    assert len(learned) == 1


def test_each_stage_has_its_budget(results: dict[str, RunResult]) -> None:
    half = results["half"]
    assert half.stages is not None
    assert [stage.budget for stage in half.stages.stages] == ["0.5", "0.5"]
    for stage in half.stages.stages:
        assert stage.cache_limit_bytes is not None
        assert stage.cache_peak_bytes is not None
        assert 0 < stage.cache_peak_bytes <= stage.cache_limit_bytes
    assert half.cache_limit_bytes == sum(stage.cache_limit_bytes or 0 for stage in half.stages.stages)
    assert half.recompute_flops_pct is not None
    assert half.recompute_flops_pct > 0
    uneven = results["uneven"].stages
    assert uneven is not None
    assert [stage.budget for stage in uneven.stages] == ["0.9", "unlimited"]
    assert uneven.stages[1].cache_limit_bytes is None
    plain = results["plain"].stages
    assert plain is not None
    assert [(stage.budget, stage.cache_peak_bytes) for stage in plain.stages] == [("none", None)] * 2


def test_the_record_says_what_each_stage_did(results: dict[str, RunResult]) -> None:
    result = results["half"]
    stages = result.stages
    assert stages is not None
    assert (stages.schedule, stages.processes, stages.n_micro_batches) == ("in order", 1, 4)
    assert stages.bubble_ideal_pct == pytest.approx(100 / 5)
    assert result.bubble_pct == stages.bubble_pct
    assert [unit for stage in stages.stages for unit in stage.units]  # every unit is somewhere, once
    for stage in stages.stages:
        assert stage.busy_s == pytest.approx(stage.forward_s + stage.backward_s)
        assert 0 < stage.recompute_s < stage.backward_s
        assert stage.busy_s < stages.step_s
        assert stage.bubble_pct == pytest.approx(100 * (1 - stage.busy_s / stages.step_s))
    unlimited = results["plain"].stages
    assert unlimited is not None
    assert sum(s.peak_memory_bytes or 0 for s in stages.stages) < sum(
        s.peak_memory_bytes or 0 for s in unlimited.stages
    )


def test_events_and_pictures_of_a_pipeline(sweep: Path, tmp_path: Path) -> None:
    events = EventAccumulator(str(sweep / "half"))
    events.Reload()
    tags = events.Tags()
    for tag in ("stage_0/busy (s)", "stage_1/bubble (%)", "stage_1/cache_peak (MiB)", "pipeline/bubble_ideal (%)"):
        assert tag in tags["scalars"]
    assert tags["images"] == ["pipeline/timeline"]
    assert (sweep / "half/timeline.png").read_bytes().startswith(b"\x89PNG")
    written = write_report([sweep], tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "stages.csv").read_text())))
    assert len(rows) == 6
    assert {row["job"] for row in rows} == {"half", "uneven", "plain"}
    assert len(written.results) == 3


class Big(nn.Module):
    """Saves so many MiB for backward."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(mib * MIB // 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + (self.scale * 2).exp().exp()).mean().reshape(1)


def test_what_is_allocated_belongs_to_the_stage_at_work() -> None:
    pipe = ModelPipeline().append(Big(1), "cpu").append(Big(8), "cpu")
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks = allocated_peaks(pipe, lambda: pipe(torch.zeros(1)).sum().backward())
    for stage, mib in ((0, 1), (1, 8)):  # two saved values, and in backward one gradient at a time beside them
        assert 2 * mib * MIB <= peaks[stage] <= 5 * mib * MIB, peaks


# -- spiking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["constant", "poisson"])
def test_a_spiking_network_learns_the_digits_as_it_does_plainly(encoder: str, tmp_path: Path) -> None:
    config = config_of(
        PipelineSpec("two_stage", devices=("cpu",), n_stages=2, n_micro_batches=1),
        model=PartSpec("snn", "recals_exp.models.snn.snn", {"width": 64, "time_steps": 6, "encoder": encoder}),
        dataset=PartSpec("digits", "recals_exp.datasets.digits", {"scale": "unit", "held_out": 397}),
        optimizer=PartSpec("adam", "torch.optim.Adam", {"lr": 0.01}),
        budget=Budget.parse(0.3),
        batch_size=100,
        train_steps=60,
        timing_pairs=1,
    )
    result = run(config, tmp_path)
    assert result.status == records.OK, result.error
    assert result.gradients_identical is True
    assert result.stages is not None
    assert result.stages.n_micro_batches == 6  # its time steps
    training = result.training
    assert training is not None
    assert training.equals_plain is True
    assert training.accuracy_pct == training.plain_accuracy_pct
    assert training.accuracy_pct is not None
    assert training.accuracy_pct > 70
    rows = dataclasses.replace(config.pipeline, n_micro_batches=2)
    refused = run(dataclasses.replace(config, pipeline=rows), tmp_path / "rows")
    assert "a rate-coded model's micro-batches are its time steps; set pipeline.n_micro_batches=1" in str(refused.error)


def test_without_held_out_digits_nothing_is_judged(results: dict[str, RunResult]) -> None:
    training = results["half"].training
    assert training is not None
    assert (training.accuracy_pct, training.equals_plain) == (None, None)


def test_held_out_digits_are_in_no_batch() -> None:
    from recals_exp.datasets import digits

    data, whole = digits(scale="unit", held_out=1700), digits(scale="unit")
    assert (data.n_samples, data.n_held_out, whole.n_held_out) == (97, 1700, 0)
    seen = torch.cat([batch.x for batch in itertools.islice(data.batches(97), 2)])
    assert torch.equal(data.held_out().x, whole.sample(torch.arange(97, 1797)).x)
    assert seen.min() == 0
    assert seen.max() == 1
    trained = {row.numpy().tobytes() for row in seen}
    assert trained <= {row.numpy().tobytes() for row in whole.sample(torch.arange(97)).x}
