"""A model whose builder comes to grief in several ways, for as long as a file called `trouble` lies in the current folder."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

FAULTS = ("raises", "exits", "killed", "memory")


def build(num_classes: int, input_shape: tuple[int, ...], fault: str = "none", depth: int = 6) -> nn.Module:
    """An MLP. Each fault is what happens to a job for real: nothing is simulated."""
    if Path("trouble").exists():
        if fault == "raises":
            raise RuntimeError("the builder broke")
        if fault == "exits":
            sys.exit("leaving for good")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "memory":
            resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
            kept = []
            while True:
                kept.append(torch.ones(1 << 26))
        if fault == "hangs":
            Path("hanging").touch()
            time.sleep(300)
    width = torch.Size(input_shape).numel()
    units = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *units, nn.Linear(width, num_classes))
