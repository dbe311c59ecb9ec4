"""dw and db over the rings: what a thread sums, over its rows of all tiles, as the CTA's row of the partials; and the
sums of these, once all CTAs of the grid have met."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_sum import sum_pieces
from .grid import meet
from .ring import cluster_bases, column_index, per_row, row_major, tile_layout


@gluon.jit
def zeros_by_column(tile: gl.constexpr):
    """Where the sums of dw or db start, each thread's its own: the rows of a tile come together at the end."""
    sums = ()
    for _ in gl.static_range(tile.chunks):
        sums = sums + (gl.full([tile.rows, tile.cluster, tile.chunk], 0.0, gl.float32, tile_layout(tile)),)
    return sums


@gluon.constexpr_function
def is_as_stored(tile):
    """Whether threads store what they hold already, or have summed over the rows of their warp."""
    return tile.cluster == 1 and 1 < tile.rows < tile.num_warps or tile.rows == 1 and tile.vector == 4


@gluon.constexpr_function
def partial_store_layout(tile):
    """A thread has some columns of all rows, which it sums in order; adjacent threads store adjacent 16 bytes."""
    if is_as_stored(tile):
        return tile_layout(tile)
    return gl.BlockedLayout(
        [tile.rows, 1, 4], [1, 1, 32], [1, 1, tile.num_warps], [2, 1, 0], cga_layout=cluster_bases(tile, 3, 1)
    )


@gluon.jit
def leave_sums(sums, wanted: gl.constexpr, tile: gl.constexpr):
    """What threads summed, in shared memory where others are to store it: all chunks at once, because one by one each
    would be two CTA barriers. When the row loop is done there is room for it: a ring of two stages is as large."""
    left = sums
    if wanted and not is_as_stored(tile):
        layout: gl.constexpr = row_major(tile, 3, 1)  # of a chunk
        memory = gl.allocate_shared_memory(gl.float32, [tile.num_chunks, tile.rows, tile.cluster, tile.chunk], layout)
        left = ()
        for c in gl.static_range(tile.chunks):
            memory.index(c).store(sums[c])
            left = left + (memory.index(c),)
    return left


@gluon.jit
def sum_over_rows(chunk, tile: gl.constexpr):
    """A chunk of dw or db, [cluster, chunk], as it is to be stored."""
    layout: gl.constexpr = partial_store_layout(tile)
    if isinstance(chunk, gl.shared_memory_descriptor):
        by_row = chunk.load(layout)
    else:
        by_row = gl.convert_layout(chunk, layout)
    return gl.sum(by_row, axis=0)


@gluon.jit
def store_partials(dw_ptr, db_ptr, dw, db, partial, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Row `partial` of the [num_partials, cols] partials. dw and db are chunks in registers, or left in shared
    memory."""
    layout: gl.constexpr = partial_store_layout(tile)
    for c in gl.static_range(tile.chunks):
        col = column_index(c, gl.SliceLayout(0, layout), tile)
        target = partial.to(gl.int64) * cols + col
        if norm.wants_dw:
            gl.store(dw_ptr + target, sum_over_rows(dw[c], tile), mask=col < cols)
        if norm.wants_db:
            gl.store(db_ptr + target, sum_over_rows(db[c], tile), mask=col < cols)


@gluon.constexpr_function
def partial_load_layout(tile):
    """Four elements a thread: [partial_rows, cluster, partial_cols]. The warps of a CTA have different rows, so that
    loads are of long pieces; but in a cluster different columns, because the compiler's sum over warps would be done by
    each CTA for all of them."""
    warps = 1 if tile.cluster == 1 else min(tile.num_warps, tile.partial_cols // 4)
    lanes = tile.partial_cols // (4 * warps)
    return gl.BlockedLayout(
        [1, 1, 4], [32 // lanes, 1, lanes], [tile.num_warps // warps, 1, warps], [2, 1, 0],
        cga_layout=cluster_bases(tile, 3, 1),
    )  # fmt: skip


@gluon.jit
def sum_partials_of_grid(
    semaphore_ptr, dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, cols, norm: gl.constexpr, tile: gl.constexpr
):
    """dw and db from the partials of all CTAs, or of all clusters, which run at once and wait for each other here."""
    meet(semaphore_ptr)
    layout: gl.constexpr = partial_load_layout(tile)
    row = per_row(gl.arange(0, tile.partial_rows, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    cta = gl.arange(0, tile.cluster, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * tile.partial_cols
    within = gl.arange(0, tile.partial_cols, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    col = gl.expand_dims(gl.expand_dims(cta, 0), 2) + gl.expand_dims(gl.expand_dims(within, 0), 1)
    sum_pieces(
        dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, gl.num_programs(0), cols, row, col,
        tile.cluster * tile.partial_cols, norm, tile,
    )  # fmt: skip
