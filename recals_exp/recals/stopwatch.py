"""Timing the ops of replays, in replays like those of a real limit.

Why by parts: what an op takes where it follows others of its kind is less than what it takes where backward has just worked on other
memory. The replays of a plan are short, so the timed ones are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, final

from .graph import Op, Value
from .policies import Policy

if TYPE_CHECKING:
    from .cache import Cache
    from .replay import Replayer

PART = 4
"""Saved values in a part; of each part one is kept."""


class Stopwatch:
    """An executor that times every op which another one runs."""

    def __init__(self, replayer: Replayer, now_s: Callable[[], float]) -> None:
        self.replayer = replayer
        self.now_s = now_s
        self.names: dict[int, str] = {}  # by number of the op
        self._runs: dict[int, list[float]] = {}
        self._last_s = 0.0

    @property
    def flops(self) -> int:
        return self.replayer.flops

    @flops.setter
    def flops(self, flops: int) -> None:
        self.replayer.flops = flops

    def replaying(self) -> AbstractContextManager[None]:
        return self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._last_s = self.now_s()
        with self.replayer.replaying():
            yield

    def run(self, op: Op, env: dict[Value, Any], wanted: list[Value], scratch: set[Value]) -> list[Any]:
        found = self.replayer.run(op, env, wanted, scratch)
        now = self.now_s()  # from op to op: what the cache does in between is part of a re-run
        self.names[op.seq] = op.name()
        self._runs.setdefault(op.seq, []).append(now - self._last_s)
        self._last_s = now
        return found

    @property
    def total_s(self) -> float:
        """Seconds of all runs."""
        return sum(sum(runs) for runs in self._runs.values())

    def seconds_per_run(self) -> dict[int, float]:
        """By number of the op, which may have run for several parts."""
        return {seq: sum(runs) / len(runs) for seq, runs in self._runs.items()}


@final
class RebuildParts(Policy):
    """Of every `PART` saved values one is held; a miss rebuilds the others of its part. ``shift`` chooses which one.

    For `plan_of`: the engine then follows what this does on a record.
    """

    name: ClassVar[str] = "rebuild-parts"

    def __init__(self, shift: int) -> None:
        self._shift = shift
        self._saved = shift

    def anew(self) -> RebuildParts:
        return RebuildParts(self._shift)

    def keeps(self, cache: Cache, value: Value) -> bool:
        self._saved += 1
        value.note = self._saved // PART
        return self._saved % PART == 0

    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        return None

    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        return [value for value in cache.live if value.note == missed.note and value.bytes() is None]

    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        return is_target
