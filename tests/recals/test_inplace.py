"""In-place ops inside forward: on values, on views, before and after they are saved, by whatever door.

What plain PyTorch refuses is refused, what it allows gives its numbers (rules 2, 3 and 9).
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from parity.harness import Call, Case, check
from recals.scenarios import Stories, grads, leaf, told
from torch import Tensor, nn

stories = Stories()


# -- inside forward: values ----------------------------------------------------------------------------------------------


@stories
def chain_of_in_place_ops(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(2).add_(1).relu_()
        return (y.cos().exp() * y).tanh()

    return told(call, fn, leaf(64, 64))


@stories(raises=RuntimeError)
def write_after_relu_saved_its_result(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().relu_()
        y.mul_(2)
        return y.exp()

    return told(call, fn, leaf(64))


@stories(raises=RuntimeError, bites=False)
def write_after_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        z = y * y
        y.add_(1)
        return z

    return told(call, fn, leaf(64))


@stories
def write_a_view_before_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y[0].mul_(3)
        y[:, 1].zero_()
        return y.exp() * y

    return told(call, fn, leaf(8, 8))


@stories(raises=RuntimeError, bites=False)
def write_a_view_after_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y * y
        y[0].mul_(3)
        return z + y

    return told(call, fn, leaf(8, 8))


@stories(raises=RuntimeError)
def write_the_base_after_a_view_was_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y[0].exp() * y[1]
        y.mul_(2)
        return z + y[2]

    return told(call, fn, leaf(8, 8))


@stories(raises=RuntimeError)
def write_through_detach_after_saved(call: Call) -> Any:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.exp() * y, y

    x = leaf(64)
    z, y = call(fn, x)
    y.detach().mul_(2)
    return grads(z, x)


@stories
def write_between_two_reads_that_save_nothing(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        z = y + x
        y.mul_(2)
        return z * y.exp()

    return told(call, fn, leaf(64))


@stories
def older_version_is_needed_to_rebuild(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        doubled = y + y  # reads version 0
        y.copy_(doubled.sin())  # version 1
        return y.exp() * doubled.cos()

    return told(call, fn, leaf(8, 8))


@stories
def written_by_the_op_that_saves_it(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        return F.rrelu(x.sin(), training=True).exp() * F.rrelu_(x.cos(), training=True).exp()

    return told(call, fn, leaf(64))


@stories
def noise_that_is_not_written_in_evaluation(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        noise = x.detach().cos()
        y = torch.ops.aten.rrelu_with_noise(x.sin(), noise, 0.1, 0.3, False)
        return (y * noise).exp().tanh()

    return told(call, fn, leaf(4, 4))


@stories
def slices_of_zeros(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        both = torch.zeros(8, 16)
        both[:, :8] = x.sin()
        both[:, 8:] = x.cos()
        return (both * both).exp()

    return told(call, fn, leaf(8, 8))


@stories
def slices_of_empty(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        both = torch.empty(8, 16)
        both[:, :8] = x.sin()
        both[:, 8:] = x.cos()
        return (both * both).exp().sin()

    return told(call, fn, leaf(8, 8))


@stories
def every_way_to_set_items(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y[y > 0] = 0.5
        y[torch.tensor([1, 2])] *= 2
        y.index_put_((torch.tensor([0, 0]),), torch.ones(8), accumulate=True)
        y.masked_fill_(y > 1, 0.1)
        y.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 1.0)
        y.index_add_(0, torch.tensor([3]), x[:1])
        return (y * y).exp()

    return told(call, fn, leaf(8, 8))


@stories
def copies_from_its_own_views(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        y[1:].copy_(y[:-1].clone())
        y[0:4] += y[4:8]
        y.t().mul_(y.clone())
        z = x.cos()
        z.copy_(z.t().contiguous())
        z.fill_diagonal_(0.3)
        return (y * y.t()).exp() * z.exp()

    return told(call, fn, leaf(8, 8))


@stories
def zeroed_and_filled_again(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.zero_()
        y.add_(x)
        y.clamp_(-1, 1)
        return (y * y.t()).exp()

    return told(call, fn, leaf(8, 8))


@stories
def overlapping_windows(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        windows = x.sin().as_strided((5, 4), (3, 1), 0)
        return (windows * windows).exp() + windows.cos()

    return told(call, fn, leaf(16))


@stories
def overlapping_windows_overwritten(call: Call) -> Any:
    """As many elements as the memory has, but not all of it."""

    def fn(x: Tensor) -> Tensor:
        y, z = x.sin(), x.cos()
        with torch.no_grad():
            y.as_strided((4, 4), (1, 1)).zero_()
            z.as_strided((4, 4), (1, 1)).copy_(torch.ones(4, 4))
        return (y * x).exp().tanh() * y + (z * x).exp().tanh() * z

    return told(call, fn, leaf(16))


@stories
def write_through_as_strided(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.as_strided((4,), (3,), 1).mul_(2)
        return (y * y).exp()

    return told(call, fn, leaf(16))


@stories
def write_under_no_grad_then_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = (x.sin() > 0).float()
            mask.mul_(3).exp_()
        return (x * mask).sin() * mask

    return told(call, fn, leaf(16))


@stories(raises=RuntimeError)
def foreach_results_written_after_saved(call: Call) -> Any:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        results = torch._foreach_exp([x.sin(), y.cos()])
        torch._foreach_add_(results, 1.0)
        return (results[0] * results[0]).sum() + (results[1] * results[1]).sum()

    return told(call, fn, leaf(8), leaf(9))


@stories
def foreach_writes_before_saved(call: Call) -> Any:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        parts = [x.sin(), y.cos()]
        torch._foreach_add_(parts, 1.0)
        torch._foreach_mul_(parts, [part.detach().clone() for part in parts])
        torch._foreach_add_(parts, 2.0)
        return (parts[0] * parts[0]).sum() + parts[1].exp().sum()

    return told(call, fn, leaf(8), leaf(9))


@stories
def out_variants(call: Call) -> Any:
    x = torch.randn(8, 8)

    def fn(w: Tensor) -> Tensor:
        y, z = torch.empty(8, 8), torch.empty(0)
        with torch.no_grad():
            torch.mul(x, 3, out=y)
            torch.sin(y, out=y)
            torch.exp(y, out=z)
            torch.add(z, 1, out=z)
        return (w * y).sin() * z

    return told(call, fn, leaf(8, 8))


@stories
def out_that_is_resized_with_a_warning(call: Call) -> Any:
    x = torch.randn(8, 8)

    def fn(w: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.zeros(2).sin()
            torch.mul(x, 3, out=y)
        return (w * y).sin() * y

    return told(call, fn, leaf(8, 8))


@stories
def out_that_shrinks(call: Call) -> Any:
    """The memory stays as large, and is not overwritten to its end."""
    a, b = torch.randn(4), torch.randn(4)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = x.sin()
            rest = y[4:]
            torch.mul(a, b, out=y)
        return (rest * x[4:]).exp().tanh() * rest + (y * x[:4]).exp()

    return told(call, fn, leaf(8))


@stories
def out_into_a_slice(call: Call) -> Any:
    x = torch.randn(8, 8)

    def fn(w: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.cos()
            torch.mul(x[2:4], 3, out=y[0:2])
        return (w * y).sin() * y

    return told(call, fn, leaf(8, 8))


# -- inside forward: storages that change under a tensor -----------------------------------------------------------------


@stories
def complex_lazy_views(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        conjugate = y.conj()
        parts = torch.view_as_real(y.conj().resolve_conj())
        product = (conjugate * y).real.sum() + (conjugate.imag * conjugate.imag.exp()).sum()
        return product + (parts * parts).sum() + (conjugate * conjugate * y).abs().sum() + (conjugate @ y).abs()

    return told(call, fn, leaf(8, dtype=torch.complex64))


@stories
def write_through_a_conjugate(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.conj().mul_(2j)
        y.imag.add_(1)
        return (y * y).abs()

    return told(call, fn, leaf(8, dtype=torch.complex64))


@stories(raises=RuntimeError)
def write_through_a_conjugate_after_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.conj() * y
        y.imag.add_(1)
        return z.abs() + y.abs()

    return told(call, fn, leaf(8, dtype=torch.complex64))


@stories
def bits_of_a_float(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        odd = (y.detach().view(torch.int32) & 1).float()
        return (y * odd).exp() * odd

    return told(call, fn, leaf(16))


@stories
def storage_swapped_by_set(call: Call) -> Any:
    w = leaf(16)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            y, z = (w * 2).sin(), (w * 3).cos()
            y.set_(z)
        return (x.sin() * y).exp() * z

    return told(call, fn, w)


@stories
def data_swapped_in_forward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().detach().clone()
        y.data = (x * 5).detach().cos()
        return (x.sin() * y).exp()

    return told(call, fn, leaf(16))


@stories
def data_edited_in_forward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp() * y
        y.data.mul_(2)  # not seen by plain PyTorch's guard: backward reads the new content
        return z

    return told(call, fn, leaf(16))


@stories
def resized_in_forward(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = (x.detach() * 2).sin()
            y.resize_(32)
            y[16:] = 3.0
        return (torch.cat([x, x]).sin() * y).exp()

    return told(call, fn, leaf(16))


@stories
def storage_freed_and_filled_again(call: Call) -> Any:
    flat = torch.arange(16.0)

    def fn(x: Tensor) -> Tensor:
        y = torch.empty(16)
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(64)
        with torch.no_grad():
            y.copy_(flat)
        return ((x * y).sin() * y).cos()

    return told(call, fn, leaf(16))


@stories
def ops_that_return_their_input(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        same = [y.contiguous(), y.to(torch.float32), F.dropout(y, 0.0), nn.Identity()(y), y.reshape(16).reshape(4, 4)]
        z = torch.relu(same[0]) * same[1] * same[2] + same[3]
        return z.exp() * same[4]

    return told(call, fn, leaf(4, 4))


@stories
def input_returned_as_it_is(call: Call) -> Any:
    x = leaf(16)
    same, out = call(lambda x: (x, x.sin().cos().exp().cos()), x)
    return same is x, grads(out, x)


# -- unusual ways to write -----------------------------------------------------------------------------------------------


@stories
def op_that_fails_half_way(call: Call) -> Any:
    """It raises at the third index; the first two are written, and the program goes on."""
    buffer = torch.zeros(16)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() + buffer
        with torch.no_grad():
            for target in (y, buffer):
                with contextlib.suppress(IndexError):
                    target[torch.tensor([0, 1, 99])] = 5.0
            with contextlib.suppress(RuntimeError):
                y.scatter_(0, torch.tensor([3, 4, 99]), 2.0)
        return (y * y.exp()).cos().sin() * buffer

    return told(call, fn, leaf(16)), buffer


@stories
def geometry_changed_in_place(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.t_()
        y.unsqueeze_(0)
        y.squeeze_(0)
        z = y.exp() * y
        w = x.cos()
        w.transpose_(0, 1)
        v = (w * w).sin().detach_().exp()
        made = v.clone().requires_grad_()
        return z.cos() * w * v * (made * made).detach()

    return told(call, fn, leaf(4, 6))


@stories(raises=RuntimeError)
def geometry_changed_in_place_after_saved(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y * y).sin()
        y.t_()
        return z.t() * y

    return told(call, fn, leaf(4, 6))


@stories(raises=RuntimeError, bites=False)
def one_of_many_views_written(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.chunk(2)[0].mul_(2)
        return (y * y).exp()

    return told(call, fn, leaf(4, 8))


@stories
def views_of_views_written(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        base = torch.zeros(4, 8)
        base.expand(4, 8)[1:3].copy_(x[:2].sin())
        base[0] = 2
        base.select(0, 3).fill_(1.5)
        rows = base.unbind(0)
        part = base.narrow(0, 0, 2).clone()
        part[0].mul_(3)
        return (base * base).exp() * rows[1].cos() + part.repeat(2, 1).sin()

    return told(call, fn, leaf(4, 8))


@stories
def out_into_its_own_inputs(call: Call) -> Any:
    numbers = torch.randn(8)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = numbers.sin()
            torch.add(y, y, out=y)
            torch.mul(y, y.clone(), out=y)
            values, order = torch.empty(2, 4), torch.empty(2, 4, dtype=torch.long)
            torch.sort(numbers.reshape(2, 4).sin(), out=(values, order))
            torch.max(numbers.reshape(2, 4).sin(), 1, out=(values[:, 0], order[:, 0]))
        return (x * y).exp() * values.flatten().sin() * order.flatten()

    return told(call, fn, leaf(8))


@stories
def memory_moved_to_be_shared(call: Call) -> Any:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        with torch.no_grad():
            z = y.exp()
            z.share_memory_()
        return (y * z).cos().sin() * z

    return told(call, fn, leaf(16))


@stories.each()
def test_in_place(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)
