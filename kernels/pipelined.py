"""The pipelined TMA schedule: a ring of row tiles in shared memory, refilled by the computing warps themselves.

CTA p (or cluster p, whose CTAs share the columns of a row) of P owns the row tiles p, p + P, p + 2P, ..., counted from
the last tile. It keeps the parameters and, in the backward, the sums of dw and db for its whole life.

The warps that read a stage also refill it, and one of them may be ahead of the others. What keeps a copy from
overwriting columns that a warp has yet to read is not in the source: between the reads of a stage and the copies of
`fill_stage` the compiler puts a CTA barrier and a proxy fence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import partial_sums, ring
from .cluster import join_cluster, leave_cluster, open_exchange
from .ptx import launch_dependents


@gluon.jit
def allocate_copy_barriers(tile: gl.constexpr):
    """One mbarrier per copy and stage: with a common mbarrier, the compiler would put a CTA barrier between its
    copies."""
    barriers = ()
    for _ in gl.static_range(tile.copies):
        barriers = barriers + (ring.allocate_barriers(tile),)
    return barriers


@gluon.jit
def fill_stage(descs, tails, rings, full, stage, row, tile: gl.constexpr):
    """Start the copies of the tile at `row`, of every tensor that has a ring, into `stage`; none if the tile lies
    before row 0.

    Each mbarrier expects its bytes before its copy starts. The stage must have been read, and every warp must have seen
    the phase that its mbarriers leave: the compiler's CTA barrier before the copies sees to both."""
    pred = row > -tile.rows
    for t in gl.static_range(len(descs)):
        for i in gl.static_range(tile.copies):
            desc = ring.descriptor_of(descs[t], tails[t], i, tile)
            ring.expect(full[t][i].index(stage), ring.copy_bytes(desc.block_type, tile), pred=pred)
    for t in gl.static_range(len(descs)):
        for i in gl.static_range(tile.copies):
            desc = ring.descriptor_of(descs[t], tails[t], i, tile)
            ring.start_copy(desc, row, i, full[t][i].index(stage), rings[t][i].index(stage), pred, tile)


@gluon.jit
def open_rings(descs, tails, rows, tile: gl.constexpr):
    """Rings and mbarriers for each tensor, with the copies of the CTA's first num_stages tiles under way. The fence
    shows the initialized mbarriers to these copies."""
    rings = ()
    full = ()
    for t in gl.static_range(len(descs)):
        rings = rings + (ring.allocate_ring(descs[t], tails[t], tile),)
        full = full + (allocate_copy_barriers(tile),)
    ring.fence_barriers()
    for s in gl.static_range(tile.stages):
        nth = (gl.program_id(0) + s * gl.num_programs(0)) * tile.rows
        fill_stage(descs, tails, rings, full, s, ring.row_of_tile(nth, rows, tile), tile)
    return rings, full


@gluon.jit
def wait_for_stage(full, stage, phase, tile: gl.constexpr):
    # Every warp waits for every copy itself, so that the copies' bytes are visible to its reads.
    for t in gl.static_range(len(full)):
        for i in gl.static_range(tile.copies):
            ring.wait(full[t][i].index(stage), phase)


@gluon.jit
def next_stage(stage, phase, tile: gl.constexpr):
    """The next stage of the ring, and the phase to wait for there."""
    stage += 1
    if stage == tile.num_stages:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit(do_not_specialize=["rows"])
