"""Lifetime and failure (rules 10 and 12): memory goes with the graph by reference counting, and nothing is left behind.

Live bytes are what the C allocator has handed out (``mallinfo2``), with the garbage collector off: that sees what autograd
holds in C++, too. Python objects are counted beside them, because a leaked piece of tape has no bytes of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from parity.harness import plain
from recals.scenarios import collector_off, grads, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recals_exp.recals import POLICIES, CacheLimitError, Recals, recals_with_rngs
from recals_exp.recals.graph import Value
from recals_exp.recals.policies import Planned
from recals_exp.recals.tape import TensorValue

ROWS, WIDTH = 64, 64
VALUE = ROWS * WIDTH * 4  # bytes of one activation of the models below
LIMIT = 3 * VALUE
DEPTH = 5  # more than fits


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def allocated_bytes() -> int:
    """What the process has from the C allocator: tensors, autograd's nodes; not Python's small objects."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("the C library has no mallinfo2")
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def mlp() -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def deep(x: Tensor) -> Tensor:
    return (x.sin().exp() * x.cos()).tanh().sin()


# -- flat over hundreds of steps -----------------------------------------------------------------------------------------

Step = Callable[[], object]
SHAPES: dict[str, Callable[[Recals], Step]] = {}


def shape(make: Callable[[Recals], Step]) -> Callable[[Recals], Step]:
    SHAPES[make.__name__] = make
    return make


@shape
def training(recals: Recals) -> Step:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2), mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        recals(model, torch.randn(ROWS, WIDTH)).square().sum().backward()
        optimizer.step()

    return step


@shape
def retaining(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        loss = recals(model, leaf(ROWS, WIDTH)).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)

    return step


@shape
def without_backward(recals: Recals) -> Step:
    model = mlp()
    return lambda: (recals(model, leaf(ROWS, WIDTH)), None)[1]


@shape
def partial_backward(recals: Recals) -> Step:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = deep(x)
        return deep(y), y.exp().cos()

    def step() -> None:
        x = leaf(ROWS, WIDTH)
        first, _ = recals(fn, x)
        grads(first, x)

    return step


