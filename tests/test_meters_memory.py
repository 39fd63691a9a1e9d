"""Peaks of programs whose allocations are known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recals_exp.meters import memory
from recals_exp.meters.memory import allocation_events, measure_memory, process_peak, step_peak_bytes
from recals_exp.meters.steps import StartingState, TrainStep, unique_storage_bytes

CPU = torch.device("cpu")
MIB = 1024**2


def take(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_peak_is_the_highest_live_sum_and_not_the_total() -> None:
    def run() -> None:
        a = take(3)
        b = take(4)
        del a
        c = take(2)
        del b, c
        take(5)

    assert step_peak_bytes(run, CPU) == 7 * MIB
    assert sum(change for change in allocation_events(run) if change > 0) == 14 * MIB


def test_peak_sees_what_backward_allocates() -> None:
    x = torch.randn(256, 1024, requires_grad=True)  # 1 MiB
    forward = step_peak_bytes(lambda: x.exp().sum() and None, CPU)
    both = step_peak_bytes(lambda: x.exp().sum().backward(), CPU)
    assert MIB <= forward < 1.1 * MIB  # exp's result
    assert 2 * MIB <= both < 2.1 * MIB  # and the gradient made from it


def test_peak_repeats_to_the_byte() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(32, 64)

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    run()
    assert len({step_peak_bytes(run, CPU) for _ in range(3)}) == 1


def test_an_exception_in_the_step_is_not_swallowed() -> None:
    def run() -> None:
        raise RuntimeError("inside the step")

    with pytest.raises(RuntimeError, match="inside the step"):
        step_peak_bytes(run, CPU)

    def fine() -> None:
        take(1)

    assert step_peak_bytes(fine, CPU) == MIB  # the profiler is free again


def test_measuring_prints_nothing() -> None:
    """In a process of its own: Kineto reads the level of its notices when it is first used."""
    script = """
import os, torch
from recals_exp.meters.memory import step_peak_bytes
step_peak_bytes(lambda: None, torch.device("cpu"))
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def deep_step(depth: int = 8, width: int = 64, rows: int = 2048) -> tuple[TrainStep, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())), nn.Linear(width, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = TrainStep(model, optimizer, nn.functional.cross_entropy, CPU)
    batch = (torch.randn(rows, width), torch.zeros(rows, dtype=torch.int64))
    step(step.model, *batch)
    return step, batch


def test_a_strategy_that_saves_memory_is_seen_to_save_it() -> None:
    step, batch = deep_step()
    state = StartingState(step, 0)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        half = len(step.model) // 2
        return step.model[half:](checkpoint(step.model[:half], x, use_reentrant=False))

    record = measure_memory(step, state, checkpointed, batch)
    layer_bytes = 2048 * 64 * 4
    assert record.method == memory.CPU_METHOD
    # 8 tanh outputs are saved; with one half checkpointed, those of four at a time
    assert 8 * layer_bytes <= record.step_peak_plain_bytes <= 13 * layer_bytes
    assert 2.9 * layer_bytes <= record.step_peak_plain_bytes - record.step_peak_bytes <= 5 * layer_bytes
    weights = unique_storage_bytes(step.model.parameters())
    assert record.resident_bytes == 2 * weights + sum(tensor.nbytes for tensor in batch)  # weights and momentum
    assert record.process_peak_bytes >= record.process_start_bytes > 0
    assert record.process_peak_plain_bytes >= record.process_start_plain_bytes > 0


def test_plain_against_plain_is_equal() -> None:
    step, batch = deep_step(depth=2, rows=64)
    record = measure_memory(step, StartingState(step, 0), step.model, batch)
    assert record.step_peak_plain_bytes == record.step_peak_bytes > 0


@pytest.mark.parametrize("high_water_mark", [True, False], ids=["VmHWM", "sampled"])
def test_process_peak_sees_memory_that_was_given_back(high_water_mark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if high_water_mark and not memory._reset_high_water_mark():
        pytest.skip("this system does not let a process reset its high-water mark")
    if not high_water_mark:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)

    def run() -> None:
        held = torch.ones(200 * MIB, dtype=torch.uint8)
        for _ in range(20):  # long enough for a sampling thread to look
            held.fill_(1)

    peak = process_peak(run)
    assert 180 * MIB <= peak.peak_bytes - peak.start_bytes <= 300 * MIB
    assert peak.method == ("VmHWM" if high_water_mark else "resident set sampled every 2 ms")


def test_storages_count_once_and_in_full() -> None:
    base = torch.empty(1000)
    assert unique_storage_bytes(iter([base[:10], base[20:30], base])) == 4000
    sparse = torch.eye(3).to_sparse()
    assert unique_storage_bytes(iter([sparse])) == 2 * 3 * 8 + 3 * 4
