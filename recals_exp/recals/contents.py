"""What a storage holds: copied, compared, summed up. No dispatch mode sees any of it."""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch import Tensor, UntypedStorage
from torch._C import _DisableTorchDispatch


def copy_of(storage: UntypedStorage) -> UntypedStorage:
    with _DisableTorchDispatch():
        return storage.clone()


def same_bytes(a: UntypedStorage, b: UntypedStorage) -> bool:
    with _DisableTorchDispatch():
        return a.nbytes() == b.nbytes() and torch.equal(_as_bytes(a), _as_bytes(b))


def checksum(storage: UntypedStorage) -> int:
    """CRC-32 on a CPU; PyTorch's hash of the 8-byte words elsewhere; 0 where there are no bytes."""
    kind, nbytes = storage.device.type, storage.nbytes()
    if kind == "meta" or nbytes == 0:
        return 0
    with _DisableTorchDispatch():
        if kind == "cpu":
            # Not by way of NumPy, which would mark the program's storage as not resizable for good.
            return zlib.crc32((ctypes.c_char * nbytes).from_address(storage.data_ptr()))
        words = _as_bytes(storage)[: nbytes // 8 * 8].view(torch.int64)
        return int(torch.hash_tensor(words)) if len(words) else 0


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
