"""The pipelined TMA schedule: a ring of row tiles in shared memory, refilled by the computing warps themselves.

CTA p owns the row tiles p, p + P, p + 2P, ... of P CTAs. A tile is read twice from its stage, once for the row sums and once for dx, and
leaves no copy in registers: what stays there for the CTA's life is the weight and the sums of dw and db.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ring


@gluon.jit
def allocate_chunk_barriers(tile: gl.constexpr):
    """One barrier per chunk and stage: copies that complete on a common one would be kept apart by a CTA barrier each."""
    barriers = ()
    for c in gl.static_range(tile.chunks):
        barriers = barriers + (ring.allocate_barriers(tile),)
    return barriers


@gluon.jit
def fill_stage(x_desc, dy_desc, x_ring, dy_ring, x_full, dy_full, stage, row, pred, tile: gl.constexpr):
    """Start the copies of the tile at `row` into `stage`."""
    for c in gl.static_range(tile.chunks):
        ring.expect(x_full[c].index(stage), x_desc.block_type.nbytes, pred=pred)
        ring.expect(dy_full[c].index(stage), dy_desc.block_type.nbytes, pred=pred)
    for c in gl.static_range(tile.chunks):
        at = [row, c * (tile.chunk // tile.box), 0]
        ring.copy_to_shared(x_desc, at, x_full[c].index(stage), x_ring[c].index(stage), pred=pred)
        ring.copy_to_shared(dy_desc, at, dy_full[c].index(stage), dy_ring[c].index(stage), pred=pred)


@gluon.jit(do_not_specialize=["rows"])
def backward(
    x_desc, dy_desc, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr,
    rows, cols, mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """dx of the CTA's row tiles and its row of the dw and db partials."""
    x_ring = ring.allocate_ring(x_desc, tile)
    dy_ring = ring.allocate_ring(dy_desc, tile)
    x_full = allocate_chunk_barriers(tile)
    dy_full = allocate_chunk_barriers(tile)
    ring.fence_barriers()

    first = gl.program_id(0) * tile.rows
    step = gl.num_programs(0) * tile.rows
    for s in gl.static_range(tile.stages):
        ahead = first + s * step
        fill_stage(x_desc, dy_desc, x_ring, dy_ring, x_full, dy_full, s, ahead, ahead < rows, tile)

    weight = ring.hold_parameter(weight_ptr, cols, norm.has_weight, tile.weight_in_smem, tile)
    dw = ring.zero_sums(tile)
    db = ring.zero_sums(tile)
    mean_next, rstd_next = ring.load_statistics(mean_ptr, rstd_ptr, first, rows, mean_stride, rstd_stride, norm, tile)
    stage = 0
    phase = 0
    for row in range(first, rows, step):
        mean = gl.expand_dims(mean_next, 1)
        rstd = gl.expand_dims(rstd_next, 1)
        mean_next, rstd_next = ring.load_statistics(mean_ptr, rstd_ptr, row + step, rows, mean_stride, rstd_stride, norm, tile)
        for c in gl.static_range(tile.chunks):
            ring.wait(x_full[c].index(stage), phase)
            ring.wait(dy_full[c].index(stage), phase)
        x = ring.read_tile(x_ring, stage, False, tile)
        dy = ring.read_tile(dy_ring, stage, False, tile)
        dw, db, mean_gx, mean_g = ring.sum_tile(x, dy, mean, rstd, weight, dw, db, cols, norm, tile)
        x = ring.read_tile(x_ring, stage, True, tile)
        dy = ring.read_tile(dy_ring, stage, True, tile)
        ring.store_dx(dx_ptr, x, dy, mean, rstd, mean_gx, mean_g, weight, row, rows, cols, norm, tile)
        ahead = row + tile.num_stages * step
        fill_stage(x_desc, dy_desc, x_ring, dy_ring, x_full, dy_full, stage, ahead, ahead < rows, tile)
        stage += 1
        if stage == tile.num_stages:
            stage = 0
            phase ^= 1

    ring.store_partials(dw_partial_ptr, db_partial_ptr, dw, db, gl.program_id(0), cols, norm, tile)
