"""What each storage holds in the course of a call: new sources, writes, and the versions they make (rules 3, 4 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage

from .contents import copy_of
from .facts import OpFacts
from .graph import Value
from .ops import Ref, TensorOp, refs_of
from .replay import flat_tensors
from .session import Session
from .tape import Source, TensorValue

if TYPE_CHECKING:
    from .recals import Recals

NO_STORAGE = (NotImplementedError, RuntimeError)  # what ``untyped_storage`` raises on sparse and other layouts


class Write:
    """A storage an op is about to write.

    Attributes:
        whole: every byte, and nothing depends on the old content.
        count: of the tensor's version counter when autograd has counted the write, too.
        is_leaf: the bytes are the program's, and stay it.
        is_made: an op that can be replayed makes the new content.
    """

    __slots__ = ("count", "is_leaf", "is_made", "old", "storage", "tensor", "whole")

    def __init__(
        self,
        old: TensorValue | Source,
        storage: UntypedStorage,
        whole: bool,
        tensor: Tensor | None = None,
        count: int | None = None,
    ) -> None:
        self.old = old
        self.storage = storage
        self.whole = whole
        self.tensor = tensor
        self.count = count
        self.is_leaf = isinstance(old, Source) and old.is_leaf
        self.is_made = not self.is_leaf and (whole or type(old) is TensorValue)

    @property
    def is_resized(self) -> bool:
        """Whether the op has resized its ``out=`` argument: the storage is another one now, or was not written whole."""
        nbytes = self.old.nbytes
        if self.storage.nbytes() != nbytes:
            return True
        return self.whole and self.tensor is not None and self.tensor.numel() * self.tensor.itemsize != nbytes


class Storages:
    """The registry of one ``Recals``, as one call changes it."""

    def __init__(self, owner: Recals, session: Session) -> None:
        self.owner = owner
        self.session = session
        self.cache = owner.cache
        self.registry = owner.registry

    def as_it_is(self, value: TensorValue, tensor: Tensor, storage: UntypedStorage) -> TensorValue | Source:
        """What the storage of ``value`` holds: something else, if it was written where no recorder saw it.

        Or if the call that made it is over: nobody has watched since what it was made from.
        """
        count, pin = version_of(tensor), value.pin
        is_here = pin.session in self.owner.running
        if pin.is_split:
            known = is_here
        elif value.count is None or count is None:
            value.count = count
            known = True
        else:
            if value.index < 0 and count == value.count - 1:
                value.count = count  # written below autograd, where nobody counts
            known = count == value.count
        if known and (pin.session == self.session.serial or self.session.follow(pin.session)):
            return value
        if is_here:
            self.storage_written_outside(storage)
        else:  # an output of an earlier call, edited since: an input of this one, like any other
            self.renewed(value, storage)
        return self.registry[id(storage)]

    def renewed(self, old: TensorValue | Source, storage: UntypedStorage) -> Source:
        """The program wrote here: another version, for those who read from now on."""
        old.pin.version += 1
        new = Source(storage, old.pin, old.is_leaf if isinstance(old, Source) else True)
        new.is_unguarded = isinstance(old, Source) and old.is_unguarded
        self.registry[id(storage)] = new
        return new

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
            self.after_write(Write(value, storage, False), 0, None)

    def new_source(self, storage: UntypedStorage, is_leaf: bool) -> Source:
        """A storage that no recorded op made."""
        key = id(storage)
        source = self.registry[key] = Source(storage, self.session.pin(storage, key), is_leaf)
        return source

    def opaque(self, out: Any, is_unguarded: bool = False) -> Any:
        """Results that no replay can make: blank until something reads them."""
        for tensor in flat_tensors(out):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue
            if id(storage) not in self.registry:
                self.new_source(storage, is_leaf=False).is_unguarded = is_unguarded
        return out

    def before_writes(
        self,
        facts: OpFacts,
        args: Any,
        kwargs: Any,
        recorded: list[Any],
        recorded_kwargs: dict[str, Any],
        unknown: dict[int, Source],
    ) -> Sequence[Write]:
        """What an op is about to write; content that earlier ops read is saved first (rule 4).

        ``unknown``: by ``id``, written storages that no op has read.
        """
        found: dict[int, Write] = {}
        for tensor, reads in facts.written_tensors(args, kwargs):
            try:
                storage = tensor.untyped_storage()
            except NO_STORAGE:
                continue
            key = id(storage)
            if unknown and key in unknown:
                continue
            old = self.registry.get(key)
            if old is None:
                continue  # quantized or nested: a constant
            count = version_of(tensor)
            if count is not None and facts.counts_writes:
                count += 1
            write = found[key] = Write(old, storage, not reads and fills(tensor, storage), tensor, count)
            if facts.hidden_writes is not None and not write.is_leaf:
                write.whole = False  # running statistics come from what they were, and may have to be made again
        writes = list(found.values())
        # Does anything depend on what this op reads before it writes?
        matters = facts.has_fresh_results
        for write in writes:
            matters = matters or write.old.producer is not None
        for write in writes:
            old = write.old
            if not isinstance(old, Source) or old.is_blank:
                continue
            if matters and not write.whole:
                old.keep(copy_of(write.storage), self.cache)
            elif old.reads > 1 or old.guard is not None:  # else nothing has read it but, perhaps, this op
                own_reads = sum(ref.value is old for ref in refs_of(recorded, recorded_kwargs))
                if old.reads > own_reads or (matters and own_reads > 1):
                    old.keep(copy_of(write.storage), self.cache)
        return writes

    def after_write(self, write: Write, position: int, op: TensorOp | None) -> None:
        """Make the new version of a written storage, unless nothing knows of the old one; ``op`` is its producer."""
        old, storage = write.old, write.storage
        pin = old.pin
        pin.version += 1
        if isinstance(old, Source) and write.is_leaf and old.is_unread:
            old.reads = 0  # running statistics: only the op that writes them read them
            return
        must_keep = False
        new: TensorValue | Source
        if op is not None and write.is_made:
            new = TensorValue(op, -position - 1, storage.nbytes(), pin, pin.version, write.count)
            if pin.session != self.session.serial:
                self.session.write_to(pin)
            if type(old) is TensorValue:
                new.guard, new.guard_version = old.guard, old.guard_version
        else:
            # A leaf stays a leaf: its bytes are the program's. Anything else can no longer be made again.
            new = Source(storage, pin, write.is_leaf)
            new.is_unguarded = type(old) is Source and old.is_unguarded
            must_keep = old.handles > 0 and not write.is_leaf
            new.pinned = must_keep
        self.registry[id(storage)] = new
        self.cache.replace(old, new, storage)
        if type(old) is TensorValue:
            old.guard = None  # an alias too: the handles are the new version's, and it must not outlive them
        if must_keep and isinstance(new, Source):
            new.keep(storage, self.cache)


def fills(tensor: Tensor, storage: UntypedStorage) -> bool:
    """Whether the elements of ``tensor`` are all bytes of ``storage``."""
    if tensor.numel() * tensor.itemsize != storage.nbytes():
        return False
    if not tensor.is_contiguous():  # elements may overlap
        step = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size != 1:
                if stride != step:
                    return False
                step *= size
    return True


def version_of(tensor: Tensor) -> int | None:
    """The count of the tensor's version counter; None for a tensor of inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def without_content(write: Write, inputs: dict[Value, None], refs: Sequence[Ref]) -> Value:
    """The op overwrites a value without reading it: its record refers to fresh memory of that size instead.

    Unless it reads the same storage by another argument.
    """
    old, found = write.old, None
    for ref in refs:
        if ref.value is old:
            if found is not None:
                return old
            found = ref
    if found is None:
        return old
    blank = Source(write.storage, old.pin, is_leaf=False)
    found.value = blank
    del inputs[old]
    inputs[blank] = None
    return blank
