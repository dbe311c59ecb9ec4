"""The warp-specialized TMA schedule: a producer warp fills a ring of row tiles, and compute groups (of num_warps warps
each) empty it in turn.

CTA p of P owns the row tiles p, p + P, p + 2P, ..., counted from the last tile. Compute group g takes every
num_groups-th of these, from the g-th on. The producer is up to num_stages tiles ahead. In a backward each group keeps
its own sums of dw and db and leaves its own row of partials. There are no clusters and no tails here.

Each stage has two mbarriers. `full` completes when the copies of a tile have arrived: a group waits for it before it
reads. `empty` completes when the group has read the stage: the producer waits for it before it refills.

num_stages is a multiple of num_groups, so that a stage always belongs to the same group. Otherwise a group could read
a tile that has not arrived: a wait knows a phase by its parity only, so the group could take an old phase of a stage's
mbarrier for the one that it waits for.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import partial_sums, passes, ring, row_tile
from .cluster import open_exchange
from .loads import StatisticsInMemory, combine_tiles, load_parameter, pointers
from .passes import ColumnSums
from .ring import Position

PRODUCER_REGISTERS = gl.constexpr(24)  # the fewest a warp can have; the compute groups get the rest


class Fill(NamedTuple):
    """What the producer needs: the descriptor and the slots of each tensor, the mbarriers, and the number of rows."""

    descs: tuple
    slots: tuple
    full: gl.tensor
    empty: gl.tensor
    rows: gl.tensor


class Backward(NamedTuple):
    """What a compute group of a backward needs. Tensors that are absent have another pointer in their place, which
    nobody uses."""

    x_slots: tuple
    dy_slots: tuple
    full: gl.tensor
    empty: gl.tensor
    statistics: StatisticsInMemory
    rows_in: tuple  # the form's other row tensors, with strides_in
    strides_in: tuple
    added: tuple  # gradients that are added to that of the normalized row
    weight_ptr: gl.tensor
    weight: tuple  # in shared memory, or placeholders
    bias_ptr: gl.tensor
    bias: tuple
    outs: tuple  # where the gradients of rows go
    partials: ColumnSums
    rows: gl.tensor
    cols: gl.tensor


class Forward(NamedTuple):
    """What a compute group of a forward needs. Parameters that are absent have another pointer in their place, which
    nobody uses."""

    x_slots: tuple
    full: gl.tensor
    empty: gl.tensor
    weight_ptr: gl.tensor
    weight: tuple  # in shared memory, or placeholders
    bias_ptr: gl.tensor
    bias: tuple
    y_ptr: gl.tensor
    statistics_ptrs: tuple  # of mean and rstd, or empty
    rows: gl.tensor
    cols: gl.tensor
    eps: gl.tensor


@gluon.constexpr_function
def stage_bytes(descs, tile):
    """Bytes of one row tile, of all tensors together."""
    return tile.copies.value * sum(desc.block_type.nbytes for desc in descs)


@gluon.jit
def produce(tile: gl.constexpr, fill):
    """Fill stage after stage with a tile of every tensor, each as soon as its group has released it. All copies into a
    stage complete on one mbarrier, which expects their bytes before the first of them starts."""
    first = gl.program_id(0) * tile.rows
    step = gl.num_programs(0) * tile.rows
    at = Position(0, 1)  # waits do not block in the first round: in a new mbarrier, the phase of parity 1 is complete
    row = row_tile.row_of_tile(first, fill.rows, tile)
    for _ in range(first, fill.rows, step):
        ring.wait(fill.empty.index(at.stage), at.phase)  # the group has read the tile that these copies overwrite
        ring.expect(fill.full.index(at.stage), stage_bytes(fill.descs, tile))
        corners = row_tile.copy_corners(row, tile)
        for i in gl.static_range(tile.copies):
            for t in gl.static_range(len(fill.descs)):
                ring.start_copy(fill.descs[t], corners[i], fill.full, fill.slots[t][i], at.stage, True)
        row -= step
        at = ring.next_position(at, tile)


@gluon.jit
def release_stage(empty, stage):
    """Let the producer refill a stage that the group has read.

    The reads went through the generic proxy, and the producer's copies write through the asynchronous proxy. Arrival
    and wait alone do not order the two; without the proxy fence the copies could overtake the reads. The compiler puts
    no fence between warp partitions. The one arrival is for the whole group: the compiler puts a barrier of the group's
    warps between fence and arrival."""
    ring.fence_async_shared()
    ring.arrive(empty.index(stage), count=1)


@gluon.jit
def consume(norm: gl.constexpr, tile: gl.constexpr, group: gl.constexpr, operands):
    """One compute group."""
    if norm.wants_dx:
        consume_backward(norm, tile, group, operands)
    else:
        consume_forward(norm, tile, group, operands)


@gluon.jit
def consume_backward(norm: gl.constexpr, tile: gl.constexpr, group: gl.constexpr, operands):
    """One compute group of a backward: every num_groups-th tile of the CTA, from the group-th on. A stage is released
    after its last read: the only one if the tile stays in registers (tile.cached), otherwise the second, for dx."""
    if tile.weight_in_smem:
        weight = operands.weight
        bias = operands.bias
    else:
        weight = load_parameter(operands.weight_ptr, operands.cols, norm.has_weight, row_tile.columns_of_thread, tile)
        bias = load_parameter(operands.bias_ptr, operands.cols, norm.has_bias, row_tile.columns_of_thread, tile)
    first_weight = row_tile.first_of_weight(operands.weight_ptr, operands.cols, operands.dy_slots[0].dtype, norm, tile)
    sums = partial_sums.zeros(norm, tile)
    first = (gl.program_id(0) + group * gl.num_programs(0)) * tile.rows
    step = gl.num_programs(0) * (tile.rows * tile.num_groups)
    row = row_tile.row_of_tile(first, operands.rows, tile)
    next_statistics = row_tile.load_row_statistics(operands.statistics, row, norm, tile)
    at = Position(group, 0)
    for _ in range(first, operands.rows, step):
        statistics = row_tile.by_row(next_statistics)
        next_statistics = row_tile.load_row_statistics(operands.statistics, row - step, norm, tile)
        ring.wait(operands.full.index(at.stage), at.phase)  # the tile has arrived, and is visible to this warp's reads
        x = row_tile.read_tile(operands.x_slots, at.stage, False, tile)
        dy = row_tile.read_tile(operands.dy_slots, at.stage, False, tile)
        first_dy = row_tile.first_of_rows(operands.dy_slots, at.stage, norm, tile)
        more = row_tile.load_tiles(operands.rows_in, operands.strides_in, row, operands.cols, tile)
        others = row_tile.load_added(operands.added, row, operands.cols, tile)
        if tile.cached:
            release_stage(operands.empty, at.stage)
        sums, row_sums = passes.sum_tile((x,) + more, (), dy, statistics, weight, sums, norm, tile)
        if not tile.cached:
            x = row_tile.read_tile(operands.x_slots, at.stage, True, tile)
            dy = row_tile.read_tile(operands.dy_slots, at.stage, True, tile)
        sums = passes.store_gradients(
            operands.outs, operands.cols, (x,) + more, (), dy, statistics, row_sums, weight, bias, others, first_dy,
            first_weight, sums, row, operands.cols, norm, tile,
        )  # fmt: skip
        if not tile.cached:
            release_stage(operands.empty, at.stage)
        row -= step
        at = ring.next_position(at, tile, group, tile.num_groups)
    # A group without a tile stores zeros, because the second launch adds up the rows of all groups. The ring's memory
    # is not free for these sums: other groups may still read it.
    partial = gl.program_id(0) * tile.num_groups + group
    partial_sums.store_partials(operands.partials, sums, partial, operands.cols, operands.cols, norm, tile)


@gluon.jit
def consume_forward(norm: gl.constexpr, tile: gl.constexpr, group: gl.constexpr, operands):
    """One compute group of a forward: every num_groups-th tile of the CTA, from the group-th on. A stage is read once,
    and released at once."""
    if tile.weight_in_smem:
        weight = operands.weight
        bias = operands.bias
    else:
        weight = load_parameter(operands.weight_ptr, operands.cols, norm.has_weight, row_tile.columns_of_thread, tile)
        bias = load_parameter(operands.bias_ptr, operands.cols, norm.has_bias, row_tile.columns_of_thread, tile)
    first = (gl.program_id(0) + group * gl.num_programs(0)) * tile.rows
    step = gl.num_programs(0) * (tile.rows * tile.num_groups)
    row = row_tile.row_of_tile(first, operands.rows, tile)
    at = Position(group, 0)
    for _ in range(first, operands.rows, step):
        ring.wait(operands.full.index(at.stage), at.phase)  # the tile has arrived, and is visible to this warp's reads
        tiles = (row_tile.read_tile(operands.x_slots, at.stage, False, tile),)
        release_stage(operands.empty, at.stage)
        x = combine_tiles(tiles, None, norm, tile)
        # Without a cluster, the exchange is a placeholder.
        statistics, _exchange = passes.row_statistics(x, operands.cols, operands.eps, open_exchange(tile), norm, tile)
        if len(operands.statistics_ptrs) > 0:
            mean_ptr, rstd_ptr = operands.statistics_ptrs
            row_tile.store_statistics(mean_ptr, rstd_ptr, statistics, row, norm, tile)
        passes.store_y(operands.y_ptr, None, tiles, (), x, statistics, weight, bias, row, operands.cols, norm, tile)
        row -= step
        at = ring.next_position(at, tile, group, tile.num_groups)


@gluon.jit
def parameter_in_smem(ptr, cols, present: gl.constexpr, tile: gl.constexpr):
    """A parameter for all groups in shared memory; placeholders where each group loads it to its registers. The groups
    read what other warps have stored: they start after a barrier of the whole CTA, which is part of
    gl.warp_specialize."""
    in_smem: gl.constexpr = present and tile.weight_in_smem
    loaded = load_parameter(ptr, cols, in_smem, row_tile.columns_of_thread, tile)
    return row_tile.hold_parameter(loaded, in_smem, True, tile)


@gluon.jit(do_not_specialize=["rows"])
def backward(
    x_desc, dy_desc, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dw_partial_ptr, db_partial_ptr, rows, cols,
    mean_stride: "i64", rstd_stride: "i64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr, rows_in=None, strides_in=None, rows_out=None,
    added=None, bias_ptr=None,
):
    """The gradients of the CTA's row tiles, and its num_groups rows of the dw and db partials."""
    x_slots = ring.allocate_slots(row_tile.copy_descriptors(x_desc, None, tile), tile)
    dy_slots = ring.allocate_slots(row_tile.copy_descriptors(dy_desc, None, tile), tile)
    full = ring.allocate_barriers(tile)
    empty = ring.allocate_barriers(tile)
    ring.fence_barriers()  # shows the initialized mbarriers to the copies
    weight = parameter_in_smem(weight_ptr, cols, norm.has_weight, tile)
    statistics = StatisticsInMemory(mean_ptr, rstd_ptr, mean_stride, rstd_stride)
    partials = ColumnSums(dw_partial_ptr, db_partial_ptr, ())
    bias = parameter_in_smem(bias_ptr, cols, norm.has_bias, tile)
    bias_ptr = or_else(bias_ptr, rstd_ptr)
    outs = pointers(dx_ptr, rows_out, norm)
    operands = Backward(
        x_slots, dy_slots, full, empty, statistics, or_empty(rows_in), or_empty(strides_in), or_empty(added),
        weight_ptr, weight, bias_ptr, bias, outs, partials, rows, cols
    )
    run_groups(Fill((x_desc, dy_desc), (x_slots, dy_slots), full, empty, rows), operands, norm, tile)


