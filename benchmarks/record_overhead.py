"""What recording adds per op, beside what an empty dispatch mode adds.

    python benchmarks/record_overhead.py

Tiny ops (8 x 8 matrices) in a plain grad-enabled forward, so that nothing but overhead is left. Plain, empty mode and
recording are interleaved in one process, in changing order; the medians of paired differences are printed, in microseconds per op.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from recals_exp.recals import recals_with_rngs


class EmptyMode(TorchDispatchMode):
    """Does nothing: the price of being called at all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def tiny_ops(x: Tensor, weight: Tensor, n_ops: int) -> Tensor:
    """``n_ops`` aten ops, each saved for backward."""
    for _ in range(n_ops // 2):
        x = torch.tanh(torch.mm(x, weight))
    return x


def under_empty_mode(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    with EmptyMode():
        return fn(*args)


def under_empty_mode_and_hooks(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), EmptyMode():
        return fn(*args)


def elapsed_us(call: Callable[[], Any], n_ops: int) -> float:
    start = time.perf_counter()
    out = call()
    seconds = time.perf_counter() - start
    del out
    return seconds / n_ops * 1e6


def measure(n_ops: int, rounds: int) -> dict[str, float]:
    """Medians over rounds, microseconds per op: plain, and what each variant adds to it."""
    x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    recals = recals_with_rngs(None)
    variants: dict[str, Callable[[], Any]] = {
        "plain": lambda: tiny_ops(x, weight, n_ops),
        "empty_mode": lambda: under_empty_mode(tiny_ops, x, weight, n_ops),
        "empty_mode_and_hooks": lambda: under_empty_mode_and_hooks(tiny_ops, x, weight, n_ops),
        "recals": lambda: recals(tiny_ops, x, weight, n_ops),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        names = list(variants)
        for i in range(rounds):
            for name in random.Random(i).sample(names, len(names)):  # what ran before leaves its data in the caches
                times[name].append(elapsed_us(variants[name], n_ops))
    finally:
        gc.enable()
    result = {"plain": statistics.median(times["plain"])}
    for name in ("empty_mode", "empty_mode_and_hooks", "recals"):
        result[name] = statistics.median(t - p for t, p in zip(times[name], times["plain"], strict=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(options.ops, 5)
    found = measure(options.ops, options.rounds)
    print(f"plain forward            {found['plain']:7.2f} us per op")
    print(f"an empty dispatch mode  +{found['empty_mode']:7.2f} us per op")
    print(f"  with identity hooks   +{found['empty_mode_and_hooks']:7.2f} us per op")
    print(f"recals, nothing dropped +{found['recals']:7.2f} us per op")
    print(f"recals / empty mode      {found['recals'] / found['empty_mode']:7.2f}")


if __name__ == "__main__":
    main()
