"""Norms of several tensors of narrow rows in one grid, such as q and k; portable Triton.

CTA p of a tensor's P has its row tiles p, p + P, p + 2P, ... The first CTAs have the first tensor, the next ones the
second, and so on, but in a forward that turns rows they are mixed. A row is held in registers, in chunks as in
multiwave.py. The form may turn whole rows, by cos and sin in memory. A backward reads no statistics: it computes them
again. It stores its CTA's sums of dw and db as row p of the tensor's [P, cols] partials.

With tile.adjacent, a thread of a forward has so many rows that follow each other, such as two heads of a token.

With tile.together, a tile is the heads of a token, which are normalized as one row. Weights, biases, sums and partials
then have elements for each of these heads, [heads, cols].

What the tensors have each, comes as a tuple with an element for each. Rows lie at tile.levels nested strides, the
outermost first, which `strides` has for the tensors in turn, level by level. `sizes` says how many rows each level but
the first has, from the innermost on: see launch.sizes_of. Row counts are 32-bit, offsets 64-bit. Numbers of rows and
CTAs come as loads.number takes them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .loads import load_parameter, number
from .multiwave import (
    as_normalized,
    columns,
    held_rows,
    inside,
    load_chunks,
    normalized_columns,
    row_moments,
    store_chunk,
)
from .ptx import behind, launch_dependents, pack, unpack
from .rowmath import (
    columns_of_pairs,
    gradient_beside_scaled,
    inverse_std,
    normalize,
    row_means,
    sums_equal_elements,
    widen,
)


class Part(NamedTuple):
    """Which tensor a CTA has, its number among the CTAs of this tensor, and how many these are."""

    tensor: tl.tensor
    cta: tl.tensor
    ctas: tl.tensor


@triton.jit
def pick(choices, part, level: tl.constexpr, tile: tl.constexpr):
    """The element of the CTA's tensor, among those of a level."""
    chosen = choices[level * tile.num_parts]
    for i in tl.static_range(1, tile.parts):
        chosen = tl.where(part.tensor == i, choices[level * tile.num_parts + i], chosen)
    return chosen


@triton.jit
def part_of_grid(ctas, share, tile: tl.constexpr):
    """The CTA's part. With a `share`, CTAs of the other tensors lie evenly between those of the first: they are this
    share of the grid, in units of 2^-31, rounded up."""
    cta = tl.program_id(0)
    tensor = cta * 0
    first = cta * 0
    count = number(ctas[0])
    if share is not None:
        before = cta.to(tl.int64) * share
        others = (before >> 31).to(tl.int32)
        is_other = ((before + share) >> 31).to(tl.int32) > others
        cta = tl.where(is_other, count + others, cta - others)
    end = count
    for i in tl.static_range(1, tile.parts):
        tensor = tl.where(cta >= end, i, tensor)
        first = tl.where(cta >= end, end, first)
        count = tl.where(cta >= end, number(ctas[i]), count)
        end += number(ctas[i])
    return Part(tensor, cta - first, count)


@triton.jit
def place(row, sizes, part, tile: tl.constexpr):
    """The indices of rows at each level, outermost first. n // size is a product with a reciprocal: launch.sizes_of."""
    found = ()
    for i in tl.static_range(tile.levels - 1):
        size = number(pick(sizes, part, 3 * i, tile))
        reciprocal = pick(sizes, part, 3 * i + 1, tile).to(tl.uint32, bitcast=True)
        shift = number(pick(sizes, part, 3 * i + 2, tile)).to(tl.uint32)
        outer = (tl.umulhi((2 * row).to(tl.uint32), reciprocal) >> shift).to(tl.int32)
        found = (row - outer * size,) + found
        row = outer
    return (row,) + found


@triton.jit
def wide(number):
    """A number that is not negative, in 64 bits. As an unsigned one it can be multiplied by one instruction also where
    the compiler has moved its extension out of a loop."""
    if number.dtype == tl.int32:
        number = number.to(tl.uint32, bitcast=True)
    return number.to(tl.int64)


