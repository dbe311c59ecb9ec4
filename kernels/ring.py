"""What the TMA schedules share: a ring of row tiles in shared memory, and the passes of forward and backward over one
tile.

A tile is tile.rows rows of x (and of dy). The tile.cluster CTAs of a cluster share its columns: [rows, cluster, chunk],
num_chunks times. A tile arrives in copies of one or several chunks. Each copy has a ring of its own, so that the
compiler sees no hazard between copies. A single copy is the quickest to start, but copies bring whole chunks: where a
row ends within a chunk, that chunk is the tail and has a copy of its own. A copy brings zeros for columns beyond the
row's end and for rows before row 0.

Tiles go from the last row to the first. The kernel that wrote the tensor has left the last rows in L2, and the kernel
that reads the result asks for the first rows first.

Hazards of a stage, in every kernel with a ring:
- Read after write: a copy writes through the asynchronous proxy. Every warp waits for the stage's mbarrier before it
  reads the stage, and the wait makes the copy's bytes visible.
- Write after read: a stage may be refilled when every warp has read it (an execution barrier) and a proxy fence
  follows the reads. Reads go through the generic proxy; without the fence the copy could overtake them. Within one set
  of warps the compiler inserts both between the reads and the copy. It inserts no fence across warp partitions, so
  warp_specialized.release_stage has its own.
- Parity: a wait tells a phase from the next by one bit. A warp cannot be a whole phase late, since the next phase ends
  with a copy that starts after every warp has read the stage.

Names that differ between Triton's releases come from gluon_compat.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .cluster import sum_over_cluster
from .gluon_compat import barrier_layout, barrier_shape, copy_to_shared, reinterpret
from .rowmath import input_gradient, inverse_std, normalize, widen

# Behind the initialization of mbarriers: shows it, a generic write, to the copies of the asynchronous proxy that
# complete on them.
fence_barriers = fence_async_shared
wait = mbarrier.wait
expect = mbarrier.expect
arrive = mbarrier.arrive


@gluon.constexpr_function
def cluster_bases(tile, rank, dim):
    """Layout bases that spread dimension `dim` of a tensor of `rank` dimensions over the CTAs of a cluster."""
    return [[1 << bit if d == dim else 0 for d in range(rank)] for bit in range((tile.cluster - 1).bit_length())]


@gluon.constexpr_function
def row_major(tile, rank, dim):
    """Row-major layout of shared memory, with dimension `dim` spread over the CTAs of a cluster."""
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


@gluon.jit
def per_row(values):
    """[rows] -> [rows, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(values, 1), 2)


@gluon.jit
def descriptor_of(desc, tail_desc, i: gl.constexpr, tile: gl.constexpr):
    """Descriptor of copy i of a tensor: [rows, cols / box, box] for a copy of one chunk and for a tail,
    [chunks, rows, chunk / box, box] for a copy of several chunks."""
    if tile.tail and i == 1:
        found = tail_desc
    else:
        found = desc
    return found


@gluon.jit
def allocate_ring(desc, tail_desc, tile: gl.constexpr):
    # For each copy of a tile: [num_stages] + the block of its descriptor.
    ring = ()
    for i in gl.static_range(tile.copies):
        of_copy = descriptor_of(desc, tail_desc, i, tile)
        stages = gl.allocate_shared_memory(
            of_copy.dtype, [tile.num_stages] + of_copy.block_type.shape, of_copy.layout
        )
        ring = ring + (stages,)
    return ring


@gluon.jit
def allocate_barriers(tile: gl.constexpr):
    # One mbarrier for each stage, in every CTA of a cluster. A phase completes with one arrival and all bytes that the
    # arrival expects. The caller must follow with `fence_barriers` before the first copy.
    shape: gl.constexpr = barrier_shape(tile.num_stages, tile.cluster)
    barriers = gl.allocate_shared_memory(gl.int64, shape, barrier_layout(tile.cluster))
    for stage in gl.static_range(tile.stages):
        mbarrier.init(barriers.index(stage), count=1)
    return barriers


@gluon.jit
def close_barriers(barriers, tile: gl.constexpr):
    """Invalidate the mbarriers, as their last use. A kernel that needs other shared memory after its row loop calls
    this at its very end, and thereby keeps the compiler from reusing their memory until then. Hardware may write to an
    mbarrier even after the wait for its last copy: it has overwritten row sums that were placed there."""
    for stage in gl.static_range(tile.stages):
        mbarrier.invalidate(barriers.index(stage))


@gluon.constexpr_function
def copy_bytes(block_type, tile):
    """Bytes that one copy brings to each CTA of a cluster."""
    return block_type.nbytes // tile.cluster


