"""A whole job, real and small: what is measured agrees with itself, and what fails is a record."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from recals_exp import records
from recals_exp.progress import Progress, TerminalProgress
from recals_exp.records import RunResult
from recals_exp.runconfig import Budget, PartSpec, PipelineSpec, RunConfig
from recals_exp.runner import finish_sweep, run

CHAIN = PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 8, "width": 64})
DIGITS = PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 8, "channels": 1})


def config_of(budget: Any = 0.5, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "model": CHAIN,
        "dataset": DIGITS,
        "optimizer": PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
        "budget": Budget.parse(budget),
        "batch_size": 256,
        "policy": "fifo",
        "device": "cpu",
        "threads": 1,
        "train_steps": 12,
        "warmup_steps": 1,
        "timing_pairs": 3,
    }
    return RunConfig(**{**fields, **changes})


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over budgets, one of them impossible."""
    folder = tmp_path_factory.mktemp("sweep")
    for budget in (0.25, 0.5, None, "100B"):
        run(config_of(budget), folder / f"budget={budget}")
    return folder


@pytest.fixture(scope="module")
def results(sweep: Path) -> dict[str, RunResult]:
    return {result.budget: result for result in map(records.load, sweep.iterdir())}


def test_every_column_of_a_finished_job_is_filled(results: dict[str, RunResult]) -> None:
    of_pipelines = ["bubble_pct", "bubble_ideal_pct"]
    for budget in ("0.25", "0.5"):
        assert [name for name, value in results[budget].row().items() if value is None] == ["error", *of_pipelines]
    assert [name for name, value in results["none"].row().items() if value is None] == [
        "cache_limit_bytes",
        "error",
        *of_pipelines,
    ]
    empty = [name for name, value in vars(results["0.5"]).items() if value is None]
    assert empty == ["error", *of_pipelines, "autocast", "batch_search", "planning_s", "baseline", "stages"]


def test_the_limit_is_the_fraction_of_the_total_and_is_kept(results: dict[str, RunResult]) -> None:
    for budget in (0.25, 0.5):
        result = results[str(budget)]
        # 8 units of 256 x 64 floats, and what the loss is not part of
        assert result.cache_total_bytes == pytest.approx(8 * 256 * 64 * 4, rel=0.05)
        assert result.cache_limit_bytes == int(budget * result.cache_total_bytes)
        assert result.cache_peak_bytes is not None
        assert 0 < result.cache_peak_bytes <= result.cache_limit_bytes
    assert results["none"].cache_peak_bytes == results["none"].cache_total_bytes == results["0.5"].cache_total_bytes


def test_the_step_is_plain_and_learns(results: dict[str, RunResult]) -> None:
    trained = [results[budget].training for budget in ("0.25", "0.5", "none")]
    assert all(training is not None and len(training.losses) == 12 for training in trained)
    assert (
        len({training.losses for training in trained if training}) == 1
    )  # the same learning at every budget, to the bit
    assert trained[0] is not None
    assert trained[0].last_loss < 0.9 * trained[0].first_loss
    for budget in ("0.25", "0.5", "none"):
        result = results[budget]
        assert result.gradients_identical is True
        assert result.parity is not None
        assert result.parity.differences == ()
        assert result.timing is not None
        assert result.timing.losses_identical


def test_recomputation_is_counted_exactly(results: dict[str, RunResult]) -> None:
    for budget, documented in (("0.25", 50.0), ("0.5", 100 / 6)):
        result = results[budget]
        assert result.documented_overhead_pct == pytest.approx(documented, rel=1e-4)
        # 8 units are few: whole values only, and the head costs nothing; the documented figure is for many
        assert result.recompute_flops_pct == pytest.approx(documented, rel=0.35)
        flops = result.flops
        assert flops is not None
        assert flops.recomputed_flops == flops.engine_recomputed_flops > 0
        assert flops.overhead_pct == result.recompute_flops_pct
    assert results["none"].recompute_flops_pct == 0.0
    assert results["0.25"].recompute_flops_pct > results["0.5"].recompute_flops_pct


def test_peak_memory_is_real_and_falls_with_the_budget(results: dict[str, RunResult]) -> None:
    peaks = [results[budget].peak_memory_bytes for budget in ("0.25", "0.5", "none")]
    assert None not in peaks
    assert sorted(set(peaks)) == peaks
    plain = {results[budget].peak_memory_plain_bytes for budget in ("0.25", "0.5", "none")}
    assert len(plain) == 1  # the baseline repeats to the byte
    assert peaks[0] < plain.pop()
    result = results["0.25"]
    assert result.memory is not None
    assert result.peak_memory_bytes == result.memory.resident_bytes + result.memory.step_peak_bytes
    assert result.memory.process_peak_bytes > 50 * 1024**2


def test_without_a_limit_a_step_peaks_where_plain_does(results: dict[str, RunResult]) -> None:
    """What backward is done with must be freed at once, as in plain PyTorch, and not when the graph dies."""
    result = results["none"]
    assert result.peak_memory_bytes == pytest.approx(result.peak_memory_plain_bytes, rel=0.02)


