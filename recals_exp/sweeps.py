"""What holds for a sweep as a whole: which of its jobs are done already, where a job runs, and when to stop.

Rules the code follows:

1. All that is known lies in the sweep's folder, as files: the jobs may run one after the other here, side by side, or on other
   machines that share the disk.
2. A job is done if a finished record of the same resolved configuration (`jobs.config_key`) lies in the sweep's folder. Equal
   jobs are repeats: a record counts for one of them. Whoever counts it claims it, by making a file that nobody can make
   twice.
3. A record of another configuration is never overwritten when a sweep is resumed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recals_exp import records
from recals_exp.keys import config_key
from recals_exp.records import RunResult
from recals_exp.runconfig import ConfigError, RunConfig

SWEEP_FILE, RUN_FILE = "multirun.yaml", ".hydra/overrides.yaml"  # Hydra's own account of a command
SUPERSEDED_FILE = "superseded.json"
"""A failed record whose job has since been run again in another folder."""

RESUME_FORMS = (
    "true (the newest folder under outputs of the same command), a folder of an earlier sweep or run, or false"
)
_LEFT_OVER = ("events.out.tfevents.*", "checkpoint.pt")
_SESSION = "RECALS_EXP_SESSION"  # an environment variable: the jobs of a sweep may be processes
_JOBS = "RECALS_EXP_JOBS"
_NOT_OF_THE_JOBS = ("resume", "fail_fast", "isolate", "checkpoint_every")


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How a job is run, as opposed to what it measures."""

    isolate: bool = False  # in a process of its own
    resume: bool = False  # what is done is not done again
    fail_fast: bool = False  # after a failed job no other one starts


# -- one command -----------------------------------------------------------------------------------------------------


def begin_session() -> None:
    """A new command: forget what an earlier one in this process, or in a parent, claimed."""
    os.environ[_SESSION] = f"{os.getpid()}-{time.time_ns():x}"
    os.environ.pop(_JOBS, None)


def expect_jobs(count: int) -> None:
    """How many jobs the sweep has, for those who wait."""
    os.environ[_JOBS] = str(count)


def expected_jobs() -> int | None:
    """How many jobs the sweep has; None if that was not found out."""
    return int(os.environ[_JOBS]) if _JOBS in os.environ else None


def format_progress(sweep: Path, expected: int, one_by_one: bool) -> str:
    """How far the sweep is and, if its jobs run one after the other, about how long it will take."""
    found = [record for path in sweep.rglob(records.RESULT_FILE) if (record := _record(path.parent)) is not None]
    ended = [record for record in found if record.status != records.RUNNING]
    failed = sum(record.status == records.FAILED for record in ended)
    text = f"{len(ended)} of {expected} jobs done" + (f", {failed} failed" if failed else "")
    times_s = [record.wall_s for record in ended if record.wall_s is not None and record.status == records.OK]
    left = expected - len(ended)
    if left > 0 and times_s and one_by_one:
        left_s = left * statistics.fmean(times_s)
        text += f", about {left_s:.0f} s left" if left_s < 90 else f", about {left_s / 60:.0f} min left"
    return text


def _session_folder(sweep: Path) -> Path:
    return sweep / f".session-{os.environ.get(_SESSION, 'none')}"


def end_session(sweep: Path) -> None:
    """Remove the claims and marks of this command."""
    shutil.rmtree(_session_folder(sweep), ignore_errors=True)


def stop_after_failure(sweep: Path) -> None:
    """No job of this sweep is to start from now on."""
    _make_once(_session_folder(sweep) / "stopped")


def is_stopped(sweep: Path) -> bool:
    """Whether a job failed that was to be the last."""
    return (_session_folder(sweep) / "stopped").exists()


