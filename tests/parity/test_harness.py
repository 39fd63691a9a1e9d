"""The parity harness sees what it claims to see: each kind of difference, planted, is found and named."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parity.freezing import differences, freeze
from parity.harness import BUDGETS, Case, Notes, Subject, Yardstick, check, plain, replace, run, run_wrapped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recals_exp.recals import CacheLimitError, Recals
from recals_exp.recals.replay import Replayer


class Counting(nn.Module):
    """Norm statistics, dropout, and a counter in Python."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(*[part for layer in parts for part in layer])
        self.unused = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


def counting() -> Subject:
    return Subject(Counting(), (torch.randn(4, 6, requires_grad=True),))


CASE = Case("counting", counting)


def found(call: Callable[..., Any], case: Case = CASE) -> str:
    """What the harness says about another way of calling."""
    return "\n".join(differences(run(case, plain), run(case, call)))


# -- what must pass ----------------------------------------------------------------------------------------------------


def test_plain_equals_plain() -> None:
    assert found(lambda fn, *args: fn(*args)) == ""


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_engine_passes(budget: str) -> None:
    stats = check(CASE, "fifo", budget)
    assert (stats.recomputed_ops > 0) is (budget != "full")


# -- what must be found ------------------------------------------------------------------------------------------------


def _after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A call whose result is changed."""
    return lambda fn, *args, **kwargs: change(fn(*args, **kwargs))


def _and(effect: Callable[[], Any]) -> Callable[..., Any]:
    """A call with a side effect."""

    def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        effect()
        return out

    return call


def _one_bit(x: Tensor) -> Tensor:
    x.data.view(torch.int32).view(-1)[3] ^= 1
    return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_after(_one_bit), r"step 0 output: 1 of 24 elements of a torch.float32 \[4, 6\] differ; the first: plain"),
        (_after(lambda x: x.double()), r"step 0 output: dtype: plain torch.float32, wrapped torch.float64"),
        (_after(lambda x: x[None]), r"step 0 output: shape: plain \(4, 6\), wrapped \(1, 4, 6\)"),
        (_after(lambda x: x.t().contiguous().t()), r"step 0 output: stride: plain \(6, 1\), wrapped \(1, 4\)"),
        (_after(lambda x: x.detach()), r"step 0 output: requires_grad: plain True, wrapped False"),
        (_after(lambda x: x + 0), r"step 0 output: grad_fn: plain TanhBackward0, wrapped AddBackward0"),
        (_after(lambda x: [x]), r"step 0 output: plain a torch.float32 tensor \[4, 6\], wrapped a builtins.list"),
        (_and(lambda: torch.rand(1)), r"torch generator after forward 0: "),
        (_and(random.random), r"Python generator after forward 0: "),
        (_and(np.random.rand), r"NumPy generator after forward 0: "),
        (_and(lambda: warnings.warn("more", stacklevel=1)), r"warnings: "),
    ],
)
def test_a_changed_call_is_found(call: Callable[..., Any], message: str) -> None:
    assert re.search(message, found(call)), found(call)


def test_what_stock_checkpoint_repeats_is_found() -> None:
    """pytorch#96136: batch-norm statistics move twice; so does everything else in the function's Python."""
    text = found(lambda fn, *args: checkpoint(fn, *args, use_reentrant=False))
    assert "buffer net.1.running_mean after backward 0" in text
    case = replace(CASE, build=lambda: Subject(Counting().eval(), (torch.randn(4, 6, requires_grad=True),)))
    text = found(lambda fn, *args: checkpoint(fn, *args, use_reentrant=False), case)
    assert "Python state of Counting after backward 0: at ['calls']: plain 1, wrapped 2" in text


def _subject_with(change: Callable[[Counting], None]) -> Case:
    def build() -> Subject:
        subject = counting()
        change(subject.fn)
        return subject

    return replace(CASE, build=build)


def test_gradients_are_told_apart_and_named() -> None:
    hooked = _subject_with(lambda model: model.net[4].weight.register_hook(lambda grad: grad * 2) and None)
    text = "\n".join(differences(run(CASE, plain), run(hooked, plain)))
    assert text.startswith("gradient of parameter net.4.weight after backward 0: 36 of 36 elements")

    def zero_unused(fn: Counting, x: Tensor) -> Tensor:
        fn.unused.weight.grad = torch.zeros(2, 2)
        return fn(x)

    text = found(zero_unused)
    assert (
        "gradient of parameter unused.weight after backward 0: plain None, wrapped a torch.float32 tensor [2, 2]"
        in text
    )


def test_aliasing_is_seen() -> None:
    case = Case("alias", lambda: Subject(lambda x: (x, x[1:], x * 2), (torch.ones(3, requires_grad=True),)))
    text = found(_after(lambda out: (out[0].view(-1), out[1].clone(), out[2])), case)
    assert "step 0 output 0 shares: plain 'input 0', wrapped 'memory of input 0'" in text
    assert "step 0 output 1 shares: plain 'memory of input 0', wrapped 'nothing'" in text
    assert "step 0 output 2 shares" not in text


