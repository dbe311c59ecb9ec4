"""Plans worth considering, variant by variant, and the key that picks one of them.

The numbers aimed at were found on an H200 (bfloat16, 64 to 262144 columns; bench/results/2026-11-20-nvidia-h200-sweep,
-rings, -rows-apart and -widths.jsonl, 2026-11-21-nvidia-h200-plans, -tiles-of-a-cta and -widths.jsonl). Of the plans
swept there the keys choose one within 8% of the fastest, 3% on the average. Other GPUs are planned for by the same
arithmetic with their own resources.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

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
    columns_of_a_thread,
    is_whole,
    num_copies,
    rows_of_a_thread,
    threads_of_a_row,
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
MULTIWAVE_SHORT_CTAS = 1  # on an SM, of few rows: 2048 x 2048 takes 17.9 us and 25.2 with four (LayerNorm backward)
MIN_MULTIWAVE_CHUNK = 16  # columns; below it, a load of one chunk is for many short pieces of memory
MULTIWAVE_CHUNK = 1024  # columns; faster than 512 by 2 to 5%, than 2048 by 1 to 6%, than 4096 by 2 to 9%
# What a thread has of a row tile at most, in bytes of x and its gradient, and in columns, of which the backward holds
# two sums each. It gets as many as are allowed: with half as many, a row's sums cost twice as much (3000 x 9216: 48.3
# us with 36, 53.0 us with 18).
RING_BYTES_PER_THREAD, MAX_COLUMNS_PER_THREAD = 144, 36
# RMSNorm, which has no sums of db, of rows for as many threads: 16384 x 10240 takes 243 us with 40 columns and 255 with
# 20 over twice as many CTAs, 4096 x 5120 35.8 us and 37.0. But 16384 x 1280 41.4 us so and 36.8 with 20.
RING_BYTES_OF_RMS, MAX_COLUMNS_OF_RMS, THREADS_OF_RMS = 160, 40, 128
# Of the forward: of a row that one or two warps have, that four have, and of two rows in a cluster. In a cluster the
# most rather than 16 CTAs (LayerNorm 2048 x 65536: 136 us by 8 and 139 us; but RMSNorm 132 us and 130 us), and of
# these with one row each (LayerNorm 2048 x 73728: 153 us and 173 us).
FORWARD_COLUMNS_PER_THREAD, FORWARD_COLUMNS_ALONE, FORWARD_COLUMNS_IN_CLUSTER = 64, 40, 36
FORWARD_THREADS_APART, LARGEST_FORWARD_CLUSTER = 64, 8
# LayerNorm, one row whose parameters are in registers, so that tiles are all that is read from shared memory. 4096 x
# 5120 takes 23.9 us, with parameters in shared memory 24.4; 8192 x 11264 94.9 us, by two rows in twice as many CTAs
# 110; 1024 x 12288 16.5 us and 18.4. But 8192 x 14336, 56 columns of a thread, 119 us and 115; a row that ends within
# a chunk, 8192 x 4864, 45.7 us and 42.3 (by shared memory, as many CTAs); eight CTAs, 2048 x 40960, 87.7 us and 83.0.
# float32 8192 x 4096 64.3 us and 67.2, by shared memory.
FORWARD_COLUMNS_OF_ONE_ROW, FORWARD_STREAMS_OF_ONE_ROW = 48, 3
FORWARD_COLUMNS = 45  # aimed at: between 32, at 512 to 2048 columns, and 64, at 4096
# RMSNorm's forward up to this width: one stage and one tile for each CTA, so that more of them are on an SM. 8192 x
# 8192 takes 65.9 us and 67.4 by two stages, 1024 x 4096 8.4 us and 8.9, 8192 x 16384 129 us and 133; but 2048 x 32768
# 69.8 us and 67.6. LayerNorm, whose CTAs load two parameters: 8192 x 8192 70.8 us and 67.1.
# Nor where two CTAs have too few elements of a row: 8192 x 10240 takes 87.5 us and 85.3 by two stages, 4096 x 12288
# 51.7 us and 50.5.
ONE_TILE_COLUMNS, TOO_FEW_FOR_TWO_CTAS = 16384, range(9217, 14336)
ELEMENTS_OF_ONE_TILE, ELEMENTS_OF_ONE_IN_CLUSTER = 32, 64  # of a thread; 4096 x 8448 36.0 us with 72 and 39.8 with 36
# Streams of tiles on an SM, each of four warps, one of which works while others wait for a row sum. Three in the
# backward where a thread has so few bytes of a tile that the registers suffice: 16384 x 1280 takes 36.8 us and 41.4 us
# with two, 16384 x 2560 66.2 us and 69.0 us; but 16384 x 3072 79.1 us and 77.2 us. LayerNorm in a cluster, which waits
# for longer, with a few more: 4096 x 12288 80.1 us and 83.2 us.
STREAMS = {"backward": 2, "forward": 4}
THREE_STREAMS_BYTES, THREE_STREAMS_BYTES_IN_CLUSTER = 80, 96
# In the forward, where all warps have a row together: 4096 x 5120 takes 24.1 us and 24.9 us with four. And LayerNorm in
# a cluster: 2048 x 8192 20.0 us and 20.7 us with four; but RMSNorm 8192 x 6144 52.0 us and 50.2 us with four.
FORWARD_STREAMS_OF_WHOLE_CTAS = 2
# Two where these bring so much to an SM, but in larger clusters: 2048 x 65536 is up to 10% slower with two (RMSNorm). A
# short-lived CTA of the forward is done sooner with two: 8192 x 8192 66.7 us and 70.2 us with three.
RING_STAGES = {"backward": 3, "forward": 2}
RING_BYTES_PER_SM, LARGEST_CLUSTER_OF_TWO_STAGES = 60 * 1000, 2
# 2048 x 131072: 401 us and 410 us with three (RMSNorm); 1024 x 262144 443 us and 440 us (LayerNorm).
RING_BYTES_PER_SM_IN_CLUSTER = 120 * 1000
# That a thread has of one chunk: RMSNorm 8192 x 16384 takes 198 us with 8 and 206 us with 4, LayerNorm 192 us with 4
# and 201 us with 8. More than 4 where threads have few columns; and narrow rows are one chunk: 128 columns take 19.9 us
# so and 20.7 us by two (LayerNorm backward), 1024 columns 35.0 us and 35.8 us by four (LayerNorm forward).
RING_COLUMNS_PER_CHUNK = {"layer": 4, "rms": 8}
WHOLE_COLUMNS, MANY_COLUMNS_PER_CHUNK = 1024, 8
# Each copy of a tile is asked for and waited for by itself: 16384 x 8448 takes 481 us by nine chunks of a copy each,
# no more than 297 us by three, which have room for half as many columns again, and 208 us by two, of eight whole chunks
# and of the one within which the row ends (LayerNorm).
TOLERATED_COPIES = 3
# Chunks that a tile has room for, for each of its own: in the forward, nine take two copies and not room for sixteen
# (16384 x 9216: 148 us and 164 us; but backward 6000 x 2304 29.0 us and 27.7; LayerNorm).
TOLERATED_ROOM = {"backward": 2, "forward": 1.7}
# Nor in a cluster three, of 8 columns a thread at least, room for four (LayerNorm forward 4096 x 12288: 51.5 us and
# 53.5; 2048 x 98304 204 us and 222; 2048 x 196608 452 us and 493), unless more CTAs than these have two rows (4096 x
# 24576: 110 us and 107).
SMALL_CLUSTER = 4
# A thread holds the parameters of so many columns in registers; of more, they are faster in shared memory (forward of
# 8192 x 10240, 20 columns a thread: 85.6 us and 89.3; LayerNorm).
MAX_COLUMNS_WITH_WEIGHT = {"backward": 32, "forward": 16}
MAX_ROWS_PER_WARP = 8  # of 4 lanes each; with 2 lanes 131072 x 64 takes 20.9 us and 20.5 us (LayerNorm backward)
# Of the one CTA on an SM that a few rows get: half as many partials to sum as of two CTAs.
SHORT_WALK_WARPS, MAX_SHORT_ROWS = 8, 4
MAX_PRODUCED_COPIES = {1: 6, 2: 2}  # by groups; of more, the producer cannot hold the addresses in its 24 registers
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


def multi_wave_short(plan: MultiWavePlan, problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """What leaves fewer partials where CTAs get few tiles."""
    if not (problem.wants_dx and (problem.wants_dw or problem.wants_db)) or plan.ctas_per_sm <= MULTIWAVE_SHORT_CTAS:
        return None
    limit = budget.register_limit(32 * plan.num_warps * MULTIWAVE_SHORT_CTAS, device)
    return replace(plan, ctas_per_sm=MULTIWAVE_SHORT_CTAS, max_registers=limit)


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


def pipelined_short(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """What had better take the place of the best plan where CTAs get few tiles, if anything: in the backward one CTA on
    an SM, which leaves fewer partials; in LayerNorm's forward one row whose parameters are in registers, over half as
    many CTAs where it was two; or, where all tiles run at once, one stage."""
    forward, wanted = problem.direction == "forward", {"num_stages": 2}
    if not forward:
        wanted |= {"cluster": 1, "ctas_per_sm": 1, "num_warps": SHORT_WALK_WARPS}
    elif problem.norm == "layer" and (plan.cluster > 1 or plan.rows_per_tile == 1):
        two = plan.rows_per_tile == 2
        wanted |= {"cluster": plan.cluster // (1 + two), "ctas_per_sm": 2 if two else FORWARD_STREAMS_OF_ONE_ROW}
        wanted |= {"rows_per_tile": 1, "num_warps": plan.num_warps, "weight_in_smem": False}
    plans = (each for each in pipelined_plans(problem, device) if wanted.items() <= vars(each).items())
    short = _best_ring(plans, problem, device) if len(wanted) > 1 else None
    if short is not None:
        fits, not_too_much = ring_key(short, problem, device)[:2]
        # Of 36 columns a thread LayerNorm's backward is up to 23% slower so, RMSNorm's by narrow rows up to 12%.
        slower = short.weight_in_smem and (problem.norm == "layer" or short.rows_per_tile > MAX_SHORT_ROWS)
        if fits and (forward or (not_too_much and not slower)):
            return short
    return replace(plan, num_stages=1) if forward and plan.short_lived and plan.num_stages > 1 else None


def column_ring_plan(problem: NormProblem, device: DeviceSpec) -> ColumnRingPlan | None:
    """Two CTAs on an SM, with as large a tile as fits."""
    limit = budget.register_limit(32 * COLUMN_RING_WARPS * 2, device)
    stages = RING_STAGES["backward"]
    plans = (ColumnRingPlan(rows, COLUMN_RING_CHUNK, stages, COLUMN_RING_WARPS, 2, limit) for rows in COLUMN_RING_ROWS)
    return next((plan for plan in plans if budget.fits_shared_memory(plan, problem, device)), None)


def warp_specialized(problem: NormProblem, device: DeviceSpec) -> WarpSpecializedPlan | None:
    """As `pipelined`."""
    return _best_ring(warp_specialized_plans(problem, device), problem, device)


def _best_ring(plans: Iterator[RingPlan], problem: NormProblem, device: DeviceSpec) -> RingPlan | None:
    ranked = sorted(plans, key=lambda plan: ring_key(plan, problem, device), reverse=True)
    return next((plan for plan in ranked if budget.fits_shared_memory(plan, problem, device)), None)


def pipelined_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[PipelinedPlan]:
    forward = problem.direction == "forward"
    streams = (1, 2, 3, 4) if forward else (1, 2, 3)
    for num_warps, ctas_per_sm, cluster in itertools.product(WARPS, streams, cluster_sizes(device)):
        limit = budget.register_limit(32 * num_warps * ctas_per_sm, device)
        short_lived = forward and ctas_per_sm > 1  # 3 to 5% faster (RMSNorm, 1024 to 32768 columns)
        stages = range(1, RING_STAGES[problem.direction] + 1)
        tiles = ring_tiles(problem, num_warps, cluster)
        for (tile, copies), num_stages, in_smem in itertools.product(tiles, stages, (False, True)):
            depth = num_stages, num_warps, ctas_per_sm, limit, in_smem, cluster
            plan = PipelinedPlan(*tile, *depth, copies.chunks, short_lived, copies.tail)
            if not forward or ctas_per_sm != FORWARD_STREAMS_OF_ONE_ROW or not in_smem:
                yield plan


def warp_specialized_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[WarpSpecializedPlan]:
    """A tile is never cached in registers: these are short, stages are not."""
    for num_groups, num_warps in ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8)):
        limit = budget.group_register_limit(num_groups, num_warps, device)
        stages = (1, 2, 3) if num_groups == 1 else (2, 4)
        tiles = ring_tiles(problem, num_warps, 1)
        for (tile, copies), num_stages, in_smem in itertools.product(tiles, stages, (False, True)):
            depth = num_stages, num_groups, num_warps, 1, limit, in_smem
            plan = WarpSpecializedPlan(*tile, *depth, False, copies.chunks)
            if not copies.tail and num_copies(plan) <= MAX_PRODUCED_COPIES[num_groups]:
                yield plan


def cluster_sizes(device: DeviceSpec) -> tuple[int, ...]:
    return CLUSTERS if device.arch in CLUSTER_ARCHS else (1,)


class Copies(NamedTuple):
    """How a tile comes: so many chunks to a copy, and whether the last of all in a copy of its own."""

    chunks: int
    tail: bool


def ring_tiles(problem: NormProblem, num_warps: int, cluster: int) -> Iterator[tuple[tuple[int, int, int], Copies]]:
    """(rows_per_tile, chunk, num_chunks) of up to 64 elements a thread, of which each is a column of its own but for
    the two rows of a forward in a cluster; and how they come: several to a copy only if they are whole."""
    apart = powers_of_two(1, MAX_ROWS_PER_WARP * num_warps)
    for rows_per_tile in apart if cluster == 1 else (1, 2) if problem.direction == "forward" else (1,):
        threads = 32 * num_warps * rows_of_a_thread(rows_per_tile, cluster) // rows_per_tile
        for chunk, num_chunks in chunkings(-(-problem.cols // cluster), threads, MAX_RING_CHUNKS):
            boxes = cluster * chunk // math.gcd(problem.cols, chunk, MAX_BOX_SIDE)  # of a chunk
            whole = problem.cols // (cluster * chunk)
            if chunk * num_chunks <= 64 * threads and boxes <= MAX_BOX_SIDE:
                tile, room = (rows_per_tile, chunk, num_chunks), 1 << (whole - 1).bit_length()
                for copy_chunks in powers_of_two(1, room if whole == num_chunks else 1):
                    yield tile, Copies(copy_chunks, False)
                if 1 < whole < num_chunks:
                    yield tile, Copies(room, True)
                elif whole == num_chunks and room == 2 * (num_chunks - 1) > 2:
                    yield tile, Copies(num_chunks - 1, True)


def ring_key(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> tuple:
    """Larger is better: no fault; a tile that is not too much for its threads; not too many copies; little padding; few
    warps to a tile; few CTAs to a row; one reduction for mean and variance, which takes whole rows; few copies; as many
    streams of tiles on an SM as are fastest; a row to few threads; a ring that is full enough; then as little as will
    do."""
    forward = problem.direction == "forward"
    streams = plan.ctas_per_sm if isinstance(plan, PipelinedPlan) else plan.num_groups
    threads, columns = threads_of_a_row(plan), columns_of_a_thread(plan)
    rows = rows_of_a_thread(plan.rows_per_tile, plan.cluster)
    bytes_of_thread = rows * columns * bytes_per_element(problem)
    in_cluster = 1 < plan.cluster and (problem.norm == "rms" or plan.cluster <= LARGEST_FORWARD_CLUSTER)
    several_rows = plan.rows_per_tile > 1 and (in_cluster or threads <= FORWARD_THREADS_APART)
    few_threads = problem.cols / plan.cluster / threads
    if forward:
        few_threads = several_rows, -distance(columns, FORWARD_COLUMNS)
    streams_and_threads = -abs(streams - _streams(plan, problem, bytes_of_thread)), few_threads
    # LayerNorm forward 16384 x 4608, by chunks that are a row and by fewer that are not: 73.1 us and 78.3.
    merges_moments = not forward or problem.norm == "rms" or is_whole(plan, problem.cols)
    one_tile = _has_one_tile(problem)
    if one_tile:
        target = ELEMENTS_OF_ONE_IN_CLUSTER if plan.cluster > 1 else ELEMENTS_OF_ONE_TILE
        streams_and_threads = -distance(rows * columns, target), streams
    stages = _ring_stages(plan, problem, streams * 2 * 32 * plan.num_warps * bytes_of_thread)
    return (
        (plan.num_stages > 1 or one_tile) and budget.registers(plan, problem, device) <= plan.max_registers,
        bytes_of_thread <= _most_bytes(plan, problem) and columns <= _most_columns(plan, problem),
        -max(TOLERATED_COPIES, num_copies(plan)),
        -max(TOLERATED_PADDING, plan.cluster * plan.chunk * plan.num_chunks / problem.cols),
        -plan.num_warps,
        -plan.cluster,
        merges_moments,
        -_cost_of_copies(plan, problem),
        streams_and_threads,
        min(plan.num_stages, stages),
        -plan.num_stages,
        plan.weight_in_smem == (columns > _most_columns_with_weight(plan, problem)),
        -distance(plan.chunk, _ring_chunk(plan, problem)),
        -plan.copy_chunks,
    )


def _cost_of_copies(plan: RingPlan, problem: NormProblem) -> float:
    """Of each tensor's that make a tile: how many there are, but less where two are faster than one, and more where
    they leave much of the room empty."""
    room = plan.copy_chunks + 1 if plan.tail else plan.copy_chunks * num_copies(plan)
    if room > TOLERATED_ROOM[problem.direction] * plan.num_chunks:
        return TOLERATED_COPIES
    if _is_better_by_two(plan, problem) and plan.tail and is_whole(plan, problem.cols):
        return 0.5
    return num_copies(plan)


def _is_better_by_two(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether a row of a few large chunks had better come in two copies."""
    layer_forward = problem.norm == "layer" and problem.direction == "forward"
    large = plan.cluster > 1 and plan.chunk >= MANY_COLUMNS_PER_CHUNK * threads_of_a_row(plan)
    if plan.rows_per_tile == 1:
        many = columns_of_a_thread(plan) > FORWARD_COLUMNS_IN_CLUSTER
        return layer_forward and large and many and not _is_one_row(plan, problem)
    return layer_forward and large and plan.cluster <= SMALL_CLUSTER


