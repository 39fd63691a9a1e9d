"""Is the price that is predicted the price that is paid? Overhead and peak memory, predicted from one step and measured.

    python benchmarks/predicted_against_measured.py time                     # overhead, by measured costs: chain, gpt, resnet50
    python benchmarks/predicted_against_measured.py peak                     # peaks of six networks at eight budgets

Networks: see ``networks.py``; `time` takes one of the four samples of gpt's batch. Time: percent of a plain training step (cross
entropy, SGD), predicted from the costs of single ops as they were measured on this machine and what recording costs there, and
measured on steps that stand next to plain ones; what must hold: within 3 points. With one thread (the default) CPU time counts,
which a busy machine does not disturb as much. Peak: parameters, gradients and all; what must hold: within 5 % of the
prediction, and never higher with a smaller budget. Prints Markdown; exits with 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import sys

import torch
from bench import MIB, called, followed, following, overheads, peak_bytes, profile_of, start
from networks import NETWORKS, training

from recals_exp.recals import StepPlan, recals_with_rngs
from recals_exp.recals.planning.planner import make_plans
from recals_exp.recals.prediction import Profile, predicted_overhead_pct, totals_of
from recals_exp.recals.simulate import following as simulated
from recals_exp.recals.simulate import pinned_bytes, rivals_of

CLOSE_POINTS = 3.0
CLOSE_SHARE = 0.05
PEAK_BUDGETS = (0.125, 0.2, 0.25, 0.35, 0.5, 0.65, 0.8, 0.95)
SAMPLES = {"gpt": 1}
MEASURING_S = 240.0
"""Of costs: four times what a run takes for it. On a noisy machine recording, a few percent of a step, is known to about a point in
one minute, and each difference shown here is of two such figures."""


def plans_of(profile: Profile, limits: list[int], effort: float) -> dict[int, StepPlan]:
    record = profile.record
    rooms = {limit: limit - pinned_bytes(record) for limit in limits}
    rivals = {room: rivals_of(record, room) for room in rooms.values()}
    made = make_plans(record, list(rooms.values()), effort=effort, others=rivals, totals=totals_of(profile))
    return {limit: StepPlan(record, planned.plan) for limit, planned in zip(limits, made, strict=True)}


def compare_times(name: str, policies: list[str], budgets: list[float], rounds: int, effort: float) -> list[str]:
    task = training(name, SAMPLES.get(name))
    state = start(task)
    profile = profile_of(task, state, "measured", MEASURING_S)
    record = profile.record
    limits = {budget: int(budget * profile.cache_total_bytes) for budget in budgets}
    plans = plans_of(profile, list(limits.values()), effort)
    predicted: dict[str, float] = {}
    forwards, engines = {}, {}
    for policy in policies:
        for budget, limit in limits.items():
            key = f"{policy} {budget:g}"
            engine = following(limit, plans[limit]) if policy == "planned" else recals_with_rngs(limit, policy=policy)
            plan = plans[limit].plan if policy == "planned" else None
            predicted[key] = predicted_overhead_pct(record, limit, policy, plan)
            forwards[key], engines[key] = called(task, engine), engine
    forwards["nothing dropped"] = called(task, recals_with_rngs(-1))
    for forward in forwards.values():  # audit, plan
        for _ in range(2):
            state.restore()
            task.step(forward, *task.batch)
    measured = overheads(task, state, forwards, rounds)
    faults = []
    for key, points in predicted.items():
        policy, budget = key.split()
        off = measured[key].median_pct - points
        print(
            f"| {name} | {policy} | {100 * float(budget):g} % | {points:.1f} % | {measured[key]} | {off:+.1f} |",
            flush=True,
        )
        if policy == "planned" and followed(engines[key]) < rounds:
            faults.append(f"{name}, {key}: only {followed(engines[key])} of {rounds} steps followed the plan")
        if abs(off) > CLOSE_POINTS:
            faults.append(f"{name}, {key}: measured is {off:+.1f} points from predicted")
    print(
        f"| {name} | nothing dropped | 100 % | {record.recording_pct:.1f} % | {measured['nothing dropped']} | |",
        flush=True,
    )
    return faults


def compare_peaks(name: str, policies: list[str], budgets: list[float], effort: float) -> list[str]:
    task = training(name)
    state = start(task)
    profile = profile_of(task, state, "model")
    record, total = profile.record, profile.cache_total_bytes
    limits = sorted({max(int(budget * total), profile.smallest_limit_bytes) for budget in budgets})
    plans = plans_of(profile, limits, effort)
    plain = peak_bytes(task, state, task.step.model)
    faults = []
    for policy in policies:
        below, steps_wrong = 0, 0
        for limit in limits:
            engine = following(limit, plans[limit]) if policy == "planned" else recals_with_rngs(limit, policy=policy)
            by = simulated(record, plans[limit].plan) if policy == "planned" else policy
            predicted = profile.memory.peak_bytes(record, limit, by)
            peak = peak_bytes(task, state, called(task, engine))
            steps_wrong += policy == "planned" and followed(engine) < 2
            off = peak / predicted - 1
            print(
                f"| {name} | {policy} | {100 * limit / total:.1f} % | {predicted / MIB:.1f} | {peak / MIB:.1f} | "
                f"{100 * off:+.1f} % | {100 * peak / plain:.0f} % |",
                flush=True,
            )
            if abs(off) > CLOSE_SHARE:
                faults.append(f"{name}, {policy} at {100 * limit / total:.1f} %: the peak is {100 * off:+.1f} % off")
            if peak < below:
                faults.append(
                    f"{name}, {policy} at {100 * limit / total:.1f} %: {peak} is below {below} of less budget"
                )
            below = peak
        if steps_wrong:
            faults.append(f"{name}, {policy}: at {steps_wrong} budgets the plan was not followed")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "peak"))
    parser.add_argument("--networks", nargs="*", choices=NETWORKS)
    parser.add_argument("--policies", nargs="*", default=["planned"])
    parser.add_argument("--budgets", nargs="+", type=float)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--effort", type=float, default=0.25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    faults: list[str] = []
    if args.what == "time":
        print(
            "| network | policy | cache | predicted | measured, median [95 %] | off, points |\n|---|---|---|---|---|---|"
        )
        for name in args.networks or ("chain", "gpt", "resnet50"):
            faults += compare_times(name, args.policies, args.budgets or [0.5, 0.25], args.rounds, args.effort)
    else:
        print(
            "| network | policy | cache | predicted MiB | measured MiB | off | of plain |\n|---|---|---|---|---|---|---|"
        )
        for name in args.networks or NETWORKS:
            faults += compare_peaks(name, args.policies, args.budgets or list(PEAK_BUDGETS), args.effort)
    print("\n" + "\n".join(faults or ["everything that must hold holds"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
