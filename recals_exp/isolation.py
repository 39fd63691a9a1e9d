"""A job in a fresh process: nothing of the jobs before it is left, and nothing that happens to it ends the sweep.

Why not a pool, or `multiprocessing`: a reused worker remembers (allocators, threads, compiled kernels), so that peaks and times
would depend on the order of the jobs; and a child of `multiprocessing` cannot be waited for with what it used. It works the
same under each of Hydra's launchers, as it happens within the job.

    python -m recals_exp.isolation FOLDER < description        the child; only `run_isolated` calls it

Rules the code follows:

1. The child gets its job on stdin, pickled, and leaves `result.json`. Whatever else becomes of it (a signal, an exit, a crash of
   the interpreter), the parent makes the record, with the reason.
2. An interrupt of the parent ends the child, which first records what there is; a second one, or silence for `GRACE_S`, kills
   it. The terminal's Ctrl-C goes to the parent alone. If the parent dies the child ends too (Linux).
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import logging.config
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from recals_exp import records
from recals_exp.jobs import INTERRUPTED, as_failed, describe
from recals_exp.records import RunResult
from recals_exp.runconfig import RunConfig

log = logging.getLogger(__name__)

GRACE_S = 60.0  # training ends its step first
CRASH_FILE = "crash.txt"
"""Where a child stood when the interpreter itself crashed."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Order:
    config: RunConfig
    folder: str
    logging: Mapping[str, Any]  # for logging.config.dictConfig
    path: tuple[str, ...]  # the parent's sys.path: what it finds, the child finds
    title: str


# -- the parent ------------------------------------------------------------------------------------------------------


def run_isolated(config: RunConfig, folder: Path, logging_config: Mapping[str, Any], title: str = "") -> RunResult:
    """Run a job in a process of its own and return its record, whatever became of it (rule 1)."""
    base = describe(config, folder)
    records.save(base, folder)
    order = _Order(config, str(folder), logging_config, tuple(sys.path), title)
    started = time.perf_counter()
    warnings = [f"-W{option}" for option in sys.warnoptions]
    with _interrupts_ignored():  # the child inherits it (rule 2)
        child = subprocess.Popen([sys.executable, *warnings, "-m", __name__, str(folder)], stdin=subprocess.PIPE)
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin as pipe:
            pickle.dump(order, pipe)
        code, peak_bytes = _wait(child)
    except KeyboardInterrupt:
        _end(child)
        _outcome(base, folder, INTERRUPTED, time.perf_counter() - started)
        raise
    wall_s = time.perf_counter() - started
    return _outcome(base, folder, _reason(code, wall_s, peak_bytes), wall_s)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """For a moment; only the main thread can, and need."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(child: subprocess.Popen[bytes]) -> tuple[int, int | None]:
    """The exit code (negative: a signal) and the largest resident set, where the system tells."""
    if not hasattr(os, "wait4"):
        return child.wait(), None
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(timeout=GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def _reason(code: int, wall_s: float, peak_bytes: int | None) -> str:
    used = "" if peak_bytes is None else f", having held {peak_bytes / 1024**3:.2f} GiB of memory at most"
    if code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; the system kills so when memory runs out" if name == "SIGKILL" else ""
            return f"killed by {name} after {wall_s:.0f} s{used}{hint}"
        return f"killed by signal {-code} after {wall_s:.0f} s{used}"
    return f"the process ended with exit code {code} after {wall_s:.0f} s{used}, without a result"


def _outcome(base: RunResult, folder: Path, reason: str, wall_s: float) -> RunResult:
    """The child's record or, if it left none, one that says why."""
    crash = folder / CRASH_FILE
    if crash.is_file():
        if crash.stat().st_size:
            reason += f"; {CRASH_FILE} says where it was"
        else:
            crash.unlink()
    with suppress(ValueError, OSError):
        base = records.load(folder)
        if base.status != records.RUNNING:
            return base
    log.error("job %s: %s", base.job, reason)
    result = as_failed(base, reason, wall_s)
    records.save(result, folder)
    return result


# -- the child -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the job that stands on stdin; the exit code is for the parent."""
    _die_with_the_parent()
    order: _Order = pickle.load(sys.stdin.buffer)
    sys.path[:] = order.path
    logging.config.dictConfig(dict(order.logging))
    signal.signal(signal.SIGTERM, _interrupt)
    with (Path(order.folder) / CRASH_FILE).open("w") as crash:
        faulthandler.enable(crash)
        try:
            # imported here: what it needs may be what is missing, and then the log says so
            from recals_exp.progress import TerminalProgress
            from recals_exp.runner import run

            result = run(order.config, Path(order.folder), TerminalProgress(title=order.title))
            return 0 if result.status == records.OK else 1
        except KeyboardInterrupt:
            return 130
        except BaseException as error:
            records.save(as_failed(describe(order.config, Path(order.folder)), error), Path(order.folder))
            log.exception("job %s failed: %s", order.folder, error)
            return 1
        finally:
            faulthandler.disable()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _die_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    from recals_exp.isolation import main as child  # the pickle names this module, not __main__

    sys.exit(child())
