"""The pipelined schedule: a ring of row tiles in shared memory, refilled by the computing warps themselves, by TMA or,
where a GPU has none, by asynchronous copies of each thread (tile.by_threads).

CTA p of P (or cluster p of P, whose CTAs share the columns of a row) owns the row tiles p, p + P, p + 2P, ..., counted
from the last tile. It keeps the parameters, the modulations that its rows share and, in the backward, the column sums
for its whole life.

sample_rows rows may be a sample with CTAs of its own, as in multiwave.py: the first dimension of the grid counts
samples, and the second is P. If there are several samples, the rows of one are a multiple of those of a tile, so that
no tile has rows of two. A backward may take its rows in an order, as there: then a tile is one row, and what is said of
rows here holds for places of the order.

The warps that read a stage also refill it, and one of them may be ahead of the others. What keeps a copy from
overwriting columns that a warp has yet to read is not in the source: between the reads of a stage and the copies of
`ring.fill_stage` the compiler puts a CTA barrier and a proxy fence.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import partial_sums, passes, ring, row_tile
from .cluster import join_cluster, leave_cluster, open_exchange, sum_over_cluster
from .loads import (
    each_of_group,
    folded,
    load_parameter,
    load_shared,
    of_group,
    pointers,
    share_of_cta,
    share_of_key,
    statistics_in_memory,
    stride_of_gradients,
    unfolded,
)
from .passes import ColumnSums
from .ptx import launch_dependents, opaque
from .ring import Position


@gluon.jit
def row_at(order_ptr, place, share):
    """The row at a place of an order; none, -1, before the CTA's first one."""
    return gl.load(order_ptr + place, mask=place >= share.first, other=-1)


@gluon.jit
def rows_in_order(order_ptr, place, step, share, tile: gl.constexpr):
    """The row at a place of an order, and those of as many tiles behind it as a ring has stages."""
    rows = (row_at(order_ptr, place, share),)
    for s in gl.static_range(tile.stages):
        rows = rows + (row_at(order_ptr, place - (s + 1) * step, share),)
    return rows


@gluon.jit
def one_tile_on(rows, behind):
    """`rows_in_order` of the next tile; the row `behind` them was loaded a tile ago, so that nothing waits for it."""
    found = ()
    for s in gl.static_range(len(rows) - 1):
        found = found + (rows[s + 1],)
    return found + (behind,)


@gluon.jit
def row_behind(row, tiles: gl.constexpr, step, rows):
    """The row that is `tiles` tiles behind `row`: one of `rows`, if there are any."""
    if rows is None:
        behind = row - tiles * step
    else:
        behind = rows[tiles]
    return behind


@gluon.jit
def first_row(rows, share):
    """The first row that the CTA may have."""
    first = share.first
    if rows is not None:
        first = 0
    return first


@gluon.jit
def open_rings(descs, tail_descs, strides, cols, share, tile: gl.constexpr, rows=None):
    """The rings, with the copies of the CTA's first num_stages tiles under way. Where threads copy, descs has pointers
    and `strides` the elements between their rows."""
    copies = ()
    for t in gl.static_range(len(descs)):
        of_tensor = descs[t]
        if tile.by_threads:
            of_tensor = of_group(of_tensor, row_tile.aligned(cols, of_tensor.dtype.element_ty), tile)
        copies = copies + (row_tile.copy_descriptors(of_tensor, tail_descs[t], tile),)
    if tile.by_threads:
        rings = ring.open_rings(copies, tile, strides, cols)
    else:
        rings = ring.open_rings(copies, tile)
    for s in gl.static_range(tile.stages):
        nth = (share.cta + s * share.ctas) * tile.rows
        row = row_tile.row_of_tile(nth, share.last, tile)
        fill_stage(rings, s, row if rows is None else rows[s], first_row(rows, share), tile)
    return rings


@gluon.jit
def fill_stage(rings, stage, row, first, tile: gl.constexpr):
    """Start the copies of the tile at `row` into a stage that is new or that this CTA has read; none, or zeros where
    threads copy, if the tile lies before row `first`. The CTA's row loop ends before such a tile, so nobody waits for
    it."""
    ring.fill_stage(rings, stage, row_tile.copy_corners(row, tile), row > first - tile.rows, tile)


