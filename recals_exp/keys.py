"""When two runs measured the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

NOT_MEASURED = ("job", "checkpoint_every")
"""Keys of a run's configuration that do not change what it finds."""


def config_key(config: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """Equal for two runs that measure the same thing: a digest of the resolved configuration."""
    relevant = {key: value for key, value in config.items() if key not in (*NOT_MEASURED, *without)}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]
