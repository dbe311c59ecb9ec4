"""The second launch of a backward, which sums the partials of dw and db."""

import triton
import triton.language as tl

from .ptx import wait_for_prerequisites


@triton.jit
def sum_partials(partial_ptr, out_ptr, first_col, num_partials, cols, tile: tl.constexpr):
    """Sum tile.cols columns, from first_col on, of [num_partials, cols] partials in a fixed order, and round once to
    the dtype of out. The loads of tile.num_loads times tile.rows rows are under way at once."""
    row = tl.arange(0, tile.rows)[:, None]
    col = first_col + tl.arange(0, tile.cols)[None, :].to(tl.int64)  # a row may be wider than 2^31 elements
    in_range = col < cols
    total = (row * 0 + col * 0).to(partial_ptr.dtype.element_ty)
    for start in range(0, num_partials, tile.rows * tile.num_loads):
        loads = ()
        for i in tl.static_range(tile.loads):
            partial = start + i * tile.rows + row
            here = partial_ptr + partial.to(tl.int64) * cols + col
            loads = loads + (tl.load(here, mask=(partial < num_partials) & in_range, other=0.0),)
        some = loads[0]  # added up before they join the total, so that no sum has too many terms
        for i in tl.static_range(1, tile.loads):
            some += loads[i]
        total += some
    total = tl.sum(total, axis=0, keep_dims=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col, total, mask=in_range)


@triton.jit(do_not_specialize=["num_partials"])
def finalize(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, norm: tl.constexpr, tile: tl.constexpr
):
    """Each CTA sums one piece of tile.cols columns: the first CTAs those of dw, the next ones those of db."""
    if tile.dependent:  # this CTA may run before the backward has ended and its partials are visible
        wait_for_prerequisites()
    piece = tl.program_id(0)
    pieces = tl.cdiv(cols, tile.cols)
    if norm.wants_dw:
        if piece < pieces:
            sum_partials(dw_partial_ptr, dw_ptr, piece.to(tl.int64) * tile.cols, num_partials, cols, tile)
    if norm.wants_db:
        of_db = piece - pieces * norm.wants_dw
        if of_db >= 0:
            sum_partials(db_partial_ptr, db_ptr, of_db.to(tl.int64) * tile.cols, num_partials, cols, tile)
