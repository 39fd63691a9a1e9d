"""How close plans come to what no plan can beat: planned, DTR, FIFO, Revolve and the bound, per budget.

    python benchmarks/planner_quality.py                               # six networks under the cost model
    python benchmarks/planner_quality.py --networks gpt --budgets 0.5 0.25 --effort 3
    python benchmarks/planner_quality.py --records tape.json           # records saved by TapeRecord.to_json
    python benchmarks/planner_quality.py --curve 20 --effort 0.25      # 20 budgets each, and what must hold on all of them

Networks: see ``networks.py``. Overheads are percent of a plain step (backward = 2 x forward). What must hold: planned is never
above DTR, never above FIFO, never below the bound, and never rises with the budget. Prints Markdown; exits with 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from networks import CHAIN_LAYERS, NETWORKS

from recals_exp.recals import recals_with_rngs
from recals_exp.recals.planning.bound import revolve_optimum
from recals_exp.recals.planning.planner import Planned, make_plans
from recals_exp.recals.record import SOURCE, TapeRecord
from recals_exp.recals.simulate import following, pinned_bytes, rivals_of, simulate

BUDGETS = (0.75, 0.5, 0.35, 0.25, 0.18, 0.125)
SMALLEST_BUDGET = 0.1  # of a curve
EPSILON_PCT = 1e-6


def record_of(name: str) -> TapeRecord:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    return recals_with_rngs(-1).profile(model, x)


def compare(name: str, record: TapeRecord, budgets: list[float], effort: float) -> list[str]:
    """Print a row per budget; what does not hold, as sentences."""
    budgets = sorted(budgets, reverse=True)
    limits = [int(budget * record.cache_total_bytes) for budget in budgets]
    rivals = {limit: rivals_of(record, limit) for limit in limits}
    faults: list[str] = []
    above = 0.0
    for budget, planned in zip(budgets, make_plans(record, limits, effort=effort, others=rivals), strict=True):
        limit = planned.plan.limit_bytes
        fifo, dtr = (simulate(record, limit, policy).overhead_pct for policy in ("fifo", "dtr"))
        # the policy following the plan, in the engine's own code, and not what the planner thinks of it
        planned_pct = simulate(record, limit + pinned_bytes(record), following(record, planned.plan)).overhead_pct
        print(_row(name, record, budget, planned, fifo, dtr, planned_pct), flush=True)
        where = f"{name} at {100 * budget:.4g} %: planned {planned_pct:.4f}"
        if planned_pct > dtr + EPSILON_PCT:
            faults.append(f"{where} is above DTR {dtr:.4f}")
        if planned_pct > fifo + EPSILON_PCT:
            faults.append(f"{where} is above FIFO {fifo:.4f}")
        if planned_pct < planned.bound.overhead_pct - EPSILON_PCT:
            faults.append(f"{where} is below the bound {planned.bound.overhead_pct:.4f}")
        if planned_pct < above - EPSILON_PCT:
            faults.append(f"{where} is below {above:.4f} of the larger budget before it")
        above = planned_pct
    return faults


def _row(
    name: str, record: TapeRecord, budget: float, planned: Planned, fifo: float, dtr: float, planned_pct: float
) -> str:
    limit = planned.plan.limit_bytes
    revolve = ""
    if name == "chain":
        slots = limit // (record.cache_total_bytes // CHAIN_LAYERS)
        revolve = f"{100 * revolve_optimum(CHAIN_LAYERS - 1, slots) / (3 * CHAIN_LAYERS):.1f}"
    bound_pct = planned.bound.overhead_pct
    cells = [
        name,
        f"{100 * budget:.4g} %",
        f"{100 * (1 / budget - 1) / 6:.1f}",
        f"{fifo:.1f}",
        f"{dtr:.1f}",
        revolve,
        f"**{planned_pct:.2f}**",
        f"{bound_pct:.2f}",
        f"{planned_pct / bound_pct:.3f}" if bound_pct > 0 else "",
        f"{planned.planning_s:.1f}",
        planned.plan.origin,
    ]
    return "| " + " | ".join(cells) + " |"


def curve(record: TapeRecord, points: int) -> list[float]:
    """That many budgets in equal steps, from what the step needs at least, or `SMALLEST_BUDGET`, to everything."""
    largest = max((v.nbytes for v in record.values if v.saved and v.producer != SOURCE), default=0)
    least = max(SMALLEST_BUDGET, max(largest, pinned_bytes(record)) / record.cache_total_bytes + 1e-9)
    return [least + (1.0 - least) * i / (points - 1) for i in range(points)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--records", nargs="*", type=Path, default=[])
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--curve", type=int, default=0, metavar="N", help="N budgets in equal steps instead")
    parser.add_argument("--effort", type=float, default=1.0)
    args = parser.parse_args()
    named = [(path.stem, TapeRecord.from_json(path.read_text())) for path in args.records]
    print("| tape | cache | documented | FIFO | DTR | Revolve | planned | bound | ratio | planning s | from |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    faults: list[str] = []
    for name, record in named or ((name, record_of(name)) for name in args.networks):
        budgets = curve(record, args.curve) if args.curve else args.budgets
        faults += compare(name, record, budgets, args.effort)
    print("\n" + "\n".join(faults or ["everything that must hold holds"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
