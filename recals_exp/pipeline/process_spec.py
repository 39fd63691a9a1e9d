"""How a pipeline runs over processes, as plain data: ranks, schedule, and the seeds of its cells."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from recals_exp.pipeline.schedule import KINDS, Action, Orders, gpipe_orders, one_f_one_b_orders

SCHEDULES = {  # our name -> torch's name, stages on each rank, ranks in the order of a V
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved1f1b": ("Interleaved1F1B", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
}
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How a pipeline runs over processes."""

    processes: int  # ranks of one pipeline
    n_micro_batches: int
    schedule: str = "1f1b"  # one of SCHEDULES
    stages_per_process: int | None = None  # None = the schedule's own number
    replicas: int = 1  # of the whole pipeline, each with its share of the batch
    reduction: str = "mean"  # what the loss function does with the rows: one of REDUCTIONS

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r} is not a whole number of at least 1"
            for name, value in (
                ("processes", self.processes),
                ("n_micro_batches", self.n_micro_batches),
                ("replicas", self.replicas),
                ("stages_per_process", self.per_process if self.schedule in SCHEDULES else 1),
            )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if self.schedule not in SCHEDULES:
            problems.append(f"schedule={self.schedule!r} is not known: use one of {', '.join(SCHEDULES)}")
        elif self.schedule in ("gpipe", "1f1b", "zbv") and self.per_process != SCHEDULES[self.schedule][1]:
            problems.append(
                f"schedule={self.schedule} has {SCHEDULES[self.schedule][1]} stages on each process, not {self.per_process}"
            )
        if self.reduction not in REDUCTIONS:
            problems.append(f"reduction={self.reduction!r} is not known: use one of {', '.join(REDUCTIONS)}")
        if self.schedule == "1f1b" and not problems and self.n_micro_batches < self.processes:
            problems.append(
                f"schedule=1f1b needs at least as many micro-batches as stages: {self.n_micro_batches} < {self.processes}; "
                "use more micro-batches, or schedule=gpipe"
            )
        if self.schedule == "interleaved1f1b" and not problems:
            rounds = max(1, self.n_micro_batches // self.processes)
            if self.n_micro_batches % rounds:
                problems.append(
                    f"schedule=interleaved1f1b cannot run {self.n_micro_batches} micro-batches on {self.processes} "
                    f"processes: use a multiple of {self.processes}"
                )
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def per_process(self) -> int:
        """Stages on each rank."""
        return SCHEDULES[self.schedule][1] if self.stages_per_process is None else self.stages_per_process

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return self.processes * self.per_process

    def rank_of(self, stage: int) -> int:
        """The rank, within one pipeline, that has a stage."""
        turn, place = divmod(stage, self.processes)
        return self.processes - 1 - place if SCHEDULES[self.schedule][2] and turn % 2 else place


def cell_seed(digest: bytes, step: int, stage: int, micro_batch: int) -> int:
    """The seed of one (stage, micro-batch); see rule 3. With replicas, micro-batches are counted through all of them."""
    text = digest + f"/{step}/{stage}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator_digest() -> bytes:
    """The state of torch's CPU generator in short, which all ranks share at the start of a step."""
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()


def schedule_orders(spec: ProcessSpec) -> Orders:
    """The actions of every rank of one pipeline, in the order torch's engine performs them.

    (The list that torch 2.14 itself gives for 1F1B numbers the last rank's micro-batches from 1; it is not what is run.)
    """
    if spec.schedule == "gpipe":
        return gpipe_orders(spec.processes, spec.n_micro_batches)
    if spec.schedule == "1f1b":
        return one_f_one_b_orders(spec.processes, spec.n_micro_batches)
    kind: Any = get_schedule_class(SCHEDULES[spec.schedule][0])
    mine = [stage for stage in range(spec.n_stages) if spec.rank_of(stage) == 0]
    planned = kind(
        [_PaperStage(stage, spec.n_stages, spec.processes) for stage in mine], n_microbatches=spec.n_micro_batches
    ).pipeline_order
    return tuple(
        tuple(
            Action(_TORCH_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in planned[rank]
            if action is not None and action.computation_type.name in _TORCH_KINDS
        )
        for rank in range(spec.processes)
    )


# sends, receives and gradient reductions are not computation
_TORCH_KINDS = dict(zip(("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"), KINDS, strict=True))


class _PaperStage:
    """What a schedule object asks of a stage while it plans."""

    def __init__(self, index: int, n_stages: int, processes: int) -> None:
        self.stage_index = index
        self.num_stages = n_stages
        self.group_size = processes
        self.group_rank = 0
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        self.submod = nn.Identity()
        self.device = torch.device("cpu")
        self.stage_index_to_group_rank: Mapping[int, int] = {}
