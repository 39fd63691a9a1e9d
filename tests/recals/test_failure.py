"""Failure at every point (rule 12): errors, interrupts and exhausted memory in forward, backward and inside replays.

Modes, hooks, generators, autocast and the cache return to what they were, and the next step is exact.
"""

from __future__ import annotations

import gc
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity.harness import ambient
from recals.scenarios import collector_off, grads, leaf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recals_exp.recals import POLICIES, recals_with_rngs

ROWS, WIDTH = 64, 64
LIMIT = 3 * ROWS * WIDTH * 4  # three activations of the models below


def mlp() -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def deep(x: Tensor) -> Tensor:
    return (x.sin().exp() * x.cos()).tanh().sin()


class FailsAt(TorchDispatchMode):
    """Raises at the n-th op below it; the ops of replays are below it, too."""

    def __init__(self, n: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = n, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise self.error("in the middle")
        self.left -= 1
        return func(*args, **(kwargs or {}))


ERRORS = {"error": ArithmeticError, "interrupt": KeyboardInterrupt, "out-of-memory": torch.OutOfMemoryError}


def _random_net(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.dropout(torch.mm(x.sin(), x.t()), 0.5).float()
    y = F.rrelu(y.exp().tanh(), training=True)
    y.mul_(2)
    return F.dropout(y.cos(), 0.5).sin()


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failure_at_every_op_leaves_nothing_behind(where: str, kind: str) -> None:
    recals = recals_with_rngs(16 * 16 * 4 + 64)
    x = leaf(16, 16)
    torch.manual_seed(5)
    expected = grads(_random_net(x), x)
    state, before = torch.get_rng_state(), ambient()

    def fails(n: int) -> bool:
        """One step that fails at op ``n``; False if there is no such op."""
        torch.manual_seed(5)
        try:
            if where == "forward":
                with FailsAt(n, ERRORS[kind]):
                    recals(_random_net, x)
            else:
                out = recals(_random_net, x)
                with FailsAt(n, ERRORS[kind]):
                    out.sum().backward()
        except ERRORS[kind] as error:
            traceback.clear_frames(error.__traceback__)
            return True
        finally:
            x.grad = None
        return False

    with collector_off():
        n = 0
        while fails(n):
            assert ambient() == before
            assert recals.stats.cached_bytes == 0
            if where == "backward":
                assert torch.equal(torch.get_rng_state(), state)
            n += 1
        torch.manual_seed(5)
        found = grads(recals(_random_net, x), x)
        assert recals.registry == {}  # torch itself may keep the hooks of a graph that failed until the next one runs
    assert n > 10
    assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_can_be_tried_again_after_a_failed_replay(policy: str) -> None:
    """With ``retain_graph`` nothing is used up: wherever the first try failed, the second gives plain PyTorch's bits."""
    recals = recals_with_rngs(16 * 16 * 4 + 64, policy=policy)
    x = leaf(16, 16)
    torch.manual_seed(5)
    expected = grads(_random_net(x), x)
    for n in range(0, 400, 3):
        torch.manual_seed(5)
        out = recals(_random_net, x)
        try:
            with FailsAt(n, torch.OutOfMemoryError):
                grads(out, x, retain_graph=True)
            break
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
        found = grads(out, x)
        assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]
        limit = recals.cache_limit_bytes
        assert limit is not None
        assert recals.stats.peak_cached_bytes <= limit
        del out
        assert recals.stats.cached_bytes == 0
    else:
        raise AssertionError("no end of failures")
    assert n > 10


def test_a_real_interrupt_in_forward_and_in_backward() -> None:
    recals = recals_with_rngs(LIMIT)
    model, before = mlp(), ambient()
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    handle = model[3].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        recals(model, x)
    handle.remove()
    handle = model[3].register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        recals(model, x).sum().backward()
    handle.remove()
    gc.collect()  # pytest's own frames of the error
    assert ambient() == before
    model.zero_grad()
    recals(model, x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert recals.stats.cached_bytes == 0


def test_a_generator_closed_in_the_middle() -> None:
    """The call is abandoned half-way, from outside: the modes must be gone with it."""
    recals, before = recals_with_rngs(LIMIT), ambient()

    def outer() -> Iterator[Tensor]:
        def fn(x: Tensor) -> Tensor:
            y = deep(x)
            raise GeneratorExit
            return y

        yield recals(fn, leaf(ROWS, WIDTH))

    with pytest.raises(GeneratorExit):
        next(outer())
    assert ambient() == before
