"""One rank of a job whose pipeline runs over processes: everything it measures, as plain data for rank 0.

The same order of work as in the runner, but on every rank at once: build, parity, training, warm-up, memory, FLOPs, one recorded
step, timed pairs. The plain partner is a whole model on rank 0, run over the same micro-batches while the others wait.

Rules the code follows:

1. Every rank does the same steps in the same order; what only rank 0 does stands between two barriers.
2. **Plain** is one process: for each micro-batch forward, its share of the loss, and backward, gradients added up. That holds the
   activations of one micro-batch at a time.
3. A model that draws random numbers draws from the seeds of the pipeline's cells (`cell_seed`) in the plain loop too; one that
   draws nothing runs whole.
4. A pair starts from the same weights, batch, random state and step number on both sides.
"""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recals_exp.datasets import Batch, build_data
from recals_exp.learning import finite_loss
from recals_exp.meters.device import deterministic_algorithms, generator_states, seed_everything, synchronize
from recals_exp.meters.flops import count_flops
from recals_exp.meters.memory import ProcessPeak, process_peak, step_peak_bytes
from recals_exp.meters.parity import StepTrace
from recals_exp.meters.steps import StartingState, StepOutcome, unique_storage_bytes
from recals_exp.models import build_model
from recals_exp.pipeline import DistributedPipeline, Event, Layout, ProcessSpec
from recals_exp.pipelines import layout_spec
from recals_exp.plain_twin import PlainTwin, drop, on_cpu, optimizer_tensors
from recals_exp.recals import Recals, Stats
from recals_exp.records import ParityRecord
from recals_exp.runconfig import RunConfig


@dataclass(frozen=True)
class StageCache:
    """The cache of one stage after the recorded step."""

    stage: int
    limit_bytes: int | None
    stats: Stats


@dataclass(frozen=True)
class PlainReport:
    """What only rank 0 knows."""

    parity: ParityRecord
    cache_total_bytes: int  # what the stages would cache for the micro-batches they hold at once
    unit_max_bytes: int
    outcomes: tuple[StepOutcome, ...]  # one for each pair
    losses_identical: bool
    resident_bytes: int
    step_peak_bytes: int
    process: ProcessPeak
    flops: int


@dataclass(frozen=True)
class RankReport:
    """One rank's share of a job."""

    rank: int
    device: str
    threads: int
    layout: Layout
    in_flight: tuple[int, ...]
    losses: tuple[float, ...]  # of training
    training_s: float
    step_s: tuple[float, ...]  # one for each pair
    resident_bytes: int
    step_peak_bytes: int
    process: ProcessPeak
    flops: int
    events: tuple[Event, ...]  # of the recorded step
    caches: tuple[StageCache, ...]
    plain: PlainReport | None  # on rank 0


def run_rank(config: RunConfig, processes: int) -> RankReport:
    """The whole job of this rank; called on every rank of the process group."""
    with deterministic_algorithms(config.deterministic):
        return _Rank(config, processes).do()


