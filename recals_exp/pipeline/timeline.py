"""What ran when in a step: events as plain data, the measures of each stage made of them, and a picture.

    with record(pipe) as timeline:            # ModelPipeline; a DistributedPipeline keeps events itself
        loss_fn(pipe(x), y).backward()
    for measure in timeline.stages(): ...

Rules:

1. Recording is off unless asked for, and then costs a few hooks for each cell.
2. Times are seconds of `time.perf_counter`, which on one machine all processes share.
3. A cell's backward lasts from the first gradient of its results to the last gradient of its inputs. A cell whose inputs want
   no gradient ends where the next event of the same worker starts, or with the backward pass.
4. Recomputation is what the engine re-runs inside a backward: an event of its own, which lies within that backward.
5. On accelerators forward times are those of queueing; use the profiler there.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recals_exp.recals import Recals
from recals_exp.recals.cache import Executor

if TYPE_CHECKING:
    from recals_exp.pipeline.module import ModelPipeline
    from recals_exp.pipeline.stage import Stage

KINDS = ("forward", "backward", "backward_input", "backward_weight", "recompute")


@dataclass(frozen=True, slots=True)
class Event:
    """Something a stage did."""

    kind: str  # one of KINDS
    stage: int
    micro_batch: int  # -1 where one re-run serves several
    start_s: float  # time.perf_counter
    end_s: float
    rank: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StageMeasure:
    """One stage in one step."""

    stage: int
    rank: int
    busy_s: float  # computing: forward and backward, recomputation included
    forward_s: float
    backward_s: float  # recomputation included
    recompute_s: float
    bubble: float  # 0 to 1: the share of the step in which the stage's worker did nothing
    cache_peak_bytes: int | None  # of the stage's Recals; None without a budget
    recompute_pct: float  # recomputation in percent of the stage's time without it


def stage_measures(
    events: Sequence[Event], cache_peaks: Mapping[int, int | None] | None = None, by_rank: bool = False
) -> tuple[StageMeasure, ...]:
    """The measures of every stage.

    Args:
        events: of one step, of all ranks.
        cache_peaks: for each stage, the peak of its cache.
        by_rank: several stages on one rank share a worker: its idle time is what none of them uses.
    """
    if not events:
        return ()
    span = max(e.end_s for e in events) - min(e.start_s for e in events)
    busy: dict[int, float] = {}
    for event in events:
        if event.kind != "recompute":
            key = event.rank if by_rank else event.stage
            busy[key] = busy.get(key, 0.0) + event.seconds
    measures = []
    for stage in sorted({event.stage for event in events}):
        own = [event for event in events if event.stage == stage]
        forward = sum(e.seconds for e in own if e.kind == "forward")
        backward = sum(e.seconds for e in own if e.kind.startswith("backward"))
        recompute = sum(e.seconds for e in own if e.kind == "recompute")
        rank = own[0].rank
        plain = forward + backward - recompute
        measures.append(
            StageMeasure(
                stage,
                rank,
                forward + backward,
                forward,
                backward,
                recompute,
                max(0.0, 1 - busy[rank if by_rank else stage] / span) if span else 0.0,
                (cache_peaks or {}).get(stage),
                100 * recompute / plain if plain > 0 else 0.0,
            )
        )
    return tuple(measures)


class Timeline:
    """The events of the steps run while it was recorded; the observer of a `ModelPipeline`."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._open: list[tuple[int, int, float]] = []  # backwards that wait for their end: stage, micro-batch, start
        self._peaks: dict[int, int | None] = {}
        self._queued = False

    @property
    def events(self) -> tuple[Event, ...]:
        """In order of their start."""
        return tuple(sorted(self._events, key=lambda event: (event.start_s, event.stage)))

    def stages(self) -> tuple[StageMeasure, ...]:
        """The measures of every stage."""
        return stage_measures(self.events, self._peaks)

    def run(self, stage: Stage, micro_batch: int, recals: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The stage's call, recorded; hooks on the results and inputs record its backward."""
        start = time.perf_counter()
        result = stage.module(*args, **kwargs) if recals is None else recals(stage.module, *args, **kwargs)
        self._events.append(Event("forward", stage.index, micro_batch, start, time.perf_counter()))
        self._peaks.setdefault(stage.index, None)
        cell = _Cell(self, stage.index, micro_batch)
        for leaf in _with_history(result):
            leaf.grad_fn.register_prehook(cell.begin)  # type: ignore[union-attr]
        cell.awaited = 0
        for leaf in _with_history((args, kwargs)):
            leaf.register_hook(cell.input_done)
            cell.awaited += 1
        return result

    def begin_backward(self, stage: int, micro_batch: int) -> None:
        """The first gradient of a cell's results is there."""
        now = time.perf_counter()
        self._close(now)
        self._open.append((stage, micro_batch, now))
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def end_backward(self, stage: int, micro_batch: int) -> None:
        """All gradients of a cell's inputs are there."""
        now = time.perf_counter()
        for waiting in self._open:
            if waiting[:2] == (stage, micro_batch):
                self._open.remove(waiting)
                self._events.append(Event("backward", stage, micro_batch, waiting[2], now))
                return

    def end_pass(self) -> None:
        """The backward pass is over."""
        self._queued = False
        self._close(time.perf_counter())

    def recomputed(self, stage: int, start_s: float, end_s: float) -> None:
        """A replay of a stage's engine."""
        current = next((micro_batch for number, micro_batch, _ in reversed(self._open) if number == stage), -1)
        self._events.append(Event("recompute", stage, current, start_s, end_s))

    def note_peaks(self, stages: Sequence[Stage]) -> None:
        """Read the peaks of the stages' caches."""
        for stage in stages:
            recals = stage.budget.recals
            self._peaks[stage.index] = recals.stats.peak_cached_bytes if isinstance(recals, Recals) else None

    def _close(self, now: float) -> None:
        for stage, micro_batch, start in self._open:
            self._events.append(Event("backward", stage, micro_batch, start, now))
        self._open.clear()


@dataclass(slots=True)
class _Cell:
    """The hooks of one cell."""

    timeline: Timeline
    stage: int
    micro_batch: int
    awaited: int = 0
    begun: bool = False

    def begin(self, grads: Any) -> None:
        if not self.begun:
            self.begun = True
            self.timeline.begin_backward(self.stage, self.micro_batch)

    def input_done(self, grad: Tensor) -> None:
        self.awaited -= 1
        if self.awaited == 0 and self.begun:
            self.timeline.end_backward(self.stage, self.micro_batch)


@contextmanager
def record(pipe: ModelPipeline) -> Iterator[Timeline]:
    """Record what a pipeline's stages do inside the block; backward must run inside it too."""
    timeline = Timeline()
    pipe.observe(timeline)
    with ExitStack() as stack:
        stack.callback(timeline.note_peaks, pipe.stages)
        stack.callback(pipe.observe, None)
        for recals, stage in {id(s.budget.recals): (s.budget.recals, s.index) for s in reversed(pipe.stages)}.values():
            if isinstance(recals, Recals):
                recals.reset_stats()
            stack.enter_context(timed_replays(recals, functools.partial(timeline.recomputed, stage)))
        yield timeline


@contextmanager
def timed_replays(recals: Any, tell: Callable[[float, float], None]) -> Iterator[None]:
    """Tell the start and end of everything the engine re-runs inside the block; nothing if ``recals`` is none of ours."""
    if not isinstance(recals, Recals):
        yield
        return
    executor = recals.cache.executor
    recals.cache.executor = _TimedReplays(executor, tell)
    try:
        yield
    finally:
        recals.cache.executor = executor


class _TimedReplays:
    """The executor of a stage's cache, with a clock."""

    def __init__(self, executor: Executor, tell: Callable[[float, float], None]) -> None:
        self._executor = executor
        self._tell = tell

    @property
    def flops(self) -> int:
        return self._executor.flops

    @flops.setter
    def flops(self, value: int) -> None:
        self._executor.flops = value

    @contextmanager
    def replaying(self) -> Iterator[None]:
        start = time.perf_counter()
        with self._executor.replaying():
            yield
        self._tell(start, time.perf_counter())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._executor.run(*args, **kwargs)


def draw_timeline(events: Sequence[Event], path: str | Path, title: str = "") -> None:
    """Write a picture of the events: a row for each stage, time to the right. The format follows the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = {
        "forward": "#4477aa",
        "backward": "#ee6677",
        "backward_input": "#ee6677",
        "backward_weight": "#ccbb44",
        "recompute": "#228833",
    }
    stages = sorted({event.stage for event in events})
    figure = Figure(figsize=(10, 1.1 + 0.6 * max(1, len(stages))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    zero = min((event.start_s for event in events), default=0.0)
    for event in sorted(events, key=lambda event: event.kind == "recompute"):
        height = 0.35 if event.kind == "recompute" else 0.8
        left, width = 1000 * (event.start_s - zero), 1000 * event.seconds
        row = stages.index(event.stage)
        axes.barh(row, width, left=left, height=height, color=colours[event.kind], edgecolor="white", linewidth=0.5)
        if event.kind != "recompute" and event.micro_batch >= 0:
            axes.text(
                left + width / 2,
                row,
                str(event.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
                clip_on=True,
            )
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in stages])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    if title:
        axes.set_title(title)
    used = [kind for kind in KINDS if any(event.kind == kind for event in events)]
    handles = [Patch(color=colours[kind], label=kind.replace("_", " ")) for kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(used)), frameon=False)
    figure.savefig(path, dpi=150)


def events_as_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events as plain dictionaries, for records."""
    return [dataclasses.asdict(event) for event in events]


def _with_history(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
