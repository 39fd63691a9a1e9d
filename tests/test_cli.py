"""``python -m recals_exp``: what a user types, and what is on disk and in the exit code afterwards.

Most tests run ``main`` in this process with a runner that measures nothing; the real path is in ``test_experiments.py``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recals_exp import __main__ as cli
from recals_exp import config, records
from recals_exp.records import RunResult
from recals_exp.runconfig import RunConfig

pytestmark = pytest.mark.usefixtures("root_logging", "config_store", "in_tmp")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


Job = Callable[[RunConfig, Path], None]


@pytest.fixture
def fake_runner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job | None], list[RunConfig]]:
    """Replace the runner by one that records a finished job; ``during`` may raise, as a job would."""

    def install(during: Job | None = None) -> list[RunConfig]:
        seen: list[RunConfig] = []

        def run(run_config: RunConfig, folder: Path, *others: object) -> RunResult:
            seen.append(run_config)
            result = finished(run_config, folder)
            try:
                if during is not None:
                    during(run_config, folder)
            except (Exception, SystemExit) as error:
                logging.getLogger("recals_exp.runner").exception("job failed")
                result = failed(run_config, folder, error)
            except KeyboardInterrupt as error:
                records.save(failed(run_config, folder, error), folder)
                raise
            records.save(result, folder)
            return result

        monkeypatch.setattr("recals_exp.runner.run", run)
        monkeypatch.setattr("recals_exp.isolation.run_isolated", run)  # test_sweeps.py has real processes
        return seen

    return install


def _identity(run_config: RunConfig, folder: Path) -> dict[str, Any]:
    return {
        "job": folder.name,
        "model": run_config.model.name,
        "dataset": run_config.dataset.name,
        "pipeline": run_config.pipeline.name,
        "policy": run_config.policy,
        "budget": str(run_config.budget),
        "strategy": run_config.strategy,
        "device": run_config.device,
        "batch_size": run_config.batch_size,
        "seed": run_config.seed,
        "config": run_config.to_dict(),
    }


def finished(run_config: RunConfig, folder: Path) -> RunResult:
    return RunResult(
        status=records.OK,
        cache_total_bytes=1000,
        cache_limit_bytes=500,
        time_overhead_pct=1.0,
        **_identity(run_config, folder),
    )


def failed(run_config: RunConfig, folder: Path, error: BaseException) -> RunResult:
    return RunResult(status=records.FAILED, error=records.describe_error(error), **_identity(run_config, folder))


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in json.loads((folder / "tradeoff.json").read_text())}


# -- one run -----------------------------------------------------------------------------------------------------------


def test_one_run(fake_runner: Any, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = fake_runner()
    assert cli.main(["budget=0.25", "model.depth=3"]) == cli.OK
    assert [str(made.budget) for made in seen] == ["0.25"]
    (folder,) = (in_tmp / "outputs").iterdir()
    assert records.load(folder).status == records.OK
    assert (folder / "recals_exp.log").is_file()
    assert not (folder / "tradeoff.json").exists()
    out, err = capsys.readouterr()
    assert folder.name in out
    assert "result.json" in out
    assert "mlp_chain on digits, batch of 1536, recals planned, budget 0.25" in err


def test_the_runs_folder_is_honoured(fake_runner: Any, in_tmp: Path) -> None:
    fake_runner()
    assert cli.main(["hydra.run.dir=some/where"]) == cli.OK
    assert records.load(in_tmp / "some/where").job == "where"
    assert not (in_tmp / "outputs").exists()


def test_a_run_that_fails(fake_runner: Any, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def during(*_: object) -> None:
        raise RuntimeError("the model broke")

    fake_runner(during)
    assert cli.main([]) == cli.JOB_FAILED
    (folder,) = (in_tmp / "outputs").iterdir()
    err = capsys.readouterr().err
    assert "error: RuntimeError: the model broke" in err
    assert str(Path("outputs", folder.name, "recals_exp.log")) in err
    assert "Traceback" not in err
    assert "Traceback" in (folder / "recals_exp.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["budget=nan"], "error: budget=nan is not a number: use a fraction in (0, 1]"),
        (["budget=-1"], "error: budget=-1 is not above 0"),
        (["budget=1.5"], "error: budget=1.5 is a fraction above 1"),
        (["budget=3XB"], "unknown unit 'XB'"),
        (["budgte=0.5"], "error: there is no key 'budgte' (did you mean 'budget'?)"),
        (["batch_size=abc"], "error: batch_size=abc is not allowed: batch_size is a whole number of at least 1"),
        (["model=custom", "model._target_=nowhere.Net"], "error: _target_='nowhere.Net': there is no module 'nowhere'"),
        (["experiment=none.yaml"], "error: experiment=none.yaml: cannot read"),
        (["model=resnet"], "error: In 'config': Could not find 'model/resnet'"),
        (["budget"], "error: Error parsing override 'budget'"),
        (["--config-dir", "nowhere"], "error: Additional config directory"),
        (["--nonsense"], "python -m recals_exp: error: unrecognized arguments: --nonsense"),
    ],
)
def test_a_command_that_is_not_understood(
    arguments: list[str], message: str, fake_runner: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fake_runner()
    assert cli.main(arguments) == cli.NOT_UNDERSTOOD
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert "HYDRA_FULL_ERROR" not in err
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert not seen


def test_a_refused_run_leaves_a_record(fake_runner: Any, in_tmp: Path) -> None:
    fake_runner()
    assert cli.main(["budget=nan"]) == cli.NOT_UNDERSTOOD
    (folder,) = (in_tmp / "outputs").iterdir()
    result = records.load(folder)
    assert (result.status, result.budget) == (records.FAILED, "nan")
    assert result.error is not None
    assert result.error.startswith("ConfigError: budget=nan is not a number")


def test_a_traceback_for_those_who_ask(fake_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runner()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="budgte"):
        cli.main(["budgte=0.5"])
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_help_reads_like_help(capsys: pytest.CaptureFixture[str], in_tmp: Path) -> None:
    assert cli.main(["--help"]) == cli.OK
    out = capsys.readouterr().out
    assert out.startswith("python -m recals_exp: what does training cost when")
    for part in ("Usage", "Examples", "Choices", "Settings", "Results", "Exit code: 0", "tensorboard --logdir outputs"):
        assert part in out
    for line in (
        "model: custom, gpt, mlp_chain, resnet18",
        "experiment: batch_size, depth, documented_curve",
        "policy: dtr, fifo, planned",
    ):
        assert line in out
    assert all(len(line) <= 130 for line in out.splitlines() if not line.startswith("experiment: "))
    assert "Powered by Hydra" not in out
    assert not list(in_tmp.iterdir()), "--help leaves nothing behind"


def test_show_the_configuration(capsys: pytest.CaptureFixture[str], in_tmp: Path) -> None:
    assert cli.main(["--cfg", "job", "--resolve", "model=gpt"]) == cli.OK
    assert "seq_len: 128" in capsys.readouterr().out
    assert not list(in_tmp.iterdir())


@pytest.mark.slow
def test_the_shell_completes(in_tmp: Path) -> None:
    """The script as it is installed, completed by a real bash."""
    program = in_tmp / "recals-exp"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from recals_exp.__main__ import command\nsys.exit(command())\n"
    )
    program.chmod(0o755)
    script = (
        'eval "$(recals-exp -sc install=bash)"; COMP_LINE="recals-exp experiment=doc"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=1; '
        'complete -p recals-exp; hydra_bash_completion; echo "found ${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{in_tmp}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert "-F hydra_bash_completion recals-exp" in done.stdout, done.stderr
    assert "found experiment=documented_curve" in done.stdout


# -- a sweep -----------------------------------------------------------------------------------------------------------


def test_a_sweep(fake_runner: Any, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = fake_runner()
    assert cli.main(["budget=0.25,0.5", "-m", "seed=3", "model.depth=2"]) == cli.OK
    assert [str(made.budget) for made in seen] == ["0.25", "0.5"]
    (folder,) = (in_tmp / "outputs").iterdir()
    assert {"0_budget=0.25", "1_budget=0.5", "tradeoff.csv", "tradeoff.json", "tradeoff.png"} <= {
        path.name for path in folder.iterdir()
    }
    assert list(rows(folder)) == ["0_budget=0.25", "1_budget=0.5"]
    assert tuple(rows(folder)["0_budget=0.25"]) == records.COLUMNS
    out = capsys.readouterr().out
    assert "tradeoff.png" in out
    assert "1_budget=0.5" in out


def test_the_sweeps_folder_is_honoured(fake_runner: Any, in_tmp: Path) -> None:
    fake_runner()
    assert cli.main(["budget=0.5,1", "-m", "hydra.sweep.dir=sweeps/one"]) == cli.OK
    assert set(rows(in_tmp / "sweeps/one")) == {"0_budget=0.5", "1_budget=1"}
    assert not (in_tmp / "outputs").exists()


def test_two_sweeps_of_the_same_second(fake_runner: Any, in_tmp: Path) -> None:
    fake_runner()
    for _ in range(2):
        assert cli.main(["budget=0.5,1", "-m"]) == cli.OK
    folders = sorted((in_tmp / "outputs").iterdir())
    assert len(folders) == 2
    assert all(len(rows(folder)) == 2 for folder in folders)


def test_tidy_numbers(fake_runner: Any, in_tmp: Path) -> None:
    fake_runner()
    assert cli.main(["budget=range(0.1,0.5,0.1)", "-m", "hydra.sweep.dir=s"]) == cli.OK
    assert set(rows(in_tmp / "s")) == {"0_budget=0.1", "1_budget=0.2", "2_budget=0.3", "3_budget=0.4"}
    assert {row["budget"] for row in rows(in_tmp / "s").values()} == {"0.1", "0.2", "0.3", "0.4"}


def test_failed_jobs_are_rows_and_the_others_run(
    fake_runner: Any, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def during(run_config: RunConfig, folder: Path) -> None:
        if run_config.seed == 1:
            raise RuntimeError("the model broke")
        if run_config.seed == 2:
            sys.exit(3)

    seen = fake_runner(during)
    assert cli.main(["seed=0,1,2,-1,3", "-m", "hydra.sweep.dir=s"]) == cli.JOB_FAILED
    assert [made.seed for made in seen] == [0, 1, 2, 3]
    table = rows(in_tmp / "s")
    assert {job: row["status"] for job, row in table.items()} == {
        "0_seed=0": "ok",
        "1_seed=1": "failed",
        "2_seed=2": "failed",
        "3_seed=-1": "failed",
        "4_seed=3": "ok",
    }
    assert table["1_seed=1"]["error"] == "RuntimeError: the model broke"
    assert table["2_seed=2"]["error"] == "SystemExit: 3"
    assert "seed=-1 is not allowed" in table["3_seed=-1"]["error"]
    for job in ("1_seed=1", "2_seed=2", "3_seed=-1"):
        assert "Traceback" in (in_tmp / "s" / job / "recals_exp.log").read_text()
    assert "Traceback" not in (in_tmp / "s/0_seed=0/recals_exp.log").read_text()
    out, err = capsys.readouterr()
    assert "3 of 5 jobs failed" in err
    assert "Traceback" not in out + err


def test_an_interrupt_ends_the_sweep_with_the_report_of_what_there_is(
    fake_runner: Any, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def during(run_config: RunConfig, folder: Path) -> None:
        if run_config.seed == 1:
            raise KeyboardInterrupt

    seen = fake_runner(during)
    assert cli.main(["seed=0,1,2", "-m", "hydra.sweep.dir=s"]) == cli.INTERRUPTED
    assert [made.seed for made in seen] == [0, 1]
    assert {job: row["status"] for job, row in rows(in_tmp / "s").items()} == {"0_seed=0": "ok", "1_seed=1": "failed"}
    assert "interrupted" in capsys.readouterr().err


def test_a_sweep_with_a_wrong_type_does_not_start(
    fake_runner: Any, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fake_runner()
    assert cli.main(["batch_size=8,abc", "-m"]) == cli.NOT_UNDERSTOOD
    assert not seen
    assert "batch_size=abc is not allowed" in capsys.readouterr().err


def test_jobs_leave_no_hydra_state_behind(fake_runner: Any) -> None:
    from hydra.core.global_hydra import GlobalHydra

    fake_runner()
    arguments = sys.argv[:]
    cli.main([])
    assert sys.argv == arguments
    assert not GlobalHydra.instance().is_initialized()


# -- experiments -------------------------------------------------------------------------------------------------------


def test_the_documented_curve_sweeps_by_itself(fake_runner: Any, in_tmp: Path) -> None:
    seen = fake_runner()
    assert cli.main(["experiment=documented_curve", "hydra.sweep.dir=s"]) == cli.OK
    assert [str(made.budget) for made in seen] == ["0.125", "0.25", "0.5", "0.75"]
    assert {(made.model.name, made.policy) for made in seen} == {("mlp_chain", "fifo")}
    assert sorted(rows(in_tmp / "s")) == [f"{n}_budget={b}" for n, b in enumerate(("0.125", "0.25", "0.5", "0.75"))]


def test_the_command_line_overrides_an_experiment(fake_runner: Any) -> None:
    seen = fake_runner()
    assert cli.main(["experiment=documented_curve", "budget=0.9", "model=gpt", "dataset=text", "seed=1,2"]) == cli.OK
    assert [(str(made.budget), made.model.name, made.seed) for made in seen] == [("0.9", "gpt", 1), ("0.9", "gpt", 2)]


def test_an_experiment_of_ones_own_by_path_and_by_folder(fake_runner: Any, in_tmp: Path) -> None:
    seen = fake_runner()
    (in_tmp / "mine").mkdir()
    (in_tmp / "mine/question.yaml").write_text("budget: 0.7\nmodel:\n  depth: 2\n")
    assert cli.main(["experiment=mine/question.yaml", "seed=5"]) == cli.OK
    (in_tmp / "my_conf/experiment").mkdir(parents=True)
    (in_tmp / "my_conf/experiment/other.yaml").write_text("# @package _global_\nbudget: 0.6\n")
    assert cli.main(["experiment=other", "--config-dir", "my_conf"]) == cli.OK
    assert [(str(made.budget), made.seed) for made in seen] == [("0.7", 5), ("0.6", 0)]
    assert seen[0].model.kwargs["depth"] == 2


# -- bring your own ----------------------------------------------------------------------------------------------------

MY_MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(hidden), nn.Tanh(), nn.Linear(hidden, num_classes))
        self(torch.ones(1, 4))

    def forward(self, x):
        return self.layers(x.flatten(1))

class Points(torch.utils.data.Dataset):
    classes = ("left", "right", "middle")

    def __init__(self, n=30):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, row):
        return torch.full((4,), float(row % 3)), row % 3
"""


