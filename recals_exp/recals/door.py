"""What is refused at the door, or noticed there: checked once per callable, so that calls pay nothing for it."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from .errors import RecalsWarning, UnsupportedError


def call_key(fn: Any) -> Any:
    """What stands for a callable across calls: a module itself, the code of a function."""
    fn = getattr(fn, "__func__", fn)
    key = getattr(fn, "__code__", fn)
    try:
        weakref.ref(key)
        hash(key)
    except TypeError:
        return type(key)
    return key


def check_supported(fn: Any) -> None:
    """Refuse what cannot be exact; say once what loses its benefit."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    modules = list(owner.named_modules()) if isinstance(owner, nn.Module) else []
    for name, module in modules:
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise UnsupportedError(
                f"module {name or 'itself'} is sharded by FSDP2 (fully_shard): its parameters are freed and gathered again "
                "around each use, so a dropped value could not be rebuilt from them. Use DistributedDataParallel, or "
                "apply recals to parts that are not sharded."
            )
    compiled = [name or "itself" for name, module in modules if _is_compiled(module)]
    if not modules and _is_compiled(fn):
        compiled = [getattr(fn, "__name__", "the function")]
    if compiled:
        shown = ", ".join(compiled[:3]) + (f" and {len(compiled) - 3} more" if len(compiled) > 3 else "")
        warnings.warn(
            f"torch.compile has no effect inside recals: {shown} will run eagerly (PyTorch skips compiled code while a "
            "dispatch mode is active). Results are exact; to use compiled code, compile around a model without recals, or "
            "use torch.compile's own activation_memory_budget.",
            RecalsWarning,
            stacklevel=5,
        )


def _is_compiled(fn: Any) -> bool:
    return (
        hasattr(fn, "_orig_mod")
        or hasattr(fn, "_torchdynamo_orig_callable")
        or getattr(fn, "_compiled_call_impl", None) is not None
    )


def refuse_function_transforms(error: RuntimeError) -> None:
    """Turn PyTorch's refusal of saved-tensor hooks under its function transforms into one with a way out."""
    if "support saved tensor hooks" in str(error):
        raise UnsupportedError(
            "torch.func.grad, vjp, jacrev and hessian do not work together with saved-tensor hooks, which recals rests on "
            "(PyTorch's limit). Apply the transform outside of the wrapped call, wrap only the parts beside it, or use "
            "torch.autograd.grad(..., create_graph=True), which works."
        ) from error
