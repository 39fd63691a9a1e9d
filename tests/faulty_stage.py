"""A model of two stages, one of which goes wrong; importable by name from the processes that run it."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn


class Fault(nn.Module):
    """Goes wrong at its fourth call on real data after the set-up: micro-batch 3 of the first step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and torch.distributed.get_rank() == 1:
            self.calls += 1
            if self.calls == 4:
                if self.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "raise":
                    raise ValueError("broken on purpose")
        return x * self.scale


def build(input_shape: tuple[int, ...], num_classes: int, how: str = "raise") -> nn.Sequential:
    """Flatten, a linear layer and the fault, a head."""
    size = input_shape[0] * input_shape[1] * input_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 8), Fault(how), nn.Linear(8, num_classes))
