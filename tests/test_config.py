"""The configuration: what composes, what is refused and with which words, and how folders are named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from recals_exp import config, folders
from recals_exp.arguments import prepare_arguments
from recals_exp.runconfig import MODES, Budget, ConfigError, PartSpec, RunConfig, locate

pytestmark = pytest.mark.usefixtures("config_store")

CONF = config.conf_dir()
N_CONF_FILES = 41  # every YAML below conf/: raise it when you add one
CHOICES = {"model", "dataset", "optimizer", "strategy", "policy", "pipeline"}


def composed(*overrides: str) -> tuple[DictConfig, dict[str, Any]]:
    """The settings and the choices, as a job gets them."""
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", prepare_arguments(overrides), return_hydra_config=True)
    choices = dict(whole.hydra.runtime.choices)
    with_hydra = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    return with_hydra, choices


def run_config(*overrides: str) -> RunConfig:
    return config.to_run_config(*composed(*overrides))


# -- what composes -----------------------------------------------------------------------------------------------------


def test_the_defaults() -> None:
    made = run_config()
    assert made.model == PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 32, "width": None})
    assert made.dataset.name == "digits"
    assert made.dataset.kwargs == {"image_size": 20, "channels": 1, "scale": "standard", "held_out": 0}
    assert made.optimizer.target == "torch.optim.SGD"
    assert (made.strategy, made.policy, made.pipeline.name) == ("recals", "planned", "none")
    assert made.budget == Budget("fraction", 0.5)
    assert made.batch_size == 1536
    assert made.mode == "run"


def test_the_data_set_is_fitted_to_the_model_and_the_user_has_the_last_word() -> None:
    digits = run_config("model=vit_b_16").dataset.kwargs
    assert (digits["image_size"], digits["channels"]) == (64, 3)
    assert run_config("model=vit_b_16", "dataset.image_size=32").dataset.kwargs["image_size"] == 32
    assert run_config("model=vit_b_16").batch_size == 16
    assert run_config("model=vit_b_16", "batch_size=3").batch_size == 3
    assert run_config("model=resnet18", "dataset=synthetic").dataset.kwargs["shape"] == [3, 64, 64]


def test_a_model_may_bring_its_data_set_and_the_user_has_the_last_word() -> None:
    assert run_config("model=gpt").dataset.name == "text"
    assert run_config("model=gpt").optimizer.name == "adamw"
    chosen = run_config("model=gpt", "dataset=synthetic_text", "optimizer=sgd")
    assert (chosen.dataset.name, chosen.optimizer.name) == ("synthetic_text", "sgd")


def _conf_files() -> list[Path]:
    return sorted(CONF.rglob("*.yaml"))


def test_every_yaml_is_counted() -> None:
    assert len(_conf_files()) == N_CONF_FILES
    assert {path.parent.name for path in _conf_files() if path.parent.parent == CONF} == CHOICES | {"preset"}


@pytest.mark.parametrize(
    "path",
    [path for path in _conf_files() if path.parent.name in CHOICES],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_choice_composes_to_a_run_config(path: Path) -> None:
    group, name = path.parent.name, path.stem
    extra = {
        ("model", "custom"): ["model._target_=torch.nn.Linear", "model.in_features=2", "model.out_features=2"],
        ("dataset", "custom"): ["dataset._target_=recals_exp.datasets.digits"],
        ("dataset", "image_folder"): ["dataset.root=somewhere"],
        ("optimizer", "custom"): ["optimizer._target_=torch.optim.Adagrad"],
    }.get((group, name), [])
    made = run_config(f"{group}={name}", *extra)
    value = getattr(made, group)
    shown = value if isinstance(value, str) else value.name
    expected = {"model": "Linear", "dataset": "digits", "optimizer": "Adagrad"}[group] if name == "custom" else name
    assert shown == expected
    assert path.read_text().startswith("# "), "the first line says what the choice is"


def test_settings_run_config_and_help_have_the_same_keys() -> None:
    run_fields = {item.name for item in dataclasses.fields(RunConfig)} - {"strategy_kwargs", "policy_kwargs", "job"}
    assert set(config.KEYS) == run_fields | {"target_peak", *config.LAUNCH_KEYS}  # the target becomes the budget
    help_text = (CONF / "hydra/help/recals_exp.yaml").read_text()
    for key in set(config.KEYS) - CHOICES:
        assert re.search(rf"^    {key} +\S", help_text, re.MULTILINE), f"--help does not explain {key}"
    for mode in MODES:
        assert re.search(rf"\b{mode}\b", help_text), f"--help does not explain mode={mode}"


def test_run_config_is_frozen_and_plain() -> None:
    made = run_config("budget=512MiB", "model.depth=3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 3  # type: ignore[misc]
    plain = made.to_dict()
    assert plain["budget"] == "512MiB"
    assert plain["model"]["kwargs"] == {"depth": 3, "width": None}
    assert plain["pipeline"]["name"] == "none"
    assert run_config("pipeline=two_stage", "pipeline.cuts=[a]").to_dict()["pipeline"]["cuts"] == ["a"]


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "kind", "value", "text"),
    [
        (None, "none", 0, "none"),
        (0.25, "fraction", 0.25, "0.25"),
        (1, "fraction", 1.0, "1"),
        ("0.5", "fraction", 0.5, "0.5"),
        (0.1 + 0.2, "fraction", 0.3, "0.3"),
        ("512MiB", "bytes", 512 * 1024**2, "512MiB"),
        ("1.5 GiB", "bytes", 1536 * 1024**2, "1536MiB"),
        ("1000B", "bytes", 1000, "1000B"),
        ("1KB", "bytes", 1000, "1000B"),
    ],
)
def test_budget_forms(raw: object, kind: str, value: float, text: str) -> None:
    budget = Budget.parse(raw)
    assert budget == Budget(kind, value)
    assert str(budget) == text


def test_budget_limit() -> None:
    assert Budget.parse(None).limit_bytes(1000) is None
    assert Budget.parse(0.5).limit_bytes(1001) == 500
    assert Budget.parse(1).limit_bytes(1001) == 1001
    assert Budget.parse(0.7).limit_bytes(10 * 4096) == 7 * 4096  # 0.7 * 10 is 6.999... in binary
    assert Budget.parse("2KiB").limit_bytes(5) == 2048


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("budget=nan", r"budget=nan is not a number: use a fraction in \(0, 1\] .* 512MiB, knee, or null for no limit"),
        ("budget=inf", r"budget=inf is a fraction above 1: use a fraction in \(0, 1\]"),
        ("budget=-0.5", r"budget=-0.5 is not above 0: use a fraction in \(0, 1\]"),
        ("budget=-5MiB", r"budget=-5MiB is not above 0: use a fraction in \(0, 1\]"),
        ("budget=0", r"budget=0 is not above 0"),
        ("budget=0MiB", r"budget=0MiB is not above 0"),
        ("budget=1.5", r"budget=1.5 is a fraction above 1: .* for a number of bytes write the unit: 1.5B"),
        ("budget=1048576", r"budget=1048576 is a fraction above 1: .* write the unit: 1048576B"),
        (
            "budget=12XB",
            r"budget=12XB is neither .*unknown unit 'XB'.*B, KB, MB, GB, TB.*KiB, MiB.*: use a fraction in",
        ),
        ("budget=abc", r"budget=abc is neither a fraction nor a size .*: use a fraction in \(0, 1\]"),
        ("budget=[0.5]", r"budget=\[0.5\] is not allowed: use a fraction"),
        ("budget=true", r"budget=True is not allowed: use a fraction"),
        ("batch_size=0", r"batch_size=0 is not allowed: use a whole number of at least 1"),
        ("seed=-1", r"seed=-1 is not allowed: use a whole number of at least 0"),
        ("threads=0", r"threads=0 is not allowed: use a whole number of at least 1, or null"),
        ("train_steps=-1", r"train_steps=-1 is not allowed: use a whole number of at least 0"),
        ("timing_pairs=0", r"timing_pairs=0 is not allowed: use a whole number of at least 1"),
        ("autocast=int8", r"autocast='int8' is not allowed: use bfloat16, float16, or null"),
        ("mode=fly", r"mode=fly is not known: use run"),
        ("model.dept=3", r"model mlp_chain .* does not take dept \(did you mean 'depth'\?\); it takes .*depth, width"),
        ("optimizer.lrr=3", r"optimizer sgd .* does not take lrr \(did you mean 'lr'\?\)"),
        ("dataset.size=3", r"dataset digits .* does not take size; it takes image_size, channels"),
        ("model=custom", r"model._target_ has no value yet: give it one with model._target_=VALUE"),
        ("dataset=image_folder", r"dataset.root has no value yet: give it one with dataset.root=VALUE"),
        ("model._target_=no_such_module.Net", r"there is no module 'no_such_module'.*in the current folder"),
        ("model._target_=torch.nn.Lineer", r"torch.nn was imported, but it has no 'Lineer'"),
        ("model._target_=Net", r"_target_='Net' is not an import path: write module.name"),
        ("model._target_=torch.pi", r"_target_='torch.pi' is a float, not callable"),
        ("model._target_=torch.nn.Bilinear", r"does not take depth, width; .* another target start from model=custom"),
        ("model._target_=null", r"model has no _target_: choose model=NAME"),
        ("pipeline.n_micro_batches=3", r"pipeline.n_micro_batches=3 with pipeline=none: .* choose pipeline=two_stage"),
        ("policy.name=3", r"policy.name=3 is not allowed: use the name of a policy"),
        ("+nonsense=3", r"there is no key 'nonsense'; the keys are model, .*, experiment and preset"),
        (
            "dataset.image_size=${nothing}",
            r"the configuration cannot be resolved: Interpolation key 'nothing' not found",
        ),
    ],
)
def test_a_value_that_is_not_allowed(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(override)


def test_several_faults_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)batch_size=0 .*threads=0 .*autocast='int8'"):
        run_config("batch_size=0", "threads=0", "autocast=int8")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("budgte=0.5", r"^there is no key 'budgte' \(did you mean 'budget'\?\); the keys are model, dataset"),
        ("batch_size=abc", r"^batch_size=abc is not allowed: batch_size is a whole number of at least 1 \("),
        ("batch_size=1.5", r"^batch_size=1.5 is not allowed: batch_size is a whole number of at least 1 \("),
        ("seed=null", r"^seed=null is not allowed: seed is a whole number of at least 0 \("),
        ("threads=many", r"^threads=many is not allowed: threads is a whole number of at least 1, or null"),
        ("timing_pairs=[1]", r"timing_pairs is a whole number of at least 1"),
        ("policy.depth=3", r"^policy has no option 'depth'"),
        (
            "pipeline.n_stage=3",
            r"^pipeline has no option 'n_stage' \(did you mean 'n_stages'\?\); it has name, devices",
        ),
        ("pipeline.n_stages=two", r"^pipeline.n_stages=two is not allowed: pipeline.n_stages is a whole number"),
        ("pipeline.ragged=maybe", r"^pipeline.ragged=maybe is not allowed: pipeline.ragged is true or false"),
        ("model=resnet", r"(?s)Could not find 'model/resnet'.*resnet18.*vit_b_16$"),
        ("experiment=nothing", r"(?s)Could not find 'experiment/nothing'.*documented_curve\n"),
        ("model=3", r"^model, dataset, .* take the name of a choice, see --help"),
        ("budget=0.5,0.25", r"(?s)Ambiguous value.*add --multirun"),
    ],
)
def test_what_hydra_refuses_is_explained(override: str, message: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- Hydra raises many kinds; what counts is the explanation
        composed(override)
    explanation = config.explain(caught.value)
    assert re.search(message, explanation), explanation
    assert "Traceback" not in explanation
    assert "search path" not in explanation


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_nested_targets_are_built() -> None:
    spec = PartSpec("seq", "torch.nn.Sequential", {})
    assert spec.build().__class__.__name__ == "Sequential"
    nested = PartSpec("x", "builtins.dict", {"inner": {"_target_": "fractions.Fraction", "numerator": 3}, "rest": [1]})
    built = nested.build()
    assert built["inner"] == 3
    assert built["rest"] == [1]
    partial = PartSpec("x", "builtins.dict", {"make": {"_target_": "fractions.Fraction", "_partial_": True}})
    assert partial.build()["make"](2) == 2


def test_defaults_give_way_to_the_recipe() -> None:
    spec = PartSpec("digits", "recals_exp.datasets.digits", {"channels": 3})
    assert spec.build(image_size=4, channels=1).input_spec.shape == (3, 4, 4)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"Linear \(torch.nn.Linear\): missing .*'out_features'; it takes in_features"
    ):
        PartSpec("Linear", "torch.nn.Linear", {"in_features": 2}).build()


def test_a_module_that_lacks_a_dependency_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"importing needs_more failed because the module 'not_installed_at_all'"):
        locate("needs_more.Net")


# -- experiments and the command line ----------------------------------------------------------------------------------


def test_options_may_stand_anywhere() -> None:
    arguments = ["budget=0.5", "-m", "seed=1", "--config-dir", "a=b", "~experiment", "--cfg", "job"]
    assert prepare_arguments(arguments) == [
        *("-m", "--config-dir", "a=b", "--cfg", "job"),
        *("budget=0.5", "seed=1", "~experiment"),
        "hydra.job.config.override_dirname.exclude_keys=[budget,seed,experiment]",
    ]


def test_only_what_varies_names_a_folder() -> None:
    last = prepare_arguments(["budget=0.1,0.2", "model.depth=3", "seed=range(3)", "dataset=digits"])[-1]
    assert last == "hydra.job.config.override_dirname.exclude_keys=[model.depth,dataset]"
    assert prepare_arguments(["budget=0.1,0.2"]) == ["budget=0.1,0.2"]


def test_an_experiment_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults:\n  - override /model: gpt\nbudget: 0.125\nmodel:\n  depth: 2\n")
    made = run_config(f"experiment={path}", "model.heads=2")
    assert made.model.name == "gpt"
    assert made.dataset.name == "text"
    assert made.model.kwargs["depth"] == 2
    assert made.model.kwargs["heads"] == 2
    assert made.budget == Budget("fraction", 0.125)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"experiment=.*mine.yaml: cannot read .*mine.yaml \(No such file"),
        ("budget: [", r"experiment=.*mine.yaml is not valid YAML"),
        ("- budget", r"experiment=.*mine.yaml must hold KEY: VALUE lines, not a ListConfig"),
    ],
)
def test_an_experiment_file_that_cannot_be_used(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepare_arguments([f"experiment={path}"])


def test_a_mistyped_key_in_an_experiment_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("budgte: 0.5\n")
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- Hydra's own kind
        composed(f"experiment={path}")
    assert "there is no key 'budgte' (did you mean 'budget'?)" in config.explain(caught.value)


# -- folders -----------------------------------------------------------------------------------------------------------


def test_folders_of_the_same_second_do_not_collide(tmp_path: Path) -> None:
    made = [folders.new_folder(str(tmp_path / "outputs")) for _ in range(5)]
    assert len(set(made)) == 5
    assert all(Path(folder).is_dir() for folder in made)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d)?", Path(folder).name) for folder in made)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "3"),
        (["budget=0.25"], "3_budget=0.25"),
        (["experiment=documented_curve", "batch_size=8", "budget=0.30000000000000004"], "3_budget=0.3"),
        (["++model.depth=4", "hydra.verbose=true"], "3_model.depth=4"),
        (["dataset.root=/data/images", "model=resnet18"], "3_dataset.root=-data-images,model=resnet18"),
        (["++model._target_=my.Net"], "3_model=my.Net"),
        (["budget=null"], "3_budget=null"),
        (["dataset.shape=[3,32,32]"], "3_dataset.shape=-3-32-32"),
    ],
)
def test_job_folders(overrides: list[str], name: str) -> None:
    assert folders.job_folder(3, overrides, ["experiment", "batch_size"]) == name


def test_long_job_folders_stay_short_and_apart() -> None:
    names = {folders.job_folder(0, [f"dataset.path={'x' * 100}{tail}"]) for tail in "abc"}
    assert len(names) == 3
    assert all(len(name) <= folders.MAX_FOLDER_NAME and "/" not in name for name in names)
