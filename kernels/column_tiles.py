"""Rows that do not fit registers, in portable Triton: each CTA works on one column tile at a time.

A forward reads its row several times, once for each statistic and once for y. Only the first pass reads from beyond the
cache. A backward has two launches: the first finds the row means that dx needs, the second reads x and dy again for all
outputs. Where elements lie is as in multiwave.py.
"""

import triton
import triton.language as tl

from .loads import (
    chunk_of,
    combine,
    divisible,
    each_of_group,
    load_if,
    load_parameter,
    of_group,
    of_groups,
    plus,
    pointers,
    row_of_sample,
    statistics_in_memory,
    stride_of_gradients,
)
from .multiwave import (
    columns,
    first_g,
    load_added,
    load_row_statistics,
    load_row_tile,
    load_row_tiles,
    other_rows,
    row_of,
    row_start,
    rows_in_memory,
    store_chunk,
)
from .rowmath import (
    corrected_moments,
    input_gradient,
    inverse_std,
    normalize,
    quotient,
    row_means,
    snapped,
    snaps,
    widen,
)


@triton.jit
def row_pointers(x_rows, rows_in, strides_in, index, row, norm: tl.constexpr, tile: tl.constexpr):
    """Where a row of x and of the form's other row tensors begins, and whether all of these have it."""
    pointers = (x_rows.ptr + row_start(x_rows, row, norm),)
    is_there = True
    if rows_in is not None:
        for t in tl.static_range(len(rows_in)):
            found, is_there = row_of(t, row, is_there, index, norm)
            pointers = pointers + (rows_in[t] + row_start(other_rows(rows_in, strides_in, t, tile), found, norm),)
    return pointers, is_there


@triton.jit
def sample_pointers(shared, strides_shared, row, sample_rows, tile: tl.constexpr):
    """Where the rows that belong to a row's sample begin."""
    pointers = ()
    if shared is not None:
        sample = row * 0
        if sample_rows is not None:
            sample = row // sample_rows
        for t in tl.static_range(len(shared)):
            pointers = pointers + (row_of_sample(shared, strides_shared, t, sample, tile),)
    return pointers


@triton.jit
def shifted(rows_in, left):
    """The pointers from column `left` on."""
    found = ()
    for t in tl.static_range(len(rows_in)):
        found = found + (rows_in[t] + left,)
    return found


@triton.jit
def load_elements(pointers, is_there, start, col, valid, norm: tl.constexpr):
    """The elements of each row at the columns start + col, zeros where not `valid`; NaN if a row is not there."""
    elements = ()
    absent = 0.0
    if norm.has_tables:
        absent = tl.where(is_there, 0.0, float("nan"))
        valid = valid & is_there
    for t in tl.static_range(len(pointers)):
        elements = elements + (tl.load(pointers[t] + start + col, mask=valid, other=absent),)
    return elements


