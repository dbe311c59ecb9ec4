"""The gradient of a table of which rows were read by an index. It is the same in every run, in compiled code, too."""

from __future__ import annotations

import torch
from torch import Tensor

from .host import torch_compat
from .namespace import TORCH_OPS
from .ops import define


def gradient(rows: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Of the table, from that of each row of x. ATen sorts the index and adds up rows in a fixed order. Inductor would
    replace this by atomic additions, so that traced code has an op of ours, which Inductor runs as it is."""
    made = TORCH_OPS.lookup_backward if torch_compat.dispatch_modes() and not torch.is_grad_enabled() else _backward
    return made(rows.to(table.dtype).reshape(*index.shape, -1), index, table.shape[0]).reshape(table.shape)


def _backward(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, index, rows, -1, False)


def _fake(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1])


define("lookup_backward(Tensor grad, Tensor index, SymInt rows) -> Tensor", _fake, (_backward, ("CPU", "CUDA")))
