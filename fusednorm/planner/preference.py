"""Ranks the plans of one variant: sort keys, and the numbers at which these aim.

The numbers were fitted on an H200 (bfloat16, 64 to 262144 columns). Among the plans swept there the keys choose one
within 8% of the fastest, 3% on average; bench/NOTES.md names the exceptions, and its section "Evidence behind
constants" has the measurements. Plans for other GPUs come from the same arithmetic with the resources of that GPU.

Padding below is a ratio: the columns that the threads compute on, divided by the columns of the row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import budget
from .device import H200, DeviceSpec
from .norm_problem import NormProblem
from .plan import (
    MultiWavePlan,
    PipelinedPlan,
    RingPlan,
    WarpSpecializedPlan,
    columns_per_thread,
    is_whole,
    num_copies,
    padded_columns,
    rows_per_thread,
    threads_per_row,
    warps_of_a_row,
)
from .tile_share import (
    FEW_FORWARD_THREADS,
    FORWARD_COLUMNS_IN_CLUSTER,
    FORWARD_STREAMS_OF_ONE_ROW,
    LARGEST_FORWARD_CLUSTER,
    MANY_COLUMNS,
    MAX_COLUMNS_PER_THREAD,
    bytes_per_element,
    exceeds_thread_tile,
    has_many_warps,
    has_one_tile,
    is_one_row,
    prefers_weight_in_smem,
)

# Padding up to this ratio does not count against a plan.
TOLERATED_PADDING = 1.125
# Backward of rows in one chunk, with at most MOST_COLUMNS_OF_ONE_CHUNK columns per thread: such a row tolerates more
# padding. The row comes in one copy and is read 16 bytes per thread at a time, so its padding costs no memory traffic.
# The first ratio holds for one warp per row, the second for several.
TOLERATED_PADDING_OF_A_WARP, TOLERATED_PADDING_OF_WARPS, MOST_COLUMNS_OF_ONE_CHUNK = 1.6, 1.32, 32
# Backward of rows in several chunks without a cluster: fewer chunks are worth a little more padding.
TOLERATED_PADDING_OF_CHUNKS = 1.18
# Backward in a cluster: fewer warps over more CTAs are worth more padding. Among plans with equally many warps and
# CTAs, only TOLERATED_PADDING is tolerated.
TOLERATED_PADDING_FOR_FEW_WARPS = 1.165
# Warps per SM at which multi-wave plans aim. In a backward of narrow rows (keys: the most columns), fewer warps with
# more rows each leave fewer partials. Rows of at most NARROW_COLUMNS are faster in chunks of NARROW_CHUNK columns.
MULTIWAVE_WARPS_PER_SM = 16
NARROW_WARPS_PER_SM = {256: 8, 512: 12, 1024: 8}
NARROW_COLUMNS, NARROW_CHUNK = 256, 64
# Backward of one chunk where each thread loads 16 bytes of every row: dw and db need no exchange between threads, which
# would cost more than the padding does. The limits are the bytes of a row of x and the columns of padding. From 1025
# columns on, LayerNorm aims at WARPS_OF_ONE_CHUNK warps per SM for such rows; RMSNorm is slower that way and keeps
# MULTIWAVE_WARPS_PER_SM.
MOST_BYTES_OF_ONE_CHUNK, MAX_PADDING_COLUMNS, WARPS_OF_ONE_CHUNK = 4096, 768, 8
# Backward of narrow 16-bit rows, from NARROWEST_OF_TWO_WARPS columns on: CTAs have as few warps as the registers of
# these allow, and tiles of this many rows.
NARROWEST_OF_TWO_WARPS, ROWS_OF_FEW_WARPS = 321, {"layer": 2, "rms": 4}
MULTIWAVE_CHUNK = 1024  # columns
FORWARD_COLUMNS = 45  # per thread, to aim at: 32 are best for rows of 512 to 2048 columns, 64 for rows of 4096
ELEMENTS_OF_ONE_TILE, ELEMENTS_OF_ONE_IN_CLUSTER = 32, 64  # per thread, to aim at where a CTA has one tile
# Streams of tiles on an SM, of four warps each: one stream works while the others wait for a row sum. The backward
# takes a third stream where several warps add up a row, if a thread has few enough columns and bytes of a tile for the
# registers to suffice. RMSNorm in a cluster takes it up to fewer bytes.
STREAMS = {"backward": 2, "forward": 4}
MOST_GROUPS = 2  # compute groups of a warp-specialized CTA, which is alone on its SM
THREE_STREAMS_COLUMNS, THREE_STREAMS_BYTES, THREE_STREAMS_BYTES_OF_RMS_IN_CLUSTER = 24, 104, 80
# Streams of a forward where all warps of a CTA share one row, and of LayerNorm's forward in a cluster. RMSNorm's
# forward in a cluster is faster with four.
FORWARD_STREAMS_OF_WHOLE_CTAS = 2
# Stages per compute group. A short-lived CTA of the forward ends sooner with two.
RING_STAGES = {"backward": 3, "forward": 2}
# Two stages suffice for the backward if they bring this many bytes to an SM. Clusters larger than
# LARGEST_CLUSTER_OF_TWO_STAGES have limits of their own below. Two stages also suffice where a tile has several rows:
# there a third stage costs more at the start than it saves.
RING_BYTES_PER_SM, LARGEST_CLUSTER_OF_TWO_STAGES = 60 * 1000, 2
# Fewer bytes suffice for LayerNorm's 16-bit rows over two CTAs that end within a chunk. RMSNorm, and rows of whole
# chunks, are faster with a third stage there.
RING_BYTES_PER_SM_OF_PART = 48 * 1000
RING_BYTES_PER_SM_IN_CLUSTER = 98 * 1000  # the limit in larger clusters
RING_BYTES_PER_SM_OF_LAYER = 91 * 1000  # the same for LayerNorm's 16-bit rows with several CTAs on an SM
# Columns of one chunk per thread. MANY_COLUMNS_PER_CHUNK holds where threads have few columns in all; rows of at most
# WHOLE_COLUMNS columns are one chunk.
RING_COLUMNS_PER_CHUNK = {"layer": 4, "rms": 8}
WHOLE_COLUMNS, MANY_COLUMNS_PER_CHUNK = 1024, 8
# Copies per tensor and tile up to which a plan is not ranked lower. A CTA issues each copy and waits for it by itself,
# so many small copies are slow.
TOLERATED_COPIES = 3
# Most shared memory of a tile's copies, as a multiple of the tile. A plan beyond it ranks as if it had TOLERATED_COPIES
# copies.
TOLERATED_ROOM = {"backward": 2, "forward": 1.7}
# The limit for rows that end within a chunk, of CTAs with eight warps (in RMSNorm's backward also four). There, three
# chunks in two copies are faster than six chunks, and one copy of five chunks would take room for eight.
TOLERATED_ROOM_OF_WIDE_ROWS = 1.4
# Rank of two copies for LayerNorm's forward in a cluster by few large chunks (MANY_COLUMNS_PER_CHUNK columns per thread
# or more). Two copies beat one, which takes room for four chunks to bring three.
LESS_THAN_ONE_COPY = 0.5


def multiwave_rank(problem: NormProblem, plan: MultiWavePlan, device: DeviceSpec) -> tuple:
    """Rank of a multi-wave plan; larger is better.

    The order: each thread owns its columns, or else little padding; the product of bytes in flight and warps, each up
    to what an SM needs, because registers buy one or the other; a chunk near the fastest size; few warps, CTAs and
    rows. Narrow rows whose threads own their columns prefer ROWS_OF_FEW_WARPS rows per tile, then fewer warps.
    """
    owned = _owns_columns(plan, problem)
    if owned and may_have_few_warps(problem):
        return True, -distance(plan.rows_per_tile, ROWS_OF_FEW_WARPS[problem.norm]), -plan.num_warps
    bytes_in_flight = plan.ctas_per_sm * plan.rows_per_tile * problem.cols * bytes_per_element(problem)
    warps = plan.ctas_per_sm * plan.num_warps
    return (
        owned,
        0 if owned else -max(TOLERATED_PADDING, plan.chunk * plan.num_chunks / problem.cols),
        min(bytes_in_flight, device.bytes_in_flight_per_sm) * min(warps, warps_per_sm(problem)),
        -distance(plan.chunk, NARROW_CHUNK if problem.cols <= NARROW_COLUMNS else MULTIWAVE_CHUNK),
        -plan.num_warps,
        -plan.ctas_per_sm,
        -plan.rows_per_tile,
    )


def warps_per_sm(problem: NormProblem) -> int:
    """Warps on an SM at which a multi-wave plan aims."""
    if problem.direction == "forward":
        return MULTIWAVE_WARPS_PER_SM
    if may_have_few_warps(problem):
        return WARPS_OF_ONE_CHUNK
    one_chunk = problem.norm == "layer" and _may_be_one_chunk(problem)
    wide = WARPS_OF_ONE_CHUNK if one_chunk else MULTIWAVE_WARPS_PER_SM
    return next((warps for most, warps in NARROW_WARPS_PER_SM.items() if problem.cols <= most), wide)


def may_have_few_warps(problem: NormProblem) -> bool:
    """True for a backward of narrow 16-bit rows, which CTAs of as few as two warps may take."""
    narrow = NARROWEST_OF_TWO_WARPS <= problem.cols <= max(NARROW_WARPS_PER_SM)
    return problem.direction == "backward" and narrow and bytes_per_element(problem) == 4 and problem.tma_aligned


def _may_be_one_chunk(problem: NormProblem) -> bool:
    return problem.tma_aligned and problem.cols * problem.x_dtype.itemsize <= MOST_BYTES_OF_ONE_CHUNK


def _owns_columns(plan: MultiWavePlan, problem: NormProblem) -> bool:
    """True for a backward of one chunk in which every thread has 16 bytes of each row of the tile, so that one thread
    adds up each column."""
    if problem.direction == "forward" or not _may_be_one_chunk(problem):
        return False
    loaded = 16 // max(problem.x_dtype.itemsize, problem.grad_dtype.itemsize) * 32 * plan.num_warps
    return plan.rows_per_tile > 1 == plan.num_chunks and loaded <= plan.chunk <= problem.cols + MAX_PADDING_COLUMNS


class RingRank(NamedTuple):
    """Rank of a ring's plan. Larger is better, and earlier fields come first."""

    is_sound: bool  # enough stages and registers
    fits_threads: bool  # a tile is not too much for its threads
    copies_beyond_tolerated: float
    padding_for_few_warps: float  # a backward's cluster tolerates more padding for fewer warps
    warps: int  # of a CTA, or of a compute group
    ctas: float  # of a row; in the backward, divided by the rows of a tile
    padding: float
    merges_moments: bool  # one reduction takes both mean and variance, which needs whole rows
    copies: float
    streams_and_threads: tuple
    enough_stages: int
    no_more_stages: int
    weight_where_preferred: bool  # in shared memory exactly where a thread has too many columns for its registers
    chunk: float  # near the fastest size
    chunks_per_copy: int


