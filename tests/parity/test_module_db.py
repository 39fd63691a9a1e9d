"""Every module of PyTorch's ``module_db``, in training and in evaluation mode, two steps each; as ``test_op_db.py``."""

from __future__ import annotations

import pytest
import torch
from parity import known_limits
from parity.databases import ModuleInfo, judge_module, modules

FEWEST_MODULES = 114  # in torch 2.14


@pytest.mark.parametrize("info", modules(), ids=lambda info: info.name)
def test_module(info: ModuleInfo) -> None:
    known_limits.expected(judge_module(info), known_limits.MODULES, full=False)


@pytest.mark.slow
@pytest.mark.parametrize("info", modules(), ids=lambda info: info.name)
def test_module_on_all_samples(info: ModuleInfo) -> None:
    known_limits.expected(judge_module(info, full=True), known_limits.MODULES, full=True)


def test_the_database_is_covered() -> None:
    names = [info.name for info in modules()]
    assert set(known_limits.MODULES) <= set(names), "known_limits.py names a module that is not in the database"
    if torch.__version__ >= (2, 14):
        assert len(names) >= FEWEST_MODULES


def test_the_list_of_limits_is_short() -> None:
    assert len(known_limits.MODULES) <= 5
    assert not any("wrong" in limit.kinds or "unsteady" in limit.kinds for limit in known_limits.MODULES.values())
