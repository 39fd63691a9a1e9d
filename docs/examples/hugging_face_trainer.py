"""The Trainer of Hugging Face within a byte limit: one line, `recals.attach(model)`.

    pip install "recals-exp[hf]"
    python docs/examples/hugging_face_trainer.py

The model stays a `PreTrainedModel` (the Trainer looks at its class, its configuration and the signature of its forward), and
what `save_pretrained` writes is what it writes without recals.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from recals_exp import recals_with_rngs


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens: to see it run, not to learn."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, 128, (count, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=4, n_head=4, use_cache=False))
    recals = recals_with_rngs("512KiB", policy="dtr")
    recals.attach(model)  # in place; recals.attach(model).remove() undoes it

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=5,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model=model, args=arguments, train_dataset=Tokens(64)).train()
        model.save_pretrained(folder)
        GPT2LMHeadModel.from_pretrained(folder)
    print(f"cached at most {recals.stats.peak_cached_bytes} bytes; recomputed {recals.stats.recomputed_values} values")


if __name__ == "__main__":
    main()
