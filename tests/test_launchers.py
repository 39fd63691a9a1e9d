"""Sweeps under Hydra's launchers: what is said of their times, and each for real, to the same report."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recals_exp import config
from recals_exp.launchers import EXTRAS, missing_extra, timing_note

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (config.conf_dir() / "hydra/launcher").glob("*.yaml"))
LINE = ["model.depth=6", "dataset.image_size=6", "batch_size=16", "threads=1", "train_steps=2", "timing_pairs=2"]
PLUGINS = {
    "side_by_side": "hydra_joblib_launcher",
    "slurm_dry": "hydra_submitit_launcher",
    "ray_local": "hydra_ray_launcher",
}
EXACT = (
    "job",
    "status",
    "budget",
    "cache_peak_bytes",
    "peak_memory_bytes",
    "recompute_flops_pct",
    "gradients_identical",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_names_its_extra_and_says_how_to_get_it(name: str) -> None:
    first = (config.conf_dir() / f"hydra/launcher/{name}.yaml").read_text().splitlines()[0]
    assert f"Needs: pip install 'recals-exp[{EXTRAS[name]}]'" in first
    assert missing_extra(name) == f"hydra/launcher={name} needs an extra: pip install 'recals-exp[{EXTRAS[name]}]'"
    assert f"`{name}`" in (ROOT / "docs/launchers.md").read_text()


def test_a_missing_extra_is_explained(tmp_path: Path) -> None:
    text = "In 'hydra/launcher/slurm': Could not find 'hydra/launcher/submitit_slurm'\n\nAvailable options: basic"
    assert config.explain(RuntimeError(text)) == (
        "hydra/launcher=submitit_slurm needs an extra: pip install 'recals-exp[submitit]'"
    )


def test_times_beside_others_come_with_a_warning() -> None:
    plugin = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
    note = timing_note(OmegaConf.create({"_target_": plugin, "n_jobs": 2}))
    assert note is not None
    assert note.startswith("2 jobs of the sweep at once on this machine: times are not to be believed")
    assert timing_note({"_target_": plugin, "n_jobs": 1}) is None
    assert str(timing_note({"_target_": plugin, "n_jobs": -1})).startswith("as many jobs as there are CPUs")
    assert timing_note({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}) is None
    assert timing_note({"_target_": "hydra_plugins.x.SlurmLauncher"}) is None


def sweep(folder: Path, name: str, *arguments: str) -> list[dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "recals_exp", "budget=0.5,0.75", *LINE, f"hydra.sweep.dir={name}", *arguments, "-m"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert ("times are not to be believed" in done.stdout) == bool(arguments)
    rows = json.loads((folder / name / "tradeoff.json").read_text())
    return [{key: row[key] for key in EXACT} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLUGINS)
def test_a_launcher_runs_the_sweep_to_the_same_report(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(f"hydra_plugins.{PLUGINS[name]}") is None:
        pytest.skip(f"needs an extra: pip install 'recals-exp[{EXTRAS[name]}]'")
    expected = sweep(tmp_path, "here")
    assert [row["status"] for row in expected] == ["ok", "ok"]
    assert sweep(tmp_path, name, f"hydra/launcher={name}") == expected
