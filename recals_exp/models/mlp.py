"""The uniform chain: the model for which the documented cost of a cache limit holds.

Why it is built so (sizes for a batch of N samples)::

    x -> [Linear -> Tanh] -> [Linear -> Tanh] -> ... -> [Linear -> Tanh] -> Linear -> logits
              unit 1              unit 2                    unit depth         head

1. Tanh saves its *output*, and the next Linear saves its *input*: the same storage. So each unit caches exactly one
   value of N x width numbers, and nothing else. (ReLU would do too, GELU would save a second value.)
2. All units have the same cost when ``width`` is the size of the flattened input, which is the default. The first Linear
   saves the input itself, which is a leaf and never counted.
3. A matmul dominates, and backward does two for each one of forward: backward = 2 x forward.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from recals_exp.models.checks import check_whole


def mlp_chain(input_shape: Sequence[int], num_classes: int, depth: int = 32, width: int | None = None) -> nn.Sequential:
    """``depth`` units of Linear and Tanh of ``width`` features (None: as many as the input has), then a linear head."""
    features = math.prod(input_shape)
    width = features if width is None else width
    check_whole(depth=depth, width=width, num_classes=num_classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number in range(1, depth + 1):
        linear = nn.Linear(features, width)
        # tanh'(0) = 1: this gain keeps the signal's size through a deep chain, so that it learns
        nn.init.xavier_normal_(linear.weight, gain=nn.init.calculate_gain("tanh") * 0.75)
        nn.init.zeros_(linear.bias)
        layers[f"unit{number}"] = nn.Sequential(OrderedDict(linear=linear, tanh=nn.Tanh()))
        features = width
    layers["head"] = nn.Linear(features, num_classes)
    return nn.Sequential(layers)
