"""Plans of column_sum: tiles, shared memory, and the choice of a plan and its number of row splits. Pure functions of
problem, rows and device.

There are two kernels: `ring` reads tiles by TMA through shared memory, `portable` reads them into registers. A grid
that fills the GPU by columns alone writes the results at once. Otherwise the rows are split, and a second launch sums
the partial sums. What was measured is in bench/NOTES.md, "Column sums".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..planner import limits
from ..planner.budget import RESERVED_SMEM_BYTES, VECTOR_BYTES, WARP_SIZE, register_limit
from ..planner.device import DeviceSpec
from ..planner.legality import MAX_RING_ROWS, OLDEST_ARCH, OLDEST_TMA_ARCH
from ..planner.plan import ReferencePlan
from .problem import ColumnSumProblem

# Most tensors in one launch. Their descriptors are kernel parameters: 128 bytes each, 152 with shape and strides.
MAX_TENSORS = 64
KERNELS = ("ring", "portable")


@dataclass(frozen=True)
class RingSum:
    """Tiles of rows_per_tile x chunk elements in num_stages stages. A stage has one tile of every tensor that a CTA
    sums. Tiles are read, and their memory refilled, for `group` tensors at a time."""

    kernel: ClassVar[str] = "ring"
    rows_per_tile: int
    chunk: int
    num_stages: int
    group: int
    num_warps: int
    ctas_per_sm: int
    max_registers: int


@dataclass(frozen=True)
class PortableSum:
    """Tiles of rows_per_tile x chunk elements in registers."""

    kernel: ClassVar[str] = "portable"
    rows_per_tile: int
    chunk: int
    num_warps: int
    ctas_per_sm: int
    max_registers: int


SumPlan = RingSum | PortableSum


class Choice(NamedTuple):
    """A plan and what it was chosen by."""

    plan: SumPlan | ReferencePlan
    num_splits: int = 1  # parts of the rows; 1: no second launch
    predicted_us: float = 0.0  # without the start that every kernel pays


# --- Ring ---


def ring_fault(problem: ColumnSumProblem, rows: int, device: DeviceSpec) -> str | None:
    """Why no tile of these tensors can go through the ring; None if one can."""
    if device.arch < OLDEST_TMA_ARCH:
        return f"needs compute capability 9.0 for TMA, {device.name} has {device.capability}"
    if problem.acc_dtype.itemsize > 4:
        return "sums in float32, and these sums are to be taken in float64"
    if not problem.tma_aligned:
        return "needs base pointers and row strides in multiples of 16 bytes for TMA, and not all tensors have them"
    least_rows, least_cols = limits.column_sum_tiles["smallest"]
    if problem.cols < least_cols:
        return f"needs at least {least_cols} columns, got {problem.cols}"
    if max(rows, problem.cols) > MAX_RING_ROWS:
        return f"needs at most {MAX_RING_ROWS} rows and columns, got {rows} x {problem.cols}"
    if next(ring_plans(problem, device), None) is None:
        tile = f"{least_rows} x {least_cols} elements"
        return f"has no room in shared memory for {tile} of each of {problem.count} tensors at once"
    return None


def ring_plans(problem: ColumnSumProblem, device: DeviceSpec) -> Iterator[RingSum]:
    """Plans of several widths, for two CTAs per SM if any such ring fits, else for one."""
    tensors, itemsize = problem.count if problem.total else 1, problem.dtype.itemsize
    ring, widths = limits.column_sum_ring, limits.column_sum_tiles["widths"]
    for ctas_per_sm in (2, 1):
        room = min(device.smem_per_block_bytes, device.smem_per_sm_bytes // ctas_per_sm - RESERVED_SMEM_BYTES)
        budget = (room - ring["reserved_bytes"]) // tensors
        least_stages = ceil_div(ring["tiles"], tensors)
        tiles = {shrink(chunk, itemsize, budget // least_stages) for chunk in widths} - {None}
        for rows, chunk in sorted(tiles):
            num_stages = min(ring["stages"], budget // (rows * chunk * itemsize))
            group = ceil_div(tensors, max(1, ring["groups"] // num_stages))
            num_warps = min(ring["warps"], rows * chunk * itemsize // (WARP_SIZE * VECTOR_BYTES))
            limit = register_limit(WARP_SIZE * num_warps * ctas_per_sm, device)
            yield RingSum(rows, chunk, num_stages, group, num_warps, ctas_per_sm, limit)
        if tiles:
            return


def shrink(chunk: int, itemsize: int, budget: int) -> tuple[int, int] | None:
    """The largest tile (rows, columns) within `budget` bytes: rows are halved first, then columns. None if the smallest
    tile is too large."""
    rows, (least_rows, least_cols) = limits.column_sum_tiles["rows"], limits.column_sum_tiles["smallest"]
    while rows * chunk * itemsize > budget:
        if rows > least_rows:
            rows //= 2
        elif chunk > least_cols:
            chunk //= 2
        else:
            return None
    return rows, chunk


def shared_bytes(plan: RingSum, problem: ColumnSumProblem) -> int:
    """Exact bytes of shared memory per CTA (Triton 3.6): the tiles, and 8 bytes per mbarrier. The mbarriers of each
    tensor start at a multiple of 16 bytes. The reduction over warps reuses the tiles' memory."""
    tensors, barriers = problem.count if problem.total else 1, 8 * plan.num_stages
    tiles = plan.num_stages * plan.rows_per_tile * plan.chunk * problem.dtype.itemsize
    return tensors * tiles + (tensors - 1) * 16 * ceil_div(barriers, 16) + barriers


