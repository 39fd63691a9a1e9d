"""What the numbers were measured on: versions, hardware, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from recals_exp.records import EnvironmentRecord

PACKAGES = ("recals-exp", "torchvision", "numpy", "hydra-core", "tensorboard")


def describe_environment(device: torch.device) -> EnvironmentRecord:
    """This machine and this installation. What cannot be found out is None, never a guess."""
    accelerator = None
    if device.type != "cpu":
        module = torch.get_device_module(device)
        accelerator = module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)
    return EnvironmentRecord(
        python=platform.python_version(),
        platform=platform.platform(),
        processor=_processor(),
        cpu_count=_usable_cpus(),
        memory_bytes=_memory_bytes(),
        accelerator=accelerator,
        packages=_versions(),
        git_commit=git_commit(Path(__file__).resolve().parents[1]),
    )


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}  # with its build, which the installed package leaves out
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _usable_cpus() -> int:
    """The CPUs this process may run on, which in a container or a batch job are fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    import psutil

    return int(psutil.virtual_memory().total)


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is part of, with `-dirty` when tracked files have changes; None if none."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed package may lie inside somebody else's checkout: only files git knows count
    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None
    commit = git("rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
