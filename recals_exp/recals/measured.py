"""Measured costs: what re-running each op of a recorded step takes on this machine, as the engine re-runs it.

Why not the cost model (``costs.py``): it knows the ratio of a matrix product to an elementwise op on a nominal machine. What a
limit will cost *here*, in percent of a step, hangs on this machine's kernels, caches and allocator. Why not a profiler's times of
forward: a replay pays for its own bookkeeping, and its memory is as cold as it will be.

How: steps in which everything that autograd saves is dropped and, at the first miss, all of it is rebuilt in one replay, whose
ops are timed one by one. Each such step stands between two plain ones, whose times are the measure, and so does a step in which
nothing is dropped, which tells what recording costs.

Rules
1. Times are taken as shares of the plain steps on either side, so that a machine whose speed drifts gives the same costs. Where those
   two differ, the speed changed in between: of the steps the steadier half counts, and of their shares the median.
   Recording is the small difference of two large times, so it is looked at twice as often. (The least of each scatters less, but
   is not what a step takes: where memory lies is part of what recording costs.)
2. What a timed step re-ran must be the recorded step, op by op; else it is refused.
3. An op that never had to be re-run gets its modelled cost, in proportion to the others.
4. Online policies go on deciding by the model, in the engine and in the simulator: `OpRecord.model_cost`.
5. Measuring takes the memory of a plain step: nothing stays dropped.
6. On the CPU with one thread, the time that counts is the thread's own: what other programs take of a busy machine is no cost of
   an op. With more threads, and on accelerators, it is the clock's.
7. Python's garbage is collected between steps, never within one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final

import torch

from .bare_step import RunStep
from .graph import Op, Value
from .policies import Fifo, Policy
from .record import RecordError, TapeRecord
from .replay import Replayer

if TYPE_CHECKING:
    from .cache import Cache
    from .recals import Recals

T = TypeVar("T")

COSTS = ("model", "measured")
LEAST_ROUNDS, MOST_ROUNDS = 5, 25
ENOUGH_S = 60.0
"""A round is six steps: two recorded ones, one whose ops are timed, and a plain one after each."""


@final
class RebuildAll(Policy):
    """Holds nothing in forward; the first miss rebuilds everything."""

    name: ClassVar[str] = "rebuild-all"
    watches: ClassVar[bool] = False

    def anew(self) -> RebuildAll:
        return RebuildAll()

    def keeps(self, cache: Cache, value: Value) -> bool:
        return False

    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        return None

    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        return [value for value in cache.live if value.bytes() is None]

    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        return is_target

    def used(self, cache: Cache, value: Value) -> None:
        pass

    def dropped(self, cache: Cache, value: Value) -> None:
        pass

    def freed(self, cache: Cache, value: Value) -> None:
        pass


class Stopwatch:
    """An executor that times every op which another one runs."""

    def __init__(self, replayer: Replayer, device: torch.device) -> None:
        self._replayer = replayer
        self._device = device
        self._last_s = 0.0
        self.times: dict[int, tuple[str, float]] = {}  # position on the tape -> name, seconds

    @property
    def flops(self) -> int:
        return self._replayer.flops

    @flops.setter
    def flops(self, flops: int) -> None:
        self._replayer.flops = flops

    def replaying(self) -> AbstractContextManager[None]:
        return self._timed_from_here()

    @contextmanager
    def _timed_from_here(self) -> Iterator[None]:
        with self._replayer.replaying():
            self._last_s = self._now()
            yield

    def run(self, op: Op, env: dict[Value, Any], wanted: list[Value], scratch: set[Value]) -> list[Any]:
        found = self._replayer.run(op, env, wanted, scratch)
        now = self._now()  # from op to op: what the cache does in between is part of a re-run
        self.times[op.seq] = (op.name(), self.times.get(op.seq, ("", 0.0))[1] + now - self._last_s)
        self._last_s = now
        return found

    def _now(self) -> float:
        return now_s(self._device)


def with_measured_costs(
    recals: Recals,
    record: TapeRecord,
    run: RunStep,
    device: torch.device,
    reset: Callable[[], None] = lambda: None,
    enough_s: float = ENOUGH_S,
) -> TapeRecord:
    """The record with costs in seconds on this machine.

    Args:
        recals: whose knowledge of ops is used.
        record: of the step that ``run`` does.
        run: one whole step; it calls ``wrap(model)`` where it would call the model, once.
        device: where the step runs.
        reset: puts the state back that ``run`` starts from; called before each step.
        enough_s: after so many seconds of the clock no further round begins, unless too few were taken.

    Raises:
        RecordError: a timed step ran other ops than the recorded one (rule 2).
    """
    # One for all rounds: what it learns of ops in its first step is no cost of the others.
    recorder = recals.unlimited(Fifo())
    plain: list[tuple[float, float]] = []  # seconds of a step, and of forward in it
    recorded: list[Beside[float]] = []
    timed: list[Beside[dict[int, float]]] = []

    def plain_step() -> float:
        plain.append(_between_collections(lambda: _step(run, None, device), reset))
        return plain[-1][0]

    def take(step: Callable[[], T], steps: list[Beside[T]]) -> None:
        before_s = plain[-1][0]
        taken = _between_collections(step, reset)
        steps.append(Beside(taken, before_s, plain_step()))

    def one_round() -> None:
        take(lambda: _step(run, recorder, device)[0], recorded)
        take(lambda: _timed_step(recals, record, run, device), timed)
        take(lambda: _step(run, recorder, device)[0], recorded)

    gc.collect()
    plain_step()
    one_round()  # warms up
    del plain[:-1], recorded[:], timed[:]
    begin = time.perf_counter()
    while len(timed) < LEAST_ROUNDS or (len(timed) < MOST_ROUNDS and time.perf_counter() - begin < enough_s):
        one_round()
    step_s = statistics.median(step_s for step_s, _ in plain)
    steady = steadier_half(timed)
    seconds = {
        op: step_s * statistics.median(each.taken[op] / each.plain_s for each in steady) for op in steady[0].taken
    }
    modelled = sum(record.ops[op].cost for op in seconds)
    scale = sum(seconds.values()) / modelled if modelled else 0.0
    forward_s = step_s * statistics.median(forward_s / step_s for step_s, forward_s in plain)
    recording_share = statistics.median(each.taken / each.plain_s for each in steadier_half(recorded)) - 1
    return replace(
        record,
        cost_unit="s",
        device=str(device),
        ops=tuple(
            replace(op, cost=seconds.get(i, scale * op.cost), model_cost=op.decision_cost)
            for i, op in enumerate(record.ops)
        ),
        forward_cost=forward_s,
        backward_cost=step_s - forward_s,
        recording_cost=max(0.0, step_s * recording_share),
    )


@dataclass(frozen=True, slots=True)
class Beside(Generic[T]):
    """What a step took, and the seconds of the plain steps before and after it."""

    taken: T
    before_s: float
    after_s: float

    @property
    def plain_s(self) -> float:
        return (self.before_s + self.after_s) / 2

    @property
    def unsteadiness(self) -> float:
        """How far the machine's speed changed meanwhile."""
        return abs(self.after_s - self.before_s) / self.plain_s


