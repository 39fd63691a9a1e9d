"""Schedules under a ceiling: brought below a target by their exact totals, and pressed as low as a price allows.

Rooms (`ceiling.py`) do not know what a rebuild needs for itself until there is a schedule; so a schedule is unrolled, its totals
are looked at, what it needs is taken off the rooms, and it is unrolled again, until it keeps the target or the tries are used up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .ceiling import Ceiling, Rooms, Totals
from .improve import Improver
from .problem import Problem
from .unroll import Schedule, to_plan, unroll

_TRIES = 8
_HALVINGS = 6
_VISITS_PER_EVENT = 4
_FOR_REBUILDING = 1.02


@dataclass(slots=True)
class Entry:
    """A candidate on its way to a plan."""

    origin: str
    problem: Problem
    schedule: Schedule
    first_cost: float  # as it came
    improved: bool = False
    excess_bytes: int = 0  # of the step's peak above the ceiling's target

    @property
    def rank(self) -> tuple[int, float, str]:
        """Lowest first: what keeps the ceiling, then what costs least."""
        return self.excess_bytes, self.schedule.cost, self.origin


class Work:
    """Work that is left, in ops and fetches visited, as in `improve.py`."""

    def __init__(self, left: float) -> None:
        self.left = left

    def spend(self, entry: Entry) -> None:
        """One look at an entry's totals, and one unrolling."""
        record = entry.problem.record
        events = len(record.forward_events) + len(record.backward_events)
        self.left -= _VISITS_PER_EVENT * (events + sum([len(miss.ops) for miss in entry.schedule.misses]))


def settle(entry: Entry, ceiling: Ceiling, work: int, dearest: float = math.inf, in_all: Work | None = None) -> Entry:
    """The entry under the ceiling, or as near as it came.

    Args:
        entry: a schedule, whose problem has rooms.
        ceiling: what to keep.
        work: of the local search, for each try.
        dearest: a schedule that costs more is given up.
        in_all: shared with other calls; the tries end with it.
    """
    best: Entry | None = None
    for number in range(_TRIES):
        if in_all is not None:
            in_all.spend(entry)
        totals = ceiling.totals(to_plan(entry.problem, entry.schedule, entry.origin))
        entry = replace(entry, excess_bytes=max(0, max(totals) - ceiling.target_bytes))
        if best is None or entry.rank < best.rank:
            best = entry
        if not entry.excess_bytes or entry.schedule.cost > dearest or (in_all is not None and in_all.left < 0):
            break
        assert entry.problem.rooms is not None
        rooms = entry.problem.rooms.tightened(entry.schedule, totals, ceiling.target_bytes)
        if number >= _TRIES // 2:  # wherever room is made, the next rebuild takes it
            rooms = rooms.lowered(entry.excess_bytes)
        entry = _moved(entry, rooms, work)
    assert best is not None
    return best


def shaken(entry: Entry, ceiling: Ceiling, work: int, settling: int, seed: int) -> Entry:
    """The better of the entry and what local search makes of it under the ceiling."""
    schedule = Improver(entry.problem, work).shake(entry.schedule, seed)
    return min(entry, settle(replace(entry, schedule=schedule), ceiling, settling), key=lambda e: e.rank)


def press(entry: Entry, others: Iterable[Entry], totals: Totals, dearest: float, work: int, in_all: Work) -> Entry:
    """The entry with the lowest peak found that costs at most ``dearest`` (see `settle`).

    The target is halved between a floor and the entry's peak. The floor grows with the limit, so that a larger limit does not
    end with the lower peak: what the step takes if it holds the limit's share of its cache at every moment, and a fiftieth
    more for rebuilding.
    """
    starts = [entry, *others]
    high = max(totals(to_plan(entry.problem, entry.schedule, entry.origin)))
    rooms = Rooms.of(entry.problem, Ceiling(high, totals))
    share = min(1.0, entry.problem.limit_bytes / max(entry.problem.record.cache_total_bytes, 1))
    low = round(_FOR_REBUILDING * rooms.share_bytes(share))
    for _ in range(_HALVINGS):
        if in_all.left < 0 or low >= high:
            break
        under = Ceiling((low + high) // 2, totals)
        within = rooms.under(under.target_bytes)
        trials = [settle(_moved(start, within, work), under, work, dearest, in_all) for start in starts]
        best = min(trials, key=lambda e: e.rank)
        if best.excess_bytes or best.schedule.cost > dearest:
            low = under.target_bytes
            continue
        starts[0] = entry = best
        high = under.target_bytes
    return entry


def _moved(entry: Entry, rooms: Rooms, work: int) -> Entry:
    """The same wishes within other rooms."""
    problem = entry.problem.with_rooms(rooms)
    schedule = unroll(problem, entry.schedule.wishes(), entry.schedule.until())
    return replace(entry, problem=problem, schedule=Improver(problem, work).polish(schedule))
