"""Who gives plain PyTorch's bits: this engine and ``torch.utils.checkpoint`` (non-reentrant), on the same cases.

    PYTHONPATH=tests python benchmarks/exactness.py            # some minutes; --full takes every sample of the databases

The cases are the parity suite's: the operators and modules of PyTorch's own databases, and networks of torchvision,
transformers and spikingjelly. The engine runs with everything dropped (a limit of 0) and at a middle limit, checkpoint
around the whole callable. Everything that a program can see is compared with the plain call (``tests/parity/harness.py``).
Prints Markdown; ``docs/exactness.md`` says what the words mean.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from parity import networks
from parity.cases import Case
from parity.databases import (
    ORDER,
    Verdict,
    differentiable_ops,
    judge,
    judge_module,
    judge_op,
    judge_other,
    module_cases,
    modules,
    op_cases,
    op_name,
)
from torch.utils.checkpoint import checkpoint

from recals_exp.recals import POLICIES

_SHOWN = 160  # characters of a difference


@dataclass(frozen=True)
class Group:
    """Some things to judge: each with its name, the engine's verdict, and checkpoint's."""

    title: str
    names: list[str]
    ours: list[Callable[[], Verdict]]
    theirs: list[Callable[[], Verdict]]


def stock_checkpoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def groups(full: bool) -> Iterable[Group]:
    ops = differentiable_ops()
    yield Group(
        "operators",
        [op_name(op) for op in ops],
        [lambda op=op: judge_op(op, full) for op in ops],
        [lambda op=op: judge_other(op_name(op), op_cases(op, full), stock_checkpoint) for op in ops],
    )
    infos = modules()
    yield Group(
        "modules",
        [info.name for info in infos],
        [lambda info=info: judge_module(info, full) for info in infos],
        [lambda info=info: judge_other(info.name, module_cases(info, full), stock_checkpoint) for info in infos],
    )
    cases: list[Case] = [*networks.CLASSIFIERS, *networks.PIXELS_BOXES_CLIPS, *networks.RECURRENT]
    cases += networks.TRANSFORMERS if networks.has("transformers") else []
    cases += networks.SPIKING if networks.has("spikingjelly") else []
    yield Group(
        "networks",
        [case.name for case in cases],
        [lambda case=case: judge(case.name, [case], lambda case: True) for case in cases],
        [lambda case=case: judge_other(case.name, [case], stock_checkpoint) for case in cases],
    )


def judged(title: str, verdicts: list[Callable[[], Verdict]]) -> list[Verdict]:
    started, found = time.monotonic(), []
    for i, verdict in enumerate(verdicts):
        found.append(verdict())
        if sys.stderr.isatty():
            print(
                f"\r{title} {i + 1}/{len(verdicts)}, {time.monotonic() - started:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(f"\r{title}: {len(verdicts)} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return found


def format_counts(rows: list[tuple[str, str, list[Verdict]]]) -> str:
    """One row for each group and engine; the verdicts of a row add up to its ``tried``."""
    lines = [
        "| cases | run by | tried | samples | rebuilt | " + " | ".join(reversed(ORDER)) + " |",
        "|---|---|" + "---:|" * (3 + len(ORDER)),
    ]
    for title, engine, verdicts in rows:
        counts = collections.Counter(verdict.kind for verdict in verdicts)
        samples = sum(verdict.samples for verdict in verdicts)
        rebuilt = str(sum(verdict.rebuilt for verdict in verdicts)) if engine == "recals" else ""
        cells = [
            title,
            engine,
            str(len(verdicts)),
            str(samples),
            rebuilt,
            *(str(counts[kind] or "") for kind in reversed(ORDER)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_exceptions(title: str, engine: str, verdicts: list[Verdict]) -> str:
    """Everything that is not simply exact, one line each."""
    lines = []
    for verdict in verdicts:
        if verdict.kind not in ("exact", "saves nothing"):
            detail = verdict.details[0].replace("\n", " ").replace("|", "/") if verdict.details else ""
            lines.append(f"- `{verdict.name}`: {verdict.kind}" + (f" ({detail[:_SHOWN]})" if detail else ""))
    return f"### {title}, {engine}: {len(lines)} not simply exact\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what gives plain PyTorch's bits.")
    parser.add_argument("--full", action="store_true", help="every sample of the databases")
    full = parser.parse_args().full
    torch.set_num_threads(1)
    rows: list[tuple[str, str, list[Verdict]]] = []
    for group in groups(full):
        rows.append((group.title, "recals", judged(f"{group.title}, recals", group.ours)))
        rows.append((group.title, "checkpoint", judged(f"{group.title}, checkpoint", group.theirs)))
    print(f"torch {torch.__version__}, CPU, {'all' if full else 'the first'} samples, policies {', '.join(POLICIES)}\n")
    print(format_counts(rows))
    for row in rows:
        print("\n" + format_exceptions(*row))


if __name__ == "__main__":
    main()
