"""Sums over the partials of dw and db, in a launch of its own or at the end of the kernel that wrote them."""

import triton
import triton.language as tl


@triton.jit
def sum_partials(partial_ptr, out_ptr, first_col, num_partials, cols, tile: tl.constexpr):
    """partial_cols columns of [num_partials, cols] partials, summed in a fixed order and rounded once to the dtype of
    out; partial_loads loads of partial_rows rows are under way at once."""
    row = tl.arange(0, tile.partial_rows)[:, None]
    col = first_col + tl.arange(0, tile.partial_cols)[None, :].to(tl.int64)  # a row may be wider than 2^31 elements
    in_range = col < cols
    total = (row * 0 + col * 0).to(partial_ptr.dtype.element_ty)
    for start in range(0, num_partials, tile.partial_rows * tile.partial_loads):
        loads = ()
        for i in tl.static_range(tile.loads):
            partial = start + i * tile.partial_rows + row
            here = partial_ptr + partial.to(tl.int64) * cols + col
            loads = loads + (tl.load(here, mask=(partial < num_partials) & in_range, other=0.0),)
        for i in tl.static_range(tile.loads):
            total += loads[i]
    total = tl.sum(total, axis=0, keep_dims=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col, total, mask=in_range)


@triton.jit
def sum_pieces(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, width, sum_piece: tl.constexpr,
    norm: tl.constexpr, tile: tl.constexpr,
):
    """dw and db by sum_piece, `width` columns at a time, which the grid's CTAs take in turn."""
    pieces = tl.cdiv(cols, width)
    for piece in range(tl.program_id(0), pieces * (norm.wants_dw + norm.wants_db), tl.num_programs(0)):
        if norm.wants_dw:
            if piece < pieces:
                sum_piece(dw_partial_ptr, dw_ptr, piece * width, num_partials, cols, tile)
        if norm.wants_db:
            of_db = piece - pieces * norm.wants_dw
            if of_db >= 0:
                sum_piece(db_partial_ptr, db_ptr, of_db * width, num_partials, cols, tile)


@triton.jit(do_not_specialize=["num_partials"])
def finalize(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, norm: tl.constexpr, tile: tl.constexpr
):
    """dw and db from their partials: at the end of the kernel that wrote them, or in a launch that follows it."""
    sum_pieces(
        dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, tile.partial_cols, sum_partials, norm, tile
    )
