"""Networks that other people wrote, at sizes at which each runs in a fraction of a second.

Small means narrow and shallow through the libraries' own constructors, or, where a family has no such knob, the stock
network on a small image with a smaller classifier. Kinds of layers, wiring, in-place ops and outputs are the library's.

A builder makes the network once (initialising some takes longer than a step); every run gets a deep copy.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from parity.cases import Case, Subject
from torch import Tensor, nn
from torchvision.models import detection, efficientnet, maxvit, regnet, segmentation, video, vision_transformer

CLASSES = 5


def network_case(name: str, build: Callable[[], nn.Module], inputs: Callable[[], Any], **options: Any) -> Case:
    """``inputs()``: a tensor, a tuple of arguments, or a dict of keyword arguments."""

    def subject() -> Subject:
        model = copy.deepcopy(_original(build)).train()
        torch.default_generator.manual_seed(1)  # making the original has drawn, once
        given = inputs()
        if isinstance(given, dict):
            return Subject(model, (), given)
        return Subject(model, given if isinstance(given, tuple) else (given,))

    return Case(name, subject, **options)


@functools.lru_cache(maxsize=2)
def _original(build: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constructors' own deprecations are none of ours
        return build()


def _image(size: int, batch: int = 2) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, size, size, requires_grad=True)


# -- torchvision: one of each family -----------------------------------------------------------------------------------


def _alexnet() -> nn.Module:
    model = torchvision.models.AlexNet(num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256, 32), nn.ReLU(inplace=True), nn.Linear(32, CLASSES))
    return model


def _vgg() -> nn.Module:
    features = torchvision.models.vgg.make_layers([8, "M", 16, "M", 16, 16, "M"], batch_norm=True)
    with torch.device("meta"):  # for the 120 million parameters of the classifier that is replaced below
        model = torchvision.models.VGG(features, num_classes=CLASSES, init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(16, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES))
    return model


def _convnext() -> nn.Module:
    block = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt(
        [block(8, 16, 2), block(16, None, 2)], stochastic_depth_prob=0.3, num_classes=CLASSES
    )


def _densenet() -> nn.Module:
    return torchvision.models.DenseNet(
        growth_rate=4, block_config=(3, 3), num_init_features=8, drop_rate=0.1, num_classes=CLASSES
    )


def _efficientnet() -> nn.Module:
    block = functools.partial(efficientnet.MBConvConfig, width_mult=1.0, depth_mult=1.0)
    fused = functools.partial(efficientnet.FusedMBConvConfig)
    blocks = [fused(1, 3, 1, 8, 8, 1), block(4, 3, 2, 8, 16, 2), block(4, 5, 1, 16, 16, 1)]
    return efficientnet.EfficientNet(
        blocks, dropout=0.2, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=32
    )


def _googlenet() -> nn.Module:
    model = torchvision.models.GoogLeNet(num_classes=CLASSES, aux_logits=True, init_weights=False)
    for aux in (model.aux1, model.aux2):
        aux.fc1 = nn.Linear(2048, 16)
        aux.fc2 = nn.Linear(16, CLASSES)
    return model


def _inception() -> nn.Module:
    model = torchvision.models.Inception3(num_classes=CLASSES, aux_logits=True, init_weights=False)
    model.AuxLogits.conv1 = torchvision.models.inception.BasicConv2d(128, 768, kernel_size=1)  # 5 x 5 needs 299 pixels
    return model


def _maxvit() -> nn.Module:
    return maxvit.MaxVit(
        (64, 64), stem_channels=8, partition_size=4, block_channels=[8, 16], block_layers=[1, 1], head_dim=4,
        stochastic_depth_prob=0.2, num_classes=CLASSES,
    )  # fmt: skip


def _mobilenet_v2() -> nn.Module:
    return torchvision.models.MobileNetV2(
        num_classes=CLASSES, width_mult=0.25, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 1]]
    )


def _mobilenet_v3() -> nn.Module:
    return torchvision.models.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25)


def _regnet() -> nn.Module:
    parameters = regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4, se_ratio=0.25)
    return regnet.RegNet(parameters, num_classes=CLASSES, stem_width=8)


def _resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES)


def _resnext() -> nn.Module:
    block = torchvision.models.resnet.Bottleneck
    return torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, groups=8, width_per_group=2)


def _shufflenet() -> nn.Module:
    return torchvision.models.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=CLASSES)


def _swin(block: Any = None) -> nn.Module:
    return torchvision.models.SwinTransformer(
        [4, 4], 8, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], dropout=0.1, attention_dropout=0.1,
        stochastic_depth_prob=0.2, num_classes=CLASSES, **({} if block is None else {"block": block}),
    )  # fmt: skip


def _swin_v2() -> nn.Module:
    block = torchvision.models.swin_transformer.SwinTransformerBlockV2
    return torchvision.models.SwinTransformer(
        [4, 4], 8, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], stochastic_depth_prob=0.2, num_classes=CLASSES,
        block=block, downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    )  # fmt: skip


def _vit() -> nn.Module:
    return vision_transformer.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, dropout=0.1, attention_dropout=0.1,
        num_classes=CLASSES,
    )  # fmt: skip


def _squeezenet() -> nn.Module:
    return torchvision.models.SqueezeNet("1_1", num_classes=CLASSES)


def _mnasnet() -> nn.Module:
    return torchvision.models.MNASNet(0.25, num_classes=CLASSES)


CLASSIFIERS = [
    network_case("alexnet", _alexnet, _image(64)),
    network_case("convnext", _convnext, _image(32)),
    network_case("densenet", _densenet, _image(32)),
    network_case("efficientnet", _efficientnet, _image(32)),
    network_case("googlenet-with-aux", _googlenet, _image(64)),
    network_case("inception-v3-with-aux", _inception, _image(107)),
    network_case("maxvit", _maxvit, _image(64)),
    network_case("mnasnet", _mnasnet, _image(32)),
    network_case("mobilenet-v2", _mobilenet_v2, _image(32)),
    network_case("mobilenet-v3", _mobilenet_v3, _image(32)),
    network_case("regnet", _regnet, _image(32)),
    network_case("resnet", _resnet, _image(32)),
    network_case("resnext", _resnext, _image(32)),
    network_case("shufflenet", _shufflenet, _image(32)),
    network_case("squeezenet", _squeezenet, _image(48)),
    network_case("swin", _swin, _image(32)),
    network_case("swin-v2", _swin_v2, _image(32)),
    network_case("vgg", _vgg, _image(32)),
    network_case("vit", _vit, _image(32)),
]


# -- torchvision: pixels, boxes, clips ---------------------------------------------------------------------------------


def _fcn() -> nn.Module:
    block = torchvision.models.resnet.Bottleneck
    backbone = torchvision.models.ResNet(block, [1, 1, 1, 1], replace_stride_with_dilation=[False, True, True])
    return segmentation.fcn._fcn_resnet(backbone, CLASSES, aux=True)


def _lraspp() -> nn.Module:
    return segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)


def _faster_rcnn() -> nn.Module:
    return detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64, rpn_pre_nms_top_n_train=50,
        rpn_post_nms_top_n_train=20, box_batch_size_per_image=16,
    )  # fmt: skip


def _boxes() -> tuple[Any, ...]:
    images = [torch.rand(3, 64, 64, requires_grad=True), torch.rand(3, 48, 64, requires_grad=True)]
    targets = [
        {"boxes": torch.tensor([[4.0, 4.0, 30.0, 40.0], [10.0, 12.0, 60.0, 44.0]]), "labels": torch.tensor([1, 2])},
        {"boxes": torch.tensor([[8.0, 2.0, 50.0, 30.0]]), "labels": torch.tensor([1])},
    ]
    return images, targets


def _r3d() -> nn.Module:
    parts = video.resnet
    return parts.VideoResNet(
        parts.BasicBlock, [parts.Conv3DSimple] * 4, [1, 1, 1, 1], parts.BasicStem, num_classes=CLASSES
    )


PIXELS_BOXES_CLIPS = [
    network_case("fcn-resnet", _fcn, _image(32)),
    network_case("lraspp", _lraspp, _image(32)),
    network_case("faster-rcnn-mobilenet", _faster_rcnn, _boxes),
    network_case("r3d", _r3d, lambda: torch.randn(2, 3, 4, 16, 16, requires_grad=True)),
]


# -- torch.nn's recurrent nets -----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer of ``torch.nn`` under a head; returns everything it gives."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        out, state = self.layer(torch.tanh(x))
        return self.head(out), state


class Packed(Recurrent):
    """The same on sequences of different lengths."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        packed = nn.utils.rnn.pack_padded_sequence(torch.tanh(x), torch.tensor([6, 4, 3]), batch_first=True)
        out, state = self.layer(packed)
        return self.head(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]), state


