"""Does ``target_peak`` land? The whole step's peak that was asked for, and the one that was measured.

    python benchmarks/target_peak.py
    python benchmarks/target_peak.py --networks unet lstm --effort 1

Networks: see ``networks.py``. Three targets each: a quarter, a half and three quarters of the way from the peak at 5 % of the cache to that
of a plain step. The plan is found as ``python -m recals_exp target_peak=...`` finds it (`predict.fit_plan`). What must hold: the
measured peak is at most the target, and within 5 % of it. Prints Markdown; exits with 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from bench import MIB, called, followed, following, peak_bytes, profile_of, start
from networks import NETWORKS, training
from predicted_against_measured import plans_of

from recals_exp.predict import CLOSE_ENOUGH, fit_plan
from recals_exp.recals import StepPlan

FLAT = 0.01  # of the peak: what moves it less is not worth a target
SHARES = (0.25, 0.5, 0.75)


def compare(name: str, effort: float) -> list[str]:
    task = training(name)
    state = start(task)
    profile = profile_of(task, state, "model")
    peaks: list[int] = []
    faults: list[str] = []

    def measure(limit: int, plans: Sequence[StepPlan]) -> int:
        if not plans:
            peaks.append(peak_bytes(task, state, task.step.model))
        else:
            engine = following(limit, plans[0])
            peaks.append(peak_bytes(task, state, called(task, engine)))
            if followed(engine) < 2:
                faults.append(f"{name}: a limit of {limit} bytes was measured without following its plan")
        return peaks[-1]

    total, smallest = profile.cache_total_bytes, min(profile.smallest_limit_bytes, profile.cache_total_bytes)
    tight = max(smallest, total // 20)
    least, most = measure(tight, [plans_of(profile, [tight], effort)[tight]]), measure(total, ())
    if most - least < FLAT * most:
        print(f"| {name} | - | {most / MIB:.1f} | - | - | - | {len(peaks)} |  (no limit moves its peak)", flush=True)
        return faults
    for share in SHARES:
        target = round(least + share * (most - least))
        before = len(peaks)
        fit = fit_plan(target, profile, measure, smallest, effort)
        off = fit.peak_bytes / target - 1
        assert fit.plan is not None
        print(
            f"| {name} | {target / MIB:.1f} | {fit.peak_bytes / MIB:.1f} | {100 * off:+.1f} % | "
            f"{100 * fit.limit_bytes / total:.1f} % | {fit.plan.plan.overhead_pct:.1f} % | {len(peaks) - before} |",
            flush=True,
        )
        if not -CLOSE_ENOUGH <= off <= 0:
            faults.append(f"{name}, target {target / MIB:.1f} MiB: the peak is {100 * off:+.1f} % off")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--effort", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        "| network | target MiB | measured MiB | off | most cached | predicted overhead | peaks measured |\n"
        "|---|---|---|---|---|---|---|"
    )
    faults = [fault for name in args.networks for fault in compare(name, args.effort)]
    print("\n" + "\n".join(faults or ["everything that must hold holds"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
