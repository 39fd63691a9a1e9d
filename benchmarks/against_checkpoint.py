"""Against ``torch.utils.checkpoint``: at the peak that a choice of blocks reaches, is a plan for the same peak faster?

    python benchmarks/against_checkpoint.py                        # chain, gpt, resnet50
    python benchmarks/against_checkpoint.py --networks gpt --rounds 15

``chain`` is 256 wide here, with a batch of 2048: as much work as 512 x 512 x 512, but activations, not gradients, make its peak.
Blocks: 8 of 8 layers (chain), 8 (gpt), 16 (resnet50). Three choices: every block, every second block, and the best of all subsets
for the peak of every second block: all of them are searched (256, 256, 65,536), by what their blocks cost to re-run (measured)
and the memory curve of a plain step; the choice found is then measured like the others.

For each choice the peak of a whole training step is measured; a plan is made for that peak (`predict.fit_plan`: what
``target_peak=`` does), and verified by measuring; then plain, checkpointed and planned steps are timed in turn, round by round,
losses compared bit by bit. `planned` is never given more memory. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from bench import MIB, called, following, overheads, peak_bytes, profile_of, start
from networks import CHAIN_LAYERS, Training, training
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from recals_exp.meters.steps import Forward, StartingState
from recals_exp.predict import Fit, fit_plan
from recals_exp.recals import StepPlan
from recals_exp.recals.prediction import Profile
from recals_exp.recals.simulate import following as simulated
from recals_exp.recals.simulate import simulate
from recals_exp.recals.step_memory import moments_of

CHAIN_BLOCKS = 8


class Blocks(nn.Module):
    """The chain as blocks of equal length: what ``checkpoint_sequential`` would make of it."""

    def __init__(self, layers: Sequence[nn.Module], n: int) -> None:
        super().__init__()
        size = len(layers) // n
        self.blocks = nn.Sequential(*(nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(n)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def flat_chain() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(CHAIN_LAYERS) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return Blocks(layers, CHAIN_BLOCKS), torch.randn(2048, 256)


def task_of(name: str) -> Training:
    return training(flat_chain if name == "chain" else name)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """What a user would checkpoint, by name, in order."""
    if hasattr(model, "layer1"):
        stages = {f"layer{i}": getattr(model, f"layer{i}") for i in range(1, 5)}
        return {f"{name}.{i}": block for name, stage in stages.items() for i, block in stage.named_children()}
    blocks: Any = model.blocks
    return {f"blocks.{i}": block for i, block in blocks.named_children()}


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """``blocks`` re-run in backward while this is entered."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def checkpointing(model: nn.Module, blocks: Sequence[nn.Module]) -> Forward:
    def forward(*args: Any) -> Any:
        with checkpointed(blocks):
            return model(*args)

    return forward


# -- the best subset -------------------------------------------------------------------------------------------------


def best_subset(profile: Profile, names: Sequence[str], peak_limit: float, scale: float) -> tuple[str, ...]:
    """The cheapest subset whose predicted peak, times ``scale``, is at most ``peak_limit``."""
    peaks, costs = predicted(profile, names)
    fits = np.flatnonzero(peaks * scale <= peak_limit)
    index = int(fits[np.argmin(costs[fits])])
    return tuple(name for i, name in enumerate(names) if index >> i & 1)


