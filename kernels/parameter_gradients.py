"""dw and db of a backward without dx: sums over rows, for which no CTA needs a whole row.

CTA (c, p) owns tile.chunk columns, from column c * tile.chunk on, of the row tiles p, p + P, p + 2P, ..., where P CTAs
share the rows. It stores its sums as row p of the [P, cols] partials. Tiles of dy, and of x for dw, come through the
ring of column_reduction.py, from the first row to the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ring
from .column_reduction import fill_stage, open_rings, read_tile, rows_at_once, tile_layout
from .loads import Statistics, StatisticsInMemory, load_statistics
from .ring import Position
from .rowmath import normalize


@gluon.jit
def load_tile_statistics(source, row, rows, norm: gl.constexpr, tile: gl.constexpr):
    """Statistics of the tile at `row`, [rows / rows_at_once, rows_at_once, 1], in the order of `read_tile`."""
    by_row: gl.constexpr = gl.SliceLayout(2, tile_layout(tile))
    outer = gl.arange(0, tile.rows // rows_at_once(tile), gl.SliceLayout(1, by_row)) * rows_at_once(tile)
    inner = gl.arange(0, rows_at_once(tile), gl.SliceLayout(0, by_row))
    index = row + gl.expand_dims(outer, 1) + gl.expand_dims(inner, 0)
    statistics = load_statistics(source, index, index < rows, norm)
    return Statistics(gl.expand_dims(statistics.mean, 2), gl.expand_dims(statistics.rstd, 2))


@gluon.jit
def store_sum(partial_ptr, acc, left, cols, tile: gl.constexpr):
    """Sum `acc` over its rows and store it as this CTA's row of the partials. The sum over warps goes through shared
    memory, which the compiler places in a ring's memory: no copy is under way."""
    col = left + gl.arange(0, tile.chunk, gl.SliceLayout(0, gl.SliceLayout(0, tile_layout(tile))))
    gl.store(partial_ptr + gl.program_id(1).to(gl.int64) * cols + col, gl.sum(acc, axis=0), mask=col < cols)


@gluon.jit(do_not_specialize=["rows"])
def dw_and_db(
    dy_desc, x_desc, mean_ptr, rstd_ptr, dw_partial_ptr, db_partial_ptr,
    rows, cols, mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The CTA's row of the dw and db partials, in float32. Descriptors are [rows, cols] in boxes of a tile.

    Every warp waits for a tile's mbarriers before it reads the tile. The stage is refilled after the reads of dy and x;
    ring.fill_stage says what orders the copies behind these reads."""
    descs = (dy_desc,)
    if norm.wants_dw:
        descs = (dy_desc, x_desc)
    left = gl.program_id(0) * tile.chunk
    first = gl.program_id(1) * tile.rows
    step = gl.num_programs(1) * tile.rows
    rings = open_rings(descs, first, left, rows, tile)
    db = gl.full([rows_at_once(tile), tile.chunk], 0.0, gl.float32, gl.SliceLayout(0, tile_layout(tile)))
    dw = db
    source = StatisticsInMemory(mean_ptr, rstd_ptr, mean_stride, rstd_stride)
    if norm.wants_dw:
        next_statistics = load_tile_statistics(source, first, rows, norm, tile)
    at = Position(0, 0)
    for row in range(first, rows, step):
        ring.wait(rings.full[0][0].index(at.stage), at.phase)
        dy = read_tile(rings.slots[0], at.stage, tile).to(gl.float32)
        if norm.wants_db:
            db += gl.sum(norm.form.to_db(dy, norm), axis=0)
        if norm.wants_dw:
            statistics = next_statistics
            next_statistics = load_tile_statistics(source, row + step, rows, norm, tile)
            ring.wait(rings.full[1][0].index(at.stage), at.phase)
            x = read_tile(rings.slots[1], at.stage, tile).to(gl.float32)
            x_hat = normalize(x, statistics.mean, statistics.rstd, norm)
            dw += gl.sum(norm.form.to_dw(dy, x_hat, norm), axis=0)
        fill_stage(rings, at.stage, row + tile.num_stages * step, left, rows, tile)
        at = ring.next_position(at, tile)
    if norm.wants_dw:
        store_sum(dw_partial_ptr, dw, left, cols, tile)
    if norm.wants_db:
        store_sum(db_partial_ptr, db, left, cols, tile)
