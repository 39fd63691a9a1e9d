"""From Hydra's composed configuration to a frozen :class:`RunConfig`, with messages that help.

Only this module and ``__main__`` know Hydra. Why a schema *and* checks of our own: the schema refuses unknown keys and
wrong types while Hydra composes, before any job starts; what a type cannot say (a fraction in (0, 1], the arguments a
model takes) is refused when the job starts, and is then a row of the report.

Rules followed here:

1. :class:`Settings` is the schema and lists every key. It is not frozen, as Hydra merges into it; the run gets a
   :class:`RunConfig`.
2. ``conf/`` and ``experiments/`` are found beside this package's folder in a checkout, and inside it in a wheel.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from recals_exp.folders import experiment_files, register_resolvers
from recals_exp.launchers import missing_extra
from recals_exp.pipelinespec import ALLOWED as PIPELINE_KEYS
from recals_exp.runconfig import (
    BUDGET_FORMS,
    DTYPES,
    MODES,
    TARGET_FORMS,
    Budget,
    ConfigError,
    PartSpec,
    PipelineSpec,
    RunConfig,
)
from recals_exp.sweeps import RESUME_FORMS, LaunchSettings

PARTS = ("model", "dataset", "optimizer")  # groups whose keys are the arguments of a target
NAMED = ("strategy", "policy")  # groups whose choice is a name with options
GROUPS = (*PARTS, *NAMED, "pipeline")
_WHOLE = "a whole number of at least"


def _allowed(text: str) -> dict[str, str]:
    return {"allowed": text}


_CHOICE = _allowed("the name of a choice; its keys follow a dot, as in model.depth=16")


@dataclass
class PipelineSettings:
    """The schema of the group ``pipeline``: types only; `PipelineSpec` says what is allowed. Any = a value or a list."""

    name: str = "none"
    devices: Any = None
    n_stages: int | None = None
    cuts: Any = None
    balance: Any = "even"
    units: Any = None
    budgets: Any = None
    n_micro_batches: int | None = None
    split_size: int | None = None
    ragged: bool = False
    threads: bool = False
    processes: Any = None
    schedule: str = "1f1b"
    stages_per_process: int | None = None
    replicas: int = 1
    timeout_s: float = 3600.0


@dataclass
class Settings:
    """The schema (rule 1). The metadata say what is allowed, for the messages."""

    model: dict[str, Any] = field(default=MISSING, metadata=_CHOICE)
    dataset: dict[str, Any] = field(default=MISSING, metadata=_CHOICE)
    optimizer: dict[str, Any] = field(default=MISSING, metadata=_CHOICE)
    strategy: dict[str, Any] = field(default=MISSING, metadata=_CHOICE)
    policy: dict[str, Any] = field(default=MISSING, metadata=_CHOICE)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings, metadata=_CHOICE)
    budget: Any = field(default=None, metadata=_allowed(BUDGET_FORMS))  # several types: Budget.parse checks it
    target_peak: Any = field(default=None, metadata=_allowed(TARGET_FORMS))  # Budget.peak checks it
    batch_size: int = field(default=64, metadata=_allowed(f"{_WHOLE} 1"))
    seed: int = field(default=0, metadata=_allowed(f"{_WHOLE} 0"))
    device: str = field(default="auto", metadata=_allowed("auto, cpu, cuda, cuda:1, or another device of torch"))
    threads: int | None = field(default=None, metadata=_allowed(f"{_WHOLE} 1, or null for torch's choice"))
    autocast: str | None = field(default=None, metadata=_allowed("bfloat16, float16, or null for none"))
    dtype: str = field(default="float32", metadata=_allowed("one of " + ", ".join(DTYPES)))
    costs: str = field(default="model", metadata=_allowed("model or measured"))
    deterministic: bool = field(default=False, metadata=_allowed("true or false"))
    checkpoint_every: int = field(default=0, metadata=_allowed(f"{_WHOLE} 0"))
    train_steps: int = field(default=10, metadata=_allowed(f"{_WHOLE} 0"))
    warmup_steps: int = field(default=2, metadata=_allowed(f"{_WHOLE} 0"))
    timing_pairs: int = field(default=7, metadata=_allowed(f"{_WHOLE} 1"))
    isolate: bool | None = field(default=None, metadata=_allowed("true, false, or null for true in a sweep"))
    resume: Any = field(default=False, metadata=_allowed(RESUME_FORMS))  # read by arguments.py
    fail_fast: bool = field(default=False, metadata=_allowed("true or false"))
    n_repeats: int = field(default=1, metadata=_allowed(f"{_WHOLE} 1"))  # read by arguments.py
    mode: str = field(default="run", metadata=_allowed("one of " + ", ".join(MODES)))


KEYS: Mapping[str, str] = {item.name: item.metadata["allowed"] for item in fields(Settings)}


def conf_dir() -> Path:
    """The folder of the configuration files (rule 2)."""
    return _data_dir("conf")


def experiments_dir() -> Path:
    """The folder of the prepared experiments (rule 2)."""
    return _data_dir("experiments")


def _data_dir(name: str) -> Path:
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"the folder {name!r} is neither in {package} (an installed wheel) nor beside it (a checkout): install the "
        "package again"
    )


def register() -> None:
    """Tell Hydra of the schema, the resolvers and the experiments. Calling it again changes nothing."""
    ConfigStore.instance().store(name="settings", node=Settings)
    register_resolvers()
    for path in sorted(experiments_dir().glob("*.yaml")):
        register_experiment(path, is_chosen=False)


def register_experiment(path: Path, is_chosen: bool = True) -> str:
    """Make a file selectable as ``experiment=NAME`` and return that name. Its keys are top-level keys.

    Its points become choices when it is chosen: other experiments may have others by the same names.
    """
    try:
        node = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"experiment={path}: cannot read {path.resolve()} ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"experiment={path} is not valid YAML: {error}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"experiment={path} must hold KEY: VALUE lines, not a {type(node).__name__}")
    node = _with_choices(node)
    experiment_files[path.stem] = path
    points = node.pop("points", None)
    if points is not None and is_chosen:
        _register_points(path, points)
        OmegaConf.update(node, "hydra.mode", "MULTIRUN", force_add=True)
        OmegaConf.update(node, "hydra.sweeper.params.point", ",".join(map(str, points)), force_add=True)
    elif is_chosen and OmegaConf.select(node, "hydra.sweeper.params") and OmegaConf.select(node, "hydra.mode") is None:
        # Else the lists would be ignored without a word.
        OmegaConf.update(node, "hydra.mode", "MULTIRUN", force_add=True)
    ConfigStore.instance().store(group="experiment", name=path.stem, node=node, package="_global_")
    return path.stem


def _with_choices(node: DictConfig) -> DictConfig:
    """KEY: VALUE lines as a command says them: ``model: gpt`` chooses, ``model.depth: 6`` is a key of what was chosen."""
    lines = OmegaConf.to_container(node, resolve=False)
    assert isinstance(lines, dict)
    groups = (*GROUPS, "preset")
    made = OmegaConf.create({"defaults": lines.pop("defaults", [])})
    for key, value in lines.items():
        if key in groups and isinstance(value, str):
            made.defaults.append({f"override /{key}": value})
        else:
            OmegaConf.update(made, str(key), value, merge=True, force_add=True)
    return made


def _register_points(path: Path, points: Any) -> None:
    """Jobs that differ in several keys at once: each point of an experiment becomes a choice of the group ``point``.

    Why: a sweep of Hydra's is a product of lists, and a budget means nothing to most strategies.
    """
    if not isinstance(points, DictConfig):
        raise ConfigError(
            f"experiment={path}: points must hold NAME: OVERRIDES lines, as in  half: strategy=recals budget=0.5"
        )
    for key_of_point, text in points.items():
        name = str(key_of_point)
        node = OmegaConf.create({"defaults": []})
        for override in str(text).split():
            key, is_given, value = override.partition("=")
            if not is_given:
                raise ConfigError(f"experiment={path}: points.{name} holds {override!r}, which is not KEY=VALUE")
            if key in (*PARTS, *NAMED):
                node.defaults.append({f"override /{key}": value})
            else:
                OmegaConf.update(node, key, yaml.safe_load(value), force_add=True)
        ConfigStore.instance().store(group="point", name=name, node=node, package="_global_")


def to_run_config(settings: DictConfig, choices: Mapping[str, Any]) -> RunConfig:
    """The frozen run configuration; ``choices`` are the names chosen in the groups. Raises :class:`ConfigError`."""
    try:
        plain = OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = str(error.full_key or "").removeprefix("hydra.")
        raise ConfigError(f"{key} has no value yet: give it one with {key}=VALUE") from error
    except (InterpolationResolutionError, OmegaConfBaseException) as error:
        raise ConfigError(f"the configuration cannot be resolved: {_first_line(error)}") from error
    assert isinstance(plain, dict)
    values: dict[str, Any] = {str(key): value for key, value in plain.items()}
    unknown = [key for key in values if key not in KEYS]
    if unknown:
        raise ConfigError(unknown_key(unknown[0]))
    mode = values["mode"]
    if mode not in MODES:
        raise ConfigError(f"mode={mode} is not known: use {', '.join(MODES)}")
    for key in LAUNCH_KEYS:
        values.pop(key)
    parts = {group: _part(group, values.pop(group), choices) for group in PARTS}
    named = {group: _named(group, values.pop(group)) for group in NAMED}
    return RunConfig(
        model=parts["model"],
        dataset=parts["dataset"],
        optimizer=parts["optimizer"],
        strategy=named["strategy"][0],
        strategy_kwargs=named["strategy"][1],
        policy=named["policy"][0],
        policy_kwargs=named["policy"][1],
        pipeline=PipelineSpec.from_mapping(values.pop("pipeline")),
        budget=_budget(values.pop("budget"), values.pop("target_peak")),
        **values,
    )


LAUNCH_KEYS = ("isolate", "resume", "fail_fast", "n_repeats")
"""How jobs are run; no part of what a run measures."""


def to_launch_settings(settings: DictConfig, is_sweep: bool, overrides: Sequence[str]) -> LaunchSettings:
    """How the job is run. ``overrides`` are those of the command, where `n_repeats` has become seeds."""
    if settings.n_repeats != 1 and not any(item.lstrip("+").startswith("seed=") for item in overrides):
        raise ConfigError(
            f"n_repeats={settings.n_repeats} was found only after the jobs had been made: give it on the command line, or "
            "write hydra: sweeper: params: seed: range(0,3) into the file"
        )
    isolate = settings.isolate if settings.isolate is not None else is_sweep and settings.mode != "dry_run"
    return LaunchSettings(isolate, settings.resume not in (False, None), settings.fail_fast)


AUTO_BUDGET, DEFAULT_BUDGET = "auto", 0.5


def _budget(budget: Any, target_peak: Any) -> Budget:
    """One of the two; with neither, ``budget: auto`` of ``conf/config.yaml`` is the default budget."""
    if target_peak is None:
        return Budget.parse(DEFAULT_BUDGET if budget == AUTO_BUDGET else budget)
    if budget not in (AUTO_BUDGET, None):
        raise ConfigError(
            f"budget={budget} and target_peak={target_peak} are both given, and each says what may be cached: leave one out"
        )
    return Budget.peak(target_peak)


def _part(group: str, node: Mapping[str, Any], choices: Mapping[str, Any]) -> PartSpec:
    kwargs = dict(node)
    kwargs.pop("suggest", None)  # read by interpolation only
    target = kwargs.pop("_target_", None)
    if not isinstance(target, str):
        raise ConfigError(
            f"{group} has no _target_: choose {group}=NAME (see --help), or give an import path with "
            f"{group}=custom {group}._target_=my_module.name"
        )
    choice = choices.get(group)
    name = target.rpartition(".")[2] if choice in (None, "custom") else str(choice)
    spec = PartSpec(name, target, kwargs)
    takes = spec.parameters()  # imports the target
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    unknown = [key for key in kwargs if key not in takes]
    if takes and unknown and not open_ended:
        known = [key for key in takes if key != "params"]
        raise ConfigError(
            f"{group} {name} ({target}) does not take {', '.join(unknown)}{_did_you_mean(unknown[0], known)}; it takes "
            f"{', '.join(known) or 'nothing'}. To use another target start from {group}=custom"
        )
    return spec


def _named(group: str, node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    kwargs = dict(node)
    name = kwargs.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{group}.name={name!r} is not allowed: use the name of a {group} (see --help)")
    return name, kwargs


# -- messages ----------------------------------------------------------------------------------------------------------


def explain(error: BaseException) -> str:
    """What is wrong with the command, and what is allowed, in a few lines and without a traceback."""
    chain = list(_chain(error))
    for item in chain:
        if isinstance(item, ConfigError):
            return str(item)
    text = "\n".join(dict.fromkeys(line for item in chain for line in str(item).splitlines() if line.strip()))
    text = text.partition("Config search path:")[0].rstrip()
    if "Config group override must be" in text:
        return f"{', '.join(GROUPS)} and experiment take the name of a choice, see --help ({text})"
    launcher = re.search(r"Could not (?:find|load) 'hydra/launcher/(\w+)'", text)
    if launcher and (help_ := missing_extra(launcher.group(1))) is not None:
        return help_
    unknown = re.search(r"Key '([^']+)' (?:is )?not in (?:struct|'(?:Pipeline)?Settings')", text)
    where = re.search(r"full_key: (\S+)", text)
    full_key = where.group(1) if where else ""
    if unknown and "." not in full_key:
        return unknown_key(unknown.group(1))
    if unknown and full_key.startswith("pipeline."):
        word = unknown.group(1)
        return f"pipeline has no option {word!r}{_did_you_mean(word, list(PIPELINE_KEYS))}; it has {', '.join(PIPELINE_KEYS)}"
    if unknown and full_key.partition(".")[0] in NAMED:
        return f"{full_key.partition('.')[0]} has no option {unknown.group(1)!r}: --cfg job shows those it has"
    allowed = {**KEYS, **{f"pipeline.{name}": text for name, text in PIPELINE_KEYS.items()}}
    if full_key in allowed:
        given = re.search(rf"\b{full_key}=(\S+)", text)
        reason = next((item for item in chain if isinstance(item, OmegaConfBaseException)), error)
        shown = f"{full_key}={given.group(1)}" if given else full_key
        return f"{shown} is not allowed: {full_key} is {allowed[full_key]} ({_first_line(reason)})"
    return text


def unknown_key(key: str) -> str:
    """The message for a key that does not exist."""
    if key == "points":
        return "points are read from an experiment's file that is given by its path: experiment=FOLDER/NAME.yaml"
    return f"there is no key {key!r}{_did_you_mean(key, list(KEYS))}; the keys are {', '.join(KEYS)}, experiment and preset"


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class TerminalFormatter(logging.Formatter):
    """Messages without tracebacks: those are in the job's log file."""

    def format(self, record: logging.LogRecord) -> str:
        bare = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "stack_info": None})
        return super().format(bare)


class TerminalFilter(logging.Filter):
    """Keeps from the terminal what is printed there anyway: records with ``extra={"printed": True}``."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, "printed", False)
