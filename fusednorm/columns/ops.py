"""torch.ops.fusednorm.column_sum and fusednorm.column_sum: sums of tensors over all their dims but the last.

inputs have one shape `[..., cols]`, one dtype (float16, bfloat16, float32 or float64) and one device. The result is a
list of contiguous `[cols]` tensors of dtype `dtype`, or of the inputs' dtype if it is None. The list has one sum per
input; with total it has a single sum, over all inputs. Sums are taken in float32 (float64 if the inputs or dtype are
float64) and rounded once. The same inputs on the same device give the same bits.

Strides may be any. Inputs whose rows lie at one constant stride are read in place; others are copied once. The op is
differentiable any number of times: the gradient of an input is that of its sum, expanded to its shape.

Raises RuntimeError if there are no inputs, if they differ in shape, dtype or device, or if they are 0-d or not of a
float dtype. Raises TypeError if an input is no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import sharding
from ..dtypes import accumulation_dtype
from ..host import torch_compat
from ..host.kernel_devices import runs_kernels
from ..host.torch_compat import needs_formula
from ..namespace import TORCH_OPS
from ..ops import ELSEWHERE, define
from ..problem.rows import packed
from ..settings import invariance
from .plan import MAX_TENSORS
from .problem import check_column_sum, validate_column_sum
from .reference import formula

SCHEMA = "column_sum(Tensor[] inputs, *, bool total=False, ScalarType? dtype=None) -> Tensor[]"


def column_sum(inputs: Sequence[Tensor], *, total: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Sum each `[..., cols]` tensor over all its dims but the last, and return a list of `[cols]` tensors. With `total`
    the list has one tensor, the sum of all. Dtypes and errors are those of torch.ops.fusednorm.column_sum."""
    if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace the registration
        sharding.register_where_needed()  # in inference mode no later step would register
    try:
        return TORCH_OPS.column_sum(inputs, total=total, dtype=dtype)
    except (TypeError, RuntimeError):
        validate_column_sum(inputs, dtype)  # raises a sentence if an argument is wrong
        raise


def _run(inputs: Sequence[Tensor], *, total: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The op on CPU and CUDA."""
    ordered = invariance.switch.invariance()
    if ordered > 0:
        out_dtype = validate_column_sum(inputs, dtype)
        if inputs[0].numel() and runs_kernels(inputs[0]):
            return _run_in_blocks(inputs, total, out_dtype, ordered)
    return _run_at_once(inputs, total, dtype)


def _run_in_blocks(inputs: Sequence[Tensor], total: bool, dtype: torch.dtype, rows: int) -> list[Tensor]:
    """The sums over one block of so many rows after another, added up in order: `ordered_sums` of
    settings/invariance.py."""
    blocks = zip(*[packed(each).view(-1, each.shape[-1]).split(rows) for each in inputs], strict=True)
    first, *rest = blocks
    if not rest:
        return _run_at_once(first, total, dtype)
    sums, *others = (_run_at_once(each, total, accumulation_dtype(inputs[0].dtype, dtype)) for each in (first, *rest))
    for each in others:
        sums = [a + b for a, b in zip(sums, each, strict=True)]
    return [each.to(dtype) for each in sums]


def _run_at_once(inputs: Sequence[Tensor], total: bool, dtype: torch.dtype | None) -> list[Tensor]:
    if len(inputs) > MAX_TENSORS:
        return _run_in_parts(inputs, total, dtype)
    call = check_column_sum(inputs, total, dtype)
    if runs_kernels(inputs[0]) and call.rows and call.problem.cols:
        return _launch().column_sum(call)
    with torch.no_grad():
        return formula(inputs, total, dtype)


def _run_in_parts(inputs: Sequence[Tensor], total: bool, dtype: torch.dtype | None) -> list[Tensor]:
    """The op on CPU and CUDA for more tensors than one launch takes: in parts of MAX_TENSORS."""
    out_dtype = validate_column_sum(inputs, dtype)
    parts = [inputs[i : i + MAX_TENSORS] for i in range(0, len(inputs), MAX_TENSORS)]
    part_dtype = accumulation_dtype(inputs[0].dtype, out_dtype) if total else out_dtype
    sums = [s for part in parts for s in _run_at_once(part, total, part_dtype)]
    return _run_at_once(sums, True, out_dtype) if total else sums


@functools.cache
def _launch() -> ModuleType:
    from . import launch as launch_columns  # imports Triton, which a process without CUDA tensors need not have

    return launch_columns


def _fake(inputs: Sequence[Tensor], *, total: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
    out_dtype = validate_column_sum(inputs, dtype)
    cols = inputs[0].shape[-1]
    return [inputs[0].new_empty(cols, dtype=out_dtype) for _ in (inputs[:1] if total else inputs)]


class ColumnSumFunction(Function):
    """apply(total, dtype, *inputs) returns the sums as a tuple."""

    @staticmethod
    def forward(ctx, total, dtype, *inputs):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype, ctx.total, ctx.count = inputs[0].shape, inputs[0].dtype, total, len(inputs)
        return tuple(_below_autograd(inputs, total, dtype))

    @staticmethod
    def backward(ctx, *grads):
        spread = [None if grad is None else grad.to(ctx.dtype).expand(ctx.shape) for grad in grads]
        spread = spread * ctx.count if ctx.total else spread
        needed = ctx.needs_input_grad[2:]
        return (None, None, *(grad if need else None for grad, need in zip(spread, needed, strict=True)))


def _above(inputs: Sequence[Tensor], *, total: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The op at autograd's dispatch key."""
    if needs_formula():
        return formula(inputs, total, dtype)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        validate_column_sum(inputs, dtype)
        return list(ColumnSumFunction.apply(total, dtype, *inputs))
    if any(tensor.is_nested for tensor in inputs):
        validate_column_sum(inputs, dtype)
    return _below_autograd(inputs, total, dtype)


def _below_autograd(inputs: Sequence[Tensor], total: bool, dtype: torch.dtype | None) -> list[Tensor]:
    sharding.register_where_needed()
    return torch_compat.below_autograd(TORCH_OPS.column_sum, _run, inputs, total=total, dtype=dtype)


def _placements(schema: Any) -> tuple:
    """As sharding.RULES has them. Sums are linear: sharded rows or partial inputs give partial sums, and sharded
    columns give sums sharded alike."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    inputs = schema.args_strategy
    last, outputs = len(inputs[0].shape) - 1, 1 if schema.kwargs_schema.get("total", False) else len(inputs)
    pairs = [(Replicate(), Replicate()), (Partial("sum"), Partial("sum")), (Shard(0), Shard(last))]
    pairs += [(Partial("sum"), Shard(dim)) for dim in range(last)]
    return inputs[0], outputs, [[output] * outputs + [input] * len(inputs) for output, input in pairs]


# An empty list has no device: `_run` raises for it. "Batched" is the key of torch.autograd's older vmap.
_keys = (_run, ELSEWHERE), (_above, ("Autograd", "FuncTorchBatchedDecomposition")), (formula, ("Batched",))
define(SCHEMA, _fake, *_keys)
sharding.RULES["column_sum"] = _placements
