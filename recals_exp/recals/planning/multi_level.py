"""Multi-level plans: dynamic programming over segments, with several options per segment.

The recursion of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains",
2019), which contains Revolve's, carried over from chains to tapes: a checkpoint is the *border* of a range (all that crosses
and is read), borders share values (a residual stream or a long skip is paid for once), and each segment has several
options, from keeping all it saved to keeping nothing (Rockmate, 2023).

Letters: E(s, t, m) = least cost of the backward of segments s .. t-1 when their left border is held and m more bytes may be;
R(s, t, m) = the same when a re-run is just passing s: the border is at hand but only the part that backward asks for is
held (keeping the rest costs ``unasked``); F(s, m) = the same for segments s .. n-1 in forward, whose own run is free.

    E(s,t,m) = min  rebuild all of [s,t)                  if it fits m
                    keep segment s by option o:           run(s,o) + R(s+1, t, m - keep(o) - asked) + rest(o)
                    run to s', do [s',t), then [s,s'):    run(s..s') + R(s', t, m - asked) + E(s, s', m)
    R(s,t,m) = min  rebuild all of [s,t)                  if it fits m
                    keep all of segment s:                run(s) + R(s+1, t, m - keep - asked)
                    hold the border:                      E(s, t, m - unasked)
    F(s,m)   = min  keep segment s by option o:           F(s+1, m - keep(o) - asked - unasked(o)) + rest(o)
                    hold the border, do [s',n), [s,s'):   F(s', m - unasked - asked) + E(s, s', m - unasked)

The model rounds bytes to 1/levels of the capacity and approximates what lives across a range's end; the exact cost and the limit are
settled by `unroll`, which every plan passes through. So a rounding can cost a little overhead, never a byte over the limit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .problem import FORWARD, Problem
from .segments import Option, Segments, segment_options

_INF = np.inf


class MultiLevel:
    """The tables of one problem and segmentation; `wishes` reads a plan off them."""

    def __init__(
        self,
        problem: Problem,
        segments: Segments,
        levels: int,
        keep_sets: Iterable[Container[int]] = (),
    ) -> None:
        self.problem, self.segments, self.levels = problem, segments, levels
        self.byte_unit = max(problem.capacity, 1) / levels
        n = segments.n
        sets = list(keep_sets)
        self.options = [segment_options(problem, segments, k, sets) for k in range(n)]
        self.run = np.concatenate([[0.0], np.cumsum(segments.through_cost)])  # [k]: running segments 0 .. k-1
        # 32-bit floats: costs are compared to a millionth of the step, and the tables are the memory this takes.
        self.E = np.full((n + 1, n + 1, levels + 1), _INF, dtype=np.float32)
        self.R = np.full((n + 1, n + 1, levels + 1), _INF, dtype=np.float32)
        for k in range(n + 1):
            self.E[k, k] = self.R[k, k] = 0.0
        for t in range(1, n + 1):
            self._fill_right_end(t)
        self.F = np.full((n + 1, levels + 1), _INF, dtype=np.float32)
        self.F[n] = 0.0
        for s in range(n - 1, -1, -1):
            self.F[s] = self._forward_choices(s).min(axis=0)

    def _fill_right_end(self, t: int) -> None:
        """E and R of every range that ends at ``t``. A finished split point is pushed to all ranges that may use it at once."""
        E, R, levels = self.E, self.R, self.levels
        for at in range(t - 1, -1, -1):
            rows = [self._rebuild_row(at, t), *(self._option_row(option, at, t) for option in self.options[at])]
            E[at, t] = np.minimum(E[at, t], np.stack(rows).min(axis=0))
            R[at, t] = self._passing_choices(at, t).min(axis=0)
            if at == 0:
                break
            units = np.rint(self.segments.asked_growth[at, t][:at] / self.byte_unit).astype(int)
            run = (self.run[at] - self.run[:at]).astype(np.float32)[:, None]
            edges = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), at]
            for low, high in pairwise(edges):
                u = int(units[low])
                if u <= levels:
                    after = E[low:high, at, u:] + (R[at, t, : levels + 1 - u] + run[low:high])
                    np.minimum(E[low:high, t, u:], after, out=E[low:high, t, u:])

    # Each choice is one row over m; rows are built in a fixed order so that an index names a choice.

    def _units(self, nbytes: float) -> int:
        return round(nbytes / self.byte_unit)

    def _shifted(self, row: NDArray[np.float32], units: int) -> NDArray[np.float32]:
        """[m] -> row[m - units]."""
        if units <= 0:
            return row
        shifted = np.full_like(row, _INF)
        if units <= self.levels:
            shifted[units:] = row[: self.levels + 1 - units]
        return shifted

    def _from(self, cost: float, units: int) -> NDArray[np.float32]:
        """``cost`` where m >= units."""
        row = np.full(self.levels + 1, _INF, dtype=np.float32)
        row[min(units, self.levels + 1) :] = cost
        return row

    def _asked(self, at: int, t: int, s: int) -> int:
        """Units of the values made in [s, at) that the backward of [at, t) asks for."""
        return 0 if at >= t else self._units(self.segments.asked_growth[at, t][s])

    def _unasked(self, s: int, t: int) -> int:
        """Units of the border of [s, t) that backward does not ask for."""
        tables = self.segments
        return self._units(tables.border_growth[s, t][0] - tables.asked_growth[s, t][0])

    def _rebuild_row(self, s: int, t: int) -> NDArray[np.float32]:
        return self._from(self.segments.rebuild_cost[s, t], self._units(self.segments.needed_bytes[s, t]))

    def _option_row(self, option: Option, s: int, t: int) -> NDArray[np.float32]:
        units = self._units(option.keep_bytes(t)) + self._asked(s + 1, t, s)
        run_cost = option.last_run_cost if s + 1 == t else option.run_cost
        row = self._shifted(self.R[s + 1, t], units) + (run_cost + option.rest_cost)
        row[: min(self._units(option.keep_bytes(s + 1) + option.rest_bytes), self.levels + 1)] = _INF
        return row

    def _border_choices(self, s: int, t: int) -> NDArray[np.float32]:
        levels = self.levels
        rows = [self._rebuild_row(s, t), *(self._option_row(option, s, t) for option in self.options[s])]
        split = np.full((t - s - 1, levels + 1), _INF, dtype=np.float32)
        for i, at in enumerate(range(s + 1, t)):
            units = self._asked(at, t, s)
            if units <= levels:
                np.add(self.R[at, t, : levels + 1 - units], self.E[s, at, units:], out=split[i, units:])
                split[i, units:] += self.run[at] - self.run[s]
        return np.concatenate([np.stack(rows), split])

    def _passing_choices(self, s: int, t: int) -> NDArray[np.float32]:
        return np.stack(
            [
                self._rebuild_row(s, t),
                self._option_row(self.options[s][0], s, t),
                self._shifted(self.E[s, t], self._unasked(s, t)),
            ]
        )

    def _forward_choices(self, s: int) -> NDArray[np.float32]:
        n, levels = self.segments.n, self.levels
        rows = []
        for option in self.options[s]:
            unasked = self._units(option.unasked_bytes)
            row = self._shifted(self.F[s + 1], self._units(option.keep_bytes(n)) + unasked + self._asked(s + 1, n, s))
            row = row + option.rest_cost
            row[: min(unasked + self._units(option.keep_bytes(s + 1) + option.rest_bytes), levels + 1)] = _INF
            rows.append(row)
        for at in range(s + 1, n + 1):
            rows.append(
                self._shifted(self._shifted(self.F[at], self._asked(at, n, s)) + self.E[s, at], self._unasked(s, at))
            )
        return np.stack(rows)

    # -- reading a plan off the tables -----------------------------------------------------------------------------

    def wishes(self, level: int) -> dict[int, set[int]] | None:
        """The plan for ``level`` / ``levels`` of the capacity; None if no plan of this kind fits."""
        if not np.isfinite(self.F[0, level]):
            return None
        n, tables = self.segments.n, self.segments
        wishes: dict[int, set[int]] = {FORWARD: set()}
        later: list[
            tuple[int, int, int]
        ] = []  # ranges (s, t, m) whose border is held, to do after those to their right
        s, m = 0, level
        while s < n:
            choice = int(self._forward_choices(s)[:, m].argmin())
            if choice < len(self.options[s]):
                option = self.options[s][choice]
                wishes[FORWARD].update(option.keep)
                wishes[FORWARD].update(option.reads)
                self._wish_rest(wishes, option, s)
                m -= self._units(option.keep_bytes(n)) + self._units(option.unasked_bytes) + self._asked(s + 1, n, s)
                at = s + 1
            else:
                at = s + 1 + choice - len(self.options[s])
                wishes[FORWARD].update(tables.border[s, at])
                m -= self._unasked(s, at)
                later.append((s, at, m))
                m -= self._asked(at, n, s)
            wishes[FORWARD].update(tables.asked_border(at, n))
            s = at
        while later:
            self._read_range(*later.pop(), wishes, later)
        return wishes

    def _wish_rest(self, wishes: dict[int, set[int]], option: Option, s: int) -> None:
        if option.rest:
            wishes.setdefault(self._time(s), set()).update(option.rest)

    def _time(self, k: int) -> int:
        """When backward reaches segment ``k``."""
        fetch = self.segments.first_fetch[k]
        return self.problem.fetch_time[fetch] if fetch < self.problem.n_fetches else fetch

    def _read_range(
        self, s: int, t: int, m: int, wishes: dict[int, set[int]], later: list[tuple[int, int, int]]
    ) -> None:
        tables = self.segments
        now = wishes.setdefault(self._time(t - 1), set())
        passing = False
        while s < t:
            choice = int((self._passing_choices if passing else self._border_choices)(s, t)[:, m].argmin())
            if choice == 0:
                now.update(tables.needed(s, t))
                return
            if passing and choice == 2:
                now.update(tables.border[s, t])
                m -= self._unasked(s, t)
                passing = False
                continue
            passing = True
            if choice <= len(self.options[s]):
                option = self.options[s][choice - 1]
                now.update(option.keep)
                self._wish_rest(wishes, option, s)
                m -= self._units(option.keep_bytes(t)) + self._asked(s + 1, t, s)
                at = s + 1
            else:
                at = s + choice - len(self.options[s])
                later.append((s, at, m))
                m -= self._asked(at, t, s)
            now.update(tables.asked_border(at, t))
            s = at
