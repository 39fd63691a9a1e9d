"""A ceiling over the whole step: how many bytes decisions may use, moment by moment, so that the step's peak meets a target.

Why not one smaller limit: a limit holds the cache, not the step. Gradients grow while backward goes on, so the room under a
peak shrinks; a limit that fits the last moment starves all others, and one that fits the first is overrun at the last.

The axis has *slots*: one per forward event, then two per fetch: from the fetch to the next event, and from there to the next
fetch. At each slot

    step's bytes = level (what the plan holds or has at hand)  +  rest (everything else)

Rules
1. The rest with nothing dropped is measured (`Ceiling.totals` of no plan, less the level then). A rebuild needs more for a
   moment: what a schedule's own rebuilds add is looked up in its exact totals, and counts against the room from then on.
2. A value that the ops of forward still hand from one to the other is there anyway: it belongs to the level from the last op
   on that reads it.
3. Only exact totals say whether a plan keeps the target; rooms are for searching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .plan import Plan

if TYPE_CHECKING:
    from .problem import Problem
    from .unroll import Schedule


Totals: TypeAlias = Callable[[Plan | None], Sequence[int]]
"""Highest bytes of the whole step around each event of its record, forward then backward, under a plan; None: nothing dropped."""


@dataclass(frozen=True)
class Ceiling:
    """The most that a step may take, and what it takes under a plan."""

    target_bytes: int
    totals: Totals


@dataclass(frozen=True)
class Rooms:
    """Bytes that the level may take at each slot of one problem."""

    first_fetch: int  # the slot of fetch 0; fetch j has the slots first_fetch + 2 j and the next
    begin: tuple[int, ...]  # by value: the slot from which on it belongs to the level if forward keeps it (rule 2)
    slot_of_event: NDArray[np.int64]
    room: NDArray[np.int64]
    rest: NDArray[np.int64]  # with nothing dropped
    everything: NDArray[np.int64]  # the step's bytes with nothing dropped

    @classmethod
    def of(cls, problem: Problem, ceiling: Ceiling) -> Rooms:
        """With what the step has beside its cache, and no rebuilds."""
        record = problem.record
        first = len(record.forward_events)
        slots, fetch = [*range(first)], -1
        for kind, index in record.backward_events:
            is_fetch = kind == "fetch" and not problem.given[index]
            fetch += is_fetch
            slots.append(first - 1 if fetch < 0 else first + 2 * fetch + (not is_fetch))
        slot_of_event = np.array(slots, dtype=np.int64)
        begin = _begins(problem)
        n_slots = first + 2 * problem.n_fetches
        level = np.zeros(n_slots + 1, dtype=np.int64)
        there: dict[int, int] = {}
        for slot, (event, value) in enumerate(record.forward_events):
            if event == "save" and not problem.given[value]:
                there.setdefault(value, max(slot, begin[value]))
            elif event == "free" and value in there:
                _add(level, there.pop(value), slot, problem.nbytes[value])
        ends = {v: first + 2 * j + 1 for j, freed in enumerate(problem.frees) for v in freed}
        ends.update(dict.fromkeys(problem.early_frees, first))
        for value, slot in there.items():
            _add(level, slot, ends.get(value, n_slots), problem.nbytes[value])
        everything = _by_slot(ceiling.totals(None), slot_of_event, n_slots)
        rest = everything - np.cumsum(level[:-1])
        return cls(first, begin, slot_of_event, ceiling.target_bytes - rest, rest, everything)

    def under(self, target_bytes: int) -> Rooms:
        """For another target, and no rebuilds."""
        return replace(self, room=target_bytes - self.rest)

    def tightened(self, schedule: Schedule, totals: Sequence[int], target_bytes: int) -> Rooms:
        """With what the rebuilds of ``schedule`` need for themselves (rule 1)."""
        assert schedule.levels is not None
        own = _by_slot(totals, self.slot_of_event, len(self.room)) - schedule.levels
        return replace(self, room=np.minimum(self.room, target_bytes - np.maximum(own, self.rest)))

    def lowered(self, nbytes: int) -> Rooms:
        """Less by so much everywhere in backward."""
        room = self.room.copy()
        room[self.first_fetch :] -= nbytes
        return replace(self, room=room)

    def most_bytes(self) -> int:
        """The most that may be held at once when forward has ended."""
        return max(0, int(self.room[self.first_fetch - 1 :].max()))

    def share_bytes(self, share: float) -> int:
        """The step's peak if at every moment the level were ``share`` of what it is with nothing dropped."""
        return int((self.rest + share * (self.everything - self.rest)).max())

    def kept_bytes(self) -> int:
        """The most that may be held at the end of forward: whatever comes after, no plan keeps more."""
        return max(0, int(self.room[self.first_fetch - 1]))


def _add(level: NDArray[np.int64], first: int, end: int, nbytes: int) -> None:
    if first < end:
        level[first] += nbytes
        level[end] -= nbytes


def _by_slot(totals: Sequence[int], slot_of_event: NDArray[np.int64], n_slots: int) -> NDArray[np.int64]:
    highest = np.full(n_slots, -1, dtype=np.int64)
    np.maximum.at(highest, slot_of_event, np.asarray(totals, dtype=np.int64))
    last = np.maximum.accumulate(np.where(highest >= 0, np.arange(n_slots), 0))  # no event: as in the slot before
    return highest[last]


def _begins(problem: Problem) -> tuple[int, ...]:
    record = problem.record
    begin = [0] * len(record.values)
    for slot, (kind, index) in enumerate(record.forward_events):
        if kind == "op":
            for value in (*record.ops[index].outputs, *record.ops[index].inputs):
                begin[value] = slot
        elif kind == "save":
            begin[index] = max(begin[index], slot)
    return tuple(begin)
