"""Recording a call: a dispatch mode that writes the tape, and the pack hook that hands autograd its handles.

The mode sits *below* autograd: autocast casts, views, in-place ops and random ops all arrive as explicit aten ops. What it
does per op is on the critical path of every small op, so: facts come from a dict, argument lists are walked without a
general tree flatten, ops without peculiarities take a short path, nothing is timed, nothing is copied unless rule 4
demands it. ``benchmarks/record_overhead.py`` measures it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._C import _DisableTorchDispatch
from torch._ops import OpOverload
from torch.nn import Parameter

from .ambient import Ambient, RecorderMode, flushes_denormals, kernel_choices, lazy_bits_resolved, share_version
from .contents import copy_of
from .facts import OpFacts, all_tensors, learn
from .graph import Value
from .handles import Handle, LeafHandle
from .layers import describe_layer, layer_name, modules_in_flight
from .replay import flat_tensors
from .tape import Constant, PeculiarOp, Pin, Ref, Registry, Slot, Source, TensorOp, TensorValue, forget, refs_of

if TYPE_CHECKING:
    from .recals import Recals

_SERIAL = itertools.count()
_UNPLACED = -1  # an op gets its place on the tape when it has made something
_NO_KWARGS: dict[str, Any] = {}
# Bare getters: they run once per op.
_is_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype
_num_threads = torch.get_num_threads
_kernel_choices = kernel_choices()
_NORMAL, _HALF = sys.float_info.min, 0.5  # ``flushes_denormals`` in line
NO_STORAGE = (NotImplementedError, RuntimeError)  # what ``untyped_storage`` raises on sparse and other layouts


class Session:
    """One call. Lives as long as a handle of it; then the storages it touched are forgotten.

    Attributes:
        largest_bytes: the largest droppable storage saved; largest_layer: where, if it is above the limit.
    """

    __slots__ = ("ambient", "largest_bytes", "largest_layer", "pins", "serial")

    def __init__(self) -> None:
        self.serial = next(_SERIAL)
        self.ambient = Ambient()
        self.pins: list[Pin] = []
        self.largest_bytes = 0
        self.largest_layer = ""

    def touch(self, pin: Pin) -> None:
        pin.session = self.serial
        pin.users += 1
        self.pins.append(pin)

    def __del__(self) -> None:
        for pin in self.pins:
            pin.users -= 1
            if pin.users == 0:
                forget(pin)


class _Write(NamedTuple):
    """A storage an op is about to write."""

    old: TensorValue | Source
    storage: UntypedStorage
    whole: bool  # every byte, and nothing depends on the old content
    is_leaf: bool

    @property
    def is_made(self) -> bool:
        """Whether an op that can be replayed makes the new content: a leaf's bytes stay the program's."""
        return not self.is_leaf and (type(self.old) is TensorValue or self.whole)


class Recorder(RecorderMode):
    """Records one call of one ``Recals``."""

    supports_higher_order_operators = True

    def __init__(self, owner: Recals, session: Session) -> None:
        super().__init__()
        self.owner = owner
        self.session = session
        self.cache = owner.cache
        self.registry: Registry = owner.registry
        self.facts = owner.facts
        self._note_settings()
        self._has_zeros = False  # forward-mode AD makes tensors of zeros without memory
        self._is_complex = False  # the op that is being recorded has a complex argument
        self._blanks: list[tuple[Source, UntypedStorage, Tensor]] = []  # read by the op that is being recorded
        self._saved_blanks: list[tuple[Slot, UntypedStorage]] = []  # saved since the last op

    # -- ops ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self.facts.get(func)
        if facts is None:
            if not isinstance(func, OpOverload):  # a higher-order operator: its inside is not seen
                return self._opaque(func(*args, **(kwargs or {})))
            facts = self.facts_of(func)
        if facts.is_view:
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        for kind in types:
            if kind is not Tensor and kind is not Parameter:
                return NotImplemented  # a subclass with its own dispatch: it comes back with the tensors inside
        if (
            _default_dtype() is not self._dtype
            or _num_threads() != self._threads
            or (_NORMAL * _HALF == 0.0) is not self._flushes
            or (facts.picks_kernels and _kernel_choices() != self._choices)
        ):  # in the middle of the call
            self._note_settings()
            self.session.ambient = Ambient()
        inputs: dict[Value, None] = {}
        recorded: list[Any] = []
        registry, serial = self.registry, self.session.serial
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:  # ``_argument`` in line, for the commonest cases
                try:
                    value = registry[id(arg.untyped_storage())]
                    known = value.pin.session == serial and arg._version == value.count
                    if known and isinstance(value, Source):  # a weight that was read before in this call
                        known = value.guard is arg and not value.others
                        value.reads += known
                    if known:
                        ref = Ref(value, arg)
                        inputs[value] = None
                        if ref.is_complex:
                            self._is_complex = True
                        recorded.append(ref)
                        continue
                except (KeyError, *NO_STORAGE):
                    pass
            recorded.append(self._argument(arg, inputs))
        recorded_kwargs = {name: self._argument(arg, inputs) for name, arg in kwargs.items()} if kwargs else _NO_KWARGS
        if not facts.is_simple or self._blanks or self._is_complex:
            return self._peculiar(func, facts, args, kwargs or {}, inputs, recorded, recorded_kwargs)
        out = func._op(*args, **kwargs) if kwargs else func._op(*args)
        op = TensorOp(
            _UNPLACED, tuple(inputs), func, facts, recorded, recorded_kwargs, self.session.ambient, _is_grad_enabled()
        )
        self._results(op, (out,) if type(out) is Tensor else flat_tensors(out))
        return out

    def _note_settings(self) -> None:
        self._dtype, self._threads = _default_dtype(), _num_threads()
        self._flushes = flushes_denormals()
        self._choices = _kernel_choices()

    def facts_of(self, func: OpOverload) -> OpFacts:
        facts = self.facts.get(func)
        if facts is None:
            facts = self.facts[func] = learn(func)
        return facts

    def _argument(self, arg: Any, inputs: dict[Value, None]) -> Any:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            try:
                storage = arg.untyped_storage()
            except NO_STORAGE:
                return Constant(share_version(arg))
            if arg.is_nested or arg.is_quantized or (self._has_zeros and arg._is_zerotensor()):
                return Constant(share_version(arg))
            value = self.registry.get(id(storage))
            if value is None:
                value = self._new_source(storage, is_leaf=True)
            else:
                if type(value) is TensorValue:
                    value = self._as_it_is(value, arg, storage)
                if value.pin.session != self.session.serial:
                    self.session.touch(value.pin)
            if type(value) is Source:
                if (value.guard is not None or value.is_unguarded) and value.is_stale:
                    value = self._renewed(value, storage)
                if value.guard is None:
                    self._first_read(value, arg, storage)
                elif value.reader is None or value.reader() is not arg:
                    value.watch_also(arg)
                value.reads += 1
            inputs[value] = None
            ref = Ref(value, arg)
            if ref.is_complex:
                self._is_complex = True
            return ref
        if kind is list or kind is tuple:
            for part in arg:
                if isinstance(part, Tensor):
                    return [self._argument(part, inputs) for part in arg]
            return arg
        if isinstance(arg, Tensor):
            return self._argument(arg.as_subclass(Tensor), inputs)
        return arg

    def _as_it_is(self, value: TensorValue, tensor: Tensor, storage: UntypedStorage) -> TensorValue | Source:
        """What the storage of ``value`` holds: something else, if it was written where no recorder saw it."""
        count = version_of(tensor)
        if value.count is None or count is None:
            value.count = count
            return value
        if count == value.count or value.pin.is_split:
            return value
        if value.pin.session in self.owner.running:
            self.storage_written_outside(storage)
        else:  # an output of an earlier call, edited since: an input of this one, like any other
            self._renewed(value, storage)
        return self.registry[id(storage)]

    def _renewed(self, old: TensorValue | Source, storage: UntypedStorage) -> Source:
        """The program wrote here: another version, for those who read from now on."""
        old.pin.version += 1
        new = Source(storage, old.pin, old.is_leaf if isinstance(old, Source) else True)
        new.is_unguarded = isinstance(old, Source) and old.is_unguarded
        self.registry[id(storage)] = new
        return new

    def _first_read(self, value: Source, tensor: Tensor, storage: UntypedStorage) -> None:
        if value.is_leaf:
            value.watch(tensor)
        elif value.is_blank:
            self._blanks.append((value, storage, tensor))

    def _results(self, op: TensorOp, outs: Sequence[Tensor], made: bool = False) -> None:
        """Register what ``op`` made; an op that made nothing has no place on the tape."""
        registry, session = self.registry, self.session
        for index, tensor in enumerate(outs):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue  # sparse and the like: recorded as a constant where it is used
            key = id(storage)
            if tensor.is_nested:
                continue
            if key in registry:  # a view of an argument, or the written argument itself
                if not op.facts.writes:
                    registry[key].pin.is_split = True
                continue
            if tensor.is_quantized or (self._has_zeros and tensor._is_zerotensor()):
                continue  # constants, too
            pin = Pin(storage, forget)
            pin.key = key
            pin.registry = registry
            pin.is_split = False
            pin.version = 0
            pin.users = 1
            pin.session = session.serial
            session.pins.append(pin)
            try:  # ``version_of`` in line
                count = tensor._version
            except RuntimeError:
                count = None
            registry[key] = TensorValue(op, index, storage.nbytes(), pin, 0, count)
            op.outs.append((tensor.shape, tensor.dtype))
            made = True
        if made:
            if op.seq == _UNPLACED:
                op.seq = next(self.owner.sequence)
            if self.cache.trace is not None:
                self.cache.trace.append(("op", op, layer_name(modules_in_flight())))
        if self._saved_blanks:
            self.settle()

    def _peculiar(
        self,
        func: Any,
        facts: OpFacts,
        args: Any,
        kwargs: Any,
        inputs: dict[Value, None],
        recorded: list[Any],
        recorded_kwargs: dict[str, Any],
    ) -> Any:
        """An op that writes, draws, allocates, or reads memory nobody filled."""
        replayable = facts.is_replayable and (not facts.is_foreign or facts.reproduces)
        unguarded = False
        if facts.pinned_layers:
            layer = layer_name(modules_in_flight())
            replayable = replayable and layer not in facts.pinned_layers
            unguarded = layer in facts.unguarded_layers
        rng = None
        if facts.is_random:
            rng = self.owner.generators.before_op(args, kwargs)
            replayable = replayable and rng is not None
        writes: Sequence[_Write] = ()
        written: list[Value] = []
        if facts.may_write:
            writes = self._before_writes(facts, args, kwargs, refs_of((recorded, recorded_kwargs)))
            for write in writes:
                old: Value = write.old
                if write.whole:
                    old = _without_content(write.old, write.storage, inputs, recorded, recorded_kwargs)
                written.append(old)
        if self._blanks:
            self._keep_blanks(facts, writes, written, replayable)
        is_complex, self._is_complex = self._is_complex or facts.makes_complex, False

        uncounted = facts.uncounted_writes(args, kwargs) if facts.writes_uncounted or facts.learned_writes else ()
        versions = [tensor._version for tensor in uncounted]
        try:
            with lazy_bits_resolved() if is_complex else nullcontext():
                out = func(*args, **kwargs)
        except BaseException:
            for position, write in enumerate(writes):  # it may have written a part
                self._after_write(write, position, None)
            raise

        if facts.is_zeros:
            self._has_zeros = True
            return out
        if facts.is_allocation:
            return self._opaque(out)
        if versions:
            count_writes(uncounted, versions)
        if any(type(write.old) is Source and write.old.is_unguarded for write in writes):
            replayable = False  # what it wrote over may have been written by others, too
        if any(write.storage.nbytes() != write.old.nbytes for write in writes):
            replayable = False  # an out= argument was resized: its storage is another one now
        if facts.is_foreign and not facts.was_watched:
            for tensor in all_tensors((args, kwargs)):  # any of them may have been written
                self.written_outside(tensor)
        if not replayable:
            self._opaque(out, unguarded)
            for position, write in enumerate(writes):
                self._after_write(write, position, None)
            self.settle()
            return out
        op = PeculiarOp(
            _UNPLACED,
            tuple(inputs),
            func,
            facts,
            recorded,
            dict(recorded_kwargs),
            self.session.ambient,
            _is_grad_enabled(),
        )
        op.rng, op.written, op.is_complex = rng, tuple(written), is_complex
        outs = flat_tensors(out)
        if facts.is_factory and not inputs and outs:
            _write_down_defaults(op, outs[0])
        if any(write.is_made for write in writes):
            op.seq = next(self.owner.sequence)
        made = [self._after_write(write, position, op) for position, write in enumerate(writes)]
        self._results(op, outs, any(made))
        return out

    def written_outside(self, tensor: Tensor) -> None:
        """What the storage of ``tensor`` holds now can no longer be made by replaying ops."""
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            return
        self.storage_written_outside(storage)

    def storage_written_outside(self, storage: UntypedStorage) -> None:
        value = self.registry.get(id(storage))
        if type(value) is TensorValue:
            self._after_write(_Write(value, storage, False, False), 0, None)

    def _new_source(self, storage: UntypedStorage, is_leaf: bool) -> Source:
        """A storage that no recorded op made."""
        pin = Pin(storage, forget)
        pin.key = id(storage)
        pin.registry = self.registry
        pin.is_split = False
        pin.version = pin.users = 0
        self.session.touch(pin)
        source = self.registry[pin.key] = Source(storage, pin, is_leaf)
        return source

    def _opaque(self, out: Any, is_unguarded: bool = False) -> Any:
        """Results that no replay can make: blank until something reads them."""
        for tensor in flat_tensors(out):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue
            if id(storage) not in self.registry:
                self._new_source(storage, is_leaf=False).is_unguarded = is_unguarded
        return out

    # -- writes -------------------------------------------------------------------------------------------------

    def _before_writes(self, facts: OpFacts, args: Any, kwargs: Any, refs: list[Ref]) -> list[_Write]:
        """What an op is about to write; content that earlier ops read is saved first (rule 4)."""
        found: dict[int, _Write] = {}
        for tensor, reads in facts.written_tensors(args, kwargs):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue
            whole = not reads and tensor.numel() * tensor.itemsize == storage.nbytes()
            old = self.registry[id(storage)]
            found[id(storage)] = _Write(old, storage, whole, type(old) is Source and old.is_leaf)
        writes = list(found.values())
        # Does anything depend on what this op reads before it writes?
        matters = facts.has_fresh_results or any(write.old.producer is not None for write in writes)
        for write in writes:
            old = write.old
            if type(old) is not Source or old.is_blank:
                continue
            was_read = old.reads > sum(ref.value is old for ref in refs)
            if was_read or (matters and not write.whole):
                old.keep(copy_of(write.storage), self.cache)
        return writes

    def _keep_blanks(self, facts: OpFacts, writes: Sequence[_Write], written: list[Value], replayable: bool) -> None:
        """The op is about to read memory that nothing can fill again: hold it, unless the op fills all of it itself."""
        position = {write.old: i for i, write in enumerate(writes)}
        for value, storage, tensor in self._blanks:
            i = position.get(value)
            if i is None:
                if replayable:
                    value.keep(storage, self.cache, tensor)
            elif written[i] is value and (facts.has_fresh_results or writes[i].whole):
                value.keep(copy_of(storage), self.cache)  # what it reads, it is about to overwrite
        self._blanks.clear()

    def _after_write(self, write: _Write, position: int, op: TensorOp | None) -> bool:
        """Make the new version of a written storage; whether ``op`` is its producer."""
        old, storage = write.old, write.storage
        pin = old.pin
        pin.version += 1
        must_keep = False
        new: TensorValue | Source
        if op is not None and write.is_made:
            new = TensorValue(op, -position - 1, storage.nbytes(), pin, pin.version)
            if type(old) is TensorValue:
                new.guard, new.guard_version = old.guard, old.guard_version
        else:
            # A leaf stays a leaf: its bytes are the program's. Anything else can no longer be made again.
            new = Source(storage, pin, write.is_leaf)
            new.is_unguarded = type(old) is Source and old.is_unguarded
            must_keep = old.handles > 0 and not write.is_leaf
            new.pinned = must_keep
        new.slot = old.slot
        slot = None if old.slot is None else old.slot()
        if slot is not None:
            slot.latest = new
        self.registry[id(storage)] = new
        self.cache.replace(old, new, storage)
        if type(old) is TensorValue:
            old.guard = None  # an alias too: the handles are the new version's, and it must not outlive them
        if must_keep and isinstance(new, Source):
            new.keep(storage, self.cache)
        return new.producer is not None

    def finish(self) -> None:
        """The call has returned."""
        self.settle()

    def settle(self) -> None:
        """Hold what autograd saved while it was blank, unless an op is its producer by now."""
        for slot, storage in self._saved_blanks:
            if type(slot.latest) is Source and slot.latest.is_blank:
                slot.latest.keep(storage, self.cache)
        self._saved_blanks.clear()

    # -- saved tensors ------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Handle | LeafHandle:
        """Autograd saves ``tensor``: what it gets instead."""
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            return LeafHandle(tensor.detach())
        value = self.registry.get(id(storage))
        if type(value) is TensorValue and tensor._version != value.count:
            value = self._as_it_is(value, tensor, storage)  # autograd saves an argument before its op runs
        if value is None or tensor.is_nested or value.nbytes == 0 or (type(value) is Source and value.is_leaf):
            # What autograd did not make is held as it is, like plain PyTorch does: it may be a Parameter, and its
            # ``.data`` may yet be exchanged.
            return LeafHandle(tensor if tensor.grad_fn is None else tensor.detach())
        slot = None if value.slot is None else value.slot()
        if slot is None:
            slot = Slot(value)
            value.slot = weakref.ref(slot)
        else:
            handle = slot.handle_of(tensor)
            if handle is not None:  # saved once by its producer and once by its consumer: one handle serves both
                return handle
        guard = _DisableTorchDispatch()
        try:
            alias = tensor.detach()
        finally:
            del guard
        handle = Handle(alias, slot, self.cache, self.session)
        slot.packed = weakref.ref(tensor)
        if type(value) is TensorValue:
            value.guard = alias
            value.guard_version = handle.version
            if value.nbytes > self.session.largest_bytes:
                self._largest(value.nbytes)
        elif isinstance(value, Source) and value.is_blank and not value.pinned:
            # The op that is saving it may be about to fill it (rule 3): decided when that op has returned.
            value.pinned = True
            self._saved_blanks.append((slot, storage))
        self.cache.save(value, storage)
        return handle

    def _largest(self, nbytes: int) -> None:
        session = self.session
        session.largest_bytes = nbytes
        limit = self.cache.limit_bytes
        if limit is not None and nbytes > limit:
            session.largest_layer = describe_layer(modules_in_flight())


def version_of(tensor: Tensor) -> int | None:
    """The count of the tensor's version counter; None for a tensor of inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def count_writes(tensors: Sequence[Tensor], versions: list[int]) -> None:
    """Move the version counters that plain PyTorch moves, but an op below a dispatch mode does not."""
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)


def _without_content(
    old: TensorValue | Source, storage: UntypedStorage, inputs: dict[Value, None], *recorded: Any
) -> Value:
    """The op overwrites ``old`` without reading it: its record refers to fresh memory of that size instead.

    Unless it reads the same storage by another argument.
    """
    refs = [ref for ref in refs_of(recorded) if ref.value is old]
    if len(refs) != 1:
        return old
    blank = Source(storage, old.pin, is_leaf=False)
    refs[0].value = blank
    del inputs[old]
    inputs[blank] = None
    return blank


def _write_down_defaults(op: TensorOp, out: Tensor) -> None:
    """A factory called without dtype or device means the defaults of that moment."""
    if op.kwargs.get("device") is None:
        op.kwargs["device"] = out.device
    if op.facts.takes_dtype and op.kwargs.get("dtype") is None:
        op.kwargs["dtype"] = out.dtype