@triton.jit(do_not_specialize=["rows", "x_inner", "sample_rows", "table_rows"])
def forward_by_column_tiles(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows: "i64", cols, eps: "fp64", x_inner: "i64",
    x_outer_stride: "i64", x_inner_stride: "i64",
    norm: tl.constexpr, tile: tl.constexpr, rows_in=None, strides_in=None, rows_out=None, shared=None,
    strides_shared=None, sample_rows=None, row_index_ptr=None, table_rows=None,
):
    """y of a row that does not fit registers, and mean and rstd unless their pointers are None; one row per CTA. Mean
    (LayerNorm only), variance (the mean of (x - mean)^2) and y take a pass over the row's column tiles each. Only the
    first pass reads from beyond the cache."""
    cols = divisible(cols, tile)
    x_rows = rows_in_memory(of_group(x_ptr, cols, tile), x_inner, x_outer_stride, x_inner_stride, tile)
    row = tl.program_id(0).to(tl.int64)
    tile_rows, is_there = row_pointers(
        x_rows, each_of_group(rows_in, cols, tile), strides_in, (row_index_ptr, table_rows), row, norm, tile
    )
    tile_rows = tile_rows + sample_pointers(shared, strides_shared, row, sample_rows, tile)
    rows_out = each_of_group(rows_out, cols, tile)
    weight_ptr = of_group(weight_ptr, cols, tile)
    bias_ptr = of_group(bias_ptr, cols, tile)
    row_begins = row * of_groups(cols, tile)
    y_row = of_group(y_ptr, cols, tile) + row_begins
    statistic = of_groups(row, tile)
    lane = tl.arange(0, tile.chunk)
    row_mean = 0.0
    if norm.layer:
        total = tl.full([tile.chunk], 0.0, norm.acc)
        for start in range(0, cols, tile.chunk):
            tiles = load_elements(tile_rows, is_there, start, lane, lane < cols - start, norm)
            total += combine(tiles, rows_out, norm).to(norm.acc)
        row_mean = quotient(tl.sum(total, axis=0), cols)
    deviations = tl.full([tile.chunk], 0.0, norm.acc)
    squares = tl.full([tile.chunk], 0.0, norm.acc)
    for start in range(0, cols, tile.chunk):
        valid = lane < cols - start
        deviation = combine(load_elements(tile_rows, is_there, start, lane, valid, norm), rows_out, norm).to(norm.acc)
        if norm.layer:
            deviation = tl.where(valid, deviation - row_mean, 0.0)
        deviations += deviation
        squares += deviation * deviation
    squares = tl.sum(squares, axis=0)
    variance = squares / cols
    if norm.layer:
        row_mean, variance = corrected_moments(row_mean, tl.sum(deviations, axis=0), squares, cols)
        if mean_ptr is not None:
            tl.store(of_group(mean_ptr, 1, tile) + statistic, row_mean)
    rstd = inverse_std(variance, tl.full([], eps, norm.acc), norm)
    if rstd_ptr is not None:
        tl.store(of_group(rstd_ptr, 1, tile) + statistic, rstd)
    for start in range(0, cols, tile.chunk):
        col = start + lane
        valid = lane < cols - start
        tiles = load_elements(tile_rows, is_there, 0, col, valid, norm)
        x = combine(tiles, rows_out, norm)
        if rows_out is not None:
            for t in tl.static_range(len(rows_out)):
                tl.store(rows_out[t] + row_begins + col, x.to(rows_out[t].dtype.element_ty), mask=valid)
        y = norm.form.round_x_hat(normalize(x.to(norm.acc), row_mean, rstd, norm), tiles, norm)
        weight = load_if(norm.has_weight, weight_ptr, col, valid)
        y = norm.form.scale(y, widen(weight, dtype=norm.acc), norm)
        bias = load_if(norm.has_bias, bias_ptr, col, valid)
        y = norm.form.shift(y, widen(bias, dtype=norm.acc), norm)
        y = norm.form.finish(y, tiles, norm)
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_counters", "rows", "x_inner", "dy_inner", "table_rows"])
def backward_row_means(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, means_ptr, counters_ptr, num_counters, rows: "i64", cols,
    x_inner: "i64", x_outer_stride: "i64", x_inner_stride: "i64", dy_inner: "i64", dy_outer_stride: "i64",
    dy_inner_stride: "i64", mean_stride: "i64", rstd_stride: "i64",
    norm: tl.constexpr, tile: tl.constexpr, rows_in=None, strides_in=None, row_index_ptr=None, table_rows=None,
):
    """First pass over rows that do not fit registers, one row per CTA: mean(g * x_hat) to means[0, row] and, for
    LayerNorm, mean(g) to means[1, row]. CTA 0 also sets the counters of the second pass to zero. That pass is the next
    launch on the stream, so it sees means and zeros."""
    cols = divisible(cols, tile)
    x_rows = rows_in_memory(of_group(x_ptr, cols, tile), x_inner, x_outer_stride, x_inner_stride, tile)
    dy_rows = rows_in_memory(of_group(dy_ptr, cols, tile), dy_inner, dy_outer_stride, dy_inner_stride, tile)
    weight_ptr = of_group(weight_ptr, cols, tile)
    source = statistics_in_memory(mean_ptr, rstd_ptr, mean_stride, rstd_stride, norm, tile)
    row = tl.program_id(0).to(tl.int64)
    if counters_ptr is not None:
        if row == 0:
            for start in range(0, num_counters, tile.chunk):
                lane = tl.arange(0, tile.chunk)
                tl.store(counters_ptr + start + lane, tl.zeros_like(lane), mask=lane < num_counters - start)
    tile_rows, is_there = row_pointers(
        x_rows, each_of_group(rows_in, cols, tile), strides_in, (row_index_ptr, table_rows), row, norm, tile
    )
    dy_row = dy_rows.ptr + row_start(dy_rows, row, norm)
    rstd = tl.load(source.rstd_ptr + row * source.rstd_stride).to(norm.acc)
    mean = rstd
    if norm.layer:
        mean = tl.load(source.mean_ptr + row * source.mean_stride).to(norm.acc)
    sum_gx = tl.full([1, tile.chunk], 0.0, norm.acc)
    sum_g = tl.full([1, tile.chunk], 0.0, norm.acc)
    for start in range(0, cols, tile.chunk):
        lane = tl.arange(0, tile.chunk)[None, :]
        col = start + lane
        valid = lane < cols - start
        tiles = load_elements(tile_rows, is_there, 0, col, valid, norm)
        x_hat = normalize(combine(tiles, None, norm).to(norm.acc), mean, rstd, norm)
        dy = tl.load(dy_row + col, mask=valid, other=0.0).to(norm.acc)
        weight = widen(load_if(norm.has_weight, weight_ptr, col, valid), dtype=norm.acc)
        g = norm.form.upstream(norm.form.to_du(dy, tiles, norm), weight, norm)
        sum_gx += tl.where(valid, g * x_hat, 0.0)
        sum_g += g
    mean_gx, mean_g = row_means(sum_gx, sum_g, cols, norm)
    if snaps(norm, dy_ptr.dtype.element_ty):
        mean_g = snapped(mean_g, first_g(dy_row, weight_ptr, True, norm))
    here = of_group(means_ptr, 2 * rows, tile) + row + tl.zeros([1, 1], tl.int64)
    tl.store(here, mean_gx)
    if norm.layer:
        tl.store(here + rows, mean_g)


