"""Schedules on paper."""

from __future__ import annotations

import pytest

from recals_exp.pipeline.schedule import (
    Action,
    clock_cycles,
    format_grid,
    forward_orders,
    gpipe_orders,
    ideal_bubble,
    ideal_efficiency,
    one_f_one_b_orders,
    simulate,
)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_bubble_of_equal_stages_is_the_ideal(n: int, m: int) -> None:
    for orders in (forward_orders(n, m), gpipe_orders(n, m), one_f_one_b_orders(n, m)):
        assert simulate(orders).bubble == pytest.approx(ideal_bubble(n, m))
    assert ideal_efficiency(n, m) == pytest.approx(m / (m + n - 1))


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 6])
def test_clock_cycles_are_the_forward_schedule(n: int, m: int) -> None:
    by_clock = {(action, clock) for clock, wave in enumerate(clock_cycles(n, m)) for action in wave}
    assert by_clock == {(slot.action, slot.start) for slot in simulate(forward_orders(n, m)).slots}
    assert len(clock_cycles(n, m)) == m + n - 1


def test_in_flight_micro_batches() -> None:
    assert simulate(gpipe_orders(3, 8)).in_flight == (8, 8, 8)
    assert simulate(one_f_one_b_orders(3, 8)).in_flight == (3, 2, 1)
    assert simulate(one_f_one_b_orders(4, 2)).in_flight == (2, 2, 2, 1)


def test_grid_is_readable() -> None:
    assert format_grid(simulate(forward_orders(3, 4))).splitlines() == [
        "worker 0 | F0 F1 F2 F3  .  .",
        "worker 1 |  . F0 F1 F2 F3  .",
        "worker 2 |  .  . F0 F1 F2 F3",
        "bubble   | 33.3% of 6 slots",
    ]
    assert format_grid(simulate(one_f_one_b_orders(2, 3))).splitlines() == [
        "worker 0 | F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2",
        "worker 1 |  . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .",
        "bubble   | 25.0% of 12 slots",
    ]
    several = ((Action("F", 0, 0), Action("F", 1, 0)),)
    assert format_grid(simulate(several)).splitlines()[0] == "worker 0 | 0F0 1F0"


def test_a_split_backward_waits_for_its_parts() -> None:
    orders = (
        (Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)),
        (Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)),
    )
    times = {str(slot.action): (slot.start, slot.end) for slot in simulate(orders).slots}
    assert times == {"0F0": (0, 1), "1F0": (1, 2), "1I0": (2, 3), "0I0": (3, 4), "1W0": (3, 4), "0W0": (4, 5)}


def test_a_schedule_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker 0 at 0B0.*worker 1 at 1B1"):
        simulate(((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0), Action("B", 1, 1))))


def test_actions_round_trip_through_text() -> None:
    for text in ("0F0", "12B3", "1I4", "0W10"):
        assert str(Action.parse(text)) == text
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse("F1")


@pytest.mark.parametrize(("n", "m"), [(0, 1), (1, 0)])
def test_counts_below_one_are_refused(n: int, m: int) -> None:
    for make in (clock_cycles, forward_orders, gpipe_orders, one_f_one_b_orders, ideal_bubble):
        with pytest.raises(ValueError, match=f"{n} stages and {m} micro-batches"):
            make(n, m)
