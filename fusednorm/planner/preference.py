"""What makes one plan of a variant better than another: the keys that rank them, and the numbers that they aim at.

These were found on an H200 (bfloat16, 64 to 262144 columns; bench/results/2026-11-20-nvidia-h200-sweep, -rings,
-rows-apart and -widths.jsonl, 2026-11-21-nvidia-h200-plans, -tiles-of-a-cta and -widths.jsonl,
2026-11-22-nvidia-h200-plans, -few-rows, -odd-widths and -one-chunk.jsonl, 2026-11-23-nvidia-h200-wide-rows and
-many-chunks.jsonl). Of the plans swept there the keys choose one within 8% of the fastest, 3% on the average;
bench/NOTES.md names exceptions. Other GPUs are planned for by the same arithmetic with their own resources.
"""

from __future__ import annotations

import math

from . import budget
from .device import H200, DeviceSpec
from .norm_problem import NormProblem
from .plan import (
    MultiWavePlan,
    PipelinedPlan,
    RingPlan,
    WarpSpecializedPlan,
    columns_of_a_thread,
    is_whole,
    num_copies,
    padded_columns,
    rows_of_a_thread,
    threads_of_a_row,
    warps_of_a_row,
)
from .tile_share import (
    FORWARD_COLUMNS_IN_CLUSTER,
    FORWARD_STREAMS_OF_ONE_ROW,
    FORWARD_THREADS_APART,
    LARGEST_FORWARD_CLUSTER,
    MANY_COLUMNS,
    MAX_COLUMNS_PER_THREAD,
    bytes_per_element,
    has_many_warps,
    has_one_tile,
    is_one_row,
    is_too_much,
    most_columns_with_weight,
)

