"""How much of a row tile, and of weight and bias, a thread of a ring should have.

The limits were fitted on an H200, and preference.py ranks plans by them. The measurements are in bench/NOTES.md,
"Evidence behind constants".
"""

from __future__ import annotations

import math

import torch

from . import budget
from .norm_problem import NormProblem
from .plan import (
    PipelinedPlan,
    RingPlan,
    WarpSpecializedPlan,
    columns_per_thread,
    has_two_rows_in_cluster,
    is_whole,
    rows_per_thread,
    threads_per_row,
)

# Backward: the most bytes of x and its gradient that a thread has of a row tile, and the most columns, of which it
# holds two sums each. A thread gets as many as are allowed: with half as many, the sums of a row cost twice as much.
RING_BYTES_PER_THREAD, MAX_COLUMNS_PER_THREAD = 144, 36
# Higher limits for 16-bit rows of multiples of 32 bytes by one CTA of four warps, if a row has at least
# LEAST_THREADS_OF_MANY_COLUMNS threads. With fewer threads per row, MAX_COLUMNS_OF_FEW_THREADS is the limit. RMSNorm,
# which has no sums of db, gets the higher limits wherever a row has THREADS_OF_RMS threads or more.
RING_BYTES_OF_MANY_COLUMNS, MANY_COLUMNS = 160, 40
LEAST_THREADS_OF_MANY_COLUMNS, MAX_COLUMNS_OF_FEW_THREADS, THREADS_OF_RMS = 16, 32, 128
# Backward of two rows in a cluster: the bytes per thread. They allow 16-bit rows only; float32 rows are faster by one.
RING_BYTES_OF_TWO_ROWS = 192
# Where two rows in a cluster of CTAs of four warps are faster than one row: the columns of a row, by norm and CTAs per
# row. Each thread has 18 to 24 of them. No other cluster of a backward should take two rows.
TWO_ROW_COLUMNS = {
    "layer": {2: range(4609, 6144)},
    "rms": {2: range(4609, 6144), 4: range(9217, 12288), 8: range(18433, 20583)},
}
# Widths for which a one-row tile of a 16-bit backward is a candidate, by (norm, warps of a CTA) and then by CTAs per
# row. In the gaps, another number of CTAs or warps was faster.
ONE_ROW_COLUMNS = {
    ("layer", 4): {
        1: (range(6132), range(6145, 7156)),
        2: (range(12263), range(12289, 14081)),
        4: (range(8193, 10241), range(12237, 28621), range(28673, 30669)),
        8: (range(16385, 20481), range(24474, 61441)),
        16: (range(32769, 40961), range(49153, 57345), range(65332, 65537)),
    },
    ("layer", 8): {ctas: (range(4096 * ctas + 1, 16384 * ctas + 1),) for ctas in (1, 2, 4, 8, 16)},
    ("rms", 4): {4: (range(8193, 24525),), 8: (range(16385, 57345),), 16: (range(32769, 81921),)},
    ("rms", 8): {8: (range(32769, 131073),), 16: (range(65537, 262145),)},
}
FEW_FORWARD_THREADS = 64  # the threads of one or two warps
FORWARD_COLUMNS_PER_THREAD = 64  # most columns per thread, forward: a row of FEW_FORWARD_THREADS threads or fewer
FORWARD_COLUMNS_OF_FOUR_WARPS = 40  # the same: a row of four warps
FORWARD_COLUMNS_IN_CLUSTER = 36  # the same: two rows over a cluster
# LayerNorm's forward has at most this many CTAs per row while FORWARD_COLUMNS_PER_THREAD suffice. Where it needs more
# CTAs, one row per tile is faster than two.
LARGEST_FORWARD_CLUSTER = 8
# Forward of 16-bit rows that four warps cannot hold: CTAs of eight warps or more, one per SM, take tiles of two rows,
# over eight CTAs if these suffice, with at most FORWARD_COLUMNS_PER_THREAD columns of each row per thread. LayerNorm
# from 131073 columns on takes one row by 16 warps, with at most this many columns, rather than 16 CTAs.
FORWARD_COLUMNS_OF_16_WARPS = 48
# LayerNorm's forward by one-row tiles: weight and bias stay in registers, so that only tiles are read from shared
# memory. The limits are columns per thread and CTAs per row; an SM has this many streams of such tiles. Rows that end
# within a chunk and larger clusters are faster otherwise.
FORWARD_COLUMNS_OF_ONE_ROW, FORWARD_STREAMS_OF_ONE_ROW, LARGEST_CLUSTER_OF_ONE_ROW = 48, 3, 4
# RMSNorm's forward up to this width: one stage and one tile per CTA, so that an SM has more CTAs. LayerNorm's CTAs load
# two parameters each and are slower that way. The excepted widths give two CTAs too few elements of a row.
ONE_TILE_COLUMNS, TOO_FEW_FOR_TWO_CTAS = 16384, range(9217, 14336)
# The most columns per thread whose weight and bias stay in registers. More are faster in shared memory.
MAX_COLUMNS_WITH_WEIGHT = {"backward": 32, "forward": 16}
# One-row tiles of a backward keep the weight in registers where these suffice (budget.py), except for LayerNorm with
# these columns per thread: it keeps the weight in shared memory.
WEIGHT_IN_SMEM_COLUMNS = range(45, 53)
# LayerNorm's backward converts pairs of bfloat16 if a thread has more columns than this, or in a cluster of CTAs with
# more than four warps. An SM then has no other work to fill its waits, so the number of instructions sets the time.
# With fewer columns and two CTAs per SM, pairs gain nothing or are slower. RMSNorm hardly changes.
LEAST_COLUMNS_IN_PAIRS = 32


