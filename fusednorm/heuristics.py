"""choose(problem, device) -> Plan. Pure: no GPU, no clock, no environment."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from .budget import MAX_REGISTERS_PER_THREAD, multiwave_registers
from .device import DeviceSpec
from .plan import ColumnTilePlan, MultiWavePlan, Plan
from .problem import NormProblem

# Little's law on an H200: 4.4 TB/s x ~1 us of loaded latency is about 32 KiB in flight per SM; more does not help.
ENOUGH_BYTES_IN_FLIGHT = 32 * 1024
ENOUGH_WARPS_PER_SM = 16
MAX_CHUNKS = 8  # a longer unrolled row loop outgrows the instruction cache
MAX_PADDING = 1.125  # above one chunk, computing on so many more columns than there are is the limit
COLUMN_TILE = 1024


@functools.cache
def choose(problem: NormProblem, device: DeviceSpec) -> Plan:
    """The plan for `problem` on `device`, for every row count."""
    if problem.direction == "backward" and not problem.wants_dx:
        return column_tile_plan(problem, device)  # no row sum is needed: a plain reduction over rows
    return max(multiwave_plans(problem, device), key=functools.partial(quality, problem), default=None) or column_tile_plan(
        problem, device
    )


def quality(problem: NormProblem, plan: MultiWavePlan) -> tuple:
    """Larger is better: bytes in flight, then warps to hide latency, then little padding, then few rows in a tile."""
    bytes_per_element = problem.x_dtype.itemsize + (problem.grad_dtype.itemsize if problem.grad_dtype else 0)
    in_flight = plan.ctas_per_sm * plan.rows_per_tile * problem.cols * bytes_per_element
    padded = plan.chunk * plan.num_chunks
    return (
        min(in_flight, ENOUGH_BYTES_IN_FLIGHT),
        min(plan.ctas_per_sm * plan.num_warps, ENOUGH_WARPS_PER_SM),
        -padded,
        -plan.rows_per_tile,
        -plan.num_warps,
        -plan.num_chunks,
    )


def multiwave_plans(problem: NormProblem, device: DeviceSpec) -> Iterator[MultiWavePlan]:
    """Every plan that holds the row in registers within the budget, with loads of 8 bytes or more where the row tile allows it."""
    vector = max(1, 16 // problem.x_dtype.itemsize)
    for num_warps in (4, 8, 16):
        threads = 32 * num_warps
        for rows_per_tile in (1, 2, 4, 8, 16, 32, 64, 128):
            for chunk in chunks(problem.cols, minimum=threads * vector // (2 * rows_per_tile)):
                num_chunks = -(-problem.cols // chunk)
                registers = multiwave_registers(problem, rows_per_tile, rows_per_tile * chunk * num_chunks / threads)
                ctas_per_sm = min(
                    device.registers_per_sm // (threads * registers), device.max_threads_per_sm // threads
                )
                if registers > MAX_REGISTERS_PER_THREAD or ctas_per_sm == 0:
                    continue
                limit = device.registers_per_sm // (threads * ctas_per_sm) // 8 * 8
                yield MultiWavePlan(
                    rows_per_tile, chunk, num_chunks, num_warps, ctas_per_sm, min(limit, MAX_REGISTERS_PER_THREAD)
                )


def chunks(cols: int, minimum: int) -> Iterator[int]:
    """Powers of two that cut cols into at most MAX_CHUNKS chunks with little padding, or hold all of it in one."""
    chunk = 1 << max(0, (cols - 1).bit_length())
    smallest = True
    while chunk >= max(1, minimum) or smallest:
        num_chunks = -(-cols // chunk)
        if num_chunks > MAX_CHUNKS:
            return
        if num_chunks == 1 or chunk * num_chunks <= MAX_PADDING * cols:
            yield chunk
        smallest = False
        chunk //= 2


def column_tile_plan(problem: NormProblem, device: DeviceSpec) -> ColumnTilePlan:
    chunk = min(COLUMN_TILE, max(16, 1 << (problem.cols - 1).bit_length()))
    rows_per_tile = max(1, COLUMN_TILE // chunk)
    fp64 = problem.acc_dtype.itemsize == 8
    # Four chunks without vector loads spill in LayerNorm's forward (16 elements a thread, sm_90 and sm_100).
    row_chunk = chunk * (4 if problem.tma_aligned and not fp64 else 2)
    return ColumnTilePlan(rows_per_tile, chunk, 8 if fp64 else 4, 2 if fp64 else 4, row_chunk, 8)
