"""The documented policy as wishes: the candidate that keeps every plan at or below the documented curve.

First in, first out: forward drops the oldest saved value when the limit is reached; a miss rebuilds, with what it needs, the
newest dropped values up to the missed one that fit in the free room (`recals.policies`, for the policy itself).
"""

from __future__ import annotations

from .problem import FORWARD, Problem


def fifo_wishes(problem: Problem) -> dict[int, set[int]]:
    """What FIFO holds, from when on."""
    nbytes, capacity = problem.nbytes, problem.capacity
    saved = dict.fromkeys(
        index for kind, index in problem.record.forward_events if kind == "save" and index in problem.fetches_of
    )
    order = list(saved)
    rank = {v: r for r, v in enumerate(order)}
    held: set[int] = set()
    used = 0
    for v in reversed(order):
        if used + nbytes[v] > capacity:
            break
        held.add(v)
        used += nbytes[v]
    wishes = {FORWARD: set(held)}
    live = set(order) - set(problem.early_frees)
    for fetch, value in enumerate(problem.fetch_value):
        if value in rank and value not in held:
            now: set[int] = set()
            for v in reversed(order[: rank[value] + 1]):
                if v in held or v not in live:
                    continue
                if used + nbytes[v] > capacity:
                    break
                now.add(v)
                used += nbytes[v]
            held |= now
            wishes[fetch] = now
        for v in problem.frees[fetch]:
            live.discard(v)
            if v in held:
                held.discard(v)
                used -= nbytes[v]
    return wishes
