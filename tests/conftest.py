"""What every test gets: a fixed seed, put-back global state, and a header that says which versions ran."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
from collections.abc import Iterator

import psutil
import pytest
import torch

SEED = 1234

# What a shell starts in the background ignores Ctrl-C, and so would the tests' own programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if WORKERS := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # they share the cores
    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))


def pytest_report_header() -> list[str]:
    import hydra
    import torchvision

    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return [
        f"seed {SEED}; torch {torch.__version__}, torchvision {torchvision.__version__}, hydra {hydra.__version__}",
        f"accelerator {accelerator}; cpus {os.cpu_count()}, torch threads {torch.get_num_threads()}",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a full collection, of which a run makes a dozen, need not look at them for 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture
def root_logging() -> Iterator[None]:
    """Put back the root logger, which a Hydra job configures anew."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def config_store() -> Iterator[None]:
    """Forget the experiments a test registers with Hydra."""
    from hydra.core.config_store import ConfigStore

    repo = ConfigStore.instance().repo
    before = dict(repo.get("experiment", {}))
    yield
    repo["experiment"] = before


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Every process that a test started ends with it (a killed one takes a moment to be gone)."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, left = psutil.wait_procs(started, timeout=5)
    tracker = "resource_tracker"  # Python's own, one for all spawned processes
    assert not [child for child in left if tracker not in " ".join(child.cmdline())]
