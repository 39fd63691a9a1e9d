"""One job from its configuration to its record: the only module that sees all parts.

    build -> analyse -> prediction -> parity -> training -> warm-up -> memory -> FLOPs -> timed pairs -> record, events

Why this order: parity runs first, because numbers of a wrong step are worth nothing; training comes before the
measurements, so that optimizer state exists and what is measured is a step in the middle of learning. Each
measurement takes one thing (see `meters`), from the same weights, batch and random state; nothing of one is switched
on during another.

Rules the code follows:

1. A job that raises becomes a record with status `failed` and its reason; the traceback goes to the log. Nothing is
   stored that would keep the job's tensors alive.
2. The record is written when the job starts (`running`) and replaced when it ends, so a killed job is a row of the
   report.
3. Where the budget is to be found out (`knee`, `target_peak`), the step is profiled before the limit is set. The other modes
   stop early: `analyze` after the analysis, `predict` after the prediction, `dry_run` after its estimate.
4. Everything random is seeded from the configuration; the number of threads is put back afterwards: jobs may share a
   process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from recals_exp import details, records, report
from recals_exp.baseline import compare_with_baseline
from recals_exp.batch_search import BatchSearch, format_tries
from recals_exp.checkpoint import Checkpoint
from recals_exp.datasets import Batch, build_data
from recals_exp.estimate import measure_estimate, write_estimate
from recals_exp.jobs import as_failed, describe
from recals_exp.learning import judge, train
from recals_exp.limits import Limits
from recals_exp.meters.device import deterministic_algorithms, resolve_device, seed_everything, thread_count
from recals_exp.meters.environment import describe_environment
from recals_exp.meters.flops import compare_flops, count_step_flops
from recals_exp.meters.memory import measure_memory
from recals_exp.meters.parity import check_parity
from recals_exp.meters.stages import measure_stages
from recals_exp.meters.steps import StartingState, StepOutcome, TrainStep
from recals_exp.meters.timeline import step_details
from recals_exp.meters.timing import measure_pairs, median_interval
from recals_exp.models import build_model
from recals_exp.pipelines import BoundPipeline, PipelineStrategy, PlainLoop, write_timeline
from recals_exp.predict import amid_training, write_prediction
from recals_exp.processes import ProcessJob, check_started_alone
from recals_exp.progress import Progress, SilentProgress
from recals_exp.recals import Analysis, Stats, format_analysis, recals_with_rngs
from recals_exp.recals.prediction import predict
from recals_exp.records import CacheRecord, FlopsRecord, ParityRecord, RunResult, StrategyRecord, TrainingRecord
from recals_exp.runconfig import RunConfig
from recals_exp.stagerecords import StagesRecord
from recals_exp.strategies import NO_BUDGET, BoundStrategy, make_strategy
from recals_exp.writers import RunWriter, has_outcome, write_tradeoff

log = logging.getLogger(__name__)

ANALYSIS_FILE = "analysis.txt"
PRINTED = {"printed": True}  # the command line prints it; the log file has it too


def run(config: RunConfig, output_dir: Path, progress: Progress | None = None) -> RunResult:
    """Run one job and write `output_dir/result.json`. A job that fails returns its record; it does not raise (rule 1).

    Only an interrupt (Ctrl-C) is recorded and raised again.
    """
    output_dir = Path(output_dir)
    base = describe(config, output_dir)
    started = time.perf_counter()
    records.save(base, output_dir)
    with RunWriter(output_dir) as writer, progress or SilentProgress() as bar:
        try:
            with thread_count(config.threads) as threads, deterministic_algorithms(config.deterministic):
                kind = ProcessJob if config.pipeline.over_processes else _Job
                check_started_alone(config)
                result = kind(config, dataclasses.replace(base, threads=threads), writer, bar).do(output_dir)
        except (Exception, SystemExit) as error:
            log.exception("job %s failed", base.job)
            result = as_failed(base, error)
        except KeyboardInterrupt as error:
            records.save(as_failed(base, error), output_dir)
            raise
        gc.collect()  # what the job built must not stay for the next one, also where a model holds itself in a cycle
        result = dataclasses.replace(result, wall_s=time.perf_counter() - started)
        writer.result(result)
    records.save(result, output_dir)
    return result


def finish_sweep(folder: Path) -> report.Report:
    """The report of a sweep's folder, and its run `tradeoff` for TensorBoard. Also on partial results."""
    written = report.write_report([folder])
    for path in sorted(folder.rglob(records.RESULT_FILE)):
        if not has_outcome(path.parent):  # it was refused, or killed: TensorBoard shows it too
            with contextlib.suppress(ValueError), RunWriter(path.parent) as writer:
                writer.result(records.load(path))
    others = {name: picture for name, picture in written.figures_png.items() if name != "tradeoff"}
    write_tradeoff(written.folder, report.group_series(written.results), written.figure_png, others, written.texts)
    return written


