"""Who computes what when: schedules as plain data, and the clock that runs them on paper.

A *schedule* is one list of actions per worker (a device, a thread or a process). It says only the order in which each
worker does its share; when an action starts follows from what it waits for::

    F = forward of a stage for one micro-batch      waits for the F of the stage before
    B = its whole backward                          waits for its own F and for the B (or I) of the stage behind
    I = backward with respect to the input only     waits like B
    W = backward with respect to the weights        waits for its own I

`simulate` turns the lists into a timetable, from which the grid, the idle share (the *bubble*) and the makespan follow.
It needs no device and no model, so that every schedule can be read, printed and tested on its own::

    worker 0 | F0 F1 F2 F3  .  .          3 stages, 4 micro-batches, forward only:
    worker 1 |  . F0 F1 F2 F3  .          each worker idles (n-1) of (m+n-1) slots
    worker 2 |  .  . F0 F1 F2 F3

Why not the planner inside `torch.distributed.pipelining`: its lists exist only inside schedule objects that need live
stages and a process group. `distributed.py` hands those lists over to be drawn here, so there is one grid for all.

The forward grid is GPipe's (https://arxiv.org/abs/1811.06965), one-forward-one-backward PipeDream-Flush's
(https://arxiv.org/abs/2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one worker."""

    kind: str  # one of KINDS
    stage: int  # 0-based
    micro_batch: int  # 0-based

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str()`` wrote: ``"1F3"`` is the forward of stage 1 for micro-batch 3."""
        for kind in KINDS:
            stage, found, micro_batch = text.partition(kind)
            if found and stage.isdigit() and micro_batch.isdigit():
                return cls(kind, int(stage), int(micro_batch))
        raise ValueError(
            f"{text!r} is not an action: write <stage><kind><micro-batch>, for example 1F3 (kinds: {KINDS})"
        )


Orders = tuple[tuple[Action, ...], ...]  # one list per worker


@dataclass(frozen=True, slots=True)
class Slot:
    """An action with its place in time."""

    worker: int
    action: Action
    start: float  # in the unit of the costs
    end: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """A schedule that was run on paper."""

    n_workers: int
    slots: tuple[Slot, ...]  # by start, then by worker

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((slot.end for slot in self.slots), default=0.0)

    def busy(self, worker: int) -> float:
        """How long a worker computes."""
        return sum(slot.end - slot.start for slot in self.slots if slot.worker == worker)

    @property
    def bubble(self) -> float:
        """The idle share of all workers over the makespan, 0 to 1."""
        if not self.slots:
            return 0.0
        return 1 - sum(self.busy(worker) for worker in range(self.n_workers)) / (self.n_workers * self.makespan)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most micro-batches whose forward is done and whose last backward is not."""
        n_stages = 1 + max((slot.action.stage for slot in self.slots), default=-1)
        split = {slot.action.stage for slot in self.slots if slot.action.kind == BACKWARD_WEIGHT}
        changes: list[tuple[float, int, int]] = []  # time, -1 or +1 (a release first), stage
        for slot in self.slots:
            stage = slot.action.stage
            if slot.action.kind == FORWARD:
                changes.append((slot.start, 1, stage))
            elif slot.action.kind == (BACKWARD_WEIGHT if stage in split else BACKWARD):
                changes.append((slot.end, -1, stage))
        peaks, held = [0] * n_stages, [0] * n_stages
        for _, change, stage in sorted(changes):
            held[stage] += change
            peaks[stage] = max(peaks[stage], held[stage])
        return tuple(peaks)


def ideal_bubble(n_stages: int, n_micro_batches: int) -> float:
    """(n-1)/(m+n-1): the idle share of n equal stages and m micro-batches, each worker having one stage."""
    _check_counts(n_stages, n_micro_batches)
    return (n_stages - 1) / (n_micro_batches + n_stages - 1)


def ideal_efficiency(n_stages: int, n_micro_batches: int) -> float:
    """m/(m+n-1): the busy share that `ideal_bubble` leaves."""
    return 1 - ideal_bubble(n_stages, n_micro_batches)


