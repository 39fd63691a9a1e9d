"""How a model is spread over devices or processes, as a configuration says it: plain data, checked when it is made.

Needs neither Hydra nor torch, like ``runconfig``. ``pipelines`` and ``ranks`` make of it what the library takes: a `LayoutSpec`,
a `ProcessSpec`. What only the model or the machine can tell (names of units, devices) is refused there.

Rules followed here:

1. `PipelineSpec` lists every key of the group ``pipeline``; its fields' metadata say what is allowed, for the messages.
2. All that is wrong is listed at once.
3. A sequence has one entry for each stage; a single value stands for all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recals_exp.configerror import ConfigError

NONE = "none"
AUTO = "auto"
BALANCES = ("even", "time", "memory")
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zbv")
BUDGETS = "a fraction in (0, 1], a size such as 512MiB, or null for the job's own budget"
_WHOLE = "a whole number of at least 1"
_IN_PROCESS = ("devices", "ragged", "threads")  # of a pipeline in one process
_OVER_PROCESSES = ("schedule", "stages_per_process", "replicas")


def _said(allowed: str, default: Any) -> Any:
    return field(default=default, metadata={"allowed": allowed})


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """How the model is spread; "none" keeps it whole on one device."""

    name: str = _said("the name of a choice", NONE)  # what the reports call it
    devices: tuple[str, ...] = _said("a device or a list of them, such as [cuda:0,cuda:1] or cpu", ())
    n_stages: int | None = _said(f"{_WHOLE}, or null for one on each device", None)
    cuts: tuple[str, ...] = _said("names of units before which a stage begins, such as [layer2,layer4]", ())
    balance: str | tuple[int, ...] = _said(f"{', '.join(BALANCES)}, or the numbers of units, such as [5,3]", "even")
    units: tuple[str, ...] | None = _said("submodules in the order they run, or null to find them", None)
    budgets: tuple[Any, ...] = _said(f"one for all stages or a list with one for each: {BUDGETS}", ())
    n_micro_batches: int | None = _said(f"{_WHOLE}, or null", None)
    split_size: int | None = _said(f"{_WHOLE} (samples of a micro-batch), or null", None)
    ragged: bool = _said("true or false", False)
    threads: bool = _said("true or false", False)  # a worker thread for each stage on the CPU
    processes: int | str | None = _said(
        f"{_WHOLE}, {AUTO} (what torchrun started, else 2), or null for one process", None
    )
    schedule: str = _said(f"one of {', '.join(SCHEDULES)}", "1f1b")
    stages_per_process: int | None = _said(f"{_WHOLE}, or null for the schedule's own number", None)
    replicas: int = _said(_WHOLE, 1)
    timeout_s: float = _said("seconds after which a job over processes is ended, above 0", 3600.0)

    @property
    def is_none(self) -> bool:
        """Whether the model stays whole."""
        return self.name == NONE

    @property
    def over_processes(self) -> bool:
        """Whether stages are on processes of their own."""
        return self.processes is not None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PipelineSpec:
        """From a configuration's plain values: lists become tuples, a single value a tuple of one (rule 3)."""
        unknown = [name for name in values if name not in ALLOWED]
        if unknown:
            raise ConfigError(f"pipeline has no option {', '.join(map(repr, unknown))}; it has {', '.join(ALLOWED)}")
        read: dict[str, Any] = {}
        for name, value in values.items():
            if name in ("devices", "cuts", "budgets", "units") and not (name == "units" and value is None):
                value = () if value is None else value
                value = tuple(value) if _is_list(value) else (value,)
                if name == "devices":
                    value = tuple(str(device) for device in value)  # 0 means the same as "0"
            elif _is_list(value):
                value = tuple(value)
            read[name] = value
        return cls(**read)

    def __post_init__(self) -> None:
        problems = [
            f"{self._says(name)} is not allowed: use {ALLOWED[name]}" for name in ALLOWED if not self._fits(name)
        ]
        if not problems:
            problems = list(self._conflicts())
        if problems:
            raise ConfigError("\n".join(problems))

    def _says(self, name: str) -> str:
        value = getattr(self, name)
        return f"pipeline.{name}={list(value) if isinstance(value, tuple) else value!r}"

    def _fits(self, name: str) -> bool:
        value = getattr(self, name)
        if name in ("n_stages", "n_micro_batches", "split_size", "stages_per_process"):
            return value is None or _is_whole(value)
        if name in ("devices", "cuts"):
            return all(isinstance(item, str) and item for item in value)
        if name in ("ragged", "threads"):
            return isinstance(value, bool)
        checks = {
            "name": isinstance(self.name, str) and bool(self.name),
            "balance": self.balance in BALANCES
            if isinstance(self.balance, str)
            else isinstance(self.balance, tuple) and bool(self.balance) and all(map(_is_whole, self.balance)),
            "units": self.units is None or (bool(self.units) and all(isinstance(unit, str) for unit in self.units)),
            "budgets": all(map(_is_budget, self.budgets)),
            "processes": self.processes in (None, AUTO) or _is_whole(self.processes),
            "schedule": self.schedule in SCHEDULES,
            "replicas": _is_whole(self.replicas),
            "timeout_s": isinstance(self.timeout_s, (int, float)) and 0 < self.timeout_s < math.inf,
        }
        return checks[name]

    def _conflicts(self) -> Any:
        """What goes with what. The number of stages is compared by the library, which knows the devices."""
        given = [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]
        if self.is_none:
            extra = [name for name in given if name != "name"]
            if extra:
                said = ", ".join(map(self._says, extra))
                yield f"{said} with pipeline=none: the model is whole there; choose pipeline=two_stage, auto or distributed"
            return
        if self.cuts and self.balance != "even":
            yield f"{self._says('cuts')} and {self._says('balance')} both say where to cut: give one of them"
        if self.n_micro_batches is not None and self.split_size is not None:
            yield f"{self._says('n_micro_batches')} and {self._says('split_size')} both say how to split: set one to null"
        wrong = [name for name in given if name in (_IN_PROCESS if self.over_processes else _OVER_PROCESSES)]
        for name in wrong:
            where = (
                "a pipeline in one process"
                if self.over_processes
                else "a pipeline over processes (pipeline=distributed)"
            )
            yield f"{self._says(name)} is for {where}: leave it out, or choose another pipeline"
        if self.over_processes and self.n_micro_batches is None:
            yield (
                f"{self._says('n_micro_batches')}: over processes the number of micro-batches must be known; give one, "
                "such as pipeline.n_micro_batches=8"
            )


ALLOWED: Mapping[str, str] = {item.name: item.metadata["allowed"] for item in dataclasses.fields(PipelineSpec)}
"""Every key of the group, and what it takes."""


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_budget(value: Any) -> bool:
    from recals_exp.runconfig import Budget  # which imports this module

    try:
        return not Budget.parse(value).is_found_out
    except ConfigError:
        return False