def exceeds_thread_tile(plan: RingPlan, problem: NormProblem) -> bool:
    """True if the tile gives a thread more columns or bytes than are fast, or spreads a row over too many CTAs."""
    columns, rows = columns_per_thread(plan), rows_per_thread(plan)
    allowed = _one_row_columns(plan, problem)
    if allowed is not None:
        return not any(problem.cols in columns for columns in allowed)
    if _has_too_many_ctas(plan, problem):
        return True
    if has_many_warps(plan, problem):
        return columns > (FORWARD_COLUMNS_OF_16_WARPS if plan.num_warps == 16 else FORWARD_COLUMNS_PER_THREAD)
    too_many = columns > _most_columns(plan, problem)
    return too_many or rows * columns * bytes_per_element(problem) > _most_bytes(plan, problem)


def _one_row_columns(plan: RingPlan, problem: NormProblem) -> tuple[range, ...] | None:
    """Entry of ONE_ROW_COLUMNS for a backward's tile; None if the table has none."""
    one_row = isinstance(plan, PipelinedPlan) and plan.rows_per_tile == 1
    if not one_row or problem.direction == "forward" or bytes_per_element(problem) > 4:
        return None
    return ONE_ROW_COLUMNS.get((problem.norm, plan.num_warps), {}).get(plan.cluster)


def has_many_warps(plan: RingPlan, problem: NormProblem) -> bool:
    """True for a forward in which CTAs of eight warps or more share a 16-bit row."""
    return problem.direction == "forward" and plan.cluster > 1 and plan.num_warps > 4 and problem.x_dtype.itemsize == 2


def _has_too_many_ctas(plan: RingPlan, problem: NormProblem) -> bool:
    """True for LayerNorm's forward of 16-bit rows that are faster over fewer CTAs of more warps."""
    large = problem.norm == "layer" and problem.direction == "forward" and plan.cluster > LARGEST_FORWARD_CLUSTER
    widest = LARGEST_FORWARD_CLUSTER * 32 * 16 * FORWARD_COLUMNS_OF_16_WARPS
    return large and problem.x_dtype.itemsize == 2 and problem.cols <= widest


def _may_have_many_columns(plan: RingPlan, problem: NormProblem) -> bool:
    """True if the higher limits of MANY_COLUMNS hold for a backward's tile."""
    threads = threads_per_row(plan)
    if problem.norm == "rms" and threads >= THREADS_OF_RMS:
        return True
    four_warps = isinstance(plan, PipelinedPlan) and plan.cluster == 1 and plan.num_warps == 4
    long_pieces = bytes_per_element(problem) == 4 and problem.cols % 16 == 0
    return four_warps and long_pieces and threads >= LEAST_THREADS_OF_MANY_COLUMNS


