"""Gradients of tables: an index reads a table's rows, and each of these gets the sum of its readers' gradients. The
sums are the same in every run.

torch.ops.fusednorm.lookup_backward takes tensors `[*index.shape, cols]`, which may have different dtypes, and returns a
sum `[rows, cols]` of each, of one dtype, to which it is rounded once. Rows whose number is no row of the table are left
out. On CPUs ATen adds up, and raises for such a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import sharding
from .dtypes import accumulation_dtype
from .host import torch_compat
from .host.kernel_devices import runs_kernels
from .host.torch_compat import needs_formula
from .namespace import TORCH_OPS
from .ops import ELSEWHERE, define

SCHEMA = "lookup_backward(Tensor[] grads, Tensor index, SymInt rows, *, ScalarType dtype) -> Tensor[]"


def gradients(grads: Sequence[Tensor], index: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """Those of tables, from a gradient for each row of x: all by one sort of the index."""
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in tables])
    cols = math.prod(tables[0].shape[1:])
    rows = [each.reshape(*index.shape, cols) for each in grads]
    sums = TORCH_OPS.lookup_backward(rows, index, tables[0].shape[0], dtype=dtype)
    return [each.to(of.dtype).reshape(of.shape) for each, of in zip(sums, tables, strict=True)]


def formula(grads: Sequence[Tensor], index: Tensor, rows: int, *, dtype: torch.dtype) -> list[Tensor]:
    wide = [each.to(torch.promote_types(accumulation_dtype(each.dtype), dtype)) for each in grads]
    return [torch.ops.aten.embedding_dense_backward(each, index, rows, -1, False).to(dtype) for each in wide]


def _run(grads: Sequence[Tensor], index: Tensor, rows: int, *, dtype: torch.dtype) -> list[Tensor]:
    """The op on CPU and CUDA."""
    found = None
    if runs_kernels(grads[0]) and grads[0].numel() and rows:
        found = _host().sums(grads, index, rows, dtype)
    with torch.no_grad():
        return formula(grads, index, rows, dtype=dtype) if found is None else found


@functools.cache
def _host() -> ModuleType:
    from .host import segments  # imports Triton, which a process without CUDA tensors need not have

    return segments


def _fake(grads: Sequence[Tensor], index: Tensor, rows: int, *, dtype: torch.dtype) -> list[Tensor]:
    return [each.new_empty((rows, each.shape[-1]), dtype=dtype) for each in grads]


class SumsFunction(Function):
    """apply(index, rows, dtype, *grads) returns the sums as a tuple."""

    @staticmethod
    def forward(ctx, index, rows, dtype, *grads):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        ctx.dtypes = [each.dtype for each in grads]
        return tuple(_below_autograd(grads, index, rows, dtype))

    @staticmethod
    def backward(ctx, *grads):
        (index,) = ctx.saved_tensors
        pairs = zip(grads, ctx.dtypes, strict=True)
        return None, None, None, *[None if each is None else F.embedding(index, each).to(of) for each, of in pairs]


def _above(grads: Sequence[Tensor], index: Tensor, rows: int, *, dtype: torch.dtype) -> list[Tensor]:
    """The op at autograd's dispatch key."""
    if needs_formula():
        return formula(grads, index, rows, dtype=dtype)
    if torch.is_grad_enabled() and any(each.requires_grad for each in grads):
        return list(SumsFunction.apply(index, rows, dtype, *grads))
    return _below_autograd(grads, index, rows, dtype)


def _below_autograd(grads: Sequence[Tensor], index: Tensor, rows: int, dtype: torch.dtype) -> list[Tensor]:
    return torch_compat.below_autograd(TORCH_OPS.lookup_backward, _run, grads, index, rows, dtype=dtype)


def _placements(schema: Any) -> tuple:
    """As sharding.RULES has them. Rows are sharded as their numbers are."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    *grads, index = schema.args_strategy
    count, dims, whole = len(grads), len(index.shape), Replicate()
    found = [(whole, whole, whole), (Partial("sum"), Partial("sum"), whole), (Shard(1), Shard(dims), whole)]
    found += [(Partial("sum"), Shard(dim), Shard(dim)) for dim in range(dims)]
    return index, count, [[sums] * count + [rows] * count + [numbers] for sums, rows, numbers in found]


_keys = (_run, ("CPU", "CUDA", *ELSEWHERE)), (_above, ("Autograd", "FuncTorchBatchedDecomposition"))
define(SCHEMA, _fake, *_keys, (formula, ("Batched",)))
sharding.RULES["lookup_backward"] = _placements
