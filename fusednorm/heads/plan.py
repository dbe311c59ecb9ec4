"""The plan of a norm of heads: a function of its problem, its row counts and a device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..host import fallback
from ..planner import limits
from ..planner.budget import MAX_REGISTERS, RESERVED_SMEM_BYTES, register_limit
from ..planner.device import DeviceSpec
from ..planner.legality import OLDEST_ARCH
from ..planner.norm_problem import ALIGNMENT
from ..planner.plan import ReferencePlan
from ..settings import invariance
from .call import HeadCall, HeadProblem, problems_of
from .problem import Heads


@dataclass(frozen=True)
class HeadPlan:
    """Row tiles of several tensors in registers: rows_per_tile rows of num_chunks chunks, of `width` columns padded to
    `chunk`."""

    variant: ClassVar[str] = "multi_wave"
    rows_per_tile: int
    chunk: int
    width: int
    num_chunks: int
    num_warps: int
    ctas_per_sm: int  # at max_registers per thread
    max_registers: int
    kernel: str = "narrow"  # or "narrow_async"
    adjacent: int = 1  # rows by the same cos and sin, all of which a thread has

    def __str__(self) -> str:
        tile = f"{self.rows_per_tile} rows of {self.num_chunks} x {self.width} columns"
        return f"{self.kernel}, {tile}, {self.num_warps} warps"


@functools.lru_cache(maxsize=4096)
def choose(problem: HeadProblem, device: DeviceSpec) -> HeadPlan | ReferencePlan:
    if device.arch < OLDEST_ARCH:
        return ReferencePlan(f"needs compute capability 8.0, {device.name} has {device.capability}")
    chunk, _, num_chunks = chunks_of(problem.cols, problem.dtype.itemsize, problem.turned_together)
    if num_chunks > (most := limits.head_chunks):
        return ReferencePlan(f"rotates {problem.turned} of {problem.cols} columns, which makes more than {most} chunks")
    if num_chunks * chunk > limits.head_columns:
        return ReferencePlan(f"takes at most {limits.head_columns} columns, got {problem.cols}")
    if problem.together > 1:
        return _of_tokens(problem, device, chunk * num_chunks)
    plans = [shaped(problem, device, each, limits.head_bytes["tile"]) for each in limits.head_warps[problem.direction]]
    return max(plans, key=lambda plan: (plan.num_warps * plan.ctas_per_sm, plan.kernel != "narrow"))


def _of_tokens(problem: HeadProblem, device: DeviceSpec, padded: int) -> HeadPlan | ReferencePlan:
    """The plan whose tiles are all heads of a token, each head of so many columns. A thread has a tile's bytes, as
    nearly as it can; but before that, an SM has two CTAs of a forward, which only waits while its tile comes."""
    most, ctas = limits.head_bytes["tile"] // problem.dtype.itemsize, 2 if problem.direction == "forward" else 1
    found = {}
    for num_warps in limits.head_token_warps:
        elements = max(1, power_of_two(problem.together) * padded // (32 * num_warps))
        if _registers(problem, elements) <= min(MAX_REGISTERS, device.registers_per_sm // (32 * num_warps)):
            found[shaped(problem, device, num_warps, 0)] = max(elements / most, most / elements)
    if not found:
        return ReferencePlan(f"normalizes {problem.together} heads together, which registers do not hold")
    return min(found, key=lambda plan: (-min(plan.ctas_per_sm, ctas), found[plan]))


def has_kernels(heads: Heads, device: DeviceSpec) -> bool:
    """Whether kernels take norms of heads in both directions, before anything is known of their strides: if so, it pays
    to run them with the rotation beside them."""
    return not any(isinstance(choose(each, device), ReferencePlan) for each in problems_of(heads))


def shaped(
    problem: HeadProblem, device: DeviceSpec, num_warps: int, tile_bytes: int, ctas_per_sm: int | None = None
) -> HeadPlan:
    """The plan with so many warps, bytes of a row tile in a thread, and CTAs that an SM has registers for: by default
    as many as leave a thread what it needs. A forward must load all that it has before it computes, and the compiler
    does so if it knows how many CTAs there are."""
    threads, adjacent = 32 * num_warps, 2 if _shares(problem) else 1
    copied = _copied(problem, threads, tile_bytes)
    copies = copied is not None
    rows, chunk, width, num_chunks = copied or _loaded(problem, threads, tile_bytes)
    if ctas_per_sm is None:
        elements = max(1, rows * chunk * num_chunks // threads)
        registers = min(MAX_REGISTERS, _registers(problem, elements, copies, adjacent))
        ctas_per_sm = max(1, int(device.registers_per_sm // (threads * registers)))
        ctas_per_sm = min(ctas_per_sm, device.max_threads_per_sm // threads)
        if copies:
            of_cta = _shared_bytes(problem, threads, chunk, num_chunks) + RESERVED_SMEM_BYTES
            ctas_per_sm = min(ctas_per_sm, device.smem_per_sm_bytes // of_cta)
    limit, kernel = register_limit(threads * ctas_per_sm, device), "narrow_async" if copies else "narrow"
    return HeadPlan(rows * adjacent, chunk, width, num_chunks, num_warps, ctas_per_sm, limit, kernel, adjacent)


def _loaded(problem: HeadProblem, threads: int, tile_bytes: int) -> tuple[int, int, int, int]:
    """The rows of a tile, and `chunks_of` a row, of a kernel in narrow.py."""
    itemsize = problem.dtype.itemsize
    chunk, width, num_chunks = chunks_of(problem.cols, itemsize, problem.turned_together)
    if problem.together > 1:
        rows = power_of_two(problem.together)
    else:
        rows = rows_of_tile(threads, tile_bytes, itemsize, chunk, num_chunks)
        if problem.per_pair and problem.settings.interleaved:  # a thread loads cos and sin of the columns that it has
            rows = min(rows, max(1, 16 * threads // itemsize // chunk))
    return rows, chunk, width, num_chunks


def _copied(problem: HeadProblem, threads: int, tile_bytes: int) -> tuple[int, int, int, int] | None:
    """Those of the kernel in narrow_async.py, whose two chunks have one half each; None unless it takes such rows."""
    itemsize, half = problem.dtype.itemsize, problem.cols // 2 if problem.turned_together else 0
    chunk, width, num_chunks = chunks_of(problem.cols, itemsize, half)
    rows = rows_of_tile(threads, tile_bytes, itemsize, chunk, num_chunks)
    in_a_warp = 16 <= chunk * itemsize <= 32 * 16  # a row of a chunk, of which a thread has 16 bytes
    sixteen_bytes = in_a_warp and num_chunks * chunk == problem.cols and rows * chunk * itemsize == 16 * threads
    fits = sixteen_bytes and _shared_bytes(problem, threads, chunk, num_chunks) <= limits.static_bytes
    return (rows, chunk, width, num_chunks) if fits and _copies(problem) else None


def _shares(problem: HeadProblem) -> bool:
    """Whether a thread has two adjacent rows, for which it takes cos, sin and parameters once. RMSNorm has so few
    instructions that it waits for memory anyway."""
    settings = problem.settings
    held = settings.layer and settings.norm_first and not (settings.interleaved and problem.per_pair)
    return problem.shares_tables and problem.together == 1 and held


def _copies(problem: HeadProblem) -> bool:
    """Whether the kernel is that of narrow_async.py, if a thread has 16 bytes of a chunk. LayerNorm of what is turned
    needs the exact mean of equal elements. RMSNorm alone copies rows of those widths that ran on a GPU."""
    settings, turned = problem.settings, problem.turned
    as_vectors = turned * problem.dtype.itemsize % (ALIGNMENT if settings.interleaved else 2 * ALIGNMENT) == 0
    as_vectors = as_vectors and not (settings.interleaved and problem.per_pair)
    exact_mean = settings.norm_first or not settings.layer or power_of_two(problem.cols) == problem.cols
    readable = problem.at_vectors and problem.wants_dx and problem.together == 1
    some, least = limits.head_copied_columns
    tried = settings.layer or turned > 0 or problem.cols == some or problem.cols >= least
    return tried and readable and (not turned or (as_vectors and exact_mean))


def _shared_bytes(problem: HeadProblem, threads: int, chunk: int, num_chunks: int) -> int:
    """What such a CTA has of shared memory: slots of each thread, of dy, of x for two tiles, and of cos and sin, twice
    if h is turned; and sums of a chunk, of each warp."""
    of_tables = sum(each.itemsize // 2 for each in problem.table_dtypes) * (1 if problem.per_pair else num_chunks)
    slots = 3 * num_chunks + of_tables * (1 if problem.settings.norm_first else 2)
    return 16 * threads * slots + threads // 32 * 4 * chunk


def _registers(problem: HeadProblem, elements: int, copies: bool = False, adjacent: int = 1) -> float:
    """What a thread needs that has so many elements of a tile, or of each of the adjacent rows."""
    itemsize, wide, of = problem.dtype.itemsize, problem.acc_dtype.itemsize // 4, limits.head_registers
    pairs, fixed = problem.turned > 0 and problem.settings.interleaved, of[problem.direction]
    if problem.direction == "forward":
        tables = sum(each.itemsize for each in problem.table_dtypes)
        parameters = [each.itemsize for each in (problem.weight_dtype, problem.bias_dtype) if each]
        if adjacent > 1:  # the second row waits, with all that it needs, while the first one is computed
            return fixed + elements * ((itemsize + tables + sum(parameters)) / 4 + wide * (1 + of["pair"] * pairs))
        # A bias is needed once the weight no longer is.
        loaded = itemsize + tables / (1 + problem.per_pair) + max(parameters, default=0)
        return fixed + elements * (loaded / 4 + wide * of["pair"] * pairs)
    fixed += of["together"] * (problem.together > 1)
    turn = not copies and (pairs or (problem.turned > 0 and not problem.settings.norm_first))
    of_element = itemsize + wide * (problem.num_sums + of["element"] + of["turn"] * turn)
    of_element += 2 * sum(each.itemsize == 8 for each in problem.table_dtypes)  # of the next tile; narrower ones fit
    if copies and not problem.settings.norm_first:  # h is turned while all else waits: what float32 adds to 16 bits
        of_element += sum(each.itemsize - 2 for each in problem.table_dtypes) / 4
    return fixed + elements * of_element  # x, dy and the next tile of both; sums


def chunks_of(cols: int, itemsize: int, width: int = 0) -> tuple[int, int, int]:
    """(chunk, width, num_chunks) of rows. Without a width it is the largest power of two that divides a row, halved if
    it is long, or the whole row if such chunks would be too many or too short."""
    if not width:
        width = cols & -cols
        if width * itemsize < limits.head_segment_bytes or cols // width > limits.head_chunks:
            width = cols
        elif width * itemsize >= 2 * limits.head_half_bytes and 2 * cols // width <= limits.head_chunks:
            width //= 2
    return power_of_two(width), width, -(-cols // width)


def rows_of_tile(threads: int, tile_bytes: int, itemsize: int, chunk: int, num_chunks: int) -> int:
    """How many rows are so many bytes in a thread: more, if chunks would have too few."""
    rows = threads * tile_bytes // itemsize // (chunk * num_chunks)
    return power_of_two(max(rows, threads * limits.head_bytes["chunk"] // itemsize // chunk, 1))


def ctas_of(plan: HeadPlan, problem: HeadProblem, rows: Sequence[int], device: DeviceSpec) -> tuple[int, ...]:
    """The CTAs of each tensor. A forward's have one row tile each. A backward's run at the same time and have equally
    many, as nearly as they can, unless a float32 sum would have too many tiles."""
    of_tile = problem.together if problem.together > 1 else plan.rows_per_tile
    tiles = [-(-each // of_tile) for each in rows]
    if problem.direction == "forward" and not device.sm_margin:
        return tuple(tiles)
    limit = plan.ctas_per_sm * device.sm_count
    if problem.num_sums:
        limit = max(len(tiles), min(limit, max(device.sm_count, sum(tiles) // limits.min_tiles_of_cta)))
    of_cta = max(1, -(-sum(tiles) // limit))
    while sum(-(-each // of_cta) for each in tiles) > limit and of_cta < max(tiles):
        of_cta += 1
    if problem.wants_float32_sum and not device.sm_margin:
        of_cta = min(of_cta, limits.most_tiles_of_sum)
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
    return replace(problem, count=1, levels=1, copies=False, shares_tables=False), device.of_architecture()


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
