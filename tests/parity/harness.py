"""Plain parity: is a call through ``Recals`` the plain call, to the last bit, in everything a program can see?

A *case* builds a fresh subject (a callable with its arguments and fixed weights) and says what a step does with it. The
step runs twice from identical state, once plainly and once wrapped; all that can be observed is written into a *trace*, and
the traces must be equal: output values, types, structure, strides, aliasing with inputs and with each other,
``requires_grad``, ``grad_fn`` types, version counters; gradients of inputs and parameters, None included; parameters,
buffers and Python-held state; generator states of torch, Python and NumPy; warnings; exceptions. Values are compared by
their bytes: NaN equals the same NaN, -0.0 is not 0.0.

Rules:

1. A case in which nothing was dropped and recomputed proves nothing. At low budgets it fails, unless it says that it saves
   nothing that could be dropped (``droppable=False``), or that its cache is one value (``bites=False``), and that is true.
2. The limit holds: peak <= limit at every budget; at the full budget nothing is dropped.
3. Nothing is left: 0 bytes cached, an empty registry, modes, hooks, autocast and settings as before, by reference counting
   alone (the garbage collector is off), after an exception too.
4. The harness knows no policy by name: it runs whatever stands in ``POLICIES``.

Budgets: ``full`` (the most the case caches), ``middle`` (half of it), ``smallest`` (what the engine names as the smallest
that works) and ``nothing`` (limit 0, refusals off: every single value is rebuilt).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from parity.cases import Call, Case, Notes, Subject, train, weighted_sum
from parity.freezing import Trace, differences, freeze

from recals_exp.recals import POLICIES, CacheLimitError, Policy, Recals, RecalsWarning, Stats, recals_with_rngs
from recals_exp.recals.planning.plan import Plan
from recals_exp.recals.planning.planner import make_plan
from recals_exp.recals.record import TapeRecord

BUDGETS = ("full", "middle", "smallest", "nothing")
SEED = 20


def plain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


# -- running -----------------------------------------------------------------------------------------------------------


def seed_everything() -> None:
    torch.default_generator.manual_seed(SEED)
    if (
        torch.cuda.is_initialized()
    ):  # before that, ``torch.manual_seed`` would queue a call, with a stack trace, for later
        torch.cuda.manual_seed_all(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def run(case: Case, call: Call, look: Callable[[str], None] = lambda moment: None) -> Trace:
    """The trace of one run. ``look`` is called with ``"done"`` (the subject alive) and ``"gone"`` (it is not)."""
    with _warnings_recorded() as seen, _collector_off():
        seed_everything()
        subject = case.build()
        seen.clear()
        seed_everything()
        before = ambient()
        note = Notes(subject)
        script = case.script or train
        try:
            script(case, call, subject, note)
            note.value("exception", None)
        except CacheLimitError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            note.value("exception", type(error).__qualname__)
            note.generators("after the exception")
            note.trace["exception text"] = str(error)  # for people; not compared
            traceback.clear_frames(error.__traceback__)
            del error
        after = ambient()
        assert after == before, f"{case}: left behind: {after}, before: {before}"
        note.value(
            "warnings", sorted((w.category.__name__, str(w.message)) for w in seen if w.category is not RecalsWarning)
        )
        said = {str(w.message) for w in seen if w.category is RecalsWarning}
        unexpected = [text for text in said if case.warns is None or case.warns not in text]
        assert not unexpected, f"{case}: unexpected RecalsWarning: {unexpected}"
        trace = note.trace
        look("done")
        del note, subject
        if case.makes_cycles:
            gc.collect()
        look("gone")
    return trace


@contextmanager
def _warnings_recorded() -> Iterator[list[warnings.WarningMessage]]:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else the second run would be missing what C++ says once per process
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.set_warn_always(always)


@contextmanager
def _collector_off() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def ambient() -> dict[str, Any]:
    """The global settings a call must leave as they were."""
    return {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
    }


# -- the yardstick -----------------------------------------------------------------------------------------------------


def make_recals(limit: int | None, policy: str, case: Case) -> Recals:
    # an audit would pin, and so hide, what the engine cannot rebuild
    return recals_with_rngs(limit, policy=make_policy(policy), **{"audit": "off", **case.options})


def make_policy(name: str) -> Policy:
    """A policy as registered; one that plans does it quickly, and in the step that needs the plan, not in the background."""
    kind = POLICIES[name]
    known = inspect.signature(kind).parameters
    return kind(**{key: value for key, value in {"waits": True, "planner": _quick_plan}.items() if key in known})


def _quick_plan(record: TapeRecord, limit_bytes: int) -> Plan:
    return make_plan(record, limit_bytes, effort=0.003).plan


@dataclass(frozen=True)
class Wrapped:
    """A wrapped run: its trace, what the engine counted, and what it held at the end."""

    trace: Trace
    stats: Stats
    left: tuple[str, ...]


def run_wrapped(case: Case, policy: str, limit: int | None, refuses: bool = True) -> Wrapped:
    """``refuses=False``: drop what is larger than the limit, too, instead of refusing it."""
    recals = make_recals(limit, policy, case)
    recals.refuses = refuses
    left: list[str] = []

    def look(moment: str) -> None:
        if case.keeps_graph and moment == "done":
            return
        if (held := recals.stats.cached_bytes) != 0:
            left.append(f"{held} bytes cached when {moment}")
        if recals.registry:
            left.append(f"{len(recals.registry)} storages in the registry when {moment}")

    trace = run(case, recals, look)
    return Wrapped(trace, recals.stats, tuple(left))


class Yardstick:
    """The plain trace of a case and its limits, each found once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._limits: dict[str, tuple[int, int]] = {}

    @functools.cached_property
    def plain(self) -> Trace:
        trace = run(self.case, plain)
        raised, expected = trace["exception"], self.case.raises
        if raised != freeze(None if expected is None else expected.__qualname__):
            raise AssertionError(
                f"{self.case}: the plain run was to raise {expected}, it raised {raised}: {trace.get('exception text')}"
            )
        return trace

    def limits(self, policy: str) -> tuple[int, int]:
        """The smallest limit that works, as the engine says, and the most that is cached without a limit."""
        if policy not in self._limits:
            total = run_wrapped(self.case, policy, None).stats.peak_cached_bytes
            smallest = 0
            for _ in range(50):  # a script may make several calls, each with a larger demand
                try:
                    run_wrapped(self.case, policy, smallest)
                    break
                except CacheLimitError as error:
                    if error.smallest_bytes <= smallest:
                        raise AssertionError(
                            f"{self.case}: {smallest} refused, {error.smallest_bytes} named"
                        ) from error
                    smallest = error.smallest_bytes
            else:
                raise AssertionError(f"{self.case}: no limit works, {smallest} bytes neither")
            self._limits[policy] = smallest, total
        return self._limits[policy]

    def limit(self, policy: str, budget: str) -> int:
        if budget == "nothing":
            return 0
        smallest, total = self.limits(policy)
        return {"full": total, "middle": max(smallest, total // 2), "smallest": smallest}[budget]

    def check(self, policy: str, budget: str) -> Stats:
        """Compare; AssertionError with every difference. Returns what the engine counted."""
        case, where = self.case, f"{self.case} [policy {policy}, budget {budget}"
        expected = self.plain
        limit = self.limit(policy, budget)
        wrapped = run_wrapped(case, policy, limit, refuses=budget != "nothing")
        where += f" = {limit} bytes]"
        stats = wrapped.stats
        found = differences(expected, wrapped.trace)
        if found and (unsteady := differences(expected, run(case, plain))):
            found = [f"plain does not reproduce itself: {line}" for line in unsteady]
        found += wrapped.left
        if budget != "nothing" and stats.peak_cached_bytes > limit:
            found.append(f"{stats.peak_cached_bytes} bytes cached at the peak")
        found += self._proof(policy, budget, limit, stats)
        assert not found, f"{where}:\n  " + "\n  ".join(found)
        return stats

    def _proof(self, policy: str, budget: str, limit: int, stats: Stats) -> list[str]:
        """Rule 1: was anything dropped and recomputed?"""
        case = self.case
        if budget == "full":
            return [f"{stats.dropped_values} values dropped at the full budget"] if stats.dropped_values else []
        if not case.droppable:
            return [f"droppable=False, but {stats.dropped_values} values were dropped"] if stats.dropped_values else []
        if budget != "nothing":
            fits = limit >= self.limits(policy)[1]
            if fits and not case.bites:
                return []
            if fits:
                return [f"the limit does not bite: all {limit} bytes fit; enlarge the case, or say bites=False"]
            if not case.bites and budget == "smallest":
                return [f"bites=False, but the smallest limit is {limit} of {self.limits(policy)[1]} bytes"]
        if case.raises is None and not (stats.dropped_values and stats.recomputed_values):
            return [f"proves nothing: {stats.dropped_values} values dropped, {stats.recomputed_values} recomputed"]
        return []


@functools.lru_cache(maxsize=4)
def yardstick(case: Case) -> Yardstick:
    """One per case; tests of one case run one after the other."""
    return Yardstick(case)


def check(case: Case, policy: str, budget: str) -> Stats:
    """The assertion of the suite."""
    return yardstick(case).check(policy, budget)


def grid(cases: Iterable[Case], budgets: Iterable[str] = BUDGETS) -> Any:
    """``@grid(CASES)``: the test runs for every case x policy x budget, as ``(case, policy, budget)``."""
    cases, budgets = list(cases), list(budgets)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"two cases of one name: {sorted(names)}"
    return pytest.mark.parametrize(
        ("case", "policy", "budget"),
        [
            pytest.param(case, policy, budget, id=f"{case.name}-{policy}-{budget}")
            for case in cases
            for policy in POLICIES
            for budget in budgets
        ],
    )


def replace(case: Case, **changes: Any) -> Case:
    """A case that differs in some fields."""
    return dataclasses.replace(case, **changes)


__all__ = [
    "BUDGETS",
    "Call",
    "Case",
    "Notes",
    "Subject",
    "Wrapped",
    "Yardstick",
    "ambient",
    "check",
    "grid",
    "make_recals",
    "plain",
    "replace",
    "run",
    "run_wrapped",
    "seed_everything",
    "train",
    "weighted_sum",
    "yardstick",
]
