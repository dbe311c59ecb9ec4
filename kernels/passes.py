"""The passes of forward and backward over a row tile in registers, for the TMA schedules."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .cluster import sum_over_cluster
from .loads import Statistics, chunk_of, combine, of_groups, plus
from .ptx import multiply_add_of_16_bits
from .row_tile import (
    aligned,
    chunk_with_shared,
    columns_of_thread,
    parameter_row,
    row_as_held,
    store_chunk,
    tile_layout,
)
from .rowmath import (
    corrected_moments,
    gradient_beside_x_hat,
    input_gradient,
    inverse_std,
    multiplies_in_16_bits,
    normalize,
    quotient,
    snapped,
    snaps,
    sums_equal_elements,
    widen,
)


class ColumnSums(NamedTuple):
    """dw, db and the gradients of modulations: chunks of sums in registers or in shared memory, or pointers to the
    partials. Of the last, those of chunk 0 come first, then those of chunk 1, ..., or a pointer for each."""

    dw: tuple
    db: tuple
    more: tuple


@gluon.jit
def add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@gluon.jit
def row_sum(values, exchange, tile: gl.constexpr):
    """Sum of [rows, cluster, chunk] over each row, [rows, cluster], and the exchange's state. Every CTA of the cluster
    gets the sum over all of them."""
    sums, exchange = sum_over_cluster((gl.sum(values, axis=2),), exchange, tile)
    return sums[0], exchange


@gluon.jit
def merge_shares(mean_a, variance_a, mean_b, variance_b):
    """Merges mean / n and variance / n^2 of sets with equal numbers of elements, where n counts the sets that are left:
    those of the union of two, with n / 2, so that one set's are its mean and variance (Chan, Golub, LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances", 1979). Shares take no halves."""
    distance = mean_a - mean_b
    return mean_a + mean_b, 2.0 * (variance_a + variance_b) + distance * distance


@gluon.jit
def merge_exact_shares(coarse_a, fine_a, variance_a, coarse_b, fine_b, variance_b):
    """`merge_shares` of means that are each coarse + fine. Where a mean is thousands of standard deviations, its
    rounding error is as large as the distance of two means; coarse parts have so few bits that their sum is exact."""
    distance = (coarse_a - coarse_b) + (fine_a - fine_b)
    return coarse_a + coarse_b, fine_a + fine_b, 2.0 * (variance_a + variance_b) + distance * distance


@gluon.jit
def by_thread(chunk, tile: gl.constexpr):
    """[rows, cluster, chunk] seen as [rows, cluster, load, thread, adjacent column], in float32."""
    threads: gl.constexpr = tile.threads_per_row
    loads: gl.constexpr = tile.chunk // (threads * tile.vector)
    return gl.reshape(widen(chunk, tile.in_pairs), [tile.rows, tile.cluster, loads, threads, tile.vector])


@gluon.jit
def sum_of_thread(values):
    """[rows, cluster, loads, threads, adjacent columns] -> [rows, cluster, threads]."""
    return gl.sum(gl.sum(values, axis=4), axis=2)


@gluon.jit
def first(a, b):
    return a


@gluon.jit
def some_mean_of_thread(values, tile: gl.constexpr):
    """[rows, cluster, loads, threads, adjacent columns] -> [rows, cluster, threads]: the mean of a thread's first load.
    It is summed by halves, which makes it exact where the elements are equal."""
    by_row: gl.constexpr = [tile.rows, tile.cluster, tile.threads_per_row]
    total = gl.reduce(values, 2, first)
    for halved in gl.static_range(1, tile.vector.bit_length()):
        total = gl.sum(gl.reshape(total, by_row + [tile.vector >> halved, 2]), axis=4)
    mean = gl.reshape(total, by_row) / tile.vector
    return gl.convert_layout(mean, gl.SliceLayout(2, gl.SliceLayout(4, values.type.layout)), assert_trivial=True)


@gluon.jit
def shares_of_threads(x, tile: gl.constexpr):
    """What `merge_shares` merges, in two passes over a thread's registers. The sum of equal elements must be exact."""
    share: gl.constexpr = 1.0 / tile.threads_per_row
    total = by_thread(x[0], tile)
    for c in gl.static_range(1, tile.chunks):
        total += by_thread(x[c], tile)
    mean = quotient(sum_of_thread(total), tile.columns_per_thread)
    of_thread = gl.expand_dims(gl.expand_dims(mean, 2), 4)
    squares = gl.zeros_like(total)
    for c in gl.static_range(tile.chunks):
        deviation = by_thread(x[c], tile) - of_thread
        squares += deviation * deviation
    return mean * share, sum_of_thread(squares) / tile.columns_per_thread * (share * share)


