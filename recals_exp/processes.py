"""A job whose pipeline runs over processes: start them or use torchrun's, and make one record of what the ranks report.

    process 0 (Hydra, the folder, the record)  --run_rank-->  every rank (`ranks.py`)  --RankReport-->  process 0

Rules the code follows:

1. One writer: the record, the events, the log and the picture are this process's. The ranks only report.
2. A rank that fails ends the job: its own traceback goes to the log, and the first line of it into the record.
3. Started here, the ranks are new processes for each job, of as many threads as there are cores for each of them. Started by
   torchrun, they take part in one job after the other (`pipeline/members.py`).
4. What must fit is the worst process: the reported peak is the largest of the ranks'. Step times are the slowest rank's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
from pathlib import Path
from typing import Any

from recals_exp import records, torchrun
from recals_exp.meters.environment import describe_environment
from recals_exp.meters.flops import compare_flops
from recals_exp.meters.stages import span_s, stage_record
from recals_exp.meters.timing import median_interval
from recals_exp.pipeline import (
    ProcessSpec,
    RankError,
    format_layout,
    ideal_bubble,
    launch,
    schedule_orders,
    simulate,
    stage_measures,
)
from recals_exp.pipeline.members import members
from recals_exp.pipelines import write_timeline
from recals_exp.pipelinespec import AUTO
from recals_exp.progress import Progress
from recals_exp.ranks import PlainReport, RankReport, run_rank
from recals_exp.records import (
    CacheRecord,
    MemoryRecord,
    PhaseTimes,
    RunResult,
    TimingRecord,
    TrainingRecord,
)
from recals_exp.runconfig import ConfigError, RunConfig
from recals_exp.stagerecords import StagesRecord
from recals_exp.writers import RunWriter

log = logging.getLogger(__name__)

METHOD = "of the stage's process: torch profiler memory events on the CPU, else the allocator's own peak"


class ProcessError(RuntimeError):
    """A process of the job failed. The message is one line; the cause has its traceback."""


class ProcessJob:
    """Like the runner's job, over processes."""

    def __init__(self, config: RunConfig, base: RunResult, writer: RunWriter, progress: Progress) -> None:
        self.config = config
        self.base = base
        self.writer = writer
        self.progress = progress
        self.processes = n_processes(config)
        check_before_starting(config, self.processes)
        progress.start(base.job, 1)

    def do(self, folder: Path) -> RunResult:
        """Run the job and return its record; the picture goes into ``folder``."""
        reports = run_ranks(self.config, self.processes)
        self.progress.advance("measured")
        first = reports[0]
        log.info("layout:\n%s", format_layout(first.layout))
        for line in _plain(first).parity.differences:
            log.warning("parity: %s", line)
        result = make_record(self.config, self.base, reports)
        for index, loss in enumerate(first.losses):
            self.writer.training_step(index, loss, first.training_s / len(first.losses), None)
        if result.timing is not None:
            self.writer.pairs(result.timing)
        events = [event for report in reports for event in report.events]
        self.writer.timeline(write_timeline(events, folder, self.base.job))
        return result


def run_ranks(config: RunConfig, processes: int) -> list[RankReport]:
    """The reports of all ranks, in order."""
    ranks = processes * config.pipeline.replicas
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if torchrun.is_rank() else ranks
    threads = config.threads or max(1, (os.cpu_count() or 1) // here)
    backend = "gloo" if config.device == "cpu" else None  # which decides on the ranks' devices
    limits: dict[str, Any] = {"threads": threads, "timeout_s": config.pipeline.timeout_s, "backend": backend}
    try:
        if torchrun.is_rank():
            return members().lead(run_rank, (config, processes), **limits)
        return launch(run_rank, ranks, (config, processes), **limits)
    except RankError as error:
        raise ProcessError(headline(error.rank, ranks, error)) from error


def check_started_alone(config: RunConfig) -> None:
    """Refuse what torchrun started several processes for, but which runs in one."""
    if torchrun.world_size() > 1 and not config.pipeline.over_processes:
        raise ConfigError(
            f"torchrun started {torchrun.world_size()} processes, but pipeline={config.pipeline.name} runs in one: use "
            "pipeline=distributed, or start it without torchrun"
        )


def check_before_starting(config: RunConfig, processes: int) -> ProcessSpec:
    """How it will run; refuses here what every rank would refuse."""
    spec = config.pipeline
    assert spec.n_micro_batches is not None
    pieces = spec.n_micro_batches * spec.replicas
    if config.batch_size % pieces:
        replicas = f" x {spec.replicas} replicas" if spec.replicas > 1 else ""
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide into {spec.n_micro_batches} micro-batches{replicas}, and over processes "
            f"they must be equal: use a multiple of {pieces}, other pipeline.n_micro_batches, or one process with "
            "pipeline.ragged=true"
        )
    return ProcessSpec(
        processes,
        spec.n_micro_batches,
        spec.schedule,
        stages_per_process=spec.stages_per_process,
        replicas=spec.replicas,
    )


