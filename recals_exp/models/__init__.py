"""Models by name, and :func:`build_model`, which fits one to a data set."""

from recals_exp.models.build import build_model
from recals_exp.models.gpt import gpt
from recals_exp.models.mlp import mlp_chain
from recals_exp.models.vision import resnet18, resnet50, vit_b_16

__all__ = ["build_model", "gpt", "mlp_chain", "resnet18", "resnet50", "vit_b_16"]
