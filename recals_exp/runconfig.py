"""The frozen description of one run: plain data, made once and never changed.

``config`` builds a :class:`RunConfig` from Hydra's composed configuration; the runner, the meters, the records and the
reports take only this. It needs neither Hydra nor torch, so that it can be built by hand, pickled and written as JSON.

Rules followed here:

1. Everything that decides what a run measures is a field; nothing is read from the environment later.
2. A part (model, data set, optimizer) is a *recipe* -- an import path with keyword arguments -- and not an object: two
   runs never share a module by accident, and a recipe can be recorded.
3. A wrong value is refused when the record is built, with a message that says what is allowed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recals_exp.configerror import ConfigError
from recals_exp.pipelinespec import PipelineSpec

MODES = ("run", "predict", "analyze", "dry_run", "batch_size")
DTYPES = ("float32", "float64", "bfloat16", "float16")
COSTS = ("model", "measured")
BUDGET_FORMS = (
    "a fraction in (0, 1] of the analysed total, a size with its unit such as 512MiB, knee, or null for no limit"
)
TARGET_FORMS = "the peak of a whole step, a size with its unit such as 6GiB, or null"
__all__ = ["Budget", "ConfigError", "PartSpec", "PipelineSpec", "RunConfig", "locate"]
_BINARY_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of activations may be cached: none (no limit), a fraction of the analysed total, or bytes.

    Two kinds are found out by the job itself: the knee of the predicted curve, and what makes the step's peak fit.
    """

    kind: str = "none"  # "none", "fraction", "bytes", "knee" or "peak"
    value: float = 0.0  # the fraction in (0, 1], or the bytes (a whole number) of the cache or of the peak; else 0

    def __post_init__(self) -> None:
        allowed = {
            "none": self.value == 0,
            "fraction": 0 < self.value <= 1,
            "bytes": self.value >= 1 and self.value == int(self.value),
            "knee": self.value == 0,
            "peak": self.value >= 1 and self.value == int(self.value),
        }
        if not allowed.get(self.kind, False):
            raise ConfigError(f"Budget(kind={self.kind!r}, value={self.value!r}) is not allowed: use {BUDGET_FORMS}")

    @classmethod
    def parse(cls, raw: object) -> Budget:
        """The budget a user wrote: ``0.25``, ``"512MiB"`` or ``None``; anything else raises :class:`ConfigError`."""
        if raw is None:
            return cls()
        if isinstance(raw, Budget):
            return raw
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ConfigError(f"budget={raw!r} is not allowed: use {BUDGET_FORMS}")
        if isinstance(raw, str):
            text = raw.strip()
            if text == "knee":
                return cls("knee")
            try:
                number = float(text)
            except ValueError:
                return cls._parse_size(text)
        else:
            number = float(raw)
        if math.isnan(number):
            raise ConfigError(f"budget={raw} is not a number: use {BUDGET_FORMS}")
        if number <= 0:
            raise ConfigError(f"budget={raw} is not above 0: use {BUDGET_FORMS}")
        if number > 1:
            raise ConfigError(
                f"budget={raw} is a fraction above 1: use {BUDGET_FORMS}; for a number of bytes write the unit: {raw}B"
            )
        # 0.1 + 0.2 must be the same point as 0.3, in folder names and in the report.
        return cls("fraction", float(f"{number:.12g}"))

    @classmethod
    def peak(cls, raw: object) -> Budget:
        """Whatever makes the peak of the whole step fit the size a user wrote, such as ``"6GiB"``."""
        from recals_exp.recals.sizes import parse_bytes  # here for the reason below

        try:
            nbytes = parse_bytes(raw)  # type: ignore[arg-type]  # refuses what is no size
        except (ValueError, TypeError) as error:
            raise ConfigError(f"target_peak={raw} is not a size ({error}): use {TARGET_FORMS}") from None
        if nbytes < 1:
            raise ConfigError(f"target_peak={raw} is not above 0: use {TARGET_FORMS}")
        return cls("peak", nbytes)

    @property
    def is_found_out(self) -> bool:
        """Whether the limit is known only once a step has been seen."""
        return self.kind in ("knee", "peak")

    @classmethod
    def _parse_size(cls, text: str) -> Budget:
        # imported here: the engine loads torch, which a configuration that names no size has no need of
        from recals_exp.recals.sizes import parse_bytes

        if text.startswith("-"):
            raise ConfigError(f"budget={text} is not above 0: use {BUDGET_FORMS}")
        try:
            nbytes = parse_bytes(text)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"budget={text} is neither a fraction nor a size ({error}): use {BUDGET_FORMS}") from None
        if nbytes < 1:
            raise ConfigError(f"budget={text} is not above 0: use {BUDGET_FORMS}")
        return cls("bytes", nbytes)

    def limit_bytes(self, total_bytes: int) -> int | None:
        """The limit in bytes for a model that would cache ``total_bytes``; None = no limit."""
        if self.kind == "none":
            return None
        if self.kind == "bytes":
            return int(self.value)
        if self.is_found_out:
            raise ValueError(f"the limit of budget {self} follows from a profiled step, not from the total")
        # a hair above the product, so that 0.7 of 10 units is 7 units and not 6.999...
        return math.floor(self.value * total_bytes * (1 + 1e-12))

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        if self.kind == "fraction":
            return f"{self.value:.6g}"
        if self.kind == "knee":
            return "knee"
        prefix = "peak<=" if self.kind == "peak" else ""
        nbytes = int(self.value)
        for size, unit in _BINARY_UNITS:
            if nbytes >= size and nbytes % size == 0:
                return f"{prefix}{nbytes // size}{unit}"
        return f"{prefix}{nbytes}B"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The recipe of one part: what to import and the keyword arguments to call it with."""

    name: str  # what the reports call it, for example "resnet18"
    target: str  # import path of a class or function, for example "recals_exp.models.resnet18"
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # plain values; nested {"_target_": ...} are built too

    def locate(self) -> Callable[..., Any]:
        """The class or function that ``target`` names."""
        return locate(self.target)

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the target by name; empty for a builtin without a signature."""
        target = self.locate()
        try:
            return inspect.signature(target).parameters
        except (ValueError, TypeError):
            return {}

    def build(self, *args: Any, **defaults: Any) -> Any:
        """Call the target. ``defaults`` are used only for names that the recipe leaves out."""
        target = self.locate()
        self.check(*args, **defaults)
        kwargs = {name: _build_nested(value) for name, value in self.kwargs.items()}
        return target(*args, **{**defaults, **kwargs})

    def check(self, *args: Any, **defaults: Any) -> None:
        """Refuse arguments that the target does not take, or lacks, before anything is built."""
        try:
            signature = inspect.signature(self.locate())
        except (ValueError, TypeError):  # a builtin that tells nothing: its own error must do
            return
        takes = signature.parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
            unknown = [name for name in self.kwargs if name not in takes]
            if unknown:
                names = ", ".join(takes) or "no arguments"
                raise ConfigError(f"{self.name} ({self.target}) does not take {', '.join(unknown)}; it takes {names}")
        try:
            signature.bind(*args, **{**defaults, **self.kwargs})
        except TypeError as error:
            raise ConfigError(f"{self.name} ({self.target}): {error}; it takes {', '.join(takes)}") from None


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run: one point of a sweep."""

    model: PartSpec
    dataset: PartSpec
    optimizer: PartSpec
    strategy: str = "recals"  # what saves the memory: a name of strategies.STRATEGIES
    strategy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "planned"  # which cached values the engine drops
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    budget: Budget = field(default_factory=Budget)
    batch_size: int = 64  # samples per step
    seed: int = 0  # of the parameters, the batches and every random draw
    device: str = "auto"  # "auto" = the first accelerator, else the CPU; or a torch device such as "cpu", "cuda:1"
    threads: int | None = None  # intra-op threads; None = torch's own choice
    autocast: str | None = None  # None, "bfloat16" or "float16"
    dtype: str = "float32"  # of parameters and inputs; one of DTYPES
    costs: str = "model"  # of ops, for predictions and plans; one of COSTS
    deterministic: bool = False  # torch's deterministic algorithms only
    checkpoint_every: int = 0  # steps of training; 0 = only when interrupted
    train_steps: int = 10  # steps of real learning under the strategy; their losses are logged
    warmup_steps: int = 2  # steps of each kind before anything is timed
    timing_pairs: int = 5  # interleaved (plain, wrapped) pairs that are timed
    mode: str = "run"  # one of MODES
    job: str = ""  # what the report calls this job; empty = the name of its output folder

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} is not allowed: use a whole number of at least {least}"
            for name, least in (
                ("batch_size", 1),
                ("seed", 0),
                ("train_steps", 0),
                ("warmup_steps", 0),
                ("checkpoint_every", 0),
                ("timing_pairs", 1),
            )
            if not _is_whole(getattr(self, name), least)
        ]
        if self.threads is not None and not _is_whole(self.threads, 1):
            problems.append(
                f"threads={self.threads!r} is not allowed: use a whole number of at least 1, or null for torch's choice"
            )
        if self.autocast not in (None, "bfloat16", "float16"):
            problems.append(f"autocast={self.autocast!r} is not allowed: use bfloat16, float16, or null for none")
        if self.costs not in COSTS:
            problems.append(f"costs={self.costs!r} is not allowed: use one of {', '.join(COSTS)}")
        if self.dtype not in DTYPES:
            problems.append(f"dtype={self.dtype!r} is not allowed: use one of {', '.join(DTYPES)}")
        if self.mode not in MODES:
            problems.append(f"mode={self.mode!r} is not allowed: use one of {', '.join(MODES)}")
        if self.budget.is_found_out and self.strategy != "recals":
            holder = "plain PyTorch" if self.strategy == "none" else "it"
            problems.append(
                f"budget {self.budget} with strategy={self.strategy} is not allowed: {holder} holds no limit; use "
                "strategy=recals"
            )
        if self.budget.kind == "knee" and self.mode == "batch_size":
            problems.append(
                "budget=knee with mode=batch_size is not allowed: each batch has another knee; use a fraction, or null"
            )
        if self.budget.kind == "peak" and self.mode != "run":
            problems.append(
                f"target_peak with mode={self.mode} is not allowed: it is met by measuring; use mode=run, or leave it out"
            )
        problems += self._pipeline_problems()
        if problems:
            raise ConfigError("\n".join(problems))

    def _pipeline_problems(self) -> list[str]:
        """What a pipeline cannot be combined with."""
        if self.pipeline.is_none:
            return []
        name, problems = self.pipeline.name, []
        if self.strategy not in ("none", "recals"):
            problems.append(
                f"strategy={self.strategy} with pipeline={name} is not allowed: stages run under strategy=recals or none"
            )
        if self.budget.is_found_out:
            problems.append(
                f"budget {self.budget} with pipeline={name} is not allowed, as it is found for one cache: give a fraction of each "
                "stage's cache, a size for each stage, or pipeline.budgets=[...]"
            )
        if self.strategy == "none" and any(budget is not None for budget in self.pipeline.budgets):
            problems.append(
                f"pipeline.budgets={list(self.pipeline.budgets)} with strategy=none is not allowed: plain PyTorch holds no "
                "limit; use strategy=recals"
            )
        if self.mode == "batch_size":
            problems.append(
                f"mode=batch_size with pipeline={name} is not allowed: it searches for one model on one device; use "
                "pipeline=none"
            )
        if self.mode == "predict":
            problems.append(
                f"mode=predict with pipeline={name} is not allowed: prices are predicted for one cache; use pipeline=none"
            )
        if ":" in self.device and self.pipeline.over_processes:
            problems.append(
                f"device={self.device} with pipeline={name} is not allowed: each process has the device of its own number; use "
                "device=auto, or device=cpu"
            )
        if self.autocast is not None and self.pipeline.over_processes:
            problems.append(
                f"autocast={self.autocast} with pipeline={name} is not allowed: between processes values keep the model's own "
                "type; leave autocast out, or run the pipeline in one process (pipeline=two_stage)"
            )
        if self.mode in ("analyze", "dry_run") and self.pipeline.over_processes:
            problems.append(
                f"mode={self.mode} with pipeline={name} is not allowed: use pipeline=none or two_stage for it"
            )
        if self.checkpoint_every and self.pipeline.over_processes:
            problems.append(
                f"checkpoint_every={self.checkpoint_every} with pipeline={name} is not allowed: a job over processes begins "
                "anew; leave it out"
            )
        return problems

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, lists, strings and numbers; the budget as its text."""
        plain = {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        plain["budget"] = str(self.budget)
        return plain


def locate(path: str) -> Callable[..., Any]:
    """Import the object a dotted path names: the longest importable module, then attributes of it."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"_target_={path!r} is not an import path: write module.name, for example my_models.Net")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise ConfigError(
                f"_target_={path!r}: importing {module_name} failed because the module {error.name!r} is not installed"
            ) from error
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                raise ConfigError(f"_target_={path!r}: {module_name} was imported, but it has no {attribute!r}")
            found = getattr(found, attribute)
        if not callable(found):
            raise ConfigError(
                f"_target_={path!r} is a {type(found).__name__}, not callable: name a class or a function"
            )
        return found
    raise ConfigError(
        f"_target_={path!r}: there is no module {parts[0]!r}. It is looked for among the installed packages and, with "
        "`python -m recals_exp`, in the current folder"
    )


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = {key: _build_nested(item) for key, item in value.items()}
        if "_target_" not in inner:
            return inner
        target = inner.pop("_target_")
        if inner.pop("_partial_", False):
            from functools import partial

            return partial(locate(target), **inner)
        return locate(target)(**inner)
    if isinstance(value, (list, tuple)):
        return [_build_nested(item) for item in value]
    return value


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
