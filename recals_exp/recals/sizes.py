"""Byte sizes as people write them: ``"512MiB"``, ``"4 GiB"``, ``1024``. Binary and decimal units are kept apart."""

from __future__ import annotations

import re

from .errors import SizeError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_ALLOWED = (
    "bytes as an integer, or a number with one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024)"
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)?\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as ``4 * 1024**3``, ``"512MiB"`` or ``"1.5 GB"``.

    Raises:
        SizeError: no number, an unknown unit, a negative size or a fraction of a byte; says what is allowed.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise SizeError(f"a size is {_ALLOWED}; got {size!r} of type {type(size).__name__}")
    if isinstance(size, int):
        if size < 0:
            raise SizeError(f"a size cannot be negative: got {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise SizeError(f"cannot read the size {size!r}; give {_ALLOWED}")
    number, unit = match.groups()
    if unit is None:
        if not number.isdigit():
            raise SizeError(f"the size {size!r} has a fraction but no unit; give {_ALLOWED}")
        return int(number)
    if unit.upper() not in _UNITS:
        raise SizeError(f"unknown unit {unit!r} in the size {size!r}; give {_ALLOWED}")
    return round(float(number) * _UNITS[unit.upper()])


def format_bytes(nbytes: int | float) -> str:
    """``1536`` -> ``"1.5 KiB"``: binary units, one decimal; plain bytes below 1 KiB."""
    value, sign = abs(float(nbytes)), "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"
