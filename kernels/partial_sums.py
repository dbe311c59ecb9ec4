"""dw, db and sums of modulations, of pipelined.py and warp_specialized.py: each thread sums over its rows of all tiles,
and the CTA (or compute group) stores its sums as one row of the partials. A second launch (finalizer.py) adds up these
rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .loads import of_groups
from .passes import ColumnSums
from .ptx import opaque
from .row_tile import cluster_bases, column_index, column_layout, row_major, tile_layout


@gluon.jit
def zeros(norm: gl.constexpr, tile: gl.constexpr):
    """Zeros to start the sums from, [rows, cluster, chunk] for each chunk. Each thread has its own sums; the rows of a
    tile are added together only at the end."""
    chunks = ()
    more = ()
    for _ in gl.static_range(tile.chunks):
        chunks = chunks + (gl.full([tile.rows, tile.cluster, tile.chunk], 0.0, gl.float32, tile_layout(tile)),)
        for _ in gl.static_range(norm.sums):
            more = more + (gl.full([tile.rows, tile.cluster, tile.chunk], 0.0, gl.float32, tile_layout(tile)),)
    return ColumnSums(chunks, chunks, more)


@gluon.constexpr_function
def is_of_several_warps(tile):
    """True if the rows of a tile are in different warps, so that a column's sum needs shared memory."""
    return tile.cluster == 1 and 1 < tile.num_warps <= tile.rows


@gluon.constexpr_function
def stores_early(norm, tile):
    """True if pipelined.backward stores the partials before it computes the last tile's dx, and not after its row loop.
    This takes registers, like prefetched statistics. It also requires that the stores need no shared memory, because
    the ring still uses it, and that the sums are complete, which those of modulations are not."""
    has_room = tile.prefetches_statistics and not tile.by_threads
    return has_room and not is_of_several_warps(tile) and not norm.summed


@gluon.constexpr_function
def by_row_layout(tile):
    """Layout of sums [rows, 1, chunk] after the exchange through shared memory: a thread has all rows of its columns,
    which are 4 float32 (16 bytes) for each store."""
    return gl.BlockedLayout([tile.rows, 1, 4], [1, 1, 32], [1, 1, tile.num_warps], [2, 1, 0])


@gluon.constexpr_function
def partial_store_layout(tile):
    """Layout in which a chunk of partials, [cluster, chunk], is stored: adjacent threads store adjacent 16 bytes.
    Unless the rows of a tile are in different warps, a warp keeps the columns that it had in the tile, so that the
    change of layout needs shuffles only."""
    if is_of_several_warps(tile):
        return gl.SliceLayout(0, by_row_layout(tile))
    if tile.vector <= 4:
        return column_layout(tile)
    of_warp = tile.vector * tile.threads_per_row // tile.num_warps  # adjacent columns of a warp
    powers = [1 << bit for bit in range(tile.chunk.bit_length() - 1)]
    lanes = [n for n in powers if 4 <= n < min(of_warp, 128)]
    warps = [n for n in powers if of_warp <= n < of_warp * tile.num_warps]
    registers = [n for n in powers if n not in lanes + warps]
    lanes += [0] * (5 - len(lanes))
    bases = [[[0, n] for n in columns] for columns in (registers, lanes, warps)]
    return gl.DistributedLinearLayout(*bases, cluster_bases(tile, 2, 0), [tile.cluster, tile.chunk])


@gluon.jit
def to_shared_memory(chunks, wanted: gl.constexpr, tile: gl.constexpr):
    """The chunks of dw or db, in shared memory if their rows are in different warps. Call this after the row
    loop: the compiler gives this memory the place of the ring, and a ring of two stages is large enough.

    The compiler puts CTA barriers between the ring's last reads and these stores, and between the stores and the reads
    of other warps' rows. All chunks are stored before any is read, so one barrier of the second kind is enough. One by
    one, each chunk would take two."""
    found = chunks
    if wanted and is_of_several_warps(tile):
        layout: gl.constexpr = row_major(tile, 3, 1)  # of one chunk
        memory = gl.allocate_shared_memory(gl.float32, [tile.num_chunks, tile.rows, 1, tile.chunk], layout)
        found = ()
        for c in gl.static_range(tile.chunks):
            memory.index(c).store(chunks[c])
            found = found + (memory.index(c),)
    return found


@gluon.jit
def sum_over_rows(chunk, tile: gl.constexpr):
    """A chunk of dw or db summed over a tile's rows, [cluster, chunk], in `partial_store_layout`. If the rows are in
    different warps, they are read from where `to_shared_memory` has put them. A compute group has not put them
    anywhere, and exchanges this chunk alone."""
    if not is_of_several_warps(tile):
        total = gl.convert_layout(gl.sum(chunk, axis=0), partial_store_layout(tile))
    elif isinstance(chunk, gl.shared_memory_descriptor):
        total = gl.sum(chunk.load(by_row_layout(tile)), axis=0)
    else:
        total = gl.sum(gl.convert_layout(chunk, by_row_layout(tile)), axis=0)
    return total


@gluon.jit
def store_partials(partials, sums, partial, cols, end, norm: gl.constexpr, tile: gl.constexpr):
    """Store row `partial` of the [num_partials, cols] partials up to column `end`, in float32. The sums are chunks in
    registers or in shared memory."""
    for c in gl.static_range(tile.chunks):
        col = column_index(c, partial_store_layout(tile), tile)
        target = partial.to(gl.int64) * of_groups(cols, tile) + col
        if norm.wants_dw:
            gl.store(partials.dw + target, sum_over_rows(sums.dw[c], tile), mask=col < end)
        if norm.wants_db:
            gl.store(partials.db + target, sum_over_rows(sums.db[c], tile), mask=col < end)
        for s in gl.static_range(norm.sums):
            gl.store(partials.more[s] + target, sum_over_rows(sums.more[c * norm.sums + s], tile), mask=col < end)


@gluon.jit
def more_in_shared_memory(more, norm: gl.constexpr, tile: gl.constexpr):
    """`to_shared_memory` of each of the sums of modulations, in the order in which they were."""
    by_sum = ()
    for s in gl.static_range(norm.sums):
        chunks = ()
        for c in gl.static_range(tile.chunks):
            chunks = chunks + (more[c * norm.sums + s],)
        by_sum = by_sum + (to_shared_memory(chunks, True, tile),)
    found = ()
    for c in gl.static_range(tile.chunks):
        for s in gl.static_range(norm.sums):
            found = found + (by_sum[s][c],)
    return found


@gluon.jit
def store_partials_of_cta(partials, sums, rows, sample_rows, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Store the CTA's row of the partials, if the CTA has row tiles."""
    dw = to_shared_memory(sums.dw, norm.wants_dw, tile)
    db = to_shared_memory(sums.db, norm.wants_db, tile)
    more = more_in_shared_memory(sums.more, norm, tile)
    # Opaque, else addresses are computed before the row loop, and held.
    if sample_rows is None:
        cta = opaque(gl.program_id(0))
        partial = cta
    else:
        cta = opaque(gl.program_id(1))
        partial = gl.program_id(0) * gl.num_programs(1) + cta
        rows = sample_rows
    end = gl.where(cta * tile.rows < rows, cols, 0)  # no columns for a CTA without row tiles
    store_partials(partials, ColumnSums(dw, db, more), partial, cols, end, norm, tile)
