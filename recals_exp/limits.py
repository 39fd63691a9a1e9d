"""From the budget of a job to the limit of its cache, and what a step under that limit will cost."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from recals_exp.datasets import Batch
from recals_exp.meters.steps import StartingState, TrainStep
from recals_exp.predict import Fit, amid_training, fit_limit, fit_plan, measured_peak_bytes, profile_training_step
from recals_exp.recals import Analysis, format_bytes, recals_with_rngs
from recals_exp.recals.peaks import plan_step
from recals_exp.recals.prediction import Bounds, Profile, predict, predicted_overhead_pct
from recals_exp.runconfig import RunConfig
from recals_exp.strategies import NO_BUDGET, SHARE, Strategy, make_strategy, share_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forecast:
    """What is known of a step before it is measured. Percent of a plain step; None where no budget is kept."""

    strategy: Strategy  # follows the plan, where one was made
    predicted_pct: float | None = None
    bound_pct: float | None = None
    planning_s: float | None = None


class Limits:
    """Finds limits for one configuration; a step is profiled at most once."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._profile: Profile | None = None
        self._fit: Fit | None = None  # what keeps `target_peak`

    def choose(self, strategy: Strategy, step: TrainStep, batch: Batch, analysis: Analysis) -> float | None:
        """The limit that the budget means: bytes, or a share for a strategy that takes one."""
        budget, total_bytes = self.config.budget, analysis.total_bytes
        if strategy.budget_kind == NO_BUDGET or budget.kind == "none":
            return None
        if strategy.budget_kind == SHARE:
            return share_of(budget, strategy.name)
        if not budget.is_found_out:
            limit_bytes = budget.limit_bytes(total_bytes)
            log.info("limit: %s bytes", limit_bytes)
            return limit_bytes
        with amid_training(step, batch, self.config.seed) as state:
            profile = self.profile(step, state, batch)
            if budget.kind == "knee":
                knee = predict(profile, policies=[strategy.policy]).knee(strategy.policy)
                log.info("limit: %d bytes, the knee at %.3g of the cache", knee.cache_limit_bytes, knee.budget)
                return knee.cache_limit_bytes
            fit = self._fit = self._fitted(strategy, step, state, batch, analysis)
        shown = ", ".join(f"{format_bytes(peak)} at {format_bytes(limit)}" for limit, peak in fit.tries)
        log.info("limit: %d bytes; measured peaks: %s", fit.limit_bytes, shown)
        return fit.limit_bytes

    def _fitted(
        self, strategy: Strategy, step: TrainStep, state: StartingState, batch: Batch, analysis: Analysis
    ) -> Fit:
        """A plan for the peak where the policy plans; else a limit for it."""
        target, profile = int(self.config.budget.value), self.profile(step, state, batch)
        smallest = max(profile.smallest_limit_bytes, analysis.smallest_limit_bytes)
        if strategy.policy != "planned":
            return fit_limit(
                target,
                lambda limit: measured_peak_bytes(step, state, self._strategy(), limit, batch),
                lambda limit: profile.memory.peak_bytes(profile.record, limit, strategy.policy),
                smallest,
                analysis.total_bytes,
            )
        return fit_plan(
            target,
            profile,
            lambda limit, plans: measured_peak_bytes(step, state, self._strategy(plans=plans), limit, batch),
            smallest,
        )

    def profile(self, step: TrainStep, state: StartingState, batch: Batch) -> Profile:
        """One recorded step, made once."""
        if self._profile is None:
            options = self.config.strategy_kwargs
            recals = recals_with_rngs(-1, options.get("gpu_devices", "all"))
            if options.get("audit", "first") != "off":
                with step.autocast():
                    recals.audit(step.model, batch.x)  # ops that do not come back bit for bit are never re-run
            self._profile = profile_training_step(step, state, recals, batch, self.config.costs)
        return self._profile

    def forecast(self, strategy: Strategy, step: TrainStep, batch: Batch, limit_bytes: int | None) -> Forecast:
        """What a step under `limit_bytes` will cost. A plan that is made for it comes back in the strategy."""
        if not strategy.uses_budget:
            return Forecast(strategy)
        if limit_bytes is None and self.config.costs == "model":
            return Forecast(strategy, predicted_pct=0.0, bound_pct=0.0)
        with amid_training(step, batch, self.config.seed) as state:
            profile = self.profile(step, state, batch)
        record = profile.record
        if limit_bytes is None:
            return Forecast(strategy, record.recording_pct, record.recording_pct)
        if limit_bytes < profile.smallest_limit_bytes:
            log.info("no prediction: the smallest limit that works is %d bytes", profile.smallest_limit_bytes)
            return Forecast(strategy)
        planning_s = plan = None
        if strategy.policy == "planned":
            started = time.perf_counter()
            fit = self._fit
            is_for_peak = fit is not None and fit.plan is not None and fit.limit_bytes == limit_bytes
            step_plan = fit.plan if fit and is_for_peak else plan_step(profile, limit_bytes)
            plan = None if step_plan is None else step_plan.plan
            planning_s = time.perf_counter() - started
            log.info("planned in %.2f s", planning_s)
            if step_plan is not None:
                strategy = self._strategy(plans=(step_plan,))
        predicted = predicted_overhead_pct(record, limit_bytes, strategy.policy, plan)
        bound = Bounds(record).overhead_pct(limit_bytes) + record.recording_pct
        log.info("predicted overhead: %.1f %% (bound: %.1f %%)", predicted, bound)
        return Forecast(strategy, predicted, bound, planning_s)

    def _strategy(self, **options: Any) -> Strategy:
        config = self.config
        return make_strategy(
            config.strategy, config.policy, {**config.policy_kwargs, **options}, **config.strategy_kwargs
        )