@shape
def without_gradients(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        with torch.no_grad():
            recals(model, torch.randn(ROWS, WIDTH))
        with torch.inference_mode():
            recals(model, torch.randn(ROWS, WIDTH))
        recals(deep, torch.randn(ROWS, WIDTH))

    return step


@shape
def several_live_graphs(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        losses = [recals(model, torch.randn(ROWS, WIDTH)).sum() for _ in range(4)]
        for i in (2, 0, 3):
            losses[i].backward()

    return step


@shape
def double_backward(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        x = leaf(ROWS, WIDTH)
        (gradient,) = torch.autograd.grad(recals(model, x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        x.grad = None

    return step


@shape
def layer_by_layer(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        x = torch.randn(ROWS, WIDTH)
        for layer in model:
            x = recals(layer, x)
        x.sum().backward()

    return step


@shape
def inside_itself_and_another(recals: Recals) -> Step:
    other, model = recals_with_rngs(LIMIT), mlp()

    def step() -> None:
        recals(lambda x: recals(model, other(deep, x)), leaf(ROWS, WIDTH)).sum().backward()

    return step


@shape
def checkpointed(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        recals(lambda x: checkpoint(model, deep(x), use_reentrant=False), leaf(ROWS, WIDTH)).sum().backward()
        checkpoint(lambda x: recals(model, deep(x)), leaf(ROWS, WIDTH), use_reentrant=False).sum().backward()

    return step


@shape
def in_place_and_leaves_written(recals: Recals) -> Step:
    buffer = torch.zeros(ROWS, WIDTH)

    def fn(x: Tensor) -> Tensor:
        y = deep(x) + buffer
        buffer.add_(1)
        y.mul_(2).relu_()
        y = (y + buffer).sin()
        buffer.mul_(0.5)
        held = torch.empty(ROWS, WIDTH)
        held.numpy()[...] = 1.0
        return (y * held).exp()

    return lambda: recals(fn, leaf(ROWS, WIDTH)).sum().backward()


@shape
def custom_function(recals: Recals) -> Step:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x.exp())
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, other = ctx.saved_tensors
            return grad * (2 * x + 0 * other)

    return lambda: recals(lambda x: Square.apply(Square.apply(x.sin()).exp()), leaf(ROWS, WIDTH)).sum().backward()


@shape
def under_autocast(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            first, second = recals(model, torch.randn(ROWS, WIDTH)), recals(model, torch.randn(ROWS, WIDTH))
        (first + second).float().sum().backward()

    return step


@shape
def recurrent_state_carried_on(recals: Recals) -> Step:
    cell = nn.GRUCell(WIDTH, WIDTH)
    state = [torch.zeros(ROWS, WIDTH)]

    def step() -> None:
        hidden = state[0]
        for _ in range(2):
            hidden = recals(lambda h: cell(torch.randn(ROWS, WIDTH), h).sin(), hidden)
        hidden.sum().backward()
        state[0] = hidden.detach()

    return step


@shape
def changing_shapes(recals: Recals) -> Step:
    model, rows = mlp(), iter(range(1, 10**6))
    return lambda: recals(model, torch.randn(ROWS - next(rows) % 3, WIDTH)).sum().backward()


@shape
def failing_forward(recals: Recals) -> Step:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        y = model(x).exp()
        raise KeyError("forward")
        return y

    def step() -> None:
        with pytest.raises(KeyError):
            recals(fn, leaf(ROWS, WIDTH))

    return step


@shape
def failing_backward(recals: Recals) -> Step:
    def fail(grad: Tensor) -> None:
        raise KeyError("backward")

    def fn(x: Tensor) -> Tensor:
        y = deep(x)
        y.register_hook(fail)
        return deep(y)

    def step() -> None:
        with pytest.raises(KeyError):
            recals(fn, leaf(ROWS, WIDTH)).sum().backward()

    return step


@shape
def refused_for_the_limit(recals: Recals) -> Step:
    def step() -> None:
        with pytest.raises(CacheLimitError):
            recals(deep, leaf(4 * ROWS, WIDTH))

    return step


@shape
def guard_trips(recals: Recals) -> Step:
    def step() -> None:
        x = torch.randn(ROWS, WIDTH)
        out = recals(lambda w: deep(deep(w * x)), leaf(ROWS, WIDTH))
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            out.sum().backward()

    return step


@shape
def backward_in_a_thread(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        thread = threading.Thread(target=recals(model, torch.randn(ROWS, WIDTH)).sum().backward)
        thread.start()
        thread.join()

    return step


@shape
def analysed_and_audited(recals: Recals) -> Step:
    model = mlp()

    def step() -> None:
        recals.analyze(model, torch.randn(ROWS, WIDTH))
        recals.audit(model, torch.randn(ROWS, WIDTH))

    return step


NOTHING_TO_DROP = {"without_gradients"}


class Plainly:
    """Stands in for a ``Recals``: the same steps without one."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    analyze = audit = __call__


def planners_idle() -> None:
    """Wait for plans that are being made in the background: what they allocate is not a step's."""
    for thread in threading.enumerate():
        if thread.name == "recals-planner":
            thread.join()


def threads_ended(threads: int, timeout_s: float = 10.0) -> None:
    """Wait until no more than ``threads`` are left: a joined one still holds megabytes until the system has ended it."""
    until = time.monotonic() + timeout_s
    while system_threads() > threads and time.monotonic() < until:
        time.sleep(0.001)


def system_threads() -> int:
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0  # without it there is no mallinfo2 either: skipped


@contextmanager
def _one_thread() -> Iterator[None]:
    """OpenMP leaves memory behind for every thread of the program that starts a team of its own (a backward in a thread)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _growth(step: Step, steps: int) -> tuple[int, int]:
    """Bytes and Python objects that ``steps`` steps leave behind."""
    with collector_off(), _one_thread():
        threads = system_threads()
        for _ in range(5):  # gradients, optimizer state, the audit of the first call, Python's caches
            step()
        planners_idle()
        for _ in range(2):  # the first steps that follow the plan
            step()
        threads_ended(threads)
        objects, held_bytes = len(gc.get_objects()), allocated_bytes()
        for _ in range(steps):
            step()
        threads_ended(threads)
        return allocated_bytes() - held_bytes, len(gc.get_objects()) - objects


def _stays_flat(name: str, policy: str, steps: int) -> None:
    # Plans are made at once here: a thread in the background would allocate beside the steps.
    recals = recals_with_rngs(LIMIT, policy=Planned(waits=True) if policy == Planned.name else policy)
    step = SHAPES[name](recals)
    more_bytes, more_objects = _growth(step, steps)
    for _ in range(6):  # what leaks, leaks every time; buffers come and go in the C allocator
        if more_bytes < 2 * VALUE and more_objects < 2 * steps:
            break
        again_bytes, again_objects = _growth(step, steps)
        more_bytes, more_objects = min(more_bytes, again_bytes), min(more_objects, again_objects)
    else:  # threads, checkpoint and others leave a little
        plain_bytes, plain_objects = _growth(SHAPES[name](Plainly()), steps)  # type: ignore[arg-type]
        assert more_bytes - plain_bytes < max(2, steps // 10) * VALUE, (
            f"{more_bytes} bytes more after {steps} steps, plainly {plain_bytes}"
        )
        assert more_objects - plain_objects < 2 * steps, f"{more_objects} objects more after {steps} steps"
    assert (recals.stats.dropped_values > 0) == (name not in NOTHING_TO_DROP)
    # Autograd keeps the nodes that a failed backward had ready until the next one, plainly too.
    leaf(1).sum().backward()
    assert recals.stats.cached_bytes == 0
    assert recals.registry == {}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_live_bytes_stay_flat(name: str, policy: str) -> None:
    _stays_flat(name, policy, 300 if "thread" in name else 25)  # the C library keeps a pool of memory per new thread


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_live_bytes_stay_flat_over_500_steps(name: str, policy: str) -> None:
    _stays_flat(name, policy, 500)


# -- one graph and its memory --------------------------------------------------------------------------------------------


def test_dropped_bytes_are_really_free() -> None:
    """While the graph lives, the allocator has no more out than the limit, the output, and what is not cache."""
    value = 256 * 256 * 4

    def fn(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin()
        return x

    def out_bytes(call: Callable[..., Tensor]) -> int:
        before = allocated_bytes()
        out = call(fn, x)
        during = allocated_bytes() - before
        del out
        return during

    x = leaf(256, 256)
    recals = recals_with_rngs(2 * value)
    grads(recals(fn, x), x)  # what is allocated once
    with collector_off():
        assert out_bytes(plain) >= 12 * value
        assert out_bytes(recals) <= 3 * value + value // 2


def test_everything_dies_with_the_graph() -> None:
    recals = recals_with_rngs(LIMIT)
    model, x = mlp(), leaf(ROWS, WIDTH)
    seen: list[weakref.ref[Any]] = []
    for part in model:
        part.register_forward_hook(lambda m, args, out: seen.append(weakref.ref(out.untyped_storage())))
    with collector_off():
        out = recals(model, x)
        assert len(seen) == 2 * DEPTH
        watched = [weakref.ref(x), weakref.ref(model), weakref.ref(out), *seen]
        assert sum(ref() is not None for ref in seen) < 2 * DEPTH  # dropped, while the graph lives
        del model, x, out
        assert [ref() for ref in watched] == [None] * len(watched)
    assert recals.stats.cached_bytes == 0


def test_input_and_output_die_before_backward() -> None:
    """The graph keeps what it needs; the tensors handed in and out are the program's to drop."""
    recals = recals_with_rngs(LIMIT)
    weight = leaf(WIDTH, WIDTH)
    with collector_off():
        x = torch.randn(ROWS, WIDTH)
        out = recals(lambda x: ((x.sin() @ weight).exp() @ weight).cos(), x)
        watched = weakref.ref(x)
        total = out.sum()
        del x, out
        total.backward()
        del total
        assert watched() is None


def test_a_dead_storage_is_forgotten_though_its_value_was_rebuilt() -> None:
    x, weight = leaf(8, 8), leaf(8, 8)
    recals = recals_with_rngs(0, policy="fifo", audit="off")
    recals.refuses = False

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y, y * weight, (y + 1).cos()

    y, product, cosine = recals(fn, x)
    key = id(y.untyped_storage())
    y.detach().add_(1)
    torch.autograd.grad(cosine.sum(), x, retain_graph=True)
    assert recals.stats.recomputed_values > 0
    del y
    assert key not in recals.registry
    del product


def test_calls_that_read_each_other_go_with_their_graphs() -> None:
    recals = recals_with_rngs(0, policy="fifo", audit="off")
    recals.refuses = False
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def inner(x: Tensor) -> Tensor:
        return second(x.sin()).exp()

    def outer(x: Tensor) -> Tensor:
        hidden = recals(inner, first(x).tanh()) * 2
        recals(lambda hidden: hidden.mul_(2), hidden)
        return recals(inner, hidden).cos()

    with collector_off():
        for _ in range(3):
            out = recals(outer, torch.randn(8, 8))
            last = recals(inner, out.detach())
            del out
            last.sum().backward()
            del last
            assert not recals.sessions
            assert not recals.registry


def test_the_object_may_go_before_backward() -> None:
    x = leaf(ROWS, WIDTH)
    expected = grads(deep(deep(x)), x)
    with collector_off():
        recals = recals_with_rngs(VALUE)
        watched = weakref.ref(recals)
        out = recals(lambda x: deep(deep(x)), x)
        del recals
        found = grads(out, x)
        del out
        assert watched() is None
    assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]


def test_nothing_is_cached_after_backward_though_the_loss_lives() -> None:
    recals = recals_with_rngs(-1)
    loss = recals(mlp(), torch.randn(ROWS, WIDTH)).sum()
    assert recals.stats.cached_bytes > 0
    loss.backward()
    assert recals.stats.cached_bytes == 0
    assert loss.grad_fn is not None


def test_deep_chains_are_freed_and_rebuilt_without_recursion() -> None:
    x = leaf(4)

    def fn(x: Tensor) -> Tensor:
        for _ in range(3000):
            x = x.sin()
        return x

    expected = grads(fn(x), x)
    recals = recals_with_rngs(16 * 300)
    with collector_off():
        out = recals(fn, x)
        found = grads(out, x)
        del out
        unused = recals(fn, x)
        del unused
    assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]
    assert recals.stats.cached_bytes == 0


def test_a_handle_that_dies_while_a_write_hands_over() -> None:
    """In another thread: nobody can reach it any more, but its own word that it is gone is still to come."""
    recals = recals_with_rngs(None, policy="dtr")
    x = torch.randn(4, requires_grad=True)
    out = recals(lambda x: torch.exp(x), x)
    (old,) = recals.cache.live
    assert isinstance(old, TensorValue)
    assert old.producer is not None
    gone: list[Value] = []
    recals.cache._watcher = types.SimpleNamespace(freed=lambda cache, value: gone.append(value))  # type: ignore[assignment]
    old.handles += 1  # the dying one
    new = TensorValue(old.producer, -1, old.nbytes, old.pin, 1)
    recals.cache.replace(old, new, None)
    assert (old.handles, new.handles) == (1, 1)
    assert gone == []
    recals.cache.release(old)
    assert gone == [old]
    assert set(recals.cache.live) == {new}
    del out
    assert gone == [old, new]
    assert not recals.cache.live
    assert recals.cache.cached_bytes == 0
