"""The folders of runs, sweeps and jobs: their names, and where Hydra put them.

Names are made by resolvers in Hydra's configuration: flat, short, unique, with tidy numbers.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from recals_exp import sweeps
from recals_exp.answers import QUESTION_FILE
from recals_exp.launchers import timing_note
from recals_exp.runconfig import ConfigError

MAX_FOLDER_NAME = 60  # characters of a job's folder


def register_resolvers() -> None:
    """Make the two names known to the configuration. Calling it again changes nothing."""
    OmegaConf.register_new_resolver("new_folder", new_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


def new_folder(parent: str) -> str:
    """Make ``parent/DATE_TIME``, with ``-2``, ``-3``, ... after it if it exists; making it is what reserves it."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    Path(parent).mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = Path(parent) / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return str(folder)
    raise ConfigError(f"{parent} already holds 999 folders of {stamp}")


def job_folder(number: int, overrides: Sequence[str], exclude: Sequence[str] = ()) -> str:
    """For example ``0_budget=0.25``: the job's number and what varies, flat, and short by a hash if need be."""
    pairs = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in exclude or key.startswith("hydra."):
            continue
        value = re.sub(r"\d+\.\d{6,}", lambda match: f"{float(match.group()):.6g}", value)
        pairs.append(re.sub(r"[^\w.=+-]+", "-", f"{key.removesuffix('._target_')}={value}").strip("-"))
    name = f"{number}_{','.join(pairs)}" if pairs else str(number)
    if len(name) > MAX_FOLDER_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: MAX_FOLDER_NAME - 9]}-{digest}"
    return name


experiment_files: dict[str, Path] = {}
"""Where the experiments that can be chosen by name lie."""


def _question(experiment: str | None) -> str | None:
    """What an experiment asks, from the comment `# Question: ...` of its file."""
    path = experiment_files.get(str(experiment))
    if path is None:
        return None
    found = re.search(
        r"^# Question:\s*(.*(?:\n#(?! *Expected| *$| *[A-Z]\w*:).*)*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return None if found is None else " ".join(found.group(1).replace("\n#", " ").split())


_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class RememberFolder(Callback):
    """Tells this process where Hydra put the run or the sweep, so that its records are found whatever became of the jobs.

    Hydra makes the callback from the configuration, so there is no other place than the class to leave the answer.
    """

    run: Path | None = None
    sweep: Path | None = None
    jobs: int | None = None  # of the sweep

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        type(self).run = Path(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        type(self).sweep = sweep = Path(config.hydra.sweep.dir)
        if (question := _question(OmegaConf.select(config, "hydra.runtime.choices.experiment"))) is not None:
            sweep.mkdir(parents=True, exist_ok=True)
            (sweep / QUESTION_FILE).write_text(f"{question}\n", encoding="utf-8")
        if (note := timing_note(config.hydra.launcher)) is not None:
            print(f"warning: {note}", file=sys.stderr)
        type(self).jobs = jobs = _count_jobs(config)
        if jobs is not None:
            sweeps.expect_jobs(jobs)

    @classmethod
    def forget(cls) -> None:
        cls.run = cls.sweep = cls.jobs = None


def _count_jobs(config: DictConfig) -> int | None:
    """How many jobs Hydra's own sweeper will make of the command; None with another sweeper, which decides as it goes."""
    swept = OmegaConf.select(config, "hydra.sweeper.params")
    if OmegaConf.select(config, "hydra.sweeper._target_") != _BASIC_SWEEPER:
        return None
    lines = [f"{key}={value}" for key, value in (swept or {}).items()]
    try:
        overrides = OverridesParser.create().parse_overrides([*lines, *config.hydra.overrides.task])
        choices = {
            item.get_key_element(): sum(1 for _ in item.sweep_iterator()) if item.is_sweep_override() else 1
            for item in overrides
        }
    except HydraException:  # Hydra will say so itself
        return None
    return math.prod(choices.values())
