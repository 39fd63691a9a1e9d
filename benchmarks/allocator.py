"""Does memory that was just freed come back? The addresses of a chain's results: plain, under a mode that does nothing, recorded.

    python benchmarks/allocator.py
    LD_PRELOAD=libtcmalloc.so.4 python benchmarks/allocator.py

64 layers (Linear 256, Tanh) on 2048 rows, one thread, the second step. Of each pair only the Tanh's result is kept for backward, so the
Linear's 2 MiB are free again when the next one runs. Prints how many addresses the 64 results had.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from record_overhead import under_empty_mode
from torch import Tensor, nn

from recals_exp.recals import recals_with_rngs

LAYERS, WIDTH, ROWS = 64, 256, 2048


def main() -> None:
    torch.set_num_threads(1)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = nn.Sequential(*[part for linear in linears for part in (linear, nn.Tanh())])
    x = torch.randn(ROWS, WIDTH)
    addresses: list[int] = []
    for linear in linears:
        linear.register_forward_hook(lambda module, args, out: addresses.append(out.data_ptr()))
    recals = recals_with_rngs(-1)

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": model,
        "an empty dispatch mode": lambda x: under_empty_mode(model, x),
        "recals, nothing dropped": lambda x: recals(model, x),
    }
    for name, call in calls.items():
        for _ in range(2):
            addresses.clear()
            call(x).sum().backward()
        print(f"{name:24} {len(set(addresses)):3} addresses for {len(addresses)} results")


if __name__ == "__main__":
    main()
