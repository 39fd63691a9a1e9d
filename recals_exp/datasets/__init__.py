"""Data sets by name. Each builder returns a :class:`DataSpec`; only ``cifar10`` and ``image_folder`` need files."""

from recals_exp.datasets.custom import as_data_spec, build_data
from recals_exp.datasets.images import cifar10, digits, image_folder
from recals_exp.datasets.spec import CLASSIFICATION, LANGUAGE_MODEL, Batch, DataSpec, InputSpec, task_loss
from recals_exp.datasets.synthetic import synthetic
from recals_exp.datasets.text import text

__all__ = [
    "CLASSIFICATION",
    "LANGUAGE_MODEL",
    "Batch",
    "DataSpec",
    "InputSpec",
    "as_data_spec",
    "build_data",
    "cifar10",
    "digits",
    "image_folder",
    "synthetic",
    "task_loss",
    "text",
]
