"""The warp-specialized TMA schedule: a producer warp fills a ring of row tiles, compute groups empty it in turn.

CTA p of P owns the row tiles p, p + P, p + 2P, ..., counted from the last tile. Compute group g takes every
num_groups-th of them, from the g-th on. The producer is up to num_stages tiles ahead. In a backward each group keeps
its own sums of dw and db and leaves its own row of partials.

Each stage has two mbarriers. `full` completes when the copies of a tile have arrived: a group waits for it before it
reads. `empty` completes when the group has read the stage: the producer waits for it before it refills.

num_stages is a multiple of num_groups, so that a stage always belongs to the same group. Otherwise a group could take
an old phase of a stage's mbarrier for the one it waits for, since a wait knows a phase by its parity only, and read a
tile that has not arrived.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import partial_sums, ring
from .cluster import open_exchange

PRODUCER_REGISTERS = gl.constexpr(24)  # the fewest a warp can have; the compute groups get the rest


@gluon.constexpr_function
def stage_bytes(descs, tile):
    """Bytes of one row tile, of all tensors together."""
    return tile.copies.value * sum(desc.block_type.nbytes for desc in descs)


@gluon.jit
def produce(tile: gl.constexpr, descs, rings, full, empty, rows):
    """Fill stage after stage with a tile of every tensor, each as soon as its group has released it. All copies of a
    tile complete on one mbarrier, which expects their bytes before the first of them starts."""
    first = gl.program_id(0) * tile.rows
    step = gl.num_programs(0) * tile.rows
    stage = 0
    phase = 1  # of a fresh barrier, the phase before its first counts as complete: the first fill does not wait
    row = ring.row_of_tile(first, rows, tile)
    for _ in range(first, rows, step):
        ring.wait(empty.index(stage), phase)  # the group has read the tile that these copies overwrite
        barrier = full.index(stage)
        ring.expect(barrier, stage_bytes(descs, tile))
        for i in gl.static_range(tile.copies):
            for t in gl.static_range(len(descs)):
                ring.start_copy(descs[t], row, i, barrier, rings[t][i].index(stage), True, tile)
        row -= step
        stage += 1
        if stage == tile.num_stages:
            stage = 0
            phase ^= 1


@gluon.jit
def release_stage(empty, stage):
    """Let the producer refill a stage that the group has read.

    The reads went through the generic proxy, and the producer's copies write through the asynchronous proxy. Arrival
    and wait alone do not order the two; without the proxy fence the copies could overtake the reads. The compiler puts
    no fence between warp partitions. The one arrival is for the whole group: the compiler lets the group's warps meet
    between fence and arrival."""
    ring.fence_async_shared()
    ring.arrive(empty.index(stage), count=1)


@gluon.jit
def next_stage(stage, phase, group, tile: gl.constexpr):
    """The group's next stage, and the phase to wait for there."""
    stage += tile.num_groups
    if stage >= tile.num_stages:
        stage = group
        phase ^= 1
    return stage, phase


@gluon.jit
def consume(norm: gl.constexpr, tile: gl.constexpr, group, operands):
    """One compute group."""
    if norm.wants_dx:
        consume_backward(norm, tile, group, operands)
    else:
        consume_forward(norm, tile, group, operands)


@gluon.jit
def consume_backward(norm: gl.constexpr, tile: gl.constexpr, group, operands):
    """One compute group of a backward: every num_groups-th tile of the CTA, from the group-th on. A stage is released
    after its last read: the only one if the tile stays in registers (tile.cached), otherwise the second, for dx."""
    inputs, parameters, outputs, sizes = operands
    x_ring, dy_ring, full, empty, mean_ptr, rstd_ptr, residual_ptr = inputs
    weight_ptr, weight_in_smem = parameters
    dx_ptr, dw_partial_ptr, db_partial_ptr = outputs
    rows, cols, mean_stride, rstd_stride = sizes
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
        ring.wait(full.index(stage), phase)  # the tile has arrived, and is visible to this warp's reads
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
        stage, phase = next_stage(stage, phase, group, tile)
    partial = gl.program_id(0) * tile.num_groups + group
    partial_sums.store_partials(dw_partial_ptr, db_partial_ptr, dw, db, partial, cols, cols, norm, tile)


