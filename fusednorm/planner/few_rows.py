"""Plans that replace the best plan at some row counts, and these row counts. Most of them are few rows; some replace it
from a row count on (`more_than`), or at any row count (infinity in a table).

A CTA with few row tiles spends most of its time on the work it does once: start, parameters, partials. The numbers were
fitted on an H200 (bfloat16, 1 to 40000 rows). The measurements are in bench/NOTES.md, "Evidence behind constants".
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
    columns_per_thread,
    has_two_rows_in_cluster,
    is_whole,
    least_rows_of_cta,
    rows_at_once,
)
from .preference import ELEMENTS_OF_ONE_TILE, TOLERATED_PADDING, WARPS_OF_ONE_CHUNK, WHOLE_COLUMNS, distance, is_sound
from .tile_share import (
    FORWARD_STREAMS_OF_ONE_ROW,
    MANY_COLUMNS,
    MAX_COLUMNS_PER_THREAD,
    ONE_TILE_COLUMNS,
    bytes_per_element,
    exceeds_thread_tile,
)

# --- Backward ---

# Few rows: one CTA of this many warps on an SM instead of several leaves fewer partials to sum. It is faster for tiles
# of up to MAX_ROWS_OF_LARGE_CTA rows, and for one-row tiles of up to this many columns per thread.
LARGE_CTA_WARPS, MAX_ROWS_OF_LARGE_CTA, MAX_COLUMNS_OF_ONE_ROW = 8, 2, {"layer": 24, "rms": 28}
# Tiles of two rows in one chunk: each thread loads 16 bytes of both rows.
ONE_CHUNK_COLUMNS = range(97, 2049)  # widths that have such a tile
# The most rows per SM at which such a tile replaces another plan, by (norm, variant replaced) and then by most columns.
TWO_ROWS_PER_SM = {
    ("layer", "multi_wave"): {256: 6, 1024: 64, 1280: 26, 2048: 13},
    ("layer", "pipelined"): {256: 0, 512: 3, 640: 8, 1024: 5, 1280: 9, 1536: 13, 2048: 11},
    ("rms", "multi_wave"): {1024: 2, 1280: 18, 2048: 12},
    ("rms", "pipelined"): {256: 0, 512: 2, 640: 4, 1024: 2, 2048: 6},
}
# RMSNorm: the rows per SM up to which multi-wave replaces a ring, by columns.
RMS_ROWS_PER_SM_IN_REGISTERS = {range(2049, 2305): 8, range(4097, 4608): 12}
# LayerNorm, where the ring for many rows has one CTA or two per row and many columns per thread: the CTAs per row for
# few rows, and the rows per SM up to which these CTAs are faster (keys: the most columns per thread). Rows by one CTA
# with more than MANY_COLUMNS get CTAS_OF_FEW_SHORT_ROWS. A cluster's tile has two rows up to COLUMNS_OF_TWO_SHORT_ROWS
# columns per thread, else one.
CTAS_OF_FEW_ROWS, CTAS_OF_FEW_SHORT_ROWS = 4, 2
ROWS_PER_SM_OVER_MORE_CTAS, COLUMNS_OF_TWO_SHORT_ROWS = {40: 5, 48: 10, 64: 9}, 48
# LayerNorm, where the ring for many rows has four or eight CTAs per row and more columns per thread than the first
# number: the rows per SM up to which twice as many CTAs are faster, by CTAs.
MOST_COLUMNS_OF_FEW_ROWS, ROWS_PER_SM_OVER_TWICE_THE_CTAS = 52, {4: 2, 8: 1}
# LayerNorm, where the ring for many rows has eight CTAs of eight warps per row and at most MANY_COLUMNS columns per
# thread: the rows per SM up to which sixteen CTAs of four warps are faster.
ROWS_PER_SM_BY_FEWER_WARPS = 4
# Multi-wave CTAs with at least this many warps give way to a ring over two CTAs, up to one row per SM.
MANY_WARPS = 16

# --- Forward ---

# CTAs of one row tile each start sooner than a ring. Where a ring is the best plan for many rows, they are used while
# an SM gets at most this many bytes of x and this many threads. LayerNorm's CTAs load two parameters and pay off up to
# fewer bytes. For narrow rows the gain ends sooner, hence the limit on threads.
ONE_TILE_BYTES_PER_SM = {"layer": 32 * 1024, "rms": 64 * 1024}
ONE_TILE_THREADS_PER_SM = {"layer": 512, "rms": 1024}
MOST_COLUMNS_OF_ONE_TILE = {"layer": 8192, "rms": ONE_TILE_COLUMNS}
ELEMENTS_OF_WIDE_ROWS = 64  # per thread, where 32 are not enough for any number of warps
ONE_TILE_WARPS = (2, 4, 8, 16)
ELEMENTS_OF_NARROW_ROWS = 16  # per thread, of several rows if need be
# Bytes per load of a thread. LayerNorm, with two parameters, prefers SHORT_LOADS for rows of more than WHOLE_COLUMNS.
LONG_LOADS, SHORT_LOADS = 16, 8
# Rows per SM up to which one-tile CTAs replace multi-wave CTAs with many tiles each (keys: the most columns). The
# numbers are for 16-bit rows; 32-bit rows get half of them. 0: never; inf: any number of rows; None: as many rows as
# run at once.
ROWS_PER_SM_OF_ONE_TILE = {
    "layer": {256: None, 320: 0, 384: 16, 448: 0, 512: math.inf, 896: 16, 1792: math.inf, 2048: 12},
    "rms": {256: None, 320: 0, 384: 16, 448: 0, 640: math.inf, 768: 8, 4096: math.inf},
}
# RMSNorm's rows of these columns: multi-wave is faster for up to this many rows per SM, one-tile CTAs for more.
RMS_COLUMNS_OF_MULTI_WAVE, RMS_ROWS_PER_SM_OF_MULTI_WAVE = range(2049, 4097), 24
# LayerNorm's rows of these columns: one-tile CTAs replace a ring up to these rows per SM. The second number holds for
# rows that are whole chunks, or not of 16 bits.
COLUMNS_BEFORE_RING, ROWS_PER_SM_BEFORE_RING, ROWS_PER_SM_BEFORE_WHOLE_RING = range(1025, 2049), 50, 12
# One-tile CTAs replace column tiles up to this many tiles per CTA, and at any row count for rows of more bytes than
# WIDEST_ROW_BYTES.
TILES_OF_WIDE_ROWS, WIDEST_ROW_BYTES = 2, 48 * 1024
# Multi-wave replaces a ring for narrow 16-bit rows up to this many rows per SM.
NARROW_COLUMNS_IN_REGISTERS, ROWS_PER_SM_IN_REGISTERS = range(257, 449), 100
# Multi-wave replaces a ring for LayerNorm's 16-bit rows up to this many tiles per CTA, by columns.
TILES_IN_REGISTERS = {
    range(1793, 2048): 12,
    range(2049, 4096): 12,
    range(4097, 5120): 12,
    range(5121, 7169): 12,
    range(12289, 14336): 24,
}
# The limit where the ring's chunks are exactly a row. It is also the limit at other widths, if the row ends within a
# chunk and has LEAST_COLUMNS_WITH_TAIL columns or more.
FEWER_TILES_IN_REGISTERS, LEAST_COLUMNS_WITH_TAIL = 8, 4097


class Replacement(NamedTuple):
    """`plan` replaces the best plan for many rows where more_than < rows <= most_rows."""

    most_rows: int
    plan: Plan | None = None
    more_than: int = 0


NO_REPLACEMENT = Replacement(0)


def replacement_of_column_tiles(problem: NormProblem, device: DeviceSpec) -> Replacement:
    """One-tile CTAs for few rows instead of column tiles; forward only."""
    if problem.direction == "backward":
        return NO_REPLACEMENT
    one_tile_each = one_tile_of_any_width(problem, device)
    if one_tile_each and problem.cols * problem.x_dtype.itemsize > WIDEST_ROW_BYTES:
        return Replacement(MAX_RING_ROWS, one_tile_each)
    return _for_tiles(TILES_OF_WIDE_ROWS, one_tile_each, device)


def replacement_of_multi_wave(plan: MultiWavePlan, problem: NormProblem, device: DeviceSpec) -> Replacement:
    """What replaces this multi-wave plan for few rows.

    If a backward has nothing better, it is the same plan with one CTA per SM, which may use all registers. It applies
    while an SM gets one CTA anyway, and up to a few more of LayerNorm's rows of multiples of 16 bytes.
    """
    if problem.direction == "forward":
        return _one_tile_for_multi_wave(problem, device)
    two_rows = _two_rows(plan, problem, device)
    if two_rows is not NO_REPLACEMENT:
        return two_rows
    # One CTA of two warps would leave an SM almost idle.
    if plan.ctas_per_sm == 1 or plan.num_warps == 2 or not problem.num_sums:
        ring = _ring_over_two_ctas(plan, problem, device)
        return NO_REPLACEMENT if ring is None else Replacement(device.sm_count, ring)
    one_cta = replace(plan, ctas_per_sm=1, max_registers=budget.register_limit(32 * plan.num_warps, device))
    ctas = 3 if plan.rows_per_tile == 1 and problem.norm == "layer" and problem.tma_aligned else 2
    return Replacement(ctas * least_rows_of_cta(plan) * device.sm_count, one_cta)


def replacement_of_pipelined(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec, tiles: int) -> Replacement:
    """What replaces this ring for few rows. If it is another ring, it does so up to `tiles` row tiles per CTA."""
    if problem.direction == "backward":
        return _for_backward_ring(plan, problem, device, tiles)
    one_row = _one_row(plan, problem, device) if problem.norm == "layer" else None
    in_registers = _multi_wave_before_ring(plan, one_row, problem, device)
    if in_registers is not NO_REPLACEMENT:
        return in_registers
    if one_row is not None:
        # In a cluster, one-row tiles stay faster up to more tiles per CTA.
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
    return Replacement(most_rows, one_tile_each)


def _best_ring_with(wanted: dict, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """The best ring whose fields have these values; None if its stages or registers do not suffice."""
    plans = (plan for plan in pipelined_plans(problem, device) if wanted.items() <= vars(plan).items())
    plan = best_ring(plans, problem, device)
    return plan if plan and is_sound(plan, problem, device) else None


def _for_tiles(tiles: int, plan: MultiWavePlan | PipelinedPlan | None, device: DeviceSpec) -> Replacement:
    return NO_REPLACEMENT if plan is None else Replacement(tiles * rows_at_once(plan, device), plan)


# --- Backward ---


def _for_backward_ring(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec, tiles: int) -> Replacement:
    if has_two_rows_in_cluster(plan):
        return NO_REPLACEMENT
    two_rows = _two_rows(plan, problem, device)
    if two_rows is not NO_REPLACEMENT:
        return two_rows
    if problem.norm == "rms" and bytes_per_element(problem) == 4 and problem.num_sums:
        for columns, rows_per_sm in RMS_ROWS_PER_SM_IN_REGISTERS.items():
            if problem.cols in columns:
                return Replacement(rows_per_sm * device.sm_count, multi_wave(problem, device))
    more_ctas = _over_more_ctas(plan, problem, device)
    if more_ctas is not NO_REPLACEMENT:
        return more_ctas
    ring = _one_large_cta(problem, device) or _two_ctas(plan, device) or _two_stages(plan)
    return _for_tiles(tiles, ring, device)


def _two_rows(plan: MultiWavePlan | PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> Replacement:
    rows_per_sm = _by_columns(TWO_ROWS_PER_SM[problem.norm, plan.variant], problem.cols, default=0)
    two_rows = two_rows_of_one_chunk(problem, device)
    if two_rows in (None, plan) or not rows_per_sm or not problem.num_sums:
        return NO_REPLACEMENT
    return Replacement(rows_per_sm * device.sm_count, two_rows)


def two_rows_of_one_chunk(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """Plan for tiles of two 16-bit rows in one chunk; None if the rows do not fit it.

    One thread adds up each column of dw and db. An SM gets WARPS_OF_ONE_CHUNK warps.
    """
    if problem.cols not in ONE_CHUNK_COLUMNS or bytes_per_element(problem) != 4 or not problem.tma_aligned:
        return None
    chunk = max(256, 1 << (problem.cols - 1).bit_length())
    num_warps = chunk // 256  # 16 bytes for each of 32 threads
    limit = budget.register_limit(32 * WARPS_OF_ONE_CHUNK, device)
    if budget.multiwave_registers(2, chunk, 1, num_warps, problem, device) > limit:
        return None
    return MultiWavePlan(2, chunk, 1, num_warps, WARPS_OF_ONE_CHUNK // num_warps, limit)


def _one_large_cta(problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """Ring with one CTA per SM, which leaves fewer partials; None if that is slower."""
    wanted = {"cluster": 1, "ctas_per_sm": 1, "num_warps": LARGE_CTA_WARPS, "num_stages": 2}
    plan = _best_ring_with(wanted, problem, device)
    if plan is None or exceeds_thread_tile(plan, problem):
        return None
    slower = (
        plan.rows_per_tile > MAX_ROWS_OF_LARGE_CTA
        or (plan.rows_per_tile == 1 and columns_per_thread(plan) > MAX_COLUMNS_OF_ONE_ROW[problem.norm])
        or (plan.weight_in_smem and problem.norm == "layer")
    )
    return None if slower else plan


def _ring_over_two_ctas(plan: MultiWavePlan, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """Ring over two CTAs for 16-bit rows instead of multi-wave with many warps; None if it is slower.

    It is slower for RMSNorm's rows of an odd multiple of 16 bytes, which the ring copies in pieces of 16 bytes.
    """
    short_pieces = problem.cols * problem.x_dtype.itemsize % 32 != 0
    pays = plan.num_warps >= MANY_WARPS and bytes_per_element(problem) == 4 and problem.num_sums
    if not pays or (short_pieces and problem.norm == "rms") or broken_rule("pipelined", problem, 1, device):
        return None
    ring = _best_ring_with({"cluster": 2}, problem, device)
    return ring if ring and not exceeds_thread_tile(ring, problem) else None


def _two_ctas(plan: PipelinedPlan, device: DeviceSpec) -> PipelinedPlan | None:
    """The plan with two CTAs per SM instead of three. None if it has fewer, or if its tiles are single rows, for which
    two are slower."""
    if plan.ctas_per_sm < 3 or plan.rows_per_tile == 1:
        return None
    return replace(plan, ctas_per_sm=2, max_registers=budget.register_limit(2 * 32 * plan.num_warps, device))


def _over_more_ctas(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> Replacement:
    """Ring over more CTAs for LayerNorm's rows of many columns per thread."""
    columns, rows = columns_per_thread(plan), 1
    if problem.norm == "rms" or plan.rows_per_tile > 1 or not problem.num_sums:
        return NO_REPLACEMENT
    if plan.cluster < CTAS_OF_FEW_ROWS and columns > MAX_COLUMNS_PER_THREAD:
        ctas = CTAS_OF_FEW_SHORT_ROWS if plan.cluster == 1 and columns > MANY_COLUMNS else CTAS_OF_FEW_ROWS
        rows = 2 if columns <= COLUMNS_OF_TWO_SHORT_ROWS else 1
        rows_per_sm = _by_columns(ROWS_PER_SM_OVER_MORE_CTAS, columns, default=0)
    elif plan.cluster == 8 and plan.num_warps == LARGE_CTA_WARPS and columns <= MANY_COLUMNS:
        ctas, rows_per_sm = 2 * plan.cluster, ROWS_PER_SM_BY_FEWER_WARPS
    elif plan.cluster in ROWS_PER_SM_OVER_TWICE_THE_CTAS and columns > MOST_COLUMNS_OF_FEW_ROWS:
        ctas, rows_per_sm = 2 * plan.cluster, ROWS_PER_SM_OVER_TWICE_THE_CTAS[plan.cluster]
    else:
        return NO_REPLACEMENT
    wanted = {"cluster": ctas, "num_warps": 4, "ctas_per_sm": 2, "num_stages": 2, "rows_per_tile": rows}
    ring = _best_ring_with(wanted, problem, device)
    return NO_REPLACEMENT if ring is None else Replacement(rows_per_sm * device.sm_count, ring)


