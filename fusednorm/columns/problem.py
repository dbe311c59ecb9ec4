"""Arguments of a column sum: validated, flattened to rows x cols, and described as a value that the planner can hash.

Only this module of column_sum raises errors on user input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import FLOAT_DTYPES, accumulation_dtype, is_float32_sum
from ..planner.norm_problem import ALIGNMENT
from ..problem.rows import RowView, row_view
from ..problem.validation import FLOATS, require_strided

OP = "column_sum"


@dataclass(frozen=True)
class ColumnSumProblem:
    """Everything about a call that its kernels may depend on, except the row count. There are `count` tensors of one
    shape; `total` asks for the sum of all instead of a sum for each."""

    count: int
    cols: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    total: bool = False
    tma_aligned: bool = True  # every row of every tensor starts at a multiple of 16 bytes, and no two rows overlap

    @property
    def title(self) -> str:
        return OP

    @property
    def num_outputs(self) -> int:
        return 1 if self.total else self.count

    @property
    def acc_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype, self.out_dtype)

    @property
    def wants_float32_sum(self) -> bool:
        return is_float32_sum(self.acc_dtype, self.out_dtype)


class ColumnSumCall(NamedTuple):
    """A checked call. Row r of a tensor starts at element r * view.outer_stride; view.inner_rows is 1."""

    problem: ColumnSumProblem
    rows: int
    views: tuple[RowView, ...]


def check_column_sum(inputs: Sequence[Tensor], total: bool, dtype: torch.dtype | None) -> ColumnSumCall:
    """Check the arguments of column_sum and flatten its inputs to rows x cols.

    Raises the errors of `validate_column_sum`. Copies an input only if its rows do not lie at one stride.
    """
    validate_column_sum(inputs, dtype)
    cols = inputs[0].shape[-1]
    views = tuple(in_place(tensor) or RowView(tensor.contiguous(), 1, cols, 0) for tensor in inputs)
    problem, rows = describe(inputs, views, total, dtype)
    return ColumnSumCall(problem, rows, views)


def describe(
    inputs: Sequence[Tensor], views: Sequence[RowView | None], total: bool, dtype: torch.dtype | None
) -> tuple[ColumnSumProblem, int]:
    """The problem and the row count of valid inputs. A view that is None stands for a fresh contiguous copy."""
    first, cols = inputs[0], inputs[0].shape[-1]
    fresh_is_aligned = cols * first.element_size() % ALIGNMENT == 0
    aligned = all(fresh_is_aligned if view is None else is_tma_aligned(view, cols) for view in views)
    problem = ColumnSumProblem(len(inputs), cols, first.dtype, dtype or first.dtype, total, aligned)
    return problem, math.prod(first.shape[:-1])


def validate_column_sum(inputs: Sequence[Tensor], dtype: torch.dtype | None, op: str = OP) -> torch.dtype:
    """Check the arguments and return the result's dtype: `dtype`, or the inputs' dtype if it is None. Raises as ops.py
    says; errors name `op`. Only shapes, dtypes and devices are read, so meta and traced tensors can be checked too."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise TypeError(f"{op}: inputs must be a sequence of tensors, got {type(inputs).__name__}")
    if not inputs:
        raise RuntimeError(f"{op}: inputs must hold at least one tensor, got none")
    for i, tensor in enumerate(inputs):
        require_strided(op, f"inputs[{i}]", tensor)
    first = inputs[0]
    if first.dim() == 0:
        raise RuntimeError(f"{op}: inputs[0] must have at least one dimension, got shape ()")
    for name, got in ((f"inputs[0] must have dtype {FLOATS}", first.dtype), (f"dtype must be {FLOATS}", dtype)):
        if got is not None and got not in FLOAT_DTYPES:
            raise RuntimeError(f"{op}: {name}, got {got}")
    for i, tensor in enumerate(inputs):
        if tensor.shape != first.shape:
            _refuse(op, i, "shape", tuple(first.shape), tuple(tensor.shape))
        if tensor.dtype != first.dtype:
            _refuse(op, i, "dtype", first.dtype, tensor.dtype)
        if tensor.device != first.device:
            _refuse(op, i, "device", first.device, tensor.device)
    return dtype or first.dtype


def _refuse(op: str, i: int, what: str, want: object, got: object) -> None:
    raise RuntimeError(f"{op}: inputs[{i}] must have {what} {want} as inputs[0] has, got {got}")


def in_place(tensor: Tensor) -> RowView | None:
    """A view of `tensor` as rows (all dims but the last) at one stride; None if that takes a copy."""
    if tensor.is_contiguous():
        return RowView(tensor, 1, tensor.shape[-1], 0)
    view = row_view(tensor, tensor.dim() - 1)
    return view if view is not None and view.inner_rows == 1 else None


def is_tma_aligned(view: RowView, cols: int) -> bool:
    """Whether TMA can read the tensor: each row starts at a multiple of 16 bytes, and rows do not overlap. The length
    of a row need not be a multiple of 16 bytes."""
    stride_bytes = view.outer_stride * view.tensor.element_size()
    return (view.tensor.data_ptr() | stride_bytes) % ALIGNMENT == 0 and view.outer_stride >= cols
