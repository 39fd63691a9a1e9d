"""The tape record: one profiled training step as plain data.

What: the ops of one step with their costs, the values they make with their bytes, and the order in which forward saves and
backward fetches and frees. A simulator, a planner and a checker read it with no model, no tensor and no device at hand.

Why not `torch.profiler` or an FX graph: the first knows times but not which value feeds which op nor what autograd kept;
the second knows the graph but not the order in which autograd's engine asks, and stops at the first graph break.

Words (see also ``docs/``): a *value* is one version of a storage (a view is not a value, an in-place op makes a new value).
An *op* reads values and makes values. A *source* is a value no op made (parameter, input, constant): always there, never
counted. An *external* value stays alive outside the cache until backward (the model's output): there for free.

Rules
1. Plain data, immutable, round-trips exactly through JSON (costs are kept as Python floats, which JSON repeats bit by bit).
2. Ids are positions: value ``v`` is ``values[v]``, op ``o`` is ``ops[o]``; ops stand in the order in which they ran.
3. A record is refused at the door if it contradicts itself, with every fault listed at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

FORMAT_VERSION = 2
"""Raised whenever the meaning of a field changes; `TapeRecord.from_json` refuses any other."""

ForwardEvent: TypeAlias = tuple[Literal["op", "save", "free"], int]
BackwardEvent: TypeAlias = tuple[Literal["fetch", "free"], int]

SOURCE = -1
"""`ValueRecord.producer` of a value that no recorded op made."""

_FAULTS_SHOWN = 10


class RecordError(ValueError):
    """A tape record contradicts itself, or was written by another version."""


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One version of a storage."""

    nbytes: int  # bytes of the whole storage (a small view of a big base costs the base)
    producer: int  # index of the op that made it; SOURCE (-1): a leaf, never counted, always there
    saved: bool  # autograd saved it: its bytes are cache
    pinned: bool = False  # cannot be rebuilt: always held, counted while it lives
    external: bool = False  # alive outside the cache until backward: there for free, never counted
    layer: str = ""  # qualified name of the module that made it, for a reader


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op that ran in forward."""

    name: str  # e.g. "aten.addmm.default"
    layer: str  # qualified name of the module it ran in
    cost: float  # seconds, or model units (see TapeRecord.cost_unit)
    flops: int  # multiply-adds counted as two, 0 where torch has no formula
    inputs: tuple[int, ...]  # ids of the non-source values it reads, each once
    outputs: tuple[int, ...]  # ids of the values it makes, saved or not
    results: tuple[int, ...] = ()  # which result each output is (negative: a written argument); (): 0, 1, 2, ...
    model_cost: float | None = None  # the modelled cost, where `cost` is measured; None: `cost` is the modelled one

    @property
    def decision_cost(self) -> float:
        """What online policies decide by: always the modelled cost, as in the engine."""
        return self.cost if self.model_cost is None else self.model_cost


@dataclass(frozen=True)
class TapeRecord:
    """One profiled step. Ids are positions in ``values`` and ``ops`` (rule 2)."""

    signature: str  # of the tape: equal signatures may share a plan
    torch_version: str
    device: str
    cost_unit: Literal["s", "model"]  # "s": measured seconds; "model": seconds on a nominal machine
    values: tuple[ValueRecord, ...]
    ops: tuple[OpRecord, ...]
    # ("op", i) op i ran | ("save", v) autograd saved v | ("free", v) the last handle of v died
    forward_events: tuple[ForwardEvent, ...]
    # ("fetch", v) autograd asked for v | ("free", v) the last handle of v died
    backward_events: tuple[BackwardEvent, ...]
    forward_cost: float
    backward_cost: float  # 2 * forward_cost in the default model
    recording_cost: float = 0.0  # what recording adds to a step in which nothing is re-run; 0 in the model
    drop_cost: float = 0.0  # what dropping a value and handing it out again adds beside the ops; 0 in the model
    pinned_bytes: int = 0  # the most held at once because it cannot be rebuilt, whether autograd saved it or not
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        faults = _faults(self)
        if faults:
            shown = "\n".join(f"  - {fault}" for fault in faults[:_FAULTS_SHOWN])
            more = f"\n  ... and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
            raise RecordError(
                f"the tape record {self.signature!r} contradicts itself in {len(faults)} place(s); "
                f"profile the step again:\n{shown}{more}"
            )

    @property
    def step_cost(self) -> float:
        """Cost of one plain step (forward and backward), in ``cost_unit``."""
        return self.forward_cost + self.backward_cost

    @cached_property
    def cache_total_bytes(self) -> int:
        """Bytes autograd's cache reaches with no limit, external values included: the budget of 100 %."""
        live = peak = 0
        seen: set[int] = set()
        for kind, index in self.forward_events:
            if kind == "op" or self.values[index].producer == SOURCE:
                continue
            if kind == "save" and index not in seen:
                seen.add(index)
                live += self.values[index].nbytes
                peak = max(peak, live)
            elif kind == "free" and index in seen:
                seen.discard(index)
                live -= self.values[index].nbytes
        return peak

    @property
    def recording_pct(self) -> float:
        """What every policy pays beside re-running, as a percentage of one plain step."""
        return self.engine_pct(0)

    def engine_pct(self, dropped_values: int) -> float:
        """What a policy that drops so many values pays beside re-running, as a percentage of one plain step."""
        return self.overhead_pct(self.recording_cost + dropped_values * self.drop_cost)

    def overhead_pct(self, rerun_cost: float) -> float:
        """Cost of re-run ops as a percentage of one plain step."""
        return 100.0 * rerun_cost / self.step_cost if self.step_cost > 0 else 0.0

    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal record (rule 1)."""
        return json.dumps(
            {
                "format_version": self.format_version,
                "torch_version": self.torch_version,
                "device": self.device,
                "signature": self.signature,
                "cost_unit": self.cost_unit,
                "forward_cost": self.forward_cost,
                "backward_cost": self.backward_cost,
                "recording_cost": self.recording_cost,
                "drop_cost": self.drop_cost,
                "pinned_bytes": self.pinned_bytes,
                "values": [[v.nbytes, v.producer, v.saved, v.pinned, v.external, v.layer] for v in self.values],
                "ops": [
                    [o.name, o.layer, o.cost, o.flops, list(o.inputs), list(o.outputs), list(o.results), o.model_cost]
                    for o in self.ops
                ],
                "forward_events": self.forward_events,
                "backward_events": self.backward_events,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> TapeRecord:
        """The record that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        found = data.get("format_version")
        if found != FORMAT_VERSION:
            raise RecordError(
                f"the tape record has format version {found!r}, this recals reads {FORMAT_VERSION}; profile the step again"
            )
        return cls(
            signature=data["signature"],
            torch_version=data["torch_version"],
            device=data["device"],
            cost_unit=data["cost_unit"],
            values=tuple(ValueRecord(*fields) for fields in data["values"]),
            ops=tuple(
                OpRecord(name, layer, cost, flops, tuple(inputs), tuple(outputs), tuple(results), model_cost)
                for name, layer, cost, flops, inputs, outputs, results, model_cost in data["ops"]
            ),
            forward_events=tuple((kind, index) for kind, index in data["forward_events"]),
            backward_events=tuple((kind, index) for kind, index in data["backward_events"]),
            forward_cost=data["forward_cost"],
            backward_cost=data["backward_cost"],
            recording_cost=data["recording_cost"],
            drop_cost=data.get("drop_cost", 0.0),  # not in older records
            pinned_bytes=data["pinned_bytes"],
        )


