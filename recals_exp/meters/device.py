"""One layer over the devices a step can run on: waiting, peaks, names and random state.

Why not `torch.cuda`: the meters must not know which accelerator there is. `torch.accelerator` answers for all of
them; the CPU, which is none, answers here.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def resolve_device(name: str) -> torch.device:
    """`auto` is the accelerator if there is one, else the CPU. An accelerator without an index is its current one."""
    if name == "auto":
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        device = torch.accelerator.current_accelerator()
        assert device is not None
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"device={name!r} is not a device: use auto, cpu, or an accelerator such as cuda:0"
            ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is None or present.type != device.type:
        here = f"cpu and {present.type}" if present is not None else "cpu only"
        raise ValueError(f"device={name!r} is not on this machine, which has {here}: use device=cpu or device=auto")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"device={name!r} is not on this machine, which has {present.type}:0 to {present.type}:{count - 1}"
        )
    return torch.device(present.type, index)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done; the CPU queues nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_everything(seed: int) -> None:
    """Every generator a model may draw from: torch's (all devices), Python's and, if it is loaded, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of those generators, by name, in a form `==` or `torch.equal` compares."""
    states: dict[str, Any] = {"torch cpu": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        states[f"torch {device}"] = torch.get_device_module(device).get_rng_state(device).cpu()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def restore_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `generator_states` gave, here or in another process."""
    torch.set_rng_state(states["torch cpu"].cpu())
    kind, internal, gauss = states["python"]
    random.setstate((kind, tuple(internal), gauss))
    if device.type != "cpu" and f"torch {device}" in states:
        torch.get_device_module(device).set_rng_state(states[f"torch {device}"].cpu(), device)
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """torch's deterministic algorithms, which refuse operations that have none, and its fixed choice of convolutions."""
    if not wanted:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch._C._get_cudnn_benchmark()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True)
    # The C setter: ``torch.backends.cudnn`` refuses after ``torch.backends.disable_global_flags()``.
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch._C._set_cudnn_benchmark(benchmark)


@contextmanager
def thread_count(threads: int | None) -> Iterator[int]:
    """Run with so many intra-op threads, and put the number back: jobs of a sweep may share a process."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        if threads is not None:
            torch.set_num_threads(before)
