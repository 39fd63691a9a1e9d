"""From a batch to micro-batches and back: the rules for what is split, what is passed whole, and how results join.

Rules, in order:

1. ``x`` is the positional input: one value, or a tuple of them. Its tensors are split on dim 0.
2. A tensor in a keyword argument is split on dim 0 too, whatever its other sizes.
3. What is not a tensor (None, numbers, text, objects) and a tensor without dimensions is passed whole.
4. An argument named in ``unsplit`` is passed whole: a keyword by its name, a position of the tuple by its number.
5. All split tensors have the same number of rows, or the call is refused. Rules 2 and 4 never look at sizes to guess: a
   mask of T x T rows is refused for a batch of N != T rows, and the message names ``unsplit``; it does not start to
   work in another way on the day T equals N.
6. The rows must divide by the group size; with ``ragged=True`` the last micro-batch may be smaller.
7. Results join on dim 0, tensor by tensor through tuples, lists and dicts; tensors without dimensions are stacked;
   what is not a tensor must be the same for each micro-batch. Joining makes new tensors: nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one pass through the stages."""

    args: tuple[Any, ...]  # positional inputs of the pipeline
    kwargs: dict[str, Any]  # for every stage that takes them
    single: bool = True  # whether the caller passed one value rather than a tuple of them

    @property
    def value(self) -> Any:
        """The positional input as the caller passed it."""
        return self.args[0] if self.single else self.args


def plan_rows(rows: int, split_sizes: int | Sequence[int], ragged: bool) -> tuple[int, ...]:
    """How many rows each micro-batch gets (rule 6); a batch of no rows is one micro-batch of none."""
    if not isinstance(split_sizes, (int, float, str)):
        sizes = tuple(split_sizes)
        if not sizes or any(not _is_whole(size) or size < 1 for size in sizes) or sum(sizes) != rows:
            raise ValueError(
                f"split_sizes={list(sizes)} adds up to {sum(sizes)} rows, but the batch has {rows}: list whole numbers "
                "of at least 1 that add up to the batch"
            )
        return sizes
    if not isinstance(split_sizes, int) or isinstance(split_sizes, bool) or split_sizes < 1:
        raise ValueError(f"split_sizes={split_sizes!r} is not a number of rows: use a whole number of at least 1")
    if rows == 0:
        return (0,)
    if rows % split_sizes and not ragged:
        raise ValueError(
            f"a batch of {rows} rows does not divide into groups of split_sizes={split_sizes}: {rows % split_sizes} rows "
            f"are left over; choose a divisor of {rows}, drop the last rows, or pass ragged=True to allow a smaller last "
            "micro-batch"
        )
    full, rest = divmod(rows, split_sizes)
    return (split_sizes,) * full + ((rest,) if rest else ())


def size_for(rows: int, n_micro_batches: int, ragged: bool) -> int:
    """The group size that makes ``n_micro_batches`` of a batch."""
    if not _is_whole(n_micro_batches) or n_micro_batches < 1:
        raise ValueError(f"n_micro_batches={n_micro_batches!r} is not a count: use a whole number of at least 1")
    if rows % n_micro_batches and not ragged:
        raise ValueError(
            f"a batch of {rows} rows does not divide into n_micro_batches={n_micro_batches}: choose a divisor of {rows}, "
            "drop the last rows, or pass ragged=True to allow a smaller last micro-batch"
        )
    return max(1, -(-rows // n_micro_batches))


def count_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], unsplit: Collection[str | int]) -> int:
    """The rows of the batch; every split tensor must have as many (rules 1 to 5)."""
    unknown = [name for name in unsplit if name not in kwargs and name not in range(len(args))]
    if unknown:
        raise ValueError(
            f"unsplit names {unknown}, but the call has the keywords {sorted(kwargs)} and {len(args)} positional inputs"
        )
    found = [
        (where, tensor.shape[0])
        for where, value in _named(args, kwargs)
        if where not in unsplit
        for tensor in pytree.tree_leaves(value)
        if isinstance(tensor, Tensor) and tensor.ndim
    ]
    if not found:
        raise ValueError(
            "there is no tensor to split: pass the batch as a tensor (or a tuple of them) with dim 0 = rows"
        )
    first, rows = found[0]
    for where, count in found:
        if count != rows:
            raise ValueError(
                f"{_describe(where)} has {count} rows, but {_describe(first)} has {rows}: every tensor is split on dim 0. "
                f"If {_describe(where)} belongs to the whole batch, pass it whole with unsplit=({where!r},)"
            )
    return rows


