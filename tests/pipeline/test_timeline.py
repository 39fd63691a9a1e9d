"""What ran when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp.pipeline import ModelPipeline
from recals_exp.pipeline.timeline import Event, draw_timeline, events_as_rows, record, stage_measures


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Slow(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.times = forward, backward
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.times[0])
        y: Tensor = SlowBackward.apply((x * self.weight).tanh(), self.times[1])
        return y


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("threads", [False, True])
def test_events_of_a_step(threads: bool, budget: Any) -> None:
    times = [(0.01, 0.02), (0.02, 0.04), (0.01, 0.01)]
    pipe = ModelPipeline(threads=threads)
    for forward, backward in times:
        pipe.append(Slow(forward, backward), "cpu", budget)
    x = torch.randn(8, 3)
    pipe(x, 2).sum().backward()
    with record(pipe) as timeline:
        pipe(x, 2).sum().backward()
    for kind in ("forward", "backward"):
        found = {(e.stage, e.micro_batch) for e in timeline.events if e.kind == kind}
        assert found == {(s, m) for s in range(3) for m in range(4)}
        assert sum(e.kind == kind for e in timeline.events) == 12
    for stage, (forward, backward) in enumerate(times):
        measure = timeline.stages()[stage]
        assert 4 * forward <= measure.forward_s < 4 * forward + 0.1
        assert 4 * backward <= measure.backward_s
        assert 0 <= measure.bubble < 1
        if budget is None:
            assert measure.recompute_s == 0
            assert measure.cache_peak_bytes is None
        else:
            assert measure.cache_peak_bytes == 24
            assert measure.recompute_s > 0
    backwards = [e for e in timeline.events if e.kind == "backward"]
    if not threads:
        assert [(e.stage, e.micro_batch) for e in backwards] == [(s, m) for m in (3, 2, 1, 0) for s in (2, 1, 0)]
        assert sum(m.backward_s for m in timeline.stages()) == pytest.approx(
            backwards[-1].end_s - backwards[0].start_s, rel=0.2
        )
    for event in timeline.events:
        if event.kind == "recompute":
            inside = [b for b in backwards if b.start_s <= event.start_s and event.end_s <= b.end_s + 1e-4]
            assert event.stage in {b.stage for b in inside}


def test_recording_changes_nothing_and_ends_with_its_block() -> None:
    torch.manual_seed(0)
    pipe = (
        ModelPipeline().append(nn.Linear(4, 4), "cpu", 64).append(nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), "cpu", 64)
    )
    x = torch.randn(8, 4)
    grads = []
    executors = [stage.budget.recals.cache.executor for stage in pipe.stages]
    for recorded in (False, True, False):
        pipe.zero_grad()
        if recorded:
            with record(pipe) as timeline:
                pipe(x, 2).square().mean().backward()
        else:
            pipe(x, 2).square().mean().backward()
        grads.append([parameter.grad for parameter in pipe.parameters()])
    assert len([e for e in timeline.events if e.kind == "forward"]) == 8
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*grads, strict=True))
    assert [stage.budget.recals.cache.executor for stage in pipe.stages] == executors
    with pytest.raises(ZeroDivisionError), record(pipe):
        1 / 0  # noqa: B018
    assert [stage.budget.recals.cache.executor for stage in pipe.stages] == executors


def test_nothing_is_recorded_without_gradients() -> None:
    pipe = ModelPipeline().append(nn.Linear(2, 2), "cpu")
    with record(pipe) as timeline, torch.no_grad():
        pipe(torch.zeros(2, 2), 1)
    assert timeline.events == ()
    assert timeline.stages() == ()


def test_measures_of_stages_that_share_a_rank() -> None:
    events = [
        Event("forward", 0, 0, 0.0, 1.0, 0),
        Event("forward", 3, 0, 3.0, 4.0, 0),
        Event("forward", 1, 0, 1.0, 2.0, 1),
        Event("backward", 1, 0, 6.0, 8.0, 1),
        Event("recompute", 1, 0, 6.0, 7.0, 1),
    ]
    one, other, third = stage_measures(events, {1: 5}, by_rank=True)
    assert (one.stage, other.stage, third.stage) == (0, 1, 3)
    assert one.bubble == third.bubble == pytest.approx(1 - 2 / 8)
    assert other.bubble == pytest.approx(1 - 3 / 8)
    assert other.recompute_pct == pytest.approx(50.0)
    assert other.cache_peak_bytes == 5


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(tmp_path: Path, suffix: str) -> None:
    events = [
        Event("forward", 0, 0, 0.0, 1.0),
        Event("forward", 1, 0, 1.0, 2.0),
        Event("backward", 1, 0, 2.0, 4.0),
        Event("recompute", 1, 0, 2.0, 2.5),
        Event("backward_weight", 0, 0, 4.0, 5.0),
    ]
    path = tmp_path / f"timeline.{suffix}"
    draw_timeline(events, path, "one step")
    assert path.stat().st_size > 1000
    if suffix == "svg":
        text = path.read_text()
        assert "stage 1" in text or "<path" in text
    draw_timeline([], tmp_path / "empty.png")
    assert events_as_rows(events)[3]["kind"] == "recompute"
