"""Row tiles in shared memory and in registers: where their elements lie, and how they come and go.

A tile is tile.rows rows of x (or dy). The tile.cluster CTAs of a cluster share its columns: [rows, cluster, chunk],
num_chunks times. It arrives in copies of one or several chunks. One copy of several chunks is quicker to start than a
copy for each, but it brings only chunks that lie within the row. Where the row ends within its last chunk, that chunk
can be a tail, with a copy of its own. A copy brings zeros for columns beyond the row's end and for rows before row 0.

Tiles go from the last row to the first. The kernel that wrote the tensor has left the last rows in L2, and the kernel
that reads the result asks for the first rows first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import reinterpret
from .loads import Statistics, chunk_of, combine, each_of_group, load_statistics, of_groups
from .rowmath import snaps, widen


@gluon.constexpr_function
def cluster_bases(tile, rank, dim):
    """Layout bases that spread dimension `dim` of a tensor of `rank` dimensions over the CTAs of a cluster."""
    return [[1 << bit if d == dim else 0 for d in range(rank)] for bit in range((tile.cluster - 1).bit_length())]


@gluon.constexpr_function
def row_major(tile, rank, dim):
    """Row-major layout of shared memory without swizzling, with dimension `dim` spread over the CTAs of a cluster."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))), cga_layout=cluster_bases(tile, rank, dim))


