"""The in-place guard (rule 9): what plain PyTorch refuses is refused, what it allows gives its numbers.

Only where a dropped value's source is really gone may ``SourceChangedError`` stand in; never a silent difference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity.harness import Call, Case, check, plain
from recals.scenarios import Stories, grads, leaf, parameter_grads, told
from torch import Tensor, nn

from recals_exp.recals import recals_with_rngs

stories = Stories()


# -- leaves written in forward (rule 4) ----------------------------------------------------------------------------------


@stories
def buffer_written_between_reads(call: Call) -> Any:
    buffer = torch.ones(64)

    def fn(x: Tensor) -> Tensor:
        y = x + buffer
        buffer.mul_(2)
        z = (y * y).sin() + buffer
        buffer.add_(1)
        return (z * z).exp()

    return told(call, fn, leaf(64)), buffer


@stories(raises=RuntimeError)
def buffer_written_after_saved(call: Call) -> Any:
    buffer = torch.ones(64)

    def fn(x: Tensor) -> Tensor:
        y = x * buffer
        buffer.mul_(2)
        return (y * y).sin()

    return told(call, fn, leaf(64)), buffer


@stories
def buffer_overwritten_whole(call: Call) -> Any:
    buffer = torch.ones(64)

    def fn(x: Tensor) -> Tensor:
        y = (x + buffer).sin()
        buffer.copy_(y.detach())
        z = y.exp() + buffer
        buffer.zero_()
        return z.sin() * y

    return told(call, fn, leaf(64)), buffer


@stories
def weight_normalised_in_forward(call: Call) -> Any:
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            layer.weight.div_(layer.weight.norm())
        return layer(x.sin()).tanh().exp()

    x = leaf(4, 8)
    out = call(fn, x)
    out.sum().backward()
    return out, x.grad, parameter_grads(layer), layer.weight


@stories
def queue_of_past_features(call: Call) -> Any:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("past", torch.zeros(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).tanh()
            scores = (y @ self.past.clone().t()).softmax(-1)
            with torch.no_grad():
                self.past[:-1] = self.past[1:].clone()
                self.past[-1] = y.detach().mean(0)
            return scores.exp() @ self.past.clone() + y

    model = Memory()
    outs = [call(model, torch.randn(4, 8)) for _ in range(3)]
    sum(out.sum() for out in outs).backward()
    return outs, parameter_grads(model), model.past


# -- between forward and backward ----------------------------------------------------------------------------------------


@stories
def output_edited_where_allowed(call: Call) -> Any:
    x = leaf(64)
    out = call(lambda x: (x * 2).sin().cos() + 1, x)
    out.mul_(2)
    return out, grads(out, x)


@stories(raises=RuntimeError)
def output_edited_where_saved(call: Call) -> Any:
    x = leaf(64)
    out = call(lambda x: (x * 2).sin().exp(), x)
    total = out.sum()
    with torch.no_grad():
        out.mul_(2)
    return grads(total, x)


@stories
def output_edited_behind_the_guard(call: Call) -> Any:
    x = leaf(64)
    out = call(lambda x: (x * 2).sin().exp(), x)
    out.data.mul_(2)  # exp's backward reads its result: plain PyTorch uses the new numbers
    return grads(out, x)


@stories(raises=RuntimeError)
def input_edited_where_saved(call: Call) -> Any:
    x, w = torch.randn(64), leaf(64)
    out = call(lambda x: (x * w).sin().exp(), x)
    x.mul_(2)
    return grads(out, w)


@stories(may_lose_source=True)
def input_edited_where_not_saved(call: Call) -> Any:
    x, w = torch.randn(64), leaf(64)

    def fn(x: Tensor) -> Tensor:
        return (x + w).sin().exp()

    before = grads(call(fn, x), w)
    out = call(fn, x)
    x.mul_(2)
    return before, grads(out, w)


@stories
def input_released_and_its_memory_reused(call: Call) -> Any:
    w = leaf(256)
    x = torch.randn(256)
    out = call(lambda x: (x + w).sin().exp(), x)
    del x
    noise = [torch.full((256,), 7.0) for _ in range(8)]
    return grads(out, w), noise


@stories(raises=RuntimeError)
def weights_stepped_between_two_backwards(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = call(model, torch.randn(4, 8))
    out.sum().backward(retain_graph=True)
    optimizer.step()
    out.sum().backward()
    return parameter_grads(model)


@stories
def weights_stepped_after_backward(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(model, torch.randn(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.parameters())


@stories(may_lose_source=True)
def bias_stepped_where_not_saved(call: Call) -> Any:
    layer = nn.Linear(8, 8)
    for step in range(2):
        out = call(lambda x: layer(x).tanh().exp(), torch.randn(4, 8))
        if step == 1:
            with torch.no_grad():
                layer.bias.add_(1)
        out.sum().backward()
    return parameter_grads(layer)


@stories
def weight_data_swapped(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = leaf(4, 8)
    out = call(model, x)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    out.sum().backward()
    return parameter_grads(model), x.grad


@stories(raises=RuntimeError)
def weight_loaded_from_a_checkpoint(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    past = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = call(model, leaf(4, 8))
    model.load_state_dict(past)  # the same numbers, written in place: plain refuses all the same
    out.sum().backward()
    return parameter_grads(model)


@stories(raises=RuntimeError)
def activation_edited_by_a_hook_in_backward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp()
        u = z * y

        def edit(grad: Tensor) -> None:
            with torch.no_grad():
                y.add_(1)

        u.register_hook(edit)
        return u

    return told(call, fn, leaf(16))


@stories
def unsaved_value_edited_by_a_hook_in_backward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        u = y.sin().exp()
        other = y + 5

        def edit(grad: Tensor) -> None:
            with torch.no_grad():
                other.add_(1)

        u.register_hook(edit)
        return u.sum() + (other * 2).sum()

    return told(call, fn, leaf(16))


@stories(raises=RuntimeError)
def activation_edited_between_two_backwards(call: Call) -> Any:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, (y * y).exp()

    x = leaf(16)
    y, out = call(fn, x)
    first = grads(out, x, retain_graph=True)
    with torch.no_grad():
        y.add_(1)
    return first, grads(out, x)


@stories
def activation_edited_where_only_recompute_needs_it(call: Call) -> Any:
    """Plain saves nothing of ``y``; a replay of ``y + 1`` would read it. It is not the program's to read any more."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 2
        return y, (y + 1).sin().exp()

    x = leaf(16)
    y, out = call(fn, x)
    with torch.no_grad():
        y.zero_()
    return grads(out, x)


