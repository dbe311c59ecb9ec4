"""Plans of column_sum: tiles, shared memory, and which of them sums how many splits of the rows. Pure functions of
problem, rows and device.

Two kernels: `ring` reads tiles through shared memory by TMA, `portable` through registers. A grid that fills the GPU by
columns alone writes the results at once; otherwise the rows are split, and a second launch sums the partial sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..planner.budget import RESERVED_SMEM_BYTES, WARP_SIZE, register_limit
from ..planner.device import KIB, DeviceSpec
from ..planner.legality import MAX_RING_ROWS, OLDEST_ARCH, OLDEST_TMA_ARCH, capability
from .problem import ColumnSumProblem

# Tensors in one launch, whose descriptors (128 bytes each, with shape and strides 152) are the kernel's parameters.
MAX_TENSORS = 64
KERNELS = ("ring", "portable")


@dataclass(frozen=True)
class RingSum:
    """Tiles of rows_per_tile x chunk elements in num_stages stages, each with one of every tensor that a CTA sums; read
    and copied anew a group of tensors at a time."""

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


@dataclass(frozen=True)
class AtenSum:
    """No kernel of this package, and why."""

    kernel: ClassVar[str] = "aten"
    reason: str


SumPlan = RingSum | PortableSum


class Choice(NamedTuple):
    """A plan; into how many splits the rows are divided (1: no second launch); and the time that chose it, beyond what
    any kernel takes to start."""

    plan: SumPlan | AtenSum
    num_splits: int = 1
    predicted_us: float = 0.0


# --- Ring ---

MOST_ROWS, WIDTHS = 128, (64, 128, 256)  # of a tile, before it is made to fit
SMALLEST_TILE = 16, 64  # a narrower one would leave a thread less than 16 adjacent bytes of a row
TILES_IN_FLIGHT = 3  # of all tensors together, in a CTA, at the least
MAX_STAGES = 6
RESERVED_BYTES = 8 * KIB  # of a CTA's shared memory, for the reduction over warps and for barriers
GROUPS = 4  # of a ring's tiles: while one is read and copied anew, the others are on their way
RING_WARPS = 8
VECTOR_BYTES = 16  # of one load of a thread


def ring_fault(problem: ColumnSumProblem, rows: int, device: DeviceSpec) -> str | None:
    """Why no tile of these tensors can go through the ring; None where one can."""
    if device.arch < OLDEST_TMA_ARCH:
        return f"needs compute capability 9.0 for TMA, {device.name} has {capability(device)}"
    if problem.acc_dtype.itemsize > 4:
        return "sums in float32, and these sums are to be taken in float64"
    if not problem.tma_aligned:
        return "needs base pointers and row strides in multiples of 16 bytes for TMA, and not all tensors have them"
    if problem.cols < SMALLEST_TILE[1]:
        return f"needs at least {SMALLEST_TILE[1]} columns, got {problem.cols}"
    if max(rows, problem.cols) > MAX_RING_ROWS:
        return f"needs at most {MAX_RING_ROWS} rows and columns, got {rows} x {problem.cols}"
    if next(ring_plans(problem, device), None) is None:
        rows, cols = SMALLEST_TILE
        return f"has no room in shared memory for {rows} x {cols} elements of each of {problem.count} tensors at once"
    return None


def ring_plans(problem: ColumnSumProblem, device: DeviceSpec) -> Iterator[RingSum]:
    """Several widths, with two CTAs on an SM where their rings fit, else with one."""
    tensors, itemsize = problem.count if problem.total else 1, problem.dtype.itemsize
    for ctas_per_sm in (2, 1):
        room = min(device.smem_per_block_bytes, device.smem_per_sm_bytes // ctas_per_sm - RESERVED_SMEM_BYTES)
        budget = (room - RESERVED_BYTES) // tensors
        least_stages = ceil_div(TILES_IN_FLIGHT, tensors)
        tiles = {shrink(chunk, itemsize, budget // least_stages) for chunk in WIDTHS} - {None}
        for rows, chunk in sorted(tiles):
            num_stages = min(MAX_STAGES, budget // (rows * chunk * itemsize))
            group = ceil_div(tensors, max(1, GROUPS // num_stages))
            num_warps = min(RING_WARPS, rows * chunk * itemsize // (WARP_SIZE * VECTOR_BYTES))
            limit = register_limit(WARP_SIZE * num_warps * ctas_per_sm, device)
            yield RingSum(rows, chunk, num_stages, group, num_warps, ctas_per_sm, limit)
        if tiles:
            return


def shrink(chunk: int, itemsize: int, budget: int) -> tuple[int, int] | None:
    """The largest tile of `budget` bytes: rows are halved first, then columns. None if the smallest is too large."""
    rows = MOST_ROWS
    while rows * chunk * itemsize > budget:
        if rows > SMALLEST_TILE[0]:
            rows //= 2
        elif chunk > SMALLEST_TILE[1]:
            chunk //= 2
        else:
            return None
    return rows, chunk


def shared_bytes(plan: RingSum, problem: ColumnSumProblem) -> int:
    """Shared memory of a CTA, exactly (Triton 3.6): the tiles, and 8 bytes for each barrier, those of a tensor at a
    multiple of 16. The reduction over warps finds place where the tiles were."""
    tensors, barriers = problem.count if problem.total else 1, 8 * plan.num_stages
    tiles = plan.num_stages * plan.rows_per_tile * plan.chunk * problem.dtype.itemsize
    return tensors * tiles + (tensors - 1) * 16 * ceil_div(barriers, 16) + barriers


# --- Portable ---

PORTABLE_WARPS = 8
PORTABLE_CTAS_PER_SM = 2
BYTES_PER_THREAD = 64  # of a tile; halved for all that takes more registers, so that two CTAs fit an SM
TILES_AHEAD = 2  # on their way while one is added
SEGMENT_BYTES = (64, 128, 256, 512, 1024)  # of a row in one CTA
FINALIZER_TILE = 64, 32  # rows, columns
FINALIZER_WARPS = 4


def portable_plans(problem: ColumnSumProblem, device: DeviceSpec) -> Iterator[PortableSum]:
    """From narrow tiles to wide ones."""
    wide = problem.acc_dtype.itemsize > max(4, problem.dtype.itemsize)
    scattered = not problem.tma_aligned or problem.cols % 16 != 0  # of such rows Triton loads single elements
    halvings = wide + scattered
    threads = WARP_SIZE * PORTABLE_WARPS
    elements = (BYTES_PER_THREAD // problem.dtype.itemsize >> halvings) * threads
    whole_row = 1 << (problem.cols - 1).bit_length()
    limit = register_limit(threads * PORTABLE_CTAS_PER_SM, device)
    for chunk in sorted({min(whole_row, size // problem.dtype.itemsize) for size in SEGMENT_BYTES}):
        yield PortableSum(elements // chunk, chunk, PORTABLE_WARPS, PORTABLE_CTAS_PER_SM, limit)


def finalizer(device: DeviceSpec) -> PortableSum:
    """The plan that sums the partial sums."""
    return PortableSum(*FINALIZER_TILE, FINALIZER_WARPS, 1, register_limit(WARP_SIZE * FINALIZER_WARPS, device))


# --- Choice ---

# What the time of a plan is predicted from. Measured on an H200 (2026-11-20): of the datasheet's bandwidth rings reach
# 0.86165 and portable kernels, whose rows of a tile are short, 0.6349; a second launch, for partial sums, takes 3.7 us.
# The others are estimates: what one SM takes in at the most, how long a load takes under load, what a ring's first
# tensor maps, barriers and fences cost beyond a plain load, what narrow tiles waste.
EFFICIENCY, SECOND_LAUNCH_US = {"ring": 0.86165, "portable": 0.6349}, 3.7
RING_START_US = 0.7
SM_BYTES_PER_US = 44 * KIB
LATENCY_US = 0.8
SHARE_BY_SEGMENT = {16: 0.3, 32: 0.5, 64: 0.8, 128: 0.92}  # by the bytes of a row that a CTA reads at a time
MAX_WAVES = 4


@functools.lru_cache(maxsize=4096)
def choose(problem: ColumnSumProblem, rows: int, device: DeviceSpec, kernel: str | None = None) -> Choice:
    """The plan and number of splits of least predicted time; of `kernel` only, where one is named and can run."""
    if device.arch < OLDEST_ARCH:
        return Choice(AtenSum(f"needs compute capability 8.0, {device.name} has {capability(device)}"))
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
    """No split, and as many as fill one wave of CTAs, two, and so on; all splits but the last have as many tiles."""
    tiles = ceil_div(rows, plan.rows_per_tile)
    found = {1}
    for waves in range(1, MAX_WAVES + 1):
        splits = min(tiles, waves * plan.ctas_per_sm * device.sm_count // ctas_of_a_split(plan, problem))
        if splits > 1:
            found.add(ceil_div(tiles, ceil_div(tiles, splits)))
    return found


def ctas_of_a_split(plan: SumPlan, problem: ColumnSumProblem) -> int:
    return ceil_div(problem.cols, plan.chunk) * problem.num_outputs


def predicted_us(plan: SumPlan, splits: int, problem: ColumnSumProblem, rows: int, device: DeviceSpec) -> float:
    """The longer of what the memory takes to deliver all bytes and what the busiest SM takes to receive its own."""
    segment = min(plan.chunk, problem.cols) * problem.dtype.itemsize
    share = next((share for size, share in SHARE_BY_SEGMENT.items() if segment <= size), 1.0)
    moved = problem.count * rows * problem.cols * problem.dtype.itemsize
    if splits > 1:  # partial sums are written and read
        moved += 2 * splits * problem.num_outputs * problem.cols * problem.acc_dtype.itemsize
    memory_us = moved / (device.bandwidth_gb_s * 1e3 * EFFICIENCY[plan.kernel] * share)
    tiles_of_a_cta = ceil_div(ceil_div(rows, plan.rows_per_tile), splits) * (problem.count // problem.num_outputs)
    ctas_of_an_sm = ceil_div(splits * ctas_of_a_split(plan, problem), device.sm_count)
    in_flight = min(ctas_of_an_sm, plan.ctas_per_sm) * bytes_in_flight(plan, problem)
    sm_bytes = ctas_of_an_sm * tiles_of_a_cta * plan.rows_per_tile * segment
    sm_us = sm_bytes / min(SM_BYTES_PER_US, in_flight / LATENCY_US)
    start_us = RING_START_US if isinstance(plan, RingSum) else 0.0
    return max(memory_us, sm_us) + start_us + (SECOND_LAUNCH_US if splits > 1 else 0.0)


def bytes_in_flight(plan: SumPlan, problem: ColumnSumProblem) -> int:
    """That a CTA has asked for while it works on a tile."""
    tile = plan.rows_per_tile * plan.chunk * problem.dtype.itemsize
    if isinstance(plan, PortableSum):
        return TILES_AHEAD * tile
    return (problem.count if problem.total else 1) * plan.num_stages * tile


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
