"""PyTorch's own databases of samples as cases: ``op_db`` (operators) and ``module_db`` (modules).

Each sample's inputs pass through a clone inside the measured call, so that they are values with a producer and can be
dropped like everything else. Samples are copied for every run; outputs that nothing differentiates are compared all the same.

Which samples run, by rule:

- ``DTYPES``: of each operator, those of them for which the database says that the CPU has a backward.
- a *short* run takes the first ``SHORT_SAMPLES`` samples of each operator and dtype, and of each module and mode; a *full*
  run takes all of them.
- the middle limit: float32 in a short run, everything in a full one.
- in-place variants run in float32 on the same samples, where the operator has one and the sample allows it.
- operators for which plain PyTorch itself raises on a sample must raise the same type wrapped; the sample counts as tried.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from parity.freezing import Trace, differences, freeze, without_nodes
from parity.harness import Case, Subject, Yardstick, plain, replace, run, run_wrapped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from recals_exp.recals import POLICIES, RecalsError, errors
from recals_exp.recals.policies.base import StepPolicy

with warnings.catch_warnings():
    # torch's test library says so for want of a fuzzer that nothing here uses.
    warnings.filterwarnings("ignore", "Fail to import hypothesis in common_utils", ImportWarning)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import ModuleInfo, module_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput
# ... and it forbids the process to set flags such as torch.backends.mkldnn.enabled, for its own tests' sake.
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
SHORT_SAMPLES = 3


# -- cases -------------------------------------------------------------------------------------------------------------


def op_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def differentiable_ops() -> list[OpInfo]:
    return [
        op for op in op_db if op.supports_autograd and any(d in op.supported_backward_dtypes("cpu") for d in DTYPES)
    ]


def op_cases(op: OpInfo, full: bool = False) -> Iterator[Case]:
    for dtype in DTYPES:
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        for i, sample in enumerate(_op_samples(op, dtype, full)):
            name = f"{op_name(op)}-{str(dtype).removeprefix('torch.')}-{i}"
            yield Case(name, _op_subject(op.op, sample), steps=1)
            if dtype is torch.float32 and op.inplace_variant is not None and not sample.broadcasts_input:
                yield Case(f"{name}-inplace", _op_subject(op.inplace_variant, sample), steps=1)


def _op_samples(op: OpInfo, dtype: torch.dtype, full: bool) -> list[SampleInput]:
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database's own
        return _first(op.sample_inputs("cpu", dtype, requires_grad=True), full)


def _op_subject(fn: Callable[..., Any], sample: SampleInput) -> Callable[[], Subject]:
    def build() -> Subject:
        args, kwargs = _copied(((sample.input, *sample.args), sample.kwargs))
        return Subject(lambda *args, **kwargs: fn(*fed(args), **fed(kwargs)), args, kwargs)

    return build


def modules() -> list[ModuleInfo]:
    return list(module_db)


def module_cases(info: ModuleInfo, full: bool = False) -> Iterator[Case]:
    for training in (True, False):
        torch.default_generator.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for i, sample in enumerate(_first(samples, full)):
            name = f"{info.name}-{'train' if training else 'eval'}-{i}"
            yield Case(name, _module_subject(info, sample, training), steps=2)


def _module_subject(info: ModuleInfo, sample: Any, training: bool) -> Callable[[], Subject]:
    def build() -> Subject:
        made, given = sample.constructor_input, sample.forward_input
        module: nn.Module = info.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs))
        module.to(torch.float32).train(training)
        args, kwargs = _copied((tuple(given.args), given.kwargs))
        return Subject(lambda *args, **kwargs: module(*fed(args), **fed(kwargs)), args, kwargs, {"": module})

    return build


def fed(value: Any) -> Any:
    """``value`` with every tensor gone through a cheap op."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), value)


def _copied(value: Any) -> Any:
    """A copy with tensors that autograd sees as leaves."""
    memo: dict[int, Any] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            bare = tensor.detach()
            bare = copy.deepcopy(bare) if bare.layout is torch.strided else bare.clone()
            memo[id(tensor)] = bare.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    return tree_map_only(Tensor, leaf, value)


def _first(samples: Iterable[Any], full: bool) -> list[Any]:
    return list(itertools.islice(samples, None if full else SHORT_SAMPLES))


# -- verdicts ----------------------------------------------------------------------------------------------------------

ORDER = ("wrong", "unsteady", "refused", "warnings", "node", "pinned", "exact", "saves nothing")
"""Verdicts, the worst first.

- ``wrong``: something differs that is not one of the following.
- ``unsteady``: plain PyTorch does not reproduce itself.
- ``refused``: an error of ours where plain works.
- ``warnings``: only the warnings differ: some are said again.
- ``node``: exact, but autograd's node has another type name; PyTorch itself chooses it under any dispatch mode, one that
  does nothing included (that is checked, not believed).
- ``pinned``: exact, and some value cannot be rebuilt: it is held whatever the limit says.
- ``exact``: the same in everything, with everything dropped and rebuilt.
- ``saves nothing``: the same, and autograd saves nothing that is not a leaf.
"""

