"""Writes that no recorder sees: between calls, in other threads, in inference mode, by fused optimizers.

A tape that trusts what it recorded would rebuild what is no longer there. Version counters give most such writes away, to the
reader of the next op; where none moves, what is known to be at risk is compared by checksum or refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.harness import Call, Case, check
from recals.scenarios import Stories, grads, leaf
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from recals_exp.recals import POLICIES, SourceChangedError, recals_with_rngs

stories = Stories()


def plain(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


# -- between calls -------------------------------------------------------------------------------------------------------


@stories
def carried_state_edited(call: Call) -> Any:
    """Truncated backpropagation through time; the state is read and not saved."""
    cell, state, loss = nn.Linear(8, 8), torch.zeros(8, 8), torch.zeros(())

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (cell(x) + state).sin()
        return hidden.exp().tanh().sum(1), hidden

    for _ in range(3):
        out, state = call(step, torch.randn(8, 8), state)
        state = state.detach()
        state *= 0.5
        loss = loss + out.sum()
    return grads(loss, *cell.parameters())


@stories
def carried_state_edited_and_saved(call: Call) -> Any:
    """Autograd saves an argument before its op runs, and so before a recorder sees it."""
    cell, state, loss = nn.GRUCell(8, 8), torch.zeros(8, 8), torch.zeros(())

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = cell(x, state)
        return hidden.exp().tanh().sin(), hidden.detach() + 0.0

    for t in range(4):
        out, state = call(step, torch.randn(8, 8), state)
        loss = loss + out.sum()
        state[t] = 0.0
    return grads(loss, *cell.parameters())


@stories
def carried_state_edited_as_the_last_op_wrote_it(call: Call) -> Any:
    cell, state, loss = nn.Linear(8, 8), torch.zeros(8, 8), torch.zeros(())

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (cell(x) + state).sin()
        return hidden.exp().tanh(), hidden.detach().clone().mul_(0.5)

    for _ in range(3):
        out, state = call(step, torch.randn(8, 8), state)
        state *= 0.5
        loss = loss + out.sum()
    return grads(loss, *cell.parameters())


@stories
def carried_matrix_product_edited(call: Call) -> Any:
    """A product of three dimensions is a view by ``_unsafe_view``, with a counter of its own."""
    weight, state, loss = leaf(8, 8), torch.randn(2, 4, 8), torch.zeros(())

    def step(x: Tensor, state: Tensor) -> Tensor:
        return (x * state).sin().exp() @ weight

    for _ in range(3):
        out = call(step, torch.randn(2, 4, 8), state)
        state = out.detach()
        state *= 0.5
        loss = loss + out.sum()
    return grads(loss, weight)


@stories
def carried_part_edited(call: Call) -> Any:
    weight = leaf(8, 8)

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.unsafe_chunk((x @ weight).sin().exp(), 2)
        return a.tanh(), b

    out, part = call(first, torch.randn(8, 8))
    part = part.detach()
    part *= 0.5
    second = call(lambda part: (part.sin() @ weight).tanh(), part)
    del part
    return grads([out, second], weight)


def _made_in_an_earlier_call(call: Call, source: nn.Module, move: Callable[[Tensor], Tensor]) -> Any:
    """The graph of the call that made an input is gone when what the input was made from moves, inside a third call."""
    first, second = leaf(8, 8), leaf(8, 8)
    hidden = call(lambda x: source(x.sin() @ first).exp(), torch.randn(8, 8))
    loss, detached = hidden.sum(), hidden.detach()
    del hidden
    out = call(lambda h: (h @ second).tanh().exp(), detached)
    del detached
    seen = grads(loss, first)
    del loss
    other = call(move, torch.randn(8, 8))
    return seen, grads(out, second), other.detach(), *source.buffers()


@stories
def source_of_an_earlier_call_moves(call: Call) -> Any:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    source = Shift()
    weight = leaf(8, 8)

    def move(x: Tensor) -> Tensor:
        source.shift.add_(1.0)
        return ((x @ weight) * source.shift.clone()).tanh()

    return _made_in_an_earlier_call(call, source, move)


@stories
def statistics_of_an_earlier_call_move(call: Call) -> Any:
    norm = nn.BatchNorm1d(8).eval()
    norm.running_var.uniform_(0.5, 2.0)
    weight = leaf(8, 8)

    def move(x: Tensor) -> Tensor:
        norm.train()
        return norm(x @ weight).tanh()

    return _made_in_an_earlier_call(call, norm, move)


@stories
def weights_stepped_while_an_older_graph_lives(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = call(model, torch.randn(4, 8))
    for _ in range(3):
        out = call(model, torch.randn(8, 8))
        optimizer.zero_grad()
        out.pow(2).mean().backward()
        optimizer.step()
    return [weight.grad for weight in model.parameters()], kept


@stories
def two_losses_over_retained_graphs(call: Call) -> Any:
    trunk, policy, value = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3), nn.Linear(8, 1)
    weights = [*trunk.parameters(), *policy.parameters(), *value.parameters()]
    optimizer = torch.optim.SGD(weights, 0.1)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = trunk(x).sin()
        return policy(hidden).tanh().exp(), value(hidden).tanh().exp()

    for _ in range(3):  # the loop's variables keep the last graph alive
        p, v = call(fn, torch.randn(8, 8))
        a, b = p.sum(), v.sum()
        optimizer.zero_grad()
        a.backward(retain_graph=True)
        b.backward()
        optimizer.step()
    return [weight.grad for weight in weights]


@stories
def buffer_moved_by_a_call_without_gradients(call: Call) -> Any:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
            return (x - self.mean).sin().tanh()

    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), Centred(), nn.Linear(8, 8), nn.Tanh(), Centred()
    )
    first = call(model, torch.randn(8, 8))
    with torch.no_grad():
        call(model, torch.randn(8, 8))
    second = call(model, torch.randn(8, 8))
    return grads(first.sum() + second.sin().sum(), *model.parameters())


@stories
def output_edited_and_given_back(call: Call) -> Any:
    x = leaf(8, 8)
    y = call(lambda x: x.sin().exp(), x)
    z = y.detach()
    z[0] = 3.0
    return grads(call(lambda z, x: (z * x.sin()).tanh().exp(), z, x), x)


# -- inside a call -------------------------------------------------------------------------------------------------------


def doubled_by_another_thread(tensor: Tensor) -> None:
    def work() -> None:
        with torch.no_grad():
            tensor.mul_(2.0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@stories
def another_thread_writes(call: Call) -> Any:
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        hidden = layer(x) * 1.0

        doubled_by_another_thread(hidden)
        return hidden.sin().tanh().exp()

    return grads(call(fn, torch.randn(8, 8)), *layer.parameters())


@stories
def another_thread_writes_after_a_write(call: Call) -> Any:
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        hidden = layer(x).mul_(1.5)

        doubled_by_another_thread(hidden)
        return hidden.sin().tanh().exp()

    return grads(call(fn, torch.randn(8, 8)), *layer.parameters())


@stories
def parts_with_counters_of_their_own(call: Call) -> Any:
    """``unsafe_chunk``, as in GRU cells: written in place one by one, they must not look like writes from outside."""
    x = leaf(8, 8)

    def fn(x: Tensor) -> Tensor:
        a, b = torch.unsafe_chunk(x.sin().exp(), 2)
        a = a.mul_(2)
        b = b.add_(1)
        return (a * b).tanh().exp()

    return grads(call(fn, x), x)


@stories.each()
def test_plain_parity(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


# -- refused where the old content is gone -------------------------------------------------------------------------------


def inference_input(call: Call) -> Tensor:
    weight = leaf(8, 8)
    with torch.inference_mode():
        x = torch.randn(8, 8)
    out = call(lambda x: ((x * 1.0).sin() @ weight).tanh().exp(), x)
    with torch.inference_mode():
        x.copy_(torch.randn(8, 8))
    return grads(out, weight)[0]


def step_weights(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    for weight in layer.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def read_through_data(call: Call) -> Tensor:
    """The first reader has a counter of its own, which the optimizer does not move."""
    layer, average = nn.Linear(8, 8), torch.zeros(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)

    def fn(x: Tensor) -> Tensor:
        average.lerp_(layer.weight.data, 0.1)
        return layer(x).tanh().sin().tanh()

    out = call(fn, torch.randn(8, 8))
    step_weights(layer, optimizer)
    return grads(out, layer.weight)[0]


def fused_step(call: Call) -> Tensor:
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)
    out = call(lambda x: layer(x).tanh().sin().tanh(), torch.randn(8, 8))
    step_weights(layer, optimizer)
    return grads(out, layer.weight)[0]


def sparse_values(call: Call) -> Tensor:
    weight, matrix = leaf(8, 8), torch.eye(8).to_sparse().coalesce()
    out = call(lambda x: ((matrix @ x).sin() @ weight).tanh().exp(), torch.randn(8, 8))
    matrix.values().mul_(2.0)
    return grads(out, weight)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("story", [inference_input, read_through_data, fused_step, sparse_values])
def test_refused_or_exact(story: Callable[[Call], Tensor], policy: str) -> None:
    """Everything held: plain's bits. Next to nothing held: refused, for the value's source is gone."""
    torch.manual_seed(0)
    expected = story(plain)
    torch.manual_seed(0)
    assert torch.equal(story(recals_with_rngs(None, policy=policy)), expected)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"modified .*before backward|modified in place|written since") as caught:
        story(recals_with_rngs(256, policy=policy))
    assert type(caught.value).__module__.startswith("recals_exp")


def test_memory_written_by_numpy_twice_is_refused() -> None:
    def run(call: Call) -> Tensor:
        weight = torch.ones(4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            staged = x.clone()
            staged.numpy()[0] = 7.0
            read = staged.sin()
            staged.numpy()[1] = 9.0
            return (read * weight).tanh()

        return grads(call(fn, torch.ones(3, 4)), weight)[0]

    assert torch.equal(run(recals_with_rngs(None)), run(plain))
    for policy in POLICIES:
        with pytest.raises(SourceChangedError, match="48 bytes that the forward pass read were written since"):
            run(recals_with_rngs(48, policy=policy))


def test_fused_optimizers_inside_a_call_move_no_counter() -> None:
    def run(call: Call) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: Tensor) -> Tensor:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            return loss

        loss = call(step, torch.ones(3, 4))
        version = model[0].weight._version
        loss.backward()
        return version, model[0].weight.grad

    (version, grad), (found_version, found) = run(plain), run(recals_with_rngs(None))
    assert found_version == version
    assert torch.equal(found, grad)


def test_every_closure_is_audited() -> None:
    """Two functions of one code object, over different modules: the second is new."""

    class Clean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.staged(x).sin() * self.weight).tanh()

        def staged(self, x: Tensor) -> Tensor:
            return x.clone()

    class Staged(Clean):
        def staged(self, x: Tensor) -> Tensor:
            staged = x.clone()
            staged.numpy()[0] = 7.0
            return staged

    def run(call: Call) -> list[Tensor]:
        found = []
        for model in (Clean(), Staged()):
            call(lambda x, model=model: model(x), torch.ones(3, 4)).sum().backward()
            found.append(model.weight.grad)
        return found

    for found, expected in zip(run(recals_with_rngs(48)), run(plain), strict=True):
        assert torch.equal(found, expected)


def test_the_audit_leaves_storages_resizable() -> None:
    x, weight = torch.ones(4), leaf(4)
    recals_with_rngs(64)(lambda x: (x * weight).tanh().sin(), x).sum().backward()
    assert x.resize_(8).shape == (8,)


def test_threads_share_one_recals() -> None:
    import sys

    def train(call: Call, seed: int, found: list[Any]) -> None:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)))
        for weight in model.parameters():
            nn.init.uniform_(weight, -1, 1, generator=generator)
        x = torch.randn(3, 4, generator=generator)
        for _ in range(4):
            call(model, x).sum().backward()
        found[seed] = [weight.grad for weight in model.parameters()] + list(model.buffers())

    expected: list[Any] = [None] * 4
    for seed in range(4):
        train(plain, seed, expected)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for policy in POLICIES:
            recals, found = recals_with_rngs(384, policy=policy), [None] * 4
            threads = [threading.Thread(target=train, args=(recals, seed, found)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for mine, theirs in zip(found, expected, strict=True):
                assert mine is not None, "the thread died"
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            assert recals.stats.dropped_values > 0
            assert recals.stats.cached_bytes == 0
    finally:
        sys.setswitchinterval(interval)