def _make_once(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


# -- one job ---------------------------------------------------------------------------------------------------------


def place(config: RunConfig, folder: Path, sweep: Path, resume: bool) -> Path | None:
    """The folder to run a job of the sweep in, `folder` if possible; None if it need not run (rule 2).

    Without `resume` the folder is used as it is, and what an earlier run of the same name left is removed.
    """
    if not resume:
        clear(folder, checkpoint=True)
        return folder
    key = config_key(config.to_dict())
    own = _record(folder)
    if own is not None and config_key(own.config) == key and _claim(sweep, folder):
        if own.status == records.OK:
            return None
        clear(folder)
        return folder
    failed: Path | None = None
    for other, record in _others(sweep, folder):
        if config_key(record.config) == key:
            if record.status == records.OK and _claim(sweep, other):
                return None
            if record.status != records.OK:
                failed = failed or other
    if failed is not None and _claim(sweep, failed):
        (failed / records.RESULT_FILE).rename(failed / SUPERSEDED_FILE)
        if (checkpoint := failed / "checkpoint.pt").exists():
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.replace(folder / checkpoint.name)
    if own is not None and own.status == records.OK:
        folder = _free(folder)  # rule 3
    _claim(sweep, folder)
    return folder


def clear(folder: Path, checkpoint: bool = False) -> None:
    """Remove what an earlier run of a job left beside its record; its checkpoint only if asked."""
    for pattern in _LEFT_OVER if checkpoint else _LEFT_OVER[:1]:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _claim(sweep: Path, folder: Path) -> bool:
    return _make_once(_session_folder(sweep) / str(folder.relative_to(sweep)).replace(os.sep, "+"))


def _others(sweep: Path, folder: Path) -> Iterator[tuple[Path, RunResult]]:
    for path in sorted(sweep.rglob(records.RESULT_FILE)):
        if path.parent != folder and (record := _record(path.parent)) is not None:
            yield path.parent, record


def _record(folder: Path) -> RunResult | None:
    try:
        return records.load(folder / records.RESULT_FILE)
    except (ValueError, OSError):
        return None


def _free(folder: Path) -> Path:
    for number in range(2, 1000):
        other = folder.with_name(f"{folder.name}-{number}")
        if not (other / records.RESULT_FILE).exists():
            return other
    raise ConfigError(f"{folder} and 998 others of its name hold results: start another sweep")


# -- which folder a command resumes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resumable:
    """An earlier command, by its folder."""

    folder: Path
    is_sweep: bool
    overrides: tuple[str, ...]


def read_resumable(folder: Path) -> Resumable | None:
    """The command whose results lie in the folder; None if that is not the folder of a command."""
    for name, is_sweep in ((SWEEP_FILE, True), (RUN_FILE, False)):
        try:
            with (folder / name).open(encoding="utf-8") as file:
                said: Any = yaml.safe_load(file)
        except OSError:
            continue
        return Resumable(folder, is_sweep, tuple(said["hydra"]["overrides"]["task"] if is_sweep else said or ()))
    return None


def find_resumable(resume: str, overrides: Sequence[str], look_in: Path) -> Resumable:
    """What `resume=...` means for a command with these overrides. ConfigError says what there is instead."""
    if resume.lower() != "true":
        found = read_resumable(Path(resume))
        if found is None:
            fault = "is not the folder of a sweep or of a run" if Path(resume).is_dir() else "does not exist"
            raise ConfigError(f"resume={resume}: that folder {fault}: use {RESUME_FORMS}")
        return found
    folders = [path for path in look_in.iterdir() if path.is_dir()] if look_in.is_dir() else []
    folders = [*([look_in] if look_in.is_dir() else []), *sorted(folders, key=lambda path: path.name, reverse=True)]
    wanted = settings_of_jobs(overrides)
    for folder in folders:
        candidate = read_resumable(folder)
        if candidate is not None and settings_of_jobs(candidate.overrides) == wanted:
            return candidate
    raise ConfigError(
        f"resume=true: no folder in {look_in} is of a command with {' '.join(sorted(wanted)) or 'no settings'}: use "
        f"{RESUME_FORMS}"
    )


def settings_of_jobs(overrides: Sequence[str]) -> set[str]:
    """The overrides that say what the jobs measure, as opposed to how they are run."""
    keys = ((item, item.partition("=")[0].lstrip("+~")) for item in overrides)
    return {item for item, key in keys if key not in _NOT_OF_THE_JOBS and not key.startswith("hydra")}
