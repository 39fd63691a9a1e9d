"""What the timed benchmarks share: interleaved steps, measured peaks, and the policy that follows one plan."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from networks import Training

from recals_exp.meters.memory import step_peak_bytes
from recals_exp.meters.parity import same_bits
from recals_exp.meters.steps import Forward, StartingState, unique_storage_bytes
from recals_exp.meters.timing import median_interval, steady_process
from recals_exp.predict import profile_training_step
from recals_exp.recals import Recals, StepPlan, recals_with_rngs
from recals_exp.recals.measured import ENOUGH_S, Beside, now_s, steadier_half
from recals_exp.recals.policies import Planned
from recals_exp.recals.prediction import Profile

MIB = 1 << 20


@dataclass(frozen=True)
class Overhead:
    """Of steps relative to the plain step beside each."""

    median_pct: float
    low_pct: float  # of the 95 % interval of the median
    high_pct: float

    def __str__(self) -> str:
        return f"{self.median_pct:.1f} % [{self.low_pct:.1f}, {self.high_pct:.1f}]"


def start(training: Training) -> StartingState:
    """The state after one plain step: what everything is measured from."""
    training.step(training.step.model, *training.batch)
    return StartingState(training.step, 0)


def profile_of(training: Training, state: StartingState, costs: str, enough_s: float = ENOUGH_S) -> Profile:
    recals = recals_with_rngs(-1)
    recals.audit(training.step.model, training.batch[0])
    return profile_training_step(training.step, state, recals, training.batch, costs, enough_s)


def following(limit_bytes: int, step_plan: StepPlan) -> Recals:
    """A ``Recals`` that follows the plan from its second step on."""
    policy = Planned(waits=True)
    policy.load([step_plan])
    return recals_with_rngs(limit_bytes, policy=policy)


def called(training: Training, recals: Recals) -> Forward:
    model = training.step.model
    return lambda *args: recals(model, *args)


def followed(recals: Recals) -> int:
    """Steps that followed a plan to their end."""
    policy: Any = recals.cache.policy
    return policy.steps_followed if isinstance(policy, Planned) else 0


def peak_bytes(training: Training, state: StartingState, forward: Forward) -> int:
    """The measured peak of a step, parameters and batch included, as a run reports it. Two steps go before: audit, plan."""
    step = training.step
    for _ in range(2):
        state.restore()
        step(forward, *training.batch)
    state.restore()
    resident = unique_storage_bytes(step.resident_tensors(*training.batch))
    return resident + step_peak_bytes(lambda: _discard(step(forward, *training.batch)), step.device)


def _discard(_: object) -> None:
    pass


def overheads(
    training: Training, state: StartingState, forwards: Mapping[str, Forward], rounds: int
) -> dict[str, Overhead]:
    """Every way to run the step in turn, round by round; each against the plain steps before and after it.

    Of the rounds of each, that half counts in which the machine's speed changed least (`measured.py`, rule 1). With one thread on the
    CPU: CPU time of that thread, which a busy machine does not disturb (rule 6).
    """
    steps: dict[str, list[Beside[float]]] = {name: [] for name in forwards}
    device = training.step.device

    with steady_process() as collect:

        def run(forward: Forward) -> tuple[float, Any]:
            state.restore()
            collect()
            begin = now_s(device)
            outcome = training.step(forward, *training.batch)
            return now_s(device) - begin, outcome.loss

        before_s, loss = run(training.step.model)
        for number in range(rounds):
            names = list(forwards)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                taken_s, wrapped_loss = run(forwards[name])
                after_s, plain_loss = run(training.step.model)
                if not (same_bits(loss, wrapped_loss) and same_bits(loss, plain_loss)):
                    raise RuntimeError("the losses of the steps of one round differ: these are not the same step")
                steps[name].append(Beside(taken_s, before_s, after_s))
                before_s = after_s
    state.restore()
    gc.collect()
    found = {}
    for name, taken in steps.items():
        values = [each.taken / each.plain_s for each in steadier_half(taken)]
        low, high, _ = median_interval(values)
        found[name] = Overhead(100 * (statistics.median(values) - 1), 100 * (low - 1), 100 * (high - 1))
    return found
