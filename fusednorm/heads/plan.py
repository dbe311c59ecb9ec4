"""The plan of a norm of heads: a function of its problem, its row counts and a device.

The constants are estimates: bench/NOTES.md, "Forms", has what they are expected to give.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..planner.budget import MAX_REGISTERS, register_limit
from ..planner.device import DeviceSpec
from ..planner.plan import MOST_TILES_OF_SUM
from .call import HeadProblem

OLDEST_ARCH = 80
MOST_CHUNKS, MOST_COLUMNS = 16, 2048  # of a row that registers hold
NUM_WARPS = 4
LEAST_BYTES = 8  # of a chunk in a thread
TILE_BYTES = {"forward": 64, "backward": 32}  # of a row tile in a thread
# Registers of a thread of a backward: for addresses and the like, and for each element of its tile.
FIXED_REGISTERS, REGISTERS_OF_ELEMENT = 40, 1.5
REGISTERS_OF_TURN = 1.5  # more, for each element, where h is turned too, or pairs are within a chunk
MIN_TILES_OF_CTA = 2  # row tiles of a CTA that leaves partials
LEAST_SEGMENT_BYTES = 32  # of a row in a chunk: a sector of memory


@dataclass(frozen=True)
class HeadPlan:
    """Row tiles of several tensors in registers: rows_per_tile rows of num_chunks chunks, of `width` columns padded to
    `chunk`."""

    variant: ClassVar[str] = "multi_wave"
    kernel: ClassVar[str] = "narrow"
    rows_per_tile: int
    chunk: int
    width: int
    num_chunks: int
    num_warps: int
    ctas_per_sm: int  # of a backward, at max_registers per thread
    max_registers: int

    def __str__(self) -> str:
        tile = f"{self.rows_per_tile} rows of {self.num_chunks} x {self.width} columns"
        return f"{self.kernel}, {tile}, {self.num_warps} warps"


@dataclass(frozen=True)
class AtenNorm:
    """ATen's operations instead of a kernel, and the reason."""

    variant: ClassVar[str] = "reference"
    kernel: ClassVar[str] = "reference"
    reason: str


@functools.lru_cache(maxsize=4096)
def choose(problem: HeadProblem, device: DeviceSpec) -> HeadPlan | AtenNorm:
    if device.arch < OLDEST_ARCH:
        return AtenNorm(f"needs compute capability {OLDEST_ARCH / 10}, {device.name} has {device.arch / 10}")
    width = chunk_columns(problem)
    chunk, num_chunks = power_of_two(width), -(-problem.cols // width)
    if num_chunks > MOST_CHUNKS:
        return AtenNorm(
            f"rotates {problem.turned} of {problem.cols} columns, which makes more than {MOST_CHUNKS} chunks"
        )
    if num_chunks * chunk > MOST_COLUMNS:
        return AtenNorm(f"takes at most {MOST_COLUMNS} columns, got {problem.cols}")
    threads, itemsize = 32 * NUM_WARPS, problem.dtype.itemsize
    rows = threads * TILE_BYTES[problem.direction] // itemsize // (chunk * num_chunks)
    rows = power_of_two(max(rows, threads * LEAST_BYTES // itemsize // chunk, 1))
    elements = rows * chunk * num_chunks // threads
    wide = problem.acc_dtype.itemsize // 4
    turn = problem.turned > 0 and (problem.settings.interleaved or not problem.settings.norm_first)
    more = REGISTERS_OF_ELEMENT + REGISTERS_OF_TURN * turn
    of_element = itemsize + wide * (problem.num_sums + more)  # of x, dy and the next tile of both; of sums
    registers = min(MAX_REGISTERS, FIXED_REGISTERS + elements * of_element)
    ctas = max(1, int(device.registers_per_sm // (threads * registers)))
    ctas = min(ctas, device.max_threads_per_sm // threads)
    return HeadPlan(rows, chunk, width, num_chunks, NUM_WARPS, ctas, register_limit(threads * ctas, device))


def chunk_columns(problem: HeadProblem) -> int:
    """Columns of a chunk: half of those that are turned, if their halves are turned together. Otherwise the largest
    power of two that divides a row, unless its chunks would be too many or too short."""
    cols, settings = problem.cols, problem.settings
    if problem.turned and not settings.interleaved:
        return problem.turned // 2
    width = cols & -cols
    return width if width * problem.dtype.itemsize >= LEAST_SEGMENT_BYTES and cols // width <= MOST_CHUNKS else cols


def ctas_of(plan: HeadPlan, problem: HeadProblem, rows: Sequence[int], device: DeviceSpec) -> tuple[int, ...]:
    """The CTAs of each tensor. A forward's have one row tile each. A backward's run at the same time and have equally
    many, as nearly as they can, unless a float32 sum would have too many tiles."""
    tiles = [-(-each // plan.rows_per_tile) for each in rows]
    if problem.direction == "forward" and not device.sm_margin:
        return tuple(tiles)
    limit = plan.ctas_per_sm * device.sm_count
    if problem.num_sums:
        limit = max(len(tiles), min(limit, max(device.sm_count, sum(tiles) // MIN_TILES_OF_CTA)))
    of_cta = max(1, -(-sum(tiles) // limit))
    while sum(-(-each // of_cta) for each in tiles) > limit and of_cta < max(tiles):
        of_cta += 1
    if problem.wants_float32_sum and not device.sm_margin:
        of_cta = min(of_cta, MOST_TILES_OF_SUM)
    return tuple(-(-each // of_cta) for each in tiles)


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
