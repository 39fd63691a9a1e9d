"""The estimates of mode=dry_run as they lie in the jobs' folders, and their table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE, TABLE_FILE = "estimate.json", "estimate.txt"
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one job would take."""

    step_s: float  # a plain step
    job_s: float  # the whole job, without the start of a process
    peak_plain_bytes: int  # of a plain step, measured
    peak_bytes: int  # of a step under the strategy, predicted; the plain one's where that cannot be
    limit_bytes: int | None  # of the cache; None: no limit
    overhead_pct: float | None  # recomputation, predicted; None where that cannot be


def load_estimates(folder: Path) -> dict[str, Estimate]:
    """Those below a folder, by job."""
    paths = sorted(folder.rglob(FILE), key=lambda path: (len(path.parent.name.partition("_")[0]), path))
    return {path.parent.name: Estimate(**json.loads(path.read_text(encoding="utf-8"))) for path in paths}


def format_estimates(estimates: Mapping[str, Estimate]) -> str:
    """A table, and with several jobs what they take together, one after the other."""
    width = max([len(job) for job in estimates] + [3])
    lines = [f"{'job':<{width}}  {'step':>10}  {'plain peak':>11}  {'peak':>11}  {'recomputed':>10}  {'whole job':>9}"]
    for job, found in estimates.items():
        overhead = "?" if found.overhead_pct is None else f"{found.overhead_pct:.1f} %"
        at_most = "<" if found.overhead_pct is None else ""
        lines.append(
            f"{job:<{width}}  {1000 * found.step_s:>7.1f} ms  {found.peak_plain_bytes / MIB:>7.1f} MiB  "
            f"{at_most + format(found.peak_bytes / MIB, '.1f'):>7} MiB  {overhead:>10}  {_duration(found.job_s):>9}"
        )
    if len(estimates) > 1:
        total_s = sum(found.job_s for found in estimates.values())
        lines.append(
            f"{len(estimates)} jobs, one after the other: about {_duration(total_s)}, and the start of each process"
        )
    return "\n".join(lines)


def _duration(time_s: float) -> str:
    if time_s < 60:
        return f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 5400 else f"{time_s / 3600:.1f} h"