class _Rank:
    def __init__(self, config: RunConfig, processes: int) -> None:
        self.config = config
        spec = config.pipeline
        assert spec.n_micro_batches is not None
        data = build_data(config.dataset)
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.batches = (_of_type(batch, dtype) for batch in data.batches(config.batch_size, config.seed))
        self.batch = next(self.batches)
        seed_everything(config.seed)
        model = build_model(config.model, data).to(dtype).train()
        whole = copy.deepcopy(model) if dist.get_rank() == 0 else None
        layout = layout_spec(config)
        self.pipe = DistributedPipeline(
            model,
            data.loss,
            self.batch.x,
            ProcessSpec(processes, spec.n_micro_batches, spec.schedule, spec.stages_per_process, spec.replicas),
            layout,
        )
        del model  # the other ranks' stages
        self.device = self.pipe.device
        own = list(self.pipe.parameters())
        # a stage without parameters still has an optimizer; a parameter of its own keeps that from complaining
        self.optimizer = config.optimizer.build(own or [nn.Parameter(torch.zeros(()))])
        self.plain: PlainTwin | None = None
        if whole is not None:
            self.plain = PlainTwin(whole.to(self.device), data, config, self.pipe, self.batch, layout.units)

    @property
    def model(self) -> DistributedPipeline:
        """What `StartingState` takes the state of."""
        return self.pipe

    def do(self) -> RankReport:
        config, plain = self.config, self.plain
        before = StartingState(self, config.seed)
        parity = self._parity()
        before.restore()
        losses, training_s = self._train()
        state = StartingState(self, config.seed)
        self._hand_weights_to_plain()
        for _ in range(max(1, config.warmup_steps)):
            self._plainly(lambda twin: twin.step(self.batch))
            self._restored(state)
            self.step(self.batch)
        if plain is not None:
            plain.remember()
        peaks = self._plainly(lambda twin: twin.peaks(self.batch))
        self._restored(state)
        step_peak = step_peak_bytes(lambda: drop(self.step(self.batch)), self.device)
        self._restored(state)
        process = process_peak(lambda: drop(self.step(self.batch)))
        plain_flops = self._plainly(lambda twin: twin.flops(self.batch))
        self._restored(state)
        flops = count_flops(lambda: self.step(self.batch))
        events, caches = self._record(state)
        outcomes, step_s, identical = self._pairs(state)
        resident = [*self.pipe.parameters(), *self.pipe.buffers(), *optimizer_tensors(self.optimizer), *self.batch]
        report = None
        if plain is not None:
            assert parity is not None
            resident_bytes, plain_peak, plain_process = peaks
            report = PlainReport(
                parity,
                plain.cache_total_bytes,
                plain.unit_max_bytes,
                tuple(outcomes),
                identical,
                resident_bytes,
                plain_peak,
                plain_process,
                plain_flops,
            )
        return RankReport(
            rank=dist.get_rank(),
            device=str(self.device),
            threads=torch.get_num_threads(),
            layout=self.pipe.layout,
            in_flight=self.pipe.in_flight,
            losses=losses,
            training_s=training_s,
            step_s=tuple(step_s),
            resident_bytes=unique_storage_bytes(iter(resident)),
            step_peak_bytes=step_peak,
            process=process,
            flops=flops,
            events=events,
            caches=caches,
            plain=report,
        )

    def step(self, batch: Batch) -> float:
        """One step of training; the loss is the same on every rank."""
        loss = self.pipe.step(batch.x, batch.target).loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return loss

    def _parity(self) -> ParityRecord | None:
        """One step against the plain one, from the start (outputs, loss, gradients, buffers, generators)."""
        seed_everything(self.config.seed)
        self.pipe.steps_done = 0
        result = self.pipe.step(self.batch.x, self.batch.target)
        generators = generator_states(self.device)
        outputs = None if result.outputs is None else pytree.tree_map_only(Tensor, on_cpu, result.outputs)
        gradients = {name: on_cpu(parameter.grad) for name, parameter in self.pipe.named_parameters()}
        gathered = self.pipe.gather((outputs, gradients, generators))
        state = self.pipe.state_dict()
        if self.plain is None:
            dist.barrier()
            return None
        assert gathered is not None
        assert state is not None
        parts = [pytree.tree_leaves(out) for out, _, _ in gathered if out is not None]  # one for each replica
        joined = [torch.cat(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True)]
        names = {name for name, _ in self.plain.model.named_parameters(remove_duplicate=False)}
        wrapped = StepTrace(
            outputs={f"output {index}": leaf for index, leaf in enumerate(joined)},
            loss={"loss": result.loss},
            gradients={name: gradient for _, its_gradients, _ in gathered for name, gradient in its_gradients.items()},
            buffers={name: tensor for name, tensor in state.items() if name not in names},
            generators={
                f"{name} on rank {rank}": value
                for rank, (_, _, its_generators) in enumerate(gathered)
                for name, value in its_generators.items()
            },
        )
        parity = self.plain.compare(wrapped, self.batch, len(gathered))
        dist.barrier()
        return parity

    def _train(self) -> tuple[tuple[float, ...], float]:
        seed_everything(self.config.seed)
        self.pipe.steps_done = 0
        started = time.perf_counter()
        batches = itertools.islice(itertools.chain([self.batch], self.batches), self.config.train_steps)
        losses = tuple(finite_loss(self.step(batch), index) for index, batch in enumerate(batches))
        return losses, time.perf_counter() - started

    def _hand_weights_to_plain(self) -> None:
        state = self.pipe.state_dict()
        if self.plain is not None:
            assert state is not None
            self.plain.load(state)

    def _restored(self, state: StartingState) -> None:
        """Every rank at the start of a step (rule 4)."""
        state.restore()
        self.pipe.steps_done = 0
        gc.collect()
        dist.barrier()

    def _plainly(self, work: Callable[[PlainTwin], Any]) -> Any:
        """Something that rank 0 does while the others wait (rule 1)."""
        dist.barrier()
        result = None if self.plain is None else work(self.plain)
        dist.barrier()
        return result

    def _record(self, state: StartingState) -> tuple[tuple[Event, ...], tuple[StageCache, ...]]:
        for _, cache in self._caches():
            cache.reset_stats()
        self._restored(state)
        self.pipe.recording = True
        self.step(self.batch)
        self.pipe.recording = False
        caches = tuple(StageCache(stage, cache.cache_limit_bytes, cache.stats) for stage, cache in self._caches())
        return tuple(self.pipe.events), caches

    def _caches(self) -> Iterator[tuple[int, Recals]]:
        for index, stage in self.pipe.stages.items():
            if isinstance(stage.budget.recals, Recals):
                yield index, stage.budget.recals

    def _pairs(self, state: StartingState) -> tuple[list[StepOutcome], list[float], bool]:
        """Interleaved pairs, the order alternating: plain steps (rank 0), this rank's seconds, equal losses."""
        outcomes: list[StepOutcome] = []
        seconds: list[float] = []
        identical = True
        for index in range(self.config.timing_pairs):
            losses = {}
            for kind in ("plain", "pipeline") if index % 2 == 0 else ("pipeline", "plain"):
                if kind == "plain":
                    outcome = self._plainly(lambda twin: twin.timed_step(self.batch))
                    if outcome is not None:
                        outcomes.append(outcome)
                        losses[kind] = float(outcome.loss)
                else:
                    self._restored(state)
                    start = time.perf_counter()
                    losses[kind] = self.step(self.batch)
                    seconds.append(time.perf_counter() - start)
            identical &= losses.get("plain", losses["pipeline"]) == losses["pipeline"]
        return outcomes, seconds, identical


def _of_type(batch: Batch, dtype: torch.dtype) -> Batch:
    return Batch(batch.x.to(dtype) if batch.x.is_floating_point() else batch.x, batch.target)
