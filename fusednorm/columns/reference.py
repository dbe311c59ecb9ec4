"""column_sum by ATen's operations: for CPU tensors, for kernels that failed, and for forward-mode autograd and
torch.func, which differentiate through these operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..dtypes import accumulation_dtype
from .problem import validate_column_sum


def formula(inputs: Sequence[Tensor], total: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The sums of column_sum by ATen, accumulated and returned in the same dtypes."""
    out_dtype = validate_column_sum(inputs, dtype)
    *batch, cols = inputs[0].shape
    acc_dtype = accumulation_dtype(inputs[0].dtype, out_dtype)
    sums = [tensor.reshape(math.prod(batch), cols).sum(0, dtype=acc_dtype) for tensor in inputs]
    if total:
        sums = [functools.reduce(torch.add, sums)]
    return [s.to(out_dtype) for s in sums]
