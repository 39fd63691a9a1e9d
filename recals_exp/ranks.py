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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recals_exp.datasets import Batch, DataSpec, build_data
from recals_exp.learning import finite_loss
from recals_exp.meters.device import deterministic_algorithms, generator_states, seed_everything, synchronize
from recals_exp.meters.flops import count_flops
from recals_exp.meters.memory import ProcessPeak, process_peak, step_peak_bytes
from recals_exp.meters.parity import StepTrace, compare
from recals_exp.meters.steps import StartingState, StepOutcome, unique_storage_bytes
from recals_exp.models import build_model
from recals_exp.pipeline import DistributedPipeline, Event, Layout, ProcessSpec, cell_seed, generator_digest
from recals_exp.pipeline.budget import undone
from recals_exp.pipeline.units import find_units
from recals_exp.pipelines import layout_spec
from recals_exp.recals import Recals, Stats, recals_with_rngs
from recals_exp.records import ParityRecord, PhaseTimes
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
        self.plain: _Plain | None = None
        if whole is not None:
            self.plain = _Plain(whole.to(self.device), data, config, self.pipe, self.batch, layout.units)

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
        step_peak = step_peak_bytes(lambda: _drop(self.step(self.batch)), self.device)
        self._restored(state)
        process = process_peak(lambda: _drop(self.step(self.batch)))
        plain_flops = self._plainly(lambda twin: twin.flops(self.batch))
        self._restored(state)
        flops = count_flops(lambda: self.step(self.batch))
        events, caches = self._record(state)
        outcomes, step_s, identical = self._pairs(state)
        resident = [*self.pipe.parameters(), *self.pipe.buffers(), *_optimizer_tensors(self.optimizer), *self.batch]
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
        outputs = None if result.outputs is None else pytree.tree_map_only(Tensor, _on_cpu, result.outputs)
        gradients = {name: _on_cpu(parameter.grad) for name, parameter in self.pipe.named_parameters()}
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

    def _plainly(self, work: Callable[[_Plain], Any]) -> Any:
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


