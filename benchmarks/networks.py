"""The networks that the benchmarks of policies and planner run on.

``chain`` = 64 x (Linear 512, Tanh), batch 512; ``gpt`` = 8 pre-norm blocks, d 512, batch 4 x 256, dropout 0.1; ``resnet50`` =
torchvision, batch 8, 128 px; ``vit_b_16`` = torchvision, batch 2, 128 px; ``unet`` = four levels with long skips, batch 4, 96 px;
``lstm`` = two LSTM cells, 256 wide, over 64 time steps, batch 32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recals_exp.meters.steps import TrainStep

CHAIN_LAYERS = 64


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(rows, steps, width)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Token and position embedding, blocks, norm, head."""

    def __init__(self, blocks: int = 8, width: int = 512, steps: int = 256, tokens: int = 1000) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(steps, width))
        self.blocks = nn.Sequential(*(Block(width, 8, 0.1) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(x) + self.position))


class UNet(nn.Module):
    """Down and up again; what each level made on the way down is read again at the very end of its way up."""

    def __init__(self, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(self._convs(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(self._convs(a + b, a) for a, b in itertools.pairwise(widths))
        self.head = nn.Conv2d(width, 10, 1)

    @staticmethod
    def _convs(inward: int, outward: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inward, outward):
            layers += [nn.Conv2d(channels, outward, 3, padding=1, bias=False), nn.BatchNorm2d(outward), nn.ReLU(True)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, convs in enumerate(self.down):
            x = convs(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for level in range(len(self.up) - 1, -1, -1):
            x = nn.functional.interpolate(x, scale_factor=2)
            x = self.up[level](torch.cat([skips[level], x], 1))
        return self.head(x).mean((2, 3))


class Lstm(nn.Module):
    """Cells in a Python loop: thousands of small values, each read by the next time step."""

    def __init__(self, width: int = 256, layers: int = 2, tokens: int = 100) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        states: list[tuple[Tensor, Tensor] | None] = [None] * len(self.cells)
        for x in self.token(tokens).unbind(1):
            for i, cell in enumerate(self.cells):
                state = states[i] = cell(x, states[i])
                x = state[0]
        return self.head(x)


def chain() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(CHAIN_LAYERS) for layer in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(512, 512)


def gpt() -> tuple[nn.Module, Tensor]:
    return Gpt(), torch.randint(0, 1000, (4, 256))


def resnet50() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.resnet50(), torch.randn(8, 3, 128, 128)


def vit_b_16() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.vit_b_16(image_size=128), torch.randn(2, 3, 128, 128)


def unet() -> tuple[nn.Module, Tensor]:
    return UNet(), torch.randn(4, 3, 96, 96)


def lstm() -> tuple[nn.Module, Tensor]:
    return Lstm(), torch.randint(0, 100, (32, 64))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "chain": chain,
    "gpt": gpt,
    "resnet50": resnet50,
    "vit_b_16": vit_b_16,
    "unet": unet,
    "lstm": lstm,
}


@dataclass(frozen=True)
class Training:
    """A training step of one network: cross entropy, SGD, one batch."""

    step: TrainStep
    batch: tuple[Tensor, Tensor]


def training(network: str | Callable[[], tuple[nn.Module, Tensor]], samples: int | None = None) -> Training:
    """The training step of a network, by name or by what builds it; ``samples``: of the batch, all of them by default."""
    torch.manual_seed(0)
    model, x = NETWORKS[network]() if isinstance(network, str) else network()
    x = x[:samples]
    with torch.no_grad():
        shape = model.eval()(x).shape
    target = torch.randint(0, shape[-1], shape[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Training(TrainStep(model.train(), optimizer, _loss, torch.device("cpu")), (x, target))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
