"""What a step holds beside the cache, moment by moment: measured in one plain step, added to any simulated cache.

Why not "fixed bytes + limit": backward's gradients grow while the cache of a plain step shrinks, and a cache that is held to a
limit stays full for longer; where the two meet is the peak. So the step is watched once with nothing dropped, and for every
event of its record (``record.py``) the live bytes are split:

    live = in the cache, or flowing from op to op (known from the record)  +  beside it (everything else: measured)

    peak under a policy = resident + max over events of
        beside, at the event   + held and working set, at their highest while the event is handled (a rebuild)
        beside, until the next + held and working set, after it                                    (the step itself)

Rules
1. Live bytes count from the step's start. What was there before (parameters, buffers, optimizer state, the batch) is
   ``resident_bytes``; gradients, the optimizer's temporaries and backward's own transient are measured, in ``beside``.
2. A value *flows* from the op that makes it to the last op that reads it, outputs of the model to the end of the step: dropped
   or not, its bytes are there. It counts once.
3. A node of autograd has its saved values *in hand* from the moment it asks for them until it frees them, also those that the
   cache drops in between to make room for the next.
4. CPU: allocations are events of torch's profiler, placed between marks that every cache event leaves in the same stream. A
   peak is looked for after allocations only. Accelerators: their allocator's own counters, read at every event; what
   autograd frees just after a handle's death counts as cached until the next event.

What it does not know: temporaries of re-run ops (a convolution's workspace), what the model's own variables hold longer than
rule 2 says, and caching by libraries. Good to a few percent; a target that must be met is measured (``predict.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import _record_function_with_args_enter as _enter
from torch.autograd import _record_function_with_args_exit as _leave
from torch.profiler import ProfilerActivity, profile

from .graph import Value
from .policies import Policy
from .record import SOURCE, TapeRecord
from .simulate import Adder, simulate

_MARK = "recals.event"


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one step beside the cache. Index i: from just after event i of the record (forward, then backward) on."""

    resident_bytes: int  # there before the step and throughout: parameters, buffers, optimizer state, the batch
    before: int  # highest before the first event, above the start (rule 1)
    at_event: tuple[int, ...]  # when event i happened
    until_next: tuple[int, ...]  # highest from event i to the next; the last one: to the step's end

    def peak_bytes(self, record: TapeRecord, limit_bytes: int | None, policy: str | Policy) -> int:
        """Predicted peak of the step with its cache held to ``limit_bytes`` by ``policy``."""
        return max(self.resident_bytes + self.before, *self.totals(record, limit_bytes, policy))

    def totals(self, record: TapeRecord, limit_bytes: int | None, policy: str | Policy) -> list[int]:
        """Predicted bytes of the step around each event: at their highest while it is handled and until the next."""
        moments = moments_of(record, limit_bytes, policy)
        return [
            self.resident_bytes + max(at + moment.highest_bytes, until + moment.bytes_after)
            for moment, at, until in zip(moments, self.at_event, self.until_next, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Moment:
    """The cache around one event: held values, flowing values (each once) and working set."""

    highest_bytes: int  # while it was handled
    bytes_after: int


def moments_of(record: TapeRecord, limit_bytes: int | None, policy: str | Policy) -> list[Moment]:
    moments: list[Moment] = []
    outside = iter([*_flowing(record), *_in_hand(record)])

    def watch(adder: Adder, values: Sequence[Value]) -> None:
        adder.outside = [values[v] for v in next(outside)]
        now = adder.bytes_now()
        moments.append(Moment(max(now, adder.highest_bytes), now))
        adder.highest_bytes = 0

    simulate(record, limit_bytes, policy, watch)
    return moments


def _in_hand(record: TapeRecord) -> list[tuple[int, ...]]:
    """For every backward event: the values that are there just after it whatever the cache does (rules 2 and 3)."""
    external = [i for i, value in enumerate(record.values) if value.external]
    result: list[tuple[int, ...]] = []
    hand: dict[int, None] = {}
    for kind, index in record.backward_events:
        if kind == "fetch":
            hand[index] = None
        else:
            hand.clear()
        result.append((*external, *(v for v in hand if not record.values[v].external)))
    return result


def _flowing(record: TapeRecord) -> list[tuple[int, ...]]:
    """For every forward event: the values that flow just after it (rule 2). Backward: as after the last one."""
    last_reader: dict[int, int] = {}
    for index, op in enumerate(record.ops):
        for value in (*op.outputs, *op.inputs):
            last_reader[value] = index
    external = [i for i, v in enumerate(record.values) if v.external]
    done_at: dict[int, list[int]] = {}
    for value, index in last_reader.items():
        if not record.values[value].external and record.values[value].producer != SOURCE:
            done_at.setdefault(index, []).append(value)
    flowing: dict[int, None] = {}
    ran: set[int] = set()
    result: list[tuple[int, ...]] = []
    present: tuple[int, ...] = ()
    for kind, index in record.forward_events:
        if kind == "op":
            flowing.update(dict.fromkeys(record.ops[index].outputs))
            ran.update(record.ops[index].outputs)
            # what this op read for the last time is let go of when it has returned; what it made and nobody reads, too
            for value in done_at.get(index, ()):
                flowing.pop(value, None)
            present = tuple(flowing)
        result.append(present)
    if result:
        result[-1] = tuple(v for v in external if v in ran)
    return result


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Kineto writes notices of its own to stderr, at a level it reads from the environment when it is first used."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


class LiveBytes:
    """Watches the live bytes of ``device`` between marks (rule 4)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at_mark: list[int] = []  # [i]: at mark i
        self.until_next: list[int] = []  # [0]: before the first mark; [i + 1]: from mark i to the next
        self._start = 0

    def watching(self) -> AbstractContextManager[None]:
        """Entered around the step."""
        if self.device.type == "cpu":
            return self._watch_cpu()
        return self._watch_accelerator()

    def mark(self) -> None:
        """An event of the record happens now."""
        if self.device.type == "cpu":
            _leave(_enter(_MARK))
            return
        self.until_next.append(torch.accelerator.max_memory_allocated(self.device) - self._start)
        self.at_mark.append(torch.accelerator.memory_allocated(self.device) - self._start)
        torch.accelerator.reset_peak_memory_stats(self.device)

    @contextmanager
    def _watch_accelerator(self) -> Iterator[None]:
        torch.accelerator.synchronize(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        self._start = torch.accelerator.memory_allocated(self.device)
        yield
        self.until_next.append(torch.accelerator.max_memory_allocated(self.device) - self._start)

    @contextmanager
    def _watch_cpu(self) -> Iterator[None]:
        with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        events = []
        for event in profiler.profiler.kineto_results.events():
            is_mark = event.name() == _MARK
            if is_mark or (event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU):
                events.append((event.start_ns(), is_mark, 0 if is_mark else event.nbytes()))
        live, peak = 0, None
        for _, is_mark, nbytes in sorted(events, key=lambda event: event[0]):
            if is_mark:
                self.until_next.append(live if peak is None else peak)
                self.at_mark.append(live)
                peak = None
            live += nbytes
            if nbytes > 0:
                peak = live if peak is None else max(peak, live)
        self.until_next.append(live if peak is None else peak)


def step_memory(record: TapeRecord, live: LiveBytes, resident_bytes: int) -> StepMemory:
    """What ``live`` saw in the step of ``record``, without its cache."""
    moments = moments_of(record, None, "fifo")
    if len(live.at_mark) != len(moments):
        raise RuntimeError(
            f"the step left {len(live.at_mark)} marks for the {len(moments)} events of its record: another step or "
            "another profiler ran at the same time; profile the step alone"
        )
    events = [*record.forward_events, *record.backward_events]
    late = live.device.type != "cpu"  # rule 4
    cached, at_event, until_next = 0, [], []
    for i, (kind, _) in enumerate(events):
        after = moments[i].bytes_after
        at_event.append(max(0, live.at_mark[i] - max(cached, after)))
        until_next.append(max(0, live.until_next[i + 1] - (max(cached, after) if late and kind == "free" else after)))
        cached = after
    return StepMemory(resident_bytes, live.until_next[0], tuple(at_event), tuple(until_next))
