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
    inputs may differ in all dims but the last. weights and biases are `[D]` or None. cos and sin have rotary_dim
    columns or, if those of a pair are equal, half as many. Their other dims broadcast against those of every input.
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
from functools import partial
from types import ModuleType

import torch
from torch.autograd import Function

from .. import sharding
from ..host import native, prepared, torch_compat
from ..host.kernel_devices import runs_kernels
from ..host.program import Program
from ..host.torch_compat import is_intercepted, is_traced, needs_formula
from ..namespace import TORCH_OPS
from ..operands import Operands, Outputs, as_op, backward_of, call_op
from ..ops import define_of_list, schema_of
from ..settings import invariance
from .call import outputs_of
from .operands import FORWARD, OPS
from .problem import check
from .reference import formula


@functools.cache
def _launch() -> ModuleType:
    from . import launch  # imports Triton, which a process without CUDA tensors need not have

    return launch


def fake(operands: Operands) -> Outputs:
    check(operands)
    return tuple(each and operands.x.new_empty(each[0], dtype=each[1]) for each in outputs_of(operands))


def launched(operands: Operands) -> tuple[Outputs, Program | None]:
    """(the outputs of an op on CPU and CUDA, the program that has made them if it is kept)"""
    return prepared.run(operands, _first) if runs_kernels(operands.x) else _first(operands)


def _first(operands: Operands, miss: prepared.Miss | None = None) -> tuple[Outputs, Program | None]:
    """`launched`, if there is no program yet."""
    check(operands)
    if runs_kernels(operands.x):
        outputs, program = _launch().run(operands, miss)
        if outputs is not None:
            return outputs, program
    with torch.no_grad():
        return formula(operands), None


def _below(operands: Operands) -> Outputs:
    return launched(operands)[0]


def above(operands: Operands) -> Outputs:
    """An op at autograd's dispatch key."""
    recorded = _is_recorded(operands)
    if needs_formula() or (recorded and operands.op != FORWARD):
        return formula(operands)
    sharding.register_where_needed()
    op, kernel = getattr(TORCH_OPS, operands.op), as_op(operands.op, _below)
    outputs = call_op(partial(torch_compat.below_autograd, op, kernel), operands)
    return _record(operands, outputs) if recorded else outputs


def _is_recorded(operands: Operands) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands.tensors)


class HeadNormFunction(Function):
    """apply(operands, outputs, *operands.tensors) returns the outputs, which a forward has made."""

    @staticmethod
    def forward(ctx, operands, outputs, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.kept = {"eps": operands.eps, **operands.form._asdict()}
        ctx.names, ctx.invariance = operands.tensor_names, invariance.of_forward()
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        tensors, wanted = dict(zip(ctx.names, ctx.saved_tensors, strict=True)), ctx.needs_input_grad[2:-2]
        given = {"grad_out": grads[0], "grad_k": grads[1], "output_mask": list(wanted)}
        operands = backward_of(FORWARD, **tensors, **given, **ctx.kept)
        return None, None, *invariance.call_as(ctx.invariance, call, operands), None, None


def _record(operands: Operands, outputs: Outputs) -> Outputs:
    return torch_compat.record(HeadNormFunction)(operands, outputs, *operands.tensors)


def call(operands: Operands) -> Outputs:
    """The outputs of an op. Without C++, a call that has run before skips the dispatcher if nobody intercepts it
    there."""
    if not (native.extension or is_traced() or is_intercepted() or torch_compat.is_profiled()):
        recorded = _is_recorded(operands)
        if runs_kernels(operands.x) and (operands.op == FORWARD or not recorded):
            outputs, _ = prepared.run(operands)
            if outputs is not None:
                return _record(operands, outputs) if recorded else outputs
    return call_op(getattr(TORCH_OPS, operands.op), operands)


for _name, _op in OPS.items():
    define_of_list(schema_of(_op), *[as_op(_name, each) for each in (fake, _below, above, formula)])
    if native.extension:
        differentiable = {"differentiable_backward": lambda operands, eps: formula(operands)}
        native.add(_op, launched, above=above, **differentiable)
