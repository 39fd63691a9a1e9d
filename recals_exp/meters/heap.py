"""What malloc does with memory that a step gives back (glibc; elsewhere nothing here does anything).

Left to itself it returns large blocks to the system, and the next step pays for them again, page by page: seen for a small
gpt, 17,000 page faults, 6 % of a plain step, and half as many with a quarter of the cache. Times would then compare two
habits of malloc, and a limit would seem to cost less than what it re-runs. An accelerator's allocator keeps what was freed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_NO_BLOCKS, _DEFAULT_BLOCKS = 0, 65536
# What malloc comes to by itself once it has freed a block of its largest threshold; to set one ends its adapting.
_SETTLED_MMAP_BYTES = 32 << 20
_SETTLED_TRIM_BYTES = 2 * _SETTLED_MMAP_BYTES

_depth = 0


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, memory that was freed stays with the process; at the end it goes back to the system. May be nested.

    From then on malloc's thresholds are what they would settle at by themselves, whatever they were set to before.
    """
    global _depth
    _depth += 1
    try:
        if _depth == 1:
            _set((_TRIM_THRESHOLD, _NEVER), (_MMAP_MAX, _NO_BLOCKS))
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _set(
                (_TRIM_THRESHOLD, _SETTLED_TRIM_BYTES),
                (_MMAP_THRESHOLD, _SETTLED_MMAP_BYTES),
                (_MMAP_MAX, _DEFAULT_BLOCKS),
            )
            return_free_memory()


def return_free_memory() -> None:
    """Give malloc's free pages back to the system."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _set(*options: tuple[int, int]) -> None:
    mallopt = _function("mallopt")
    if mallopt is not None:
        for option, value in options:
            mallopt(option, value)


def _function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