# Columns beyond the last are computed on for nothing; so many for each that there is do not matter.
TOLERATED_PADDING = 1.125
# Nor do more where a row is one chunk (backward): all of it comes in one copy, 16 bytes to a thread at a time, and what
# its threads have beyond the row costs no memory traffic. By the threads of a row, a warp or more: 16384 x 832 takes
# 25.7 us as 1024 columns and 27.2 as seven chunks of 128, 8000 x 160 10.1 as 256 and 10.8 as five of 32, but 16384 x
# 640 22.7 and 22.1 as five of 128; 16384 x 1664 47.4 as 2048 and 49.3 as seven of 256, but 16384 x 1408 44.3 and 38.8
# as three of 512; 5242 x 6400 over two CTAs 60.2 and 62.8 (LayerNorm).
TOLERATED_PADDING_OF_A_WARP, TOLERATED_PADDING_OF_WARPS, MOST_COLUMNS_OF_ONE_CHUNK = 1.6, 1.32, 32
# And a little more for fewer chunks: 15420 x 2176 takes 55.9 us as five chunks of 512, which are 2560, and 58.3 as nine
# of 256, 12000 x 544 18.4 as five of 128 and 19.0 as nine of 64 (LayerNorm backward).
TOLERATED_PADDING_OF_CHUNKS = 1.18
# Or for fewer warps over more CTAs: 1500 x 5392, as 6144, takes 24.2 us so and 27.9 by one CTA, which has as many
# columns but for the last copy, 2000 x 6192 29.1 and 35.8 (LayerNorm backward). But by as many warps of as many CTAs
# 2000 x 14064 63 us as four chunks of 1024 each and 54 as seven of 512 (RMSNorm).
TOLERATED_PADDING_FOR_FEW_WARPS = 1.165
# A backward of narrow rows has fewer warps with more rows each, whose partials are fewer; by the most columns: 8192 x
# 1000 takes 20.0 us by 16 and 17.8 by 8 (RMSNorm), 2500 x 1001 17.3 and 13.5, but 2500 x 1900 16.5 and 17.6
# (LayerNorm). Of the narrowest, smaller chunks: 128 columns take 12.0 us by chunks of 64, 13.1 us of 128 (forward).
MULTIWAVE_WARPS_PER_SM = 16
NARROW_WARPS_PER_SM = {256: 8, 512: 12, 1024: 8}
NARROW_COLUMNS, NARROW_CHUNK = 256, 64
# Where each thread loads 16 bytes of every row, a backward needs no exchange between threads for dw and db, which costs
# more than padding: 4096 x 632 takes 13.6 us as one chunk of 1024 and 21.5 as five of 128, 4096 x 1544 17.5 as 2048 and
# 22.0 as seven of 256; but 10000 x 2600 64.5 as 4096 and 53.4 as three of 1024, and 22243 x 1152 56.2 as 2048 and 50.0
# as five of 256 (LayerNorm). From 1025 columns on LayerNorm has eight warps on an SM for these, RMSNorm, 8% slower so,
# sixteen.
MOST_BYTES_OF_ONE_CHUNK, MOST_COLUMNS_BEYOND, WARPS_OF_ONE_CHUNK = 4096, 768, 8
# Narrow rows of 16 bits by CTAs of as few warps as have the registers, LayerNorm two rows at a time, RMSNorm four: 2500
# x 440 takes 10.9 us by two warps and two rows, 12.4 by four warps and eight rows of seven chunks of 64; 20000 x 632
# 30.9 by two warps and 35.5 by four with four rows (LayerNorm); RMSNorm 20000 x 632 28.3 by four rows, by two 30.3. But
# 10000 x 312 16.4 us as 512 columns and 15.2 as five of 64.
NARROWEST_OF_TWO_WARPS, ROWS_OF_FEW_WARPS = 321, {"layer": 2, "rms": 4}
MULTIWAVE_CHUNK = 1024  # columns; faster than 512 by 2 to 5%, than 2048 by 1 to 6%, than 4096 by 2 to 9%
FORWARD_COLUMNS = 45  # aimed at: between 32, at 512 to 2048 columns, and 64, at 4096
ELEMENTS_OF_ONE_TILE, ELEMENTS_OF_ONE_IN_CLUSTER = 32, 64  # of a thread; 4096 x 8448 36.0 us with 72 and 39.8 with 36
# Streams of tiles on an SM, each of four warps, one of which works while others wait for a row sum. Three in the
# backward where several warps make that sum, if a thread has so few bytes of a tile that the registers suffice: 16384 x
# 1280 takes 36.6 us and 41.0 with two, 16384 x 1536 40.4 and 43.4, 16384 x 2688 68.8 and 78.0, 4096 x 12288 80.1 and
# 83.2 (LayerNorm); but 4096 x 640, a warp to a row, 13.2 and 11.8. RMSNorm in a cluster with fewer: 8192 x 6144 is 2%
# slower with three.
STREAMS = {"backward": 2, "forward": 4}
MOST_GROUPS = 2  # of a warp-specialized CTA, of which an SM has one
THREE_STREAMS_COLUMNS, THREE_STREAMS_BYTES, THREE_STREAMS_BYTES_OF_RMS_IN_CLUSTER = 24, 104, 80
# In the forward, where all warps have a row together: 4096 x 5120 takes 24.1 us and 24.9 us with four. And LayerNorm in
# a cluster: 2048 x 8192 20.0 us and 20.7 us with four; but RMSNorm 8192 x 6144 52.0 us and 50.2 us with four.
FORWARD_STREAMS_OF_WHOLE_CTAS = 2
# Two where these bring so much to an SM, but in larger clusters: 2048 x 65536 is up to 10% slower with two (RMSNorm). A
# short-lived CTA of the forward is done sooner with two: 8192 x 8192 66.7 us and 70.2 us with three.
RING_STAGES = {"backward": 3, "forward": 2}
# Nor is a third worth its start where a tile has several rows: 4000 x 1280 15.6 us and 16.9 with three, 4000 x 768 12.0
# and 12.5, 16384 x 896 27.1 and 27.8, 1500 x 10240, two rows in a cluster, 29.9 and 30.8; but 8192 x 10240 125.9 and
# 123.9 (LayerNorm; RMSNorm 16384 x 10240 242 us and 254).
RING_BYTES_PER_SM, LARGEST_CLUSTER_OF_TWO_STAGES = 60 * 1000, 2
# LayerNorm of 16 bits over two CTAs with fewer, where the chunks are more than a row: 1500 x 6352 24.1 us and 26.0
# with three, 4000 x 6656 47.9 and 48.5; but 8000 x 7168, seven whole chunks, 90 and 85 (RMSNorm 4000 x 6656 44.8 and
# 42.4).
RING_BYTES_PER_SM_OF_PART = 48 * 1000
# 2048 x 131072: 401 us and 410 us with three (RMSNorm); 1024 x 262144 443 us and 440 us (LayerNorm). 8192 x 49152 628
# us and 662 (LayerNorm), 1024 x 114688 177 and 189 (RMSNorm). Of LayerNorm by several CTAs on an SM twelve chunks
# rather than a third stage: 2048 x 47104 145.5 us and 156.4 by three large ones; but by one CTA 2048 x 92160 283 us
# with three stages and 290 with two.
RING_BYTES_PER_SM_IN_CLUSTER, RING_BYTES_PER_SM_OF_LAYER = 98 * 1000, 91 * 1000
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
# Of rows that end within a chunk by eight warps, three chunks in two copies rather than six, of which five have room
# for eight: backward 4096 x 88064 585 us and 606, forward 1024 x 90112 97 and 102 (LayerNorm). RMSNorm's backward by
# four as well: 8192 x 45056 569 us and 574.
TOLERATED_ROOM_OF_WIDE_ROWS = 1.4
# Nor in a cluster three, of 8 columns a thread at least, room for four (LayerNorm forward of one row: 2048 x 98304
# 204 us and 222; 2048 x 196608 452 us and 493).
LESS_THAN_ONE_COPY = 0.5


