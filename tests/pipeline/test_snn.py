"""The spiking network, trained on digits through constant_forward under a budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from recals_exp.models.snn import LIF, RateCoded, rate_forward, reset_neurons, snn
from recals_exp.pipeline import ModelPipeline
from recals_exp.runconfig import ConfigError

STEPS = 6


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    return x[:1400], y[:1400], x[1400:], y[1400:]


def spread(model: RateCoded, budget: Any, threads: bool = False) -> ModelPipeline:
    pipe = ModelPipeline(threads=threads)
    layers = list(model.step)
    for part in (layers[:3], layers[3:5], layers[5:]):
        pipe.append(nn.Sequential(*part), "cpu", budget)
    return pipe


@pytest.mark.parametrize("encoder", ["constant", "poisson"])
def test_trained_on_digits_under_a_budget_it_is_the_plain_network_bit_for_bit(encoder: str) -> None:
    torch.manual_seed(0)
    plain = snn((64,), 10, depth=2, width=64, time_steps=STEPS, encoder=encoder)
    model = copy.deepcopy(plain)
    pipe = spread(model, 0.3)
    train_x, train_y, test_x, test_y = digits()
    accuracies = []
    losses: list[list[float]] = []
    for net, forward in ((plain, plain), (pipe, lambda x: rate_forward(pipe, x, STEPS))):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        losses.append([])
        for _ in range(4):
            for rows in torch.randperm(len(train_x)).split(100):
                loss = nn.functional.cross_entropy(forward(train_x[rows]), train_y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        with torch.no_grad():
            accuracies.append((forward(test_x).argmax(1) == test_y).float().mean().item())
    assert losses[0] == losses[1]
    assert accuracies[0] == accuracies[1]
    assert accuracies[0] > 0.8
    for one, other in zip(plain.step.parameters(), model.step.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sum(stage.budget.recals.stats.replays for stage in pipe.stages) > 0


def test_a_neuron_leaks_fires_and_resets() -> None:
    neuron = LIF(tau=2.0)
    current = torch.tensor([1.5, 3.0])
    assert torch.equal(neuron(current), torch.tensor([0.0, 1.0]))
    assert torch.equal(neuron.voltage, torch.tensor([0.75, 0.0]))
    assert torch.equal(neuron(current), torch.tensor([1.0, 1.0]))
    reset_neurons(nn.Sequential(neuron))
    assert neuron.voltage is None


def test_the_surrogate_gradient_is_that_of_an_arctangent() -> None:
    current = torch.tensor([2.0, 4.0], requires_grad=True)
    LIF(tau=2.0)(current).sum().backward()
    slope = [0.5 * 1 / (1 + (torch.pi * (c / 2 - 1)) ** 2) for c in (2.0, 4.0)]
    torch.testing.assert_close(current.grad, torch.tensor(slope))


def test_the_state_belongs_to_no_state_dict_and_each_call_starts_at_rest() -> None:
    torch.manual_seed(0)
    model = snn((4,), 2, width=8)
    x = torch.rand(3, 4)
    assert torch.equal(model(x), model(x))
    assert set(model.state_dict()) == {
        f"step.{n}.{k}" for n in ("linear1", "linear2", "readout") for k in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tau": 0.5}, "tau=0.5"), ({"encoder": "rate"}, "constant, poisson"), ({"depth": 0}, "depth=0")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        snn((4,), 2, **options)
