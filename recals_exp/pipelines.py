"""A configured pipeline in one process, in the shape the runner measures: a plain loop, and the same work as a strategy.

    PlainLoop(model)        the model over the micro-batches, one after the other: the baseline of every comparison
    PipelineStrategy.bind   a `ModelPipeline` of the same model's parts, each stage under its budget

Why a strategy: parity, memory, FLOPs and timing compare a model with something bound to it, and a pipeline is such a thing.

Rules the code follows:

1. What is not said otherwise holds for every stage: ``budget=0.25`` is a quarter of each stage's own cache, ``budget=64MiB`` is
   64 MiB for each stage; ``pipeline.budgets`` replaces it stage by stage.
2. The layout is found once, with the first model that is bound, and kept: copies for checks are cut where the measured model is.
3. The result comes back to the device of the input. Where stages live elsewhere than the model did, the plain loop runs on
   the same stages without their budgets.
4. A rate-coded model's micro-batches are its time steps; its rows are not split.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recals_exp.configerror import ConfigError
from recals_exp.models.snn import RateCoded, rate_forward
from recals_exp.pipeline import Event, Layout, LayoutSpec, ModelPipeline, build_pipeline, draw_timeline, format_layout
from recals_exp.pipeline.batch import merge_outputs, plan_rows, size_for
from recals_exp.pipeline.devices import existing_devices
from recals_exp.pipelinespec import PipelineSpec
from recals_exp.recals import POLICIES, Recals, Stats, recals_with_rngs
from recals_exp.runconfig import Budget, PartSpec, RunConfig
from recals_exp.strategies import NO_BUDGET, BoundStrategy, Strategy, Terms, make_strategy

log = logging.getLogger(__name__)


class PlainLoop(nn.Module):
    """The model over the micro-batches of a batch, one after the other, and the results joined."""

    def __init__(self, model: nn.Module, spec: PipelineSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        self.stages_elsewhere: tuple[BoundPipeline, ...] = ()  # in a tuple, so that it is no child (rule 3)

    def sizes(self, rows: int) -> tuple[int, ...]:
        """The rows of each micro-batch."""
        size = self.spec.split_size
        if size is None and self.spec.n_micro_batches is not None:
            size = size_for(rows, self.spec.n_micro_batches, self.spec.ragged)
        return (rows,) if size is None else plan_rows(rows, size, self.spec.ragged)

    def forward(self, x: Tensor) -> Any:
        for bound in self.stages_elsewhere:
            with bound.pipe.unbudgeted():
                return bound(x)
        return merge_outputs([self.model(piece) for piece in x.split(self.sizes(len(x)))])


@final
class PipelineStrategy(Strategy):
    """A pipeline of the model's parts; the strategy and the policy of the configuration hold within each stage."""

    budget_kind = NO_BUDGET  # each stage has its own (rule 1): there is no limit for the whole to bind with

    def __init__(self, config: RunConfig, example: Tensor) -> None:
        self._config = config
        self._stage_strategy = make_strategy(
            config.strategy, config.policy, config.policy_kwargs, **config.strategy_kwargs
        )
        self.name = self._stage_strategy.name
        self._spec = layout_spec(config)
        self._spec.place()  # refuse devices before anything is traced or measured
        self._example = example
        self._layout: Layout | None = None

    @property
    def terms(self) -> Terms:
        return self._stage_strategy.terms

    @property
    def policy(self) -> str:
        return self._stage_strategy.policy

    def bind(self, model: nn.Module, limit: float | None) -> BoundPipeline:
        assert isinstance(model, PlainLoop)
        assert limit is None
        inner = model.model
        rate_coded = isinstance(inner, RateCoded)
        if rate_coded and len(model.sizes(len(self._example))) > 1:
            raise ConfigError(
                f"pipeline.n_micro_batches={self._spec.n_micro_batches} and split_size={self._spec.split_size} with "
                f"{self._config.model.name}: a rate-coded model's micro-batches are its time steps; set "
                "pipeline.n_micro_batches=1"
            )
        spec = self._spec
        if self._layout is not None:  # rule 2
            counts = tuple(last - first for first, last in itertools.pairwise(self._layout.bounds))
            spec = dataclasses.replace(spec, cuts=(), balance=counts)
        devices = {device for device in (*self._spec.place(), self._example.device) if device.type != "cpu"}
        kind = next((device.type for device in devices), "cuda")  # of which there is one on a machine
        with torch.random.fork_rng(devices=list(devices), device_type=kind):
            pipe, layout = build_pipeline(inner.step if isinstance(inner, RateCoded) else inner, spec, self._example)
        if self._layout is None:
            log.info("layout:\n%s", format_layout(layout))
            self._layout = layout
        bound = BoundPipeline(pipe, layout, inner.time_steps if isinstance(inner, RateCoded) else None)
        if any(stage.device != self._example.device for stage in pipe.stages):
            model.stages_elsewhere = (bound,)
        return bound


