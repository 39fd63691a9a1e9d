"""The command line as Hydra gets it: resuming and repeating. What a single override becomes is in `test_config.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recals_exp.arguments import prepare_arguments, quote
from recals_exp.runconfig import ConfigError
from recals_exp.sweeps import RUN_FILE, SWEEP_FILE

NAMES = "hydra.job.config.override_dirname.exclude_keys="


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepared(*arguments: str) -> list[str]:
    return [item for item in prepare_arguments(arguments) if not item.startswith(NAMES)]


def test_repeats_are_a_sweep_over_seeds() -> None:
    assert prepared("n_repeats=3") == ["-m", "n_repeats=3", "seed=0,1,2"]
    assert prepared("seed=5", "n_repeats=2", "budget=0.5,1", "-m") == ["-m", "n_repeats=2", "budget=0.5,1", "seed=5,6"]
    assert prepared("n_repeats=1") == ["n_repeats=1"]
    assert prepared("n_repeats=2", "seed=5,6", "-m") == ["-m", "n_repeats=2", "seed=5,6"]
    with pytest.raises(ConfigError, match="n_repeats=3 chooses the seeds, but seed=1,2 does too: leave one out"):
        prepared("n_repeats=3", "seed=1,2", "-m")
    with pytest.raises(ConfigError, match="n_repeats=few is not allowed: use a whole number of at least 1"):
        prepared("n_repeats=few")


@pytest.mark.usefixtures("config_store")
def test_an_experiment_may_ask_for_repeats(tmp_path: Path) -> None:
    (tmp_path / "often.yaml").write_text("n_repeats: 2\nseed: 4\n")
    assert prepared("experiment=often.yaml") == ["-m", "experiment=often", "seed=4,5"]


def test_a_resumed_sweep_keeps_its_folder_and_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "outputs/2030-01-01_00-00-00"
    folder.mkdir(parents=True)
    said = ["budget=0.25,0.5", "++model.depth=4"]
    (folder / SWEEP_FILE).write_text(yaml.safe_dump({"hydra": {"overrides": {"task": said}}}))
    place = "hydra.sweep.dir='outputs/2030-01-01_00-00-00'"
    assert prepared("budget=0.25,0.5", "model.depth=4", "-m", "resume=true") == [
        "-m",
        "budget=0.25,0.5",
        "++model.depth=4",
        "resume=true",
        place,
    ]
    alone = prepared("resume=outputs/2030-01-01_00-00-00", "fail_fast=true")
    assert alone[0] == "-m"
    assert alone[-1] == place
    assert alone[1:3] == said
    more = prepared("resume=outputs/2030-01-01_00-00-00", "budget=0.25,0.5,1", "model.depth=4")
    assert more[:2] == ["-m", "resume=outputs/2030-01-01_00-00-00"]
    assert said[0] not in more


def test_a_resumed_run_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "here" / RUN_FILE).parent.mkdir(parents=True)
    (tmp_path / "here" / RUN_FILE).write_text(yaml.safe_dump(["budget=0.5"]))
    assert prepared("resume=here") == ["budget=0.5", "resume=here", "hydra.run.dir='here'"]


def test_help_and_the_like_resume_nothing() -> None:
    assert prepared("--cfg", "job", "resume=true") == ["--cfg", "job", "resume=true"]


def test_quoting() -> None:
    assert quote(r"it's a \ folder") == r"'it\'s a \\ folder'"
