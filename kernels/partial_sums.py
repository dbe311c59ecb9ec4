"""dw and db over the rings: what a thread sums, over its rows of all tiles, as the CTA's row of the partials; and the
sums of these, once all CTAs of the grid have met."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_sum import sum_pieces
from .grid import WORDS, arrive, group_of, group_size, groups_with_members, wait_for_group
from .ring import cluster_bases, column_index, column_layout, per_row, row_major, tile_layout


@gluon.jit
def zeros_by_column(tile: gl.constexpr):
    """Where the sums of dw or db start, each thread's its own: the rows of a tile come together at the end."""
    sums = ()
    for _ in gl.static_range(tile.chunks):
        sums = sums + (gl.full([tile.rows, tile.cluster, tile.chunk], 0.0, gl.float32, tile_layout(tile)),)
    return sums


@gluon.constexpr_function
def is_of_several_warps(tile):
    """Whether the rows of a tile are in different warps, so that only shared memory brings a column's sum together."""
    return tile.cluster == 1 and 1 < tile.num_warps <= tile.rows


@gluon.constexpr_function
def leave_early(tile):
    """Whether partials leave before the last tile's dx is made, for which they must need no shared memory: that is the
    ring's until then."""
    return tile.works_ahead and not is_of_several_warps(tile)


@gluon.constexpr_function
def by_row_layout(tile):
    """Of [rows, cluster, chunk] read back from shared memory: a thread has some columns of all rows."""
    return gl.BlockedLayout([tile.rows, 1, 4], [1, 1, 32], [1, 1, tile.num_warps], [2, 1, 0])


@gluon.constexpr_function
def partial_store_layout(tile):
    """Of a chunk of partials, [cluster, chunk]: adjacent threads store adjacent 16 bytes. A warp has the columns that
    it had in the tile, so that they change hands by shuffles."""
    if is_of_several_warps(tile):
        return gl.SliceLayout(0, by_row_layout(tile))
    if tile.vector <= 4:
        return column_layout(tile)
    of_warp = tile.vector * tile.threads_of_a_row // tile.num_warps  # adjacent columns
    powers = [1 << bit for bit in range(tile.chunk.bit_length() - 1)]
    lanes = [n for n in powers if 4 <= n < min(of_warp, 128)]
    warps = [n for n in powers if of_warp <= n < of_warp * tile.num_warps]
    registers = [n for n in powers if n not in lanes + warps]
    lanes += [0] * (5 - len(lanes))
    bases = [[[0, n] for n in columns] for columns in (registers, lanes, warps)]
    return gl.DistributedLinearLayout(*bases, cluster_bases(tile, 2, 0), [tile.cluster, tile.chunk])


@gluon.jit
def leave_sums(sums, wanted: gl.constexpr, tile: gl.constexpr):
    """The chunks of dw or db, in shared memory where warps have to meet there: all at once, because one by one each
    would be two CTA barriers. When the row loop is done there is room for it: a ring of two stages is as large."""
    left = sums
    if wanted and is_of_several_warps(tile):
        layout: gl.constexpr = row_major(tile, 3, 1)  # of a chunk
        memory = gl.allocate_shared_memory(gl.float32, [tile.num_chunks, tile.rows, 1, tile.chunk], layout)
        left = ()
        for c in gl.static_range(tile.chunks):
            memory.index(c).store(sums[c])
            left = left + (memory.index(c),)
    return left


@gluon.jit
def sum_over_rows(chunk, tile: gl.constexpr):
    """A chunk of dw or db, [cluster, chunk], as it is to be stored."""
    if not is_of_several_warps(tile):
        total = gl.convert_layout(gl.sum(chunk, axis=0), partial_store_layout(tile))
    elif isinstance(chunk, gl.shared_memory_descriptor):
        total = gl.sum(chunk.load(by_row_layout(tile)), axis=0)
    else:
        total = gl.sum(gl.convert_layout(chunk, by_row_layout(tile)), axis=0)
    return total


@gluon.jit
def store_partials(dw_ptr, db_ptr, dw, db, partial, cols, end, norm: gl.constexpr, tile: gl.constexpr):
    """Row `partial` of the [num_partials, cols] partials, up to column `end`. dw and db are chunks in registers, or
    left in shared memory."""
    for c in gl.static_range(tile.chunks):
        col = column_index(c, partial_store_layout(tile), tile)
        target = partial.to(gl.int64) * cols + col
        if norm.wants_dw:
            gl.store(dw_ptr + target, sum_over_rows(dw[c], tile), mask=col < end)
        if norm.wants_db:
            gl.store(db_ptr + target, sum_over_rows(db[c], tile), mask=col < end)


