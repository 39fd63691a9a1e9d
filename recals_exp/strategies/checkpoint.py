"""PyTorch's activation checkpointing, by blocks: a block keeps its input, and its forward is run again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

from torch import nn
from torch.utils.checkpoint import checkpoint

from recals_exp.strategies.blocks import choose_blocks
from recals_exp.strategies.patched import Forward, PatchedModel
from recals_exp.strategies.strategy import NO_BUDGET, BoundStrategy, Strategy, Terms, refuse_limit


def terms_of_blocks(decided_by: str) -> Terms:
    """What running blocks again needs and changes, with eager kernels; `decided_by`: what says how much is saved."""
    return Terms(
        needs=f"repeated blocks, or their names; how much is saved follows from the {decided_by}, not from a budget",
        changes="what a block does beside its result happens twice: batch norm's statistics move twice (pytorch#96136)",
        exact_gradients=True,
        exact_buffers=False,
    )


def checkpointed(forward: Forward) -> Forward:
    """`forward`, run again in backward instead of keeping what it saves."""
    return partial(checkpoint, forward, use_reentrant=False)


@final
class CheckpointStrategy(Strategy):
    """`torch.utils.checkpoint` (not re-entrant) around every `every`-th block."""

    name = "checkpoint"
    budget_kind = NO_BUDGET

    def __init__(self, every: int = 1, blocks: Sequence[str] | None = None) -> None:
        self._every = every
        self._blocks = blocks  # names; None: found by `find_blocks`

    @property
    def terms(self) -> Terms:
        return terms_of_blocks("blocks")

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        refuse_limit(self.name, limit)
        blocks = choose_blocks(model, self._blocks, self._every, self.name)
        return PatchedModel(model, blocks, checkpointed, self.name)
