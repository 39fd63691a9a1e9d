"""FLOPs of whole steps: the exact price of recomputation, with no clock involved.

`torch.utils.flop_counter.FlopCounterMode` counts every matrix product, convolution and attention of a step. The
engine's replays run with foreign dispatch modes left active, so what is re-run in backward is counted like everything
else, and the difference to a plain step is what the budget costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from recals_exp.meters.steps import Forward, StartingState, TrainStep
from recals_exp.records import FlopsRecord


def _cpu_attention_formulas() -> dict[Any, Any]:
    """Fused attention on the CPU, which the counter's own registry leaves out (seen in torch 2.10 to 2.14).

    Without these a transformer's attention is free on the CPU, forward and backward. Removable when the registry has
    them.
    """
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward in flop_counter.flop_registry:
        return {}

    def forward_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return flop_counter.sdpa_flop_count(query, key, value)

    def backward_flops(
        grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
    ) -> int:
        return flop_counter.sdpa_backward_flop_count(grad, query, key, value)

    return {forward: forward_flops, backward: backward_flops}


def count_step_flops(step: TrainStep, state: StartingState, forward: Forward, batch: tuple[Tensor, Tensor]) -> int:
    """FLOPs of one step (forward, backward, optimizer) from the given state."""
    state.restore()
    return count_flops(lambda: step(forward, *batch))


def count_flops(run: Callable[[], Any]) -> int:
    """FLOPs of one call."""
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_cpu_attention_formulas())
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