def _faults(record: TapeRecord) -> list[str]:
    """Every contradiction in a record, as sentences."""
    faults: list[str] = []
    n_values, n_ops = len(record.values), len(record.ops)
    made_by: dict[int, int] = {}
    for index, op in enumerate(record.ops):
        if op.cost < 0:
            faults.append(f"op {index} ({op.name}) has the negative cost {op.cost}")
        for value in op.outputs:
            if not 0 <= value < n_values:
                faults.append(f"op {index} ({op.name}) makes value {value}, there are {n_values} values")
            elif value in made_by:
                faults.append(f"value {value} is made by op {made_by[value]} and by op {index}")
            else:
                made_by[value] = index
        for value in op.inputs:
            if not 0 <= value < n_values:
                faults.append(f"op {index} ({op.name}) reads value {value}, there are {n_values} values")
            elif record.values[value].producer != SOURCE and made_by.get(value, index) >= index:
                faults.append(f"op {index} ({op.name}) reads value {value} before it is made")
    for index, value_record in enumerate(record.values):
        if value_record.nbytes < 0:
            faults.append(f"value {index} has {value_record.nbytes} bytes")
        if value_record.producer != made_by.get(index, SOURCE):
            faults.append(
                f"value {index} names op {value_record.producer} as its producer, "
                f"the ops say {made_by.get(index, SOURCE)} (-1 = none)"
            )
    for phase, events, sized in (
        ("forward", record.forward_events, {"op": n_ops, "save": n_values, "free": n_values}),
        ("backward", record.backward_events, {"fetch": n_values, "free": n_values}),
    ):
        for kind, index in events:
            if kind not in sized:
                faults.append(f"{phase} has an event {kind!r}, known are {sorted(sized)}")
            elif not 0 <= index < sized[kind]:
                faults.append(f"{phase} event ({kind!r}, {index}) is out of range, there are {sized[kind]}")
    return faults
