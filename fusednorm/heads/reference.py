"""The norms of heads as tensor code: for CPU tensors, where no kernel of ours runs, and for derivatives of the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import accumulation_dtype
from ..operands import Operands, Outputs
from ..reference import affine, input_gradient, normalized, rounded
from .call import apart, joined, outputs_of, with_zeros
from .problem import Heads, grads_of, heads_of, packing_of


def formula(operands: Operands) -> Outputs:
    """The outputs of an op for checked operands, contiguous: of a forward, for each tensor the norm of its rows and the
    rotation, in the order of norm_first. Derivatives do not see the rounding of x_hat."""
    heads = heads_of(operands)
    if not grads_of(operands):
        return tuple(_forward(heads, at) for at in range(len(heads.inputs)))
    if packing_of(operands):
        return tuple(joined(operands, formula(apart(operands))))
    of_each = [_backward(heads, at, grad) for at, grad in enumerate(grads_of(with_zeros(operands)))]
    found = [grad for kind in zip(*of_each, strict=True) for grad in kind]
    made = outputs_of(operands)
    return tuple(of and grad.to(of[1]).reshape(of[0]).contiguous() for grad, of in zip(found, made, strict=True))


def _forward(heads: Heads, at: int) -> Tensor:
    x, settings = heads.inputs[at], heads.settings
    dtype = accumulation_dtype(x.dtype)
    h = x.to(dtype)
    if not settings.norm_first:
        h = rotated(h, heads)
    x_hat, *_ = normalized(h, heads.dims, settings.layer, heads.eps)
    x_hat = rounded(x_hat, x.dtype) if settings.rounds_x_hat else x_hat
    u = affine(x_hat, *_parameters(heads, at), settings.weight_offset)
    if settings.norm_first:
        u = rotated(u, heads)
    return u.to(heads.output_dtype(at)).contiguous()


def _backward(heads: Heads, at: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of one tensor, in the accumulation dtype."""
    x, settings = heads.inputs[at], heads.settings
    dtype, last = accumulation_dtype(x.dtype), settings.norm_first
    h, du = x.to(dtype), grad.to(dtype)
    h, du = (h, rotated(du, heads, back=True)) if last else (rotated(h, heads), du)
    x_hat, *_ = of = normalized(h, heads.dims, settings.layer, heads.eps)
    weight, _ = _parameters(heads, at)
    dh = input_gradient(affine(du, weight, offset=settings.weight_offset), of, heads.dims)
    dx = dh if last else rotated(dh, heads, back=True)
    shape = x.shape[-len(heads.dims) :]
    return dx, (du * x_hat)[None].sum_to_size(shape), du[None].sum_to_size(shape)


def _parameters(heads: Heads, at: int) -> list[Tensor | None]:
    """Weight and bias of one tensor, in the shape of what is normalized."""
    shape = heads.inputs[at].shape[-len(heads.dims) :]
    return [each if each is None else each.reshape(shape) for each in (heads.weights[at], heads.biases[at])]


def rotated(rows: Tensor, heads: Heads, back: bool = False) -> Tensor:
    """The first rotary_dim columns of rows times cos, plus those of each pair's other column times sin, one of them
    negated; `back` is the transposed map. Without cos, the rows."""
    if heads.cos is None:
        return rows
    turned, interleaved = heads.rotary_dim, heads.settings.interleaved
    cos, sin = (_of_columns(each.to(rows.dtype), turned, interleaved) for each in (heads.cos, heads.sin))
    front, rest = (rows.narrow(-1, start, size) for start, size in ((0, turned), (turned, heads.cols - turned)))
    if back:
        front = front * cos - _other(front * sin, interleaved)
    else:
        front = front * cos + _other(front, interleaved) * sin
    return torch.cat([front, rest], -1) if rest.shape[-1] else front


def _of_columns(table: Tensor, turned: int, interleaved: bool) -> Tensor:
    """cos or sin with an entry for each column, where it has one for each pair."""
    if table.shape[-1] == turned:
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def _other(rows: Tensor, interleaved: bool) -> Tensor:
    """(-b, a) for each pair of columns (a, b)."""
    if interleaved:
        return torch.stack([-rows[..., 1::2], rows[..., ::2]], -1).reshape(rows.shape)
    a, b = rows.chunk(2, -1)
    return torch.cat([-b, a], -1)