def split_inputs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    unsplit: Collection[str | int] = (),
    single: bool = True,
) -> list[MicroBatch]:
    """The micro-batches, in order."""
    pieces = {
        where: [value] * len(sizes) if where in unsplit else _split_value(value, sizes)
        for where, value in _named(args, kwargs)
    }
    return [
        MicroBatch(
            tuple(pieces[position][index] for position in range(len(args))),
            {name: pieces[name][index] for name in kwargs},
            single,
        )
        for index in range(len(sizes))
    ]


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """The results of all micro-batches as one (rule 7)."""
    return _combine(outputs, _concatenate)


def sum_outputs(outputs: Sequence[Any]) -> Any:
    """The sum of all results, from the first to the last, as a plain loop adds them."""
    return _combine(outputs, _add_up)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int | str, Any]]:
    return [*enumerate(args), *kwargs.items()]


def _describe(where: int | str) -> str:
    return f"positional input {where}" if isinstance(where, int) else f"keyword {where!r}"


def _split_value(value: Any, sizes: Sequence[int]) -> list[Any]:
    leaves, spec = pytree.tree_flatten(value)
    columns = [
        _split_tensor(leaf, sizes) if isinstance(leaf, Tensor) and leaf.ndim else [leaf] * len(sizes) for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[index] for column in columns], spec) for index in range(len(sizes))]


def _split_tensor(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    if len(sizes) == 1:
        return [tensor]
    if tensor.requires_grad and tensor.is_leaf:
        # one node for all pieces: its backward is one concatenation. A leaf cannot be changed in place anyway
        return list(torch.split(tensor, list(sizes)))
    pieces, start = [], 0
    for size in sizes:
        # autograd refuses in-place work on the pieces of a split; on slices a first in-place layer works as it would alone
        pieces.append(tensor[start : start + size])
        start += size
    return pieces


def _combine(outputs: Sequence[Any], join: Any) -> Any:
    first_leaves, spec = pytree.tree_flatten(outputs[0])
    columns = [[leaf] for leaf in first_leaves]
    for index, output in enumerate(outputs[1:], start=1):
        leaves, other = pytree.tree_flatten(output)
        if other != spec:
            raise ValueError(
                f"the result of micro-batch {index} is built differently ({other}) from that of micro-batch 0 ({spec}): "
                "results can only be joined if they have the same structure"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return pytree.tree_unflatten([join(column) for column in columns], spec)


def _concatenate(column: list[Any]) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return _the_same(column)
    if column[0].ndim == 0:
        return torch.stack(column)
    return column[0] if len(column) == 1 else torch.cat(column)


def _add_up(column: list[Any]) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return _the_same(column)
    total = column[0]
    for leaf in column[1:]:
        total = total + leaf  # never in place: autograd may need the results themselves
    return total


def _the_same(column: list[Any]) -> Any:
    for index, leaf in enumerate(column):
        if leaf is not column[0] and (isinstance(leaf, Tensor) or isinstance(column[0], Tensor) or leaf != column[0]):
            raise ValueError(
                f"the results hold {column[0]!r} for micro-batch 0 and {leaf!r} for micro-batch {index}: a value that is "
                "not a tensor must be the same for all, or there is no one result"
            )
    return column[0]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
