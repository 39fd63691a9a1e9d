"""`torch.compile`: kernels generated for the whole model, with recomputation decided by its own memory budget.

`activation_memory_budget` is a share of what the compiled step would hold with no recomputation: 1 is compile's default (it
recomputes what is free), near 0 recomputes most. It is a wish to a solver and not a limit; the report's peak says what came out.

Rules the code follows:

1. Dynamo finds compiled code by the code object it came from and the backend object. Every bind has a backend of its own,
   so that two budgets of one model do not take each other's code.
2. The budget is set while the backend compiles, and nowhere else.
3. FLOPs are counted on the compiled graphs: PyTorch skips compiled code while a dispatch mode, such as a FLOP counter, is
   active, and would count the eager step. They are given only where there is one graph, which runs once in a step.
4. Results of random ops are saved. Under a budget below 1, torch (2.10 to 2.14) may compute them again in backward and draw
   other numbers: gradients of another dropout mask, without a word (pytorch#190758). Removable when that is mended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from recals_exp.recals.costs import op_flops
from recals_exp.strategies.blocks import choose_blocks
from recals_exp.strategies.checkpoint import checkpointed
from recals_exp.strategies.patched import Patches
from recals_exp.strategies.strategy import NO_BUDGET, SHARE, BoundStrategy, Strategy, Terms, refuse_limit

BACKENDS = ("inductor", "aot_eager")
_MAX_VERSIONS = (
    1024  # of one code object, over all binds of a process; dynamo's default would end in eager code, unnoticed
)
_CHANGES = (
    "generated kernels round otherwise than eager ones, and draw other random numbers (dropout): compare with compiled code "
    "without the saving, and judge by the loss"
)


@final
class CompileStrategy(Strategy):
    """`torch.compile` with `activation_memory_budget`."""

    name = "compile"
    budget_kind = SHARE

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = check_backend(backend)

    @property
    def terms(self) -> Terms:
        return _terms(self._backend)

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        if limit is not None and not 0 < limit <= 1:
            raise ValueError(
                f"strategy 'compile' takes its budget as a share in (0, 1], but got {limit}: a limit in bytes is held by "
                "strategy=recals alone"
            )
        return _CompiledModel(model, Backend(self._backend, 1.0 if limit is None else limit), None)

    def check_device(self, device: torch.device) -> None:
        check_compiler(self.name, self._backend, device)

    def own_baseline(self) -> Strategy | None:
        return CompileStrategy(self._backend)


@final
class CompileCheckpointStrategy(Strategy):
    """`torch.utils.checkpoint` around every `every`-th block, all of it inside of `torch.compile`."""

    name = "compile_checkpoint"
    budget_kind = NO_BUDGET

    def __init__(self, every: int = 1, blocks: Sequence[str] | None = None, backend: str = "inductor") -> None:
        self._every = every
        self._blocks = blocks
        self._backend = check_backend(backend)

    @property
    def terms(self) -> Terms:
        return _terms(self._backend)

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        refuse_limit(self.name, limit)
        blocks = choose_blocks(model, self._blocks, self._every, self.name)
        return _CompiledModel(model, Backend(self._backend, 1.0), Patches(blocks, checkpointed))

    def check_device(self, device: torch.device) -> None:
        check_compiler(self.name, self._backend, device)

    def own_baseline(self) -> Strategy | None:
        return CompileStrategy(self._backend)


def _terms(backend: str) -> Terms:
    needs = {
        "inductor": "a model that torch.compile can trace; a C++ compiler on the CPU, Triton on a GPU; a minute to compile",
        "aot_eager": "a model that torch.compile can trace",
    }
    return Terms(needs=needs[backend], changes=_CHANGES, exact_gradients=False, exact_buffers=False)


def check_backend(backend: str) -> str:
    """The name, or ValueError."""
    if backend not in BACKENDS:
        raise ValueError(
            f"strategy.backend={backend!r} is not known: use inductor (generates code), or aot_eager (none: the same "
            "graphs and budget run by eager kernels)"
        )
    return backend


def check_compiler(strategy: str, backend: str, device: torch.device) -> None:
    """ValueError if the backend has nothing to generate code with on this device."""
    if backend != "inductor":
        return
    way_out = "or run the same graphs without generated code: strategy.backend=aot_eager"
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                f"strategy={strategy} generates C++ on the CPU, and no C++ compiler was found: install g++ or clang++ (or "
                f"point CXX at one), {way_out}"
            ) from None
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise ValueError(
            f"strategy={strategy} generates Triton code on {device.type}, and Triton is missing, {way_out}"
        )


@final
class Backend:
    """A backend for `torch.compile` with one budget, which counts the FLOPs of what it compiles (rules 1 to 3)."""

    def __init__(self, name: str, share: float) -> None:
        self._name = name
        self._share = share
        self.n_graphs = 0  # compiled from Python code; each has a forward and, with gradients, a backward
        self._flops: list[int] = []

    @property
    def step_flops(self) -> int | None:
        """FLOPs of forward and backward; None unless there is exactly one of each."""
        return sum(self._flops) if self.n_graphs == 1 and len(self._flops) == 2 else None

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        import torch._functorch.config as functorch_config

        self.n_graphs += 1
        # compiled code out of the cache of AOTAutograd would not pass by here
        with functorch_config.patch(activation_memory_budget=self._share, enable_autograd_cache=False):
            if self._name == "inductor":
                import torch._inductor.config as inductor_config
                from torch._inductor.compile_fx import compile_fx

                with inductor_config.patch(custom_partitioner_fn=_RandomSavingPartitioner()):
                    compiled: Any = compile_fx(graph, example_inputs, inner_compile=self._inductor)
                    return compiled
            from torch._dynamo.backends.common import aot_autograd

            compiler: Any = aot_autograd(
                fw_compiler=self._eager,
                bw_compiler=self._eager,
                partition_fn=_RandomSavingPartitioner(),
                keep_inference_input_mutations=True,
            )
            return compiler(graph, example_inputs)

    def _inductor(self, graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        self._flops.append(graph_flops(graph))
        return compile_fx_inner(graph, example_inputs, **kwargs)

    def _eager(self, graph: Any, example_inputs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        self._flops.append(graph_flops(graph))
        return make_boxed_func(graph.forward)


@final
class _RandomSavingPartitioner(CustomPartitionerFn):
    """The usual partition into forward and backward, with what random ops gave marked to be saved (rule 4)."""

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        for node in gm.graph.nodes:
            if _draws(node.target) and "recompute" not in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "recals-exp random-saving partitioner 1"


def _draws(func: Any) -> bool:
    """Whether an op of a joint graph reads a generator. Inductor's `random` does not: its seed is an input of it."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func.overloadpacket.__name__
    return name in ("inductor_seed", "inductor_seeds") or (
        torch.Tag.nondeterministic_seeded in func.tags and name != "inductor_random"
    )


