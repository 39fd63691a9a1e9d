"""The planner in a process of its own.

Why a process and not a thread: the planner is Python, and a thread of it takes the interpreter's lock from training between any
two ops; a step of 2,000 small ops was seen to take six times as long while a thread planned. And a thread inside of a solver
cannot be stopped when the interpreter ends; a process can.

::

    parent                                     python -m recals_exp.recals.planning.worker
      {record, limit_bytes} as one line of JSON  -> stdin; stays open
      plan as JSON                               <- stdout; then it ends

Rules
1. The child ends when its stdin closes: it never outlives its parent, however that ends. The parent kills it at its own exit.
2. Only the plan goes to stdout: what libraries print there (HiGHS does, now and then) is thrown away.
3. It runs at a lower priority, on one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from ..record import TapeRecord
from .plan import Plan

_NICENESS = 10
_running: dict[subprocess.Popen[str], int] = {}  # -> the process that started it (a fork is not to kill its parent's)


class WorkerError(RuntimeError):
    """No plan came back."""


class WorkerStopped(WorkerError):
    """The interpreter ends, and the process was stopped with it."""


def plan_in_process(record: TapeRecord, limit_bytes: int) -> Plan:
    """What ``default_planner`` makes of it, made by another process; waits for it.

    Raises:
        OSError: the process cannot be started.
        WorkerError: it ended without a plan; carries the end of what it said.
        WorkerStopped: this process is ending.
    """
    if not sys.executable:
        raise OSError("this interpreter does not know its own path")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    if not _running:
        atexit.register(stop_processes)
    _running[process] = os.getpid()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdin, process.stdout, process.stderr:
            with contextlib.suppress(BrokenPipeError):  # it ended at once: what it said tells why
                process.stdin.write(json.dumps([json.loads(record.to_json()), limit_bytes]) + "\n")
                process.stdin.flush()
            text = process.stdout.read()
            said = process.stderr.read()
        if process.wait() and process not in _running:
            raise WorkerStopped("stopped")
        if process.returncode or not text:
            raise WorkerError(f"the planning process ended with {process.returncode}: {said.strip()[-2000:]}")
        return Plan.from_json(text)
    finally:
        _running.pop(process, None)


def stop_processes() -> None:
    """Kill those of this process."""
    for process, owner in list(_running.items()):
        if owner == os.getpid():
            del _running[process]
            process.kill()
            process.wait()


def main() -> None:
    """The child."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # rule 2
    with contextlib.suppress(AttributeError, OSError):
        os.nice(_NICENESS)
    request: list[Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from ..policies.planned import default_planner

    record, limit_bytes = TapeRecord.from_json(json.dumps(request[0])), int(request[1])
    text = default_planner(record, limit_bytes).to_json()
    with os.fdopen(out, "w", encoding="utf-8") as stdout:
        stdout.write(text)
    os._exit(0)  # the thread may hold on to stdin


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
