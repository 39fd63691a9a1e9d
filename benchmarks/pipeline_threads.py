"""How well the stages of a `ModelPipeline` overlap on worker threads: measured efficiency beside the ideal m/(m+n-1).

    python benchmarks/pipeline_threads.py

Stages that sleep show the overhead of the pipeline alone. Stages that compute show what two cores make of it (inference).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from recals_exp.pipeline import ModelPipeline, format_grid, forward_orders, ideal_efficiency, simulate


class Sleep(nn.Module):
    """A stage that takes a fixed time and no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x + 1


def best_of(pipe: ModelPipeline, x: Tensor, rows: int, repeats: int = 5) -> float:
    """The least seconds of a call without gradients."""
    with torch.no_grad():
        pipe(x, rows)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            pipe(x, rows)
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep-ms", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(format_grid(simulate(forward_orders(3, 8))))
    print(f"\n{'stages':>6}  {'micro-batches':>13}  {'measured':>8}  {'ideal':>6}  {'of ideal':>8}")
    for n, m in ((2, 4), (2, 8), (3, 8), (4, 8), (4, 16)):
        pipe = ModelPipeline(threads=True)
        for _ in range(n):
            pipe.append(Sleep(args.sleep_ms / 1000), "cpu")
        efficiency = m * args.sleep_ms / 1000 / best_of(pipe, torch.zeros(m), 1)
        ideal = ideal_efficiency(n, m)
        print(f"{n:>6}  {m:>13}  {efficiency:>8.3f}  {ideal:>6.3f}  {efficiency / ideal:>7.1%}")
    x = torch.randn(1024, 1024)
    seconds = {}
    for threads in (False, True):
        torch.manual_seed(0)
        pipe = ModelPipeline(threads=threads)
        for _ in range(2):
            pipe.append(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), "cpu")
        seconds[threads] = best_of(pipe, x, 128)
    print(
        f"\ntwo stages of six 1024 x 1024 layers, 8 micro-batches, 1 thread each: {1000 * seconds[False]:.1f} ms in order, "
        f"{1000 * seconds[True]:.1f} ms on threads ({seconds[False] / seconds[True]:.2f}x)"
    )


if __name__ == "__main__":
    main()