# --- Portable ---


def portable_plans(problem: ColumnSumProblem, device: DeviceSpec) -> Iterator[PortableSum]:
    """Plans of the portable kernel, from narrow tiles to wide ones."""
    wide = problem.acc_dtype.itemsize > max(4, problem.dtype.itemsize)
    scattered = not problem.tma_aligned or problem.cols % 16 != 0  # Triton loads such rows element by element
    shape, itemsize = limits.column_sum_registers, problem.dtype.itemsize
    threads, whole_row = WARP_SIZE * shape["warps"], 1 << (problem.cols - 1).bit_length()
    elements = (shape["bytes"] // itemsize >> wide + scattered) * threads
    limit = register_limit(threads * shape["ctas"], device)
    for chunk in sorted({min(whole_row, size // itemsize) for size in shape["segments"]}):
        yield PortableSum(elements // chunk, chunk, shape["warps"], shape["ctas"], limit)


def finalizer(device: DeviceSpec) -> PortableSum:
    """The plan that sums the partial sums."""
    *tile, num_warps = limits.column_sum_finalizer
    return PortableSum(*tile, num_warps, 1, register_limit(WARP_SIZE * num_warps, device))


# --- Choice ---


@functools.lru_cache(maxsize=4096)
def choose(problem: ColumnSumProblem, rows: int, device: DeviceSpec, kernel: str | None = None) -> Choice:
    """The plan and number of splits with the least predicted time. If `kernel` is named and has a plan, only its plans
    compete."""
    if device.arch < OLDEST_ARCH:
        return Choice(ReferencePlan(f"needs compute capability 8.0, {device.name} has {device.capability}"))
    plans: dict[str, list[SumPlan]] = {"ring": [], "portable": list(portable_plans(problem, device))}
    if ring_fault(problem, rows, device) is None:
        plans["ring"] = list(ring_plans(problem, device))
    choices = (
        Choice(plan, splits, predicted_us(plan, splits, problem, rows, device))
        for plan in plans.get(kernel) or plans["ring"] + plans["portable"]
        for splits in splits_worth_trying(plan, problem, rows, device)
    )
    return min(choices, key=lambda choice: (choice.predicted_us, choice.num_splits))


def splits_worth_trying(plan: SumPlan, problem: ColumnSumProblem, rows: int, device: DeviceSpec) -> set[int]:
    """Numbers of splits to compare: 1, and those that fill one wave of CTAs or a few; more where a CTA would have more
    tiles of a float32 sum than limits.most_tiles_of_column_sum. All splits but the last have equally many tiles."""
    tiles, least, found = ceil_div(rows, plan.rows_per_tile), 1, {1}
    if problem.wants_float32_sum:  # in each split, a CTA has equally many tiles of all tensors of its sum
        least = ceil_div(tiles, max(1, limits.most_tiles_of_column_sum // (problem.count // problem.num_outputs)))
    for waves in range(1, limits.column_sum_waves + 1):
        splits = min(tiles, waves * plan.ctas_per_sm * device.sm_count // ctas_of_a_split(plan, problem))
        if splits > 1:
            found.add(ceil_div(tiles, ceil_div(tiles, splits)))
    return {splits for splits in found if splits >= least} or {least}


def ctas_of_a_split(plan: SumPlan, problem: ColumnSumProblem) -> int:
    return ceil_div(problem.cols, plan.chunk) * problem.num_outputs


def predicted_us(plan: SumPlan, splits: int, problem: ColumnSumProblem, rows: int, device: DeviceSpec) -> float:
    """Predicted time in us: the time for the memory to deliver all bytes or for the busiest SM to receive its own,
    whichever is longer, plus the start of a ring and of a second launch."""
    segment = min(plan.chunk, problem.cols) * problem.dtype.itemsize
    share = next(share for most, share in limits.column_sum_share if most is None or segment <= most)
    moved = problem.count * rows * problem.cols * problem.dtype.itemsize
    if splits > 1:  # partial sums are written and read
        moved += 2 * splits * problem.num_outputs * problem.cols * problem.acc_dtype.itemsize
    memory_us = moved / (device.bandwidth_gb_s * 1e3 * limits.column_sum_bandwidth[plan.kernel] * share)
    tiles_of_a_cta = ceil_div(ceil_div(rows, plan.rows_per_tile), splits) * (problem.count // problem.num_outputs)
    ctas_of_an_sm = ceil_div(splits * ctas_of_a_split(plan, problem), device.sm_count)
    in_flight = min(ctas_of_an_sm, plan.ctas_per_sm) * bytes_in_flight(plan, problem)
    sm_bytes = ctas_of_an_sm * tiles_of_a_cta * plan.rows_per_tile * segment
    us = limits.column_sum_us
    sm_us = sm_bytes / min(limits.column_sum_sm_bytes_per_us, in_flight / us["latency"])
    start_us = us["ring"] if isinstance(plan, RingSum) else 0.0
    return max(memory_us, sm_us) + start_us + (us["second_launch"] if splits > 1 else 0.0)


def bytes_in_flight(plan: SumPlan, problem: ColumnSumProblem) -> int:
    """Bytes that a CTA has requested while it works on a tile."""
    tile = plan.rows_per_tile * plan.chunk * problem.dtype.itemsize
    if isinstance(plan, PortableSum):
        return limits.column_sum_registers["ahead"] * tile
    return (problem.count if problem.total else 1) * plan.num_stages * tile


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