@gluon.jit
def exact_shares_of_threads(x, tile: gl.constexpr):
    """What `merge_exact_shares` merges, in one pass over a thread's registers: from the deviations from the mean of k
    of its n columns, which are 0 where all elements are equal. The variance is a difference of two numbers, of which
    none is more than n / k times as large (Samuelson, "How deviant can you be?", 1968)."""
    share: gl.constexpr = 1.0 / tile.threads_per_row
    some_mean = some_mean_of_thread(by_thread(x[0], tile), tile)
    of_thread = gl.expand_dims(gl.expand_dims(some_mean, 2), 4)
    deviations = by_thread(x[0], tile) - of_thread
    squares = deviations * deviations
    for c in gl.static_range(1, tile.chunks):
        deviation = by_thread(x[c], tile) - of_thread
        deviations += deviation
        squares += deviation * deviation
    distance = sum_of_thread(deviations) / tile.columns_per_thread
    variance = sum_of_thread(squares) / tile.columns_per_thread - distance * distance
    # 14 of the 24 bits: the sum over 1024 threads is exact.
    coarse = (some_mean.to(gl.int32, bitcast=True) & -1024).to(gl.float32, bitcast=True)
    fine = (some_mean - coarse) + distance
    return coarse * share, fine * share, gl.where(variance < 0.0, 0.0, variance) * (share * share)


@gluon.jit
def row_moments(x, exchange, tile: gl.constexpr):
    """mean and variance [rows, cluster] of rows without padding (tile.whole), and the exchange's state. Each thread
    finds those of its own columns; one reduction merges both over the threads. The merge needs equally many columns in
    every thread."""
    if sums_equal_elements(x[0].dtype, gl.float32, tile.columns_per_thread):
        moments = gl.reduce(shares_of_threads(x, tile), 2, merge_shares)
    else:
        coarse, fine, variance = gl.reduce(exact_shares_of_threads(x, tile), 2, merge_exact_shares)
        moments = (coarse + fine, variance)
    moments, exchange = sum_over_cluster(moments, exchange, tile, moments=True)
    # The reduction's results are where by_row has them, but in a layout of another name: nothing moves.
    by_row: gl.constexpr = gl.SliceLayout(2, tile_layout(tile))
    mean = gl.convert_layout(moments[0], by_row, assert_trivial=True)
    variance = gl.convert_layout(moments[1], by_row, assert_trivial=True)
    return mean, variance, exchange


@gluon.jit
def row_statistics(x, cols, eps, exchange, norm: gl.constexpr, tile: gl.constexpr):
    """Statistics [rows, cluster] of a tile in registers, and the exchange's state. With a dimension more, each would be
    in as many registers as a thread has adjacent columns, and Triton 3.6 would store each of these."""
    if norm.layer and tile.whole:
        mean, square, exchange = row_moments(x, exchange, tile)
    else:
        mean, square, exchange = mean_and_squares(x, cols, exchange, norm, tile)
    return Statistics(mean, inverse_std(square, eps.to(gl.float32), norm)), exchange


@gluon.jit
def mean_and_squares(x, cols, exchange, norm: gl.constexpr, tile: gl.constexpr):
    """The rows' mean and the mean of (x - mean)^2, [rows, cluster] each, and the exchange's state. RMSNorm's mean is
    0 and takes no reduction; each of the other values takes one, which also corrects the mean."""
    corrects: gl.constexpr = norm.layer and not sums_equal_elements(x[0].dtype, gl.float32, tile.padded_columns)
    layout: gl.constexpr = tile_layout(tile)
    shape: gl.constexpr = [tile.rows, tile.cluster, tile.chunk]
    mean = gl.full([tile.rows, tile.cluster], 0.0, gl.float32, gl.SliceLayout(2, layout))
    if norm.layer:
        total = gl.full(shape, 0.0, gl.float32, layout)
        for c in gl.static_range(tile.chunks):
            total += widen(x[c], tile.in_pairs)
        total, exchange = row_sum(total, exchange, tile)
        mean = quotient(total, cols)
    deviations = gl.full(shape, 0.0, gl.float32, layout)
    squares = gl.full(shape, 0.0, gl.float32, layout)
    for c in gl.static_range(tile.chunks):
        deviation = widen(x[c], tile.in_pairs)
        if norm.layer:
            deviation -= gl.expand_dims(mean, 2)
            if c == tile.num_chunks - 1:  # padding has x = 0, but a deviation of -mean
                col = gl.expand_dims(columns_of_thread(c, tile), 0)
                deviation = gl.where(col < cols, deviation, 0.0)
        deviations += deviation
        squares += deviation * deviation
    if corrects:
        sums, exchange = sum_over_cluster(gl.reduce((deviations, squares), 2, add_pairs), exchange, tile)
        mean, variance = corrected_moments(mean, sums[0], sums[1], cols)
    else:
        squares, exchange = row_sum(squares, exchange, tile)
        variance = squares / cols
    return mean, variance, exchange


