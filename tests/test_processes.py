"""Pipelines over real processes from the command line: one folder, one writer, failures that end as records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_pipelines import config_of

from recals_exp import __main__ as cli
from recals_exp import records
from recals_exp.pipeline import RankError
from recals_exp.pipelinespec import PipelineSpec
from recals_exp.processes import check_before_starting, headline, n_processes
from recals_exp.records import RunResult
from recals_exp.runconfig import ConfigError

pytestmark = [pytest.mark.usefixtures("root_logging", "config_store", "no_process_is_left"), pytest.mark.timeout(400)]

TESTS = Path(__file__).resolve().parent
SMALL = ["model=mlp_chain", "model.depth=6", "dataset.image_size=8", "batch_size=32", "pipeline.n_micro_batches=4"]
SHORT = ["train_steps=2", "warmup_steps=1", "timing_pairs=2", "threads=1", "budget=0.5"]
FAULTY = ["model=custom", "model._target_=faulty_stage.build", "dataset.image_size=8", "dataset.channels=1"]
FAULTY += ["batch_size=64", "pipeline.balance=[2,2]"]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "recals_exp")


def check_finished(folder: Path, schedule: str = "1f1b") -> RunResult:
    """A job as it should end: one record, one event file, the stages of two processes."""
    result = records.load(folder)
    assert result.status == records.OK, result.error
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert result.parity is not None
    assert result.parity.differences == ()
    assert result.timing is not None
    assert result.timing.losses_identical
    stages = result.stages
    assert stages is not None
    assert (stages.schedule, stages.processes) == (schedule, 2)
    assert sorted({stage.process for stage in stages.stages}) == [0, 1]
    return result


def test_a_job_over_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pipeline=distributed", *SMALL, *SHORT, "hydra.run.dir=job"]) == cli.OK
    result = check_finished(tmp_path / "job")
    assert result.stages is not None
    first, last = result.stages.stages
    assert (first.micro_batches_held, last.micro_batches_held) == (2, 1)  # 1F1B: the first stage holds more
    assert first.cache_limit_bytes is not None
    assert last.cache_limit_bytes is not None
    assert 1.5 < first.cache_limit_bytes / last.cache_limit_bytes < 2.5
    for stage in (first, last):
        assert stage.cache_peak_bytes is not None
        assert stage.cache_limit_bytes is not None
        assert stage.cache_peak_bytes <= stage.cache_limit_bytes
        assert stage.recompute_s > 0
        assert stage.peak_memory_bytes is not None
    assert result.cache_limit_bytes is not None
    assert result.cache_total_bytes is not None
    assert result.cache_limit_bytes / result.cache_total_bytes == pytest.approx(0.5, abs=0.03)
    assert result.flops is not None
    assert result.flops.recomputed_flops == result.flops.engine_recomputed_flops > 0
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_plain_bytes is not None
    assert result.peak_memory_bytes < result.peak_memory_plain_bytes  # half of the parameters each
    assert result.stages.bubble_scheduled_pct == pytest.approx(result.stages.bubble_ideal_pct) == pytest.approx(20)
    assert result.training is not None
    assert len(result.training.losses) == 2
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert events.Tags()["images"] == ["pipeline/timeline"]
    assert {"stage_0/busy (s)", "stage_1/peak_memory (MiB)", "training/loss"} <= set(events.Tags()["scalars"])


def test_a_stage_that_raises_is_a_failed_record_with_its_own_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TESTS))
    assert cli.main(["pipeline=distributed", *FAULTY, *SHORT, "hydra.run.dir=job"]) == cli.JOB_FAILED
    result = records.load(tmp_path / "job")
    assert result.status == records.FAILED
    assert result.error == (
        "ProcessError: rank 1 of 2 failed: ValueError: broken on purpose This was raised in the forward of stage 1 (2..3) at "
        "micro-batch 3 of 8, on rank 1 of 2."
    )
    log = (tmp_path / "job/recals_exp.log").read_text()
    assert 'raise ValueError("broken on purpose")' in log
    assert "faulty_stage.py" in log


def test_headlines() -> None:
    killed = RankError("rank 1 of 2 was killed by SIGKILL; the job was ended", 1, "")
    assert headline(1, 2, killed) == "rank 1 of 2 was killed by SIGKILL; the job was ended"
    text = "Traceback (most recent call last):\n  File ...\nValueError: two\nlines\n"
    assert headline(0, 2, RankError("", 0, text)) == "rank 0 of 2 failed: ValueError: two lines"


@pytest.mark.parametrize(
    ("world", "options", "expected"),
    [
        (None, {"processes": "auto"}, 2),
        (None, {"processes": 3}, 3),
        ("4", {"processes": "auto"}, 4),
        ("4", {"processes": "auto", "replicas": 2}, 2),
        ("4", {"processes": 2, "replicas": 2}, 2),
        ("3", {"processes": "auto", "replicas": 2}, "torchrun started 3 processes, which do not make 2 replicas"),
        ("4", {"processes": 3}, "torchrun started 4 processes"),
    ],
)
def test_the_number_of_processes(
    world: str | None, options: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", world), ("MASTER_ADDR", "localhost")):
        if world is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))
    config = config_of(PipelineSpec("distributed", n_micro_batches=4, **options))
    if isinstance(expected, int):
        assert n_processes(config) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            n_processes(config)


@pytest.mark.parametrize(
    ("options", "batch_size", "message"),
    [
        ({}, 10, "batch_size=10 does not divide into 4 micro-batches, .* use a multiple of 4, .* pipeline.ragged=true"),
        ({"replicas": 2}, 12, "batch_size=12 does not divide into 4 micro-batches x 2 replicas, .* a multiple of 8"),
        ({"n_micro_batches": 1}, 8, "schedule=1f1b needs at least as many micro-batches as stages: 1 < 2"),
        ({"schedule": "zbv", "stages_per_process": 3}, 8, "schedule=zbv has 2 stages on each process, not 3"),
    ],
)
def test_what_cannot_run_starts_no_process(options: dict[str, Any], batch_size: int, message: str) -> None:
    spec = PipelineSpec("distributed", **{"processes": 2, "n_micro_batches": 4, **options})
    with pytest.raises(ValueError, match=message):
        check_before_starting(config_of(spec, batch_size=batch_size), 2)


# -- the whole command -----------------------------------------------------------------------------------------------


def command(*arguments: str, launcher: tuple[str, ...] = (sys.executable, "-W", "error", "-m", "recals_exp")) -> Any:
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [*launcher, "pipeline=distributed", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


@pytest.mark.slow
def test_five_jobs_of_a_sweep_one_after_the_other(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    done = command(*SMALL, *SHORT, "seed=0,1,2,3,4", "-m", f"hydra.sweep.dir={sweep}")
    assert done.returncode == cli.OK, done.stderr
    jobs = [folder for folder in sweep.iterdir() if (folder / "result.json").is_file()]
    assert len(jobs) == 5
    for folder in jobs:
        check_finished(folder)
    assert len(json.loads((sweep / "tradeoff.json").read_text())) == 5
    assert len((sweep / "stages.csv").read_text().splitlines()) == 11


@pytest.mark.slow
def test_a_sweep_goes_on_after_stages_that_fail(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    started = time.monotonic()
    done = command(*FAULTY, *SHORT, "model.how=raise,kill,no", "-m", f"hydra.sweep.dir={sweep}")
    assert done.returncode == cli.JOB_FAILED, done.stderr
    assert time.monotonic() - started < 300
    table = {row["job"]: row for row in json.loads((sweep / "tradeoff.json").read_text())}
    assert table["0_model.how=raise"]["error"].startswith("ProcessError: rank 1 of 2 failed: ValueError: broken")
    assert table["1_model.how=kill"]["error"] == "ProcessError: rank 1 of 2 was killed by SIGKILL; the job was ended"
    check_finished(sweep / "2_model.how=no")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved1f1b", "zbv"])
def test_every_schedule(schedule: str, tmp_path: Path) -> None:
    done = command(*SMALL, *SHORT, f"pipeline.schedule={schedule}", f"hydra.run.dir={tmp_path / 'job'}")
    assert done.returncode == cli.OK, done.stderr
    check_finished(tmp_path / "job", schedule)


@pytest.mark.slow
def test_a_model_that_draws_random_numbers(tmp_path: Path) -> None:
    gpt = ["model=gpt", "model.depth=2", "model.width=32", "model.heads=2", "model.dropout=0.2", "batch_size=8"]
    done = command(*gpt, *SHORT, "pipeline.n_micro_batches=4", f"hydra.run.dir={tmp_path / 'job'}")
    assert done.returncode == cli.OK, done.stderr
    check_finished(tmp_path / "job")


@pytest.mark.slow
def test_a_sweep_on_the_processes_of_torchrun_goes_on_after_failures(tmp_path: Path) -> None:
    """One folder for both processes, and a stage that fails leaves them ready for the next job."""
    sweep = tmp_path / "sweep"
    options = (*FAULTY, *SHORT, "model.how=no,raise,kill,no", "-m", f"hydra.sweep.dir={sweep}")
    done = command(*options, launcher=TORCHRUN)
    assert done.returncode != cli.OK
    table = {row["job"]: row for row in json.loads((sweep / "tradeoff.json").read_text())}
    assert {job: row["status"] for job, row in table.items()} == {
        "0_model.how=no": "ok",
        "1_model.how=raise": "failed",
        "2_model.how=kill": "failed",
        "3_model.how=no": "ok",
    }
    assert table["1_model.how=raise"]["error"].startswith("ProcessError: rank 1 of 2 failed: ValueError: broken")
    assert table["2_model.how=kill"]["error"] == "ProcessError: rank 1 of 2 was killed by SIGKILL; the job was ended"
    assert 'raise ValueError("broken on purpose")' in (sweep / "1_model.how=raise/recals_exp.log").read_text()
    for job in ("0_model.how=no", "3_model.how=no"):
        check_finished(sweep / job)


@pytest.mark.slow
def test_torchrun_with_what_it_cannot_run(tmp_path: Path) -> None:
    done = command(*SMALL, *SHORT, "pipeline.processes=3", f"hydra.run.dir={tmp_path / 'job'}", launcher=TORCHRUN)
    assert done.returncode != cli.OK
    assert "torchrun started 2 processes, which do not make 1 replicas of 3 processes" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
