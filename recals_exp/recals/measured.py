"""Measured costs: what re-running each op of a recorded step takes on this machine, as the engine re-runs it.

Why not the cost model (``costs.py``): it knows the ratio of a matrix product to an elementwise op on a nominal machine. What a
limit will cost *here*, in percent of a step, hangs on this machine's kernels, caches and allocator. Why not a profiler's times of
forward: a replay pays for its own bookkeeping, and its memory is as cold as it will be.

How: the engine follows a plan, as it will, in which autograd's values are dropped, all but a few, and rebuilt by parts, whose ops are
timed one by one (``stopwatch.py``). Each such step stands between two plain ones, whose times are the measure, and so does a step in
which nothing is dropped, which tells what recording costs.

Rules
1. Times are taken as shares of the plain steps on either side, so that a machine whose speed drifts gives the same costs. Where those
   two differ, the speed changed in between: of the steps the steadier half counts, and of their shares the median.
   Recording is the small difference of two large times: it is looked at twice as often, and forward apart from the rest, as most of it
   is in forward, where times scatter less. (The least of each scatters less, too, but is not what a step takes: where memory
   lies is part of what recording costs.)
2. What a timed step re-ran must be the recorded step, op by op; else it is refused.
3. An op that never had to be re-run gets its modelled cost, in proportion to the others. What a timed step takes beside the ops
   it re-runs and more than a recorded one is the price of dropping values, in equal parts.
4. Online policies go on deciding by the model, in the engine and in the simulator: `OpRecord.model_cost`.
5. Measuring takes the memory of a plain step: nothing stays dropped.
6. On the CPU with one thread, the time that counts is the thread's own: what other programs take of a busy machine is no cost of
   an op. With more threads, and on accelerators, it is the clock's. There each op is waited for, which a step under a limit does
   not do: where launching is what takes time, dropping looks dearer than it is.
7. Python's garbage is collected between steps, never within one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from .bare_step import RunStep
from .policies import Fifo, Planned
from .record import RecordError, TapeRecord
from .simulate import plan_of
from .stopwatch import PART, RebuildParts, Stopwatch
from .structure import step_key

if TYPE_CHECKING:
    from .planning.plan import Plan
    from .recals import Recals

T = TypeVar("T")
_NO_LIMIT = 1 << 62

COSTS = ("model", "measured")
ENOUGH_S = 60.0
LEAST_ROUNDS, MOST_ROUNDS = 5, 50
"""A round is six steps: two recorded ones, one whose ops are timed, and a plain one after each. The most is for `ENOUGH_S`; with more
time come more rounds."""


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
        enough_s: after so many seconds of the clock, or `MOST_ROUNDS`, no further round begins, unless too few were taken.

    Raises:
        RecordError: a timed step ran other ops than the recorded one (rule 2).
    """
    plans = [plan_of(record, _NO_LIMIT, policy) for policy in (Fifo(), *map(RebuildParts, range(PART)))]
    engines = [_Follower(recals, record, plan) for plan in plans]
    plain: list[StepTimes] = []
    recorded: list[Beside[TimedStep]] = []
    timed: list[Beside[TimedStep]] = []

    def plain_step() -> float:
        plain.append(_between_collections(lambda: _run(run, None, device), reset))
        return plain[-1].step_s

    def take(step: Callable[[], TimedStep], steps: list[Beside[TimedStep]]) -> None:
        before_s = plain[-1].step_s
        taken = _between_collections(step, reset)
        steps.append(Beside(taken, before_s, plain_step()))

    recorder, watched = engines[0], engines[1:]
    gc.collect()
    for engine in engines:  # to warm up
        _between_collections(partial(engine.step, run, device), reset)
    plain_step()
    most_rounds = max(MOST_ROUNDS, MOST_ROUNDS * enough_s / ENOUGH_S)
    begin = time.perf_counter()
    while len(timed) < LEAST_ROUNDS or (len(timed) < most_rounds and time.perf_counter() - begin < enough_s):
        take(partial(recorder.step, run, device), recorded)
        take(partial(watched[len(timed) % PART].step, run, device), timed)
        take(partial(recorder.step, run, device), recorded)
    return _evaluated(record, device, plain, recorded, timed)


