"""What budgets will cost, for a configured training step: the profile, the files, and the limit that makes a peak fit.

The computing is the engine's (``recals/prediction.py``); here it gets a whole step, with its loss and its optimizer, and its
answer is written: ``prediction.csv``, ``prediction.png`` and ``prediction.txt``.

Rules the code follows:

1. A step in the middle of training is profiled, so that the optimizer's state exists. Weights, buffers and optimizer are put
   back afterwards; what a model keeps in Python attributes moves on.
2. `prediction.csv` has exactly the columns of a `PredictionRow`, in bytes and percent.
3. A target for the peak is met by measuring, with the meter that the run reports (`meters/memory.py`): prediction only says
   where to begin, or what to plan for.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from recals_exp.figures import Curve, prediction_png
from recals_exp.meters.heap import freed_memory_kept
from recals_exp.meters.memory import step_peak_bytes
from recals_exp.meters.steps import StartingState, TrainStep, unique_storage_bytes
from recals_exp.recals import Prediction, PredictionRow, Recals, StepPlan, format_bytes, format_prediction
from recals_exp.recals.measured import ENOUGH_S
from recals_exp.recals.peaks import plan_for_peak
from recals_exp.recals.prediction import Profile, profile_run
from recals_exp.recals.simulate import pinned_bytes
from recals_exp.strategies import Strategy

CSV_FILE = "prediction.csv"
FIGURE_FILE = "prediction.png"
TABLE_FILE = "prediction.txt"
COLUMNS = tuple(field.name for field in dataclasses.fields(PredictionRow))

CLOSE_ENOUGH = 0.05
"""A peak may lie this share below its target."""

_AIM = 0.98  # of the target
_TRIES = 10
_TRIES_FOR_MORE = 3  # plans, while a peak is further below its target than that


class TargetPeakError(ValueError):
    """No cache limit makes the step's peak fit."""

    def __init__(self, message: str, target_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.target_bytes = target_bytes
        self.smallest_bytes = smallest_bytes  # the smallest peak that was measured


# -- the step --------------------------------------------------------------------------------------------------------


@contextmanager
def amid_training(step: TrainStep, batch: tuple[Tensor, Tensor], seed: int) -> Iterator[StartingState]:
    """The state after one step, for measuring from; everything is put back at the end (rule 1)."""
    before = StartingState(step, seed)
    try:
        step(step.model, *batch)
        yield StartingState(step, seed)
    finally:
        before.restore()


def profile_training_step(
    step: TrainStep,
    state: StartingState,
    recals: Recals,
    batch: tuple[Tensor, Tensor],
    costs: str = "model",
    enough_s: float = ENOUGH_S,
) -> Profile:
    """One step (forward, loss, backward, optimizer) with nothing dropped: its record, and its memory beside the cache."""
    state.restore()
    resident = unique_storage_bytes(step.resident_tensors(*batch))
    with freed_memory_kept() if costs == "measured" else nullcontext():
        return profile_run(
            recals,
            lambda wrap: step(wrap(step.model), *batch),
            step.device,
            resident,
            reset=state.restore,
            costs=costs,
            enough_s=enough_s,
        )


def measured_peak_bytes(
    step: TrainStep, state: StartingState, strategy: Strategy, limit: float | None, batch: tuple[Tensor, Tensor]
) -> int:
    """The real peak of a step under the strategy within a limit, as a run reports it. Its first step may plan."""
    bound = strategy.bind(step.model, limit)
    state.restore()
    step(bound, *batch)
    state.restore()
    resident = unique_storage_bytes(step.resident_tensors(*batch))
    return resident + step_peak_bytes(lambda: _discard(step(bound, *batch)), step.device)


def _discard(_: object) -> None:
    pass


# -- a limit for a peak ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A cache limit, the peak that was measured with it, and how it was found."""

    limit_bytes: int
    peak_bytes: int
    tries: tuple[tuple[int, int], ...]  # (limit, peak) in the order of measuring
    plan: StepPlan | None = None  # keeps the peak within the limit; None: none is needed, or the policy makes none


def fit_limit(
    target_bytes: int,
    peak_of: Callable[[int], int],
    predicted_peak_of: Callable[[int], int],
    smallest_limit_bytes: int,
    total_bytes: int,
) -> Fit:
    """The largest limit found whose measured peak is at most the target, and within `CLOSE_ENOUGH` of it where one is.

    Begins where the prediction meets the target, then moves by what was measured (secant steps within a bracket, halves
    where they stall). With room for the whole cache the limit is ``total_bytes``.

    Args:
        target_bytes: the most that the whole step may take.
        peak_of: measures the peak with a limit.
        predicted_peak_of: a cheap estimate of the same.
        smallest_limit_bytes: below it the step is refused.
        total_bytes: cached with no limit.

    Raises:
        TargetPeakError: not even the smallest limit makes it fit; says what the smallest peak is.
    """
    tries: dict[int, int] = {}

    def measure(limit: int) -> int:
        if limit not in tries:
            tries[limit] = peak_of(limit)
        return tries[limit]

    low, high = min(smallest_limit_bytes, total_bytes), total_bytes
    aim = round(_AIM * target_bytes)
    guess = _where(predicted_peak_of, aim, low, high)
    fits: int | None = None
    while len(tries) < _TRIES and low <= high:
        peak = measure(guess)
        if peak <= target_bytes:
            fits, low = guess, guess
            if guess == high or peak >= (1 - CLOSE_ENOUGH) * target_bytes:
                break
        else:
            if guess == low:
                break
            high = guess if fits is None else min(high, guess)
        guess = _next(tries, guess, aim, low, high, fits)
        if guess in tries:
            break
    if fits is None:
        smallest_peak = min([*tries.values(), measure(min(smallest_limit_bytes, total_bytes))])
        if smallest_peak > target_bytes:
            raise _unmet(target_bytes, smallest_peak)
    fits = max(limit for limit, peak in tries.items() if peak <= target_bytes)
    return Fit(fits, tries[fits], tuple(tries.items()))


def fit_plan(
    target_bytes: int,
    profile: Profile,
    peak_of: Callable[[int, tuple[StepPlan, ...]], int],
    smallest_limit_bytes: int,
    effort: float = 1.0,
) -> Fit:
    """The cheapest plan found whose measured peak is at most the target.

    The planner holds the predicted peak below the target; where more is measured, it aims lower by as much.

    Args:
        target_bytes: the most that the whole step may take.
        profile: of the step.
        peak_of: measures the peak with a limit and plans for it (none: nothing is dropped).
        smallest_limit_bytes: below it the step is refused.
        effort: of planning.

    Raises:
        TargetPeakError: no plan fits; says what the smallest peak found is.
    """
    record, total = profile.record, profile.cache_total_bytes
    tries: list[tuple[int, int]] = []
    aim = target_bytes
    if profile.memory.peak_bytes(record, None, "fifo") <= aim:
        tries.append((total, peak_of(total, ())))
        if tries[-1][1] <= target_bytes:
            return Fit(total, tries[-1][1], tuple(tries))
        aim -= tries[-1][1] - target_bytes
    found: Fit | None = None
    cheapest = math.inf
    while len(tries) < _TRIES:
        plan, predicted = plan_for_peak(profile, aim, effort)
        limit = max(plan.plan.limit_bytes + pinned_bytes(record), smallest_limit_bytes)
        peak = peak_of(limit, (plan,))
        tries.append((limit, peak))
        if peak <= target_bytes:
            if plan.plan.overhead_pct < cheapest:
                found, cheapest = Fit(limit, peak, (), plan), plan.plan.overhead_pct
            if peak >= (1 - CLOSE_ENOUGH) * target_bytes or len(tries) > _TRIES_FOR_MORE:
                break
            aim += (target_bytes - peak) // 2  # room is left: a plan for a little more may fit
        elif found is not None or predicted > aim:
            break
        else:
            aim -= peak - target_bytes
    if found is None:
        raise _unmet(target_bytes, min(peak for _, peak in tries))
    return replace(found, tries=tuple(tries))


def _unmet(target_bytes: int, smallest_peak: int) -> TargetPeakError:
    return TargetPeakError(
        f"target_peak: {target_bytes} bytes ({format_bytes(target_bytes)}) cannot be met by any cache limit: the "
        f"smallest feasible peak of this step is {smallest_peak} bytes ({format_bytes(smallest_peak)}); raise the "
        "target to that, or use a smaller batch",
        target_bytes,
        smallest_peak,
    )


def _where(predicted_peak_of: Callable[[int], int], aim: int, low: int, high: int) -> int:
    """The largest limit whose predicted peak is at most ``aim``, to half a percent of the range."""
    if predicted_peak_of(high) <= aim:
        return high
    step = max(1, (high - low) // 200)
    while high - low > step:
        middle = (low + high) // 2
        if predicted_peak_of(middle) <= aim:
            low = middle
        else:
            high = middle
    return low


def _next(tries: dict[int, int], guess: int, aim: int, low: int, high: int, fits: int | None) -> int:
    """Where to measure next: as far as the peak is off, but inside the bracket; its middle where that is no news."""
    moved = guess + aim - tries[guess]
    if high in tries and tries[high] <= aim:  # unreached so far: everything may fit
        return high
    if fits is None and moved <= low:
        return low
    if moved >= high and high not in tries:
        return high
    margin = (high - low) // 20
    if low + margin <= moved <= high - margin and moved not in tries:
        return moved
    return (low + high) // 2


# -- files -----------------------------------------------------------------------------------------------------------


def format_csv(prediction: Prediction) -> str:
    """The rows as CSV (rule 2)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in prediction.rows:
        writer.writerow([getattr(row, column) for column in COLUMNS])
    return buffer.getvalue()


def write_prediction(prediction: Prediction, folder: Path, title: str) -> str:
    """Write the three files and return the table."""
    table = format_prediction(prediction)
    (folder / CSV_FILE).write_text(format_csv(prediction), encoding="utf-8")
    (folder / FIGURE_FILE).write_bytes(prediction_png(_curves(prediction), title))
    (folder / TABLE_FILE).write_text(table + "\n", encoding="utf-8")
    return table


def _curves(prediction: Prediction) -> list[Curve]:
    """Every policy's curve, and the bound's; the figure draws the documented curve itself."""
    curves = []
    for policy in prediction.policies:
        rows = prediction.curve(policy)
        knee = prediction.knee(policy)
        curves.append(
            Curve(
                policy,
                tuple(100 * row.budget for row in rows),
                tuple(row.predicted_overhead_pct for row in rows),
                tuple(row.peak_memory_bytes for row in rows),
                100 * knee.budget,
            )
        )
    rows = prediction.curve(prediction.policies[0])
    bound = Curve("bound", tuple(100 * row.budget for row in rows), tuple(row.bound_overhead_pct for row in rows))
    return [*curves, bound]
