"""Sweeps that survive: real jobs in real processes, and which job need not run again."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from trouble_model import FAULTS

from recals_exp import isolation, records, sweeps
from recals_exp.jobs import as_failed, describe
from recals_exp.keys import config_key
from recals_exp.runconfig import Budget, ConfigError, PartSpec, RunConfig
from recals_exp.writers import has_outcome

ROOT = Path(__file__).resolve().parents[1]
TINY = ["dataset.image_size=6", "dataset.channels=1", "batch_size=16", "threads=1"]
SHORT = ["train_steps=2", "warmup_steps=1", "timing_pairs=2"]
OWN = ["model=custom", "model._target_=trouble_model.build"]
DEADLINE_S = 900  # machines are busy; alone it takes a minute


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m recals_exp` in that folder, in a process of its own."""
    line = [sys.executable, "-m", "recals_exp", *arguments]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)


def table(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in json.loads((folder / "tradeoff.json").read_text())}


def settings(**changes: Any) -> RunConfig:
    made = RunConfig(
        model=PartSpec("build", "trouble_model.build", {"fault": "none"}),
        dataset=PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 6, "channels": 1}),
        optimizer=PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1}),
        budget=Budget.parse(0.5),
        batch_size=16,
        device="cpu",
        threads=1,
        train_steps=0,
        warmup_steps=0,
        timing_pairs=1,
        mode="analyze",
    )
    return dataclasses.replace(made, **changes)


# -- which jobs are done -----------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    sweeps.begin_session()
    return tmp_path


def leave(folder: Path, config: RunConfig, status: str = records.OK) -> Path:
    record = describe(config, folder)
    record = as_failed(record, "it broke") if status == records.FAILED else dataclasses.replace(record, status=status)
    records.save(record, folder)
    return folder


def test_what_is_finished_is_not_run_again_and_what_failed_is(sweep: Path) -> None:
    done, failed, killed = settings(seed=0), settings(seed=1), settings(seed=2)
    leave(sweep / "0_a", done)
    leave(sweep / "1_b", failed, records.FAILED)
    (sweep / "1_b/events.out.tfevents.1").touch()
    leave(sweep / "2_c", killed, records.RUNNING)
    assert sweeps.place(done, sweep / "0_a", sweep, True) is None
    assert sweeps.place(failed, sweep / "1_b", sweep, True) == sweep / "1_b"
    assert not (sweep / "1_b/events.out.tfevents.1").exists(), "the failed run's curves are not those of this one"
    assert sweeps.place(killed, sweep / "2_c", sweep, True) == sweep / "2_c"
    assert sweeps.place(settings(seed=3), sweep / "3_d", sweep, True) == sweep / "3_d"


def test_without_resume_everything_runs(sweep: Path) -> None:
    leave(sweep / "0_a", settings())
    assert sweeps.place(settings(), sweep / "0_a", sweep, False) == sweep / "0_a"


def test_jobs_are_matched_by_what_they_measure_not_by_number(sweep: Path) -> None:
    leave(sweep / "0_x", settings(seed=0))
    leave(sweep / "1_y", settings(seed=1), records.FAILED)
    assert sweeps.place(settings(seed=1), sweep / "0_y", sweep, True) == sweep / "0_y"
    assert not (sweep / "1_y/result.json").exists()
    assert (sweep / "1_y" / sweeps.SUPERSEDED_FILE).exists()
    assert sweeps.place(settings(seed=0), sweep / "1_x", sweep, True) is None


def test_another_configurations_result_is_not_overwritten(sweep: Path) -> None:
    leave(sweep / "0", settings(seed=0))
    assert sweeps.place(settings(seed=0, train_steps=5), sweep / "0", sweep, True) == sweep / "0-2"


def test_equal_jobs_are_repeats_and_count_one_by_one(sweep: Path) -> None:
    """Two of three repeats are there, under any number: exactly one runs."""
    leave(sweep / "1", settings())
    leave(sweep / "2", settings())
    places = [sweeps.place(settings(), sweep / str(number), sweep, True) for number in range(3)]
    assert sum(place is not None for place in places) == 1
    sweeps.end_session(sweep)
    assert sorted(path.name for path in sweep.iterdir()) == ["1", "2"]


