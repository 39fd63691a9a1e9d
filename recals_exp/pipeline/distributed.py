"""A pipeline over processes: this rank's stages on the engine of `torch.distributed.pipelining`, each under its own budget.

What torch's engine does: sends and receives between neighbours, and the schedules. What is added here: stages cut by the same
layout as in one process, a `Recals` for each stage, the loss scaling and the random numbers of a plain run, refusals
before anything is sent, replicas, and records of what ran when.

Rules:

1. Every rank builds the same model from the same seed, finds the same cut (rank 0 decides), and is called with the same
   batch. So what is wrong with a batch is seen, and refused, on every rank before anything is sent.
2. **Loss.** The loss of a micro-batch is the mean loss divided by the number of micro-batches, as in the plain loop
   ``(loss_fn(model(x_i), y_i) / m).backward()``. torch's own way, to divide the gradients after the step, would also divide
   those of an earlier step; it is switched off. With ``reduction="sum"`` nothing is divided.
3. **Random numbers.** The plain loop draws in an order that would serialise the ranks. Instead every (stage, micro-batch)
   draws from its own seed, made of the generator's state at the start of the step, the number of the step, stage and
   micro-batch: a model that draws gives the same results under every schedule and number of ranks, if it has the same
   stages. `cell_seed` is public, so that a plain loop can do the same. The generators are left as they were.
4. **Budgets.** A fraction is a share of what the stage caches for the micro-batches that the schedule holds at once there:
   under 1F1B the first stage holds more than the last.
5. Shapes between stages are found once, with fake tensors, and fixed. A batch of another shape is refused (rule 1).
6. What crosses a stage's border is no view and no leaf, so that a stage may begin with in-place work, and zero-bubble
   schedules may cut the graph there.
7. With replicas the batch is split between them first, in order; after a step their gradients are summed, without those
   of earlier steps. Buffers follow replica 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from recals_exp.pipeline.budget import StageBudget
from recals_exp.pipeline.layout import Layout, LayoutSpec, plan_layout
from recals_exp.pipeline.placed import stage_modules, stage_tensors
from recals_exp.pipeline.process_spec import SCHEDULES, ProcessSpec, cell_seed, generator_digest, schedule_orders
from recals_exp.pipeline.rank_stage import EventStage, RankStage
from recals_exp.pipeline.schedule import Timetable, simulate
from recals_exp.pipeline.shapes import infer_shapes
from recals_exp.pipeline.timeline import Event
from recals_exp.pipeline.units import find_units


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step tells every rank."""

    loss: float  # of the whole batch, as the plain run has it
    outputs: Any  # the joined result of this replica's share, on the rank of the last stage; None elsewhere