def n_processes(config: RunConfig) -> int:
    """Processes of one pipeline; refuses what torchrun's number does not fit."""
    asked, replicas = config.pipeline.processes, config.pipeline.replicas
    if not torchrun.is_rank():
        return 2 if asked == AUTO else int(asked or 1)
    world = torchrun.world_size()
    if (asked == AUTO and world % replicas) or (asked != AUTO and int(asked or 1) * replicas != world):
        raise ConfigError(
            f"torchrun started {world} processes, which do not make {replicas} replicas of {asked} processes: leave "
            "pipeline.processes out, or start as many as both say together"
        )
    return world // replicas


def headline(rank: int, ranks: int, error: RankError) -> str:
    """What went wrong first, and where, in one line: torch wraps a stage's exception in others."""
    lines = error.rank_traceback.splitlines()
    first = error.rank_traceback.partition("\n\nThe above exception")[0].splitlines()
    own = [line.strip() for line in first if line.strip() and not line.startswith((" ", "Traceback"))]
    if not own:
        return str(error).splitlines()[0]
    place = next((line for line in lines if line.startswith("This was raised ")), "")
    return " ".join((f"rank {rank} of {ranks} failed:", *own, *([place] if place and place not in own else [])))


# -- one record ------------------------------------------------------------------------------------------------------


def make_record(config: RunConfig, base: RunResult, reports: list[RankReport]) -> RunResult:
    """The job's record from what the ranks report (rule 4)."""
    plain = _plain(reports[0])
    timing = _timing(config, plain, reports)
    low, high, _ = median_interval(timing.ratios)
    memory = _memory(plain, reports)
    engine = [cache.stats.recomputed_flops for report in reports for cache in report.caches]
    flops = compare_flops(plain.flops, sum(report.flops for report in reports), sum(engine) if engine else None)
    stages = _stages(config, reports)
    limits = [stage.cache_limit_bytes for stage in stages.stages]
    peaks = [stage.cache_peak_bytes for stage in stages.stages]
    losses = reports[0].losses
    return dataclasses.replace(
        base,
        status=records.OK,
        device=reports[0].device,
        threads=reports[0].threads,
        environment=describe_environment(_device(reports[0].device)),
        cache_total_bytes=plain.cache_total_bytes,
        cache_limit_bytes=None if None in limits else sum(limit or 0 for limit in limits),
        cache_peak_bytes=None if None in peaks else sum(peak or 0 for peak in peaks),
        step_time_plain_s=statistics.median(timing.plain_s),
        step_time_s=statistics.median(timing.wrapped_s),
        time_overhead_pct=100 * (statistics.median(timing.ratios) - 1),
        time_overhead_low_pct=100 * (low - 1),
        time_overhead_high_pct=100 * (high - 1),
        recompute_flops_pct=flops.overhead_pct,
        samples_per_s=config.batch_size / statistics.median(timing.wrapped_s),
        speed_vs_plain=1 / statistics.median(timing.ratios),
        peak_memory_plain_bytes=plain.resident_bytes + plain.step_peak_bytes,
        peak_memory_bytes=memory.resident_bytes + memory.step_peak_bytes,
        gradients_identical=plain.parity.gradients_identical,
        timing=timing,
        memory=memory,
        flops=flops,
        cache=_cache(plain, reports),
        parity=plain.parity,
        training=TrainingRecord(losses, losses[0], losses[-1], reports[0].training_s) if losses else None,
        bubble_pct=stages.bubble_pct,
        bubble_ideal_pct=stages.bubble_ideal_pct,
        stages=stages,
    )