def _sequence() -> Tensor:
    return torch.randn(3, 6, 8, requires_grad=True)


_TWO_LAYERS = {"input_size": 8, "hidden_size": 8, "num_layers": 2, "batch_first": True, "dropout": 0.2}
RECURRENT = [
    network_case("lstm", lambda: Recurrent(nn.LSTM(**_TWO_LAYERS), 8), _sequence),
    network_case("lstm-bidirectional", lambda: Recurrent(nn.LSTM(**_TWO_LAYERS, bidirectional=True), 16), _sequence),
    network_case("lstm-projection", lambda: Recurrent(nn.LSTM(**_TWO_LAYERS, proj_size=4), 4), _sequence),
    network_case("lstm-packed", lambda: Packed(nn.LSTM(**_TWO_LAYERS), 8), _sequence),
    network_case("gru", lambda: Recurrent(nn.GRU(**_TWO_LAYERS), 8), _sequence),
    network_case("gru-packed", lambda: Packed(nn.GRU(**_TWO_LAYERS), 8), _sequence),
    network_case("rnn-relu", lambda: Recurrent(nn.RNN(**_TWO_LAYERS, nonlinearity="relu"), 8), _sequence),
]


# -- transformers ------------------------------------------------------------------------------------------------------


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(package), reason=f"{package} is not installed: pip install 'recals-exp[parity]'")


