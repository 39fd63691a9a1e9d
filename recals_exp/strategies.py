"""Ways to run a model's forward pass that save memory, behind one small interface.

A strategy is a description: it has a name, says what it needs, and holds no tensor. Bound to a model it becomes a
`BoundStrategy`, which is called where the model would be called and gives the same result.

Why bind, and not wrap the model: the plain and the wrapped step of a pair run on the same parameters, so a strategy
must leave the model itself as it is. Binding may return something that calls the model (recals), or something built
from it once (a compiled module, a module with checkpointed blocks), as long as parameters and buffers are the model's
own.

Rules the code follows:

1. Abstract or final: `Strategy` and `BoundStrategy` say what there is; every other class is complete and not derived
   from again.
2. Each bind is independent: a copy of a model bound for a check shares no cache, limit or statistics with the one
   that is timed.
3. A new strategy is a class and a line in `STRATEGIES`. The conformance suite (`tests/test_strategies.py`) then runs
   on it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

from torch import nn

from recals_exp.recals import POLICIES, Recals, Stats, recals_with_rngs


class BoundStrategy(ABC):
    """A model under a strategy: called like the model, with the same result."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)`, with less memory held for backward."""

    @property
    @abstractmethod
    def limit_bytes(self) -> int | None:
        """The limit on cached bytes that is in force; None if there is none."""

    @property
    @abstractmethod
    def stats(self) -> Stats | None:
        """The engine's account since the last reset; None if the strategy keeps none."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Start the account anew; nothing if there is none."""


class Strategy(ABC):
    """What to do with a model's forward pass."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the configuration and the reports call it."""

    @property
    @abstractmethod
    def uses_budget(self) -> bool:
        """Whether the budget means anything to it. If not, `bind` is given no limit and the report shows none."""

    @property
    @abstractmethod
    def policy(self) -> str:
        """What decides which values to drop; `none` if nothing is dropped."""

    @abstractmethod
    def bind(self, model: nn.Module, limit_bytes: int | None) -> BoundStrategy:
        """The model under this strategy, held to the limit (None: no limit)."""


@final
class NoStrategy(Strategy):
    """Plain PyTorch: the baseline, and a check of the measurement (its overhead must read 0)."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def uses_budget(self) -> bool:
        return False

    @property
    def policy(self) -> str:
        return "none"

    def bind(self, model: nn.Module, limit_bytes: int | None) -> BoundStrategy:
        if limit_bytes is not None:
            raise ValueError(f"strategy 'none' cannot hold a limit, but got {limit_bytes} bytes: use strategy=recals")
        return _PlainModel(model)


@final
class _PlainModel(BoundStrategy):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    @property
    def limit_bytes(self) -> int | None:
        return None

    @property
    def stats(self) -> Stats | None:
        return None

    def reset_stats(self) -> None:
        pass


@final
class RecalsStrategy(Strategy):
    """The activation cache held to a byte limit by this package's engine."""

    def __init__(
        self,
        policy: str = "fifo",
        policy_options: Mapping[str, Any] | None = None,
        gpu_devices: Any = "all",  # whose generators are saved, in every form `recals_with_rngs` takes
        audit: str = "first",  # when to check that what may be dropped reproduces: "first" call, "always", "off"
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} does not exist; there are: {', '.join(sorted(POLICIES))}")
        self._policy = policy
        self._policy_options = dict(policy_options or {})
        self._gpu_devices = gpu_devices
        self._audit = audit

    @property
    def name(self) -> str:
        return "recals"

    @property
    def uses_budget(self) -> bool:
        return True

    @property
    def policy(self) -> str:
        return self._policy

    def bind(self, model: nn.Module, limit_bytes: int | None) -> BoundStrategy:
        policy = POLICIES[self._policy](**self._policy_options)  # one policy serves one cache (rule 2)
        return _CachedModel(model, recals_with_rngs(limit_bytes, self._gpu_devices, policy=policy, audit=self._audit))


@final
class _CachedModel(BoundStrategy):
    def __init__(self, model: nn.Module, recals: Recals) -> None:
        self._model = model
        self._recals = recals

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recals(self._model, *args, **kwargs)

    @property
    def limit_bytes(self) -> int | None:
        return self._recals.cache_limit_bytes

    @property
    def stats(self) -> Stats | None:
        return self._recals.stats

    def reset_stats(self) -> None:
        self._recals.reset_stats()


STRATEGIES: Mapping[str, type[Strategy]] = {"none": NoStrategy, "recals": RecalsStrategy}
"""Name -> class (rule 3). Its keyword arguments are the strategy's options; `policy` and `policy_options` come from the
configuration's group `policy`, and only to a class that takes them."""

_FROM_POLICY_GROUP = ("policy", "policy_options")


def make_strategy(
    name: str, policy: str = "fifo", policy_options: Mapping[str, Any] | None = None, **options: Any
) -> Strategy:
    """The strategy of that name. ValueError says which strategies, policies and options there are."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy={name!r} does not exist; there are: {', '.join(sorted(STRATEGIES))}")
    kind = STRATEGIES[name]
    takes = set(inspect.signature(kind).parameters)
    known = sorted(takes.difference(_FROM_POLICY_GROUP))
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(
            f"strategy={name!r} does not know the option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
            f"it takes {', '.join(known) or 'none'}"
        )
    offered = {"policy": policy, "policy_options": policy_options}
    return kind(**{key: value for key, value in offered.items() if key in takes}, **options)
