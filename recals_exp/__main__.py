"""``python -m recals_exp``: one run, or a sweep with its report. ``--help`` explains the command.

Why the work is not left to ``hydra.main`` alone: Hydra's basic launcher leaves a failed job without a trace in its folder,
and calls no end-of-sweep hook after one. Here a job (``task.py``) never raises into Hydra: its outcome is a record on disk,
and the report and the exit code are made from those records, after Hydra has returned, failed or been interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from recals_exp import config, estimates, records, report, sweeps, task, torchrun
from recals_exp.arguments import prepare_arguments
from recals_exp.folders import RememberFolder
from recals_exp.records import RunResult
from recals_exp.task import NOT_UNDERSTOOD

OK, JOB_FAILED, INTERRUPTED = 0, 1, 130
"""Exit codes; --help lists them."""

TABLES = ("analysis.txt", "prediction.txt", estimates.TABLE_FILE)
"""What a job of mode=analyze, predict or dry_run leaves for people; printed instead of the table of measurements."""

SHOWN_FILES = (".json", ".csv", ".png", ".txt")


def command() -> int:
    """The script `recals-exp`: as `python -m recals_exp`, own modules in the current folder are found."""
    sys.path.insert(0, os.getcwd())
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (without the program's name; None = the process's own) and return the exit code.

    Of several processes that torchrun started the first runs it; the others take part in its jobs.
    """
    if torchrun.world_size() == 1:
        return _main(arguments)
    from recals_exp.pipeline.members import members

    if torchrun.rank() > 0:
        members().serve()
        return OK
    try:
        return _main(arguments)
    finally:
        members().dismiss()


def _main(arguments: Sequence[str] | None) -> int:
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    exit_code = OK
    RememberFolder.forget()
    sweeps.begin_session()
    try:
        config.register()
        with (
            _terminated_like_interrupted(),
            _command_line(prepare_arguments(sys.argv[1:] if arguments is None else arguments)),
        ):
            hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(task.job)()
    except KeyboardInterrupt:
        _say("interrupted")
        exit_code = INTERRUPTED
    except SystemExit as leaving:  # of --help and the like, of a command line that cannot be parsed, of job()
        if RememberFolder.sweep is None:
            return leaving.code if isinstance(leaving.code, int) else OK
        exit_code = JOB_FAILED
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # of composing: a job's own are records
        if wants_traceback:
            raise
        _say(f"error: {config.explain(error)}")
        exit_code = NOT_UNDERSTOOD
    if RememberFolder.sweep is not None:
        return max(exit_code, finish_sweep(RememberFolder.sweep))
    if RememberFolder.run is not None:
        return max(exit_code, finish_run(RememberFolder.run))
    return exit_code


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
    sweeps.end_session(folder)
    if not any(folder.rglob(records.RESULT_FILE)):
        return JOB_FAILED
    if expected := estimates.load_estimates(folder):
        print(estimates.format_estimates(expected))
        results = report.find_results([folder])
        return _point_to_logs(folder, results) if any(result.status != records.OK for result in results) else OK
    from recals_exp.runner import finish_sweep as write

    written = write(folder)
    _print_table(written.results)
    print(written.texts["answer"])
    files = (report.CSV_FILE, report.JSON_FILE, report.FIGURE_FILE, report.PAGE_FILE)
    print(f"written: {', '.join(str(folder / name) for name in files)}")
    missing = (RememberFolder.jobs or 0) - len(written.results)
    if missing > 0:
        _say(f"{missing} of {RememberFolder.jobs} jobs did not start; resume={folder} runs what is missing or failed")
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


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which schedulers send before they kill, ends a command as Ctrl-C does: with the report of what there is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """What ``hydra.main`` reads: the arguments, and the switch that makes it raise its errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    completes = not {"-sc", "--shell-completion"}.isdisjoint(arguments)  # a shell completes commands, not modules
    sys.argv = ["recals-exp" if completes else "python -m recals_exp", *arguments]
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
