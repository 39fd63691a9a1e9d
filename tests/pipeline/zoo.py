"""Tiny models for the pipeline tests: each as a list of stages, with the rule that makes the plain model of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# torchvision and the models are imported where they are used: process tests import this file in every rank


@dataclass(frozen=True)
class Case:
    """A model cut into stages, and a batch for it."""

    name: str
    stages: Callable[[], list[nn.Module]]
    batch: Callable[[], Tensor]
    takes: dict[int, Any] = field(default_factory=dict)  # stage -> append(takes=...)
    max_stages: int = 5

    def plain(self, modules: list[nn.Module], x: Tensor) -> Tensor:
        """What the stages compute, written as a loop."""
        results: list[Any] = []
        for index, module in enumerate(modules):
            take = self.takes.get(index)
            if take is None:
                results.append(module(results[-1] if results else x))
            else:
                results.append(module(*(results[t if t != "previous" else index - 1] for t in take)))
        return results[-1]


def group(modules: list[nn.Module], n: int) -> list[nn.Module]:
    """``n`` stages of consecutive modules, as even as they come."""
    bounds = [round(k * len(modules) / n) for k in range(n + 1)]
    return [nn.Sequential(*modules[a:b]) for a, b in itertools.pairwise(bounds)]


def chain() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(5)]


def resnet() -> list[nn.Module]:
    import torchvision

    net = torchvision.models.resnet18(num_classes=5)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return [
        nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1),
        net.layer2,
        net.layer3,
        net.layer4,
        head,
    ]


class Front(nn.Module):
    """GPT's embeddings."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.drop = net.tokens, net.positions, net.drop

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))


def small_gpt() -> list[nn.Module]:
    from recals_exp.models.gpt import gpt

    net: Any = gpt(vocab_size=17, seq_len=6, depth=3, width=16, heads=2, dropout=0.2)
    return [Front(net), *net.blocks, nn.Sequential(net.norm, net.head)]


def spiking() -> list[nn.Module]:
    from recals_exp.models.snn import snn

    return list(snn((12,), 4, depth=2, width=10, encoder="poisson").step)


def conv(i: int, o: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, stride=stride, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Up(nn.Module):
    """Upsample, join with the skip, convolve."""

    def __init__(self, i: int, skip: int, o: int) -> None:
        super().__init__()
        self.body = conv(i + skip, o)

    def forward(self, low: Tensor, skip: Tensor) -> Tensor:
        return self.body(torch.cat([nn.functional.interpolate(low, scale_factor=2.0), skip], 1))


def unet() -> list[nn.Module]:
    return [conv(2, 4), conv(4, 8, 2), conv(8, 8, 2), Up(8, 8, 8), Up(8, 4, 3)]


CASES = {
    case.name: case
    for case in (
        Case("chain", chain, lambda: torch.randn(16, 12)),
        Case("resnet18", resnet, lambda: torch.randn(16, 3, 8, 8)),
        Case("gpt", small_gpt, lambda: torch.randint(17, (16, 6))),
        Case("unet", unet, lambda: torch.randn(16, 2, 8, 8), {3: ["previous", 1], 4: ["previous", 0]}),
        Case("snn", spiking, lambda: torch.rand(16, 12)),
    )
}
