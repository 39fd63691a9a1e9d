"""``python -m recals_exp``: one run, or a sweep with its report. ``--help`` explains the command.

Why the work is not left to ``hydra.main`` alone: Hydra's basic launcher leaves a failed job without a trace in its folder,
and calls no end-of-sweep hook after one. Here a job of a sweep never raises into Hydra: its outcome is a record on disk, and
the report and the exit code are made from those records, after Hydra has returned, failed or been interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from recals_exp import config, records, report
from recals_exp.records import RunResult
from recals_exp.runconfig import ConfigError, RunConfig

log = logging.getLogger("recals_exp")

OK, JOB_FAILED, NOT_UNDERSTOOD, INTERRUPTED = 0, 1, 2, 130
"""Exit codes; --help lists them."""

TABLES = ("analysis.txt", "prediction.txt")
"""What a job of mode=analyze or mode=predict leaves for people; printed instead of the table of measurements."""

SHOWN_FILES = (".json", ".csv", ".png", ".txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (without the program's name; None = the process's own) and return the exit code."""
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    exit_code = OK
    config.RememberFolder.forget()
    try:
        config.register()
        with _command_line(config.prepare_arguments(sys.argv[1:] if arguments is None else arguments)):
            hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(job)()
    except KeyboardInterrupt:
        _say("interrupted")
        exit_code = INTERRUPTED
    except SystemExit as leaving:  # of --help and the like, of a command line that cannot be parsed, of job()
        if config.RememberFolder.sweep is None:
            return leaving.code if isinstance(leaving.code, int) else OK
        exit_code = JOB_FAILED
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # of composing: a job's own are records
        if wants_traceback:
            raise
        _say(f"error: {config.explain(error)}")
        exit_code = NOT_UNDERSTOOD
    if config.RememberFolder.sweep is not None:
        return max(exit_code, finish_sweep(config.RememberFolder.sweep))
    if config.RememberFolder.run is not None:
        return max(exit_code, finish_run(config.RememberFolder.run))
    return exit_code


def job(settings: DictConfig) -> str:
    """One job in the folder Hydra made for it; returns its status. In a sweep, whatever goes wrong is a record."""
    context = HydraConfig.get()
    folder = Path(context.runtime.output_dir)
    try:
        run_config = config.to_run_config(settings, context.runtime.choices)
    except (Exception, SystemExit) as error:
        records.save(_failed_before_start(folder, settings, context.runtime.choices, error), folder)
        if context.mode == RunMode.RUN and isinstance(error, ConfigError):
            _say(f"error: {error}")
            raise SystemExit(NOT_UNDERSTOOD) from None  # the command itself is at fault
        log.exception("job %s failed before it started: %s", folder.name, error)
        return records.FAILED
    return _run(run_config, folder).status


def _run(run_config: RunConfig, folder: Path) -> RunResult:
    # imported here: torch's domain libraries take seconds, which --help and a mistyped key need not wait for
    from recals_exp.progress import TerminalProgress
    from recals_exp.runner import run

    log.info("job %s: %s", folder.name, _title(run_config))
    return run(run_config, folder, TerminalProgress())


def finish_run(folder: Path) -> int:
    """Print what one run found and return the exit code."""
    try:
        result = records.load(folder)
    except FileNotFoundError:
        _say(f"no record in {folder}: the job did not start")
        return JOB_FAILED
    if result.status != records.OK:
        _say(f"error: {result.error or 'the job did not finish'}")
        return _point_to_logs(folder, [result])
    tables = [folder / name for name in TABLES if (folder / name).is_file()]
    for table in tables:
        print(table.read_text(encoding="utf-8"), end="")
    if not tables:
        _print_table([result])
    print(f"written: {', '.join(str(path) for path in sorted(folder.iterdir()) if path.suffix in SHOWN_FILES)}")
    return OK


def finish_sweep(folder: Path) -> int:
    """Write and print the report of what there is, and return the exit code."""
    if not any(folder.rglob(records.RESULT_FILE)):
        return JOB_FAILED
    from recals_exp.runner import finish_sweep as write

    written = write(folder)
    _print_table(written.results)
    files = (report.CSV_FILE, report.JSON_FILE, report.FIGURE_FILE)
    print(f"written: {', '.join(str(folder / name) for name in files)}")
    return _point_to_logs(folder, written.results) if written.failed else OK


def _print_table(results: Sequence[RunResult]) -> None:
    console = Console()
    width = max(console.width, 80) if console.is_terminal else None
    print(report.format_table(results, width=width, color=console.is_terminal))


def _point_to_logs(folder: Path, results: Sequence[RunResult]) -> int:
    bad = [result.job for result in results if result.status != records.OK]
    where = folder if folder.name in bad else folder / (bad[0] if len(bad) == 1 else "JOB")
    _say(f"{len(bad)} of {len(results)} jobs failed: {', '.join(bad)}; the traceback is in {where / 'recals_exp.log'}")
    return JOB_FAILED


def _failed_before_start(
    folder: Path, settings: DictConfig, choices: Mapping[str, Any], error: BaseException
) -> RunResult:
    """The record of a job whose configuration could not be used: what is known of it, and the reason."""
    raw = OmegaConf.to_container(settings, resolve=False)
    assert isinstance(raw, dict)
    batch_size, seed = raw.get("batch_size"), raw.get("seed")
    return RunResult(
        job=folder.name,
        status=records.FAILED,
        error=records.describe_error(error),
        budget=str(raw.get("budget")),
        device=str(raw.get("device")),
        batch_size=batch_size if isinstance(batch_size, int) else 0,
        seed=seed if isinstance(seed, int) else 0,
        config={str(key): str(value) if isinstance(value, float) else value for key, value in raw.items()},
        model=str(choices.get("model")),
        dataset=str(choices.get("dataset")),
        pipeline=str(choices.get("pipeline")),
        policy=str(choices.get("policy")),
        strategy=str(choices.get("strategy")),
    )


def _title(run_config: RunConfig) -> str:
    return (
        f"{run_config.model.name} on {run_config.dataset.name}, batch of {run_config.batch_size}, "
        f"{run_config.strategy} {run_config.policy}, budget {run_config.budget}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """What ``hydra.main`` reads: the arguments, and the switch that makes it raise its errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["python -m recals_exp", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


if __name__ == "__main__":
    sys.exit(main())
