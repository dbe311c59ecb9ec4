"""The formulas of the plain norms with arguments by position, as tests call them."""

from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.reference import backward_formula, forward_formula


def layer_norm(x, normalized_shape, weight, bias, eps):
    """(y, mean, rstd) of layer_norm_fwd, in its dtypes and shapes."""
    return forward_formula(ForwardOperands("layer", x, normalized_shape, weight, bias, eps))


def rms_norm(x, normalized_shape, weight, eps):
    """(y, rstd) of rms_norm_fwd, in its dtypes and shapes."""
    return forward_formula(ForwardOperands("rms", x, normalized_shape, weight, None, eps))[::2]


def norm_backward(grad_out, x, normalized_shape, mean, *more, **named):
    """(dx, dweight, dbias) of the arguments of layer_norm_bwd_residual, or of those of rms_norm_bwd_residual if mean is
    None."""
    norm = "rms" if mean is None else "layer"
    given = BackwardOperands(norm, grad_out, x, normalized_shape, mean, *more, **named, suffix="_residual")
    return backward_formula(given)
