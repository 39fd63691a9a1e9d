"""Cases: what the parity suite runs, and the notes it takes of what can be seen.

A ``Subject`` is a callable with its arguments; a ``Case`` builds fresh ones and says what a step does with them; ``Notes``
write down what can be observed, by name. ``harness.py`` runs cases and compares the notes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from parity.freezing import Trace, freeze, tensors_in
from torch import Tensor, nn

Call = Callable[..., Any]
"""``call(fn, *args, **kwargs)``: plain, a ``Recals``, or anything else that promises to be the same."""

_MODULE_MACHINERY = frozenset(vars(nn.Module()))  # what is noted by name, or is no state


@dataclass
class Subject:
    """What is called. ``state``: more objects whose tensors or scalars the step may change (modules are found in ``fn``)."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    state: Any = None

    def __post_init__(self) -> None:
        owner = self.fn if isinstance(self.fn, nn.Module) else getattr(self.fn, "__self__", None)
        if isinstance(owner, nn.Module) and not self.modules:
            self.modules = {"": owner}

    def named(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """``parameters`` or ``buffers`` of all modules, with their names."""
        for prefix, module in self.modules.items():
            yield from getattr(module, f"named_{kind}")(prefix=prefix)


@dataclass(frozen=True, eq=False)
class Case:
    """One thing to run.

    Attributes:
        build: makes a fresh subject; called with all generators seeded, so weights and inputs are the same each time.
        loss: reduces what the call returned to what ``backward`` starts from; None: nothing there to differentiate.
        steps: how often the default script calls and differentiates; gradients accumulate.
        script: what to do with the subject instead of the default (``train``).
        between: called on the subject after each step of the default script (reset a state, say).
        droppable: False: everything it saves is pinned or a leaf; then nothing must be dropped.
        bites: False: at the smallest workable limit everything fits (one value is the whole cache, say).
        keeps_graph: the subject itself holds on to the graph (a recurrent state): the cache is empty when it is gone.
        makes_cycles: the subject makes reference cycles of its own: the collector may run before the cache is looked at.
        warns: the engine may say this (a ``RecalsWarning``; a piece of its text), once per process.
        raises: plain raises this type, so wrapped must too.
        options: further arguments of ``recals_with_rngs``.
    """

    name: str
    build: Callable[[], Subject]
    loss: Callable[[Any], Tensor | None] = field(default=lambda out: weighted_sum(out))
    steps: int = 2
    script: Callable[[Case, Call, Subject, Notes], None] | None = None
    between: Callable[[Subject], None] | None = None
    droppable: bool = True
    bites: bool = True
    keeps_graph: bool = False
    makes_cycles: bool = False
    warns: str | None = None
    raises: type[BaseException] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def weighted_sum(out: Any) -> Tensor | None:
    """A loss that is linear in every output that requires grad, each element with a weight of its own.

    Linear, so that it keeps no output alive (what autograd saved must really be rebuilt) and lets no NaN through.
    """
    total: Tensor | None = None
    for tensor in tensors_in(out):
        if not tensor.requires_grad:
            continue
        dense = tensor.values() if tensor.is_nested else tensor if tensor.layout is torch.strided else tensor.to_dense()
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        part = (real * _weights(real.shape, real.dtype, real.device)).sum()
        total = part if total is None else total + part.to(total.dtype)
    return total


def _weights(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1 + sum(shape))
    return (torch.rand(shape, generator=generator) + 0.5).to(device, dtype)


# -- a step and what is seen of it -------------------------------------------------------------------------------------


class Notes:
    """Writes down, by name, what can be seen of a subject."""

    def __init__(self, subject: Subject) -> None:
        self.trace: Trace = {}
        self._subject = subject

    def value(self, name: str, value: Any, versions: bool = True) -> None:
        """Anything: tensors and containers by content, other objects by type."""
        assert name not in self.trace, f"noted twice: {name}"
        self.trace[name] = freeze(value, versions)

    def outputs(self, out: Any, name: str = "output") -> None:
        """What a call returned, and which of its tensors share memory with what."""
        self.value(name, out, versions=False)
        subject = self._subject
        known: dict[int, str] = {}
        objects: dict[int, str] = {}
        sources: list[tuple[str, Tensor]] = [
            (f"input {i}", t) for i, t in enumerate(tensors_in((subject.args, subject.kwargs)))
        ]
        sources += [*subject.named("parameters"), *subject.named("buffers")]
        for label, tensor in sources:
            objects.setdefault(id(tensor), label)
            known.setdefault(_memory(tensor), label)
        for i, tensor in enumerate(tensors_in(out)):
            if (memory := _memory(tensor)) == 0:
                continue
            shared = objects.get(id(tensor)) or (known.get(memory) and f"memory of {known[memory]}") or "nothing"
            self.value(f"{name} {i} shares", shared)
            objects.setdefault(id(tensor), f"{name} {i}")
            known.setdefault(memory, f"{name} {i}")

    def gradients(self, when: str) -> None:
        subject = self._subject
        for i, tensor in enumerate(tensors_in((subject.args, subject.kwargs))):
            if tensor.is_leaf:
                self.value(f"gradient of input {i} {when}", tensor.grad, versions=False)
        for name, parameter in subject.named("parameters"):
            self.value(f"gradient of parameter {name} {when}", parameter.grad, versions=False)

    def state(self, when: str) -> None:
        """Parameters, buffers, inputs, Python-held state and generators."""
        subject = self._subject
        self.value(f"inputs {when}", (subject.args, subject.kwargs))
        for kind in ("parameters", "buffers"):
            for name, tensor in subject.named(kind):
                self.value(f"{kind[:-1]} {name} {when}", tensor.detach())
        for prefix, module in subject.modules.items():
            for name, part in module.named_modules(prefix=prefix):
                held = {key: value for key, value in vars(part).items() if key not in _MODULE_MACHINERY}
                self.value(f"Python state of {name or type(part).__name__} {when}", held)
        self.value(f"further state {when}", subject.state)
        self.generators(when)

    def generators(self, when: str) -> None:
        self.value(f"torch generator {when}", torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.value(f"accelerator generators {when}", torch.cuda.get_rng_state_all())
        self.trace[f"Python generator {when}"] = random.getstate()  # plain data already
        self.trace[f"NumPy generator {when}"] = [
            v.tobytes() if isinstance(v, np.ndarray) else v for v in np.random.get_state()
        ]


def _memory(tensor: Tensor) -> int:
    """Identifies the memory under a tensor; 0 where there is none."""
    try:
        return tensor.untyped_storage()._cdata if tensor.untyped_storage().nbytes() else 0
    except (NotImplementedError, RuntimeError):  # sparse and the like
        return 0


def train(case: Case, call: Call, subject: Subject, note: Notes) -> None:
    """The default script: call, look, differentiate, look."""
    for step in range(case.steps):
        out = call(subject.fn, *subject.args, **subject.kwargs)
        note.outputs(out, f"step {step} output")
        note.state(f"after forward {step}")
        loss = case.loss(out)
        del out  # nothing but the graph is to keep its values
        if loss is not None:
            loss.backward()
        del loss
        note.gradients(f"after backward {step}")
        note.state(f"after backward {step}")
        if case.between is not None:
            case.between(subject)
