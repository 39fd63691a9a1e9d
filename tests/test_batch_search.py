"""The largest batch within a peak: found on curves where it is known, and in a real job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_results import MIB, finished

from recals_exp import records
from recals_exp.answers import answer
from recals_exp.batch_search import CLOSE, largest_batch
from recals_exp.records import BatchSearchRecord
from recals_exp.runconfig import Budget, ConfigError, PartSpec, RunConfig
from recals_exp.runner import run


def line(size: int) -> int:
    return 1000 + 37 * size


def steps(size: int) -> int:
    """An allocator's: the peak grows in jumps."""
    return 1000 + 400 * (size // 8)


def bent(size: int) -> int:
    """Another part of the step makes the peak from batch 50 on."""
    return max(1000 + 10 * size, 100 * size - 3500)


@pytest.mark.parametrize("start", [1, 8, 300])
@pytest.mark.parametrize("peak_of", [line, steps, bent], ids=lambda curve: curve.__name__)
def test_what_is_found_fits_and_one_close_above_does_not(peak_of: Callable[[int], int], start: int) -> None:
    target = 5000
    found = largest_batch(target, peak_of, start)
    truth = max(size for size in range(1, 1000) if peak_of(size) <= target)
    assert found.peak_bytes == peak_of(found.batch_size) <= target
    assert found.too_large is not None
    assert found.batch_size <= truth < found.too_large
    assert found.too_large - found.batch_size <= max(1, CLOSE * found.batch_size)
    assert len(found.tries) <= 14
    assert found.tries[0] == (start, peak_of(start))


def test_running_out_of_memory_is_not_fitting() -> None:
    found = largest_batch(10**9, lambda size: 10 * size if size < 77 else None, 8)
    assert 74 <= found.batch_size <= 76
    assert 0 in {peak for _, peak in found.tries}


def test_everything_fits_or_nothing_does() -> None:
    assert largest_batch(10**9, lambda size: 5, 8, most=512).too_large is None
    with pytest.raises(
        ValueError, match=r"not even one sample fits: .* peaks at 1037 bytes, the target is 500; use a larger"
    ):
        largest_batch(500, line, 8)


def job(strategy: str, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "model": PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 8, "width": 64}),
        "dataset": PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 8, "channels": 1}),
        "optimizer": PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1}),
        "strategy": strategy,
        "batch_size": 128,
        "device": "cpu",
        "threads": 1,
        "timing_pairs": 2,
        "mode": "batch_size",
    }
    return RunConfig(**{**fields, **changes})


def test_a_real_search_of_plain_finds_the_batch_it_started_from(tmp_path: Path) -> None:
    result = run(job("none"), tmp_path)
    assert result.status == records.OK, result.error
    assert 128 <= result.batch_size <= 132
    assert result.batch_search is not None
    assert result.batch_search.target_peak_bytes == result.peak_memory_plain_bytes
    assert records.load(tmp_path) == result


def test_less_memory_becomes_more_samples(tmp_path: Path) -> None:
    result = run(job("recals", budget=Budget.parse(0.25)), tmp_path)
    assert result.status == records.OK, result.error
    assert result.batch_size > 160
    assert result.peak_memory_bytes <= result.peak_memory_plain_bytes
    assert result.gradients_identical is True
    assert result.samples_per_s == pytest.approx(result.batch_size / result.step_time_s)
    search = result.batch_search
    assert search is not None
    assert (search.plain_batch_size, search.tries[0][0]) == (128, 128)
    assert search.too_large is not None
    assert dict(search.tries)[search.too_large] > search.target_peak_bytes
    assert result.batch_size < search.too_large


def test_the_sentence_names_the_largest_and_the_fastest() -> None:
    search = BatchSearchRecord(8, 100 * MIB, 20, ((8, 50 * MIB), (20, 101 * MIB)))
    results = [
        finished(0.5, job="a", batch_search=search, batch_size=19, samples_per_s=5.0, speed_vs_plain=0.8),
        finished(0.25, job="b", batch_search=search, batch_size=12, samples_per_s=9.0, speed_vs_plain=1.25),
    ]
    assert answer(results) == (
        "mlp_chain: within the peak of a plain step at batch size 8 (100.0 MiB) the largest batch is 19, under recals fifo 0.5; "
        "the best throughput is 9.0 samples/s, 1.25 x plain's, under recals fifo 0.25 at batch size 12."
    )


def test_what_has_no_meaning_here_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="budget=knee with mode=batch_size is not allowed: each batch has another knee"
    ):
        job("recals", budget=Budget.parse("knee"))
    with pytest.raises(ConfigError, match="target_peak with mode=batch_size is not allowed"):
        job("recals", budget=Budget.peak("1MiB"))
