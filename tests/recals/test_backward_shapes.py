"""Every way to run backward (rule 11): twice, partly, never, in any order, from any thread, and through itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from parity.harness import Call, Case, check, weighted_sum
from recals.scenarios import Stories, grads, held, leaf, parameter_grads
from torch import Tensor, nn

from recals_exp.recals import recals_with_rngs

stories = Stories()


def mlp(width: int = 8, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])


def deep(x: Tensor) -> Tensor:
    return (x.sin().exp() * x.cos()).tanh().sin()


# -- again, partly, never ------------------------------------------------------------------------------------------------


@stories
def retained_and_run_three_times(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)
    loss = weighted_sum(call(model, x))
    assert loss is not None
    seen = []
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        seen.append([grad.clone() for grad in parameter_grads(model) if grad is not None])
    return seen, x.grad


@stories(raises=RuntimeError)
def run_again_without_retaining(call: Call) -> Any:
    x = leaf(4, 8)
    loss = call(deep, x).sum()
    loss.backward()
    loss.backward()


@stories
def one_of_several_outputs(call: Call) -> Any:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = deep(x)
        return y.exp().sin(), y.cos().tanh(), deep(y)

    x = leaf(8)
    first, second, third = call(fn, x)
    seen = grads(second, x, retain_graph=True)
    del third
    return seen, grads(first, x)


@stories
def outputs_one_after_the_other(call: Call) -> Any:
    def fn(x: Tensor) -> dict[str, Tensor]:
        y = deep(x)
        return {"a": deep(y), "b": y.exp().sin(), "c": (y * y).cos()}

    x = leaf(8)
    out = call(fn, x)
    return [grads(out[name], x, retain_graph=name != "a") for name in ("c", "b", "a")]


@stories
def gradients_of_the_middle(call: Call) -> Any:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = deep(x)
        return y, deep(y).exp()

    x = leaf(8)
    middle, out = call(fn, x)
    return grads(out, middle, retain_graph=True), grads(out, x, middle)


@stories
def retained_gradients_inside(call: Call) -> Any:
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.retain_grad()
        kept.append(y)
        return deep(y)

    x = leaf(8)
    call(fn, x).sum().backward()
    return x.grad, kept[0].grad


@stories
def forward_without_backward(call: Call) -> Any:
    model = mlp()
    for _ in range(3):
        unused = call(model, torch.randn(4, 8))
        del unused
    loss = call(model, torch.randn(4, 8)).sum()
    loss.backward()
    return held(model)


@stories
def selected_inputs_only(call: Call) -> Any:
    model, x = mlp(), leaf(4, 8)
    out = call(model, x)
    out.sum().backward(inputs=[x, model[2].weight])
    return x.grad, parameter_grads(model)


@stories
def vector_of_gradients(call: Call) -> Any:
    x = leaf(4, 3)
    out = call(deep, x)
    batch = torch.eye(12).reshape(12, 4, 3)
    batched = torch.autograd.grad(out, x, batch, is_grads_batched=True, retain_graph=True)
    return batched, torch.autograd.grad(out, x, torch.randn(4, 3))


@stories
def jacobian_and_hessian(call: Call) -> Any:
    x = torch.randn(4)
    jacobian = torch.autograd.functional.jacobian(lambda x: call(deep, x), x)
    hessian = torch.autograd.functional.hessian(lambda x: call(lambda x: deep(x).sum(), x), x)
    return jacobian, hessian


@stories
def jacobian_vectorised(call: Call) -> Any:
    return torch.autograd.functional.jacobian(lambda x: call(deep, x), torch.randn(4), vectorize=True)


@stories(raises=RuntimeError)
def error_in_a_hook_then_again(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()

        def fail(grad: Tensor) -> None:
            raise RuntimeError("the hook fails")

        y.register_hook(fail)
        return deep(y)

    x = leaf(8)
    call(fn, x).sum().backward()


@stories
def anomaly_mode(call: Call) -> Any:
    x = leaf(8)
    with torch.autograd.detect_anomaly(check_nan=True):
        out = call(deep, x)
        return grads(out, x)


# -- several live graphs -------------------------------------------------------------------------------------------------


@stories
def micro_batches_accumulated(call: Call) -> Any:
    model = mlp()
    losses = [weighted_sum(call(model, torch.randn(4, 8))) for _ in range(4)]
    sum(losses).backward()  # type: ignore[union-attr]
    return held(model)


@stories
def live_graphs_in_reverse_and_shuffled(call: Call) -> Any:
    model = mlp()
    seen = []
    for order in ((3, 2, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1)):
        losses = [weighted_sum(call(model, torch.randn(4, 8))) for _ in range(4)]
        for i in order:
            loss = losses[i]
            assert loss is not None
            loss.backward()
        losses.clear()
        seen.append([grad.clone() for grad in parameter_grads(model) if grad is not None])
    return seen


@stories
def one_forward_one_backward_pipeline(call: Call) -> Any:
    first, second = mlp(), mlp()
    waiting: list[Tensor] = []
    for step in range(5):
        waiting.append(call(second, call(first, torch.randn(4, 8))).sum())
        if step >= 2:
            waiting.pop(0).backward()
    while waiting:
        waiting.pop(0).backward()
    return held(first, second)


@stories
def some_graphs_never_run(call: Call) -> Any:
    model = mlp()
    losses = [call(model, torch.randn(4, 8)).sum() for _ in range(4)]
    losses[2].backward()
    del losses[0]
    losses[0].backward()
    return held(model)


@stories
def generator_against_discriminator(call: Call) -> Any:
    maker, judge = mlp(), mlp()
    makers = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    seen = []
    for _ in range(3):
        made = call(maker, torch.randn(4, 8))
        judges.zero_grad()
        loss = call(judge, made.detach()).mean() - call(judge, torch.randn(4, 8)).mean()
        loss.backward()
        judges.step()
        makers.zero_grad()
        call(judge, made).mean().backward()
        makers.step()
        seen.append(loss.detach())
    return seen, held(maker, judge)


@stories(raises=RuntimeError)
def discriminator_stepped_under_the_generators_graph(call: Call) -> Any:
    maker, judge = mlp(), mlp()
    judges = torch.optim.SGD(judge.parameters(), lr=0.01)
    verdict = call(judge, call(maker, torch.randn(4, 8)))
    verdict.sum().backward(retain_graph=True)
    judges.step()
    verdict.mean().backward()


@stories
def truncated_through_time(call: Call) -> Any:
    cell, state = nn.GRUCell(8, 8), torch.zeros(4, 8)
    seen = []
    for step in range(6):
        state = call(lambda x, state: cell(x, state).sin().exp().tanh(), torch.randn(4, 8), state)
        if step % 2:
            state.sum().backward()
            state = state.detach()
            seen.append(state)
    return seen, held(cell)


# -- through backward itself ---------------------------------------------------------------------------------------------


@stories
def gradient_penalty(call: Call) -> Any:
    judge, x = mlp(), leaf(4, 8)
    out = call(judge, x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
    return parameter_grads(judge), x.grad


@stories
def gradient_penalty_inside(call: Call) -> Any:
    judge, x = mlp(), leaf(4, 8)

    def penalty(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean() + judge(x).mean()

    call(penalty, x).backward()
    return parameter_grads(judge), x.grad


@stories
def third_derivative(call: Call) -> Any:
    x = leaf(8)
    value = call(deep, x)
    seen = []
    for _ in range(3):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        seen.append(value.detach())
    return seen


@stories
def learning_to_learn(call: Call) -> Any:
    weight, data = leaf(8, 8), torch.randn(4, 8)

    def loss(weight: Tensor) -> Tensor:
        return ((data @ weight).tanh().exp() * data).square().mean()

    fast = weight
    for _ in range(3):
        (step,) = torch.autograd.grad(call(loss, fast), fast, create_graph=True)
        fast = fast - 0.1 * step
    final = call(loss, fast)
    return final.detach(), torch.autograd.grad(final, weight)


@stories
def backward_inside_the_call(call: Call) -> Any:
    model = mlp()

    def step(x: Tensor) -> Tensor:
        y = model(x)
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        return loss + deep(y).sum()

    out = call(step, torch.randn(4, 8))
    out.backward()
    return out.detach(), held(model)


@stories(bites=False)
def whole_training_step_inside_the_call(call: Call) -> Any:
    """The optimizer writes weights that recorded ops have read: the most bytes are the copies of those (rule 4)."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [call(step, torch.randn(4, 8)) for _ in range(3)], held(model)


