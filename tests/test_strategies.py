"""The conformance suite: every strategy gives the plain step, as far as its terms promise, on every model and limit here.

A strategy is tested by being listed in `STRATEGIES`.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
from collections.abc import Callable, Iterator
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recals_exp import strategies
from recals_exp.config import conf_dir
from recals_exp.meters.memory import step_peak_bytes
from recals_exp.meters.parity import check_parity
from recals_exp.meters.steps import TrainStep
from recals_exp.recals import POLICIES, recals_with_rngs
from recals_exp.strategies import BYTES, NO_BUDGET, SHARE, STRATEGIES, BoundStrategy, Strategy, make_strategy
from recals_exp.strategies.blocks import find_blocks

CPU = torch.device("cpu")


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 4))


def noisy() -> nn.Module:
    """Batch norm and dropout: hidden writes and random numbers."""

    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.3))

    return nn.Sequential(block(16), block(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


class Residual(nn.Module):
    """Skips, a block used three times, and a parameter used never."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Sigmoid())
        self.unused = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.mix(x)
        return self.head(x)


MODELS: list[Callable[[], nn.Module]] = [chain, noisy, Residual]
BY_BLOCKS = {"checkpoint", "selective", "compile_checkpoint"}
COMPILED = {"compile", "compile_checkpoint"}
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="generated code needs a C++ compiler"
)


def cases() -> list[Any]:
    """Every strategy with every policy it can take, and every budget that means something to it."""
    budgets: dict[str, tuple[float | None, ...]] = {NO_BUDGET: (None,), SHARE: (None, 0.3), BYTES: (None, 1.0, 0.5)}
    found = []
    for name in sorted(STRATEGIES):
        policies = sorted(POLICIES) if make_strategy(name).policy != "none" else ["none"]
        found += [
            pytest.param(name, policy, fraction, id=f"{name}-{policy}-{fraction or 'no limit'}")
            for policy in policies
            for fraction in budgets[make_strategy(name).budget_kind]
        ]
    return found


def strategy_of(name: str, policy: str, model: nn.Module | None = None) -> Strategy:
    """Compiled ones without generated code, which takes a compiler and its time; a block that repeats in time is named."""
    options: dict[str, Any] = {"backend": "aot_eager"} if name in COMPILED else {}
    if name in BY_BLOCKS and isinstance(model, Residual):
        options["blocks"] = ["mix"]
    return make_strategy(name, policy if policy != "none" else "fifo", **options)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def step_of(build: Callable[[], nn.Module]) -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = build()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), nn.functional.cross_entropy, CPU
    )
    return step, (torch.randn(12, 16), torch.arange(12) % 4)


def limit_of(strategy: Strategy, step: TrainStep, x: Tensor, fraction: float | None) -> float | None:
    if fraction is None or strategy.budget_kind == SHARE:
        return fraction
    total, unit_max = recals_with_rngs(-1).analyze(step.model, x)
    return max(int(fraction * total), unit_max)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_a_step_is_the_plain_step(
    name: str, policy: str, fraction: float | None, build: Callable[[], nn.Module]
) -> None:
    """As far as the strategy's terms promise; what they do not promise must at least be close."""
    step, batch = step_of(build)
    strategy = strategy_of(name, policy, step.model)
    limit = limit_of(strategy, step, batch[0], fraction)
    bound: list[BoundStrategy] = []

    def bind(model: nn.Module) -> BoundStrategy:
        bound.append(strategy.bind(model, limit))
        return bound[-1]

    record = check_parity(step, bind, batch, seed=1)
    promised = [
        line
        for line in record.differences
        if (strategy.terms.exact_buffers if line.startswith("buffer") else strategy.terms.exact_gradients)
    ]
    assert promised == []
    far = [line for line in record.differences if not line.startswith("buffer") and "e-" not in line]
    assert far == []
    assert bound[0].limit_bytes == (limit if strategy.budget_kind == BYTES else None)
    assert bool(bound[0].blocks) == (name in BY_BLOCKS)
    stats = bound[0].stats
    if stats is not None:
        assert stats.cached_bytes == 0  # backward gave everything back
        assert limit is None or stats.peak_cached_bytes <= limit
        assert (stats.dropped_values > 0) == (fraction == 0.5)  # else the low budget proved nothing


