"""How long planning takes as tapes grow, and how close to the bound it stays.

    PYTHONPATH=tests python benchmarks/planner_scale.py               # 2,500 ops
    PYTHONPATH=tests python benchmarks/planner_scale.py --ops 10000

Synthetic tapes (``tests/planning/records.py``) in the proportions of the real thing. Seconds of this process (CPU) and of the
clock, both with everything: bound, candidates, local search and the final judge. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from planning.records import gpt_like, lstm_like, resnet_like, uniform_chain

from recals_exp.recals.planning.planner import make_plan
from recals_exp.recals.record import TapeRecord

FAMILIES: dict[str, Callable[[int], TapeRecord]] = {
    "chain": lambda ops: uniform_chain(ops // 2),
    "gpt": lambda ops: gpt_like(ops // 20),
    "resnet": lambda ops: resnet_like(tuple(ops * share // 100 for share in (2, 3, 3, 2))),
    "lstm": lambda ops: lstm_like(ops // 12),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=2500)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.125])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    args = parser.parse_args()
    print("| tape | ops | cache | planned | bound | CPU s | clock s |")
    print("|---|---|---|---|---|---|---|")
    for name in args.families:
        record = FAMILIES[name](args.ops)
        for budget in args.budgets:
            cpu, clock = time.process_time(), time.perf_counter()
            planned = make_plan(record, int(budget * record.cache_total_bytes))
            cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
            print(
                f"| {name} | {len(record.ops)} | {100 * budget:g} % | {planned.verdict.overhead_pct:.2f} | "
                f"{planned.bound.overhead_pct:.2f} | {cpu:.1f} | {clock:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
