"""Planning: from a tape record and a limit to what to hold and what to rebuild when.

    record.py (plain data) -> problem.py (flat lists) -> bound.py         what no plan can beat
                                                      -> single_level.py  \
                                                      -> multi_level.py    > wishes -> unroll.py -> improve.py
                                                      -> fifo.py          /         (exact)    (local search)
    planner.py picks the cheapest -> plan.py (plain data) -> checker.py judges it, trusting none of the above

Start at `planner.make_plan`. SciPy is imported when the first program is solved (`solver.py`), not before.
"""