@gluon.constexpr_function
def tile_layout(tile):
    """Layout of a tile's chunk, [rows, cluster, chunk].

    With at least as many rows as warps, the threads of a row are in one warp, and its row sum needs no other warp. With
    fewer rows, every warp holds a part of every row, and its sums over rows (dw, db) need shuffles only. In a cluster,
    each thread holds the same columns of every row: a row sum takes all threads of the CTA anyway."""
    rows_of_thread, lanes, warps = tile.rows, 1, 1
    if tile.cluster == 1:
        rows_of_thread, warps = 1, 1 if tile.rows < tile.num_warps else tile.num_warps
        lanes = tile.rows // warps
    return gl.BlockedLayout(
        [rows_of_thread, 1, tile.vector], [lanes, 1, 32 // lanes], [warps, 1, tile.num_warps // warps], [2, 1, 0],
        cga_layout=cluster_bases(tile, 3, 1),
    )  # fmt: skip


@gluon.constexpr_function
def column_layout(tile):
    """Layout of one value per column, [cluster, chunk]: parameters, dw, db."""
    return gl.SliceLayout(0, tile_layout(tile))


@gluon.constexpr_function
def row_layout(tile):
    """Layout of one value per row, [rows]."""
    return gl.SliceLayout(1, gl.SliceLayout(2, tile_layout(tile)))


@gluon.constexpr_function
def numbers_layout(tile):
    """The layout of numbers. Each CTA of a cluster has all of them."""
    return gl.BlockedLayout([1], [32], [tile.num_warps], [0], cga_layout=cluster_bases(tile, 1, None))


@gluon.jit
def numbers(count: gl.constexpr, tile: gl.constexpr):
    """loads.share_of_key calls this."""
    return gl.arange(0, count, numbers_layout(tile))


@gluon.jit
def per_row(values):
    """[rows] -> [rows, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(values, 1), 2)


@gluon.jit
def copy_descriptors(desc, tail_desc, tile: gl.constexpr):
    """The descriptor, or pointer, for each copy of a tile. A descriptor for copies of one chunk, such as the tail's,
    describes the tensor as [rows, cols / box, box]; one for copies of several chunks, as [chunks, rows, chunk / box,
    box]. chunk counts the columns of all CTAs of a cluster here. With groups of columns, these are a dimension behind
    the rows."""
    descs = (desc,)
    for _ in gl.static_range(1, tile.copies):
        if tile.tail:
            descs = descs + (tail_desc,)
        else:
            descs = descs + (desc,)
    return descs


@gluon.jit
def copy_corners(row, tile: gl.constexpr):
    """The coordinates at which each copy of the tile at `row` begins, in the dimensions of its descriptor; `row` where
    threads copy."""
    corners = ()
    rows = (row,)
    if tile.groups > 1:
        rows = (row, gl.program_id(2))
    for i in gl.static_range(tile.copies):
        if tile.by_threads:
            corners = corners + (row,)
        elif tile.chunks_of(i) > 1:
            corners = corners + ((tile.first_chunk(i),) + rows + (0, 0),)
        else:
            corners = corners + (rows + (tile.first_chunk(i) * (tile.cluster * tile.chunk // tile.box), 0),)
    return corners


@gluon.jit
def read_chunk(slots, stage, c: gl.constexpr, reload: gl.constexpr, tile: gl.constexpr):
    """Chunk c of a stage, [rows, cluster, chunk]. See `read_tile`."""
    dtype: gl.constexpr = slots[0].dtype
    as_bits: gl.constexpr = gl.int16 if dtype.primitive_bitwidth == 16 else gl.int32
    seen_as: gl.constexpr = as_bits if reload else dtype
    i: gl.constexpr = tile.copy_of(c)
    shape: gl.constexpr = [tile.chunks_of(i), tile.rows, tile.cluster, tile.chunk]
    copied = reinterpret(slots[i].index(stage), seen_as, shape, row_major(tile, 3, 1))
    return copied.index(c - tile.first_chunk(i)).load(tile_layout(tile)).to(dtype, bitcast=True)


@gluon.jit
def first_of_rows(slots, stage, norm: gl.constexpr, tile: gl.constexpr):
    """The first element of each row of a stage, [rows, cluster, 1], in float32; each CTA of a cluster gets that of its
    columns. A placeholder if rowmath.snapped does not need it."""
    first = 0.0
    if snaps(norm, slots[0].dtype):
        if tile.cluster == 1:
            shape: gl.constexpr = [tile.chunks_of(0), tile.rows, tile.cluster, tile.chunk]
            copied = reinterpret(slots[0].index(stage), slots[0].dtype, shape, row_major(tile, 3, 1))
            first = copied.index(0).slice(0, 1, dim=2).load(tile_layout(tile))
        else:  # Triton 3.6 has no slices over several CTAs, whose tiles have one row or two
            elements_of_cta: gl.constexpr = [tile.chunks_of(0) * tile.rows * tile.chunk, 1, tile.cluster, 1]
            copied = reinterpret(slots[0].index(stage), slots[0].dtype, elements_of_cta, row_major(tile, 3, 1))
            first = copied.index(0).load(tile_layout(tile))
            if tile.rows == 2:
                is_second = per_row(gl.arange(0, tile.rows, row_layout(tile))) == 1
                first = gl.where(is_second, copied.index(tile.chunk).load(tile_layout(tile)), first)
    return first


@gluon.jit
def first_of_weight(ptr, cols, dtype: gl.constexpr, norm: gl.constexpr, tile: gl.constexpr):
    """The weight at the columns of `first_of_rows`, [1, cluster, 1], in float32. dtype is that of dy."""
    first = 0.0
    if norm.has_weight and snaps(norm, dtype):
        by_cta: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, tile_layout(tile)))
        col = gl.arange(0, tile.cluster, by_cta) * tile.chunk
        loaded = gl.load(ptr + col, mask=col < cols, other=0.0).to(gl.float32)
        first = gl.expand_dims(gl.expand_dims(loaded, 0), 2)
    return first


@gluon.jit
def read_tile(slots, stage, reload: gl.constexpr, tile: gl.constexpr):
    """The chunks of a stage in registers, in their own dtype. The caller has waited for the stage's mbarriers. `reload`
    marks a second read of the stage, which goes through an integer type. Otherwise the compiler would find both reads
    equal and keep the values of the first in registers."""
    chunks = ()
    for c in gl.static_range(tile.chunks):
        chunks = chunks + (read_chunk(slots, stage, c, reload, tile),)
    return chunks


@gluon.jit
def column_index(c: gl.constexpr, layout: gl.constexpr, tile: gl.constexpr):
    """The columns [cluster, chunk] of chunk c, in `layout`."""
    cta = gl.arange(0, tile.cluster, gl.SliceLayout(1, layout)) * tile.chunk
    within = gl.arange(0, tile.chunk, gl.SliceLayout(0, layout))
    return c * (tile.cluster * tile.chunk) + gl.expand_dims(cta, 1) + gl.expand_dims(within, 0)


@gluon.jit
def row_of_tile(nth, rows, tile: gl.constexpr):
    """First row of the tile that has `nth` rows of the tensor after it. The tile with row 0 may begin before row 0."""
    return rows - tile.rows - nth


@gluon.jit
def row_index(row, tile: gl.constexpr):
    """The rows [rows] of the tile at `row`; negative ones lie outside the tensor."""
    return row + gl.arange(0, tile.rows, row_layout(tile))


@gluon.jit
def columns_of_thread(c: gl.constexpr, tile: gl.constexpr):
    """The columns [cluster, chunk] of chunk c, in the layout of a tile: each thread has those of its elements."""
    return column_index(c, column_layout(tile), tile)


@gluon.jit
def hold_parameter(loaded, present: gl.constexpr, in_smem: gl.constexpr, tile: gl.constexpr):
    """Keep a loaded parameter for the CTA's life: in registers, or in shared memory where registers are short."""
    held = loaded
    if present and in_smem:
        by_rows: gl.constexpr = row_major(tile, 2, 0)
        held = ()
        for c in gl.static_range(tile.chunks):
            chunk = loaded[c]
            held = held + (gl.allocate_shared_memory(chunk.dtype, [tile.cluster, tile.chunk], by_rows, chunk),)
    return held


@gluon.jit
def hold_shared(loaded, tile: gl.constexpr):
    """What loads.load_shared has loaded, each as `hold_parameter` keeps it."""
    held = ()
    for t in gl.static_range(len(loaded)):
        held = held + (hold_parameter(loaded[t], True, tile.weight_in_smem, tile),)
    return held


@gluon.jit
def as_rows(chunks, present: gl.constexpr, tile: gl.constexpr):
    """Chunks [cluster, chunk] -> [1, cluster, chunk]; placeholders of an absent operand as they are."""
    found = chunks
    if present:
        found = ()
        for c in gl.static_range(tile.chunks):
            found = found + (gl.expand_dims(chunks[c], 0),)
    return found


@gluon.jit
def chunk_with_shared(tiles, held, c: gl.constexpr, tile: gl.constexpr):
    """Chunk c of each row tile, and of each row that `hold_shared` keeps, [1, cluster, chunk], each in its own dtype.
    """
    return with_shared(chunk_of(tiles, c), held, c, tile)


@gluon.jit
def with_shared(chunks, held, c: gl.constexpr, tile: gl.constexpr):
    """`chunk_with_shared` from chunk c of each row tile."""
    for t in gl.static_range(len(held)):
        row = held[t][c]
        if tile.weight_in_smem:
            row = row.load(column_layout(tile))
        chunks = chunks + (gl.expand_dims(row, 0),)
    return chunks


@gluon.jit
def combine_tiles(tiles, held, rows_out, norm: gl.constexpr, tile: gl.constexpr):
    """loads.combine of each chunk, of tiles and of what `hold_shared` keeps."""
    chunks = ()
    for c in gl.static_range(tile.chunks):
        chunks = chunks + (combine(chunk_with_shared(tiles, held, c, tile), rows_out, norm),)
    return chunks


@gluon.jit
def row_as_held(held, tile: gl.constexpr):
    """One chunk of a parameter that `hold_parameter` keeps, [1, cluster, chunk]."""
    row = held
    if tile.weight_in_smem:
        row = held.load(column_layout(tile))
    return gl.expand_dims(row, 0)


@gluon.jit
def parameter_row(held, present: gl.constexpr, tile: gl.constexpr):
    """`row_as_held` in float32; the placeholder of an absent parameter as it is."""
    row = held
    if present:
        row = widen(row_as_held(held, tile), tile.in_pairs)
    return row


@gluon.jit
def load_row_statistics(source, row, norm: gl.constexpr, tile: gl.constexpr):
    """Statistics [rows] of the tile at `row`. Rows before row 0, such as those of a tile after the last, get zeros."""
    index = row_index(row, tile)
    return load_statistics(source, index, index >= 0, norm)


@gluon.jit
def by_row(statistics):
    """Statistics [rows] -> [rows, 1, 1]."""
    return Statistics(per_row(statistics.mean), per_row(statistics.rstd))


@gluon.jit
def store_statistics(mean_ptr, rstd_ptr, statistics, row, norm: gl.constexpr, tile: gl.constexpr):
    """Store statistics [rows, cluster] of the tile at `row`."""
    cta = gl.expand_dims(gl.arange(0, tile.cluster, gl.SliceLayout(0, gl.SliceLayout(2, tile_layout(tile)))), 0)
    index = gl.expand_dims(row_index(row, tile), 1) + 0 * cta
    here = (index >= 0) & (cta == 0)  # every CTA of a cluster has the statistics; the first one stores them
    index = of_groups(index, tile)
    gl.store(rstd_ptr + index, statistics.rstd, mask=here)
    if norm.layer:
        gl.store(mean_ptr + index, statistics.mean, mask=here)


@gluon.constexpr_function
def log2_of_16_bytes(dtype):
    return (128 // dtype.primitive_bitwidth).bit_length() - 1


@gluon.jit
def aligned(size, dtype: gl.constexpr):
    """`size`, elements of `dtype` that are a multiple of 16 bytes, in a form that shows this to the compiler. It finds
    only multiples of 16 elements by itself, and loads single elements where it cannot tell."""
    bits: gl.constexpr = log2_of_16_bytes(dtype)
    return (size >> bits) << bits


@gluon.jit
def load_tile(ptr, row, stride, cols, tile: gl.constexpr):
    """The chunks of the tile at `row` of a tensor whose rows are `stride` elements apart, in its own dtype, from global
    memory to registers without a ring."""
    chunks = ()
    for c in gl.static_range(tile.chunks):
        chunks = chunks + (load_chunk(ptr, row, stride, cols, c, tile),)
    return chunks


@gluon.jit
def load_chunk(ptr, row, stride, cols, c: gl.constexpr, tile: gl.constexpr):
    """Chunk c of `load_tile`."""
    source, mask = elements(row, stride, cols, c, tile)
    if has_no_outside(c, tile):
        chunk = gl.load(ptr + source)
    else:
        chunk = gl.load(ptr + source, mask=mask, other=0.0)
    return chunk


@gluon.jit
def load_tiles(rows_in, strides_in, row, cols, tile: gl.constexpr):
    """`load_tile` of the row tensors that a form reads beside x, as a tuple. Their pointers and strides come as in
    multiwave.py; their rows have one stride, a multiple of 16 bytes."""
    tiles = ()
    rows_in = each_of_group(rows_in, cols, tile)
    if rows_in is not None:
        for t in gl.static_range(len(rows_in)):
            stride = aligned(strides_in[3 * t + 1], rows_in[t].dtype.element_ty)
            tiles = tiles + (load_tile(rows_in[t], row, stride, cols, tile),)
    return tiles


@gluon.jit
def load_added(added, row, cols, tile: gl.constexpr):
    """`load_tile` of the gradients that are added to that of the normalized row, as a tuple. They are contiguous."""
    tiles = ()
    added = each_of_group(added, cols, tile)
    if added is not None:
        for t in gl.static_range(len(added)):
            tiles = tiles + (load_tile(added[t], row, of_groups(cols, tile), cols, tile),)
    return tiles


@gluon.jit
def load_added_chunks(added, row, cols, c: gl.constexpr, tile: gl.constexpr):
    """Chunk c of each tile of `load_added`."""
    chunks = ()
    added = each_of_group(added, cols, tile)
    if added is not None:
        for t in gl.static_range(len(added)):
            chunks = chunks + (load_chunk(added[t], row, of_groups(cols, tile), cols, c, tile),)
    return chunks


@gluon.jit
def elements(row, stride, cols, c: gl.constexpr, tile: gl.constexpr, copied: gl.constexpr = None):
    """Element offsets (int64) of chunk c of the tile at `row` in a [rows, cols] tensor whose rows are `stride` elements
    apart, and the mask of those inside the tensor. `copied` is the dtype of a tensor that threads copy to a ring."""
    index = per_row(row_index(row, tile))
    col = gl.expand_dims(columns_of_thread(c, tile), 0)
    if tile.by_threads:  # chunks differ by a constant, so that no address of a chunk is held
        first = gl.expand_dims(columns_of_thread(0, tile), 0)
        begin = index.to(gl.int64) * stride
        if copied is not None:  # aligned here: an aligned stride would be held, too
            begin = aligned(begin, copied)
        offset = begin + first + c * tile.chunk
    else:
        offset = index.to(gl.int64) * stride + col
    return offset, (index >= 0) & (col < cols)


@gluon.constexpr_function
def has_no_outside(c, tile):
    """True if every element of chunk c of every tile is inside the tensor, and loads and stores take no mask. A tile of
    several rows may begin before row 0. Two compute groups keep their masks even where all elements are inside: without
    masks the compiler computes addresses once and holds them, and these groups lack one register for that."""
    whole = tile.whole or (tile.by_threads and c < tile.num_chunks - 1)
    return whole and tile.rows == 1 and tile.num_groups == 1


@gluon.jit
def store_chunk(ptr, value, row, stride, cols, c: gl.constexpr, eviction_policy: gl.constexpr, tile: gl.constexpr):
    target, mask = elements(row, stride, cols, c, tile)
    rounded = value.to(ptr.dtype.element_ty)
    if has_no_outside(c, tile):
        gl.store(ptr + target, rounded, eviction_policy=eviction_policy)
    else:
        gl.store(ptr + target, rounded, mask=mask, eviction_policy=eviction_policy)
