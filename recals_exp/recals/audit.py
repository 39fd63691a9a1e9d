"""The audit: does what may be dropped come back bit for bit?

A call is recorded as usual, and every op is run a second time, at once, on the inputs it had, the way a replay would run
it; its results are compared bit by bit. If every op reproduces, so does every chain of ops. Two more things are looked
for, which no schema tells: bytes that changed between the op that made them and the op that reads them (written outside
aten: NumPy, ctypes, a raw kernel), and foreign ops that write arguments or draw random numbers without saying so.

Foreign ops (not PyTorch's own) may have side effects, so the audit that runs by itself on a first call only watches them;
their results are held. ``Recals.audit`` and ``audit="always"`` run them twice as well, and let go of what reproduces.

What does not reproduce is *pinned*: from then on, results of that op in that layer are held, not rebuilt. The price is
one more forward for the audited call, plus a checksum of every op's inputs, and the memory of one op's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch._C import DisableTorchFunction
from torch._ops import OpOverload

from .ambient import would_be_seen
from .contents import checksum, copy_of, same_bytes
from .facts import OpFacts, all_tensors
from .graph import Value
from .layers import layer_name, modules_in_flight
from .ops import TensorOp
from .randomness import default_generator, generators_restored
from .recorder import Recorder, count_writes
from .sizes import format_bytes
from .storages import NO_STORAGE
from .tape import Source, TensorValue

if TYPE_CHECKING:
    from .recals import Recals
    from .session import Session

NOT_REPRODUCED = "its result differs when run again"
WRITTEN_OUTSIDE = "its result was written outside of aten after it ran"
HIDDEN_WRITE = "it writes an argument without declaring it"
READ_CHANGING = "it reads memory that was written outside of aten afterwards"
HIDDEN_RANDOM = "it draws random numbers without declaring it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to pin. ``nbytes`` is the largest result concerned."""

    op: str
    layer: str
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audited call found. ``findings`` stay pinned in the ``Recals`` that made the report."""

    ops: int
    values: int
    value_bytes: int
    findings: tuple[Finding, ...]

    @property
    def is_clean(self) -> bool:
        return not self.findings


def format_audit(report: AuditReport) -> str:
    """The report for people."""
    head = (
        f"audit: {report.ops} ops, {report.values} values ({format_bytes(report.value_bytes)}) run again and compared"
    )
    if report.is_clean:
        return f"{head}; all came back bit for bit"
    lines = [f"{head}; {len(report.findings)} pinned:"]
    lines += [f"  {f.op} in {f.layer or '(no module)'}: {f.reason} ({format_bytes(f.nbytes)})" for f in report.findings]
    return "\n".join(lines)


class Auditor(Recorder):
    """A recorder that runs every op twice."""

    def __init__(self, owner: Recals, session: Session, runs_foreign: bool) -> None:
        super().__init__(owner, session)
        self.runs_foreign = runs_foreign
        self.ops = self.values = self.value_bytes = 0
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self._last_ops: list[TensorOp] = []  # recorded by the call that is being handled
        self._checksums: dict[int, tuple[Any, int, int]] = {}  # id(storage) -> pin, version, checksum
        self._readers: dict[Source, list[tuple[Any, str]]] = {}  # of leaves: op and layer

    def report(self) -> AuditReport:
        return AuditReport(self.ops, self.values, self.value_bytes, tuple(self.findings.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if would_be_seen(args) or would_be_seen(all_tensors((args, kwargs))):
            with DisableTorchFunction():
                return self.__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        facts = self.facts_of(func) if isinstance(func, OpOverload) else None
        if facts is None or facts.is_view or facts.is_allocation or types or not _has_bytes((args, kwargs)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        storages = _storages((args, kwargs))
        for storage in storages:
            self._check_untouched(storage)
        watched = facts.is_foreign and not facts.was_watched
        fragile = storages if facts.is_foreign else _storages([t for t, _ in facts.written_tensors(args, kwargs)])
        before = {id(storage): copy_of(storage) for storage in fragile}
        devices = {storage.device for storage in storages} if facts.is_foreign else set()
        states = {device: g.get_state() for device in devices if (g := default_generator(device)) is not None}
        facts.was_watched = True
        was_replayable = facts.reproduces
        if facts.is_foreign and self.runs_foreign:
            facts.reproduces = True  # recorded as if; believed only after the second run
        versions = [tensor._version for tensor in all_tensors((args, kwargs))] if watched else []

        self._last_ops.clear()
        out = super().__torch_dispatch__(func, types, args, kwargs)

        op = self._last_ops[-1] if self._last_ops and _has_bytes(out) else None
        self._last_ops.clear()
        clean = True
        if watched:
            clean = self._learn_foreign(facts, args, kwargs, before, states, versions)
        if op is not None:
            clean = clean and self._run_again(op, facts, out, storages, before, states)
        if facts.is_foreign:
            facts.reproduces = clean and (op is not None or was_replayable)
            if op is not None and not clean:
                for tensor in all_tensors(out):
                    self.storages.written_outside(tensor)
        for storage in (*storages, *_storages(out)):
            self._note(storage)
        for value in op.inputs if op is not None else ():
            if type(value) is Source and value.is_leaf:
                self._readers.setdefault(value, []).append((func, layer_name(modules_in_flight())))
        return out

    def finish(self) -> None:
        for value in list(self.registry.values()):  # written after the last op that read it
            storage = value.pin()
            if storage is not None:
                self._check_untouched(storage)
        super().finish()

    def _result(self, op: TensorOp, tensor: Tensor) -> None:
        self._results(op, (tensor,))

    def _results(self, op: TensorOp, outs: Sequence[Tensor], made: bool = False) -> None:
        super()._results(op, outs, made)
        self._last_ops.append(op)

    def _run_again(
        self,
        op: TensorOp,
        facts: OpFacts,
        out: Any,
        storages: list[UntypedStorage],
        before: dict[int, UntypedStorage],
        states: dict[torch.device, Tensor],
    ) -> bool:
        """Whether every result came back bit for bit."""
        made: dict[int, tuple[TensorValue, UntypedStorage]] = {}
        for storage in (*_storages(out), *storages):
            value = self.registry.get(id(storage))
            if type(value) is TensorValue and value.producer is op:
                made[id(storage)] = (value, storage)
        if not made:
            return True
        env: dict[Value, Any] = {v: v for v in op.inputs if isinstance(v, Source) and v.is_blank}
        for storage in storages:
            for version in self._versions(op, storage):
                env[version] = before.get(id(storage), storage)
        wanted: list[Value] = [value for value, _ in made.values()]
        replayer = self.owner.replayer
        flops = replayer.flops
        # the lock: another thread's backward may be replaying
        with self.cache.lock, generators_restored(states), replayer.replaying(observed=False):
            for device, state in states.items():
                default_generator(device).set_state(state)  # type: ignore[union-attr]
            again = replayer.run(op, env, wanted, set())
        replayer.flops = flops
        self.ops += 1
        self.values += len(wanted)
        self.value_bytes += sum(value.nbytes for value in wanted)
        clean = True
        for (value, storage), rebuilt in zip(made.values(), again, strict=True):
            if value.index not in facts.unspecified and not same_bytes(storage, rebuilt):
                self._pin(value, storage, NOT_REPRODUCED)
                clean = False
        return clean

    def _versions(self, op: TensorOp, storage: UntypedStorage) -> list[Value]:
        """The inputs of ``op`` that lived in ``storage`` when it ran."""
        value = self.registry.get(id(storage))
        return [v for v in op.inputs if value is not None and getattr(v, "pin", None) is value.pin]

    # -- what no schema tells -----------------------------------------------------------------------------------

    def _learn_foreign(
        self,
        facts: OpFacts,
        args: Any,
        kwargs: Any,
        before: dict[int, UntypedStorage],
        states: dict[torch.device, Tensor],
        versions: list[int],
    ) -> bool:
        """What a foreign op does without declaring it; whether it does nothing of the kind."""
        clean = True
        declared = {id(storage) for storage in _storages([t for t, _ in facts.written_tensors(args, kwargs)])}
        for position, tensor in enumerate(all_tensors((args, kwargs))):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue
            if id(storage) in declared or same_bytes(storage, before[id(storage)]):
                continue
            clean = False
            facts.learn_write(position)
            self._find(facts.name, HIDDEN_WRITE, storage.nbytes())
            value = self.registry.get(id(storage))
            if type(value) is Source and value.is_leaf:
                value.keep(before[id(storage)], self.cache)
                self.registry[id(storage)] = Source(storage, value.pin, is_leaf=True)
                value.pin.version += 1
            else:
                self.storages.written_outside(tensor)
            count_writes([tensor], [versions[position]])
        for device, state in states.items():
            generator = default_generator(device)
            if generator is not None and not facts.is_random and not torch.equal(generator.get_state(), state):
                clean = False
                facts.is_random = True
                self._find(facts.name, HIDDEN_RANDOM, 0)
        return clean

    def _check_untouched(self, storage: UntypedStorage) -> None:
        value = self.registry.get(id(storage))
        known = self._checksums.get(id(storage))
        if value is None or known is None or known[0] is not value.pin or known[1] != value.pin.version:
            return
        if checksum(storage) == known[2]:
            return
        del self._checksums[id(storage)]
        if type(value) is TensorValue:
            self._pin(value, storage, WRITTEN_OUTSIDE)
        elif isinstance(value, Source) and value.is_leaf:
            for func, layer in self._readers.pop(value, ()):
                self.owner.pin_results(func, layer)
                self._find(str(func), READ_CHANGING, storage.nbytes())
            value.lose()
            self.registry[id(storage)] = Source(storage, value.pin, is_leaf=True)
            value.pin.version += 1

    def _note(self, storage: UntypedStorage) -> None:
        value = self.registry.get(id(storage))
        if value is None or (type(value) is Source and not value.is_leaf):
            return
        known = self._checksums.get(id(storage))
        if known is None or known[0] is not value.pin or known[1] != value.pin.version:
            self._checksums[id(storage)] = (value.pin, value.pin.version, checksum(storage))

    def _pin(self, value: TensorValue, storage: UntypedStorage, reason: str) -> None:
        producer = value.producer
        assert isinstance(producer, TensorOp)
        layer = self._find(producer.name(), reason, value.nbytes)
        self.owner.pin_results(producer.func, layer, is_unguarded=reason == WRITTEN_OUTSIDE)
        self.storages.storage_written_outside(storage)
        latest = self.registry[id(storage)]
        if isinstance(latest, Source) and reason == WRITTEN_OUTSIDE:
            latest.is_unguarded = True

    def _find(self, op: str, reason: str, nbytes: int) -> str:
        layer = layer_name(modules_in_flight())
        key = (op, layer, reason)
        found = self.findings.get(key)
        if found is None:
            self.findings[key] = Finding(op, layer, reason, nbytes)
        elif nbytes > found.nbytes:
            self.findings[key] = replace(found, nbytes=nbytes)
        return layer


def _has_bytes(tree: Any) -> bool:
    """Whether there is anything to compare: not with meta tensors."""
    return not any(tensor.is_meta for tensor in all_tensors(tree))


def _storages(tree: Any) -> list[UntypedStorage]:
    """The storages with bytes of the tensors in a tree, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in all_tensors(tree):
        if tensor.is_meta:
            continue
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            continue
        found[id(storage)] = storage
    return list(found.values())
