"""The contract of ModelPipeline apart from parity: arguments, devices, states, failures, lifetimes."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recals_exp.pipeline import ModelPipeline
from recals_exp.pipeline.schedule import ideal_efficiency
from recals_exp.pipeline.workers import ThreadOrderError


class Count(nn.Module):
    """Notes which inputs it saw, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x[0].item())
        return x + 1


class Fn(nn.Module):
    """A stage of a plain function with exactly one parameter."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Any) -> Any:
        return self.fn(x)


def pipeline(*modules: nn.Module, **options: Any) -> ModelPipeline:
    pipe = ModelPipeline(**options)
    for module in modules:
        pipe.append(module, "cpu")
    return pipe


# -- order and counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
def test_first_in_first_out(threads: bool) -> None:
    stages = [Count() for _ in range(3)]
    pipe = pipeline(*stages, threads=threads)
    for _ in range(2):
        assert torch.equal(pipe(torch.arange(6.0), 2), torch.arange(6.0) + 3)
        assert [stage.seen for stage in stages] == [[0, 2, 4], [1, 3, 5], [2, 4, 6]]
        for stage in stages:
            stage.seen.clear()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_constant_forward_calls_each_stage_exactly_t_times(n: int, threads: bool) -> None:
    stages = [Count() for _ in range(n)]
    pipe = pipeline(*stages, threads=threads)
    pipe.constant_forward(torch.zeros(2), 4)
    pipe.constant_forward(torch.zeros(2), 3)
    assert [len(stage.seen) for stage in stages] == [7] * n


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Tanh(), nn.ReLU()])
def test_results_are_never_changed_in_place(last: nn.Module) -> None:
    """The first ModelPipeline added up with +=, which broke the backward of a stage that saves its result."""
    pipe = pipeline(nn.Linear(3, 3), last)
    pipe.constant_forward(torch.randn(2, 3), 3).sum().backward()
    assert pipe.get_parameter("0.weight").grad is not None


# -- splitting --------------------------------------------------------------------------------------------------------


def test_a_ragged_batch_is_refused_before_any_work() -> None:
    stage = Count()
    with pytest.raises(ValueError, match=r"10 rows does not divide into groups of split_sizes=4.*2 rows.*ragged=True"):
        pipeline(stage)(torch.zeros(10), 4)
    assert stage.seen == []


def test_ragged_and_listed_sizes() -> None:
    stage = Count()
    pipe = pipeline(stage)
    x = torch.arange(10.0)
    assert torch.equal(pipe(x, 4, ragged=True), x + 1)
    assert torch.equal(pipe(x, [1, 9]), x + 1)
    assert stage.seen == [0, 4, 8, 0, 1]
    with pytest.raises(ValueError, match="adds up to 9 rows, but the batch has 10"):
        pipe(x, [4, 5])


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_size_that_is_no_count_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="split_sizes="):
        pipeline(Count())(torch.zeros(4), size)


def test_defaults_of_the_constructor() -> None:
    stage = Count()
    assert pipeline(stage, n_micro_batches=5)(torch.zeros(10)).shape == (10,)
    assert len(stage.seen) == 5
    stage.seen.clear()
    pipeline(stage, split_size=5)(torch.zeros(10))
    assert len(stage.seen) == 2
    with pytest.raises(ValueError, match="10 rows does not divide into n_micro_batches=4"):
        pipeline(stage, n_micro_batches=4)(torch.zeros(10))
    with pytest.raises(ValueError, match="give one of them"):
        ModelPipeline(split_size=1, n_micro_batches=1)


def test_batches_of_one_and_of_none() -> None:
    pipe = pipeline(nn.Linear(3, 2), nn.Tanh(), nn.Tanh())
    assert pipe(torch.zeros(1, 3), 1).shape == (1, 2)
    assert pipe(torch.zeros(0, 3), 4).shape == (0, 2)


class Masked(nn.Module):
    """Takes what the tests pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, note: Any = None) -> Tensor:
        self.calls.append((None if mask is None else tuple(mask.shape), scale, note))
        return x * scale


