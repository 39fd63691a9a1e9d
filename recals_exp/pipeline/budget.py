"""The cache budget of a stage: from what a user writes to the ``Recals`` that holds all micro-batches in flight.

Rules:

1. A number of bytes (or text such as "512MiB") is the limit of the stage, over all its micro-batches together; -1 is no
   limit, but measured.
2. A fraction is a share of what the stage would cache for one whole call: the bytes `Recals.analyze` finds for the first
   micro-batch, times the number of micro-batches. A share below the smallest limit that works is raised to that. It
   becomes bytes at the first call that records gradients, and then stays: memory is a fixed size.
3. A ``Recals`` is used as it is; stages that are given the same one share its limit.
4. Analysing runs the stage once more. Whatever that changes is put back: buffers and generators by the engine, what
   modules keep in Python attributes (the state of spiking neurons, counters) by `undone` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recals_exp.pipeline.placed import stage_modules
from recals_exp.recals import Recals, parse_bytes, recals_with_rngs

Budget = int | float | str | Recals | Callable[..., Any] | None
UNLIMITED = -1


class StageBudget:
    """What one stage may cache: first as written, later as a ``Recals``."""

    def __init__(self, written: Budget, policy: Any = "fifo") -> None:
        self.written = check_budget(written)
        self._policy = policy
        self._recals: Any = self._of_bytes() if not self.is_fraction else None

    @property
    def is_fraction(self) -> bool:
        """Whether the limit still depends on an analysis (rule 2)."""
        return isinstance(self.written, float)

    @property
    def recals(self) -> Any:
        """The ``Recals`` in force; None without a budget, or before a fraction was resolved."""
        return self._recals

    def resolve(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], n_calls: int) -> Any:
        """The ``Recals`` for a call of ``n_calls`` micro-batches of which ``args`` is the first."""
        if self._recals is None and isinstance(self.written, float):
            # on copies: a first layer that works in place would otherwise change its input twice
            copies, named = pytree.tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))
            with undone(module):
                analysis = recals_with_rngs(UNLIMITED).analyze(module, *copies, **named)
            share = math.floor(self.written * analysis.total_bytes * n_calls * (1 + 1e-12))
            smallest = analysis.pinned_bytes * n_calls + analysis.largest_value_bytes
            self._recals = self._make(max(share, smallest))
        return self._recals

    def _of_bytes(self) -> Any:
        if self.written is None or callable(self.written):
            return self.written
        assert isinstance(self.written, int)
        return self._make(self.written)

    def _make(self, limit_bytes: int) -> Any:
        if isinstance(self._policy, str) or not callable(self._policy):
            return recals_with_rngs(limit_bytes, policy=self._policy)
        return self._policy(limit_bytes)


def check_budget(written: Budget) -> Budget:
    """The budget with text read as bytes or a fraction; ValueError names the forms that are allowed."""
    if written is None or (callable(written) and not isinstance(written, type)):
        return written
    value: Any = written
    if isinstance(value, str):
        try:
            value = float(value) if "." in value else parse_bytes(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        value = None
    if isinstance(value, float) and not 0 < value <= 1:
        value = None
    if isinstance(value, int) and value < UNLIMITED:
        value = None
    if value is None:
        raise ValueError(
            f"budget={written!r} is not a stage's budget: use bytes (an int, or text such as '512MiB'), a fraction in "
            "(0, 1] (a float, of what the stage would cache for one call), a Recals, or None for no limit"
        )
    return value


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Put back what running ``module`` changes in it: Python attributes, and tensors kept in attributes and buffers."""
    kept = []
    for part in stage_modules(module):
        attributes = {name: value for name, value in vars(part).items() if name not in ("_parameters", "_modules")}
        tensors = [
            (tensor, tensor._version, tensor.detach().clone())
            for tensor in (*attributes.values(), *part._buffers.values())
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
        ]
        kept.append((part, attributes, dict(part._buffers), tensors))
    try:
        yield
    finally:
        with torch.no_grad():
            for part, attributes, buffers, tensors in kept:
                for name in [
                    name for name in vars(part) if name not in attributes and name not in ("_parameters", "_modules")
                ]:
                    del part.__dict__[name]
                part.__dict__.update(attributes)
                part._buffers.clear()
                part._buffers.update(buffers)
                for tensor, version, content in tensors:
                    # batch norm moves its running statistics without telling the version counter
                    if tensor._version != version or not torch.equal(tensor, content):
                        tensor.detach().copy_(content)