_OUR_ERRORS = frozenset(
    kind.__qualname__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RecalsError)
)


@dataclass
class Verdict:
    """On one operator or module: the worst verdict of its samples."""

    name: str
    kind: str = "saves nothing"
    samples: int = 0
    rebuilt: int = 0  # samples in which something was dropped and rebuilt
    middle: int = 0  # samples that ran at the middle limit too
    details: list[str] = field(default_factory=list)

    def add(self, case: Case, kind: str, details: list[str]) -> None:
        if ORDER.index(kind) < ORDER.index(self.kind):
            self.kind, self.details = kind, []
        if kind == self.kind and details:
            self.details.append(f"{case}: " + "; ".join(details))


def judge_op(op: OpInfo, full: bool = False) -> Verdict:
    return judge(op_name(op), op_cases(op, full), lambda case: full or "-float32-" in case.name)


def judge_module(info: ModuleInfo, full: bool = False) -> Verdict:
    return judge(info.name, module_cases(info, full), lambda case: True)


def judge(name: str, cases: Iterable[Case], wants_middle: Callable[[Case], bool]) -> Verdict:
    """Everything dropped and rebuilt; then, where wanted, at half of what the case caches.

    Case number k runs under policy number k modulo how many there are: one step, or two under a policy that plans ahead.
    """
    verdict = Verdict(name)
    for case, policy in zip(cases, itertools.cycle(POLICIES)):
        if issubclass(POLICIES[policy], StepPolicy):  # it watches one step and acts in the next
            case = replace(case, steps=max(case.steps, 2))
        expected = run(case, plain)
        wrapped = run_wrapped(case, policy, 0, refuses=False)
        stats = wrapped.stats
        kind, details = compare(case, expected, wrapped.trace)
        details += wrapped.left
        raised = expected["exception"] != freeze(None)
        if kind in ("exact", "node"):
            if wrapped.left or (stats.dropped_values and not stats.recomputed_values and not raised):
                kind = "wrong"
                details.append(f"{stats.dropped_values} values dropped, {stats.recomputed_values} rebuilt")
            elif kind == "node":
                pass
            elif stats.peak_cached_bytes:
                kind = "pinned"
            elif not stats.dropped_values:
                kind = "saves nothing"
        verdict.samples += 1
        verdict.rebuilt += stats.recomputed_values > 0
        verdict.add(case, kind, details)
        if kind == "exact" and stats.dropped_values > 1 and wants_middle(case):
            _judge_at_the_middle(verdict, case, policy, expected)
    return verdict


def _judge_at_the_middle(verdict: Verdict, case: Case, policy: str, expected: Trace) -> None:
    smallest, total = Yardstick(case).limits(policy)
    limit = max(smallest, total // 2)
    if limit == total:
        return
    wrapped = run_wrapped(case, policy, limit)
    kind, details = compare(case, expected, wrapped.trace)
    if wrapped.stats.peak_cached_bytes > limit or not wrapped.stats.dropped_values or wrapped.left:
        kind = "wrong"
        details = [*details, f"at the middle limit of {limit} bytes: {wrapped.stats}, {wrapped.left}"]
    verdict.middle += 1
    verdict.add(case, kind, details)


def judge_other(name: str, cases: Iterable[Case], call: Callable[..., Any]) -> Verdict:
    """The same comparison for another way of calling. An error of its own counts as a refusal, whatever its type."""
    verdict = Verdict(name)
    for case in cases:
        expected = run(case, plain)
        found = run(case, call)
        kind, details = compare(case, expected, found)
        if kind == "wrong" and expected["exception"] == freeze(None) != found["exception"]:
            kind = "refused"
        verdict.samples += 1
        verdict.add(case, kind, details)
    return verdict


def compare(case: Case, expected: Trace, found: Trace) -> tuple[str, list[str]]:
    lines = differences(expected, found)
    if not lines:
        return "exact", []
    if unsteady := differences(expected, run(case, plain)):
        return "unsteady", unsteady[:2]
    if not differences(without_nodes(expected), without_nodes(found)) and not differences(
        found, run(case, under_a_mode)
    ):
        return "node", lines[:1]
    if differences({**expected, "warnings": None}, {**found, "warnings": None}) == []:
        return "warnings", lines
    raised = found["exception"]
    if raised != freeze(None) and raised.items[0][1].strip("'") in _OUR_ERRORS:
        return "refused", [str(found.get("exception text"))[:300]]
    return "wrong", lines[:4]


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Plain PyTorch while some dispatch mode is active."""
    with _Nothing():
        return fn(*args, **kwargs)