def test_keywords_are_split_or_passed_whole_by_rule() -> None:
    stage, plain = Masked(), nn.Sequential(nn.Identity())
    pipe = pipeline(plain, stage)
    x = torch.ones(6, 2)
    assert torch.equal(pipe(x, 3, mask=torch.ones(6, 4), scale=2.0, note="n"), x * 2)
    assert stage.calls == [((3, 4), 2.0, "n")] * 2
    stage.calls.clear()
    pipe(x, 3, mask=torch.ones(4, 4), unsplit=("mask",))
    assert stage.calls[0][0] == (4, 4)
    with pytest.raises(ValueError, match=r"'mask' has 4 rows, but positional input 0 has 6.*unsplit=\('mask',\)"):
        pipe(x, 3, mask=torch.ones(4, 4))
    stage.calls.clear()
    pipe(x, 3, mask=None, note=torch.tensor(3.0))
    assert stage.calls[0][0] is None
    assert stage.calls[0][2].item() == 3.0
    with pytest.raises(TypeError, match="no stage takes the keyword 'maks'"):
        pipe(x, 3, maks=None)
    with pytest.raises(ValueError, match="unsplit names"):
        pipe(x, 3, unsplit=("mask",))


def test_unsplit_names_of_the_constructor_may_be_absent() -> None:
    pipe = pipeline(Masked(), unsplit=("mask",))
    assert pipe(torch.ones(4, 2), 2).shape == (4, 2)
    assert pipe(torch.ones(4, 2), 2, mask=torch.ones(3, 3)).shape == (4, 2)


