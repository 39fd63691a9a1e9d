"""Other people's training loops, for real and tiny: the same training within a limit, to the last bit; and the examples run."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp import Recals, recals_with_rngs

EXAMPLES = sorted((Path(__file__).parents[1] / "docs/examples").glob("*.py"))
NEEDS = {"hugging_face_trainer": ("accelerate", "hf"), "lightning_module": ("lightning", "lightning")}
SEED = 5
# deprecations and advice of the trainers themselves
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("no_threads")]


@pytest.fixture
def no_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def needs(package: str, extra: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'recals-exp[{extra}]'")


def test_every_example_is_found() -> None:
    assert [path.stem for path in EXAMPLES] == ["hugging_face_trainer", "lightning_module", "plain_loop"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=needs(*NEEDS[path.stem]) if path.stem in NEEDS else (), id=path.stem)
        for path in EXAMPLES
    ],
)
def test_an_example_runs_and_saves_memory(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    said = re.search(r"cached at most (\d+) .*recomputed (\d+) values", capsys.readouterr().out)
    assert said
    assert int(said[1]) > 0
    assert int(said[2]) > 0


@needs("accelerate", "hf")
def test_the_trainer_of_hugging_face_trains_the_same(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    rows = torch.randint(0, 50, (24, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row, "ignored": 1} for row in rows]

    def train(recals: Recals | None) -> tuple[list[float], dict[str, Tensor], float]:
        torch.manual_seed(SEED)
        config = GPT2Config(
            vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config)
        if recals is not None:
            recals.attach(model)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=SEED,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])  # type: ignore[arg-type]
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(tmp_path / "saved"))
        again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        assert again.config.architectures == ["GPT2LMHeadModel"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, again.state_dict(), evaluated

    losses, weights, evaluated = train(None)
    recals = recals_with_rngs(4 * 12 * 16 * 4 * 12, policy="dtr")
    other_losses, other_weights, other_evaluated = train(recals)
    assert other_losses == losses
    assert len(losses) == 3
    assert other_evaluated == evaluated
    assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == []
    assert recals.stats.recomputed_values


@needs("lightning", "lightning")
def test_lightning_trains_the_same(tmp_path: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self, recals: Recals | None) -> None:
            super().__init__()
            blocks = (
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)
            )
            net = nn.Sequential(*blocks, nn.Linear(16, 4))
            self.net = net if recals is None else recals.wrap(net)
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train(recals: Recals | None) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(SEED)
        model = Module(recals)
        data = TensorDataset(torch.randn(32, 16), torch.arange(32) % 4)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
            enable_checkpointing=False,
        )
        trainer.fit(model, DataLoader(data, batch_size=8))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
        Module(None).load_state_dict(saved)  # with recals or without: the same keys
        return model.losses, saved

    losses, weights = train(None)
    recals = recals_with_rngs(2 * 8 * 16 * 4)
    other_losses, other_weights = train(recals)
    assert other_losses == losses
    assert len(losses) == 8
    assert list(other_weights) == list(weights)
    assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == []
    assert recals.stats.recomputed_values
