"""recals: a byte limit on what autograd caches, on any eager PyTorch callable, with the gradients of the plain call."""

from .analysis import Analysis, LayerBytes, format_analysis
from .audit import AuditReport, Finding, format_audit
from .cache import Stats
from .errors import (
    CacheLimitError,
    RecalsError,
    RecalsWarning,
    ReplayError,
    SizeError,
    SourceChangedError,
    UnsupportedError,
)
from .plans import PlansError, StepPlan, format_plan
from .policies import POLICIES, Policy
from .prediction import Prediction, PredictionRow, format_prediction
from .recals import Recals, recals_with_rngs
from .record import TapeRecord
from .sizes import format_bytes, parse_bytes

__all__ = [
    "POLICIES",
    "Analysis",
    "AuditReport",
    "CacheLimitError",
    "Finding",
    "LayerBytes",
    "PlansError",
    "Policy",
    "Prediction",
    "PredictionRow",
    "Recals",
    "RecalsError",
    "RecalsWarning",
    "ReplayError",
    "SizeError",
    "SourceChangedError",
    "Stats",
    "StepPlan",
    "TapeRecord",
    "UnsupportedError",
    "format_analysis",
    "format_audit",
    "format_bytes",
    "format_plan",
    "format_prediction",
    "parse_bytes",
    "recals_with_rngs",
]
