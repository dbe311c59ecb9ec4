"""Rows in the order of the numbers that an index gives them, for sums of the rows that have the same number.

The order is that of a stable sort: two launches for each digit of a number, whose CTAs share the places of the order
before. CTA c of the first counts how often its places have each digit, as row c of the counts; CTA c of the second
knows from these where its rows go. Keys are numbers in ascending order. Those below 0 are -1, and those from `size` on
are `size`.

Backwards take their rows in this order. The rows of a key are divided among CTAs as those of a sample are, so that CTAs
that run at the same time read rows that lie near one another. The CTAs of a key are adjacent (loads.share_of_key), and
so are its rows of the partials, which `sum_keys` adds up.
"""

import triton
import triton.language as tl

from .finalizer import sum_partials
from .loads import first_of_key, most_places
from .ptx import wait_for_prerequisites


@triton.jit
def tiles_of_cta(rows, tile: tl.constexpr):
    tiles = tl.cdiv(rows, tile.rows)
    cta = tl.program_id(0).to(tl.int64)
    return cta * tiles // tl.num_programs(0), (cta + 1) * tiles // tl.num_programs(0)


@triton.jit
def keys_and_digits(key_ptr, place, rows, size, tile: tl.constexpr):
    """The keys at some places, and which of their digits is which, [tile.rows, tile.digits]; none beyond the rows."""
    inside = place < rows
    keys = tl.load(key_ptr + place, mask=inside, other=0)
    keys = tl.minimum(tl.maximum(keys, -1), size).to(tl.int32)
    digits = tl.where(inside, ((keys + 1) >> tile.shift) & (tile.digits - 1), -1)
    return keys, (digits[:, None] == tl.arange(0, tile.digits)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "size"])
def count_digits(key_ptr, count_ptr, rows: "i64", size: "i64", tile: tl.constexpr):
    first, last = tiles_of_cta(rows, tile)
    counts = tl.full([tile.rows, tile.digits], 0, tl.int32)
    for at in range(first, last):
        _, digits = keys_and_digits(key_ptr, at * tile.rows + tl.arange(0, tile.rows), rows, size, tile)
        counts += digits
    digit = tl.arange(0, tile.digits)
    tl.store(count_ptr + tl.program_id(0) * tile.digits + digit, tl.sum(counts, axis=0))


@triton.jit(do_not_specialize=["rows", "size"])
def sort_by_digit(
    key_ptr, order_ptr, count_ptr, sorted_key_ptr, sorted_order_ptr, rows: "i64", size: "i64", tile: tl.constexpr
):  # fmt: skip
    """`order_ptr` is None before the first pass: rows are in their own order."""
    digit = tl.arange(0, tile.digits)[None, :]
    before = tl.full([tile.rows, tile.digits], 0, tl.int32)  # rows with the digit in CTAs before this one
    all_of_it = tl.full([tile.rows, tile.digits], 0, tl.int32)
    for start in range(0, tl.num_programs(0), tile.rows):
        cta = start + tl.arange(0, tile.rows)[:, None]
        counts = tl.load(count_ptr + cta * tile.digits + digit, mask=cta < tl.num_programs(0), other=0)
        all_of_it += counts
        before += tl.where(cta < tl.program_id(0), counts, 0)
    total = tl.sum(all_of_it, axis=0)
    goes_to = tl.cumsum(total, axis=0) - total + tl.sum(before, axis=0)
    first, last = tiles_of_cta(rows, tile)
    for at in range(first, last):
        place = at * tile.rows + tl.arange(0, tile.rows)
        keys, digits = keys_and_digits(key_ptr, place, rows, size, tile)
        target = tl.sum(digits * (goes_to[None, :] + tl.cumsum(digits, axis=0) - 1), axis=1)
        order = place.to(tl.int32)
        if order_ptr is not None:
            order = tl.load(order_ptr + place, mask=place < rows, other=0)
        tl.store(sorted_key_ptr + target, keys, mask=place < rows)
        tl.store(sorted_order_ptr + target, order, mask=place < rows)
        goes_to += tl.sum(digits, axis=0)


@triton.jit(do_not_specialize=["rows", "num_partials"])
def sum_keys(
    partial_ptrs, out_ptrs, key_ptr, rows: "i64", num_partials, cols, tile_rows: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Round each sum once, to the dtype of out; 0 for a key that no row has. The partials are of tiles of tile_rows
    rows. CTA (key, p, t) has piece p of tensor t."""
    if tile.dependent:
        wait_for_prerequisites()
    key = tl.program_id(0).to(tl.int64)
    first_col = tl.program_id(1).to(tl.int64) * tile.cols
    bounds = key + tl.arange(0, 2)[:, None]
    found = bounds * 0  # where this key and the next one begin: no key before is as large, and at most `left` behind it
    left = rows
    lanes: tl.constexpr = 256
    while left > 0:
        step = tl.cdiv(left, lanes)
        place = found + (tl.arange(0, lanes)[None, :] + 1) * step - 1
        inside = place < rows
        smaller = inside & (tl.load(key_ptr + place, mask=inside, other=0) < bounds)
        found += tl.sum(smaller.to(tl.int32), axis=1, keep_dims=True) * step
        left = step - 1
    most = most_places(rows, tl.num_programs(0), num_partials, tile_rows)
    first, last = first_of_key(tl.min(found), key, most), first_of_key(tl.max(found), key, most)
    for t in tl.static_range(len(out_ptrs)):
        if tl.program_id(2) == t:
            partials, out = partial_ptrs[t] + first * cols, out_ptrs[t] + key * cols
            sum_partials(partials, out, first_col, last - first + 1, cols, None, None, None, tile)
