"""What a cache limit will cost, before training: the whole curve of every policy, the bound and the peak, from one step.

Why not measure a sweep: a point costs many steps and says nothing about its neighbours. One step recorded with nothing dropped
(`profile_step`) is enough for all of them: policies are simulated by the engine's own code, plans are judged, the bound is
proved, and the step's memory is put together as ``step_memory.py`` says.

Rules
1. A budget is a fraction in (0, 1] of what the step caches with no limit, or bytes; rows carry both.
2. Overheads are percent of one plain step in the record's cost unit (``record.py``). With measured costs they count what recording
   and dropping take beside the ops that are re-run; the bound then counts recording, too, which no policy is spared.
3. What no limit can do is refused, with the smallest that works: a value that does not fit, or pinned bytes.
4. ``planned`` costs planning time: ``effort`` scales it (1: what the engine spends on a plan). More effort never costs more, nor does
   a plan ever cost more than DTR, FIFO or a plan for less, in ops that are re-run: what dropping takes beside them is not planned for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .bare_step import BareStep, RunStep
from .errors import CacheLimitError
from .measured import COSTS, ENOUGH_S, with_measured_costs
from .policies import POLICIES, Fifo, Planned, Policy
from .profiling import record_of
from .record import SOURCE, TapeRecord
from .simulate import following, pinned_bytes, rivals_of, simulate
from .sizes import format_bytes, parse_bytes
from .step_memory import LiveBytes, StepMemory, step_memory
from .trace import Trace

if TYPE_CHECKING:
    from .planning.ceiling import Totals
    from .planning.plan import Plan
    from .recals import Recals

BUDGETS: tuple[float | int | str, ...] = (0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
"""The budgets of a curve unless others are asked for."""

EFFORT = 0.25
"""Work for a plan of a curve, in units of what the engine spends (rule 4)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One step as it was seen: its record and its memory beside the cache."""

    record: TapeRecord
    memory: StepMemory

    @property
    def cache_total_bytes(self) -> int:
        """Bytes cached with no limit: the budget of 1."""
        return simulate(self.record, None, "fifo").peak_cached_bytes

    @property
    def smallest_limit_bytes(self) -> int:
        """The smallest limit with which the engine runs the step (rule 3)."""
        return smallest_limit_bytes(self.record)


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One policy at one budget."""

    policy: str
    budget: float  # cache_limit_bytes as a fraction of what the step caches with no limit
    cache_limit_bytes: int
    predicted_overhead_pct: float  # percent of a plain step: re-run ops, and with measured costs what the engine takes
    bound_overhead_pct: float  # no policy costs less
    documented_overhead_pct: float  # (1/budget - 1)/6: FIFO on equal layers
    peak_memory_bytes: int  # of the whole step: resident + beside the cache + cache + working set


@dataclass(frozen=True, slots=True)
class Prediction:
    """The price of every budget. ``rows`` stand by policy, then by rising budget."""

    rows: tuple[PredictionRow, ...]
    profile: Profile
    cache_total_bytes: int
    smallest_limit_bytes: int
    refused: tuple[float, ...]  # standard budgets left out: below the smallest limit

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    def curve(self, policy: str) -> tuple[PredictionRow, ...]:
        """The rows of one policy, by rising budget."""
        rows = tuple(row for row in self.rows if row.policy == policy)
        if not rows:
            raise ValueError(f"policy={policy!r} is not in this prediction; there are: {', '.join(self.policies)}")
        return rows

    def knee(self, policy: str) -> PredictionRow:
        """Where a smaller budget begins to cost much: see `knee`."""
        rows = self.curve(policy)
        return rows[knee([(row.budget, row.predicted_overhead_pct) for row in rows])]


def knee(points: Sequence[tuple[float, float]]) -> int:
    """Index of the knee of a curve of (budget, overhead) by rising budget: the point farthest below its chord.

    Both axes are scaled to [0, 1] over the points given; the chord joins the first point and the last. Of equal distances
    the smaller budget counts. On a curve that costs nothing anywhere that is the smallest budget.
    """
    if not points:
        raise ValueError("a curve without points has no knee")
    (x0, y0), (x1, y1) = points[0], points[-1]
    width, height = x1 - x0, y0 - y1
    if width <= 0 or height <= 0:
        return 0
    below = [1 - (x - x0) / width - (y - y1) / height for x, y in points]
    best = max(below)
    return next(i for i, distance in enumerate(below) if distance >= best - 1e-12)


def documented_overhead_pct(budget: float) -> float:
    """FIFO on a chain of equal layers, backward = 2 x forward: (1/b - 1)/6 of a step."""
    return 100 * (1 / budget - 1) / 6


# -- one step --------------------------------------------------------------------------------------------------------------


