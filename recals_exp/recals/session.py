"""One call of one ``Recals``, and the storages it touched."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import UntypedStorage

from .ambient import Ambient
from .tape import Pin, forget

if TYPE_CHECKING:
    from .recals import Recals

_SERIAL = itertools.count()
_ALL = -1


class Reach:
    """The storages that a call touched. It lives as long as the call's session, and as one that followed it; then they are forgotten."""

    __slots__ = ("earlier", "owner", "pins")

    def __init__(self, owner: Recals) -> None:
        self.owner = owner
        self.pins: list[Pin] = []
        # Of calls that made what this one read and had returned, and of those that wrote values of this one.
        self.earlier: list[Reach] = []

    def __del__(self) -> None:
        owner = self.owner
        with owner.cache.lock:
            if not owner.sessions:  # as a rule: every storage that is known was this call's
                owner.registry.clear()
                return
        for pin in self.pins:
            pin.users -= 1
            if pin.users == 0:
                forget(pin)


class Session:
    """One call. Lives as long as a handle of it.

    Attributes:
        followed: by serial, the calls whose values this one read, and how many of their pins it knows.
        largest_bytes: the largest droppable storage saved; largest_layer: where, if it is above the limit.
    """

    __slots__ = ("ambient", "followed", "largest_bytes", "largest_layer", "owner", "pins", "reach", "serial")

    def __init__(self, owner: Recals) -> None:
        self.owner = owner
        self.serial = next(_SERIAL)
        self.reach = Reach(owner)
        self.pins = self.reach.pins
        with owner.cache.lock:
            owner.sessions[self.serial] = self.reach
        self.ambient = Ambient()
        self.followed: dict[int, int] = {}
        self.largest_bytes = 0
        self.largest_layer = ""

    def pin(self, storage: UntypedStorage, key: int) -> Pin:
        """Know a storage that no call knows yet; ``key`` is its ``id``."""
        pin = Pin(storage, forget)
        pin.key = key
        pin.registry = self.owner.registry
        pin.is_split = False
        pin.version = 0
        pin.users = 1
        pin.session = self.serial
        self.pins.append(pin)
        return pin

    def touch(self, pin: Pin) -> None:
        """Know a storage that another call knows."""
        pin.session = self.serial
        pin.users += 1
        self.pins.append(pin)

    def follow(self, serial: int) -> bool:
        """Know what another call made its values from, as that call does; False: nobody does any more."""
        known = self.followed.get(serial, 0)
        if known == _ALL:
            return True
        with self.owner.cache.lock:
            reach = self.owner.sessions.get(serial)
            if reach is None:
                return False
            if serial in self.owner.running:  # it may come to follow this one, and no two hold each other
                pins, earlier = reach.pins[known:], reach.earlier
                self.pins.extend(pins)
                for pin in pins:
                    pin.users += 1
                self.followed[serial] = known + len(pins)
            else:
                earlier = [reach]
                self.followed[serial] = _ALL
            self.reach.earlier.extend(each for each in earlier if each not in self.reach.earlier)
        return True

    def write_to(self, pin: Pin) -> None:
        """This call makes a new value of a storage of another one, which goes on knowing it if it is still running."""
        with self.owner.cache.lock:
            reach = self.owner.sessions.get(pin.session) if pin.session in self.owner.running else None
            if reach is None:
                pin.session = self.serial
            elif self.reach not in reach.earlier:
                reach.earlier.append(self.reach)

    def __del__(self) -> None:
        owner = self.owner
        with owner.cache.lock:
            owner.sessions.pop(self.serial, None)
            if owner.sessions:  # one of them may have followed: of what is dead, nobody has to know
                self.reach.pins = [pin for pin in self.pins if pin() is not None]
