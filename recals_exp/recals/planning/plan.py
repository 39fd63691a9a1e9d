"""A plan: what to hold in forward and what to do on each miss in backward, as plain data.

Why data and not a policy object: a plan is printed, saved, compared, checked by an independent interpreter
(`recals.planning.checker`) and followed by the engine; none of these needs the planner that made it.

Meaning (shared by the planner, the checker, the simulator and the engine)
1. Every value in ``keep`` is a saved one and is held from the moment it is saved. Any other saved value is dropped at once.
   Pinned values are held whatever the plan says and never appear in it.
2. A fetch of a value that is held, external or a source costs nothing. Any other fetch is a *miss*; the ``nth`` miss of a
   value (counted from 0) looks up the step ``(value, nth)``. With no such step the value is rebuilt for this fetch alone.
3. A step first lets go of ``discard`` (held values leave the held set, their bytes may still feed this very rebuild), then
   rebuilds the missed value and every value in ``hold``, re-running each needed op once, in tape order. Needed are the
   ancestors of these targets up to values that are held, discarded just now, external or sources.
4. Every value in ``hold`` enters the held set until its last handle dies (a value that was never saved: until discarded;
   it must be one that the missed value is made from, for nobody else knows it).
   The missed value itself is held only if it is listed. Otherwise it is handed to autograd and stays *at hand*: further
   fetches of it are hits, its bytes are working set, and it is gone at the next miss (before that rebuild) or with its last
   handle. This never raises the peak: between two misses the held set only shrinks.

Format follows the idea of checkpoint schedules as streams of small actions (Griewank & Walther, Revolve, 2000).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FORMAT_VERSION = 1
_HEADER = "recals-plan"


class PlanError(ValueError):
    """A plan's text is not a plan, or a plan does not fit its record or its limit."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do on one miss (rules 2 to 4)."""

    value: int  # the value that autograd asked for and that is not there
    nth: int  # the how-manieth miss of this value, from 0
    discard: tuple[int, ...]  # held values to let go of first
    hold: tuple[int, ...]  # values to rebuild and hold, in tape order; may or may not contain `value`

    def __str__(self) -> str:
        parts = [f"miss {self.value}" + (f"#{self.nth}" if self.nth else "")]
        if self.discard:
            parts.append("discard " + _ids(self.discard))
        if self.hold:
            parts.append("hold " + _ids(self.hold))
        return " | ".join(parts)


@dataclass(frozen=True)
class Plan:
    """Which values to hold, and how to rebuild those that are missed."""

    signature: str  # of the tape record it was made for
    limit_bytes: int  # the held set never exceeds this
    origin: str  # which planner made it, e.g. "multi-level"
    keep: tuple[int, ...]  # values held in forward, ascending (rule 1)
    steps: tuple[Step, ...]  # in the order in which backward reaches them
    overhead_pct: float  # predicted: cost of re-run ops, percent of a plain step
    bound_pct: float | None = None  # no plan within limit_bytes costs less; None: not computed
    format_version: int = FORMAT_VERSION

    @cached_property
    def keep_set(self) -> frozenset[int]:
        """``keep`` for membership tests."""
        return frozenset(self.keep)

    @cached_property
    def step_by_miss(self) -> dict[tuple[int, int], Step]:
        """(value, nth miss of that value) -> step (rule 2)."""
        return {(step.value, step.nth): step for step in self.steps}

    # -- text form -------------------------------------------------------------------------------------------------
    def to_text(self) -> str:
        """One action per line; `from_text` turns it back into an equal plan."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"{_HEADER} {self.format_version}"
        yield f"signature {self.signature}"
        yield f"limit_bytes {self.limit_bytes}"
        yield f"origin {self.origin}"
        yield f"overhead_pct {self.overhead_pct!r}"
        yield f"bound_pct {'none' if self.bound_pct is None else repr(self.bound_pct)}"
        yield f"keep {_ids(self.keep)}".rstrip()
        for step in self.steps:
            yield str(step)
        yield "end"

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The plan that `to_text` wrote."""
        lines = text.splitlines()
        names = (_HEADER, "signature", "limit_bytes", "origin", "overhead_pct", "bound_pct", "keep")
        if len(lines) < len(names) + 1 or lines[-1] != "end":
            raise PlanError(
                f"a plan's text has at least {len(names) + 1} lines and ends with 'end', got {len(lines)} line(s)"
            )
        fields: dict[str, str] = {}
        for number, (name, line) in enumerate(zip(names, lines, strict=False), start=1):
            key, _, value = line.partition(" ")
            if key != name:
                raise PlanError(f"line {number} of the plan should start with {name!r}, got {line!r}")
            fields[name] = value
        if fields[_HEADER] != str(FORMAT_VERSION):
            raise PlanError(
                f"the plan has format version {fields[_HEADER]!r}, this recals reads {FORMAT_VERSION}; plan again"
            )
        first = len(names) + 1
        return cls(
            signature=fields["signature"],
            limit_bytes=int(fields["limit_bytes"]),
            origin=fields["origin"],
            keep=_parse_ids(fields["keep"]),
            steps=tuple(_parse_step(number, line) for number, line in enumerate(lines[first - 1 : -1], start=first)),
            overhead_pct=float(fields["overhead_pct"]),
            bound_pct=None if fields["bound_pct"] == "none" else float(fields["bound_pct"]),
        )

    # -- JSON ------------------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """JSON that `from_json` turns back into an equal plan."""
        return json.dumps(
            {
                "format_version": self.format_version,
                "signature": self.signature,
                "limit_bytes": self.limit_bytes,
                "origin": self.origin,
                "overhead_pct": self.overhead_pct,
                "bound_pct": self.bound_pct,
                "keep": list(self.keep),
                "steps": [[step.value, step.nth, list(step.discard), list(step.hold)] for step in self.steps],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        if data.get("format_version") != FORMAT_VERSION:
            raise PlanError(
                f"the plan has format version {data.get('format_version')!r}, this recals reads {FORMAT_VERSION}; plan again"
            )
        return cls(
            signature=data["signature"],
            limit_bytes=data["limit_bytes"],
            origin=data["origin"],
            keep=tuple(data["keep"]),
            steps=tuple(Step(value, nth, tuple(discard), tuple(hold)) for value, nth, discard, hold in data["steps"]),
            overhead_pct=data["overhead_pct"],
            bound_pct=data["bound_pct"],
        )


def _ids(ids: tuple[int, ...]) -> str:
    """Ascending ids with runs shortened: (1, 2, 3, 7) -> "1-3 7"; any other order is written out."""
    if list(ids) != sorted(set(ids)):
        return " ".join(map(str, ids))
    runs: list[list[int]] = []
    for value in ids:
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _parse_ids(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in text.split():
        low, _, high = part.partition("-")
        ids.extend(range(int(low), int(high or low) + 1))
    return tuple(ids)


def _parse_step(number: int, line: str) -> Step:
    fields: dict[str, str] = {}
    for part in line.split(" | "):
        name, _, value = part.partition(" ")
        if name not in ("miss", "discard", "hold") or name in fields:
            raise PlanError(f"line {number} of the plan is not 'miss V[#N] [| discard ..] [| hold ..]': {line!r}")
        fields[name] = value
    if "miss" not in fields:
        raise PlanError(f"line {number} of the plan names no miss: {line!r}")
    value, _, nth = fields["miss"].partition("#")
    return Step(int(value), int(nth or 0), _parse_ids(fields.get("discard", "")), _parse_ids(fields.get("hold", "")))
