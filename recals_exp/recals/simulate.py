"""A step simulated from its record: the cache and the policies of the engine, without tensors.

Given a record, a limit and a policy: which bytes are held when, what is dropped and re-run, and what it costs. The code
that decides is the engine's own (``cache.py``, ``policies/``); only bytes are tokens here and running an op adds its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .graph import Op, Value
from .policies import Dtr, Fifo, Planned, Policy, StepPolicy, make_policy
from .record import SOURCE, TapeRecord

if TYPE_CHECKING:
    from .planning.plan import Plan

_TOKEN = object()


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a policy does on a recorded step under a limit."""

    policy: str
    limit_bytes: int | None
    overhead_pct: float  # cost of re-run ops, percent of a plain step
    engine_pct: float  # what the engine itself takes beside them, percent of a plain step; 0 in the model
    rerun_cost: float  # in the record's cost unit
    rerun_ops: tuple[int, ...]  # ids, in the order in which they re-ran
    dropped_values: int
    dropped_bytes: int
    replays: int
    peak_cached_bytes: int
    peak_working_bytes: int

    @property
    def total_pct(self) -> float:
        """What the step takes more than a plain one, percent of it."""
        return self.overhead_pct + self.engine_pct


class _SimOp(Op):
    __slots__ = ("id", "record")

    def __init__(self, op_id: int, record: Any, inputs: tuple[Value, ...]) -> None:
        super().__init__(op_id, inputs)
        self.id = op_id
        self.record = record

    def cost(self) -> float:
        return self.record.decision_cost

    def name(self) -> str:
        return self.record.name


class _SimValue(Value):
    __slots__ = ("external",)

    external: bool

    def bytes(self) -> Any:
        if self.payload is None and self.external:
            return _TOKEN
        return self.payload


class Adder:
    """Executor that only adds up."""

    def __init__(self) -> None:
        self.flops = 0
        self.cost = 0.0
        self.ops: list[int] = []
        # for a watcher of bytes, which resets both as it likes
        self.cache: Cache | None = None
        self.outside: Sequence[Value] = ()  # values whose bytes are there although the cache does not hold them
        self.highest_bytes = 0  # cache, working set, outside, and what an op that re-ran was about to make

    def bytes_now(self) -> int:
        """Bytes of the cache, the working set and ``outside``, each value once."""
        assert self.cache is not None
        outside = sum(value.nbytes for value in self.outside if value.payload is None)
        return self.cache.cached_bytes + self.cache.working_bytes + outside

    @contextmanager
    def replaying(self) -> Iterator[None]:
        yield

    def run(self, op: Op, env: dict[Value, Any], wanted: list[Value], scratch: set[Value]) -> list[Any]:
        assert isinstance(op, _SimOp)
        self.cost += op.record.cost
        self.ops.append(op.id)
        if self.cache is not None:
            self.highest_bytes = max(self.highest_bytes, self.bytes_now() + sum(value.nbytes for value in wanted))
        return [_TOKEN] * len(wanted)


Watch = Callable[[Adder, Sequence[Value]], None]
"""Called after every event, with the executor and the values by id."""


def following(record: TapeRecord, plan: Plan) -> Planned:
    """A policy that follows ``plan`` when ``record`` is simulated."""
    policy = Planned()
    policy.install(record.signature, record, plan)
    return policy


def pinned_bytes(record: TapeRecord) -> int:
    """The most that is held at once because it cannot be rebuilt."""
    return max(record.pinned_bytes, _saved_pinned_bytes(record))


def _saved_pinned_bytes(record: TapeRecord) -> int:
    """The part of it that autograd saved."""
    live = peak = 0
    for kind, index in record.forward_events:
        value = record.values[index] if kind != "op" else None
        if value is None or not value.pinned:
            continue
        live += value.nbytes if kind == "save" else -value.nbytes
        peak = max(peak, live)
    return peak