@gluon.jit(do_not_specialize=["rows"])
def forward(
    x_desc, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, eps: "fp64",
    norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
):
    """y of the CTA's row tiles, and mean and rstd unless their pointers are None."""
    x_slots = ring.allocate_slots(row_tile.copy_descriptors(x_desc, None, tile), tile)
    full = ring.allocate_barriers(tile)
    empty = ring.allocate_barriers(tile)
    ring.fence_barriers()  # shows the initialized mbarriers to the copies
    weight = parameter_in_smem(weight_ptr, cols, norm.has_weight, tile)
    bias = parameter_in_smem(bias_ptr, cols, norm.has_bias, tile)
    statistics = ()
    if rstd_ptr is not None:
        statistics = (or_else(mean_ptr, rstd_ptr), rstd_ptr)
    weight_ptr = or_else(weight_ptr, y_ptr)
    bias_ptr = or_else(bias_ptr, y_ptr)
    operands = Forward(
        x_slots, full, empty, weight_ptr, weight, bias_ptr, bias, y_ptr, statistics, rows, cols, eps
    )
    run_groups(Fill((x_desc,), (x_slots,), full, empty, rows), operands, norm, tile)


@gluon.jit
def or_else(pointer, other):
    """`pointer`, or `other` if `pointer` is None. A warp partition does not accept None as an argument."""
    if pointer is None:
        found = other
    else:
        found = pointer
    return found


@gluon.jit
def or_empty(given):
    """A tuple, or an empty one in place of None."""
    if given is None:
        found = ()
    else:
        found = given
    return found


@gluon.jit
def run_groups(fill, operands, norm: gl.constexpr, tile: gl.constexpr):
    """Run the producer beside one or two compute groups. The first group runs in the kernel's own warps; numbers of
    warps and registers are given for the others only. The barrier with which gl.warp_specialize starts them also shows
    them the initialized mbarriers."""
    if tile.num_groups == 1:
        gl.warp_specialize(
            [(consume, (norm, tile, 0, operands)), (produce, (tile, fill))],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(tile.num_groups == 2)
        gl.warp_specialize(
            [(consume, (norm, tile, 0, operands)), (consume, (norm, tile, 1, operands)), (produce, (tile, fill))],
            [tile.num_warps, 1],
            [tile.group_registers, PRODUCER_REGISTERS],
        )
