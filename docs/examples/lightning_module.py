"""Lightning within a byte limit: the network of the LightningModule is wrapped, in one line.

pip install "recals-exp[lightning]"
python docs/examples/lightning_module.py
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from recals_exp import recals_with_rngs


class Classifier(lightning.LightningModule):
    """A small network; its checkpoints have the same keys with and without recals."""

    def __init__(self, limit: str) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(6))
        self.recals = recals_with_rngs(limit)
        self.net = self.recals.wrap(nn.Sequential(*blocks, nn.Linear(64, 10)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
    model = Classifier("128KiB")
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=128))
    stats = model.recals.stats
    print(f"cached at most {stats.peak_cached_bytes} bytes; recomputed {stats.recomputed_values} values")


if __name__ == "__main__":
    main()
