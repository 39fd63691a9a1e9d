"""The limit: never exceeded at any moment, exact to the byte, refused with the numbers that help, and truly reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recals.scenarios import grads, leaf
from torch import Tensor, nn

from recals_exp.recals import POLICIES, CacheLimitError, Recals, RecalsError, format_bytes, recals_with_rngs
from recals_exp.recals.cache import Cache

VALUE = 32 * 32 * 4


class WatchedCache(Cache):
    """Looks at the books at every entry: the sum of what is held, the limit, the peak."""

    @property
    def cached_bytes(self) -> int:
        return self.__dict__["cached_bytes"]

    @cached_bytes.setter
    def cached_bytes(self, nbytes: int) -> None:
        self.__dict__["cached_bytes"] = nbytes
        self.__dict__["most"] = max(self.__dict__.get("most", 0), nbytes)
        self.__dict__["entries"] = self.__dict__.get("entries", 0) + 1
        limit = self.limit_bytes
        assert limit is None or nbytes <= limit, f"{nbytes} bytes cached, above the limit of {limit}"
        assert nbytes >= 0


def watched(limit: int | None, policy: str, **options: Any) -> Recals:
    recals = recals_with_rngs(limit, policy=policy, **options)
    recals.cache.__class__ = WatchedCache
    return recals


def chain(depth: int) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = x.sin()
        return x

    return fn


def mixed(x: Tensor) -> Tensor:
    y = F.dropout(x.sin(), 0.5).exp()
    y = torch.cat([y, y.cos()]) @ x
    y.mul_(2).relu_()
    held = torch.empty(64, 32)
    held.numpy()[...] = 0.5
    z = (y * held).chunk(2)
    return F.layer_norm(z[0].tanh() * z[1].sigmoid(), (32,)).softmax(-1).log()


def total_of(fn: Callable[[Tensor], Tensor], x: Tensor) -> int:
    recals = recals_with_rngs(-1)
    out = recals(fn, x)
    del out
    return recals.stats.peak_cached_bytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [1.0, 0.7, 0.45])
def test_never_above_the_limit_at_any_entry_of_the_books(share: float, policy: str) -> None:
    x = leaf(32, 32)
    limit = int(total_of(mixed, x) * share)
    recals = watched(limit, policy)
    for _ in range(3):
        kept = recals(mixed, x)  # a second live graph over the same limit
        out = recals(mixed, x)
        grads(out, x, retain_graph=True)
        grads(kept, x)
        grads(out, x)
        del kept, out
    books = recals.cache.__dict__
    assert books["entries"] > 20
    assert recals.stats.peak_cached_bytes == books["most"] <= limit
    assert recals.stats.cached_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_agree_with_what_is_held(policy: str) -> None:
    recals = recals_with_rngs(4 * VALUE, policy=policy)
    x = leaf(32, 32)
    out = recals(chain(10), x)
    cache = recals.cache

    def held() -> int:
        storages = {id(value.payload): value.payload.nbytes() for value in cache.held}
        return sum(storages.values()) + cache.pinned_bytes

    assert held() == recals.stats.cached_bytes <= 4 * VALUE
    seen: list[tuple[int, int]] = []
    hooked = out.grad_fn
    while hooked is not None and hooked.next_functions:
        hooked.register_hook(lambda *_: seen.append((held(), recals.stats.cached_bytes)))
        hooked = hooked.next_functions[0][0]
    grads(out, x)
    assert len(seen) >= 10
    assert all(a == b <= 4 * VALUE for a, b in seen)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exact_fit_drops_nothing_and_a_byte_less_drops_one(policy: str) -> None:
    x = leaf(32, 32)
    total = total_of(chain(6), x)
    assert total == 5 * VALUE
    for limit, dropped in ((total, 0), (total - 1, 1)):
        recals = watched(limit, policy)
        expected = grads(chain(6)(x), x)
        found = grads(recals(chain(6), x), x)
        assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]
        assert recals.stats.dropped_values == dropped
        assert recals.stats.peak_cached_bytes == (5 - dropped) * VALUE


@pytest.mark.parametrize("policy", POLICIES)
def test_one_limit_for_all_calls(policy: str) -> None:
    recals = watched(6 * VALUE, policy)
    xs = [leaf(32, 32) for _ in range(4)]
    outs = [recals(chain(5), x) for x in xs]
    assert recals.stats.cached_bytes <= 6 * VALUE
    assert recals.stats.dropped_bytes >= (4 * 4 - 6) * VALUE
    for x, out in zip(xs, outs, strict=True):
        assert torch.equal(grads(out, x)[0], grads(chain(5)(x), x)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_limit_for_all_threads(policy: str) -> None:
    recals = watched(5 * VALUE, policy, audit="off")
    barrier = threading.Barrier(4)

    def work(_: int) -> bool:
        x = leaf(32, 32)
        expected = grads(chain(6)(x), x)[0]
        same = True
        for _ in range(5):
            barrier.wait(30)
            same &= torch.equal(grads(recals(chain(6), x), x)[0], expected)  # type: ignore[arg-type]
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4), timeout=60))
    assert recals.stats.cached_bytes == 0
    assert recals.stats.peak_cached_bytes <= 5 * VALUE


# -- refused -------------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.wide = nn.Linear(32, 128)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.act(self.wide(x)).sum(-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_below_the_largest_value_is_refused_with_the_numbers(policy: str) -> None:
    model, x = Named(), torch.randn(32, 32)
    largest = 32 * 128 * 4
    recals = recals_with_rngs(largest - 1, policy=policy)
    with pytest.raises(CacheLimitError, match="act") as raised:
        recals(model, x)
    error = raised.value
    assert isinstance(error, (RecalsError, ValueError))
    assert (error.limit_bytes, error.needed_bytes, error.smallest_bytes) == (largest - 1, largest, largest)
    assert "act (Tanh)" in error.layer
    for number in (largest - 1, largest):
        assert str(number) in str(error)
    assert format_bytes(largest) in str(error)
    assert "raise the limit" in str(error).lower()
    assert recals.stats.cached_bytes == 0
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    works = recals_with_rngs(error.smallest_bytes, policy=policy)
    works(model, x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert works.stats.dropped_values > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_below_what_is_pinned_is_refused_with_the_numbers(policy: str) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(3):
            held = torch.empty(32, 32)
            held.numpy()[...] = 0.5
            x = (x.sin() * held).exp()
        return x

    x = leaf(32, 32)
    recals = recals_with_rngs(2 * VALUE, policy=policy)
    with pytest.raises(CacheLimitError) as raised:
        recals(fn, x)
    error = raised.value
    assert error.limit_bytes == 2 * VALUE
    assert error.needed_bytes == 3 * VALUE
    assert error.smallest_bytes > 2 * VALUE
    assert recals.stats.pinned_bytes == recals.stats.cached_bytes == 0
    works = recals_with_rngs(error.smallest_bytes, policy=policy)
    assert torch.equal(grads(fn(x), x)[0], grads(works(fn, x), x)[0])  # type: ignore[arg-type]
    assert works.stats.peak_cached_bytes <= error.smallest_bytes


def test_refused_before_anything_wrong_is_returned_and_the_next_call_works() -> None:
    recals = recals_with_rngs(VALUE)
    x, wide = leaf(32, 32), leaf(64, 64)
    with pytest.raises(CacheLimitError, match="outside of any module"):
        recals(chain(4), wide)
    assert wide.grad is None
    assert torch.equal(grads(chain(4)(x), x)[0], grads(recals(chain(4), x), x)[0])  # type: ignore[arg-type]


def test_smallest_limit_is_what_analyze_says() -> None:
    model, x = Named(), torch.randn(32, 32)
    analysis = recals_with_rngs(-1).analyze(model, x)
    smallest = analysis.smallest_limit_bytes
    assert smallest == 32 * 128 * 4
    recals_with_rngs(smallest)(model, x).sum().backward()
    with pytest.raises(CacheLimitError):
        recals_with_rngs(smallest - 1)(model, x)


# -- reported ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_working_set_is_what_one_op_needs(policy: str) -> None:
    """However long the way to rebuild a value, only an op's input and result are needed at once beyond the cache."""
    x = leaf(32, 32)
    for depth in (5, 40):
        recals = recals_with_rngs(VALUE, policy=policy)
        grads(recals(chain(depth), x), x)
        assert 0 < recals.stats.peak_working_bytes <= 2 * VALUE


