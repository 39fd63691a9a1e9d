"""What every policy must decide. Each method is abstract here and final where it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, ClassVar

from ..graph import Value

if TYPE_CHECKING:
    from ..cache import Cache


class Policy(ABC):
    """Decides; the cache does. One instance serves one cache. Called with the cache's lock held."""

    name: ClassVar[str]

    @abstractmethod
    def anew(self) -> Policy:
        """A policy with the same settings that has seen nothing yet."""

    @abstractmethod
    def keeps(self, cache: Cache, value: Value) -> bool:
        """A value was saved in forward: try to hold it?"""

    @abstractmethod
    def victim(self, cache: Cache, incoming: Value) -> Value | None:
        """A held value to drop so that ``incoming`` fits; None: rather do not hold ``incoming``."""

    @abstractmethod
    def targets(self, cache: Cache, missed: Value) -> Iterable[Value]:
        """Autograd asks for ``missed``, which was dropped: the values to rebuild in one replay."""

    @abstractmethod
    def keeps_rebuilt(self, cache: Cache, value: Value, is_target: bool) -> bool:
        """A replay has just made ``value``: try to hold it?"""


class WatchingPolicy(Policy):
    """A policy that wants to know what becomes of saved values, which costs a call each."""

    @abstractmethod
    def used(self, cache: Cache, value: Value) -> None:
        """Autograd read a value that was held."""

    @abstractmethod
    def dropped(self, cache: Cache, value: Value) -> None:
        """A saved value lost its bytes, or was not held from the start."""

    @abstractmethod
    def freed(self, cache: Cache, value: Value) -> None:
        """The last handle of ``value`` died."""


class StepPolicy(WatchingPolicy):
    """A policy that wants to know where a step begins and ends.

    A step runs from a call made while nothing is cached to the death of the last handle.
    """

    @abstractmethod
    def began(self, cache: Cache, key: Hashable, first_seq: int) -> None:
        """A step begins with a call of the kind ``key``; its first op will have the number ``first_seq``."""

    @abstractmethod
    def returned(self, values: Iterable[Value]) -> None:
        """A call has returned; ``values`` belong to its outputs, which the caller holds."""

    @abstractmethod
    def ended(self, cache: Cache) -> None:
        """The last handle has died."""
