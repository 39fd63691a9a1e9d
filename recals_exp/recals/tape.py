"""The tape with tensors: storages, their versions, and who watches them.

Legend::

    value  one version of a storage: producer op, bytes if held, guard      (graph.Value; the registry has the latest)
    Pin    weak reference to the storage + the number of its current version
    Ref    value + dtype, size, stride, offset                               (ops.Ref: an argument of a recorded op)

A view is geometry, not a value (rule 2). A recorded write hands a storage's handles over to its new value, an op goes on referring to
the old one: autograd reads what the storage holds when backward comes, unless its version counter moved (then it raises);
an op must be replayed on what it read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, UntypedStorage

from .ambient import share_version
from .contents import checksum
from .errors import SourceChangedError
from .graph import Op, Value

if TYPE_CHECKING:
    from .cache import Cache
    from .handles import Handle

Registry = dict[int, "TensorValue | Source"]
"""``id`` of a live storage's Python object -> its latest value."""


class Pin(weakref.ref):
    """Weak reference to a storage's Python object, which lives exactly as long as the storage.

    Attributes:
        key: ``id`` of the storage object.
        version: number of the storage's current version; bumped by every recorded write.
        users: live sessions that touched the storage; session: the one that made its value, of a leaf the last to touch it.
        is_split: tensors over the storage have several version counters (``unsafe_split`` and its kin give each part its own).
    """

    __slots__ = ("is_split", "key", "registry", "session", "users", "version")

    is_split: bool
    key: int
    version: int
    users: int
    session: int
    registry: Registry


def forget(pin: Pin) -> None:
    """The storage died, or nobody is interested any more: take it from the registry."""
    value = pin.registry.get(pin.key)
    if value is not None and value.pin is pin:
        del pin.registry[pin.key]


class SavedValue(Value):
    """A value that autograd may have saved.

    Attributes:
        asking: the handles that refer to it.
        packed: the tensor of the last of them.
    """

    __slots__ = ("asking", "packed")

    asking: list[weakref.ref[Handle]] | None
    packed: weakref.ref[Tensor] | None

    def saved(self, tensor: Tensor, handle: Handle) -> None:
        """``handle`` was made for ``tensor``, and refers to this value."""
        reference = weakref.ref(handle)
        if self.asking is None or not self.handles:
            self.asking = [reference]
        else:
            self.asking.append(reference)
        self.packed = weakref.ref(tensor)

    def handle_of(self, tensor: Tensor) -> Handle | None:
        """The last handle, if it is of this very tensor, unchanged since."""
        if self.asking is not None and self.packed is not None and self.packed() is tensor:
            handle = self.asking[-1]()
            if handle is not None and handle.version == tensor._version:
                return handle
        return None

    def strip(self) -> None:
        for reference in self.asking or ():
            handle = reference()
            if handle is not None:
                handle.strip()

    def hand_over(self, new: Value) -> None:
        for reference in self.asking or ():
            handle = reference()
            if handle is not None:
                handle.value = new  # type: ignore[assignment]  # of the same storage
                new.handles += 1
                self.handles -= 1
        new.asking, self.asking = self.asking, None  # type: ignore[attr-defined]


class TensorValue(SavedValue):
    """One version of a storage, made by a recorded op.

    ``guard`` is a tensor that shares the version counter of the tensors over this storage, with the count at which its
    bytes were this version's. Bytes in reach whose counter has moved are somebody else's by now. ``count`` is the count of
    the tensors when the op had returned (None: of inference mode, which has none). A reader that finds another count knows
    of a write that was not recorded.
    """

    __slots__ = ("count", "guard", "guard_version", "pin", "version")

    def __init__(self, producer: Op, index: int, nbytes: int, pin: Pin, version: int, count: int | None = None) -> None:
        self.count = count
        self.producer = producer
        self.index = index
        self.nbytes = nbytes
        self.payload = None
        self.handles = 0
        self.pinned = False
        self.note = None
        self.pin = pin
        self.version = version
        self.guard: Tensor | None = None
        self.asking = self.packed = None
        self.guard_version = 0

    def bytes(self) -> Any:
        guard = self.guard
        if guard is None:
            return self.payload
        if guard._version != self.guard_version:
            return None
        if self.payload is not None:
            return self.payload
        # Dropped, but the storage lives on elsewhere (a model's output, say): its bytes are there for free.
        pin = self.pin
        return pin() if pin.version == self.version else None

    def rebuilt(self, payload: Any) -> None:
        old = self.pin
        if not self.handles or old() is not None:
            return
        pin = Pin(payload, forget)
        pin.key, pin.registry = id(payload), old.registry
        pin.version, pin.users, pin.session = self.version, old.users, old.session
        pin.is_split = old.is_split
        self.pin = pin


