"""The command line, put into the form Hydra takes: what a user may also write, and what only a command as a whole can say.

- Options before overrides, as Hydra's parser does not find an override after an option that follows another one.
- ``experiment=FILE.yaml``: the file is registered and replaced by its name.
- ``model.KEY=VALUE`` for a key that is not in the YAML: allowed (``++``), since the target's signature, which knows better, is
  checked afterwards. The same for the other parts.
- ``resume``: the folder it means becomes Hydra's; with nothing else given, so do the overrides of the earlier command.
- ``n_repeats=N``: a sweep over N seeds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from recals_exp.config import PARTS, experiment_files, register_experiment
from recals_exp.runconfig import ConfigError
from recals_exp.sweeps import find_resumable, settings_of_jobs


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra takes it. Raises :class:`ConfigError` for what cannot be meant."""
    options, overrides = [], []
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        is_override = not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
        if not is_override or previous in _OPTIONS_WITH_VALUE:
            options.append(argument)
            continue
        key, _, value = argument.partition("=")
        if key.partition(".")[0] in PARTS and "." in key:
            argument = f"++{argument}"
        elif key.lstrip("+") == "experiment":
            argument = f"{key}={','.join(map(_experiment, value.split(',')))}"
        overrides.append(argument)
    if _ASKS.isdisjoint(options):
        options, overrides = _repeat(options, overrides)  # first: an earlier command is known by its seeds
        options, overrides = _resume(options, overrides)
    return [*options, *overrides, *_name_folders_by(overrides)]


_ASKS = frozenset(
    ("--help", "-h", "--hydra-help", "--info", "-i", "--cfg", "-c", "--shell-completion", "-sc", "--version")
)
"""Options that run nothing."""


def _experiment(item: str) -> str:
    """The name of a chosen experiment, which may be given as a file."""
    if item.endswith((".yaml", ".yml")):
        return register_experiment(Path(item))
    return register_experiment(experiment_files[item]) if item in experiment_files else item


def _value(key: str, overrides: Sequence[str]) -> str | None:
    """What the command says of a key; the last one counts, as in Hydra."""
    said = [item.partition("=")[2] for item in overrides if item.partition("=")[0].lstrip("+") == key]
    return said[-1].strip("'\"") if said else None


def _resume(options: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    resume = _value("resume", overrides)
    if resume is None or resume.lower() in ("false", "null"):
        return options, overrides
    given = _value("hydra.sweep.dir", overrides) or _value("hydra.run.dir", overrides)
    rest = [item for item in overrides if not item.partition("=")[0].lstrip("+").startswith("resume")]
    found = find_resumable(resume, rest, Path(given or "outputs"))
    if not settings_of_jobs(overrides):
        own = _value_keys(overrides)
        overrides = [*(item for item in found.overrides if _value_keys([item]).isdisjoint(own)), *overrides]
    if found.is_sweep and not {"-m", "--multirun"} & set(options):
        options = [*options, "-m"]
    key = "hydra.sweep.dir" if found.is_sweep else "hydra.run.dir"
    return options, [*overrides, f"{key}={quote(str(found.folder))}"]


def _value_keys(overrides: Sequence[str]) -> set[str]:
    return {item.partition("=")[0].lstrip("+~") for item in overrides}


def quote(text: str) -> str:
    """A value as Hydra's grammar takes it, whatever it holds."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _repeat(options: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    said = _value("n_repeats", overrides) or _of_experiment("n_repeats", overrides)
    if said is None:
        return options, overrides
    if not re.fullmatch(r"[1-9]\d*", said):
        raise ConfigError(f"n_repeats={said} is not allowed: use a whole number of at least 1")
    count = int(said)
    seed = _value("seed", overrides) or _of_experiment("seed", overrides) or "0"
    if count == 1 or len(re.findall(r"\d+", seed)) == count > 1:  # the latter: a resumed command, with its seeds
        return options, overrides
    if not re.fullmatch(r"\d+", seed):
        raise ConfigError(f"n_repeats={count} chooses the seeds, but seed={seed} does too: leave one out")
    seeds = ",".join(str(int(seed) + index) for index in range(count))
    rest = [item for item in overrides if item.partition("=")[0].lstrip("+") != "seed"]
    return ([*options, "-m"] if not {"-m", "--multirun"} & set(options) else options), [*rest, f"seed={seeds}"]


def _of_experiment(key: str, overrides: Sequence[str]) -> str | None:
    """What the chosen experiment says of a key, where it is one that was registered."""
    name = _value("experiment", overrides)
    entry = ConfigStore.instance().repo.get("experiment", {}).get(f"{name}.yaml")
    value = None if entry is None else OmegaConf.select(entry.node, key)
    return None if value is None else str(value)


def _name_folders_by(overrides: Sequence[str]) -> list[str]:
    """The Hydra setting that keeps what does not vary over a sweep out of the names of its folders."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:  # Hydra will say so itself
        return []
    fixed = [item.key_or_group for item in parsed if not item.is_sweep_override()]
    return [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"] if fixed else []


_OPTIONS_WITH_VALUE = frozenset(
    (
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
        "--package",
        "-p",
        "--cfg",
        "-c",
        "--info",
        "-i",
    )
)
