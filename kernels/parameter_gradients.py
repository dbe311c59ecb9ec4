"""dw and db of a backward without dx: sums over rows, for which no CTA needs a whole row.

CTA (c, p) owns tile.chunk columns, from column c * tile.chunk on, of the row tiles p, p + P, p + 2P, ... of P
CTAs, and stores its sums as row p of the [P, cols] partials. Tiles of dy, and of x for dw, come through the ring of
column_reduction.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ring
from .column_reduction import fill, open_rings, read_tile, rows_at_once, tile_layout
from .rowmath import normalize


@gluon.jit
def load_statistic(ptr, stride, row, rows, tile: gl.constexpr):
    """mean or rstd of the tile at `row`, [rows / rows_at_once, rows_at_once, 1], in float32. They are 0 beyond the last
    row, so that such a row adds nothing to dw."""
    by_row: gl.constexpr = gl.SliceLayout(2, tile_layout(tile))
    outer = gl.arange(0, tile.rows // rows_at_once(tile), gl.SliceLayout(1, by_row)) * rows_at_once(tile)
    inner = gl.arange(0, rows_at_once(tile), gl.SliceLayout(0, by_row))
    index = row + gl.expand_dims(outer, 1) + gl.expand_dims(inner, 0)
    return gl.expand_dims(gl.load(ptr + index * stride, mask=index < rows, other=0.0).to(gl.float32), 2)


@gluon.jit
def load_statistics(
    mean_ptr, rstd_ptr, row, rows, mean_stride, rstd_stride, norm: gl.constexpr, tile: gl.constexpr
):  # fmt: skip
    rstd = load_statistic(rstd_ptr, rstd_stride, row, rows, tile)
    mean = rstd
    if norm.layer:
        mean = load_statistic(mean_ptr, mean_stride, row, rows, tile)
    return mean, rstd


@gluon.jit
def store_sum(partial_ptr, acc, left, cols, tile: gl.constexpr):
    col = left + gl.arange(0, tile.chunk, gl.SliceLayout(0, gl.SliceLayout(0, tile_layout(tile))))
    gl.store(partial_ptr + gl.program_id(1).to(gl.int64) * cols + col, gl.sum(acc, axis=0), mask=col < cols)


@gluon.jit(do_not_specialize=["rows"])
def dw_and_db(
    dy_desc, x_desc, mean_ptr, rstd_ptr, dw_partial_ptr, db_partial_ptr,
    rows, cols, mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The CTA's row of the dw and db partials, in float32. Descriptors are [rows, cols] in boxes of a tile.

    Every warp waits for a tile's mbarriers before it reads the tile. The stage is refilled after the reads of dy and x:
    see column_reduction.fill for what orders the copies behind them."""
    descs = (dy_desc,)
    if norm.wants_dw:
        descs = (dy_desc, x_desc)
    left = gl.program_id(0) * tile.chunk
    first = gl.program_id(1) * tile.rows
    step = gl.num_programs(1) * tile.rows
    rings, full = open_rings(descs, first, left, rows, tile)
    db = gl.full([rows_at_once(tile), tile.chunk], 0.0, gl.float32, gl.SliceLayout(0, tile_layout(tile)))
    dw = db
    if norm.wants_dw:
        mean_next, rstd_next = load_statistics(mean_ptr, rstd_ptr, first, rows, mean_stride, rstd_stride, norm, tile)
    stage = 0
    phase = 0
    for row in range(first, rows, step):
        ring.wait(full[0].index(stage), phase)
        dy = read_tile(rings[0], stage, tile).to(gl.float32)
        if norm.wants_db:
            db += gl.sum(dy, axis=0)
        if norm.wants_dw:
            mean = mean_next
            rstd = rstd_next
            mean_next, rstd_next = load_statistics(
                mean_ptr, rstd_ptr, row + step, rows, mean_stride, rstd_stride, norm, tile
            )
            ring.wait(full[1].index(stage), phase)
            x = read_tile(rings[1], stage, tile).to(gl.float32)
            dw += gl.sum(dy * normalize(x, mean, rstd, norm), axis=0)
        ahead = row + tile.num_stages * step
        fill(descs, rings, full, stage, ahead, left, ahead < rows, 0, len(descs))
        stage += 1
        if stage == tile.num_stages:
            stage = 0
            phase ^= 1
    if norm.wants_dw:
        store_sum(dw_partial_ptr, dw, left, cols, tile)
    if norm.wants_db:
        store_sum(db_partial_ptr, db, left, cols, tile)