def _from_config(architecture: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, architecture)(getattr(transformers, config)(**settings))

    return build


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (2, 9))
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_tokens() -> dict[str, Tensor]:
    return {**_tokens(), "attention_mask": (torch.arange(9) < torch.tensor([[9], [6]])).long()}


_LLAMA = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_dropout": 0.1,
}  # fmt: skip
_BERT = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TRANSFORMERS = [
    network_case(
        "gpt2", _from_config("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        bos_token_id=0, eos_token_id=0), _tokens
    ),
    network_case("bert", _from_config("BertForMaskedLM", "BertConfig", **_BERT), _masked_tokens),
    network_case(
        "t5", _from_config("T5ForConditionalGeneration", "T5Config", vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2,
        num_heads=2, decoder_start_token_id=0, pad_token_id=0), _tokens,
    ),
    network_case("llama", _from_config("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _masked_tokens),
    network_case(
        "mixtral", _from_config("MixtralForCausalLM", "MixtralConfig", **_LLAMA, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True), _tokens,
    ),
    network_case(
        "vit-transformers", _from_config("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, hidden_size=16,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=32), lambda: {"pixel_values": torch.randn(2, 3, 16, 16)},
    ),
]  # fmt: skip
NEEDS_TRANSFORMERS = _needs("transformers")


# -- spikingjelly ------------------------------------------------------------------------------------------------------

STEPS_IN_TIME = 4


class Spiking(nn.Module):
    """A small convolutional spiking net of spikingjelly's layers.

    Single-step: the net is called once for each step in time and its neurons keep their potentials as Python attributes.
    Multi-step: one call sees ``[T, N, ...]``. Neurons are reset at the start of forward, so the state of the step stays in
    reach until the next one, as in a training loop that resets before it.
    """

    def __init__(self, neuron: str, multi_step: bool, reset: bool) -> None:
        super().__init__()
        from spikingjelly.activation_based import functional, layer, surrogate
        from spikingjelly.activation_based import neuron as neurons

        def spikes() -> nn.Module:
            return getattr(neurons, neuron)(surrogate_function=surrogate.ATan(), detach_reset=True)

        self.net = nn.Sequential(
            layer.Conv2d(2, 4, 3, padding=1, bias=False), layer.BatchNorm2d(4), spikes(), layer.MaxPool2d(2),
            layer.Conv2d(4, 8, 3, padding=1, bias=False), layer.BatchNorm2d(8), spikes(), layer.Flatten(),
            layer.Dropout(0.3), layer.Linear(8 * 16, CLASSES), spikes(),
        )  # fmt: skip
        self.multi_step = multi_step
        self.reset = reset
        functional.set_step_mode(self.net, "m" if multi_step else "s")

    def reset_state(self) -> None:
        from spikingjelly.activation_based import functional

        functional.reset_net(self.net)

    def forward(self, x: Tensor) -> Tensor:
        if self.reset:
            self.reset_state()
        if self.multi_step:
            return self.net(x).mean(0)
        rate: Tensor = self.net(x[0])
        for step in range(1, STEPS_IN_TIME):
            rate = rate + self.net(x[step])
        return rate / STEPS_IN_TIME


def _clip() -> Tensor:
    return torch.rand(STEPS_IN_TIME, 2, 2, 8, 8, requires_grad=True)


def _reset_after(subject: Subject) -> None:
    assert isinstance(subject.fn, Spiking)
    subject.fn.reset_state()


SPIKING = [
    network_case(
        f"{neuron}-{'multi' if multi else 'single'}-step-reset-{'before' if before else 'after'}",
        functools.partial(Spiking, neuron, multi, before),
        _clip,
        between=None if before else _reset_after,
        keeps_graph=True,  # the neurons' potentials
    )
    for neuron in ("LIFNode", "ParametricLIFNode")
    for multi in (False, True)
    for before in (True, False)
]
NEEDS_SPIKINGJELLY = _needs("spikingjelly")
