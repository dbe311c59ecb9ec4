"""Sums over the partials of dw and db, in a launch of its own or at the end of the kernel that wrote them."""

import triton
import triton.language as tl


@triton.jit
def sum_partials(
    partial_ptr, out_ptr, row, col, out_col, num_partials, cols, sum_rows: tl.constexpr, tile: tl.constexpr
):
    """The columns `col` of [num_partials, cols] partials summed in a fixed order and rounded once to the dtype of out.
    `row` indexes the rows of one load; partial_loads of them are under way at once. What a thread has added up,
    sum_rows brings together: out_col are the columns of the sums as it returns them."""
    in_range = col < cols
    total = (row * 0 + col * 0).to(partial_ptr.dtype.element_ty)
    here = partial_ptr + (row.to(tl.int64) * cols + col)
    step = tl.cast(cols, tl.int64) * tile.partial_rows
    for start in range(0, num_partials, tile.partial_rows * tile.partial_loads):
        loads = ()
        for i in tl.static_range(tile.loads):
            left = num_partials - start - i * tile.partial_rows
            loads = loads + (tl.load(here, mask=(row < left) & in_range, other=0.0),)
            here += step
        for i in tl.static_range(tile.loads):
            total += loads[i]
    tl.store(out_ptr + out_col, sum_rows(total, tile).to(out_ptr.dtype.element_ty), mask=out_col < cols)


@triton.jit
def sum_pieces(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, row, col, out_col, width,
    sum_rows: tl.constexpr, norm: tl.constexpr, tile: tl.constexpr,
):
    """dw and db, in pieces of `width` columns (`col` and out_col, counted from the piece's first) that the grid's CTAs
    take in turn."""
    pieces = tl.cdiv(cols, width)
    for piece in range(tl.program_id(0), pieces * (norm.wants_dw + norm.wants_db), tl.num_programs(0)):
        if norm.wants_dw:
            if piece < pieces:
                at = piece * width
                sum_partials(
                    dw_partial_ptr, dw_ptr, row, at + col, at + out_col, num_partials, cols, sum_rows, tile
                )  # fmt: skip
        if norm.wants_db:
            at = (piece - pieces * norm.wants_dw) * width
            if at >= 0:
                sum_partials(
                    db_partial_ptr, db_ptr, row, at + col, at + out_col, num_partials, cols, sum_rows, tile
                )  # fmt: skip


@triton.jit
def sum_columns(values, tile: tl.constexpr):
    """[partial_rows, partial_cols] -> [1, partial_cols]."""
    return tl.sum(values, axis=0, keep_dims=True)


@triton.jit(do_not_specialize=["num_partials"])
def finalize(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, norm: tl.constexpr, tile: tl.constexpr
):
    """dw and db from their partials: at the end of the kernel that wrote them, or in a launch that follows it."""
    row = tl.arange(0, tile.partial_rows)[:, None]
    col = tl.arange(0, tile.partial_cols)[None, :].to(tl.int64)  # a row may be wider than 2^31 elements
    sum_pieces(
        dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, row, col, col, tile.partial_cols,
        sum_columns, norm, tile,
    )  # fmt: skip
