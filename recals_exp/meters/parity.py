"""Is a step under a strategy the plain step, to the last bit?

Both run on a copy of the model (deep: Python-held state too), from the same seeds, one after the other, so that only
one copy is alive at a time. Compared are outputs, loss, every parameter's gradient (None included), buffers, and the
generators' states after backward. Bits are compared, not values: NaN equals the same NaN, and -0.0 is not 0.0.

When something differs, the plain step is run once more: where plain PyTorch does not reproduce itself (atomic adds on
some accelerators), a difference accuses nobody, and the record says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from recals_exp.meters.device import generator_states, seed_everything
from recals_exp.meters.steps import Forward, TrainStep
from recals_exp.records import ParityRecord


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Same type, shape and bits. None equals None only."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.coalesce(), b.coalesce()
        return same_bits(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)


@dataclass(frozen=True)
class StepTrace:
    """Everything one step left, on the CPU. Names are what a difference is reported by."""

    outputs: dict[str, Any]
    loss: dict[str, Any]
    gradients: dict[str, Any]
    buffers: dict[str, Any]
    generators: dict[str, Any]


def check_parity(
    step: TrainStep,
    bind: Callable[[nn.Module], Forward],
    batch: tuple[Tensor, Tensor],
    seed: int,
    *,
    baseline: Callable[[nn.Module], Forward] = lambda model: model,
    rehearsals: int = 0,
) -> ParityRecord:
    """Compare one step of `bind(copy of the model)` with one plain step, or with one of `baseline(copy of the model)`.

    The model itself is not touched. `rehearsals`: steps that both do before, without an optimizer; for a strategy that does
    something else after its first.
    """
    plain = _trace(step, baseline, batch, seed, rehearsals)
    wrapped = _trace(step, bind, batch, seed, rehearsals)
    return compare(plain, wrapped, lambda: _trace(step, baseline, batch, seed, rehearsals))


def compare(plain: StepTrace, wrapped: StepTrace, again: Callable[[], StepTrace] | None = None) -> ParityRecord:
    """The differences of two traces; `again` is asked for another plain one if there are any."""
    parts = StepTrace.__dataclass_fields__
    found = {part: _differences(part, getattr(plain, part), getattr(wrapped, part)) for part in parts}
    reproducible = None
    if again is not None and any(found.values()):
        second = again()
        reproducible = not any(_differences(part, getattr(plain, part), getattr(second, part)) for part in parts)
    return ParityRecord(
        outputs_identical=not found["outputs"],
        loss_identical=not found["loss"],
        gradients_identical=not found["gradients"],
        buffers_identical=not found["buffers"],
        generators_identical=not found["generators"],
        differences=tuple(line for lines in found.values() for line in lines),
        plain_reproducible=reproducible,
    )


def _trace(
    step: TrainStep,
    bind: Callable[[nn.Module], Forward],
    batch: tuple[Tensor, Tensor],
    seed: int,
    rehearsals: int,
) -> StepTrace:
    model = copy.deepcopy(step.model)
    seed_everything(seed)
    forward = bind(model)
    for _ in range(rehearsals):
        model.zero_grad(set_to_none=True)
        output, loss = step.compute_loss(forward, *batch)
        loss.backward()
        del output, loss  # the next step begins with nothing of this one alive
    model.zero_grad(set_to_none=True)
    output, loss = step.compute_loss(forward, *batch)
    # read before backward: nothing keeps a later in-place write from changing them
    outputs = _snapshot({f"output {index}": leaf for index, leaf in enumerate(tree_flatten(output)[0])})
    loss_value = _snapshot({"loss": loss})
    loss.backward()
    return StepTrace(
        outputs=outputs,
        loss=loss_value,
        gradients=_snapshot({name: parameter.grad for name, parameter in model.named_parameters()}),
        buffers=_snapshot(dict(model.named_buffers())),
        generators=generator_states(step.device),
    )


def _snapshot(named: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in named.items()
    }


def _differences(part: str, plain: dict[str, Any], other: dict[str, Any]) -> list[str]:
    kind = {"gradients": "gradient of ", "buffers": "buffer ", "generators": "generator "}.get(part, "")
    lines = [f"{kind}{name} exists on one side only" for name in sorted(plain.keys() ^ other.keys())]
    for name in (name for name in plain if name in other):
        a, b = plain[name], other[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if not same_bits(a, b):
                lines.append(f"{kind}{name} differs: {_distance(a, b)}")
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or (a is not b and a != b):
            what = "" if part == "generators" else f": plain {_brief(a)}, under the strategy {_brief(b)}"
            lines.append(f"{kind}{name} differs{what}")
    return lines


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _distance(a: Tensor, b: Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"plain {a.dtype} {tuple(a.shape)}, under the strategy {b.dtype} {tuple(b.shape)}"
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return f"layouts {a.layout} and {b.layout}"
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    gap = (a.double() - b.double()).abs().max().item()
    return f"largest difference {gap:.3g} (largest plain value {a.double().abs().max().item():.3g})"
