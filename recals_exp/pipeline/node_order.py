"""The order in which autograd sums gradients, kept when the graph was built on several threads.

Among the nodes that are ready autograd runs the one with the highest *sequence number* first, so the numbers decide in which
order the gradients of one tensor are added, and with that their last bits. Numbers are given at creation, and each thread
counts for itself: threads that build the stages of a pipeline give numbers that say nothing about each other.

The plain loop makes the nodes of (micro-batch 0, stage 0), then those of (micro-batch 0, stage 1), and so on. After a
threaded call this module gives every node the number it would have had there::

    new = caller's counter + nodes of all cells before this one in the plain loop + (old - thread's counter at cell's start)

and moves the caller's counter behind the last of them, so that what the caller does next comes later, as it should.

A node belongs to a cell if it is reached from the stage's results or module attributes without passing the stage's inputs,
and its old number lies in the interval of the cell. What can be missed: a tensor with a history of its own that enters a
stage through a closure, whose nodes may be taken for the stage's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recals_exp.pipeline.stage import Stage


@dataclass(slots=True)
class _Span:
    """The sequence numbers of one cell on its thread."""

    start: int
    end: int = 0


class NodeOrder:
    """Collects what the threads of one call build; `restore` renumbers it. Threads write only to their own stage."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._spans: list[list[_Span]] = [[] for _ in stages]
        self._roots: list[set[Any]] = [set() for _ in stages]
        self._outside: list[set[Any]] = [set(_histories(_attributes(stage))) for stage in stages]

    def begin(self, stage: Stage, *inputs: Any) -> None:
        """Called by the stage's thread before each cell, with the cell's inputs."""
        self._outside[stage.index].update(_histories(pytree.tree_leaves(inputs)))
        self._spans[stage.index].append(_Span(torch._C._autograd._get_sequence_nr()))

    def end(self, stage: Stage, result: Any) -> None:
        """Called by the stage's thread after each cell."""
        self._spans[stage.index][-1].end = torch._C._autograd._get_sequence_nr()
        self._roots[stage.index].update(_histories(pytree.tree_leaves(result)))

    def restore(self) -> None:
        """Renumber; called by the caller's thread when all cells are done."""
        counter = torch._C._autograd._get_sequence_nr()
        firsts: list[list[int]] = [[] for _ in self._stages]
        following = counter
        for cell in zip(*self._spans, strict=True):  # micro-batch by micro-batch, stage by stage
            for index, span in enumerate(cell):
                firsts[index].append(following)
                following += span.end - span.start
        for stage, spans, first, roots, outside in zip(
            self._stages, self._spans, firsts, self._roots, self._outside, strict=True
        ):
            roots.update(_histories(_attributes(stage)))
            _renumber(roots - outside, outside, spans, first)
        _advance(following - counter)
        self._roots, self._outside = [], []


def _renumber(roots: Iterable[Any], outside: set[Any], spans: Sequence[_Span], first: Sequence[int]) -> None:
    starts = [span.start for span in spans]
    seen = set(roots)  # holds the nodes' Python objects, whose identity lasts only while somebody holds them
    stack = list(seen)
    numbers: list[tuple[Any, int]] = []
    while stack:
        node = stack.pop()
        old = node._sequence_nr()
        index = bisect_right(starts, old) - 1
        if index < 0 or old >= spans[index].end:
            continue  # a parameter's accumulator, or a history that the stage did not make
        numbers.append((node, first[index] + old - starts[index]))
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in outside:
                seen.add(following)
                stack.append(following)
    for node, number in numbers:
        node._set_sequence_nr(number)


def _advance(count: int) -> None:
    """Move this thread's counter on: nothing but making nodes does."""
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        for _ in range(count):
            leaf.view_as(leaf)


def _histories(values: Iterable[Any]) -> list[Any]:
    return [value.grad_fn for value in values if isinstance(value, Tensor) and value.grad_fn is not None]


def _attributes(stage: Stage) -> list[Any]:
    """What the stage's modules keep in Python attributes and buffers."""
    return [
        leaf
        for part in stage.module.modules()
        for name, value in (*vars(part).items(), *part._buffers.items())
        if not name.startswith("_")
        for leaf in pytree.tree_leaves(value)
    ]