@gluon.jit(do_not_specialize=["rows", "sample_rows"])
def forward(
    x_desc, x_tail_desc, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, eps: "fp64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr, rows_in=None, strides_in=None, rows_out=None,
    desc_1=None, desc_2=None, tail_desc_1=None, tail_desc_2=None, shared=None, strides_shared=None, sample_rows=None,
    strides=None,
):
    """y of the CTA's row tiles, and mean and rstd unless their pointers are None. A tile is read once from its stage
    and then stays in registers, so the stage is refilled as soon as the statistics are known, before y is stored.

    The row tensors that a form reads beside x come by `rows_in` to registers, or by descriptors through the ring, each
    of which is a parameter: Triton 3.6 cannot launch a kernel with descriptors inside a tuple. Where threads copy, all
    of them are pointers, and `strides` has the elements between the rows of each, in their order."""
    exchange = open_exchange(tile)
    weight_ptr = of_group(weight_ptr, cols, tile)
    bias_ptr = of_group(bias_ptr, cols, tile)
    y_ptr = of_group(y_ptr, cols, tile)
    rows_out = each_of_group(rows_out, cols, tile)
    mean_ptr = of_group(mean_ptr, 1, tile)
    rstd_ptr = of_group(rstd_ptr, 1, tile)
    share = share_of_cta(rows, sample_rows)
    first = share.cta * tile.rows
    step = share.ctas * tile.rows
    row = row_tile.row_of_tile(first, share.last, tile)
    # Loaded before the first copies start; otherwise the parameters would arrive after those tiles.
    weight = load_parameter(weight_ptr, cols, norm.has_weight, row_tile.columns_of_thread, tile)
    bias = load_parameter(bias_ptr, cols, norm.has_bias, row_tile.columns_of_thread, tile)
    of_sample = load_shared(shared, strides_shared, share.sample, cols, row_tile.columns_of_thread, tile)
    descs = (x_desc,)
    if desc_1 is not None:
        descs = descs + (desc_1,)
    if desc_2 is not None:
        descs = descs + (desc_2,)
    rings = open_rings(descs, (x_tail_desc, tail_desc_1, tail_desc_2), strides, cols, share, tile)
    # Placed after the start of the copies, because a store to shared memory waits for the loads.
    inside: gl.constexpr = norm.inside
    weight, bias, of_sample = folded(weight, bias, of_sample, norm, tile)
    weight = row_tile.hold_parameter(weight, inside.has_weight, tile.weight_in_smem, tile)
    bias = row_tile.hold_parameter(bias, inside.has_bias, tile.weight_in_smem, tile)
    held = row_tile.hold_shared(of_sample, tile)
    exchange = join_cluster(exchange, tile)
    dtype: gl.constexpr = rings.slots[0][0].dtype
    at = Position(0, 0)
    for _ in range(first, share.last - share.first, step):
        more = row_tile.load_tiles(rows_in, strides_in, row, row_tile.aligned(cols, dtype), tile)
        ring.wait_for_tile(rings, at, tile)
        tiles = ()
        for t in gl.static_range(len(descs)):
            tiles = tiles + (row_tile.read_tile(rings.slots[t], at.stage, False, tile),)
        tiles = tiles + more
        x = row_tile.combine_tiles(tiles, held, rows_out, inside, tile)
        statistics, exchange = passes.row_statistics(x, cols, eps, exchange, inside, tile)
        # Refill: every warp has read the stage, by the compiler's CTA barrier and proxy fence before the copies.
        fill_stage(rings, at.stage, row - tile.num_stages * step, share.first, tile)
        if rstd_ptr is not None:
            row_tile.store_statistics(mean_ptr, rstd_ptr, statistics, row, norm, tile)
        passes.store_y(y_ptr, rows_out, tiles, held, x, statistics, weight, bias, row, cols, inside, tile)
        row -= step
        at = ring.next_position(at, tile)
    ring.wait_for_all(tile)
    leave_cluster(tile)


@gluon.jit
def read_tiles(rings, stage, reload: gl.constexpr, tile: gl.constexpr):
    """The tiles of x and of the form's row tensors in the ring, and that of dy."""
    tiles = (row_tile.read_tile(rings.slots[0], stage, reload, tile),)
    dy = row_tile.read_tile(rings.slots[1], stage, reload, tile)
    for t in gl.static_range(2, len(rings.slots) - tile.added_in_ring):
        tiles = tiles + (row_tile.read_tile(rings.slots[t], stage, reload, tile),)
    return tiles, dy