class Pair(nn.Module):
    """Two tensors in, two out."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a - b


def test_tuples_are_spread_over_stages_that_take_several() -> None:
    pipe = pipeline(Pair(), Pair(), Fn(lambda pair: {"sum": pair[0], "rest": [pair[1], None]}))
    a, b = torch.randn(4, 2), torch.randn(4, 2)
    out = pipe((a, b), 2)
    assert torch.equal(out["sum"], (a + b) + (a - b))
    assert torch.equal(out["rest"][0], (a + b) - (a - b))
    assert out["rest"][1] is None


def test_results_without_dimensions_are_stacked_and_others_must_agree() -> None:
    assert torch.equal(pipeline(Fn(lambda x: x.sum()))(torch.ones(6), 2), torch.full((3,), 2.0))
    assert pipeline(Fn(lambda x: (x, "label")))(torch.ones(6), 2)[1] == "label"
    with pytest.raises(ValueError, match=r"hold 0.0 for micro-batch 0 and 2.0 for micro-batch 1"):
        pipeline(Fn(lambda x: x[0].item()))(torch.arange(4.0), 2)
    with pytest.raises(ValueError, match="built differently"):
        pipeline(Fn(lambda x: (x,) if x[0] else (x, x)))(torch.arange(4.0), 2)


def test_a_first_layer_in_place_works_on_pieces() -> None:
    x = (torch.randn(6, 3, requires_grad=True) * 1.0).requires_grad_()
    pipe = pipeline(nn.ReLU(inplace=True), nn.Linear(3, 1))
    with torch.no_grad():
        expected = torch.relu(x)
    assert torch.equal(pipe(x, 2), pipe.stages[1].module(expected))


# -- skips ------------------------------------------------------------------------------------------------------------


class Add(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return sum(parts[1:], parts[0])


def test_takes_from_inputs_stages_and_items() -> None:
    pipe = ModelPipeline()
    pipe.append(Pair(), "cpu", takes=[("input", 1), ("input", 0)])
    pipe.append(nn.Identity(), "cpu", takes=(0, 1))
    pipe.append(Add(), "cpu", takes=["previous", (0, 0), ("input", 0)])
    a, b = torch.randn(4), torch.randn(4)
    assert torch.equal(pipe((a, b), 2), (b - a) + (b + a) + a)


def test_a_wrong_take_is_refused() -> None:
    pipe = pipeline(nn.Identity())
    for take in (1, "next", (0, -1), True, [], (0, "a")):
        with pytest.raises(ValueError, match=r"stage 1 (cannot take|takes nothing)"):
            pipe.append(nn.Identity(), "cpu", takes=take)  # type: ignore[arg-type]
    pipe.append(nn.Identity(), "cpu", takes=(0, 1))
    with pytest.raises(ValueError, match="item 1 of stage 0 was asked for, but its result is a Tensor"):
        pipe(torch.zeros(2))


# -- devices ----------------------------------------------------------------------------------------------------------


def test_names_of_the_cpu() -> None:
    for name in ("cpu", "cpu:0", "cpu:1", torch.device("cpu", 1)):
        assert ModelPipeline().append(nn.Linear(1, 1), name).stages[0].device == torch.device("cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="names devices that would exist here")
@pytest.mark.parametrize("name", [2, "2", "cuda:1", torch.device("cuda", 0), "xpu"])
def test_a_device_that_does_not_exist_is_refused_with_those_that_do(name: Any) -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="does not exist on this machine; the devices that exist are: cpu"):
        ModelPipeline().append(module, name)
    assert module.weight.device.type == "cpu"


@pytest.mark.parametrize("name", [True, None, 1.0, "gpu zero", "-1"])
def test_what_names_no_device_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="does not name a device"):
        ModelPipeline().append(nn.Linear(1, 1), name)


def test_shared_parameters_across_devices_are_refused_before_anything_moves() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    pipe = pipeline(first)
    with pytest.raises(ValueError, match=r"stage 1 shares weight with stage 0.*meta and cpu"):
        pipe.append(second, "meta")
    assert first.weight.device.type == second.bias.device.type == "cpu"
    assert len(pipe) == 1
    pipe.append(second, "cpu")
    assert pipe(torch.zeros(2, 2)).shape == (2, 2)


def test_tied_parameters_on_one_device_are_exact() -> None:
    torch.manual_seed(0)
    first, middle, last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    plain = copy.deepcopy(nn.Sequential(first, middle, last))
    pipe = pipeline(first, middle, last)
    x = torch.randn(12, 8)
    pipe(x, 3).square().mean().backward()
    torch.cat([plain(piece) for piece in x.split(3)]).square().mean().backward()
    assert torch.equal(first.weight.grad, plain[0].weight.grad)
    with pytest.raises(ValueError, match="stage 2 shares weight with stage 0"):
        pipeline(first, middle, last, threads=True)


def test_moving_a_whole_pipeline_is_refused_and_dtypes_convert() -> None:
    pipe = pipeline(nn.Linear(2, 2))
    assert pipe.double()(torch.zeros(2, 2, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="moved to meta, but its place is cpu"):
        pipe.to("meta")


# -- a module among modules -------------------------------------------------------------------------------------------


def test_state_dict_is_that_of_the_plain_model_in_both_directions() -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    pipe = pipeline(*copy.deepcopy(plain))
    other = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    pipe.load_state_dict(other.state_dict())
    plain.load_state_dict(pipe.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(4, 2)
    assert torch.equal(plain.eval()(x), pipe.eval()(x))
    assert not pipe.stages[1].module.training


def test_an_optimizer_made_before_stays_valid_and_copies_are_independent() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    pipe = pipeline(module)
    twin = copy.deepcopy(pipe)
    before = module.weight.detach().clone()
    pipe(torch.ones(4, 2), 2).sum().backward()
    optimizer.step()
    assert not torch.equal(pipe.stages[0].module.weight, before)
    assert torch.equal(twin.stages[0].module.weight, before)
    assert twin.stages[0].module is twin.get_submodule("0")


def test_an_empty_pipeline_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="no stage: append"):
        ModelPipeline()(torch.zeros(2))
    with pytest.raises(ValueError, match="no stage: append"):
        ModelPipeline().constant_forward(torch.zeros(2), 2)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5])
def test_a_number_of_runs_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="T="):
        pipeline(Count()).constant_forward(torch.zeros(2), steps)


def test_only_modules_are_stages() -> None:
    with pytest.raises(TypeError, match=r"a stage must be an nn.Module, got function"):
        ModelPipeline().append(lambda x: x, "cpu")  # type: ignore[arg-type]


# -- budgets ----------------------------------------------------------------------------------------------------------


class Spy:
    """Stands where a Recals stands."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return fn(*args, **kwargs)


def test_without_gradients_nothing_is_added() -> None:
    spy = Spy()
    pipe = ModelPipeline().append(nn.Linear(2, 2), "cpu", spy).append(nn.Linear(2, 2), "cpu", 0.5)
    x = torch.zeros(4, 2)
    with torch.no_grad():
        pipe(x, 2)
    with torch.inference_mode():
        pipe(x, 2)
    assert spy.calls == 0
    assert pipe.stages[1].budget.recals is None, "a fraction is analysed only where gradients are recorded"
    pipe(x, 2)
    assert spy.calls == 2


