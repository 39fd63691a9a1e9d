"""Data parallel over two real processes: gradients and hooks as without recals, or a refusal that says why.

One pair of processes runs every case (starting them costs more than the cases); each rank compares with its own plain run
and reports by file.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recals_exp.recals import Recals, UnsupportedError, recals_with_rngs

WORLD = 2
TIMEOUT_S = 120
STEPS = 3


class Net(nn.Module):
    """Batch norm, dropout, a branch that some steps do not use, and a layer used twice."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.first, self.norm, self.shared = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
        self.branches, self.calls = branches, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = torch.dropout(self.norm(self.first(x)).tanh(), 0.2, True)
        y = self.shared(self.shared(y).tanh()).tanh()
        if self.branches:
            return (self.left if self.calls % 2 else self.right)(y).exp()
        return (self.left(y) * self.right(y)).tanh()


def _train(
    rank: int,
    call: Callable[..., Tensor],
    branches: bool,
    outside: bool,
    prepare: Callable[[Net], nn.Module] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train by DDP and write down everything that must not depend on ``call``, nor on ``prepare``."""
    torch.manual_seed(0)
    net = Net(branches)
    fired: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"accumulated {name}"))
    reduced: list[int] = []

    def communicate(state, bucket):  # type: ignore[no-untyped-def]  # DDP insists on annotations that are no strings
        reduced.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / WORLD)  # type: ignore[union-attr]

    if outside:  # recals around DDP, or the module DDP is given was prepared
        model: Callable[[Tensor], Tensor] = DistributedDataParallel(prepare(net) if prepare else net, **options)
        wrapped = model
    else:  # DDP around a module that calls through recals
        inner = net

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = inner

            def forward(self, x: Tensor) -> Tensor:
                return call(self.net, x)

        wrapped = DistributedDataParallel(Inside(), **options)
        model = wrapped
    wrapped.register_comm_hook(None, communicate)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[list[float]] = []
    torch.manual_seed(rank + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(6, 8)
        out = call(model, x) if outside else model(x)
        out.square().sum().backward()
        seen.append([float(value) for p in net.parameters() if p.grad is not None for value in p.grad.flatten()])
        optimizer.step()
    buffers = [float(value) for buffer in net.buffers() for value in buffer.flatten()]
    weights = [float(value) for parameter in net.parameters() for value in parameter.flatten()]
    noise = float(torch.rand(()))
    return {
        "gradients": seen, "weights": weights, "buffers": buffers, "fired": sorted(fired), "reduced": reduced,
        "calls": net.calls, "noise": noise,
    }  # fmt: skip


WAYS = ("wrap", "attach")


def _prepare(recals: Recals, way: str, net: Net) -> nn.Module:
    if way == "wrap":
        return recals.wrap(net)
    recals.attach(net)
    return net


CASES: dict[str, dict[str, Any]] = {
    "ddp": {"branches": False},
    "ddp-unused": {"branches": True, "find_unused_parameters": True},
    "ddp-static": {"branches": False, "static_graph": True},
    "ddp-views": {"branches": False, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
}


def _differences(plain: dict[str, Any], found: dict[str, Any], recals: Recals) -> list[str]:
    problems = [
        f"{key}: {str(found[key])[:80]} instead of {str(plain[key])[:80]}" for key in plain if plain[key] != found[key]
    ]
    stats = recals.stats
    if not stats.recomputed_values:
        problems.append("nothing was recomputed")
    if stats.cached_bytes:
        problems.append(f"{stats.cached_bytes} bytes left")
    return problems


def _fsdp(rank: int) -> list[str]:
    """FSDP2 frees and refills parameter memory behind autograd's back: exact, or refused at the door."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))

    def train(call: Callable[..., Tensor]) -> list[list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(rank + 1)
        seen = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            call(net, torch.randn(6, 8)).square().sum().backward()
            seen.append([float(v) for p in net.parameters() for v in p.grad.to_local().flatten()])  # type: ignore[union-attr]
            optimizer.step()
        return seen

    plain = train(lambda fn, *args: fn(*args))
    recals = recals_with_rngs(6 * 8 * 4)
    try:
        found = train(recals)
    except UnsupportedError as error:
        return [] if "FSDP" in str(error) else [f"refused without the reason: {error}"]
    return [] if found == plain else ["FSDP2: gradients differ from the plain run, without a word"]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    report: dict[str, list[str]] = {}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        for name, options in CASES.items():
            plain = _train(rank, lambda fn, *args: fn(*args), outside=True, **options)
            for outside in (True, False):
                recals = recals_with_rngs(2 * 6 * 16 * 4)
                found = _train(rank, recals, outside=outside, **options)
                report[f"{name}-{'around' if outside else 'inside'}"] = _differences(plain, found, recals)
            for way in WAYS:
                recals = recals_with_rngs(2 * 6 * 16 * 4)
                prepare = partial(_prepare, recals, way)
                found = _train(rank, lambda fn, *args: fn(*args), outside=True, prepare=prepare, **options)
                report[f"{name}-{way}"] = _differences(plain, found, recals)
        report["fsdp2"] = _fsdp(rank)
        dist.destroy_process_group()
    except Exception:
        report["error"] = [traceback.format_exc()[-3000:]]
    Path(folder, f"report{rank}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, str(folder)), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    assert not hung, f"{len(hung)} of {WORLD} ranks did not end within {TIMEOUT_S} s"
    found = [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(WORLD)]
    errors = [report["error"][0] for report in found if "error" in report]
    assert not errors, errors[0]
    return found


@pytest.mark.parametrize("where", ["around", "inside", *WAYS])
@pytest.mark.parametrize("case", CASES)
def test_ddp_is_the_plain_run(case: str, where: str, reports: list[dict[str, list[str]]]) -> None:
    for report in reports:
        assert report[f"{case}-{where}"] == []


def test_fsdp2_is_exact_or_refused(reports: list[dict[str, list[str]]]) -> None:
    for report in reports:
        assert report["fsdp2"] == []