@triton.jit
def starts(indices, strides, part, tile: tl.constexpr):
    """Element offsets [tile.rows, 1] of the starts of rows."""
    start = wide(indices[0]) * wide(pick(strides, part, 0, tile))
    for level in tl.static_range(1, tile.levels):
        start += wide(indices[level]) * wide(pick(strides, part, level, tile))
    return start[:, None]


@triton.jit
def columns_of_tile(c: tl.constexpr, tile: tl.constexpr):
    """`columns` [tile.rows, tile.chunk]: what is loaded by them is where a thread's elements of the rows are. Otherwise
    Triton may move these elements through shared memory to where it has loaded a weight."""
    return columns(c, tile) + tl.full([tile.rows, 1], 0, tl.int32)


@triton.jit
def rows_of_parameters(ptr, cols: tl.constexpr, tile: tl.constexpr):
    """Where the weights or biases of a tile's rows begin: padding has those of the last row. None as it is."""
    found = ptr
    if tile.together > 1 and ptr is not None:
        found = ptr + tl.minimum(tl.arange(0, tile.rows), tile.together - 1)[:, None] * cols
    return found


@triton.jit
def load_table(ptr, start, row_mask, rest: tl.constexpr, tile: tl.constexpr):
    """cos or sin of the chunks that have turned columns, with `rest` for other columns; one of each pair of adjacent
    columns, if it is that of both. No chunks without a table."""
    table = ()
    if ptr is not None:
        for c in tl.static_range(tile.turned_chunks):
            if tile.per_pair and tile.pairs:
                col = c * (tile.width // 2) + tl.arange(0, tile.chunk // 2)[None, :]
                mask = row_mask & (col < tl.minimum(tile.turned, (c + 1) * tile.width) // 2)
            else:
                mask = row_mask & inside(c, tile.turned, tile)
                col = columns(0, tile) if tile.per_pair else columns(c, tile)
            table = table + (tl.load(ptr + start + col, mask=mask, other=rest if tile.is_beside(c) else 0.0),)
    return table


@triton.jit
def load_tables(cos_ptr, sin_ptr, indices, strides, part, row_mask, tile: tl.constexpr):
    cos = ()
    sin = ()
    if cos_ptr is not None:
        start = starts(indices, strides, part, tile)
        cos = load_table(cos_ptr, start, row_mask, 1.0, tile)
        sin = load_table(sin_ptr, start, row_mask, 0.0, tile)
    return cos, sin


@triton.jit
def wide_chunks(chunks, norm: tl.constexpr, tile: tl.constexpr):
    """The chunks in the accumulation dtype."""
    found = ()
    for c in tl.static_range(len(chunks)):
        found = found + (widen(chunks[c], tile.in_pairs, norm.acc),)
    return found


@triton.jit
def turned(chunks, turn: tl.constexpr, cos, sin, back: tl.constexpr, norm: tl.constexpr, tile: tl.constexpr):
    """`wide_chunks`, turned if the form does so."""
    found = wide_chunks(chunks, norm, tile)
    if turn is not None:
        found = turn(found, wide_chunks(cos, norm, tile), wide_chunks(sin, norm, tile), back, tile)
    return found


@triton.constexpr_function
def has_exact_mean(numbers, cols, norm, tile):
    """Whether the mean of equal elements, which are `numbers`, is exact as it is: for LayerNorm of vectors that are a
    power of two of columns, without padding."""
    whole = tile.vectors and tile.chunk * tile.num_chunks == cols and cols & (cols - 1) == 0 and tile.together == 1
    return norm.layer and whole and numbers is not None and sums_equal_elements(numbers, norm.acc, cols)


@triton.jit
def squares_of_vectors(x, tile: tl.constexpr):
    """The sums of the squares of each vector's elements, by a multiply-add for each."""
    vectors = x.reshape(tile.rows, tile.chunk // 8, 8)
    return tl.sum(vectors * vectors, axis=2)


@triton.jit
def statistics(h, dtype: tl.constexpr, cols: tl.constexpr, eps, norm: tl.constexpr, tile: tl.constexpr):
    """mean and rstd [tile.rows, 1] of h, which is x, of this dtype, where the form does not turn it."""
    numbers: tl.constexpr = None if norm.form.turn_h is not None else dtype
    if has_exact_mean(numbers, cols, norm, tile):
        total = h[0]
        for c in tl.static_range(1, tile.chunks):
            total += h[c]
        mean = tl.sum(total, axis=1) / cols
        squares = squares_of_vectors(h[0] - mean[:, None], tile)
        for c in tl.static_range(1, tile.chunks):
            squares += squares_of_vectors(h[c] - mean[:, None], tile)
        variance = tl.sum(squares, axis=1) / cols
    else:
        mean, variance = row_moments(h, cols, norm, tile, numbers)
    rstd = inverse_std(variance, tl.full([], eps, norm.acc), norm, True)
    return mean[:, None], rstd[:, None]


@triton.jit
def of_columns(table, tile: tl.constexpr):
    """A chunk of cos or sin with an element for each column."""
    found = table
    if tile.per_pair and tile.pairs:
        found = tl.join(table, table).reshape(tile.rows, tile.chunk)
    return found


@triton.jit
def all_come(x, cos, sin, zero, norm: tl.constexpr, tile: tl.constexpr):
    """x, known once cos and sin have come, too. Behind LayerNorm's mean the compiler would ask for them after x has."""
    found = x
    if norm.layer and tile.in_pairs and len(cos) > 0:
        if x[0].dtype == tl.bfloat16 and cos[0].dtype == tl.bfloat16 and sin[0].dtype == tl.bfloat16:
            found = ()
            for c in tl.static_range(tile.chunks):
                if c < len(cos):
                    found = found + (behind(x[c], of_columns(cos[c], tile), of_columns(sin[c], tile), zero),)
                else:
                    found = found + (x[c],)
    return found


@triton.jit
def write_tile(
    first, count, x_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, y_ptr, part, sizes, x_strides, table_strides,
    cols: tl.constexpr, eps, norm: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """y of the row tile from row `first` on. What is beyond the last rows is computed as these, and not stored: loads
    without masks have fewer instructions. For adjacent rows, addresses, cos, sin and parameters are found once."""
    row = first + tl.arange(0, tile.rows) * tile.adjacent
    are_rows = held_rows(tile)
    in_range = (row < count)[:, None] & are_rows
    at = place(tl.minimum(row, count - tile.adjacent), sizes, part, tile)
    start = starts(at, x_strides, part, tile)
    step = wide(pick(x_strides, part, tile.num_levels - 1, tile))
    rows_of_x = ()
    for n in tl.static_range(tile.nth_rows):
        rows_of_x = rows_of_x + (load_chunks(x_ptr, start + n * step, are_rows, cols, tile),)
    cos, sin = load_tables(cos_ptr, sin_ptr, at, table_strides, part, are_rows, tile)
    weight = load_parameter(weight_ptr, cols, norm.has_weight, columns_of_tile, tile)
    bias = load_parameter(bias_ptr, cols, norm.has_bias, columns_of_tile, tile)
    for n in tl.static_range(tile.nth_rows):
        x = rows_of_x[n]
        if n == 0:
            x = all_come(x, cos, sin, (count >> 31).to(tl.int16), norm, tile)
        h = turned(x, norm.form.turn_h, cos, sin, False, norm, tile)
        mean, rstd = statistics(h, x_ptr.dtype.element_ty, cols, eps, norm, tile)
        u = ()
        for c in tl.static_range(tile.chunks):
            x_hat = normalize(h[c], mean, rstd, norm)
            x_hat = norm.form.round_x_hat(x_hat, (x[c],), norm)
            scaled = norm.form.scale(x_hat, widen(weight[c], tile.in_pairs, norm.acc), norm)
            u = u + (norm.form.shift(scaled, widen(bias[c], tile.in_pairs, norm.acc), norm),)
        u = turned(u, norm.form.turn_u, cos, sin, False, norm, tile)
        to = ((row.to(tl.int64) + n) * cols)[:, None]
        for c in tl.static_range(tile.chunks):
            store_chunk(y_ptr, to, u[c], in_range, cols, c, tile)


@triton.jit
def forward(
    x_ptrs, weight_ptrs, bias_ptrs, cos_ptr, sin_ptr, y_ptrs, rows, ctas, share, sizes, x_strides, table_strides,
    eps: "fp64", cols: tl.constexpr, norm: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Stores y, contiguous, of the CTA's row tiles. With tile.one_tile it has one. x is loaded first: a CTA
    waits for what it loads once."""
    part = part_of_grid(ctas, share, tile)
    x_ptr = pick(x_ptrs, part, 0, tile)
    y_ptr = pick(y_ptrs, part, 0, tile)
    count = number(pick(rows, part, 0, tile))
    weight_ptr = None
    if norm.has_weight:
        weight_ptr = rows_of_parameters(pick(weight_ptrs, part, 0, tile), cols, tile)
    bias_ptr = None
    if norm.has_bias:
        bias_ptr = rows_of_parameters(pick(bias_ptrs, part, 0, tile), cols, tile)
    start = part.cta * tile.step
    if tile.one_tile:
        write_tile(
            start, count, x_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, y_ptr, part, sizes, x_strides, table_strides,
            cols, eps, norm, tile,
        )  # fmt: skip
    else:
        for first in range(start, count, part.ctas * tile.step):
            write_tile(
                first, count, x_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, y_ptr, part, sizes, x_strides,
                table_strides, cols, eps, norm, tile,
            )  # fmt: skip


@triton.jit
def centered(chunks, mean, norm: tl.constexpr, tile: tl.constexpr):
    """x_hat without the factor rstd."""
    found = chunks
    if norm.layer:
        found = ()
        for c in tl.static_range(tile.chunks):
            found = found + (chunks[c] - mean,)
    return found


@triton.jit
def copy_rows(ptrs, rows, sizes, from_strides, to_strides, part, cols: tl.constexpr, tile: tl.constexpr):
    """The grid's CTAs copy the rows of one more tensor to those of another: `ptrs` has both, `rows` their number."""
    count = number(rows[0])
    for first in range(tl.program_id(0) * tile.rows, count, tl.num_programs(0) * tile.rows):
        row = first + tl.arange(0, tile.rows)
        in_range = (row < count)[:, None]
        at = place(row, sizes, part, tile)
        chunks = load_chunks(ptrs[0], starts(at, from_strides, part, tile), in_range, cols, tile)
        start = starts(at, to_strides, part, tile)
        for c in tl.static_range(tile.chunks):
            store_chunk(ptrs[1], start, chunks[c], in_range, cols, c, tile)


@triton.constexpr_function
def asks_for_rows_only(dtype, tile):
    """Whether a backward asks again for rows that it has where none are left, in place of masks. That takes fewer
    instructions, but each CTA loads a tile in vain at its end: it pays where cos and sin are loaded, too."""
    return tile.turned > 0 and dtype == tl.bfloat16


@triton.jit
def held(chunks, tile: tl.constexpr):
    """Chunks as a loop carries them: bfloat16 in pairs if rows are turned. Two values of 16 bits would be joined again
    in each iteration, for which the loads must have come."""
    found = ()
    for c in tl.static_range(len(chunks)):
        chunk = chunks[c]
        if tile.in_pairs and tile.turned > 0 and chunk.dtype == tl.bfloat16 and chunk.shape[1] > 1:
            low, high = columns_of_pairs(chunk)
            chunk = pack(low, high)
        found = found + (chunk,)
    return found


@triton.jit
def released(chunks, tile: tl.constexpr):
    """Chunks that were held; what was in pairs in float32."""
    found = ()
    for c in tl.static_range(len(chunks)):
        chunk = chunks[c]
        if chunk.dtype == tl.int32:
            low, high = unpack(chunk)
            chunk = tl.join(low, high).reshape(low.shape[0], 2 * low.shape[1])
        found = found + (chunk,)
    return found


@triton.jit
def load_ahead(
    x_ptr, dy_ptr, cos_ptr, sin_ptr, at, in_range, x_strides, dy_strides, table_strides, part, cols: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """x, dy, cos and sin of rows, held. Out of range dy is 0."""
    asked = in_range
    if asks_for_rows_only(x_ptr.dtype.element_ty, tile):
        asked = held_rows(tile)
    x = load_chunks(x_ptr, starts(at, x_strides, part, tile), asked, cols, tile)
    dy = load_chunks(dy_ptr, starts(at, dy_strides, part, tile), in_range, cols, tile)
    cos, sin = load_tables(cos_ptr, sin_ptr, at, table_strides, part, asked, tile)
    return held(x, tile), held(dy, tile), held(cos, tile), held(sin, tile)


@triton.jit
def store_sums(ptr, sums, here, everywhere, c: tl.constexpr, cols: tl.constexpr, tile: tl.constexpr):
    """Sums of a chunk, to the partials of CTA `here`."""
    if tile.together > 1:
        start = here * tile.together * cols + tl.arange(0, tile.rows)[:, None] * cols
        store_chunk(ptr, start, sums, held_rows(tile), cols, c, tile)
    else:
        store_chunk(ptr, here * cols, tl.sum(sums, axis=0)[None, :], everywhere, cols, c, tile)


@triton.jit
def backward(
    x_ptrs, dy_ptrs, weight_ptrs, cos_ptr, sin_ptr, dx_ptrs, dw_ptrs, db_ptrs, rows, ctas, sizes, x_strides, dy_strides,
    dx_strides, table_strides, copy_ptrs, copied_rows, copy_sizes, from_strides, to_strides, eps: "fp64",
    cols: tl.constexpr, norm: tl.constexpr, tile: tl.constexpr, copy_tile: tl.constexpr = None,
):  # fmt: skip
    """dx of the CTA's row tiles, and its row of its tensor's partials of dw and db. The next tile is loaded once
    this one is turned. With a copy_tile, the CTA copies its share of rows while it waits for the first."""
    part = part_of_grid(ctas, None, tile)
    x_ptr = pick(x_ptrs, part, 0, tile)
    dy_ptr = pick(dy_ptrs, part, 0, tile)
    count = number(pick(rows, part, 0, tile))
    weight_ptr = None
    if norm.has_weight:
        weight_ptr = rows_of_parameters(pick(weight_ptrs, part, 0, tile), cols, tile)
    weight = load_parameter(weight_ptr, cols, norm.has_weight, columns, tile)
    dw = ()
    db = ()
    for _ in tl.static_range(tile.chunks):
        dw = dw + (tl.full([tile.rows, tile.chunk], 0.0, norm.acc),)
        db = db + (tl.full([tile.rows, tile.chunk], 0.0, norm.acc),)
    only_rows: tl.constexpr = asks_for_rows_only(x_ptr.dtype.element_ty, tile)
    step = part.ctas * tile.step
    next_row = part.cta * tile.step + tl.arange(0, tile.rows)
    row = tl.minimum(next_row, count - 1) if only_rows else next_row
    next_at = place(row, sizes, part, tile)
    ahead = (next_row < count)[:, None] & held_rows(tile)
    next_x, next_dy, next_cos, next_sin = load_ahead(
        x_ptr, dy_ptr, cos_ptr, sin_ptr, next_at, ahead, x_strides, dy_strides, table_strides, part, cols, tile
    )  # fmt: skip
    if copy_tile is not None:
        copy_rows(copy_ptrs, copied_rows, copy_sizes, from_strides, to_strides, part, cols, copy_tile)
    for _ in range(part.cta * tile.step, count, step):
        at = next_at
        x = released(next_x, tile)
        dy = released(next_dy, tile)
        cos = released(next_cos, tile)
        sin = released(next_sin, tile)
        in_range = ahead
        next_row += step
        ahead = (next_row < count)[:, None] & held_rows(tile)
        if tile.together > 1 and only_rows:
            row = tl.minimum(next_row, count - 1)
        else:
            row = tl.where(next_row < count, next_row, row) if only_rows else next_row
        next_at = place(row, sizes, part, tile)
        h = turned(x, norm.form.turn_h, cos, sin, False, norm, tile)
        du = turned(dy, norm.form.turn_u, cos, sin, True, norm, tile)
        next_x, next_dy, next_cos, next_sin = load_ahead(
            x_ptr, dy_ptr, cos_ptr, sin_ptr, next_at, ahead, x_strides, dy_strides, table_strides, part, cols, tile
        )  # fmt: skip
        mean, rstd = statistics(h, x_ptr.dtype.element_ty, cols, eps, norm, tile)
        if not only_rows:  # of what is no row it is infinite if eps is 0, and x_hat would be NaN
            rstd = tl.where(in_range, rstd, 0.0)
        h = centered(h, mean, norm, tile)
        if tile.together > 1:  # loaded again: registers are short
            weight = load_parameter(weight_ptr, cols, norm.has_weight, columns, tile)
        g = ()
        new_dw = ()
        new_db = ()
        for c in tl.static_range(tile.chunks):
            scaled = du[c] * rstd  # in place of x_hat and dx, which would both be scaled
            g = g + (norm.form.upstream(scaled, widen(weight[c], tile.in_pairs, norm.acc), norm),)
            new_dw = new_dw + (dw[c] + norm.form.to_dw(scaled, h[c], norm),)
            new_db = new_db + (db[c] + norm.form.to_db(du[c], norm),)
        dw = new_dw
        db = new_db
        if norm.wants_dx:
            sum_gx = g[0] * h[0]
            sum_g = g[0]
            for c in tl.static_range(1, tile.chunks):
                sum_gx += g[c] * h[c]
                sum_g += g[c]
            sum_gx = as_normalized(sum_gx, tile)
            sum_g = as_normalized(sum_g, tile)
            mean_gx, mean_g = row_means(sum_gx, sum_g, normalized_columns(cols, tile), norm)
            dh = ()
            for c in tl.static_range(tile.chunks):
                dh = dh + (gradient_beside_scaled(g[c], h[c], rstd, mean_gx, mean_g, norm),)
            dx = turned(dh, norm.form.turn_h, cos, sin, True, norm, tile)
            dx_ptr = pick(dx_ptrs, part, 0, tile)
            if tile.together > 1:  # found again: registers are short
                in_range = held_rows(tile)
                at = place(next_row - step, sizes, part, tile)
            start = starts(at, dx_strides, part, tile)
            for c in tl.static_range(tile.chunks):
                store_chunk(dx_ptr, start, dx[c], in_range, cols, c, tile)
    if tile.announces_end:  # saves time only: the dependent launch waits for this one's end
        launch_dependents()
    here = part.cta + tl.zeros([1, 1], tl.int64)
    everywhere = here >= 0
    for c in tl.static_range(tile.chunks):
        if norm.wants_dw:
            store_sums(pick(dw_ptrs, part, 0, tile), dw[c], here, everywhere, c, cols, tile)
        if norm.wants_db:
            store_sums(pick(db_ptrs, part, 0, tile), db[c], here, everywhere, c, cols, tile)
