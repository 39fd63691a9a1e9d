"""Steps of fused optimizers: the one ordinary way to change weights that moves no version counter.

``torch.optim.AdamW(fused=True)`` and its kin write weights by kernels that PyTorch does not count as in-place changes, in plain
training either. A value rebuilt from such a weight would silently be another one, so every ``Recals`` is told of the step.
Fused kernels that are called without a ``torch.optim`` optimizer cannot be noticed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from .tape import Source

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .recals import Recals

_OWNERS: weakref.WeakSet[Recals] = weakref.WeakSet()
_HOOKS: list[Any] = []


def watch_fused_steps(owner: Recals) -> None:
    """From now on, weights that a fused optimizer steps count as changed for ``owner``."""
    _OWNERS.add(owner)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    owners = [owner for owner in _OWNERS if owner.registry]
    if not owners:
        return
    for group in optimizer.param_groups:
        for weight in group["params"] if group.get("fused") else ():
            for owner in owners:
                value = owner.registry.get(id(weight.untyped_storage()))
                if type(value) is Source and value.is_leaf:
                    value.lose()
