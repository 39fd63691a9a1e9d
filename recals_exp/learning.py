"""Real training, and what it is worth: does training under a strategy learn exactly what plain training learns?

Where the data set holds samples out, the model is trained a second time, plainly, from the same weights on the same batches. Then
the losses, the weights, the buffers, and the accuracy on the held-out samples are compared.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from recals_exp.checkpoint import Checkpoint
from recals_exp.datasets import Batch
from recals_exp.meters.device import seed_everything
from recals_exp.meters.parity import same_bits
from recals_exp.meters.steps import Forward, StepOutcome, TrainStep
from recals_exp.records import TrainingRecord


def train(
    step: TrainStep,
    forward: Forward,
    batches: Iterable[Batch],
    count: int,
    seed: int,
    on_step: Callable[[int, float, StepOutcome], None] = lambda index, loss, outcome: None,
    before_step: Callable[[], None] = lambda: None,
    checkpoint: Checkpoint | None = None,
) -> list[float]:
    """Learn for ``count`` steps and return the losses. ValueError if one is not finite.

    With a ``checkpoint``, the steps that it holds are not done again.
    """
    seed_everything(seed)
    losses: list[float] = []
    left = itertools.islice(batches, count)
    if checkpoint is not None:
        losses, generators = checkpoint.load()
        collections.deque(itertools.islice(left, len(losses)), maxlen=0)  # draws the batches of the steps that are done
        checkpoint.restore_generators(generators)
    with nullcontext() if checkpoint is None else checkpoint.interrupts_kept():
        for index, batch in enumerate(left, len(losses)):
            before_step()
            outcome = step(forward, *batch)
            loss = outcome.loss.item()
            losses.append(finite_loss(loss, index))
            on_step(index, loss, outcome)
            if checkpoint is not None:
                checkpoint.after_step(losses)
    if checkpoint is not None:
        checkpoint.remove()
    return losses


def finite_loss(loss: float, index: int) -> float:
    """The loss; ValueError if training diverged."""
    if not math.isfinite(loss):
        raise ValueError(f"training diverged: the loss of step {index} is {loss}; a lower optimizer.lr may help")
    return loss


def judge(
    training: TrainingRecord,
    step: TrainStep,
    forward: Forward,
    plain: TrainStep,
    batches: Iterable[Batch],
    held_out: Batch,
    seed: int,
) -> TrainingRecord:
    """The record with accuracies, and with plain training beside it.

    Args:
        step, forward: the trained model, and how it is called.
        plain: the same model before training; it is trained here.
        batches: those that ``step`` was trained on.
        held_out: on the step's device.
    """
    losses = train(plain, plain.model, batches, len(training.losses), seed)
    tensors = zip(
        (*step.model.parameters(), *step.model.buffers()),
        (*plain.model.parameters(), *plain.model.buffers()),
        strict=True,
    )
    same = tuple(losses) == training.losses and all(same_bits(one, other) for one, other in tensors)
    return dataclasses.replace(
        training,
        accuracy_pct=accuracy_pct(step, forward, held_out, seed),
        plain_accuracy_pct=accuracy_pct(plain, plain.model, held_out, seed),
        equals_plain=same,
    )


def accuracy_pct(step: TrainStep, forward: Forward, held_out: Batch, seed: int) -> float:
    """The share of samples whose largest logit is the target's, in eval mode and without gradients."""
    modes = [(part, part.training) for part in step.model.modules()]
    step.model.eval()
    seed_everything(seed)
    try:
        with torch.no_grad(), step.autocast():
            output: Any = forward(held_out.x)
    finally:
        for part, mode in modes:
            part.training = mode
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return 100 * (logits.argmax(-1) == held_out.target).double().mean().item()
