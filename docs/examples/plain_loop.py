"""A plain training loop within a byte limit: two lines beside an ordinary one.

python docs/examples/plain_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

from recals_exp import recals_with_rngs


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)), nn.Linear(64, 10)
    )
    x, target = torch.randn(256, 64), torch.randint(0, 10, (256,))

    total, _ = recals_with_rngs(-1).analyze(model, x)
    recals = recals_with_rngs(total // 4)  # bytes; or a size such as "4GiB"
    limited = recals.wrap(model)  # called like the model; same state_dict keys, same parameters

    optimizer = torch.optim.AdamW(limited.parameters(), lr=3e-3)
    for step in range(20):
        loss = nn.functional.cross_entropy(limited(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    model.load_state_dict(limited.state_dict())  # checkpoints interchange
    print(
        f"cached at most {recals.stats.peak_cached_bytes} of {total} bytes; recomputed {recals.stats.recomputed_values} values"
    )


if __name__ == "__main__":
    main()
