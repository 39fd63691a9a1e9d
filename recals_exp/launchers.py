"""What it means for the measurements where Hydra's launcher runs the jobs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXTRAS: Mapping[str, str] = {
    "joblib": "joblib",
    "side_by_side": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "slurm": "submitit",
    "slurm_dry": "submitit",
    "ray": "ray",
    "ray_local": "ray",
    "ray_aws": "ray",
}
"""hydra/launcher -> the extra of this package that brings it."""


def missing_extra(launcher: str) -> str | None:
    """How to install what a launcher needs; None for one that is not known."""
    extra = EXTRAS.get(launcher)
    return None if extra is None else f"hydra/launcher={launcher} needs an extra: pip install 'recals-exp[{extra}]'"


def timing_note(launcher: Mapping[str, Any]) -> str | None:
    """What to say of times measured under a launcher's configuration; None where jobs run one after the other, or apart."""
    kind = str(launcher.get("_target_", "")).rpartition(".")[2]
    at_once = {
        "JoblibLauncher": launcher.get("n_jobs") or 1,
        "LocalLauncher": "all",  # submitit's: it starts them all
        "RayLauncher": "several",
    }.get(kind, 1)
    if at_once == 1:
        return None
    how_many = "as many jobs as there are CPUs" if at_once == -1 else f"{at_once} jobs"
    return (
        f"{how_many} of the sweep at once on this machine: times are not to be believed, memory and FLOPs are; leave "
        "hydra/launcher out to time one job after the other"
    )