def forward(
    x_desc, x_tail_desc, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, eps: "fp64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """y of the CTA's row tiles, and mean and rstd unless their pointers are None. A tile is read once from its stage
    and then stays in registers, so the stage is refilled as soon as the statistics are known, before y is stored."""
    exchange = open_exchange(tile)
    first = gl.program_id(0) * tile.rows
    step = gl.num_programs(0) * tile.rows
    row = ring.row_of_tile(first, rows, tile)
    weight = ring.load_parameter(weight_ptr, cols, norm.has_weight, tile)
    bias = ring.load_parameter(bias_ptr, cols, norm.has_bias, tile)
    rings, full = open_rings((x_desc,), (x_tail_desc,), rows, tile)
    weight = ring.hold_parameter(weight, norm.has_weight, tile.weight_in_smem, tile)
    bias = ring.hold_parameter(bias, norm.has_bias, tile.weight_in_smem, tile)
    exchange = join_cluster(exchange, tile)
    stage = 0
    phase = 0
    for _ in range(first, rows, step):
        wait_for_stage(full, stage, phase, tile)
        x = ring.read_tile(rings[0], stage, False, tile)
        mean, rstd, exchange = ring.row_statistics(x, cols, eps, exchange, norm, tile)
        fill_stage((x_desc,), (x_tail_desc,), rings, full, stage, row - tile.num_stages * step, tile)
        if rstd_ptr is not None:
            ring.store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, norm, tile)
        ring.store_y(y_ptr, x, mean, rstd, weight, bias, row, cols, norm, tile)
        row -= step
        stage, phase = next_stage(stage, phase, tile)
    leave_cluster(tile)


@gluon.jit(do_not_specialize=["rows"])
def backward(
    x_desc, dy_desc, x_tail_desc, dy_tail_desc, mean_ptr, rstd_ptr, weight_ptr, residual_ptr, dx_ptr, dw_partial_ptr,
    db_partial_ptr, rows, cols, mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """dx of the CTA's row tiles, and its row of the dw and db partials. A tile is read twice from its stage, for the
    row sums and for dx, and is not kept in registers between; the stage is refilled after the second read. The
    partials are complete before the last tile's dx and leave before it where `leave_early` allows."""
    wants_sums: gl.constexpr = norm.wants_dw or norm.wants_db
    exchange = open_exchange(tile)
    first = gl.program_id(0) * tile.rows
    step = gl.num_programs(0) * tile.rows
    row = ring.row_of_tile(first, rows, tile)
    descs = x_desc, dy_desc
    tails = x_tail_desc, dy_tail_desc
    rings, full = open_rings(descs, tails, rows, tile)
    weight = ring.load_parameter(weight_ptr, cols, norm.has_weight, tile)
    mean_next, rstd_next = ring.load_statistics(mean_ptr, rstd_ptr, row, mean_stride, rstd_stride, norm, tile)
    weight = ring.hold_parameter(weight, norm.has_weight, tile.weight_in_smem, tile)
    dw = partial_sums.zeros_by_column(tile)
    db = partial_sums.zeros_by_column(tile)
    exchange = join_cluster(exchange, tile)
    stage = 0
    phase = 0
    for nth in range(first, rows, step):
        mean = ring.per_row(mean_next)
        rstd = ring.per_row(rstd_next)
        if tile.works_ahead:
            mean_next, rstd_next = ring.load_statistics(
                mean_ptr, rstd_ptr, row - step, mean_stride, rstd_stride, norm, tile
            )
        wait_for_stage(full, stage, phase, tile)
        x = ring.read_tile(rings[0], stage, False, tile)
        dy = ring.read_tile(rings[1], stage, False, tile)
        residual = ring.load_residual(residual_ptr, row, cols, norm, tile)
        dw, db, sums = ring.sum_tile(x, dy, mean, rstd, weight, dw, db, norm, tile)
        if wants_sums and partial_sums.leave_early(tile):
            if nth + step >= rows:  # the last tile
                if tile.announces_end:  # saves time only: the dependent launch waits for this one's end
                    launch_dependents()
                partial_sums.leave_partials(dw_partial_ptr, db_partial_ptr, dw, db, rows, cols, norm, tile)
        sums, exchange = ring.sum_over_cluster(sums, exchange, tile)
        if not tile.works_ahead:
            mean_next, rstd_next = ring.load_statistics(
                mean_ptr, rstd_ptr, row - step, mean_stride, rstd_stride, norm, tile
            )
        x = ring.read_tile(rings[0], stage, True, tile)
        dy = ring.read_tile(rings[1], stage, True, tile)
        ring.store_dx(dx_ptr, x, dy, mean, rstd, sums, weight, residual, row, cols, norm, tile)
        fill_stage(descs, tails, rings, full, stage, row - tile.num_stages * step, tile)
        row -= step
        stage, phase = next_stage(stage, phase, tile)

    # The compiler may place these sums in the rings' memory, whose last copies have been waited for, but not in the
    # barriers' memory: they are closed last.
    if wants_sums and not partial_sums.leave_early(tile):
        if tile.announces_end:
            launch_dependents()
        partial_sums.leave_partials(dw_partial_ptr, db_partial_ptr, dw, db, rows, cols, norm, tile)
    for t in gl.static_range(len(full)):
        for i in gl.static_range(tile.copies):
            ring.close_barriers(full[t][i], tile)
