"""What the rest of the framework knows about a data set: the shape of its input, its task, and its batches.

Why not ``torch.utils.data.DataLoader``: a measurement needs the same batch again (plain and wrapped steps are compared
on it), in the same order for the same seed, with no worker processes beside the thing that is timed.

Rules followed here:

1. Batches are a pure function of (data set, batch size, seed): no global generator is read or moved.
2. Every batch is full. Epochs are joined end to end, each a new permutation, so a batch may be larger than the data.
3. Targets are for the data set's own loss; the model is called with the input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSIFICATION = "classification"  # output: logits [N, classes], target: class numbers [N]
LANGUAGE_MODEL = "language_model"  # output: logits [N, T, vocabulary], target: next tokens [N, T]
TASKS = (CLASSIFICATION, LANGUAGE_MODEL)


class Batch(NamedTuple):
    """What one step learns from."""

    x: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One sample as the model gets it, without the batch dimension."""

    shape: tuple[int, ...]  # (channels, height, width) of an image, (tokens,) of a text
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A data set ready for use. ``sample`` gives the rows for a list of row numbers; :meth:`batches` chooses them."""

    name: str
    task: str  # one of TASKS
    input_spec: InputSpec
    n_classes: int  # classes, or the size of the vocabulary
    n_samples: int  # that batches are drawn from
    sample: Callable[[Tensor], Batch]  # int64 row numbers [N] -> Batch of N rows
    loss: Callable[[Any, Tensor], Tensor]  # (model output, target) -> scalar
    note: str = ""  # where the data come from, for the report
    n_held_out: int = 0  # rows after those, which no batch has: what was learned is judged by them

    def batches(self, batch_size: int, seed: int = 0) -> Iterator[Batch]:
        """Batches without end, on the CPU; the same for the same arguments (rules 1 and 2)."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not allowed: use at least 1")
        generator = torch.Generator().manual_seed(seed)
        rows = torch.empty(0, dtype=torch.int64)
        while True:
            while len(rows) < batch_size:
                rows = torch.cat([rows, torch.randperm(self.n_samples, generator=generator)])
            yield self.sample(rows[:batch_size])
            rows = rows[batch_size:]

    def held_out(self) -> Batch:
        """The rows that are held out, on the CPU."""
        return self.sample(torch.arange(self.n_samples, self.n_samples + self.n_held_out))

    def facts(self) -> dict[str, Any]:
        """What a model builder may ask for by the name of a parameter; see ``models.build_model``."""
        shape = self.input_spec.shape
        if self.task == LANGUAGE_MODEL:
            return {"vocab_size": self.n_classes, "seq_len": shape[0]}
        facts: dict[str, Any] = {"input_shape": shape, "num_classes": self.n_classes}
        if len(shape) == 3:
            facts |= {"in_channels": shape[0], "image_size": shape[-1]}
        return facts


def task_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [N, C] against [N], or of logits [N, T, V] against next tokens [N, T]."""
    logits = getattr(output, "logits", output)  # Hugging Face models return a record
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returned a {type(output).__name__}: the task's loss needs a tensor of logits, or a record with "
            "a field 'logits'"
        )
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"the model returned logits of shape {tuple(logits.shape)} for targets of shape {tuple(target.shape)}: "
            f"expected {(*target.shape, 'classes')}"
        )
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())
