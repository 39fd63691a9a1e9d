"""The global settings an op ran under, and the neutral ground a replay runs on (rule 7).

Ops are recorded below autograd and autocast, so both are switched off for a replay by running it under the very dispatch
keys the recorder saw. Settings that choose between kernels (default dtype, TF32, determinism, cuDNN's choices) are noted
once per call and put in force for its replays.

Dispatch modes: the recorders of this engine never see a replay. Other modes that are active when backward runs stay
active (``FlopCounterMode`` counts re-run work like any other; ``docs/engine.md`` says why this departs from "none").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode


class RecorderMode(TorchDispatchMode):
    """Base of this engine's modes, to tell them from others."""


PLAIN_KEYS = (_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())


class _Probe(RecorderMode):
    """Reads the dispatch keys that are in force inside a mode's handler."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keys = (_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())
        return func(*args, **(kwargs or {}))


def _handler_keys() -> tuple[Any, Any]:
    with _ForceDispatchKeyGuard(*PLAIN_KEYS), _Probe() as probe:
        torch.empty(0)
    return probe.keys


_LAZY_BITS = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)
_HANDLER_KEYS = _handler_keys()


def share_version(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias of ``tensor`` that shares its version counter, also from inside a mode's handler."""
    with _ForceDispatchKeyGuard(*PLAIN_KEYS), torch.no_grad():
        return tensor.detach()


def lazy_bits_resolved() -> _ForceDispatchKeyGuard:
    """A guard for running complex ops below a mode.

    A mode's handler runs with the Conjugate and Negative keys excluded, so a kernel that takes a conjugate *view* inside
    would have its bit ignored: wrong values (pytorch#198118).
    """
    exclude = _dispatch_tls_local_exclude_set() - _LAZY_BITS
    return _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), exclude)


@contextmanager
def neutral(observed: bool = True) -> Iterator[None]:
    """Below autograd and autocast, no gradient, no recorder, no default device; others' modes only if ``observed``."""
    include, exclude = _HANDLER_KEYS
    foreign = _set_recorders_aside() if observed and _len_torch_dispatch_stack() else None
    if foreign is not None and _len_torch_dispatch_stack():
        include = include | DispatchKeySet(DispatchKey.Python)
    try:
        with _ForceDispatchKeyGuard(include, exclude), torch.no_grad(), torch._C.DisableTorchFunction():
            yield
    finally:
        if foreign is not None:
            _put_back(foreign)


def _set_recorders_aside() -> list[Any]:
    """Leave only other people's modes on the stack; returns the whole stack."""
    stack = [_get_dispatch_stack_at(i) for i in range(_len_torch_dispatch_stack())]
    if any(isinstance(mode, RecorderMode) for mode in stack):
        for _ in stack:
            _pop_torch_dispatch_stack(None)
        for mode in stack:
            if not isinstance(mode, RecorderMode):
                _push_on_torch_dispatch_stack(mode)
    return stack


def _put_back(stack: list[Any]) -> None:
    while _len_torch_dispatch_stack():
        _pop_torch_dispatch_stack(None)
    for mode in stack:
        _push_on_torch_dispatch_stack(mode)


def _settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))

    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),  # reductions split by it
        "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "mkldnn": attribute(torch.backends.mkldnn, "enabled"),
    }
    if torch.backends.cudnn.is_available():
        for name in ("enabled", "benchmark", "deterministic"):
            found[f"cudnn {name}"] = attribute(torch.backends.cudnn, name)
    return found


_SETTINGS = _settings()


class Ambient:
    """The global settings of one call; immutable."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = tuple(read() for read, _ in _SETTINGS.values())

    @contextmanager
    def in_force(self) -> Iterator[None]:
        present = tuple(read() for read, _ in _SETTINGS.values())
        if present == self.values:
            yield
            return
        changed = [
            (write, now, then)
            for (_, write), now, then in zip(_SETTINGS.values(), present, self.values, strict=True)
            if now != then
        ]
        try:
            for write, _, then in changed:
                write(then)
            yield
        finally:
            for write, now, _ in changed:
                write(now)
