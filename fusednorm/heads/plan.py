"""The plan of a norm of heads: a function of its problem, its row counts and a device.

The constants were chosen by a sweep on an H100: bench/NOTES.md, "Forms", has what they give.
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
NUM_WARPS = {"forward": 4, "backward": 8, "copy": 4}
MOST_WARPS = 16
LEAST_ROWS_OF_TURN = 32  # of a forward's tile, or else there are more warps
LEAST_BYTES = 8  # of a chunk in a thread
MOST_HEADS = 2  # of a forward's thread for each load of cos and sin
TILE_BYTES = {"forward": 64, "backward": 32, "copy": 64}  # of a row tile in a thread
# Registers of a thread of a backward: for addresses and the like, and for each element of its tile.
FIXED_REGISTERS, REGISTERS_OF_ELEMENT = 40, 1.5
REGISTERS_OF_TURN = 1.5  # more, for each element, where h is turned too, or pairs are within a chunk
MIN_TILES_OF_CTA = 2  # row tiles of a CTA that leaves partials
LEAST_SEGMENT_BYTES = 32  # of a row in a chunk: a sector of memory


@dataclass(frozen=True)
class HeadPlan:
    """Row tiles of several tensors in registers: rows_per_tile rows of num_chunks chunks, of `width` columns padded to
    `chunk`. A thread has `heads` adjacent rows, for which it loads cos and sin once."""

    variant: ClassVar[str] = "multi_wave"
    kernel: ClassVar[str] = "narrow"
    rows_per_tile: int
    chunk: int
    width: int
    num_chunks: int
    num_warps: int
    ctas_per_sm: int  # of a backward, at max_registers per thread
    max_registers: int | None  # None: as many as the compiler wants
    heads: int = 1

    def __str__(self) -> str:
        tile = f"{self.rows_per_tile} rows of {self.num_chunks} x {self.width} columns"
        shared = f", {self.heads} for each load of cos and sin" if self.heads > 1 else ""
        return f"{self.kernel}, {tile}, {self.num_warps} warps{shared}"


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
    chunk, _, num_chunks = chunks_of(problem.cols, problem.dtype.itemsize, problem.turned_together)
    if num_chunks > MOST_CHUNKS:
        return AtenNorm(
            f"rotates {problem.turned} of {problem.cols} columns, which makes more than {MOST_CHUNKS} chunks"
        )
    if num_chunks * chunk > MOST_COLUMNS:
        return AtenNorm(f"takes at most {MOST_COLUMNS} columns, got {problem.cols}")
    num_warps, tile_bytes = NUM_WARPS[problem.direction], TILE_BYTES[problem.direction]
    if problem.direction == "forward" and problem.turned:
        of_warp = 32 * tile_bytes // (problem.cols * problem.dtype.itemsize)
        num_warps = max(num_warps, min(MOST_WARPS, power_of_two(-(-LEAST_ROWS_OF_TURN // max(1, of_warp)))))
    return shaped(problem, device, num_warps, tile_bytes, MOST_HEADS)


def shaped(
    problem: HeadProblem, device: DeviceSpec, num_warps: int, tile_bytes: int, most_heads: int,
    ctas_per_sm: int | None = None,
) -> HeadPlan:  # fmt: skip
    """The plan with so many warps, bytes of a row tile in a thread, heads for each load of cos and sin, and CTAs that
    an SM must have room for. By default a backward has as many as its tiles leave registers for, and a forward as many
    as the compiler makes of it."""
    itemsize, threads, heads = problem.dtype.itemsize, 32 * num_warps, min(problem.heads, most_heads)
    chunk, width, num_chunks = chunks_of(problem.cols, itemsize, problem.turned_together)
    rows = rows_of_tile(threads, tile_bytes, itemsize, chunk, num_chunks, heads)
    elements, backward = rows * chunk * num_chunks // threads, problem.direction == "backward"
    ctas = ctas_per_sm or _ctas_of(problem, device, threads, elements)
    limit = register_limit(threads * ctas, device) if ctas_per_sm or backward else None
    return HeadPlan(rows, chunk, width, num_chunks, num_warps, ctas, limit, heads)


def _ctas_of(problem: HeadProblem, device: DeviceSpec, threads: int, elements: int) -> int:
    """How many CTAs an SM has registers for, if a thread has `elements` of a tile."""
    itemsize, wide = problem.dtype.itemsize, problem.acc_dtype.itemsize // 4
    turn = problem.turned > 0 and (problem.settings.interleaved or not problem.settings.norm_first)
    more = REGISTERS_OF_ELEMENT + REGISTERS_OF_TURN * turn
    of_element = itemsize + wide * (problem.num_sums + more)  # of x, dy and the next tile of both; of sums
    registers = min(MAX_REGISTERS, FIXED_REGISTERS + elements * of_element)
    ctas = max(1, int(device.registers_per_sm // (threads * registers)))
    return min(ctas, device.max_threads_per_sm // threads)


def chunks_of(cols: int, itemsize: int, width: int = 0) -> tuple[int, int, int]:
    """(chunk, width, num_chunks) of rows. Without a width it is the largest power of two that divides a row, or the
    whole row if such chunks would be too many or too short."""
    if not width:
        width = cols & -cols
        if width * itemsize < LEAST_SEGMENT_BYTES or cols // width > MOST_CHUNKS:
            width = cols
    return power_of_two(width), width, -(-cols // width)


def rows_of_tile(threads: int, tile_bytes: int, itemsize: int, chunk: int, num_chunks: int, heads: int = 1) -> int:
    """How many rows are so many bytes in a thread: more, if chunks would have too few."""
    rows = threads * tile_bytes // itemsize // (chunk * num_chunks)
    return power_of_two(max(rows, heads * max(1, threads * LEAST_BYTES // itemsize // chunk)))


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
