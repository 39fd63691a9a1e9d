"""A stage: a module with its place, its budget, and where its inputs come from."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recals_exp.pipeline.budget import StageBudget
from recals_exp.pipeline.placed import PlacedModule, stage_tensors

INPUT = -1  # the "stage" that the pipeline's own inputs come from

Take = str | int | tuple[str | int, int]  # "previous", "input", a stage's number, or (one of these, item)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one positional input of a stage comes from."""

    stage: int  # 0-based; INPUT = the pipeline's inputs
    item: int | None = None  # which item of that result's tuple; None = the whole result

    def pick(self, result: Any) -> Any:
        """The input, from that stage's result."""
        if self.item is None:
            return result
        if not isinstance(result, (tuple, list)) or self.item >= len(result):
            size = f"of {len(result)}" if isinstance(result, (tuple, list)) else "that cannot be counted"
            raise ValueError(
                f"item {self.item} of stage {self.stage} was asked for, but its result is a {type(result).__name__} {size}"
            )
        return result[self.item]


class StageObserver(Protocol):
    """Sees a stage work; must return what the plain call returns."""

    def run(self, stage: Stage, micro_batch: int, recals: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``recals(stage.module, *args, **kwargs)``, or without a budget ``stage.module(*args, **kwargs)``."""
        ...


@dataclass(eq=False, slots=True)
class Stage:
    """One stage of a pipeline."""

    index: int  # 0-based place in the pipeline
    name: str  # what messages and measures call it
    module: nn.Module
    device: torch.device
    budget: StageBudget
    sources: tuple[Source, ...]  # its positional inputs
    _positional: float = field(init=False)  # how many positional arguments its forward takes; inf = any number
    _keywords: frozenset[str] = field(init=False)
    _any_keyword: bool = field(init=False)

    def __post_init__(self) -> None:
        self._positional, self._keywords, self._any_keyword = _accepted(self.module)

    def takes_keyword(self, name: str) -> bool:
        """Whether a keyword argument of the pipeline goes to this stage."""
        return self._any_keyword or name in self._keywords

    def spread(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The positional arguments: a single tuple is spread if the stage takes more than one argument."""
        if len(inputs) == 1 and type(inputs[0]) is tuple and self._positional != 1:
            return inputs[0]
        return inputs

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers."""
        return stage_tensors(self.module)

    def move_to(self, device: torch.device) -> None:
        """Move parameters and buffers; parameters stay the same objects."""
        if isinstance(self.module, PlacedModule):
            self.module.place(device)
        else:
            self.module.to(device)
        self.device = device


def read_takes(takes: Take | list[Take] | None, index: int) -> tuple[Source, ...]:
    """The sources that ``append(takes=...)`` names, for the stage of that index: a list is several, a tuple is an item."""
    if takes is None:
        return (Source(index - 1),)
    sources = []
    for entry in takes if isinstance(takes, list) else [takes]:
        origin, item = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        number = {"previous": index - 1, "input": INPUT}.get(origin) if isinstance(origin, str) else origin
        known = isinstance(number, int) and not isinstance(number, bool) and INPUT <= number < index
        if not known or not (item is None or (isinstance(item, int) and item >= 0)):
            raise ValueError(
                f"stage {index} cannot take {entry!r}: use 'previous', 'input', the number of an earlier stage "
                f"(0 to {index - 1}), or (one of these, item) with an item from 0"
            )
        assert isinstance(number, int)
        sources.append(Source(number, item))
    if not sources:
        raise ValueError(f"stage {index} takes nothing: name at least one input, such as takes='input'")
    return tuple(sources)


def shared_state(one: nn.Module, other: nn.Module) -> list[str]:
    """The names (in ``other``) of parameters and buffers whose memory both modules use."""
    held = {memory_key(tensor) for tensor in stage_tensors(one)}
    named = (*other.named_parameters(remove_duplicate=False), *other.named_buffers(remove_duplicate=False))
    return [name for name, tensor in named if memory_key(tensor) in held]


def memory_key(tensor: Tensor) -> int:
    """What two tensors have in common that share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a layout or subclass without one storage
        return id(tensor)


def _accepted(module: nn.Module) -> tuple[float, frozenset[str], bool]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (ValueError, TypeError):
        return math.inf, frozenset(), True
    positional: float = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = math.inf
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return positional, names, any(p.kind is p.VAR_KEYWORD for p in parameters)
