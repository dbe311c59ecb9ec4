"""What the TMA schedules share: a ring of row tiles in shared memory, and the two passes of the backward over one tile.

A tile is tile.rows rows of x and of dy. A row is tile.num_chunks chunks of tile.chunk columns (a power of two each); every chunk of a tensor
has a ring of its own, [num_stages, rows, chunk], so that a row needs no padding to a power of two and the compiler sees no hazard between the
copies into different chunks. Rows beyond the last arrive as zeros, and so do columns.

The one file that names Gluon's TMA functions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .rowmath import input_gradient, normalize, row_means

fence_barriers = fence_async_shared
wait = mbarrier.wait
expect = mbarrier.expect
arrive = mbarrier.arrive
copy_to_shared = tma.async_copy_global_to_shared


@gluon.constexpr_function
def tile_layout(tile):
    """A thread holds the same columns of every row of a tile, so that dw and db are summed over the tile's rows without leaving it."""
    return gl.BlockedLayout([tile.rows, tile.vector], [1, 32], [1, tile.num_warps], [1, 0])


@gluon.constexpr_function
def column_layout(tile):
    """Layout of what has a value per column: parameters, dw, db."""
    return gl.SliceLayout(0, tile_layout(tile))


@gluon.jit
def allocate_ring(desc, tile: gl.constexpr):
    ring = ()
    for c in gl.static_range(tile.chunks):
        ring = ring + (gl.allocate_shared_memory(desc.dtype, [tile.num_stages] + desc.block_type.shape, desc.layout),)
    return ring


@gluon.jit
def allocate_barriers(tile: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [tile.num_stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(tile.stages):
        mbarrier.init(barriers.index(stage), count=1)
    return barriers


@gluon.jit
def read_tile(ring, stage, again: gl.constexpr, tile: gl.constexpr):
    """The chunks [rows, chunk] of a stage in registers, in their own dtype. `again` reads through another type, or the compiler would find
    the second read equal to the first and keep that one in registers instead."""
    dtype: gl.constexpr = ring[0].dtype
    as_bits: gl.constexpr = gl.int16 if dtype.primitive_bitwidth == 16 else gl.int32
    seen_as: gl.constexpr = as_bits if again else dtype
    rows_by_columns: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = tile_layout(tile)
    chunks = ()
    for c in gl.static_range(tile.chunks):
        chunk = ring[c].index(stage)._reinterpret(seen_as, [tile.rows, tile.chunk], rows_by_columns).load(layout)
        chunks = chunks + (chunk.to(dtype, bitcast=True),)
    return chunks


@gluon.jit
def column_index(c: gl.constexpr, tile: gl.constexpr):
    return c * tile.chunk + gl.arange(0, tile.chunk, column_layout(tile))


@gluon.jit
def hold_parameter(ptr, cols, present: gl.constexpr, in_smem: gl.constexpr, tile: gl.constexpr):
    """The chunks of weight or bias for the CTA's life: in registers, or in shared memory where registers are short."""
    held = ()
    for c in gl.static_range(tile.chunks):
        if present:
            col = column_index(c, tile)
            chunk = gl.load(ptr + col, mask=col < cols, other=0.0)
            if in_smem:
                held = held + (gl.allocate_shared_memory(chunk.dtype, [tile.chunk], gl.SwizzledSharedLayout(1, 1, 1, [0]), chunk),)
            else:
                held = held + (chunk,)
        else:
            held = held + (0.0,)
    return held


@gluon.jit
def parameter_row(held, tile: gl.constexpr):
    """One chunk of a held parameter, [1, chunk], in float32."""
    if tile.weight_in_smem:
        row = held.load(column_layout(tile))
    else:
        row = held
    return gl.expand_dims(row, 0).to(gl.float32)


@gluon.jit
def upstream_gradient(dy, weight, norm: gl.constexpr, tile: gl.constexpr):
    """g = dy * w."""
    if norm.has_weight:
        g = dy * parameter_row(weight, tile)
    else:
        g = dy
    return g


@gluon.jit
def zero_sums(tile: gl.constexpr):
    sums = ()
    for c in gl.static_range(tile.chunks):
        sums = sums + (gl.full([tile.chunk], 0.0, gl.float32, column_layout(tile)),)
    return sums


@gluon.jit
def row_index(row, tile: gl.constexpr):
    return row + gl.arange(0, tile.rows, gl.SliceLayout(1, tile_layout(tile)))


@gluon.jit
def load_statistics(mean_ptr, rstd_ptr, row, rows, mean_stride, rstd_stride, norm: gl.constexpr, tile: gl.constexpr):
    """mean and rstd [rows] of a tile; zeros beyond the last row, so that such a row adds nothing to dw."""
    index = row_index(row, tile)
    rstd = gl.load(rstd_ptr + index * rstd_stride, mask=index < rows, other=0.0).to(gl.float32)
    mean = rstd
    if norm.layer:
        mean = gl.load(mean_ptr + index * mean_stride, mask=index < rows, other=0.0).to(gl.float32)
    return mean, rstd


@gluon.jit
def sum_tile(x, dy, mean, rstd, weight, dw, db, cols, norm: gl.constexpr, tile: gl.constexpr):
    """First pass: the row means that dx needs, and dw and db with the tile's share added."""
    sum_gx = gl.full([tile.rows, tile.chunk], 0.0, gl.float32, tile_layout(tile))
    sum_g = sum_gx
    new_dw = ()
    new_db = ()
    for c in gl.static_range(tile.chunks):
        x_hat = normalize(x[c].to(gl.float32), mean, rstd, norm)
        upstream = dy[c].to(gl.float32)
        g = upstream_gradient(upstream, weight[c], norm, tile)
        sum_gx += g * x_hat
        sum_g += g
        new_dw = new_dw + (dw[c] + gl.sum(upstream * x_hat, axis=0),)
        new_db = new_db + (db[c] + gl.sum(upstream, axis=0),)
    mean_gx, mean_g = row_means(sum_gx, sum_g, cols, norm)
    layout: gl.constexpr = tile_layout(tile)
    return new_dw, new_db, gl.convert_layout(mean_gx, layout), gl.convert_layout(mean_g, layout)


@gluon.jit
def store_dx(dx_ptr, x, dy, mean, rstd, mean_gx, mean_g, weight, row, rows, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Second pass."""
    index = row_index(row, tile)
    for c in gl.static_range(tile.chunks):
        g = upstream_gradient(dy[c].to(gl.float32), weight[c], norm, tile)
        dx = input_gradient(g, x[c].to(gl.float32), mean, rstd, mean_gx, mean_g, norm)
        store_tile_chunk(dx_ptr, dx, index, rows, cols, c, tile)


@gluon.jit
def store_tile_chunk(ptr, value, index, rows, cols, c: gl.constexpr, tile: gl.constexpr):
    """Chunk c of the rows `index` of a contiguous [rows, cols] output."""
    col = column_index(c, tile)
    mask = gl.expand_dims(index < rows, 1) & gl.expand_dims(col < cols, 0)
    target = gl.expand_dims(index.to(gl.int64) * cols, 1) + gl.expand_dims(col, 0)
    gl.store(ptr + target, value.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def store_partials(dw_ptr, db_ptr, dw, db, partial, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Row `partial` of the [num_partials, cols] partials."""
    for c in gl.static_range(tile.chunks):
        col = column_index(c, tile)
        target = partial.to(gl.int64) * cols + col
        if norm.wants_dw:
            gl.store(dw_ptr + target, dw[c], mask=col < cols)
        if norm.wants_db:
            gl.store(db_ptr + target, db[c], mask=col < cols)