def _two_stages(plan: PipelinedPlan) -> PipelinedPlan | None:
    """The plan with two stages, for rows over several CTAs; None for others, or if the plan has no more than two."""
    return replace(plan, num_stages=2) if plan.cluster > 1 and plan.num_stages > 2 else None


# --- Forward ---


def _one_row(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """LayerNorm's ring of one-row tiles with weight and bias in registers, over half the CTAs if `plan` has two rows
    per tile; None if there is none."""
    if plan.cluster == 1 and plan.rows_per_tile > 1:
        return None
    wanted = {"rows_per_tile": 1, "num_stages": 2, "num_warps": plan.num_warps, "weight_in_smem": False}
    if plan.rows_per_tile == 2:
        wanted |= {"cluster": plan.cluster // 2, "ctas_per_sm": 2}
    else:
        wanted |= {"cluster": plan.cluster, "ctas_per_sm": FORWARD_STREAMS_OF_ONE_ROW}
    return _best_ring_with(wanted, problem, device)


def _multi_wave_before_ring(
    plan: PipelinedPlan, one_row: PipelinedPlan | None, problem: NormProblem, device: DeviceSpec
) -> Replacement:
    in_registers = multi_wave(problem, device)
    if in_registers.kernel != "multi_wave":
        return NO_REPLACEMENT
    has_16_bits = problem.x_dtype.itemsize == 2
    if has_16_bits and problem.cols in NARROW_COLUMNS_IN_REGISTERS:
        return Replacement(ROWS_PER_SM_IN_REGISTERS * device.sm_count, in_registers)
    if problem.norm == "rms":
        return NO_REPLACEMENT
    tiles = next((tiles for columns, tiles in TILES_IN_REGISTERS.items() if problem.cols in columns), 0)
    if has_16_bits and tiles:
        whole = is_whole(plan, problem.cols)
        return _for_tiles(FEWER_TILES_IN_REGISTERS if whole else tiles, in_registers, device)
    with_tail = plan.tail and problem.cols >= LEAST_COLUMNS_WITH_TAIL and one_row in (None, plan)
    return _for_tiles(FEWER_TILES_IN_REGISTERS, in_registers, device) if with_tail else NO_REPLACEMENT


def _one_tile_for_multi_wave(problem: NormProblem, device: DeviceSpec) -> Replacement:
    plan = one_tile(problem, device)
    rows_per_sm = _by_columns(ROWS_PER_SM_OF_ONE_TILE[problem.norm], problem.cols, default=None)
    if plan is None or rows_per_sm is None:
        return _for_tiles(1, plan, device)
    sms = device.sm_count * 2 / problem.x_dtype.itemsize  # the numbers of rows per SM are for 16 bits
    most_rows = int(min(rows_per_sm * sms, MAX_RING_ROWS))
    several_tiles = problem.norm == "rms" and problem.cols in RMS_COLUMNS_OF_MULTI_WAVE
    more_than = int(RMS_ROWS_PER_SM_OF_MULTI_WAVE * sms) if several_tiles else 0
    return Replacement(most_rows, plan, more_than) if most_rows else NO_REPLACEMENT


def _by_columns(values: dict, columns: int, default: int | None) -> float | None:
    """The value of the first key that is at least `columns`; `default` if there is none."""
    return next((value for most, value in values.items() if columns <= most), default)


def one_tile(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """The best plan with one row tile per CTA; None above MOST_COLUMNS_OF_ONE_TILE, where other plans are good."""
    too_wide = problem.cols > MOST_COLUMNS_OF_ONE_TILE[problem.norm]
    return None if too_wide else one_tile_of_any_width(problem, device)


def one_tile_of_any_width(problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    """The best plan with one row tile per CTA, or None."""
    return max(one_tile_plans(problem, device), key=lambda plan: _one_tile_key(problem, plan), default=None)


def one_tile_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[MultiWavePlan]:
    """Forward plans with one row tile per CTA, for rows of multiples of 16 bytes; each load has 8 bytes or more."""
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
    """Larger is better: little padding, few warps, enough elements per thread, then loads of the preferred length."""
    threads = 32 * plan.num_warps
    loads = SHORT_LOADS if problem.norm == "layer" and problem.cols > WHOLE_COLUMNS else LONG_LOADS
    return (
        -max(TOLERATED_PADDING, plan.chunk * plan.num_chunks / problem.cols),
        -plan.num_warps,
        -distance(plan.rows_per_tile * plan.chunk * plan.num_chunks / threads, ELEMENTS_OF_NARROW_ROWS),
        -distance(plan.rows_per_tile * plan.chunk * problem.x_dtype.itemsize / threads, loads),
    )
