"""A model whose blocks run through another function for the time of a call.

Why not replace the blocks by wrappers: names, `state_dict` keys and the plain step of a pair would change with them. Why
not forward hooks: a hook cannot run the block inside of something.

While a call runs, each block's `forward` is an attribute of the instance, which hides the class's; afterwards whatever was
there before is there again, also after an exception. The block's own hooks run outside of the replacement, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from recals_exp.strategies.blocks import Block
from recals_exp.strategies.strategy import BoundStrategy

Forward = Callable[..., Any]
_ABSENT = object()


@final
class Patches:
    """The replacements of some blocks' `forward`. They are made once, so that compiled code meets the same objects again."""

    def __init__(self, blocks: Sequence[Block], replace: Callable[[Forward], Forward]) -> None:
        self.names = tuple(name for name, _ in blocks)
        self._entries = [(module, replace(module.forward)) for _, module in blocks]

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [module.__dict__.get("forward", _ABSENT) for module, _ in self._entries]
        try:
            for module, forward in self._entries:
                module.__dict__["forward"] = forward
            yield
        finally:
            for (module, _), was in zip(self._entries, before, strict=True):
                if was is _ABSENT:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = was


@final
class PatchedModel(BoundStrategy):
    """A model called with its blocks' `forward` replaced."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], replace: Callable[[Forward], Forward], strategy: str
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._runs = 0
        self._patches = Patches(blocks, lambda forward: self._counted(replace(forward)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._patches.applied():
            out = self._model(*args, **kwargs)
        if not self._runs:
            raise ValueError(
                f"strategy={self._strategy}: the model ran, but none of the blocks {', '.join(self._patches.names)} was "
                "called as a module, so nothing was saved: name other modules with strategy.blocks=[NAME, ...]"
            )
        return out

    def _counted(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._runs += 1
            return forward(*args, **kwargs)

        return run

    @property
    def blocks(self) -> tuple[str, ...]:
        return self._patches.names
