"""What is shipped: the wheel holds the configuration and works from any folder; the project's files agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} left {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_yaml_and_nothing_foreign(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "experiments"):
        expected = {f"recals_exp/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.yaml")}
        assert expected
        assert expected == {name for name in names if name.startswith(f"recals_exp/{folder}/")}
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-.*(?=\.dist-info)", "", top) for top in tops} == {"recals_exp", "recals_exp.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """Unpacked where no checkout is near; the dependencies are this environment's."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    python = (sys.executable, "-W", "error")
    where = run(
        *python, "-c", "from recals_exp import config; print(config.conf_dir())", cwd=elsewhere, PYTHONPATH=str(site)
    )
    assert Path(where.strip()) == site / "recals_exp/conf"
    text = run(*python, "-m", "recals_exp", "--help", cwd=elsewhere, PYTHONPATH=str(site))
    assert text.startswith("python -m recals_exp: ")
    assert "experiment: batch_size, depth, documented_curve" in text
    tiny = (
        "model.depth=2",
        "dataset.image_size=4",
        "batch_size=8",
        "train_steps=1",
        "warmup_steps=0",
        "timing_pairs=1",
    )
    run(*python, "-m", "recals_exp", *tiny, cwd=elsewhere, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    assert len(list(elsewhere.glob("outputs/*/result.json"))) == 1
    assert [path.name for path in elsewhere.iterdir()] == ["outputs"]


def test_ci_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^test: lint$", makefile, re.MULTILINE)
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", "-m pytest"):
        assert f"$(BIN)/{tool}" in makefile or tool in makefile


def test_make_test_does_not_install_again_when_the_environment_is_current(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert "pip install" in run("make", "--dry-run", "install", cwd=tmp_path)
    stamp = tmp_path / ".venv/.installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert "pip install" not in run("make", "--dry-run", "install", cwd=tmp_path)
    os.utime(stamp, (0, 0))
    assert "pip install" in run("make", "--dry-run", "install", cwd=tmp_path), "pyproject.toml is newer"


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_results_are_ignored_but_their_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    run("git", "init", "--quiet", str(tmp_path), cwd=tmp_path)
    for name in ("outputs/.gitkeep", "outputs/run/result.json", ".venv/pyvenv.cfg", "recals_exp/datasets/images.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    kept = run("git", "ls-files", "--others", "--exclude-standard", cwd=tmp_path).split()
    assert sorted(kept) == [".gitignore", "outputs/.gitkeep", "recals_exp/datasets/images.py"]
    assert (ROOT / "outputs/.gitkeep").is_file()
