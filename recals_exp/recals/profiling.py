"""From a traced step to its record: what the simulator and the planner read, with no model at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .bare_step import BareStep
from .measured import COSTS, with_measured_costs
from .record import SOURCE, OpRecord, TapeRecord, ValueRecord
from .trace import Key, Trace

if TYPE_CHECKING:
    from .recals import Recals

BACKWARD_PER_FORWARD = 2.0
"""Work of backward relative to forward in the default cost model: one product per operand of every product."""


def record_of(trace: Trace, device: str = "cpu", pinned_bytes: int = 0) -> TapeRecord:
    """The record of a step that was traced from its first op to the death of its last handle.

    ``pinned_bytes``: the most that was held at once because it cannot be rebuilt.
    """
    made: dict[int, set[Key]] = {number: set() for number in trace.ops}
    sources: dict[Key, None] = {}
    for key in (*sorted(trace.saved), *(key for op in trace.ops.values() for key in op.inputs)):
        if key[0] in made:
            made[key[0]].add(key)
        elif key in trace.saved:
            sources[key] = None
    ids: dict[Key, int] = {}
    values: list[ValueRecord] = []
    op_records: list[OpRecord] = []
    for position, (number, op) in enumerate(trace.ops.items()):
        outputs = sorted(made[number])
        for key in outputs:
            ids[key] = len(values)
            outside = key in trace.outside
            values.append(ValueRecord(trace.nbytes[key], position, key in trace.saved, False, outside, op.layer))
        op_records.append(
            OpRecord(
                op.name,
                op.layer,
                op.cost,
                op.flops,
                tuple(ids[key] for key in op.inputs if key in ids),
                tuple(ids[key] for key in outputs),
                tuple(index for _, index in outputs),
            )
        )
    for key in sources:
        ids[key] = len(values)
        values.append(ValueRecord(trace.nbytes[key], SOURCE, True, key in trace.pinned, False, ""))
    forward, backward = _events(trace, {number: i for i, number in enumerate(trace.ops)}, ids)
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
        pinned_bytes=pinned_bytes,
    )


def _events(trace: Trace, op_ids: dict[int, int], ids: dict[Key, int]) -> tuple[list[Any], list[Any]]:
    """Forward ends with the last op; what autograd asks for comes after."""
    forward: list[Any] = []
    backward: list[Any] = []
    last_op = max((i for i, (kind, _) in enumerate(trace.events) if kind in ("op", "save")), default=-1)
    for i, (kind, item) in enumerate(trace.events):
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


def profile_step(recals: Recals, fn: Callable[..., Any], args: Any, kwargs: Any, costs: str = "model") -> TapeRecord:
    """Run one step (forward, and backward from a gradient of ones) with nothing dropped, and record it.

    Buffers, generators and gradients are left as they were. ``costs``: ``"model"``, or ``"measured"`` (``measured.py``).
    """
    if costs not in COSTS:
        raise ValueError(f"costs={costs!r} is not known; there are: {', '.join(COSTS)}")
    trace = Trace()

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recals.cache.trace = trace
            out = recals(fn, *args, **kwargs)
            trace.returned(recals._values_of(out))
            return out

        return call

    with BareStep(fn, args, kwargs) as step:
        step(wrap)
        recals.cache.trace = None
        record = record_of(trace, step.device.type, recals.cache.peak_pinned_bytes)
        return with_measured_costs(recals, record, step, step.device, step.reset) if costs == "measured" else record
