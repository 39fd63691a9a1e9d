"""What is not simply exact, and why: the whole list, for the operators and modules of PyTorch's databases.

A verdict other than ``exact`` or ``saves nothing`` that is not listed here fails the suite, and so does an entry that is
exact by now. Nothing here is *wrong*: a value that cannot be rebuilt is held whatever the limit says (``pinned``); an
autograd node of another type name computes the same (``node``).
"""

from __future__ import annotations

from dataclasses import dataclass

from parity.databases import Verdict


@dataclass(frozen=True)
class Limit:
    """``kinds``: the verdicts of ``databases.ORDER`` that are meant; ``short``: a short run meets it."""

    kinds: tuple[str, ...]
    reason: str
    short: bool = True


_RAW_KERNEL = "target lengths given as numbers become a tensor outside aten (rule 8): those few bytes are held"
_IN_SLICES = (
    "fills uninitialised memory slice by slice; what is saved half-filled cannot be rebuilt (rule 8) and is held"
)
_NOISE = (
    "in place, it fills its noise argument, uninitialised memory, without saying that it fills all of it (rule 8): held"
)
_STATISTICS = (
    "reads its running statistics and then writes them: their old content, two floats a channel, is held (rule 4)"
)
_CTC_NODE = (
    "PyTorch takes another overload with the same result when a dispatch mode is active; the node is CtcLossBackward1"
)
_RESHAPE_NODE = (
    "PyTorch's reshape makes a view, not an alias, when a dispatch mode is active; the node is ViewBackward0"
)
_WARNINGS = "PyTorch's autograd engine collects C++ warnings past Python's filters, so that those of a replayed op are given again"

OPS: dict[str, Limit] = {
    **{
        name: Limit(("warnings",), _WARNINGS)
        for name in (
            "index_reduce.amax",
            "index_reduce.amin",
            "index_reduce.mean",
            "index_reduce.prod",
            "log_softmax.with_dtype",
            "nn.functional.softmin.with_dtype",
            "softmax.with_dtype",
            "sparse.mm.reduce",
            "sparse.sampled_addmm",
            "triangular_solve",
        )
    },
    "linalg.vector_norm": Limit(("warnings",), _WARNINGS, short=False),
    "linalg.tensorinv": Limit(("node",), _RESHAPE_NODE),
    "nn.functional.ctc_loss": Limit(("node",), _CTC_NODE, short=False),
    "nn.functional.linear_cross_entropy.chunked_none": Limit(("pinned",), _IN_SLICES),
    "nn.functional.rrelu": Limit(("pinned",), _NOISE),
}

MODULES: dict[str, Limit] = {
    "nn.CTCLoss": Limit(("pinned", "node"), f"{_RAW_KERNEL}; {_CTC_NODE}"),
    "nn.InstanceNorm1d": Limit(("pinned",), _STATISTICS),
    "nn.InstanceNorm2d": Limit(("pinned",), _STATISTICS),
    "nn.InstanceNorm3d": Limit(("pinned",), _STATISTICS),
    "nn.LinearCrossEntropyLoss": Limit(("pinned",), _IN_SLICES, short=False),
}


def expected(verdict: Verdict, limits: dict[str, Limit], full: bool) -> None:
    """The verdict is exact, or what the list of limits says."""
    limit = limits.get(verdict.name)
    assert verdict.samples > 0, f"{verdict.name}: no samples"
    if limit is None or (not full and not limit.short):
        assert verdict.kind in ("exact", "saves nothing"), f"{verdict.name} is {verdict.kind}:\n" + "\n".join(
            verdict.details
        )
    else:
        assert verdict.kind in limit.kinds, (
            f"known_limits.py says that {verdict.name} is {' or '.join(limit.kinds)}; it is {verdict.kind}"
            + (
                ": take the entry away"
                if verdict.kind in ("exact", "saves nothing")
                else ":\n" + "\n".join(verdict.details)
            )
        )
