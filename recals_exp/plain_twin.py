"""The plain partner of a pipeline over processes: the whole model on rank 0, run over the same micro-batches.

It holds the activations of one micro-batch at a time: for each, forward, its share of the loss, and backward, gradients added up.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recals_exp.datasets import Batch, DataSpec
from recals_exp.meters.device import generator_states, seed_everything, synchronize
from recals_exp.meters.flops import count_flops
from recals_exp.meters.memory import ProcessPeak, process_peak, step_peak_bytes
from recals_exp.meters.parity import StepTrace, compare
from recals_exp.meters.steps import StartingState, StepOutcome, unique_storage_bytes
from recals_exp.pipeline import DistributedPipeline, cell_seed, generator_digest
from recals_exp.pipeline.budget import undone
from recals_exp.pipeline.units import find_units
from recals_exp.recals import recals_with_rngs
from recals_exp.records import ParityRecord, PhaseTimes
from recals_exp.runconfig import RunConfig


class PlainTwin:
    """The whole model, in the loop over all micro-batches."""

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
            for number, stage in enumerate(self._stages):  # what a cell of the pipeline draws
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
                outputs={f"output {index}": on_cpu(torch.cat(column)) for index, column in enumerate(columns)},
                loss={"loss": float(loss)},
                gradients={name: on_cpu(parameter.grad) for name, parameter in parameters.items()},
                buffers={
                    name: on_cpu(tensor) for name, tensor in self.model.state_dict().items() if name not in parameters
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
        """Back to that start."""
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
        resident = [*self.model.parameters(), *self.model.buffers(), *optimizer_tensors(self.optimizer), *batch]
        self.restore()
        peak = step_peak_bytes(lambda: drop(self.step(batch)), self._device)
        self.restore()
        return unique_storage_bytes(iter(resident)), peak, process_peak(lambda: drop(self.step(batch)))

    def flops(self, batch: Batch) -> int:
        """Of one plain step."""
        self.restore()
        return count_flops(lambda: self.step(batch))


def on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _new_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _generators(states: dict[str, Any]) -> StepTrace:
    return StepTrace({}, {}, {}, {}, states)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for entries in optimizer.state.values():
        yield from (value for value in entries.values() if isinstance(value, Tensor))


def drop(_: object) -> None:
    pass