@gluon.jit
def read_chunks(rings, stage, reload: gl.constexpr, c: gl.constexpr, tile: gl.constexpr):
    """Chunk c of each tile of `read_tiles`."""
    chunks = (row_tile.read_chunk(rings.slots[0], stage, c, reload, tile),)
    dy = row_tile.read_chunk(rings.slots[1], stage, c, reload, tile)
    for t in gl.static_range(2, len(rings.slots)):
        chunks = chunks + (row_tile.read_chunk(rings.slots[t], stage, c, reload, tile),)
    return chunks, dy


@gluon.jit
def sum_by_chunks(rings, stage, held, statistics, weight, sums, norm: gl.constexpr, tile: gl.constexpr):
    """passes.sum_tile where threads copy: each chunk is waited for by itself, and no other one is in registers."""
    sum_gx, sum_g = passes.no_sums(tile)
    dw = ()
    db = ()
    # Each chunk has a loop that runs once, which the compiler does not know. Without it, it would add up dw and db
    # late, and hold what it adds of the whole row until then.
    once = opaque(gl.to_tensor(1))
    for c in gl.static_range(tile.chunks):
        dw_of_chunk, db_of_chunk = sums.dw[c], sums.db[c]
        for _ in range(once):
            ring.wait_for_chunk(c, tile)
            chunks, dy = read_chunks(rings, stage, False, c, tile)
            of_chunk = row_tile.with_shared(chunks, held, c, tile)
            by_column, dw_of_chunk, db_of_chunk = passes.sum_chunk(
                of_chunk, dy, statistics, weight[c], (sum_gx, sum_g), dw_of_chunk, db_of_chunk, norm, tile
            )
            sum_gx, sum_g = by_column
        dw = dw + (dw_of_chunk,)
        db = db + (db_of_chunk,)
    return ColumnSums(dw, db, sums.more), passes.sums_of_rows((sum_gx, sum_g), norm)


