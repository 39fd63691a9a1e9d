"""PyTorch's selective activation checkpointing, by blocks: results of matrix products are kept, the rest is run again.

The policy is the usual one: what costs FLOPs (matrix products, convolutions, fused attention) is saved, every `save_every`-th
of it in a block (1: all; 2: every other, as torchtitan does), and everything else (norms, activations, dropout) is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recals_exp.strategies.blocks import choose_blocks
from recals_exp.strategies.checkpoint import terms_of_blocks
from recals_exp.strategies.patched import Forward, PatchedModel
from recals_exp.strategies.strategy import NO_BUDGET, BoundStrategy, Strategy, Terms, refuse_limit

_aten = torch.ops.aten
MATMULS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""What is worth keeping: the ops whose FLOPs `torch.utils.flop_counter` counts in a forward."""


@final
class _SaveMatmuls:
    """The policy of one block's run; it counts forward and recomputation apart, so that both decide alike."""

    def __init__(self, save_every: int) -> None:
        self._save_every = save_every
        self._seen = {False: 0, True: 0}  # is_recompute -> products so far

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self._seen[ctx.is_recompute]
        self._seen[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if number % self._save_every == 0 else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(save_every: int) -> Any:
    return create_selective_checkpoint_contexts(_SaveMatmuls(save_every))


@final
class SelectiveStrategy(Strategy):
    """Selective checkpointing around every `every`-th block, with the save-matmuls policy."""

    name = "selective"
    budget_kind = NO_BUDGET

    def __init__(self, save_every: int = 1, every: int = 1, blocks: Sequence[str] | None = None) -> None:
        if isinstance(save_every, bool) or not isinstance(save_every, int) or save_every < 1:
            raise ValueError(f"strategy.save_every={save_every!r} is not allowed: use a whole number of at least 1")
        self._save_every = save_every
        self._every = every
        self._blocks = blocks

    @property
    def terms(self) -> Terms:
        return terms_of_blocks("policy")

    def bind(self, model: nn.Module, limit: float | None) -> BoundStrategy:
        refuse_limit(self.name, limit)
        blocks = choose_blocks(model, self._blocks, self._every, self.name)
        return PatchedModel(model, blocks, self._wrap, self.name)

    def _wrap(self, forward: Forward) -> Forward:
        contexts = partial(_contexts, self._save_every)
        return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
