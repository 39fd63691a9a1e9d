"""Re-running recorded ops on neutral ground."""

from __future__ import annotations

from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from .ambient import Ambient, NeutralGround, lazy_bits_resolved
from .errors import ReplayError
from .graph import Op, Value
from .ops import Constant, Ref, TensorOp
from .tape import Source


def flat_tensors(out: Any) -> list[Tensor]:
    """The tensors an op returned, in order; undefined results (None) are left out."""
    if isinstance(out, Tensor):
        return [out]
    found: list[Tensor] = []
    if isinstance(out, (list, tuple)):
        for part in out:
            found.extend(flat_tensors(part))
    return found


class Replaying:
    """Around the ops of one replay."""

    __slots__ = ("_ground", "_outer", "_replayer")

    def __init__(self, replayer: Replayer, observed: bool) -> None:
        self._replayer = replayer
        self._ground = NeutralGround(observed)

    def __enter__(self) -> None:
        replayer = self._replayer
        self._ground.__enter__()
        self._outer = replayer.ambient, replayer.replaced
        replayer.ambient = replayer.replaced = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        replayer = self._replayer
        try:
            replayer.put_in_force(None)
        finally:
            replayer.ambient, replayer.replaced = self._outer
            self._ground.__exit__(kind, error, trace)


class Replayer:
    """Runs ops of one cache; called with the cache's lock held.

    ``flops`` counts what was re-run by torch's formulas.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.ambient: Ambient | None = None  # in force, if the replay that is running has put one in force
        self.replaced: Ambient | None = None  # what it replaced, if that differed

    def replaying(self, observed: bool = True) -> Replaying:
        """``observed``: dispatch modes of other people see the ops."""
        return Replaying(self, observed)

    def put_in_force(self, ambient: Ambient | None) -> None:
        """The settings of the ops that follow; None: those that were in force before the replay."""
        if self.replaced is not None:
            replaced, self.replaced = self.replaced, None
            replaced.replace()
        self.ambient = ambient
        if ambient is not None:
            self.replaced = ambient.replace()

    def run(self, op: Op, env: dict[Value, Any], wanted: list[Value], scratch: set[Value]) -> list[UntypedStorage]:
        assert isinstance(op, TensorOp)
        if op.ambient is not self.ambient:
            self.put_in_force(op.ambient)
        storages = env
        if op.written:
            # A replay writes only memory of its own (rule 5).
            own: dict[Value, Any] = {}
            for value in op.written:
                if isinstance(value, Source) and value.is_blank:
                    own[value] = UntypedStorage(value.nbytes, device=value.device)
                elif value not in scratch:
                    own[value] = env[value].clone()
            storages = {**{v: env[v] for v in op.inputs}, **own}
        if op.grad_mode is not torch.is_grad_enabled():
            torch._C._set_grad_enabled(op.grad_mode)  # ``neutral`` puts it back
        args = [_bound(arg, storages) for arg in op.args]
        kwargs = {name: _bound(arg, storages) for name, arg in op.kwargs.items()} if op.kwargs else {}
        run = op.func._op if kwargs or op.is_complex else op.facts.run
        if op.rng is None and not op.is_complex:
            out = run(*args, **kwargs)
        else:
            with (
                op.rng.restored() if op.rng else nullcontext(),
                lazy_bits_resolved() if op.is_complex else nullcontext(),
            ):
                out = run(*args, **kwargs)
        if op.facts.has_flops:
            self.flops += op.flops()
        outs = flat_tensors(out)
        found: list[UntypedStorage] = []
        for value in wanted:
            if value.index < 0:
                storage = storages[op.written[-value.index - 1]]
            elif value.index < len(outs):
                storage = outs[value.index].untyped_storage()
            else:
                raise ReplayError(
                    f"{op.name()} gave {len(outs)} tensors when re-run; result {value.index} is wanted", op=op.name()
                )
            if storage.nbytes() != value.nbytes:
                raise ReplayError(
                    f"{op.name()} gave a storage of {storage.nbytes()} bytes when re-run; it had {value.nbytes} in forward. "
                    "Something it depends on has changed since; run backward before changing it.",
                    op=op.name(),
                )
            found.append(storage)
        return found


def _bound(arg: Any, storages: dict[Value, Any]) -> Any:
    kind = type(arg)
    if kind is Ref:
        return arg.tensor(storages[arg.value])
    if kind is list:
        return [_bound(part, storages) for part in arg]
    if kind is Constant:
        return arg.tensor()
    return arg
