"""Errors the engine raises, with their numbers as attributes.

Every message says what happened, gives both values and names the way out. User mistakes are also ``ValueError``;
what plain PyTorch would raise (an in-place change of a saved tensor) is raised with PyTorch's own type and wording.
"""

from __future__ import annotations


class RecalsError(RuntimeError):
    """Base of everything the engine raises on its own account."""


class CacheLimitError(RecalsError, ValueError):
    """The cache limit cannot hold what must be held at once.

    Attributes:
        limit_bytes: the limit in force.
        needed_bytes: bytes of the value that did not fit, or of everything pinned.
        smallest_bytes: the smallest limit with which the same call works.
        layer: name of the layer that made the value ("" when unknown).
    """

    def __init__(self, message: str, *, limit_bytes: int, needed_bytes: int, smallest_bytes: int, layer: str) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.needed_bytes = needed_bytes
        self.smallest_bytes = smallest_bytes
        self.layer = layer


class SourceChangedError(RecalsError):
    """A tensor that a replay must read was changed after the forward pass, so the dropped value is lost.

    Raised instead of returning gradients that would be silently wrong. Attribute ``what`` names the tensor.
    """

    def __init__(self, message: str, *, what: str) -> None:
        super().__init__(message)
        self.what = what


class ReplayError(RecalsError):
    """A replayed op did not give what it gave in forward (another size or structure). Attribute ``op`` names it."""

    def __init__(self, message: str, *, op: str) -> None:
        super().__init__(message)
        self.op = op


class UnsupportedError(RecalsError, TypeError):
    """A construct that cannot be held exactly, refused at the door. The message has the workaround."""


class SizeError(ValueError):
    """A size that cannot be read, or is out of range."""


class RecalsWarning(UserWarning):
    """Something works but loses a benefit (said once per process and cause)."""
