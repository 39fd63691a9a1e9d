"""The cache: which saved values hold their bytes, within the limit, and how a dropped one comes back.

Free of tensors on purpose: the engine runs it with an executor that re-runs ops, the simulator with one that only adds
up costs. The policy decides, the cache does and counts. Invariants:

- ``cached_bytes`` = sum of ``nbytes`` over ``held`` + pinned bytes <= ``limit_bytes``, at every moment, in forward and in
  backward. What a replay needs at once beyond that is the *working set*, counted apart (``working_bytes``).
- a value enters ``held`` at most once and leaves it when dropped, or when its last handle dies.
- nothing here keeps a value alive that has neither a handle nor a reason in the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import RecalsError
from .graph import Op, Value
from .policies.base import StepPolicy, WatchingPolicy

if TYPE_CHECKING:
    from .policies.base import Policy
    from .trace import Trace


class Executor(Protocol):
    """Re-runs ops. ``env`` maps every input value to its bytes."""

    flops: int  # of everything re-run

    def replaying(self) -> AbstractContextManager[None]:
        """Entered around the ops of one replay."""

    def run(self, op: Op, env: dict[Value, Any], wanted: list[Value], scratch: set[Value]) -> list[Any]:
        """Run ``op`` once and return the bytes of ``wanted``, in order.

        ``scratch`` are the inputs whose bytes nobody needs afterwards: an op may write them in place.
        """


@dataclass(frozen=True, slots=True)
class Stats:
    """What one ``Recals`` has done since the last ``reset_stats()``. Bytes are whole storages, each counted once."""

    cached_bytes: int  # held now (pinned ones included)
    peak_cached_bytes: int  # the most held at once; never above the limit
    pinned_bytes: int  # held now because they cannot be rebuilt
    peak_working_bytes: int  # the most a replay needed at once beyond the cache
    dropped_bytes: int
    dropped_values: int
    recomputed_bytes: int  # bytes of the saved values that were rebuilt
    recomputed_values: int
    recomputed_ops: int
    recomputed_flops: int  # matrix products, convolutions and attention, by torch's own formulas
    replays: int


class Cache:
    """Holds the bytes of saved values within ``limit_bytes`` (None: no limit)."""

    def __init__(self, limit_bytes: int | None, policy: Policy, executor: Executor) -> None:
        self.limit_bytes = limit_bytes
        self.policy = policy
        self.calls_running = 0
        self.discard_after_schedule: list[Value] = []  # what a plan lets go of in the replay that is about to run
        self._stepper = policy if isinstance(policy, StepPolicy) else None
        self._watcher = policy if isinstance(policy, WatchingPolicy) else None
        self.executor = executor
        self.lock = threading.RLock()
        self.live: dict[Value, None] = {}  # saved, with at least one handle; in order of saving
        self.held: dict[Value, None] = {}  # droppable values that hold their bytes; in order of entering
        self.cached_bytes = 0
        self.pinned_bytes = 0
        self.peak_pinned_bytes = 0  # since the current call began
        self.working_bytes = 0
        self.trace: Trace | None = None  # profiling: every event, its op or value, and the layer
        self.busy: dict[Value, Any] = {}  # bytes a running replay needs
        self._at_hand: Value | None = None  # rebuilt last and not held: it stays until the next miss
        self.reset_stats()

    # -- statistics ---------------------------------------------------------------------------------------------

    def reset_stats(self) -> None:
        self.peak_cached_bytes = self.cached_bytes
        self.peak_working_bytes = self.working_bytes
        self.dropped_bytes = self.dropped_values = 0
        self.recomputed_bytes = self.recomputed_values = self.recomputed_ops = self.replays = 0
        self.executor.flops = 0

    @property
    def recomputed_flops(self) -> int:
        return self.executor.flops

    def stats(self) -> Stats:
        with self.lock:
            return Stats(**{name: getattr(self, name) for name in Stats.__dataclass_fields__})

    # -- what autograd does -------------------------------------------------------------------------------------

    def save(self, value: Value, payload: Any) -> None:
        """Autograd saved ``value``, whose bytes are ``payload`` now (its first handle, or a further one)."""
        with self.lock:
            value.handles += 1
            if value.handles == 1:
                self.live[value] = None
                if value.payload is None and not value.pinned:
                    self._offer(value, payload)
            elif value.payload is None and not value.pinned:
                value.strip()  # dropped already; the new handle must not hold the bytes either
            if self.trace is not None:
                self.trace.append(("save", value, ""))

    def fetch(self, value: Value) -> Any:
        """The bytes of ``value``, for autograd; rebuilt if they were dropped."""
        with self.lock:
            if self.trace is not None:
                self.trace.append(("fetch", value, ""))
            # What cannot be rebuilt is read as it is now, like plain PyTorch reads it.
            payload = value.payload if value.pinned and value.payload is not None else value.bytes()
            if payload is None:
                return self._rebuild(value)
            if self._watcher is not None:
                self._watcher.used(self, value)
            return payload

    def release(self, value: Value) -> None:
        """One handle of ``value`` died."""
        with self.lock:
            value.handles -= 1
            if value.handles == 0:
                self.live.pop(value, None)
                if value in self.held:
                    self._let_go(value)
                elif value is self._at_hand:
                    self._put_down()
                if self._watcher is not None:
                    self._watcher.freed(self, value)
                if self.trace is not None:
                    self.trace.append(("free", value, ""))
                if not self.live:
                    self.maybe_ended()

    def maybe_ended(self) -> None:
        """Nothing is cached and no call is running: the step is over."""
        if self._stepper is not None and not self.live and not self.calls_running:
            for value in list(self.held):  # checkpoints of a plan
                self._let_go(value)
            self._stepper.ended(self)

    def replace(self, old: Value, new: Value, payload: Any) -> None:
        """An in-place op made version ``new`` of the storage of ``old``: handles ask for the new one from now on."""
        with self.lock:
            if old is self._at_hand:
                self._put_down()
            elif old.payload is not None and old.producer is not None:
                self._let_go(old)
            if old.handles:
                old.hand_over(new)
                if not old.handles:  # else they are dying in another thread
                    self.live.pop(old, None)
                    if self._watcher is not None:
                        self._watcher.freed(self, old)
                    if self.trace is not None:
                        self.trace.append(("free", old, ""))
            if new.handles:
                if self.trace is not None:
                    self.trace.append(("save", new, ""))
                self.live[new] = None
                if not new.pinned and new.payload is None:
                    self._offer(new, payload)

    # -- pinned bytes -------------------------------------------------------------------------------------------

    def pin(self, nbytes: int) -> None:
        """``nbytes`` that cannot be rebuilt are held from now on; droppable values make room for them."""
        with self.lock:
            self.pinned_bytes += nbytes
            if self.pinned_bytes > self.peak_pinned_bytes:
                self.peak_pinned_bytes = self.pinned_bytes
            self._make_room(nbytes)
            self._add(nbytes)

    def unpin(self, nbytes: int) -> None:
        with self.lock:
            self.pinned_bytes -= nbytes
            self.cached_bytes -= nbytes

    # -- holding and dropping -----------------------------------------------------------------------------------

    def room(self) -> float:
        """Bytes that fit without dropping anything."""
        return float("inf") if self.limit_bytes is None else self.limit_bytes - self.cached_bytes

    def drop(self, value: Value) -> None:
        """Drop the bytes of a held value."""
        self._let_go(value)
        value.strip()
        self._count_dropped(value)
        if self._watcher is not None:
            self._watcher.dropped(self, value)
        if value in self.busy:
            self._work(value.nbytes)

    def discard(self, value: Value) -> None:
        """Stop holding a value that nobody needs any more (a plan's checkpoint): not a drop."""
        self._let_go(value)

    def hold(self, value: Value, payload: Any) -> bool:
        """Hold ``value`` if room can be made for it; the policy names what to drop."""
        if value in self.held:
            return True
        if value is self._at_hand:
            self._put_down()
        limit = self.limit_bytes
        while limit is not None and self.cached_bytes + value.nbytes > limit:
            victim = self.policy.victim(self, value)
            if victim is None:
                return False
            self.drop(victim)
        value.payload = payload
        self.held[value] = None
        self._add(value.nbytes)
        return True

    def _offer(self, value: Value, payload: Any) -> None:
        if self.policy.keeps(self, value):
            cached = self.cached_bytes + value.nbytes
            if self.limit_bytes is None or cached <= self.limit_bytes:  # ``hold`` in line, for the commonest case
                value.payload = payload
                self.held[value] = None
                self.cached_bytes = cached
                if cached > self.peak_cached_bytes:
                    self.peak_cached_bytes = cached
                return
            if self.hold(value, payload):
                return
        value.strip()
        self._count_dropped(value)
        if self._watcher is not None:
            self._watcher.dropped(self, value)

    def _make_room(self, nbytes: int) -> None:
        while self.room() < nbytes and self.held:
            self.drop(next(iter(self.held)))

    def _let_go(self, value: Value) -> None:
        if value in self.held:
            del self.held[value]
            value.payload = None
            self.cached_bytes -= value.nbytes

    def _count_dropped(self, value: Value) -> None:
        self.dropped_bytes += value.nbytes
        self.dropped_values += 1

    def _add(self, nbytes: int) -> None:
        self.cached_bytes += nbytes
        if self.cached_bytes > self.peak_cached_bytes:
            self.peak_cached_bytes = self.cached_bytes

    def _work(self, nbytes: int) -> None:
        self.working_bytes += nbytes
        if self.working_bytes > self.peak_working_bytes:
            self.peak_working_bytes = self.working_bytes

    # -- replay -------------------------------------------------------------------------------------------------

    def _rebuild(self, missed: Value) -> Any:
        """Re-run what ``missed`` needs, and what the policy wants rebuilt along with it."""
        self._put_down()
        made: set[Value] = set()
        targets = dict.fromkeys(self.policy.targets(self, missed))
        targets[missed] = None
        try:
            env, tape = self.schedule(targets)
        except RecalsError:
            # Something to rebuild along with it lost its sources (the graph of an earlier step, say): nobody has asked yet.
            targets = dict.fromkeys(self._possible(targets))
            targets[missed] = None
            env, tape = self.schedule(targets)
        working_before = self.working_bytes
        outer, self.busy = self.busy, env
        discards, self.discard_after_schedule = self.discard_after_schedule, []
        for value in discards:  # their bytes may still feed this replay
            if value in self.held:
                self.drop(value)
                made.add(value)
        last_use: dict[Value, int] = {}
        for i, (op, _) in enumerate(tape):
            for value in op.inputs:
                last_use[value] = i
        self.replays += 1
        try:
            with self.executor.replaying():
                for i, (op, wanted) in enumerate(tape):
                    scratch = {u for u in op.inputs if u in made and last_use[u] == i and u not in self.held}
                    payloads = self.executor.run(op, env, wanted, scratch)
                    self.recomputed_ops += 1
                    for value, payload in zip(wanted, payloads, strict=True):
                        env[value] = payload
                        made.add(value)
                        self._made(value, payload, value in targets)
                    for value in (*op.inputs, *wanted):
                        if value is missed or last_use.get(value, -1) > i or env.pop(value, None) is None:
                            continue
                        if value in made and value not in self.held:
                            self._work(-value.nbytes)
            payload = env[missed]
        finally:
            self.busy = outer
            self.working_bytes = working_before
        if missed not in self.held:  # its other readers follow as a rule: keep it in reach for them
            missed.payload = payload
            self._at_hand = missed
            self._work(missed.nbytes)
        return payload

    def _put_down(self) -> None:
        value, self._at_hand = self._at_hand, None
        if value is not None:
            value.payload = None
            self._work(-value.nbytes)

    def _made(self, value: Value, payload: Any, is_target: bool) -> None:
        value.rebuilt(payload)
        if value.handles:
            self.recomputed_bytes += value.nbytes
            self.recomputed_values += 1
        if not (self.policy.keeps_rebuilt(self, value, is_target) and self.hold(value, payload)):
            self._work(value.nbytes)

    def _possible(self, targets: Iterable[Value]) -> Iterator[Value]:
        for value in targets:
            with suppress(RecalsError):
                self.schedule((value,))
                yield value

    def schedule(self, targets: Iterable[Value]) -> tuple[dict[Value, Any], list[tuple[Op, list[Value]]]]:
        """What rebuilding ``targets`` takes.

        Returns:
            the bytes to start from, and the ops to run in tape order, each with the values wanted from it. Found
            iteratively: chains may be deeper than Python's stack.
        """
        env: dict[Value, Any] = {}
        wanted: dict[Op, list[Value]] = {}
        seen: set[Value] = set()
        stack = list(targets)
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            payload = value.bytes()
            if payload is not None:
                env[value] = payload
                continue
            op = value.producer
            if op is None:
                raise RecalsError(f"a source of {value.nbytes} bytes is gone; this is a fault of the engine")
            values = wanted.get(op)
            if values is None:
                wanted[op] = [value]
                stack.extend(op.inputs)
            else:
                values.append(value)
        return env, sorted(wanted.items(), key=lambda item: item[0].seq)
