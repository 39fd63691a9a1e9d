"""The global settings an op ran under, and the neutral ground a replay runs on (rule 7).

Ops are recorded below autograd and autocast, so both are switched off for a replay by running it under the very dispatch
keys the recorder saw. Settings that choose between kernels (default dtype, TF32, determinism, cuDNN's choices) are noted
once per call and put in force for its replays.

Dispatch modes: the recorders of this engine never see a replay. Other modes that are active when backward runs stay
active (``FlopCounterMode`` counts re-run work like any other; ``docs/engine.md`` says why this departs from "none").
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
    _get_dispatch_stack_at,
    _get_fp32_precision_getter,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
    _set_fp32_precision_setter,
)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode

F = TypeVar("F", bound=Callable[..., Any])


def never_compiled(function: F) -> F:
    """Called from compiled code, ``function`` and what it calls run as they are.

    What ``torch.compiler.disable`` does, without its wrapper around each call and without importing the compiler.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is it looked into
    return function


class RecorderMode(TorchDispatchMode):
    """Base of this engine's modes, to tell them from others."""

    def __init_subclass__(cls) -> None:
        handler = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__()
        if handler is not None:  # without the three Python calls per op that PyTorch puts around it
            cls.__torch_dispatch__ = never_compiled(handler)  # type: ignore[method-assign]


PLAIN_KEYS = (_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())
with torch._C._AutoDispatchBelowAutograd():
    _BELOW_AUTOGRAD = (_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())


class _Probe(RecorderMode):
    """Reads the dispatch keys that are in force inside a mode's handler."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keys = (_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())
        return func(*args, **(kwargs or {}))


def _handler_keys() -> tuple[Any, Any]:
    with _ForceDispatchKeyGuard(*PLAIN_KEYS), _Probe() as probe:
        torch.empty(0)
    return probe.keys


# Put in front of the filters as they are: ``warnings.catch_warnings`` makes Python forget what it has said once already.
_SILENCE = ("ignore", None, Warning, None, 0)
# Functions of ``torch`` that are called on these arguments would be seen by the program's ``TorchFunctionMode``, or by their class. As
# a rule neither is asked where an op arrives, but both are below code in C++: a scripted function, the engine of autograd.
would_be_seen = torch._C._has_torch_function
would_be_seen_unary = torch._C._has_torch_function_unary
_LAZY_BITS = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)
_HANDLER_KEYS = _handler_keys()


def share_version(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias of ``tensor`` that shares its version counter, also from inside a mode's handler."""
    with _ForceDispatchKeyGuard(*_BELOW_AUTOGRAD):  # not ``no_grad``: this runs for every saved tensor
        return tensor.detach()


def lazy_bits_resolved() -> _ForceDispatchKeyGuard:
    """A guard for running complex ops below a mode.

    A mode's handler runs with the Conjugate and Negative keys excluded, so a kernel that takes a conjugate *view* inside
    would have its bit ignored: wrong values (pytorch#198118).
    """
    exclude = _dispatch_tls_local_exclude_set() - _LAZY_BITS
    return _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), exclude)


class NeutralGround:
    """Below autograd and autocast, no gradient, no recorder, no default device; others' modes only if ``observed``.

    And silent: what an op had to warn of, it said in forward. Entered once per replay, so without the layers of
    ``contextlib``.
    """

    __slots__ = ("_filters", "_foreign", "_functions", "_grad", "_keys", "_observed")

    def __init__(self, observed: bool = True) -> None:
        self._observed = observed

    def __enter__(self) -> None:
        include, exclude = _HANDLER_KEYS
        self._foreign = _set_recorders_aside() if self._observed and _len_torch_dispatch_stack() else None
        if self._foreign is not None and _len_torch_dispatch_stack():
            include = include | DispatchKeySet(DispatchKey.Python)
        self._filters = warnings.filters
        self._filters.insert(0, _SILENCE)  # type: ignore[attr-defined]
        self._grad = torch.is_grad_enabled()
        self._keys = _ForceDispatchKeyGuard(include, exclude)
        self._keys.__enter__()
        torch._C._set_grad_enabled(False)
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._functions.__exit__(kind, error, trace)
        torch._C._set_grad_enabled(self._grad)
        self._keys.__exit__(kind, error, trace)
        with suppress(ValueError):  # reset by another thread
            self._filters.remove(_SILENCE)  # type: ignore[attr-defined]
        if self._foreign is not None:
            _put_back(self._foreign)


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


_SMALLEST_NORMAL, _HALF = sys.float_info.min, 0.5  # names, or Python would multiply them once and for all

Setting = tuple[Callable[[], Any], Callable[[Any], None]]

# Wider ones first: a narrower one that was never set follows the wider, so writing it would be one write too many.
_PRECISIONS = [("generic", "all")] + [(b, op) for b in ("mkldnn", "cuda") for op in ("all", "matmul", "conv", "rnn")]


def _precision(backend: str, op: str) -> Setting:
    def write(value: str) -> None:
        _set_fp32_precision_setter(backend, op, value)

    return partial(_get_fp32_precision_getter, backend, op), write


def _settings() -> dict[str, Setting]:
    # The setters are the C ones: those of ``torch.backends`` refuse after ``torch.backends.disable_global_flags()``.
    found: dict[str, Setting] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),  # loops split by it
        "flush denormals": (flushes_denormals, _set_flush_denormals),
        "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        "mkldnn deterministic": (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
        # set before the precisions of the backends, which it overwrites
        "matmul precision": (_matmul_precision, torch._C._set_float32_matmul_precision),
    }
    for backend, op in _PRECISIONS:
        found[f"{backend} {op} precision"] = _precision(backend, op)
    if torch.backends.cudnn.is_available():
        found |= {
            "cudnn": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
            "cudnn benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
            "cudnn deterministic": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
        }
    return found


def flushes_denormals() -> bool:
    """Whether this thread's arithmetic takes denormal numbers for 0 (PyTorch has a setter only)."""
    return _SMALLEST_NORMAL * _HALF == 0.0


def _set_flush_denormals(value: bool) -> None:
    torch.set_flush_denormal(value)


def _matmul_precision() -> str:
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:  # the precision was set per backend, which this getter cannot tell
        return ""


_SETTINGS = _settings()
_READERS = [read for read, _ in _SETTINGS.values()]


def kernel_choices() -> Callable[[], tuple[Any, ...]]:
    """A reader of the backends' settings that people change in the middle of a forward pass."""
    names = ["mkldnn", "mkldnn matmul precision"]
    if torch.cuda.is_available():
        names += ["cuda matmul precision", "cuda conv precision", "cudnn", "cudnn benchmark", "cudnn deterministic"]
    readers = [_SETTINGS[name][0] for name in names if name in _SETTINGS]
    if len(readers) == 2:
        first, second = readers
        return lambda: (first(), second())
    return lambda: tuple(read() for read in readers)


class Ambient:
    """The global settings of one call; immutable."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = tuple([read() for read in _READERS])

    def replace(self) -> Ambient | None:
        """Put these settings in force; returns those that were, if they were others."""
        present = Ambient()
        if present.values == self.values:
            return None
        try:
            self._write()
        except BaseException:
            present._write()
            raise
        return present

    def _write(self) -> None:
        for (read, write), value in zip(_SETTINGS.values(), self.values, strict=True):
            if value != read() and value != "":
                write(value)
