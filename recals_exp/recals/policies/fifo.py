"""First in, first out: the documented policy, and the documented cost.

When the limit is reached the oldest value is dropped. When backward misses one, forward is re-run from the start up to
that value, caching on the way. On layers of equal cost with backward = 2 x forward this re-runs (1/b - 1)/2 forwards
for a budget fraction b: +16.7 % of a step at 50 %, +50 % at 25 %, +116.7 % at 12.5 %.

"From the start up to the missed value, caching on the way" would cache and drop again all but the last values that fit.
Only those are rebuilt here, with what they need: the same result, without work whose result is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, final

from ..graph import Value
from .base import Policy

if TYPE_CHECKING:
    from ..cache import Cache


@final
class Fifo(Policy):
    name: ClassVar[str] = "fifo"

    def anew(self) -> Fifo:
        return Fifo()

    def keeps(self, cache: Cache, value: Value) -> bool:
        return cache.limit_bytes is None or value.nbytes <= cache.limit_bytes - cache.pinned_bytes

    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        return next(iter(cache.held), None)

    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        room = cache.room() - missed.nbytes
        targets = [missed]
        for value in reversed(cache.live):
            if room <= 0:
                break
            if value.position > missed.position or value is missed or value.bytes() is not None:
                continue
            room -= value.nbytes
            if room >= 0:
                targets.append(value)
        return targets

    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        return is_target and self.keeps(cache, value)