def graph_flops(graph: torch.fx.GraphModule) -> int:
    """FLOPs of the ops of a graph of AOTAutograd, from the shapes it notes at its nodes."""
    total = 0
    for node in graph.graph.nodes:
        func, args = node.target, node.args
        if isinstance(func, torch._ops.HigherOrderOperator) and args and isinstance(args[0], torch._ops.OpOverload):
            func, args = args[0], args[1:]  # an op run with a saved random state
        if isinstance(func, torch._ops.OpOverload):
            shown_args, shown_kwargs = torch.fx.node.map_arg((args, node.kwargs), lambda item: item.meta.get("val"))
            total += op_flops(func, shown_args, shown_kwargs, node.meta.get("val"))
    return total


@final
class _CompiledModel(BoundStrategy):
    def __init__(self, model: nn.Module, backend: Backend, patches: Patches | None) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        self._backend = backend
        self._patches = patches
        self._call: Callable[..., Any] = torch.compile(call, backend=backend, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MAX_VERSIONS, accumulated_recompile_limit=_MAX_VERSIONS):
            if self._patches is None:
                return self._call(*args, **kwargs)
            with self._patches.applied():
                return self._call(*args, **kwargs)

    @property
    def blocks(self) -> tuple[str, ...]:
        return () if self._patches is None else self._patches.names

    @property
    def step_flops(self) -> int | None:
        return self._backend.step_flops

    @property
    def hides_flops(self) -> bool:
        return True