@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_training_is_plain_training(name: str, policy: str, fraction: float | None) -> None:
    plain_step, batch = step_of(noisy)
    torch.manual_seed(3)
    plain = [plain_step(plain_step.model, *batch).loss.item() for _ in range(5)]
    step, batch = step_of(noisy)
    strategy = strategy_of(name, policy)
    bound = strategy.bind(step.model, limit_of(strategy, step, batch[0], fraction))
    torch.manual_seed(3)
    losses = [step(bound, *batch).loss.item() for _ in range(5)]
    assert plain[-1] < plain[0]
    if not strategy.terms.exact_gradients:
        assert losses == pytest.approx(plain, rel=1e-4)
        return
    assert losses == plain
    buffers = dict(step.model.named_buffers())
    for (key, a), b in zip(plain_step.model.state_dict().items(), step.model.state_dict().values(), strict=True):
        assert torch.equal(a, b) or (key in buffers and not strategy.terms.exact_buffers), key


class Scale(nn.Module):
    def forward(self, x: Tensor, *, by: float) -> Tensor:
        return x * by


class Scales(nn.Module):
    """Keyword arguments, an object that is no tensor, a nested result; can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale() for _ in range(2))

    def forward(self, x: Tensor, *, scale: float, extra: Any = None, fails: bool = False) -> dict[str, Any]:
        for block in self.scales:
            x = block(x, by=scale)
            if fails:
                raise RuntimeError("told to")
        return {"y": x, "extra": extra}


@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_arguments_and_results_pass_through(name: str, policy: str, fraction: float | None) -> None:
    strategy = strategy_of(name, policy)
    bound = strategy.bind(Scales(), 2**20 if fraction and strategy.uses_budget else fraction)
    marker = object()
    out = bound(torch.ones(2, requires_grad=True), scale=3.0, extra=marker)
    assert out["extra"] is marker
    assert torch.equal(out["y"], torch.full((2,), 9.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, after the failure
@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_the_model_is_as_it_was_after_a_failure(name: str, policy: str, fraction: float | None) -> None:
    model = Scales()
    model.scales[1].__dict__["forward"] = own = lambda x, by: x - by  # an instance's own, as accelerate leaves them
    strategy = strategy_of(name, policy)
    bound = strategy.bind(model, 2**20 if fraction and strategy.uses_budget else fraction)
    with pytest.raises(RuntimeError, match="told to"):
        bound(torch.ones(2, requires_grad=True), scale=3.0, fails=True)
    assert "forward" not in model.scales[0].__dict__
    assert model.scales[1].__dict__["forward"] is own
    assert torch.equal(bound(torch.ones(2, requires_grad=True), scale=3.0)["y"], torch.zeros(2))


@pytest.mark.parametrize(("name", "policy", "fraction"), cases())
def test_binding_leaves_the_model_as_it_is(name: str, policy: str, fraction: float | None) -> None:
    step, batch = step_of(noisy)
    keys = list(step.model.state_dict())
    identities = [id(parameter) for parameter in step.model.parameters()]
    attributes = [dict(module.__dict__) for module in step.model.modules()]
    strategy = strategy_of(name, policy)
    limit = limit_of(strategy, step, batch[0], fraction)
    one, other = strategy.bind(step.model, limit), strategy.bind(step.model, limit)
    step(one, *batch)
    assert list(step.model.state_dict()) == keys
    assert [id(parameter) for parameter in step.model.parameters()] == identities
    assert [dict(module.__dict__) for module in step.model.modules()] == attributes
    if other.stats is not None:
        assert other.stats.peak_cached_bytes == 0  # independent accounts
        assert one.stats is not None
        assert one.stats.peak_cached_bytes > 0
        one.reset_stats()
        assert one.stats is not None
        assert one.stats.peak_cached_bytes == 0


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_strategy_states_its_terms_and_its_budget(name: str) -> None:
    strategy = make_strategy(name)
    assert strategy.terms.needs
    assert strategy.terms.changes
    assert strategy.budget_kind in (NO_BUDGET, BYTES, SHARE)
    if strategy.budget_kind == NO_BUDGET:
        with pytest.raises(ValueError, match="cannot hold a limit, but got 5 bytes: use strategy=recals"):
            strategy.bind(noisy(), 5)
    if strategy.budget_kind == SHARE:
        with pytest.raises(ValueError, match=r"takes its budget as a share in \(0, 1\], but got 5"):
            strategy.bind(noisy(), 5)
    assert (strategy.own_baseline() is not None) == (not strategy.terms.exact_gradients)


# -- what each does --------------------------------------------------------------------------------------------------


def saved_bytes(step: TrainStep, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> int:
    return step_peak_bytes(lambda: (step(forward, *batch), None)[1], CPU)


def deep() -> nn.Module:
    """Wide activations, light weights: what is saved shows in the peak."""
    return nn.Sequential(
        nn.Linear(16, 64),
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.Tanh()) for _ in range(8)),
        nn.Linear(64, 4),
    )


def deep_step() -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    step, _ = step_of(deep)
    return step, (torch.randn(2048, 16), torch.arange(2048) % 4)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("checkpoint", {}, None),
        ("checkpoint", {"every": 2}, None),
        ("selective", {}, None),
        ("compile", {"backend": "aot_eager"}, 0.4),
        ("compile_checkpoint", {"backend": "aot_eager"}, None),
    ],
)
def test_it_saves_memory(name: str, options: dict[str, Any], limit: float | None) -> None:
    step, batch = deep_step()
    bound = make_strategy(name, **options).bind(step.model, limit)
    step(bound, *batch)  # compiles
    assert saved_bytes(step, bound, batch) < 0.85 * saved_bytes(step, step.model, batch)


def flops_of(step: TrainStep, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        step(forward, *batch)
    return int(counter.get_total_flops())


def test_recomputation_is_of_the_blocks_and_of_what_the_policy_says() -> None:
    """Eight products of blocks are run again: all by `checkpoint`, every other with every=2, none by `selective`."""
    step, batch = deep_step()
    product = 2 * 2048 * 64 * 64
    plain = flops_of(step, step.model, batch)

    def rerun(name: str, **options: Any) -> float:
        return (flops_of(step, make_strategy(name, **options).bind(step.model, None), batch) - plain) / product

    assert rerun("checkpoint") == 8
    assert rerun("checkpoint", every=2) == 4
    assert rerun("checkpoint", blocks=["3"]) == 1
    assert rerun("selective") == 0


def test_selective_saves_every_other_product() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()).tanh()

    step, batch = step_of(lambda: nn.Sequential(Two(), Two(), nn.Linear(16, 4)))
    plain = flops_of(step, step.model, batch)
    bound = make_strategy("selective", save_every=2).bind(step.model, None)
    assert flops_of(step, bound, batch) - plain == 2 * (2 * 12 * 16 * 16)  # the second product of each block


def test_compiled_flops_are_those_of_its_graphs() -> None:
    """The counter sees the eager step, as PyTorch skips compiled code under a dispatch mode."""
    step, batch = deep_step()
    plain = flops_of(step, step.model, batch)
    counted = {}
    for limit in (None, 0.2):
        bound = make_strategy("compile", backend="aot_eager").bind(step.model, limit)
        step(bound, *batch)
        assert bound.hides_flops
        counted[limit] = bound.step_flops
    assert counted[None] == plain
    assert counted[0.2] is not None
    assert counted[0.2] > plain


def test_two_budgets_of_one_model_keep_apart() -> None:
    """Dynamo finds compiled code by the code object: without a backend of its own, the second bind ran the first's."""
    step, batch = deep_step()
    bounds = [make_strategy("compile", backend="aot_eager").bind(step.model, limit) for limit in (None, 0.4)]
    for bound in bounds:
        step(bound, *batch)
    free, tight = (saved_bytes(step, bound, batch) for bound in bounds)
    assert tight < 0.9 * free


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_a_compiled_budget_keeps_the_dropout_of_its_forward(backend: str) -> None:
    """Torch's partitioner recomputes dropout with other numbers (pytorch#190758): gradients were off by their own size."""
    step, batch = step_of(noisy)
    strategy = make_strategy("compile", backend=backend)
    record = check_parity(
        step, lambda model: strategy.bind(model, 0.1), batch, 1, baseline=lambda model: strategy.bind(model, None)
    )
    assert record.differences == ()


