"""The plan that takes the place of the best one where CTAs get few row tiles, and up to how many rows.

What a kernel does once for each CTA is most of what it does then. The numbers were found on an H200 (bfloat16, 1 to
40000 rows; bench/results/2026-11-22-nvidia-h200-few-rows and -fewer-rows.jsonl).
"""

from __future__ import annotations

import itertools
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
from .legality import MAX_RING_ROWS
from .plan import (
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    columns_of_a_thread,
    has_two_rows_in_cluster,
    least_rows_of_cta,
    rows_at_once,
)
from .preference import (
    ELEMENTS_OF_ONE_TILE,
    FORWARD_STREAMS_OF_ONE_ROW,
    ONE_TILE_COLUMNS,
    TOLERATED_PADDING,
    WARPS_OF_ONE_CHUNK,
    WHOLE_COLUMNS,
    bytes_per_element,
    distance,
    ring_key,
)
from .problem import NormProblem

# --- Backward ---

# Of the one CTA on an SM that a few rows get: half as many partials to sum as of two CTAs. 1024 x 4096 takes 13.7 us so
# and 14.1 by two CTAs, 600 x 3072 11.1 us and 12.0; but 4000 x 2048, four rows, 19.4 us and 18.3, 264 x 1024, eight,
# 10.6 us and 8.1. Over two CTAs 700 x 8192, 32 columns of a thread, 16.1 us and 17.2; 700 x 5120, two rows in a
# cluster, 13.6 us and 14.2 (LayerNorm). One row of 28 columns a thread 300 x 7168 12.8 us and 12.2 by two CTAs, 11.2
# and 11.3 (RMSNorm).
LARGE_CTA_WARPS, MAX_ROWS_OF_LARGE_CTA, MAX_COLUMNS_OF_ONE_ROW = 8, 2, {"layer": 24, "rms": 28}
# Tiles of two rows by one chunk, of which each thread loads 16 bytes of both rows: of how many columns, and for up to
# how many rows of each SM by the columns of the chunk, in the place of multi-wave and of a ring. 132 x 632 takes 6.8 us
# so and 7.8 by four rows, 5000 x 632 14.5 and 15.8 by two warps, but 12000 x 632 24.5 and 22.5; 700 x 2048 10.2
# and 11.1 by the ring, 132 x 768 6.9 and 7.6, 264 x 288 7.2 and 8.5 (LayerNorm); 132 x 632 6.7 and 7.0, 1050 x 632 8.9
# and 8.1, 132 x 1232 6.6 and 7.8 by the ring, 700 x 1680 9.3 and 9.9 (RMSNorm).
COLUMNS_OF_TWO_ROWS = range(97, 2049)
TWO_ROWS_PER_SM = {
    ("layer", "multi_wave"): {256: 6, 512: 64, 1024: 64, 2048: 16},
    ("layer", "pipelined"): {512: 3, 1024: 5, 2048: 8},
    ("rms", "multi_wave"): {256: 2, 512: 2, 1024: 2, 2048: 16},
    ("rms", "pipelined"): {512: 2, 1024: 2, 2048: 6},
}

# --- Forward ---

