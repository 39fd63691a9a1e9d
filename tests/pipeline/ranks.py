"""What the ranks of the process tests run: importable by name, with plain arguments and results."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline.zoo import CASES, group
from torch import Tensor, nn

from recals_exp.pipeline.distributed import DistributedPipeline
from recals_exp.pipeline.layout import LayoutSpec
from recals_exp.pipeline.process_spec import ProcessSpec, cell_seed, generator_digest


class UNet(nn.Module):
    """Skips over all of the middle, and in-place ReLUs at every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.d3, self.u2, self.u1 = CASES["unet"].stages()

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2(a)
        return self.u1(self.u2(self.d3(b), b), a)


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The same model and batch on every rank."""
    torch.manual_seed(0)
    if name == "gpt":
        from recals_exp.models.gpt import gpt

        model: nn.Module = gpt(vocab_size=17, seq_len=6, depth=3, width=16, heads=2, dropout=0.2)
        return model, torch.randint(17, (16, 6))
    if name == "unet":
        return UNet(), torch.randn(16, 2, 8, 8)
    if name == "sleep":
        return nn.Sequential(*(Sleep() for _ in range(4))), torch.zeros(16, 2)
    model = nn.Sequential(*group(CASES[name].stages(), 5))
    return model, CASES[name].batch()


class Sleep(nn.Module):
    """Takes 20 ms forward and 40 ms backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        y = x * self.scale
        if y.requires_grad:
            y.register_hook(lambda grad: time.sleep(0.04))
        return y


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output.flatten(1).mean(1) - target).square().mean()


def plain(model: nn.Module, x: Tensor, y: Tensor, m: int, steps: int, bounds: Any = None, stages: Any = None) -> Any:
    """The loop over the same micro-batches, each stage drawing from its own seeds."""
    losses = []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        state = torch.get_rng_state()
        digest = generator_digest()
        for index, (piece, target) in enumerate(zip(x.chunk(m), y.chunk(m), strict=True)):
            if stages is None:
                out = model(piece)
            else:
                out = piece
                for number, stage in enumerate(stages):
                    torch.manual_seed(cell_seed(digest, step, number, index))
                    out = stage(*out) if isinstance(out, tuple) else stage(out)
            loss = square(out, target) / m
            loss.backward()
            total += loss.detach()
        torch.set_rng_state(state)
        losses.append(float(total))
    return losses


def parity(name: str, schedule: str, processes: int, m: int, budget: Any, replicas: int = 1) -> Any:
    """Losses, state and gradients of two accumulated steps, and what each rank's caches did."""
    model, x = build(name)
    y = torch.linspace(-1, 1, len(x))
    spec = ProcessSpec(processes, m, schedule, replicas=replicas)
    pipe = DistributedPipeline(model, square, x, spec, LayoutSpec(budgets=(budget,)))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    losses = [pipe.step(x, y).loss for _ in range(2)]
    same = bool(torch.equal(before, torch.get_rng_state()))
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    stats = [stage.budget.recals.stats for stage in pipe.stages.values() if stage.budget.recals is not None]
    return losses, same, grads, pipe.state_dict(), pipe.layout.bounds, stats


def parity_of_all(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Many cases in one start of the processes."""
    return [parity(*case) for case in cases]


def reference(name: str, m: int, bounds: tuple[int, ...]) -> Any:
    """The same in one process."""
    from recals_exp.pipeline.units import find_units

    model, x = build(name)
    y = torch.linspace(-1, 1, len(x))
    units = find_units(model, (x[: len(x) // m],), dynamic=False)
    stages = [stage.module for stage in units.stages(bounds, relay=True)]
    torch.manual_seed(5)
    losses = plain(model, x, y, m, 2, stages=stages if name == "gpt" else None)
    return losses, {k: p.grad for k, p in model.named_parameters()}, copy.deepcopy(model.state_dict())


# -- failures ---------------------------------------------------------------------------------------------------------


class Fault(nn.Module):
    """Goes wrong at its fourth call: micro-batch 3."""

    def __init__(self, how: str, mark: str) -> None:
        super().__init__()
        self.how = how
        self.mark = mark  # a file for the moment it goes wrong
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        fake = isinstance(x, torch._subclasses.FakeTensor)
        self.calls += not fake
        if self.calls == 4 and not fake:
            Path(self.mark).write_text(str(time.monotonic()))
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                time.sleep(600)
            raise ValueError("broken on purpose")
        return x * self.scale


def faulty(how: str, stage: int, mark: str) -> Any:
    model = nn.Sequential(*(Fault(how, mark) if k == stage else nn.Linear(4, 4) for k in range(2)))
    x = torch.randn(16, 4)
    pipe = DistributedPipeline(model, square, x, ProcessSpec(2, 8, "1f1b"))
    return pipe.step(x, torch.zeros(16)).loss


def batches(rows: int, width: int, target_rows: int) -> Any:
    """Refusals come on every rank and leave the pipeline usable."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    good = torch.randn(8, 4)
    pipe = DistributedPipeline(model, square, good, ProcessSpec(2, 4, "gpipe"))
    try:
        pipe.step(torch.randn(rows, width), torch.zeros(target_rows))
    except ValueError as error:
        return str(error), pipe.step(good, torch.zeros(8)).loss
    return "accepted", 0.0


def build_only(options: dict[str, Any]) -> Any:
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return DistributedPipeline(model, square, x, ProcessSpec(2, 4, "gpipe"), LayoutSpec.from_mapping(options)).layout


def sleeps(schedule: str, m: int) -> Any:
    """Seconds of a step, and its events."""
    model, x = build("sleep")
    x = torch.zeros(m, 2)
    pipe = DistributedPipeline(model, square, x, ProcessSpec(2, m, schedule))
    pipe.step(x, torch.zeros(m))
    pipe.recording = True
    best, events = float("inf"), []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        pipe.step(x, torch.zeros(m))
        seconds = time.perf_counter() - start
        if seconds < best:
            best, events = seconds, list(pipe.events)
    return best, events


def uneven(schedule: str, m: int) -> Any:
    """The limit a fraction becomes on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))
    x = torch.randn(16, 8)
    pipe = DistributedPipeline(model, square, x, ProcessSpec(2, m, schedule), LayoutSpec(budgets=(0.5,)))
    pipe.step(x, torch.zeros(16))
    return [
        (stage.in_flight, stage.budget.recals.cache_limit_bytes, stage.budget.recals.stats.peak_cached_bytes)
        for stage in pipe.stages.values()
    ]


def number() -> int:
    return dist.get_rank() * 10 + int(os.environ["WORLD_SIZE"])


def unpicklable() -> Any:
    return lambda: None


def slow() -> None:
    time.sleep(600)


def threads() -> int:
    return torch.get_num_threads()
