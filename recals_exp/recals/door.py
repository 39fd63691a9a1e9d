"""What is refused at the door, or noticed there: checked once per callable, so that calls pay nothing for it."""

from __future__ import annotations

import warnings
import weakref
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey

from .errors import RecalsWarning, UnsupportedError

_LOOKED_AT = 100  # items, in search of the modules behind a callable


def call_key(fn: Any) -> Any:
    """What stands for a callable across calls: a module itself, also behind its bound `__call__`; the code of a function."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module) and fn.__func__ is nn.Module.__call__:
        return owner
    fn = getattr(fn, "__func__", fn)
    key = getattr(fn, "__code__", fn)
    try:
        weakref.ref(key)
        hash(key)
    except TypeError:
        return type(key)
    return key


def audit_keys(fn: Any, args: tuple[Any, ...]) -> list[Any]:
    """What an audit of this call covers: the callable, and the modules it closes over or is given."""
    keys = [call_key(fn)]
    seen: list[Any] = []
    stack: list[Any] = [fn, *args]
    while stack and len(seen) < _LOOKED_AT:
        item = stack.pop()
        seen.append(item)
        if isinstance(item, nn.Module):
            keys.append(item)
        elif isinstance(item, partial):
            stack += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, MethodType):
            stack += [item.__self__, item.__func__]
        elif isinstance(item, (list, tuple)):
            stack += item
        elif isinstance(item, FunctionType):
            keys.append(item.__code__)
            stack += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            for cell in item.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    stack.append(cell.cell_contents)
    return keys


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


def check_modes() -> None:
    """Refuse to work on fake tensors."""
    if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
        raise UnsupportedError(
            "recals was called under FakeTensorMode (torch.export and shape propagation use it): fake tensors have no bytes "
            "to hold or drop. Call the function without recals there."
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