def _has_much_of_rms(plan: RingPlan, problem: NormProblem) -> bool:
    return problem.norm == "rms" and problem.direction == "backward" and threads_of_a_row(plan) >= THREADS_OF_RMS


def _most_bytes(plan: RingPlan, problem: NormProblem) -> int:
    """Of x and its gradient, that a thread had better have."""
    return RING_BYTES_OF_RMS if _has_much_of_rms(plan, problem) else RING_BYTES_PER_THREAD


def _most_columns(plan: RingPlan, problem: NormProblem) -> int:
    """That a thread had better have."""
    if problem.direction == "backward":
        return MAX_COLUMNS_OF_RMS if _has_much_of_rms(plan, problem) else MAX_COLUMNS_PER_THREAD
    threads = threads_of_a_row(plan)
    too_wide = problem.norm == "layer" and problem.cols > LARGEST_FORWARD_CLUSTER * threads * FORWARD_COLUMNS_IN_CLUSTER
    if threads <= FORWARD_THREADS_APART or too_wide or _has_one_tile(problem):
        return FORWARD_COLUMNS_PER_THREAD
    if _is_one_row(plan, problem):
        return FORWARD_COLUMNS_OF_ONE_ROW
    return FORWARD_COLUMNS_IN_CLUSTER if plan.cluster > 1 else FORWARD_COLUMNS_ALONE


