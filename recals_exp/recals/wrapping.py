"""A limit in people's own code, by one line: a module that calls another one through a `Recals`, or the module itself made so.

Why two: a wrapper leaves the module as it is, and is what a plain loop or a part of a larger model takes. Trainers look at the
model's class (`isinstance`, the signature of `forward`, methods such as `save_pretrained`): there the module must stay what it
is, and `attach` changes how it is called and nothing else.

Rules the code follows:

1. Names are the module's: `state_dict`, `named_parameters` and `named_modules` of a wrapper have the same keys. It shares the
   module's own dictionaries of parameters, buffers and children instead of having the module as a child.
2. Attaching swaps the module's class for a derived one that overrides `__call__` alone. A patched `forward` would be copied by
   `deepcopy` bound to the original, and could not be pickled.
3. A copy, or an unpickled module, has a cache of its own with the same limit and policy.
4. With gradients off a call costs one check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from torch import nn

from .door import check_supported

if TYPE_CHECKING:
    from .recals import Recals

_KEY = "_recals_of_this_module"
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What a wrapper has in common with its module (rule 1)."""


@final
class RecalsModule(nn.Module):
    """`module`, called through `recals`. Made by `Recals.wrap`."""

    def __init__(self, module: nn.Module, recals: Recals) -> None:
        super().__init__()
        _refuse_twice(module)
        check_supported(module)
        self.__dict__["wrapped"] = module  # in no dictionary of children, so that no name changes (rule 1)
        self.__dict__["recals"] = recals
        for shared in _SHARED:
            self.__dict__[shared] = module.__dict__[shared]
        self.__dict__["training"] = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.recals(self.wrapped, *args, **kwargs)

    def train(self, mode: bool = True) -> RecalsModule:
        self.wrapped.train(mode)
        self.__dict__["training"] = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RecalsModule:
        self.wrapped._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        """What it does not have itself is the module's: configuration, methods, parameters."""
        wrapped = self.__dict__.get("wrapped")
        if wrapped is None:  # while being copied or unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(wrapped, name)

    # what a class may have made its own of its state goes through the module
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{type(self.wrapped).__name__}, {_limit_of(self.recals)}"


@final
class Attachment:
    """What `Recals.attach` did to a module. `remove` undoes it; as a context it removes itself at the end."""

    def __init__(self, module: nn.Module, recals: Recals) -> None:
        self.module = module
        self.recals = recals

    def remove(self) -> None:
        """Make the module what it was. ValueError if it is not attached (any more)."""
        if self.module.__dict__.get(_KEY) is not self.recals:
            raise ValueError(
                f"this {type(self.module).__name__} is not attached to this recals: it was removed already"
            )
        del self.module.__dict__[_KEY]
        self.module.__class__ = type(self.module).__mro__[1]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def attach(module: nn.Module, recals: Recals) -> Attachment:
    """Make calls of `module` go through `recals` (rule 2)."""
    _refuse_twice(module)
    check_supported(module)
    module.__class__ = _attached_class(type(module))
    module.__dict__[_KEY] = recals
    return Attachment(module, recals)


_classes: dict[type[nn.Module], type[nn.Module]] = {}  # of a program; as many as it has classes of attached modules


def _attached_class(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` with another `__call__`, by the same name; one for each class."""
    made = _classes.get(kind)
    if made is None:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recals = self.__dict__.get(_KEY)
            inner = kind.__call__.__get__(self)
            return inner(*args, **kwargs) if recals is None else recals(inner, *args, **kwargs)

        body = {
            "__call__": call,
            "__reduce_ex__": _reduce,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        made = _classes[kind] = type(kind.__name__, (kind,), body)
    return made


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Rebuilt from the original class, which can be imported, and attached anew (rule 3)."""
    return _restore, (type(self).__mro__[1],), dict(self.__dict__)


def _restore(kind: type[nn.Module]) -> nn.Module:
    made = _attached_class(kind)
    return made.__new__(made)


def _refuse_twice(module: nn.Module) -> None:
    if isinstance(module, RecalsModule) or _KEY in module.__dict__:
        how = "wrapped" if isinstance(module, RecalsModule) else "attached"
        raise ValueError(
            f"this {type(module).__name__} is {how} already: one limit holds for all it calls; remove the attachment, or wrap "
            "the module itself"
        )


def _limit_of(recals: Recals) -> str:
    limit = recals.cache_limit_bytes
    return f"{recals.policy}, " + ("no limit" if limit is None else f"limit {limit} bytes")
