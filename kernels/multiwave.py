"""The portable schedule: several CTAs per SM. Each loads, computes and stores its own rows, with the loads of its next
row tile already under way.

A row is held in registers as tile.num_chunks chunks of tile.chunk columns. Only the chunk has to be a power of two, so
a row is padded to a multiple of the chunk and not to the next power of two. CTA p of P owns the row tiles p, p + P,
p + 2P, ... Its sums of dw and db stay in registers and are stored once, as row p of the [P, cols] partials.

Row r of a tensor starts at element (r // inner) * outer_stride + (r % inner) * inner_stride; without norm.nested_rows,
at r * outer_stride. Offsets are 64-bit. Row counts and strides have a fixed type, so that Triton does not compile the
kernel again for one beyond 2^31.

With tile.groups, all of this holds for the columns of each group by themselves, as for a norm of `cols` columns: CTA
(p, 0, k) is CTA p of those of group k, and moves every pointer to where its group begins (loads.of_group).

Row tensors beside x that a form reads or writes come as tuples, or as None: `rows_in` of pointers, `strides_in` of
inner, outer_stride and inner_stride of each, and `rows_out` of pointers to contiguous rows. For row r, those that are
tables (norm.tables) have a row whose number is at row_index_ptr + r; if they have no such row, NaN is read. A backward
adds the rows of `added`, which are contiguous, to the gradient of the row that was normalized.

sample_rows rows may be a sample with CTAs of its own: the first dimension of the grid counts samples, and the second is
P. A row of `shared`, tensors that are given as those of `rows_in` are, belongs to a sample. A backward leaves partials
for each sample, those of sample s from row s * P on: also of the gradients that are summed (norm.summed), with
pointers in `sum_partials`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .loads import (
    Statistics,
    chunk_of,
    combine,
    combine_tiles,
    divisible,
    each_of_group,
    folded,
    load_late_shared,
    load_parameter,
    load_shared,
    load_statistics,
    of_group,
    of_groups,
    plus,
    pointers,
    share_of_cta,
    share_of_key,
    statistics_in_memory,
    stride_of_gradients,
    unfolded,
)
from .ptx import launch_dependents, multiply_add_of_16_bits
from .rowmath import (
    corrected_moments,
    input_gradient,
    inverse_std,
    multiplies_in_16_bits,
    normalize,
    quotient,
    row_means,
    snapped,
    snaps,
    sums_equal_elements,
    widen,
)


class RowsInMemory(NamedTuple):
    """Where the rows of a tensor begin: see the module's docstring."""

    ptr: tl.tensor
    inner: tl.tensor
    outer_stride: tl.tensor
    inner_stride: tl.tensor


@triton.jit
def rows_in_memory(ptr, inner, outer_stride, inner_stride, tile: tl.constexpr):
    return RowsInMemory(ptr, inner, divisible(outer_stride, tile), divisible(inner_stride, tile))


@triton.jit
def other_rows(rows_in, strides_in, t: tl.constexpr, tile: tl.constexpr):
    """Where the rows of the t-th row tensor beside x begin."""
    return rows_in_memory(rows_in[t], strides_in[3 * t], strides_in[3 * t + 1], strides_in[3 * t + 2], tile)


@triton.jit
def numbers_of(row_index_ptr, row, in_range):
    """The numbers of the rows of tables that belong to the rows `row`."""
    return tl.load(row_index_ptr + row, mask=in_range, other=0).to(tl.int64)


@triton.jit
def row_of(t: tl.constexpr, row, in_range, index, norm: tl.constexpr):
    """Which rows of the t-th row tensor beside x belong to the rows `row`, and which of these are there. `index` is the
    pointer to all rows' numbers, or those of these rows, and how many rows a table has."""
    found = row
    is_there = in_range
    if norm.is_table(t):
        found = index[0]
        if found.dtype.is_ptr():
            found = numbers_of(found, row, in_range)
        is_there = in_range & (found.to(tl.uint64) < index[1])  # a negative number is a large one
    return found, is_there


@triton.jit
def numbers(count: tl.constexpr, tile: tl.constexpr):
    """`share_of_key` calls this."""
    return tl.arange(0, count)


@triton.jit
def rows_at(order_ptr, place, last, rows):
    """The rows at some places of an order; from the last place on, what is no row."""
    return tl.load(order_ptr + place, mask=place < last, other=rows)


