"""A tape record as a planning problem: flat lists, only what a decision can change.

Why not work on the record: a planner visits every op thousands of times; lists of integers are several times faster than
frozen dataclasses, and what is always there (sources, external and pinned values) can be left out once.

Words: a *fetch* is one backward event ("fetch", v) of a droppable value, numbered from 0 in backward order. Time in
backward is counted in fetches; time -1 is the forward pass. The *home* of a fetch is the op around which its handle was
saved: autograd runs nodes in reverse order of their creation, so the k-th last save of a value meets its k-th fetch.

A *lazy* value is one that is cheap to rebuild from values that matter more; `Problem.reduced` is the same step without
lazy values: each of their fetches asks for what they are rebuilt from instead. *Small change* is what is so small that it is
always held (statistics of normalisations, scalars): it leaves the problem, and its bytes the capacity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import copy

from ..record import SOURCE, TapeRecord
from .ceiling import Ceiling, Rooms
from .plan import PlanError

FORWARD = -1
"""The time of the forward pass, on the clock of fetches."""


_SMALL_SHARE = 1 / 2000  # of the limit: a value this small may be small change
_SMALL_TOTAL_SHARE = 1 / 100  # of the limit: all small change together


class Problem:
    """One record within one limit. Immutable by agreement; safe to share between planners."""

    def __init__(
        self,
        record: TapeRecord,
        limit_bytes: int,
        lazy: Mapping[int, tuple[int, ...]] | None = None,
        ceiling: Ceiling | None = None,
    ) -> None:
        """``lazy``: value -> the values it is rebuilt from at each fetch (see `reduced`)."""
        self.record, self.limit_bytes = record, limit_bytes
        values, ops = record.values, record.ops
        # Always there, whatever a plan says: never a decision.
        self.given = [v.producer == SOURCE or v.external or v.pinned for v in values]
        self.nbytes = [v.nbytes for v in values]
        self.producer = [v.producer for v in values]
        self.saved = [v.saved for v in values]  # these can be held in forward; others only once a miss rebuilds them
        self.small = self._small_change()
        for v in self.small:
            self.given[v] = True
        small_bytes = sum(self.nbytes[v] for v in self.small)
        pinned_bytes = self._pinned_peak()
        self.capacity = limit_bytes - pinned_bytes - small_bytes  # bytes that decisions may use
        if self.capacity < 0:
            raise PlanError(
                f"the limit of {limit_bytes} bytes is below the {pinned_bytes} bytes that cannot be rebuilt "
                f"and must be held; raise the limit to at least {pinned_bytes} bytes"
            )
        self.cost = [op.cost for op in ops]
        self.inputs = [tuple(u for u in op.inputs if not self.given[u]) for op in ops]
        self.outputs = [tuple(u for u in op.outputs if not self.given[u]) for op in ops]
        self._read_events(lazy or {})
        self._find_relevant()
        self._fuse()
        self.rooms = None if ceiling is None else Rooms.of(self, ceiling)  # None: the limit is all

    def with_rooms(self, rooms: Rooms) -> Problem:
        """The same problem with other rooms."""
        other = copy(self)
        other.rooms = rooms
        return other

    def _small_change(self) -> tuple[int, ...]:
        """Saved values that live through forward and are too small to decide about, smallest first."""
        freed = {index for kind, index in self.record.forward_events if kind == "free"}
        room = self.limit_bytes * _SMALL_TOTAL_SHARE
        found: list[int] = []
        for v in sorted(
            {i for kind, i in self.record.backward_events if kind == "fetch"}, key=lambda v: (self.nbytes[v], v)
        ):
            room -= self.nbytes[v]
            if self.nbytes[v] > self.limit_bytes * _SMALL_SHARE or room < 0:
                break
            if not self.given[v] and v not in freed:
                found.append(v)
        return tuple(sorted(found))

    def reduced(self, price: float) -> Problem:
        """The step without the values that cost at most ``price`` per byte to rebuild (all their fetches together).

        Found in tape order: a value is rebuilt from values that are not lazy themselves.
        """
        lazy: dict[int, tuple[int, ...]] = {}
        order = sorted(self.fetches_of, key=lambda v: (self.producer[v], v))
        for v in order:
            rebuilds = sum(1 for a, b in zip([-2, *self.fetches_of[v]], self.fetches_of[v], strict=False) if b > a + 1)
            most = price * self.nbytes[v] / rebuilds
            cost, seen, sources, stack = 0.0, {self.producer[v]}, set(), [self.producer[v]]
            while stack and cost <= most:
                op = stack.pop()
                cost += self.cost[op]
                for u in self.inputs[op]:
                    if u in self.fetches_of and u not in lazy:
                        sources.add(u)
                    elif self.producer[u] not in seen:
                        seen.add(self.producer[u])
                        stack.append(self.producer[u])
            if cost <= most:
                lazy[v] = tuple(sorted(sources))
        return Problem(self.record, self.limit_bytes, lazy)

    def _read_events(self, lazy: Mapping[int, tuple[int, ...]]) -> None:
        homes, dead = self._homes()
        self.fetch_value: list[int] = []
        self.fetch_home: list[int] = []
        self.fetch_time: list[int] = []  # the fetch's number in the whole problem, should this one be reduced
        self.frees: list[list[int]] = []  # [j]: values whose last handle dies between fetch j and fetch j + 1
        self.early_frees: list[int] = []  # ... before fetch 0
        self.fetches_of: dict[int, list[int]] = defaultdict(list)
        time = -1
        for kind, index in self.record.backward_events:
            if self.given[index]:
                continue
            if kind == "free":
                (self.frees[-1] if self.frees else self.early_frees).append(index)
                continue
            time += 1
            saves = homes.get(index) or [self.producer[index]]
            home = saves.pop() if len(saves) > 1 else saves[0]
            for value in lazy.get(index, (index,)):
                self.fetches_of[value].append(len(self.fetch_value))
                self.fetch_value.append(value)
                self.fetch_home.append(home)
                self.fetch_time.append(time)
                self.frees.append([])
        self.freed_in_forward = dead
        self.n_fetches = len(self.fetch_value)
        self.last_fetch = {value: at[-1] for value, at in self.fetches_of.items()}
        # A value's handles may outlive its last fetch; its bytes then count until here.
        self.freed_at: dict[int, int] = {}
        for j, freed in enumerate(self.frees):
            for value in freed:
                self.freed_at[value] = j

    def _homes(self) -> tuple[dict[int, list[int]], set[int]]:
        """For each value the homes of its saves, in order; and the values without a handle when forward ends.

        Autograd saves an op's inputs before it runs and its results after: a save between op p and op p + 1 belongs to p
        if it is the first of something p made, else to p + 1. A single save of what p made and p + 1 reads could be
        either; it is taken for an input.
        """
        ops = self.record.ops
        homes: dict[int, list[int]] = defaultdict(list)
        dead: set[int] = set()
        position = -1
        first: dict[int, int] = {}  # since the last op: value p made -> where in its homes the first save stands
        for kind, index in self.record.forward_events:
            if kind == "op":
                for value, at in first.items():
                    if value in ops[index].inputs:
                        homes[value][at] = index
                first.clear()
                position = index
            elif kind == "save":
                dead.discard(index)
                if self.producer[index] == position and index not in first:
                    first[index] = len(homes[index])
                    homes[index].append(position)
                else:
                    if index in first and first[index] == len(homes[index]) - 1:
                        first[index] = len(homes[index])  # two saves: the first is a result's, the second an input's
                    homes[index].append(min(position + 1, len(ops) - 1))
            else:
                dead.add(index)
        return homes, dead

    def _find_relevant(self) -> None:
        """Ops and values that some fetch may need, and the last fetch that may need each value."""
        self.death = [FORWARD] * len(self.nbytes)
        for value, last in self.last_fetch.items():
            self.death[value] = last
        relevant = [False] * len(self.cost)
        for op in range(len(self.cost) - 1, -1, -1):
            last = max((self.death[u] for u in self.outputs[op]), default=FORWARD)
            if last == FORWARD:
                continue
            relevant[op] = True
            for u in self.inputs[op]:
                if self.death[u] < last:
                    self.death[u] = last
        self.relevant_op = relevant
        self.relevant_ops = [op for op, yes in enumerate(relevant) if yes]

    def _fuse(self) -> None:
        """Give an op's cost and inputs to its only reader where backward never asks for what it makes.

        The two always re-run together, so nothing is lost but the choice to hold what lies between them; the problem
        shrinks by about half. The op stays in the lists, irrelevant.
        """
        readers: list[set[int]] = [set() for _ in self.cost]
        for op in self.relevant_ops:
            for u in self.inputs[op]:
                readers[self.producer[u]].add(op)
        for op in self.relevant_ops:
            if len(readers[op]) != 1 or any(v in self.fetches_of for v in self.outputs[op]):
                continue
            (reader,) = readers[op]
            between = set(self.outputs[op])
            merged = dict.fromkeys(u for u in self.inputs[reader] if u not in between)
            merged.update(dict.fromkeys(self.inputs[op]))
            self.inputs[reader] = tuple(merged)
            self.cost[reader] += self.cost[op]
            for u in self.inputs[op]:
                readers[self.producer[u]].discard(op)
                readers[self.producer[u]].add(reader)
            self.relevant_op[op] = False
        self.relevant_ops = [op for op in self.relevant_ops if self.relevant_op[op]]

    def _pinned_peak(self) -> int:
        live = peak = 0
        held: set[int] = set()
        pinned = [v.pinned and v.producer != SOURCE and not v.external for v in self.record.values]
        for kind, index in self.record.forward_events:
            entering = self.record.ops[index].outputs if kind == "op" else (index,) if kind == "save" else ()
            for value in entering:
                if pinned[value] and value not in held:
                    held.add(value)
                    live += self.nbytes[value]
            peak = max(peak, live)
            if kind == "free" and index in held:
                held.discard(index)
                live -= self.nbytes[index]
        return peak