def _most_bytes(plan: RingPlan, problem: NormProblem) -> int:
    """The most bytes of x and its gradient that a thread should have of a tile; 0 if the tile is never fast."""
    if problem.direction == "backward" and has_two_rows_in_cluster(plan):
        fast = plan.num_warps == 4 and problem.cols in TWO_ROW_COLUMNS[problem.norm].get(plan.cluster, ())
        return RING_BYTES_OF_TWO_ROWS if fast else 0
    if problem.direction == "backward" and _may_have_many_columns(plan, problem):
        return RING_BYTES_OF_MANY_COLUMNS
    return RING_BYTES_PER_THREAD


def _most_columns(plan: RingPlan, problem: NormProblem) -> int:
    """The most columns of a row that a thread should have."""
    if problem.direction == "backward":
        if _may_have_many_columns(plan, problem):
            return MANY_COLUMNS
        few_threads = plan.cluster == 1 and threads_per_row(plan) < LEAST_THREADS_OF_MANY_COLUMNS
        return MAX_COLUMNS_OF_FEW_THREADS if few_threads else MAX_COLUMNS_PER_THREAD
    threads = threads_per_row(plan)
    too_wide = problem.norm == "layer" and problem.cols > LARGEST_FORWARD_CLUSTER * threads * FORWARD_COLUMNS_IN_CLUSTER
    if threads <= FEW_FORWARD_THREADS or too_wide or has_one_tile(problem):
        return FORWARD_COLUMNS_PER_THREAD
    if is_one_row(plan, problem):
        return FORWARD_COLUMNS_OF_ONE_ROW
    return FORWARD_COLUMNS_IN_CLUSTER if plan.cluster > 1 else FORWARD_COLUMNS_OF_FOUR_WARPS


def has_one_tile(problem: NormProblem) -> bool:
    """True if a forward is fastest with one tile per CTA."""
    narrow = problem.cols <= ONE_TILE_COLUMNS and problem.cols not in TOO_FEW_FOR_TWO_CTAS
    return problem.direction == "forward" and problem.norm == "rms" and narrow


def is_one_row(plan: RingPlan, problem: NormProblem) -> bool:
    """True for a tile of LayerNorm's forward whose threads should hold weight and bias rather than a second row."""
    if problem.norm == "rms" or problem.direction == "backward" or plan.rows_per_tile > 1:
        return False
    columns, whole = columns_per_thread(plan), is_whole(plan, problem.cols)
    if problem.x_dtype.itemsize == 2:
        least, most = FORWARD_COLUMNS_OF_FOUR_WARPS + (plan.cluster == 1 and not whole), FORWARD_COLUMNS_OF_ONE_ROW
    else:  # there is no room for a second row anyway
        least, most = 0 if whole else math.inf, FORWARD_COLUMNS_IN_CLUSTER
    return least <= columns <= most and plan.cluster <= LARGEST_CLUSTER_OF_ONE_ROW


def prefers_weight_in_smem(plan: RingPlan, problem: NormProblem) -> bool:
    """True if a thread has too many columns to keep their weight and bias in registers."""
    columns = columns_per_thread(plan)
    if _one_row_columns(plan, problem):
        return problem.norm == "layer" and columns in WEIGHT_IN_SMEM_COLUMNS
    one_cta_per_sm = isinstance(plan, WarpSpecializedPlan) and problem.direction == "forward"
    if one_cta_per_sm or is_one_row(plan, problem):
        return columns > FORWARD_COLUMNS_OF_ONE_ROW
    return columns > MAX_COLUMNS_WITH_WEIGHT[problem.direction]


def widens_in_pairs(plan: RingPlan, problem: NormProblem) -> bool:
    """True if bfloat16 values should become float32 two at a time, because instructions limit the speed."""
    if problem.norm == "rms" or problem.direction == "forward" or problem.x_dtype != torch.bfloat16:
        return False
    shared = plan.cluster > 1 and plan.num_warps > 4
    many = shared or columns_per_thread(plan) > LEAST_COLUMNS_IN_PAIRS
    return many and isinstance(plan, PipelinedPlan) and budget.has_registers_for_pairs(plan, problem)


def bytes_per_element(problem: NormProblem) -> int:
    """Bytes per element of x, plus the gradient's in a backward."""
    return problem.x_dtype.itemsize + (problem.grad_dtype.itemsize if problem.direction == "backward" else 0)
