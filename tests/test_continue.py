"""Comfort: training stopped and continued, settings of the numerics, a dry run, the debug preset."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recals_exp import __main__ as cli
from recals_exp import records
from recals_exp.checkpoint import CHECKPOINT_FILE, Checkpoint
from recals_exp.datasets import Batch
from recals_exp.estimates import Estimate, format_estimates, load_estimates
from recals_exp.learning import train
from recals_exp.meters.device import deterministic_algorithms, generator_states, restore_generator_states
from recals_exp.meters.steps import TrainStep
from recals_exp.runconfig import Budget, ConfigError, PartSpec, RunConfig
from recals_exp.runner import run
from recals_exp.writers import RunWriter

STEPS = 6


def config_of(**changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "model": PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 6, "width": 16}),
        "dataset": PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 6, "channels": 1}),
        "optimizer": PartSpec("adam", "torch.optim.Adam", {"lr": 0.01}),
        "budget": Budget.parse(0.5),
        "batch_size": 16,
        "device": "cpu",
        "threads": 1,
        "train_steps": STEPS,
        "warmup_steps": 1,
        "timing_pairs": 1,
    }
    return RunConfig(**{**fields, **changes})


# -- stopped and continued ---------------------------------------------------------------------------------------------


def learner() -> tuple[TrainStep, Iterator[Batch]]:
    """A model that draws (dropout), keeps statistics (batch norm) and has an optimizer with state, on batches that draw."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    step = TrainStep(
        model, torch.optim.Adam(model.parameters(), lr=0.1), nn.functional.cross_entropy, torch.device("cpu")
    )
    return step, (Batch(torch.rand(8, 4), torch.randint(3, (8,))) for _ in range(100))


@pytest.mark.parametrize(("stop_at", "every", "done"), [(3, 0, 4), (1, 0, 2)])
def test_stopped_training_continues_as_if_it_had_not_been(tmp_path: Path, stop_at: int, every: int, done: int) -> None:
    """The interrupt comes in the middle of a step: that step is still done, and then there is a checkpoint."""
    whole, batches = learner()
    expected = train(whole, whole.model, batches, STEPS, seed=5)

    def interrupt(index: int, loss: float, outcome: object) -> None:
        if index == stop_at:
            signal.raise_signal(signal.SIGINT)

    first, batches = learner()
    with pytest.raises(KeyboardInterrupt):
        train(first, first.model, batches, STEPS, 5, interrupt, checkpoint=Checkpoint(tmp_path, first, {"a": 1}, every))
    assert len(torch.load(tmp_path / CHECKPOINT_FILE, weights_only=True)["losses"]) == done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    second, batches = learner()
    seen: list[int] = []
    losses = train(
        second,
        second.model,
        batches,
        STEPS,
        5,
        lambda index, *_: seen.append(index),
        checkpoint=Checkpoint(tmp_path, second, {"a": 1}),
    )
    assert seen == list(range(done, STEPS))
    assert losses == expected
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert not (tmp_path / CHECKPOINT_FILE).exists()


def test_a_killed_job_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    step, batches = learner()

    def dies(index: int, *_: object) -> None:
        if index == 4:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        train(step, step.model, batches, STEPS, 5, dies, checkpoint=Checkpoint(tmp_path, step, {}, every=2))
    assert len(torch.load(tmp_path / CHECKPOINT_FILE, weights_only=True)["losses"]) == 4


def test_a_checkpoint_of_another_configuration_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, _ = learner()
    Checkpoint(tmp_path, step, {"lr": 1}, every=1).after_step([0.5])
    assert Checkpoint(tmp_path, step, {"lr": 2}).load() == ([], {})
    assert "is of another configuration and is not used" in caplog.text
    assert Checkpoint(tmp_path, step, {"lr": 1, "checkpoint_every": 3}).load()[0] == [0.5]