@triton.jit
def row_start(source, row, norm: tl.constexpr):
    """Element offset of the start of each row; `row` is int64."""
    if norm.nested_rows:
        start = (row // source.inner) * source.outer_stride + (row % source.inner) * source.inner_stride
    else:
        start = row * source.outer_stride
    return start


@triton.jit
def columns(c: tl.constexpr, tile: tl.constexpr):
    """The columns [1, tile.chunk] of chunk c. `load_parameter` calls this too."""
    return c * tile.width + tl.arange(0, tile.chunk)[None, :]


@triton.jit
def inside(c: tl.constexpr, cols, tile: tl.constexpr):
    """Which columns of chunk c are columns of the row."""
    found = columns(c, tile) < cols
    if tile.width < tile.chunk:
        found = found & (tl.arange(0, tile.chunk)[None, :] < tile.width)
    return found


@triton.jit
def mask_of_chunk(row_mask, cols, c: tl.constexpr, tile: tl.constexpr):
    """Which elements of chunk c are inside the tensor. Only the last chunk has columns that may be outside, unless each
    is padded."""
    mask = row_mask
    if c == tile.num_chunks - 1 or tile.width < tile.chunk:
        mask = row_mask & inside(c, cols, tile)
    return mask


@triton.jit
def load_row_tile(source, row, rows, cols, norm: tl.constexpr, tile: tl.constexpr):
    """Rows `row` as tile.num_chunks chunks [tile.rows, tile.chunk] in the tensor's own dtype, with zeros outside the
    tensor."""
    start = row_start(source, row, norm)[:, None]
    row_mask = (row < rows)[:, None]
    return load_chunks(source.ptr, start, row_mask, cols, tile)


@triton.jit
def load_other_tile(
    rows_in, strides_in, index, t: tl.constexpr, row, rows, cols, norm: tl.constexpr, tile: tl.constexpr
):
    """`load_row_tile` of the t-th row tensor beside x."""
    source, in_range = other_rows(rows_in, strides_in, t, tile), row < rows
    found, is_there = row_of(t, row, in_range, index, norm)
    absent = 0.0
    if norm.is_table(t):
        absent = tl.where(is_there == in_range, 0.0, float("nan"))[:, None]
    return load_chunks(source.ptr, row_start(source, found, norm)[:, None], is_there[:, None], cols, tile, absent)


@triton.jit
def load_row_tiles(
    x_rows, rows_in, strides_in, index, row, rows, cols, norm: tl.constexpr, tile: tl.constexpr,
    late: tl.constexpr = True,
):  # fmt: skip
    """`load_row_tile` of x and of the form's other row tensors, as a tuple; without `late`, placeholders for those that
    `load_late_tiles` loads."""
    tiles = (load_row_tile(x_rows, row, rows, cols, norm, tile),)
    if rows_in is not None:
        for t in tl.static_range(len(rows_in)):
            if norm.is_late(t) and not late:
                tiles = tiles + (tiles[0],)
            else:
                tiles = tiles + (load_other_tile(rows_in, strides_in, index, t, row, rows, cols, norm, tile),)
    return tiles


@triton.jit
def load_late_tiles(tiles, rows_in, strides_in, index, row, rows, cols, norm: tl.constexpr, tile: tl.constexpr):
    """The tiles of `load_row_tiles`, complete."""
    found = (tiles[0],)
    if rows_in is not None:
        for t in tl.static_range(len(rows_in)):
            if norm.is_late(t):
                found = found + (load_other_tile(rows_in, strides_in, index, t, row, rows, cols, norm, tile),)
            else:
                found = found + (tiles[1 + t],)
    return found


@triton.jit
def made_again(chunks, rows, tile: tl.constexpr):
    """The chunks of a tile. With tile.makes_again, the compiler does not know that they are the same: it makes values
    of theirs again that it would have to hold."""
    found = chunks
    if tile.makes_again:
        found = ()
        for c in tl.static_range(tile.chunks):
            found = found + (plus_zero_bits(chunks[c], rows),)
    return found


@triton.jit
def tiles_again(tiles, rows, norm: tl.constexpr, tile: tl.constexpr):
    """`made_again` of the tiles of x and of rows_in, but for those that are late."""
    found = (made_again(tiles[0], rows, tile),)
    for t in tl.static_range(1, len(tiles)):
        if norm.is_late(t - 1):
            found = found + (tiles[t],)
        else:
            found = found + (made_again(tiles[t], rows, tile),)
    return found


@triton.jit
def plus_zero_bits(value, rows):
    """`value`. Only who knows that there are fewer than 2^48 rows can tell."""
    as_bits: tl.constexpr = bits_of(value.dtype)
    return (value.to(as_bits, bitcast=True) ^ (rows >> 48).to(as_bits)).to(value.dtype, bitcast=True)


@triton.constexpr_function
def bits_of(dtype):
    """The integers of as many bits."""
    return {16: tl.int16, 32: tl.int32, 64: tl.int64}[dtype.primitive_bitwidth]


@triton.jit
def load_chunks(ptr, start, row_mask, cols, tile: tl.constexpr, absent=0.0):
    """Chunks of rows that begin `start` elements after `ptr`, in their own dtype, and what is in place of others."""
    chunks = ()
    for c in tl.static_range(tile.chunks):
        mask = mask_of_chunk(row_mask, cols, c, tile)
        chunks = chunks + (tl.load(ptr + start + columns(c, tile), mask=mask, other=absent),)
    return chunks


@triton.jit
def load_added(added, start, row_mask, cols, tile: tl.constexpr):
    """`load_chunks` of each tensor of `added`, as a tuple."""
    tiles = ()
    if added is not None:
        for t in tl.static_range(len(added)):
            tiles = tiles + (load_chunks(added[t], start, row_mask, cols, tile),)
    return tiles


@triton.jit
def first_g(dy_ptr, weight_ptr, mask, norm: tl.constexpr):
    """g at the first column of rows that begin at `dy_ptr`, for rowmath.snapped."""
    weight = 0.0
    if norm.has_weight:
        weight = tl.load(weight_ptr).to(norm.acc)
    return norm.form.upstream(tl.load(dy_ptr, mask=mask, other=0.0), weight, norm)


@triton.jit
def load_row_statistics(source, row, rows, norm: tl.constexpr):
    """Statistics [tile.rows, 1]."""
    statistics = load_statistics(source, row, row < rows, norm)
    return Statistics(statistics.mean[:, None], statistics.rstd[:, None])


@triton.jit
def store_chunk(ptr, start, value, row_mask, cols, c: tl.constexpr, tile: tl.constexpr):
    mask = mask_of_chunk(row_mask, cols, c, tile)
    tl.store(ptr + start + columns(c, tile), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def held_rows(tile: tl.constexpr):
    """Which rows of a tile are not padding, [tile.rows, 1]."""
    held = tl.full([tile.rows, 1], True, tl.int1)
    if tile.together > 1 and tile.together < tile.rows:
        held = (tl.arange(0, tile.rows) < tile.together)[:, None]
    return held


@triton.jit
def as_normalized(elements, tile: tl.constexpr):
    """Elements that are added up by rows, [tile.rows, tile.chunk]; their sum, [1, 1], if the rows are normalized as
    one."""
    if tile.together > 1:
        elements = tl.sum(tl.sum(elements, axis=1, keep_dims=True), axis=0, keep_dims=True)
    return elements


@triton.jit
def normalized_columns(cols, tile: tl.constexpr):
    """How many elements have one mean."""
    if tile.together > 1:
        cols = cols * tile.together
    return cols


@triton.jit
def row_moments(x, cols, norm: tl.constexpr, tile: tl.constexpr, numbers: tl.constexpr = None):
    """Mean and variance of rows in registers, [tile.rows] or, of rows that are normalized as one, [1]: the mean of
    (x - mean)^2. RMSNorm's mean is 0. All elements are `numbers`, by default of their dtype."""
    count = normalized_columns(cols, tile)
    if norm.layer:
        total = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
        for c in tl.static_range(tile.chunks):
            total += x[c].to(norm.acc)
        row_mean = quotient(tl.sum(as_normalized(total, tile), axis=1), count)
    else:
        row_mean = tl.full([tile.rows], 0.0, norm.acc)
    mean = row_mean[:, None]
    deviations = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
    squares = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
    for c in tl.static_range(tile.chunks):
        deviation = x[c].to(norm.acc)
        if norm.layer:
            deviation -= mean
            # Padding has x = 0, but a deviation of -mean.
            if c == tile.num_chunks - 1 or tile.width < tile.chunk or tile.together > 1:
                deviation = tl.where(mask_of_chunk(held_rows(tile), cols, c, tile), deviation, 0.0)
        deviations += deviation
        squares += deviation * deviation
    squares = tl.sum(as_normalized(squares, tile), axis=1)
    variance = squares / count
    columns_of_sum: tl.constexpr = tile.padded_columns * tile.together
    if norm.layer and not sums_equal_elements(numbers or x[0].dtype, norm.acc, columns_of_sum):
        deviations = tl.sum(as_normalized(deviations, tile), axis=1)
        row_mean, variance = corrected_moments(row_mean, deviations, squares, count)
    return row_mean, variance


@triton.jit
def write_rows(
    tiles, of_sample, rows_in, strides_in, index, row, rows, cols, weight, bias, y_ptr, mean_ptr, rstd_ptr, rows_out,
    eps, norm: tl.constexpr, tile: tl.constexpr, next_weight_ptr=None, next_bias_ptr=None, next_mean_ptr=None,
    next_rstd_ptr=None,
):  # fmt: skip
    """Store y of row tiles that are in registers, and mean and rstd unless their pointers are None; then those of the
    norm of y, whose parameters no register holds before."""
    in_range = row < rows
    x = combine_tiles(tiles + of_sample, rows_out, norm, tile)
    if rows_out is not None and norm.again is None:
        for t in tl.static_range(len(rows_out)):
            for c in tl.static_range(tile.chunks):
                start = (row * of_groups(cols, tile))[:, None]
                store_chunk(rows_out[t], start, x[c], in_range[:, None], cols, c, tile)
    y = write_normalized(
        x, tiles, of_sample, rows_in, strides_in, index, row, rows, cols, weight, bias, y_ptr, mean_ptr, rstd_ptr, eps,
        norm, tile,
    )  # fmt: skip
    if norm.again is not None:
        again: tl.constexpr = norm.again
        y = without_padding(y, cols, norm, tile)
        next_weight = load_parameter(next_weight_ptr, cols, again.has_weight, columns, tile)
        next_bias = load_parameter(next_bias_ptr, cols, again.has_bias, columns, tile)
        write_normalized(
            y, (y,), (), None, None, index, row, rows, cols, next_weight, next_bias, rows_out[0], next_mean_ptr,
            next_rstd_ptr, eps, again, tile,
        )  # fmt: skip


@triton.jit
def without_padding(y, cols, norm: tl.constexpr, tile: tl.constexpr):
    """Chunks of y with zeros where no column is. RMSNorm's have these: x, bias and what is added are 0 there."""
    chunks = ()
    for c in tl.static_range(tile.chunks):
        chunk = y[c]
        if norm.layer and c == tile.num_chunks - 1:
            chunk = tl.where(inside(c, cols, tile), chunk, 0.0).to(chunk.dtype)
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def write_normalized(
    x, tiles, of_sample, rows_in, strides_in, index, row, rows, cols, weight, bias, y_ptr, mean_ptr, rstd_ptr, eps,
    norm: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Store y of rows x that are made of `tiles`, and their statistics. Returns y as it is stored. Rows of tables are
    loaded when the statistics are known, from the cache, so that no register holds them before."""
    in_range = row < rows
    row_mean, variance = row_moments(x, cols, norm, tile)
    if mean_ptr is not None:
        tl.store(mean_ptr + of_groups(row, tile), row_mean, mask=in_range)
    row_rstd = inverse_std(variance, tl.full([], eps, norm.acc), norm)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + of_groups(row, tile), row_rstd, mask=in_range)
    mean = row_mean[:, None]
    rstd = row_rstd[:, None]
    tiles = load_late_tiles(tiles, rows_in, strides_in, index, row, rows, cols, norm, tile) + of_sample
    stored = ()
    for c in tl.static_range(tile.chunks):
        of_chunk = chunk_of(tiles, c)
        y = normalize(x[c].to(norm.acc), mean, rstd, norm)
        if multiplies_in_16_bits(norm, of_chunk, weight[c], bias[c], y_ptr.dtype.element_ty):
            y = multiply_add_of_16_bits(y, weight[c], bias[c])
        else:
            y = norm.form.round_x_hat(y, of_chunk, norm)
            y = norm.form.scale(y, widen(weight[c], dtype=norm.acc), norm)
            y = norm.form.shift(y, widen(bias[c], dtype=norm.acc), norm)
            y = norm.form.finish(y, of_chunk, norm)
        start = (row * of_groups(cols, tile))[:, None]
        y = y.to(y_ptr.dtype.element_ty)
        store_chunk(y_ptr, start, y, in_range[:, None], cols, c, tile)
        stored = stored + (y,)
    return stored


@triton.jit(do_not_specialize=["rows", "x_inner", "sample_rows", "table_rows"])
def forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows: "i64", cols, eps: "fp64", x_inner: "i64",
    x_outer_stride: "i64", x_inner_stride: "i64",
    norm: tl.constexpr, tile: tl.constexpr, rows_in=None, strides_in=None, rows_out=None, shared=None,
    strides_shared=None, sample_rows=None, row_index_ptr=None, table_rows=None, next_weight_ptr=None,
    next_bias_ptr=None, next_mean_ptr=None, next_rstd_ptr=None,
):
    """y of the CTA's row tiles (of its only one, with tile.one_tile), and mean and rstd unless their pointers are
    None. If y is normalized again, `rows_out` is where that goes."""
    cols = divisible(cols, tile)
    x_rows = rows_in_memory(of_group(x_ptr, cols, tile), x_inner, x_outer_stride, x_inner_stride, tile)
    rows_in = each_of_group(rows_in, cols, tile)
    rows_out = each_of_group(rows_out, cols, tile)
    y_ptr = of_group(y_ptr, cols, tile)
    mean_ptr = of_group(mean_ptr, 1, tile)
    rstd_ptr = of_group(rstd_ptr, 1, tile)
    share = share_of_cta(rows, sample_rows)
    step = share.ctas * tile.rows
    row = share.first + share.cta.to(tl.int64) * tile.rows + tl.arange(0, tile.rows)
    named = row  # the rows of tables, if there are any
    if norm.has_tables:
        named = numbers_of(row_index_ptr, row, row < share.last)
    tiles = load_row_tiles(
        x_rows, rows_in, strides_in, (named, table_rows), row, share.last, cols, norm, tile, late=False
    )
    of_sample = load_shared(shared, strides_shared, share.sample, cols, columns, tile)
    weight = load_parameter(of_group(weight_ptr, cols, tile), cols, norm.has_weight, columns, tile)
    bias = load_parameter(of_group(bias_ptr, cols, tile), cols, norm.has_bias, columns, tile)
    inside: tl.constexpr = norm.inside
    weight, bias, of_sample = folded(weight, bias, of_sample, norm, tile)
    if tile.one_tile:
        write_rows(
            tiles, of_sample, rows_in, strides_in, (named, table_rows), row, share.last, cols, weight, bias, y_ptr,
            mean_ptr, rstd_ptr, rows_out, eps, inside, tile, next_weight_ptr, next_bias_ptr, next_mean_ptr,
            next_rstd_ptr,
        )  # fmt: skip
    else:
        for _ in range(tl.cdiv(share.last - share.first - share.cta * tile.rows, step)):
            ahead = row + step
            named_ahead = ahead
            if norm.has_tables:
                named_ahead = numbers_of(row_index_ptr, ahead, ahead < share.last)
            next_tiles = load_row_tiles(
                x_rows, rows_in, strides_in, (named_ahead, table_rows), ahead, share.last, cols, norm, tile, late=False
            )
            write_rows(
                tiles, of_sample, rows_in, strides_in, (named, table_rows), row, share.last, cols, weight, bias, y_ptr,
                mean_ptr, rstd_ptr, rows_out, eps, inside, tile, next_weight_ptr, next_bias_ptr, next_mean_ptr,
                next_rstd_ptr,
            )  # fmt: skip
            row = ahead
            named = named_ahead
            tiles = next_tiles


@triton.jit(do_not_specialize=["rows", "x_inner", "dy_inner", "sample_rows", "table_rows"])
def backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr, rows: "i64", cols,
    x_inner: "i64", x_outer_stride: "i64", x_inner_stride: "i64", dy_inner: "i64", dy_outer_stride: "i64",
    dy_inner_stride: "i64", mean_stride: "i64", rstd_stride: "i64",
    norm: tl.constexpr, tile: tl.constexpr, rows_in=None, strides_in=None, rows_out=None, added=None, bias_ptr=None,
    shared=None, strides_shared=None, sum_partials=None, sample_rows=None, width=None, x_at=None, gate_at=None,
    row_index_ptr=None, table_rows=None, key_ptr=None, order_ptr=None,
):
    """The gradients of the CTA's row tiles, and its row of the partials. With a `width`, dx is the gradient of a tensor
    of so many columns, of which those from x_at and from gate_at on are stored here. With sorted keys, the rows of one
    are a sample, wherever they lie, and the shared rows are those of this number in tables (loads.share_of_key)."""
    index = (row_index_ptr, table_rows)
    cols = divisible(cols, tile)
    dy_ptr = of_group(dy_ptr, cols, tile)
    weight_ptr = of_group(weight_ptr, cols, tile)
    rows_in = each_of_group(rows_in, cols, tile)
    added = each_of_group(added, cols, tile)
    x_rows = rows_in_memory(of_group(x_ptr, cols, tile), x_inner, x_outer_stride, x_inner_stride, tile)
    dy_rows = rows_in_memory(dy_ptr, dy_inner, dy_outer_stride, dy_inner_stride, tile)
    weight = load_parameter(weight_ptr, cols, norm.has_weight, columns, tile)
    bias = load_parameter(of_group(bias_ptr, cols, tile), cols, norm.has_bias, columns, tile)
    if width is not None:
        width, x_at, gate_at = divisible(width, tile), divisible(x_at, tile), divisible(gate_at, tile)
    outs = each_of_group(pointers(dx_ptr, rows_out, norm, x_at, gate_at), cols, tile)
    if key_ptr is None:
        share = share_of_cta(rows, sample_rows)
        rows_of_table = None
    else:
        share = share_of_key(key_ptr, rows, table_rows, numbers, tile)
        rows_of_table = table_rows
    of_sample = load_shared(shared, strides_shared, share.sample, cols, columns, tile, rows_of_table)
    inside: tl.constexpr = norm.inside
    weight, bias, of_sample = folded(weight, bias, of_sample, norm, tile)
    dw = ()
    db = ()
    sums = ()  # those of chunk 0, then those of chunk 1, ...
    for _ in tl.static_range(tile.chunks):
        dw = dw + (tl.full([tile.rows, tile.chunk], 0.0, norm.acc),)
        db = db + (tl.full([tile.rows, tile.chunk], 0.0, norm.acc),)
        for _ in tl.static_range(inside.sums):
            sums = sums + (tl.full([tile.rows, tile.chunk], 0.0, norm.acc),)
    step = share.ctas * tile.rows
    if key_ptr is None:
        row = share.first + share.cta.to(tl.int64) * tile.rows + tl.arange(0, tile.rows)
        end = share.last
    else:
        place = share.first + share.cta * tile.rows + tl.arange(0, tile.rows)
        row = rows_at(order_ptr, place, share.last, rows)
        ahead = rows_at(order_ptr, place + step, share.last, rows)
        end = rows
    next_tiles = load_row_tiles(
        x_rows, rows_in, strides_in, index, row, end, cols, norm, tile, late=False
    )
    dy_next = load_row_tile(dy_rows, row, end, cols, norm, tile)
    source = statistics_in_memory(mean_ptr, rstd_ptr, mean_stride, rstd_stride, norm, tile)
    next_statistics = load_row_statistics(source, row, end, norm)
    # In an order two registers are short for what the compiler would compute before the loop.
    tiles_of_cta = tl.cdiv(share.last - share.first - share.cta * tile.rows, step)
    for _ in tl.range(tiles_of_cta, disable_licm=key_ptr is not None):
        early = next_tiles
        tiles = early + of_sample
        dy = dy_next
        mean = next_statistics.mean
        rstd = next_statistics.rstd
        in_range = row < end
        if key_ptr is None:
            ahead = row + step
        else:  # the rows of a tile are known one tile before they are loaded
            place += step
            later = rows_at(order_ptr, place + step, share.last, rows)
        next_tiles = load_row_tiles(
            x_rows, rows_in, strides_in, index, ahead, end, cols, norm, tile, late=False
        )
        dy_next = load_row_tile(dy_rows, ahead, end, cols, norm, tile)
        next_statistics = load_row_statistics(source, ahead, end, norm)
        if snaps(norm, dy_ptr.dtype.element_ty):
            first = first_g(dy_ptr + row_start(dy_rows, row, norm), weight_ptr, in_range, norm)
        # Nothing is added if there is a width.
        start = (row.to(tl.int64) * stride_of_gradients(cols, width, tile))[:, None]
        others = load_added(added, start, in_range[:, None], cols, tile)
        of_rows = load_late_tiles(early, rows_in, strides_in, index, row, end, cols, norm, tile)
        sum_gx = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
        sum_g = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
        new_dw = ()
        new_db = ()
        for c in tl.static_range(tile.chunks):
            of_chunk = chunk_of(tiles, c)
            x_hat = normalize(combine(of_chunk, None, inside).to(norm.acc), mean, rstd, norm)
            du = inside.form.to_du(dy[c].to(norm.acc), of_chunk, inside)
            g = inside.form.upstream(du, widen(weight[c], dtype=norm.acc), inside)
            sum_gx += g * x_hat
            sum_g += g
            new_dw = new_dw + (dw[c] + inside.form.to_dw(du, x_hat, inside),)
            new_db = new_db + (db[c] + inside.form.to_db(du, inside),)
        dw = new_dw
        db = new_db
        mean_gx, mean_g = row_means(sum_gx, sum_g, cols, norm)
        if snaps(norm, dy_ptr.dtype.element_ty):
            mean_g = snapped(mean_g, first[:, None])
        new_sums = ()
        complete = of_sample
        if key_ptr is not None:
            complete = load_late_shared(
                of_sample, shared, strides_shared, share.sample, cols, columns, norm, tile, table_rows
            )  # fmt: skip
        tiles = tiles_again(of_rows, rows, norm, tile) + complete
        dy = made_again(dy, rows, tile)
        for c in tl.static_range(tile.chunks):
            of_chunk = chunk_of(tiles, c)
            h = combine(of_chunk, None, inside).to(norm.acc)
            wide_dy = dy[c].to(norm.acc)
            w = widen(weight[c], dtype=norm.acc)
            g = inside.form.upstream(inside.form.to_du(wide_dy, of_chunk, inside), w, inside)
            dh = plus(input_gradient(g, h, mean, rstd, mean_gx, mean_g, norm), chunk_of(others, c), False, norm)
            b = widen(bias[c], dtype=norm.acc)
            grads = inside.form.gradients(dh, wide_dy, normalize(h, mean, rstd, norm), w, b, of_chunk, inside)
            for t in tl.static_range(len(outs)):
                store_chunk(outs[t], start, grads[norm.gradient(t)], in_range[:, None], cols, c, tile)
            for s in tl.static_range(inside.sums):
                new_sums = new_sums + (sums[c * inside.sums + s] + grads[inside.gradient_of_sum(s)],)
        sums = new_sums
        row = ahead
        if key_ptr is not None:
            ahead = later
    if tile.announces_end:  # saves time only: the dependent launch waits for this one's end
        launch_dependents()
    if norm.folds:
        weight = load_parameter(weight_ptr, cols, norm.has_weight, columns, tile)
        bias = load_parameter(of_group(bias_ptr, cols, tile), cols, norm.has_bias, columns, tile)
        of_sample = load_shared(shared, strides_shared, share.sample, cols, columns, tile, rows_of_table)
        dw, db, sums = unfolded(dw, db, sums, weight, bias, of_sample, norm, tile)
    # One for each CTA that has rows.
    partials = min(share.ctas, tl.cdiv(share.last - share.first, tile.rows).to(tl.int32))
    for c in tl.static_range(tile.chunks):
        partial = share.cta + tl.zeros([1, 1], tl.int64)
        if key_ptr is not None:  # every CTA has a row, whatever it has
            partial = partial * 0 + tl.program_id(0)
            partials = tl.num_programs(0)
        here, is_any = partial * of_groups(cols, tile), partial < partials
        if sample_rows is not None:
            here += share.sample.to(tl.int64) * share.ctas * of_groups(cols, tile)
        if norm.wants_dw:
            dw_ptr = of_group(dw_partial_ptr, cols, tile)
            store_chunk(dw_ptr, here, tl.sum(dw[c], axis=0)[None, :], is_any, cols, c, tile)
        if norm.wants_db:
            db_ptr = of_group(db_partial_ptr, cols, tile)
            store_chunk(db_ptr, here, tl.sum(db[c], axis=0)[None, :], is_any, cols, c, tile)
        for s in tl.static_range(norm.sums):
            total = tl.sum(sums[c * norm.sums + s], axis=0)[None, :]
            store_chunk(sum_partials[s], here, total, is_any, cols, c, tile)
