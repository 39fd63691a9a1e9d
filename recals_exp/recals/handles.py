"""What autograd holds in place of a saved tensor.

A handle holds a detached *alias* of the saved tensor, which shares its version counter (rule 9). While the cache holds the
bytes, the alias is what autograd gets back. When they are dropped, the alias is *stripped*: its geometry is written
down and its data swapped for nothing, which leaves the version counter. An in-place change since packing raises what
plain PyTorch raises; else the tensor is put together again over the value's bytes, sharing the counter once more, so that
a change made *during* backward is seen too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from .ambient import PLAIN_KEYS, never_compiled, share_version, would_be_seen_unary
from .ops import Ref
from .storages import version_of
from .tape import Source, TensorValue

if TYPE_CHECKING:
    from .cache import Cache
    from .session import Session

_EMPTY: dict[torch.device, Tensor] = {}


def _empty_on(device: torch.device) -> Tensor:
    empty = _EMPTY.get(device)
    if empty is None:
        empty = _EMPTY[device] = torch.empty(0, device=device)
    return empty


def modified(kind: str, size: Any, found: int, expected: int) -> RuntimeError:
    """The error of plain PyTorch for a saved tensor that was modified."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(size)}] is at version {found}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class LeafHandle:
    """A saved leaf: nothing to count, nothing to drop; only the in-place guard to keep."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor) or 0

    def unpack(self) -> Tensor:
        tensor = self.tensor
        if not tensor.is_inference() and tensor._version != self.version:
            raise modified(tensor.type(), tensor.shape, tensor._version, self.version)
        return tensor


class Handle:
    """A saved value. Its death (with autograd's graph) is what frees the bytes (rule 10)."""

    __slots__ = ("__weakref__", "alias", "cache", "geometry", "session", "value", "version")

    def __init__(self, alias: Tensor, value: TensorValue | Source, cache: Cache, session: Session) -> None:
        self.alias = alias
        self.version: int = alias._version
        self.geometry: Ref | None = None
        self.session = session
        self.cache = cache
        self.value = value  # what the storage holds by now, which a recorded write changes

    def strip(self) -> None:
        """Let go of the bytes; keep how to read them, and the version counter."""
        if self.geometry is None:
            alias = self.alias
            with torch._C._ForceDispatchKeyGuard(*PLAIN_KEYS):
                self.geometry = geometry = Ref(None, alias)
                if geometry.is_conj or geometry.is_neg:
                    alias = self.alias = _without_bits(alias)
                alias.data = _empty_on(alias.device)

    def unpack(self) -> Tensor:
        """The saved tensor. Never the alias itself: it may be stripped while autograd still works with what it got."""
        with self.cache.lock:
            if self.alias._version != self.version:
                raise self._modified()
            storage = self.cache.fetch(self.value)
            tensor, geometry = share_version(self.alias), self.geometry
            if geometry is None:
                return tensor
            with torch._C._ForceDispatchKeyGuard(*PLAIN_KEYS):
                whole = torch.empty(0, dtype=geometry.dtype, device=storage.device)
                whole.set_(storage, geometry.offset, geometry.size, geometry.stride)
                tensor.data = whole
                if geometry.is_conj or geometry.is_neg:
                    tensor = _with_bits(tensor, geometry)
        return tensor

    def _modified(self) -> RuntimeError:
        alias, geometry = self.alias, self.geometry
        if geometry is None:
            return modified(alias.type(), alias.shape, alias._version, self.version)
        kind = torch.empty(0, dtype=geometry.dtype, device=alias.device).type()
        return modified(kind, geometry.size, alias._version, self.version)

    @never_compiled
    def __del__(self) -> None:
        if hasattr(self, "value"):
            with self.cache.lock:
                value = self.value
                self.cache.release(value)
                if value.handles == 0:
                    value.guard = None  # an alias too: it must not outlive the handles


@torch.no_grad()
def _without_bits(tensor: Tensor) -> Tensor:
    """An alias with the same version counter and no lazy conjugation or negation."""
    if tensor.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


@torch.no_grad()
def _with_bits(tensor: Tensor, geometry: Ref) -> Tensor:
    if geometry.is_conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if geometry.is_neg else tensor


@never_compiled
def unpack(handle: Handle | LeafHandle) -> Tensor:
    if would_be_seen_unary(None):  # by a mode
        with DisableTorchFunction():
            return handle.unpack()
    return handle.unpack()
