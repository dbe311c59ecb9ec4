"""What a thread of a ring had better have: of a row tile, and of its parameters.

These were found on an H200; preference.py says where the numbers are, and ranks plans by them.
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
    columns_of_a_thread,
    has_two_rows_in_cluster,
    is_whole,
    rows_of_a_thread,
    threads_of_a_row,
)

# What a thread has of a row tile at most, in bytes of x and its gradient, and in columns, of which the backward holds
# two sums each. It gets as many as are allowed: with half as many, a row's sums cost twice as much (3000 x 9216: 48.3
# us with 36, 53.0 us with 18).
RING_BYTES_PER_THREAD, MAX_COLUMNS_PER_THREAD = 144, 36
# A few more of 16-bit rows that no cluster shares: 26214 x 1280 takes 53.6 us with 40 columns, the parameter in
# shared memory, and 55.1 with 20, 6000 x 2560 28.5 and 29.3, 27594 x 608 31.8 and 34.0 with 20 (LayerNorm); but 3000
# x 320, by eight threads to a row, 10.7 and 9.4 as 512, and 40000 x 272 29.1 with 36 columns and 26.5 with 20. And of
# RMSNorm, which has no sums of db, of rows for as many threads: 2048 x 40960 127 us and 129 with 20 columns over twice
# as many CTAs.
RING_BYTES_OF_MANY_COLUMNS, MANY_COLUMNS = 160, 40
LEAST_THREADS_OF_MANY_COLUMNS, MAX_COLUMNS_OF_FEW_THREADS, THREADS_OF_RMS = 16, 32, 128
# Two rows in a cluster, where a thread has so many columns: 4096 x 5120 takes 35.4 us and 37.4 by one row, 8192 x 5632
# 73 us and 78 (LayerNorm), 8192 x 20480 240 us and 254 by 40 columns of one row over half as many CTAs, 4096 x 10752 70
# us and 84 (RMSNorm). But 8192 x 6144, 24 columns, 82.5 us and 77.0, 2048 x 40960, 16 CTAs, 149 us and 140 (LayerNorm);
# and of float32, of which these are more bytes than are allowed, 4096 x 5120, ten columns, 66.1 us and 64.7.
RING_BYTES_OF_TWO_ROWS = 192
# LayerNorm over four CTAs and more is faster by one row over half as many: 8192 x 10240 124 us and 135, 8192 x 22528
# 290 and 309; RMSNorm over eight from 20 columns on, 8192 x 23552 298 and 309.
COLUMNS_OF_TWO_ROWS = {"layer": {2: (18, 24)}, "rms": {2: (18, 24), 4: (18, 24), 8: (18, 20.1)}}
# Of 16-bit rows by one-row tiles of a backward, by the warps of a CTA and how many CTAs share a row: columns of the row
# (padding not counted) that a thread had better have, in ranges above the first and up to the second (23.9 lets 24 in,
# 47.9 leaves 48 out). Fewer CTAs or warps with more columns are faster than what the limits above allow, if they come
# in many small chunks: LayerNorm 8192 x 5376 takes 69 us by one CTA and 76 by two, 2048 x 43520 134 by four warps with
# 44 and 146 by eight with 48, three large chunks; 2048 x 90112 267 with 44 and 280 with 48, 2048 x 122880 369 by eight
# CTAs with 60 and 422 by sixteen with 30, 2048 x 245760 792 by eight warps with 60 and 906 by sixteen with 30; RMSNorm
# 2048 x 102400 304 with 52 and 318 over twice as many. What is left out: 48 and 56 columns of LayerNorm that are 24 or
# 28 over twice as many CTAs (8192 x 6144 77.0 us and 79.6, 8192 x 14336 171 and 173), 33 and more by four warps over
# sixteen CTAs, which eight warps over eight have (2048 x 67584 226 us and 240).
ANY_CLUSTER = 0
COLUMNS_OF_ONE_ROW: dict[tuple[str, int], dict[int, tuple[tuple[float, float], ...]]] = {
    ("layer", 4): {
        1: ((0, 47.9), (48, 55.9)),
        2: ((0, 47.9), (48, 55)),
        4: ((16, 20), (23.9, 55.9), (56, 59.9)),
        8: ((16, 20), (23.9, 60)),
        16: ((16, 20), (24, 28), (31.9, 32)),
    },
    ("layer", 8): {ANY_CLUSTER: ((16, 64),)},
    ("rms", 4): {4: ((16, 47.9),), 8: ((16, 56),), 16: ((16, 40),)},
    ("rms", 8): {8: ((16, 64),), 16: ((16, 64),)},
}
# Of the forward: of a row that one or two warps have, that four have, and of two rows in a cluster. In a cluster the
# most rather than 16 CTAs (LayerNorm 2048 x 65536: 136 us by 8 and 139 us; but RMSNorm 132 us and 130 us), and of
# these with one row each (LayerNorm 2048 x 73728: 153 us and 173 us).
FORWARD_COLUMNS_PER_THREAD, FORWARD_COLUMNS_ALONE, FORWARD_COLUMNS_IN_CLUSTER = 64, 40, 36
FORWARD_THREADS_APART, LARGEST_FORWARD_CLUSTER = 64, 8
# CTAs of eight warps and more, one on an SM, for rows that four cannot hold: 16-bit rows by two, eight CTAs to a row if
# that will do, each thread with up to 64 columns of both: 1024 x 90112 takes 97 us so and 119 by 16 CTAs of four warps,
# 1024 x 106496 114 and 132 (LayerNorm), 1024 x 98304 98 and 112 (RMSNorm); of LayerNorm from 131073 columns on one row
# by 16 warps, with 48 columns at most, rather than 16 CTAs: 1024 x 163840 168 us and 206.
FORWARD_COLUMNS_OF_16_WARPS = 48
# LayerNorm, one row whose parameters are in registers, so that tiles are all that is read from shared memory. 4096 x
# 5120 takes 23.9 us, with parameters in shared memory 24.4; 8192 x 11264 94.9 us, by two rows in twice as many CTAs
# 110; 1024 x 12288 16.5 us and 18.4. But 8192 x 14336, 56 columns of a thread, 119 us and 115; a row that ends within
# a chunk, 8192 x 4864, 45.7 us and 42.3 (by shared memory, as many CTAs); eight CTAs, 2048 x 40960, 87.7 us and 83.0.
# float32 8192 x 4096 64.3 us and 67.2, by shared memory.
FORWARD_COLUMNS_OF_ONE_ROW, FORWARD_STREAMS_OF_ONE_ROW, LARGEST_CLUSTER_OF_ONE_ROW = 48, 3, 4
# RMSNorm's forward up to this width: one stage and one tile for each CTA, so that more of them are on an SM. 8192 x
# 8192 takes 65.9 us and 67.4 by two stages, 1024 x 4096 8.4 us and 8.9, 8192 x 16384 129 us and 133; but 2048 x 32768
# 69.8 us and 67.6. LayerNorm, whose CTAs load two parameters: 8192 x 8192 70.8 us and 67.1.
# Nor where two CTAs have too few elements of a row: 8192 x 10240 takes 87.5 us and 85.3 by two stages, 4096 x 12288
# 51.7 us and 50.5.
ONE_TILE_COLUMNS, TOO_FEW_FOR_TWO_CTAS = 16384, range(9217, 14336)
# A thread holds the parameters of so many columns in registers; of more, they are faster in shared memory (forward of
# 8192 x 10240, 20 columns a thread of two rows: 85.6 us and 89.3; LayerNorm).
MAX_COLUMNS_WITH_WEIGHT = {"backward": 32, "forward": 16}
# One row of a backward: in registers if these suffice (budget.py), but of LayerNorm not where the columns are more than
# so many, up to the second. 2048 x 139264 takes 480 us so and 503, 2048 x 41984 132 and 134, 2048 x 57856 179 and 182,
# but 2048 x 46080, 48 columns, 149 and 144, 2048 x 98304 306 and 296; RMSNorm 2048 x 200704 613 and 637.
LAYER_COLUMNS_WITHOUT_WEIGHT = 44, 52
# Where nothing else fills an SM's waits (one row's sums at a time, of many columns), instructions are what it waits
# for: LayerNorm's backward by eight warps in clusters 2048 x 139264 549 us and 507 with pairs, 2048 x 90112 306 and
# 280; of four, 2048 x 61440 194 and 187, 2048 x 43520 134.7 and 133.0. With fewer columns and two CTAs on an SM it is
# all the same, or 7% slower by a schedule of the compiler's (4096 x 5120); RMSNorm, 1% either way.
LEAST_COLUMNS_IN_PAIRS = 32


def is_too_much(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether a thread had better have less of a row tile."""
    columns, rows = columns_of_a_thread(plan), rows_of_a_thread(plan.rows_per_tile, plan.cluster)
    ranges = ranges_of_one_row(plan, problem)
    if ranges is not None:
        of_row = problem.cols / plan.cluster / threads_of_a_row(plan)
        return not any(above < of_row <= most for above, most in ranges)
    if _has_too_many_ctas(plan, problem):
        return True
    if has_many_warps(plan, problem):
        return columns > (FORWARD_COLUMNS_OF_16_WARPS if plan.num_warps == 16 else FORWARD_COLUMNS_PER_THREAD)
    too_many = columns > _most_columns(plan, problem)
    return too_many or rows * columns * bytes_per_element(problem) > _most_bytes(plan, problem)


