"""Whether this process is one of several that ``torchrun`` started, and which. Loads neither torch nor Hydra."""

from __future__ import annotations

import os


def is_rank() -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def rank() -> int:
    """The number of this process; 0 if it is alone."""
    return int(os.environ["RANK"]) if is_rank() else 0


def world_size() -> int:
    """How many were started; 1 if this process is alone."""
    return int(os.environ["WORLD_SIZE"]) if is_rank() else 1
