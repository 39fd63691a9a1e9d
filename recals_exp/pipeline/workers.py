"""Stages on worker threads: overlap on the CPU whose results are still those of the plain loop, bit for bit.

torch's kernels (and anything else that releases the interpreter lock) run at the same time on several threads. What
threads could change, and what is done about each:

1. **Random numbers.** All threads share torch's CPU generator, Python's and NumPy's. The first call with given training
   flags runs in order on the caller's thread, and notes which stages draw. Later, stages that draw from torch's generator
   take turns in the order of the plain loop (micro-batch by micro-batch), while the others overlap freely. A stage that
   is not known to draw runs under a guard that refuses its first random op, and the generators are compared at the end:
   a call is either exact or an error, never silently different. Stages that draw from Python's or NumPy's generator are
   refused: no guard can see single draws of those.
2. **Order of gradient sums.** It follows from numbers that each thread gives to the graph nodes it makes. They are
   changed into those of the plain loop when the threads are done (``node_order.py``). Stages that share parameters or
   buffers are refused: two threads may not write one buffer.
3. **What belongs to a thread.** Gradient mode, inference mode and autocast of the caller hold in the workers, and so do
   context variables. Dispatch modes, function modes, saved-tensor hooks and functorch's levels cannot be handed
   over: under one of them, and inside another recals, the call runs in order on the caller's thread, with equal results
   (`ThreadPlan.last_run` says so).
4. **Failures.** The first failure in the order of the plain loop is raised; later cells are not started, and every
   thread has ended when the call returns or raises. Threads live for one call only: nothing is left behind.

Only forward overlaps: autograd runs all CPU nodes of one backward on one thread. For training that overlaps on CPUs use
processes (``distributed.py``); this is for inference and for stages that wait (remote calls, disks, sleeps). That is why it
is off by default.
"""

from __future__ import annotations

import contextvars
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recals_exp.pipeline.node_order import NodeOrder
from recals_exp.pipeline.run import PipelineRun
from recals_exp.pipeline.stage import Stage, shared_state

IN_ORDER_TO_LEARN = "in order: first call in this mode, which stages draw random numbers is learned"


class ThreadOrderError(RuntimeError):
    """A threaded call did something whose order could differ from the plain loop."""


class ThreadPlan:
    """What is known about the stages of one pipeline that run on threads."""

    def __init__(self) -> None:
        self.last_run = ""  # how the last call ran: "threads", or "in order: <why>"
        self._drawing: dict[Any, frozenset[int]] = {}  # mode -> the stages that draw from torch's generator

    def check(self, stage: Stage, others: Sequence[Stage]) -> None:
        """Refuse a stage that threads cannot run exactly (rule 2)."""
        if stage.device.type != "cpu":
            raise ValueError(
                f"threads=True, but stage {stage.index} is to live on {stage.device}: worker threads are for stages on "
                "the CPU; accelerators overlap without them"
            )
        for other in others:
            shared = shared_state(other.module, stage.module)
            if shared:
                raise ValueError(
                    f"threads=True, but stage {stage.index} shares {', '.join(shared)} with stage {other.index}: on two "
                    "threads the order of their gradient sums would not be that of the plain model. Use threads=False"
                )

    def drawing(self, mode: Any) -> frozenset[int] | None:
        """The stages that draw in a mode; None if it was not seen before."""
        return self._drawing.get(mode)

    def learn(self, mode: Any, drawing: frozenset[int]) -> None:
        self._drawing[mode] = drawing