def multiwave_key(problem: NormProblem, plan: MultiWavePlan, device: DeviceSpec) -> tuple:
    """Larger is better: little padding; enough bytes in flight and enough warps, which registers trade for each other;
    then chunks of the size that was fastest. Of narrow rows whose threads hold the columns of a chunk alone, as many at
    a time, and by as few warps, as were fastest."""
    if may_have_few_warps(problem) and _holds_columns_alone(plan, problem):
        return True, -distance(plan.rows_per_tile, ROWS_OF_FEW_WARPS[problem.norm]), -plan.num_warps
    bytes_in_flight = plan.ctas_per_sm * plan.rows_per_tile * problem.cols * bytes_per_element(problem)
    warps = plan.ctas_per_sm * plan.num_warps
    alone = _holds_columns_alone(plan, problem)
    return (
        alone,
        0 if alone else -max(TOLERATED_PADDING, plan.chunk * plan.num_chunks / problem.cols),
        min(bytes_in_flight, device.bytes_in_flight_per_sm) * min(warps, warps_per_sm(problem)),
        -distance(plan.chunk, NARROW_CHUNK if problem.cols <= NARROW_COLUMNS else MULTIWAVE_CHUNK),
        -plan.num_warps,
        -plan.ctas_per_sm,
        -plan.rows_per_tile,
    )


def warps_per_sm(problem: NormProblem) -> int:
    """That multi-wave had better have."""
    if problem.direction == "forward":
        return MULTIWAVE_WARPS_PER_SM
    if may_have_few_warps(problem):
        return WARPS_OF_ONE_CHUNK
    one_chunk = problem.norm == "layer" and _may_be_one_chunk(problem)
    wide = WARPS_OF_ONE_CHUNK if one_chunk else MULTIWAVE_WARPS_PER_SM
    return next((warps for most, warps in NARROW_WARPS_PER_SM.items() if problem.cols <= most), wide)


def may_have_few_warps(problem: NormProblem) -> bool:
    """Whether it is a backward of narrow rows of 16 bits, of which a CTA of two warps may have some."""
    narrow = NARROWEST_OF_TWO_WARPS <= problem.cols <= max(NARROW_WARPS_PER_SM)
    return problem.direction == "backward" and narrow and bytes_per_element(problem) == 4 and problem.tma_aligned


def _may_be_one_chunk(problem: NormProblem) -> bool:
    return problem.tma_aligned and problem.cols * problem.x_dtype.itemsize <= MOST_BYTES_OF_ONE_CHUNK


def _holds_columns_alone(plan: MultiWavePlan, problem: NormProblem) -> bool:
    """Whether it is a backward of one chunk, of which every thread has 16 bytes of each row of the tile."""
    if problem.direction == "forward" or not _may_be_one_chunk(problem):
        return False
    loaded = 16 // max(problem.x_dtype.itemsize, problem.grad_dtype.itemsize) * 32 * plan.num_warps
    return plan.rows_per_tile > 1 == plan.num_chunks and loaded <= plan.chunk <= problem.cols + MOST_COLUMNS_BEYOND