def test_a_run_stopped_and_continued_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(config_of(), tmp_path / "whole")
    written = RunWriter.training_step

    def interrupts(self: RunWriter, index: int, *others: Any) -> None:
        written(self, index, *others)
        if index == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunWriter, "training_step", interrupts)
    with pytest.raises(KeyboardInterrupt):
        run(config_of(), tmp_path / "job")
    assert records.load(tmp_path / "job").error == "interrupted"
    continued = run(config_of(), tmp_path / "job")
    assert whole.training is not None
    assert continued.training is not None
    assert continued.training.losses == whole.training.losses
    assert continued.peak_memory_bytes == whole.peak_memory_bytes
    assert continued.flops == whole.flops


def test_generators_are_put_back() -> None:
    numpy = pytest.importorskip("numpy")
    import random

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    states = generator_states(torch.device("cpu"))
    first = draw()
    assert draw() != first
    restore_generator_states(states, torch.device("cpu"))
    assert draw() == first


# -- numerics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtype_is_that_of_the_parameters_and_inputs(dtype: str, tmp_path: Path) -> None:
    result = run(config_of(dtype=dtype, train_steps=1), tmp_path)
    assert result.status == records.OK, result.error
    assert result.gradients_identical is True
    plain = run(config_of(train_steps=1), tmp_path / "float32")
    ratio = {"float64": 2, "bfloat16": 0.5}[dtype]
    assert result.cache_total_bytes == ratio * plain.cache_total_bytes  # type: ignore[operator]


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="dtype='int8' is not allowed: use one of float32, float64, bfloat16, float16"
    ):
        config_of(dtype="int8")


@pytest.mark.parametrize("allowed", [True, False])
def test_deterministic_algorithms_are_on_for_the_job_only(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = torch.backends.flags_frozen.__globals__  # what ``torch.backends.disable_global_flags()`` changes for good
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", allowed)
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()


# -- a dry run, and the preset -----------------------------------------------------------------------------------------


def test_a_dry_run_estimates_and_measures_nothing(tmp_path: Path) -> None:
    config = config_of(
        mode="dry_run",
        model=PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 12, "width": 64}),
        batch_size=256,
    )
    result = run(config, tmp_path / "0_dry")
    assert result.status == records.OK, result.error
    assert result.time_overhead_pct is None
    (estimate,) = load_estimates(tmp_path).values()
    real = run(dataclasses.replace(config, mode="run"), tmp_path / "real")
    assert estimate.peak_plain_bytes == pytest.approx(real.peak_memory_plain_bytes, rel=0.02)
    assert estimate.peak_bytes == pytest.approx(real.peak_memory_bytes, rel=0.05)
    assert estimate.overhead_pct == pytest.approx(real.predicted_overhead_pct)
    # of time no more can be said here: steps of milliseconds, on a machine that others use
    assert estimate.job_s > estimate.step_s * config.train_steps


def test_the_table_of_estimates() -> None:
    one = Estimate(0.5, 42.0, 2**20, 2**19, 1000, 16.6)
    table = format_estimates({"0_a": one, "1_b": dataclasses.replace(one, job_s=4000.0, overhead_pct=None)})
    assert "500.0 ms" in table
    assert "16.6 %" in table
    assert "<0.5 MiB" in table
    assert "2 jobs, one after the other: about 67 min" in table


@pytest.mark.usefixtures("root_logging", "config_store")
def test_a_sweep_in_dry_run_and_with_the_debug_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["preset=debug", "model.depth=4", "dataset.image_size=6", "budget=0.5,0.75", "-m"]
    assert cli.main([*tiny, "mode=dry_run", "hydra.sweep.dir=dry"]) == cli.OK
    assert "2 jobs, one after the other: about" in capsys.readouterr().out
    assert not (tmp_path / "dry/tradeoff.json").exists()
    assert cli.main([*tiny, "hydra.sweep.dir=short"]) == cli.OK
    rows = json.loads((tmp_path / "short/tradeoff.json").read_text())
    assert [row["status"] for row in rows] == ["ok", "ok"]
    result = records.load(tmp_path / "short/0_budget=0.5")
    assert (result.batch_size, result.config["timing_pairs"]) == (4, 2)
