"""The cost model: FLOPs as torch counts them, bytes read once and written once, no tensor data touched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recals_exp.recals.costs import NOMINAL, Meta, calibrate, op_cost, op_flops

aten = torch.ops.aten


def test_matmul_from_shapes_alone() -> None:
    cost = op_cost(
        aten.addmm.default, [Meta((512,), 4), Meta((64, 512), 4), Meta((512, 512), 4)], {}, Meta((64, 512), 4)
    )
    assert cost.flops == 2 * 64 * 512 * 512
    assert cost.nbytes == 4 * (512 + 64 * 512 + 512 * 512 + 64 * 512)
    assert cost.seconds == pytest.approx(
        NOMINAL.op_s + max(cost.flops / NOMINAL.flops_per_s, cost.nbytes / NOMINAL.bytes_per_s)
    )


def test_views_are_free_and_inplace_is_not() -> None:
    x = Meta((4, 8), 4)
    assert op_cost(aten.view.default, [x, [8, 4]], {}, Meta((8, 4), 4)).seconds == 0
    assert op_cost(aten.t.default, [x], {}, Meta((8, 4), 4)).seconds == 0
    assert op_cost(aten.relu_.default, [x], {}, x).nbytes == 2 * 4 * 8 * 4


def test_narrow_elements_compute_faster() -> None:
    wide = op_cost(aten.mm.default, [Meta((4096, 4096), 4)] * 2, {}, Meta((4096, 4096), 4))
    narrow = op_cost(aten.mm.default, [Meta((4096, 4096), 2)] * 2, {}, Meta((4096, 4096), 2))
    assert narrow.flops == wide.flops
    assert narrow.seconds < wide.seconds / 2


class _Adding(TorchDispatchMode):
    """Adds up what the model says of every op below."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.flops += op_flops(func, args, kwargs or {}, out)
        return out


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.linear(x, torch.ones(12, 16)),
        lambda x: torch.bmm(x, x.transpose(1, 2)),
        lambda x: F.conv1d(x, torch.ones(8, x.shape[1], 3), padding=1),
        lambda x: F.conv_transpose1d(x, torch.ones(x.shape[1], 4, 3), stride=2),
    ],
    ids=["linear", "bmm", "conv", "conv_transpose"],
)
def test_flops_agree_with_the_flop_counter(fn) -> None:
    x = torch.ones(2, 6, 16)
    with FlopCounterMode(display=False) as counter:
        fn(x)
    with _Adding() as adding:
        fn(x)
    assert adding.flops == counter.get_total_flops() > 0


def test_fused_attention_counts_its_two_products() -> None:
    q = torch.ones(2, 3, 16, 8)
    with _Adding() as adding:
        F.scaled_dot_product_attention(q, q, q)
    assert adding.flops == 2 * (2 * 2 * 3 * 16 * 16 * 8)


def test_rnn_layer_counts_every_step_and_weight() -> None:
    lstm = torch.nn.LSTM(8, 16)
    with _Adding() as adding:
        lstm(torch.ones(5, 3, 8))
    assert adding.flops == 2 * 5 * 3 * 4 * 16 * (8 + 16)


def test_calibration_gives_positive_rates() -> None:
    machine = calibrate("cpu")
    assert machine.name == "calibrated-cpu"
    assert min(machine.flops_per_s, machine.narrow_flops_per_s, machine.bytes_per_s, machine.op_s) > 0
