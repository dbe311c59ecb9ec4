"""Sums over rows: the finalizer that turns fp32 partials into dw and db."""

import triton
import triton.language as tl


@triton.jit
def sum_partials(partial_ptr, out_ptr, num_partials, cols, tile: tl.constexpr):
    """tile.chunk columns of [num_partials, cols] partials summed in a fixed order, rounded once to the dtype of out."""
    col = tl.program_id(0).to(tl.int64) * tile.chunk + tl.arange(0, tile.chunk)[None, :]
    total = tl.full([tile.rows, tile.chunk], 0.0, partial_ptr.dtype.element_ty)
    for start in range(0, num_partials, tile.rows):
        row = start + tl.arange(0, tile.rows)[:, None]
        here = partial_ptr + row.to(tl.int64) * cols + col
        total += tl.load(here, mask=(row < num_partials) & (col < cols), other=0.0)
    tl.store(out_ptr + col, tl.sum(total, axis=0)[None, :].to(out_ptr.dtype.element_ty), mask=col < cols)


@triton.jit(do_not_specialize=["num_partials"])
def finalize(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, norm: tl.constexpr, tile: tl.constexpr
):
    """dw and db in one launch: the grid's second axis walks the outputs that are wanted."""
    if norm.wants_dw:
        if tl.program_id(1) == 0:
            sum_partials(dw_partial_ptr, dw_ptr, num_partials, cols, tile)
    if norm.wants_db:
        if tl.program_id(1) == tl.num_programs(1) - 1:
            sum_partials(db_partial_ptr, db_ptr, num_partials, cols, tile)
