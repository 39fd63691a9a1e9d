"""Pipelines over real processes, on gloo."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline import ranks

from recals_exp.pipeline.launch import RankError, launch
from recals_exp.pipeline.process_spec import SCHEDULES, ProcessSpec, schedule_orders
from recals_exp.pipeline.schedule import ideal_efficiency, simulate

pytestmark = [pytest.mark.usefixtures("no_process_is_left"), pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As in the ranks: the number of threads decides how sums are split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TWO = [
    (name, schedule, 2, 4, budget)
    for name in ("chain", "resnet18", "gpt", "unet")
    for schedule in SCHEDULES
    for budget in (None, 0.5)
]
FOUR = [
    ("unet", "gpipe", 4, 8, 0.5),
    ("gpt", "1f1b", 4, 8, 0.5),
    ("gpt", "zbv", 4, 8, 0.5),
    ("gpt", "interleaved1f1b", 4, 8, 0.5),
]


@pytest.fixture(scope="module")
def results_of() -> Any:
    """The results of a case on each rank; all cases of as many processes are run in one start."""
    done: dict[int, list[list[Any]]] = {}

    def find(case: tuple[Any, ...]) -> list[Any]:
        cases, processes = (TWO, 2) if case in TWO else (FOUR, 4)
        if processes not in done:
            done[processes] = launch(ranks.parity_of_all, processes, (cases,), timeout_s=1500, threads=1)
        return [of_rank[cases.index(case)] for of_rank in done[processes]]

    return find


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", TWO + FOUR, ids=lambda case: "-".join(map(str, case)))
def test_processes_equal_the_plain_loop(case: tuple[Any, ...], results_of: Any) -> None:
    name, _, _, m, budget = case
    results = results_of(case)
    bounds = results[0][4]
    losses, grads, state = ranks.reference(name, m, bounds)
    found: dict[str, Any] = {}
    replays = 0
    for rank, (its_losses, generator_same, its_grads, _, _, stats) in enumerate(results):
        assert its_losses == losses, f"loss on rank {rank}"
        assert generator_same
        found.update(its_grads)
        replays += sum(s.replays for s in stats)
        assert all(s.cached_bytes == 0 for s in stats)
    assert budget is None or replays > 0, "nothing was dropped: the budget did not bite"
    assert found.keys() == grads.keys()
    for key, gradient in grads.items():
        assert torch.equal(found[key], gradient), f"gradient of {key}"
    whole = results[0][3]
    assert whole.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(whole[key], tensor), f"state {key}"
    assert all(result[3] is None for result in results[1:])


@pytest.mark.slow
def test_replicas_equal_the_plain_loop_up_to_the_order_of_sums() -> None:
    results = launch(ranks.parity, 4, ("chain", "1f1b", 2, 2, 0.5, 2), timeout_s=120, threads=1)
    losses, grads, state = ranks.reference("chain", 4, results[0][4])
    for its_losses, _, its_grads, *_ in results:
        assert its_losses == pytest.approx(losses)
        for key, gradient in its_grads.items():
            torch.testing.assert_close(gradient, grads[key])
    for key, tensor in state.items():
        torch.testing.assert_close(results[0][3][key], tensor)


# -- refusals and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((10, 4, 10), "a batch of 10 rows does not divide into 4 micro-batches"),
        ((8, 5, 8), r"built for inputs of \[8, 4\] float32 and got \[8, 5\] float32"),
        ((16, 4, 16), r"built for inputs of \[8, 4\] float32 and got \[16, 4\] float32"),
        ((8, 4, 7), "the target has 7 rows, but the batch has 8"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_any_send(batch: tuple[int, ...], message: str) -> None:
    results = launch(ranks.batches, 2, batch, timeout_s=150, threads=1)
    for told, loss in results:
        assert re.search(message, told)
        assert loss == results[0][1] > 0


def test_options_of_one_process_are_refused() -> None:
    for options, message in (
        ({"devices": ["cpu", "cpu"]}, "each rank has its own device"),
        ({"ragged": True}, "are for a pipeline in one process"),
    ):
        with pytest.raises(RankError, match=message):
            launch(ranks.build_only, 2, (options,), timeout_s=150, threads=1)


@pytest.mark.parametrize(
    ("how", "stage", "message"),
    [
        ("raise", 1, r"rank 1 of 2 failed: RuntimeError"),
        ("raise", 0, r"rank 0 of 2 failed: RuntimeError"),
        ("kill", 1, "rank 1 of 2 was killed by SIGKILL"),
        ("exit", 0, "rank 0 of 2 exited with code 3"),
    ],
)
def test_a_failing_rank_ends_the_job_with_its_own_traceback(how: str, stage: int, message: str, tmp_path: Path) -> None:
    mark = tmp_path / "failed_at"
    with pytest.raises(RankError, match=message) as caught:
        launch(ranks.faulty, 2, (how, stage, str(mark)), timeout_s=150, threads=1)
    assert time.monotonic() - float(mark.read_text()) < 15, "the job ended too long after the failure"
    assert caught.value.rank == stage
    if how == "raise":
        told = caught.value.rank_traceback
        assert "ValueError: broken on purpose" in told
        assert f"in the forward of stage {stage} ({stage}) at micro-batch 3 of 8, on rank {stage} of 2" in told


def test_a_rank_that_hangs_runs_into_the_time_limit(tmp_path: Path) -> None:
    mark = tmp_path / "hung_at"
    with pytest.raises((TimeoutError, RankError)):
        launch(ranks.faulty, 2, ("hang", 1, str(mark)), timeout_s=20, threads=1)
    assert time.monotonic() - float(mark.read_text()) < 35


def test_launch_returns_what_each_rank_returns_job_after_job() -> None:
    for _ in range(3):
        assert launch(ranks.number, 2, timeout_s=150, threads=1) == [2, 12]
    assert launch(ranks.threads, 1, timeout_s=150, threads=1) == [1]
    with pytest.raises(RankError, match="pickle"):
        launch(ranks.unpicklable, 1, timeout_s=150)
    with pytest.raises(TimeoutError, match="did not end within 4 s; still running: pipeline rank 0"):
        launch(ranks.slow, 1, timeout_s=4)
    with pytest.raises(ValueError, match="processes=0"):
        launch(ranks.number, 0)


# -- schedules and budgets --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_processes_overlap_nearly_ideally(schedule: str) -> None:
    m = 8
    results = launch(ranks.sleeps, 2, (schedule, m), timeout_s=120, threads=1)
    seconds = max(result[0] for result in results)
    one_stage = m * 2 * 0.06  # two sleeping layers on each rank
    assert one_stage / seconds >= 0.9 * ideal_efficiency(2, m)
    events = [event for result in results for event in result[1]]
    assert {(event.kind, event.rank) for event in events} == {(k, r) for k in ("forward", "backward") for r in (0, 1)}
    assert len(events) == 2 * 2 * m


def test_a_fraction_follows_what_the_schedule_holds_at_once() -> None:
    layer = 2 * 8 * 4  # bytes: 2 rows of 8 floats
    for schedule, flights in (("1f1b", (2, 1)), ("gpipe", (8, 8))):
        results = launch(ranks.uneven, 2, (schedule, 8), timeout_s=150, threads=1)
        for rank, ((flight, limit, peak),) in enumerate(results):
            assert flight == flights[rank]
            assert limit == flight * 4 * layer // 2
            assert 0 < peak <= limit


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("processes", "m"), [(2, 4), (4, 8)])
def test_orders_of_all_schedules_run_on_paper(schedule: str, processes: int, m: int) -> None:
    spec = ProcessSpec(processes, m, schedule)
    table = simulate(schedule_orders(spec))
    assert len(table.slots) == spec.n_stages * m * (3 if schedule == "zbv" else 2)
    for slot in table.slots:
        assert spec.rank_of(slot.action.stage) == slot.worker
    assert 0 <= table.bubble < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "pipedream"}, "schedule='pipedream' is not known: use one of gpipe, 1f1b, interleaved1f1b, zbv"),
        ({"processes": 0}, "processes=0 is not a whole number"),
        ({"processes": 4, "n_micro_batches": 2}, "1f1b needs at least as many micro-batches as stages: 2 < 4"),
        ({"schedule": "interleaved1f1b", "n_micro_batches": 5}, "cannot run 5 micro-batches on 2 processes"),
        ({"schedule": "zbv", "stages_per_process": 1}, "zbv has 2 stages on each process, not 1"),
        ({"reduction": "max"}, "reduction='max' is not known"),
    ],
)
def test_a_wrong_process_spec_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProcessSpec(**{"processes": 2, "n_micro_batches": 4, **options})