@pytest.mark.parametrize("budget", [0.0, 1.5, -2, True, "lots", [1], int])
def test_a_wrong_budget_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match="is not a stage's budget"):
        ModelPipeline().append(nn.Linear(1, 1), "cpu", budget)


def test_forms_of_a_budget() -> None:
    for written, limit in (("1KiB", 1024), (512, 512), (-1, None), ("4096", 4096)):
        assert (
            ModelPipeline().append(nn.Linear(1, 1), "cpu", written).stages[0].budget.recals.cache_limit_bytes == limit
        )


class Stateful(nn.Module):
    """Keeps everything a module can keep in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count = 0
        self.state: Tensor | None = None
        self.running = torch.zeros(2)
        self.register_buffer("moving", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.late = self.count
        y = self.linear(x).tanh()
        self.state = y.mean(0) if self.state is None else self.state * 0.5 + y.mean(0)
        with torch.no_grad():
            self.running.add_(y.mean(0))
            self.moving = self.moving * 0.9 + y.mean(0)
        return y + self.state


def test_analysing_for_a_fraction_leaves_no_trace() -> None:
    torch.manual_seed(0)
    mine, its = Stateful(), Stateful()
    its.load_state_dict(mine.state_dict())
    pipe = ModelPipeline().append(mine, "cpu", 0.9)
    x = torch.randn(4, 2)
    pipe(x, 2).sum().backward()
    torch.cat([its(piece) for piece in x.split(2)]).sum().backward()
    assert mine.count == its.count == mine.late == 2
    assert torch.equal(mine.running, its.running)
    assert torch.equal(mine.moving, its.moving)
    assert mine.state is not None
    assert its.state is not None
    assert torch.equal(mine.state, its.state)
    assert torch.equal(mine.linear.weight.grad, its.linear.weight.grad)


def test_a_fraction_is_of_all_micro_batches_in_flight() -> None:
    limits = {}
    for m in (1, 2, 4):
        pipe = ModelPipeline().append(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8))), "cpu", 0.5
        )
        pipe(torch.randn(8, 4), 8 // m).sum().backward()
        recals = pipe.stages[0].budget.recals
        limits[m] = recals.cache_limit_bytes
        assert 0 < recals.stats.peak_cached_bytes <= limits[m]
    assert limits[1] == limits[2] == limits[4] == 8 * 8 * 4 * 4 // 2


# -- failures ---------------------------------------------------------------------------------------------------------


def boom(x: Tensor) -> Tensor:
    if x[0] == 4:
        raise KeyError("broken")
    return x


@pytest.mark.parametrize("threads", [False, True])
def test_a_failure_names_stage_and_micro_batch_and_keeps_its_type(threads: bool) -> None:
    pipe = pipeline(nn.Identity(), Fn(boom), Count(), threads=threads)
    pipe(torch.zeros(8), 2)
    before = threading.active_count()
    with pytest.raises(KeyError, match="broken") as caught:
        pipe(torch.arange(8.0), 2)
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "in stage 1 (1) at micro-batch 2 of 4" in told
    assert any(frame.name == "boom" for frame in caught.traceback)
    assert threading.active_count() == before
    assert pipe(torch.zeros(8), 2).shape == (8,)


def test_threads_raise_the_failure_the_plain_loop_would_meet_first() -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.05)
        if x[0] == 2:
            raise ValueError("the first in order")
        return x

    def quick(x: Tensor) -> Tensor:
        if x[0] == 6:
            raise ValueError("the first in time")
        return x

    pipe = pipeline(Fn(quick), Fn(slow), threads=True)
    with torch.no_grad():
        pipe(torch.zeros(8), 2)
        with pytest.raises(ValueError, match="the first in order"):
            pipe(torch.arange(8.0), 2)


@pytest.mark.parametrize("threads", [False, True])
def test_a_call_keeps_nothing_alive(threads: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        pipe = pipeline(nn.Linear(2, 2), nn.Tanh(), Fn(boom), threads=threads)
        for bad in (False, False, True, True):
            x = torch.zeros(8, 2)
            gone = weakref.ref(x)
            if bad:
                pipe.stages[2].module.fn = lambda x: 1 / 0
                with pytest.raises(ZeroDivisionError):
                    pipe(x, 2)
            else:
                pipe.stages[2].module.fn = lambda x: x
                pipe(x, 2).sum().backward()
            del x
            assert gone() is None
    finally:
        gc.enable()


# -- threads ----------------------------------------------------------------------------------------------------------


class Sleep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x + 1


@pytest.mark.parametrize(("n", "m"), [(2, 8), (3, 8), (4, 4)])
def test_threads_overlap_nearly_ideally(n: int, m: int) -> None:
    pipe = pipeline(*(Sleep() for _ in range(n)), threads=True)
    x = torch.zeros(m)
    pipe(x, 1)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        pipe(x, 1)
        seconds.append(time.perf_counter() - start)
    efficiency = m * 0.02 / min(seconds)
    assert efficiency >= 0.9 * ideal_efficiency(n, m)


def test_what_holds_in_the_caller_holds_in_the_workers() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        ambient = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype())
        seen.append((threading.current_thread().name, *ambient, (x @ x.T).dtype, torch.get_num_threads()))
        return x

    pipe = pipeline(Fn(look), Fn(look), threads=True)
    x = torch.randn(4, 3)
    for grad in (True, False):
        for autocast in (True, False):
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                pipe(x, 2)
                seen.clear()
                pipe(x, 2)
                dtype = torch.bfloat16 if autocast else torch.float32
                assert {entry[1:] for entry in seen} == {
                    (grad, autocast, torch.float32, dtype, torch.get_num_threads())
                }
                assert {entry[0] for entry in seen} == {"pipeline stage 0", "pipeline stage 1"}


def test_autocast_with_its_weight_cache_is_exact_on_threads() -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(16, 16) for _ in range(3)]
    plain = copy.deepcopy(nn.Sequential(*modules))
    pipe = pipeline(*modules, threads=True)
    x = torch.randn(12, 16)
    for _ in range(3):
        for net in (pipe, plain):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = pipe(x, 2) if net is pipe else torch.cat([plain(piece) for piece in x.split(2)])
                out = out + (pipe(x, 2) if net is pipe else torch.cat([plain(piece) for piece in x.split(2)]))
            out.float().square().mean().backward()
        for (name, one), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), name
    assert pipe.threads_note == "threads"


def test_a_stage_that_starts_to_draw_is_refused_on_threads() -> None:
    state = {"draw": False}
    pipe = pipeline(nn.Identity(), Fn(lambda x: x + torch.rand(1) if state["draw"] else x), threads=True)
    pipe(torch.zeros(4), 2)
    state["draw"] = True
    with pytest.raises(ThreadOrderError, match=r"stage 1 \(1\) called aten.rand"):
        pipe(torch.zeros(4), 2)
    for module in (
        Fn(lambda x: x + __import__("random").random()),
        Fn(lambda x: x + __import__("numpy").random.rand()),
    ):
        with pytest.raises(ThreadOrderError, match="global generator, and on threads"):
            pipeline(nn.Identity(), module, threads=True)(torch.zeros(4), 2)


def test_draws_inside_a_fork_take_turns() -> None:
    def forked(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(int(x[0]))
            time.sleep(0.005)
            return x + torch.rand(1)

    pipe = pipeline(Fn(forked), nn.Dropout(0.5), Fn(forked), threads=True)
    x = torch.arange(6.0)
    torch.manual_seed(1)
    first = pipe(x, 1)
    for _ in range(3):
        torch.manual_seed(1)
        assert torch.equal(pipe(x, 1), first)
        assert pipe.threads_note == "threads"


def test_threads_stand_back_where_they_could_not_be_exact() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    pipe = pipeline(nn.Linear(2, 2), nn.Linear(2, 2), threads=True)
    x = torch.randn(4, 2)
    pipe(x, 2)
    with FlopCounterMode(display=False) as flops:
        pipe(x, 2)
    assert flops.get_total_flops() == 2 * 2 * 4 * 2 * 2
    assert pipe.threads_note == "in order: a dispatch mode is active"
    with torch.autograd.graph.save_on_cpu():
        pipe(x, 2)
    assert pipe.threads_note == "in order: saved-tensor hooks are active"
    with torch.device("cpu"):
        pipe(x, 2)
    assert pipe.threads_note == "in order: a function mode is active"
    pipe(x, 4)
    assert "nothing to overlap" in pipe.threads_note
    assert pipeline(nn.Identity()).threads_note == ""


class Twice(nn.Module):
    """Uses its weight for both of two results, one of which skips the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = (x @ self.w).tanh()
        return (x @ self.w).sigmoid() @ self.w, skip @ self.w


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, a: Tensor, b: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return (b @ self.w).sin() + (a @ self.w) + x * 0.1 + bias @ self.w


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return (x @ self.w + bias).cos() + bias


