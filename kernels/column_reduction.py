"""Sums of [rows, cols] tensors over their rows: several tensors in one launch, one sum each or one of all.

CTA (c, s, o) owns tile.chunk columns of output o, from column c * tile.chunk on, and split s of the S splits of the
rows: row tiles s, s + S, s + 2S, ... It stores its sums as row s of out[o], [S, cols]: a partial sum, or the result if
S = 1. Partials are [rows, cols] themselves, so the portable kernel sums them up too.

Tensors, row strides and descriptors come as tuples with one element for each tensor. Where every output is the sum of
one tensor, a CTA picks its tensor once, by comparisons: only these comparisons grow with the number of tensors. Offsets
are 64-bit.

parameter_gradients.py uses the second half of this file, the ring of column tiles.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ring
from .gluon_compat import reinterpret
from .loads import chosen
from .ring import Position, Rings

# --- Rows through registers: any strides, any architecture ---


@triton.jit
def load_tile(inputs, row_strides, which, row, col, rows, cols):
    target = chosen(inputs, which) + row * chosen(row_strides, which) + col
    return tl.load(target, mask=(row < rows) & (col < cols), other=0.0)


@triton.jit
def add_rows(acc, inputs, row_strides, col, rows, cols, tile: tl.constexpr):
    """acc [tile.rows, tile.chunk] with the CTA's row tiles of all tensors added: the same rows of each tensor in turn,
    then the next rows. The loads of the next two tiles are always under way."""
    step = tl.num_programs(1) * tile.rows
    first = tl.program_id(1) * tile.rows
    row = first.to(tl.int64) + tl.arange(0, tile.rows)[:, None]
    which = 0
    next_tile = load_tile(inputs, row_strides, which, row, col, rows, cols)
    row, which = advance(row, which, len(inputs), step)
    tile_after = load_tile(inputs, row_strides, which, row, col, rows, cols)
    for _ in range(tl.cdiv(rows - first, step) * len(inputs)):
        x = next_tile
        next_tile = tile_after
        row, which = advance(row, which, len(inputs), step)
        tile_after = load_tile(inputs, row_strides, which, row, col, rows, cols)
        acc += x.to(acc.dtype)
    return acc


@triton.jit
def advance(row, which, count, step):
    """Row and tensor of the next tile: the same rows of the next tensor or, after the last, the first tensor's next
    rows."""
    last = which + 1 == count
    return row + tl.where(last, step, 0), tl.where(last, 0, which + 1)


@triton.jit(do_not_specialize=["rows"])
def sum_rows(
    inputs, row_strides, outs, rows: "i64", cols,
    total: tl.constexpr, fp64: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Sums of tensors given by pointer and row stride in elements; elements of a row are adjacent. Accumulates in
    float64 with `fp64`, else in float32, and rounds once to the output's dtype."""
    output = tl.program_id(2)
    col = tl.program_id(0).to(tl.int64) * tile.chunk + tl.arange(0, tile.chunk)[None, :]
    acc = tl.full([tile.rows, tile.chunk], 0.0, tl.float64 if fp64 else tl.float32)
    if total:
        acc = add_rows(acc, inputs, row_strides, col, rows, cols, tile)
    else:
        acc = add_rows(acc, (chosen(inputs, output),), (chosen(row_strides, output),), col, rows, cols, tile)
    out = chosen(outs, output)
    target = out + tl.program_id(1).to(tl.int64) * cols + col
    tl.store(target, tl.sum(acc, axis=0)[None, :].to(out.dtype.element_ty), mask=col < cols)


# --- Row tiles through a ring in shared memory, by TMA ---


@gluon.jit
def pick_descriptor(choices, which):
    chosen = choices[0]
    for i in gl.static_range(1, len(choices)):
        if which == i:
            chosen = choices[i]
    return chosen


