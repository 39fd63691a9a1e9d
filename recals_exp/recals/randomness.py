"""Generator states for random ops (rule 6).

A random op is recorded with the state its generator had before it ran. A replay sets that state, runs the op, and puts
the present state back. Only the generator an op really draws from is touched: the explicit one, or its device's default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GpuDevices = str | int | list[int] | tuple[int, ...] | Tensor
CPU_INDEX = -1  # the documented index of the CPU generator in ``gpu_devices``


@dataclass(frozen=True, slots=True)
class RandomState:
    """A generator and the state to replay from."""

    generator: torch.Generator
    state: Tensor

    @contextmanager
    def restored(self) -> Iterator[None]:
        present = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(present)


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator ops on ``device`` draw from; None where the backend has none that Python can reach."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", None)
    if generators is not None:
        index = device.index if device.index is not None else module.current_device()
        return generators[index]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return None


class SavedGenerators:
    """Which default generators may be saved: the ``gpu_devices`` argument of ``recals_with_rngs``.

    Forms: ``"all"``; ``"none"``; ``"cuda"`` (all accelerators, not the CPU); ``"cpu"``; an accelerator index, -1 for the
    CPU generator; a list of indices; a tensor (its device). A random op whose generator is not saved is never replayed:
    its result is held instead.
    """

    __slots__ = ("_accelerators", "_cpu", "_indices", "gpu_devices")

    def __init__(self, gpu_devices: GpuDevices) -> None:
        self.gpu_devices = gpu_devices
        self._cpu = self._accelerators = False
        self._indices: frozenset[int] = frozenset()
        if isinstance(gpu_devices, str):
            known = {"all": (True, True), "none": (False, False), "cuda": (False, True), "cpu": (True, False)}
            if gpu_devices not in known:
                raise ValueError(
                    f"gpu_devices={gpu_devices!r} is not known; allowed: 'all', 'none', 'cuda', 'cpu', a device index "
                    "(-1 for the CPU), a list of indices, or a tensor"
                )
            self._cpu, self._accelerators = known[gpu_devices]
        elif isinstance(gpu_devices, Tensor):
            self._take([CPU_INDEX if gpu_devices.device.type == "cpu" else gpu_devices.device.index or 0])
        elif isinstance(gpu_devices, int) and not isinstance(gpu_devices, bool):
            self._take([gpu_devices])
        elif isinstance(gpu_devices, (list, tuple)):
            self._take(gpu_devices)
        else:
            raise TypeError(
                f"gpu_devices is a str, an int, a list of ints or a tensor; got {type(gpu_devices).__name__}: {gpu_devices!r}"
            )

    def _take(self, indices: Iterable[Any]) -> None:
        found = list(indices)
        for index in found:
            if isinstance(index, bool) or not isinstance(index, int):
                raise TypeError(f"a device index is an int; got {type(index).__name__}: {index!r}")
            if index < CPU_INDEX:
                raise ValueError(f"a device index is 0 or more, or -1 for the CPU; got {index}")
        self._cpu = CPU_INDEX in found
        self._indices = frozenset(index for index in found if index >= 0)

    def covers(self, device: torch.device) -> bool:
        if device.type == "cpu":
            return self._cpu
        return self._accelerators or (device.index or 0) in self._indices

    def before_op(self, args: Any, kwargs: Any) -> RandomState | None:
        """The state to save before a random op runs, or None if it cannot be replayed."""
        explicit = kwargs.get("generator")
        if explicit is None:
            explicit = next((arg for arg in args if type(arg) is torch.Generator), None)
        if explicit is not None:
            return RandomState(explicit, explicit.get_state())
        device = _device_of(args, kwargs)
        if not self.covers(device):
            return None
        generator = default_generator(device)
        return None if generator is None else RandomState(generator, generator.get_state())


def _device_of(args: Any, kwargs: Any) -> torch.device:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, torch.device):
            return arg
    return torch.device("cpu")


@contextmanager
def generators_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the default generators of ``devices`` as they were."""
    saved = [(g, g.get_state()) for g in map(default_generator, dict.fromkeys(devices)) if g is not None]
    try:
        yield
    finally:
        for generator, state in saved:
            generator.set_state(state)


def live_devices() -> list[torch.device]:
    """The CPU and every accelerator that has been used."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        found += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    return found
