"""TensorBoard: the curves of a job, the HParams of a sweep, and the trade-off as a run of its own.

Why not `SummaryWriter.add_hparams`: it opens a second, time-stamped run for every job, refuses None and lists, and
its tab shows only the keys of whichever run is read first. Here each job writes its hyperparameters into its own run.

Rules the code follows:

1. A tag says what and in which unit: `memory/peak (MiB)`. Bytes are converted here, where they are shown.
2. Every job, also one that failed, writes the same hyperparameters and announces the same metrics, so it does not
   matter which run TensorBoard reads first. A metric is a scalar of the same tag in the job's run; a failed job
   simply has none.
3. A job's events lie in the job's folder, those of the trade-off in `tradeoff/` of the sweep's folder. Writing the
   trade-off again replaces it.
4. TensorBoard's x axis is a whole number. The trade-off's is the budget in percent, rounded half up; the exact
   percentage is a scalar beside it.
5. Nothing is written while steps are timed: pairs are written from the finished record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter

from recals_exp.records import FAILED, OK, RunResult, TimingRecord

MIB = 1024**2
TRADEOFF_RUN = "tradeoff"
FIGURE_TAG = "tradeoff/figure"
BUDGET_TAG = "tradeoff/budget_exact (%)"

METRIC_TAGS: Mapping[str, str] = {
    "time_overhead_pct": "overhead/measured_time (%)",
    "recompute_flops_pct": "overhead/measured_flops (%)",
    "peak_memory_bytes": "memory/peak (MiB)",
    "peak_memory_plain_bytes": "memory/peak_plain (MiB)",
    "step_time_s": "step_time/under_budget (s)",
    "step_time_plain_s": "step_time/plain (s)",
    "documented_overhead_pct": "overhead/documented (%)",
    "time_overhead_low_pct": "overhead/measured_time_low (%)",
    "time_overhead_high_pct": "overhead/measured_time_high (%)",
    "cache_peak_bytes": "cache/peak (MiB)",
    "cache_limit_bytes": "cache/limit (MiB)",
    "cache_total_bytes": "cache/total (MiB)",
    "gradients_identical": "parity/gradients_identical (0 or 1)",
    "bubble_pct": "pipeline/bubble (%)",
    "bubble_ideal_pct": "pipeline/bubble_ideal (%)",
}
"""Column -> tag, of the run scalars that the HParams tab shows as metrics; it shows the first five unasked."""


def _number(column: str, value: float) -> float:
    return value / MIB if column.endswith("_bytes") else float(value)


_EVENT_FILES = "events.out.tfevents.*"


def has_outcome(folder: Path) -> bool:
    """Whether a run has been written into this very folder to its end: one whose process was killed has not."""
    end = metadata.SESSION_END_INFO_TAG.encode()
    return any(end in path.read_bytes() for path in folder.glob(_EVENT_FILES))


class RunWriter:
    """The events of one job, written into its folder."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))
        self._started_s = time.time()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()

    def training_step(self, step: int, loss: float, step_s: float, peak_cached_bytes: int | None) -> None:
        """One step of training, as it happens."""
        self._writer.add_scalar("training/loss", loss, step)
        self._writer.add_scalar("training/step_time (s)", step_s, step)
        if peak_cached_bytes is not None:
            self._writer.add_scalar("training/cache_peak (MiB)", peak_cached_bytes / MIB, step)

    def losses(self, losses: Sequence[float]) -> None:
        """Those of steps done before an interruption, from the first step on."""
        for step, loss in enumerate(losses):
            self._writer.add_scalar("training/loss", loss, step)

    def pairs(self, timing: TimingRecord) -> None:
        """The timed pairs, one point each (rule 5)."""
        for index, (plain, wrapped, ratio) in enumerate(
            zip(timing.plain_s, timing.wrapped_s, timing.ratios, strict=True)
        ):
            self._writer.add_scalar("pairs/plain (s)", plain, index)
            self._writer.add_scalar("pairs/under_budget (s)", wrapped, index)
            self._writer.add_scalar("pairs/time_overhead (%)", 100 * (ratio - 1), index)

    def timeline(self, png: bytes) -> None:
        """The picture of one step of a pipeline."""
        self._writer._get_file_writer().add_summary(_image("pipeline/timeline", png), 0)

    def result(self, result: RunResult) -> None:
        """The job's outcome: one point per metric, and its line in the HParams tab (rule 2)."""
        for column, tag in METRIC_TAGS.items():
            value = getattr(result, column)
            if value is not None:
                self._writer.add_scalar(tag, _number(column, value), 0)
        for tag, value in _details(result).items():
            self._writer.add_scalar(tag, value, 0)
        if result.error is not None:
            self._writer.add_text("error", result.error, 0)
        for summary in _hparams_summaries(result, self._started_s):
            self._writer._get_file_writer().add_summary(summary)
        self._writer.flush()