class ThreadedRun:
    """One call on threads."""

    def __init__(self, run: PipelineRun, plan: ThreadPlan) -> None:
        self._run = run
        self._plan = plan
        self._stages = run.stages
        self._count = len(run.micro_batches)
        self._changed = threading.Condition()
        self._done = [0] * len(run.stages)  # micro-batches each stage has finished
        self._failure: tuple[int, int] | None = None  # (micro-batch, stage), the earliest in the plain loop's order
        self._error: BaseException | None = None
        self._stopped = False
        self._outputs: list[Any] = [None] * self._count
        self._turns: list[int] = []
        self._order = NodeOrder(run.stages) if run.recording else None

    def outputs(self) -> list[Any]:
        """The results of all micro-batches, as `PipelineRun.in_order` gives them."""
        reason = self._why_in_order()
        if reason:
            self._plan.last_run = f"in order: {reason}"
            return self._run.in_order()
        mode = _mode(self._stages)
        drawing = self._plan.drawing(mode)
        if drawing is None:
            self._plan.last_run = IN_ORDER_TO_LEARN
            return self._learn(mode)
        self._plan.last_run = "threads"
        self._turns = sorted(drawing)
        return self._on_threads()

    def _why_in_order(self) -> str:
        """Why threads cannot be used for this call, or would not overlap anything; empty = they can."""
        if len(self._stages) == 1 or self._count == 1:
            return f"{len(self._stages)} stages and {self._count} micro-batches leave nothing to overlap"
        return next((reason for reason, active in _THREAD_BOUND if active()), "")

    # -- in order, watching ---------------------------------------------------------------------------------------

    def _learn(self, mode: Any) -> list[Any]:
        drawing: set[int] = set()
        for index in range(self._count):
            for stage in self._stages:
                before = _other_generators()
                with _Watch() as watch:
                    self._run.cell(stage, index)
                if watch.drew:
                    drawing.add(stage.index)
                changed = _changes(before, _other_generators())
                if changed:
                    raise ThreadOrderError(
                        f"threads=True, but stage {stage.index} ({stage.name}) draws from {changed}'s global generator, "
                        "and on threads the order of its draws cannot be held to that of the plain loop. Use "
                        "torch's generator in the stage, or threads=False"
                    )
            self._outputs[index] = self._run.take(len(self._stages) - 1, index)
        self._plan.learn(mode, frozenset(drawing))
        return self._outputs

    # -- on threads -----------------------------------------------------------------------------------------------

    def _on_threads(self) -> list[Any]:
        ambient = _Ambient()
        before = _other_generators()
        torch_before = torch.get_rng_state()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._work, stage, ambient),
                name=f"pipeline stage {stage.index}",
                daemon=True,
            )
            for stage in self._stages
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # no cycle between this frame and the traceback
        changed = _changes(before, _other_generators())
        if not self._turns and not torch.equal(torch_before, torch.get_rng_state()):
            changed = "torch"
        if changed:
            raise ThreadOrderError(
                f"{changed}'s global generator moved during a threaded call, though no stage drew from it in the first "
                "call of this mode: the result may differ from the plain loop. Use threads=False"
            )
        if self._order is not None:
            self._order.restore()
        return self._outputs

    def _work(self, stage: Stage, ambient: _Ambient) -> None:
        turn = self._turns.index(stage.index) if stage.index in self._turns else None
        index = 0
        try:
            with ambient.in_force(), torch.autograd.profiler.record_function(f"pipeline stage {stage.index}"):
                for index in range(self._count):
                    if not self._wait(stage, index, turn):
                        return
                    self._cell(stage, index, guarded=turn is None)
                    if stage.index == len(self._stages) - 1:
                        self._outputs[index] = self._run.take(stage.index, index)
                    with self._changed:
                        self._done[stage.index] += 1
                        self._changed.notify_all()
        except BaseException as error:  # handed to the caller's thread, which raises it
            with self._changed:
                if self._failure is None or (index, stage.index) < self._failure:
                    self._failure, self._error = (index, stage.index), error
                self._changed.notify_all()

    def _cell(self, stage: Stage, index: int, guarded: bool) -> None:
        with self._run.placed(stage, index), _Guard(stage) if guarded else nullcontext():
            args, kwargs = self._run.inputs(stage, index)
            if self._order is not None:
                self._order.begin(stage, args, kwargs)
            result = self._run.compute(stage, index, args, kwargs)
            if self._order is not None:
                self._order.end(stage, result)

    def _wait(self, stage: Stage, index: int, turn: int | None) -> bool:
        """Until the inputs are there and it is this stage's turn to draw; False = do not start this cell."""
        needs = [source.stage for source in stage.sources if source.stage >= 0]
        before: tuple[int, int] | None = None  # (stage, micro-batches it must have done)
        if turn is not None and len(self._turns) > 1:
            before = (self._turns[turn - 1], index + 1) if turn else (self._turns[-1], index)
        with self._changed:
            while True:
                if self._stopped or (self._failure is not None and (index, stage.index) > self._failure):
                    return False
                ready = all(self._done[need] > index for need in needs)
                if ready and (before is None or self._done[before[0]] >= before[1]):
                    return True
                self._changed.wait()


class _Ambient:
    """What holds in the caller's thread and must hold in the workers (rule 3)."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu")
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        # set by hand, not with torch.autocast: leaving that context would clear the cache of weight casts that all
        # micro-batches share, and with it change how their gradients are summed. The thread ends, so nothing to undo
        torch.set_autocast_enabled("cpu", self._autocast)
        torch.set_autocast_dtype("cpu", self._dtype)
        torch.set_autocast_cache_enabled(self._cache)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield


class _Watch(TorchDispatchMode):
    """Notes whether torch's default generator is used, also where its state is put back afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.drew = True
        return func(*args, **kwargs)


class _Guard(TorchDispatchMode):
    """Refuses random ops in a stage that is not known to draw."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            raise ThreadOrderError(
                f"stage {self._stage.index} ({self._stage.name}) called {func}, but drew no random numbers in the first "
                "call of this mode: on threads its draws would not be in the order of the plain loop. Use threads=False"
            )
        return func(*args, **kwargs)


def _mode(stages: Sequence[Stage]) -> Any:
    flags = tuple(part.training for stage in stages for part in stage.module.modules())
    return flags, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


_THREAD_BOUND: tuple[tuple[str, Callable[[], bool]], ...] = (  # what a worker cannot take over from the caller (rule 3)
    ("a dispatch mode is active", lambda: torch._C._len_torch_dispatch_stack() > 0),
    ("a function mode is active", lambda: torch._C._len_torch_function_stack() > 0),
    ("saved-tensor hooks are active", lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is not None),
    ("a functorch transform is active", lambda: torch._C._functorch.peek_interpreter_stack() is not None),
)


def _other_generators() -> tuple[Any, Any]:
    """The states of Python's and NumPy's global generators, to compare."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def _changes(before: tuple[Any, Any], after: tuple[Any, Any]) -> str:
    """Whose generator moved: "Python", "NumPy", or "" for none."""
    if before[0] != after[0]:
        return "Python"
    return "NumPy" if before[1] is not None and before[1] != after[1] else ""
