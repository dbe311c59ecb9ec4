"""torch.ops.fusednorm.head_norm_fwd and its backwards: LayerNorm or RMSNorm of the rows of two tensors at once, q and
k, with the rotation (RoPE) before or behind the norm.

head_norm_fwd
    for each tensor x of the two inputs, `[..., D]`, its rows normalized, times weight_offset + weight, plus bias; the
    first rotary_dim columns are rotated by cos and sin, before the norm unless norm_first
head_norm_bwd
    the gradients that output_mask wants of both inputs, then of the weights, then of the biases. An absent parameter
    has none. An absent one of grads is zero. Statistics are computed again from the inputs
head_norm_bwd_packed
    the same for q and k that lie in one tensor with v: the gradient of that tensor, which takes grads[2] as v's part,
    then those of the parameters

Shapes
    inputs may differ in all dims but the last. weights and biases are `[D]` or None. Those of inputs `[..., H, D]`, but
    not of a packed tensor, may be `[H * D]` or `[H, D]`: the H rows are then normalized as one. cos and sin have
    rotary_dim columns or, if those of a pair are equal, half as many. Their other dims broadcast against those of every
    input.
Dtypes
    Each tensor has its own: float16, bfloat16, float32 or float64. An output has the dtype of its input, or with
    rounds_x_hat the promoted dtype of input, weight and bias; gradients have those of their tensors. The arithmetic is
    float32, or float64 for a float64 input; outputs are rounded once.
Strides
    Any. Outputs and gradients are contiguous.
Derivatives
    Of any order. cos and sin must not require grad.
Errors
    RuntimeError if an operand has another shape, dtype or device than stated here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .. import autograd, sharding
from ..operands import Operands, as_op
from .operands import OPS
from .problem import check
from .reference import formula
from .sharding import placements

if TYPE_CHECKING:
    from ..host.prepared import Miss
    from ..ops import Launched


def launch(operands: Operands, miss: Miss | None) -> Launched:
    from .launch import run  # imports Triton, which a process without CUDA tensors need not have

    return run(operands, miss)


for _name, _op in OPS.items():
    autograd.add(_op, as_op(_name, formula), check, launch)
    sharding.RULES[_name] = functools.partial(placements, _name)
