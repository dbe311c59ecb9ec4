"""Plans worth considering, variant by variant, and the key that picks one of them.

The numbers aimed at were found on an H200 (bfloat16, 1024 to 16384 columns, 2026-11-20). Of the plans swept there the
keys choose one within 3% of the fastest in the backward and 5% in the forward. Other GPUs are planned for by the same
arithmetic with their own resources.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from . import budget
from .device import DeviceSpec
from .plan import (
    MAX_BOX_SIDE,
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    RingPlan,
    WarpSpecializedPlan,
    num_copies,
)
from .problem import NormProblem

WARPS = (4, 8, 16)
MAX_CHUNKS = 8  # a longer unrolled row loop outgrows the instruction cache
MAX_RING_CHUNKS = 10
# Columns beyond the last are computed on for nothing; so many for each that there is do not matter.
TOLERATED_PADDING = 1.125

# Little's law: 4.4 TB/s of an H200 times about 1 us of loaded latency is 32 KiB in flight for each SM.
BYTES_IN_FLIGHT_PER_SM = 32 * 1024
MULTIWAVE_WARPS_PER_SM = 16
# By the most columns: of narrow rows fewer warps with more rows each. 512 columns take 36.2 us so and 41.0 us with 20
# warps, 128 columns 20.9 us and 26.2 us (LayerNorm backward). Of the narrowest, smaller chunks: 128 columns take 12.0
# us by chunks of 64, 13.1 us of 128 (forward).
NARROW_WARPS_PER_SM = {256: 8, 512: 12}
NARROW_COLUMNS, NARROW_CHUNK = 256, 64
MIN_MULTIWAVE_CHUNK = 16  # columns; below it, a load of one chunk is for many short pieces of memory
MULTIWAVE_CHUNK = 1024  # columns; faster than 512 by 2 to 5%, than 2048 by 1 to 6%, than 4096 by 2 to 9%
# Elements of a row tile in a thread, in bytes of x and its gradient: with half or twice as many the backward is up to
# 25% slower. And what all tiles of a stage bring to an SM at least.
RING_BYTES_PER_THREAD = 128
# Where whole rows have fewer columns than this, and threads fewer sums and parameters to hold, more of them: 12000 x
# 1536 takes 32.5 us and 39.9 us with half as many, 16384 x 768 28.8 us and 30.3 us (LayerNorm).
FEW_COLUMNS, RING_BYTES_PER_THREAD_OF_FEW = 2048, 176
RING_STAGE_BYTES_PER_SM = 24 * 1024
# 4 to 8 are no faster in the backward, where 2 are up to 10% slower (2048 x 65536, RMSNorm); a short-lived CTA of the
# forward is done sooner with 2: 8192 x 8192 66.7 us and 70.2 us with 3.
RING_STAGES = {"backward": 3, "forward": 2}
# Of a thread from shared memory, by norm. With twice as many LayerNorm, with half RMSNorm is 1 to 3% slower; a thread
# of LayerNorm that has no more than 8 had better read them at once (1024 columns, backward: 56.7 us and 58.1 us).
RING_COLUMNS_PER_LOAD = {"layer": 4, "rms": 8}
COLUMNS_AT_ONCE = 8
BUSY_WARPS = 8  # on an SM: 4 in each of two CTAs, one of which works while the other waits for a row sum, or 8 in one
# Short-lived CTAs where several run on an SM: SMs do not run equally fast, 42 to 47 us for the same work, and who is
# fast gets more of it. 3 to 5% in the forward (RMSNorm, 1024 to 32768 columns).
FORWARD_WAVES = 16
MAX_COLUMNS_PER_THREAD = 32
# 8 rows of 1024 columns take 39.4 us in the forward where 4 take 35.6 (LayerNorm); in the backward they win at 768.
MAX_ROWS_PER_TILE = {"backward": 8, "forward": 4}
# A thread holds the parameters of so many columns in registers; of more, they are faster in shared memory.
MAX_COLUMNS_WITH_WEIGHT = {"backward": 32, "forward": 20}
MAX_PRODUCED_COPIES = {1: 6, 2: 4}  # by groups; of more, the producer cannot hold the addresses in its 24 registers
CLUSTERS = (1, 2, 4, 8, 16)  # CTAs that share a row too wide for one
CLUSTER_ARCHS = (90, 100, 103)

COLUMN_TILE = 1024
# Of a backward without dx by TMA: the one tile that was measured, others are to be.
COLUMN_RING_CHUNK = 128
COLUMN_RING_ROWS = (64, 32, 16)
COLUMN_RING_WARPS = 8


# --- Rows in registers, and what does not fit there ---


def multi_wave(problem: NormProblem, device: DeviceSpec) -> Plan:
    """The best plan that holds rows in registers, or one by column tiles."""
    if problem.direction == "backward" and not problem.wants_dx:
        return column_tile_plan(problem, device)  # no row sum is needed: a plain reduction over rows
    plans = multiwave_plans(problem, device)
    return max(plans, key=lambda plan: multiwave_key(problem, plan), default=None) or column_tile_plan(problem, device)


def multiwave_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[MultiWavePlan]:
    """Every plan within the budgets whose threads load 8 bytes or more at once."""
    elements_at_once = 8 // problem.x_dtype.itemsize
    for num_warps, rows_per_tile in itertools.product(WARPS, powers_of_two(1, 128)):
        threads = 32 * num_warps
        for chunk, num_chunks in chunkings(problem.cols, MIN_MULTIWAVE_CHUNK, MAX_CHUNKS):
            if rows_per_tile * chunk < elements_at_once * threads:
                continue
            registers = budget.multiwave_registers(rows_per_tile, chunk, num_chunks, num_warps, problem, device)
            room = min(device.registers_per_sm // registers, device.max_threads_per_sm) // threads
            if registers <= budget.MAX_REGISTERS and room:
                tile_bytes = rows_per_tile * problem.cols * bytes_per_element(problem)
                enough = max(warps_per_sm(problem) / num_warps, BYTES_IN_FLIGHT_PER_SM / tile_bytes)
                ctas_per_sm = min(room, math.ceil(enough))
                limit = budget.register_limit(threads * ctas_per_sm, device)
                yield MultiWavePlan(rows_per_tile, chunk, num_chunks, num_warps, ctas_per_sm, limit)


def multiwave_key(problem: NormProblem, plan: MultiWavePlan) -> tuple:
    """Larger is better: little padding; enough bytes in flight and enough warps, which registers trade for each other;
    then chunks of the size that was fastest."""
    bytes_in_flight = plan.ctas_per_sm * plan.rows_per_tile * problem.cols * bytes_per_element(problem)
    warps = plan.ctas_per_sm * plan.num_warps
    return (
        -max(TOLERATED_PADDING, plan.chunk * plan.num_chunks / problem.cols),
        min(bytes_in_flight, BYTES_IN_FLIGHT_PER_SM) * min(warps, warps_per_sm(problem)),
        -distance(plan.chunk, NARROW_CHUNK if problem.cols <= NARROW_COLUMNS else MULTIWAVE_CHUNK),
        -plan.num_warps,
        -plan.rows_per_tile,
    )


def warps_per_sm(problem: NormProblem) -> int:
    narrow = NARROW_WARPS_PER_SM.items() if problem.direction == "backward" else ()
    return next((warps for most, warps in narrow if problem.cols <= most), MULTIWAVE_WARPS_PER_SM)


def column_tile_plan(problem: NormProblem, device: DeviceSpec) -> ColumnTilePlan:
    """For rows that fit no registers. The pass over whole rows has a CTA for each."""
    whole, fp64 = 1 << max(4, (problem.cols - 1).bit_length()), problem.acc_dtype.itemsize == 8
    chunk = min(COLUMN_TILE, whole)
    # On sm_120 some builds spill 8 bytes, whatever registers they may have: not those with fewer elements a thread.
    num_warps = 8 if fp64 or device.arch >= 120 else 4
    if problem.direction == "backward":
        row_pass = 4096, 8
    else:  # the one is up to 35% slower below, the other above (LayerNorm, H200, bfloat16, 2026-11-20)
        row_pass = (2048, 8) if problem.cols <= 16384 else (8192 if device.arch < 120 else 4096, 16)
    row_pass_chunk, row_pass_warps = row_pass
    if fp64:
        row_pass_chunk = 8 * 32 * row_pass_warps  # 8 elements a thread; of 4 it spills on sm_90
    # On sm_80 a thread takes up to 131 registers, of which four CTAs of four warps have no more than 128.
    rows_per_tile, ctas_per_sm = COLUMN_TILE // chunk, 2 if num_warps == 8 else 3 if device.arch < 90 else 4
    return ColumnTilePlan(rows_per_tile, chunk, num_warps, ctas_per_sm, min(row_pass_chunk, whole), row_pass_warps)


# --- Rings ---


def pipelined(problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | ColumnRingPlan | None:
    """The best plan that fits shared memory, faults or not; None if even one stage is too large."""
    if problem.direction == "backward" and not problem.wants_dx:
        return column_ring_plan(problem, device)
    return _best_ring(pipelined_plans(problem, device), problem, device)


def pipelined_alone(problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """The best plan with rows in one CTA each, on the threads that are fastest; None if that is too much for them."""
    plans = (plan for plan in pipelined_plans(problem, device) if plan.cluster == 1)
    plan = _best_ring(plans, problem, device)
    return plan if plan is not None and all(ring_key(plan, problem, device)[:3]) else None


def column_ring_plan(problem: NormProblem, device: DeviceSpec) -> ColumnRingPlan | None:
    """Two CTAs on an SM, with as large a tile as fits."""
    limit = budget.register_limit(32 * COLUMN_RING_WARPS * 2, device)
    stages = RING_STAGES["backward"]
    plans = (
        ColumnRingPlan(rows, COLUMN_RING_CHUNK, stages, COLUMN_RING_WARPS, 2, limit) for rows in COLUMN_RING_ROWS
    )
    return next((plan for plan in plans if budget.fits_shared_memory(plan, problem, device)), None)


def warp_specialized(problem: NormProblem, device: DeviceSpec) -> WarpSpecializedPlan | None:
    """As `pipelined`."""
    return _best_ring(warp_specialized_plans(problem, device), problem, device)


def _best_ring(plans: Iterator[RingPlan], problem: NormProblem, device: DeviceSpec) -> RingPlan | None:
    ranked = sorted(plans, key=lambda plan: ring_key(plan, problem, device), reverse=True)
    return next((plan for plan in ranked if budget.fits_shared_memory(plan, problem, device)), None)


def pipelined_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[PipelinedPlan]:
    forward = problem.direction == "forward"
    for num_warps, ctas_per_sm, cluster in itertools.product(WARPS, (1, 2), cluster_sizes(device)):
        limit = budget.register_limit(32 * num_warps * ctas_per_sm, device)
        waves = FORWARD_WAVES if forward and ctas_per_sm > 1 else 1
        stages = range(1, RING_STAGES[problem.direction] + 1)
        tiles = ring_tiles(problem, num_warps, cluster)
        for (tile, copy_chunks), num_stages, in_smem in itertools.product(tiles, stages, (False, True)):
            yield PipelinedPlan(*tile, num_stages, num_warps, ctas_per_sm, limit, in_smem, cluster, copy_chunks, waves)


def warp_specialized_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[WarpSpecializedPlan]:
    """A tile is never cached in registers: these are short, stages are not."""
    for num_groups, num_warps in ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8)):
        limit = budget.group_register_limit(num_groups, num_warps, device)
        stages = (1, 2, 3) if num_groups == 1 else (2, 4)
        tiles = ring_tiles(problem, num_warps, 1)
        for (tile, copy_chunks), num_stages, in_smem in itertools.product(tiles, stages, (False, True)):
            plan = WarpSpecializedPlan(*tile, num_stages, num_groups, num_warps, 1, limit, in_smem, False, copy_chunks)
            if num_copies(plan) <= MAX_PRODUCED_COPIES[num_groups]:
                yield plan


def cluster_sizes(device: DeviceSpec) -> tuple[int, ...]:
    return CLUSTERS if device.arch in CLUSTER_ARCHS else (1,)


def ring_tiles(problem: NormProblem, num_warps: int, cluster: int) -> Iterator[tuple[tuple[int, int, int], int]]:
    """(rows_per_tile, chunk, num_chunks) of up to 64 elements a thread, of which each is a column of its own; and the
    chunks of a copy: several only where they are all whole."""
    threads = 32 * num_warps
    for chunk, num_chunks in chunkings(-(-problem.cols // cluster), threads, MAX_RING_CHUNKS):
        most_rows = min(64 * threads // (chunk * num_chunks), MAX_BOX_SIDE if cluster == 1 else 2)
        boxes = cluster * chunk // math.gcd(problem.cols, chunk, MAX_BOX_SIDE)  # of a chunk
        most_chunks = 1 << (num_chunks - 1).bit_length() if problem.cols % (cluster * chunk) == 0 else 1
        if most_rows and boxes <= MAX_BOX_SIDE:
            for rows_per_tile, copy_chunks in itertools.product(
                powers_of_two(1, most_rows), powers_of_two(1, most_chunks)
            ):
                yield (rows_per_tile, chunk, num_chunks), copy_chunks


def ring_key(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> tuple:
    """Larger is better: no fault; a row that is not too much for its threads; a full ring; little padding; as many
    bytes to an SM and to a thread as are fastest; few copies; a row in one CTA, if it has company; two streams of tiles
    on an SM; few CTAs to a row; then as little as will do.

    Company is another CTA on the SM, or in the backward a tile that fills threads which hold few columns each. With
    half a row in each of two CTAs instead, 1024 x 4096 takes 3 to 8% longer; but 2048 x 8192, where threads would hold
    32 columns, 4% less (LayerNorm 31.1 us and 32.4 us).
    """
    streams = plan.ctas_per_sm if isinstance(plan, PipelinedPlan) else plan.num_groups
    threads = 32 * plan.num_warps
    columns = plan.chunk * plan.num_chunks  # of one CTA
    row_bytes = columns * bytes_per_element(problem)
    stage_bytes = streams * plan.rows_per_tile * row_bytes
    tile_bytes, backward = plan.rows_per_tile * row_bytes, problem.direction == "backward"
    fills_threads = tile_bytes >= RING_BYTES_PER_THREAD * threads and columns < MAX_COLUMNS_PER_THREAD * threads
    has_company = streams == 2 or (backward and fills_threads)
    at_once = backward and columns <= COLUMNS_AT_ONCE * threads
    few = backward and plan.cluster == 1 and columns < FEW_COLUMNS
    bytes_per_thread = RING_BYTES_PER_THREAD_OF_FEW if few else RING_BYTES_PER_THREAD
    columns_per_load = COLUMNS_AT_ONCE if at_once else RING_COLUMNS_PER_LOAD[problem.norm]
    return (
        plan.num_stages > 1 and budget.registers(plan, problem, device) <= plan.max_registers,
        row_bytes <= RING_BYTES_PER_THREAD * threads and columns <= MAX_COLUMNS_PER_THREAD * threads,
        streams * plan.num_warps == BUSY_WARPS,
        min(plan.num_stages, RING_STAGES[problem.direction]),
        -max(TOLERATED_PADDING, plan.cluster * columns / problem.cols),
        -max(MAX_ROWS_PER_TILE[problem.direction], plan.rows_per_tile),
        min(stage_bytes, RING_STAGE_BYTES_PER_SM),
        -distance(tile_bytes / threads, bytes_per_thread),
        -num_copies(plan),
        min(plan.rows_per_tile, 2) if plan.cluster == 1 and has_company else 0,
        streams,
        -plan.cluster,
        -stage_bytes,
        plan.weight_in_smem == (columns > MAX_COLUMNS_WITH_WEIGHT[problem.direction] * threads),
        -distance(plan.chunk / threads, columns_per_load),
        -plan.copy_chunks,
    )


# --- Common ---


def chunkings(cols: int, smallest: int, most: int) -> Iterator[tuple[int, int]]:
    """(chunk, num_chunks) that cover cols, chunk a power of two of at least `smallest`, at most `most` of them."""
    for chunk in powers_of_two(smallest, max(smallest, 1 << (cols - 1).bit_length())):
        num_chunks = -(-cols // chunk)
        if num_chunks <= most:
            yield chunk, num_chunks


def bytes_per_element(problem: NormProblem) -> int:
    """Of x and, in the backward, the gradient."""
    return problem.x_dtype.itemsize + (problem.grad_dtype.itemsize if problem.direction == "backward" else 0)


def powers_of_two(first: int, last: int) -> list[int]:
    return [1 << exponent for exponent in range((first - 1).bit_length(), last.bit_length())]


def distance(value: float, target: float) -> float:
    """In doublings."""
    return abs(math.log2(value / target))