def steadier_half(steps: Sequence[Beside[T]]) -> list[Beside[T]]:
    """Those in whose course the machine's speed changed least (rule 1), at least one."""
    ordered = sorted(range(len(steps)), key=lambda i: steps[i].unsteadiness)
    return [steps[i] for i in sorted(ordered[: (len(steps) + 1) // 2])]


def _between_collections(step: Callable[[], T], reset: Callable[[], None]) -> T:
    """``step`` from the starting state, with the collector off (rule 7)."""
    reset()
    gc.collect(0)  # all that was made since the last one
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return step()
    finally:
        if was_enabled:
            gc.enable()


def _step(run: RunStep, recals: Recals | None, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and of the model's call in it. None: a plain step."""
    forward_s = 0.0

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal forward_s
            begin = now_s(device)
            out = fn(*args, **kwargs) if recals is None else recals(fn, *args, **kwargs)
            forward_s += now_s(device) - begin
            return out

        return call

    begin = now_s(device)
    run(wrap)
    return now_s(device) - begin, forward_s


def _timed_step(recals: Recals, record: TapeRecord, run: RunStep, device: torch.device) -> dict[int, float]:
    """Seconds of each op that was re-run, by its place in the record."""
    timed = recals.unlimited(RebuildAll())
    watch = Stopwatch(timed.replayer, device)
    timed.cache.executor = watch

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: timed(fn, *args, **kwargs)

    run(wrap)
    for place, (name, _) in watch.times.items():
        known = record.ops[place].name if place < len(record.ops) else "nothing"
        if name != known:
            raise RecordError(
                f"op {place} of the step was {known} when it was recorded and {name} when it was timed: the step does not repeat "
                "itself, so its costs cannot be measured; use costs='model'"
            )
    return {place: seconds for place, (_, seconds) in watch.times.items()}


def now_s(device: torch.device) -> float:
    """Seconds, with nothing under way on ``device`` (rule 6)."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
