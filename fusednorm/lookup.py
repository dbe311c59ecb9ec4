"""Rows of a table by an index, with a gradient that is the same in every run, in compiled code, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .host.key import PLAIN_TYPES
from .namespace import TORCH_OPS
from .ops import define


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """table[index]. ATen's gradient sorts the index and adds up rows in a fixed order. Inductor would replace it by
    atomic additions, so that in compiled code the gradient is an op of ours, which Inductor runs as it is."""
    if torch.compiler.is_dynamo_compiling() and type(table) in PLAIN_TYPES:
        return LookupFunction.apply(table, index)
    return F.embedding(index, table)


class LookupFunction(Function):
    """apply(table, index)"""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx, grad):
        return TORCH_OPS.lookup_backward(grad, *ctx.saved_tensors, ctx.rows), None


def _backward(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, index, rows, -1, False)


def _fake(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1])


define("lookup_backward(Tensor grad, Tensor index, SymInt rows) -> Tensor", _fake, (_backward, ("CPU", "CUDA")))
