"""The tape as a graph of ops and values: the part that needs no tensor.

The engine and the simulator run the *same* cache and policies over this graph; only what a value's bytes are, and what
running an op means, differs (``tape.py`` for tensors, ``simulate.py`` for records). That is what makes a simulated run
exact.

Words: a *value* is one version of one storage. An *op* made it from other values. A value without a producer is a
*source*: a leaf (parameter, buffer, input, constant; never counted) or an opaque value (cannot be rebuilt; always held
and counted). Ownership runs one way, handle -> value -> op -> input values, so that a piece of tape nobody can ask for
any more disappears by reference counting alone (rule 10 of docs/engine.md).
"""

from __future__ import annotations

from typing import Any


class Op:
    """One recorded op. ``seq`` orders the tape; ``inputs`` are the values it reads, each once."""

    __slots__ = ("inputs", "seq")

    def __init__(self, seq: int, inputs: tuple[Value, ...]) -> None:
        self.seq = seq
        self.inputs = inputs

    def cost(self) -> float:
        """Seconds (or model units) of one run; policies compare costs only with each other."""
        raise NotImplementedError

    def name(self) -> str:
        raise NotImplementedError


class Value:
    """One version of one storage.

    Attributes:
        producer: the op that made it; None for a source.
        index: which result of the producer it is (>= 0: output tensor; < 0: written argument ``-index - 1``).
        nbytes: bytes of the whole storage (rule 1).
        payload: what holds the bytes while the cache (or, for a source, the tape) keeps them; None when dropped.
        handles: live autograd handles that may still ask for it.
        pinned: must not be dropped: it cannot be rebuilt.
        note: scratch space of the policy in force.
    """

    __slots__ = ("__weakref__", "handles", "index", "nbytes", "note", "payload", "pinned", "producer")

    def __init__(self, producer: Op | None, index: int, nbytes: int) -> None:
        self.producer = producer
        self.index = index
        self.nbytes = nbytes
        self.payload: Any = None
        self.handles = 0
        self.pinned = False
        self.note: Any = None

    def bytes(self) -> Any:
        """What holds the bytes if they can be read now, else None."""
        return self.payload

    def strip(self) -> None:
        """The bytes are not held any more: whatever the handles keep of them must go."""

    def hand_over(self, new: Value) -> None:
        """A write made ``new`` of the storage: its handles ask for that from now on."""
        new.handles, self.handles = self.handles, 0

    def rebuilt(self, payload: Any) -> None:
        """A replay made the bytes again; they may live on outside the cache."""

    @property
    def position(self) -> int:
        """Place on the tape: the producer's, or -1 for a source."""
        return -1 if self.producer is None else self.producer.seq