@final
class BoundPipeline(BoundStrategy):
    """A pipeline that is called like the model it was made of."""

    def __init__(self, pipe: ModelPipeline, layout: Layout, time_steps: int | None) -> None:
        self.pipe = pipe
        self.layout = layout
        self.time_steps = time_steps  # of a rate-coded model

    def __call__(self, x: Tensor) -> Any:
        result = self.pipe(x) if self.time_steps is None else rate_forward(self.pipe, x, self.time_steps)
        return pytree.tree_map_only(Tensor, lambda value: value.to(x.device), result)

    @property
    def caches(self) -> tuple[Recals, ...]:
        """The stages' caches, each once."""
        found = (stage.budget.recals for stage in self.pipe.stages)
        return tuple({id(cache): cache for cache in found if isinstance(cache, Recals)}.values())

    @property
    def limit_bytes(self) -> int | None:
        """The stages' limits together; None if one has none."""
        limits = [cache.cache_limit_bytes for cache in self.caches]
        return sum(limit for limit in limits if limit is not None) if limits and None not in limits else None

    @property
    def stats(self) -> Stats | None:
        """The stages' accounts added up: peaks are those of each stage, which need not fall together."""
        accounts = [cache.stats for cache in self.caches]
        if not accounts:
            return None
        names = [item.name for item in dataclasses.fields(Stats)]
        return Stats(**{name: sum(getattr(account, name) for account in accounts) for name in names})

    def reset_stats(self) -> None:
        for cache in self.caches:
            cache.reset_stats()


# -- from the configuration to what the library takes ----------------------------------------------------------------


def layout_spec(config: RunConfig) -> LayoutSpec:
    """The library's layout for a configuration."""
    spec = config.pipeline
    n_stages = spec.n_stages
    told = n_stages or spec.cuts or not isinstance(spec.balance, str) or max(len(spec.devices), len(spec.budgets)) > 1
    if not told and not spec.over_processes and len(existing_devices()) <= 2:  # the CPU, and one accelerator at most
        n_stages = 2
    return LayoutSpec(
        devices=spec.devices,
        n_stages=n_stages,
        cuts=spec.cuts,
        balance=spec.balance,
        units=spec.units,
        budgets=stage_budgets(config),
        n_micro_batches=spec.n_micro_batches,
        split_size=spec.split_size,
        ragged=spec.ragged,
        threads=spec.threads,
        policy=functools.partial(make_recals, config.policy, dict(config.policy_kwargs), dict(config.strategy_kwargs)),
        optimizer_states=optimizer_states(config.optimizer),
    )


def stage_budgets(config: RunConfig) -> tuple[Any, ...]:
    """What each stage may cache, as the library takes it (rule 1); -1 measures without a limit."""
    if config.strategy == "none":
        return (None,)
    own = [config.budget if budget is None else Budget.parse(budget) for budget in config.pipeline.budgets]
    values: dict[str, Callable[[Budget], Any]] = {
        "none": lambda budget: -1,
        "fraction": lambda budget: float(budget.value),
        "bytes": lambda budget: int(budget.value),
    }
    return tuple(values[budget.kind](budget) for budget in own or [config.budget])


def make_recals(policy: str, policy_options: Mapping[str, Any], options: Mapping[str, Any], limit_bytes: int) -> Recals:
    """The cache of one stage; one policy serves one cache."""
    return recals_with_rngs(
        limit_bytes,
        options.get("gpu_devices", "all"),
        policy=POLICIES[policy](**policy_options),
        audit=options.get("audit", "first"),
    )


def optimizer_states(optimizer: PartSpec) -> float:
    """Tensors of a parameter's size that the optimizer keeps; Adam's two where it is not known."""
    if optimizer.target.rpartition(".")[2] == "SGD":
        return 1.0 if optimizer.kwargs.get("momentum") else 0.0
    return 2.0


# -- the picture -----------------------------------------------------------------------------------------------------

TIMELINE_FILE = "timeline.png"


def write_timeline(events: Sequence[Event], folder: Path, title: str) -> bytes:
    """Write `timeline.png` of one step (stage x time: forward, backward, recomputation) and return its bytes."""
    draw_timeline(events, folder / TIMELINE_FILE, title)
    return (folder / TIMELINE_FILE).read_bytes()