def profile_run(
    recals: Recals,
    run: RunStep,
    device: torch.device,
    resident_bytes: int,
    *,
    reset: Callable[[], None] = lambda: None,
    costs: str = "model",
    enough_s: float = ENOUGH_S,
) -> Profile:
    """Watch one training step with nothing dropped.

    Args:
        recals: whose knowledge of ops is used; its cache is not touched.
        run: the step; see `RunStep`. It must start with no gradients, and call the model once.
        device: where the model's memory is.
        resident_bytes: there before the step and throughout.
        reset: puts the state back that ``run`` starts from; called before every further step.
        costs: ``"model"``, or ``"measured"``: more steps are run, and timed (``measured.py``).
        enough_s: for how long, if that is five rounds of six steps or more.
    """
    if costs not in COSTS:
        raise ValueError(f"costs={costs!r} is not known; there are: {', '.join(COSTS)}")
    watched = recals.unlimited(Fifo())
    live = LiveBytes(device)
    trace = Trace(live.mark)

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            watched.cache.trace = trace
            out = watched(fn, *args, **kwargs)
            trace.returned(watched._values_of(out))
            return out

        return call

    with torch.enable_grad(), live.watching():
        run(wrap)
    watched.cache.trace = None
    record = record_of(trace, device.type, watched.cache.peak_pinned_bytes)
    memory = step_memory(record, live, resident_bytes)
    if costs == "measured":
        record = with_measured_costs(recals, record, run, device, reset, enough_s)
    return Profile(record, memory)


def profile_call(recals: Recals, fn: Callable[..., Any], args: Any, kwargs: Any, costs: str = "model") -> Profile:
    """`profile_run` of a bare step: forward of ``fn`` and backward from gradients of ones; no loss, no optimizer.

    Buffers, generators and gradients are left as they were.
    """
    with BareStep(fn, args, kwargs) as step:
        return profile_run(recals, step, step.device, step.resident_bytes, reset=step.reset, costs=costs)


# -- the curve -------------------------------------------------------------------------------------------------------------


def predict(
    profile: Profile,
    budgets: Iterable[float | int | str] | None = None,
    policies: Iterable[str] = ("fifo", "dtr", "planned"),
    effort: float = EFFORT,
) -> Prediction:
    """The price of every budget under every policy.

    Args:
        profile: of one step.
        budgets: fractions in (0, 1], or bytes ("512MiB", or a whole number above 1); default: `BUDGETS`, of which those
            below the smallest limit are left out.
        policies: names.
        effort: of planning (rule 4).

    Raises:
        ValueError: an unknown policy, or a budget that is neither a fraction nor bytes.
        CacheLimitError: a budget that was asked for lies below the smallest limit (rule 3).
    """
    names = list(dict.fromkeys(policies))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ValueError(f"policies={names} is not allowed: use one or more of {', '.join(sorted(POLICIES))}")
    total, smallest = profile.cache_total_bytes, profile.smallest_limit_bytes
    asked = BUDGETS if budgets is None else tuple(budgets)
    limits = {budget: budget_bytes(budget, total) for budget in asked}
    too_small = [budget for budget, limit in limits.items() if limit < min(smallest, total)]
    if too_small and budgets is not None:
        limit = limits[too_small[0]]
        raise CacheLimitError(
            f"the budget {too_small[0]!r} is a cache limit of {limit} bytes, the smallest that works for this step is "
            f"{smallest} bytes ({format_bytes(smallest)}, a budget of {smallest / total:.3g}); use that or more.",
            limit_bytes=limit,
            needed_bytes=smallest,
            smallest_bytes=smallest,
            layer="",
        )
    usable = sorted({limit for budget, limit in limits.items() if budget not in too_small})
    bounds, totals = Bounds(profile.record), totals_of(profile)
    rows: list[PredictionRow] = []
    for name in names:
        for limit, policy in zip(usable, _bind(profile.record, name, usable, effort, totals), strict=True):
            fraction = min(1.0, limit / total) if total else 1.0
            rows.append(
                PredictionRow(
                    policy=name,
                    budget=fraction,
                    cache_limit_bytes=limit,
                    predicted_overhead_pct=simulate(profile.record, limit, policy()).total_pct,
                    bound_overhead_pct=bounds.overhead_pct(limit) + profile.record.recording_pct,
                    documented_overhead_pct=documented_overhead_pct(fraction),
                    peak_memory_bytes=profile.memory.peak_bytes(profile.record, limit, policy()),
                )
            )
    refused = tuple(float(budget) for budget in too_small)
    return Prediction(tuple(rows), profile, total, smallest, refused)


