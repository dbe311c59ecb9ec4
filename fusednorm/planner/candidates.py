"""Plans worth considering, variant by variant, and the best plan of each variant, by the ranks of preference.py.

The measurements behind the constants are in bench/NOTES.md, "Evidence behind constants".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from . import budget
from .device import DeviceSpec
from .norm_problem import NormProblem
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
from .preference import RING_STAGES, is_sound, may_have_few_warps, multiwave_rank, ring_rank, warps_per_sm
from .tile_share import FORWARD_STREAMS_OF_ONE_ROW, bytes_per_element, exceeds_thread_tile

WARPS = (4, 8, 16)
MAX_CHUNKS = 8  # a longer unrolled row loop outgrows the instruction cache
MAX_RING_CHUNKS = {"backward": 16, "forward": 10}
# With more chunks than FEW_CHUNKS, a thread has at least two columns of each chunk; four where the tile is one row that
# ends within a chunk.
FEW_CHUNKS = 10
MIN_MULTIWAVE_CHUNK = 16  # columns; a narrower chunk would make one load gather many short pieces of memory
MAX_ROWS_PER_WARP = 8  # four lanes per row; two lanes per row are no faster
# A row's chunk has at most MAX_BOX_SIDE TMA boxes, over all CTAs of its cluster. Rows of more than COLUMNS_OF_FEW_BOXES
# columns with boxes shorter than BYTES_OF_LONG_BOX are excepted: column tiles, the alternative, are slower. Boxes of 16
# bytes pay up to MOST_BOXES_OF_16_BYTES.
COLUMNS_OF_FEW_BOXES, BYTES_OF_LONG_BOX, MOST_BOXES_OF_16_BYTES = 32768, 128, 512
# Most copies per tile, of all tensors, by num_groups. The producer's 24 registers hold the addresses of no more.
MAX_PRODUCED_COPIES = {1: 12, 2: 4}
# Oldest architecture for which nvFuser has published plans, with deep rings (as_published). Hopper wants few stages.
OLDEST_PUBLISHED_ARCH = 100
CLUSTERS = (1, 2, 4, 8, 16)  # CTAs that share a row too wide for one
CLUSTER_ARCHS = (90, 100, 103)
# (most SMs left to others, largest cluster): see cluster_sizes and bench/NOTES.md, "Clusters beside others".
LARGEST_CLUSTER = ((0, 16), (8, 8), (32, 4), (math.inf, 2))
COLUMN_TILE = 1024
# Tiles of a backward without dx by TMA. Only one tile has been measured so far.
COLUMN_RING_CHUNK = 128
COLUMN_RING_ROWS = (64, 32, 16)
COLUMN_RING_WARPS = 8


# --- Rows in registers, and what does not fit there ---


def multi_wave(problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """The best plan that holds rows in registers; a column tile plan where none fits, or where no dx is wanted. Column
    tiles have no sums by sample: None where these are wanted and no other plan fits."""
    if problem.direction == "backward" and not problem.wants_dx and not problem.by_sample:
        return column_tile_plan(problem, device)  # without dx no row sum is needed, only a reduction over rows
    plans = multiwave_plans(problem, device)
    best = max(plans, key=lambda plan: multiwave_rank(problem, plan, device), default=None)
    return best or (None if problem.by_sample else column_tile_plan(problem, device))


def multiwave_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[MultiWavePlan]:
    """Every plan within the budgets whose threads load at least 8 bytes at once."""
    elements_at_once = 8 // problem.x_dtype.itemsize
    few_warps = may_have_few_warps(problem)
    for num_warps, rows_per_tile in itertools.product((2, *WARPS) if few_warps else WARPS, powers_of_two(1, 128)):
        threads = 32 * num_warps
        for chunk, num_chunks in chunkings(problem.cols, MIN_MULTIWAVE_CHUNK, MAX_CHUNKS):
            if rows_per_tile * chunk < elements_at_once * threads or (num_chunks > 1 and num_warps < min(WARPS)):
                continue
            registers = budget.multiwave_registers(rows_per_tile, chunk, num_chunks, num_warps, problem, device)
            room = ctas_with_room(registers, threads, device)
            if registers <= budget.MAX_REGISTERS and room:
                tile_bytes = rows_per_tile * problem.cols * bytes_per_element(problem)
                enough = warps_per_sm(problem) / num_warps
                if num_chunks > 1 or not few_warps:
                    enough = max(enough, device.bytes_in_flight_per_sm / tile_bytes)
                ctas_per_sm = min(room, math.ceil(enough))
                limit = budget.register_limit(threads * ctas_per_sm, device)
                yield MultiWavePlan(rows_per_tile, chunk, num_chunks, num_warps, ctas_per_sm, limit)


def ctas_with_room(registers: int, threads: int, device: DeviceSpec) -> int:
    """How many CTAs of `threads` threads, with `registers` registers each, fit an SM."""
    return min(device.registers_per_sm // registers, device.max_threads_per_sm) // threads


def column_tile_plan(problem: NormProblem, device: DeviceSpec) -> ColumnTilePlan:
    """The plan for rows that do not fit in registers. In its pass over whole rows, each CTA has one row."""
    whole, fp64 = 1 << max(4, (problem.cols - 1).bit_length()), problem.acc_dtype.itemsize == 8
    chunk = min(COLUMN_TILE, whole)
    # On sm_120 some builds of 4 warps spill, whatever their register limit; with fewer elements per thread none does.
    num_warps = 8 if fp64 or device.arch >= 120 else 4
    if problem.direction == "backward":
        row_pass = 4096, 8
    else:  # short rows are done sooner by 8 warps, long rows by 16
        row_pass = (2048, 8) if problem.cols <= 16384 else (8192 if device.arch < 120 else 4096, 16)
    row_pass_chunk, row_pass_warps = row_pass
    if fp64:
        row_pass_chunk = 8 * 32 * row_pass_warps  # 8 elements per thread; with 4 the build spills on sm_90
    # On sm_80 a thread takes up to 131 registers, but four CTAs of four warps leave it only 128: three CTAs there.
    # So do rows that are read or written beside x, dy, dx and those of a gate.
    many_rows = len(problem.rows_in + problem.rows_out) > 2
    ctas_per_sm = 2 if num_warps == 8 or many_rows else 3 if device.arch < 90 else 4
    rows_per_tile = COLUMN_TILE // chunk
    return ColumnTilePlan(rows_per_tile, chunk, num_warps, ctas_per_sm, min(row_pass_chunk, whole), row_pass_warps)


# --- Rings ---


def pipelined(problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | ColumnRingPlan | None:
    """The best plan that fits shared memory, with or without faults; None if even one stage is too large."""
    if problem.direction == "backward" and not problem.wants_dx:
        return column_ring_plan(problem, device)
    return best_ring(pipelined_plans(problem, device), problem, device)


def column_ring_plan(problem: NormProblem, device: DeviceSpec) -> ColumnRingPlan | None:
    """The plan of a backward without dx: two CTAs per SM, with the largest tile that fits; None if none fits."""
    limit = budget.register_limit(32 * COLUMN_RING_WARPS * 2, device)
    stages = RING_STAGES["backward"]
    plans = (ColumnRingPlan(rows, COLUMN_RING_CHUNK, stages, COLUMN_RING_WARPS, 2, limit) for rows in COLUMN_RING_ROWS)
    return next((plan for plan in plans if budget.fits_shared_memory(plan, problem, device)), None)


def warp_specialized(problem: NormProblem, device: DeviceSpec) -> WarpSpecializedPlan | None:
    """The best plan that fits shared memory, with or without faults; None if even one stage is too large."""
    plan = best_ring(warp_specialized_plans(problem, device), problem, device)
    return as_published(plan, problem, device) if plan and device.arch >= OLDEST_PUBLISHED_ARCH else plan


def as_published(plan: WarpSpecializedPlan, problem: NormProblem, device: DeviceSpec) -> WarpSpecializedPlan:
    """The last steps of nvFuser's ladder: two groups keep a tile in registers where the registers suffice, and the
    number of stages doubles as long as they fit."""
    cached = replace(plan, cached=True)
    if plan.num_groups > 1 and budget.registers(cached, problem, device) <= plan.max_registers:
        plan = cached
    while budget.fits_shared_memory(deeper := replace(plan, num_stages=2 * plan.num_stages), problem, device):
        plan = deeper
    return plan


def best_ring(plans: Iterator[RingPlan], problem: NormProblem, device: DeviceSpec) -> RingPlan | None:
    """The plan of the highest rank that fits shared memory; None if no plan fits.

    To rank a plan takes long, and most plans lack one of the first two fields of RingRank. They are ranked only if no
    plan that has both fits.
    """
    plans = list(plans)
    usual = [plan for plan in plans if not exceeds_thread_tile(plan, problem) and is_sound(plan, problem, device)]
    for some in (usual, plans):
        ranked = sorted(some, key=lambda plan: ring_rank(plan, problem, device), reverse=True)
        for plan in ranked:
            if budget.fits_shared_memory(plan, problem, device):
                return plan
    return None


def pipelined_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[PipelinedPlan]:
    forward = problem.direction == "forward"
    streams = (1, 2, 3, 4) if forward else (1, 2, 3)
    for num_warps, ctas_per_sm, cluster in itertools.product(WARPS, streams, cluster_sizes(device)):
        limit = budget.register_limit(32 * num_warps * ctas_per_sm, device)
        short_lived = forward and ctas_per_sm > 1  # faster than CTAs that stay for many tiles
        stages = range(1, RING_STAGES[problem.direction] + 1)
        tiles = ring_tiles(problem, num_warps, cluster)
        for (tile, copies), num_stages, in_smem in itertools.product(tiles, stages, (False, True)):
            if not forward or ctas_per_sm != FORWARD_STREAMS_OF_ONE_ROW or not in_smem:
                resources = num_stages, num_warps, ctas_per_sm, limit, in_smem, cluster
                in_ring = bool(problem.rows_in) and num_stages > 1  # no tile is ahead in a ring of one stage
                yield PipelinedPlan(*tile, *resources, copies.chunks, short_lived, copies.tail, in_ring)


def warp_specialized_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[WarpSpecializedPlan]:
    """Plans with few stages. A forward reads each tile from its ring once, a backward twice."""
    forward = problem.direction == "forward"
    tensors = 1 if forward else 2
    for num_groups, num_warps in ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8)):
        limit = budget.group_register_limit(num_groups, num_warps, device)
        stages = (1, 2, 3) if num_groups == 1 else (2, 4)
        tiles = ring_tiles(problem, num_warps, 1)
        for (tile, copies), num_stages, in_smem in itertools.product(tiles, stages, (False, True)):
            resources = num_stages, num_groups, num_warps, 1, limit, in_smem
            plan = WarpSpecializedPlan(*tile, *resources, forward, copies.chunks)
            if not copies.tail and tensors * num_copies(plan) <= MAX_PRODUCED_COPIES[num_groups]:
                yield plan


def cluster_sizes(device: DeviceSpec) -> tuple[int, ...]:
    """Cluster sizes that can start while other kernels hold sm_margin SMs. All CTAs of a cluster start together, in one
    group of SMs (GPC). If others hold SMs in every group, a cluster as large as a group waits for them."""
    if device.arch not in CLUSTER_ARCHS:
        return (1,)
    largest = next(size for most, size in LARGEST_CLUSTER if device.sm_margin <= most)
    return tuple(size for size in CLUSTERS if size <= largest)


class Copies(NamedTuple):
    """How a tile is copied: chunks per copy, and whether the last chunk has a copy of its own."""

    chunks: int
    tail: bool


def ring_tiles(problem: NormProblem, num_warps: int, cluster: int) -> Iterator[tuple[tuple[int, int, int], Copies]]:
    """Tiles (rows_per_tile, chunk, num_chunks) with up to 64 columns per thread, each with the ways to copy it.

    A thread has columns of one row; in a cluster, of all rows of the tile. Only whole chunks share a copy.
    """
    for rows_per_tile in powers_of_two(1, MAX_ROWS_PER_WARP * num_warps) if cluster == 1 else (1, 2):
        threads = 32 * num_warps if cluster > 1 else 32 * num_warps // rows_per_tile  # of a row
        for chunk, num_chunks in chunkings(-(-problem.cols // cluster), threads, MAX_RING_CHUNKS[problem.direction]):
            boxes = cluster * chunk // math.gcd(problem.cols, chunk, MAX_BOX_SIDE)  # per chunk over the cluster
            whole_chunks = problem.cols // (cluster * chunk)
            least = 4 if rows_per_tile == 1 and whole_chunks < num_chunks else 2
            too_small = num_chunks > FEW_CHUNKS and chunk < least * threads
            if chunk * num_chunks <= 64 * threads and boxes <= most_boxes(problem, cluster) and not too_small:
                for copies in ways_to_copy(num_chunks, whole_chunks):
                    yield (rows_per_tile, chunk, num_chunks), copies


def ways_to_copy(num_chunks: int, whole_chunks: int) -> Iterator[Copies]:
    """A copy has room for a power of two of chunks, except for that before the tail of a row of whole chunks."""
    room = 1 << (whole_chunks - 1).bit_length()
    for chunks in powers_of_two(1, room if whole_chunks == num_chunks else 1):
        yield Copies(chunks, False)
    if 1 < whole_chunks < num_chunks:
        yield Copies(room, True)
    elif whole_chunks == num_chunks and room == 2 * (num_chunks - 1) > 2:
        yield Copies(num_chunks - 1, True)


def most_boxes(problem: NormProblem, cluster: int) -> int:
    """Most TMA boxes in a row's chunk over its cluster. Each CTA has at most MAX_BOX_SIDE."""
    box_bytes = math.gcd(problem.cols, MAX_BOX_SIDE) * problem.x_dtype.itemsize
    if problem.cols <= COLUMNS_OF_FEW_BOXES or box_bytes >= BYTES_OF_LONG_BOX:
        return MAX_BOX_SIDE
    return MOST_BOXES_OF_16_BYTES if box_bytes == 16 else cluster * MAX_BOX_SIDE


# --- Common ---


def chunkings(cols: int, smallest: int, most: int) -> Iterator[tuple[int, int]]:
    """(chunk, num_chunks) that cover cols. chunk is a power of two, at least `smallest`; num_chunks at most `most`."""
    for chunk in powers_of_two(smallest, max(smallest, 1 << (cols - 1).bit_length())):
        num_chunks = -(-cols // chunk)
        if num_chunks <= most:
            yield chunk, num_chunks


def powers_of_two(first: int, last: int) -> list[int]:
    return [1 << exponent for exponent in range((first - 1).bit_length(), last.bit_length())]
