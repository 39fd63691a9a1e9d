"""recals-exp: a byte limit on what autograd caches, a pipeline of stages under such limits, and the instrument that measures
what it costs."""

from .pipeline import ModelPipeline
from .recals import Recals, recals_with_rngs

__all__ = ["ModelPipeline", "Recals", "recals_with_rngs"]
