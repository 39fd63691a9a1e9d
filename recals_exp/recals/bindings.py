"""Running an aten op from Python, below a dispatch mode, for less.

``OpOverload._op`` reads arguments by the operator's schema and puts them in boxes. The function of ``torch`` by the same name has a
generated parser, which is quicker, and calls the same dispatcher entry with the same arguments. Listed are overloads for
which that was seen to be so (``tests/recals/test_bindings.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_HOMES = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)

QUICK = frozenset(
    {"mm.default", "bmm.default", "addmm.default", "baddbmm.default", "convolution.default", "embedding.default"}
    | {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "rsub.Scalar", "neg.default", "pow.Tensor_Scalar"}
    | {"tanh.default", "sigmoid.default", "relu.default", "gelu.default", "silu.default", "exp.default", "log.default"}
    | {"sin.default", "cos.default", "sqrt.default", "rsqrt.default", "abs.default", "clone.default"}
    | {"native_layer_norm.default", "native_group_norm.default", "_softmax.default", "_log_softmax.default"}
    | {"max_pool2d_with_indices.default", "avg_pool2d.default", "_adaptive_avg_pool2d.default"}
    | {"sum.default", "sum.dim_IntList", "mean.default", "mean.dim"}
    | {"_scaled_dot_product_flash_attention_for_cpu.default", "masked_fill.Scalar"}
    | {"native_batch_norm.default", "native_dropout.default", "bernoulli_.float"}
    | {"add_.Tensor", "mul_.Tensor", "relu_.default"}
    # views
    | {"t.default", "transpose.int", "permute.default", "view.default", "expand.default"}
    | {"unsqueeze.default", "squeeze.dim", "select.int", "unbind.int", "split.Tensor", "split_with_sizes.default"}
)


def quickest(func: Any) -> Callable[..., Any]:
    """What runs the overload ``func``, arguments given by position."""
    namespace, _, base = func._schema.name.partition("::")
    if namespace == "aten" and f"{base}.{func._overloadname}" in QUICK:
        for home in _HOMES:
            binding: Callable[..., Any] | None = getattr(home, base, None)
            if binding is not None:
                return binding
    return func._op
