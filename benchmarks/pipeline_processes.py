"""Two processes against one: the speed-up of real work on the CPU, and what budgets do to each stage's memory.

    python benchmarks/pipeline_processes.py speed                  # one thread each; schedules beside one process
    python benchmarks/pipeline_processes.py memory                 # peak and throughput over schedules x budgets

Speed: a chain of equal layers, batch 64 in 8 micro-batches. One process runs the same micro-batches with one thread; steps of
both are taken in turns of whole jobs, and the medians are compared. Memory: the peak of each rank's resident memory over its
level before the first step, read from the kernel (Linux only), beside the peak of the stage's cache. malloc is told to map
every tensor by itself: what it otherwise keeps for reuse hides what a budget saves. A stage's result is held anyway, so the
resident peak falls by the share of the cache that is not the stages' results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recals_exp.pipeline import SCHEDULES, DistributedPipeline, LayoutSpec, ProcessSpec, ideal_efficiency, launch

MICRO_BATCHES = 8
STEPS = 5


def chain(depth: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def one_process(depth: int, width: int, rows: int) -> float:
    """Median seconds of a step of the plain loop."""
    model = chain(depth, width)
    x, y = torch.randn(rows, width), torch.zeros(rows, width)
    seconds = []
    for _ in range(STEPS):
        model.zero_grad()
        start = time.perf_counter()
        for piece, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            (loss_fn(model(piece), target) / MICRO_BATCHES).backward()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def one_rank(schedule: str, depth: int, width: int, rows: int, budget: Any) -> tuple[float, int, int | None]:
    """Median seconds of a step, peak bytes above the start, peak bytes of the cache."""
    model = chain(depth, width)
    x, y = torch.randn(rows, width), torch.zeros(rows, width)
    spec = ProcessSpec(dist.get_world_size(), MICRO_BATCHES, schedule)
    pipe = DistributedPipeline(model, loss_fn, x, spec, LayoutSpec(budgets=(budget,)))
    del model
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        pipe.step(x, y)
        seconds.append(time.perf_counter() - start)
    caches = [stage.budget.recals for stage in pipe.stages.values()]
    peak = (
        sum(cache.stats.peak_cached_bytes for cache in caches if cache is not None) if caches[0] is not None else None
    )
    return statistics.median(seconds), _resident("VmHWM") - before, peak


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def speed(args: argparse.Namespace) -> None:
    size = (args.depth, args.width, args.rows)
    print(f"chain of {args.depth} x {args.width}, {args.rows} rows in {MICRO_BATCHES} micro-batches, 1 thread each")
    print(f"ideal for 2 stages: {2 * ideal_efficiency(2, MICRO_BATCHES):.2f}x")
    print(f"{'schedule':<16}  {'one process':>11}  {'two':>8}  {'speed-up':>8}")
    for schedule in args.schedules:
        (alone,) = launch(one_process, 1, size, threads=1, timeout_s=600)
        ranks = launch(one_rank, 2, (schedule, *size, None), threads=1, timeout_s=600)
        together = max(rank[0] for rank in ranks)
        print(f"{schedule:<16}  {alone:>9.3f} s  {together:>6.3f} s  {alone / together:>7.2f}x", flush=True)


def memory(args: argparse.Namespace) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read by the ranks when they start
    print(f"{'schedule':<16}  {'budget':>6}  {'step':>8}  {'rank':>4}  {'peak RSS':>10}  {'peak cache':>10}")
    for schedule in args.schedules:
        for budget in (None, -1, 0.5, 0.25):
            ranks = launch(one_rank, 2, (schedule, args.depth, args.width, args.rows, budget), threads=1, timeout_s=600)
            for rank, (seconds, peak, cache) in enumerate(ranks):
                told = "none" if budget is None else "inf" if budget == -1 else str(budget)
                cached = "-" if cache is None else f"{cache / 2**20:.1f} MiB"
                print(
                    f"{schedule:<16}  {told:>6}  {seconds:>6.3f} s  {rank:>4}  {peak / 2**20:>6.1f} MiB  {cached:>10}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    args = parser.parse_args()
    {"speed": speed, "memory": memory}[args.what](args)


if __name__ == "__main__":
    main()
