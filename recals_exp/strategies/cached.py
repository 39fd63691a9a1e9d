"""The activation cache held to a byte limit by this package's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from recals_exp.recals import POLICIES, Recals, Stats, recals_with_rngs
from recals_exp.strategies.strategy import BYTES, BoundStrategy, Strategy, Terms


@final
class RecalsStrategy(Strategy):
    """`recals_with_rngs` around the model."""

    name = "recals"
    budget_kind = BYTES

    def __init__(
        self,
        policy: str = "planned",
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
    def terms(self) -> Terms:
        return Terms(
            needs="an eager model; compiled parts run eagerly",
            changes="nothing: gradients, buffers and random state are plain PyTorch's, bit for bit",
            exact_gradients=True,
            exact_buffers=True,
        )

    @property
    def policy(self) -> str:
        return self._policy

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        policy = POLICIES[self._policy](**self._policy_options)  # one policy serves one cache
        limit_bytes = None if limit is None else int(limit)
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
