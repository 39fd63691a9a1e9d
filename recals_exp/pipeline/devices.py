"""The one place that knows about devices: what they are called, which exist, and how values travel between them.

Rules followed here:

1. ``2`` and ``"2"`` mean the accelerator with that index, as in the first ModelPipeline; anything torch can parse works.
2. A device that does not exist is refused when it is named, and the message lists those that exist.
3. There is one CPU: ``"cpu:0"`` and ``"cpu:1"`` are both ``"cpu"``, as they are to torch's tensors.
4. A copy to an accelerator runs on a stream of its own, so that kernels of either device need not wait for it: it waits
   for the work queued on the source, and the destination waits for it. Memory that two streams touch is marked so
   that the caching allocator does not hand it out too early. A copy to the CPU blocks: the CPU cannot wait for a stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

GpuId = int | str | torch.device


def parse_device(gpu_id: GpuId) -> torch.device:
    """The device a user named, if it exists; ValueError with those that exist if not (rules 1 to 3)."""
    if isinstance(gpu_id, bool) or not isinstance(gpu_id, (int, str, torch.device)):
        raise ValueError(
            f"{gpu_id!r} does not name a device: use an index, a name such as 'cuda:1' or 'cpu', or a device"
        )
    if isinstance(gpu_id, torch.device):
        device = gpu_id
    else:
        text = str(gpu_id).strip()
        try:
            device = torch.device(f"{accelerator_type()}:{text}" if text.isdigit() else text)
        except RuntimeError as error:
            raise ValueError(f"{gpu_id!r} does not name a device ({error}); {_exist()}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        return torch.device("meta")
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if device.type != accelerator_type() or (device.index or 0) >= count:
        raise ValueError(f"device {str(gpu_id)!r} ({device}) does not exist on this machine; {_exist()}")
    return torch.device(device.type, torch.accelerator.current_device_index() if device.index is None else device.index)


def existing_devices() -> tuple[str, ...]:
    """The names of the devices a stage can be put on."""
    if not torch.accelerator.is_available():
        return ("cpu",)
    return ("cpu", *(f"{accelerator_type()}:{index}" for index in range(torch.accelerator.device_count())))


def accelerator_type() -> str:
    """The kind of accelerator that a bare index means: this build's, or "cuda" where it has none."""
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


class Mover:
    """Takes values to devices; keeps one copy stream for each accelerator (rule 4)."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def move(self, value: Any, device: torch.device) -> Any:
        """The same value with every tensor in it on ``device``; those already there are the same objects."""
        if isinstance(value, Tensor):
            return self._move_tensor(value, device)
        if value is None or isinstance(value, (int, float, bool, str)):
            return value
        return pytree.tree_map_only(Tensor, lambda tensor: self._move_tensor(tensor, device), value)

    def _move_tensor(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        if device.type in ("cpu", "meta"):
            return tensor.to(device)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        destination = torch.accelerator.current_stream(device)
        from_accelerator = tensor.device.type == device.type
        # the copy writes fresh memory of the destination and reads the source: it waits for the queues of both
        stream.wait_stream(destination)
        if from_accelerator:
            stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with stream:
            moved = tensor.to(device, non_blocking=True)
        destination.wait_stream(stream)
        moved.record_stream(destination)
        if from_accelerator:
            tensor.record_stream(stream)
        return moved


def _exist() -> str:
    return f"the devices that exist are: {', '.join(existing_devices())}"
