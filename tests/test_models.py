"""Models: they fit their data set, they can be differentiated, and the chain caches what its docstring says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp.datasets import LANGUAGE_MODEL, DataSpec, digits, synthetic
from recals_exp.models import build_model, mlp_chain
from recals_exp.runconfig import ConfigError, PartSpec

TOKENS = synthetic([12], 40, task=LANGUAGE_MODEL)
CASES: dict[str, tuple[dict[str, Any], DataSpec]] = {
    "mlp_chain": ({"depth": 3}, digits(6)),
    "resnet18": ({}, digits(32, 3)),
    "resnet50": ({}, digits(32, 1)),
    "vit_b_16": ({"depth": 2, "width": 48, "heads": 3, "dropout": 0.1}, digits(32, 3)),
    "gpt": ({"depth": 2, "width": 24, "heads": 2}, TOKENS),
}


def spec(name: str, **kwargs: Any) -> PartSpec:
    return PartSpec(name, f"recals_exp.models.{name}", kwargs)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str) -> None:
    kwargs, data = CASES[name]
    model = build_model(spec(name, **kwargs), data)
    x, target = next(data.batches(4))
    output = model(x)
    assert output.shape == (*target.shape, data.n_classes)
    data.loss(output, target).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # with a softmax over keys, a shift of all keys changes nothing: the key bias has no gradient
        assert "bias" in parameter_name or parameter.grad.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", CASES)
def test_the_seed_decides_the_parameters(name: str) -> None:
    kwargs, data = CASES[name]
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build_model(spec(name, **kwargs), data).state_dict())
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert any(not torch.equal(models[0][key], models[2][key]) for key in models[0])


def test_full_sizes_are_the_known_ones() -> None:
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in build_model(spec(name), synthetic((3, 224, 224), 1000)).parameters())
            for name in ("resnet18", "resnet50", "vit_b_16")
        }
    assert sizes == {"resnet18": 11_689_512, "resnet50": 25_557_032, "vit_b_16": 86_567_656}


def saved_bytes(model: nn.Module, x: Tensor) -> list[int]:
    """Bytes of every storage autograd saves that is neither a parameter nor the input, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    assert output.requires_grad  # keeps the graph, and so the storages, until here
    return list(found.values())


@pytest.mark.parametrize("depth", [1, 5])
def test_the_chain_caches_one_equal_value_for_each_unit(depth: int) -> None:
    """What Tanh saves (its output) and what the next Linear saves (its input) is one storage."""
    x = torch.rand(8, 1, 6, 6)
    model = mlp_chain((1, 6, 6), 10, depth=depth)
    assert saved_bytes(model, x) == [8 * 36 * 4] * depth


def test_the_chain_is_uniform() -> None:
    model = mlp_chain((1, 6, 6), 10, depth=4)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)][:-1]
    assert {(linear.in_features, linear.out_features) for linear in linears} == {(36, 36)}
    assert mlp_chain((1, 6, 6), 10, depth=2, width=20)[2].linear.in_features == 20


def test_gpt_does_not_look_ahead() -> None:
    model = build_model(spec("gpt", depth=2, width=24, heads=2), TOKENS).eval()
    tokens = torch.randint(40, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 40
    difference = (model(tokens) - model(changed)).abs().amax(dim=2)[0]
    assert difference[:8].max() == 0
    assert difference[8] > 0


def test_gpt_has_dropout_only_in_training() -> None:
    model = build_model(spec("gpt", depth=1, width=24, heads=2, dropout=0.5), TOKENS)
    tokens = torch.randint(40, (1, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (spec("mlp_chain", depth=0), digits(), r"depth=0: not allowed, use whole numbers of at least 1"),
        (spec("mlp_chain", depth="deep", width=1.5), digits(), r"depth='deep', width=1.5: not allowed"),
        (spec("vit_b_16"), digits(30, 3), r"image_size=30 .*vit_b_16.*multiple of 16.*dataset.image_size=32"),
        (spec("vit_b_16", width=50), digits(32, 3), r"width=50 is not a multiple of heads=12"),
        (spec("vit_b_16", dropout=1.5), digits(32, 3), r"dropout=1.5: not allowed, use a probability"),
        (spec("gpt", heads=5), TOKENS, r"width=192 is not a multiple of heads=5"),
        (spec("gpt", dropout=-0.1), TOKENS, r"dropout=-0.1: not allowed"),
        (spec("gpt"), digits(), r"gpt needs vocab_size, seq_len, but the data set digits .* dataset=text"),
        (spec("resnet18"), TOKENS, r"resnet18 needs in_channels, num_classes, but .*synthetic \(a text data set\)"),
        (PartSpec("mine", "torch.nn.Linear", {"in_features": 2}), digits(), r"mine needs out_features.*model.out_fea"),
        (
            PartSpec("mine", "builtins.dict", {"a": 1}),
            digits(),
            r"builtins.dict returned a dict, not a torch.nn.Module",
        ),
    ],
)
def test_a_model_that_does_not_fit(model: PartSpec, data: DataSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(model, data)


def test_gpt_refuses_longer_inputs() -> None:
    model = build_model(spec("gpt", depth=1, width=24, heads=2), TOKENS)
    with pytest.raises(ValueError, match=r"got 13 tokens, but this model was built for seq_len=12"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_the_recipe_has_the_last_word_over_the_data_set() -> None:
    assert build_model(spec("mlp_chain", depth=1, num_classes=3), digits(4))(torch.rand(2, 1, 4, 4)).shape == (2, 3)