class DistributedPipeline:
    """This rank's share of a pipeline. Make it on every rank of the process group, with equal arguments (rule 1).

    Args:
        model: the whole model; the parameters of other ranks' stages are freed.
        loss_fn: ``loss_fn(output, target)``, the mean (or the sum) over the rows of a micro-batch.
        example: a whole batch, as ``step`` will get it: a tensor, or a tuple of the positional inputs.
        processes: the schedule and the ranks.
        layout: cut, balance and budgets; its devices are left out, for each rank has one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        example: Any,
        processes: ProcessSpec,
        layout: LayoutSpec | None = None,
    ) -> None:
        spec = layout or LayoutSpec()
        self.spec = processes
        self._loss_fn = loss_fn
        self._example = _signature(example)
        self.device = _rank_device()
        world = dist.get_world_size()
        if world != processes.processes * processes.replicas:
            raise ValueError(
                f"{processes.replicas} replicas of {processes.processes} processes need "
                f"{processes.replicas * processes.processes} ranks, but {world} were started"
            )
        mesh = init_device_mesh(
            self.device.type, (processes.replicas, processes.processes), mesh_dim_names=("replica", "stage")
        )
        self._group = mesh["stage"].get_group()
        self._replica_group = mesh["replica"].get_group()
        self.rank, self.replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
        self.global_rank = dist.get_rank()
        self.n_micro_batches = processes.n_micro_batches
        self.place = f"rank {self.global_rank} of {world}"
        pieces = self._check_batch(example)
        args = tuple(_first_rows(arg, pieces) for arg in _positional(example))
        units = find_units(model, args, spec.units, dynamic=False)
        flights = _in_flight(processes)
        self.layout = self._agree_on_layout(units, spec, args, flights)
        stages = units.stages(self.layout.bounds, relay=True)
        shapes = infer_shapes(model, stages, args)
        mine = [stage for stage in range(processes.n_stages) if processes.rank_of(stage) == self.rank]
        self.stages: dict[int, RankStage] = {}
        for index in mine:
            budget = StageBudget(self.layout.stages[index].budget, spec.policy)
            module = RankStage(index, stages[index].name, stages[index].module, budget, flights[index])
            module.to(self.device)
            self.stages[index] = module
        self._names = _own_names(model, self.stages.values())
        _release_others(model, self.stages.values())
        torch_stages = [
            EventStage(
                self,
                self.stages[index],
                index,
                processes.n_stages,
                self.device,
                input_args=tuple(shape.tensor() for shape in shapes[index]),
                output_args=tuple(shape.tensor() for shape in shapes[index + 1]),
                group=self._group,
            )
            for index in mine
        ]
        kind: Any = get_schedule_class(SCHEDULES[processes.schedule][0])
        many = issubclass(kind, PipelineScheduleMulti)
        options = {"n_microbatches": processes.n_micro_batches, "loss_fn": self._scaled_loss, "scale_grads": False}
        self._schedule = kind(torch_stages if many else torch_stages[0], **options)
        self.events: list[Event] = []  # of the last step, if it was recorded
        self.recording = False
        self._steps = 0  # part of every seed (rule 3)
        self._seed_base = b""

    # -- training -------------------------------------------------------------------------------------------------

    def step(self, x: Any, target: Any) -> StepResult:
        """Forward and backward of a batch; gradients are added to those of the rank's parameters."""
        args, target = self._share(x, target)
        first, last = 0 in self.stages, self.spec.n_stages - 1 in self.stages
        losses: list[Tensor] = []
        self.events = []
        kept = self._set_gradients_aside()
        self._sync_buffers()
        with self._cells():
            outputs = self._schedule.step(
                *(args if first else ()), **({"target": target, "losses": losses} if last else {})
            )
        self._add_up_replicas(kept)
        self._steps += 1
        return StepResult(self._tell_loss(losses), outputs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for its optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the model's names."""
        for name, tensor in self._names.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def buffers(self) -> Iterator[Tensor]:
        """The buffers of this rank's stages that belong to the ``state_dict``."""
        return (tensor for tensor in self._own_state().values() if not isinstance(tensor, nn.Parameter))

    @property
    def steps_done(self) -> int:
        """Part of every seed (rule 3). Set it back to draw what an earlier step drew; the same on every rank."""
        return self._steps

    @steps_done.setter
    def steps_done(self, count: int) -> None:
        self._steps = count

    def state_dict(self) -> dict[str, Tensor] | None:
        """The model's whole ``state_dict`` (parameters and buffers) on global rank 0, None on the others; called by all."""
        own = {name: tensor.detach().cpu() for name, tensor in self._own_state().items()} if self.replica == 0 else {}
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered)
        if gathered is None:
            return None
        return {name: tensor for part in gathered for name, tensor in part.items()}

    def gather(self, value: Any) -> list[Any] | None:
        """One value of each rank, in order, on global rank 0; None on the others; called by all."""
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, gathered)
        return gathered

    # -- the schedule ---------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage of the pipeline, the micro-batches it holds at once."""
        return _in_flight(self.spec)

    def timetable(self) -> Timetable:
        """The schedule on paper: equal stages, backward twice the forward."""
        return simulate(schedule_orders(self.spec))

    # -- the batch ------------------------------------------------------------------------------------------------

    def _share(self, x: Any, target: Any) -> tuple[tuple[Any, ...], Any]:
        """This replica's part of a batch, after everything is found right (rule 1)."""
        size = self._check_batch(x)
        now = _signature(x)
        if now != self._example:
            raise ValueError(
                f"the pipeline was built for inputs of {_say(self._example)} and got {_say(now)}: between processes the "
                "shapes are fixed. Build another DistributedPipeline, or pad the batch"
            )
        rows = size * self.spec.n_micro_batches
        found = target.shape[0] if isinstance(target, Tensor) and target.ndim else None
        if found != rows * self.spec.replicas:
            raise ValueError(
                f"the target has {found} rows, but the batch has {rows * self.spec.replicas}: it is split with the inputs"
            )
        span = slice(self.replica * rows, (self.replica + 1) * rows)
        args = tuple(arg[span].to(self.device) if isinstance(arg, Tensor) else arg for arg in _positional(x))
        return args, target[span].to(self.device)

    def _check_batch(self, x: Any) -> int:
        """The rows of a micro-batch; a batch that does not divide is refused (before any send)."""
        counts = {arg.shape[0] for arg in _positional(x) if isinstance(arg, Tensor) and arg.ndim}
        if len(counts) != 1 or not all(isinstance(arg, Tensor) and arg.ndim for arg in _positional(x)):
            raise ValueError(
                f"over processes every positional input must be a tensor with the batch's rows on dim 0, got rows {sorted(counts)}"
            )
        rows = counts.pop()
        pieces = self.spec.n_micro_batches * self.spec.replicas
        if rows == 0 or rows % pieces:
            per = f"{self.spec.n_micro_batches} micro-batches"
            if self.spec.replicas > 1:
                per += f" x {self.spec.replicas} replicas"
            raise ValueError(
                f"a batch of {rows} rows does not divide into {per}: torch.distributed.pipelining needs equal "
                f"micro-batches. Use a multiple of {pieces}, drop the last rows, or run in one process with ragged=True"
            )
        return rows // pieces

    # -- loss, seeds, replicas ------------------------------------------------------------------------------------

    def _scaled_loss(self, output: Any, target: Any) -> Tensor:
        loss = self._loss_fn(output, target)
        return loss if self.spec.reduction == "sum" else loss / (self.spec.n_micro_batches * self.spec.replicas)

    def _tell_loss(self, losses: Sequence[Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total)
        return float(total)

    @contextmanager
    def _cells(self) -> Iterator[None]:
        """Seeds for this step (rule 3); the generators afterwards are those of before."""
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices=devices, device_type=self.device.type if devices else None):
            self._seed_base = generator_digest()
            yield

    def seed_cell(self, stage: int, micro_batch: int) -> None:
        """Called before each forward."""
        index = self.replica * self.spec.n_micro_batches + micro_batch
        torch.manual_seed(cell_seed(self._seed_base, self._steps, stage, index))

    def _set_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        if self.spec.replicas == 1:
            return []
        kept = [(parameter, parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def _add_up_replicas(self, kept: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        if self.spec.replicas == 1:
            return
        for parameter in self.parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient, group=self._replica_group)
                parameter.grad = gradient
        for parameter, earlier in kept:
            assert parameter.grad is not None
            parameter.grad = earlier + parameter.grad

    def _sync_buffers(self) -> None:
        if self.spec.replicas == 1:
            return
        source = dist.get_global_rank(self._replica_group, 0)
        for tensor in self.buffers():
            dist.broadcast(tensor, source, group=self._replica_group)

    def _own_state(self) -> dict[str, Tensor]:
        return {name: value.get() if isinstance(value, _Buffer) else value for name, value in self._names.items()}

    def _agree_on_layout(self, units: Any, spec: LayoutSpec, args: tuple[Any, ...], flights: Sequence[int]) -> Layout:
        """The cut that rank 0 finds; the same on all ranks, also where it depends on measured times."""
        told: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                here = _on_processes(spec, self.spec.n_stages)
                told = [plan_layout(units, here, args, flights)]
            except Exception as error:
                told = [error]
        dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        layout: Layout = told[0]
        return layout


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer, found anew at each use: modules may replace theirs."""

    owner: nn.Module
    name: str

    def get(self) -> Tensor:
        buffer = self.owner._buffers[self.name]
        assert buffer is not None
        return buffer


def _in_flight(spec: ProcessSpec) -> tuple[int, ...]:
    return simulate(schedule_orders(spec)).in_flight


def _on_processes(spec: LayoutSpec, n_stages: int) -> LayoutSpec:
    """The same layout with a place for each stage: every rank has its own device, called "cpu" here."""
    if spec.devices:
        raise ValueError(
            f"devices={list(spec.devices)}: over processes each rank has its own device, the accelerator of its number or "
            "the CPU; leave devices out"
        )
    if spec.ragged or spec.threads:
        raise ValueError("ragged=True and threads=True are for a pipeline in one process; leave them out")
    return dataclasses.replace(spec, devices=("cpu",), n_stages=n_stages)


def _rank_device() -> torch.device:
    if dist.get_backend() == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _positional(x: Any) -> tuple[Any, ...]:
    return x if type(x) is tuple else (x,)


def _first_rows(arg: Any, rows: int) -> Any:
    return arg[:rows] if isinstance(arg, Tensor) else arg


def _signature(x: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(arg.shape), arg.dtype) for arg in _positional(x) if isinstance(arg, Tensor))


def _say(signature: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in signature)


def _own_names(model: nn.Module, stages: Any) -> dict[str, Any]:
    """The parameters and buffers of this rank's stages by the model's names; shared ones by each of their names."""
    own = {id(tensor) for stage in stages for tensor in stage_tensors(stage.module)}
    names: dict[str, Any] = {}
    for prefix, part in model.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in own:
                names[f"{prefix}.{name}" if prefix else name] = parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) in own and name not in part._non_persistent_buffers_set:
                names[f"{prefix}.{name}" if prefix else name] = _Buffer(part, name)
    return names


def _release_others(model: nn.Module, stages: Any) -> None:
    """Free the parameters of other ranks' stages."""
    own = {id(tensor) for stage in stages for tensor in stage_tensors(stage.module)}
    mine = {id(part) for stage in stages for part in stage_modules(stage.module)}
    for part in model.modules():
        if id(part) in mine:
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in own:
                empty = torch.empty_like(parameter, device="meta")
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
