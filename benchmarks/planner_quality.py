"""How close plans come to what no plan can beat: planned, DTR, FIFO, Revolve and the bound, per budget.

    python benchmarks/planner_quality.py                               # chain, gpt, resnet50 under the cost model
    python benchmarks/planner_quality.py --models gpt --budgets 0.5 0.25 --effort 3
    python benchmarks/planner_quality.py --records tape.json           # records saved by TapeRecord.to_json

``chain`` = 64 x (Linear 512, Tanh), batch 512; ``gpt`` = 8 pre-norm blocks, d 512, batch 4 x 256, dropout 0.1; ``resnet50`` =
torchvision, batch 8, 128 px. Overheads are percent of a plain step (backward = 2 x forward). Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from recals_exp.recals import recals_with_rngs
from recals_exp.recals.planning.bound import revolve_optimum
from recals_exp.recals.planning.planner import Planned, make_plans
from recals_exp.recals.profiling import profile_step
from recals_exp.recals.record import TapeRecord
from recals_exp.recals.simulate import plan_of, simulate

BUDGETS = (0.75, 0.5, 0.35, 0.25, 0.18, 0.125)
CHAIN_LAYERS = 64


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(rows, steps, width)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Token and position embedding, blocks, norm, head."""

    def __init__(self, blocks: int = 8, width: int = 512, steps: int = 256, tokens: int = 1000) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(steps, width))
        self.blocks = nn.Sequential(*(Block(width, 8, 0.1) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(x) + self.position))


def chain() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(CHAIN_LAYERS) for layer in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(512, 512)


def gpt() -> tuple[nn.Module, Tensor]:
    return Gpt(), torch.randint(0, 1000, (4, 256))


def resnet50() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.resnet50(), torch.randn(8, 3, 128, 128)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"chain": chain, "gpt": gpt, "resnet50": resnet50}


def record_of(name: str) -> TapeRecord:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    return profile_step(recals_with_rngs(-1), model, (x,), {})


def compare(name: str, record: TapeRecord, budgets: list[float], effort: float) -> None:
    limits = [int(budget * record.cache_total_bytes) for budget in budgets]
    rivals = {limit: (plan_of(record, limit, "dtr"),) for limit in limits}
    for budget, planned in zip(budgets, make_plans(record, limits, effort=effort, others=rivals), strict=True):
        print(_row(name, record, budget, planned), flush=True)


def _row(name: str, record: TapeRecord, budget: float, planned: Planned) -> str:
    limit = planned.plan.limit_bytes
    revolve = ""
    if name == "chain":
        slots = limit // (record.cache_total_bytes // CHAIN_LAYERS)
        revolve = f"{100 * revolve_optimum(CHAIN_LAYERS - 1, slots) / (3 * CHAIN_LAYERS):.1f}"
    bound_pct, planned_pct = planned.bound.overhead_pct, planned.verdict.overhead_pct
    cells = [
        name,
        f"{100 * budget:g} %",
        f"{100 * (1 / budget - 1) / 6:.1f}",
        f"{simulate(record, limit, 'fifo').overhead_pct:.1f}",
        f"{simulate(record, limit, 'dtr').overhead_pct:.1f}",
        revolve,
        f"**{planned_pct:.2f}**",
        f"{bound_pct:.2f}",
        f"{planned_pct / bound_pct:.3f}" if bound_pct > 0 else "",
        f"{planned.planning_s:.1f}",
        planned.plan.origin,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--records", nargs="*", type=Path, default=[])
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--effort", type=float, default=1.0)
    args = parser.parse_args()
    print("| tape | cache | documented | FIFO | DTR | Revolve | planned | bound | ratio | planning s | from |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for path in args.records:
        compare(path.stem, TapeRecord.from_json(path.read_text()), args.budgets, args.effort)
    for name in args.models if not args.records else ():
        compare(name, record_of(name), args.budgets, args.effort)


if __name__ == "__main__":
    main()
