"""Plain PyTorch: the baseline, and a check of the measurement (its overhead must read 0)."""

from __future__ import annotations

from typing import Any, final

from torch import nn

from recals_exp.strategies.strategy import NO_BUDGET, BoundStrategy, Strategy, Terms, refuse_limit


@final
class NoStrategy(Strategy):
    """The model as it is."""

    name = "none"
    budget_kind = NO_BUDGET

    @property
    def terms(self) -> Terms:
        return Terms(needs="nothing", changes="nothing", exact_gradients=True, exact_buffers=True)

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        refuse_limit(self.name, limit)
        return _PlainModel(model)


@final
class _PlainModel(BoundStrategy):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)
