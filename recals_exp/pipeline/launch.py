"""Starting the processes of a pipeline, and ending all of them when one fails.

Why not `torch.multiprocessing.spawn`: it reports the failure it notices first, which is often a neighbour's broken connection;
it returns nothing; and it waits for ever. Under ``torchrun`` none of this is used: `join_ranks` then joins what it started.

Rules:

1. The ranks meet through a file in a folder of their own, so that jobs do not compete for ports.
2. When a rank fails or dies, the others are ended at once. The error raised here is that of the rank that failed first, with
   its own traceback; a rank that died without a word counts as the first, for the others' errors follow from it.
3. No process is left: not after an error, a timeout or an interrupt, nor if this process is killed.
4. What each rank returns comes back, in order of ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

GRACE_S = 1.0  # how long the other ranks may take to tell why they failed, and then to end


class RankError(RuntimeError):
    """A rank failed. Attributes: ``rank``, and ``rank_traceback``, its own traceback as text ("" if it was killed)."""

    def __init__(self, message: str, rank: int, rank_traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_traceback = rank_traceback


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    at_s: float  # monotonic, of the machine
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store that torchrun has made, and the part of it that one job uses."""

    host: str
    port: int
    prefix: str

    def join(self) -> dist.Store:
        """Connect to it."""
        store = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(self.prefix, store)


def launch(
    function: Callable[..., Any],
    processes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 3600.0,
    backend: str | None = None,
    threads: int | None = None,
) -> list[Any]:
    """Run ``function(*args)`` in new processes that are joined in a process group.

    Args:
        function: importable by name; its arguments and result are pickled.
        processes: how many; each finds its number with ``torch.distributed.get_rank()``.
        timeout_s: the job is ended when it takes longer, and so is any wait of one rank for another.
        backend: of the process group; by default NCCL where each rank has an accelerator of its own, else gloo.
        threads: intra-op threads of each process; None = torch's choice.

    Raises:
        RankError: a rank raised or died.
        TimeoutError: the job took longer than ``timeout_s``.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes={processes!r} is not a number of processes: use a whole number of at least 1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pipeline-", ignore_cleanup_errors=True) as folder:
        ranks: list[BaseProcess] = [
            context.Process(
                target=rank_main,
                args=(function, tuple(args), rank, processes, folder, timeout_s, backend, threads),
                name=f"pipeline rank {rank}",
            )
            for rank in range(processes)
        ]
        try:
            for process in ranks:
                process.start()
            _watch(ranks, Path(folder), timeout_s)
        finally:
            end(ranks)
        return [pickle.loads(result_file(folder, rank).read_bytes()) for rank in range(processes)]


@contextmanager
def join_ranks(timeout_s: float = 3600.0, backend: str | None = None) -> Iterator[None]:
    """The process group of this process: the one that exists, or the one that torchrun's environment describes."""
    if dist.is_initialized():
        yield
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"this process belongs to no process group, and {', '.join(missing)} is not set: start it with torchrun, or "
            "have the processes started here (launch, or pipeline.processes=2)"
        )
    dist.init_process_group(backend or default_backend(), timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()


def default_backend(processes: int | None = None) -> str:
    """NCCL (or the accelerator's own) where every local rank has a device, else gloo."""
    local = processes or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return dist.get_default_backend_for_device(accelerator.type)
    return "gloo"


# -- in the launching process -----------------------------------------------------------------------------------------


def _watch(ranks: Sequence[BaseProcess], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in ranks}
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            late = ", ".join(process.name for process in running.values())
            raise TimeoutError(f"the job did not end within {timeout_s:g} s; still running: {late}. All were ended")
        for sentinel in wait(list(running), timeout=left):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                raise _explain(ranks, running, folder)


def _explain(ranks: Sequence[BaseProcess], running: dict[Any, BaseProcess], folder: Path) -> RankError:
    """Why the job failed (rule 2)."""
    until = time.monotonic() + GRACE_S
    while running and time.monotonic() < until:
        for sentinel in wait(list(running), timeout=until - time.monotonic()):
            running.pop(sentinel).join()
    for rank, process in enumerate(ranks):
        if process.exitcode and not failure_file(folder, rank).exists():
            how = how_it_died(process.exitcode)
            return RankError(f"rank {rank} of {len(ranks)} {how}; the job was ended", rank, "")
    failures = [
        pickle.loads(path.read_bytes())
        for path in (failure_file(folder, rank) for rank in range(len(ranks)))
        if path.exists()
    ]
    first: Failure = min(failures, key=lambda failure: failure.at_s)
    return RankError(
        f"rank {first.rank} of {len(ranks)} failed: {first.error}\n\n{first.traceback}", first.rank, first.traceback
    )


def how_it_died(code: int) -> str:
    """An exit code in words; a negative one is a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def end(ranks: Sequence[BaseProcess]) -> None:
    """End those that still run, at last by force."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + GRACE_S
    for process in started:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


# -- in a rank --------------------------------------------------------------------------------------------------------


def rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    processes: int,
    folder: str,
    timeout_s: float,
    backend: str | None,
    threads: int | None,
    store: StoreAddress | None = None,
) -> None:
    """What a rank's process runs. The ranks meet through a file in the folder or, with ``store``, as torchrun's environment says."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # rule 3
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the launching process's to handle
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if store is None:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes)
            )
        chosen = backend or default_backend(None if store else processes)
        if chosen != "gloo":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        meeting: dict[str, Any] = (
            {"init_method": f"file://{folder}/rendezvous"} if store is None else {"store": store.join()}
        )
        dist.init_process_group(
            chosen, rank=rank, world_size=processes, timeout=timedelta(seconds=timeout_s), **meeting
        )
        dist.barrier()  # a rank that is done at once must not leave while others are still connecting to it
        result = function(*args)
        _write(result_file(folder, rank), result)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException as error:
        at_s = time.monotonic()
        text = f"{type(error).__name__}: {error}"
        _write(failure_file(folder, rank), Failure(rank, at_s, text, traceback.format_exc()))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: a rank in trouble must not wait for its neighbours in a destructor, and gloo's
    # threads, if one is still running when its object is destroyed, abort a rank that has done all its work.
    os._exit(code)


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.replace(path)


def result_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"result-{rank}"


def failure_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"failure-{rank}"