@gluon.jit
def start_copy(desc, row, i: gl.constexpr, barrier, stage, pred, tile: gl.constexpr):
    """Start copy i of the tile at `row`, by its descriptor, into a stage of its ring. The caller has made `barrier`
    expect the bytes, and knows that all reads of the stage are done (see the module's docstring)."""
    first: gl.constexpr = tile.first_chunk(i)
    if tile.chunks_of(i) > 1:
        copy_to_shared(desc, [first, row, 0, 0], barrier, stage, pred=pred)
    else:
        copy_to_shared(desc, [row, first * (tile.cluster * tile.chunk // tile.box), 0], barrier, stage, pred=pred)


@gluon.jit
def read_chunk(ring, stage, c: gl.constexpr, again: gl.constexpr, tile: gl.constexpr):
    dtype: gl.constexpr = ring[0].dtype
    as_bits: gl.constexpr = gl.int16 if dtype.primitive_bitwidth == 16 else gl.int32
    seen_as: gl.constexpr = as_bits if again else dtype
    i: gl.constexpr = tile.copy_of(c)
    shape: gl.constexpr = [tile.chunks_of(i), tile.rows, tile.cluster, tile.chunk]
    copied = reinterpret(ring[i].index(stage), seen_as, shape, row_major(tile, 3, 1))
    return copied.index(c - tile.first_chunk(i)).load(tile_layout(tile)).to(dtype, bitcast=True)


@gluon.jit
def read_tile(ring, stage, again: gl.constexpr, tile: gl.constexpr):
    """The chunks of a stage in registers, in their own dtype, after the wait for its mbarriers. `again` marks a second
    read, which goes through an integer type. Otherwise the compiler would find both reads equal and keep the first
    one's values in registers."""
    chunks = ()
    for c in gl.static_range(tile.chunks):
        chunks = chunks + (read_chunk(ring, stage, c, again, tile),)
    return chunks


@gluon.jit
def column_index(c: gl.constexpr, layout: gl.constexpr, tile: gl.constexpr):
    """The columns [cluster, chunk] of chunk c."""
    cta = gl.arange(0, tile.cluster, gl.SliceLayout(1, layout)) * tile.chunk
    within = gl.arange(0, tile.chunk, gl.SliceLayout(0, layout))
    return c * (tile.cluster * tile.chunk) + gl.expand_dims(cta, 1) + gl.expand_dims(within, 0)


@gluon.jit
def row_of_tile(nth, rows, tile: gl.constexpr):
    """First row of the tile that has `nth` rows after it. A tensor's first tile may begin before row 0."""
    return rows - tile.rows - nth


@gluon.jit
def row_index(row, tile: gl.constexpr):
    return row + gl.arange(0, tile.rows, row_layout(tile))


@gluon.jit
def load_parameter(ptr, cols, present: gl.constexpr, tile: gl.constexpr):
    """The chunks of weight or bias in registers, in their own dtype. The pipelined schedule loads them before it
    starts its first copies; otherwise they would arrive after those tiles."""
    loaded = ()
    for c in gl.static_range(tile.chunks):
        if present:
            col = column_index(c, column_layout(tile), tile)
            loaded = loaded + (gl.load(ptr + col, mask=col < cols, other=0.0),)
        else:
            loaded = loaded + (0.0,)
    return loaded


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
def parameter_row(held, tile: gl.constexpr):
    """One chunk of a held parameter, [1, cluster, chunk], in float32."""
    if tile.weight_in_smem:
        row = held.load(column_layout(tile))
    else:
        row = held
    row = gl.expand_dims(row, 0)
    if tile.in_pairs:
        row = widen(row, True)
    return row.to(gl.float32)


@gluon.jit
def upstream_gradient(dy, weight, norm: gl.constexpr, tile: gl.constexpr):
    """g = dy * w."""
    if norm.has_weight:
        g = dy * parameter_row(weight, tile)
    else:
        g = dy
    return g


@gluon.jit
def load_statistics(mean_ptr, rstd_ptr, row, mean_stride, rstd_stride, norm: gl.constexpr, tile: gl.constexpr):
    """mean and rstd [rows] of a tile, in float32. They are 0 before row 0, so that such a row adds nothing to dw."""
    index = row_index(row, tile)
    rstd = gl.load(rstd_ptr + index * rstd_stride, mask=index >= 0, other=0.0).to(gl.float32)
    mean = rstd
    if norm.layer:
        mean = gl.load(mean_ptr + index * mean_stride, mask=index >= 0, other=0.0).to(gl.float32)
    return mean, rstd


@gluon.jit
def add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@gluon.jit
def row_sum(values, exchange, tile: gl.constexpr):
    """Sum of [rows, cluster, chunk] over each row, [rows, cluster, 1], and the exchange's state. Every CTA of the
    cluster gets the sum over all of them."""
    sums, exchange = sum_over_cluster((gl.sum(values, axis=2),), exchange, tile)
    return gl.expand_dims(sums[0], 2), exchange


@gluon.jit
def merge_moments(mean_a, variance_a, mean_b, variance_b):
    """Mean and variance of the union of two halves with equal numbers of elements (Chan, Golub, LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances", 1979)."""
    distance = 0.5 * (mean_a - mean_b)
    return 0.5 * (mean_a + mean_b), 0.5 * (variance_a + variance_b) + distance * distance


@gluon.jit
def by_thread(chunk, tile: gl.constexpr):
    """[rows, cluster, chunk] seen as [rows, cluster, load, thread, adjacent column], in float32."""
    threads: gl.constexpr = tile.threads_of_a_row
    loads: gl.constexpr = tile.chunk // (threads * tile.vector)
    return gl.reshape(chunk.to(gl.float32), [tile.rows, tile.cluster, loads, threads, tile.vector])


@gluon.jit
def sum_of_thread(values):
    """[rows, cluster, loads, threads, adjacent columns] -> [rows, cluster, threads]."""
    return gl.sum(gl.sum(values, axis=4), axis=2)


@gluon.jit
def row_moments(x, exchange, tile: gl.constexpr):
    """mean and variance [rows, cluster, 1] of whole rows, and the exchange's state. Each thread finds mean and variance
    of its own columns in two passes over its registers; one reduction merges both over the threads."""
    total = by_thread(x[0], tile)
    for c in gl.static_range(tile.chunks):
        if c > 0:
            total += by_thread(x[c], tile)
    mean = sum_of_thread(total) / tile.columns_of_thread
    of_thread = gl.expand_dims(gl.expand_dims(mean, 2), 4)
    squares = by_thread(x[0], tile) - of_thread
    squares *= squares
    for c in gl.static_range(tile.chunks):
        if c > 0:
            deviation = by_thread(x[c], tile) - of_thread
            squares += deviation * deviation
    moments = gl.reduce((mean, sum_of_thread(squares) / tile.columns_of_thread), 2, merge_moments)
    moments, exchange = sum_over_cluster(moments, exchange, tile, moments=True)
    by_row: gl.constexpr = gl.SliceLayout(2, tile_layout(tile))
    mean = gl.expand_dims(gl.convert_layout(moments[0], by_row, assert_trivial=True), 2)
    variance = gl.expand_dims(gl.convert_layout(moments[1], by_row, assert_trivial=True), 2)
    return mean, variance, exchange


@gluon.jit
def row_statistics(x, cols, eps, exchange, norm: gl.constexpr, tile: gl.constexpr):
    """mean and rstd [rows, cluster, 1] of a tile in registers, and the exchange's state."""
    if norm.layer and tile.whole:
        mean, square, exchange = row_moments(x, exchange, tile)
    else:
        mean, square, exchange = mean_and_squares(x, cols, exchange, norm, tile)
    return mean, inverse_std(square, eps.to(gl.float32)), exchange


@gluon.jit
def mean_and_squares(x, cols, exchange, norm: gl.constexpr, tile: gl.constexpr):
    """The rows' mean and the mean of (x - mean)^2, [rows, cluster, 1] each, and the exchange's state. RMSNorm's mean is
    0 and takes no reduction; each of the others takes one."""
    layout: gl.constexpr = tile_layout(tile)
    shape: gl.constexpr = [tile.rows, tile.cluster, tile.chunk]
    mean = gl.full([tile.rows, tile.cluster, 1], 0.0, gl.float32, layout)
    if norm.layer:
        total = gl.full(shape, 0.0, gl.float32, layout)
        for c in gl.static_range(tile.chunks):
            total += x[c].to(gl.float32)
        total, exchange = row_sum(total, exchange, tile)
        mean = total / cols
    squares = gl.full(shape, 0.0, gl.float32, layout)
    for c in gl.static_range(tile.chunks):
        deviation = x[c].to(gl.float32)
        if norm.layer:
            deviation -= mean
            if c == tile.num_chunks - 1:  # padding has x = 0, but a deviation of -mean
                col = gl.expand_dims(column_index(c, column_layout(tile), tile), 0)
                deviation = gl.where(col < cols, deviation, 0.0)
        squares += deviation * deviation
    squares, exchange = row_sum(squares, exchange, tile)
    return mean, squares / cols, exchange


@gluon.jit
def store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, norm: gl.constexpr, tile: gl.constexpr):
    cta = gl.arange(0, tile.cluster, gl.SliceLayout(0, gl.SliceLayout(2, tile_layout(tile))))
    cta = gl.expand_dims(gl.expand_dims(cta, 0), 2)
    index = per_row(row_index(row, tile)) + 0 * cta
    here = (index >= 0) & (cta == 0)  # every CTA of a cluster has the statistics; the first one stores them
    gl.store(rstd_ptr + index, rstd, mask=here)
    if norm.layer:
        gl.store(mean_ptr + index, mean, mask=here)


@gluon.jit
def store_y(y_ptr, x, mean, rstd, weight, bias, row, cols, norm: gl.constexpr, tile: gl.constexpr):
    for c in gl.static_range(tile.chunks):
        y = normalize(x[c].to(gl.float32), mean, rstd, norm)
        if norm.has_weight:
            y *= parameter_row(weight[c], tile)
        if norm.has_bias:
            y += parameter_row(bias[c], tile)
        # y is likely to be read soon, x perhaps never again: L2 should evict y's lines last.
        store_chunk(y_ptr, y, row, cols, c, "evict_last", tile)


@gluon.jit
def sum_tile(x, dy, mean, rstd, weight, dw, db, norm: gl.constexpr, tile: gl.constexpr):
    """First pass of the backward: dw and db with the tile's share added, and the CTA's row sums [rows, cluster] of
    g * x_hat and of g, as a tuple; RMSNorm's has only the first."""
    sum_gx = gl.full([tile.rows, tile.cluster, tile.chunk], 0.0, gl.float32, tile_layout(tile))
    sum_g = sum_gx
    new_dw = ()
    new_db = ()
    for c in gl.static_range(tile.chunks):
        x_hat = normalize(widen(x[c], tile.in_pairs), mean, rstd, norm)
        upstream = widen(dy[c], tile.in_pairs)
        g = upstream_gradient(upstream, weight[c], norm, tile)
        sum_gx += g * x_hat
        sum_g += g
        new_dw = new_dw + (dw[c] + upstream * x_hat,)
        new_db = new_db + (db[c] + upstream,)
    if norm.layer:
        # One reduction of pairs has half the CTA barriers of two reductions.
        sums = gl.reduce((sum_gx, sum_g), 2, add_pairs)
    else:
        sums = (gl.sum(sum_gx, axis=2),)
    return new_dw, new_db, sums


@gluon.jit
def load_residual(ptr, row, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Chunks of the gradient that is added to dx, in its own dtype. It is contiguous, as dx is, and comes straight to
    registers."""
    chunks = ()
    for c in gl.static_range(tile.chunks):
        if norm.has_residual:
            target, mask = output_elements(row, cols, c, tile)
            if has_no_outside(tile):
                chunks = chunks + (gl.load(ptr + target),)
            else:
                chunks = chunks + (gl.load(ptr + target, mask=mask, other=0.0),)
        else:
            chunks = chunks + (0.0,)
    return chunks


@gluon.jit
def store_dx(dx_ptr, x, dy, mean, rstd, sums, weight, residual, row, cols, norm: gl.constexpr, tile: gl.constexpr):
    """Second pass of the backward: dx of a tile, from its row sums over the whole cluster."""
    mean_gx = gl.expand_dims(sums[0], 2) / cols
    mean_g = mean_gx
    if norm.layer:
        mean_g = gl.expand_dims(sums[1], 2) / cols
    for c in gl.static_range(tile.chunks):
        g = upstream_gradient(widen(dy[c], tile.in_pairs), weight[c], norm, tile)
        dx = input_gradient(g, widen(x[c], tile.in_pairs), mean, rstd, mean_gx, mean_g, norm)
        if norm.has_residual:
            dx += widen(residual[c], tile.in_pairs)
        store_chunk(dx_ptr, dx, row, cols, c, "", tile)


@gluon.jit
def output_elements(row, cols, c: gl.constexpr, tile: gl.constexpr):
    """Element offsets (int64) of chunk c of the tile at `row` in a contiguous [rows, cols] tensor, and the mask of
    those inside the tensor."""
    index = per_row(row_index(row, tile))
    col = gl.expand_dims(column_index(c, column_layout(tile), tile), 0)
    return index.to(gl.int64) * cols + col, (index >= 0) & (col < cols)


@gluon.constexpr_function
def has_no_outside(tile):
    """True if a tile lies inside the tensor and its loads and stores go without a mask. False for two compute groups:
    without masks the compiler shares addresses and keeps them, for which those groups lack one register."""
    return tile.whole and tile.rows == 1 and tile.num_groups == 1


@gluon.jit
def store_chunk(ptr, value, row, cols, c: gl.constexpr, eviction_policy: gl.constexpr, tile: gl.constexpr):
    target, mask = output_elements(row, cols, c, tile)
    rounded = value.to(ptr.dtype.element_ty)
    if has_no_outside(tile):
        gl.store(ptr + target, rounded, eviction_policy=eviction_policy)
    else:
        gl.store(ptr + target, rounded, mask=mask, eviction_policy=eviction_policy)
