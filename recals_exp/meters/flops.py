"""FLOPs of whole steps: the exact price of recomputation, with no clock involved.

`torch.utils.flop_counter.FlopCounterMode` counts every matrix product, convolution and attention of a step. The
engine's replays run with foreign dispatch modes left active, so what is re-run in backward is counted like everything
else, and the difference to a plain step is what the budget costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from recals_exp.meters.steps import Forward, StartingState, TrainStep
from recals_exp.recals.costs import OWN_FORMULAS
from recals_exp.records import FlopsRecord


def _missing_formulas() -> dict[Any, Any]:
    """Fused attention on the CPU and fused RNN layers, which the counter's own registry leaves out (torch 2.10 to 2.14).

    Without these they are free, forward and backward. Forward ones are the engine's. Removable when the registry has them.
    """
    aten = torch.ops.aten

    def attention_backward_flops(
        grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
    ) -> int:
        return flop_counter.sdpa_backward_flop_count(grad, query, key, value)

    backward: dict[str, Callable[..., int]] = {"_scaled_dot_product_flash_attention_for_cpu": attention_backward_flops}
    formulas: dict[Any, Any] = {}
    for name, flops in OWN_FORMULAS.items():
        packet = getattr(aten, name, None)
        if packet is None or packet in flop_counter.flop_registry:
            continue
        formulas[packet] = partial(_by_shapes, flops, 1)
        # An RNN layer's gradients: of what it read and of its weights, a product each for every one of forward.
        formulas[getattr(aten, f"{name}_backward")] = backward.get(name, partial(_by_shapes, flops, 2))
    return formulas


def _by_shapes(
    flops: Callable[[list[Any]], int], times: int, *shapes: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return times * flops(list(shapes))


def count_step_flops(step: TrainStep, state: StartingState, forward: Forward, batch: tuple[Tensor, Tensor]) -> int:
    """FLOPs of one step (forward, backward, optimizer) from the given state."""
    state.restore()
    return count_flops(lambda: step(forward, *batch))


def count_flops(run: Callable[[], Any]) -> int:
    """FLOPs of one call."""
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_missing_formulas())
    counter.mod_tracker = _WholeProgram()  # type: ignore[assignment]
    with counter:
        run()
    return int(counter.get_total_flops())


class _WholeProgram:
    """In the place of the counter's module tracker: only the total is wanted, and the tracker's hooks on gradients do not work
    under `torch.autograd.grad`, which zero-bubble schedules use ("a leaf node was passed to _will_engine_execute_node").
    """

    parents = frozenset(("Global",))  # what the counter calls the total

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


def compare_flops(plain: int, wrapped: int, engine_recomputed: int | None) -> FlopsRecord:
    """The record of a pair of counts; a step without countable FLOPs has no percentage."""
    return FlopsRecord(
        plain_flops=plain,
        wrapped_flops=wrapped,
        recomputed_flops=wrapped - plain,
        engine_recomputed_flops=engine_recomputed,
        overhead_pct=100 * (wrapped - plain) / plain if plain else None,
    )
