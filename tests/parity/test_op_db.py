"""Every differentiable operator of PyTorch's ``op_db``: plain's bits with everything dropped, and at a middle limit.

A short run takes the first samples of each operator and dtype (``databases.py`` has the rules); the slow test takes all.
What is not simply exact stands in ``known_limits.py``.
"""

from __future__ import annotations

import pytest
import torch
from parity import known_limits
from parity.databases import DTYPES, OpInfo, differentiable_ops, judge_op, op_name

FEWEST_OPS = 544  # in torch 2.14; a newer torch has more, an older one may have fewer


@pytest.mark.parametrize("op", differentiable_ops(), ids=op_name)
def test_operator(op: OpInfo) -> None:
    known_limits.expected(judge_op(op), known_limits.OPS, full=False)


@pytest.mark.slow
@pytest.mark.parametrize("op", differentiable_ops(), ids=op_name)
def test_operator_on_all_samples(op: OpInfo) -> None:
    known_limits.expected(judge_op(op, full=True), known_limits.OPS, full=True)


def test_the_database_is_covered() -> None:
    ops = differentiable_ops()
    names = [op_name(op) for op in ops]
    assert len(set(names)) == len(names)
    assert set(known_limits.OPS) <= set(names), "known_limits.py names an operator that is not in the database"
    if torch.__version__ >= (2, 14):
        assert len(ops) >= FEWEST_OPS
    for dtype in DTYPES:
        assert any(dtype in op.supported_backward_dtypes("cpu") for op in ops), dtype


def test_the_list_of_limits_is_short() -> None:
    repeated = [name for name, limit in known_limits.OPS.items() if limit.kinds == ("warnings",)]
    assert len(repeated) <= 11
    assert len(known_limits.OPS) - len(repeated) <= 4
    assert not any("wrong" in limit.kinds or "unsteady" in limit.kinds for limit in known_limits.OPS.values())
