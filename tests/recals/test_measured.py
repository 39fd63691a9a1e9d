"""Times beside plain steps: which of them count."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from recals_exp.recals import recals_with_rngs
from recals_exp.recals.measured import Beside, steadier_half


def test_the_share_is_of_both_neighbours() -> None:
    step = Beside(3.0, 1.0, 2.0)
    assert step.plain_s == 1.5
    assert step.unsteadiness == pytest.approx(2 / 3)


@pytest.mark.parametrize(("count", "kept"), [(1, [0]), (2, [0]), (3, [0, 2]), (4, [0, 2])])
def test_the_steadier_half_counts_in_its_order(count: int, kept: list[int]) -> None:
    steps = [Beside(0, 1.0, 1.01), Beside(1, 1.0, 1.5), Beside(2, 2.0, 2.0), Beside(3, 1.0, 0.8)][:count]
    assert [step.taken for step in steadier_half(steps)] == kept


def test_no_garbage_is_collected_within_a_step_and_the_collector_comes_back() -> None:
    seen: list[bool] = []

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(gc.isenabled())
            return super().forward(x).tanh()

    assert gc.isenabled()
    recals_with_rngs(-1).profile(Net(4, 4), torch.randn(2, 4), costs="measured")
    assert gc.isenabled()
    assert seen.count(False) > 40
    assert all(seen[: seen.index(False)])  # what is not timed is left as it is
