"""The plan that takes the place of the best one where CTAs get few row tiles, and up to how many rows.

What a kernel does once for each CTA is most of what it does then. The numbers were found on an H200 (bfloat16, 1 to
40000 rows; bench/results/2026-11-22-nvidia-h200-few-rows, -fewer-rows and -every-row.jsonl).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from . import budget
from .candidates import (
    MAX_CHUNKS,
    MIN_MULTIWAVE_CHUNK,
    best_ring,
    chunkings,
    ctas_with_room,
    multi_wave,
    pipelined_plans,
    powers_of_two,
)
from .device import DeviceSpec
from .legality import MAX_RING_ROWS, broken_rule
from .norm_problem import NormProblem
from .plan import (
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    columns_of_a_thread,
    has_two_rows_in_cluster,
    is_whole,
    least_rows_of_cta,
    rows_at_once,
)
from .preference import ELEMENTS_OF_ONE_TILE, TOLERATED_PADDING, WARPS_OF_ONE_CHUNK, WHOLE_COLUMNS, distance, ring_key
from .tile_share import (
    FORWARD_STREAMS_OF_ONE_ROW,
    MANY_COLUMNS,
    MAX_COLUMNS_PER_THREAD,
    ONE_TILE_COLUMNS,
    bytes_per_element,
)

# --- Backward ---

# Of the one CTA on an SM that a few rows get: half as many partials to sum as of two CTAs. 1024 x 4096 takes 13.7 us so
# and 14.1 by two CTAs, 600 x 3072 11.1 us and 12.0; but 4000 x 2048, four rows, 19.4 us and 18.3, 264 x 1024, eight,
# 10.6 us and 8.1. Over two CTAs 700 x 8192, 32 columns of a thread, 16.1 us and 17.2; 700 x 5120, two rows in a
# cluster, 13.6 us and 14.2 (LayerNorm). One row of 28 columns a thread 300 x 7168 12.8 us and 12.2 by two CTAs, 11.2
# and 11.3 (RMSNorm).
LARGE_CTA_WARPS, MAX_ROWS_OF_LARGE_CTA, MAX_COLUMNS_OF_ONE_ROW = 8, 2, {"layer": 24, "rms": 28}
# Tiles of two rows by one chunk, of which each thread loads 16 bytes of both rows: of how many columns, and for up to
# how many rows of each SM, by the most columns, in the place of multi-wave and of a ring. 132 x 632 takes 6.8 us so and
# 7.8 by four rows, 5000 x 632 14.5 and 15.8 by two warps, but 12000 x 632 24.5 and 22.5; 1100 x 1376 11.1 us and 12.1
# by the ring, 2400 x 1096 14.6 and 17.0, 132 x 768 6.9 and 7.6, 264 x 288 7.2 and 8.5 (LayerNorm); 132 x 632 6.7 and
# 7.0, 1050 x 632 8.9 and 8.1, 132 x 1232 6.6 and 7.8 by the ring, 300 x 544 7.3 and 7.8 (RMSNorm).
COLUMNS_OF_TWO_ROWS = range(97, 2049)
TWO_ROWS_PER_SM = {
    ("layer", "multi_wave"): {256: 6, 1024: 64, 1280: 26, 2048: 13},
    ("layer", "pipelined"): {256: 0, 512: 3, 640: 8, 1024: 5, 1280: 9, 1536: 13, 2048: 11},
    ("rms", "multi_wave"): {1024: 2, 1280: 18, 2048: 12},
    ("rms", "pipelined"): {256: 0, 512: 2, 640: 4, 1024: 2, 2048: 6},
}
# RMSNorm, in the place of a ring by multi-wave: 120 x 2176 takes 7.6 us so and 8.3, 798 x 2272 11.4 and 12.0, 300 x
# 4480 10.3 and 10.9; but 132 x 4608, nine whole chunks, 9.1 and 8.1.
RMS_ROWS_PER_SM_IN_REGISTERS = {range(2049, 2305): 8, range(4097, 4608): 12}
# LayerNorm's rows of many columns of a thread, by one CTA or two: over four, for so many rows of each SM, by the most
# columns of a thread; two rows in a cluster but where the columns are the most. 264 x 10240 takes 13.5 us so and 14.9,
# 264 x 10752 14.8 and 16.9, 1024 x 10752 26.8 and 27.8, 700 x 12800 23.6 and 25.6, 1024 x 14080 30.4 and 32.4, but 1024
# x 10240 24.5 and 24.1, 2048 x 10752 43.9 and 42.7, 2621 x 12800 62.6 and 58.7. By one CTA over two if there are more
# than 40: 1024 x 6656 18.2 us so and 23.5 over four.
CTAS_OF_FEW_ROWS, CTAS_OF_FEW_SHORT_ROWS = 4, 2
ROWS_PER_SM_OVER_MORE_CTAS, COLUMNS_OF_TWO_SHORT_ROWS = {40: 5, 48: 10, 64: 9}, 48
# By four CTAs or eight with more than so many columns: over twice as many, for so many rows of each SM. 132 x 29696
# takes 15.1 us so and 18.2, 264 x 29696 21.1 and 24.0, 132 x 114688 36.1 and 39.8, but 264 x 58368 35.9 and 34.6.
MOST_COLUMNS_OF_FEW_ROWS, ROWS_PER_SM_OVER_TWICE_THE_CTAS = 52, {4: 2, 8: 1}
# By eight CTAs of eight warps, with 40 columns at most: over sixteen of four. 132 x 73728 25.1 us so and 28.7, 528 x
# 73728 65.3 and 68.2, 2048 x 73728 228 and 221.
ROWS_PER_SM_BY_FEWER_WARPS = 4
# In the place of multi-wave by CTAs of so many warps, by a ring over two CTAs: 37 x 8008 takes 10.0 us so and 11.8, 132
# x 5320 11.8 and 12.6, but 264 x 5320 17.5 and 13.6 (LayerNorm); 60 x 7664 8.2 and 9.9 (RMSNorm).
MANY_WARPS = 16

# --- Forward ---

# By CTAs of one row tile each, which start sooner than a ring: what an SM gets of x, at most, if a ring is the best for
# many rows. RMSNorm 264 x 4096 takes 5.4 us and 6.3 by a ring, 1056 x 4096 8.5 and 8.7, but 1056 x 8192 12.6 and 12.2.
# LayerNorm, whose CTAs load two parameters, 528 x 2048 5.9 and 6.2, 1056 x 2048 6.9 and 7.2, but 1056 x 4096 10.1 and
# 8.8. Narrow rows end sooner: 5544 x 512, 1344 threads, 7.6 us and 7.5 (RMSNorm), 4224 x 512, 1024 threads, 7.3 and 7.1
# (LayerNorm).
ONE_TILE_BYTES_PER_SM = {"layer": 32 * 1024, "rms": 64 * 1024}
ONE_TILE_THREADS_PER_SM = {"layer": 512, "rms": 1024}
MOST_COLUMNS_OF_ONE_TILE = {"layer": 8192, "rms": ONE_TILE_COLUMNS}
ELEMENTS_OF_WIDE_ROWS = 64  # of a thread, where 32 are not enough for any number of warps
ONE_TILE_WARPS = (2, 4, 8, 16)
ELEMENTS_OF_NARROW_ROWS = 16  # of a thread, by several rows if need be
# LayerNorm, with two parameters, had better load 8 bytes at once: 1250 x 2048 7.2 us and 8.2 by 16, 2500 x 3072 12.7
# and 13.2; but 1000 columns are as fast either way.
LONG_LOADS, SHORT_LOADS = 16, 8
# In the place of multi-wave CTAs that walk over rows, so many 16-bit rows of each SM, by the most columns, half as many
# of 32 bits; None: as many as run at once. 40000 x 1680 takes 71 us so and 79, 8000 x 928 12.5 and 13.3, but 1000 x 416
# 5.7 and 5.3, 4000 x 528 8.1 and 7.6, 2600 x 1872 10.1 and 9.4 (LayerNorm); 30000 x 1600 47 and 52, but 4000 x 656 8.2
# and 7.0 (RMSNorm).
ROWS_PER_SM_OF_ONE_TILE = {
    "layer": {256: None, 320: 0, 384: 16, 448: 0, 512: math.inf, 896: 16, 1792: math.inf, 2048: 12},
    "rms": {256: None, 320: 0, 384: 16, 448: 0, 640: math.inf, 768: 8, 4096: math.inf},
}
# Of RMSNorm's rows of so many columns, more than so many: 1200 x 2688 takes 8.1 us so and 7.1 by multi-wave, 1700 x
# 2176 8.5 and 7.9, but 6500 x 3136 22.0 and 23.5.
RMS_COLUMNS_WALKED_OVER, RMS_ROWS_PER_SM_WALKED_OVER = range(2049, 4097), 24
# And in the place of a ring of LayerNorm's, of so many columns: 6500 x 1344 takes 13.4 us so and 14.3, 1700 x 1472 7.3
# and 8.0; but of rows that are whole chunks 2600 x 1792 10.0 and 9.8.
COLUMNS_BEFORE_RING, ROWS_PER_SM_BEFORE_RING, ROWS_PER_SM_BEFORE_WHOLE_RING = range(1025, 2049), 50, 12
# And in the place of column tiles, for so many tiles of each CTA: 30 x 16312 takes 6.4 us so and 12.3, 264 x 16312 11.1
# and 13.2, but 1300 x 20808 45 and 42 (LayerNorm). However many of the widest, in bytes: 600 x 32760 26 and 32
# (RMSNorm).
TILES_OF_WIDE_ROWS, WIDEST_ROW_BYTES = 2, 48 * 1024
# In the place of a ring by multi-wave. 16-bit rows so narrow for so many rows of each SM: 1000 x 416 takes 5.3 us so
# and 5.6, 8000 x 320 7.0 and 7.5, but 40000 x 448 21.7 and 20.9 (LayerNorm); 4000 x 384 6.1 and 6.4 (RMSNorm).
# LayerNorm for so many tiles of each CTA, by the columns: 600 x 2496 6.5 us and 7.3, 2600 x 4064 14.8 and 15.8, 2600 x
# 4240 15.4 and 16.5, 6500 x 1984 16.1 and 17.4, 2000 x 13056 31.0 and 33.1, but 6500 x 3360 27.3 and 26.5, 20000 x 1984
# 42.3 and 39.4, 300 x 5120 6.9 and 6.8. For fewer in the place of a ring of whole chunks, and of other wide rows, if
# they end within a chunk: 250 x 11264 8.0 and 8.8, but 2000 x 11264 27.7 and 25.9.
NARROW_COLUMNS_IN_REGISTERS, ROWS_PER_SM_IN_REGISTERS = range(257, 449), 100
TILES_IN_REGISTERS = {
    range(1793, 2048): 12,
    range(2049, 4096): 12,
    range(4097, 5120): 12,
    range(5121, 7169): 12,
    range(12289, 14336): 24,
}
FEWER_TILES_IN_REGISTERS, LEAST_COLUMNS_WITH_TAIL = 8, 4097


class ShortWalk(NamedTuple):
    """A plan, and the most rows of which it is faster than the best plan for many; more than some, if not any few."""

    most_rows: int
    plan: Plan | None = None
    more_than: int = 0


NO_SHORT_WALK = ShortWalk(0)


def column_tiles_short(problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    """In the place of column tiles."""
    if problem.direction == "backward":
        return NO_SHORT_WALK
    short = _for_tiles(TILES_OF_WIDE_ROWS, one_tile_of_any_width(problem, device), device)
    widest = problem.cols * problem.x_dtype.itemsize > WIDEST_ROW_BYTES
    return short._replace(most_rows=MAX_RING_ROWS) if widest and short.plan else short


def multi_wave_short(plan: MultiWavePlan, problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    """In the place of this plan. In the backward the same with all registers, if there is nothing better, where each SM
    gets one CTA anyway: 300 x 2055 takes 10.8 us so and 11.5, but 600 x 2055 13.4 and 12.6 by two CTAs; and of rows of
    multiples of 16 bytes a little longer, 700 x 2200 12.1 and 13.4 (LayerNorm)."""
    if problem.direction == "forward":
        return _one_tile_for_multi_wave(problem, device)
    two_rows = _two_rows(plan, problem, device)
    if two_rows is not NO_SHORT_WALK:
        return two_rows
    # A CTA of two warps alone would leave an SM almost idle.
    if plan.ctas_per_sm == 1 or plan.num_warps == 2 or not problem.num_sums:
        ring = _ring_over_two_ctas(plan, problem, device)
        return NO_SHORT_WALK if ring is None else ShortWalk(device.sm_count, ring)
    alone = replace(plan, ctas_per_sm=1, max_registers=budget.register_limit(32 * plan.num_warps, device))
    ctas = 3 if plan.rows_per_tile == 1 and problem.norm == "layer" and problem.tma_aligned else 2
    return ShortWalk(ctas * least_rows_of_cta(plan) * device.sm_count, alone)


def pipelined_short(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec, tiles: int) -> ShortWalk:
    """In the place of this plan; by another ring for so many tiles of each CTA."""
    if problem.direction == "backward":
        return _short_backward_of_ring(plan, problem, device, tiles)
    one_row = _one_row(plan, problem, device) if problem.norm == "layer" else None
    in_registers = _multi_wave_before_ring(plan, one_row, problem, device)
    if in_registers is not NO_SHORT_WALK:
        return in_registers
    if one_row is not None:
        # For longer in a cluster: 2000 x 15872 takes 33.5 us so and 36.7 by two rows over twice as many CTAs, 4000 x
        # 15872 70.0 and 66.9; 4000 x 8000, by one CTA and two rows over two, 37.7 and 34.3.
        return _for_tiles(tiles * min(one_row.cluster, 2), one_row, device)
    one_tile_each = one_tile(problem, device)
    if one_tile_each is None:
        one_stage = replace(plan, num_stages=1) if plan.short_lived and plan.num_stages > 1 else None
        return _for_tiles(1, one_stage, device)
    most_rows = rows_at_once(one_tile_each, device)
    if problem.norm == "layer" and problem.cols in COLUMNS_BEFORE_RING:
        longer = problem.x_dtype.itemsize == 2 and not is_whole(plan, problem.cols)
        rows_per_sm = ROWS_PER_SM_BEFORE_RING if longer else ROWS_PER_SM_BEFORE_WHOLE_RING
        most_rows = max(most_rows, rows_per_sm * device.sm_count)
    return ShortWalk(most_rows, one_tile_each)


def _rings_with(wanted: dict, problem: NormProblem, device: DeviceSpec) -> Iterator[PipelinedPlan]:
    """The plans that have these fields."""
    return (plan for plan in pipelined_plans(problem, device) if wanted.items() <= vars(plan).items())


def _for_tiles(tiles: int, plan: MultiWavePlan | PipelinedPlan | None, device: DeviceSpec) -> ShortWalk:
    return NO_SHORT_WALK if plan is None else ShortWalk(tiles * rows_at_once(plan, device), plan)


# --- Backward ---


def _short_backward_of_ring(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec, tiles: int) -> ShortWalk:
    if has_two_rows_in_cluster(plan):
        return NO_SHORT_WALK
    two_rows = _two_rows(plan, problem, device)
    if two_rows is not NO_SHORT_WALK:
        return two_rows
    if problem.norm == "rms" and bytes_per_element(problem) == 4 and problem.num_sums:
        for columns, rows_per_sm in RMS_ROWS_PER_SM_IN_REGISTERS.items():
            if problem.cols in columns:
                return ShortWalk(rows_per_sm * device.sm_count, multi_wave(problem, device))
    more_ctas = _over_more_ctas(plan, problem, device)
    if more_ctas is not NO_SHORT_WALK:
        return more_ctas
    ring = _one_large_cta(problem, device) or _two_ctas(plan, device) or _two_stages(plan)
    return _for_tiles(tiles, ring, device)


def _two_rows(plan: MultiWavePlan | PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    rows_per_sm = _by_columns(TWO_ROWS_PER_SM[problem.norm, plan.variant], problem.cols, beyond=0)
    two_rows = two_rows_of_one_chunk(problem, device)
    if two_rows in (None, plan) or not rows_per_sm or not problem.num_sums:
        return NO_SHORT_WALK
    return ShortWalk(rows_per_sm * device.sm_count, two_rows)


def two_rows_of_one_chunk(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """Of 16-bit rows, so that a column of dw and db has one thread; so many CTAs that an SM has eight warps."""
    if problem.cols not in COLUMNS_OF_TWO_ROWS or bytes_per_element(problem) != 4 or not problem.tma_aligned:
        return None
    chunk = max(256, 1 << (problem.cols - 1).bit_length())
    num_warps = chunk // 256  # 16 bytes for each of 32 threads
    limit = budget.register_limit(32 * WARPS_OF_ONE_CHUNK, device)
    if budget.multiwave_registers(2, chunk, 1, num_warps, problem, device) > limit:
        return None
    return MultiWavePlan(2, chunk, 1, num_warps, WARPS_OF_ONE_CHUNK // num_warps, limit)


def _one_large_cta(problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """On an SM, which leaves fewer partials."""
    wanted = {"cluster": 1, "ctas_per_sm": 1, "num_warps": LARGE_CTA_WARPS, "num_stages": 2}
    plan = best_ring(_rings_with(wanted, problem, device), problem, device)
    if plan is None or not all(ring_key(plan, problem, device)[:2]):
        return None
    slower = (
        plan.rows_per_tile > MAX_ROWS_OF_LARGE_CTA
        or (plan.rows_per_tile == 1 and columns_of_a_thread(plan) > MAX_COLUMNS_OF_ONE_ROW[problem.norm])
        or (plan.weight_in_smem and problem.norm == "layer")  # of 36 columns a thread by up to 23%
    )
    return None if slower else plan


def _ring_over_two_ctas(plan: MultiWavePlan, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """Of 16-bit rows; RMSNorm's not by pieces of 16 bytes: 37 x 7384 takes 10.8 us so and 9.5."""
    short_pieces = problem.cols * problem.x_dtype.itemsize % 32 != 0
    pays = plan.num_warps >= MANY_WARPS and bytes_per_element(problem) == 4 and problem.num_sums
    if not pays or (short_pieces and problem.norm == "rms") or broken_rule("pipelined", problem, 1, device):
        return None
    ring = best_ring(_rings_with({"cluster": 2}, problem, device), problem, device)
    return ring if ring is not None and all(ring_key(ring, problem, device)[:2]) else None