@gluon.jit
def store_y(
    y_ptr, rows_out, tiles, held, x, statistics, weight, bias, row, cols, norm: gl.constexpr, tile: gl.constexpr
):  # fmt: skip
    """Second pass of the forward: y of the tile at `row`. x has what loads.combine_tiles made of `tiles`; it is stored
    to `rows_out`, which may be None."""
    mean, rstd = gl.expand_dims(statistics.mean, 2), gl.expand_dims(statistics.rstd, 2)
    if rows_out is not None:
        for t in gl.static_range(len(rows_out)):
            for c in gl.static_range(tile.chunks):
                width = aligned(cols, tiles[0][0].dtype)
                store_chunk(rows_out[t], x[c], row, of_groups(width, tile), width, c, "", tile)
    for c in gl.static_range(tile.chunks):
        of_chunk = chunk_with_shared(tiles, held, c, tile)
        y = normalize(widen(x[c], tile.in_pairs), mean, rstd, norm)
        if multiplies_in_16_bits(norm, of_chunk, weight[c], bias[c], y_ptr.dtype.element_ty):
            y = multiply_add_of_16_bits(y, row_as_held(weight[c], tile), row_as_held(bias[c], tile))
        else:
            y = norm.form.round_x_hat(y, of_chunk, norm)
            y = norm.form.scale(y, parameter_row(weight[c], norm.has_weight, tile), norm)
            y = norm.form.shift(y, parameter_row(bias[c], norm.has_bias, tile), norm)
            y = norm.form.finish(y, of_chunk, norm)
        # y is likely to be read soon, x perhaps never again: L2 should evict y's lines last.
        store_chunk(y_ptr, y, row, of_groups(cols, tile), cols, c, "evict_last", tile)


@gluon.jit
def no_sums(tile: gl.constexpr):
    """Zeros to start a tile's row sums from: each thread has its own, by column of a chunk."""
    zeros = gl.full([tile.rows, tile.cluster, tile.chunk], 0.0, gl.float32, tile_layout(tile))
    return zeros, zeros


@gluon.jit
def sum_chunk(of_chunk, dy, statistics, weight, by_column, dw, db, norm: gl.constexpr, tile: gl.constexpr):
    """First pass of the backward over a chunk: its row sums by column, of g * x_hat and of g, and its sums of dw and
    db, each with the chunk's share added."""
    sum_gx, sum_g = by_column
    h = widen(combine(of_chunk, None, norm), tile.in_pairs)
    x_hat = normalize(h, statistics.mean, statistics.rstd, norm)
    du = norm.form.to_du(widen(dy, tile.in_pairs), of_chunk, norm)
    g = norm.form.upstream(du, parameter_row(weight, norm.has_weight, tile), norm)
    sum_gx += g * x_hat
    sum_g += g
    return (sum_gx, sum_g), dw + norm.form.to_dw(du, x_hat, norm), db + norm.form.to_db(du, norm)


@gluon.jit
def sums_of_rows(by_column, norm: gl.constexpr):
    """The CTA's row sums [rows, cluster] of g * x_hat and of g, as a tuple. RMSNorm's tuple has the first only.
    `sum_over_cluster` must follow where CTAs share a row."""
    if norm.layer:
        # One reduction of pairs has half the CTA barriers of two reductions.
        row_sums = gl.reduce(by_column, 2, add_pairs)
    else:
        row_sums = (gl.sum(by_column[0], axis=2),)
    return row_sums


@gluon.jit
def sum_tile(tiles, held, dy, statistics, weight, sums, norm: gl.constexpr, tile: gl.constexpr):
    """First pass of the backward over a tile: the sums of dw and db with the tile's share added, and `sums_of_rows`."""
    by_column = no_sums(tile)
    dw = ()
    db = ()
    for c in gl.static_range(tile.chunks):
        of_chunk = chunk_with_shared(tiles, held, c, tile)
        by_column, dw_of_chunk, db_of_chunk = sum_chunk(
            of_chunk, dy[c], statistics, weight[c], by_column, sums.dw[c], sums.db[c], norm, tile
        )
        dw = dw + (dw_of_chunk,)
        db = db + (db_of_chunk,)
    return ColumnSums(dw, db, sums.more), sums_of_rows(by_column, norm)