def predicted(profile: Profile, names: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Peak in bytes and cost of every subset of blocks; the bits of an index are its blocks.

    What a checkpointed block saves inside is not there from its end in forward until backward reaches it.
    """
    record, memory = profile.record, profile.memory
    events = [*record.forward_events, *record.backward_events]
    moments = moments_of(record, None, "fifo")
    live = np.array(
        [
            max(at + moment.highest_bytes, until + moment.bytes_after)
            for moment, at, until in zip(moments, memory.at_event, memory.until_next, strict=True)
        ],
        dtype=np.float64,
    )
    block_of_op = [_block(op.layer, names) for op in record.ops]
    last_of: dict[int, int] = {}
    for i, (kind, index) in enumerate(record.forward_events):
        if kind == "op" and block_of_op[index] >= 0:
            last_of[block_of_op[index]] = i
    read_after = [-1] * len(record.values)  # by a later block: it is there as that block's input
    for op, place in zip(record.ops, block_of_op, strict=True):
        for v in op.inputs:
            read_after[v] = max(read_after[v], place if place >= 0 else len(names))
    absent = np.zeros((len(names), len(events)))
    costs = np.array(
        [sum(op.cost for op, at in zip(record.ops, block_of_op, strict=True) if at == b) for b in range(len(names))]
    )
    first_fetch = [len(events)] * len(names)
    for i, (kind, index) in enumerate(record.backward_events):
        place = block_of_op[record.values[index].producer] if record.values[index].producer >= 0 else -1
        if kind == "fetch" and place >= 0 and read_after[index] <= place:
            first_fetch[place] = min(first_fetch[place], len(record.forward_events) + i)
    for v, value in enumerate(record.values):
        place = block_of_op[value.producer] if value.producer >= 0 else -1
        if value.saved and not value.external and place >= 0 and read_after[v] <= place:
            absent[place, last_of[place] + 1 : first_fetch[place]] += value.nbytes
    n_subsets = 1 << len(names)
    bits = (np.arange(n_subsets)[:, None] >> np.arange(len(names))) & 1
    peaks = np.empty(n_subsets)
    for low in range(0, n_subsets, 4096):
        peaks[low : low + 4096] = (live - bits[low : low + 4096] @ absent).max(axis=1)
    return memory.resident_bytes + peaks, bits @ costs


def _block(layer: str, names: Sequence[str]) -> int:
    return next((i for i, name in enumerate(names) if layer == name or layer.startswith(name + ".")), -1)


# -- planned at the same peak ----------------------------------------------------------------------------------------


def planned_for(
    peak: int, task: Training, state: StartingState, profile: Profile, effort: float
) -> tuple[Fit, StepPlan]:
    """The plan for a peak, verified by measuring."""

    def measure(limit: int, plans: Sequence[StepPlan]) -> int:
        forward = called(task, following(limit, plans[0])) if plans else task.step.model
        return peak_bytes(task, state, forward)

    fit = fit_plan(peak, profile, measure, profile.smallest_limit_bytes, effort)
    assert fit.plan is not None
    return fit, fit.plan


def compare(name: str, rounds: int, effort: float, costs: str) -> None:
    task = task_of(name)
    model = task.step.model
    blocks = blocks_of(model)
    state = start(task)
    profile = profile_of(task, state, costs)
    plain_peak = peak_bytes(task, state, model)
    names = list(blocks)
    choices = {"every block": tuple(names), "every second block": tuple(names[::2])}
    peaks: dict[str, int] = {}
    for choice, chosen in choices.items():
        peaks[choice] = peak_bytes(task, state, checkpointing(model, [blocks[b] for b in chosen]))
    modelled, _ = predicted(profile, names)
    second = sum(1 << i for i in range(0, len(names), 2))
    scale = peaks["every second block"] / modelled[second]
    best = best_subset(profile, names, peaks["every second block"] * 1.005, scale)
    label = f"best subset: all but {_short(set(names) - set(best))}"
    choices[label] = best
    peaks[label] = peak_bytes(task, state, checkpointing(model, [blocks[b] for b in best]))
    for choice, chosen in choices.items():
        fit, step_plan = planned_for(peaks[choice], task, state, profile, effort)
        limit, peak = fit.limit_bytes, fit.peak_bytes
        forwards = {
            "checkpoint": checkpointing(model, [blocks[b] for b in chosen]),
            "planned": called(task, following(limit, step_plan)),
        }
        for forward in forwards.values():
            for _ in range(2):
                state.restore()
                task.step(forward, *task.batch)
        found = overheads(task, state, forwards, rounds)
        points = simulate(profile.record, limit, simulated(profile.record, step_plan.plan)).overhead_pct
        faster = (1 + found["checkpoint"].median_pct / 100) / (1 + found["planned"].median_pct / 100)
        print(
            f"| {name} | {choice} | {peaks[choice] / MIB:.1f} ({100 * peaks[choice] / plain_peak:.0f} % of plain) | "
            f"{found['checkpoint']} | {peak / MIB:.1f} | {100 * limit / profile.cache_total_bytes:.0f} % | "
            f"{found['planned']} | {points:.1f} % | {faster:.3f}x |",
            flush=True,
        )


def _short(names: set[str]) -> str:
    return ", ".join(sorted(name.removeprefix("blocks.").removeprefix("layer") for name in names)) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--networks", nargs="*", choices=("chain", "gpt", "resnet50"), default=["chain", "gpt", "resnet50"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--effort", type=float, default=0.25)
    parser.add_argument("--costs", choices=("model", "measured"), default="measured")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        "| network | checkpointed | peak MiB | its overhead, median [95 %] | planned: peak MiB | most cached | overhead | "
        "re-runs, predicted | checkpoint / planned |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name in args.networks:
        compare(name, args.rounds, args.effort, args.costs)


if __name__ == "__main__":
    main()
