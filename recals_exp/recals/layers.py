"""Which layer is running: found from the Python stack, so that recording pays nothing for it.

``nn.Module.__call__`` runs ``_call_impl`` (or ``_slow_forward``) with the module as ``self``; the innermost such frame is
the layer in flight, the frames above it are its containers.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn


def modules_in_flight() -> list[nn.Module]:
    """The modules whose call is running in this thread, innermost first, each once."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and (not found or found[-1] is not module):
                found.append(module)
        frame = frame.f_back
    return found


def layer_name(stack: list[nn.Module]) -> str:
    """Qualified name of the innermost module of ``modules_in_flight()``; its type for the root itself; "" for none."""
    if not stack:
        return ""
    layer, root = stack[0], stack[-1]
    name = next((name for name, module in root.named_modules() if module is layer), "")
    return name or type(layer).__name__


def describe_layer(stack: list[nn.Module]) -> str:
    """Such as ``"blocks.0.mlp (Linear)"``, for messages."""
    if not stack:
        return "(outside of any module)"
    name, kind = layer_name(stack), type(stack[0]).__name__
    return name if name == kind else f"{name} ({kind})"