def test_a_model_and_data_of_ones_own_by_target(
    fake_runner: Any, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recals_exp.datasets import build_data
    from recals_exp.models import build_model

    (in_tmp / "my_own_parts.py").write_text(MY_MODELS)
    monkeypatch.syspath_prepend(str(in_tmp))
    seen = fake_runner()
    command = ["model=custom", "model._target_=my_own_parts.Net", "model.hidden=16"]
    command += ["dataset=custom", "dataset._target_=my_own_parts.Points", "dataset.n=12"]
    assert cli.main(command) == cli.OK
    (made,) = seen
    data = build_data(made.dataset)
    assert (made.model.name, made.dataset.name, data.n_samples, data.n_classes) == ("Net", "Points", 12, 3)
    model = build_model(made.model, data)
    assert model.layers[0].out_features == 16
    assert model(next(data.batches(5)).x).shape == (5, 3)


def test_a_model_of_ones_own_in_a_yaml_outside_the_package(
    fake_runner: Any, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_tmp / "my_yaml_parts.py").write_text(MY_MODELS)
    monkeypatch.syspath_prepend(str(in_tmp))
    (in_tmp / "my_conf/model").mkdir(parents=True)
    (in_tmp / "my_conf/model/mine.yaml").write_text("_target_: my_yaml_parts.Net\nhidden: 5\n")
    seen = fake_runner()
    assert cli.main(["--config-dir", "my_conf", "model=mine,mlp_chain", "-m"]) == cli.OK
    assert [(made.model.name, made.model.target) for made in seen] == [
        ("mine", "my_yaml_parts.Net"),
        ("mlp_chain", "recals_exp.models.mlp_chain"),
    ]


@pytest.mark.slow
def test_the_real_command_finds_modules_of_the_current_folder(in_tmp: Path) -> None:
    """``python -m`` puts the current folder on the path; everything here is the real thing."""
    (in_tmp / "my_parts.py").write_text(
        MY_MODELS + "\ndef broken(num_classes):\n    raise RuntimeError('no such luck')\n"
    )
    command = [
        *(sys.executable, "-W", "error", "-m", "recals_exp", "model=custom", "-m"),
        *("model._target_=my_parts.Net,my_parts.broken", "dataset=custom", "dataset._target_=my_parts.Points"),
        *(
            "budget=1",
            "batch_size=6",
            "train_steps=2",
            "warmup_steps=0",
            "timing_pairs=1",
            "hydra.sweep.dir=s",
            "threads=1",
        ),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == cli.JOB_FAILED, done.stderr
    table = rows(in_tmp / "s")
    assert table["0_model=my_parts.Net"]["status"] == "ok", done.stderr
    assert table["0_model=my_parts.Net"]["gradients_identical"] is True
    assert table["1_model=my_parts.broken"]["error"] == "RuntimeError: no such luck"
    assert re.search(r"1 of 2 jobs failed: 1_model=my_parts.broken", done.stderr)
    assert "Traceback" not in done.stdout + done.stderr


def test_conf_is_found_in_this_checkout() -> None:
    assert config.conf_dir() == ROOT / "conf"
    assert config.experiments_dir() == ROOT / "experiments"
