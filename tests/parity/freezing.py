"""Freezing: what a program can see of a value, as plain data that later writes cannot change, and what differs.

Tensors become a ``FrozenTensor``: type, dtype, shape, stride, layout, device, autograd's marks, and the bytes of their
elements. Containers keep their types and keys. ``torch.allclose`` and ``==`` are no use here: they hide NaN, signed zeros,
dtypes and strides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Trace = dict[str, Any]
"""Name -> frozen value, in the order of noting."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
_MAX_DEPTH = 12
_LARGE = 1 << 18  # bytes of a tensor from which on only a digest is kept
_SHOWN = 12  # differences listed before "and so on"


@dataclass(frozen=True)
class FrozenTensor:
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # None where the layout has none
    layout: str
    device: str
    requires_grad: bool
    grad_fn: str | None
    is_leaf: bool
    is_view: bool
    version: int | None  # of the in-place guard; None where it says nothing (see ``freeze``)
    parts: tuple[tuple[str, Any], ...]  # the elements' bytes under "data", or the tensors inside another layout


@dataclass(frozen=True)
class Frozen:
    """A container or an object: its type and what is in it."""

    kind: str
    items: tuple[tuple[Any, Any], ...]


def freeze(value: Any, versions: bool = True, depth: int = 0) -> Any:
    """Plain, immutable data that is equal exactly if the values cannot be told apart.

    ``versions``: note the version counters too. They say whether a tensor that the program has held before was written. The
    counter of a new tensor says how often the kernel that made it wrote it, which no program can build on: under any
    dispatch mode, writes inside a kernel are not counted.
    """
    if isinstance(value, Tensor):
        return freeze_tensor(value, versions)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _ATOMS):
        return Frozen(kind, (("", repr(value)),))  # repr tells -0.0 from 0.0, and NaN is equal to NaN
    if depth == _MAX_DEPTH:
        return Frozen(kind, ())
    if isinstance(value, np.ndarray):
        return Frozen(kind, (("", (str(value.dtype), value.shape, value.tobytes())),))
    if isinstance(value, torch.Generator):
        return Frozen(kind, (("state", freeze_tensor(value.get_state())),))
    if isinstance(value, Mapping):
        return Frozen(kind, tuple((repr(key), freeze(part, versions, depth + 1)) for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return Frozen(kind, tuple((i, freeze(part, versions, depth + 1)) for i, part in enumerate(value)))
    if isinstance(value, (set, frozenset)):
        return Frozen(kind, tuple((repr(part), True) for part in sorted(value, key=repr)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
        return Frozen(kind, tuple((name, freeze(part, versions, depth + 1)) for name, part in fields))
    return Frozen(kind, ())


def freeze_tensor(tensor: Tensor, versions: bool = True) -> FrozenTensor:
    with torch.no_grad(), warnings.catch_warnings():
        if tensor.layout is not torch.strided:
            warnings.simplefilter("ignore")  # the beta notices of sparse layouts, for looking at them
        return FrozenTensor(
            kind=type(tensor).__name__,
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape) if not tensor.is_nested else (),
            stride=tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None,
            layout=str(tensor.layout),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            grad_fn=None if tensor.grad_fn is None else type(tensor.grad_fn).__name__,
            is_leaf=tensor.is_leaf,
            is_view=tensor._is_view(),
            version=tensor._version if versions and not tensor.is_inference() else None,
            parts=tuple(_parts(tensor)),
        )


def _parts(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    tensor = tensor.detach()
    if tensor.is_meta:
        return
    if tensor.is_nested:
        for i, part in enumerate(tensor.unbind()):
            yield f"part {i}", freeze_tensor(part, False)
    elif type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield name, freeze_tensor(getattr(tensor, name), False)
    elif tensor.is_quantized:
        yield "data", _bytes(tensor.int_repr())
        yield "quantizer", repr(tensor.qscheme())
    elif tensor.layout is torch.strided:
        yield "data", _bytes(tensor)
    elif tensor.layout is torch.sparse_coo:
        yield "coalesced", tensor.is_coalesced()
        yield "indices", freeze_tensor(tensor._indices(), False)
        yield "values", freeze_tensor(tensor._values(), False)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield "compressed", freeze_tensor(tensor.crow_indices() if by_row else tensor.ccol_indices(), False)
        yield "plain", freeze_tensor(tensor.col_indices() if by_row else tensor.row_indices(), False)
        yield "values", freeze_tensor(tensor.values(), False)
    else:  # oneDNN's own
        yield "data", _bytes(tensor.to_dense())


def _bytes(tensor: Tensor) -> bytes | str:
    """The elements' bytes; of a large tensor, their digest."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    raw = flat.view(torch.uint8).numpy()
    return raw.tobytes() if raw.nbytes <= _LARGE else f"digest {hashlib.sha1(raw).hexdigest()}"


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value, through the containers that ``freeze`` knows, in order."""
    if isinstance(value, Tensor):
        yield value
    elif depth == _MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, depth + 1)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name, None), depth + 1)


def without_nodes(frozen: Any) -> Any:
    """The same with every ``grad_fn`` type rubbed out, but for whether there is one."""
    if isinstance(frozen, dict):
        return {name: without_nodes(part) for name, part in frozen.items()}
    if isinstance(frozen, Frozen):
        return Frozen(frozen.kind, tuple((key, without_nodes(part)) for key, part in frozen.items))
    if isinstance(frozen, FrozenTensor):
        return dataclasses.replace(frozen, grad_fn=frozen.grad_fn and "some")
    return frozen


# -- what differs ------------------------------------------------------------------------------------------------------


def differences(expected: Trace, found: Trace) -> list[str]:
    """One line per noted thing that differs; the first names come first. Exception texts are for people only."""
    lines = []
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name == "exception text":
            continue
        if name not in found or name not in expected:
            side = "plain" if name in expected else "wrapped"
            lines.append(f"{name}: seen in the {side} run only")
        elif expected[name] != found[name]:
            lines.append(f"{name}: {_first_difference(expected[name], found[name])}")
    if lines:
        texts = [(side, trace.get("exception text")) for side, trace in (("plain", expected), ("wrapped", found))]
        lines[:0] = [f"the {side} run raised: {text[:1000]}" for side, text in texts if text is not None]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"... and {len(lines) - _SHOWN} more differences"]
    return lines


