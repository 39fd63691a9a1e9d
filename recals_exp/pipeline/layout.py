"""Layouts: how a model is spread, as plain data from a configuration, and the pipeline that is built from one.

    LayoutSpec (what the user wrote)  --plan_layout-->  Layout (which units where)  --build_pipeline-->  ModelPipeline

Rules:

1. The cut is given by ``cuts`` (names of units to cut before), by ``balance`` as numbers of units, or found: ``"even"`` (equal
   numbers of units), ``"time"`` and ``"memory"`` (`profile.py` measures, `balance.py` minimises the worst stage).
2. The memory of a stage is that of its parameters with gradients and optimizer state, plus the saved values of the
   micro-batches in flight, or what the stage's budget leaves of those.
3. Devices are checked before anything is measured or moved.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recals_exp.pipeline.balance import StageCost, best_bounds, check_counts, worst_cost
from recals_exp.pipeline.batch import plan_rows, size_for
from recals_exp.pipeline.budget import Budget, check_budget
from recals_exp.pipeline.devices import existing_devices, parse_device
from recals_exp.pipeline.module import ModelPipeline
from recals_exp.pipeline.profile import Profile, profile_units
from recals_exp.pipeline.units import Units, find_units
from recals_exp.recals import format_bytes

BALANCES = ("even", "time", "memory")


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """What a user says about a pipeline. Sequences have one entry for each stage."""

    devices: tuple[str, ...] = ()  # () = every accelerator, or the CPU once for each stage
    n_stages: int | None = None  # None = one for each device
    cuts: tuple[str, ...] = ()  # names of units before which a stage begins
    balance: str | tuple[int, ...] = "even"  # one of BALANCES, or the numbers of units
    units: tuple[str, ...] | None = None  # submodules in the order they run; None = found
    budgets: tuple[Any, ...] = ()  # bytes, text, fractions or None; one for all stages, or one each
    n_micro_batches: int | None = None
    split_size: int | None = None  # rows of a micro-batch; give one of the two at most
    ragged: bool = False
    unsplit: tuple[str, ...] = ()
    threads: bool = False
    policy: str | Callable[[int], Any] = "fifo"  # of the stages' caches; or what makes a cache for a limit in bytes
    optimizer_states: float = 2.0  # tensors of a parameter's size that the optimizer keeps: SGD 0, momentum 1, Adam 2

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> LayoutSpec:
        """From a configuration's plain values; unknown keys and wrong forms are refused together."""
        fields = {item.name: item for item in dataclasses.fields(cls)}
        unknown = [name for name in values if name not in fields]
        if unknown:
            raise ValueError(f"a pipeline has no option {', '.join(unknown)}; it has: {', '.join(fields)}")
        read: dict[str, Any] = {}
        for name, value in values.items():
            is_sequence = not isinstance(value, str) and isinstance(value, Sequence)
            if name in ("devices", "cuts", "units", "budgets", "unsplit") and value is not None and not is_sequence:
                value = (value,)
            read[name] = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name in ("devices", "cuts", "budgets", "unsplit"):
            if read.get(name, ()) is None:
                del read[name]
        if "devices" in read:
            read["devices"] = tuple(str(device) for device in read["devices"])
        return cls(**read)

    def __post_init__(self) -> None:
        problems = []
        if isinstance(self.balance, str) and self.balance not in BALANCES:
            problems.append(f"balance={self.balance!r} is not known: use {', '.join(BALANCES)}, or numbers of units")
        if self.cuts and self.balance != "even":
            problems.append(
                f"cuts={list(self.cuts)} and balance={self.balance} both say where to cut: give one of them"
            )
        if self.n_micro_batches is not None and self.split_size is not None:
            problems.append(
                f"n_micro_batches={self.n_micro_batches} and split_size={self.split_size} both say how to split: give one"
            )
        if problems:
            raise ValueError("\n".join(problems))

    def place(self) -> tuple[torch.device, ...]:
        """The device of each stage (rule 3); they must agree with everything else that tells the number of stages."""
        said = {
            "n_stages": self.n_stages,
            "devices": len(self.devices) if len(self.devices) > 1 else None,
            "cuts": len(self.cuts) + 1 if self.cuts else None,
            "balance": len(self.balance) if not isinstance(self.balance, str) else None,
            "budgets": len(self.budgets) if len(self.budgets) > 1 else None,
        }
        counts = {name: count for name, count in said.items() if count is not None}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} says {count}" for name, count in counts.items())
            raise ValueError(f"how many stages? {told}: let them agree, or leave some out")
        devices = self.devices
        if not devices:
            found = existing_devices()
            devices = found[1:] or ("cpu",)
            if counts and len(devices) > 1:
                devices = devices[: next(iter(counts.values()))]
        n_stages = next(iter(counts.values()), len(devices))
        if len(devices) == 1:
            devices = devices * n_stages
        if len(devices) < n_stages:
            raise ValueError(
                f"{n_stages} stages do not fit on {len(devices)} devices ({', '.join(devices)}): name a device for each "
                "stage (one may be named several times)"
            )
        return tuple(parse_device(device) for device in devices)

    def stage_budgets(self, n_stages: int) -> tuple[Budget, ...]:
        """The budget of each stage."""
        budgets = self.budgets or (None,)
        return tuple(check_budget(budget) for budget in (budgets * n_stages if len(budgets) == 1 else budgets))


