"""Single-level plans: keep some values, re-run the rest once, stage by stage.

The bound's program (`bound.py`) with the tape cut into K stages, so that its solution can be carried out: when backward
reaches a stage, everything dropped in it is rebuilt at once from what is kept.

1. An input that a re-run op reads from an earlier stage is kept: keep_u >= rerun_o.
2. When stage k is rebuilt, the stages before it still hold what they keep: for every k,
   (kept bytes of stages < k) + (all asked bytes of stage k) <= limit.
Many short stages leave room for little but checkpoints, few long ones need room for much at once: try several K.
"""

from __future__ import annotations

from .problem import FORWARD, Problem
from .segments import choose_cuts
from .solver import Program

_RELATIVE_GAP = 5e-3


def single_level_wishes(problem: Problem, stages: int, *, time_limit_s: float = 60.0) -> dict[int, set[int]] | None:
    """The best plan with (at most) ``stages`` stages; None if none fits."""
    cuts = choose_cuts(problem, stages)
    stage_of_op = [k for k in range(len(cuts) - 1) for _ in range(cuts[k], cuts[k + 1])]
    producer, asked = problem.producer, problem.fetches_of
    program = Program()
    scale = problem.record.forward_cost or 1.0
    rerun = {op: program.variable(problem.cost[op] / scale) for op in problem.relevant_ops}
    made = [v for op in problem.relevant_ops for v in problem.outputs[op] if problem.death[v] > FORWARD]
    keep = {v: program.variable(0.0, integral=True) for v in made}
    for v in made:
        if v in asked:
            program.at_least(1.0, {keep[v]: 1.0, rerun[producer[v]]: 1.0})
    for op in problem.relevant_ops:
        for u in problem.inputs[op]:
            terms = {keep[u]: 1.0, rerun[op]: -1.0}
            if stage_of_op[producer[u]] == stage_of_op[op]:  # rule 1
                terms[rerun[producer[u]]] = 1.0
            program.at_least(0.0, terms)
    kept_before: dict[int, float] = {}
    unit = max(problem.capacity, 1)
    for k in range(len(cuts) - 1):  # rule 2
        of_stage = [v for v in made if stage_of_op[producer[v]] == k]
        asked_bytes = sum(problem.nbytes[v] for v in of_stage if v in asked)
        if asked_bytes > problem.capacity:
            return None
        unasked = {keep[v]: problem.nbytes[v] / unit for v in of_stage if v not in asked}
        program.at_most(1.0 - asked_bytes / unit, {**kept_before, **unasked})
        kept_before.update({keep[v]: problem.nbytes[v] / unit for v in of_stage})
    solution = program.solve(
        capped=({variable: float(problem.nbytes[v]) for v, variable in keep.items()}, float(problem.capacity)),
        relative_gap=_RELATIVE_GAP,
        time_limit_s=time_limit_s,
    )
    if solution.x is None:
        return None
    wishes: dict[int, set[int]] = {FORWARD: {v for v, variable in keep.items() if solution.x[variable] > 0.5}}
    reached: set[int] = set()
    for fetch, value in enumerate(problem.fetch_value):
        stage = stage_of_op[producer[value]]
        if stage not in reached:
            reached.add(stage)
            wishes[fetch] = {v for v in made if v in asked and stage_of_op[producer[v]] == stage}
    return wishes
