"""Devices, random states, threads, and what the environment record says."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from recals_exp.meters.device import generator_states, resolve_device, seed_everything, thread_count
from recals_exp.meters.environment import describe_environment, git_commit

CPU = torch.device("cpu")


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    expected = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else CPU
    assert expected is not None
    assert resolve_device("auto").type == expected.type
    assert resolve_device("cpu:0") == CPU


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toaster", "device='toaster' is not a device: use auto, cpu, or an accelerator such as cuda:0"),
        ("meta", "device='meta' is not on this machine, which has .*: use device=cpu or device=auto"),
        ("cuda:1000", "device='cuda:1000' is not on this machine, which has "),
    ],
)
def test_devices_that_are_not_there_are_refused_with_those_that_are(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_device(name)


@pytest.mark.gpu
def test_an_accelerator_gets_its_index() -> None:
    assert resolve_device("cuda") == torch.device("cuda", torch.cuda.current_device())


def test_one_seed_seeds_every_generator() -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    seed_everything(7)
    first = draws()
    assert draws() != first
    seed_everything(7)
    assert draws() == first


@pytest.mark.parametrize(
    ("draw", "name"),
    [(lambda: torch.rand(1), "torch cpu"), (random.random, "python"), (lambda: numpy.random.rand(), "numpy")],
)
def test_each_draw_moves_one_state(draw: object, name: str) -> None:
    def comparable() -> dict[str, object]:
        return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in states().items()}

    def states() -> dict[str, object]:
        return generator_states(CPU)

    before = comparable()
    draw()  # type: ignore[operator]
    after = comparable()
    assert [key for key in before if before[key] != after[key]] == [name]


def test_threads_are_put_back_also_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with thread_count(before + 1) as threads:
            assert threads == torch.get_num_threads() == before + 1
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.get_num_threads() == before
    with thread_count(None) as threads:
        assert threads == before


def test_environment_says_what_ran() -> None:
    environment = describe_environment(CPU)
    assert environment.packages["torch"] == torch.__version__
    assert environment.processor
    assert environment.platform
    assert environment.accelerator is None
    assert environment.cpu_count >= 1
    assert environment.memory_bytes is not None
    assert environment.memory_bytes > 2**28


def test_commit_of_a_checkout_clean_dirty_and_foreign(tmp_path: Path) -> None:
    def git(*args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_commit(package) is None  # no checkout
    git("init")
    git("commit", "--allow-empty", "-m", "somebody else's")
    assert git_commit(package) is None  # a checkout, but not of this package
    git("add", ".")
    git("commit", "-m", "first")
    assert git_commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("x = 1")
    assert git_commit(package) == git("rev-parse", "HEAD") + "-dirty"
    assert git_commit(tmp_path / "nowhere") is None