def is_sound(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> bool:
    """True if a ring has stages enough to copy while it works, and registers enough not to spill."""
    one_tile = isinstance(plan, PipelinedPlan) and has_one_tile(problem)
    return (plan.num_stages > 1 or one_tile) and budget.registers(plan, problem, device) <= plan.max_registers


def ring_rank(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> RingRank:
    forward, columns = problem.direction == "forward", columns_per_thread(plan)
    rows = rows_per_thread(plan)
    padded = padded_columns(plan) / problem.cols
    # Positional, because this runs hundreds of times per problem.
    return RingRank(
        is_sound(plan, problem, device),
        not exceeds_thread_tile(plan, problem),
        -max(TOLERATED_COPIES, num_copies(plan)),
        -_padding(plan, problem, TOLERATED_PADDING_FOR_FEW_WARPS),
        -plan.num_warps,
        -plan.cluster if forward else -plan.cluster / rows,
        -_padding(plan, problem, TOLERATED_PADDING) if forward or columns <= MANY_COLUMNS else -padded,
        # LayerNorm's forward is faster by chunks that are exactly a row than by fewer chunks that are not.
        not forward or problem.norm == "rms" or is_whole(plan, problem.cols),
        -_cost_of_copies(plan, problem),
        _streams_and_threads(plan, problem),
        min(plan.num_stages, _ring_stages(plan, problem, device)),
        -plan.num_stages,
        plan.weight_in_smem == prefers_weight_in_smem(plan, problem),
        -distance(plan.chunk, _ring_chunk(plan, problem)),
        -plan.copy_chunks,
    )


def _streams_and_threads(plan: RingPlan, problem: NormProblem) -> tuple:
    """Larger is better: close to the preferred number of streams on an SM, then few threads per row (forward: several
    rows per tile, then columns per thread close to FORWARD_COLUMNS). Where each CTA has one tile: elements per thread
    close to the preferred number, then many streams."""
    columns, rows = columns_per_thread(plan), rows_per_thread(plan)
    if isinstance(plan, PipelinedPlan) and has_one_tile(problem):
        target = ELEMENTS_OF_ONE_IN_CLUSTER if plan.cluster > 1 else ELEMENTS_OF_ONE_TILE
        return -distance(rows * columns, target), plan.ctas_per_sm
    streams = -abs(_num_streams(plan) - _preferred_streams(plan, problem))
    if problem.direction == "backward":
        return streams, (rows, problem.cols / plan.cluster / threads_per_row(plan))
    few_ctas = problem.norm == "rms" or plan.cluster <= LARGEST_FORWARD_CLUSTER or has_many_warps(plan, problem)
    in_cluster = 1 < plan.cluster and few_ctas
    several_rows = plan.rows_per_tile > 1 and (in_cluster or threads_per_row(plan) <= FEW_FORWARD_THREADS)
    return streams, (several_rows, -distance(columns, FORWARD_COLUMNS))


def _num_streams(plan: RingPlan) -> int:
    """Row tiles on which an SM works at a time."""
    return plan.ctas_per_sm if isinstance(plan, PipelinedPlan) else plan.num_groups


def _bytes_per_thread(plan: RingPlan, problem: NormProblem) -> float:
    """Bytes of a row tile per thread, without the padding."""
    columns = problem.cols / plan.cluster / threads_per_row(plan)
    return rows_per_thread(plan) * columns * bytes_per_element(problem)


def _padding(plan: RingPlan, problem: NormProblem, in_cluster: float) -> float:
    """Padding of a row, or TOLERATED_PADDING if it is tolerated; `in_cluster` is the limit in a backward's cluster."""
    tolerated, padding = TOLERATED_PADDING, padded_columns(plan) / problem.cols
    one_chunk = plan.num_chunks == 1 and columns_per_thread(plan) <= MOST_COLUMNS_OF_ONE_CHUNK
    if problem.direction == "backward" and one_chunk:
        tolerated = TOLERATED_PADDING_OF_A_WARP if warps_of_a_row(plan) == 1 else TOLERATED_PADDING_OF_WARPS
    elif problem.direction == "backward":
        tolerated = TOLERATED_PADDING_OF_CHUNKS if plan.cluster == 1 else in_cluster
    return TOLERATED_PADDING if padding <= tolerated else padding


def _cost_of_copies(plan: RingPlan, problem: NormProblem) -> float:
    """Rank of the copies that bring one tensor's tile; smaller is better.

    It is their number, less where two are faster than one, and more where they leave much of their room empty.
    """
    room = plan.copy_chunks + 1 if plan.tail else plan.copy_chunks * num_copies(plan)
    tolerated = TOLERATED_ROOM[problem.direction]
    if not is_whole(plan, problem.cols) and _is_wide_row_of_copies(plan, problem):
        tolerated = TOLERATED_ROOM_OF_WIDE_ROWS
    if room > tolerated * plan.num_chunks:
        return TOLERATED_COPIES
    if _is_better_in_two_copies(plan, problem) and plan.tail and is_whole(plan, problem.cols):
        return LESS_THAN_ONE_COPY
    return num_copies(plan)


def _is_wide_row_of_copies(plan: RingPlan, problem: NormProblem) -> bool:
    """True if empty room in the copies costs time."""
    if plan.num_warps > 4:  # in large clusters, and on one-row tiles of many columns per thread
        return plan.cluster > 2 or (plan.rows_per_tile == 1 and columns_per_thread(plan) > MAX_COLUMNS_PER_THREAD)
    # On one-row tiles of RMSNorm's backward in large clusters.
    return plan.cluster > 2 and plan.rows_per_tile == 1 and problem.norm == "rms" and problem.direction == "backward"


def _is_better_in_two_copies(plan: RingPlan, problem: NormProblem) -> bool:
    """True if a row of a few large chunks is faster in two copies than in one."""
    one_row = problem.norm == "layer" and problem.direction == "forward" and plan.rows_per_tile == 1 < plan.cluster
    large = plan.chunk >= MANY_COLUMNS_PER_CHUNK * threads_per_row(plan)
    many = columns_per_thread(plan) > FORWARD_COLUMNS_IN_CLUSTER
    return one_row and large and many and not is_one_row(plan, problem) and not has_many_warps(plan, problem)


def _preferred_streams(plan: RingPlan, problem: NormProblem) -> int:
    if isinstance(plan, WarpSpecializedPlan):
        return MOST_GROUPS
    layer_in_cluster = problem.norm == "layer" and plan.cluster > 1
    if problem.direction == "forward":
        if has_many_warps(plan, problem):
            return 1
        if is_one_row(plan, problem):
            return FORWARD_STREAMS_OF_ONE_ROW
        whole_cta = plan.cluster == 1 and plan.rows_per_tile == 1 and not has_one_tile(problem)
        return FORWARD_STREAMS_OF_WHOLE_CTAS if whole_cta or layer_in_cluster else STREAMS["forward"]
    rms_in_cluster = plan.cluster > 1 and not layer_in_cluster
    most_bytes = THREE_STREAMS_BYTES_OF_RMS_IN_CLUSTER if rms_in_cluster else THREE_STREAMS_BYTES
    few = _bytes_per_thread(plan, problem) <= most_bytes and columns_per_thread(plan) <= THREE_STREAMS_COLUMNS
    return STREAMS["backward"] + (few and warps_of_a_row(plan) > 1)


def _ring_stages(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> int:
    """Stages that suffice, all compute groups together. The limits, which hold for an H200, scale with the bytes that
    the device's SMs need in flight."""
    if has_one_tile(problem) and isinstance(plan, PipelinedPlan):
        return 1
    groups = plan.num_groups if isinstance(plan, WarpSpecializedPlan) else 1
    layer_of_16_bits = problem.norm == "layer" and bytes_per_element(problem) == 4
    if plan.cluster <= LARGEST_CLUSTER_OF_TWO_STAGES:
        in_part = layer_of_16_bits and plan.cluster == 2 and not is_whole(plan, problem.cols)
        limit = RING_BYTES_PER_SM_OF_PART if in_part else RING_BYTES_PER_SM
    else:
        several_ctas = layer_of_16_bits and plan.ctas_per_sm > 1
        limit = RING_BYTES_PER_SM_OF_LAYER if several_ctas else RING_BYTES_PER_SM_IN_CLUSTER
    bytes_of_two = _num_streams(plan) * 2 * 32 * plan.num_warps * _bytes_per_thread(plan, problem)
    enough = bytes_of_two >= device.bytes_in_flight_per_sm / H200.bytes_in_flight_per_sm * limit
    two = enough or (problem.direction == "backward" and plan.rows_per_tile > 1)
    return groups * (2 if two else RING_STAGES[problem.direction])


def _ring_chunk(plan: RingPlan, problem: NormProblem) -> int:
    """Fastest chunk, in columns, for the threads of a row."""
    threads = threads_per_row(plan)
    several_rows = plan.cluster == 1 and plan.rows_per_tile > 1
    if several_rows and problem.cols <= WHOLE_COLUMNS:
        return problem.cols
    few_registers = plan.ctas_per_sm > STREAMS["backward"] or plan.max_registers <= 128
    columns = RING_COLUMNS_PER_CHUNK[problem.norm]
    if has_many_warps(plan, problem) and plan.num_warps == 16:
        columns = RING_COLUMNS_PER_CHUNK["layer"]
    elif several_rows or problem.direction == "forward" or (plan.cluster > 1 and few_registers):
        columns = MANY_COLUMNS_PER_CHUNK
    elif columns_per_thread(plan) == 3 * columns and problem.norm == "rms":
        columns //= 2  # six chunks are faster than three (6144, 12288, 24576 columns)
    return threads * columns


def distance(value: float, target: float) -> float:
    """How far value is from target, in doublings."""
    return abs(math.log2(value / target))
