"""Dataclasses to plain data and back: tuples, mappings, optionals and the JSON scalars, nothing more."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def plain(value: Any) -> Any:
    """What `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def leaves(value: Any, where: str) -> list[tuple[str, Any]]:
    """Every scalar in `value`, with its path below `where`."""
    value = plain(value)
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{where}.{key}" if where else key)]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, f"{where}[{index}]")]
    return [(where, value)]


def build(kind: type[_T], data: Any, where: str) -> _T:
    """The dataclass `kind` from plain data. ValueError says which fields are unknown, missing or of a wrong type."""
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the record'} must be an object with the fields of {kind.__name__}, got {data!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    missing = sorted(set(fields) - set(data))
    faults = [f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}"] if unknown else []
    faults += [f"missing field{'s' if len(missing) > 1 else ''} {', '.join(missing)}"] if missing else []
    if faults:
        raise ValueError(
            f"{where or kind.__name__}: {'; '.join(faults)}; this version has exactly: {', '.join(fields)}"
        )
    hints = typing.get_type_hints(kind)
    return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}" if where else name) for name in fields})


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        return _decode(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_decode(typing.get_args(hint)[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, got {value!r}")
        return {key: _decode(typing.get_args(hint)[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, where)
    # bool is an int to Python and 3 is a fine float to JSON, but not the other way round
    fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value, fits = float(value), True
    if not fits:
        raise ValueError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value