def test_offload_leaves_parameters_and_moves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from recals_exp.strategies import offload

    moved: list[tuple[int, ...]] = []

    class Moving(offload.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            inner = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tuple(tensor.shape)), inner(tensor))[1]

    monkeypatch.setattr(offload, "save_on_cpu", Moving)
    step, batch = step_of(chain)
    step(make_strategy("offload").bind(step.model, None), *batch)
    assert moved.count((12, 16)) == 13  # the input, and each tanh's result for itself and for the next linear
    assert (16, 16) not in moved


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize(("name", "limit"), [("compile", 0.5), ("compile_checkpoint", None)])
def test_generated_code_learns_what_eager_learns(name: str, limit: float | None) -> None:
    step, batch = deep_step()
    record = check_parity(step, lambda model: make_strategy(name).bind(model, limit), batch, seed=1)
    assert not [line for line in record.differences if "e-" not in line]


def test_without_a_compiler_generated_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    for name in sorted(COMPILED):
        with pytest.raises(ValueError, match=rf"strategy={name} generates C\+\+ .*install g\+\+ .*backend=aot_eager"):
            make_strategy(name).check_device(CPU)
        make_strategy(name, backend="aot_eager").check_device(CPU)
    with pytest.raises(ValueError, match=r"strategy\.backend='magic' is not known: use inductor .*aot_eager"):
        make_strategy("compile", backend="magic")


