"""From wishes to an exact schedule: what each miss re-runs, holds and lets go of, and what it all costs.

A planner states *wishes*: at time t (a fetch, or the forward pass), hold these values. `unroll` walks the backward pass once
and turns them into a schedule that keeps the limit by construction:

1. A wish waits for the first miss at or after its time, so that nothing is rebuilt before it is missed.
2. A miss with no wish rebuilds its value alone. It stays at hand, uncounted, until the next miss (`plan.py`, rule 4), and is
   held if it is fetched again later than that is sure to last (by the next fetch) and fits.
3. A value with no further use is let go of at the next miss; its bytes may still feed that rebuild.
4. Forward holds saved values only (`plan.py`, rule 1), a rebuild unsaved ones only on the way to the missed value. Wishes that
   do not fit are granted latest op first (backward needs these first); the others are forgotten.

Cost is linear in the ops re-run. The checker (`checker.py`) shares no code with this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .ceiling import Rooms
from .plan import Plan, Step
from .problem import FORWARD, Problem

Wishes = Mapping[int, Iterable[int]]
"""time -> values to hold from then on; time FORWARD (-1) is the forward pass, any other a fetch."""

Until = Mapping[tuple[int, int], int]
"""(value, time its holding begins) -> the fetch after which it is of no use."""


@dataclass(slots=True)
class Miss:
    """One rebuild: what happened at a fetch whose value was not there."""

    fetch: int  # index of the fetch
    value: int
    discard: tuple[int, ...]
    hold: tuple[int, ...]  # in tape order
    made: list[int]  # every value rebuilt: the missed one, those to hold, and what they needed
    ops: list[int]  # re-run, in tape order
    cost: float
    held_bytes: int  # held once the rebuild is over: the most until the next miss


@dataclass(slots=True)
class Holding:
    """One value held over one span. Places count misses: place p is from miss p to miss p + 1, place -1 is before miss 0."""

    value: int
    begin: int  # time: a fetch, or FORWARD
    first_place: int
    last_place: int
    first_use: int  # fetch (a hit, or a rebuild that read it); = begin if never used
    last_use: int


@dataclass(slots=True)
class Schedule:
    """A whole step."""

    keep: tuple[int, ...]
    kept_bytes: int
    misses: list[Miss] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    cost: float = 0.0
    # what is free at each place, [place + 1]: bytes that may be held in addition from that miss to the next
    free: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    levels: NDArray[np.int64] | None = None  # held and at hand, by slot (`ceiling.py`); None: the limit is all

    def wishes(self) -> dict[int, set[int]]:
        """The wishes that were granted and used: unrolling them again gives the same cost in no more bytes."""
        found: dict[int, set[int]] = {}
        for holding in self.holdings:
            if holding.last_use > holding.begin:
                found.setdefault(holding.begin, set()).add(holding.value)
        return found

    def until(self) -> dict[tuple[int, int], int]:
        """The last use of every holding."""
        return {(holding.value, holding.begin): holding.last_use for holding in self.holdings}


def unroll(problem: Problem, wishes: Wishes, until: Until | None = None) -> Schedule:
    """The schedule that ``wishes`` lead to within the problem's capacity.

    ``until`` lets a holding go after the use it names; a holding that it does not name lasts until the last fetch that may
    need it.
    """
    return _Unroller(problem, until or {}).run(wishes)


class _Unroller:
    """State of one walk. Lists indexed by value and by op: this is the inner loop of every planner."""

    def __init__(self, problem: Problem, until: Until) -> None:
        self.problem, self.capacity, self.until = problem, problem.capacity, until
        n_values = len(problem.nbytes)
        self.held: list[Holding | None] = [None] * n_values
        self.end_of = [0] * n_values  # of a held value: its last use, as far as known
        self.ending: list[list[int]] = [[] for _ in range(problem.n_fetches)]  # values whose last use is this fetch
        self.gone = bytearray(n_values)  # no handle any more
        self.seen = [-1] * n_values  # the last miss that looked at this value
        self.ran = [-1] * len(problem.cost)  # the last miss that re-ran this op
        self.used_bytes = 0
        self.schedule = Schedule((), 0)
        self.levels = None if problem.rooms is None else _Levels(problem, problem.rooms)

    def run(self, wishes: Wishes) -> Schedule:
        problem, held, schedule = self.problem, self.held, self.schedule
        for value in problem.freed_in_forward:
            self.gone[value] = 1
        for value in self._sensible(wishes.get(FORWARD, ()), FORWARD):
            fits = problem.saved[value] and self.used_bytes + problem.nbytes[value] <= self.capacity
            if fits and self._has_room(value, FORWARD):
                self._begin(value, FORWARD, -1)
        schedule.keep = tuple(sorted(holding.value for holding in schedule.holdings))
        schedule.kept_bytes = self.used_bytes
        self._free(problem.early_frees)
        times = sorted(time for time in wishes if time != FORWARD)
        next_time, at_hand = 0, -1
        stale: list[int] = []  # values past their last use, still held unless freed
        for fetch, value in enumerate(problem.fetch_value):
            if self.ending[fetch]:
                stale += self.ending[fetch]
            holding = held[value]
            if holding is not None:
                if holding.first_use == holding.begin:
                    holding.first_use = fetch
                holding.last_use = fetch
            elif value != at_hand:
                pending: set[int] = set()
                while next_time < len(times) and times[next_time] <= fetch:
                    pending.update(wishes[times[next_time]])
                    next_time += 1
                self._rebuild(fetch, value, pending, stale)
                stale.clear()
                at_hand = value
            if self.levels is not None:
                self.levels.note(fetch, self._level(at_hand))
            if problem.frees[fetch]:
                self._free(problem.frees[fetch])
            if self.levels is not None:
                self.levels.note(fetch, self._level(at_hand), is_freed=True)
        last_place = len(schedule.misses) - 1
        for holding in held:
            if holding is not None:
                holding.last_place = last_place
        most = [schedule.kept_bytes, *[miss.held_bytes for miss in schedule.misses]]
        schedule.free = self.capacity - np.array(most, dtype=np.int64)
        if self.levels is not None:
            self.levels.settle(schedule)
        return schedule

    def _level(self, at_hand: int) -> int:
        """Bytes held, and at hand beside that."""
        is_beside = at_hand >= 0 and self.held[at_hand] is None and not self.gone[at_hand]
        return self.used_bytes + (self.problem.nbytes[at_hand] if is_beside else 0)

    def _end(self, value: int, time: int) -> int:
        return self.until.get((value, time), self.problem.death[value])

    def _has_room(self, value: int, time: int) -> bool:
        """Whether the ceiling leaves room; takes it if so."""
        return self.levels is None or self.levels.take(value, time, self._end(value, time))

    def _sensible(self, values: Iterable[int], time: int) -> list[int]:
        """Wishes that make sense now, latest op first (rule 4)."""
        problem, held, gone, until = self.problem, self.held, self.gone, self.until
        given, death, producer = problem.given, problem.death, problem.producer
        alive = [
            v
            for v in set(values)
            if held[v] is None and not gone[v] and not given[v] and until.get((v, time), death[v]) > time
        ]
        alive.sort(key=lambda v: (producer[v], v), reverse=True)
        return alive

    def _begin(self, value: int, time: int, place: int) -> None:
        holding = Holding(value, time, place, place, time, time)
        self.held[value] = holding
        self.schedule.holdings.append(holding)
        end = self._end(value, time)
        self.end_of[value] = end
        self.ending[end].append(value)
        self.used_bytes += self.problem.nbytes[value]

    def _leave(self, value: int, holding: Holding) -> None:
        holding.last_place = len(self.schedule.misses) - 1
        self.held[value] = None
        self.used_bytes -= self.problem.nbytes[value]

    def _free(self, values: Iterable[int]) -> None:
        for value in values:
            self.gone[value] = 1
            holding = self.held[value]
            if holding is not None:
                self._leave(value, holding)

    def _rebuild(self, fetch: int, value: int, pending: set[int], stale: list[int]) -> None:
        problem, held, schedule = self.problem, self.held, self.schedule
        nbytes, producer = problem.nbytes, problem.producer
        discard = [v for v in dict.fromkeys(stale) if held[v] is not None and self.end_of[v] <= fetch]  # rule 3
        room = self.capacity - self.used_bytes
        for v in discard:
            room += nbytes[v]
        if self.levels is not None:
            self.levels.give_back(discard, fetch)
        hold: list[int] = []
        lasts = problem.last_fetch[value] <= fetch + (0 if value in pending else 1)  # rule 2
        pending.discard(value)
        if not lasts and nbytes[value] <= room and self._has_room(value, fetch):
            hold.append(value)
            room -= nbytes[value]
        wanted = self._sensible(pending, fetch) if pending else []
        if not all(problem.saved[v] for v in wanted):
            path = self._path_to(value)
            wanted = [v for v in wanted if problem.saved[v] or v in path]
        for v in wanted:
            if nbytes[v] <= room and self._has_room(v, fetch):
                hold.append(v)
                room -= nbytes[v]
        made, ops, cost = self._rerun(fetch, value, hold)
        for v in discard:
            leaving = held[v]
            assert leaving is not None
            self._leave(v, leaving)
        hold.sort(key=lambda v: (producer[v], v))
        place = len(schedule.misses)
        for v in hold:
            self._begin(v, fetch, place)
        schedule.cost += cost
        schedule.misses.append(
            Miss(fetch, value, tuple(sorted(discard)), tuple(hold), made, ops, cost, self.used_bytes)
        )

    def _path_to(self, value: int) -> set[int]:
        """The values that rebuilding ``value`` alone makes: of unsaved values only these can be held (`plan.py`, rule 4)."""
        problem, held = self.problem, self.held
        path = {value}
        stack = [value]
        while stack:
            for u in problem.inputs[problem.producer[stack.pop()]]:
                if u not in path and held[u] is None:
                    path.add(u)
                    stack.append(u)
        return path

    def _rerun(self, fetch: int, value: int, hold: list[int]) -> tuple[list[int], list[int], float]:
        """What rebuilding the targets takes: the values made, the ops in tape order, and their cost."""
        problem, held, seen, ran = self.problem, self.held, self.seen, self.ran
        producer, inputs, costs = problem.producer, problem.inputs, problem.cost
        made: list[int] = []
        ops: list[int] = []
        stack = [value]
        seen[value] = fetch
        for v in hold:
            if seen[v] != fetch:
                seen[v] = fetch
                stack.append(v)
        while stack:
            v = stack.pop()
            holding = held[v]
            if holding is not None:
                if holding.first_use == holding.begin:
                    holding.first_use = fetch
                holding.last_use = fetch
                continue
            made.append(v)
            op = producer[v]
            if ran[op] != fetch:
                ran[op] = fetch
                ops.append(op)
                for u in inputs[op]:
                    if seen[u] != fetch:
                        seen[u] = fetch
                        stack.append(u)
        ops.sort()
        return made, ops, sum([costs[op] for op in ops])


class _Levels:
    """What holdings take of the rooms, slot by slot: as far as known ahead, and as it came."""

    def __init__(self, problem: Problem, rooms: Rooms) -> None:
        self.problem, self.rooms = problem, rooms
        self.left = rooms.room.copy()
        self.ends: dict[int, int] = {}  # of a holding that lasts: the slot at which its bytes are free again
        self.levels = np.zeros(len(rooms.room), dtype=np.int64)

    def take(self, value: int, time: int, end: int) -> bool:
        first, nbytes = self.rooms.first_fetch, self.problem.nbytes[value]
        begin = self.rooms.begin[value] if time == FORWARD else first + 2 * time
        freed = self.problem.freed_at.get(value)
        until = first + 2 * end + 2
        if freed is not None:
            until = min(until, first + 2 * freed + 1)
        left = self.left[begin:until]
        if len(left) and int(left.min()) < nbytes:
            return False
        left -= nbytes
        self.ends[value] = until
        return True

    def give_back(self, values: Iterable[int], fetch: int) -> None:
        """These are let go of at this fetch."""
        begin = self.rooms.first_fetch + 2 * fetch
        for v in values:
            self.left[begin : self.ends[v]] += self.problem.nbytes[v]

    def note(self, fetch: int, level: int, is_freed: bool = False) -> None:
        """What was held and at hand after a fetch, or after what it freed."""
        self.levels[self.rooms.first_fetch + 2 * fetch + is_freed] = level

    def settle(self, schedule: Schedule) -> None:
        """Say what is free at each place."""
        first = self.rooms.first_fetch
        for v in schedule.keep:
            self.levels[min(self.rooms.begin[v], first - 1) : first] += self.problem.nbytes[v]
        places = [0, *[first + 2 * miss.fetch for miss in schedule.misses]]
        schedule.levels = self.levels
        schedule.free = np.minimum(schedule.free, np.minimum.reduceat(self.rooms.room - self.levels, places))


def tighten(problem: Problem, wishes: Wishes, until: Until | None = None) -> Schedule:
    """`unroll`, then again with only the wishes that were used and each holding let go of after its last use."""
    first = unroll(problem, wishes, until)
    second = unroll(problem, first.wishes(), first.until())
    return second if second.cost <= first.cost else first


def to_plan(problem: Problem, schedule: Schedule, origin: str, bound_pct: float | None = None) -> Plan:
    """The schedule as plain data."""
    nth: dict[int, int] = {}
    steps: list[Step] = []
    for miss in schedule.misses:
        count = nth.get(miss.value, 0)
        nth[miss.value] = count + 1
        if miss.discard or miss.hold:
            steps.append(Step(miss.value, count, miss.discard, miss.hold))
    return Plan(
        signature=problem.record.signature,
        limit_bytes=problem.limit_bytes,
        origin=origin,
        keep=tuple(sorted((*schedule.keep, *problem.small))),
        steps=tuple(steps),
        overhead_pct=problem.record.overhead_pct(schedule.cost),
        bound_pct=bound_pct,
    )
