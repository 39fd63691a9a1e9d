"""Recording a call: a dispatch mode that writes the tape.

The mode sits *below* autograd: autocast casts, views, in-place ops and random ops all arrive as explicit aten ops. What it
does per op is on the critical path of every small op, so: facts come from a dict, argument lists are walked without a
general tree flatten, ops without peculiarities take a short path, nothing is timed, nothing is copied unless rule 4
demands it. ``benchmarks/record_overhead.py`` measures it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.nn import Parameter

from .ambient import (
    Ambient,
    RecorderMode,
    flushes_denormals,
    kernel_choices,
    lazy_bits_resolved,
    share_version,
    would_be_seen,
)
from .contents import copy_of
from .facts import OpFacts, all_tensors, learn
from .graph import Value
from .layers import layer_name, modules_in_flight
from .ops import Constant, PeculiarOp, Ref, TensorOp, refs_of
from .replay import flat_tensors
from .saving import Saver
from .session import Session
from .storages import NO_STORAGE, Storages, Write, fills, version_of, without_content
from .tape import Registry, Source, TensorValue

if TYPE_CHECKING:
    from .recals import Recals

_UNPLACED = -1  # an op gets its place on the tape when it has made something
_NO_KWARGS: dict[str, Any] = {}
_NUMBERS = frozenset({int, float, bool})
_NO_TENSORS = _NUMBERS | {type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
# Bare getters: they run once per op.
_is_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype
_num_threads = torch.get_num_threads
_kernel_choices = kernel_choices()
_NORMAL, _HALF = sys.float_info.min, 0.5  # ``flushes_denormals`` in line


class Recorder(RecorderMode):
    """Records one call of one ``Recals``."""

    supports_higher_order_operators = True

    def __init__(self, owner: Recals, session: Session) -> None:
        super().__init__()
        self.owner = owner
        self.session = session
        self.cache = owner.cache
        self.registry: Registry = owner.registry
        self.storages = Storages(owner, session)
        self.facts = owner.facts
        self._sequence = owner.sequence
        self._note_settings()
        self._has_constant = False  # the op that is being recorded has an argument that is kept whole
        self._has_zeros = False  # forward-mode AD makes tensors of zeros without memory
        self._is_complex = False  # the op that is being recorded has a complex argument
        self._blanks: list[tuple[Source, UntypedStorage, Tensor]] = []  # read by the op that is being recorded
        self._overwritten: dict[int, Source] = {}  # id of a storage that it writes -> the memory a replay has instead
        self._unwatched: list[tuple[Source, Tensor]] = []  # leaves that it is the first to read
        self.saver = Saver(owner, session, self.storages)

    # -- ops ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self.facts.get(func)
        if facts is None:
            if not isinstance(func, OpOverload):  # a higher-order operator: its inside is not seen
                return self.storages.opaque(func(*args, **(kwargs or {})))
            facts = self.facts_of(func)
        if (
            would_be_seen(args)
            or (kwargs and would_be_seen(tuple(kwargs.values())))
            or (facts.takes_lists and would_be_seen(all_tensors(args)))
        ):
            with DisableTorchFunction():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if not facts.is_simple:
            if facts.is_view:
                return func._op(*args, **kwargs) if kwargs else facts.run(*args)
            if facts.is_allocation:  # reads no bytes
                return self.storages.opaque(func._op(*args, **kwargs) if kwargs else func._op(*args))
            if facts.is_only_write and not kwargs and len(args) == 2 and self._is_count(*args):
                return facts.run(*args)
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
        if facts.hidden_writes is not None:
            self._find_overwritten(facts.hidden_writes(args, kwargs or _NO_KWARGS), args)
        inputs: dict[Value, None] = {}
        recorded: list[Any] = []
        registry, serial = self.registry, self.session.serial
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:  # ``_argument`` in line, for the commonest cases
                try:
                    value = registry[id(arg.untyped_storage())]
                    known = value.pin.session == serial and arg._version == value.count
                    if known and type(value) is Source:  # a weight that was read before in this call
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
            elif kind in _NO_TENSORS:
                recorded.append(arg)
                continue
            recorded.append(self._argument(arg, inputs))
        recorded_kwargs = {name: self._argument(arg, inputs) for name, arg in kwargs.items()} if kwargs else _NO_KWARGS
        if not facts.is_simple or self._blanks or self._is_complex:
            return self._peculiar(func, facts, args, kwargs or {}, inputs, recorded, recorded_kwargs)
        if self._unwatched:
            self._watch()
        out = func._op(*args, **kwargs) if kwargs else facts.run(*args)
        op = TensorOp(
            _UNPLACED, tuple(inputs), func, facts, recorded, recorded_kwargs, self.session.ambient, _is_grad_enabled()
        )
        if type(out) is Tensor and not (self._has_constant or self._has_zeros or facts.makes_constants):
            self._result(op, out)
        else:
            self._results(op, flat_tensors(out))
        return out

    def _is_count(self, target: Any, operand: Any) -> bool:
        """Whether nothing is known of ``target`` (a batch norm's count of batches): nothing has to be noted then."""
        if type(target) is not Tensor or type(operand) not in _NUMBERS or target.is_complex() or target.is_neg():
            return False
        try:
            return id(target.untyped_storage()) not in self.registry
        except NO_STORAGE:
            return False

    def _find_overwritten(self, tensors: Sequence[Any], args: Sequence[Any]) -> None:
        """Running statistics of which nothing is known: nothing has to be noted of what they were."""
        self._overwritten.clear()
        try:
            keys = [id(arg.untyped_storage()) for arg in args if isinstance(arg, Tensor)]
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key = id(storage)
                whole = fills(tensor, storage)
                if whole and key not in self.registry and keys.count(key) == 1:
                    self._overwritten[key] = Source(storage, None, is_leaf=False)
        except NO_STORAGE:
            return

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
                self._has_constant = True
                return Constant(share_version(arg))
            if self._overwritten and (blank := self._overwritten.get(id(storage))) is not None:
                inputs[blank] = None
                return Ref(blank, arg)
            if arg.is_nested or arg.is_quantized or (self._has_zeros and arg._is_zerotensor()):
                self._has_constant = True
                return Constant(share_version(arg))
            value = self.registry.get(id(storage))
            if value is None:
                value = self.storages.new_source(storage, is_leaf=True)
                if arg.requires_grad:
                    value.watch(arg)
            else:
                if type(value) is TensorValue:
                    value = self.storages.as_it_is(value, arg, storage)
            if type(value) is Source:
                if value.pin.session != self.session.serial:
                    self.session.touch(value.pin)
                if (value.guard is not None or value.is_unguarded) and value.is_stale:
                    value = self.storages.renewed(value, storage)
                if value.guard is None:
                    if value.payload is None:
                        self._blanks.append((value, storage, arg))
                    elif value.cache is None:
                        if arg.is_inference():
                            value.watch(arg)
                        else:
                            self._unwatched.append((value, arg))
                elif value.guard is not arg:
                    value.watch_also(arg)
                value.reads += 1
            inputs[value] = None
            ref = Ref(value, arg)
            if ref.is_complex:
                self._is_complex = True
            return ref
        if kind is list or kind is tuple:
            if arg and type(arg[0]) in _NUMBERS:  # lists are of one kind
                return arg
            for part in arg:
                if isinstance(part, Tensor):
                    return [self._argument(part, inputs) for part in arg]
            return arg
        if isinstance(arg, Tensor):
            return self._argument(arg.as_subclass(Tensor), inputs)
        return arg

    def _watch(self, writes: Sequence[Write] = ()) -> None:
        """Remember the version counters of the leaves that the op reads first; what it writes, it needs no word for."""
        written = [write.old for write in writes]
        for value, tensor in self._unwatched:
            if value in written:
                continue
            if value.guard is None:
                value.watch(tensor)
            else:
                value.watch_also(tensor)
        self._unwatched.clear()

    def _result(self, op: TensorOp, tensor: Tensor) -> None:
        """``_results`` for the commonest case: one new dense tensor."""
        registry, session = self.registry, self.session
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            return
        key = id(storage)
        if key in registry:
            self._results(op, (tensor,))
            return
        try:  # ``version_of`` in line
            count = tensor._version
        except RuntimeError:
            count = None
        op.outs = ((tensor.shape, tensor.dtype),)
        op.seq = next(self._sequence)
        registry[key] = TensorValue(op, 0, storage.nbytes(), session.pin(storage, key), 0, count)
        if self.cache.trace is not None:
            self.cache.trace.append(("op", op, layer_name(modules_in_flight())))
        if self.saver.blanks:
            self.saver.settle()

    def _results(self, op: TensorOp, outs: Sequence[Tensor], made: bool = False) -> None:
        """Register what ``op`` made; an op that made nothing has no place on the tape."""
        registry, session = self.registry, self.session
        is_odd = self._has_constant or self._has_zeros or op.facts.makes_constants
        self._has_constant = False
        for index, tensor in enumerate(outs):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue  # sparse and the like: recorded as a constant where it is used
            key = id(storage)
            if is_odd and tensor.is_nested:
                continue
            if key in registry:  # a view of an argument, or the written argument itself
                if not op.facts.writes:
                    value = registry[key]
                    if len(outs) == 1 and type(value) is TensorValue:
                        value.count = version_of(tensor)  # ``_unsafe_view``: nobody has the argument any more
                    else:
                        value.pin.is_split = True
                continue
            if is_odd and (tensor.is_quantized or (self._has_zeros and tensor._is_zerotensor())):
                continue  # constants, too
            try:  # ``version_of`` in line
                count = tensor._version
            except RuntimeError:
                count = None
            registry[key] = TensorValue(op, index, storage.nbytes(), session.pin(storage, key), 0, count)
            op.outs = (*op.outs, (tensor.shape, tensor.dtype))
            made = True
        if made:
            if op.seq == _UNPLACED:
                op.seq = next(self._sequence)
            if self.cache.trace is not None:
                self.cache.trace.append(("op", op, layer_name(modules_in_flight())))
        if self.saver.blanks:
            self.saver.settle()

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
        writes: Sequence[Write] = ()
        written: list[Value] = []
        if facts.may_write:
            writes = self.storages.before_writes(facts, args, kwargs, recorded, recorded_kwargs, self._overwritten)
            refs = refs_of(recorded, recorded_kwargs) if any(write.whole for write in writes) else ()
            for write in writes:
                written.append(without_content(write, inputs, refs) if write.whole else write.old)
            if self._overwritten:
                written.extend(self._overwritten.values())
                self._overwritten.clear()
        if self._unwatched:
            self._watch(writes)
        if self._blanks:
            self._keep_blanks(facts, writes, written, replayable)
        is_complex, self._is_complex = self._is_complex or facts.makes_complex, False

        uncounted = facts.uncounted_writes(args, kwargs) if facts.writes_uncounted or facts.learned_writes else ()
        versions = [tensor._version for tensor in uncounted]
        try:
            if is_complex:
                with lazy_bits_resolved():
                    out = func._op(*args, **kwargs)
            else:
                out = func._op(*args, **kwargs) if kwargs else facts.run(*args)
        except BaseException:
            for position, write in enumerate(writes):  # it may have written a part
                self.storages.after_write(write, position, None)
            raise

        if facts.is_zeros:
            self._has_zeros = True
            return out
        if versions:
            count_writes(uncounted, versions)
        is_made = False
        for write in writes:
            old = write.old
            if type(old) is Source and old.is_unguarded:
                replayable = False  # what it wrote over may have been written by others, too
            if write.is_resized:
                replayable = False
            is_made = is_made or write.is_made
        if facts.is_foreign and not facts.was_watched:
            for tensor in all_tensors((args, kwargs)):  # any of them may have been written
                self.storages.written_outside(tensor)
        if not replayable:
            self.storages.opaque(out, unguarded)
        # Nor is anything left to replay where all that was made are leaves' new bytes, which are the program's own.
        if not replayable or (writes and not is_made and not facts.has_fresh_results and not facts.is_foreign):
            for position, write in enumerate(writes):
                self.storages.after_write(write, position, None)
            self.saver.settle()
            return out
        op = PeculiarOp(
            _UNPLACED,
            tuple(inputs),
            func,
            facts,
            recorded,
            recorded_kwargs,
            self.session.ambient,
            _is_grad_enabled(),
        )
        op.rng, op.written, op.is_complex = rng, tuple(written), is_complex
        outs = flat_tensors(out)
        if facts.is_factory and not inputs and outs:
            _write_down_defaults(op, outs[0])
        if is_made:
            op.seq = next(self._sequence)
        for position, write in enumerate(writes):
            self.storages.after_write(write, position, op)
        self._results(op, outs, is_made)
        return out

    def finish(self) -> None:
        """The call has returned."""
        self.saver.settle()

    def _keep_blanks(self, facts: OpFacts, writes: Sequence[Write], written: list[Value], replayable: bool) -> None:
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


def count_writes(tensors: Sequence[Tensor], versions: list[int]) -> None:
    """Move the version counters that plain PyTorch moves, but an op below a dispatch mode does not."""
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)


def _write_down_defaults(op: TensorOp, out: Tensor) -> None:
    """A factory called without dtype or device means the defaults of that moment."""
    op.kwargs = dict(op.kwargs)
    if op.kwargs.get("device") is None:
        op.kwargs["device"] = out.device
    if op.facts.takes_dtype and op.kwargs.get("dtype") is None:
        op.kwargs["dtype"] = out.dtype
