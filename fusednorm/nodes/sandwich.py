"""A norm behind a layer and the norm before the next one, h = residual + norm(x) and y = norm(h), as in Gemma 2 to 4:
one op forward and two backward, where autograd would add the gradients of h by a kernel of its own. C++ records a node
for each norm (csrc/node.h); SandwichFunction is for the other calls."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import Proxy

from .. import autograd, functional
from ..forms import ROUNDINGS
from ..host import native
from ..host.torch_compat import recorder
from ..operands import AGAIN_OPS, ops_in_two

# Of each norm: the first norm's forward, the next one's, and that of both.
FORWARDS = {op.norm: (*ops_in_two(op.norm)[:2], op.name) for op in AGAIN_OPS}


def layer_norm_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of h, h) with h = residual + LayerNorm of x, which is layer_norm_add and then affine_layer_norm.

    weight and bias are those of the first norm, next_weight and next_bias those of the second. The other arguments are
    for both, and they, dtypes and errors are those of layer_norm_add. The second norm's backward adds the gradient of h
    before it rounds, in the same pass; either gradient may be absent.
    """
    return _sandwich("layer", x, residual, weight, next_weight, bias, next_bias, eps, weight_offset, rounding)


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of h, h) with h = residual + RMSNorm of x, as in the blocks of Gemma 2 to 4. Arguments as
    layer_norm_add_layer_norm's; eps None is the machine epsilon of float32 (float64 for float64 x or residual)."""
    return _sandwich("rms", x, residual, weight, next_weight, bias, next_bias, eps, weight_offset, rounding)


def _sandwich(
    norm, x, residual, weight, next_weight, bias, next_bias, eps, weight_offset, rounding
) -> tuple[Tensor, Tensor]:
    tensors = x, residual, weight, next_weight, bias, next_bias
    first, second, both = FORWARDS[norm]
    shape, of_h = functional.shape_of(x, weight, bias), functional.shape_of(x, next_weight, next_bias)
    is_one_op = _is_one_op(shape, of_h)
    if is_one_op:
        given = x, shape, residual, next_weight, next_bias, weight, bias, eps
        outputs = native.y_of(both, (*given, weight_offset, ROUNDINGS.get(rounding), None))
        if outputs is not None:
            h, y, *_ = outputs
            return y, h
    record = recorder(SandwichFunction, *tensors)
    # Dynamo's Functions take no tensor twice, and torch.fx must see the ops.
    if record is None or any(isinstance(a, Proxy) or a is b is not None for a, b in combinations(tensors, 2)):
        last = eps, None, weight_offset, rounding
        if record is None and is_one_op:
            h, y, *_ = functional.of_form(both, x, (residual, next_weight, next_bias), weight, bias, *last)
            return y, h
        h = functional.of_form(first, x, (residual,), weight, bias, *last)
        return functional.of_form(second, h, (), next_weight, next_bias, *last), h
    functional.require_settings(first, eps, weight_offset, rounding)
    settings = eps, float(weight_offset), ROUNDINGS[rounding], None
    return record(norm, settings, *tensors)


def _is_one_op(shape, of_h) -> bool:
    """Whether both norms are of the same dims, which shapes that torch.fx traces do not say. Dynamo's graphs have two
    ops, which Inductor knows."""
    traced = torch.compiler.is_dynamo_compiling() or isinstance(shape, Proxy) or isinstance(of_h, Proxy)
    return not traced and shape == of_h


class SandwichFunction(Function):
    """apply(norm, settings, x, residual, weight, next_weight, bias, next_bias) -> (y, h), with the ops' settings by
    position."""

    @staticmethod
    def forward(ctx, norm, settings, x, residual, weight, next_weight, bias, next_bias):
        first, second, both = FORWARDS[norm]
        shape, of_h = (functional.shape_of(x, *each) for each in ((weight, bias), (next_weight, next_bias)))
        if _is_one_op(shape, of_h):
            given = x, shape, residual, next_weight, next_bias, weight, bias, *settings
            outputs = autograd.outputs_of(both, given)
            half = len(outputs) // 2
            (h, *statistics), (y, *of_second) = outputs[:half], outputs[half:]
        else:
            h, *statistics = autograd.outputs_of(first, (x, shape, residual, weight, bias, *settings))
            y, *of_second = autograd.outputs_of(second, (h, of_h, next_weight, next_bias, *settings))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, weight, next_weight, bias, next_bias, *statistics, *of_second)
        ctx.norm, ctx.shape, ctx.shape_of_h, ctx.weight_offset = norm, tuple(shape), tuple(of_h), settings[1]
        ctx.infos = [autograd.info_for_backward(each, settings[0]) for each in (first, second)]
        return y, h

    @staticmethod
    def backward(ctx, grad_y, grad_h):
        x, h, weight, next_weight, bias, next_bias, *statistics = ctx.saved_tensors
        _, _, x_wants, residual_wants, *wanted = ctx.needs_input_grad
        given = weight, next_weight, bias, next_bias
        w_wants, next_w_wants, b_wants, next_b_wants = (
            want and each is not None for want, each in zip(wanted, given, strict=True)
        )
        name, half = f"{ctx.norm}_norm_bwd_residual", len(statistics) // 2
        first, second = ctx.infos
        dh, dx, dw, db, next_dw, next_db = grad_h, None, None, None, None, None
        if grad_y is not None:
            mask = (x_wants or residual_wants or w_wants or b_wants), next_w_wants, next_b_wants
            operands = grad_y, h, ctx.shape_of_h, *statistics[half:], next_weight, next_bias, grad_h, mask, h.dtype
            dh, next_dw, next_db = autograd.gradients_of(second, name, (*operands, ctx.weight_offset))
        mask = x_wants, w_wants, b_wants
        if dh is not None and any(mask):
            operands = dh, x, ctx.shape, *statistics[:half], weight, bias, None, mask, x.dtype
            dx, dw, db = autograd.gradients_of(first, name, (*operands, ctx.weight_offset))
        return None, None, dx, dh if residual_wants else None, dw, next_dw, db, next_db