@stories
def called_again_by_a_hook_in_backward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()

        def again(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                z = torch.ones(8, requires_grad=True)
                (inner,) = torch.autograd.grad(call(deep, z).sum(), z)
            return grad * inner

        y.register_hook(again)
        return deep(y)

    x = leaf(8)
    return grads(call(fn, x), x)


# -- threads -------------------------------------------------------------------------------------------------------------


@stories
def backward_from_another_thread(call: Call) -> Any:
    model = mlp()
    losses = [call(model, torch.randn(4, 8)).sum() for _ in range(3)]
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    return held(model)


@stories
def forward_from_another_thread(call: Call) -> Any:
    x = leaf(4, 8)
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(call, deep, x).result()
    return grads(out, x)


@stories
def saved_tensors_read_by_the_program(call: Call) -> Any:
    x = leaf(8)
    out = call(lambda x: x.sin().exp().cos().tanh().exp(), x)
    node = out.grad_fn
    assert node is not None
    tanh = node.next_functions[0][0]
    assert tanh is not None
    cos = tanh.next_functions[0][0]
    seen = [tensor.detach().clone() for tensor in (tanh._saved_result, cos._saved_self, tanh._saved_result)]
    del node, tanh, cos
    return seen, grads(out, x, retain_graph=True), grads(out, x)


@stories.each()
def test_backward_shape(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


@pytest.mark.parametrize("limit_share", [1.0, 0.3])
def test_many_threads_share_one_object(limit_share: float) -> None:
    """Forward and backward of six models in six threads at once: every gradient as when run alone, the limit kept."""
    torch.manual_seed(0)
    models = [mlp(16) for _ in range(6)]
    inputs = [torch.randn(8, 16) for _ in models]

    def step(call: Any, i: int) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in models[i].parameters()]
        for _ in range(5):
            out = call(models[i], inputs[i])
            found = torch.autograd.grad(out.square().sum(), list(models[i].parameters()))
            total = [a + b for a, b in zip(total, found, strict=True)]
        return total

    alone = [step(lambda fn, x: fn(x), i) for i in range(6)]
    unlimited = recals_with_rngs(-1)
    kept = [unlimited(model, x) for model, x in zip(models, inputs, strict=True)]
    total = unlimited.stats.cached_bytes
    del kept
    recals = recals_with_rngs(int(total * limit_share))
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda i: step(recals, i), range(6), timeout=60))
    for expected, found in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert recals.stats.cached_bytes == 0
    assert recals.stats.peak_cached_bytes <= int(total * limit_share)


def test_two_threads_run_backward_of_one_graph_at_once() -> None:
    x = leaf(64, 64)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = deep(x)
        return deep(y.exp().sin()), deep(y.cos())

    expected = [torch.autograd.grad(out.sum(), x)[0] for out in (fn(x)[0], fn(x)[1])]
    recals = recals_with_rngs(64 * 64 * 4 * 2)
    for _ in range(30):
        outs = recals(fn, x)
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(lambda out: torch.autograd.grad(out.sum(), x, retain_graph=True)[0], out) for out in outs
            ]
            found = [job.result(timeout=60) for job in jobs]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        del outs, jobs
    assert recals.stats.cached_bytes == 0
    assert recals.stats.recomputed_values > 0