def _details(result: RunResult) -> dict[str, float]:
    """Run scalars beside the main metrics."""
    details: dict[str, float] = {}
    if (timing := result.timing) is not None:
        for kind, phases in (("plain", timing.plain), ("under_budget", timing.wrapped)):
            if phases is None:
                continue
            details[f"step_time/{kind}_forward (s)"] = phases.forward_s
            details[f"step_time/{kind}_backward (s)"] = phases.backward_s
            details[f"step_time/{kind}_optimizer (s)"] = phases.optimizer_s
        if timing.expected_overhead_pct is not None:
            details["overhead/expected_from_phases (%)"] = timing.expected_overhead_pct
    if (memory := result.memory) is not None:
        details["memory/resident (MiB)"] = memory.resident_bytes / MIB
        details["memory/process_peak (MiB)"] = memory.process_peak_bytes / MIB
        details["memory/process_peak_plain (MiB)"] = memory.process_peak_plain_bytes / MIB
    if result.stages is not None:
        details["pipeline/bubble_scheduled (%)"] = result.stages.bubble_scheduled_pct
        for stage in result.stages.stages:
            tag = f"stage_{stage.stage}"
            details[f"{tag}/busy (s)"] = stage.busy_s
            details[f"{tag}/bubble (%)"] = stage.bubble_pct
            details[f"{tag}/recompute (%)"] = stage.recompute_pct
            for name, nbytes in (("peak_memory", stage.peak_memory_bytes), ("cache_peak", stage.cache_peak_bytes)):
                if nbytes is not None:
                    details[f"{tag}/{name} (MiB)"] = nbytes / MIB
    if (training := result.training) is not None:
        details["training/first_loss"] = training.first_loss
        details["training/last_loss"] = training.last_loss
        for kind, accuracy in (("accuracy", training.accuracy_pct), ("accuracy_plain", training.plain_accuracy_pct)):
            if accuracy is not None:
                details[f"training/{kind} (%)"] = accuracy
    return details


# -- HParams ---------------------------------------------------------------------------------------------------------


def hyperparameters(result: RunResult) -> dict[str, str | float]:
    """What the HParams tab shows of a job: the same keys, of the same types, for every job."""
    fraction = result.budget_fraction()
    return {
        "budget": result.budget,
        "budget_pct": "unknown" if fraction is None else f"{100 * fraction:.6g}",
        "policy": result.policy,
        "model": result.model,
        "dataset": result.dataset,
        "pipeline": result.pipeline,
        "strategy": result.strategy,
        "device": result.device,
        "autocast": result.autocast or "none",
        "status": result.status,
        "batch_size": float(result.batch_size),
        "seed": float(result.seed),
    }


_SHOWN_FIRST = ("budget", "dataset", "model", "policy", "strategy")
"""The tab shows five unasked: by name, but first those said to differ between jobs."""


