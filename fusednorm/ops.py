"""The registered ops, torch.ops.fusednorm.*: schemas, fakes and entry points for CPU and CUDA.

x is `[*batch, *normalized_shape]`: rows of cols = prod(normalized_shape) elements, M of them.

layer_norm_fwd
    y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(var + eps), var the biased variance of a row
rms_norm_fwd
    y = x * rstd * weight, with rstd = 1 / sqrt(mean(x^2) + eps); eps None is the machine epsilon of float32 (float64
    for float64 x)
layer_norm_bwd, rms_norm_bwd
    gradients of x, weight and bias, from the gradient of y and the statistics that the forward returned
layer_norm_bwd_residual, rms_norm_bwd_residual
    the same, with residual_grad (the gradient of a residual stream that x also went into) added to dx before dx is
    rounded, once, to dx_dtype (x's by default)

The first four take the arguments of aten::native_layer_norm, native_layer_norm_backward, _fused_rms_norm and
_fused_rms_norm_backward at the same positions.

Shapes
    grad_out and residual_grad have x's shape, weight and bias normalized_shape. mean and rstd have any shape of M
    elements, such as `[M]`, `[M, 1]` or the `[*batch, 1, ...]` that the forward returns. Outputs are contiguous.
Dtypes
    Each operand has its own: float16, bfloat16, float32 or float64. y and dx have x's dtype, dweight and dbias that of
    their parameter. Statistics are float32, or float64 for float64 x.
Strides
    Any. Rows at one constant stride or at two nested strides are read in place; anything else is copied once.
Derivatives
    Of any order, of every output, mean and rstd included (ATen's ops do not differentiate these two).
Masks
    An output that output_mask leaves out, or whose parameter is None, is not computed and is returned as None.
Errors
    RuntimeError if an operand has another shape, dtype or device than stated here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .host import native, recipe
from .host.kernel_devices import runs_kernels
from .namespace import NAMESPACE
from .planner.norm_problem import accumulation_dtype
from .problem import BackwardCall, check_backward, check_forward, stats_shape, validate_backward, validate_forward

LIBRARY = torch.library.Library(NAMESPACE, "DEF")

SCHEMAS = (
    "layer_norm_fwd(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    "layer_norm_bwd(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
    " Tensor? weight=None, Tensor? bias=None, bool[3] output_mask=[True, True, True])"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "rms_norm_fwd(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None)"
    " -> (Tensor y, Tensor rstd)",
    "rms_norm_bwd(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd, Tensor? weight=None,"
    " bool[2] output_mask=[True, True]) -> (Tensor dx, Tensor dweight)",
    "layer_norm_bwd_residual(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
    " Tensor? weight=None, Tensor? bias=None, Tensor? residual_grad=None, bool[3] output_mask=[True, True, True], *,"
    " ScalarType? dx_dtype=None) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "rms_norm_bwd_residual(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd, Tensor? weight=None,"
    " Tensor? residual_grad=None, bool[2] output_mask=[True, True], *, ScalarType? dx_dtype=None)"
    " -> (Tensor dx, Tensor dweight)",
)


def layer_norm_fwd(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    return forward("layer", x, normalized_shape, weight, bias, eps)


def layer_norm_bwd(grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=(True, True, True)):
    return backward("layer", grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)


def rms_norm_fwd(x, normalized_shape, weight=None, eps=None):
    y, _, rstd = forward("rms", x, normalized_shape, weight, None, eps)
    return y, rstd


def rms_norm_bwd(grad_out, x, normalized_shape, rstd, weight=None, output_mask=(True, True)):
    dx, dw, _ = backward("rms", grad_out, x, normalized_shape, None, rstd, weight, None, (*output_mask, False))
    return dx, dw


def layer_norm_bwd_residual(
    grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, residual_grad=None,
    output_mask=(True, True, True), *, dx_dtype=None,
):  # fmt: skip
    operands = (grad_out, x, normalized_shape, mean, rstd, weight, bias)
    return backward("layer", *operands, output_mask, residual_grad, dx_dtype, op="layer_norm_bwd_residual")


def rms_norm_bwd_residual(
    grad_out, x, normalized_shape, rstd, weight=None, residual_grad=None, output_mask=(True, True), *, dx_dtype=None
):
    operands, mask = (grad_out, x, normalized_shape, None, rstd, weight, None), (*output_mask, False)
    return backward("rms", *operands, mask, residual_grad, dx_dtype, op="rms_norm_bwd_residual")[:2]


def forward(
    norm, x, normalized_shape, weight, bias, eps, wants_statistics=True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, mean, rstd). mean is None for RMSNorm. Kernels write statistics only if wants_statistics. Raises RuntimeError
    as `check_forward` does."""
    operands = (x, normalized_shape, weight, bias, eps, wants_statistics)
    if not runs_kernels(x):
        return reference.forward(check_forward(norm, *operands))
    seen = recipe.forward(norm, *operands)
    outputs = recipe.repeat(seen)
    if outputs is None:
        call = check_forward(norm, *operands)
        if not (call.rows and call.problem.cols):
            return reference.forward(call)
        outputs = launch().forward(call, partial(recipe.remember, seen))
    return outputs


