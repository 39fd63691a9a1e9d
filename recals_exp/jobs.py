"""A job before anything is measured: what it is called in the report, and its record as it starts or could not run.

Apart from the runner, since whoever starts a job in another process, or finds it dead, has no need of its parts.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from pathlib import Path

from recals_exp import records
from recals_exp.records import RunResult
from recals_exp.runconfig import RunConfig

INTERRUPTED = "interrupted"


def describe(config: RunConfig, folder: Path) -> RunResult:
    """The record of a job that starts now."""
    return RunResult(
        job=config.job or folder.name,
        status=records.RUNNING,
        model=config.model.name,
        dataset=config.dataset.name,
        pipeline=config.pipeline.name,
        policy=config.policy if config.strategy == "recals" else "none",
        budget=str(config.budget),
        strategy=config.strategy,
        device=config.device,
        batch_size=config.batch_size,
        seed=config.seed,
        threads=config.threads,
        autocast=config.autocast,
        config=config.to_dict(),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def as_failed(result: RunResult, reason: str | BaseException, wall_s: float | None = None) -> RunResult:
    """The same job, failed."""
    text = records.describe_error(reason) if isinstance(reason, BaseException) else reason
    if isinstance(reason, KeyboardInterrupt):
        text = INTERRUPTED
    return dataclasses.replace(result, status=records.FAILED, error=text, wall_s=wall_s)
