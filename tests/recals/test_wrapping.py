"""`wrap` and `attach`: a limit by one line, with the plain run's bits, names, copies and files."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp.recals import Recals, recals_with_rngs

LIMIT = 3 * 12 * 16 * 4  # bytes: three values of a step that saves eleven


class Net(nn.Module):
    """Batch norm, dropout, a buffer that is not saved, a state of its own, a method, a hook's victim."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)), nn.Dropout(0.2)
        )
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        return self.head(self.layers(x)) * self.scale * factor

    def describe(self) -> str:
        return "a net"

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Outer(nn.Module):
    """A module with another one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).exp()


def wrapped(module: nn.Module, recals: Recals) -> nn.Module:
    return recals.wrap(module)


def attached(module: nn.Module, recals: Recals) -> nn.Module:
    recals.attach(module)
    return module


WAYS: list[Callable[[nn.Module, Recals], nn.Module]] = [wrapped, attached]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, steps: int = 3) -> list[Any]:
    """Losses, gradients of the last step, weights, and the generator: all that must not depend on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    seen: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(12, 16)).square().mean()
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
    seen += [
        (name, parameter.grad.tolist()) for name, parameter in model.named_parameters() if parameter.grad is not None
    ]
    seen += [(name, value.tolist()) for name, value in model.named_buffers()]
    return [*seen, torch.rand(()).item()]


@each_way
def test_a_plain_loop_is_the_plain_run(way: Callable[[nn.Module, Recals], nn.Module]) -> None:
    recals = recals_with_rngs(LIMIT)
    assert train(way(net(), recals)) == train(net())
    assert recals.stats.recomputed_values
    assert recals.stats.peak_cached_bytes <= LIMIT
    assert recals.stats.cached_bytes == 0


@each_way
def test_a_part_of_a_model_can_be_limited(way: Callable[[nn.Module, Recals], nn.Module]) -> None:
    recals = recals_with_rngs(LIMIT)
    outer = Outer(way(net(), recals))
    plain = Outer(net())
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in outer.named_modules()] == [name for name, _ in plain.named_modules()]
    assert train(outer) == train(plain)
    assert recals.stats.recomputed_values


@each_way
def test_checkpoints_interchange(way: Callable[[nn.Module, Recals], nn.Module]) -> None:
    plain, limited = net(), way(Net(), recals_with_rngs(LIMIT))
    plain.calls = 7
    state = plain.state_dict()
    assert list(limited.state_dict()) == list(state)
    assert state["_extra_state"] == {"calls": 7}
    limited.load_state_dict(state)
    assert limited.calls == 7
    again = Net()
    again.load_state_dict(limited.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    outer = Outer(way(Net(), recals_with_rngs(LIMIT)))  # loading goes another way for a child
    outer.load_state_dict(Outer(plain).state_dict())
    assert outer.inner.calls == 7
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*head\.weight"):
        limited.load_state_dict({})


@each_way
def test_train_eval_and_to_pass_through(way: Callable[[nn.Module, Recals], nn.Module]) -> None:
    module = net()
    limited = way(module, recals_with_rngs(LIMIT))
    assert limited.eval().training is False
    assert (module.training, module.layers.training) == (False, False)
    assert limited.train().layers.training
    assert module.training
    assert limited.to(torch.float64) is limited
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
    assert {buffer.dtype for buffer in limited.buffers()} == {torch.float64, torch.int64}
    limited.extra = nn.Linear(2, 2)
    assert "extra.weight" in dict(limited.named_parameters())
    assert limited.describe() == "a net"
    assert limited.head is module.head
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = limited.nothing
    assert limited(torch.randn(2, 16).double(), factor=0.0).abs().max() == 0


@each_way
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_parameters_and_a_cache_of_its_own(
    way: Callable[[nn.Module, Recals], nn.Module], duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    recals = recals_with_rngs(LIMIT, policy="dtr")
    original = way(net(), recals)
    original(torch.randn(12, 16)).sum().backward()
    original.zero_grad()
    other = duplicate(original)
    before = train(net())
    assert type(other) is type(original)
    assert other.calls == 1
    other.load_state_dict(net().state_dict())
    recals.reset_stats()
    other.seen.zero_()
    assert train(other) == before
    assert recals.stats.peak_cached_bytes == 0  # the original's was not asked
    assert list(other.state_dict()) == list(original.state_dict())
    assert all(a is not b for a, b in zip(other.parameters(), original.parameters(), strict=True))


@each_way
def test_whole_modules_are_saved_and_loaded(way: Callable[[nn.Module, Recals], nn.Module]) -> None:
    file = io.BytesIO()
    torch.save(way(net(), recals_with_rngs(LIMIT)), file)
    file.seek(0)
    assert train(torch.load(file, weights_only=False)) == train(net())


@each_way
def test_without_gradients_nothing_is_recorded(way: Callable[[nn.Module, Recals], nn.Module]) -> None:
    recals = recals_with_rngs(LIMIT)
    limited = way(net(), recals)
    with torch.no_grad():
        limited(torch.randn(12, 16))
    with torch.inference_mode():
        limited(torch.randn(12, 16))
    assert recals.stats.peak_cached_bytes == 0
    assert next(recals.sequence) == 0


def test_attaching_leaves_everything_but_the_call() -> None:
    module = net()
    parameters = inspect.signature(module.forward).parameters
    with recals_with_rngs(LIMIT).attach(module) as attachment:
        assert isinstance(module, Net)
        assert type(module).__name__ == "Net"
        assert type(module) is not Net
        assert inspect.signature(module.forward).parameters == parameters
        assert "forward" not in module.__dict__
        assert attachment.module is module
    assert type(module) is Net
    assert train(module) == train(net())
    assert attachment.recals.stats.peak_cached_bytes == 0
    with pytest.raises(ValueError, match="it was removed already"):
        attachment.remove()


def test_twice_is_refused() -> None:
    recals = recals_with_rngs(LIMIT)
    module = net()
    wrapper = recals.wrap(module)
    with pytest.raises(ValueError, match=r"this RecalsModule is wrapped already: .* wrap the module itself"):
        recals.attach(wrapper)
    recals.attach(module)
    for again in (recals.wrap, recals.attach):
        with pytest.raises(ValueError, match=r"this Net is attached already: .* remove the attachment"):
            again(module)


def test_one_limit_holds_for_several_modules() -> None:
    """Each is known by itself, though all are called through the one `nn.Module.__call__`."""
    recals = recals_with_rngs(LIMIT)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(4)))
    plain = copy.deepcopy(model)
    for block in model:
        recals.attach(block)
    assert train(model) == train(plain)
    assert recals.stats.peak_cached_bytes <= LIMIT
    assert recals.stats.recomputed_values
    assert all(block in recals._seen for block in model)


def test_the_representation_says_what_it_is() -> None:
    text = repr(recals_with_rngs("4KiB").wrap(net()))
    assert text.startswith("RecalsModule(\n  Net, planned, limit 4096 bytes\n")
    assert "(head): Linear" in text