def test_time_columns_agree_with_the_raw_pairs(results: dict[str, RunResult]) -> None:
    result = results["0.5"]
    timing = result.timing
    assert timing is not None
    assert len(timing.ratios) == 3
    assert sorted(timing.ratios)[1] == pytest.approx(1 + result.time_overhead_pct / 100)
    assert result.time_overhead_low_pct <= result.time_overhead_pct <= result.time_overhead_high_pct
    assert min(timing.plain_s) <= result.step_time_plain_s <= max(timing.plain_s)
    assert timing.expected_overhead_pct == pytest.approx(
        records.expected_overhead_pct(result.cache_limit_bytes / result.cache_total_bytes, timing.plain)
    )


def test_an_impossible_limit_is_a_failed_record_with_the_reason(results: dict[str, RunResult]) -> None:
    result = results["100B"]
    assert result.status == records.FAILED
    assert result.error is not None
    assert result.error.startswith("CacheLimitError:")
    assert "unit" in result.error
    assert result.wall_s is not None
    assert result.model == "mlp_chain"


def test_the_record_holds_the_configuration_and_the_environment(results: dict[str, RunResult]) -> None:
    result = results["0.5"]
    assert result.config["model"]["kwargs"]["depth"] == 8
    assert result.config["budget"] == "0.5"
    assert result.environment is not None
    assert result.environment.packages["torch"] == torch.__version__
    assert result.threads == 1
    assert result.device == "cpu"


def test_events_lie_in_the_jobs_own_folder(sweep: Path) -> None:
    events = EventAccumulator(str(sweep / "budget=0.5"), size_guidance={"scalars": 0})
    events.Reload()
    assert len(events.Scalars("training/loss")) == 12
    assert len(events.Scalars("pairs/plain (s)")) == 3
    assert len(events.Scalars("overhead/measured_flops (%)")) == 1
    assert [path.name for path in (sweep / "budget=0.5").iterdir() if path.is_dir()] == []


