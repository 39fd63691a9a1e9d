"""Job after job on the processes that ``torchrun`` started.

    Members().lead(function, args)     on rank 0: function(*args) on every rank of a new process group; what each returned
    Members().serve()                  on the others: take part until rank 0 is done

Why not one process group for all jobs: after a failure its ranks wait for one another for ever, and cannot be told otherwise
from Python.

Rules:

1. What torchrun started only supervises: for each job it starts one child, and that is the rank. A job that fails leaves nothing
   behind, and the next one begins anew.
2. Orders, outcomes and failures pass through torchrun's store. Whoever sees its child fail says so there; the others then end
   theirs. The error is told as by `launch`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import rendezvous

from recals_exp.pipeline.launch import (
    GRACE_S,
    Failure,
    RankError,
    StoreAddress,
    end,
    failure_file,
    how_it_died,
    rank_main,
    result_file,
)

POLL_S = 0.2
_STOP = b"stop"
_A_LONG_TIME = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class _Order:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    threads: int | None
    backend: str | None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one rank's child."""

    result: bytes | None = None  # pickled
    failure: Failure | None = None  # its own word
    death: str | None = None  # how it died without one
    late: bool = False


class Members:
    """This process among those that torchrun started. Make one in each process (`members` keeps it)."""

    def __init__(self) -> None:
        self.store, self.rank, self.world = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        self._next = 0

    def lead(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        timeout_s: float = 3600.0,
        threads: int | None = None,
        backend: str | None = None,
    ) -> list[Any]:
        """Run ``function(*args)`` on every rank and return the results in order. To be called on rank 0.

        Raises:
            RankError: a rank raised or died.
            TimeoutError: the job took longer than ``timeout_s``.
        """
        order = _Order(function, tuple(args), timeout_s, threads, backend)
        self.store.set(f"order/{self._next}", pickle.dumps(order))
        job = self._take_part(order)
        keys = [f"{job}/outcome/{rank}" for rank in range(self.world)]
        self.store.wait(keys, timedelta(seconds=60))  # a supervisor answers soon after its child has ended
        outcomes: list[_Outcome] = [pickle.loads(self.store.get(key)) for key in keys]
        _raise_first(outcomes, timeout_s)
        return [pickle.loads(outcome.result or b"") for outcome in outcomes]

    def serve(self) -> None:
        """Take part in every job until rank 0 is done. To be called on the other ranks."""
        while True:
            key = f"order/{self._next}"
            self.store.wait([key], _A_LONG_TIME)
            message = self.store.get(key)
            if message == _STOP:
                return
            self._take_part(pickle.loads(message))

    def dismiss(self) -> None:
        """Let the others end. To be called on rank 0."""
        self.store.set(f"order/{self._next}", _STOP)

    def _take_part(self, order: _Order) -> str:
        """Supervise this rank's child through one job (rule 1); the job's name in the store."""
        job, self._next = f"job/{self._next}", self._next + 1
        address = StoreAddress(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), f"{job}/group")
        with tempfile.TemporaryDirectory(prefix="pipeline-", ignore_cleanup_errors=True) as folder:
            rank = multiprocessing.get_context("spawn").Process(
                target=rank_main,
                args=(
                    *(order.function, order.args, self.rank, self.world, folder),
                    *(order.timeout_s, order.backend, order.threads),
                ),
                kwargs={"store": address},
                name=f"pipeline rank {self.rank}",
            )
            rank.start()
            try:
                outcome = self._watch(rank, job, Path(folder), order.timeout_s)
            finally:
                end([rank])
        self.store.set(f"{job}/outcome/{self.rank}", pickle.dumps(outcome))
        return job

    def _watch(self, rank: Any, job: str, folder: Path, timeout_s: float) -> _Outcome:
        """Until the child has ended, or another one has failed (rule 2)."""
        deadline = time.monotonic() + timeout_s
        while not wait([rank.sentinel], timeout=POLL_S):
            if self.store.check([f"{job}/failed"]):
                break  # after a while, in which this one may say why it fails too
            if time.monotonic() > deadline:
                self.store.set(f"{job}/failed", b"")
                return _Outcome(late=True)
        rank.join(GRACE_S)  # the sentinel may tell before the exit code is there
        if rank.exitcode == 0:
            return _Outcome(result=result_file(folder, self.rank).read_bytes())
        self.store.set(f"{job}/failed", b"")
        if failure_file(folder, self.rank).exists():
            return _Outcome(failure=pickle.loads(failure_file(folder, self.rank).read_bytes()))
        return _Outcome(death=None if rank.exitcode is None else how_it_died(rank.exitcode))


def _raise_first(outcomes: Sequence[_Outcome], timeout_s: float) -> None:
    """The failure that the others follow from: a death without a word, else the earliest."""
    for rank, outcome in enumerate(outcomes):
        if outcome.death is not None:
            raise RankError(f"rank {rank} of {len(outcomes)} {outcome.death}; the job was ended", rank, "")
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if failures:
        first = min(failures, key=lambda failure: failure.at_s)
        raise RankError(
            f"rank {first.rank} of {len(outcomes)} failed: {first.error}\n\n{first.traceback}",
            first.rank,
            first.traceback,
        )
    late = [rank for rank, outcome in enumerate(outcomes) if outcome.result is None]
    if late:
        raise TimeoutError(f"the job did not end within {timeout_s:g} s; still running: ranks {late}. All were ended")


@functools.cache
def members() -> Members:
    """This process's `Members`."""
    return Members()
