"""Composite functions that compute otherwise when a dispatch mode is active, put back to what they compute without one.

A composite runs as its parts, and a few ask whether a mode is there, to avoid what tensor subclasses cannot do. The
recorder is a mode; its calls must not see a difference. Known is one: the weighted mean of `cross_entropy` with label smoothing
sums the weights of the targets that count, and with a mode those of all targets, the others set to zero: another order of
additions, so another last bit (``cross_entropy_loss_label_smoothing`` in ATen's LossNLL.cpp).

The function is replaced while any call of the process is recording, and decides by thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack, _nn
from torch._C._functorch import is_functorch_wrapped_tensor

from .ambient import RecorderMode

_MEAN = 1
_KINDS = (Tensor, nn.Parameter)
_lock = threading.Lock()
_here = threading.local()
_active = 0
_plain_cross_entropy: Callable[..., Tensor] = _nn.cross_entropy_loss


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    by_mode = reduction == _MEAN and 0.0 < label_smoothing <= 1.0 and target.shape != input.shape
    if not by_mode or weight is None or _is_seen_as_subclass(weight) or not _is_recording_alone():
        return _plain_cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing)
    # Autocast casts for the function, not for its parts.
    if input.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return _smoothed_mean(_float(input), target, _float(weight), ignore_index, label_smoothing)
    return _smoothed_mean(input, target, weight, ignore_index, label_smoothing)


def _is_seen_as_subclass(weight: Tensor) -> bool:
    """Whether plain PyTorch computes the other way for it as well: a subclass, or batched by `vmap`."""
    return type(weight) not in _KINDS or is_functorch_wrapped_tensor(weight)


def _is_recording_alone() -> bool:
    """Whether this thread records, and no mode of the program's is active: with one, plain PyTorch computes the other way, too."""
    if not getattr(_here, "recording", 0):
        return False
    stack = (_get_dispatch_stack_at(i) for i in range(_len_torch_dispatch_stack()))
    return all(isinstance(mode, RecorderMode) for mode in stack)


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _smoothed_mean(input: Tensor, target: Tensor, weight: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    class_dim = 0 if input.dim() == 1 else 1
    logs = input.log_softmax(class_dim, input.dtype)
    nll = _nn.nll_loss_nd(logs, target, weight, _MEAN, ignore_index)  # type: ignore[arg-type]  # the stub says str
    n_classes = logs.shape[class_dim]
    shape = [1] * logs.dim()
    shape[class_dim] = n_classes
    smooth = -(logs * weight.view(shape)).sum(class_dim)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    mean = smooth.sum() / weight.gather(0, target.masked_select(~ignored).flatten()).sum()
    return mean * (label_smoothing / n_classes) + nll * (1 - label_smoothing)


class AsWithoutModes:
    """Entered around a call that records."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _active
        with _lock:
            _active += 1
            _nn.cross_entropy_loss = _cross_entropy  # type: ignore[assignment]  # reduction is a number, the stub says str
        _here.recording = getattr(_here, "recording", 0) + 1

    def __exit__(self, *error: object) -> None:
        global _active
        _here.recording -= 1
        with _lock:
            _active -= 1
            if not _active:
                _nn.cross_entropy_loss = _plain_cross_entropy