# -- blocks ----------------------------------------------------------------------------------------------------------


def block_names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


def test_blocks_are_the_longest_run_of_one_class() -> None:
    from recals_exp.models import gpt, resnet50

    assert block_names(gpt(64, 8, depth=3, width=12, heads=2)) == ["blocks.0", "blocks.1", "blocks.2"]
    stages = block_names(resnet50(3, 10))
    assert len(stages) == 16
    assert (stages[0], stages[-1]) == ("layer1.0", "layer4.2")
    assert block_names(chain()) == [str(number) for number in range(6)]
    assert block_names(noisy()) == ["0", "1"]


def test_no_block_lies_in_another_and_none_counts_twice() -> None:
    class Box(nn.Module):
        def __init__(self, *inner: nn.Module) -> None:
            super().__init__()
            self.inner = nn.ModuleList(inner)

    shared = Box()
    assert block_names(nn.Sequential(Box(Box(), Box()), Box())) == ["0", "1"]
    assert block_names(nn.ModuleList([shared, shared, Box()])) == ["0", "2"]


def test_where_nothing_repeats_the_blocks_must_be_named() -> None:
    strategy = make_strategy("checkpoint")
    with pytest.raises(
        ValueError,
        match=r"strategy=checkpoint: no repeated blocks were found in Residual .*strategy\.blocks=.* mix, head",
    ):
        strategy.bind(Residual(), None)
    with pytest.raises(ValueError, match=r"strategy\.blocks names 'mox', which Residual does not have: .* mix, mix\.0"):
        make_strategy("checkpoint", blocks=["mix", "mox"]).bind(Residual(), None)
    with pytest.raises(ValueError, match="names a module inside of another, or one twice"):
        make_strategy("checkpoint", blocks=["mix", "mix.1"]).bind(Residual(), None)
    with pytest.raises(ValueError, match=r"strategy\.every=0 is not allowed: use a whole number of at least 1"):
        make_strategy("checkpoint", every=0).bind(chain(), None)
    with pytest.raises(ValueError, match=r"strategy\.save_every=0 is not allowed"):
        make_strategy("selective", save_every=0)


def test_blocks_that_never_run_as_modules_are_noticed() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.parts[0][0].weight

    with pytest.raises(ValueError, match=r"none of the blocks parts\.0, parts\.1 was called as a module"):
        make_strategy("checkpoint").bind(Aside(), None)(torch.ones(2, 16))


# -- the list --------------------------------------------------------------------------------------------------------


def test_classes_are_abstract_or_final() -> None:
    modules = [
        importlib.import_module(f"{strategies.__name__}.{info.name}") for info in iter_modules(strategies.__path__)
    ]
    classes = [
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    ]
    assert len(classes) >= 16
    for kind in classes:
        if not issubclass(kind, (Strategy, BoundStrategy)):
            continue
        assert inspect.isabstract(kind) != getattr(kind, "__final__", False), kind
        assert not any(getattr(base, "__final__", False) for base in kind.__mro__[1:]), kind


def test_every_name_is_its_strategy() -> None:
    assert {name: make_strategy(name).name for name in STRATEGIES} == {name: name for name in STRATEGIES}
    assert {path.stem for path in (conf_dir() / "strategy").glob("*.yaml")} == set(STRATEGIES)


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"strategy='magic' does not exist; there are: none, recals"):
        make_strategy("magic")
    with pytest.raises(ValueError, match=r"policy='magic' does not exist; there are: .*fifo"):
        make_strategy("recals", "magic")
    with pytest.raises(ValueError, match=r"strategy='none' does not know the option magic; it takes none"):
        make_strategy("none", magic=1)
    with pytest.raises(
        ValueError, match=r"strategy='recals' does not know the options magic, more; it takes audit, gpu_dev"
    ):
        make_strategy("recals", more=1, magic=1)