class _Job:
    """The stages of one job, each a method; what they share is set in the constructor."""

    STAGES = 6  # beside training, warm-up, pairs and an own baseline: built, analysed, parity, predicted, memory, FLOPs
    STAGES_ALONE: Mapping[str, int] = {
        "analyze": 2,
        "predict": 3,
        "dry_run": 3,
        "batch_size": 4,
    }  # of the modes that stop early

    def __init__(self, config: RunConfig, base: RunResult, writer: RunWriter, progress: Progress) -> None:
        self.config = config
        self.writer = writer
        self.progress = progress
        self.device = resolve_device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.pipelined = not config.pipeline.is_none
        self.strategy = make_strategy(config.strategy, config.policy, config.policy_kwargs, **config.strategy_kwargs)
        self.strategy.check_device(self.device)
        self.base = dataclasses.replace(
            base,
            device=str(self.device),
            environment=describe_environment(self.device),
            budget="none" if self.strategy.budget_kind == NO_BUDGET else base.budget,
        )
        # a strategy's first call may check or plan; without a step of training that must not be what is measured
        self.warmup_steps = config.warmup_steps if config.train_steps else max(1, config.warmup_steps)
        has_baseline = self.strategy.own_baseline() is not None
        steps = self.STAGES + has_baseline + config.train_steps + 2 * self.warmup_steps + config.timing_pairs
        progress.start(base.job, self.STAGES_ALONE.get(config.mode, steps))
        self.limits = Limits(config)

    def do(self, folder: Path) -> RunResult:
        """What the mode says; files beside the record go into `folder`."""
        if self.config.mode == "analyze":
            return self.analyze(folder)
        if self.config.mode == "predict":
            return self.predict(folder)
        if self.config.mode == "batch_size":
            return self.find_batch()
        if self.config.mode == "dry_run":
            return self.estimate(folder)
        return self.measure(folder)

    def find_batch(self) -> RunResult:
        """The largest batch within the peak of the plain step, by measuring."""
        step, _ = self._build()

        def batch_of(size: int) -> Batch:
            return self._on_device(next(self.data.batches(size, self.config.seed)))

        def limit_of(batch: tuple[Tensor, Tensor]) -> float | None:
            if self.strategy.budget_kind == NO_BUDGET:
                return None
            with step.autocast():
                analysis = recals_with_rngs(-1).analyze(step.model, batch[0])
            return self.limits.choose(self.strategy, step, Batch(*batch), analysis)

        config = self.config
        search = BatchSearch(
            step, self.strategy, batch_of, limit_of, config.batch_size, config.seed, config.timing_pairs, self._done
        )
        fields = search.run()
        log.info("peaks by batch size: %s", format_tries(fields["batch_search"]))
        return dataclasses.replace(self.base, status=records.OK, **fields)

    def analyze(self, folder: Path) -> RunResult:
        """What the model caches, by layer, as a table in `folder/analysis.txt`."""
        step, batches = self._build()
        analysis = self._analyse(step, next(batches).x)
        table = format_analysis(analysis)
        log.info("what the model caches, by layer:\n%s", table, extra=PRINTED)
        (folder / ANALYSIS_FILE).write_text(table + "\n", encoding="utf-8")
        return dataclasses.replace(self.base, status=records.OK, cache_total_bytes=analysis.total_bytes)

    def predict(self, folder: Path) -> RunResult:
        """The price of every budget, in the files of `predict.write_prediction`."""
        config = self.config
        step, batches = self._build()
        batch = next(batches)
        total_bytes = self._analyse(step, batch.x).total_bytes
        with amid_training(step, batch, config.seed) as state:
            prediction = predict(self.limits.profile(step, state, batch))
        title = f"Predicted from one step: {config.model.name}, {config.dataset.name}, batch of {config.batch_size}"
        log.info("%s\n%s", title, write_prediction(prediction, folder, title), extra=PRINTED)
        self._done("predicted")
        return dataclasses.replace(self.base, status=records.OK, cache_total_bytes=total_bytes)

    def estimate(self, folder: Path) -> RunResult:
        """What the job would take, in the files of `estimate.write_estimate`."""
        started = time.perf_counter()
        step, batches = self._build()
        batch = next(batches)
        analysis = self._analyse(step, batch.x)
        limit = self.limits.choose(self.strategy, step, batch, analysis)
        with amid_training(step, batch, self.config.seed) as state:
            is_engine = self.config.strategy == "recals" and not self.pipelined
            profile = self.limits.profile(step, state, batch) if is_engine else None
            limit_bytes = int(limit) if is_engine and limit is not None else None
            so_far_s = time.perf_counter() - started
            estimate = measure_estimate(self.config, step, state, batch, profile, limit_bytes, so_far_s)
        log.info("%s", write_estimate(estimate, self.base.job, folder), extra=PRINTED)
        self._done("estimated")
        return dataclasses.replace(self.base, status=records.OK, cache_total_bytes=analysis.total_bytes)

    def measure(self, folder: Path) -> RunResult:
        """Every stage in order; the record of a job that went through all of them."""
        config = self.config
        step, batches = self._build()
        batch = next(batches)
        analysis = self._analyse(step, batch.x)
        total_bytes = analysis.total_bytes
        limit = self.limits.choose(self.strategy, step, batch, analysis)
        limit_bytes = int(limit) if limit is not None and self.strategy.uses_budget else None
        forecast = self.limits.forecast(self.strategy, step, batch, limit_bytes)
        self.strategy = forecast.strategy
        self.base = dataclasses.replace(self.base, planning_s=forecast.planning_s)
        self._done("predicted")
        parity = self._check_parity(step, limit, batch)
        bound = self.strategy.bind(step.model, limit)
        training = self._train(step, bound, batch, batches, folder)
        state = StartingState(step, config.seed)
        self._warm_up(step, state, bound, batch)
        memory = measure_memory(step, state, bound, batch)
        details.save(step_details(analysis, step, state, bound, batch, memory.resident_bytes), folder)
        self._done("memory measured")
        flops, stats = self._count_flops(step, state, bound, batch)
        fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / max(total_bytes, 1))
        stages = self._measure_stages(step, state, bound, batch, folder)
        is_documented = not self.pipelined and (self.strategy.uses_budget or self.strategy.name == "none")
        follows_fifo = is_documented and self.strategy.policy in ("fifo", "none")
        bound.reset_stats()
        timing = measure_pairs(
            step,
            state,
            bound,
            batch,
            config.timing_pairs,
            warmup_steps=self.warmup_steps,
            fifo_fraction=fraction if follows_fifo else None,
            on_pair=lambda *_: self._done("timing pairs"),
        )
        timed_stats = bound.stats
        self.writer.pairs(timing)
        baseline = compare_with_baseline(
            step, state, self.strategy, bound, limit, batch, config.seed, self.warmup_steps, config.timing_pairs
        )
        if baseline is not None:
            self._done("own baseline measured")
        step_time_s = statistics.median(timing.wrapped_s)
        ratio, (low, high, _) = statistics.median(timing.ratios), median_interval(timing.ratios)
        return dataclasses.replace(
            self.base,
            status=records.OK,
            cache_total_bytes=total_bytes,
            cache_limit_bytes=bound.limit_bytes,
            cache_peak_bytes=None if timed_stats is None else timed_stats.peak_cached_bytes,
            step_time_plain_s=statistics.median(timing.plain_s),
            step_time_s=step_time_s,
            time_overhead_pct=100 * (ratio - 1),
            time_overhead_low_pct=100 * (low - 1),
            time_overhead_high_pct=100 * (high - 1),
            recompute_flops_pct=None if flops is None else flops.overhead_pct,
            documented_overhead_pct=records.documented_overhead_pct(fraction) if is_documented else None,
            peak_memory_plain_bytes=memory.resident_bytes + memory.step_peak_plain_bytes,
            peak_memory_bytes=memory.resident_bytes + memory.step_peak_bytes,
            gradients_identical=parity.gradients_identical,
            predicted_overhead_pct=forecast.predicted_pct,
            bound_overhead_pct=forecast.bound_pct,
            samples_per_s=config.batch_size / step_time_s,
            speed_vs_plain=1 / ratio,
            timing=timing,
            memory=memory,
            flops=flops,
            cache=None if stats is None else _cache_record(stats, analysis.unit_max_bytes),
            parity=parity,
            training=training,
            bubble_pct=None if stages is None else stages.bubble_pct,
            bubble_ideal_pct=None if stages is None else stages.bubble_ideal_pct,
            stages=stages,
            strategy_says=StrategyRecord(self.strategy.terms.needs, self.strategy.terms.changes, bound.blocks),
            baseline=baseline,
        )

    def _build(self) -> tuple[TrainStep, Iterator[Batch]]:
        config = self.config
        self.data = build_data(config.dataset)
        step, batches = self._plain_step()
        if self.pipelined:  # the plain step is the loop over the micro-batches, and the pipeline is what is bound to it
            example = self._on_device(next(self.data.batches(config.batch_size, config.seed)))
            self.strategy = PipelineStrategy(config, example.x)
        self._done("built")
        return step, batches

    def _plain_step(self) -> tuple[TrainStep, Iterator[Batch]]:
        """The model as the seed makes it, with its optimizer, and its batches."""
        config = self.config
        seed_everything(config.seed)
        model = build_model(config.model, self.data).to(self.device, self.dtype).train()
        if self.pipelined:
            model = PlainLoop(model, config.pipeline)
        optimizer = config.optimizer.build(model.parameters())
        step = TrainStep(model, optimizer, self.data.loss, self.device, config.autocast)
        return step, map(self._on_device, self.data.batches(config.batch_size, config.seed))

    def _on_device(self, batch: Batch) -> Batch:
        dtype = self.dtype if batch.x.is_floating_point() else None
        return Batch(batch.x.to(self.device, dtype), batch.target.to(self.device))

    def _analyse(self, step: TrainStep, x: Tensor) -> Analysis:
        """What the model caches without a limit."""
        with step.autocast():
            analysis = recals_with_rngs(-1).analyze(step.model, x)
        log.info("cache: %d bytes in all, %d in the largest layer", analysis.total_bytes, analysis.unit_max_bytes)
        self._done("analysed")
        return analysis

    def _check_parity(self, step: TrainStep, limit: float | None, batch: Batch) -> ParityRecord:
        parity = check_parity(
            step,
            lambda model: self.strategy.bind(model, limit),
            batch,
            self.config.seed,
            rehearsals=int(self.strategy.policy == "planned"),  # the first step has no plan yet
        )
        for line in parity.differences:
            log.warning("parity: %s", line)
        self._done("parity checked")
        return parity

    def _train(
        self, step: TrainStep, bound: BoundStrategy, first: Batch, others: Iterator[Batch], folder: Path
    ) -> TrainingRecord | None:
        """Learn for real, under the strategy. The first batch is the one that is measured on later."""
        config, count = self.config, self.config.train_steps
        started = time.perf_counter()

        taken = 0  # of the losses, the rest is from before an interruption

        def done(index: int, loss: float, outcome: StepOutcome) -> None:
            nonlocal taken
            taken += 1
            stats = bound.stats
            self.writer.training_step(index, loss, outcome.step_s, None if stats is None else stats.peak_cached_bytes)
            self._done("training")

        checkpoint = Checkpoint(folder, step, config.to_dict(), config.checkpoint_every)
        all_batches = itertools.chain([first], others)
        losses = train(step, bound, all_batches, count, config.seed, done, bound.reset_stats, checkpoint)
        if not losses:
            return None
        self.writer.losses(losses[: len(losses) - taken])
        log.info("training: loss %.4g at step 0, %.4g at step %d", losses[0], losses[-1], count - 1)
        training = TrainingRecord(tuple(losses), losses[0], losses[-1], time.perf_counter() - started)
        if not self.data.n_held_out:
            return training
        plain, batches = self._plain_step()
        training = judge(training, step, bound, plain, batches, self._on_device(self.data.held_out()), config.seed)
        log.info("accuracy: %.2f %%, %.2f %% after plain training", training.accuracy_pct, training.plain_accuracy_pct)
        return training

    def _warm_up(self, step: TrainStep, state: StartingState, bound: BoundStrategy, batch: Batch) -> None:
        for _ in range(self.warmup_steps):
            for forward in (step.model, bound):
                state.restore()
                step(forward, *batch)
                self._done("warming up")

    def _count_flops(
        self, step: TrainStep, state: StartingState, bound: BoundStrategy, batch: Batch
    ) -> tuple[FlopsRecord | None, Stats | None]:
        """The FLOPs of a plain and of a wrapped step (None: not known), and the engine's account of that wrapped step."""
        plain = count_step_flops(step, state, step.model, batch)
        bound.reset_stats()
        wrapped = count_step_flops(step, state, bound, batch)
        stats = bound.stats
        self._done("FLOPs counted")
        if bound.hides_flops:
            return None if bound.step_flops is None else compare_flops(plain, bound.step_flops, None), None
        return compare_flops(plain, wrapped, None if stats is None else stats.recomputed_flops), stats

    def _measure_stages(
        self, step: TrainStep, state: StartingState, bound: BoundStrategy, batch: Batch, folder: Path
    ) -> StagesRecord | None:
        """What each stage of a pipeline did, and a picture of it; None for a whole model."""
        if not isinstance(bound, BoundPipeline):
            return None
        stages, events = measure_stages(step, state, bound, batch)
        self.writer.timeline(write_timeline(events, folder, self.base.job))
        return stages

    def _done(self, stage: str) -> None:
        self.progress.advance(stage)


def _cache_record(stats: Stats, unit_max_bytes: int) -> CacheRecord:
    shared = {field.name for field in dataclasses.fields(CacheRecord)} - {"unit_max_bytes"}
    return CacheRecord(unit_max_bytes=unit_max_bytes, **{name: getattr(stats, name) for name in shared})
