"""A step written down while it runs: the events of its cache and its ops, as numbers.

Why not references to ops and values: they would keep the whole tape alive, and with it bytes that the step lets go of.

A value is named by the place of its op and which result it is; a value that no op made, by a number of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .graph import Op, Value
from .ops import TensorOp

Key: TypeAlias = tuple[int, int]
"""(the op's number on the tape, which of its results), or (SOURCE_KEY, a number)."""

SOURCE_KEY = -1

Event: TypeAlias = tuple[str, Any, str]
"""("op", the op, its layer) | ("save" | "fetch" | "free", the value, "")."""


@dataclass(frozen=True, slots=True)
class OpNote:
    """One op."""

    name: str
    layer: str
    cost: float  # modelled
    flops: int
    inputs: tuple[Key, ...]


class Trace:
    """The notes of one step. The cache and the recorder append to it."""

    def __init__(self, mark: Callable[[], None] | None = None) -> None:
        """``mark`` is called after every event."""
        self._mark = mark
        self.ops: dict[int, OpNote] = {}  # by the number on the tape
        self.events: list[tuple[str, Any]] = []  # ("op", number) or (kind, key)
        self.nbytes: dict[Key, int] = {}
        self.saved: set[Key] = set()
        self.pinned: set[Key] = set()  # cannot be rebuilt
        self.outside: set[Key] = set()  # the caller holds them until backward
        self._sources: weakref.WeakKeyDictionary[Value, Key] = weakref.WeakKeyDictionary()
        self._n_sources = 0

    def append(self, event: Event) -> None:
        kind, item, layer = event
        if kind == "op":
            self._op(item, layer)
        else:
            key = self.key(item)
            self.nbytes[key] = item.nbytes
            if kind == "save":
                self.saved.add(key)
            if item.pinned:
                self.pinned.add(key)
            self.events.append((kind, key))
        if self._mark is not None:
            self._mark()

    def __iadd__(self, events: Iterable[Event]) -> Trace:
        for event in events:
            self.append(event)
        return self

    def __len__(self) -> int:
        return len(self.events)

    def returned(self, values: Iterable[Value]) -> None:
        """A call has returned; ``values`` belong to its outputs, which the caller holds."""
        self.outside.update(self.key(value) for value in values)

    def key(self, value: Value) -> Key:
        if value.producer is not None:
            return value.producer.seq, value.index
        key = self._sources.get(value)
        if key is None:
            key = self._sources[value] = (SOURCE_KEY, self._n_sources)
            self._n_sources += 1
        return key

    def _op(self, op: Op, layer: str) -> None:
        inputs = []
        for value in op.inputs:
            key = self.key(value)
            self.nbytes[key] = value.nbytes
            inputs.append(key)
        flops = op.full_cost().flops if isinstance(op, TensorOp) else 0
        self.ops[op.seq] = OpNote(op.name(), layer, op.cost(), flops, tuple(inputs))
        self.events.append(("op", op.seq))
