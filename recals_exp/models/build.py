"""From a recipe and a data set to a model: the data set answers what the recipe leaves open."""

from __future__ import annotations

import inspect

from torch import nn

from recals_exp.datasets import LANGUAGE_MODEL, DataSpec
from recals_exp.runconfig import ConfigError, PartSpec


def build_model(spec: PartSpec, data: DataSpec) -> nn.Module:
    """Build the model; torch's global generator draws its parameters.

    A parameter of the builder that bears the name of one of ``data.facts()`` (``num_classes``, ``in_channels``,
    ``image_size``, ``input_shape``; ``vocab_size``, ``seq_len``) and that the recipe does not set is filled from there.
    """
    takes = spec.parameters()
    facts = data.facts()
    missing = [
        name
        for name, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in facts
        and name not in spec.kwargs
    ]
    if missing:
        fitting = "dataset=text or dataset=synthetic_text" if "vocab_size" in missing else "dataset=digits"
        kind = "text" if data.task == LANGUAGE_MODEL else "classification"
        raise ConfigError(
            f"model {spec.name} needs {', '.join(missing)}, but the data set {data.name} (a {kind} data set) only tells "
            f"{', '.join(facts)}: set model.{missing[0]}=..., or choose a data set that fits, such as {fitting}"
        )
    model = spec.build(**{name: value for name, value in facts.items() if name in takes})
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {spec.name}: {spec.target} returned a {type(model).__name__}, not a torch.nn.Module; name a class or "
            "a function that returns one"
        )
    return model