def test_gradient_sums_keep_their_order_on_threads() -> None:
    """Nodes are numbered by thread: without renumbering, skips, second calls and shared inputs change the last bits."""
    torch.manual_seed(0)
    first, middle, last = Twice(), Biased(), Late()
    modules = nn.ModuleList([first, middle, last])
    pipe = ModelPipeline(threads=True, unsplit=("bias",)).append(first, "cpu").append(middle, "cpu", takes=(0, 0))
    pipe.append(last, "cpu", takes=["previous", (0, 1), "input"])
    x, bias = torch.randn(12, 8) * 0.3, torch.randn(1, 8)
    source = torch.randn(8, 8)

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        results = []
        for piece in x.split(2) if x.is_leaf else [x[i : i + 2] for i in range(0, 12, 2)]:
            a, b = first(piece)
            results.append(last(middle(a, bias=bias), b, piece, bias=bias))
        return torch.cat(results)

    def step(call: Any) -> list[Tensor]:
        modules.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (x, bias, source)]
        history = leaves[0] @ leaves[2]
        early = first.w.sin().sum() * 0.01
        one = call(history, leaves[1].exp())
        two = call(one.detach() + history, leaves[1])
        late = (two @ leaves[2]).tanh() @ first.w
        (one.square().mean() + two.mean() + late.square().mean() + early).backward()
        return [t.grad for t in (*leaves, *modules.parameters()) if t.grad is not None]

    expected = step(plain)
    for _ in range(6):
        for number, (mine, its) in enumerate(zip(step(lambda x, b: pipe(x, 2, bias=b)), expected, strict=True)):
            assert torch.equal(mine, its), number
    assert pipe.threads_note == "threads"


