"""A rate-coded spiking network: leaky integrate-and-fire neurons, run several times on the same input.

Each run of the network is one time step. A neuron's membrane voltage v leaks towards its input and is set back when it
fires; it is what connects one step with the next::

    v <- v + (x - v) / tau          fires (1) if v >= 1, else silent (0)          v <- 0 where it fired

Why not spikingjelly: a reader sees here in a page what a cache must hold (the voltages and spikes of every step), and one
dependency less is needed. Its networks run through `ModelPipeline.constant_forward` in the same way.

Rules followed here:

1. Firing is a step, whose derivative is zero or infinite; backward uses the derivative of an arctangent in its place
   (a surrogate gradient, https://arxiv.org/abs/1901.09948).
2. The voltage lives in a Python attribute, made at the first step after a reset; it belongs to no ``state_dict``.
3. `RateCoded.forward` resets, runs the steps, averages, and resets again, for a voltage holds the whole graph of its step.
   ``RateCoded.step`` alone is the network of one step, which a pipeline runs with ``constant_forward``; `rate_forward` does
   that with the same result, bit for bit.
4. The input is constant (pixels as currents) or Poisson (a pixel in [0, 1] is the probability of a spike in each step,
   drawn anew from torch's generator).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recals_exp.models.checks import check_whole
from recals_exp.runconfig import ConfigError

ENCODERS = ("constant", "poisson")
THRESHOLD = 1.0  # volts at which a neuron fires
SHARPNESS = 2.0  # of the surrogate: higher is closer to the step


class Fire(torch.autograd.Function):
    """1 where the voltage is above the threshold; a smooth derivative in backward (rule 1)."""

    @staticmethod
    def forward(ctx: Any, above: Tensor) -> Tensor:
        ctx.save_for_backward(above)
        return (above >= 0).to(above.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (above,) = ctx.saved_tensors
        return grad * (SHARPNESS / 2) / (1 + (math.pi / 2 * SHARPNESS * above).square())


class LIF(nn.Module):
    """Leaky integrate-and-fire neurons, one for each feature; ``tau`` is the leak's time constant in steps."""

    def __init__(self, tau: float = 2.0) -> None:
        super().__init__()
        self.tau = tau
        self.voltage: Tensor | None = None

    def forward(self, current: Tensor) -> Tensor:
        before = torch.zeros_like(current) if self.voltage is None else self.voltage
        voltage = before + (current - before) / self.tau
        spikes: Tensor = Fire.apply(voltage - THRESHOLD)
        self.voltage = voltage * (1 - spikes)
        return spikes

    def reset(self) -> None:
        """Forget the voltage: the next step starts at rest."""
        self.voltage = None

    def extra_repr(self) -> str:
        return f"tau={self.tau}"


class PoissonInput(nn.Module):
    """Spikes with the pixel's value as their probability, drawn anew in each step."""

    def forward(self, pixels: Tensor) -> Tensor:
        return (torch.rand_like(pixels) < pixels).to(pixels.dtype)


class RateCoded(nn.Module):
    """``time_steps`` runs of ``step`` on the same input, averaged."""

    def __init__(self, step: nn.Sequential, time_steps: int) -> None:
        super().__init__()
        self.step = step
        self.time_steps = time_steps

    def forward(self, x: Tensor) -> Tensor:
        reset_neurons(self.step)
        total = self.step(x)
        for _ in range(self.time_steps - 1):
            total = total + self.step(x)
        reset_neurons(self.step)
        return total / self.time_steps


class RunsConstant(Protocol):
    """What `rate_forward` needs of a pipeline."""

    def constant_forward(self, x: Any, T: int, reduce: bool = True) -> Any: ...

    def modules(self) -> Any: ...


def snn(
    input_shape: Sequence[int],
    num_classes: int,
    depth: int = 2,
    width: int = 128,
    time_steps: int = 8,
    tau: float = 2.0,
    encoder: str = "constant",
) -> RateCoded:
    """``depth`` layers of ``width`` spiking neurons, then a linear read-out, over ``time_steps`` steps."""
    check_whole(depth=depth, width=width, time_steps=time_steps, num_classes=num_classes)
    if tau < 1:
        raise ConfigError(f"tau={tau} is below 1: a neuron cannot leak more than all of its voltage in a step")
    if encoder not in ENCODERS:
        raise ConfigError(f"encoder={encoder!r} is not known: use one of {', '.join(ENCODERS)}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    if encoder == "poisson":
        layers["encoder"] = PoissonInput()
    features = math.prod(input_shape)
    for number in range(1, depth + 1):
        layers[f"linear{number}"] = nn.Linear(features, width)
        layers[f"neurons{number}"] = LIF(tau)
        features = width
    layers["readout"] = nn.Linear(features, num_classes)
    return RateCoded(nn.Sequential(layers), time_steps)


def rate_forward(pipeline: RunsConstant, x: Tensor, time_steps: int) -> Tensor:
    """What `RateCoded` returns, with its ``step`` run by a pipeline."""
    reset_neurons(pipeline)
    total: Tensor = pipeline.constant_forward(x, time_steps)
    reset_neurons(pipeline)
    return total / time_steps


def reset_neurons(module: nn.Module | RunsConstant) -> None:
    """Reset every `LIF` in a module."""
    for part in module.modules():
        if isinstance(part, LIF):
            part.reset()