def _hparams_summaries(result: RunResult, started_s: float) -> Iterable[Summary]:
    values = hyperparameters(result)
    experiment = api_pb2.Experiment(
        hparam_infos=[
            # no domain: it would be that of the first run read, and the tab would offer only its values
            api_pb2.HParamInfo(
                name=name,
                type=api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64,
                differs=name in _SHOWN_FIRST,
            )
            for name, value in values.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRIC_TAGS.values()],
    )
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=started_s)
    for name, value in values.items():
        if isinstance(value, str):
            start.hparams[name].string_value = value
        else:
            start.hparams[name].number_value = value
    status = {OK: api_pb2.STATUS_SUCCESS, FAILED: api_pb2.STATUS_FAILURE}.get(result.status, api_pb2.STATUS_UNKNOWN)
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    yield _hparams_summary(metadata.EXPERIMENT_TAG, experiment=experiment)
    yield _hparams_summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)
    yield _hparams_summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _hparams_summary(tag: str, **content: Any) -> Summary:
    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])


# -- the trade-off ---------------------------------------------------------------------------------------------------

TRADEOFF_COLUMNS = (
    "documented_overhead_pct",
    "recompute_flops_pct",
    "time_overhead_pct",
    "time_overhead_low_pct",
    "time_overhead_high_pct",
    "peak_memory_bytes",
    "peak_memory_plain_bytes",
    "cache_limit_bytes",
    "cache_peak_bytes",
    "step_time_s",
    "step_time_plain_s",
)


def tradeoff_tag(column: str) -> str:
    """A column's tag in the run `tradeoff`. Not the jobs' tag: theirs have steps or nothing on the x axis."""
    return f"{TRADEOFF_RUN}/{METRIC_TAGS[column].replace('/', '_')}"


def budget_step(percent: float) -> int:
    """The point on TensorBoard's x axis for a budget in percent (rule 4)."""
    return int(percent + 0.5)


def write_tradeoff(
    folder: Path,
    series: Mapping[str, Sequence[RunResult]],
    figure_png: bytes,
    others: Mapping[str, bytes] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write the run `tradeoff`: for each series its points over the budget; the figure and the others; the report's texts.

    One series lies in `tradeoff` itself. Several lie in runs below it, named by the series, so that TensorBoard draws
    them in one chart; the figure, which shows them all, stays in `tradeoff`.
    """
    run = folder / TRADEOFF_RUN
    run.mkdir(parents=True, exist_ok=True)
    for old in sorted(run.rglob(_EVENT_FILES)):
        old.unlink()
    with SummaryWriter(str(run)) as writer:
        writer._get_file_writer().add_summary(_image(FIGURE_TAG, figure_png), 0)
        for name, png in (others or {}).items():
            writer._get_file_writer().add_summary(_image(f"{TRADEOFF_RUN}/{name}", png), 0)
        for name, text in (texts or {}).items():
            if text:
                writer.add_text(f"report/{name}", text, 0)
        if len(series) == 1:
            _write_points(writer, next(iter(series.values())))
    if len(series) > 1:
        for name, results in series.items():
            with SummaryWriter(str(run / _folder_name(name))) as writer:
                _write_points(writer, results)
    return run


def _write_points(writer: SummaryWriter, results: Sequence[RunResult]) -> None:
    """Ascending in the budget: TensorBoard takes a step back for a restart."""
    points = [(100 * fraction, result) for result in results if (fraction := result.budget_fraction()) is not None]
    for percent, result in sorted(points, key=lambda point: point[0]):
        step = budget_step(percent)
        writer.add_scalar(BUDGET_TAG, percent, step)
        for column in TRADEOFF_COLUMNS:
            value = getattr(result, column)
            if value is not None:
                writer.add_scalar(tradeoff_tag(column), _number(column, value), step)


def _image(tag: str, png: bytes) -> Summary:
    """The file itself as an image summary: no decoding, no second copy of its size than the file's own header."""
    if png[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{tag}: expected the bytes of a PNG file, got {png[:8]!r}")
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _folder_name(series: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in series)
