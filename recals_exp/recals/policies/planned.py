"""Planned: watch one step, plan it, follow the plan while the same step comes again.

The first steps of a kind (same callable, same shapes) run under ``Dtr``. When the kind comes again its tape is traced, and a
plan is made by another process (``planning/worker.py``), so that training does not stall; steps until then stay with ``Dtr``. A step that
departs from its plan is noticed at the first saved value that is not where the plan has it: the rest of it runs under
``Dtr``, exactly as ever, and the kind is traced anew the next time.

Plans are known by the signature of their step: one that is known already, from this run or from a file, is followed at once.

Plans may cost time, never exactness: what to hold is all that a plan says.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, final

from ..graph import Value
from ..planning.worker import WorkerStopped, plan_in_process, stop_processes
from ..plans import StepPlan
from ..record import TapeRecord
from ..trace import Trace
from .base import StepPolicy
from .dtr import Dtr

if TYPE_CHECKING:
    from ..cache import Cache
    from ..planning.ceiling import Totals
    from ..planning.plan import Plan, Step

_LOCKS: dict[int, threading.Lock] = {}  # by process: a fork must not wait for a thread that it does not have
_THREAD = "recals-planner"
_ending = threading.Event()
_SMALL_OPS = 64  # up to here a plan is made sooner than a process starts
_FULL_EFFORT_OPS = 400
_KINDS_KEPT = 64
_LOG = logging.getLogger(__name__)

Planner = Callable[[TapeRecord, int], "Plan"]


class Route:
    """A plan laid over the tape it was made for: where each value of the plan is on the tape."""

    __slots__ = ("places", "plan", "record", "step_plan", "values")

    def __init__(self, step_plan: StepPlan) -> None:
        self.step_plan = step_plan
        self.record = record = step_plan.record
        self.plan = step_plan.plan
        self.values: dict[tuple[int, int], tuple[int, int]] = {}  # (op, result) -> (id, bytes)
        self.places: list[tuple[int, int] | None] = [None] * len(record.values)  # id -> (op, result)
        for op_id, op in enumerate(record.ops):
            for value_id, index in zip(op.outputs, op.results or range(len(op.outputs)), strict=True):
                self.values[op_id, index] = (value_id, record.values[value_id].nbytes)
                self.places[value_id] = (op_id, index)


class _Kind:
    """One kind of step."""

    __slots__ = ("is_plannable", "is_planning", "route", "seen")

    def __init__(self) -> None:
        self.route: Route | None = None
        self.is_planning = False
        self.is_plannable = True
        self.seen = 0


@final
class Planned(StepPolicy):
    """``planner`` maps a record and a limit to a plan; by default ``planning.planner.make_plan``.

    ``waits``: plan in the step that needs it instead of in the background (repeatable, for tests and benchmarks).
    ``plans``: known from the start.
    ``measured``: a record whose costs were measured; steps like it are planned by these costs, others by modelled ones.
    """

    name: ClassVar[str] = "planned"

    def __init__(
        self,
        planner: Planner | None = None,
        waits: bool = False,
        plans: Iterable[StepPlan] = (),
        measured: TapeRecord | None = None,
    ) -> None:
        self._planner = planner or default_planner
        self._measured = measured
        self._library: dict[str, StepPlan] = {}  # by signature
        self._waits = waits
        self._fallback = Dtr()
        self._kinds: dict[Hashable, _Kind] = {}
        self._kind: _Kind | None = None
        self._route: Route | None = None  # in force for the present step
        self._first_seq = 0
        self._values: dict[int, Value] = {}  # id -> value, of the present step
        self._nth: dict[int, int] = {}  # misses of each id so far
        self._step: Step | None = None
        self._hold: frozenset[Value] = frozenset()
        self._trace: Trace | None = None
        self._has_dropped = False  # in the present step
        self.steps_followed = 0
        self.steps_departed = 0
        self._given = tuple(plans)
        self.load(self._given)

    # -- steps --------------------------------------------------------------------------------------------------

    def began(self, cache: Cache, key: Hashable, first_seq: int) -> None:
        kind = self._kinds.get(key)
        if kind is None:
            while len(self._kinds) >= _KINDS_KEPT:  # shapes that never repeat must not grow for ever
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[key] = _Kind()
        self._kind = kind
        self._has_dropped = False
        self._first_seq = first_seq
        self._route = kind.route
        kind.seen += 1
        # a kind seen once may never come again: not worth a plan, unless there is one already
        comes_again = kind.seen > 1 or self._waits or bool(self._library)
        is_open = kind.is_plannable and not kind.is_planning
        if kind.route is None and comes_again and is_open and cache.limit_bytes is not None:
            self._trace = cache.trace = Trace()

    def returned(self, values: Iterable[Value]) -> None:
        if self._trace is not None:
            self._trace.returned(values)

    def ended(self, cache: Cache) -> None:
        kind, trace = self._kind, self._trace
        if self._route is not None:
            self.steps_followed += 1
        self._clear()
        if trace is None:
            return
        cache.trace = None
        if kind is None or cache.limit_bytes is None:
            return
        room = cache.limit_bytes - cache.peak_pinned_bytes
        record = self._record(trace)
        if record is not None:
            known = self._library.get(record.signature)
            if known is not None and known.plan.limit_bytes <= room:
                kind.route = Route(known)
                return
        if record is None or not record.backward_events or room < 0 or not self._has_dropped:
            kind.is_plannable = False
            return
        kind.is_planning = True
        if self._waits:
            self._plan(kind, record, room)
        else:
            threading.Thread(target=self._plan, args=(kind, record, room), name=_THREAD, daemon=True).start()

    def _record(self, trace: Trace) -> TapeRecord | None:
        from ..profiling import record_of

        try:
            record = record_of(trace)
            measured = self._measured
            if measured is not None and measured.signature == record.signature:
                record = replace(
                    record,
                    cost_unit=measured.cost_unit,
                    ops=measured.ops,
                    forward_cost=measured.forward_cost,
                    backward_cost=measured.backward_cost,
                    recording_cost=measured.recording_cost,
                    drop_cost=measured.drop_cost,
                )
            return record
        except ValueError as error:  # backward inside of the call, say
            _LOG.info("no record of this kind of step, it stays with dtr: %s", error)
            return None

    def _plan(self, kind: _Kind, record: TapeRecord, room: int) -> None:
        """Plan one kind of step. It runs after a handle's death or in a thread of its own: nothing may come out of it."""
        try:
            # planning takes a core: several plans at once would only slow down training
            with _LOCKS.setdefault(os.getpid(), threading.Lock()):
                if _ending.is_set():
                    raise WorkerStopped("stopped")
                step_plan = StepPlan(record, self._make_plan(record, room))
            self._learn(step_plan)
            kind.route = Route(step_plan)
        except WorkerStopped:
            kind.is_plannable = False
        except Exception:
            kind.is_plannable = False
            _LOG.exception("planning failed; this kind of step stays with dtr")
        finally:
            kind.is_planning = False

    def _make_plan(self, record: TapeRecord, room: int) -> Plan:
        if self._planner is not default_planner or self._waits or len(record.ops) <= _SMALL_OPS:
            return self._planner(record, room)
        try:
            return plan_in_process(record, room)
        except OSError as error:
            _LOG.info(
                "planning in a thread, which slows down training meanwhile: no process could be started: %s", error
            )
            return self._planner(record, room)

    def install(self, key: Hashable, record: TapeRecord, plan: Plan) -> None:
        """Follow ``plan`` in steps of the kind ``key`` from now on."""
        kind = self._kinds.setdefault(key, _Kind())
        kind.route = Route(StepPlan(record, plan))

    def load(self, plans: Iterable[StepPlan]) -> None:
        """Follow these plans in steps of their signatures."""
        for step_plan in plans:
            self._learn(step_plan)

    def _learn(self, step_plan: StepPlan) -> None:
        self._library.pop(step_plan.signature, None)
        while len(self._library) >= _KINDS_KEPT:
            del self._library[next(iter(self._library))]
        self._library[step_plan.signature] = step_plan

    def plans(self) -> tuple[StepPlan, ...]:
        """Every plan that is known."""
        return tuple(self._library.values())

    def _clear(self) -> None:
        self._route = None
        self._kind = None
        self._trace = None
        self._values.clear()
        self._nth.clear()
        self._step = None
        self._hold = frozenset()

    def _depart(self) -> None:
        """The step is not the planned one: go on without a plan, and trace this kind again next time."""
        self._route = None
        self._values.clear()
        self.steps_departed += 1
        if self._kind is not None:
            self._kind.route = None

    def route(self) -> Route | None:
        """The plan in force for the present step, or the last one made."""
        routes = [kind.route for kind in self._kinds.values() if kind.route is not None]
        return self._route or (routes[-1] if routes else None)

    @property
    def first_seq(self) -> int:
        """The number of the first op of the present step, or of the last one."""
        return self._first_seq

    # -- decisions ----------------------------------------------------------------------------------------------

    def anew(self) -> Planned:
        return Planned(self._planner, self._waits, self._given, self._measured)

    def keeps(self, cache: Cache, value: Value) -> bool:
        route = self._route
        if route is not None:
            known = route.values.get((value.position - self._first_seq, value.index))
            if known is not None and known[1] == value.nbytes and route.record.values[known[0]].saved:
                self._values[known[0]] = value
                return known[0] in route.plan.keep_set
            self._depart()
        return self._fallback.keeps(cache, value)

    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        if self._route is not None:
            self._depart()
        return self._fallback.victim(cache, incoming)

    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        self._step, self._hold = None, frozenset()
        route = self._route
        if route is None:
            return self._fallback.targets(cache, missed)
        known = route.values.get((missed.position - self._first_seq, missed.index))
        if known is None:
            self._depart()
            return self._fallback.targets(cache, missed)
        nth = self._nth.get(known[0], 0)
        self._nth[known[0]] = nth + 1
        step = route.plan.step_by_miss.get((known[0], nth))
        if step is None:
            return (missed,)
        self._step = step
        cache.discard_after_schedule = [v for v in map(self._values.get, step.discard) if v is not None]
        hold = [value for value in (self._find(route, i, missed) for i in step.hold) if value is not None]
        self._hold = frozenset(hold)
        return (missed, *hold)

    def _find(self, route: Route, value_id: int, missed: Value) -> Value | None:
        """A value by its id: seen when it was saved, else looked for among what the missed value is made from."""
        value = self._values.get(value_id)
        if value is not None:
            return value
        place = route.places[value_id]
        if route.record.values[value_id].saved or place is None:
            return None  # nobody will ask for it any more
        seen: set[Value] = set()
        stack = [missed]
        while stack:
            value = stack.pop()
            if value in seen or value.producer is None:
                continue
            seen.add(value)
            if (value.position - self._first_seq, value.index) == place:
                self._values[value_id] = value
                return value
            stack.extend(value.producer.inputs)
        return None

    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        if self._route is None:
            return self._fallback.keeps_rebuilt(cache, value, is_target)
        return value in self._hold

    def used(self, cache: Cache, value: Value) -> None:
        if self._route is None:
            self._fallback.used(cache, value)

    def dropped(self, cache: Cache, value: Value) -> None:
        self._has_dropped = True
        if self._route is None:
            self._fallback.dropped(cache, value)

    def freed(self, cache: Cache, value: Value) -> None:
        route = self._route
        if route is None:
            self._fallback.freed(cache, value)
            return
        known = route.values.get((value.position - self._first_seq, value.index))
        if known is not None:
            self._values.pop(known[0], None)


@atexit.register
def _end() -> None:
    """Wait for the threads that plan: C++ code that comes back to an interpreter that has ended aborts the process."""
    _ending.set()
    for thread in threading.enumerate():
        while thread.name == _THREAD and thread.is_alive():
            stop_processes()  # one may have been about to start
            thread.join(0.05)


def default_planner(record: TapeRecord, limit_bytes: int, totals: Totals | None = None) -> Any:
    """The planner of this package, with the schedules of DTR and FIFO as plans to beat."""
    from ..planning.planner import make_plan
    from ..simulate import rivals_of

    effort = min(1.0, len(record.ops) / _FULL_EFFORT_OPS)
    return make_plan(record, limit_bytes, effort=effort, others=rivals_of(record, limit_bytes), totals=totals).plan