@gluon.jit
def hidden(value):
    """A number of which the compiler knows nothing more, not even that it is the same in every turn of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def num_partials(rows, tile: gl.constexpr):
    """As many as there are CTAs, or clusters, that have row tiles; the others only help to sum them."""
    return min(gl.num_programs(0), gl.cdiv(rows, tile.rows))


@gluon.jit
def leave_partials(dw_ptr, db_ptr, dw, db, semaphore_ptr, rows, cols, norm: gl.constexpr, tile: gl.constexpr):
    """The CTA's row of the partials, if it has row tiles; with a semaphore, for all CTAs to read when they meet."""
    dw = leave_sums(dw, norm.wants_dw, tile)
    db = leave_sums(db, norm.wants_db, tile)
    partial = hidden(gl.program_id(0))  # or addresses would be worked out before the row loop, and held
    end = gl.where(partial * tile.rows < rows, cols, 0)
    store_partials(dw_ptr, db_ptr, dw, db, partial, cols, end, norm, tile)
    come(semaphore_ptr, partial, tile)


@gluon.jit
def come(semaphore_ptr, partial, tile: gl.constexpr):
    """With a semaphore, let whoever reads row `partial` know that this CTA is done with it."""
    if semaphore_ptr is not None:
        adjacent: gl.constexpr = partials_of_a_load(tile)
        groups: gl.constexpr = meeting_groups(tile)
        partials = hidden(gl.num_programs(0))
        group = group_of(partial, adjacent, groups)
        ctas = group_size(group, partials, adjacent, groups) * tile.cluster
        first = group * (adjacent * tile.cluster)
        arrive(semaphore_ptr, group, first, ctas, groups_with_members(partials, adjacent, groups))


@gluon.constexpr_function
def partials_of_a_load(tile):
    """Rows of the partials that a warp reads at once, four elements a thread."""
    return 128 // tile.partial_cols


@gluon.constexpr_function
def meeting_groups(tile):
    """Groups of CTAs, by the warps that read what they wrote: a warp has long been busy with what others left when the
    last CTA comes."""
    return min(WORDS, tile.num_warps)


@gluon.constexpr_function
def partial_load_layout(tile):
    """Four elements a thread of [partial_rows, cluster, partial_cols]: different rows in each warp."""
    lanes = tile.partial_cols // 4
    return gl.BlockedLayout(
        [1, 1, 4], [32 // lanes, 1, lanes], [tile.num_warps, 1, 1], [2, 1, 0], cga_layout=cluster_bases(tile, 3, 1)
    )


@gluon.constexpr_function
def partial_sum_layout(tile):
    """Of the same, the rows of a column within a warp where columns are enough: each CTA of a cluster would sum over
    warps for all of them."""
    warps = min(tile.num_warps, tile.partial_cols // 4)
    lanes = tile.partial_cols // (4 * warps)
    return gl.BlockedLayout(
        [1, 1, 4], [32 // lanes, 1, lanes], [tile.num_warps // warps, 1, warps], [2, 1, 0],
        cga_layout=cluster_bases(tile, 3, 1),
    )  # fmt: skip


@gluon.jit
def piece_columns(layout: gl.constexpr, tile: gl.constexpr):
    """The columns of a cluster's piece of dw or db, [1, cluster, partial_cols]."""
    cta = gl.arange(0, tile.cluster, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * tile.partial_cols
    within = gl.arange(0, tile.partial_cols, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return gl.expand_dims(gl.expand_dims(cta, 0), 2) + gl.expand_dims(gl.expand_dims(within, 0), 1)


@gluon.jit
def sum_partials(partial_ptr, out_ptr, first_col, num_partials, cols, tile: gl.constexpr):
    """As column_sum's: `partial_cols` columns for each CTA of a cluster. Rows are multiples of 16 bytes here, so that a
    thread has one address, and one step from load to load."""
    layout: gl.constexpr = partial_load_layout(tile)
    row = per_row(gl.arange(0, tile.partial_rows, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    col = first_col + piece_columns(layout, tile)
    total = (row * 0 + col * 0).to(gl.float32)
    here = partial_ptr + (row.to(gl.int64) * cols + col)
    step = cols.to(gl.int64) * tile.partial_rows
    for start in range(0, num_partials, tile.partial_rows * tile.partial_loads):
        loads = ()
        for i in gl.static_range(tile.loads):
            left = num_partials - start - i * tile.partial_rows
            loads = loads + (gl.load(here, mask=(row < left) & (col < cols), other=0.0),)
            here += step
        for i in gl.static_range(tile.loads):
            total += loads[i]
    total = gl.expand_dims(gl.sum(gl.convert_layout(total, partial_sum_layout(tile)), axis=0), 0)
    col = first_col + piece_columns(partial_sum_layout(tile), tile)
    gl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


@gluon.jit
def sum_partials_of_grid(
    semaphore_ptr, dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, rows, cols, norm: gl.constexpr, tile: gl.constexpr
):
    """dw and db from the partials of all CTAs, or of all clusters, which run at once and wait for each other here."""
    groups: gl.constexpr = meeting_groups(tile)
    wait_for_group(semaphore_ptr, group_of(gl.program_id(0), partials_of_a_load(tile), groups), groups)
    sum_pieces(
        dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, num_partials(rows, tile), cols,
        tile.cluster * tile.partial_cols, sum_partials, norm, tile,
    )  # fmt: skip
