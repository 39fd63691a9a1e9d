"""What an aten overload does to its arguments: looked up once per overload, then a dict hit.

Schemas do not tell all (rule 5): batch norms move their running statistics without declaring it. Those are listed here,
by name. Overloads from outside PyTorch are *foreign*: nothing their schema says is believed before the audit has seen
them run (``audit.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from .bindings import quickest
from .costs import OWN_FORMULAS

_NATIVE_NAMESPACES = frozenset({"aten", "prims", "prim", "quantized", "quantized_decomposed", "torchvision"})
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem", "fsdp"})

# Fresh memory whose content nobody has written yet (rule 8).
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "empty_quantized"}
    | {"_empty_affine_quantized", "_empty_per_channel_affine_quantized"}
)
# Ops that write every element of the tensor they are given without reading it.
_OVERWRITES = frozenset(
    {
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "bernoulli_",
        "cauchy_",
        "log_normal_",
    }
    | {"geometric_", "rrelu_with_noise"}
)
# Random state inside an argument, or a result that depends on more than arguments and generator.
_NOT_REPLAYABLE = frozenset(
    {
        "_cudnn_rnn",
        "miopen_rnn",
        "_cudnn_init_dropout_state",
        "record_stream",
        "set_",
        "resize_",
        "resize_as_",
        "_resize_output_",
    }
    | {"from_file", "_local_scalar_dense", "_sparse_mm_reduce_impl"}  # the last looks at requires_grad
)


# Pointwise ops that still run by oneDNN or natively, as the settings say.
_POINTWISE_BY_CHOICE = frozenset({"gelu", "gelu_", "gelu_backward"})

# These write lists of tensors, and plain PyTorch moves no counter either.
_NEVER_COUNTED = ("_fused_", "_amp_foreach_non_finite_check_and_unscale_")

_MAKES_COMPLEX = frozenset({"_fft_r2c", "complex", "polar", "linalg_eig", "linalg_eigvals", "_linalg_eigvals"})
_UNSPECIFIED = {"mkldnn_rnn_layer": frozenset({3}), "_cudnn_rnn": frozenset({3}), "miopen_rnn": frozenset({3})}


def _arg(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _batch_norm_stats(args: Any, kwargs: Any) -> tuple[Any, ...]:
    if not _arg(args, kwargs, 5, "training"):
        return ()
    mean, var = _arg(args, kwargs, 3, "running_mean"), _arg(args, kwargs, 4, "running_var")
    if mean is not None and var is not None:
        return mean, var
    return tuple(tensor for tensor in (mean, var) if tensor is not None)


def _positions(*positions: tuple[int, str]) -> Callable[[Any, Any], tuple[Any, ...]]:
    def written(args: Any, kwargs: Any) -> tuple[Any, ...]:
        found = (_arg(args, kwargs, position, name) for position, name in positions)
        return tuple(tensor for tensor in found if tensor is not None)

    return written


_RUNNING = ((3, "running_mean"), (4, "running_var"))
_HIDDEN_WRITES: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "native_batch_norm": _batch_norm_stats,
    "cudnn_batch_norm": _batch_norm_stats,
    "miopen_batch_norm": _batch_norm_stats,
    "batch_norm_gather_stats": _positions(*_RUNNING),
    "batch_norm_gather_stats_with_counts": _positions(*_RUNNING),
    "batch_norm_update_stats": _positions((1, "running_mean"), (2, "running_var")),
}


def all_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [tensor for part in tree for tensor in all_tensors(part)]
    return []


@dataclass(slots=True)
class OpFacts:
    """Facts about one overload. Plain attributes: the recorder reads them once per op."""

    name: str
    run: Callable[..., Any]  # the op itself, arguments given by position (``bindings.py``)
    is_view: bool  # every result only views an argument, nothing is written
    writes: tuple[tuple[int, str, bool], ...]  # (position, name, is an out= argument) of each declared write
    makes_complex: bool  # complex results from real arguments
    writes_uncounted: (
        bool  # some written argument is a list of tensors, whose counters no mode sees moved (foreach ops)
    )
    hidden_writes: Callable[[Any, Any], tuple[Any, ...]] | None  # written undeclared, and nothing else depends on them
    counts_writes: bool  # a write moves the version counter
    only_write: int | None  # position of the written argument of an in-place op that writes nothing else
    is_random: bool
    is_allocation: bool
    is_zeros: bool  # makes a tensor without memory
    overwrites: bool  # the written argument's old content is not read
    overwrites_in_training: bool  # and elsewhere leaves the argument alone
    is_foreign: bool  # not PyTorch's own: believed only after an audit
    is_replayable: bool
    has_fresh_results: bool  # some result is neither a view of an argument nor the written argument itself
    is_simple: bool  # nothing to see to but its inputs and results: the recorder's fast path
    picks_kernels: bool  # may compute by another kernel, to other bits, where a backend's setting differs
    is_only_write: bool  # writes its first argument in place, and that is all there is to it
    makes_constants: bool  # may make nested or quantized tensors of others
    takes_lists: bool  # of tensors
    is_factory: bool  # takes a device
    takes_dtype: bool
    has_flops: bool  # there is a FLOP formula for it
    returns_tensor: bool  # one tensor, and no list of them
    unspecified: frozenset[int]  # results with bytes that no reader looks at (workspaces): an audit cannot compare them
    learned_writes: set[int] = field(default_factory=set)  # tensor arguments an audit saw written undeclared
    flops: dict[tuple[Any, ...], int] = field(default_factory=dict)  # by the sizes of its arguments
    was_watched: bool = False  # an audit has watched a foreign op run: its writes are known
    reproduces: bool = False  # an audit has run a foreign op twice
    pinned_layers: set[str] = field(default_factory=set)  # where an audit saw results that do not reproduce
    unguarded_layers: set[str] = field(default_factory=set)  # of them, where others wrote the results afterwards
    may_write: bool = False

    def __post_init__(self) -> None:
        self.may_write = bool(self.writes) or self.hidden_writes is not None

    def written_tensors(self, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
        """The tensors this call writes, declared or hidden, each with whether anything depends on its old content."""
        reads = not self.overwrites or (self.overwrites_in_training and not _arg(args, kwargs, 4, "training"))
        if self.only_write is not None and not self.learned_writes and len(args) > self.only_write:
            return [(args[self.only_write], reads)]
        found: list[tuple[torch.Tensor, bool]] = []
        for position, name, is_out in self.writes:
            item = _arg(args, kwargs, position, name)
            parts = item if isinstance(item, (list, tuple)) else (item,)
            found.extend((part, reads and not is_out) for part in parts if isinstance(part, torch.Tensor))
        if self.learned_writes:
            found.extend((tensor, True) for tensor in self.learned_tensors(args, kwargs))
        if self.hidden_writes is not None:
            found.extend((tensor, False) for tensor in self.hidden_writes(args, kwargs))
        return found

    def uncounted_writes(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors whose version counters nobody moves below a mode: in written lists, or written undeclared."""
        found: list[torch.Tensor] = self.learned_tensors(args, kwargs)
        for position, name, _ in self.writes:
            item = _arg(args, kwargs, position, name)
            if isinstance(item, (list, tuple)):
                found.extend(part for part in item if isinstance(part, torch.Tensor))
        return found

    def learned_tensors(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors that an audit saw this op write without declaring it."""
        tensors = all_tensors((args, kwargs))
        return [tensors[position] for position in sorted(self.learned_writes) if position < len(tensors)]

    def learn_write(self, position: int) -> None:
        """An audit saw the tensor argument at ``position`` written."""
        self.learned_writes.add(position)
        self.may_write = True


def _is_tensor_in_place(func: Any, write: tuple[int, str, bool]) -> bool:
    position, _, is_out = write
    return not is_out and isinstance(func._schema.arguments[position].type, torch.TensorType)


def learn(func: Any) -> OpFacts:
    """The facts of an operator overload, from its schema, its tags and the lists above."""
    schema = func._schema
    namespace, _, base = schema.name.partition("::")
    writes = tuple(
        (i, arg.name, bool(arg.is_out))
        for i, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )
    returns = schema.returns
    hidden = _HIDDEN_WRITES.get(base) if namespace == "aten" else None
    is_view = (
        not writes and bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    )
    facts = OpFacts(
        name=str(func),
        run=quickest(func),
        is_view=is_view,
        writes=writes,
        makes_complex=base in _MAKES_COMPLEX,
        writes_uncounted=any("List" in str(schema.arguments[i].type) for i, _, _ in writes)
        and not base.startswith(_NEVER_COUNTED),
        hidden_writes=hidden,
        counts_writes=hidden is None and not base.startswith(_NEVER_COUNTED),
        only_write=writes[0][0]
        if len(writes) == 1 and hidden is None and _is_tensor_in_place(func, writes[0])
        else None,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_allocation=namespace == "aten" and base in _ALLOCATIONS,
        is_zeros=base == "_efficientzerotensor",
        overwrites=base in _OVERWRITES,
        overwrites_in_training=base == "rrelu_with_noise",
        is_foreign=namespace not in _NATIVE_NAMESPACES,
        has_fresh_results=any(r.alias_info is None for r in returns),
        is_simple=False,
        picks_kernels=torch.Tag.pointwise not in func.tags or base in _POINTWISE_BY_CHOICE,
        is_only_write=False,
        makes_constants=namespace not in ("aten", "prims", "prim") or "nested" in base or "quantize" in base,
        takes_lists=any("List[" in str(arg.type) and "Tensor" in str(arg.type) for arg in schema.arguments),
        is_factory=any(arg.name == "device" for arg in schema.arguments),
        takes_dtype=any(arg.name == "dtype" for arg in schema.arguments),
        unspecified=_UNSPECIFIED.get(base, frozenset()),
        has_flops=func._overloadpacket in flop_registry or (namespace == "aten" and base in OWN_FORMULAS),
        returns_tensor=len(returns) == 1 and isinstance(returns[0].type, torch.TensorType),
        is_replayable=base not in _NOT_REPLAYABLE and namespace not in _COLLECTIVE_NAMESPACES,
    )
    facts.is_only_write = facts.only_write == 0 and not (
        facts.has_fresh_results or facts.is_random or facts.is_foreign or not facts.is_replayable
    )
    facts.is_simple = not (
        facts.is_view
        or facts.may_write
        or facts.is_random
        or facts.is_allocation
        or facts.is_zeros
        or facts.is_factory
        or facts.is_foreign
        or facts.makes_complex
        or not facts.is_replayable
    )
    return facts
