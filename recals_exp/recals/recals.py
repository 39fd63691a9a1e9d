"""The facade: one ``Recals`` holds what autograd caches in all the calls made through it to one byte limit."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import saved_tensors_hooks

from .ambient import never_compiled
from .analysis import Analysis, Measuring, module_state_restored
from .audit import Auditor, AuditReport
from .cache import Cache, Stats
from .composites import AsWithoutModes
from .door import audit_keys, check_modes, check_supported, refuse_function_transforms
from .errors import CacheLimitError, SizeError
from .facts import OpFacts
from .graph import Value
from .handles import unpack
from .optimizers import watch_fused_steps
from .plans import StepPlan, plans_from_json, plans_to_json
from .policies import POLICIES, Fifo, Planned, Policy, StepPolicy, make_policy
from .policies.planned import default_planner
from .prediction import Prediction, predict, profile_call
from .profiling import profile_step
from .randomness import GpuDevices, SavedGenerators
from .record import TapeRecord
from .recorder import Recorder
from .replay import Replayer
from .session import Reach, Session
from .simulate import pinned_bytes
from .sizes import format_bytes, parse_bytes
from .storages import NO_STORAGE
from .structure import output_tensors, step_key
from .tape import Registry, TensorValue
from .wrapping import Attachment, RecalsModule, attach

T = TypeVar("T")
AUDITS = ("first", "always", "off")


class Recals:
    """Calls functions with the memory autograd caches inside held to ``cache_limit_bytes``.

    ``recals(fn, *args, **kwargs)`` equals ``fn(*args, **kwargs)``. Values that autograd saves for backward are held up to
    the limit, over all calls made through this object; what does not fit is dropped and rebuilt in backward by re-running
    just the ops it needs. Gradients, buffers and random state are those of the plain call, bit for bit.

    Make one with ``recals_with_rngs``. Calls from several threads may share one object.
    """

    def __init__(self, limit_bytes: int | None, gpu_devices: GpuDevices, policy: Policy, audit: str) -> None:
        if audit not in AUDITS:
            raise ValueError(f"audit={audit!r} is not known; allowed: {', '.join(map(repr, AUDITS))}")
        self.replayer = Replayer()
        self.cache = Cache(limit_bytes, policy, self.replayer)
        self.audit_when = audit
        self.refuses = True  # False: drop what does not fit instead of raising (for tests of the engine)
        self.facts: dict[Any, OpFacts] = {}
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.generators = SavedGenerators(gpu_devices)
        self.registry: Registry = {}
        self.sequence = itertools.count()  # places on the tape
        self.sessions: dict[int, Reach] = {}  # calls of which a handle lives
        self.running: set[int] = set()  # of them, those that have not returned
        watch_fused_steps(self)

    def __reduce__(self) -> Any:
        """A copy, or a pickle, has the settings and an empty cache."""
        return Recals, (self.cache_limit_bytes, self.generators.gpu_devices, self.cache.policy.anew(), self.audit_when)

    @property
    def cache_limit_bytes(self) -> int | None:
        """The limit in bytes; None for no limit."""
        return self.cache.limit_bytes

    @property
    def policy(self) -> str:
        """Name of the policy in force."""
        return self.cache.policy.name

    @property
    def stats(self) -> Stats:
        """What was cached, dropped and recomputed since the last ``reset_stats()``."""
        return self.cache.stats()

    def reset_stats(self) -> None:
        self.cache.reset_stats()

    @never_compiled
    def __call__(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """``fn(*args, **kwargs)`` with its cache held to the limit.

        Raises:
            CacheLimitError: one saved value alone is above the limit; names the layer, its bytes, and the smallest limit
                with which the call works.
        """
        cache = self.cache
        if (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()) and not cache.live:
            return fn(*args, **kwargs)  # nothing to save, and nobody who may have to rebuild from what it writes
        check_modes()
        stepper = cache.policy if isinstance(cache.policy, StepPolicy) else None
        if stepper is not None and not cache.live and not cache.calls_running:
            stepper.began(cache, step_key(fn, args, kwargs), next(self.sequence) + 1)
        session = Session(self)
        self.cache.peak_pinned_bytes = self.cache.pinned_bytes
        recorder = self._recorder(fn, args, session)
        cache.calls_running += 1
        self.running.add(session.serial)
        try:
            with AsWithoutModes(), saved_tensors_hooks(recorder.saver.pack, unpack), recorder:
                out = fn(*args, **kwargs)
            if stepper is not None:
                stepper.returned(self._values_of(out))
        except RuntimeError as error:
            refuse_function_transforms(error)
            raise
        finally:
            cache.calls_running -= 1
            self.running.discard(session.serial)
            cache.maybe_ended()
        recorder.finish()
        limit, largest, layer = self.cache.limit_bytes, session.largest_bytes, session.largest_layer
        if limit is not None and max(largest, self.cache.peak_pinned_bytes) > limit and self.refuses:
            del out, recorder, session  # nothing of the call may live on in the error's traceback
            self._refuse(limit, largest, layer)
        return out

    def _values_of(self, out: Any) -> list[Value]:
        """The values that the outputs of a call hold."""
        found: list[Value] = []
        with DisableTorchFunction():  # subclasses and modes of the program's must not notice
            for tensor in output_tensors(out):
                try:
                    value = self.registry.get(id(tensor.untyped_storage()))
                except NO_STORAGE:
                    continue
                if type(value) is TensorValue:
                    found.append(value)
        return found

    def wrap(self, module: nn.Module) -> RecalsModule:
        """A module that calls ``module`` through this object; ``state_dict`` and all names are the module's.

        Parameters, buffers, ``train``, ``eval`` and ``to`` are shared. ValueError if it is wrapped or attached already.
        """
        return RecalsModule(module, self)

    def attach(self, module: nn.Module) -> Attachment:
        """Let calls of ``module`` itself go through this object, until ``remove()`` of what is returned.

        Its class, its names and its methods stay, which is what trainers look at. ValueError if it is wrapped or attached
        already.
        """
        return attach(module, self)

    def analyze(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Analysis:
        """What ``fn(*args, **kwargs)`` would cache. Runs forward once with gradients enabled, storing nothing.

        Buffers and generators are left as they were. Unpacks as ``total, unit_max``, both in bytes: ``total`` is what the
        call caches, ``unit_max`` the largest cache of one leaf layer.
        """
        policy = Measuring()
        measuring = Recals(None, "all", policy, "off")
        with torch.enable_grad(), module_state_restored(fn):
            out = measuring(fn, *args, **kwargs)
            pinned_bytes = measuring.cache.peak_cached_bytes
            del out
        return policy.analysis(pinned_bytes)

    @never_compiled
    def audit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AuditReport:
        """Run ``fn(*args, **kwargs)`` forward once, every op twice, and report what does not come back bit for bit.

        Buffers and generators are left as they were. What is found stays pinned in this object.
        """
        session = Session(self)
        self.running.add(session.serial)
        try:
            with torch.enable_grad(), module_state_restored(fn):
                auditor = Auditor(self, session, runs_foreign=True)
                with saved_tensors_hooks(auditor.saver.pack, unpack), auditor:
                    fn(*args, **kwargs)
                auditor.finish()
        finally:
            self.running.discard(session.serial)
        self._seen.update(audit_keys(fn, args))
        return auditor.report()

    def profile(self, fn: Callable[..., Any], /, *args: Any, costs: str = "model", **kwargs: Any) -> TapeRecord:
        """The record of one step (forward, and backward from gradients of ones): what simulator and planner read.

        Runs with nothing dropped. Buffers, generators and gradients are left as they were. ``costs``: ``"model"`` (FLOPs and
        bytes on a nominal machine) or ``"measured"`` (seconds here; runs the step again for about a minute).
        """
        self._learn(fn, args, kwargs)
        return profile_step(self.unlimited(Fifo()), fn, args, kwargs, costs)

    def predict(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        budgets: Iterable[float | int | str] | None = None,
        policies: Iterable[str] = tuple(POLICIES),
        costs: str = "model",
        **kwargs: Any,
    ) -> Prediction:
        """What every budget would cost under every policy, the bound, and the peak memory, from one profiled step.

        The step is a bare one: no loss, no optimizer (``python -m recals_exp mode=predict`` has both). Budgets are fractions in
        (0, 1] of what the step caches, or bytes ("512MiB"). ``format_prediction`` makes a table of it. Planning takes seconds
        per budget; leave ``planned`` out where that is too long. ``costs``: as for ``profile``.
        """
        self._learn(fn, args, kwargs)
        return predict(profile_call(self, fn, args, kwargs, costs), budgets, policies)

    def plan(self, fn: Callable[..., Any], /, *args: Any, costs: str = "model", **kwargs: Any) -> StepPlan:
        """Plan steps like ``fn(*args, **kwargs)`` now, instead of in the background once they come again.

        Profiles one step as ``profile`` does (with nothing dropped: it takes a plain step's memory), plans within the limit,
        which takes seconds, and follows the plan from the second such step on.
        """
        policy = self._planned_policy("plan")
        if self.cache.limit_bytes is None:
            raise ValueError(
                "there is nothing to plan without a cache limit: recals_with_rngs(limit, policy='planned')"
            )
        record = self.profile(fn, *args, costs=costs, **kwargs)
        room = self.cache.limit_bytes - pinned_bytes(record)
        if room < 0:
            self.cache.peak_pinned_bytes = pinned_bytes(record)
            self._refuse(self.cache.limit_bytes, 0, "")
        step_plan = StepPlan(record, default_planner(record, room))
        policy.load([step_plan])
        return step_plan

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The plans that are known: made so far, or loaded. ``format_plan`` makes a table of one."""
        return self._planned_policy("plans").plans()

    def save_plans(self, path: str | Path) -> None:
        """Write the plans that are known, with the records of their steps, as JSON."""
        Path(path).write_text(plans_to_json(self.plans), encoding="utf-8")

    def load_plans(self, path: str | Path) -> tuple[StepPlan, ...]:
        """Follow the plans that ``save_plans`` wrote, where their steps come again and the limit allows.

        A step is known by its ops and sizes once it has run, so the first one still runs under ``dtr``.
        """
        policy = self._planned_policy("load_plans")
        plans = plans_from_json(Path(path).read_text(encoding="utf-8"), str(path))
        policy.load(plans)
        return plans

    def _planned_policy(self, what: str) -> Planned:
        policy = self.cache.policy
        if not isinstance(policy, Planned):
            raise ValueError(
                f"{what}: policy={policy.name!r} makes no plans; use recals_with_rngs(limit, policy='planned')"
            )
        return policy

    def unlimited(self, policy: Policy) -> Recals:
        """Another object with no limit and a cache of its own, that shares what this one knows about ops."""
        other = Recals(None, "all", policy, "off")
        other.facts, other.generators = self.facts, self.generators
        return other

    def _learn(self, fn: Any, args: Any, kwargs: Any) -> None:
        """What the first limited call of ``fn`` would find out about its ops."""
        if self.audit_when != "off" and not self._seen.issuperset(audit_keys(fn, args)):
            self.audit(fn, *args, **kwargs)

    def pin_results(self, func: Any, layer: str, is_unguarded: bool = False) -> None:
        """Hold the results of ``func`` in ``layer`` from now on; unguarded ones are written by others, too."""
        facts = self.facts[func]
        facts.pinned_layers.add(layer)
        if is_unguarded:
            facts.unguarded_layers.add(layer)
        facts.is_simple = False

    def _recorder(self, fn: Any, args: tuple[Any, ...], session: Session) -> Recorder:
        keys = audit_keys(fn, args)
        is_new = not self._seen.issuperset(keys)
        if is_new:
            self._seen.update(keys)
            check_supported(fn)
        # Without a limit nothing is ever re-run.
        if self.cache.limit_bytes is not None and (
            self.audit_when == "always" or (is_new and self.audit_when == "first")
        ):
            return Auditor(self, session, runs_foreign=self.audit_when == "always")
        return Recorder(self, session)

    def _refuse(self, limit: int, largest: int, layer: str) -> None:
        pinned = self.cache.peak_pinned_bytes
        smallest = max(largest, pinned)
        if largest > limit:
            needed = largest
            what = f"is below the largest value that autograd saves: {needed} bytes ({format_bytes(needed)}) in layer {layer}"
        else:
            needed, layer = pinned, ""
            what = (
                f"is below what cannot be rebuilt and must be held: {needed} bytes ({format_bytes(needed)}); "
                "`recals.audit(model, ...)` names the ops concerned"
            )
        raise CacheLimitError(
            f"the cache limit of {limit} bytes ({format_bytes(limit)}) {what}. The smallest limit that works for this call "
            f"is {smallest} bytes; raise the limit to that, or use a smaller batch.",
            limit_bytes=limit,
            needed_bytes=needed,
            smallest_bytes=smallest,
            layer=layer,
        )


def recals_with_rngs(
    cache_limit_size: int | str | None,
    gpu_devices: GpuDevices = "all",
    *,
    policy: str | Policy = "planned",
    audit: str = "first",
) -> Recals:
    """A ``Recals`` with a cache limit.

    Args:
        cache_limit_size: the limit in bytes, a size such as ``"4GiB"``, or -1 or None for no limit.
        gpu_devices: whose generators are saved before random ops, so that a re-run draws the same numbers: ``"all"``,
            ``"none"``, ``"cuda"``, ``"cpu"``, a device index (-1: CPU), a list of indices, or a tensor (its device).
            Results of random ops on other devices are held instead of re-run.
        policy: what to drop: ``"planned"`` (watches the second step, plans it in another process, and follows the plan;
            until then as ``"dtr"``), ``"dtr"`` (decides as it goes: least cost per byte and staleness), ``"fifo"`` (the
            documented curve: the oldest), or a ``Policy``. Results are the same, bit for bit, whatever is dropped.
        audit: run every op twice and compare (see ``Recals.audit``) on a callable's ``"first"`` call, ``"always"`` or
            ``"off"``. Foreign ops (not PyTorch's own) are never re-run before an audit has seen them.

    Raises:
        SizeError: a limit that is no size, or below -1.
    """
    if cache_limit_size is None or (cache_limit_size == -1 and not isinstance(cache_limit_size, bool)):
        limit = None
    else:
        try:
            limit = parse_bytes(cache_limit_size)
        except SizeError as error:
            raise SizeError(f"cache_limit_size: {error} (-1 or None means no limit)") from None
    return Recals(limit, gpu_devices, make_policy(policy), audit)