def test_exceptions_are_told_apart() -> None:
    def build() -> Subject:
        return Subject(lambda x: (_ for _ in ()).throw(KeyError("a")), (torch.ones(1),))

    case = Case("raises", build, raises=KeyError)

    def wrong_type(fn: Callable[..., Any], x: Tensor) -> Any:
        try:
            return fn(x)
        except KeyError:
            raise IndexError("b") from None

    assert "exception: plain 'KeyError', wrapped 'IndexError'" in found(wrong_type, case)
    assert "exception: plain 'KeyError', wrapped None" in found(lambda fn, x: x, case)
    with pytest.raises(AssertionError, match=r"the plain run was to raise None, it raised .*KeyError"):
        _ = Yardstick(replace(case, raises=None)).plain


def test_something_left_behind_is_found() -> None:
    def leaves_grad_off(fn: Callable[..., Any], x: Tensor) -> Any:
        out = fn(x)
        torch._C._set_grad_enabled(False)
        return out

    def no_backward(case: Case, call: Any, subject: Subject, note: Notes) -> None:
        call(subject.fn, *subject.args)

    try:
        with pytest.raises(AssertionError, match=r"left behind: .*'grad mode': False"):
            run(replace(CASE, script=no_backward), leaves_grad_off)
    finally:
        torch._C._set_grad_enabled(True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (float("nan"), 0.0),
        (0.0, -0.0),
        (1, True),
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.tensor([2]).view(torch.float64), torch.tensor([3]).view(torch.float64)),
        (torch.tensor([0x7FC00000]).int().view(torch.float32), torch.tensor([0x7FC00001]).int().view(torch.float32)),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    ],
)
def test_values_are_compared_by_their_bytes(one: Any, other: Any) -> None:
    assert freeze(one) == freeze(one)
    assert freeze(one) != freeze(other)


def test_nan_equals_the_same_nan() -> None:
    assert freeze(torch.tensor(float("nan"))) == freeze(torch.tensor(float("nan")))
    assert freeze(float("nan")) == freeze(float("nan"))


# -- what proves nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "budget", "message"),
    [
        (
            Case("no-op", lambda: Subject(lambda x: x + 1, (torch.ones(3, requires_grad=True),))),
            "nothing",
            "proves nothing: 0 values",
        ),
        (
            Case("one-value", lambda: Subject(lambda x: (x * 2).exp() + 1, (torch.ones(3, requires_grad=True),))),
            "smallest",
            "the limit does not bite: all 12 bytes fit",
        ),
        (replace(CASE, bites=False), "smallest", "bites=False, but the smallest limit is"),
        (replace(CASE, droppable=False), "nothing", "droppable=False, but .* values were dropped"),
    ],
)
def test_a_case_that_proves_nothing_fails(case: Case, budget: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(case, "fifo", budget)


def test_cases_that_say_so_pass() -> None:
    check(
        Case("no-op", lambda: Subject(lambda x: x + 1, (torch.ones(3, requires_grad=True),)), droppable=False),
        "fifo",
        "nothing",
    )
    one = Case(
        "one-value", lambda: Subject(lambda x: (x * 2).exp() + 1, (torch.ones(3, requires_grad=True),)), bites=False
    )
    check(one, "fifo", "smallest")
    check(one, "fifo", "nothing")


# -- an engine at fault ------------------------------------------------------------------------------------------------


def test_a_replay_that_is_one_bit_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Replayer.run

    def off_by_a_bit(self: Replayer, *args: Any) -> Any:
        storages = honest(self, *args)
        storages[0][0] ^= 1
        return storages

    monkeypatch.setattr(Replayer, "run", off_by_a_bit)
    with pytest.raises(AssertionError, match=r"counting \[policy fifo, budget middle = \d+ bytes\]:\n  gradient of "):
        Yardstick(CASE).check("fifo", "middle")


def test_what_is_still_held_at_the_end_is_found() -> None:
    kept: list[Any] = []

    def no_backward(case: Case, call: Any, subject: Subject, note: Notes) -> None:
        kept.append(call(subject.fn, *subject.args))

    wrapped = run_wrapped(replace(CASE, script=no_backward), "fifo", None)
    assert re.fullmatch(r"\d+ bytes cached when gone", wrapped.left[-2]), wrapped.left
    assert re.fullmatch(r"\d+ storages in the registry when gone", wrapped.left[-1]), wrapped.left


def test_a_peak_above_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    yardstick = Yardstick(CASE)
    limit = yardstick.limit("fifo", "middle")
    monkeypatch.setattr("parity.harness.make_recals", lambda limit, policy, case: _unlimited(policy))
    with pytest.raises(AssertionError, match="bytes cached at the peak"):
        yardstick.check("fifo", "middle")
    assert limit > 0


def _unlimited(policy: str) -> Recals:
    from recals_exp.recals import recals_with_rngs

    return recals_with_rngs(None, policy=policy, audit="off")


def test_a_wrong_smallest_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> Any:
        raise CacheLimitError("", limit_bytes=0, needed_bytes=1, smallest_bytes=0, layer="")

    monkeypatch.setattr(
        Recals, "__call__", lambda self, fn, *args: fn(*args) if self.cache_limit_bytes is None else refuses()
    )
    with pytest.raises(AssertionError, match="counting: 0 refused, 0 named"):
        Yardstick(CASE).limits("fifo")
