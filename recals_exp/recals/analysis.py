"""What a call would cache: the total, the largest layer, and who caches how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn

from .graph import Value
from .layers import layer_name, modules_in_flight
from .policies.base import WatchingPolicy
from .randomness import generators_restored, live_devices
from .sizes import format_bytes

if TYPE_CHECKING:
    from .cache import Cache

_OUTSIDE = "(outside of any module)"


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer caches in one call. ``nbytes`` counts each storage once, at the layer that saved it first."""

    name: str
    module_type: str
    nbytes: int
    n_values: int
    is_unit: bool  # a leaf layer: it has no submodules


@dataclass(frozen=True, slots=True)
class Analysis:
    """What autograd would cache in one call. Iterates as the documented pair ``(total_bytes, unit_max_bytes)``."""

    total_bytes: int  # the most cached at once; parameters, buffers and inputs are not cache
    unit_max_bytes: int  # the most one leaf layer (or one value saved outside of leaf layers) caches
    unit_max_layer: str
    pinned_bytes: int  # part of the total that cannot be rebuilt and is always held
    largest_value_bytes: int
    n_values: int
    layers: tuple[LayerBytes, ...]  # in order of first use

    @property
    def smallest_limit_bytes(self) -> int:
        """The smallest cache limit with which the call works."""
        return max(self.pinned_bytes, self.largest_value_bytes)

    def __iter__(self) -> Iterator[int]:
        yield self.total_bytes
        yield self.unit_max_bytes


def format_analysis(analysis: Analysis, most: int = 20) -> str:
    """A table for people: the layers that cache most, in order of size."""
    shown = sorted(analysis.layers, key=lambda layer: -layer.nbytes)[:most]
    width = max([len(layer.name) for layer in shown] + [5])
    lines = [f"{'layer':<{width}}  {'type':<20}  {'cached':>10}  {'share':>6}"]
    total = max(analysis.total_bytes, 1)
    for layer in shown:
        lines.append(
            f"{layer.name:<{width}}  {layer.module_type:<20}  {format_bytes(layer.nbytes):>10}  "
            f"{100 * layer.nbytes / total:5.1f} %"
        )
    if len(analysis.layers) > most:
        rest = sum(layer.nbytes for layer in analysis.layers) - sum(layer.nbytes for layer in shown)
        lines.append(f"... and {len(analysis.layers) - most} more layers with {format_bytes(rest)}")
    lines.append(
        f"total {format_bytes(analysis.total_bytes)}, largest layer {format_bytes(analysis.unit_max_bytes)} "
        f"({analysis.unit_max_layer}), pinned {format_bytes(analysis.pinned_bytes)}, smallest limit "
        f"{format_bytes(analysis.smallest_limit_bytes)}"
    )
    return "\n".join(lines)


@final
class Measuring(WatchingPolicy):
    """Holds nothing and takes note of everything that would be cached."""

    name: ClassVar[str] = "measuring"

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.largest_bytes = self.n_values = 0
        self.layers: dict[str, list[Any]] = {}  # name -> [type, bytes, values, is leaf, largest value]

    def anew(self) -> Measuring:
        return Measuring()

    def keeps(self, cache: Cache, value: Value) -> bool:
        modules = modules_in_flight()
        name = layer_name(modules) or _OUTSIDE
        kind = type(modules[0]).__name__ if modules else "function"
        is_leaf = bool(modules) and not any(True for _ in modules[0].children())
        layer = self.layers.setdefault(name, [kind, 0, 0, is_leaf, 0])
        layer[1] += value.nbytes
        layer[2] += 1
        layer[4] = max(layer[4], value.nbytes)
        self.n_values += 1
        self.live_bytes += value.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, value.nbytes)
        return False

    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        return None

    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        return (missed,)

    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        return False

    def used(self, cache: Cache, value: Value) -> None:
        pass

    def dropped(self, cache: Cache, value: Value) -> None:
        pass

    def freed(self, cache: Cache, value: Value) -> None:
        if not value.pinned:
            self.live_bytes -= value.nbytes

    def analysis(self, pinned_bytes: int) -> Analysis:
        layers = tuple(
            LayerBytes(name, kind, nbytes, count, is_leaf)
            for name, (kind, nbytes, count, is_leaf, _) in self.layers.items()
        )
        # A unit is a leaf layer; what is saved outside of leaf layers counts value by value.
        units = {name: nbytes if is_leaf else largest for name, (_, nbytes, _, is_leaf, largest) in self.layers.items()}
        unit = max(units, key=lambda name: units[name], default="")
        return Analysis(
            total_bytes=self.peak_bytes + pinned_bytes,
            unit_max_bytes=units.get(unit, 0),
            unit_max_layer=unit,
            pinned_bytes=pinned_bytes,
            largest_value_bytes=self.largest_bytes,
            n_values=self.n_values,
            layers=layers,
        )


@contextmanager
def module_state_restored(fn: Callable[..., Any]) -> Iterator[None]:
    """Leave the buffers of the module behind ``fn``, and the default generators, as they were.

    State that a module keeps elsewhere (Python attributes) is the caller's to restore.
    """
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    saved = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]
    with generators_restored(live_devices()):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, content in saved:
                    buffer.data.copy_(content)
                    module._buffers[name] = buffer
