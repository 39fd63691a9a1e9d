"""One job of a command: what Hydra calls, wherever its launcher runs it.

Rules the code follows:

1. Whatever goes wrong is a record in the job's folder; nothing is raised into Hydra but an interrupt, and, outside of a sweep,
   that the command itself is at fault.
2. Importing this module is enough for a worker process to resolve the configuration it is sent.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from recals_exp import config, folders, isolation, records, sweeps, torchrun
from recals_exp.jobs import as_failed
from recals_exp.launchers import timing_note
from recals_exp.records import RunResult
from recals_exp.runconfig import ConfigError, RunConfig
from recals_exp.sweeps import LaunchSettings

log = logging.getLogger("recals_exp")

NOT_UNDERSTOOD = 2  # exit code
NOT_STARTED, DONE_ALREADY = "not started", "done already"

folders.register_resolvers()  # rule 2


def job(settings: DictConfig) -> str:
    """One job in the folder Hydra made for it; returns its status."""
    context = HydraConfig.get()
    folder = Path(context.runtime.output_dir)
    is_sweep = context.mode == RunMode.MULTIRUN
    sweep = Path(context.sweep.dir).resolve() if is_sweep else folder
    if is_sweep and sweeps.is_stopped(sweep):
        log.info("job %s is not started: another one failed", folder.name)
        return NOT_STARTED
    launch = LaunchSettings()
    try:
        launch = config.to_launch_settings(settings, is_sweep, context.overrides.task)
        run_config = config.to_run_config(settings, context.runtime.choices)
        place = sweeps.place(run_config, folder, sweep, launch.resume)
    except (Exception, SystemExit) as error:
        records.save(_failed_before_start(folder, settings, context.runtime.choices, error), folder)
        if not is_sweep and isinstance(error, ConfigError):
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(NOT_UNDERSTOOD) from None  # the command itself is at fault
        log.exception("job %s failed before it started: %s", folder.name, error)
        status = records.FAILED
    else:
        if place is None:
            log.info("job %s is done already", folder.name)
            return DONE_ALREADY
        result = _run(run_config, place, launch, context)
        if is_sweep and run_config.mode == "run" and (note := timing_note(context.launcher)) is not None:
            result = dataclasses.replace(result, notes=(*result.notes, note))
            records.save(result, place)
        status = result.status
    if status != records.OK and launch.fail_fast and is_sweep:
        sweeps.stop_after_failure(sweep)
    if is_sweep and (expected := sweeps.expected_jobs()) is not None:
        log.info("%s", sweeps.format_progress(sweep, expected, timing_note(context.launcher) is None))
    return status


def _run(run_config: RunConfig, folder: Path, launch: LaunchSettings, context: Any) -> RunResult:
    expected = sweeps.expected_jobs()
    number = f"{context.job.num + 1}/{expected} " if expected is not None and context.mode == RunMode.MULTIRUN else ""
    log.info("job %s%s: %s", number, folder.name, _title(run_config))
    if launch.isolate and not torchrun.is_rank():  # torchrun's processes run each job in processes of their own anyway
        return isolation.run_isolated(run_config, folder, _logging(context, folder), number)
    # imported here: torch's domain libraries take seconds, which --help and a mistyped key need not wait for
    from recals_exp.progress import TerminalProgress
    from recals_exp.runner import run

    return run(run_config, folder, TerminalProgress(title=number))


def _logging(context: Any, folder: Path) -> dict[str, Any]:
    """Hydra's logging of this job, for another process, with its files in the folder the job is run in."""
    plain: Any = OmegaConf.to_container(context.job_logging, resolve=True)
    for handler in plain.get("handlers", {}).values():
        if "filename" in handler:
            handler["filename"] = str(folder / Path(handler["filename"]).name)
    if context.verbose is True:
        plain["root"]["level"] = "DEBUG"
    return plain


def _failed_before_start(
    folder: Path, settings: DictConfig, choices: Mapping[str, Any], error: BaseException
) -> RunResult:
    """The record of a job whose configuration could not be used: what is known of it, and the reason."""
    raw = OmegaConf.to_container(settings, resolve=False)
    assert isinstance(raw, dict)
    batch_size, seed = raw.get("batch_size"), raw.get("seed")
    unusable = RunResult(
        job=folder.name,
        status=records.RUNNING,
        budget=str(raw.get("budget")),
        device=str(raw.get("device")),
        batch_size=batch_size if isinstance(batch_size, int) else 0,
        seed=seed if isinstance(seed, int) else 0,
        config={str(key): str(value) if isinstance(value, float) else value for key, value in raw.items()},
        model=str(choices.get("model")),
        dataset=str(choices.get("dataset")),
        pipeline=str(choices.get("pipeline")),
        policy=str(choices.get("policy")),
        strategy=str(choices.get("strategy")),
    )
    return as_failed(unusable, error)


def _title(run_config: RunConfig) -> str:
    return (
        f"{run_config.model.name} on {run_config.dataset.name}, batch of {run_config.batch_size}, "
        f"{run_config.strategy} {run_config.policy}, budget {run_config.budget}"
    )
