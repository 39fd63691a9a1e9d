"""Dynamic tensor rematerialisation: drop what is cheap to make, large, and not needed for long. Needs no plan.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021. The value dropped is the one with the smallest
``cost / (bytes * staleness)``, where cost counts the dropped neighbours that would have to be rebuilt with it (kept as sums
over equivalence classes, the paper's ``h_DTR^eq``), and staleness is the work done since the value was last used.

Departures: work is counted in modelled op costs, not read from a clock, so that runs repeat exactly; and costs are only
looked up once something has to be dropped, so that a step that fits pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, final

from ..graph import Op, Value
from .base import WatchingPolicy

if TYPE_CHECKING:
    from ..cache import Cache


class _Class:
    """Union-find set of neighbouring dropped values with the sum of their costs."""

    __slots__ = ("cost", "parent")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.parent: _Class | None = None

    def root(self) -> _Class:
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent  # path halving
            node = node.parent
        return node


class _Note:
    """What the policy remembers of one saved value."""

    __slots__ = ("children", "cost", "dropped_in", "last_use", "parents")

    def __init__(self, last_use: float) -> None:
        self.cost = -1.0  # of the ops between the saved values it is made from and itself; -1: not looked up yet
        self.parents: tuple[_Note, ...] = ()  # of those saved values
        self.children: list[_Note] = []  # of the saved values made from this one
        self.last_use = last_use
        self.dropped_in: _Class | None = None  # set while dropped


@final
class Dtr(WatchingPolicy):
    name: ClassVar[str] = "dtr"

    def __init__(self) -> None:
        self._clock = 0.0  # tape positions run so far, re-runs included

    def anew(self) -> Dtr:
        return Dtr()

    def keeps(self, cache: Cache, value: Value) -> bool:
        if cache.limit_bytes is None:
            return True
        if len(cache.live) <= 1:
            self._clock = 0.0  # a new step: what earlier ones re-ran is forgotten, so that equal steps run equally
        self._clock = max(self._clock, float(value.position))
        value.note = _Note(self._clock)
        return value.nbytes <= cache.limit_bytes - cache.pinned_bytes

    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        best, best_score = None, float("inf")
        busy = cache.busy
        now = self._clock + 1.0
        for value in cache.held:
            if value in busy:
                continue
            note = self._looked_up(value)
            score = self._lost(note) / (value.nbytes * (now - note.last_use))
            if score < best_score:
                best, best_score = value, score
        return best

    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        return (missed,)

    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        self._clock += 1.0
        if not value.handles:
            return False
        note = self._looked_up(value)
        note.last_use = self._clock
        self._back(note)
        return cache.limit_bytes is None or value.nbytes <= cache.limit_bytes - cache.pinned_bytes

    def used(self, cache: Cache, value: Value) -> None:
        if value.note is not None:
            value.note.last_use = self._clock

    def dropped(self, cache: Cache, value: Value) -> None:
        note = self._looked_up(value)
        if note.dropped_in is not None:
            return
        own = note.dropped_in = _Class(note.cost)
        for other in (*note.parents, *note.children):
            if other.dropped_in is not None:
                self._join(own, other.dropped_in)

    def freed(self, cache: Cache, value: Value) -> None:
        note, value.note = value.note, None
        if note is not None:
            self._back(note)
            for parent in note.parents:
                parent.children.remove(note)
            for child in note.children:
                child.parents = tuple(p for p in child.parents if p is not note)
            note.children.clear()  # notes refer to each other both ways: nothing may be left for the cycle collector
            note.parents = ()

    # -- scores -------------------------------------------------------------------------------------------------

    @staticmethod
    def _back(note: _Note) -> None:
        """The value is no longer missing: its class has that much less to rebuild."""
        if note.dropped_in is not None:
            note.dropped_in.root().cost -= note.cost
            note.dropped_in = None

    def _looked_up(self, value: Value) -> _Note:
        """The note of a value, with cost and parents: found by walking back to the nearest saved values."""
        note = value.note
        if note is None:
            note = value.note = _Note(self._clock)
        if note.cost >= 0.0:
            return note
        cost = 0.0
        parents: dict[_Note, None] = {}
        seen: set[Op] = set()
        stack = [value.producer]
        while stack:
            op = stack.pop()
            if op is None or op in seen:
                continue
            seen.add(op)
            cost += op.cost()
            for source in op.inputs:
                if source.note is not None:
                    parents[source.note] = None
                elif source.producer is not None:
                    stack.append(source.producer)
        note.cost, note.parents = cost, tuple(parents)
        for parent in parents:
            parent.children.append(note)
        return note

    @staticmethod
    def _lost(note: _Note) -> float:
        """What it costs to have the value back if it were dropped now: its own cost and its dropped neighbours' classes."""
        cost = note.cost
        roots: dict[_Class, None] = {}
        for parent in (*note.parents, *note.children):
            if parent.dropped_in is not None:
                roots[parent.dropped_in.root()] = None
        for root in roots:
            cost += root.cost
        return cost

    @staticmethod
    def _join(a: _Class, b: _Class) -> None:
        a, b = a.root(), b.root()
        if a is not b:
            a.cost += b.cost
            b.parent = a