def _has_one_tile(problem: NormProblem) -> bool:
    """Whether a CTA had better have one tile only."""
    narrow = problem.cols <= ONE_TILE_COLUMNS and problem.cols not in TOO_FEW_FOR_TWO_CTAS
    return problem.direction == "forward" and problem.norm == "rms" and narrow


def _is_one_row(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether it is a tile of LayerNorm's forward whose threads had better hold its parameters than a second row."""
    if problem.norm == "rms" or problem.direction == "backward" or plan.rows_per_tile > 1:
        return False
    columns, whole = columns_of_a_thread(plan), is_whole(plan, problem.cols)
    if problem.x_dtype.itemsize == 2:
        least, most = FORWARD_COLUMNS_ALONE + (plan.cluster == 1 and not whole), FORWARD_COLUMNS_OF_ONE_ROW
    else:  # there is no room for a second row anyway
        least, most = 0 if whole else math.inf, FORWARD_COLUMNS_IN_CLUSTER
    return least <= columns <= most and plan.cluster <= SMALL_CLUSTER


def _most_columns_with_weight(plan: RingPlan, problem: NormProblem) -> int:
    """Whose parameters a thread had better have in registers."""
    return FORWARD_COLUMNS_OF_ONE_ROW if _is_one_row(plan, problem) else MAX_COLUMNS_WITH_WEIGHT[problem.direction]


def _streams(plan: RingPlan, problem: NormProblem, bytes_of_thread: float) -> int:
    """Row tiles that an SM had better work on at a time."""
    layer_in_cluster = problem.norm == "layer" and plan.cluster > 1
    if problem.direction == "forward":
        if _is_one_row(plan, problem):
            return FORWARD_STREAMS_OF_ONE_ROW
        alone = plan.cluster == 1 and plan.rows_per_tile == 1 and not _has_one_tile(problem)
        return FORWARD_STREAMS_OF_WHOLE_CTAS if alone or layer_in_cluster else STREAMS["forward"]
    most_bytes = THREE_STREAMS_BYTES_IN_CLUSTER if layer_in_cluster else THREE_STREAMS_BYTES
    return STREAMS["backward"] + (bytes_of_thread <= most_bytes and isinstance(plan, PipelinedPlan))


def _ring_stages(plan: RingPlan, problem: NormProblem, bytes_of_two: float) -> int:
    """Stages enough, of which two bring so many bytes to an SM."""
    if _has_one_tile(problem):
        return 1
    groups = plan.num_groups if isinstance(plan, WarpSpecializedPlan) else 1
    few_ctas = plan.cluster <= LARGEST_CLUSTER_OF_TWO_STAGES
    two = bytes_of_two >= (RING_BYTES_PER_SM if few_ctas else RING_BYTES_PER_SM_IN_CLUSTER)
    return groups * (2 if two else RING_STAGES[problem.direction])


def _ring_chunk(plan: RingPlan, problem: NormProblem) -> int:
    """The chunk that is fastest for the threads of a row."""
    threads = threads_of_a_row(plan)
    apart = plan.cluster == 1 and plan.rows_per_tile > 1
    if apart and problem.cols <= WHOLE_COLUMNS:
        return problem.cols
    few_registers = plan.ctas_per_sm > STREAMS["backward"] or plan.max_registers <= 128
    columns = RING_COLUMNS_PER_CHUNK[problem.norm]
    if apart or problem.direction == "forward" or (plan.cluster > 1 and few_registers):
        columns = MANY_COLUMNS_PER_CHUNK
    elif columns_of_a_thread(plan) == 3 * columns and problem.norm == "rms":
        columns //= 2  # 6144, 12288, 24576 columns: six chunks are up to 2% faster than three
    return threads * columns


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