@dataclass(frozen=True, slots=True)
class StageLayout:
    """One stage of a layout."""

    units: tuple[str, ...]
    device: str
    budget: Any
    time_s: float | None = None  # forward and backward of one micro-batch; None = not measured
    state_bytes: int | None = None  # parameters, gradients, optimizer state, buffers
    activation_bytes: int | None = None  # saved values of the micro-batches in flight, under the budget

    @property
    def memory_bytes(self) -> int | None:
        """State and activations."""
        if self.state_bytes is None or self.activation_bytes is None:
            return None
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Which units are where."""

    bounds: tuple[int, ...]
    stages: tuple[StageLayout, ...]


def plan_layout(
    units: Units,
    spec: LayoutSpec,
    example: tuple[Any, ...] = (),
    in_flight: Sequence[int] | None = None,
    profile: Profile | None = None,
) -> Layout:
    """Choose the bounds.

    Args:
        units: the model's units.
        spec: what the user wrote.
        example: positional inputs of one micro-batch; needed to balance time or memory if no profile is given.
        in_flight: micro-batches each stage holds at once; by default all of them.
        profile: a measurement to use instead of a new one.
    """
    devices = spec.place()
    n_units, n_stages = len(units.names), len(devices)
    check_counts(n_units, n_stages)
    budgets = spec.stage_budgets(n_stages)
    flights = tuple(in_flight) if in_flight is not None else (spec.n_micro_batches or 1,) * n_stages
    if profile is None and spec.balance in ("time", "memory"):
        if not example:
            raise ValueError(f"balance={spec.balance} needs an example input to measure the units with")
        profile = profile_units(units, example, spec.optimizer_states)
    if spec.cuts:
        bounds = (0, *(units.index(name) for name in spec.cuts), n_units)
        units.check_bounds(bounds)
    elif not isinstance(spec.balance, str):
        bounds = (0, *itertools.accumulate(spec.balance))
        if bounds[-1] != n_units or any(not isinstance(n, int) or n < 1 for n in spec.balance):
            raise ValueError(
                f"balance={list(spec.balance)} adds up to {bounds[-1]} units, but the model has {n_units}: "
                f"{', '.join(units.names)}"
            )
    elif spec.balance == "even":
        bounds = tuple(round(stage * n_units / n_stages) for stage in range(n_stages + 1))
    else:
        assert profile is not None
        bounds = best_bounds(n_units, n_stages, stage_cost(profile, spec.balance, budgets, flights))
    stages = []
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        measured: dict[str, Any] = {}
        if profile is not None:
            measured = {
                "time_s": profile.time_s(first, last),
                "state_bytes": profile.state_bytes(first, last),
                "activation_bytes": _activations(profile, first, last, budgets[stage], flights[stage]),
            }
        stages.append(StageLayout(units.names[first:last], str(devices[stage]), budgets[stage], **measured))
    return Layout(bounds, tuple(stages))


def stage_cost(profile: Profile, balance: str, budgets: Sequence[Budget], in_flight: Sequence[int]) -> StageCost:
    """What ``balance`` minimises the worst of: seconds, or bytes (rule 2)."""
    if balance == "time":
        return lambda first, last, stage: profile.time_s(first, last)
    state = functools.cache(profile.state_bytes)
    saved = functools.cache(profile.saved_bytes)

    def memory(first: int, last: int, stage: int) -> float:
        return state(first, last) + _under_budget(saved(first, last) * in_flight[stage], budgets[stage])

    return memory


def build_pipeline(
    model: nn.Module, spec: LayoutSpec, example: Any = None, profile: Profile | None = None
) -> tuple[ModelPipeline, Layout]:
    """A pipeline of a model's own parts, and the layout it follows.

    Args:
        model: any module; afterwards its parts live on the stages' devices, and the pipeline has its ``state_dict``.
        spec: what the user wrote.
        example: an input batch (a tensor, or a tuple of them); needed for models that are no ``nn.Sequential``, and to
            balance time or memory. Its first micro-batch is used.
        profile: a measurement to use instead of a new one.
    """
    spec.place()  # refuse before tracing and measuring
    piece = first_micro_batch(example, spec)
    units = find_units(model, piece, spec.units)
    layout = plan_layout(units, spec, piece, profile=profile)
    pipe = ModelPipeline(
        split_size=spec.split_size,
        n_micro_batches=spec.n_micro_batches,
        ragged=spec.ragged,
        unsplit=spec.unsplit,
        threads=spec.threads,
        policy=spec.policy,
    ).adopt(model)
    for part, place in zip(units.stages(layout.bounds), layout.stages, strict=True):
        pipe.append(part.module, place.device, place.budget, takes=part.takes, name=part.name)
    return pipe, layout


def first_micro_batch(example: Any, spec: LayoutSpec) -> tuple[Any, ...]:
    """The positional inputs of the first micro-batch of a batch; () if there is no example."""
    if example is None:
        return ()
    args = example if type(example) is tuple else (example,)
    rows = next((arg.shape[0] for arg in args if isinstance(arg, Tensor) and arg.ndim), 1)
    size = spec.split_size
    if size is None and spec.n_micro_batches is not None:
        size = size_for(rows, spec.n_micro_batches, spec.ragged)
    count = rows if size is None else plan_rows(rows, size, spec.ragged)[0]
    return tuple(arg[:count] if isinstance(arg, Tensor) and arg.ndim else arg for arg in args)


def format_layout(layout: Layout) -> str:
    """A table for people."""
    rows = [("stage", "device", "units", "time/mb", "state", "activations", "budget")]
    for number, stage in enumerate(layout.stages):
        span = (
            stage.units[0] if len(stage.units) == 1 else f"{stage.units[0]} .. {stage.units[-1]} ({len(stage.units)})"
        )
        rows.append(
            (
                str(number),
                stage.device,
                span,
                "-" if stage.time_s is None else f"{1000 * stage.time_s:.2f} ms",
                "-" if stage.state_bytes is None else format_bytes(stage.state_bytes),
                "-" if stage.activation_bytes is None else format_bytes(stage.activation_bytes),
                "none" if stage.budget in (None, -1) else str(stage.budget),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _activations(profile: Profile, first: int, last: int, budget: Budget, in_flight: int) -> int:
    return int(_under_budget(profile.saved_bytes(first, last) * in_flight, budget))


def _under_budget(saved: int, budget: Budget) -> float:
    if isinstance(budget, float):
        return saved * budget
    if isinstance(budget, int) and budget >= 0:
        return min(saved, budget)
    limit = getattr(budget, "cache_limit_bytes", None)
    return saved if limit is None else min(saved, limit)


__all__ = [
    "BALANCES",
    "Layout",
    "LayoutSpec",
    "StageLayout",
    "build_pipeline",
    "format_layout",
    "plan_layout",
    "stage_cost",
    "worst_cost",
]