class Source(SavedValue):
    """A value no recorded op made. Three kinds, which may follow one another:

    - a *leaf* (parameter, buffer, input, constant): the program's own bytes; held, not counted.
    - a *blank*: memory no recorded op has filled, from an allocation or from an op that cannot be replayed. Nothing is
      held. If an op overwrites all of it, a replay starts from fresh memory just as well; if anything reads it first,
      it becomes kept (rule 8).
    - *kept* bytes: held for the tape alone and counted in ``cache``: opaque memory, or the old content of a leaf that
      the program has overwritten since (rule 4). Never dropped; they go when nothing refers to them.

    Attributes:
        guard: shares the version counter of a leaf; if it has moved, the old bytes are lost and reading is refused.
        others: further guards and their counts: ``.data`` has a version counter of its own.
        reader: the tensor that was read last, unless it is ``guard`` itself.
        reads: how often recorded ops read this version; if they did, a write must copy it first.
        cache: where kept bytes are counted; None for a leaf or a blank.
        is_unguarded: somebody writes here whom no counter gives away (NumPy; inference mode); then ``checksum`` does, of the
            bytes as they were read first.
    """

    __slots__ = (
        "cache",
        "checksum",
        "device",
        "guard",
        "guard_version",
        "is_unguarded",
        "others",
        "pin",
        "reader",
        "reads",
    )

    def __init__(self, storage: UntypedStorage, pin: Pin | None, is_leaf: bool) -> None:
        # ``Value.__init__`` in line: a batch norm makes several.
        self.producer = None
        self.index = self.handles = 0
        self.nbytes = storage.nbytes()
        self.payload = storage if is_leaf else None
        self.pinned = False
        self.note = None
        if pin is not None:
            self.pin = pin  # a blank that stands for memory of the replay's own has none
        self.asking = self.packed = None
        self.device = storage.device
        self.guard: Tensor | None = None
        self.guard_version = 0
        self.others: Sequence[tuple[Tensor, int]] = ()
        self.reader: weakref.ref[Tensor] | None = None
        self.reads = 0
        self.cache: Cache | None = None
        self.is_unguarded = False
        self.checksum: int | None = None

    @property
    def is_leaf(self) -> bool:
        return self.cache is None and self.payload is not None

    @property
    def is_blank(self) -> bool:
        return self.payload is None

    @property
    def is_unread(self) -> bool:
        """Whether nothing on the tape and no handle refers to a leaf's present bytes."""
        return self.guard is None and self.asking is None and self.cache is None and not self.is_unguarded

    def keep(self, storage: UntypedStorage, cache: Cache, guard: Tensor | None = None) -> None:
        """Hold ``storage`` as the bytes of this version, and count them; ``guard``: the program's tensor, unless it is a copy."""
        self.payload = storage
        self.checksum = checksum(storage) if self.is_unguarded else None
        if guard is None:
            self.guard = None
            self.others = ()
        else:
            self.watch(guard)
        if self.cache is None:
            self.cache = cache
            self.pinned = True
            cache.pin(self.nbytes)

    def watch(self, tensor: Tensor) -> None:
        """Remember the version counter of the program's tensor over a leaf's bytes."""
        if self.is_unguarded or tensor.is_inference():
            self.is_unguarded = True
            if self.checksum is None:
                self.checksum = checksum(self.payload)
            return
        if tensor.requires_grad and tensor.grad_fn is None:
            self.guard, self.reader = tensor, None  # others might come to hold this very graph
        else:
            self.guard, self.reader = share_version(tensor), weakref.ref(tensor)
        self.guard_version = tensor._version

    def watch_also(self, tensor: Tensor) -> None:
        """A tensor of the program over a leaf's bytes: its version counter may be another one than those known."""
        if tensor is self.guard or (self.reader is not None and self.reader() is tensor):
            return
        base = tensor._base if tensor._is_view() else None
        if base is not None and (base is self.guard or (self.reader is not None and base is self.reader())):
            return
        self.reader = weakref.ref(tensor if base is None else base)
        self.others = (*self.others, (share_version(tensor), tensor._version))

    @property
    def count(self) -> int | None:
        """Of the tensor that was read first."""
        return None if self.guard is None else self.guard_version

    @property
    def is_stale(self) -> bool:
        """Whether the program has written here since."""
        if self.checksum is not None and self.payload is not None:
            return checksum(self.payload) != self.checksum
        guard = self.guard
        if guard is not None and guard._version != self.guard_version:
            return True
        return bool(self.others) and any(other._version != count for other, count in self.others)

    def lose(self) -> None:
        """The bytes were overwritten, and nobody kept a copy: refuse to read them."""
        self.guard_version = -1

    def bytes(self) -> Any:
        if self.is_stale:
            self._refuse()
        return self if self.payload is None else self.payload  # a blank: the replay of its writer allocates it

    def _refuse(self) -> NoReturn:
        if self.checksum is not None:
            raise SourceChangedError(
                f"{self.nbytes} bytes that the forward pass read were written since, where no version counter tells (by NumPy or "
                "other code outside of PyTorch, or in inference mode). A value dropped from the cache is rebuilt from them, "
                "and their old content is gone. Run backward first, or work on a copy, or raise the cache limit so that "
                "nothing is dropped.",
                what=f"{self.nbytes} bytes",
            )
        watched = self.others if self.guard is None else [(self.guard, self.guard_version), *self.others]
        guard, expected = next((guard, count) for guard, count in watched if guard._version != count)
        what = f"[{guard.type()} {list(guard.shape)}]"
        counts = (
            f"it is at version {guard._version}; expected version {expected}"
            if expected >= 0
            else "by a fused optimizer, or outside of PyTorch, which moves no version counter"
        )
        raise SourceChangedError(
            f"a tensor {what} that the forward pass read was modified by an in-place operation before backward: {counts}. A "
            "value dropped from the cache is rebuilt from it, and its old content is gone. Run backward first, or modify a "
            "copy of it, or raise the cache limit so that nothing is dropped.",
            what=what,
        )

    def __del__(self) -> None:
        if self.cache is not None:
            self.cache.unpin(self.nbytes)
