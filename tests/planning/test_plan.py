"""Plans as data: both forms round-trip, and text that is not a plan is refused by line."""

from __future__ import annotations

import random

import pytest

from recals_exp.recals.planning.plan import Plan, PlanError, Step


def _random_plan(seed: int) -> Plan:
    rng = random.Random(seed)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(40), rng.randint(0, most))))

    return Plan(
        signature=f"tape-{seed}",
        limit_bytes=rng.randrange(10**12),
        origin="multi-level, laziness 0.5, 90%",
        keep=ids(20),
        steps=tuple(Step(value, rng.choice((0, 0, 1)), ids(3), ids(5)) for value in rng.sample(range(40), 8)),
        overhead_pct=rng.random() * 100,
        bound_pct=rng.choice((None, rng.random())),
    )


@pytest.mark.parametrize("seed", range(20))
def test_text_and_json_round_trip(seed: int) -> None:
    plan = _random_plan(seed)
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_json(plan.to_json()) == plan


def test_text_is_one_action_per_line() -> None:
    plan = Plan("t", 100, "by hand", (1, 2, 3, 7), (Step(9, 0, (3,), (8, 9)), Step(9, 1, (), ())), 12.5)
    assert plan.to_text().splitlines()[-4:] == ["keep 1-3 7", "miss 9 | discard 3 | hold 8-9", "miss 9#1", "end"]
    assert plan.step_by_miss[9, 1].hold == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("end\n", ""), "ends with 'end'"),
        (lambda t: t.replace("recals-plan 1", "recals-plan 9"), "format version '9', this recals reads 1"),
        (lambda t: t.replace("keep", "hold", 1), "line 7 of the plan should start with 'keep'"),
        (lambda t: t.replace("miss 9 | discard", "miss 9 | throw"), "line 8 of the plan is not 'miss V"),
        (lambda t: t.replace("miss 9 | discard 3 | hold", "hold"), "line 8 of the plan names no miss"),
    ],
)
def test_other_text_is_refused_by_line(change, message: str) -> None:
    text = Plan("t", 100, "by hand", (1,), (Step(9, 0, (3,), (8, 9)),), 12.5).to_text()
    changed = change(text)
    assert changed != text
    with pytest.raises(PlanError, match=message):
        Plan.from_text(changed)


def test_other_json_version_is_refused() -> None:
    text = _random_plan(0).to_json().replace('"format_version":1', '"format_version":2')
    with pytest.raises(PlanError, match="format version 2, this recals reads 1"):
        Plan.from_json(text)
