"""torchvision's models, untrained, fitted to the data set's channels, classes and image size."""

from __future__ import annotations

from collections.abc import Callable

import torchvision
from torch import nn

from recals_exp.models.checks import check_probability, check_whole
from recals_exp.runconfig import ConfigError

VIT_PATCH = 16  # pixels: the "16" of vit_b_16


def resnet18(in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-18: 11.7 million parameters."""
    return _resnet(torchvision.models.resnet18, in_channels, num_classes)


def resnet50(in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-50: 25.6 million parameters."""
    return _resnet(torchvision.models.resnet50, in_channels, num_classes)


def vit_b_16(
    in_channels: int,
    image_size: int,
    num_classes: int,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    dropout: float = 0.0,
) -> nn.Module:
    """ViT-B with patches of 16 x 16 pixels: 86 million parameters; depth, width and heads make it smaller."""
    check_whole(image_size=image_size, num_classes=num_classes, depth=depth, width=width, heads=heads)
    check_probability(dropout=dropout)
    if image_size % VIT_PATCH:
        raise ConfigError(
            f"image_size={image_size} is not allowed for vit_b_16: its patches have {VIT_PATCH} pixels, use a multiple "
            f"of {VIT_PATCH}, for example dataset.image_size={max(1, round(image_size / VIT_PATCH)) * VIT_PATCH}"
        )
    if width % heads:
        raise ConfigError(f"width={width} is not a multiple of heads={heads}: every head takes the same share")
    model = torchvision.models.VisionTransformer(
        image_size=image_size,
        patch_size=VIT_PATCH,
        num_layers=depth,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=4 * width,
        dropout=dropout,
        num_classes=num_classes,
    )
    # torchvision starts the head at zero, for fine-tuning: no gradient would pass it in the first step
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
    if in_channels != 3:
        model.conv_proj = nn.Conv2d(in_channels, width, VIT_PATCH, VIT_PATCH)
    return model


def _resnet(builder: Callable[..., nn.Module], in_channels: int, num_classes: int) -> nn.Module:
    check_whole(in_channels=in_channels, num_classes=num_classes)
    model = builder(weights=None, num_classes=num_classes)
    if in_channels != 3:
        model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model