@gluon.jit
def store_early_gradients(
    outs, stride, tiles, held, dy, statistics, weight, bias, row, cols, norm: gl.constexpr, tile: gl.constexpr
):  # fmt: skip
    """Store those gradients of the tile at `row` that need no row sums. The first pass has made what they take, and
    need not hold it for the second."""
    for c in gl.static_range(tile.chunks):
        of_chunk = chunk_with_shared(tiles, held, c, tile)
        wide_dy = widen(dy[c], tile.in_pairs)
        h = widen(combine(of_chunk, None, norm), tile.in_pairs)
        x_hat = normalize(h, statistics.mean, statistics.rstd, norm)
        w = parameter_row(weight[c], norm.has_weight, tile)
        b = parameter_row(bias[c], norm.has_bias, tile)
        no_dh = gl.zeros_like(x_hat)
        grads = norm.form.gradients(no_dh, wide_dy, x_hat, w, b, of_chunk, norm)
        for t in gl.static_range(len(outs)):
            if norm.is_early(t):
                store_chunk(outs[t], grads[norm.gradient(t)], row, stride, cols, c, "", tile)


@gluon.jit
def store_gradients(
    outs, stride, tiles, held, dy, statistics, row_sums, weight, bias, others, first_dy, first_weight, sums, row, cols,
    norm: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """Second pass of the backward: the gradients of the tile at `row`, from its row sums over the whole cluster. The
    tiles `others` are added to the gradient of the row that was normalized. Rows of `outs` are `stride` elements apart.
    first_dy and first_weight are one element of each row, for `snapped`. Returns the column sums with the tile's share
    of the gradients of modulations added."""
    means = means_of_rows(row_sums, first_dy, first_weight, cols, dy[0].dtype, norm)
    more = ()
    for c in gl.static_range(tile.chunks):
        of_chunk = chunk_with_shared(tiles, held, c, tile)
        more = more + store_gradients_of_chunk(
            outs, stride, of_chunk, dy[c], statistics, means, weight[c], bias[c], chunk_of(others, c), sums.more, row,
            cols, c, norm, tile,
        )  # fmt: skip
    return ColumnSums(sums.dw, sums.db, more)


@gluon.jit
def means_of_rows(row_sums, first_dy, first_weight, cols, dtype: gl.constexpr, norm: gl.constexpr):
    """mean(g * x_hat) and mean(g) of each row, [rows, cluster, 1]; dtype is that of dy."""
    mean_gx = gl.expand_dims(row_sums[0], 2) / cols
    mean_g = mean_gx
    if norm.layer:
        mean_g = quotient(gl.expand_dims(row_sums[1], 2), cols)
        if snaps(norm, dtype):
            mean_g = snapped(mean_g, norm.form.upstream(first_dy, first_weight, norm))
    return mean_gx, mean_g


@gluon.jit
def store_gradients_of_chunk(
    outs, stride, of_chunk, dy, statistics, means, weight, bias, others, more, row, cols, c: gl.constexpr,
    norm: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """`store_gradients` of chunk c. Returns its sums of the gradients of modulations."""
    mean = statistics.mean
    rstd = statistics.rstd
    mean_gx, mean_g = means
    wide_dy = widen(dy, tile.in_pairs)
    w = parameter_row(weight, norm.has_weight, tile)
    g = norm.form.upstream(norm.form.to_du(wide_dy, of_chunk, norm), w, norm)
    h = widen(combine(of_chunk, None, norm), tile.in_pairs)
    if tile.reads_once:
        dh = gradient_beside_x_hat(g, normalize(h, mean, rstd, norm), rstd, mean_gx, mean_g, norm)
    else:
        dh = input_gradient(g, h, mean, rstd, mean_gx, mean_g, norm)
    dh = plus(dh, others, tile.in_pairs, norm)
    b = parameter_row(bias, norm.has_bias, tile)
    grads = norm.form.gradients(dh, wide_dy, normalize(h, mean, rstd, norm), w, b, of_chunk, norm)
    for t in gl.static_range(len(outs)):
        if not (tile.reads_once and norm.is_early(t)):
            store_chunk(outs[t], grads[norm.gradient(t)], row, stride, cols, c, "", tile)
    sums = ()
    for s in gl.static_range(norm.sums):
        sums = sums + (more[c * norm.sums + s] + grads[norm.gradient_of_sum(s)],)
    return sums
