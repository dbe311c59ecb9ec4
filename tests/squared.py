"""RMSNorm and LayerNorm of a squared weight, y = x_hat * weight^2 + bias, added from outside the package."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import triton
import triton.language as tl
from fusednorm.kernels import rowmath

from fusednorm import autograd, operands, reference
from fusednorm.forms import FormSpec

PLAIN = [op for op in operands.OPS.values() if op.aten]  # those that need no more operands
OPS = [op._replace(suffix="_squared", form=FormSpec("squared"), aten=None) for op in PLAIN]


@triton.jit
def times_square(x, weight, norm: tl.constexpr):
    return x * (weight * weight if norm.has_weight else 1.0)


@triton.jit
def times_twice_the_weight(total, weight, norm: tl.constexpr):
    """The derivative of weight^2."""
    return total * (2.0 * weight)


def formula(op, *arguments):
    """That of the norm, of which the weight is the square of this one's."""
    given = dict(zip([slot.name for slot in op.arguments], arguments, strict=True))
    weight = given["weight"]
    given |= {} if weight is None else {"weight": weight.square()}
    norm = operands.operands_of(op._replace(suffix="").name, (), given)
    first, second, *rest = operands.op_outputs(norm.op, reference.formula(norm))
    if op.direction == "backward" and second is not None:
        second = 2 * weight * second
    return first, second, *rest


@functools.cache
def register() -> None:
    rowmath.FORMS["squared"] = replace(
        rowmath.AFFINE, scale=times_square, upstream=times_square, finish_dw=times_twice_the_weight
    )
    for op in OPS:
        autograd.add(op, functools.partial(formula, op))


@contextlib.contextmanager
def squared():
    """Inside, torch.ops.fusednorm has the ops, such as rms_norm_fwd_squared."""
    register()
    operands.OPS.update({op.name: op for op in OPS})
    yield
    for op in OPS:
        del operands.OPS[op.name]
