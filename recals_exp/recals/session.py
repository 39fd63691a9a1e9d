"""One call of one ``Recals``, and the storages it touched."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from .ambient import Ambient
from .tape import Pin, forget

if TYPE_CHECKING:
    from .recals import Recals

_SERIAL = itertools.count()


class Session:
    """One call. Lives as long as a handle of it; then the storages it touched are forgotten.

    Attributes:
        largest_bytes: the largest droppable storage saved; largest_layer: where, if it is above the limit.
    """

    __slots__ = ("ambient", "largest_bytes", "largest_layer", "owner", "pins", "serial")

    def __init__(self, owner: Recals) -> None:
        self.owner = owner
        self.serial = next(_SERIAL)
        with owner.cache.lock:
            owner.sessions.add(self.serial)
        self.ambient = Ambient()
        self.pins: list[Pin] = []
        self.largest_bytes = 0
        self.largest_layer = ""

    def touch(self, pin: Pin) -> None:
        pin.session = self.serial
        pin.users += 1
        self.pins.append(pin)

    def __del__(self) -> None:
        owner = self.owner
        with owner.cache.lock:
            owner.sessions.discard(self.serial)
            if not owner.sessions:  # as a rule: every storage that is known was this call's
                owner.registry.clear()
                return
        for pin in self.pins:
            pin.users -= 1
            if pin.users == 0:
                forget(pin)
