"""Stages whose parameters and buffers live in the modules of the model they were cut from."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class PlacedModule(nn.Module, abc.ABC):
    """A stage made of parts of another module, which finds its parameters there at each call."""

    @abc.abstractmethod
    def place(self, device: torch.device) -> None:
        """Move what the stage uses to a device, in the modules it belongs to."""

    @abc.abstractmethod
    def owners(self) -> Iterator[nn.Module]:
        """The modules that hold what the stage uses and may change."""

    @abc.abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """The parameters and buffers the stage uses."""


def stage_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers a stage uses."""
    if isinstance(module, PlacedModule):
        yield from module.tensors()
    else:
        yield from module.parameters()
        yield from module.buffers()


def stage_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules a stage consists of."""
    yield from module.modules()
    if isinstance(module, PlacedModule):
        yield from module.owners()
