"""From a traced step to its record: what the simulator and the planner read, with no model at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .analysis import module_state_restored
from .facts import all_tensors
from .graph import Op, Value
from .record import SOURCE, OpRecord, TapeRecord, ValueRecord
from .structure import output_tensors
from .tape import TensorOp

if TYPE_CHECKING:
    from .recals import Recals

BACKWARD_PER_FORWARD = 2.0
"""Work of backward relative to forward in the default cost model: one product per operand of every product."""

Trace = list[tuple[str, Any, str]]


def record_of(trace: Trace, external: Iterable[Value] = (), device: str = "cpu") -> TapeRecord:
    """The record of a step that was traced from its first op to the death of its last handle.

    ``external``: values that the caller of the model holds until backward (its outputs).
    """
    ops: dict[Op, str] = {}
    for kind, item, layer in trace:
        if kind == "op":
            ops.setdefault(item, layer)
    saved = {item for kind, item, _ in trace if kind == "save"}
    made: dict[Op, dict[int, Value]] = {op: {} for op in ops}
    sources: dict[Value, None] = {}
    for value in (*saved, *(value for op in ops for value in op.inputs)):
        if value.producer in made:
            made[value.producer][value.index] = value
        elif value in saved:
            sources[value] = None
    outside = set(external)
    ids: dict[Value, int] = {}
    values: list[ValueRecord] = []
    op_records: list[OpRecord] = []
    for position, (op, layer) in enumerate(ops.items()):
        outputs = [value for _, value in sorted(made[op].items())]
        for value in outputs:
            ids[value] = len(values)
            values.append(ValueRecord(value.nbytes, position, value in saved, False, value in outside, layer))
        cost = op.full_cost() if isinstance(op, TensorOp) else None
        op_records.append(
            OpRecord(
                op.name(),
                layer,
                op.cost(),
                cost.flops if cost is not None else 0,
                tuple(ids[value] for value in op.inputs if value in ids),
                tuple(ids[value] for value in outputs),
                tuple(value.index for value in outputs),
            )
        )
    for value in sources:
        ids[value] = len(values)
        values.append(ValueRecord(value.nbytes, SOURCE, True, value.pinned, False, ""))
    forward, backward = _events(trace, {op: i for i, op in enumerate(ops)}, ids)
    forward_cost = sum(op.cost for op in op_records)
    return TapeRecord(
        signature=signature_of(op_records, values),
        torch_version=torch.__version__,
        device=device,
        cost_unit="model",
        values=tuple(values),
        ops=tuple(op_records),
        forward_events=tuple(forward),
        backward_events=tuple(backward),
        forward_cost=forward_cost,
        backward_cost=BACKWARD_PER_FORWARD * forward_cost,
    )


def _events(trace: Trace, op_ids: dict[Op, int], ids: dict[Value, int]) -> tuple[list[Any], list[Any]]:
    """Forward ends with the last op; what autograd asks for comes after."""
    forward: list[Any] = []
    backward: list[Any] = []
    last_op = max((i for i, (kind, _, _) in enumerate(trace) if kind in ("op", "save")), default=-1)
    for i, (kind, item, _) in enumerate(trace):
        if kind == "op":
            forward.append(("op", op_ids[item]))
        else:
            (forward if i <= last_op else backward).append((kind, ids[item]))
    return forward, backward


def signature_of(ops: Iterable[OpRecord], values: Iterable[ValueRecord]) -> str:
    """Equal for steps that run the same ops on values of the same sizes."""
    digest = hashlib.sha256()
    for op in ops:
        digest.update(f"{op.name}{op.inputs}{op.outputs}".encode())
    for value in values:
        digest.update(f"{value.nbytes},{value.saved};".encode())
    return digest.hexdigest()[:16]


def profile_step(recals: Recals, fn: Callable[..., Any], args: Any, kwargs: Any) -> TapeRecord:
    """Run one step (forward, and backward from a gradient of ones) with nothing dropped, and record it.

    Buffers, generators and gradients are left as they were.
    """
    inputs = [tensor for tensor in all_tensors((args, kwargs)) if tensor.requires_grad]
    parameters = list(fn.parameters()) if hasattr(fn, "parameters") else []
    grads = [(tensor, tensor.grad) for tensor in (*inputs, *parameters)]
    for tensor, _ in grads:
        tensor.grad = None  # backward would add to it in place
    trace: Trace = []
    with torch.enable_grad(), module_state_restored(fn):
        recals.cache.trace = trace
        out = recals(fn, *args, **kwargs)
        roots = [tensor for tensor in output_tensors(out) if tensor.requires_grad]
        external = recals._values_of(out)
        try:
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        finally:
            for tensor, grad in grads:
                tensor.grad = grad
    recals.cache.trace = None
    device = roots[0].device.type if roots else "cpu"
    return record_of(trace, external, device)