def _first_difference(expected: Any, found: Any, path: str = "") -> str:
    at = f"at {path}: " if path else ""
    if type(expected) is not type(found):
        return f"{at}plain {_brief(expected)}, wrapped {_brief(found)}"
    if isinstance(expected, FrozenTensor):
        for f in dataclasses.fields(FrozenTensor):
            one, other = getattr(expected, f.name), getattr(found, f.name)
            if one != other:
                return at + (
                    _content(expected, found) if f.name == "parts" else f"{f.name}: plain {one}, wrapped {other}"
                )
    if isinstance(expected, Frozen):
        if expected.kind != found.kind:
            return f"{at}plain {_brief(expected)}, wrapped {_brief(found)}"
        keys, others = [key for key, _ in expected.items], [key for key, _ in found.items]
        if len(keys) != len(others) and expected.kind in ("builtins.list", "builtins.tuple"):
            return f"{at}plain has {len(keys)} items, wrapped has {len(others)}"
        if keys != others:
            return f"{at}plain has {keys}, wrapped has {others}"
        for (key, one), (_, other) in zip(expected.items, found.items, strict=True):
            if one != other:
                return _first_difference(one, other, f"{path}[{key}]" if key != "" else path)
    return f"{at}plain {_brief(expected)}, wrapped {_brief(found)}"


def _content(expected: FrozenTensor, found: FrozenTensor) -> str:
    one, other = dict(expected.parts).get("data"), dict(found.parts).get("data")
    if not isinstance(one, bytes) or not isinstance(other, bytes) or len(one) != len(other):
        return f"content: plain {_brief(expected.parts)}, wrapped {_brief(found.parts)}"
    dtype = getattr(torch, expected.dtype.removeprefix("torch."))
    a, b = (torch.frombuffer(bytearray(data), dtype=dtype).reshape(expected.shape) for data in (one, other))
    raw = torch.frombuffer(bytearray(one), dtype=torch.uint8) != torch.frombuffer(bytearray(other), dtype=torch.uint8)
    wrong = raw.reshape(-1, dtype.itemsize).any(dim=1)
    i = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements of a {expected.dtype} {list(expected.shape)} differ; "
        f"the first: plain {a.flatten()[i].item()!r}, wrapped {b.flatten()[i].item()!r}"
    )


def _brief(value: Any) -> str:
    if isinstance(value, Frozen):
        if len(value.items) == 1 and value.items[0][0] == "":
            return str(value.items[0][1])[:200]
        return f"a {value.kind}"
    if isinstance(value, FrozenTensor):
        return f"a {value.dtype} tensor {list(value.shape)}"
    if isinstance(value, str):  # a frozen atom: its repr
        return value[:200]
    return repr(value)[:200]
