"""The share that a budget means to a strategy with a budget of its own."""

from __future__ import annotations

from recals_exp.runconfig import Budget


def share_of(budget: Budget, strategy: str) -> float | None:
    """The fraction, or None for no budget. ValueError for a size: nothing would hold it."""
    if budget.kind == "none":
        return None
    if budget.kind != "fraction":
        raise ValueError(
            f"budget={budget} with strategy={strategy} is not allowed: its budget is a share of its own, which holds no "
            "size; use a fraction in (0, 1] or null, or strategy=recals for a limit in bytes"
        )
    return budget.value