@triton.jit(do_not_specialize=["rows", "x_inner", "dy_inner", "table_rows"])
def backward_by_column_tiles(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, means_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr,
    counters_ptr, rows: "i64", cols, x_inner: "i64", x_outer_stride: "i64", x_inner_stride: "i64", dy_inner: "i64",
    dy_outer_stride: "i64", dy_inner_stride: "i64", mean_stride: "i64", rstd_stride: "i64",
    norm: tl.constexpr, tile: tl.constexpr, rows_in=None, strides_in=None, rows_out=None, added=None, bias_ptr=None,
    width=None, x_at=None, gate_at=None, row_index_ptr=None, table_rows=None,
):
    """Second pass: CTA (c, p) owns column tile c (tile.chunk columns) of the row tiles p, p + P, p + 2P, ..., where P
    CTAs share the rows. The row means are for dx only, so this kernel alone computes a backward without dx.

    With counters, one for each column tile, the last CTA of a column tile to finish sums the tile's partials. The order
    of the sum does not depend on which CTA is last. That CTA sees all partials: the threads of each CTA store theirs
    and meet at a barrier, and then the CTA counts itself by one atomic addition, which releases all that the barrier
    ordered before it. The addition is an acquire as well, so the CTA that finds all others counted also sees their
    partials."""
    cols = divisible(cols, tile)
    left = tl.program_id(0).to(tl.int64) * tile.chunk  # rows may be wider than 2^31 elements
    x_rows = rows_in_memory(of_group(x_ptr, cols, tile) + left, x_inner, x_outer_stride, x_inner_stride, tile)
    dy_rows = rows_in_memory(of_group(dy_ptr, cols, tile) + left, dy_inner, dy_outer_stride, dy_inner_stride, tile)
    source = statistics_in_memory(mean_ptr, rstd_ptr, mean_stride, rstd_stride, norm, tile)
    weight_ptr = of_group(weight_ptr, cols, tile)
    bias_ptr = of_group(bias_ptr, cols, tile)
    rows_in = each_of_group(rows_in, cols, tile)
    added = each_of_group(added, cols, tile)
    means_ptr = of_group(means_ptr, 2 * rows, tile)
    dw_partial_ptr = of_group(dw_partial_ptr, cols, tile)
    db_partial_ptr = of_group(db_partial_ptr, cols, tile)
    row_width = of_groups(cols, tile)
    here = divisible(tl.minimum(cols - left, tile.chunk).to(tl.int32), tile)  # columns of the tile
    weight = (0.0,)
    if norm.has_weight and norm.wants_dx:
        weight = load_parameter(weight_ptr + left, here, True, columns, tile)
    bias = (0.0,)
    if norm.has_bias and norm.wants_dx:
        bias = load_parameter(bias_ptr + left, here, True, columns, tile)
    if width is not None:
        width, x_at, gate_at = divisible(width, tile), divisible(x_at, tile), divisible(gate_at, tile)
    outs = each_of_group(pointers(dx_ptr, rows_out, norm, x_at, gate_at), cols, tile)
    more_rows = rows_in
    if rows_in is not None:
        more_rows = shifted(rows_in, left)
    dw = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
    db = tl.full([tile.rows, tile.chunk], 0.0, norm.acc)
    step = tl.num_programs(1) * tile.rows
    row = tl.program_id(1).to(tl.int64) * tile.rows + tl.arange(0, tile.rows)
    index = (row_index_ptr, table_rows)
    next_tiles = load_row_tiles(x_rows, more_rows, strides_in, index, row, rows, here, norm, tile)
    dy_next = load_row_tile(dy_rows, row, rows, here, norm, tile)
    for _ in range(tl.cdiv(rows - tl.program_id(1) * tile.rows, step)):
        tiles = chunk_of(next_tiles, 0)
        h = combine(tiles, None, norm).to(norm.acc)
        dy = dy_next[0].to(norm.acc)
        in_range = row < rows
        statistics = load_row_statistics(source, row, rows, norm)
        ahead = row + step
        next_tiles = load_row_tiles(x_rows, more_rows, strides_in, index, ahead, rows, here, norm, tile)
        dy_next = load_row_tile(dy_rows, ahead, rows, here, norm, tile)
        x_hat = normalize(h, statistics.mean, statistics.rstd, norm)
        du = norm.form.to_du(dy, tiles, norm)
        dw += norm.form.to_dw(du, x_hat, norm)
        db += norm.form.to_db(du, norm)
        if norm.wants_dx:
            mean_gx = tl.load(means_ptr + row, mask=in_range, other=0.0)[:, None]
            mean_g = mean_gx
            if norm.layer:
                mean_g = tl.load(means_ptr + rows + row, mask=in_range, other=0.0)[:, None]
            w = widen(weight[0], dtype=norm.acc)
            g = norm.form.upstream(du, w, norm)
            dh = input_gradient(g, h, statistics.mean, statistics.rstd, mean_gx, mean_g, norm)
            start = (row * stride_of_gradients(cols, width, tile))[:, None]
            others = load_added(added, start + left, in_range[:, None], here, tile)
            dh = plus(dh, chunk_of(others, 0), False, norm)
            grads = norm.form.gradients(dh, dy, x_hat, w, widen(bias[0], dtype=norm.acc), tiles, norm)
            for t in tl.static_range(len(outs)):
                store_chunk(outs[t] + left, start, grads[norm.gradient(t)], in_range[:, None], here, 0, tile)
        row = ahead
    partial = tl.program_id(1).to(tl.int64) * row_width + tl.zeros([1, 1], tl.int64)
    if norm.wants_dw:
        store_chunk(dw_partial_ptr + left, partial, tl.sum(dw, axis=0)[None, :], partial >= 0, here, 0, tile)
    if norm.wants_db:
        store_chunk(db_partial_ptr + left, partial, tl.sum(db, axis=0)[None, :], partial >= 0, here, 0, tile)
    if counters_ptr is not None:
        tl.debug_barrier()  # every thread has stored its partials before the CTA is counted
        counter = of_group(counters_ptr, tl.num_programs(0), tile) + tl.program_id(0)
        others = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()  # no thread reads partials before the addition has acquired them
        if others == tl.num_programs(1) - 1:
            if norm.wants_dw:
                finish: tl.constexpr = norm.form.finish_dw
                dw_out = of_group(dw_ptr, cols, tile)
                sum_column_tile(dw_partial_ptr, dw_out, left, here, row_width, weight_ptr, finish, norm, tile)
            if norm.wants_db:
                db_out = of_group(db_ptr, cols, tile)
                sum_column_tile(db_partial_ptr, db_out, left, here, row_width, None, None, norm, tile)


