"""Plans that a ``Recals`` follows, as data: shown to a reader, saved, loaded.

A plan alone is numbers; with the record of its step they get names. Both are kept together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .record import TapeRecord
from .sizes import format_bytes

if TYPE_CHECKING:
    from .planning.plan import Plan

FORMAT_VERSION = 1
_FORMAT = "recals-plans"
_OUTSIDE = "(outside of any module)"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan and the step that it was made for."""

    record: TapeRecord
    plan: Plan

    @property
    def signature(self) -> str:
        """Of the tape: steps with the same signature follow the same plan."""
        return self.record.signature


class PlansError(ValueError):
    """A file is not one of saved plans, or was written by another version."""


def plans_to_json(plans: Iterable[StepPlan]) -> str:
    """Text that `plans_from_json` turns back into equal plans."""
    return json.dumps(
        {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            "plans": [[json.loads(p.record.to_json()), json.loads(p.plan.to_json())] for p in plans],
        },
        separators=(",", ":"),
    )


def plans_from_json(text: str, name: str = "the text") -> tuple[StepPlan, ...]:
    """The plans that `plans_to_json` wrote; ``name`` is for messages."""
    from .planning.plan import Plan  # here: the planner's modules load slowly, and `Recals` imports this one

    try:
        data = json.loads(text)
        found = data["format"], data["format_version"]
    except (ValueError, KeyError, TypeError):
        raise PlansError(f"{name} does not hold saved plans; `recals.save_plans(path)` writes them") from None
    if found != (_FORMAT, FORMAT_VERSION):
        raise PlansError(
            f"{name} has the format {found[0]!r}, version {found[1]!r}; this recals reads {_FORMAT!r}, version "
            f"{FORMAT_VERSION}: plan again and save"
        )
    return tuple(
        StepPlan(TapeRecord.from_json(json.dumps(record)), Plan.from_json(json.dumps(plan)))
        for record, plan in data["plans"]
    )


@dataclass(slots=True)
class _Row:
    saved_bytes: int = 0
    kept_bytes: int = 0
    rerun_ops: int = 0
    rerun_cost: float = 0.0


def format_plan(step: StepPlan, depth: int | None = None, most: int = 40) -> str:
    """What a plan keeps and what it re-runs, by layer, as a table for people.

    Args:
        step: the plan.
        depth: layers are put together to names of so many parts (1: ``blocks``, 2: ``blocks.0``); None: as they are.
        most: rows shown; those that cost most.
    """
    from .simulate import following, pinned_bytes, simulate

    record, plan = step.record, step.plan
    rows: dict[str, _Row] = {}

    def row(layer: str) -> _Row:
        return rows.setdefault(".".join(layer.split(".")[:depth]) or _OUTSIDE, _Row())

    always = {i for i, v in enumerate(record.values) if v.external or v.pinned}
    for i, value in enumerate(record.values):
        if value.saved and value.producer >= 0 and i not in always:
            row(value.layer).saved_bytes += value.nbytes
            row(value.layer).kept_bytes += value.nbytes if i in plan.keep_set else 0
    done = simulate(record, plan.limit_bytes + pinned_bytes(record), following(record, plan))
    for op in done.rerun_ops:
        row(record.ops[op].layer).rerun_ops += 1
        row(record.ops[op].layer).rerun_cost += record.ops[op].cost
    bound = "" if plan.bound_pct is None else f"; no plan costs less than {plan.bound_pct:.2f} %"
    lines = [
        f"plan for the step {plan.signature}: {len(record.ops)} ops, at most {format_bytes(plan.limit_bytes)} held",
        f"re-runs {len(done.rerun_ops)} ops in {done.replays} replays: {plan.overhead_pct:.2f} % of a step{bound}",
        f"made by: {plan.origin}",
        "",
    ]
    table = [["layer", "autograd saves", "kept", "ops re-run", "cost, % of a step"]]
    shown = sorted(rows.items(), key=lambda item: (-item[1].rerun_cost, -item[1].saved_bytes))[:most]
    for name, entry in sorted(shown, key=lambda item: list(rows).index(item[0])):
        cost_pct = record.overhead_pct(entry.rerun_cost)
        table.append(
            [
                name,
                format_bytes(entry.saved_bytes),
                format_bytes(entry.kept_bytes),
                str(entry.rerun_ops),
                f"{cost_pct:.2f}",
            ]
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *cells]))
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more layers, which cost less")
    return "\n".join(lines)
