"""The judge: an interpreter of (record, limit, plan) that trusts nobody.

Why a second interpreter: every planner is wrong sometimes, and a planner that checks itself is wrong the same way twice. This
one works on plain sets, follows the meaning written in `plan.py` line by line, and shares no code with the planner.

It checks the precondition of every action, the limit after each, that every step is used, and that backward completes; it
returns what the plan costs. Faults are `PlanError`s that name the event, the value and both numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..record import SOURCE, TapeRecord
from .plan import Plan, PlanError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a valid plan does."""

    rerun_cost: float  # in the record's cost unit
    rerun_ops: int
    overhead_pct: float  # of a plain step
    misses: int
    peak_held_bytes: int  # never above the plan's limit
    peak_working_bytes: int  # the most a rebuild needed at once beyond the held set
    peak_total_bytes: int  # the most held and working bytes together
    kept_bytes: int  # held when forward ended


class _Interpreter:
    def __init__(self, record: TapeRecord, plan: Plan, limit_bytes: int) -> None:
        self.record, self.plan, self.limit_bytes = record, plan, limit_bytes
        self.always = {i for i, v in enumerate(record.values) if v.producer == SOURCE or v.external}
        self.pinned = {i for i, v in enumerate(record.values) if v.pinned} - self.always
        self.held: set[int] = set()
        self.held_bytes = 0
        self.peak_held = self.peak_working = self.peak_total = self.rerun_ops = self.misses = 0
        self.at_hand: int | None = None  # rebuilt last, handed to autograd, not held
        self.rerun_cost = 0.0
        self.nth: dict[int, int] = {}
        self.unused = set(plan.step_by_miss)
        self.where = "before forward"

    def bytes_of(self, values: set[int]) -> int:
        return sum(self.record.values[v].nbytes for v in values)

    def fail(self, what: str) -> PlanError:
        return PlanError(
            f"plan {self.plan.origin!r} for tape {self.plan.signature!r} is not valid {self.where}: {what}"
        )

    def enter(self, value: int) -> None:
        if value not in self.held:
            self.held.add(value)
            self.held_bytes += self.record.values[value].nbytes
        held = self.held_bytes
        self.peak_held = max(self.peak_held, held)
        self.peak_total = max(self.peak_total, held)
        if held > self.limit_bytes:
            raise self.fail(
                f"holding value {value} ({self.record.values[value].nbytes} bytes) makes {held} bytes held, "
                f"the limit is {self.limit_bytes}"
            )

    def leave(self, value: int) -> None:
        if value in self.held:
            self.held.discard(value)
            self.held_bytes -= self.record.values[value].nbytes

    def check_static(self) -> None:
        n_values = len(self.record.values)
        if self.plan.signature != self.record.signature:
            raise self.fail(f"the record's tape is {self.record.signature!r}; plan for this tape")
        if len(self.plan.step_by_miss) != len(self.plan.steps):
            raise self.fail("two steps name the same miss")
        named = {*self.plan.keep, *(v for s in self.plan.steps for v in (s.value, *s.discard, *s.hold))}
        unknown = sorted(v for v in named if not 0 <= v < n_values)
        if unknown:
            raise self.fail(f"it names the values {unknown[:5]}, the record has {n_values}")
        fixed = sorted(named & (self.always | self.pinned))
        if fixed:
            raise self.fail(f"it decides about the values {fixed[:5]}, which are sources, external or pinned")
        unsaved = sorted(v for v in self.plan.keep if not self.record.values[v].saved)
        if unsaved:
            raise self.fail(f"it keeps the values {unsaved[:5]} in forward, which autograd does not save")
        if len(self.plan.keep_set) != len(self.plan.keep):
            raise self.fail("keep names a value twice")

    def forward(self) -> None:
        for number, (kind, index) in enumerate(self.record.forward_events):
            self.where = f"at forward event {number} ({kind} {index})"
            if kind == "op":
                for value in self.record.ops[index].outputs:
                    if value in self.pinned:
                        self.enter(value)
            elif kind == "save":
                if index in self.pinned or index in self.plan.keep_set:
                    self.enter(index)
            else:
                self.leave(index)
        self.where = "at the end of forward"
        lost = sorted(self.plan.keep_set - self.held)
        if lost:
            raise self.fail(f"keep names the values {lost[:5]}, which forward frees or never makes")

    def backward(self) -> None:
        for number, (kind, index) in enumerate(self.record.backward_events):
            self.where = f"at backward event {number} ({kind} {index})"
            if kind == "free":
                self.leave(index)
                if index == self.at_hand:
                    self.at_hand = None
            elif index not in self.held and index not in self.always and index != self.at_hand:
                self.miss(index)
                self.at_hand = None if index in self.held else index
        self.where = "at the end of backward"
        if self.unused:
            value, nth = min(self.unused)
            raise self.fail(f"the step for miss {value}#{nth} is never used ({len(self.unused)} such steps)")

    def miss(self, value: int) -> None:
        self.misses += 1
        nth = self.nth.get(value, 0)
        self.nth[value] = nth + 1
        step = self.plan.step_by_miss.get((value, nth))
        discard = set(step.discard) if step else set()
        hold = set(step.hold) if step else set()
        self.unused.discard((value, nth))
        if not discard <= self.held:
            raise self.fail(f"it lets go of the values {sorted(discard - self.held)[:5]}, which are not held")
        if hold & self.held:
            raise self.fail(f"it rebuilds the values {sorted(hold & self.held)[:5]}, which are held")
        strangers = sorted(v for v in hold if not self.record.values[v].saved and v not in self.ancestors(value))
        if strangers:
            raise self.fail(f"it holds the unsaved values {strangers[:5]}, which value {value} is not made from")
        there = self.held | self.always
        for value_let_go in discard:
            self.leave(value_let_go)
        ops = self.needed_ops({value, *hold}, there)
        self.replay(value, ops, hold, there)
        if not hold <= self.held:
            raise self.fail(f"the values {sorted(hold - self.held)[:5]} were not rebuilt")

    def ancestors(self, value: int) -> set[int]:
        found: set[int] = set()
        todo = [value]
        while todo:
            op = self.record.values[todo.pop()].producer
            new = set(self.record.ops[op].inputs) - found if op != SOURCE else set()
            found |= new
            todo.extend(new)
        return found

    def needed_ops(self, targets: set[int], there: set[int]) -> list[int]:
        todo, ops = list(targets), set()
        while todo:
            value = todo.pop()
            op = self.record.values[value].producer
            if value in there or op in ops:
                continue
            if value in self.pinned:
                raise self.fail(f"it needs value {value}, which is pinned but gone")
            ops.add(op)
            todo.extend(self.record.ops[op].inputs)
        return sorted(ops)

    def replay(self, missed: int, ops: list[int], hold: set[int], there: set[int]) -> None:
        readers: dict[int, int] = {}  # value -> last op of this rebuild that reads it
        for op in ops:
            for value in self.record.ops[op].inputs:
                readers[value] = op
        working = {v for v in there - self.held - self.always if v in readers}  # let go of, but feeding this rebuild
        available = set(there)
        for op in ops:
            record = self.record.ops[op]
            absent = [v for v in record.inputs if v not in available]
            if absent:
                raise self.fail(f"op {op} ({record.name}) reads the values {absent[:5]}, which are not there")
            self.rerun_ops += 1
            self.rerun_cost += record.cost
            for value in record.outputs:
                if value in self.held or value in self.always:
                    continue
                available.add(value)
                if value in hold:
                    self.enter(value)
                elif value in readers or value == missed:
                    working.add(value)
            now = self.bytes_of(working)
            self.peak_working = max(self.peak_working, now)
            self.peak_total = max(self.peak_total, now + self.held_bytes)
            working -= {v for v in record.inputs if readers[v] == op and v != missed}
            available -= {v for v in record.inputs if readers[v] == op} - self.held - self.always - {missed}
        if missed not in available:
            raise self.fail(f"value {missed} was asked for and not rebuilt")


def check(record: TapeRecord, plan: Plan, limit_bytes: int | None = None) -> Verdict:
    """Interpret ``plan`` on ``record``; raises `PlanError` at its first fault.

    Args:
        record: the step.
        plan: the plan to judge.
        limit_bytes: a limit to hold it to; default: the plan's own.
    """
    interpreter = _Interpreter(record, plan, plan.limit_bytes if limit_bytes is None else limit_bytes)
    interpreter.check_static()
    interpreter.forward()
    kept_bytes = interpreter.held_bytes
    interpreter.backward()
    return Verdict(
        rerun_cost=interpreter.rerun_cost,
        rerun_ops=interpreter.rerun_ops,
        overhead_pct=record.overhead_pct(interpreter.rerun_cost),
        misses=interpreter.misses,
        peak_held_bytes=interpreter.peak_held,
        peak_working_bytes=interpreter.peak_working,
        peak_total_bytes=interpreter.peak_total,
        kept_bytes=kept_bytes,
    )
