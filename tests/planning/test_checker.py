"""The judge: what it computes is right by hand, and every kind of fault is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.records import RecordBuilder, uniform_chain

from recals_exp.recals.planning.checker import check
from recals_exp.recals.planning.plan import Plan, PlanError, Step
from recals_exp.recals.record import TapeRecord


def _y(layer: int) -> int:
    """Id of the output of a layer (1, 2, ..) of a uniform chain: source 0, then (linear, tanh) per layer."""
    return 2 * layer


def _plan(record: TapeRecord, keep=(), steps=(), limit: int = 300) -> Plan:
    return Plan(record.signature, limit, "by hand", tuple(keep), tuple(steps), 0.0)


def test_chain_by_hand() -> None:
    # y1 .. y5 are asked for (y6 is the output); keep y3, rebuild 4, 5 and then 1, 2, each run once
    record = uniform_chain(6)
    steps = (Step(_y(5), 0, (), (_y(4), _y(5))), Step(_y(2), 0, (), (_y(1), _y(2))))
    verdict = check(record, _plan(record, [_y(3)], steps))
    assert verdict.rerun_cost == pytest.approx(4.0)
    assert verdict.rerun_ops == 8
    assert verdict.overhead_pct == pytest.approx(100 * 4 / 18)
    assert (verdict.peak_held_bytes, verdict.kept_bytes, verdict.misses) == (300, 100, 2)


def test_missed_value_stays_at_hand_until_the_next_miss() -> None:
    # y2 is fetched twice in a row and held by nobody: one rebuild. y1 comes next: gone again.
    record = uniform_chain(3)
    verdict = check(record, _plan(record, limit=0))
    assert verdict.misses == 2
    assert verdict.rerun_cost == pytest.approx(2 + 1)
    assert (verdict.peak_held_bytes, verdict.peak_working_bytes) == (0, 200)  # what an op reads and what it makes


def test_discarded_value_feeds_the_rebuild_that_discards_it() -> None:
    record = uniform_chain(4)
    steps = (Step(_y(3), 0, (_y(1),), (_y(2), _y(3))), Step(_y(1), 0, (), (_y(1),)))
    verdict = check(record, _plan(record, [_y(1)], steps, limit=200))
    assert verdict.rerun_cost == pytest.approx(2 + 1)  # 2 and 3 from 1, then 1 again from the source
    assert verdict.peak_held_bytes == 200
    assert verdict.peak_working_bytes == 200  # y1 while it still feeds, and what tanh reads


def test_pinned_is_held_and_counted() -> None:
    b = RecordBuilder()
    x = b.source()
    (opaque,) = b.op("empty", (x,), 50, 1.0, saves_outputs=(0,), pinned=True)
    (y,) = b.op("mul", (opaque,), 10, 1.0, saves_outputs=(0,))
    (out,) = b.op("sum", (y,), 1, 1.0)
    record = b.build(out)
    verdict = check(record, _plan(record, limit=50))
    assert verdict.peak_held_bytes == 50
    assert verdict.rerun_cost == pytest.approx(1.0)
    with pytest.raises(PlanError, match=r"makes 50 bytes held, the limit is 49"):
        check(record, _plan(record, limit=49))


@pytest.mark.parametrize(
    ("keep", "steps", "message"),
    [
        ([_y(1), _y(2), _y(3), _y(4)], (), r"makes 400 bytes held, the limit is 300"),
        ([], (Step(_y(5), 0, (_y(2),), ()),), r"lets go of the values \[4\], which are not held"),
        ([_y(3)], (Step(_y(5), 0, (), (_y(3),)),), r"rebuilds the values \[6\], which are held"),
        ([], (Step(_y(5), 1, (), (_y(5),)),), r"the step for miss 10#1 is never used"),
        ([_y(5)], (Step(_y(5), 0, (), ()),), r"the step for miss 10#0 is never used"),
        ([0], (), r"decides about the values \[0\], which are sources, external or pinned"),
        ([_y(6)], (), r"decides about the values \[12\]"),
        ([1], (), r"keeps the values \[1\] in forward, which autograd does not save"),
        ([99], (), r"names the values \[99\], the record has 13"),
        ([_y(1), _y(1)], (), r"keep names a value twice"),
        ([_y(5)], (Step(_y(4), 0, (), (11,)),), r"holds the unsaved values \[11\], which value 8 is not made from"),
        ([], (Step(_y(5), 0, (), ()), Step(_y(5), 0, (), (_y(5),))), r"two steps name the same miss"),
        ([], (Step(_y(5), 0, (), (_y(2), _y(3), _y(4), _y(5))),), r"at backward event 2 \(fetch 10\).*400 bytes held"),
    ],
)
def test_every_fault_is_named(keep, steps, message: str) -> None:
    record = uniform_chain(6)
    with pytest.raises(PlanError, match=message):
        check(record, _plan(record, keep, steps))


def test_plan_for_another_tape_is_refused() -> None:
    plan = replace(_plan(uniform_chain(6)), signature="other")
    with pytest.raises(PlanError, match=r"the record's tape is 'chain6'"):
        check(uniform_chain(6), plan)
