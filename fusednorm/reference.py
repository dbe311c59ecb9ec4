"""Every op through ATen: for CPU tensors, for tensors without elements, and where no kernel of ours runs.

The formulas are plain tensor code. autograd.py runs them instead of the ops if torch.func, forward-mode AD or a second
derivative must differentiate the inside of an op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .forms import PLAIN
from .operands import Operands, Outputs, call_op
from .planner.norm_problem import accumulation_dtype
from .problem import BackwardCall, ForwardCall, resolve_eps, stats_shape, validate


@torch.no_grad()
def forward(call: ForwardCall) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd) of a checked call. mean is None for RMSNorm."""
    x, dtype = call.x.tensor, call.problem.acc_dtype
    if call.problem.norm == "rms":
        y, rstd = rms_norm_formula(x, call.normalized_shape, call.weight, call.eps)
        return y, None, rstd
    # Upcast: ATen returns 16-bit statistics for 16-bit operands, and takes few mixtures of dtypes.
    x, weight, bias = _cast(x, dtype), _cast(call.weight, dtype), _cast(call.bias, dtype)
    y, mean, rstd = torch.native_layer_norm(x, call.normalized_shape, weight, bias, call.eps)
    return _cast(y, call.problem.x_dtype), mean, rstd


@torch.no_grad()
def backward(call: BackwardCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of a checked call. A gradient that the call does not want is None."""
    problem, shape = call.problem, call.normalized_shape
    grad_out, x, mask = call.grad_out.tensor, call.x.tensor, (problem.wants_dx, problem.wants_dw, problem.wants_db)
    if problem.norm == "rms":  # ATen has no such kernel for CPU tensors
        operands = (grad_out, x, shape, None, call.rstd, call.weight, None)
        return backward_formula(*operands, mask, call.residual_grad, call.dx_dtype)
    operands = (grad_out, x, call.mean, call.rstd, call.weight)
    # Upcast: for 16-bit x, ATen accumulates dweight and dbias in 16 bits. ATen reads mean and rstd as if they were
    # contiguous.
    grad_out, x, mean, rstd, weight = (t if t is None else t.to(problem.acc_dtype).contiguous() for t in operands)
    bias = x.new_empty(shape) if problem.wants_db else None  # ATen reads only bias's shape and dtype
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(grad_out, x, shape, mean, rstd, weight, bias, mask)
    if call.residual_grad is not None:
        dx = dx + _cast(call.residual_grad, problem.acc_dtype)
    return _cast(dx, call.dx_dtype), _cast(dw, problem.weight_dtype), _cast(db, problem.bias_dtype)


@torch.no_grad()
def run(operands: Operands, call: ForwardCall | BackwardCall | None = None) -> Outputs:
    """The outputs: by ATen's kernels if these compute the op and it was checked (`call`), else by its formula."""
    if call is None or call.problem.form != PLAIN or call.added:
        return formula(operands)
    return forward(call) if isinstance(call, ForwardCall) else backward(call)


def formula(operands: Operands) -> Outputs:
    """The outputs, as plain tensor code. Checks the operands."""
    validate(operands)
    own = FORMULAS.get(operands.op)
    return call_op(own, operands) if own else backward_formula(*operands[1:11])


def layer_norm_formula(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of layer_norm_fwd, in its dtypes and shapes."""
    dtype, dims = accumulation_dtype(x.dtype), _normalized_dims(normalized_shape)
    upcast = x.to(dtype)
    mean = upcast.mean(dims, keepdim=True)
    mean = mean + (upcast - mean).mean(dims, keepdim=True)  # takes away its rounding error: large equal x give y = 0
    centered = upcast - mean
    rstd = torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    return _affine(centered * rstd, weight, bias).to(x.dtype).contiguous(), mean, rstd


def rms_norm_formula(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """(y, rstd) of rms_norm_fwd, in its dtypes and shapes."""
    dtype, dims = accumulation_dtype(x.dtype), _normalized_dims(normalized_shape)
    upcast = x.to(dtype)
    rstd = torch.rsqrt(upcast.square().mean(dims, keepdim=True) + resolve_eps(eps, x.dtype))
    return _affine(upcast * rstd, weight).to(x.dtype).contiguous(), rstd


def _affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x_hat * weight + bias, in x_hat's dtype."""
    if weight is not None:
        x_hat = x_hat * weight.to(x_hat.dtype)
    return x_hat if bias is None else x_hat + bias.to(x_hat.dtype)


def backward_formula(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
    residual_grad: Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of layer_norm_bwd, or of rms_norm_bwd if mean is None, in the op's dtypes and shapes.

    residual_grad and dx_dtype make it the formula of the *_bwd_residual ops. All tensors are independent arguments: a
    derivative of this formula with respect to x treats mean and rstd as constants, and the formula's derivatives with
    respect to mean and rstd carry the rest.
    """
    dtype, dims = accumulation_dtype(x.dtype), _normalized_dims(normalized_shape)
    statistics_shape = stats_shape(x.shape[: x.dim() - len(normalized_shape)], normalized_shape)
    rstd = rstd.reshape(statistics_shape).to(dtype)
    centered = x.to(dtype) if mean is None else x.to(dtype) - mean.reshape(statistics_shape).to(dtype)
    x_hat, dy = centered * rstd, grad_out.to(dtype)
    dx = dw = db = None
    if output_mask[0]:
        wdy = _affine(dy, weight)
        inner = wdy - x_hat * (wdy * x_hat).mean(dims, keepdim=True)
        if mean is not None:
            inner = inner - wdy.mean(dims, keepdim=True)
        dx = inner * rstd
        if residual_grad is not None:
            dx = dx + residual_grad.to(dtype)
        dx = dx.to(dx_dtype or x.dtype).contiguous()
    if output_mask[1] and weight is not None:
        dw = _sum_rows(dy * x_hat, normalized_shape, weight.dtype)
    if output_mask[2] and bias is not None:
        db = _sum_rows(dy, normalized_shape, bias.dtype)
    return dx, dw, db


def statistics_backward_formula(
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor,
    grad_mean: Tensor | None,
    grad_rstd: Tensor | None,
) -> Tensor:
    """The contribution of the gradients of mean and rstd (None if absent) to dx, in x's dtype."""
    dtype, cols = accumulation_dtype(x.dtype), math.prod(normalized_shape)
    dx = torch.zeros_like(x, dtype=dtype)
    if grad_mean is not None:
        dx = dx + grad_mean / cols
    if grad_rstd is not None:
        centered = x.to(dtype) if mean is None else x.to(dtype) - mean
        dx = dx - grad_rstd * rstd.pow(3) * centered / cols
    return dx.to(x.dtype)


def _sum_rows(rows: Tensor, normalized_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The sum over the batch dims: contiguous, and a new tensor even if there are none."""
    return rows[None].sum_to_size(normalized_shape).to(dtype).contiguous()


def _normalized_dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


# Of an op's arguments. All other ops are backwards of both norms.
FORMULAS: dict[str, Callable[..., tuple]] = {"layer_norm_fwd": layer_norm_formula, "rms_norm_fwd": rms_norm_formula}
