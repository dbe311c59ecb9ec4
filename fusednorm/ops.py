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
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .host import native, prepared
from .host.kernel_devices import runs_kernels
from .host.program import Program
from .namespace import NAMESPACE
from .operands import OPERANDS_OF_OP, ForwardOperands, Operands, Outputs, as_op
from .planner.norm_problem import accumulation_dtype
from .problem import BackwardCall, ForwardCall, check_backward, check_forward, stats_shape, validate

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


def run(operands: Operands) -> Outputs:
    """The outputs of either direction, below autograd: (y, mean, rstd) or (dx, dw, db). mean is None for RMSNorm, and
    so is an unwanted gradient; kernels write statistics only if wants_statistics. Raises as `check_forward` and
    `check_backward` do."""
    return launched(operands)[0]


def launched(operands: Operands) -> tuple[Outputs, Program | None]:
    """(what `run` returns, the program that has made it if the program is kept)."""
    return prepared.run(operands, first) if runs_kernels(operands.x) else (_by_aten(_checked(operands)), None)


def first(operands: Operands, miss: prepared.Miss | None) -> tuple[Outputs, Program | None]:
    """`launched`, for a call on a GPU for which no program was found."""
    call = _checked(operands)
    has_work = call.rows and call.problem.cols and (call.problem.direction == "forward" or call.problem.wants_any)
    return launch().run(call, miss) if has_work else (_by_aten(call), None)


def _checked(operands: Operands) -> ForwardCall | BackwardCall:
    return check_forward(operands) if isinstance(operands, ForwardOperands) else check_backward(operands)


def _by_aten(call: ForwardCall | BackwardCall) -> Outputs:
    if isinstance(call, ForwardCall):
        return reference.forward(call)
    return reference.backward(call) if call.problem.wants_any else (None, None, None)


@functools.cache
def launch() -> ModuleType:
    from .host import launch  # imported late: it imports Triton, which a process without CUDA tensors may lack

    return launch


def _fake(operands: Operands) -> Outputs:
    """The fake kernel: outputs without values, each a tensor of its own."""
    batch_shape, x = validate(operands), operands.x
    if isinstance(operands, ForwardOperands):
        shape, dtype = stats_shape(batch_shape, operands.normalized_shape), accumulation_dtype(x.dtype)
        mean = x.new_empty(shape, dtype=dtype) if operands.norm == "layer" else None
        return x.new_empty(x.shape), mean, x.new_empty(shape, dtype=dtype)
    likes, dtypes = (x, operands.weight, operands.bias), (operands.dx_dtype, None, None)
    dx, dw, db = (
        like.new_empty(like.shape, dtype=dtype or like.dtype) if wanted and like is not None else None
        for like, wanted, dtype in zip(likes, operands.output_mask, dtypes, strict=True)
    )
    return dx, dw, db


def _refuse(operands: Operands) -> Outputs:
    """Raises for calls that no kernel takes: nested or sparse tensors, other devices, no tensor at all."""
    validate(operands)  # raises first if an operand itself is wrong
    device = next(each.device for each in operands.tensors if isinstance(each, Tensor))
    raise RuntimeError(f"{operands.op}: x must be on a CPU or a CUDA GPU, got {device}")


# Dispatch keys that serve all tensors without a kernel of their own.
ELSEWHERE = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")
OPS = tuple(OPERANDS_OF_OP)
KERNELS = {name: as_op(name, run) for name in OPS}

for schema in SCHEMAS:
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
for name, kernel in KERNELS.items():
    LIBRARY.impl(name, kernel, "CPU")
    if not (native.extension and name in native.OPS):
        LIBRARY.impl(name, kernel, "CUDA")
    for key in ELSEWHERE:
        LIBRARY.impl(name, as_op(name, _refuse), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", as_op(name, _fake), lib=LIBRARY)

# AOTInductor accepts None only for outputs declared `Tensor?`, but the schemas above declare `Tensor` as ATen's do.
# These copies of the backward ops declare `Tensor?` and have no derivatives. Only AOTInductor's graphs use them
# (integrations/routing.py).
for name in ("layer_norm_bwd", "rms_norm_bwd"):
    arguments, outputs = next(s for s in SCHEMAS if s.startswith(f"{name}(")).split(" -> ")
    copy = f"{name}_optional"
    schema = f"{copy}{arguments.removeprefix(name)} -> {outputs.replace('Tensor', 'Tensor?')}"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(copy, KERNELS[name], key)
    torch.library.register_fake(f"{NAMESPACE}::{copy}", as_op(name, _fake), lib=LIBRARY)