def clock_cycles(n_stages: int, n_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The forward wave, one tuple for each clock: at clock c, stage k works on micro-batch c-k."""
    _check_counts(n_stages, n_micro_batches)
    return tuple(
        tuple(
            Action(FORWARD, stage, clock - stage) for stage in range(n_stages) if 0 <= clock - stage < n_micro_batches
        )
        for clock in range(n_micro_batches + n_stages - 1)
    )


def forward_orders(n_stages: int, n_micro_batches: int) -> Orders:
    """One worker for each stage, forward only: what `ModelPipeline` overlaps."""
    _check_counts(n_stages, n_micro_batches)
    return tuple(
        tuple(Action(FORWARD, stage, micro_batch) for micro_batch in range(n_micro_batches))
        for stage in range(n_stages)
    )


def gpipe_orders(n_stages: int, n_micro_batches: int) -> Orders:
    """All forwards, then all backwards in the same order of micro-batches."""
    _check_counts(n_stages, n_micro_batches)
    return tuple(
        tuple(
            Action(kind, stage, micro_batch) for kind in (FORWARD, BACKWARD) for micro_batch in range(n_micro_batches)
        )
        for stage in range(n_stages)
    )


def one_f_one_b_orders(n_stages: int, n_micro_batches: int) -> Orders:
    """As few forwards ahead as keep the pipe full, then one backward for each forward: stage k holds n-k of them."""
    _check_counts(n_stages, n_micro_batches)
    orders = []
    for stage in range(n_stages):
        ahead = min(n_micro_batches, n_stages - stage)
        actions = [Action(FORWARD, stage, micro_batch) for micro_batch in range(ahead)]
        for micro_batch in range(n_micro_batches):
            actions.append(Action(BACKWARD, stage, micro_batch))
            if micro_batch + ahead < n_micro_batches:
                actions.append(Action(FORWARD, stage, micro_batch + ahead))
        orders.append(tuple(actions))
    return tuple(orders)


def unit_cost(action: Action) -> float:
    """Forward 1, backward 2, and each half of a split backward 1: layers whose backward is twice their forward."""
    return 2.0 if action.kind == BACKWARD else 1.0


def simulate(orders: Sequence[Sequence[Action]], cost: Callable[[Action], float] = unit_cost) -> Timetable:
    """Run the lists on paper; a schedule in which workers wait for each other forever is refused by name."""
    n_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    ends: dict[Action, float] = {}
    free_at = [0.0] * len(orders)
    position = [0] * len(orders)
    slots: list[Slot] = []
    remaining = sum(len(order) for order in orders)
    while remaining:
        moved = False
        for worker, order in enumerate(orders):
            while position[worker] < len(order):
                action = order[position[worker]]
                ready = _ready_at(action, ends, n_stages)
                if ready is None:
                    break
                start = max(free_at[worker], ready)
                end = start + cost(action)
                slots.append(Slot(worker, action, start, end))
                ends[action] = free_at[worker] = end
                position[worker] += 1
                remaining -= 1
                moved = True
        if not moved:
            stuck = ", ".join(
                f"worker {worker} at {order[position[worker]]}"
                for worker, order in enumerate(orders)
                if position[worker] < len(order)
            )
            raise ValueError(f"this schedule never ends: {stuck} wait for each other or for an action nobody does")
    slots.sort(key=lambda slot: (slot.start, slot.worker))
    return Timetable(len(orders), tuple(slots))


def format_grid(timetable: Timetable, slot_time: float = 1.0) -> str:
    """The timetable as text: one row for each worker, one column for each ``slot_time``, "." where it idles.

    A cell shows kind and micro-batch, and the stage too where a worker has several of them.
    """
    columns = max(1, round(timetable.makespan / slot_time))
    stages: dict[int, set[int]] = {}
    for slot in timetable.slots:
        stages.setdefault(slot.worker, set()).add(slot.action.stage)
    several = any(len(held) > 1 for held in stages.values())
    cells = [["."] * columns for _ in range(timetable.n_workers)]
    for slot in timetable.slots:
        action = slot.action
        text = str(action) if several else f"{action.kind}{action.micro_batch}"
        first, last = round(slot.start / slot_time), round(slot.end / slot_time)
        for column in range(first, max(first + 1, last)):
            if column < columns:
                cells[slot.worker][column] = text
    width = max(len(text) for row in cells for text in row) if cells else 1
    label = max(len(f"worker {worker}") for worker in range(timetable.n_workers)) if cells else 0
    lines = [
        f"{f'worker {worker}':<{label}} | " + " ".join(f"{text:>{width}}" for text in row)
        for worker, row in enumerate(cells)
    ]
    return "\n".join([*lines, f"{'bubble':<{label}} | {timetable.bubble:.1%} of {columns} slots"])


def _ready_at(action: Action, ends: dict[Action, float], n_stages: int) -> float | None:
    """When everything the action waits for has ended; None = not yet known."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return 0.0 if stage == 0 else ends.get(Action(FORWARD, stage - 1, micro_batch))
    if action.kind == BACKWARD_WEIGHT:
        return ends.get(Action(BACKWARD_INPUT, stage, micro_batch))
    own = ends.get(Action(FORWARD, stage, micro_batch))
    if stage == n_stages - 1 or own is None:
        return own
    behind = ends.get(
        Action(BACKWARD, stage + 1, micro_batch), ends.get(Action(BACKWARD_INPUT, stage + 1, micro_batch))
    )
    return None if behind is None else max(own, behind)


def _check_counts(n_stages: int, n_micro_batches: int) -> None:
    if n_stages < 1 or n_micro_batches < 1:
        raise ValueError(
            f"got {n_stages} stages and {n_micro_batches} micro-batches: a schedule needs at least one of each"
        )