class _Follower:
    """Runs steps that follow a plan, with a stopwatch in their replays."""

    def __init__(self, recals: Recals, record: TapeRecord, plan: Plan) -> None:
        self._policy = Planned()
        self._record, self._plan = record, plan
        self._recals = recals.unlimited(self._policy)
        self._replayer = self._recals.replayer
        self._key: Hashable = None

    def step(self, run: RunStep, device: torch.device) -> TimedStep:
        watch = Stopwatch(self._replayer, lambda: now_s(device))
        self._recals.cache.executor = watch
        self._recals.reset_stats()
        times = _run(run, self, device)
        if self._policy.steps_departed:
            raise RecordError(
                "a step saved other values than the recorded one: it does not repeat itself, so its costs cannot be measured; use "
                "costs='model'"
            )
        ops_s: dict[int, float] = {}
        for seq, seconds in watch.seconds_per_run().items():
            place = seq - self._policy.first_seq
            known = self._record.ops[place].name if 0 <= place < len(self._record.ops) else "nothing"
            if watch.names[seq] != known:
                raise RecordError(
                    f"op {place} of the step was {known} when it was recorded and {watch.names[seq]} when it was timed: the step "
                    "does not repeat itself, so its costs cannot be measured; use costs='model'"
                )
            ops_s[place] = seconds
        return TimedStep(times, ops_s, watch.total_s, self._recals.stats.dropped_values)

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = step_key(fn, args, kwargs)
        if self._key is None:
            self._key = key
            self._policy.install(key, self._record, self._plan)
        elif key != self._key:  # the plan would not be followed
            raise RecordError(
                "a step called another function, or with other shapes, or in another mode (train, eval) than the step before: it does "
                "not repeat itself, so its costs cannot be measured; use costs='model'"
            )
        return self._recals(fn, *args, **kwargs)


def _evaluated(
    record: TapeRecord,
    device: torch.device,
    plain: Sequence[StepTimes],
    recorded: Sequence[Beside[TimedStep]],
    timed: Sequence[Beside[TimedStep]],
) -> TapeRecord:
    step_s = statistics.median(step.step_s for step in plain)
    forward_share = statistics.median(step.forward_s / step.step_s for step in plain)

    steady = steadier_half(timed)
    shares = {**_shares(timed), **_shares(steady)}  # of an op that no steady step re-ran, any will do
    seconds_of = {op: step_s * statistics.median(found) for op, found in shares.items()}
    modelled = sum(record.ops[op].cost for op in seconds_of)
    scale = sum(seconds_of.values()) / modelled if modelled else 0.0

    recording = max(0.0, _without_reruns(steadier_half(recorded)) - 1)
    dropping = _without_reruns(steady) - 1 - recording
    dropped_values = max(1, max(each.taken.dropped_values for each in timed))
    return replace(
        record,
        cost_unit="s",
        device=str(device),
        ops=tuple(
            replace(op, cost=seconds_of.get(i, scale * op.cost), model_cost=op.decision_cost)
            for i, op in enumerate(record.ops)
        ),
        forward_cost=step_s * forward_share,
        backward_cost=step_s * (1 - forward_share),
        recording_cost=step_s * recording,
        drop_cost=max(0.0, step_s * dropping) / dropped_values,
    )


def _without_reruns(steps: Sequence[Beside[TimedStep]]) -> float:
    """A step without what it re-ran, as a share of the plain steps beside it; forward apart from the rest (rule 1)."""
    forward = statistics.median(each.taken.times.forward_s / each.plain_s for each in steps)
    rest = statistics.median((each.taken.times.rest_s - each.taken.reruns_s) / each.plain_s for each in steps)
    return forward + rest


def _shares(steps: Sequence[Beside[TimedStep]]) -> dict[int, list[float]]:
    """By op, its times as shares of the plain steps beside it."""
    shares: dict[int, list[float]] = {}
    for each in steps:
        for op, seconds in each.taken.ops_s.items():
            shares.setdefault(op, []).append(seconds / each.plain_s)
    return shares


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step: of the model's call, and of all the rest."""

    forward_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.rest_s


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in which values were dropped and rebuilt."""

    times: StepTimes
    ops_s: dict[int, float]  # by their place in the record, of one run
    reruns_s: float  # of all runs of all ops
    dropped_values: int


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


def _run(run: RunStep, engine: _Follower | None, device: torch.device) -> StepTimes:
    """One step. None: a plain one."""
    forward_s = 0.0

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal forward_s
            begin = now_s(device)
            out = fn(*args, **kwargs) if engine is None else engine(fn, *args, **kwargs)
            forward_s += now_s(device) - begin
            return out

        return call

    begin = now_s(device)
    run(wrap)
    return StepTimes(forward_s, now_s(device) - begin - forward_s)


def now_s(device: torch.device) -> float:
    """Seconds, with nothing under way on ``device`` (rule 6)."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
