"""Times beside plain steps: which of them count."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import Tensor, nn

from recals_exp.recals import Recals, measured, recals_with_rngs
from recals_exp.recals.bare_step import Wrap
from recals_exp.recals.measured import Beside, StepTimes, TimedStep, _evaluated, steadier_half
from recals_exp.recals.prediction import profile_run
from recals_exp.recals.record import RecordError
from recals_exp.recals.stopwatch import PART, RebuildParts, Stopwatch


def test_the_share_is_of_both_neighbours() -> None:
    step = Beside(3.0, 1.0, 2.0)
    assert step.plain_s == 1.5
    assert step.unsteadiness == pytest.approx(2 / 3)


@pytest.mark.parametrize(("count", "kept"), [(1, [0]), (2, [0]), (3, [0, 2]), (4, [0, 2])])
def test_the_steadier_half_counts_in_its_order(count: int, kept: list[int]) -> None:
    steps = [Beside(0, 1.0, 1.01), Beside(1, 1.0, 1.5), Beside(2, 2.0, 2.0), Beside(3, 1.0, 0.8)][:count]
    assert [step.taken for step in steadier_half(steps)] == kept


def test_no_garbage_is_collected_within_a_step_and_the_collector_comes_back() -> None:
    seen: list[bool] = []

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(gc.isenabled())
            return super().forward(x).tanh()

    assert gc.isenabled()
    recals_with_rngs(-1).profile(Net(4, 4), torch.randn(2, 4), costs="measured")
    assert gc.isenabled()
    assert seen.count(False) > 40
    assert all(seen[: seen.index(False)])  # what is not timed is left as it is


@pytest.mark.parametrize(("enough_s", "rounds"), [(30.0, 6), (60.0, 6), (150.0, 15)])
def test_more_time_brings_more_rounds(enough_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_ROUNDS", 6)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    losses: list[Tensor] = []

    def run(wrap: Wrap) -> None:
        losses.append(wrap(net)(x).sum())
        losses[-1].backward()

    cpu = torch.device("cpu")
    profile_run(recals_with_rngs(-1), run, cpu, 0, reset=net.zero_grad, costs="measured", enough_s=enough_s)
    untimed = 1 + (1 + PART) + 1  # recorded, to warm up, the first plain one
    assert len(losses) == untimed + 6 * rounds


# -- the stopwatch -----------------------------------------------------------------------------------------------------


def chain(n: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(n) for layer in (nn.Linear(4, 4), nn.Tanh())])


def watched(shift: int, x: Tensor) -> tuple[Stopwatch, Recals]:
    clock = itertools.count()
    recals = recals_with_rngs(-1).unlimited(RebuildParts(shift))
    watch = recals.cache.executor = Stopwatch(recals.replayer, lambda: float(next(clock)))
    recals(chain(8), x).sum().backward()
    return watch, recals


def test_all_but_one_of_each_part_are_rebuilt_together() -> None:
    _, recals = watched(0, torch.randn(2, 4))
    stats = recals.stats
    assert (stats.dropped_values, stats.recomputed_values) == (6, 6)  # of 8: the fourth and the eighth stay
    assert stats.replays == 2


def test_between_them_the_shifts_time_every_op() -> None:
    x = torch.randn(2, 4)
    places = [set(watched(shift, x)[0].seconds_per_run()) for shift in range(PART)]
    assert set().union(*places) == set(range(16))
    assert all(len(found) < 16 for found in places)


def test_an_op_takes_from_the_end_of_the_one_before() -> None:
    watch, recals = watched(0, torch.randn(2, 4))
    assert set(watch.seconds_per_run().values()) == {1.0}  # of a clock that counts how often it is read
    assert watch.total_s == recals.stats.recomputed_ops


def test_a_step_that_does_not_repeat_itself_is_refused() -> None:
    class Net(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Net.calls += 1
            out = super().forward(x).tanh()
            return out if Net.calls < 4 else torch.cat([out, out]).sigmoid()

    with pytest.raises(RecordError, match="does not repeat itself, so its costs cannot be measured; use costs='model'"):
        recals_with_rngs(-1).profile(Net(4, 4), torch.randn(2, 4), costs="measured")


def test_another_call_than_the_first_is_refused() -> None:
    net, sizes = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), itertools.chain([2] * 8, itertools.repeat(3))

    def run(wrap: Wrap) -> None:
        wrap(net)(torch.randn(next(sizes), 4)).sum().backward()

    with pytest.raises(RecordError, match="with other shapes"):
        profile_run(recals_with_rngs(-1), run, torch.device("cpu"), 0, costs="measured")


def test_noise_in_what_recording_takes_is_counted_once() -> None:
    """Recorded steps that look faster than plain ones: recording is free, and dropping costs what is seen in all."""
    record = recals_with_rngs(-1).profile(chain(4), torch.randn(2, 4))
    recorded = [Beside(TimedStep(StepTimes(0.32, 0.66), {}, 0.0, 0), 1.0, 1.0)] * 4
    timed = [Beside(TimedStep(StepTimes(0.33, 0.78), {2: 0.1}, 0.1, 10), 1.0, 1.0)] * 4
    found = _evaluated(record, torch.device("cpu"), [StepTimes(0.33, 0.67)], recorded, timed)
    assert found.recording_cost == 0.0
    assert found.engine_pct(10) == pytest.approx(1.0)
    assert found.ops[2].cost == pytest.approx(0.1)
    assert (found.forward_cost, found.backward_cost) == pytest.approx((0.33, 0.67))