def test_threads_are_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="worker threads are for stages on the CPU"):
        ModelPipeline(threads=True).append(nn.Linear(1, 1), "meta")


# -- accelerators -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("devices", [["cpu", 0], [0, "cpu"], [0, 0], [0, 1]])
def test_parity_across_devices(devices: list[Any]) -> None:
    if max((d for d in devices if d != "cpu"), default=0) >= torch.accelerator.device_count():
        pytest.skip("needs a second accelerator")
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in devices]
    plain = copy.deepcopy(modules)
    pipe = ModelPipeline()
    for module, device in zip(modules, devices, strict=True):
        pipe.append(module, device, 0.5)
    homes = [stage.device for stage in pipe.stages]
    for module, home in zip(plain, homes, strict=True):
        module.to(home)
    x = torch.randn(32, 64, requires_grad=True)
    y = x.detach().clone().requires_grad_()

    def loop(piece: Tensor) -> Tensor:
        for module, home in zip(plain, homes, strict=True):
            piece = module(piece.to(home))
        return piece

    pipe(x, 8).square().mean().backward()
    torch.cat([loop(piece) for piece in y.split(8)]).square().mean().backward()
    torch.accelerator.synchronize()
    assert torch.equal(x.grad, y.grad)
    for one, other in zip(modules, plain, strict=True):
        assert torch.equal(one[0].weight.grad, other[0].weight.grad)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.accelerator.is_available() or torch.accelerator.device_count() < 2, reason="needs two accelerators"
)
def test_stages_on_two_accelerators_overlap() -> None:
    def work(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x) * 1e-3
        return x

    pipe = ModelPipeline().append(Fn(work), 0).append(Fn(work), 1)
    x = torch.randn(4 * 4096, 4096, device=torch.device(torch.accelerator.current_accelerator().type, 0))
    pipe(x, 4096)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        pipe(x, 4096)
        for index in range(2):
            torch.accelerator.synchronize(index)
    spans: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for event in profile.events():
        if "gemm" in event.name.lower() and event.device_index in spans:
            spans[event.device_index].append((event.time_range.start, event.time_range.end))
    assert any(a < d and c < b for a, b in spans[0] for c, d in spans[1]), "no two kernels ran at the same time"
