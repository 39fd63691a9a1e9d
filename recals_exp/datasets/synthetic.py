"""Random inputs of any shape: for measuring a model for which no data are at hand. There is nothing in them to learn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recals_exp.datasets.spec import CLASSIFICATION, LANGUAGE_MODEL, TASKS, Batch, DataSpec, InputSpec, task_loss
from recals_exp.runconfig import ConfigError


def synthetic(
    shape: Sequence[int] = (3, 32, 32),
    num_classes: int = 10,
    task: str = CLASSIFICATION,
    n_samples: int = 256,
    seed: int = 0,
) -> DataSpec:
    """Normal noise of ``shape`` with random classes; for a language model, random tokens of shape ``[seq_len]``.

    A sample is a function of (``seed``, its number) alone: nothing is stored, whatever the shape.
    """
    shape = tuple(shape)
    if not shape or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in shape):
        raise ConfigError(f"shape={list(shape)} is not allowed: use whole numbers of at least 1, such as [3,32,32]")
    if task not in TASKS:
        raise ConfigError(f"task={task!r} is not allowed: use one of {', '.join(TASKS)}")
    if task == LANGUAGE_MODEL and len(shape) != 1:
        raise ConfigError(
            f"shape={list(shape)} is not allowed for {LANGUAGE_MODEL}: use one number, the sequence length"
        )
    for name, value in (("num_classes", num_classes), ("n_samples", n_samples)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} is not allowed: use a whole number of at least 1")

    def one(row: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + row)
        if task == LANGUAGE_MODEL:
            tokens = torch.randint(num_classes, (shape[0] + 1,), generator=generator)
            return Batch(tokens[:-1], tokens[1:])
        target = torch.randint(num_classes, (), generator=generator)
        return Batch(torch.randn(shape, generator=generator), target)

    def sample(rows: Tensor) -> Batch:
        items = [one(row) for row in rows.tolist()]
        return Batch(torch.stack([item.x for item in items]), torch.stack([item.target for item in items]))

    return DataSpec(
        name="synthetic",
        task=task,
        input_spec=InputSpec(shape, torch.int64 if task == LANGUAGE_MODEL else torch.float32),
        n_classes=num_classes,
        n_samples=n_samples,
        sample=sample,
        loss=task_loss,
        note="random numbers; the loss has nothing to fall to",
    )