# By CTAs of one row tile each, which start sooner than a ring: what an SM gets of x, at most, if a ring is the best for
# many rows. RMSNorm 264 x 4096 takes 5.4 us and 6.3 by a ring, 1056 x 4096 8.5 and 8.7, but 1056 x 8192 12.6 and 12.2.
# LayerNorm, whose CTAs load two parameters, 528 x 2048 5.9 and 6.2, 1056 x 2048 6.9 and 7.2, but 1056 x 4096 10.1 and
# 8.8. Narrow rows end sooner: 5544 x 512, 1344 threads, 7.6 us and 7.5 (RMSNorm), 4224 x 512, 1024 threads, 7.3 and 7.1
# (LayerNorm).
ONE_TILE_BYTES_PER_SM = {"layer": 32 * 1024, "rms": 64 * 1024}
ONE_TILE_THREADS_PER_SM = {"layer": 512, "rms": 1024}
MOST_COLUMNS_OF_ONE_TILE = {"layer": 4096, "rms": ONE_TILE_COLUMNS}
ONE_TILE_WARPS = (2, 4, 8, 16)
ELEMENTS_OF_NARROW_ROWS = 16  # of a thread, by several rows if need be
# LayerNorm, with two parameters, had better load 8 bytes at once: 1250 x 2048 7.2 us and 8.2 by 16, 2500 x 3072 12.7
# and 13.2; but 1000 columns are as fast either way.
LONG_LOADS, SHORT_LOADS = 16, 8
# In the place of multi-wave CTAs that walk over rows, any number of these columns: 1250 x 1232 takes 6.3 us and 8.3,
# 40000 x 1680 71 us and 79, 4200 x 504 7.2 and 9.4 (LayerNorm). Of narrower rows so many for each SM: 2500 x 632 6.8 us
# and 7.5, 8000 x 632 10.9 and 9.9. And in the place of a ring of LayerNorm's, of some columns, more than run at
# once: 1500 x 1376 6.8 us and 7.6, 2100 x 1376 8.7 and 8.2, 1200 x 3840 10.0 and 10.8.
COLUMNS_OF_ONE_TILE = {"layer": (range(481, 513), range(960, 2049)), "rms": (range(481, 513), range(960, 3073))}
NARROW_ROWS_PER_SM, ROWS_PER_SM_BEFORE_RING, COLUMNS_BEFORE_RING = 40, 12, (range(1025, 2049), range(3585, 4096))
# LayerNorm, in the place of a ring by multi-wave for so many tiles of each CTA: 16-bit rows of some columns, and from
# 4097 columns on those that end within a chunk of the ring's. 600 x 2496 takes 6.5 us and 7.3, 1500 x 3328 9.5 and
# 10.4, 528 x 5632 7.7 and 8.5, 250 x 11264 8.0 and 8.8, but 600 x 7168, without a tail, 9.5 and 9.3, 2000 x 11264 27.3
# and 26.4.
COLUMNS_IN_REGISTERS, LEAST_COLUMNS_WITH_TAIL, TILES_IN_REGISTERS = range(2049, 3585), 4097, 8


class ShortWalk(NamedTuple):
    """A plan, and the most rows of which it is faster than the best plan for many."""

    most_rows: int
    plan: Plan | None = None


NO_SHORT_WALK = ShortWalk(0)


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
        return NO_SHORT_WALK
    alone = replace(plan, ctas_per_sm=1, max_registers=budget.register_limit(32 * plan.num_warps, device))
    ctas = 3 if plan.rows_per_tile == 1 and problem.norm == "layer" and problem.tma_aligned else 2
    return ShortWalk(ctas * least_rows_of_cta(plan) * device.sm_count, alone)


def pipelined_short(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec, tiles: int) -> ShortWalk:
    """In the place of this plan; by another ring for so many tiles of each CTA."""
    if problem.direction == "backward":
        if has_two_rows_in_cluster(plan):
            return NO_SHORT_WALK
        two_rows = _two_rows(plan, problem, device)
        ring = _one_large_cta(problem, device) or _two_ctas(plan, device) or _two_stages(plan)
        return two_rows if two_rows is not NO_SHORT_WALK else _for_tiles(tiles, ring, device)
    if problem.norm == "layer":
        one_row = _one_row(plan, problem, device)
        if one_row in (None, plan) and _may_be_in_registers(plan, problem):
            in_registers = multi_wave(problem, device)
            if isinstance(in_registers, MultiWavePlan):
                return _for_tiles(TILES_IN_REGISTERS, in_registers, device)
        if one_row is not None:
            return _for_tiles(tiles, one_row, device)
    one_tile_each = one_tile(problem, device)
    if one_tile_each is None:
        one_stage = replace(plan, num_stages=1) if plan.short_lived and plan.num_stages > 1 else None
        return _for_tiles(1, one_stage, device)
    more = problem.norm == "layer" and any(problem.cols in columns for columns in COLUMNS_BEFORE_RING)
    at_once = rows_at_once(one_tile_each, device)
    return ShortWalk(max(at_once, ROWS_PER_SM_BEFORE_RING * device.sm_count * more), one_tile_each)