def test_the_key_of_a_configuration() -> None:
    plain = json.loads(json.dumps(settings().to_dict()))  # as it is read back from a record
    assert config_key(plain) == config_key(settings(job="another name").to_dict())
    assert config_key(plain) != config_key(settings(timing_pairs=2).to_dict())
    assert config_key(plain, without=("seed",)) == config_key(settings(seed=7).to_dict(), without=("seed",))


def test_how_far_a_sweep_is(sweep: Path) -> None:
    records.save(dataclasses.replace(describe(settings(), sweep / "0"), status=records.OK, wall_s=30.0), sweep / "0")
    leave(sweep / "1", settings(seed=1), records.FAILED)
    leave(sweep / "2", settings(seed=2), records.RUNNING)
    assert sweeps.format_progress(sweep, 4, True) == "2 of 4 jobs done, 1 failed, about 60 s left"
    assert sweeps.format_progress(sweep, 40, True) == "2 of 40 jobs done, 1 failed, about 19 min left"
    assert sweeps.format_progress(sweep, 4, False) == "2 of 4 jobs done, 1 failed"


# -- which folder is resumed -------------------------------------------------------------------------------------------


def leave_command(folder: Path, *overrides: str) -> None:
    folder.mkdir(parents=True)
    (folder / sweeps.SWEEP_FILE).write_text(yaml.safe_dump({"hydra": {"overrides": {"task": list(overrides)}}}))


def test_resume_finds_the_newest_folder_of_the_same_command(tmp_path: Path) -> None:
    leave_command(tmp_path / "2030-01-01_00-00-00", "budget=0.1,0.2", "seed=3")
    leave_command(tmp_path / "2030-01-02_00-00-00", "seed=3", "budget=0.1,0.2", "fail_fast=true")
    leave_command(tmp_path / "2030-01-03_00-00-00", "budget=0.1,0.2")
    found = sweeps.find_resumable("true", ["budget=0.1,0.2", "seed=3", "isolate=false"], tmp_path)
    assert found.folder.name == "2030-01-02_00-00-00"
    assert found.is_sweep
    with pytest.raises(ConfigError, match=r"resume=true: no folder in .* is of a command with budget=0.9: use true"):
        sweeps.find_resumable("true", ["budget=0.9"], tmp_path)
    with pytest.raises(ConfigError, match="resume=nowhere: that folder does not exist"):
        sweeps.find_resumable("nowhere", [], tmp_path)
    with pytest.raises(ConfigError, match="is not the folder of a sweep or of a run"):
        sweeps.find_resumable(str(tmp_path), [], tmp_path)


# -- a process per job -------------------------------------------------------------------------------------------------


def quiet(folder: Path) -> dict[str, Any]:
    handler = {"class": "logging.FileHandler", "filename": str(folder / "job.log")}
    return {"version": 1, "handlers": {"file": handler}, "root": {"level": "INFO", "handlers": ["file"]}}


