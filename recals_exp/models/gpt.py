"""A small GPT: a pre-norm decoder with learned positions and dropout, on torch's own scaled dot product attention.

Why not the one of transformers: it is one more dependency, and this one shows in thirty lines what a cache holds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recals_exp.models.checks import check_probability, check_whole
from recals_exp.runconfig import ConfigError


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    """Tokens [N, T] to logits [N, T, vocabulary]."""

    def __init__(self, vocab_size: int, seq_len: int, depth: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.positions.num_embeddings:
            raise ValueError(
                f"got {tokens.shape[1]} tokens, but this model was built for seq_len={self.positions.num_embeddings}: "
                "build it with a larger seq_len or cut the input"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(
    vocab_size: int, seq_len: int, depth: int = 6, width: int = 192, heads: int = 6, dropout: float = 0.1
) -> nn.Module:
    """A decoder of ``depth`` blocks."""
    check_whole(vocab_size=vocab_size, seq_len=seq_len, depth=depth, width=width, heads=heads)
    check_probability(dropout=dropout)
    if width % heads:
        raise ConfigError(f"width={width} is not a multiple of heads={heads}: every head takes the same share")
    return GPT(vocab_size, seq_len, depth, width, heads, dropout)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