def ring_key(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> tuple:
    """Larger is better: no fault; a tile that is not too much for its threads; not too many copies; little padding; few
    warps to a tile; few CTAs to a row, or in the backward to each row of a tile; of as many, less padding; one
    reduction for mean and variance, which takes whole rows; few copies; as many streams of tiles on an SM as are
    fastest; a row to few threads; a ring that is full enough; then as little as will do."""
    forward = problem.direction == "forward"
    streams = plan.ctas_per_sm if isinstance(plan, PipelinedPlan) else plan.num_groups
    threads, columns = threads_of_a_row(plan), columns_of_a_thread(plan)
    rows = rows_of_a_thread(plan.rows_per_tile, plan.cluster)
    columns_of_row = problem.cols / plan.cluster / threads  # a thread's, without the padding
    bytes_of_thread = rows * columns_of_row * bytes_per_element(problem)
    few_ctas = problem.norm == "rms" or plan.cluster <= LARGEST_FORWARD_CLUSTER or has_many_warps(plan, problem)
    in_cluster = 1 < plan.cluster and few_ctas
    several_rows = plan.rows_per_tile > 1 and (in_cluster or threads <= FORWARD_THREADS_APART)
    few_threads = rows, columns_of_row
    if forward:
        few_threads = several_rows, -distance(columns, FORWARD_COLUMNS)
    streams_and_threads = -abs(streams - _streams(plan, problem, bytes_of_thread)), few_threads
    # LayerNorm forward 16384 x 4608, by chunks that are a row and by fewer that are not: 73.1 us and 78.3.
    merges_moments = not forward or problem.norm == "rms" or is_whole(plan, problem.cols)
    padded = padded_columns(plan) / problem.cols
    one_tile = isinstance(plan, PipelinedPlan) and has_one_tile(problem)
    if one_tile:
        target = ELEMENTS_OF_ONE_IN_CLUSTER if plan.cluster > 1 else ELEMENTS_OF_ONE_TILE
        streams_and_threads = -distance(rows * columns, target), streams
    stages = _ring_stages(plan, problem, device, streams * 2 * 32 * plan.num_warps * bytes_of_thread)
    return (
        (plan.num_stages > 1 or one_tile) and budget.registers(plan, problem, device) <= plan.max_registers,
        not is_too_much(plan, problem),
        -max(TOLERATED_COPIES, num_copies(plan)),
        -_padding(plan, problem, TOLERATED_PADDING_FOR_FEW_WARPS),
        -plan.num_warps,
        -plan.cluster if forward else -plan.cluster / rows,
        -_padding(plan, problem, TOLERATED_PADDING) if forward or columns <= MANY_COLUMNS else -padded,
        merges_moments,
        -_cost_of_copies(plan, problem),
        streams_and_threads,
        min(plan.num_stages, stages),
        -plan.num_stages,
        plan.weight_in_smem == (columns > most_columns_with_weight(plan, problem)),
        -distance(plan.chunk, _ring_chunk(plan, problem)),
        -plan.copy_chunks,
    )


def _padding(plan: RingPlan, problem: NormProblem, in_cluster: float) -> float:
    """Columns that a row takes, for each that it has, where they matter; in a backward's cluster, beyond so many."""
    tolerated, padding = TOLERATED_PADDING, padded_columns(plan) / problem.cols
    one_chunk = plan.num_chunks == 1 and columns_of_a_thread(plan) <= MOST_COLUMNS_OF_ONE_CHUNK
    if problem.direction == "backward" and one_chunk:
        tolerated = TOLERATED_PADDING_OF_A_WARP if warps_of_a_row(plan) == 1 else TOLERATED_PADDING_OF_WARPS
    elif problem.direction == "backward":
        tolerated = TOLERATED_PADDING_OF_CHUNKS if plan.cluster == 1 else in_cluster
    return TOLERATED_PADDING if padding <= tolerated else padding


def _cost_of_copies(plan: RingPlan, problem: NormProblem) -> float:
    """Of each tensor's that make a tile: how many there are, but less where two are faster than one, and more where
    they leave much of the room empty."""
    room = plan.copy_chunks + 1 if plan.tail else plan.copy_chunks * num_copies(plan)
    tolerated = TOLERATED_ROOM[problem.direction]
    if not is_whole(plan, problem.cols) and _is_wide_row_of_copies(plan, problem):
        tolerated = TOLERATED_ROOM_OF_WIDE_ROWS
    if room > tolerated * plan.num_chunks:
        return TOLERATED_COPIES
    if _is_better_by_two(plan, problem) and plan.tail and is_whole(plan, problem.cols):
        return LESS_THAN_ONE_COPY
    return num_copies(plan)


def _is_wide_row_of_copies(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether room in copies that stays empty is time lost: of eight warps with many columns or more CTAs, and of
    RMSNorm's backward."""
    if plan.num_warps > 4:
        return plan.cluster > 2 or (plan.rows_per_tile == 1 and columns_of_a_thread(plan) > MAX_COLUMNS_PER_THREAD)
    return plan.cluster > 2 and plan.rows_per_tile == 1 and problem.norm == "rms" and problem.direction == "backward"


def _is_better_by_two(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether a row of a few large chunks had better come in two copies."""
    alone = problem.norm == "layer" and problem.direction == "forward" and plan.rows_per_tile == 1 < plan.cluster
    large = plan.chunk >= MANY_COLUMNS_PER_CHUNK * threads_of_a_row(plan)
    many = columns_of_a_thread(plan) > FORWARD_COLUMNS_IN_CLUSTER
    return alone and large and many and not is_one_row(plan, problem) and not has_many_warps(plan, problem)


def _streams(plan: RingPlan, problem: NormProblem, bytes_of_thread: float) -> int:
    """Row tiles that an SM had better work on at a time."""
    if isinstance(plan, WarpSpecializedPlan):
        return MOST_GROUPS
    layer_in_cluster = problem.norm == "layer" and plan.cluster > 1
    if problem.direction == "forward":
        if has_many_warps(plan, problem):
            return 1
        if is_one_row(plan, problem):
            return FORWARD_STREAMS_OF_ONE_ROW
        alone = plan.cluster == 1 and plan.rows_per_tile == 1 and not has_one_tile(problem)
        return FORWARD_STREAMS_OF_WHOLE_CTAS if alone or layer_in_cluster else STREAMS["forward"]
    rms_in_cluster = plan.cluster > 1 and not layer_in_cluster
    most_bytes = THREE_STREAMS_BYTES_OF_RMS_IN_CLUSTER if rms_in_cluster else THREE_STREAMS_BYTES
    few = bytes_of_thread <= most_bytes and columns_of_a_thread(plan) <= THREE_STREAMS_COLUMNS
    return STREAMS["backward"] + (few and warps_of_a_row(plan) > 1)


def _ring_stages(plan: RingPlan, problem: NormProblem, device: DeviceSpec, bytes_of_two: float) -> int:
    """Stages enough, of which two bring so many bytes to an SM; more bytes where an SM needs more in flight."""
    if has_one_tile(problem) and isinstance(plan, PipelinedPlan):
        return 1
    groups = plan.num_groups if isinstance(plan, WarpSpecializedPlan) else 1
    few_ctas = plan.cluster <= LARGEST_CLUSTER_OF_TWO_STAGES
    in_two = problem.norm == "layer" and plan.cluster == 2 and bytes_per_element(problem) == 4
    in_part = in_two and not is_whole(plan, problem.cols)
    in_few = RING_BYTES_PER_SM_OF_PART if in_part else RING_BYTES_PER_SM
    several_of_layer = problem.norm == "layer" and plan.ctas_per_sm > 1 and bytes_per_element(problem) == 4
    in_many = RING_BYTES_PER_SM_OF_LAYER if several_of_layer else RING_BYTES_PER_SM_IN_CLUSTER
    more = device.bytes_in_flight_per_sm / H200.bytes_in_flight_per_sm
    enough = bytes_of_two >= more * (in_few if few_ctas else in_many)
    two = enough or (problem.direction == "backward" and plan.rows_per_tile > 1)
    return groups * (2 if two else RING_STAGES[problem.direction])


def _ring_chunk(plan: RingPlan, problem: NormProblem) -> int:
    """The chunk that is fastest for the threads of a row."""
    threads = threads_of_a_row(plan)
    apart = plan.cluster == 1 and plan.rows_per_tile > 1
    if apart and problem.cols <= WHOLE_COLUMNS:
        return problem.cols
    few_registers = plan.ctas_per_sm > STREAMS["backward"] or plan.max_registers <= 128
    columns = RING_COLUMNS_PER_CHUNK[problem.norm]
    if has_many_warps(plan, problem) and plan.num_warps == 16:
        columns = RING_COLUMNS_PER_CHUNK["layer"]
    elif apart or problem.direction == "forward" or (plan.cluster > 1 and few_registers):
        columns = MANY_COLUMNS_PER_CHUNK
    elif columns_of_a_thread(plan) == 3 * columns and problem.norm == "rms":
        columns //= 2  # 6144, 12288, 24576 columns: six chunks are up to 2% faster than three
    return threads * columns


def distance(value: float, target: float) -> float:
    """In doublings."""
    return abs(math.log2(value / target))