@triton.jit
def sum_column_tile(
    partial_ptr, out_ptr, left, width, cols, weight_ptr, finish: tl.constexpr, norm: tl.constexpr, tile: tl.constexpr
):
    """Sum `width` columns, from column `left` on, of the partials of the CTAs that share the rows, in the order of
    these CTAs, and `finish` the sums unless it is None. Sums of a few partials are added up, so that no sum has too
    many terms."""
    lane = tl.arange(0, tile.chunk)
    here = partial_ptr + left + lane
    total = tl.full([tile.chunk], 0.0, norm.acc)
    partials_at_once: tl.constexpr = 32
    for start in range(0, tl.num_programs(1), partials_at_once):
        some = tl.full([tile.chunk], 0.0, norm.acc)
        for _ in range(start, tl.minimum(start + partials_at_once, tl.num_programs(1))):
            # Bypass L1: it may hold old values where other SMs have written.
            some += tl.load(here, mask=lane < width, other=0.0, cache_modifier=".cg")
            here += cols
        total += some
    if finish is not None:
        weight = load_if(norm.has_weight, weight_ptr, left + lane, lane < width)
        total = finish(total, widen(weight, dtype=norm.acc), norm)
    tl.store(out_ptr + left + lane, total.to(out_ptr.dtype.element_ty), mask=lane < width)