def _rings_with(wanted: dict, problem: NormProblem, device: DeviceSpec) -> Iterator[PipelinedPlan]:
    """The plans that have these fields."""
    return (plan for plan in pipelined_plans(problem, device) if wanted.items() <= vars(plan).items())


def _for_tiles(tiles: int, plan: MultiWavePlan | PipelinedPlan | None, device: DeviceSpec) -> ShortWalk:
    return NO_SHORT_WALK if plan is None else ShortWalk(tiles * rows_at_once(plan, device), plan)


# --- Backward ---


def _two_rows(plan: MultiWavePlan | PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    rows_per_sm = TWO_ROWS_PER_SM.get((problem.norm, plan.variant), {})
    two_rows = two_rows_of_one_chunk(problem, device)
    if two_rows in (None, plan) or two_rows.chunk not in rows_per_sm or not problem.num_sums:
        return NO_SHORT_WALK
    return ShortWalk(rows_per_sm[two_rows.chunk] * device.sm_count, two_rows)


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


def _two_ctas(plan: PipelinedPlan, device: DeviceSpec) -> PipelinedPlan | None:
    """On an SM instead of three: 4096 x 1536 takes 16.5 us so and 17.0 (LayerNorm), but 4096 x 2688, tiles of one row,
    25.8 and 24.3."""
    if plan.ctas_per_sm < 3 or plan.rows_per_tile == 1:
        return None
    return replace(plan, ctas_per_sm=2, max_registers=budget.register_limit(2 * 32 * plan.num_warps, device))


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


def _may_be_in_registers(plan: PipelinedPlan, problem: NormProblem) -> bool:
    narrower = problem.cols in COLUMNS_IN_REGISTERS and problem.x_dtype.itemsize == 2
    return narrower or (plan.tail and problem.cols >= LEAST_COLUMNS_WITH_TAIL)


def _one_tile_for_multi_wave(problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    short, any_rows = _for_tiles(1, one_tile(problem, device), device), COLUMNS_OF_ONE_TILE[problem.norm]
    if short.plan is None or problem.cols >= any_rows[-1].stop:
        return short
    if any(problem.cols in columns for columns in any_rows):
        return short._replace(most_rows=MAX_RING_ROWS)
    waves = NARROW_ROWS_PER_SM * device.sm_count // short.most_rows  # whole ones: 4509 x 392 is 10% slower by a fifth
    return short._replace(most_rows=max(1, waves) * short.most_rows)


def one_tile(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """The best plan by CTAs of one row tile each, of which an SM has no more than are faster so; if there is any."""
    return max(one_tile_plans(problem, device), key=lambda plan: _one_tile_key(problem, plan), default=None)


def one_tile_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[MultiWavePlan]:
    """Of forwards whose rows are multiples of 16 bytes, those whose threads load 8 bytes or more at once."""
    too_wide = problem.cols > MOST_COLUMNS_OF_ONE_TILE[problem.norm]
    if too_wide or not problem.tma_aligned or problem.acc_dtype.itemsize == 8:
        return
    elements_at_once = 8 // problem.x_dtype.itemsize
    for num_warps, rows_per_tile in itertools.product(ONE_TILE_WARPS, powers_of_two(1, 32)):
        threads = 32 * num_warps
        for chunk, num_chunks in chunkings(problem.cols, MIN_MULTIWAVE_CHUNK, MAX_CHUNKS):
            elements = rows_per_tile * chunk * num_chunks / threads
            if rows_per_tile * chunk < elements_at_once * threads or elements > ELEMENTS_OF_ONE_TILE:
                continue
            tile_bytes = rows_per_tile * problem.cols * problem.x_dtype.itemsize
            registers = budget.one_tile_registers(elements, problem)
            room = ctas_with_room(registers, threads, device)
            wanted = ONE_TILE_BYTES_PER_SM[problem.norm] // tile_bytes, ONE_TILE_THREADS_PER_SM[problem.norm] // threads
            ctas_per_sm = min(room, *wanted)
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
