"""Sums of the rows that have the same number, as gradients of tables are. They are the same in every run.

The numbers come sorted, as `keys`, and `order` says which row each belongs to. A block is tile.block adjacent places of
this order. CTA (b, c, t) of the first launch adds up the rows of tensor t in block b, tile.chunk columns of them, and
stores a partial sum for each number in the block, as row b + number of the partials: no two blocks and numbers have the
same row, because both ascend. The blocks of a number are adjacent, and so are its partials, which CTA (number, c, t) of
the second launch adds up. Numbers below 0 and from `size` on are left out.
"""

import triton
import triton.language as tl

from .finalizer import sum_partials


@triton.jit
def load_in_order(row_ptr, order_ptr, place, last, col, cols):
    """The rows at some places of the order, before the last one."""
    inside = place < last
    row = tl.load(order_ptr + place, mask=inside, other=0)
    return tl.load(row_ptr + row.to(tl.int64) * cols + col, mask=inside & (col < cols), other=0.0)


@triton.jit
def sum_block(row_ptr, partial_ptr, key_ptr, order_ptr, rows, cols, size, tile: tl.constexpr):
    """The partial sums of one CTA. The load of the next rows is always under way."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, tile.block)
    col = tl.program_id(1).to(tl.int64) * tile.chunk + tl.arange(0, tile.chunk)[None, :]
    place = tl.arange(0, tile.rows)[:, None]
    key_ptr += block * tile.block
    order_ptr += block * tile.block
    keys = tl.load(key_ptr + lane, mask=lane < rows - block * tile.block, other=size).to(tl.int64)
    at = tl.sum((keys < 0).to(tl.int32))
    end = tl.sum((keys < size).to(tl.int32))
    while at < end:
        key = tl.min(tl.where(lane < at, size, keys))
        last = tl.sum((keys <= key).to(tl.int32))
        total = tl.full([tile.rows, tile.chunk], 0.0, partial_ptr.dtype.element_ty)
        ahead = load_in_order(row_ptr, order_ptr, at + place, last, col, cols)
        for start in range(at, last, tile.rows):
            some = ahead
            ahead = load_in_order(row_ptr, order_ptr, start + tile.rows + place, last, col, cols)
            total += some.to(total.dtype)
        target = partial_ptr + (block + key) * cols + col
        tl.store(target, tl.sum(total, axis=0)[None, :], mask=col < cols)
        at = last


@triton.jit(do_not_specialize=["rows", "size"])
def sum_blocks(row_ptrs, partial_ptrs, key_ptr, order_ptr, rows: "i64", cols, size: "i64", tile: tl.constexpr):
    for t in tl.static_range(len(row_ptrs)):
        if tl.program_id(2) == t:
            sum_block(row_ptrs[t], partial_ptrs[t], key_ptr, order_ptr, rows, cols, size, tile)


@triton.jit(do_not_specialize=["rows"])
def sum_segments(
    partial_ptrs, out_ptrs, key_ptr, rows: "i64", cols, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Round each sum once, to the dtype of out; 0 for a number that no row has."""
    key = tl.program_id(0).to(tl.int64)
    first_col = tl.program_id(1).to(tl.int64) * tile.cols
    bounds = key + tl.arange(0, 2)  # the first places of this number and of the next one, by halves of what is left
    found = bounds * 0
    left = rows
    while left > 1:
        half = left // 2
        found = tl.where(tl.load(key_ptr + found + half - 1).to(tl.int64) < bounds, found + half, found)
        left -= half
    found += (tl.load(key_ptr + found).to(tl.int64) < bounds).to(tl.int64)
    begin, end = tl.min(found), tl.max(found)
    first = begin // block
    count = tl.where(begin < end, (end - 1) // block - first + 1, 0).to(tl.int32)
    for t in tl.static_range(len(out_ptrs)):
        if tl.program_id(2) == t:
            partials, out = partial_ptrs[t] + (first + key) * cols, out_ptrs[t] + key * cols
            sum_partials(partials, out, first_col, count, cols, None, None, None, tile)