def test_a_killed_job_is_a_record_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trouble").touch()
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    config = settings(model=PartSpec("build", "trouble_model.build", {"fault": "killed"}))
    result = isolation.run_isolated(config, tmp_path / "job", quiet(tmp_path / "job"))
    assert result == records.load(tmp_path / "job")
    assert result.status == records.FAILED
    assert result.error is not None
    assert result.error.startswith("killed by SIGKILL after")
    assert "GiB of memory at most; the system kills so when memory runs out" in result.error
    assert sorted(path.suffix for path in (tmp_path / "job").iterdir() if "events" not in path.name) == [
        ".json",
        ".log",
    ]


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_eight_jobs_of_which_four_fail_and_a_resumed_sweep(tmp_path: Path) -> None:
    """Each of the four faults is real: an exception, an exit, SIGKILL and a limit on memory."""
    faults = ["none", FAULTS[0], "a", FAULTS[1], FAULTS[2], "b", FAULTS[3], "c"]
    line = [*OWN, f"model.fault={','.join(faults)}", *TINY, *SHORT, "-m"]
    (tmp_path / "trouble").touch()
    done = command(tmp_path, *line)
    assert done.returncode == 1, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    rows = table(folder)
    assert len(rows) == 8
    status = {job: row["status"] for job, row in rows.items()}
    assert {job for job, said in status.items() if said == "failed"} == {
        f"{number}_model.fault={fault}" for number, fault in enumerate(faults) if fault in FAULTS
    }
    for row in rows.values():
        assert (row["time_overhead_pct"] is not None) == (row["status"] == "ok")
    reasons = {fault: rows[f"{faults.index(fault)}_model.fault={fault}"]["error"] for fault in FAULTS}
    assert reasons["raises"] == "RuntimeError: the builder broke"
    assert reasons["exits"] == "SystemExit: leaving for good"
    assert "killed by SIGKILL" in reasons["killed"]
    assert "memory" in reasons["memory"]
    for reason in reasons.values():
        assert reason in done.stdout
    assert all(has_outcome(folder / job) for job in rows), "TensorBoard has a line for every job"
    assert (folder / "report.html").is_file()

    (tmp_path / "trouble").unlink()
    before = {job: (folder / job / "result.json").stat().st_mtime_ns for job in rows}
    again = command(tmp_path, *line, "resume=true")
    assert again.returncode == 0, again.stderr
    assert {job for job in rows if (folder / job / "result.json").stat().st_mtime_ns > before[job]} == {
        job for job, said in status.items() if said == "failed"
    }
    assert {row["status"] for row in table(folder).values()} == {"ok"}
    assert len(list((tmp_path / "outputs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
def test_results_do_not_depend_on_the_order_of_the_jobs(tmp_path: Path) -> None:
    """Bytes and FLOPs to the last one; times within noise: the faster of the pairs, as other work may disturb the rest."""
    sizes = ["model.depth=8", "dataset.image_size=16", "batch_size=256", "threads=1", "train_steps=2", "timing_pairs=5"]
    found = []
    for name, order in (("up", "0.25,0.5,1"), ("down", "1,0.5,0.25")):
        done = command(tmp_path, f"budget={order}", *sizes, "-m", f"hydra.sweep.dir={name}")
        assert done.returncode == 0, done.stderr
        found.append({r.budget: r for r in map(records.load, sorted((tmp_path / name).glob("*/result.json")))})
    single = command(tmp_path, "budget=0.25", *sizes, "hydra.run.dir=single")
    assert single.returncode == 0, single.stderr
    up, down = found
    alone = records.load(tmp_path / "single")
    for one, other in [*((up[budget], down[budget]) for budget in up), (up["0.25"], alone)]:
        for column in ("peak_memory_bytes", "peak_memory_plain_bytes", "cache_peak_bytes", "recompute_flops_pct"):
            assert getattr(one, column) == getattr(other, column), column
        assert one.threads == other.threads == 1
        assert one.training is not None
        assert other.training is not None
        assert one.training.losses == other.training.losses
        assert one.timing is not None
        assert other.timing is not None
        assert min(one.timing.ratios) == pytest.approx(min(other.timing.ratios), rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_sweep_reports_what_there_is(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "trouble").touch()
    line = [sys.executable, "-m", "recals_exp", *OWN, "model.fault=none,hangs,b", *TINY, *SHORT, "-m"]
    running = subprocess.Popen(
        line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + DEADLINE_S
    while not (tmp_path / "hanging").exists() and time.monotonic() < until and running.poll() is None:
        time.sleep(0.1)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    (folder,) = (tmp_path / "outputs").iterdir()
    rows = table(folder)
    assert {job: row["status"] for job, row in rows.items()} == {
        "0_model.fault=none": "ok",
        "1_model.fault=hangs": "failed",
    }
    assert rows["1_model.fault=hangs"]["error"] == "interrupted"
    assert "1 of 3 jobs did not start" in err
    assert "1_model.fault=hangs failed: interrupted" in out
    assert "Traceback" not in err
