"""Pairs, order, state, and the interval of a median. No test here depends on how fast anything is."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp.meters.steps import StartingState, TrainStep
from recals_exp.meters.timing import measure_pairs, median_interval, steady_process
from recals_exp.records import expected_overhead_pct

CPU = torch.device("cpu")


def tiny_step(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    step = TrainStep(model, optimizer(model.parameters(), lr=0.1, **options), nn.functional.cross_entropy, CPU)
    return step, (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


# -- the interval ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "coverage"),
    [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609375), (20, 6, 0.958610534667969)],
)
def test_interval_takes_the_textbook_order_statistics(n: int, k: int, coverage: float) -> None:
    values = [float(value) for value in range(1, n + 1)]
    random.Random(3).shuffle(values)
    assert median_interval(values) == (float(k), float(n + 1 - k), pytest.approx(coverage))


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    trials, covered = 4000, 0
    for _ in range(trials):
        low, high, _ = median_interval([generator.expovariate(1.0) for _ in range(15)])
        covered += low <= 0.6931471805599453 <= high  # ln 2, the median of that distribution
    assert covered / trials == pytest.approx(0.9648, abs=0.015)  # skewed data: no symmetry is assumed


def test_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="median of no values"):
        median_interval([])


# -- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_alternate_their_order_and_start_from_one_state() -> None:
    step, batch = tiny_step(torch.optim.Adam)
    step(step.model, *batch)
    calls: list[str] = []
    seen: list[tuple[Tensor, ...]] = []

    def note(kind: str) -> None:
        calls.append(kind)
        seen.append((step.model[0].weight.detach().clone(), step.model[1].running_mean.clone(), torch.get_rng_state()))

    step.model.register_forward_pre_hook(lambda module, args: calls.append("plain") or note("state"))

    def wrapped(x: Tensor) -> Tensor:
        calls.append("wrapped")
        return step.model(x)

    before = step.model[0].weight.detach().clone()
    timing = measure_pairs(step, StartingState(step, seed=5), wrapped, batch, 4)
    order = [call for call in calls if call != "state"]
    first_of_each = ["plain", "wrapped", "wrapped", "plain", "plain", "wrapped", "wrapped", "plain"]
    assert order == [
        name for kind in first_of_each for name in (("plain",) if kind == "plain" else ("wrapped", "plain"))
    ]
    assert all(torch.equal(a, b) for state in seen for a, b in zip(state, seen[0], strict=True))
    assert torch.equal(step.model[0].weight, before)  # and it ends where it began
    assert len(timing.plain_s) == len(timing.wrapped_s) == len(timing.ratios) == 4
    assert timing.losses_identical


def test_ratio_and_phases_are_of_the_recorded_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts calls in known strides, every figure is known."""
    plain, wrapped = (0.0, 1.0, 3.0, 3.5), (0.0, 2.0, 6.0, 6.5)
    ticks = iter([*plain, *wrapped, *wrapped, *plain])
    monkeypatch.setattr("recals_exp.meters.steps.time.perf_counter", lambda: next(ticks))
    step, batch = tiny_step()
    timing = measure_pairs(step, StartingState(step, 0), step.model, batch, 2, fifo_fraction=0.25)
    assert timing.plain_s == (3.5, 3.5)
    assert timing.wrapped_s == (6.5, 6.5)
    assert timing.ratios == (6.5 / 3.5, 6.5 / 3.5)
    assert (timing.plain.forward_s, timing.plain.backward_s, timing.plain.optimizer_s) == (1.0, 2.0, 0.5)
    assert timing.backward_forward_ratio == 2.0
    assert timing.expected_overhead_pct == expected_overhead_pct(0.25, timing.plain) == pytest.approx(100 * 1.5 / 3.5)
    assert timing.interval_coverage_pct == 50.0


def test_a_wrapped_step_with_another_loss_is_noticed() -> None:
    step, batch = tiny_step()
    timing = measure_pairs(step, StartingState(step, 0), lambda x: step.model(x) * 1.01, batch, 1)
    assert not timing.losses_identical


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a program that froze nothing; these tests do (``conftest.py``)."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_no_automatic_collection_within_a_step_and_everything_put_back() -> None:
    step, batch = tiny_step()
    enabled: list[bool] = []

    def wrapped(x: Tensor) -> Tensor:
        enabled.append(gc.isenabled())
        return step.model(x)

    frozen = gc.get_freeze_count()
    measure_pairs(step, StartingState(step, 0), wrapped, batch, 2)
    assert enabled == [False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    with pytest.raises(RuntimeError, match="inside"), steady_process():
        raise RuntimeError("inside")
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with steady_process():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def _is_frozen(thing: object) -> bool:
    """Not by count: a frozen object that nobody holds any more leaves, too."""
    return all(other is not thing for other in gc.get_objects())


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("by_program", [False, True])
def test_what_the_program_froze_stays_frozen(by_program: bool) -> None:
    thing = [object()]
    if by_program:
        gc.freeze()
    with steady_process():
        assert _is_frozen(thing)
    assert _is_frozen(thing) == by_program


def test_no_pairs_are_refused() -> None:
    step, batch = tiny_step()
    with pytest.raises(ValueError, match="at least one pair; got timing_pairs=0"):
        measure_pairs(step, StartingState(step, 0), step.model, batch, 0)


# -- the step and its starting state ---------------------------------------------------------------------------------


def test_a_step_learns_and_leaves_no_gradient() -> None:
    step, batch = tiny_step()
    losses = [step(step.model, *batch).loss.item() for _ in range(30)]
    assert statistics.mean(losses[-5:]) < statistics.mean(losses[:5])
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_restored_steps_repeat_to_the_last_bit(optimizer: Any, steps_before: int) -> None:
    """Also when the optimizer makes its state only after the start was noted."""
    step, batch = tiny_step(optimizer)
    for _ in range(steps_before):
        step(step.model, *batch)
    state = StartingState(step, seed=1)

    def three_losses() -> list[float]:
        state.restore()
        return [step(step.model, *batch).loss.item() for _ in range(3)]

    first = three_losses()
    assert first == three_losses() == three_losses()
    assert len(set(first)) == 3  # it moves: the comparison is not of a constant


def test_restoring_keeps_the_parameters_the_same_objects() -> None:
    step, batch = tiny_step(torch.optim.Adam)
    step(step.model, *batch)
    before = [id(tensor) for tensor in step.resident_tensors()]
    state = StartingState(step, 0)
    step(step.model, *batch)
    state.restore()
    assert [id(tensor) for tensor in step.resident_tensors()] == before


def test_autocast_covers_forward_and_loss() -> None:
    step, batch = tiny_step()
    step.autocast_dtype = torch.bfloat16
    output, loss = step.compute_loss(step.model, *batch)
    assert output.dtype is torch.bfloat16
    assert loss.isfinite()
