"""Data sets: shapes, determinism, messages, and that digits and text can really be learned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recals_exp.datasets import (
    CLASSIFICATION,
    LANGUAGE_MODEL,
    DataSpec,
    as_data_spec,
    build_data,
    cifar10,
    digits,
    image_folder,
    synthetic,
    task_loss,
    text,
)
from recals_exp.models import build_model
from recals_exp.runconfig import ConfigError, PartSpec


def first(data: DataSpec, batch_size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    return next(data.batches(batch_size, seed))


def all_offline() -> list[DataSpec]:
    return [
        digits(16, 3),
        text(seq_len=32),
        synthetic((3, 8, 8), 5),
        synthetic([7], 11, task=LANGUAGE_MODEL),
    ]


@pytest.mark.parametrize("data", all_offline(), ids=lambda data: f"{data.name}-{data.task}")
def test_batches_fit_the_description(data: DataSpec) -> None:
    x, target = first(data, 6)
    assert x.shape == (6, *data.input_spec.shape)
    assert x.dtype == data.input_spec.dtype
    assert target.dtype == torch.int64
    assert target.shape == ((6,) if data.task == CLASSIFICATION else (6, *data.input_spec.shape))
    assert 0 <= int(target.min()) <= int(target.max()) < data.n_classes
    assert x.is_contiguous()


@pytest.mark.parametrize("data", all_offline(), ids=lambda data: f"{data.name}-{data.task}")
def test_batches_depend_on_the_seed_alone_and_move_no_generator(data: DataSpec) -> None:
    before = torch.get_rng_state()
    one = list(itertools.islice(data.batches(8, seed=3), 3))
    torch.rand(5)
    two = list(itertools.islice(data.batches(8, seed=3), 3))
    assert all(torch.equal(a.x, b.x) and torch.equal(a.target, b.target) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0].x, first(data, 8, seed=4)[0])
    assert not torch.equal(one[0].x, one[1].x)
    torch.set_rng_state(before)
    first(data, 8, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_are_permutations_joined_end_to_end() -> None:
    data = synthetic((2,), 4, n_samples=10)
    rows: list[Tensor] = []
    spy = DataSpec(
        data.name, data.task, data.input_spec, 4, 10, lambda r: (rows.append(r), data.sample(r))[1], task_loss
    )
    for _ in itertools.islice(spy.batches(4, 0), 5):
        pass
    seen = torch.cat(rows)
    assert sorted(seen[:10].tolist()) == list(range(10))
    assert sorted(seen[10:].tolist()) == list(range(10))


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert first(synthetic((2,), 4, n_samples=3), 10)[0].shape == (10, 2)


def test_batch_size_is_checked() -> None:
    with pytest.raises(ValueError, match=r"batch_size=0 is not allowed: use at least 1"):
        first(synthetic((2,)), 0)


def test_digits_are_the_real_ones_enlarged_and_normalised() -> None:
    data = digits()
    assert data.n_samples == 1797
    x, target = data.sample(torch.arange(1797))
    assert x.mean().abs() < 1e-4
    assert abs(x.std() - 1) < 1e-3
    assert torch.bincount(target).min() > 170
    large = digits(32, 3).sample(torch.arange(2)).x
    assert large.shape == (2, 3, 32, 32)
    assert torch.equal(large[:, 0], large[:, 2])
    # averaged back, the enlarged image is the small one
    small = torch.nn.functional.avg_pool2d(large[:, :1], 4)
    assert torch.corrcoef(torch.stack([small.flatten(), x[:2].flatten()]))[0, 1] > 0.97


def test_text_targets_are_the_next_bytes(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(50)))
    data = text(str(path), seq_len=8)
    assert data.n_samples == 42
    x, target = data.sample(torch.tensor([0, 41]))
    assert x.tolist()[0] == list(range(8))
    assert target.tolist() == [list(range(1, 9)), list(range(42, 50))]


def test_the_text_of_python_is_large_and_english() -> None:
    data = text(seq_len=64)
    assert data.n_samples > 100_000
    whole = bytes(data.sample(torch.arange(0, 64_000, 64)).x.flatten().tolist())
    assert b" the " in whole


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: digits(0), r"image_size=0 is not allowed: use a whole number of pixels"),
        (lambda: digits(True), r"image_size=True is not allowed"),
        (lambda: digits(8, 2), r"channels=2 is not allowed: use 1 \(grey\) or 3 \(colour\)"),
        (lambda: text(seq_len=0), r"seq_len=0 is not allowed"),
        (lambda: text("no/such/file"), r"cannot read .*no/such/file \(No such file.*dataset.path=FILE, or leave"),
        (lambda: text(__file__, seq_len=10**6), r"has \d+ bytes, but one sample takes 1000001: use a longer file"),
        (lambda: synthetic((3, 0)), r"shape=\[3, 0\] is not allowed: use whole numbers of at least 1"),
        (lambda: synthetic((3,), task="regression"), r"task='regression' is not allowed: use one of classification"),
        (lambda: synthetic((3, 4), task=LANGUAGE_MODEL), r"shape=\[3, 4\] is not allowed for language_model"),
        (lambda: synthetic((3,), num_classes=0), r"num_classes=0 is not allowed"),
        (lambda: cifar10("no/such/root"), r"cifar10: .*no/such/root/cifar-10-batches-py does not hold .*dataset.root="),
        (lambda: image_folder("no/such/root"), r"image_folder: .*no/such/root does not hold one folder .*CLASS/IMAGE"),
    ],
)
def test_what_is_wrong_and_the_way_out(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_cifar10_reads_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision's own reader, on files of its format that we make; only the checksums are set aside."""
    import pickle

    import numpy
    from torchvision.datasets import CIFAR10

    base = tmp_path / CIFAR10.base_folder
    base.mkdir()
    pixels = numpy.arange(4 * 3072, dtype=numpy.uint32).reshape(4, 3072).astype(numpy.uint8)
    for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list):
        (base / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 9]}))
    names = [f"class{number}" for number in range(10)]
    (base / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({CIFAR10.meta["key"]: names}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = cifar10(str(tmp_path), image_size=16)
    assert (data.n_samples, data.n_classes, data.input_spec.shape) == (20, 10, (3, 16, 16))
    assert first(data)[0].shape == (4, 3, 16, 16)


@pytest.mark.parametrize("channels", [1, 3])
def test_image_folder_reads_images(tmp_path: Path, channels: int) -> None:
    from PIL import Image

    for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (20, 30), color).save(tmp_path / name / f"{number}.png")
    data = image_folder(str(tmp_path), image_size=8, channels=channels)
    assert (data.n_samples, data.n_classes) == (4, 2)
    x, target = data.sample(torch.arange(4))
    assert x.shape == (4, channels, 8, 8)
    assert target.tolist() == [0, 0, 1, 1]
    if channels == 3:
        assert x[0, 2].min() > x[0, 0].max()  # blue


# -- a user's own ------------------------------------------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset[Any]):
    """The usual kind."""

    def __init__(self, n: int = 6, classes: int = 3) -> None:
        self.n, self.k = n, classes

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((2, 2), float(row)), row % self.k


class Documented(Pairs):
    classes = ("a", "b", "c", "d", "e")


def test_a_torch_dataset_is_taken_as_it_is() -> None:
    data = as_data_spec(Pairs(), "pairs")
    assert (data.n_classes, data.n_samples, data.input_spec.shape) == (3, 6, (2, 2))
    x, target = data.sample(torch.tensor([4, 2]))
    assert x[:, 0, 0].tolist() == [4, 2]
    assert target.tolist() == [1, 2]
    assert as_data_spec(Documented()).n_classes == 5
    assert as_data_spec(data) is data


def test_build_data_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_frames.py").write_text(
        "import torch\n\ndef frames(n):\n    return [(torch.ones(3), row % 2) for row in range(n)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = build_data(PartSpec("frames", "my_frames.frames", {"n": 4}))
    assert (data.name, data.n_samples, data.n_classes) == ("frames", 4, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, r"dataset mine is a int: a data set is a recals_exp.datasets.DataSpec, or has __len__ and __getitem__"),
        ([], r"dataset mine is empty"),
        ([torch.ones(2)], r"a sample is a Tensor, not an \(input, class\) pair"),
        ([("text", 1)], r"an input is a str, which is no tensor .*ToTensor"),
        ([(torch.ones(2), 0.5)], r"a class is 0.5, not a whole number. For another task build a DataSpec"),
        (Pairs(n=30_000), r"has 30000 samples and does not say how many classes: give it a 'num_classes'"),
    ],
)
def test_a_data_set_that_does_not_fit(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_data_spec(data, "mine")


# -- the loss, and learning --------------------------------------------------------------------------------------------


def test_the_loss_says_what_it_expects() -> None:
    with pytest.raises(
        ValueError, match=r"logits of shape \(4, 9, 10\) for targets of shape \(4,\): expected \(4, 'cla"
    ):
        task_loss(torch.ones(4, 9, 10), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the model returned a tuple: .*'logits'"):
        task_loss((torch.ones(4, 10),), torch.zeros(4, dtype=torch.int64))


def test_the_loss_of_a_record_with_logits() -> None:
    class Output:
        logits = torch.zeros(2, 3, 4)

    assert task_loss(Output(), torch.zeros(2, 3, dtype=torch.int64)).item() == pytest.approx(
        torch.log(torch.tensor(4.0))
    )


@pytest.mark.parametrize(
    ("model", "data", "optimizer", "steps", "falls_to"),
    [
        (
            PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 4, "width": 64}),
            digits(8),
            PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1}),
            60,
            0.35,
        ),
        (
            PartSpec("gpt", "recals_exp.models.gpt", {"depth": 1, "width": 48, "heads": 2}),
            text(seq_len=32),
            PartSpec("adamw", "torch.optim.AdamW", {"lr": 3e-3}),
            60,
            0.6,
        ),
    ],
    ids=["digits", "text"],
)
def test_training_learns(model: PartSpec, data: DataSpec, optimizer: PartSpec, steps: int, falls_to: float) -> None:
    torch.manual_seed(0)
    net = build_model(model, data)
    step = optimizer.build(net.parameters())
    losses = []
    for x, target in itertools.islice(data.batches(32, 0), steps):
        loss = data.loss(net(x), target)
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    start, end = losses[0], sum(losses[-5:]) / 5
    assert start == pytest.approx(torch.log(torch.tensor(float(data.n_classes))).item(), rel=0.25), "an untrained guess"
    assert end < falls_to * start
