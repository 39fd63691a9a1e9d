"""What a strategy is: a description that can be bound to a model, and the model under it.

Rules the code follows:

1. Abstract or final: `Strategy` and `BoundStrategy` say what there is; every other class is complete and not derived
   from again.
2. Each bind is independent: a copy of a model bound for a check shares no cache, limit, statistics or compiled code with
   the one that is timed.
3. Between two calls of a bound strategy the model is as it was: the plain and the wrapped step of a pair run on the same
   modules. What a strategy changes, it changes for the time of a call, and puts it back also after an exception.
4. Parameters and buffers are the model's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recals_exp.recals import Stats

NO_BUDGET, BYTES, SHARE = "none", "bytes", "share"
BUDGET_KINDS = (NO_BUDGET, BYTES, SHARE)
"""What `budget` means to a strategy: nothing; a limit in bytes; or a fraction that it makes its own sense of."""


@dataclass(frozen=True)
class Terms:
    """What a user agrees to. The two flags are promises that the conformance suite holds a strategy to."""

    needs: str  # to run, or to save anything at all
    changes: str  # beside time and memory
    exact_gradients: bool  # outputs, loss and gradients are plain eager PyTorch's to the last bit
    exact_buffers: bool  # buffers (batch norm's statistics) are too


class BoundStrategy(ABC):
    """A model under a strategy: called like the model, with the same result."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)`, with less memory held for backward."""

    @property
    def limit_bytes(self) -> int | None:
        """The limit on cached bytes that is in force; None if there is none."""
        return None

    @property
    def stats(self) -> Stats | None:
        """The engine's account since the last reset; None if the strategy keeps none."""
        return None

    def reset_stats(self) -> None:  # noqa: B027  # most strategies keep no account
        """Start the account anew; nothing if there is none."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the modules it treats one by one; empty if it treats the model as a whole."""
        return ()

    @property
    def step_flops(self) -> int | None:
        """FLOPs of a step, where `FlopCounterMode` cannot see them (compiled code); None where it can, or not known."""
        return None

    @property
    def hides_flops(self) -> bool:
        """Whether `FlopCounterMode` sees something else than what runs: PyTorch skips compiled code under such a mode."""
        return False


class Strategy(ABC):
    """What to do with a model's forward pass."""

    name: str  # what the configuration and the reports call it
    budget_kind: str  # one of `BUDGET_KINDS`; with `none`, `bind` is given no limit and the report shows no budget

    @property
    @abstractmethod
    def terms(self) -> Terms:
        """What it needs and what it changes."""

    @abstractmethod
    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        """The model under this strategy, held to the limit: bytes, or a share in (0, 1], as `budget_kind` says.

        None is no limit.
        """

    @property
    def policy(self) -> str:
        """What decides which values to drop, among the engine's policies; `none` if the strategy has another way."""
        return "none"

    @property
    def uses_budget(self) -> bool:
        """Whether the budget is a limit in bytes on the cache."""
        return self.budget_kind == BYTES

    def check_device(self, device: torch.device) -> None:  # noqa: B027  # most run everywhere
        """ValueError, with the way out, if the strategy cannot run on this device of this machine."""

    def own_baseline(self) -> Strategy | None:
        """The same machinery without its memory saving, where that is not plain eager PyTorch: compiled code."""
        return None


def refuse_limit(name: str, limit: float | None) -> None:
    """For strategies without a budget."""
    if limit is not None:
        raise ValueError(f"strategy {name!r} cannot hold a limit, but got {limit} bytes: use strategy=recals")
