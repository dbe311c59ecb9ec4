"""The second launch of a backward, which sums the partials of dw and db."""

import triton
import triton.language as tl

from .loads import chosen, divisible, load_if, number
from .ptx import wait_for_prerequisites
from .rowmath import widen


@triton.jit
def sum_partials(
    partial_ptr, out_ptr, first_col, num_partials, cols, weight_ptr, finish: tl.constexpr, norm: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Sum tile.cols columns, from first_col on, of [num_partials, cols] partials in a fixed order, `finish` the sums
    unless it is None, and round once to the dtype of out. The loads of tile.num_loads times tile.rows rows are under
    way at once."""
    cols = divisible(cols, tile)
    row = tl.arange(0, tile.rows)[:, None]
    col = first_col + tl.arange(0, tile.cols)[None, :].to(tl.int64)  # a row may be wider than 2^31 elements
    in_range = col < cols
    here = partial_ptr + (row.to(tl.int64) * cols + col)
    step = tl.full([], tile.rows, tl.int64) * cols
    total = (row * 0 + col * 0).to(partial_ptr.dtype.element_ty)
    for start in range(0, num_partials, tile.rows * tile.num_loads):
        loads = ()
        for i in tl.static_range(tile.loads):
            is_there = row < num_partials - (start + i * tile.rows)
            loads = loads + (tl.load(here, mask=is_there & in_range, other=0.0),)
            here += step
        some = loads[0]  # added up before they join the total, so that no sum has too many terms
        for i in tl.static_range(1, tile.loads):
            some += loads[i]
        total += some
    total = tl.sum(total, axis=0, keep_dims=True)
    if finish is not None:
        weight = load_if(norm.has_weight, weight_ptr, col, in_range)
        total = finish(total, widen(weight, dtype=norm.acc), norm)
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=in_range)


@triton.jit(do_not_specialize=["num_partials"])
def finalize(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials, cols, weight_ptr, norm: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Each CTA sums one piece of tile.cols columns: the first CTAs those of dw, the next ones those of db. Only
    norm.form.finish_dw needs the weight; weight_ptr may be None without it."""
    if tile.dependent:  # this CTA may run before the backward has ended and its partials are visible
        wait_for_prerequisites()
    piece = tl.program_id(0)
    pieces = tl.cdiv(cols, tile.cols)
    if norm.wants_dw:
        if piece < pieces:
            first_col = piece.to(tl.int64) * tile.cols
            finish: tl.constexpr = norm.form.finish_dw
            sum_partials(dw_partial_ptr, dw_ptr, first_col, num_partials, cols, weight_ptr, finish, norm, tile)
    if norm.wants_db:
        of_db = piece - pieces * norm.wants_dw
        if of_db >= 0:
            first_col = of_db.to(tl.int64) * tile.cols
            sum_partials(db_partial_ptr, db_ptr, first_col, num_partials, cols, None, None, norm, tile)


@triton.jit(do_not_specialize=["num_partials"])
def finalize_samples(partial_ptrs, out_ptrs, shares, num_partials, cols, tile: tl.constexpr):
    """`finalize` of sums that have num_partials partials for each sample of rows. The s-th has a row for each shares[s]
    samples, or if that is 0 one for all: Triton 3.6 takes no None in a tuple of numbers. CTA (m, p, s) sums piece p of
    its row m."""
    if tile.dependent:
        wait_for_prerequisites()
    cols = divisible(cols, tile)
    member = tl.program_id(0).to(tl.int64)
    samples = tl.num_programs(0)
    first_col = tl.program_id(1).to(tl.int64) * tile.cols
    for s in tl.static_range(len(shares)):
        if tl.program_id(2) == s:
            share = tl.where(shares[s] > 0, shares[s], samples)
            if member * share < samples:
                count = num_partials * share
                partials = partial_ptrs[s] + member * count * cols
                sum_partials(partials, out_ptrs[s] + member * cols, first_col, count, cols, None, None, None, tile)


@triton.jit(do_not_specialize=["num_blocks"])
def add_blocks(sum_ptrs, out_ptrs, num_blocks, cols, stride, tile: tl.constexpr):
    """Add up the sums that blocks of rows have left, [num_blocks, cols] in rows that are `stride` elements apart, one
    after another: ((b0 + b1) + b2) + ... CTA (p, s) has piece p of the s-th of these sums."""
    col = tl.program_id(0).to(tl.int64) * tile.cols + tl.arange(0, tile.cols)
    in_range = col < cols
    for s in tl.static_range(len(sum_ptrs)):
        if tl.program_id(1) == s:
            here = sum_ptrs[s] + col
            total = tl.load(here, mask=in_range, other=0.0)
            for start in range(1, num_blocks, tile.num_loads):
                sums = ()
                for i in tl.static_range(tile.loads):
                    block = start + i + tl.zeros_like(col)
                    inside = in_range & (block < num_blocks)
                    # -0.0 leaves every number as it is, 0.0 would make 0.0 of -0.0
                    sums = sums + (tl.load(here + block * stride, mask=inside, other=-0.0),)
                for i in tl.static_range(tile.loads):
                    total += sums[i]
            tl.store(out_ptrs[s] + col, total.to(out_ptrs[s].dtype.element_ty), mask=in_range)


@triton.jit
def finalize_several(partial_ptrs, out_ptrs, counts, cols, tile: tl.constexpr):
    """`finalize` of any number of sums, each with its own number of partials, which comes as loads.number takes it. CTA
    (p, s) sums piece p of the s-th."""
    if tile.dependent:
        wait_for_prerequisites()
    first_col = tl.program_id(0).to(tl.int64) * tile.cols
    nth = tl.program_id(1)
    partials = chosen(partial_ptrs, nth)
    count = number(chosen(counts, nth))
    sum_partials(partials, chosen(out_ptrs, nth), first_col, count, cols, None, None, None, tile)