def simulate(
    record: TapeRecord, limit_bytes: int | None, policy: str | Policy, watch: Watch | None = None
) -> Simulation:
    """Run ``record`` under ``policy`` within ``limit_bytes`` (None: no limit).

    ``"planned"`` plans as the engine would; a plan at hand is ``following(record, plan)``.
    """
    if policy == Planned.name:
        from .policies.planned import default_planner

        needs_plan = limit_bytes is not None and limit_bytes < simulate(record, None, "fifo").peak_cached_bytes
        room = (limit_bytes or 0) - pinned_bytes(record)
        policy = following(record, default_planner(record, room)) if needs_plan else "fifo"
    adder = Adder()
    chosen = make_policy(policy)
    cache = Cache(limit_bytes, chosen, adder)
    values = _values(record)
    if isinstance(chosen, StepPolicy):
        chosen.began(cache, record.signature, 0)
    cache.calls_running = 1
    cache.pin(pinned_bytes(record) - _saved_pinned_bytes(record))  # autograd never asks for these
    if watch is not None:
        adder.cache = cache
    for kind, index in record.forward_events:
        if kind == "save":
            value = values[index]
            if value.pinned and not value.handles:
                cache.pin(value.nbytes)
            cache.save(value, _TOKEN)
        elif kind == "free":
            _release(cache, values[index])
        if watch is not None:
            watch(adder, values)
    cache.calls_running = 0
    for event, index in record.backward_events:
        if event == "fetch":
            cache.fetch(values[index])
        else:
            _release(cache, values[index])
        if watch is not None:
            watch(adder, values)
    return Simulation(
        policy=chosen.name,
        limit_bytes=limit_bytes,
        overhead_pct=record.overhead_pct(adder.cost),
        engine_pct=record.engine_pct(cache.dropped_values),
        rerun_cost=adder.cost,
        rerun_ops=tuple(adder.ops),
        dropped_values=cache.dropped_values,
        dropped_bytes=cache.dropped_bytes,
        replays=cache.replays,
        peak_cached_bytes=cache.peak_cached_bytes,
        peak_working_bytes=cache.peak_working_bytes,
    )


def _values(record: TapeRecord) -> list[_SimValue]:
    values: list[_SimValue] = []
    ops: dict[int, _SimOp] = {}
    for entry in record.values:
        value = _SimValue(None, 0, entry.nbytes)
        value.external = entry.external
        value.pinned = entry.pinned
        if entry.producer == SOURCE or entry.pinned:
            value.payload = _TOKEN
        values.append(value)
    for op_id, op in enumerate(record.ops):
        ops[op_id] = _SimOp(op_id, op, tuple(values[i] for i in op.inputs))
        for index, value_id in zip(op.results or range(len(op.outputs)), op.outputs, strict=True):
            if not values[value_id].pinned:
                values[value_id].producer = ops[op_id]
            values[value_id].index = index
    return values


def _release(cache: Cache, value: Value) -> None:
    """The record names the death of the last handle only."""
    while value.handles:
        cache.release(value)
    if value.pinned and cache.pinned_bytes:
        cache.unpin(value.nbytes)


def rivals_of(record: TapeRecord, limit_bytes: int) -> tuple[Plan, ...]:
    """What the online policies do within ``limit_bytes``: the plans that a planner has to beat."""
    return tuple(plan_of(record, limit_bytes, policy) for policy in (Dtr.name, Fifo.name))


def plan_of(record: TapeRecord, limit_bytes: int, policy: str | Policy) -> Plan:
    """What a policy does on a recorded step, written down as a plan: a rival for the planner."""
    from .planning.plan import Plan, Step

    adder = Adder()
    chosen = make_policy(policy)
    cache = Cache(limit_bytes, chosen, adder)
    values = _values(record)
    ids: dict[Value, int] = {value: i for i, value in enumerate(values)}
    for kind, index in record.forward_events:
        if kind == "save":
            cache.save(values[index], _TOKEN)
        elif kind == "free":
            _release(cache, values[index])
    free = {i for i, entry in enumerate(record.values) if entry.external or entry.pinned or entry.producer == SOURCE}
    keep = sorted(ids[value] for value in cache.held if ids[value] not in free)
    steps: list[Step] = []
    nth: dict[int, int] = {}
    for event, index in record.backward_events:
        if event == "free":
            _release(cache, values[index])
            continue
        before, replays = set(cache.held), cache.replays
        cache.fetch(values[index])
        if cache.replays == replays:
            continue
        discard = sorted(ids[value] for value in before - set(cache.held) if ids[value] not in free)
        hold = sorted(ids[value] for value in set(cache.held) - before if ids[value] not in free)
        steps.append(Step(index, nth.get(index, 0), tuple(discard), tuple(hold)))
        nth[index] = nth.get(index, 0) + 1
    return Plan(record.signature, limit_bytes, chosen.name, tuple(keep), tuple(steps), record.overhead_pct(adder.cost))