def budget_bytes(budget: float | int | str, total_bytes: int) -> int:
    """The limit that a budget means (rule 1)."""
    if isinstance(budget, str) or (isinstance(budget, int) and not isinstance(budget, bool) and budget > 1):
        return parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget!r} is not allowed: use a fraction in (0, 1] of the {total_bytes} bytes that the step caches, "
            "or bytes such as '512MiB'"
        )
    return int(budget * total_bytes * (1 + 1e-12))


class Bounds:
    """The proven lower bound of one record at any limit; each is solved once."""

    def __init__(self, record: TapeRecord) -> None:
        from .planning.bound import BoundModel  # here: SciPy takes a second to load, and `Recals` imports this module

        self._model = BoundModel(record)
        self._pinned_bytes = pinned_bytes(record)
        self._most_bytes = simulate(record, None, "fifo").peak_cached_bytes
        self._known: dict[int, float] = {}

    def overhead_pct(self, limit_bytes: int) -> float:
        """No policy re-runs less within ``limit_bytes``; percent of a plain step."""
        if limit_bytes >= self._most_bytes:
            return 0.0
        if limit_bytes not in self._known:
            self._known[limit_bytes] = self._model.solve(limit_bytes - self._pinned_bytes).overhead_pct
        return self._known[limit_bytes]


def predicted_overhead_pct(record: TapeRecord, limit_bytes: int | None, policy: str, plan: Plan | None = None) -> float:
    """What a step within one limit takes more than a plain one, in percent: re-run ops, and with measured costs the engine itself.

    ``plan``: what ``planned`` follows; without one, the plan that the engine itself would make.
    """
    if limit_bytes is None:
        return record.recording_pct
    make = _bind(record, policy, [limit_bytes], effort=1.0)[0] if plan is None else _follower(record, plan)
    return simulate(record, limit_bytes, make()).total_pct


def totals_of(profile: Profile) -> Totals:
    """The step's bytes under a plan, as the planner asks for them."""
    record, memory = profile.record, profile.memory
    with_everything = memory.totals(record, None, Fifo.name)

    def totals(plan: Plan | None) -> list[int]:
        if plan is None:
            return with_everything
        return memory.totals(record, plan.limit_bytes + pinned_bytes(record), following(record, plan))

    return totals


def smallest_limit_bytes(record: TapeRecord) -> int:
    """The smallest limit with which the engine runs the step (rule 3)."""
    largest = max((v.nbytes for v in record.values if v.saved and v.producer != SOURCE), default=0)
    return max(1, largest, pinned_bytes(record))


def _bind(
    record: TapeRecord, name: str, limits: list[int], effort: float, totals: Totals | None = None
) -> list[Callable[[], Policy]]:
    """For every limit (ascending) a maker of the policy as it acts there; a policy serves one simulation."""
    if name != Planned.name:
        return [POLICIES[name] for _ in limits]
    from .planning.planner import make_plans

    pinned, total = pinned_bytes(record), simulate(record, None, "fifo").peak_cached_bytes
    rooms = [limit - pinned for limit in limits if limit < total]
    rivals = {room: rivals_of(record, room) for room in rooms}
    made = make_plans(record, rooms, effort=effort, others=rivals, totals=totals) if rooms else ()
    plans = [planned.plan for planned in made]
    makers = [_follower(record, plan) for plan in plans]
    return [*makers, *[Fifo for _ in limits[len(plans) :]]]  # with room for everything any policy holds everything


def _follower(record: TapeRecord, plan: Plan) -> Callable[[], Policy]:
    return lambda: following(record, plan)


def format_prediction(prediction: Prediction) -> str:
    """A table for people: a row per budget, and where the knee of each policy is."""
    policies = prediction.policies
    heads = ["budget", "limit", "documented", *policies, "bound", *[f"peak, {name}" for name in policies]]
    curves = [prediction.curve(name) for name in policies]
    lines = [heads]
    for rows in zip(*curves, strict=True):
        first = rows[0]
        lines.append(
            [
                f"{100 * first.budget:.3g} %",
                format_bytes(first.cache_limit_bytes),
                f"{first.documented_overhead_pct:.1f} %",
                *[f"{row.predicted_overhead_pct:.1f} %" for row in rows],
                f"{first.bound_overhead_pct:.1f} %",
                *[format_bytes(row.peak_memory_bytes) for row in rows],
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    knees = ", ".join(f"{name} {100 * prediction.knee(name).budget:.3g} %" for name in policies)
    text.append(f"knee: {knees}")
    text.append(
        f"the step caches {format_bytes(prediction.cache_total_bytes)}; the smallest limit that works is "
        f"{format_bytes(prediction.smallest_limit_bytes)}"
    )
    if prediction.refused:
        text.append(f"below it, so not shown: {', '.join(f'{100 * budget:.3g} %' for budget in prediction.refused)}")
    return "\n".join(text)
