"""The front door: every documented form of every argument, and errors that say what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recals.scenarios import grads, leaf
from torch import Tensor, nn

from recals_exp.recals import POLICIES, Recals, SizeError, format_bytes, parse_bytes, recals_with_rngs

CPU_SAVED: list[Any] = ["all", "cpu", -1, [-1], [0, -1], (-1,), torch.empty(0), torch.zeros(3, dtype=torch.long)]
CPU_NOT_SAVED: list[Any] = ["none", "cuda", 0, 3, [0], [0, 1], (), []]


def _noisy(x: Tensor) -> Tensor:
    for _ in range(4):
        x = F.dropout(x.sin(), 0.5)
    return x


@pytest.mark.parametrize("devices", CPU_SAVED + CPU_NOT_SAVED, ids=repr)
def test_every_form_of_gpu_devices_gives_plain_gradients(devices: Any) -> None:
    x = leaf(16, 16)
    torch.manual_seed(1)
    expected = grads(_noisy(x), x)
    state = torch.get_rng_state()
    unlimited = recals_with_rngs(-1, devices)
    kept = unlimited(_noisy, x)
    pinned_bytes = unlimited.stats.pinned_bytes
    del kept
    recals = recals_with_rngs(pinned_bytes + 16 * 16 * 4, devices)
    torch.manual_seed(1)
    found = grads(recals(_noisy, x), x)
    assert torch.equal(expected[0], found[0])  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert recals.stats.recomputed_values > 0
    saved = any(devices is form for form in CPU_SAVED)
    assert (pinned_bytes == 0) == saved


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ("gpu", ValueError, r"'gpu' is not known; allowed: 'all', 'none', 'cuda', 'cpu'"),
        ("", ValueError, "allowed"),
        (-2, ValueError, "-1 for the CPU; got -2"),
        ([0, -3], ValueError, "got -3"),
        (True, TypeError, "bool"),
        ([True], TypeError, "bool"),
        (1.0, TypeError, "float"),
        (["0"], TypeError, "str"),
        (None, TypeError, "NoneType"),
        ({"cpu": 0}, TypeError, "dict"),
    ],
    ids=repr,
)
def test_other_forms_of_gpu_devices_are_refused(devices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recals_with_rngs(1024, devices)


@pytest.mark.gpu
def test_a_tensor_names_its_device() -> None:
    recals = recals_with_rngs(0, torch.empty(0, device="cuda:0"))
    assert recals.generators.covers(torch.device("cuda:0"))
    assert not recals.generators.covers(torch.device("cpu"))


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        (0, 0), (1024, 1024), (4 * 1024**3, 4 * 1024**3), ("4GiB", 4 * 1024**3), ("512MiB", 512 * 1024**2), (" 1.5 KB ", 1500),
        ("2 mib", 2 * 1024**2), ("100", 100), ("7B", 7), (".5TiB", 2**39), ("3.GB", 3 * 10**9), (-1, None), (None, None),
    ],
)  # fmt: skip
def test_sizes(size: Any, limit: int | None) -> None:
    assert recals_with_rngs(size).cache_limit_bytes == limit


@pytest.mark.parametrize(
    "size", [-2, "-1", "4 GiB extra", "GiB", "", "4XB", "1.5", True, False, 1.5, b"4GiB", "1e9", "4 Gi B", [4]]
)
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(SizeError, match="cache_limit_size") as raised:
        recals_with_rngs(size)
    assert isinstance(raised.value, ValueError)
    assert repr(size) in str(raised.value) or str(size) in str(raised.value)
    assert "-1 or None means no limit" in str(raised.value)


def test_sizes_are_formatted_as_they_are_read() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 512 * 2**20, 3 * 2**40, -2048)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "512.0 MiB", "3.0 TiB", "-2.0 KiB",
    ]  # fmt: skip
    for nbytes in (1, 1024, 5 * 2**20, 7 * 2**30):
        assert parse_bytes(format_bytes(nbytes)) == nbytes


def test_policies_by_name_and_by_object() -> None:
    for name, policy in POLICIES.items():
        assert recals_with_rngs(0, policy=name).policy == name
        assert recals_with_rngs(0, policy=policy()).policy == name
    with pytest.raises(ValueError, match=r"'lifo' is not known; there are: .*fifo"):
        recals_with_rngs(0, policy="lifo")
    with pytest.raises(TypeError):
        recals_with_rngs(0, "all", "fifo")  # type: ignore[misc]


@pytest.mark.parametrize("audit", ["first", "off", "always"])
def test_audit_settings(audit: str) -> None:
    x = leaf(8)
    recals = recals_with_rngs(32, audit=audit)
    for _ in range(2):
        assert torch.equal(grads(recals(_cheap, x), x)[0], grads(_cheap(x), x)[0])  # type: ignore[arg-type]


def _cheap(x: Tensor) -> Tensor:
    return x.sin().exp().cos().tanh()


def test_other_audit_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="sometimes") as raised:
        recals_with_rngs(0, audit="sometimes")
    for allowed in ("first", "off", "always"):
        assert allowed in str(raised.value)


def test_arguments_named_like_its_own() -> None:
    recals = recals_with_rngs(-1)

    def fn(a: int, /, *args: int, fn: int, self: int, **kwargs: int) -> tuple[Any, ...]:
        return a, args, fn, self, kwargs

    given = recals(fn, 1, 2, fn=3, self=4, recals=5, args=6, kwargs=7, out=8, session=9)
    assert given == (1, (2,), 3, 4, {"recals": 5, "args": 6, "kwargs": 7, "out": 8, "session": 9})
    model = nn.Linear(2, 2)
    for method in (recals.analyze, recals.audit):
        assert method(lambda fn, self: fn.sin() + model(self).exp(), fn=leaf(2), self=leaf(2)) is not None


def test_errors_of_the_function_are_its_own() -> None:
    recals = recals_with_rngs(-1)
    with pytest.raises(KeyError, match="mine"):
        recals({}.__getitem__, "mine")
    with pytest.raises(TypeError, match="not callable"):
        recals(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        recals()  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        recals(nn.Linear(3, 3), torch.randn(2, 2))


def test_analyze_is_a_pair_and_more() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.BatchNorm1d(8))
    x = torch.randn(5, 4)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    recals = recals_with_rngs(16)
    analysis = recals.analyze(model, x)
    total, unit_max = analysis
    assert (total, unit_max) == (analysis.total_bytes, analysis.unit_max_bytes)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert recals.stats.cached_bytes == recals.stats.peak_cached_bytes == 0
    unlimited = recals_with_rngs(-1)
    out = unlimited(model, x)
    assert unlimited.stats.cached_bytes == total
    del out
    names = [layer.name for layer in analysis.layers]
    assert "2.1" in names
    assert sum(layer.nbytes for layer in analysis.layers) == total
    assert unit_max == max(layer.nbytes for layer in analysis.layers if layer.is_unit)
    with torch.no_grad():
        assert tuple(recals.analyze(model, x)) == (total, unit_max)


def test_audit_reports_what_it_looked_at() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Sigmoid())
    report = recals_with_rngs(-1).audit(model, torch.randn(5, 4))
    assert report.is_clean
    assert report.findings == ()
    assert report.ops >= 5
    assert report.value_bytes > 0


def test_two_objects_do_not_know_each_other() -> None:
    first, second = recals_with_rngs(64), recals_with_rngs(-1)
    x = leaf(16)
    a, b = first(_cheap, x), second(_cheap, x)
    assert first.stats.dropped_values > 0
    assert second.stats.dropped_values == 0
    assert torch.equal(grads(a, x)[0], grads(b, x)[0])  # type: ignore[arg-type]


def test_it_says_what_it_is() -> None:
    assert isinstance(recals_with_rngs("1MiB"), Recals)
    assert recals_with_rngs("1MiB").policy == "planned"
    with pytest.raises(AttributeError):
        recals_with_rngs("1MiB").stats = None  # type: ignore[misc, assignment]