class _Plain:
    """Rank 0's whole model, in the loop over all micro-batches (rule 2)."""

    def __init__(
        self,
        model: nn.Module,
        data: DataSpec,
        config: RunConfig,
        pipe: DistributedPipeline,
        batch: Batch,
        units: Sequence[str] | None,
    ) -> None:
        self.model = model
        self.optimizer = config.optimizer.build(model.parameters())
        self._loss_fn = data.loss
        self._seed = config.seed
        self._device = pipe.device
        self._n = pipe.n_micro_batches * pipe.spec.replicas
        self._state: StartingState | None = None
        piece = (batch.x.to(self._device).chunk(self._n)[0],)
        with undone(model):
            stages = find_units(model, piece, units, dynamic=False).stages(pipe.layout.bounds, relay=True)
            self._stages = [stage.module for stage in stages]
            self.cache_total_bytes, self.unit_max_bytes = self._analyse(piece, pipe.in_flight)
            before = generator_states(self._device)
            with torch.no_grad():
                model(*piece)
            self._draws = bool(compare(_generators(before), _generators(generator_states(self._device))).differences)

    def _analyse(self, piece: tuple[Any, ...], in_flight: Sequence[int]) -> tuple[int, int]:
        total = unit_max = 0
        value: Any = piece
        for stage, held in zip(self._stages, in_flight, strict=True):
            inputs = value if isinstance(value, tuple) else (value,)
            analysis = recals_with_rngs(-1).analyze(stage, *inputs)
            total += held * analysis.total_bytes
            unit_max = max(unit_max, analysis.unit_max_bytes)
            value = pytree.tree_map_only(Tensor, _new_leaf, stage(*inputs))
        return total, unit_max

    def accumulate(self, batch: Batch) -> tuple[list[Any], Tensor, float, float]:
        """Forward and backward of all micro-batches: results, the loss, seconds of forward and of backward."""
        digest = generator_digest()
        results, forward_s, backward_s = [], 0.0, 0.0
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        pieces = zip(batch.x.to(self._device).chunk(self._n), batch.target.to(self._device).chunk(self._n), strict=True)
        for index, (x, target) in enumerate(pieces):
            start = time.perf_counter()
            output = self._forward(x, digest, index)
            loss = self._loss_fn(output, target) / self._n
            synchronize(self._device)
            middle = time.perf_counter()
            results.append(pytree.tree_map_only(Tensor, torch.detach, output))
            loss.backward()
            total += loss.detach()
            del output, loss
            synchronize(self._device)
            forward_s += middle - start
            backward_s += time.perf_counter() - middle
        return results, total, forward_s, backward_s

    def _forward(self, x: Tensor, digest: bytes, index: int) -> Any:
        if not self._draws:
            return self.model(x)
        value: Any = x
        with self._forked():
            for number, stage in enumerate(self._stages):  # rule 3
                torch.manual_seed(cell_seed(digest, 0, number, index))
                value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value

    def _forked(self) -> Any:
        if self._device.type == "cpu":
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[self._device], device_type=self._device.type)

    def compare(self, wrapped: StepTrace, batch: Batch, ranks: int) -> ParityRecord:
        """The pipeline's step against a plain one; the model is as before afterwards."""
        start = copy.deepcopy(self.model.state_dict())

        def trace() -> StepTrace:
            seed_everything(self._seed)
            results, loss, _, _ = self.accumulate(batch)
            columns = zip(*(pytree.tree_leaves(result) for result in results), strict=True)
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            found = StepTrace(
                outputs={f"output {index}": _on_cpu(torch.cat(column)) for index, column in enumerate(columns)},
                loss={"loss": float(loss)},
                gradients={name: _on_cpu(parameter.grad) for name, parameter in parameters.items()},
                buffers={
                    name: _on_cpu(tensor) for name, tensor in self.model.state_dict().items() if name not in parameters
                },
                generators={
                    f"{name} on rank {rank}": value
                    for name, value in generator_states(self._device).items()
                    for rank in range(ranks)
                },
            )
            self.model.zero_grad(set_to_none=True)
            self.model.load_state_dict(start)
            return found

        return compare(trace(), wrapped, trace)

    def load(self, weights: dict[str, Tensor]) -> None:
        """What the pipeline has learned."""
        self._weights = weights
        self.model.load_state_dict(weights)

    def remember(self) -> None:
        """The start of every measured step: those weights, and an optimizer whose state exists."""
        self.model.load_state_dict(self._weights)
        self._state = StartingState(self, self._seed)

    def restore(self) -> None:
        """Back to that start (rule 4)."""
        assert self._state is not None
        self._state.restore()
        gc.collect()

    def step(self, batch: Batch) -> StepOutcome:
        """One plain step of training."""
        start = time.perf_counter()
        _, loss, forward_s, backward_s = self.accumulate(batch)
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self._device)
        end = time.perf_counter()
        return StepOutcome(loss, PhaseTimes(forward_s, backward_s, end - middle), end - start)

    def timed_step(self, batch: Batch) -> StepOutcome:
        """The same, from the start."""
        self.restore()
        return self.step(batch)

    def peaks(self, batch: Batch) -> tuple[int, int, ProcessPeak]:
        """Bytes it holds throughout, its step's peak above them, and the process's."""
        resident = [*self.model.parameters(), *self.model.buffers(), *_optimizer_tensors(self.optimizer), *batch]
        self.restore()
        peak = step_peak_bytes(lambda: _drop(self.step(batch)), self._device)
        self.restore()
        return unique_storage_bytes(iter(resident)), peak, process_peak(lambda: _drop(self.step(batch)))

    def flops(self, batch: Batch) -> int:
        """Of one plain step."""
        self.restore()
        return count_flops(lambda: self.step(batch))


def _of_type(batch: Batch, dtype: torch.dtype) -> Batch:
    return Batch(batch.x.to(dtype) if batch.x.is_floating_point() else batch.x, batch.target)


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _new_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _generators(states: dict[str, Any]) -> StepTrace:
    return StepTrace({}, {}, {}, {}, states)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for entries in optimizer.state.values():
        yield from (value for value in entries.values() if isinstance(value, Tensor))


def _drop(_: object) -> None:
    pass