@stories
def running_output_accumulated(call: Call) -> Any:
    x = leaf(16)
    total = torch.zeros(16)
    for _ in range(3):
        total += call(lambda x: x.sin().exp().cos(), x)
    return total, grads(total, x)


@stories
def gradient_edited_in_place_by_hook(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad.mul_(2))
        return y.exp() * y

    return told(call, fn, leaf(16))


@stories
def copy_of_a_saved_value_edited(call: Call) -> Any:
    x = leaf(16)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().exp()
        return (y * y).sin(), y.detach().clone()

    out, copy = call(fn, x)
    copy.zero_()
    return grads(out, x)


@stories
def buffer_data_swapped(call: Call) -> Any:
    buffer, x = torch.randn(6, 6), leaf(6, 6)
    out = call(lambda x: (x.sin() * buffer).exp().sin().exp(), x)
    buffer.data = buffer.data * 3  # plain PyTorch reads the new one
    return grads(out, x)


@stories
def sharpness_aware_steps(call: Call) -> Any:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    for _ in range(2):
        call(model, x).square().sum().backward()
        with torch.no_grad():
            step = [p.grad * 0.05 for p in model.parameters()]  # type: ignore[operator]
            torch._foreach_add_(list(model.parameters()), step)
        model.zero_grad()
        call(model, x).square().sum().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), step)
            for p in model.parameters():
                p.sub_(0.1 * p.grad)  # type: ignore[operator]
        model.zero_grad()
    return list(model.parameters())


@stories
def gradient_read_in_forward_then_accumulated(call: Call) -> Any:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    layer(x).sum().backward()

    def fn(x: Tensor) -> Tensor:
        return (layer(x).tanh() * layer.weight.grad.sum(0).exp()).sin().exp()  # type: ignore[union-attr]

    call(fn, x).sum().backward()
    return parameter_grads(layer)


@stories.each()
def test_guard(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


# -- what no version counter tells ---------------------------------------------------------------------------------------

hidden = Stories()


@hidden(may_lose_source=True)
def weights_edited_through_data(call: Call) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = leaf(4, 8)
    out = call(model, x)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    out.sum().backward()
    return parameter_grads(model), x.grad


@hidden(may_lose_source=True)
def output_edited_through_data(call: Call) -> Any:
    x = leaf(16)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().exp()
        return y, (y.sin() * 2).cos().tanh()

    y, out = call(fn, x)
    y.data.mul_(2)
    return grads(out, x)


@hidden(may_lose_source=True)
def activation_data_swapped_after_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y * y).exp().sin()
        y.data = y.data * 3
        return z + (y * y).cos()

    return told(call, fn, leaf(6, 6))


@hidden(may_lose_source=True)
def statistics_moved_outside_of_any_call(call: Call) -> Any:
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()
    out = call(lambda x: norm(layer(x).sin()).exp().tanh(), torch.randn(6, 4))
    norm.train()(torch.randn(6, 4) * 3)
    norm.eval()
    return grads(out, *layer.parameters())


@pytest.mark.xfail(
    reason="`.data` and batch norms move no version counter that others can see: a dropped value is rebuilt from what is there "
    "now, without notice. Plain PyTorch gives mixed gradients without notice, too; these are other ones"
)
@pytest.mark.parametrize("case", hidden, ids=str)
def test_edits_behind_the_guard(case: Case) -> None:
    check(case, "fifo", "smallest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_was_modified_is_named_as_plainly(dtype: torch.dtype) -> None:
    """For a value that was dropped, too."""

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        edited.append(y)
        return y.sin().exp().cos().sin()

    edited: list[Tensor] = []
    named = []
    recals = recals_with_rngs(3 * dtype.itemsize, policy="fifo", audit="off")
    for call in (plain, recals):
        out = call(fn, torch.ones(3, dtype=dtype, requires_grad=True))
        edited.pop().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            out.sum().backward(torch.ones((), dtype=dtype))
        named.append(str(raised.value).partition("inplace operation: [")[2].partition("]")[0])
    assert named[0] == named[1] != ""
    assert recals.stats.dropped_values > 0
