"""How the rows of tensors lie in memory, and which rows share a row of a modulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..planner.norm_problem import ALIGNMENT
from ..settings import invariance


class RowView(NamedTuple):
    """A tensor as rows x cols, read in place. Row r starts at element

        (r // inner_rows) * outer_stride + (r % inner_rows) * inner_stride

    and its cols elements are adjacent. Strides are in elements. inner_rows is 1 if one stride is enough. A
    tensor of table_rows rows is a table: row r is that of the number index[r], by the index of the call.
    """

    tensor: Tensor
    inner_rows: int
    outer_stride: int
    inner_stride: int
    table_rows: int | None = None


def row_view(tensor: Tensor, batch_ndim: int) -> RowView | None:
    """View `tensor` as rows (its first `batch_ndim` dims) x cols (the others). None if only a copy would do."""
    shape, strides = tensor.shape, tensor.stride()
    cols = math.prod(shape[batch_ndim:])
    if tensor.is_contiguous():
        return RowView(tensor, 1, cols, 0)
    expected = 1
    for size, stride in zip(reversed(shape[batch_ndim:]), reversed(strides[batch_ndim:]), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    levels = levels_of(shape[:batch_ndim], strides[:batch_ndim])
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        (inner_rows, (inner_stride,)), (_, (outer_stride,)) = levels
        return RowView(tensor, inner_rows, outer_stride, inner_stride)
    return RowView(tensor, 1, levels[0][1][0] if levels else cols, 0)


def levels_of(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """The levels at which rows of tensors of one shape are nested, innermost first: (size, the stride in each tensor).
    Dims that one stride covers in each tensor are one level."""
    levels: list[tuple[int, tuple[int, ...]]] = []
    for size, *by_tensor in zip(reversed(shape), *map(reversed, strides), strict=True):
        if size == 1:
            continue
        if levels and by_tensor == [levels[-1][0] * inner for inner in levels[-1][1]]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, tuple(by_tensor)))
    return levels


def is_tma_aligned(view: RowView, cols: int) -> bool:
    """Whether each row starts and ends at a multiple of 16 bytes, as a TMA descriptor demands."""
    row_units = cols | view.outer_stride | view.inner_stride
    return (view.tensor.data_ptr() | row_units * view.tensor.element_size()) % ALIGNMENT == 0


def spread(modulation: Tensor, ndim: int, normalized_ndim: int) -> Tensor:
    """A view with `ndim` dims: 1 for each batch dim that a modulation does not name. If it has more dims, the last ones
    of its batch dims are 1 and left out."""
    shape, lead, batch_ndim = modulation.shape, modulation.dim() - normalized_ndim, ndim - normalized_ndim
    kept = shape[: min(lead, batch_ndim)]
    return modulation.reshape(*kept, *(1,) * (batch_ndim - len(kept)), *shape[lead:])


class Sharing(NamedTuple):
    """Which rows of x share a row of a modulation."""

    rows: int = 1  # as many that are next to each other; 0 for all rows, -1 if they are not next to each other
    whole: tuple[bool, ...] = ()  # of the modulation's batch dims: whether it is x's, and not 1
    dims: int = 0  # the first batch dims of x, of which each place has a row, if there are `rows`

    @property
    def is_by_sample(self) -> bool:
        return self.rows > 1 or self.rows == 0


def sharing(modulation: Tensor, batch_shape: Sequence[int], normalized_ndim: int) -> Sharing:
    sizes = modulation.shape[: modulation.dim() - normalized_ndim]
    whole, dims = tuple([size != 1 for size in sizes]), len(sizes)
    while dims and sizes[dims - 1] == 1:
        dims -= 1
    if not dims:
        return Sharing(0, whole)
    rows = math.prod(batch_shape[dims:]) if sizes[:dims] == batch_shape[:dims] else -1
    return Sharing(rows, whole, dims)


def row_view_or_copy(tensor: Tensor, batch_ndim: int, cols: int) -> RowView:
    """Where rows are batch-invariant, rows that are not contiguous are copied."""
    if tensor.is_contiguous() or invariance.switch.invariance():
        return RowView(packed(tensor), 1, cols, 0)
    return row_view(tensor, batch_ndim) or RowView(tensor.contiguous(), 1, cols, 0)


def statistic(tensor: Tensor) -> Tensor:
    return (packed(tensor) if invariance.switch.invariance() else tensor).reshape(-1)


def packed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that is contiguous; if rows are batch-invariant also aligned, because builds for
    other addresses may add up a row in another order."""
    packed = tensor.contiguous()
    return packed.clone() if packed.data_ptr() % ALIGNMENT and invariance.switch.invariance() else packed
