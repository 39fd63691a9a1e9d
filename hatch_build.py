"""Build hook: a wheel carries ``conf/`` and ``experiments/`` inside the package; an editable install reads the checkout's.

Why not ``force-include`` in pyproject.toml: that copies them for editable installs too, where they would go stale.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConfigurationHook(BuildHookInterface):
    """Adds the two folders to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            for folder in ("conf", "experiments"):
                build_data["force_include"][f"{self.root}/{folder}"] = f"recals_exp/{folder}"
