"""A user's own data set: anything that is, or looks like, a map-style ``torch.utils.data.Dataset`` of (input, class)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recals_exp.datasets.spec import CLASSIFICATION, Batch, DataSpec, InputSpec, task_loss
from recals_exp.runconfig import ConfigError, PartSpec

SCAN_LIMIT = 20_000  # samples looked at to count the classes of a data set that does not say
ALLOWED = (
    "a data set is a recals_exp.datasets.DataSpec, or has __len__ and __getitem__ and gives (input, class number) pairs, "
    "like a torch.utils.data.Dataset"
)


def build_data(spec: PartSpec) -> DataSpec:
    """Build the data set a recipe names."""
    return as_data_spec(spec.build(), spec.name)


def as_data_spec(data: Any, name: str = "custom") -> DataSpec:
    """``data`` itself if it is a :class:`DataSpec`, else its view as one."""
    if isinstance(data, DataSpec):
        return data
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ConfigError(f"dataset {name} is a {type(data).__name__}: {ALLOWED}")
    if len(data) == 0:
        raise ConfigError(f"dataset {name} is empty: it must hold at least one sample")
    first, _ = _pair(data[0], name)

    def sample(rows: Tensor) -> Batch:
        pairs = [_pair(data[row], name) for row in rows.tolist()]
        return Batch(torch.stack([x for x, _ in pairs]), torch.tensor([target for _, target in pairs]))

    return DataSpec(
        name=name,
        task=CLASSIFICATION,
        input_spec=InputSpec(tuple(first.shape), first.dtype),
        n_classes=_count_classes(data, name),
        n_samples=len(data),
        sample=sample,
        loss=task_loss,
        note=f"{type(data).__module__}.{type(data).__qualname__}",
    )


def _pair(item: Any, name: str) -> tuple[Tensor, int]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ConfigError(f"dataset {name}: a sample is a {type(item).__name__}, not an (input, class) pair; {ALLOWED}")
    x, target = item
    try:
        x = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"dataset {name}: an input is a {type(x).__name__}, which is no tensor ({error}); convert it in the data set, "
            "for example with torchvision.transforms.ToTensor()"
        ) from error
    number = target.item() if isinstance(target, Tensor) and target.numel() == 1 else target
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise ConfigError(
            f"dataset {name}: a class is {target!r}, not a whole number. For another task build a DataSpec with its own "
            "loss"
        )
    return x, int(number)


def _count_classes(data: Any, name: str) -> int:
    if hasattr(data, "num_classes"):
        return int(data.num_classes)
    if hasattr(data, "classes"):
        return len(data.classes)
    if len(data) > SCAN_LIMIT:
        raise ConfigError(
            f"dataset {name} has {len(data)} samples and does not say how many classes: give it a 'num_classes' or "
            "'classes' attribute"
        )
    return 1 + max(_pair(data[row], name)[1] for row in range(len(data)))
