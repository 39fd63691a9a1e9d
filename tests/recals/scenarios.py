"""Stories: what plain parity compares where one call of one model does not tell enough.

A *story* is a function of ``call``: it builds what it needs, makes its calls through ``call(fn, *args, **kwargs)``, runs
backward in whatever shape it likes, edits things in between, and returns everything it saw. Told plainly and through a
``Recals``, it must have seen the same. A story becomes a ``Case`` of ``parity.harness``, whose rules all hold: every policy
and budget, something dropped and recomputed, the limit kept, nothing left behind.

``SourceChangedError`` is a ``RuntimeError``, the type plain PyTorch raises where a saved tensor was modified; where plain
refuses, it is as good. Where plain works it is a failure, except in a story that says ``may_lose_source``: there the bytes
that a dropped value comes from are really gone, and refusing is all one can do.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity.harness import Call, Case, Notes, Subject, plain, seed_everything, weighted_sum
from torch import Tensor, nn

from recals_exp.recals import POLICIES, Recals, SourceChangedError

Story = Callable[[Call], Any]


class Stories(list[Case]):
    """The stories of one file. Use as a decorator, with or without further arguments of ``Case``."""

    def __call__(self, story: Story | None = None, /, *, may_lose_source: bool = False, **expected: Any) -> Any:
        def add(story: Story) -> Story:
            script = _told_with_loss if may_lose_source else _told
            self.append(Case(story.__name__, build=lambda: Subject(story), script=script, **expected))
            return story

        return add if story is None else add(story)

    def each(self) -> Any:
        """``@stories.each()``: the test runs for every story x policy x budget.

        Not at the middle budget: stories are short, and what happens between the smallest limit and the total is one of both.
        All of it runs for the first policy; for the others the smallest limit does, and the rest is marked slow.
        """
        names = [case.name for case in self]
        assert len(set(names)) == len(names), f"two stories of one name: {sorted(names)}"
        first = next(iter(POLICIES))
        params = []
        for case in self:
            for policy in POLICIES:
                for budget in ("full", "smallest", "nothing"):
                    quick = policy == first or budget == "smallest"
                    marks = () if quick else pytest.mark.slow
                    params.append(pytest.param(case, policy, budget, id=f"{case.name}-{policy}-{budget}", marks=marks))
        return pytest.mark.parametrize(("case", "policy", "budget"), params)


def _told(case: Case, call: Call, subject: Subject, note: Notes) -> None:
    try:
        note.outputs(subject.fn(call))
    except SourceChangedError as error:
        traceback.clear_frames(error.__traceback__)
        raise RuntimeError(str(error)) from None


def _told_with_loss(case: Case, call: Call, subject: Subject, note: Notes) -> None:
    try:
        seen = subject.fn(call)
    except SourceChangedError as error:
        traceback.clear_frames(error.__traceback__)
        assert isinstance(call, Recals)
        assert call.stats.dropped_values > 0, "nothing was dropped, yet a source is missed"
        del error
        seed_everything()
        seen = subject.fn(plain)
    note.outputs(seen)


@contextmanager
def collector_off() -> Iterator[None]:
    """Whatever is freed inside is freed by reference counting."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- small parts of stories --------------------------------------------------------------------------------------------


def views_and_norms(x: Tensor, weight: Tensor) -> Tensor:
    """Of two 4 x 4 tensors; TorchScript can compile it."""
    for _ in range(4):
        x = torch.tanh(x @ weight.t()).view(2, 8).transpose(0, 1).reshape(4, 4)
        x = torch.nn.functional.layer_norm(x, (4,)) + 0.5
    return x


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fresh random tensor that requires a gradient."""
    return torch.randn(*size, dtype=dtype).requires_grad_()


def grads(out: Any, *leaves: Tensor, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Gradients of a weighted sum of all of ``out``."""
    loss = weighted_sum(out)
    assert loss is not None
    return torch.autograd.grad(loss, leaves, allow_unused=True, **kwargs)


def told(call: Call, fn: Callable[..., Any], *leaves: Tensor) -> Any:
    """The commonest story: one call, one backward."""
    out = call(fn, *leaves)
    loss = weighted_sum(out)
    del out  # nothing but the graph is to keep its values
    assert loss is not None
    return loss.detach(), torch.autograd.grad(loss, leaves, allow_unused=True)


def trained(call: Call, model: nn.Module, *args: Any, steps: int = 2) -> Any:
    """Some steps on one input; everything the model holds afterwards."""
    losses = []
    for _ in range(steps):
        loss = weighted_sum(call(model, *args))
        assert loss is not None
        loss.backward()
        losses.append(loss.detach())
    return losses, held(model)


def parameter_grads(*modules: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def held(*modules: nn.Module) -> list[Tensor | None]:
    """Every buffer, parameter and parameter gradient."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    return [
        *buffers,
        *(parameter for module in modules for parameter in module.parameters()),
        *parameter_grads(*modules),
    ]
