"""`ModelPipeline`: a model spread over devices as a chain of stages, fed with micro-batches.

Why not `nn.Sequential` with `.to()` in between, or `torch.distributed.pipelining`: the first leaves every device but one
idle and cannot hold a stage to a memory budget; the second needs one process for each device. This is one module in one
process, called like any other, whose gradients come from one ordinary `loss.backward()`.

    x --split--> [mb 0][mb 1][mb 2]        stage 0        stage 1        stage 2
                    |    |    |           (device a)  ->  (device b)  ->  (device c)  --join--> y

Rules the code follows:

1. First in, first out: each stage sees micro-batch 0, then 1, and so on, each exactly once.
2. The caller's thread issues a micro-batch through all stages before it issues the next. This *is* the plain loop
   ``[model(piece) for piece in pieces]``: random numbers, running statistics, spiking state and the order in which
   gradients are summed are the same, bit for bit. Accelerators still overlap: their kernels are only queued here, so
   stage 0 computes micro-batch 1 while stage 1 computes micro-batch 0. (The wave order ``schedule.clock_cycles`` would
   queue the first micro-batches slightly earlier and draw shared random numbers in another order.)
3. Between stages values travel as they are. A tuple is spread over the next stage's positional parameters if that stage
   takes more than one (or ``*args``); a stage that takes exactly one gets the tuple itself, as in `nn.Sequential`.
4. A keyword argument goes to every stage whose forward has a parameter of that name (or ``**kwargs``), and at least
   one must have it. What is split and what is passed whole is ``batch.py``'s rule.
5. ``takes`` gives a stage other inputs than its predecessor's result: results of any earlier stage (skip connections),
   which travel straight from device to device.
6. Results are joined or added into new tensors; nothing autograd may still need is written in place.
7. Without gradients (no_grad, inference) a stage is called directly: no budget, no analysis, no record.
8. A failure keeps its own type and traceback and gets a note that names the stage and the micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from recals_exp.pipeline.batch import (
    MicroBatch,
    count_rows,
    merge_outputs,
    plan_rows,
    size_for,
    split_inputs,
    sum_outputs,
)
from recals_exp.pipeline.budget import Budget, StageBudget
from recals_exp.pipeline.devices import GpuId, Mover, parse_device
from recals_exp.pipeline.run import PipelineRun
from recals_exp.pipeline.stage import Stage, StageObserver, Take, read_takes, shared_state
from recals_exp.pipeline.workers import ThreadedRun, ThreadPlan


class ModelPipeline(nn.Module):
    """Stages on devices, called with micro-batches.

    Args:
        split_size: rows of a micro-batch when ``forward`` is called without ``split_sizes``; None = the whole batch.
        n_micro_batches: the same, as a number of micro-batches; give one of the two at most.
        ragged: allow a smaller last micro-batch.
        unsplit: keyword names (or positions in a tuple ``x``) that are passed whole; see ``batch.py``.
        threads: run each stage on a worker thread of its own so that stages on the CPU overlap; see ``workers.py``.
        policy: the engine's policy for the budgets written as bytes or fractions, or a function that makes the ``Recals`` for
            a limit in bytes.

    Example:
        >>> pipe = ModelPipeline(split_size=8)
        >>> pipe.append(front, "cuda:0", budget="4GiB").append(back, 1)
        >>> loss_fn(pipe(x), y).backward()
    """

    def __init__(
        self,
        *,
        split_size: int | None = None,
        n_micro_batches: int | None = None,
        ragged: bool = False,
        unsplit: Collection[str | int] = (),
        threads: bool = False,
        policy: Any = "fifo",
    ) -> None:
        super().__init__()
        if split_size is not None and n_micro_batches is not None:
            raise ValueError(
                f"split_size={split_size} and n_micro_batches={n_micro_batches} both say how to split: give one of them"
            )
        self._split_size = split_size
        self._n_micro_batches = n_micro_batches
        self._ragged = ragged
        self._unsplit = tuple(unsplit)
        self._policy = policy
        self._stages: list[Stage] = []
        self._mover = Mover()
        self._thread_plan = ThreadPlan() if threads else None
        self._observer: StageObserver | None = None
        self._budgeted = True
        self._adopted: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no child

    def append(
        self,
        nn_module: nn.Module,
        gpu_id: GpuId,
        budget: Budget = None,
        *,
        takes: Take | list[Take] | None = None,
        name: str | None = None,
    ) -> ModelPipeline:
        """Move a module to a device and make it the next stage.

        Args:
            nn_module: the stage. Its parameters keep their identity, so an optimizer made before stays valid.
            gpu_id: ``2`` or ``"2"`` (the accelerator of that index), ``"cuda:2"``, ``"cpu"``, or a ``torch.device``.
            budget: what autograd may cache in this stage, over all micro-batches in flight: bytes (``"512MiB"``), a
                fraction, a ``Recals`` (stages may share one), or None for no limit; see ``budget.py``.
            takes: the stage's positional inputs, where they are not simply the result of the stage before:
                ``"previous"``, ``"input"``, the number of an earlier stage, or ``(stage, item)`` for one item of its
                tuple (``("input", item)`` too); one of these, or a list of them.
            name: what messages and measures call the stage; its number by default.

        Returns:
            the pipeline, so that calls can be chained.
        """
        if not isinstance(nn_module, nn.Module):
            raise TypeError(f"a stage must be an nn.Module, got {type(nn_module).__name__}")
        index = len(self._stages)
        device = parse_device(gpu_id)
        sources = read_takes(takes, index)
        for other in self._stages:
            if other.device != device:
                shared = shared_state(other.module, nn_module)
                if shared:
                    raise ValueError(
                        f"stage {index} shares {', '.join(shared)} with stage {other.index}, but they are to live on "
                        f"{device} and {other.device}: one tensor cannot be on two devices. Put both stages on one "
                        "device, or give the second its own copy (copy.deepcopy)"
                    )
        stage = Stage(index, name or str(index), nn_module, device, StageBudget(budget, self._policy), sources)
        if self._thread_plan is not None:
            self._thread_plan.check(stage, self._stages)
        stage.move_to(device)
        if not self._adopted:
            self.add_module(str(index), nn_module)
        self._stages.append(stage)
        return self

    def adopt(self, model: nn.Module) -> ModelPipeline:
        """Take over a model's names: its stages are parts of it, and ``state_dict`` is that of the model.

        To be called before any stage is appended; the stages must then be made of the model's own modules.
        """
        if self._stages:
            raise ValueError(f"adopt() comes before append(): this pipeline already has {len(self._stages)} stages")
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)
        self._adopted = (model,)
        self.train(model.training)
        return self

    def train(self, mode: bool = True) -> ModelPipeline:
        super().train(mode)
        for model in self._adopted:
            model.training = mode
        return self

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        return tuple(self._stages)

    @property
    def threads_note(self) -> str:
        """How the last call ran: "threads", "in order: <why>"; "" without ``threads=True`` or before the first call."""
        return "" if self._thread_plan is None else self._thread_plan.last_run

    def __len__(self) -> int:
        return len(self._stages)

    def forward(
        self,
        x: Any,
        split_sizes: int | Sequence[int] | None = None,
        /,
        *,
        ragged: bool | None = None,
        unsplit: Collection[str | int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Split ``x`` on dim 0, send the micro-batches through the stages, and join the results on dim 0.

        Args:
            x: the input of the first stage; a tuple for several.
            split_sizes: rows of a micro-batch (or a list with the rows of each); default as constructed.
            ragged: allow a smaller last micro-batch; default as constructed.
            unsplit: names or positions that are passed whole; default as constructed.
            kwargs: for every stage that takes them by name.

        Raises:
            ValueError: the batch does not divide, tensors disagree about the rows, or there is no stage.
        """
        self._check_stages(kwargs)
        single = type(x) is not tuple
        args = (x,) if single else x
        whole = self._unsplit if unsplit is None else tuple(unsplit)
        if unsplit is None:  # the constructor's names need not all occur in each call
            whole = tuple(name for name in whole if name in kwargs or name in range(len(args)))
        rows = count_rows(args, kwargs, whole)
        sizes = self._sizes(rows, split_sizes, self._ragged if ragged is None else ragged)
        return merge_outputs(self._run(split_inputs(args, kwargs, sizes, whole, single)))

    def constant_forward(self, x: Any, T: int, reduce: bool = True, **kwargs: Any) -> Any:
        """Run the model ``T`` times on the same input, as rate-coded spiking networks do; each stage exactly T times.

        Returns:
            the sum of the T results, added from the first to the last, or with ``reduce=False`` their join on dim 0.
        """
        if isinstance(T, bool) or not isinstance(T, int) or T < 1:
            raise ValueError(f"T={T!r} is not a number of runs: use a whole number of at least 1")
        self._check_stages(kwargs)
        single = type(x) is not tuple
        outputs = self._run([MicroBatch((x,) if single else x, dict(kwargs), single)] * T)
        return sum_outputs(outputs) if reduce else merge_outputs(outputs)

    def extra_repr(self) -> str:
        return ", ".join(f"{stage.name}: {stage.device}" for stage in self._stages)

    def observe(self, observer: StageObserver | None) -> None:
        """Report each stage's work to ``observer`` from now on; None stops it. ``timeline.py`` has one."""
        self._observer = observer

    @contextmanager
    def unbudgeted(self) -> Iterator[None]:
        """Inside, stages run without their budgets: the plain loop on the same devices, for comparisons."""
        before, self._budgeted = self._budgeted, False
        try:
            yield
        finally:
            self._budgeted = before

    def _check_stages(self, kwargs: Mapping[str, Any]) -> None:
        if not self._stages:
            raise ValueError("this pipeline has no stage: append(module, device) at least one before calling it")
        nobody = [name for name in kwargs if not any(stage.takes_keyword(name) for stage in self._stages)]
        if nobody:
            raise TypeError(
                f"no stage takes the keyword {', '.join(map(repr, nobody))}: it goes to the stages whose forward has a "
                "parameter of that name"
            )

    def _sizes(self, rows: int, split_sizes: int | Sequence[int] | None, ragged: bool) -> tuple[int, ...]:
        if split_sizes is None:
            split_sizes = self._split_size
        if split_sizes is None and self._n_micro_batches is not None:
            split_sizes = size_for(rows, self._n_micro_batches, ragged)
        if split_sizes is None:
            return (rows,)
        return plan_rows(rows, split_sizes, ragged)

    def _run(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        run = PipelineRun(self._stages, micro_batches, self._mover, self._observer, self._budgeted)
        if self._thread_plan is None:
            return run.in_order()
        return ThreadedRun(run, self._thread_plan).outputs()

    def _apply(self, fn: Any, recurse: bool = True) -> ModelPipeline:
        super()._apply(fn, recurse)
        for stage in self._stages:
            strays = {str(tensor.device) for tensor in stage.tensors() if tensor.device != stage.device}
            if strays:
                raise ValueError(
                    f"stage {stage.name} was moved to {', '.join(sorted(strays))}, but its place is {stage.device}: a "
                    "pipeline's stages stay where append() put them. Convert the dtype without a device, or build "
                    "another pipeline"
                )
        return self
