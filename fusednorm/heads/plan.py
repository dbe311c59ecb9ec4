"""The plan of a norm of heads: a function of its problem, its row counts and a device.

The constants are estimates: bench/NOTES.md, "Forms", has what they are expected to give.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..host import fallback
from ..planner import canonical
from ..planner.budget import MAX_REGISTERS, register_limit
from ..planner.device import DeviceSpec
from ..planner.legality import OLDEST_ARCH, capability
from ..planner.plan import MOST_TILES_OF_SUM, ReferencePlan
from ..settings import invariance
from .call import HeadCall, HeadProblem

MOST_CHUNKS, MOST_COLUMNS = 16, 2048  # of a row that registers hold
NUM_WARPS = {"forward": (4,), "backward": (8, 4)}  # the first of those that an SM has registers for most of
LEAST_BYTES = 8  # of a chunk in a thread
TILE_BYTES, COPIED_BYTES = 32, 64  # of a row tile in a thread, of the rows that it copies at a time
# Registers of a thread: for addresses and the like (a forward has what it loads besides), and for each element of a
# backward's tile.
FIXED_REGISTERS, REGISTERS_OF_ELEMENT = {"forward": 24, "backward": 40}, 1.5
REGISTERS_OF_PAIRS = 0.5  # in a forward for each element, where pairs are within a chunk
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
    ctas_per_sm: int  # at max_registers per thread
    max_registers: int

    def __str__(self) -> str:
        tile = f"{self.rows_per_tile} rows of {self.num_chunks} x {self.width} columns"
        return f"{self.kernel}, {tile}, {self.num_warps} warps"


@functools.lru_cache(maxsize=4096)
def choose(problem: HeadProblem, device: DeviceSpec) -> HeadPlan | ReferencePlan:
    if device.arch < OLDEST_ARCH:
        return ReferencePlan(f"needs compute capability 8.0, {device.name} has {capability(device)}")
    chunk, _, num_chunks = chunks_of(problem.cols, problem.dtype.itemsize, problem.turned_together)
    if num_chunks > MOST_CHUNKS:
        return ReferencePlan(
            f"rotates {problem.turned} of {problem.cols} columns, which makes more than {MOST_CHUNKS} chunks"
        )
    if num_chunks * chunk > MOST_COLUMNS:
        return ReferencePlan(f"takes at most {MOST_COLUMNS} columns, got {problem.cols}")
    plans = [shaped(problem, device, num_warps, TILE_BYTES) for num_warps in NUM_WARPS[problem.direction]]
    return max(plans, key=lambda plan: plan.num_warps * plan.ctas_per_sm)


def shaped(
    problem: HeadProblem, device: DeviceSpec, num_warps: int, tile_bytes: int, ctas_per_sm: int | None = None
) -> HeadPlan:
    """The plan with so many warps, bytes of a row tile in a thread, and CTAs that an SM has registers for: by default
    as many as leave a thread what it needs. A forward must load all that it has before it computes, and the compiler
    does so if it knows how many CTAs there are."""
    itemsize, threads = problem.dtype.itemsize, 32 * num_warps
    chunk, width, num_chunks = chunks_of(problem.cols, itemsize, problem.turned_together)
    rows = rows_of_tile(threads, tile_bytes, itemsize, chunk, num_chunks)
    if ctas_per_sm is None:
        registers = min(MAX_REGISTERS, _registers(problem, rows * chunk * num_chunks // threads))
        ctas_per_sm = max(1, int(device.registers_per_sm // (threads * registers)))
        ctas_per_sm = min(ctas_per_sm, device.max_threads_per_sm // threads)
    limit = register_limit(threads * ctas_per_sm, device)
    return HeadPlan(rows, chunk, width, num_chunks, num_warps, ctas_per_sm, limit)


def _registers(problem: HeadProblem, elements: int) -> float:
    """What a thread needs that has so many elements of a tile."""
    itemsize, wide, fixed = problem.dtype.itemsize, problem.acc_dtype.itemsize // 4, FIXED_REGISTERS[problem.direction]
    pairs = problem.turned > 0 and problem.settings.interleaved
    if problem.direction == "forward":
        tables = sum(each.itemsize for each in problem.table_dtypes) / (1 + problem.per_pair)
        loaded = itemsize + tables + sum(each.itemsize for each in (problem.weight_dtype, problem.bias_dtype) if each)
        return fixed + elements * (loaded / 4 + wide * REGISTERS_OF_PAIRS * pairs)
    turn = pairs or (problem.turned > 0 and not problem.settings.norm_first)
    of_element = itemsize + wide * (problem.num_sums + REGISTERS_OF_ELEMENT + REGISTERS_OF_TURN * turn)
    return fixed + elements * of_element  # x, dy and the next tile of both; sums


def chunks_of(cols: int, itemsize: int, width: int = 0) -> tuple[int, int, int]:
    """(chunk, width, num_chunks) of rows. Without a width it is the largest power of two that divides a row, or the
    whole row if such chunks would be too many or too short."""
    if not width:
        width = cols & -cols
        if width * itemsize < LEAST_SEGMENT_BYTES or cols // width > MOST_CHUNKS:
            width = cols
    return power_of_two(width), width, -(-cols // width)


def rows_of_tile(threads: int, tile_bytes: int, itemsize: int, chunk: int, num_chunks: int) -> int:
    """How many rows are so many bytes in a thread: more, if chunks would have too few."""
    rows = threads * tile_bytes // itemsize // (chunk * num_chunks)
    return power_of_two(max(rows, threads * LEAST_BYTES // itemsize // chunk, 1))


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


def asked(problem: HeadProblem, device: DeviceSpec) -> tuple[HeadProblem, DeviceSpec]:
    """What `choose` is asked for a call, and by what failures are remembered. If rows are batch-invariant, it is the
    same for every layout and every choice of gradients that has those of inputs."""
    if not invariance.switch.invariance():
        return problem, device
    if problem.wants_dx:
        sums = {"wants_dw": problem.weight_dtype is not None, "wants_db": problem.bias_dtype is not None}
        problem = replace(problem, **sums)
    return replace(problem, count=1, levels=1, copies=False), canonical.of_architecture(device)


Planned = list[tuple[HeadCall | None, HeadPlan | ReferencePlan]]


def plans_of(calls: Iterable[HeadCall | None], device: DeviceSpec) -> Planned:
    """Each launch, and what runs it: a plan whose kernel has not failed yet, or ATen."""
    found: Planned = []
    for call in calls:
        if call is None:
            found.append((call, ReferencePlan("the rows are too many, or lie at too many nested strides")))
            continue
        question = asked(call.problem, device)
        plan = choose(*question)
        cause = fallback.failed_of(*question).get(plan)
        found.append((call, ReferencePlan(f"the kernel cannot run here: {cause}") if cause else plan))
    return found