@gluon.jit
def consume_forward(norm: gl.constexpr, tile: gl.constexpr, group, operands):
    """One compute group of a forward: every num_groups-th tile of the CTA, from the group-th on. A stage is read once,
    and released at once."""
    inputs, parameters, outputs, sizes = operands
    x_ring, full, empty = inputs
    weight_ptr, weight_in_smem, bias_ptr, bias_in_smem = parameters
    y_ptr, statistics = outputs
    rows, cols, eps = sizes
    if tile.weight_in_smem:
        weight = weight_in_smem
        bias = bias_in_smem
    else:
        weight = ring.load_parameter(weight_ptr, cols, norm.has_weight, tile)
        bias = ring.load_parameter(bias_ptr, cols, norm.has_bias, tile)
    first = (gl.program_id(0) + group * gl.num_programs(0)) * tile.rows
    step = gl.num_programs(0) * (tile.rows * tile.num_groups)
    row = ring.row_of_tile(first, rows, tile)
    stage = group
    phase = 0
    for _ in range(first, rows, step):
        ring.wait(full.index(stage), phase)  # the tile has arrived, and is visible to this warp's reads
        x = ring.read_tile(x_ring, stage, False, tile)
        release_stage(empty, stage)
        mean, rstd, _exchange = ring.row_statistics(x, cols, eps, open_exchange(tile), norm, tile)
        if len(statistics) > 0:
            ring.store_statistics(statistics[0], statistics[1], mean, rstd, row, norm, tile)
        ring.store_y(y_ptr, x, mean, rstd, weight, bias, row, cols, norm, tile)
        row -= step
        stage, phase = next_stage(stage, phase, group, tile)


@gluon.jit(do_not_specialize=["rows"])
def backward(
    x_desc, dy_desc, mean_ptr, rstd_ptr, weight_ptr, residual_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr, rows, cols,
    mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """dx of the CTA's row tiles, and its num_groups rows of the dw and db partials. The fence shows the initialized
    mbarriers to the copies."""
    x_ring = ring.allocate_ring(x_desc, None, tile)
    dy_ring = ring.allocate_ring(dy_desc, None, tile)
    full = ring.allocate_barriers(tile)
    empty = ring.allocate_barriers(tile)
    ring.fence_barriers()
    in_smem: gl.constexpr = norm.has_weight and tile.weight_in_smem
    weight = ring.hold_parameter(ring.load_parameter(weight_ptr, cols, in_smem, tile), in_smem, True, tile)
    filling = ((x_desc, dy_desc), (x_ring, dy_ring), full, empty, rows)
    inputs = (x_ring, dy_ring, full, empty, mean_ptr, rstd_ptr, residual_ptr)
    outputs = (dx_ptr, dw_partial_ptr, db_partial_ptr)
    sizes = (rows, cols, mean_stride, rstd_stride)
    run_groups(filling, (inputs, (weight_ptr, weight), outputs, sizes), norm, tile)


@gluon.jit(do_not_specialize=["rows"])
def forward(
    x_desc, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, eps: "fp64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """y of the CTA's row tiles, and mean and rstd unless their pointers are None. The fence shows the initialized
    mbarriers to the copies."""
    x_ring = ring.allocate_ring(x_desc, None, tile)
    full = ring.allocate_barriers(tile)
    empty = ring.allocate_barriers(tile)
    ring.fence_barriers()
    weight_held: gl.constexpr = norm.has_weight and tile.weight_in_smem
    bias_held: gl.constexpr = norm.has_bias and tile.weight_in_smem
    weight = ring.load_parameter(weight_ptr, cols, weight_held, tile)
    bias = ring.load_parameter(bias_ptr, cols, bias_held, tile)
    weight = ring.hold_parameter(weight, weight_held, True, tile)
    bias = ring.hold_parameter(bias, bias_held, True, tile)
    statistics = ()
    if rstd_ptr is not None:
        statistics = (or_else(mean_ptr, rstd_ptr), rstd_ptr)
    filling = ((x_desc,), (x_ring,), full, empty, rows)
    parameters = (or_else(weight_ptr, y_ptr), weight, or_else(bias_ptr, y_ptr), bias)
    run_groups(filling, ((x_ring, full, empty), parameters, (y_ptr, statistics), (rows, cols, eps)), norm, tile)


@gluon.jit
def or_else(pointer, other):
    """`pointer`, or `other` if it is None, which a warp partition does not accept as an argument."""
    if pointer is None:
        found = other
    else:
        found = pointer
    return found


@gluon.jit
def run_groups(filling, operands, norm: gl.constexpr, tile: gl.constexpr):
    """Run the producer beside one or two compute groups."""
    if tile.num_groups == 1:
        gl.warp_specialize(
            [(consume, (norm, tile, 0, operands)), (produce, (tile,) + filling)],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(tile.num_groups == 2)
        gl.warp_specialize(
            [
                (consume, (norm, tile, 0, operands)),
                (consume, (norm, tile, 1, operands)),
                (produce, (tile,) + filling),
            ],
            [tile.num_warps, 1],
            [tile.group_registers, PRODUCER_REGISTERS],
        )