def _plain(report: RankReport) -> PlainReport:
    assert report.plain is not None, "rank 0 runs the plain partner"
    return report.plain


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _timing(config: RunConfig, plain: PlainReport, reports: list[RankReport]) -> TimingRecord:
    plain_s = tuple(outcome.step_s for outcome in plain.outcomes)
    wrapped_s = tuple(max(seconds) for seconds in zip(*(report.step_s for report in reports), strict=True))
    ratios = tuple(wrapped / alone for wrapped, alone in zip(wrapped_s, plain_s, strict=True))
    phases = PhaseTimes(
        *(
            statistics.median(getattr(outcome.phases, name) for outcome in plain.outcomes)
            for name in ("forward_s", "backward_s", "optimizer_s")
        )
    )
    return TimingRecord(
        warmup_steps=max(1, config.warmup_steps),
        plain_s=plain_s,
        wrapped_s=wrapped_s,
        ratios=ratios,
        interval_coverage_pct=100 * median_interval(ratios)[2],
        plain=phases,
        wrapped=None,
        backward_forward_ratio=phases.backward_s / phases.forward_s,
        expected_overhead_pct=None,
        losses_identical=plain.losses_identical,
    )


def _memory(plain: PlainReport, reports: list[RankReport]) -> MemoryRecord:
    worst = max(reports, key=lambda report: report.resident_bytes + report.step_peak_bytes)
    return MemoryRecord(
        method=f"rank {worst.rank}, the largest, {METHOD}",
        resident_bytes=worst.resident_bytes,
        step_peak_plain_bytes=plain.step_peak_bytes,
        step_peak_bytes=worst.step_peak_bytes,
        process_method=worst.process.method,
        process_start_plain_bytes=plain.process.start_bytes,
        process_peak_plain_bytes=plain.process.peak_bytes,
        process_start_bytes=worst.process.start_bytes,
        process_peak_bytes=worst.process.peak_bytes,
        resident_plain_bytes=plain.resident_bytes,
    )


def _cache(plain: PlainReport, reports: list[RankReport]) -> CacheRecord | None:
    stats = [cache.stats for report in reports for cache in report.caches]
    if not stats:
        return None
    names = {field.name for field in dataclasses.fields(CacheRecord)} - {"unit_max_bytes"}
    return CacheRecord(
        unit_max_bytes=plain.unit_max_bytes, **{name: sum(getattr(each, name) for each in stats) for name in names}
    )


def _stages(config: RunConfig, reports: list[RankReport]) -> StagesRecord:
    """The stages of the first pipeline; its replicas do the same with their share of the batch."""
    spec = config.pipeline
    own = reports[: len(reports) // spec.replicas]
    events = [event for report in own for event in report.events]
    caches = {cache.stage: cache for report in own for cache in report.caches}
    measures = stage_measures(events, {stage: c.stats.peak_cached_bytes for stage, c in caches.items()}, by_rank=True)
    assert spec.n_micro_batches is not None
    schedule = ProcessSpec(len(own), spec.n_micro_batches, spec.schedule, spec.stages_per_process)
    layout = own[0].layout
    stages = tuple(
        stage_record(
            measure,
            device=own[measure.rank].device,
            units=layout.stages[measure.stage].units,
            budget=layout.stages[measure.stage].budget,
            held=own[0].in_flight[measure.stage],
            limit_bytes=caches[measure.stage].limit_bytes if measure.stage in caches else None,
            peak_bytes=own[measure.rank].resident_bytes + own[measure.rank].step_peak_bytes,
        )
        for measure in measures
    )
    by_rank = {stage.process: stage.bubble_pct for stage in stages}
    return StagesRecord(
        schedule=spec.schedule,
        processes=len(own),
        replicas=spec.replicas,
        n_micro_batches=spec.n_micro_batches,
        step_s=span_s(events),
        bubble_pct=sum(by_rank.values()) / len(by_rank),
        bubble_scheduled_pct=100 * simulate(schedule_orders(schedule)).bubble,
        bubble_ideal_pct=100 * ideal_bubble(len(own), spec.n_micro_batches),
        memory_method=METHOD,
        stages=stages,
    )