def _two_ctas(plan: PipelinedPlan, device: DeviceSpec) -> PipelinedPlan | None:
    """On an SM instead of three: 4096 x 1536 takes 16.5 us so and 17.0 (LayerNorm), but 4096 x 2688, tiles of one row,
    25.8 and 24.3."""
    if plan.ctas_per_sm < 3 or plan.rows_per_tile == 1:
        return None
    return replace(plan, ctas_per_sm=2, max_registers=budget.register_limit(2 * 32 * plan.num_warps, device))


def _over_more_ctas(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    """Of LayerNorm's rows of which a thread has many columns."""
    columns, rows = columns_of_a_thread(plan), 1
    if problem.norm == "rms" or plan.rows_per_tile > 1 or not problem.num_sums:
        return NO_SHORT_WALK
    if plan.cluster < CTAS_OF_FEW_ROWS and columns > MAX_COLUMNS_PER_THREAD:
        ctas = CTAS_OF_FEW_SHORT_ROWS if plan.cluster == 1 and columns > MANY_COLUMNS else CTAS_OF_FEW_ROWS
        rows = 2 if columns <= COLUMNS_OF_TWO_SHORT_ROWS else 1
        rows_per_sm = _by_columns(ROWS_PER_SM_OVER_MORE_CTAS, columns, beyond=0)
    elif plan.cluster == 8 and plan.num_warps == LARGE_CTA_WARPS and columns <= MANY_COLUMNS:
        ctas, rows_per_sm = 2 * plan.cluster, ROWS_PER_SM_BY_FEWER_WARPS
    elif plan.cluster in ROWS_PER_SM_OVER_TWICE_THE_CTAS and columns > MOST_COLUMNS_OF_FEW_ROWS:
        ctas, rows_per_sm = 2 * plan.cluster, ROWS_PER_SM_OVER_TWICE_THE_CTAS[plan.cluster]
    else:
        return NO_SHORT_WALK
    wanted = {"cluster": ctas, "num_warps": 4, "ctas_per_sm": 2, "num_stages": 2, "rows_per_tile": rows}
    best = best_ring(_rings_with(wanted, problem, device), problem, device)
    if best is None or not ring_key(best, problem, device)[0]:
        return NO_SHORT_WALK
    return ShortWalk(rows_per_sm * device.sm_count, best)


def _two_stages(plan: PipelinedPlan) -> PipelinedPlan | None:
    """Of rows that CTAs share: 600 x 6336 takes 14.9 us so and 15.9 with three, 300 x 12288 14.1 and 15.0 (LayerNorm),
    but 1250 x 12288 30.0 and 28.6 (RMSNorm)."""
    return replace(plan, num_stages=2) if plan.cluster > 1 and plan.num_stages > 2 else None


# --- Forward ---


def _one_row(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """Of LayerNorm, whose parameters are in registers; over half as many CTAs where it was two rows."""
    if plan.cluster == 1 < plan.rows_per_tile:
        return None
    wanted = {"rows_per_tile": 1, "num_stages": 2, "num_warps": plan.num_warps, "weight_in_smem": False}
    if plan.rows_per_tile == 2:
        wanted |= {"cluster": plan.cluster // 2, "ctas_per_sm": 2}
    else:
        wanted |= {"cluster": plan.cluster, "ctas_per_sm": FORWARD_STREAMS_OF_ONE_ROW}
    best = best_ring(_rings_with(wanted, problem, device), problem, device)
    return best if best is not None and ring_key(best, problem, device)[0] else None


def _multi_wave_before_ring(
    plan: PipelinedPlan, one_row: PipelinedPlan | None, problem: NormProblem, device: DeviceSpec
) -> ShortWalk:
    in_registers = multi_wave(problem, device)
    if not isinstance(in_registers, MultiWavePlan):
        return NO_SHORT_WALK
    has_16_bits = problem.x_dtype.itemsize == 2
    if has_16_bits and problem.cols in NARROW_COLUMNS_IN_REGISTERS:
        return ShortWalk(ROWS_PER_SM_IN_REGISTERS * device.sm_count, in_registers)
    if problem.norm == "rms":
        return NO_SHORT_WALK
    tiles = next((tiles for columns, tiles in TILES_IN_REGISTERS.items() if problem.cols in columns), 0)
    if has_16_bits and tiles:
        whole = is_whole(plan, problem.cols)
        return _for_tiles(FEWER_TILES_IN_REGISTERS if whole else tiles, in_registers, device)
    with_tail = plan.tail and problem.cols >= LEAST_COLUMNS_WITH_TAIL and one_row in (None, plan)
    return _for_tiles(FEWER_TILES_IN_REGISTERS, in_registers, device) if with_tail else NO_SHORT_WALK


def _one_tile_for_multi_wave(problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    plan = one_tile(problem, device)
    rows_per_sm = _by_columns(ROWS_PER_SM_OF_ONE_TILE[problem.norm], problem.cols, beyond=None)
    if plan is None or rows_per_sm is None:
        return _for_tiles(1, plan, device)
    rows_at_16_bits = device.sm_count * 2 / problem.x_dtype.itemsize
    most_rows = int(min(rows_per_sm * rows_at_16_bits, MAX_RING_ROWS))
    walked_over = problem.norm == "rms" and problem.cols in RMS_COLUMNS_WALKED_OVER
    more_than = int(RMS_ROWS_PER_SM_WALKED_OVER * rows_at_16_bits) if walked_over else 0
    return ShortWalk(most_rows, plan, more_than) if most_rows else NO_SHORT_WALK


def _by_columns(values: dict, columns: int, beyond: int | None) -> float | None:
    """The value of the first bound that is not exceeded."""
    return next((value for most, value in values.items() if columns <= most), beyond)


def one_tile(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """The best plan by CTAs of one row tile each, of rows for which there are good others; if there is any."""
    too_wide = problem.cols > MOST_COLUMNS_OF_ONE_TILE[problem.norm]
    return None if too_wide else one_tile_of_any_width(problem, device)


def one_tile_of_any_width(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """The best plan by CTAs of one row tile each, of which an SM has no more than are faster so; if there is any."""
    return max(one_tile_plans(problem, device), key=lambda plan: _one_tile_key(problem, plan), default=None)


def one_tile_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[MultiWavePlan]:
    """Of forwards whose rows are multiples of 16 bytes, those whose threads load 8 bytes or more at once."""
    if not problem.tma_aligned or problem.acc_dtype.itemsize == 8:
        return
    elements_at_once = 8 // problem.x_dtype.itemsize
    wide = problem.cols > ELEMENTS_OF_ONE_TILE * 32 * ONE_TILE_WARPS[-1]
    most_elements = ELEMENTS_OF_WIDE_ROWS if wide else ELEMENTS_OF_ONE_TILE
    for num_warps, rows_per_tile in itertools.product(ONE_TILE_WARPS, powers_of_two(1, 32)):
        threads = 32 * num_warps
        for chunk, num_chunks in chunkings(problem.cols, MIN_MULTIWAVE_CHUNK, MAX_CHUNKS):
            elements = rows_per_tile * chunk * num_chunks / threads
            if rows_per_tile * chunk < elements_at_once * threads or elements > most_elements:
                continue
            tile_bytes = rows_per_tile * problem.cols * problem.x_dtype.itemsize
            registers = budget.one_tile_registers(elements, problem)
            room = ctas_with_room(registers, threads, device)
            wanted = max(1, ONE_TILE_BYTES_PER_SM[problem.norm] // tile_bytes)
            ctas_per_sm = min(room, wanted, ONE_TILE_THREADS_PER_SM[problem.norm] // threads)
            if ctas_per_sm:
                limit = budget.register_limit(threads * ctas_per_sm, device)
                yield MultiWavePlan(rows_per_tile, chunk, num_chunks, num_warps, ctas_per_sm, limit, True)


def _one_tile_key(problem: NormProblem, plan: MultiWavePlan) -> tuple:
    """Larger is better: little padding; few warps; then threads with enough to do, and loads of a good length."""
    threads = 32 * plan.num_warps
    loads = SHORT_LOADS if problem.norm == "layer" and problem.cols > WHOLE_COLUMNS else LONG_LOADS
    return (
        -max(TOLERATED_PADDING, plan.chunk * plan.num_chunks / problem.cols),
        -plan.num_warps,
        -distance(plan.rows_per_tile * plan.chunk * plan.num_chunks / threads, ELEMENTS_OF_NARROW_ROWS),
        -distance(plan.rows_per_tile * plan.chunk * problem.x_dtype.itemsize / threads, loads),
    )
