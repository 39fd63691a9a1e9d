"""A model as a list of *units*, the smallest pieces a cut can fall between, and the stages that a cut makes of them.

There are two ways to find the units, tried in this order by `find_units`:

1. A chain: an ``nn.Sequential`` is its children (nested ones opened, unless they carry hooks), or the user lists
   submodules by name. Each unit gets the result of the one before, as `nn.Sequential` does it.
2. Tracing (``trace.py``): any model that `torch.export` can trace, with values that skip units.

The units are the model's own modules: a pipeline made of them has the parameters, and with `ModelPipeline.adopt` the names,
of the model.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recals_exp.pipeline.budget import undone
from recals_exp.pipeline.stage import Take


@dataclass(frozen=True, slots=True)
class CutStage:
    """One stage of a cut model."""

    name: str  # "first..last" unit
    module: nn.Module
    takes: Take | list[Take] | None  # for ModelPipeline.append


class Units(abc.ABC):
    """A model that can be cut; ``names`` are its units in the order they run."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.names = tuple(names)

    @abc.abstractmethod
    def stages(self, bounds: Sequence[int], relay: bool = False) -> list[CutStage]:
        """The stages between ``bounds`` (0, ..., the number of units).

        With ``relay`` each stage takes the whole result of the one before and hands on what later stages need, as it must
        be where only neighbours are connected; without, a value travels straight to the stages that use it.
        """

    def check_bounds(self, bounds: Sequence[int]) -> None:
        """Every stage must have a unit."""
        if list(bounds) != sorted(set(bounds)) or bounds[0] != 0 or bounds[-1] != len(self.names):
            raise ValueError(f"bounds {list(bounds)} must rise from 0 to the number of units, {len(self.names)}")

    def stage_name(self, first: int, last: int) -> str:
        """A stage is called by its first and last unit."""
        return self.names[first] if last == first + 1 else f"{self.names[first]}..{self.names[last - 1]}"

    def index(self, name: str) -> int:
        """The unit that a cut "before ``name``" falls before: the unit itself, or the first of those inside it."""
        for index, unit in enumerate(self.names):
            if unit == name or unit.startswith(name + "."):
                return index
        raise ValueError(f"there is no unit {name!r} to cut before; the units are: {', '.join(self.names)}")


class ChainStage(nn.Module):
    """Units one after the other."""

    def __init__(self, units: Sequence[tuple[str, Callable[..., Any]]]) -> None:
        super().__init__()
        self._units = [unit for _, unit in units]
        for number, (name, unit) in enumerate(units):
            if isinstance(unit, nn.Module):
                self.add_module(f"{number}:{name}".replace(".", "/"), unit)

    def forward(self, *values: Any) -> Any:
        value: Any = values[0] if len(values) == 1 else values
        for unit in self._units:
            value = unit(value)
        return value


class Chain(Units):
    """Units that each take the result of the one before."""

    def __init__(self, model: nn.Module, units: Sequence[tuple[str, Callable[..., Any]]]) -> None:
        super().__init__(model, [name for name, _ in units])
        self._units = list(units)

    def stages(self, bounds: Sequence[int], relay: bool = False) -> list[CutStage]:
        self.check_bounds(bounds)
        return [
            CutStage(self.stage_name(first, last), ChainStage(self._units[first:last]), None)
            for first, last in itertools.pairwise(bounds)
        ]


def flatten(x: Tensor) -> Tensor:
    """All but the rows in one dimension; what many models do between their last pooling and their head."""
    return torch.flatten(x, 1)


def find_units(
    model: nn.Module,
    example: tuple[Any, ...] = (),
    named: Sequence[str | Callable[..., Any]] | None = None,
    dynamic: bool = True,
) -> Units:
    """The units of a model.

    Args:
        model: any module.
        example: the positional inputs of one micro-batch; needed for tracing, and to check a list of names.
        named: submodules by name, in the order they run; ``"flatten"`` and callables may stand between them.
        dynamic: trace so that the number of rows may change later.
    """
    if named is not None:
        return _named_chain(model, named, example)
    if type(model) is nn.Sequential:
        return Chain(model, list(_open(model, "")))
    if not example:
        raise ValueError(
            f"{type(model).__name__} is not an nn.Sequential: to cut it, give an example input to trace it with, or list "
            "its submodules in the order they run (units=[...])"
        )
    from recals_exp.pipeline.trace import TracedUnits

    return TracedUnits(model, example, dynamic)


def _open(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        hooked = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks
        if type(child) is nn.Sequential and len(child) and not hooked:
            yield from _open(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _named_chain(model: nn.Module, named: Sequence[str | Callable[..., Any]], example: tuple[Any, ...]) -> Chain:
    units: list[tuple[str, Callable[..., Any]]] = []
    for entry in named:
        if isinstance(entry, str):
            try:
                units.append((entry, flatten if entry == "flatten" else model.get_submodule(entry)))
            except AttributeError:
                known = ", ".join(name for name, _ in model.named_modules() if name)
                raise ValueError(f"the model has no submodule {entry!r}; it has: {known}") from None
        elif callable(entry):
            units.append((getattr(entry, "__name__", type(entry).__name__), entry))
        else:
            raise ValueError(f"{entry!r} is no unit: use names of submodules, 'flatten', or callables")
    if not units:
        raise ValueError("units=[] names nothing to cut")
    chain = Chain(model, units)
    listed = {id(p) for _, unit in units if isinstance(unit, nn.Module) for p in unit.parameters()}
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in listed]
    if lost:
        raise ValueError(
            f"the units leave out the parameters {', '.join(lost)}: list the submodules that hold them too"
        )
    if example:
        _check_same(model, chain, example)
    return chain


def _check_same(model: nn.Module, chain: Chain, example: tuple[Any, ...]) -> None:
    """A list of submodules is a claim about the model's forward: hold it to that."""
    whole = ChainStage(chain._units)
    results = []
    for module in (model, whole):
        with undone(model), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            results.append(pytree.tree_leaves(module(*example)))
    same = len(results[0]) == len(results[1]) and all(
        torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one is other or one == other
        for one, other in zip(*results, strict=False)
    )
    if not same:
        raise ValueError(
            f"the units {', '.join(chain.names)}, run one after the other, do not compute what the model computes for the "
            "example: something happens between them. Leave units out to have the model traced, or name callables too"
        )