def test_the_working_set_counts_wide_ops_in_full() -> None:
    def fn(x: Tensor) -> Tensor:
        parts = [x.sin() for _ in range(6)]
        return torch.cat(parts).exp().sin().exp().sin()

    x = leaf(32, 32)
    recals = recals_with_rngs(6 * VALUE)
    assert torch.equal(grads(fn(x), x)[0], grads(recals(fn, x), x)[0])  # type: ignore[arg-type]
    assert recals.stats.peak_working_bytes >= 6 * VALUE


def test_counts_of_a_chain_by_fifo() -> None:
    """Twelve equal values, three of them held: 12 - 3 dropped in forward; re-run per miss from the start, as documented."""
    x = leaf(32, 32)
    recals = recals_with_rngs(3 * VALUE, policy="fifo", audit="off")
    out = recals(chain(13), x)
    stats = recals.stats
    assert (stats.cached_bytes, stats.peak_cached_bytes, stats.pinned_bytes) == (3 * VALUE, 3 * VALUE, 0)
    assert (stats.dropped_values, stats.dropped_bytes) == (9, 9 * VALUE)
    assert (stats.recomputed_values, stats.recomputed_ops, stats.replays) == (0, 0, 0)
    grads(out, x)
    stats = recals.stats
    # Values 1..12 saved; 10..12 held. Misses at 9, 6, 3 run again from the start up to there and hold the last three.
    assert (stats.replays, stats.recomputed_values, stats.recomputed_bytes) == (3, 18, 18 * VALUE)
    assert stats.recomputed_ops == 9 + 6 + 3
    assert stats.cached_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_stats(policy: str) -> None:
    x = leaf(32, 32)
    recals = recals_with_rngs(3 * VALUE, policy=policy)
    grads(recals(chain(8), x), x)
    before = recals.stats
    assert before.dropped_values > 0
    assert before.recomputed_ops > 0
    recals.reset_stats()
    after = recals.stats
    assert after == type(after)(**dict.fromkeys(type(after).__dataclass_fields__, 0))
    assert before.dropped_values > 0  # a snapshot stays what it was
    out = recals(chain(8), x)
    recals.reset_stats()
    assert recals.stats.peak_cached_bytes == recals.stats.cached_bytes > 0
    del out


