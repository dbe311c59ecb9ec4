"""The ops as plain tensor code with the ops' own arguments and errors, for transforms such as vmap."""

from __future__ import annotations

from . import reference
from .problem import validate_backward, validate_forward


def layer_norm_fwd(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    validate_forward("layer", x, normalized_shape, weight, bias)
    return reference.layer_norm_formula(x, normalized_shape, weight, bias, eps)


def rms_norm_fwd(x, normalized_shape, weight=None, eps=None):
    validate_forward("rms", x, normalized_shape, weight, None)
    return reference.rms_norm_formula(x, normalized_shape, weight, eps)


def layer_norm_bwd(grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=(True, True, True)):
    operands = grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask
    validate_backward("layer", *operands)
    return reference.backward_formula(*operands)


def rms_norm_bwd(grad_out, x, normalized_shape, rstd, weight=None, output_mask=(True, True)):
    operands = grad_out, x, normalized_shape, None, rstd, weight, None, (*output_mask, False)
    validate_backward("rms", *operands)
    return reference.backward_formula(*operands)[:2]


def layer_norm_bwd_residual(
    grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, residual_grad=None,
    output_mask=(True, True, True), *, dx_dtype=None,
):  # fmt: skip
    operands = grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask, residual_grad, dx_dtype
    validate_backward("layer", *operands, op="layer_norm_bwd_residual")
    return reference.backward_formula(*operands)


def rms_norm_bwd_residual(
    grad_out, x, normalized_shape, rstd, weight=None, residual_grad=None, output_mask=(True, True), *, dx_dtype=None
):
    mask = (*output_mask, False)
    operands = grad_out, x, normalized_shape, None, rstd, weight, None, mask, residual_grad, dx_dtype
    validate_backward("rms", *operands, op="rms_norm_bwd_residual")
    return reference.backward_formula(*operands)[:2]