@gluon.jit
def store_by_chunks(
    rings, stage, outs, stride, held, statistics, means, weight, bias, added, sums, row, next_row, share, cols,
    norm: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """passes.store_gradients where threads copy: each chunk is refilled, from the tile at next_row, as soon as it is
    read. So one stage is enough to have copies under way while the CTA computes."""
    more = ()
    for c in gl.static_range(tile.chunks):
        chunks, dy = read_chunks(rings, stage, True, c, tile)
        others = row_tile.load_added_chunks(added, row, cols, c, tile)
        ring.fill_chunk(rings, stage, next_row, c, next_row > share.first - tile.rows, tile)
        of_chunk = row_tile.with_shared(chunks, held, c, tile)
        more = more + passes.store_gradients_of_chunk(
            outs, stride, of_chunk, dy, statistics, means, weight[c], bias[c], others, sums.more, row, cols, c, norm,
            tile,
        )  # fmt: skip
    return ColumnSums(sums.dw, sums.db, more)


class Parameters(NamedTuple):
    """Pointers to weight and bias, and to rows of samples with their strides. If these are tables, how many rows."""

    weight_ptr: gl.tensor
    bias_ptr: gl.tensor
    shared: tuple
    strides_shared: tuple
    table_rows: gl.tensor


@gluon.jit
def store_sums(partials, sums, parameters, sample, rows, sample_rows, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Store the CTA's row of the partials, from the sums of norm.inside."""
    if norm.folds:
        weight = load_parameter(parameters.weight_ptr, cols, norm.has_weight, row_tile.columns_of_thread, tile)
        bias = load_parameter(parameters.bias_ptr, cols, norm.has_bias, row_tile.columns_of_thread, tile)
        weight = row_tile.as_rows(weight, norm.has_weight, tile)
        bias = row_tile.as_rows(bias, norm.has_bias, tile)
        columns: gl.constexpr = row_tile.columns_of_thread
        loaded = load_shared(
            parameters.shared, parameters.strides_shared, sample, cols, columns, tile, parameters.table_rows
        )  # fmt: skip
        of_sample = ()
        for t in gl.static_range(len(loaded)):
            of_sample = of_sample + (row_tile.as_rows(loaded[t], True, tile),)
        sums = ColumnSums(*unfolded(sums.dw, sums.db, sums.more, weight, bias, of_sample, norm, tile))
    partial_sums.store_partials_of_cta(partials, sums, rows, sample_rows, cols, norm, tile)


@gluon.jit(do_not_specialize=["rows", "sample_rows", "table_rows"])
def backward(
    x_desc, dy_desc, x_tail_desc, dy_tail_desc, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr,
    rows, cols, mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr, rows_in=None, strides_in=None, rows_out=None,
    added=None, bias_ptr=None, desc_1=None, desc_2=None, tail_desc_1=None, tail_desc_2=None, width=None, x_at=None,
    gate_at=None, shared=None, strides_shared=None, sum_partials=None, sample_rows=None, strides=None,
    desc_3=None, tail_desc_3=None, table_rows=None, key_ptr=None, order_ptr=None,
):
    """The gradients of the CTA's row tiles, and its row of the partials. A tile is read twice from its stage, for the
    row sums and for dx, and is not kept in registers between; the stage is refilled after the second read. With
    tile.reads_once, the second read falls away: the compiler holds what both passes make, and what the second alone
    would make for gradients without row sums is made in the first. dw and db are complete before the last tile's dx,
    and are stored before it where `partial_sums.stores_early` says so. The form's other row tensors come as in
    `forward`. So does a gradient that is added: to registers, asked for before the tile is waited for, or as the ring's
    last tensor, from which it is read when dx is made. Where threads copy, each chunk of a tile is waited for, read and
    refilled by itself."""
    in_memory = statistics_in_memory(mean_ptr, rstd_ptr, mean_stride, rstd_stride, norm, tile)
    partials = ColumnSums(of_group(dw_partial_ptr, cols, tile), of_group(db_partial_ptr, cols, tile), sum_partials)
    weight_ptr = of_group(weight_ptr, cols, tile)
    bias_ptr = of_group(bias_ptr, cols, tile)
    exchange = open_exchange(tile)
    if key_ptr is None:
        share = share_of_cta(rows, sample_rows)
        rows_of_table = None
        rows_with_sums = rows
    else:
        share = share_of_key(key_ptr, rows, table_rows, row_tile.numbers, tile)
        rows_of_table = table_rows
        rows_with_sums = gl.num_programs(0)  # every CTA stores sums, whatever rows it has
    of_norm = Parameters(weight_ptr, bias_ptr, shared, strides_shared, rows_of_table)
    first = share.cta * tile.rows
    step = share.ctas * tile.rows
    row = row_tile.row_of_tile(first, share.last, tile)
    place = row
    in_order = None
    if order_ptr is not None:
        in_order = rows_in_order(order_ptr, place, step, share, tile)
        row = in_order[0]
    # The copies start before the loads of weight and statistics, which are few enough to arrive in time.
    descs = (x_desc, dy_desc)
    if desc_1 is not None:
        descs = descs + (desc_1,)
    if desc_2 is not None:
        descs = descs + (desc_2,)
    if desc_3 is not None:
        descs = descs + (desc_3,)
    tails = (x_tail_desc, dy_tail_desc, tail_desc_1, tail_desc_2, tail_desc_3)
    rings = open_rings(descs, tails, strides, cols, share, tile, in_order)
    weight = load_parameter(weight_ptr, cols, norm.has_weight, row_tile.columns_of_thread, tile)
    next_statistics = row_tile.load_row_statistics(in_memory, row, norm, tile)
    bias = load_parameter(bias_ptr, cols, norm.has_bias, row_tile.columns_of_thread, tile)
    columns: gl.constexpr = row_tile.columns_of_thread
    of_sample = load_shared(shared, strides_shared, share.sample, cols, columns, tile, rows_of_table)
    inside: gl.constexpr = norm.inside
    weight, bias, of_sample = folded(weight, bias, of_sample, norm, tile)
    weight = row_tile.hold_parameter(weight, inside.has_weight, tile.weight_in_smem, tile)
    bias = row_tile.hold_parameter(bias, inside.has_bias, tile.weight_in_smem, tile)
    held = row_tile.hold_shared(of_sample, tile)
    first_weight = row_tile.first_of_weight(weight_ptr, cols, rings.slots[1][0].dtype, inside, tile)
    dtype: gl.constexpr = rings.slots[0][0].dtype
    stride = stride_of_gradients(cols, width, tile)
    if width is not None:
        stride = row_tile.aligned(width, dtype)
        x_at, gate_at = row_tile.aligned(x_at, dtype), row_tile.aligned(gate_at, dtype)
    outs = each_of_group(pointers(dx_ptr, rows_out, norm, x_at, gate_at), cols, tile)
    sums = partial_sums.zeros(inside, tile)
    exchange = join_cluster(exchange, tile)
    at = Position(0, 0)
    for nth in range(first, share.last - share.first, step):
        statistics = row_tile.by_row(next_statistics)
        if order_ptr is not None:
            behind = row_at(order_ptr, place - (tile.num_stages + 1) * step, share)
        if tile.prefetches_statistics:  # one tile ahead; else half a tile, below, where registers are short
            next_statistics = row_tile.load_row_statistics(in_memory, row_behind(row, 1, step, in_order), norm, tile)
        more = row_tile.load_tiles(rows_in, strides_in, row, row_tile.aligned(cols, dtype), tile)
        if tile.by_threads:
            stage = opaque(at.stage)  # else the addresses of all chunks would be held
            sums, row_sums = sum_by_chunks(rings, stage, held, statistics, weight, sums, inside, tile)
        else:
            others = row_tile.load_added(added, row, cols, tile)
            ring.wait_for_tile(rings, at, tile)
            tiles, dy = read_tiles(rings, at.stage, False, tile)
            if tile.reads_once:
                passes.store_early_gradients(
                    outs, stride, tiles + more, held, dy, statistics, weight, bias, row, cols, inside, tile
                )  # fmt: skip
            sums, row_sums = passes.sum_tile(tiles + more, held, dy, statistics, weight, sums, inside, tile)
        if norm.wants_sums and partial_sums.stores_early(norm, tile):
            if nth + step >= share.last - share.first:  # the last tile
                if tile.announces_end:  # saves time only: the dependent launch waits for this one's end
                    launch_dependents()
                store_sums(partials, sums, of_norm, share.sample, rows_with_sums, sample_rows, cols, norm, tile)
        row_sums, exchange = sum_over_cluster(row_sums, exchange, tile)
        if not tile.prefetches_statistics:
            next_statistics = row_tile.load_row_statistics(in_memory, row_behind(row, 1, step, in_order), norm, tile)
        first_dy = row_tile.first_of_rows(rings.slots[1], at.stage, inside, tile)
        if tile.by_threads:
            means = passes.means_of_rows(row_sums, first_dy, first_weight, cols, rings.slots[1][0].dtype, inside)
            sums = store_by_chunks(
                rings, stage, outs, stride, held, statistics, means, weight, bias, added, sums, row,
                row - tile.num_stages * step, share, cols, inside, tile,
            )  # fmt: skip
        else:
            # Refill: every warp has read the stage, by the compiler's CTA barrier and proxy fence before the copies.
            if tile.added_in_ring:
                others = (row_tile.read_tile(rings.slots[len(rings.slots) - 1], at.stage, False, tile),)
            if tile.reads_once:
                next_row = row_behind(row, tile.num_stages, step, in_order)
                fill_stage(rings, at.stage, next_row, first_row(in_order, share), tile)
            else:  # the stage still has the tile: it is refilled below, after these reads
                tiles, dy = read_tiles(rings, at.stage, True, tile)
            sums = passes.store_gradients(
                outs, stride, tiles + more, held, dy, statistics, row_sums, weight, bias, others, first_dy,
                first_weight, sums, row, cols, inside, tile,
            )  # fmt: skip
            if not tile.reads_once:
                next_row = row_behind(row, tile.num_stages, step, in_order)
                fill_stage(rings, at.stage, next_row, first_row(in_order, share), tile)
        if order_ptr is None:
            row -= step
        else:
            in_order = one_tile_on(in_order, behind)
            row = in_order[0]
            place -= step
        at = ring.next_position(at, tile)

    ring.wait_for_all(tile)
    # Here `store_partials_of_cta` may need shared memory. The compiler may place it in the rings' memory, whose last
    # copies have been waited for, but not in the mbarriers' memory, because the mbarriers are closed last.
    if norm.wants_sums and not partial_sums.stores_early(norm, tile):
        if tile.announces_end:  # saves time only, as above
            launch_dependents()
        store_sums(partials, sums, of_norm, share.sample, rows_with_sums, sample_rows, cols, norm, tile)
    ring.close_barriers(rings, tile)
