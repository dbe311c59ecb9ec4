"""The warp-specialized TMA schedule: a producer warp fills a ring of row tiles, compute groups empty it in turn.

CTA p owns the row tiles p, p + P, p + 2P, ... of P CTAs, counted from the last; of these, group g takes every
num_groups-th. num_stages is a multiple of num_groups, so a stage always belongs to the same group: were it not, a group
could take an old phase of a stage's barrier for the one it waits for. Each group keeps its own sums of dw and db and
leaves its own row of partials.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import partial_sums, ring

PRODUCER_REGISTERS = gl.constexpr(24)  # the least a warp can be left with; the rest goes to the compute groups


@gluon.jit
def produce(tile: gl.constexpr, x_desc, dy_desc, x_ring, dy_ring, full, empty, rows):
    """Fill stage after stage, each as soon as its group has let go of it."""
    first = gl.program_id(0) * tile.rows
    step = gl.num_programs(0) * tile.rows
    stage = 0
    phase = 1  # a fresh barrier counts as having completed the phase before its first
    row = ring.row_of_tile(first, rows, tile)
    for _ in range(first, rows, step):
        ring.wait(empty.index(stage), phase)
        barrier = full.index(stage)
        ring.expect(barrier, tile.copies * (x_desc.block_type.nbytes + dy_desc.block_type.nbytes))
        for i in gl.static_range(tile.copies):
            ring.start_copy(x_desc, row, i, barrier, x_ring[i].index(stage), True, tile)
            ring.start_copy(dy_desc, row, i, barrier, dy_ring[i].index(stage), True, tile)
        row -= step
        stage += 1
        if stage == tile.num_stages:
            stage = 0
            phase ^= 1


@gluon.jit
def release_stage(empty, stage):
    """Let the producer refill a stage that has been read. Its copies write through another proxy than these reads went
    by, and without a fence between them could overtake the reads."""
    ring.fence_async_shared()
    ring.arrive(empty.index(stage), count=1)


@gluon.jit
def consume(
    norm: gl.constexpr, tile: gl.constexpr, group, x_ring, dy_ring, full, empty, mean_ptr, rstd_ptr, weight_ptr,
    weight_in_smem, residual_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr, rows, cols, mean_stride, rstd_stride,
):
    """One compute group: every num_groups-th tile of the CTA, from the group-th on."""
    if tile.weight_in_smem:
        weight = weight_in_smem
    else:
        weight = ring.load_parameter(weight_ptr, cols, norm.has_weight, tile)
    dw = partial_sums.zeros_by_column(tile)
    db = partial_sums.zeros_by_column(tile)
    first = (gl.program_id(0) + group * gl.num_programs(0)) * tile.rows
    step = gl.num_programs(0) * (tile.rows * tile.num_groups)
    row = ring.row_of_tile(first, rows, tile)
    mean_next, rstd_next = ring.load_statistics(mean_ptr, rstd_ptr, row, mean_stride, rstd_stride, norm, tile)
    stage = group
    phase = 0
    for _ in range(first, rows, step):
        mean = ring.per_row(mean_next)
        rstd = ring.per_row(rstd_next)
        mean_next, rstd_next = ring.load_statistics(
            mean_ptr, rstd_ptr, row - step, mean_stride, rstd_stride, norm, tile
        )
        ring.wait(full.index(stage), phase)
        x = ring.read_tile(x_ring, stage, False, tile)
        dy = ring.read_tile(dy_ring, stage, False, tile)
        residual = ring.load_residual(residual_ptr, row, cols, norm, tile)
        if tile.cached:
            release_stage(empty, stage)
        dw, db, sums = ring.sum_tile(x, dy, mean, rstd, weight, dw, db, norm, tile)
        if not tile.cached:
            x = ring.read_tile(x_ring, stage, True, tile)
            dy = ring.read_tile(dy_ring, stage, True, tile)
        ring.store_dx(dx_ptr, x, dy, mean, rstd, sums, weight, residual, row, cols, norm, tile)
        if not tile.cached:
            release_stage(empty, stage)
        row -= step
        stage += tile.num_groups
        if stage >= tile.num_stages:
            stage = group
            phase ^= 1
    partial = gl.program_id(0) * tile.num_groups + group
    partial_sums.store_partials(dw_partial_ptr, db_partial_ptr, dw, db, partial, cols, cols, norm, tile)


@gluon.jit(do_not_specialize=["rows"])
def backward(
    x_desc, dy_desc, mean_ptr, rstd_ptr, weight_ptr, residual_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr, rows, cols,
    mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """dx of the CTA's row tiles and its num_groups rows of the dw and db partials."""
    x_ring = ring.allocate_ring(x_desc, None, tile)
    dy_ring = ring.allocate_ring(dy_desc, None, tile)
    full = ring.allocate_barriers(tile)
    empty = ring.allocate_barriers(tile)
    ring.fence_barriers()
    in_smem: gl.constexpr = norm.has_weight and tile.weight_in_smem
    weight = ring.hold_parameter(ring.load_parameter(weight_ptr, cols, in_smem, tile), in_smem, True, tile)
    filling = (x_desc, dy_desc, x_ring, dy_ring, full, empty, rows)
    emptying = (
        x_ring, dy_ring, full, empty, mean_ptr, rstd_ptr, weight_ptr, weight, residual_ptr,
        dx_ptr, dw_partial_ptr, db_partial_ptr, rows, cols, mean_stride, rstd_stride,
    )  # fmt: skip
    if tile.num_groups == 1:
        gl.warp_specialize(
            [(consume, (norm, tile, 0) + emptying), (produce, (tile,) + filling)],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(tile.num_groups == 2)
        gl.warp_specialize(
            [
                (consume, (norm, tile, 0) + emptying),
                (consume, (norm, tile, 1) + emptying),
                (produce, (tile,) + filling),
            ],
            [tile.num_warps, 1],
            [tile.group_registers, PRODUCER_REGISTERS],
        )
