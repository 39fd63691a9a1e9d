"""What autograd gets in place of the tensors it saves: the pack hook of one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, UntypedStorage
from torch._C import DisableTorchFunction, _DisableTorchDispatch

from .ambient import would_be_seen_unary
from .handles import Handle, LeafHandle
from .layers import describe_layer, modules_in_flight
from .session import Session
from .storages import NO_STORAGE, Storages
from .tape import Source, TensorValue

if TYPE_CHECKING:
    from .recals import Recals


class Saver:
    """Makes the handles of one call.

    Attributes:
        blanks: saved since the last op, of memory that no op has filled yet.
    """

    def __init__(self, owner: Recals, session: Session, storages: Storages) -> None:
        self.session = session
        self.storages = storages
        self.cache = owner.cache
        self.registry = owner.registry
        self.blanks: list[tuple[Handle, UntypedStorage]] = []

    def pack(self, tensor: Tensor) -> Handle | LeafHandle:
        """Autograd saves ``tensor``: what it gets instead."""
        if would_be_seen_unary(tensor):
            with DisableTorchFunction():
                return self.pack(tensor)
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            return LeafHandle(tensor.detach())
        value = self.registry.get(id(storage))
        if type(value) is TensorValue and (tensor._version != value.count or value.pin.session != self.session.serial):
            value = self.storages.as_it_is(value, tensor, storage)  # autograd saves an argument before its op runs
        if (
            value is None
            or value.nbytes == 0
            or (type(value) is not TensorValue and ((type(value) is Source and value.is_leaf) or tensor.is_nested))
        ):
            # What autograd did not make is held as it is, like plain PyTorch does: it may be a Parameter, and its
            # ``.data`` may yet be exchanged.
            return LeafHandle(tensor if tensor.grad_fn is None else tensor.detach())
        if value.handles:
            known = value.handle_of(tensor)
            if known is not None:  # saved once by its producer and once by its consumer: one handle serves both
                return known
        guard = _DisableTorchDispatch()
        try:
            alias = tensor.detach()
        finally:
            del guard
        handle = Handle(alias, value, self.cache, self.session)
        value.saved(tensor, handle)
        if type(value) is TensorValue:
            value.guard = alias
            value.guard_version = handle.version
            if value.nbytes > self.session.largest_bytes:
                self._largest(value.nbytes)
        elif isinstance(value, Source) and value.is_blank and not value.pinned:
            # The op that is saving it may be about to fill it (rule 3): decided when that op has returned.
            value.pinned = True
            self.blanks.append((handle, storage))
        self.cache.save(value, storage)
        return handle

    def settle(self) -> None:
        """Hold what autograd saved while it was blank, unless an op is its producer by now."""
        for handle, storage in self.blanks:
            value = handle.value
            if type(value) is Source and value.is_blank:
                value.keep(storage, self.cache)
        self.blanks.clear()

    def _largest(self, nbytes: int) -> None:
        session = self.session
        session.largest_bytes = nbytes
        limit = self.cache.limit_bytes
        if limit is not None and nbytes > limit:
            session.largest_layer = describe_layer(modules_in_flight())