def ranges_of_one_row(plan: RingPlan, problem: NormProblem) -> tuple[tuple[float, float], ...] | None:
    """COLUMNS_OF_ONE_ROW of a backward's tile; None where there are none."""
    if problem.direction == "forward" or plan.rows_per_tile > 1 or bytes_per_element(problem) > 4:
        return None
    by_cluster = COLUMNS_OF_ONE_ROW.get((problem.norm, plan.num_warps), {})
    return by_cluster.get(plan.cluster, by_cluster.get(ANY_CLUSTER)) if isinstance(plan, PipelinedPlan) else None


def has_many_warps(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether it is a forward in which CTAs of eight warps or more share a 16-bit row."""
    return problem.direction == "forward" and plan.cluster > 1 and plan.num_warps > 4 and problem.x_dtype.itemsize == 2


def _has_too_many_ctas(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether it is a forward of LayerNorm, of 16-bit rows that fewer CTAs had better share, by more warps."""
    large = problem.norm == "layer" and problem.direction == "forward" and plan.cluster > LARGEST_FORWARD_CLUSTER
    widest = LARGEST_FORWARD_CLUSTER * 32 * 16 * FORWARD_COLUMNS_OF_16_WARPS
    return large and problem.x_dtype.itemsize == 2 and problem.cols <= widest


def _may_have_many_columns(plan: RingPlan, problem: NormProblem) -> bool:
    """Of a backward, whether a thread had better have a few more columns than usual."""
    threads = threads_of_a_row(plan)
    if problem.norm == "rms" and threads >= THREADS_OF_RMS:
        return True
    alone = isinstance(plan, PipelinedPlan) and plan.cluster == 1 and plan.num_warps == 4
    long_pieces = bytes_per_element(problem) == 4 and problem.cols % 16 == 0
    return alone and long_pieces and threads >= LEAST_THREADS_OF_MANY_COLUMNS


def _most_bytes(plan: RingPlan, problem: NormProblem) -> int:
    """Of x and its gradient, that a thread had better have."""
    if problem.direction == "backward" and has_two_rows_in_cluster(plan):
        least, too_many = COLUMNS_OF_TWO_ROWS[problem.norm].get(plan.cluster, (0, 0))
        enough = least < problem.cols / plan.cluster / threads_of_a_row(plan) < too_many
        return RING_BYTES_OF_TWO_ROWS if plan.num_warps == 4 and enough else 0
    if problem.direction == "backward" and _may_have_many_columns(plan, problem):
        return RING_BYTES_OF_MANY_COLUMNS
    return RING_BYTES_PER_THREAD


def _most_columns(plan: RingPlan, problem: NormProblem) -> int:
    """That a thread had better have."""
    if problem.direction == "backward":
        if _may_have_many_columns(plan, problem):
            return MANY_COLUMNS
        few_threads = plan.cluster == 1 and threads_of_a_row(plan) < LEAST_THREADS_OF_MANY_COLUMNS
        return MAX_COLUMNS_OF_FEW_THREADS if few_threads else MAX_COLUMNS_PER_THREAD
    threads = threads_of_a_row(plan)
    too_wide = problem.norm == "layer" and problem.cols > LARGEST_FORWARD_CLUSTER * threads * FORWARD_COLUMNS_IN_CLUSTER
    if threads <= FORWARD_THREADS_APART or too_wide or has_one_tile(problem):
        return FORWARD_COLUMNS_PER_THREAD
    if is_one_row(plan, problem):
        return FORWARD_COLUMNS_OF_ONE_ROW
    return FORWARD_COLUMNS_IN_CLUSTER if plan.cluster > 1 else FORWARD_COLUMNS_ALONE


def has_one_tile(problem: NormProblem) -> bool:
    """Whether a CTA had better have one tile only."""
    narrow = problem.cols <= ONE_TILE_COLUMNS and problem.cols not in TOO_FEW_FOR_TWO_CTAS
    return problem.direction == "forward" and problem.norm == "rms" and narrow


def is_one_row(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether it is a tile of LayerNorm's forward whose threads had better hold its parameters than a second row."""
    if problem.norm == "rms" or problem.direction == "backward" or plan.rows_per_tile > 1:
        return False
    columns, whole = columns_of_a_thread(plan), is_whole(plan, problem.cols)
    if problem.x_dtype.itemsize == 2:
        least, most = FORWARD_COLUMNS_ALONE + (plan.cluster == 1 and not whole), FORWARD_COLUMNS_OF_ONE_ROW
    else:  # there is no room for a second row anyway
        least, most = 0 if whole else math.inf, FORWARD_COLUMNS_IN_CLUSTER
    return least <= columns <= most and plan.cluster <= LARGEST_CLUSTER_OF_ONE_ROW


def most_columns_with_weight(plan: RingPlan, problem: NormProblem) -> float:
    """Whose parameters a thread had better have in registers."""
    if problem.direction == "backward" and ranges_of_one_row(plan, problem):
        above, most = LAYER_COLUMNS_WITHOUT_WEIGHT
        return above if problem.norm == "layer" and columns_of_a_thread(plan) <= most else math.inf
    alone = isinstance(plan, WarpSpecializedPlan) and problem.direction == "forward"  # on an SM, with its registers
    if alone or is_one_row(plan, problem):
        return FORWARD_COLUMNS_OF_ONE_ROW
    return MAX_COLUMNS_WITH_WEIGHT[problem.direction]


def widens_in_pairs(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether two bfloat16 had better become float32 at a time: where instructions are what an SM's warps wait for."""
    if problem.norm == "rms" or problem.direction == "forward" or problem.x_dtype != torch.bfloat16:
        return False
    shared = plan.cluster > 1 and plan.num_warps > 4
    many = shared or columns_of_a_thread(plan) > LEAST_COLUMNS_IN_PAIRS
    return many and isinstance(plan, PipelinedPlan) and budget.has_registers_for_pairs(plan, problem)


def bytes_per_element(problem: NormProblem) -> int:
    """Of x and, in the backward, the gradient."""
    return problem.x_dtype.itemsize + (problem.grad_dtype.itemsize if problem.direction == "backward" else 0)
