"""What one step holds, layer by layer and moment by moment: `step.json` beside a job's record.

Apart from `result.json`, as it is long, and as a report can do without it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DETAILS_FILE = "step.json"
FORMAT_VERSION = 1
MAX_POINTS = 600  # of a timeline


@dataclass(frozen=True, slots=True)
class Layer:
    """What autograd saves for one layer in a plain step."""

    name: str
    kind: str  # its class
    cached_bytes: int  # each storage once, at the layer that saved it first


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes of one step above those at its start; the profiler that watched makes the step slower."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    times_s: tuple[float, ...]  # since the step's start, rising
    live_bytes: tuple[int, ...]  # from that time on

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes above the start."""
        return max(self.live_bytes, default=0)


@dataclass(frozen=True, slots=True)
class StepDetails:
    """One job's step."""

    layers: tuple[Layer, ...]  # in order of first use
    resident_bytes: int  # live throughout, to be added to the timelines
    plain: Timeline | None = None  # None where the device does not tell
    wrapped: Timeline | None = None


def thinned(
    times_s: Sequence[float], live_bytes: Sequence[int], most: int = MAX_POINTS
) -> tuple[list[float], list[int]]:
    """At most `most` of the points: the highest of each run of neighbours, so that peaks stay; the last point stays too."""
    if len(times_s) <= most:
        return list(times_s), list(live_bytes)
    size = -(-len(times_s) // (most - 1))
    kept = [
        max(range(i, min(i + size, len(times_s))), key=live_bytes.__getitem__) for i in range(0, len(times_s), size)
    ]
    if kept[-1] != len(times_s) - 1:
        kept.append(len(times_s) - 1)
    return [times_s[i] for i in kept], [live_bytes[i] for i in kept]


def save(details: StepDetails, folder: Path) -> Path:
    """Write `folder/step.json`."""
    path = folder / DETAILS_FILE
    plain = {"format_version": FORMAT_VERSION, **dataclasses.asdict(details)}
    path.write_text(json.dumps(plain, allow_nan=False) + "\n", encoding="utf-8")
    return path


def load(folder: Path) -> StepDetails | None:
    """What `save` wrote; None if there is nothing, or nothing that can be read."""
    try:
        data = json.loads((folder / DETAILS_FILE).read_text(encoding="utf-8"))
        if data.pop("format_version") != FORMAT_VERSION:
            return None
        layers = tuple(Layer(**layer) for layer in data["layers"])
        return StepDetails(layers, data["resident_bytes"], _timeline(data["plain"]), _timeline(data["wrapped"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _timeline(data: dict[str, Any] | None) -> Timeline | None:
    if data is None:
        return None
    return Timeline(**{**data, "times_s": tuple(data["times_s"]), "live_bytes": tuple(data["live_bytes"])})