def test_finishing_the_sweep_writes_report_and_tradeoff(sweep: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "sweep"
    shutil.copytree(sweep, copy)
    refused = RunResult(
        job="refused",
        status=records.FAILED,
        error="ConfigError: budget=7",
        model="m",
        dataset="d",
        pipeline="none",
        policy="fifo",
        budget="7",
        strategy="recals",
        device="cpu",
        batch_size=1,
        seed=0,
    )
    records.save(refused, copy / "refused")
    written = finish_sweep(copy)
    assert written.failed == 2
    figures = {f"{name}{end}" for name in ("tradeoff", "memory_timeline", "layers") for end in (".png", ".svg")}
    assert {path.name for path in copy.iterdir() if path.is_file()} == {
        "tradeoff.csv",
        "tradeoff.json",
        "report.html",
        *figures,
    }
    assert len(json.loads((copy / "tradeoff.json").read_text())) == 5
    events = EventAccumulator(str(copy / "tradeoff"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("tradeoff/overhead_measured_flops (%)")] == [25, 50, 100]
    # a job that was refused before it ran has its line in TensorBoard too
    refused_events = EventAccumulator(str(copy / "refused"))
    refused_events.Reload()
    assert "_hparams_/session_start_info" in refused_events.summary_metadata


# -- failure ---------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Raises what it is told to, in the forward call of the given number."""

    alive: Any = None

    def __init__(self, error: str = "RuntimeError", at_call: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.error, self.calls_left = error, at_call
        self.me = [self]  # a cycle, as real models have them
        Broken.alive = weakref.ref(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left <= 0:
            raise {"RuntimeError": RuntimeError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[
                self.error
            ]("the model\nis broken")
        return self.linear(x.flatten(1))


def broken(**options: Any) -> RunConfig:
    return config_of(model=PartSpec("broken", f"{__name__}.Broken", options))


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_a_job_that_raises_is_a_record_its_traceback_is_logged(
    error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    with caplog.at_level(logging.ERROR):
        result = run(broken(error=error), tmp_path)
    assert result == records.load(tmp_path)
    assert (result.status, result.error) == (records.FAILED, f"{error}: the model is broken")
    assert "in forward" in caplog.text
    assert "Traceback" in caplog.text
    assert torch.get_num_threads() == threads
    caplog.clear()
    gc.collect()


def test_a_failed_job_keeps_no_tensor_alive(tmp_path: Path) -> None:
    logging.getLogger("recals_exp.runner").disabled = True  # the test's log capture would keep the traceback
    try:
        result = run(broken(), tmp_path)
    finally:
        logging.getLogger("recals_exp.runner").disabled = False
    assert result.status == records.FAILED
    assert Broken.alive() is None


def test_an_interrupt_is_recorded_and_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(broken(error="KeyboardInterrupt"), tmp_path)
    assert records.load(tmp_path).status == records.FAILED
    assert records.load(tmp_path).error == "interrupted"


def test_while_it_runs_the_record_says_so(tmp_path: Path) -> None:
    seen: list[str] = []

    class Look(Progress):
        def start(self, title: str, total: int) -> None:
            seen.append(records.load(tmp_path).status)

        def advance(self, stage: str, steps: int = 1) -> None:
            pass

        def stop(self) -> None:
            pass

    run(config_of(train_steps=0, warmup_steps=0, timing_pairs=1), tmp_path, Look())
    assert seen == [records.RUNNING]
    assert records.load(tmp_path).status == records.OK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:99"}, "ValueError: device='cuda:99' is not on this machine, which has .*use device=cpu"),
        ({"device": "toaster"}, "ValueError: device='toaster' is not a device: use auto, cpu"),
        (
            {"pipeline": PipelineSpec("mine", devices=("cuda:99", "cpu"))},
            r"ValueError: device 'cuda:99' \(cuda:99\) does not exist on this machine; the devices that exist are: cpu",
        ),
        ({"strategy": "magic"}, "ValueError: strategy='magic' does not exist; there are: none, recals"),
        ({"policy": "magic"}, "ValueError: policy='magic' does not exist; there are: .*fifo"),
        (
            {"optimizer": PartSpec("sgd", "torch.optim.SGD", {"lr": 1e38})},
            r"ValueError: training diverged: the loss of step \d+ is (nan|inf); a lower optimizer\.lr may help",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    result = run(config_of(**changes), tmp_path)
    assert result.status == records.FAILED
    assert re.match(message, str(result.error)), result.error


# -- other ways to run -----------------------------------------------------------------------------------------------


def test_no_strategy_measures_plain_against_plain(tmp_path: Path) -> None:
    result = run(config_of(0.25, strategy="none"), tmp_path)
    assert result.status == records.OK, result.error
    assert (result.policy, result.cache_limit_bytes, result.cache_peak_bytes) == ("none", None, None)
    assert result.recompute_flops_pct == 0.0
    assert result.documented_overhead_pct == 0.0
    assert result.peak_memory_bytes == result.peak_memory_plain_bytes


def test_without_training_and_with_autocast(tmp_path: Path) -> None:
    result = run(config_of(0.5, train_steps=0, warmup_steps=0, timing_pairs=1, autocast="bfloat16"), tmp_path)
    assert result.status == records.OK, result.error
    assert result.training is None
    assert result.gradients_identical is True
    assert result.cache_peak_bytes <= result.cache_limit_bytes


def test_the_result_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first = run(config_of(train_steps=3), tmp_path / "first")
    torch.rand(100)
    again = run(config_of(train_steps=3), tmp_path / "again")
    other = run(config_of(train_steps=3, seed=1), tmp_path / "other")
    assert first.training
    assert again.training
    assert other.training
    assert first.training.losses == again.training.losses != other.training.losses
    exact = (
        "cache_total_bytes",
        "cache_peak_bytes",
        "recompute_flops_pct",
        "peak_memory_bytes",
        "peak_memory_plain_bytes",
    )
    assert [getattr(first, name) for name in exact] == [getattr(again, name) for name in exact]


def test_the_number_of_threads_is_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    result = run(config_of(threads=before + 1, train_steps=0, timing_pairs=1), tmp_path)
    assert result.threads == before + 1
    assert torch.get_num_threads() == before


def test_progress_reaches_its_total_and_names_the_stages(tmp_path: Path) -> None:
    class Count(Progress):
        def __init__(self) -> None:
            self.total, self.steps, self.stopped = 0, 0, False
            self.stages: list[str] = []

        def start(self, title: str, total: int) -> None:
            self.total = total

        def advance(self, stage: str, steps: int = 1) -> None:
            self.steps += steps
            if stage not in self.stages:
                self.stages.append(stage)

        def stop(self) -> None:
            self.stopped = True

    progress = Count()
    run(config_of(train_steps=2), tmp_path, progress)
    assert progress.steps == progress.total > 0
    assert progress.stopped
    assert progress.stages == [
        "built",
        "analysed",
        "predicted",
        "parity checked",
        "training",
        "warming up",
        "memory measured",
        "FLOPs counted",
        "timing pairs",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_shows_on_a_terminal_only(terminal: bool, tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w") as screen:
        progress = TerminalProgress(Console(file=screen, force_terminal=terminal, width=120))
        progress.start("a job", 4)
        progress.advance("built")
        progress.advance("timing pairs", 3)
        progress.stop()
    drawn = (tmp_path / "screen").read_text()
    assert ("4/4" in drawn and "timing pairs" in drawn and "left" in drawn) if terminal else drawn == ""


def test_a_run_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(config_of(train_steps=1, timing_pairs=1), tmp_path)
    assert result.status == records.OK
    out, err = capfd.readouterr()
    assert out == ""
    # Kineto's notices, if the profiler was used before in this process (test_meters_memory.py sees to one where it was not)
    notices = [line for line in err.splitlines() if not line.startswith("USDT:")]
    assert [line for line in notices if "kineto" in line.lower()] == []


def test_result_is_a_frozen_record(results: dict[str, RunResult]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        results["0.5"].status = "other"  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["planned", "fifo"])
def test_a_limit_that_cannot_work_is_given_no_price(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert run(config_of("100B", policy=policy), tmp_path / "job").status == records.FAILED
    assert "no prediction: the smallest limit that works is" in caplog.text
    assert "predicted overhead" not in caplog.text