def test_parameters_inputs_and_views_are_not_cache() -> None:
    """Leaves are the program's; a small view of a big base costs the base, once, however many views were saved."""
    layer, x = nn.Linear(32, 32), leaf(32, 32)
    recals = recals_with_rngs(-1)
    out = recals(lambda x: layer(x) @ layer.weight, x)
    assert recals.stats.cached_bytes == VALUE  # the result of the layer; weights and input are not counted
    del out

    def views(x: Tensor) -> Tensor:
        base = x.sin()
        return sum((base[i : i + 1].exp() * base[i]).sum() for i in range(4))  # type: ignore[return-value]

    out = recals(views, x)
    small = 4 * 32 * 4
    assert VALUE + small <= recals.stats.cached_bytes <= VALUE + 2 * small
    del out


@pytest.mark.parametrize("policy", POLICIES)
def test_a_limit_of_zero_serves_what_caches_nothing(policy: str) -> None:
    recals = recals_with_rngs(0, policy=policy)
    x = leaf(8)
    assert torch.equal(grads(recals(lambda x: x + 1, x), x)[0], grads(x + 1, x)[0])  # type: ignore[arg-type]
    with torch.no_grad():
        recals(chain(5), x)
    with pytest.raises(CacheLimitError):
        recals(chain(5), x)
