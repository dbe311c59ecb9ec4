"""Sums over the partials of dw and db, in a launch of its own or at the end of the kernel that wrote them."""

import triton
import triton.language as tl


@triton.jit
def sum_partials(partial_ptr, out_ptr, row, col, num_partials, cols, num_rows: tl.constexpr):
    """The columns `col` of [num_partials, cols] partials summed in a fixed order, num_rows at a time (`row`, one index
    each), rounded once to the dtype of out."""
    here = partial_ptr + row.to(tl.int64) * cols + col
    in_range = col < cols
    total = tl.load(here, mask=(row < num_partials) & in_range, other=0.0)
    for start in range(num_rows, num_partials, num_rows):
        here += num_rows * cols.to(tl.int64)
        total += tl.load(here, mask=(start + row < num_partials) & in_range, other=0.0)
    total = tl.sum(total, axis=0, keep_dims=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col, total, mask=in_range)


@triton.jit
def sum_pieces(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, row, col,
    num_rows: tl.constexpr, width: tl.constexpr, norm: tl.constexpr,
):
    """dw and db, in pieces of `width` columns (`col`, counted from the piece's first) that the grid's CTAs take in
    turn."""
    pieces = tl.cdiv(cols, width)
    for piece in range(tl.program_id(0), pieces * (norm.wants_dw + norm.wants_db), tl.num_programs(0)):
        if norm.wants_dw:
            if piece < pieces:
                sum_partials(dw_partial_ptr, dw_ptr, row, piece * width + col, num_partials, cols, num_rows)
        if norm.wants_db:
            of_db = piece - pieces * norm.wants_dw
            if of_db >= 0:
                sum_partials(db_partial_ptr, db_ptr, row, of_db * width + col, num_partials, cols, num_rows)


@triton.jit
def sum_pieces_in_tiles(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols,
    norm: tl.constexpr, num_rows: tl.constexpr, width: tl.constexpr,
):
    """`sum_pieces`, [num_rows, width] partials at a time."""
    row = tl.arange(0, num_rows)[:, None]
    col = tl.arange(0, width)[None, :].to(tl.int64)  # a row may be wider than 2^31 elements
    sum_pieces(dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, row, col, num_rows, width, norm)


@triton.jit(do_not_specialize=["num_partials"])
def finalize(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, norm: tl.constexpr, tile: tl.constexpr
):
    """dw and db from their partials, which an earlier launch left."""
    sum_pieces_in_tiles(dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, norm, tile.rows, tile.chunk)
