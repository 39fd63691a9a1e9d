"""Ways to run a model's forward pass that save memory, behind one small interface.

A strategy is a description: it has a name, says what it needs and changes, and holds no tensor. Bound to a model it becomes a
`BoundStrategy`, which is called where the model would be called and gives the same result.

Why bind, and not wrap the model: the plain and the wrapped step of a pair run on the same parameters, so a strategy must leave
the model itself as it is (`strategy.py` has the rules).

    strategy.py    the interface                 checkpoint.py  torch.utils.checkpoint, by blocks
    plain.py       plain PyTorch                 selective.py   selective checkpointing, by blocks
    cached.py      this package's engine         offload.py     save_on_cpu
    blocks.py      which modules are blocks      compiled.py    torch.compile, alone or around checkpoints
    patched.py     blocks that run through       share.py       what a budget means to compiled code
                   another function in a call

A new strategy is a class, a line in `STRATEGIES` and a YAML in `conf/strategy`. The conformance suite
(`tests/test_strategies.py`) then runs on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from recals_exp.strategies.cached import RecalsStrategy
from recals_exp.strategies.checkpoint import CheckpointStrategy
from recals_exp.strategies.compiled import CompileCheckpointStrategy, CompileStrategy
from recals_exp.strategies.offload import OffloadStrategy
from recals_exp.strategies.plain import NoStrategy
from recals_exp.strategies.selective import SelectiveStrategy
from recals_exp.strategies.share import share_of
from recals_exp.strategies.strategy import BYTES, NO_BUDGET, SHARE, BoundStrategy, Strategy, Terms

__all__ = [
    "BYTES",
    "NO_BUDGET",
    "SHARE",
    "STRATEGIES",
    "BoundStrategy",
    "Strategy",
    "Terms",
    "make_strategy",
    "share_of",
]

STRATEGIES: Mapping[str, type[Strategy]] = {
    "none": NoStrategy,
    "recals": RecalsStrategy,
    "checkpoint": CheckpointStrategy,
    "selective": SelectiveStrategy,
    "offload": OffloadStrategy,
    "compile": CompileStrategy,
    "compile_checkpoint": CompileCheckpointStrategy,
}
"""Name -> class. Its keyword arguments are the strategy's options; `policy` and `policy_options` come from the
configuration's group `policy`, and only to a class that takes them."""

_FROM_POLICY_GROUP = ("policy", "policy_options")


def make_strategy(
    name: str, policy: str = "planned", policy_options: Mapping[str, Any] | None = None, **options: Any
) -> Strategy:
    """The strategy of that name. ValueError says which strategies, policies and options there are."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy={name!r} does not exist; there are: {', '.join(STRATEGIES)}")
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
