"""Images: scikit-learn's digits, which need no download, and torchvision's CIFAR-10 and image folders.

Why not torchvision's transforms for all: digits are kept as the 1797 small images they are and enlarged one batch at a
time, so that a ViT's 224 x 224 pixels do not cost a gigabyte.

Every builder takes ``image_size`` and ``channels``: what the model needs (``conf/dataset`` fills them in from it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recals_exp.datasets.spec import CLASSIFICATION, Batch, DataSpec, InputSpec, task_loss
from recals_exp.runconfig import ConfigError

N_DIGITS = 1797
SCALES = ("standard", "unit")


def digits(image_size: int = 8, channels: int = 1, scale: str = "standard", held_out: int = 0) -> DataSpec:
    """The 1797 handwritten digits of scikit-learn, 8 x 8 pixels, enlarged.

    Args:
        scale: "standard" has mean 0 and deviation 1; "unit" lies in [0, 1], as a rate-coded model's input must.
        held_out: so many digits, the last ones, are not trained on but used to judge what was learned.
    """
    _check_image(image_size, channels)
    if scale not in SCALES:
        raise ConfigError(f"scale={scale!r} is not allowed: use one of {', '.join(SCALES)}")
    if isinstance(held_out, bool) or not isinstance(held_out, int) or not 0 <= held_out < N_DIGITS:
        raise ConfigError(f"held_out={held_out!r} is not allowed: use a whole number from 0 to {N_DIGITS - 1}")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    images = (images - images.mean()) / images.std() if scale == "standard" else images / images.max()

    def sample(rows: Tensor) -> Batch:
        return Batch(_fit_image(images[rows], image_size, channels), labels[rows])

    return DataSpec(
        name="digits",
        task=CLASSIFICATION,
        input_spec=InputSpec((channels, image_size, image_size)),
        n_classes=10,
        n_samples=len(labels) - held_out,
        sample=sample,
        loss=task_loss,
        note="scikit-learn's handwritten digits, part of the package",
        n_held_out=held_out,
    )


def cifar10(
    root: str = "data", image_size: int = 32, channels: int = 3, train: bool = True, download: bool = False
) -> DataSpec:
    """CIFAR-10 from files under ``root`` (the folder that holds ``cifar-10-batches-py``)."""
    _check_image(image_size, channels)
    from torchvision.datasets import CIFAR10

    try:
        data = CIFAR10(root, train=train, download=download)
    except RuntimeError as error:
        raise ConfigError(
            f"cifar10: {Path(root).resolve() / CIFAR10.base_folder} does not hold the data set ({error}). Nothing is "
            "downloaded unasked: put the extracted files there, name their folder with dataset.root=FOLDER, or run "
            "once with dataset.download=true; dataset=digits needs no files"
        ) from error
    pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()  # uint8
    labels = torch.tensor(data.targets)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)  # of the training images
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)

    def sample(rows: Tensor) -> Batch:
        images = (pixels[rows].to(torch.float32) / 255 - mean) / std
        return Batch(_fit_image(images, image_size, channels), labels[rows])

    return DataSpec(
        name="cifar10",
        task=CLASSIFICATION,
        input_spec=InputSpec((channels, image_size, image_size)),
        n_classes=len(data.classes),
        n_samples=len(labels),
        sample=sample,
        loss=task_loss,
        note=f"CIFAR-10 from {root}",
    )


def image_folder(root: str, image_size: int = 224, channels: int = 3) -> DataSpec:
    """Images in one folder per class under ``root``, cut to a square, resized and normalised as ImageNet's are."""
    _check_image(image_size, channels)
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    try:
        data = ImageFolder(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"image_folder: {Path(root).resolve()} does not hold one folder of images per class ({error}). Expected "
            "root/CLASS/IMAGE.png (or .jpg, .jpeg, .bmp, .webp, ...); name the root with dataset.root=FOLDER"
        ) from error
    steps: list[Any] = [transforms.Resize(image_size), transforms.CenterCrop(image_size)]
    if channels == 1:
        steps += [transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize([0.449], [0.226])]
    else:
        steps += [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    transform = transforms.Compose(steps)

    def sample(rows: Tensor) -> Batch:
        items = [data[row] for row in rows.tolist()]
        return Batch(torch.stack([transform(image) for image, _ in items]), torch.tensor([label for _, label in items]))

    return DataSpec(
        name="image_folder",
        task=CLASSIFICATION,
        input_spec=InputSpec((channels, image_size, image_size)),
        n_classes=len(data.classes),
        n_samples=len(data),
        sample=sample,
        loss=task_loss,
        note=f"{len(data)} images of {len(data.classes)} classes under {root}",
    )


def _fit_image(images: Tensor, image_size: int, channels: int) -> Tensor:
    """[N, c, h, w] to [N, channels, image_size, image_size]."""
    if images.shape[-1] != image_size:
        shrinks = images.shape[-1] > image_size
        images = F.interpolate(
            images, size=(image_size, image_size), mode="bilinear", align_corners=False, antialias=shrinks
        )
    if images.shape[1] == channels:
        return images.contiguous()
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1).contiguous()
    return images.mean(dim=1, keepdim=True)


def _check_image(image_size: object, channels: object) -> None:
    if not isinstance(image_size, int) or isinstance(image_size, bool) or image_size < 1:
        raise ConfigError(f"image_size={image_size!r} is not allowed: use a whole number of pixels, at least 1")
    if isinstance(channels, bool) or channels not in (1, 3):
        raise ConfigError(f"channels={channels!r} is not allowed: use 1 (grey) or 3 (colour)")