@gluon.constexpr_function
def threads_per_row(tile):
    return min(32, tile.chunk // tile.vector)


@gluon.constexpr_function
def rows_at_once(tile):
    """Rows of a tile that the CTA reads at a time. Its accumulators have a row for each until the end."""
    return tile.num_warps * 32 // threads_per_row(tile)


@gluon.constexpr_function
def tile_layout(tile):
    """Layout of a tile as [rows / rows_at_once, rows_at_once, chunk]. The first dimension is within a thread, so that
    its sum moves nothing between threads. A thread has tile.vector adjacent columns and the next thread the next ones;
    warps lie along the rows."""
    across = threads_per_row(tile)
    return gl.BlockedLayout(
        [tile.rows // rows_at_once(tile), 1, tile.vector], [1, 32 // across, across], [1, tile.num_warps, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def end_of_group(first, count, tile):
    return gl.constexpr(min(first + tile.group, count))


@gluon.jit
def open_rings(descs, first, left, rows, tile: gl.constexpr):
    """A ring for each tensor, with the copies of the CTA's first num_stages row tiles under way."""
    copies = ()
    for t in gl.static_range(len(descs)):
        copies = copies + ((descs[t],),)
    rings = ring.open_rings(copies, tile)
    for stage in gl.static_range(tile.stages):
        fill_stage(rings, stage, first + stage * gl.num_programs(1) * tile.rows, left, rows, tile)
    return rings


@gluon.jit
def fill_stage(rings, stage, row, left, rows, tile: gl.constexpr):
    """Start the copies of the tile at (row, left) into a stage that is new or that this CTA has read; none if the tile
    lies after the last row. ring.fill_stage says what orders the copies behind the reads."""
    ring.fill_stage(rings, stage, ((row, left),), row < rows, tile)


@gluon.jit
def some_rings(rings, first: gl.constexpr, end: gl.constexpr):
    """The rings of tensors first to end - 1."""
    return Rings(rings.descs[first:end], rings.slots[first:end], rings.full[first:end], rings.strides, rings.cols)


@gluon.jit
def read_tile(slots, stage, tile: gl.constexpr):
    """A stage's tile in registers, [rows / rows_at_once, rows_at_once, chunk]. The caller has waited for its
    mbarrier."""
    by_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shape: gl.constexpr = [tile.rows // rows_at_once(tile), rows_at_once(tile), tile.chunk]
    return reinterpret(slots[0].index(stage), slots[0].dtype, shape, by_rows).load(tile_layout(tile))


@gluon.jit
def add_tiles(acc, rings, at, tile: gl.constexpr):
    """acc with a stage's tiles of all rings added."""
    for t in gl.static_range(len(rings.slots)):
        # Every warp waits for each copy itself, so that the copy's bytes are visible to its reads.
        ring.wait(rings.full[t][0].index(at.stage), at.phase)
        acc += gl.sum(read_tile(rings.slots[t], at.stage, tile).to(gl.float32), axis=0)
    return acc


@gluon.jit
def sum_tiles(descs, left, rows, tile: gl.constexpr):
    """Sums [chunk] of the CTA's row tiles of all tensors. Tiles are read and refilled one group of tensors at a time,
    while copies of the other groups and stages are under way."""
    layout: gl.constexpr = tile_layout(tile)
    acc = gl.full([rows_at_once(tile), tile.chunk], 0.0, gl.float32, gl.SliceLayout(0, layout))
    first = gl.program_id(1) * tile.rows
    step = gl.num_programs(1) * tile.rows
    rings = open_rings(descs, first, left, rows, tile)
    at = Position(0, 0)
    for row in range(first, rows, step):
        ahead = row + tile.num_stages * step
        for start in gl.static_range(0, len(descs), tile.groups):
            group = some_rings(rings, start, end_of_group(start, len(descs), tile))
            acc = add_tiles(acc, group, at, tile)
            # Refill: every warp has read the group's tiles, by the compiler's CTA barrier and proxy fence before it.
            fill_stage(group, at.stage, ahead, left, rows, tile)
        at = ring.next_position(at, tile)
    # The sum over warps goes through shared memory, which the compiler places in a ring's memory. No copy is under way.
    return gl.sum(acc, axis=0)


@gluon.jit
def sum_and_store(descs, outs, rows, cols, total: gl.constexpr, tile: gl.constexpr):
    """Sums of tensors given by descriptor: [rows, cols] in boxes of a tile. Rows and columns beyond the last arrive as
    zeros. Accumulates in float32 and rounds once to the output's dtype."""
    left = gl.program_id(0) * tile.chunk
    if total:
        sums = sum_tiles(descs, left, rows, tile)
    else:
        sums = sum_tiles((pick_descriptor(descs, gl.program_id(2)),), left, rows, tile)
    out = chosen(outs, gl.program_id(2))
    col = left + gl.arange(0, tile.chunk, gl.SliceLayout(0, gl.SliceLayout(0, tile_layout(tile))))
    target = out + gl.program_id(1).to(gl.int64) * cols + col
    gl.store(target, sums.to(out.dtype.element_ty), mask=col < cols)


# Triton 3.6 cannot launch a kernel with descriptors inside a tuple, so each descriptor is a parameter, None beyond the
# last. Each parameter costs time on the host (bench/NOTES.md, "Host time"), so there are two kernels:
# one for up to 8 tensors, one for up to 64.


@gluon.jit(do_not_specialize=["rows"])
def sum_few_by_tma(
    outs, rows, cols, total: gl.constexpr, tile: gl.constexpr, count: gl.constexpr, num_warps: gl.constexpr,
    d0, d1, d2, d3, d4, d5, d6, d7,
):  # fmt: skip
    sum_and_store((d0, d1, d2, d3, d4, d5, d6, d7)[:count], outs, rows, cols, total, tile)


@gluon.jit(do_not_specialize=["rows"])
def sum_many_by_tma(
    outs, rows, cols, total: gl.constexpr, tile: gl.constexpr, count: gl.constexpr, num_warps: gl.constexpr,
    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15,
    d16, d17, d18, d19, d20, d21, d22, d23, d24, d25, d26, d27, d28, d29, d30, d31,
    d32, d33, d34, d35, d36, d37, d38, d39, d40, d41, d42, d43, d44, d45, d46, d47,
    d48, d49, d50, d51, d52, d53, d54, d55, d56, d57, d58, d59, d60, d61, d62, d63,
):  # fmt: skip
    descs = (
        d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15,
        d16, d17, d18, d19, d20, d21, d22, d23, d24, d25, d26, d27, d28, d29, d30, d31,
        d32, d33, d34, d35, d36, d37, d38, d39, d40, d41, d42, d43, d44, d45, d46, d47,
        d48, d49, d50, d51, d52, d53, d54, d55, d56, d57, d58, d59, d60, d61, d62, d63,
    )  # fmt: skip
    sum_and_store(descs[:count], outs, rows, cols, total, tile)