def backward(
    norm, grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask, residual_grad=None, dx_dtype=None, *,
    op=None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dw, db); None for an unwanted gradient. Raises RuntimeError as `check_backward` does; messages name `op`."""
    operands = (grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask, residual_grad, dx_dtype)
    if not runs_kernels(x):
        call = check_backward(norm, *operands, op=op)
        return reference.backward(call) if _wants_any(call) else (None, None, None)
    seen = recipe.backward(norm, *operands)
    outputs = recipe.repeat(seen)
    if outputs is None:
        call = check_backward(norm, *operands, op=op)
        if not _wants_any(call):
            return None, None, None
        if not (call.rows and call.problem.cols):
            return reference.backward(call)
        outputs = launch().backward(call, partial(recipe.remember, seen))
    return outputs


def _wants_any(call: BackwardCall) -> bool:
    return call.problem.wants_dx or call.problem.wants_dw or call.problem.wants_db


@functools.cache
def launch() -> ModuleType:
    from .host import launch  # imported late: it imports Triton, which a process without CUDA tensors may lack

    return launch


def _layer_norm_fwd_fake(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    y, rstd = _fake_forward("layer", x, normalized_shape, weight, bias)
    return y, torch.empty_like(rstd), rstd


def _layer_norm_bwd_fake(
    grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=(True, True, True)
):
    return _fake_backward("layer", grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)


def _layer_norm_bwd_residual_fake(
    grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, residual_grad=None,
    output_mask=(True, True, True), *, dx_dtype=None,
):  # fmt: skip
    operands = (grad_out, x, normalized_shape, mean, rstd, weight, bias)
    return _fake_backward("layer", *operands, output_mask, residual_grad, dx_dtype, op="layer_norm_bwd_residual")


def _rms_norm_fwd_fake(x, normalized_shape, weight=None, eps=None):
    return _fake_forward("rms", x, normalized_shape, weight, None)


def _rms_norm_bwd_fake(grad_out, x, normalized_shape, rstd, weight=None, output_mask=(True, True)):
    mask = (*output_mask, False)
    return _fake_backward("rms", grad_out, x, normalized_shape, None, rstd, weight, None, mask)[:2]


def _rms_norm_bwd_residual_fake(
    grad_out, x, normalized_shape, rstd, weight=None, residual_grad=None, output_mask=(True, True), *, dx_dtype=None
):
    operands, mask = (grad_out, x, normalized_shape, None, rstd, weight, None), (*output_mask, False)
    return _fake_backward("rms", *operands, mask, residual_grad, dx_dtype, op="rms_norm_bwd_residual")[:2]


def _fake_forward(norm, x, normalized_shape, weight, bias):
    batch_shape = validate_forward(norm, x, normalized_shape, weight, bias)
    statistic = x.new_empty(stats_shape(batch_shape, normalized_shape), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), statistic


def _fake_backward(
    norm, grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask, residual_grad=None, dx_dtype=None, *,
    op=None,
):  # fmt: skip
    operands = (grad_out, x, normalized_shape, mean, rstd, weight, bias)
    validate_backward(norm, *operands, output_mask, residual_grad, dx_dtype, op=op)
    outputs = zip((x, weight, bias), output_mask, (dx_dtype, None, None), strict=True)
    return tuple(
        like.new_empty(like.shape, dtype=dtype or like.dtype) if wanted and like is not None else None
        for like, wanted, dtype in outputs
    )


def _refuse(name: str, validate: Callable) -> Callable:
    """The op for calls that no kernel takes: nested or sparse tensors, other devices, no tensor at all. It raises."""

    def refuse(*args, **kwargs):
        validate(*args, **kwargs)  # raises first if an operand itself is wrong
        device = next(each.device for each in args if isinstance(each, Tensor))
        raise RuntimeError(f"{name}: x must be on a CPU or a CUDA GPU, got {device}")

    return refuse


ELSEWHERE = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")
FAKES = {
    layer_norm_fwd: _layer_norm_fwd_fake,
    layer_norm_bwd: _layer_norm_bwd_fake,
    rms_norm_fwd: _rms_norm_fwd_fake,
    rms_norm_bwd: _rms_norm_bwd_fake,
    layer_norm_bwd_residual: _layer_norm_bwd_residual_fake,
    rms_norm_bwd_residual: _rms_norm_bwd_residual_fake,
}
OPS = tuple(kernel.__name__ for kernel in FAKES)

for schema in SCHEMAS:
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
for kernel, fake in FAKES.items():
    LIBRARY.impl(kernel.__name__, kernel, "CPU")
    if not (native.extension and kernel.__name__ in native.OPS):
        LIBRARY.impl(kernel.__name__, kernel, "CUDA")
    for key in ELSEWHERE:
        LIBRARY.impl(kernel.__name__, _refuse(kernel.__name__, fake), key)
    torch.library.register_fake(f"{NAMESPACE}::{kernel.__name__}", fake, lib=LIBRARY)

# AOTInductor accepts None only for outputs declared `Tensor?`, but the schemas above declare `Tensor` as ATen's do.
# These copies of the backward ops declare `Tensor?` and have no derivatives. Only AOTInductor's graphs use them
# (integrations/routing.py).
for name, kernel, fake in (
    ("layer_norm_bwd_optional", layer_norm_bwd, _layer_norm_bwd_fake),
    ("rms_norm_bwd_optional", rms_norm_bwd, _rms_norm_bwd_fake),
):
    arguments, outputs = next(s for s in SCHEMAS if s.startswith(f"{kernel.__name__}(")).split(" -> ")
    schema = f"{name}{arguments.removeprefix(kernel.__name__)} -> {outputs.replace('Tensor', 'Tensor?')}"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
