"""candidates(variant, problem, device): the few plans worth considering, all legal and within the budgets.

A frame names the warps of a CTA, the CTAs of an SM, the stages, and how many elements of a tile a thread may have. It
makes plans whose chunks are 0. Each is then cut: a row gets the fewest copies, then the least padding, then the largest
chunk. Which candidate is the fastest is not asked here. The frames were chosen from surveys (bench/NOTES.md, "A survey
of plan families").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from . import budget, limits
from .device import DeviceSpec
from .legality import broken_rule
from .norm_problem import NormProblem
from .plan import (
    MAX_BOX_SIDE,
    AsyncCopyPlan,
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    WarpSpecializedPlan,
)

ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a tile; in a cluster, the first two
CLUSTERS = (1, 2, 4, 8, 16)  # CTAs that share a row too wide for one
CLUSTER_ARCHS = (90, 100, 103)
OLDEST_PUBLISHED_ARCH = 100  # nvFuser has published plans from here on: deep rings (see `_deepened`)


class Frame(NamedTuple):
    """Warps of a CTA and CTAs on an SM. A tile has at most most_rows rows, and a thread more than `least` and at most
    `most` of its elements. A ring also has stages, and limits of how many CTAs share a row. If it is not deep, the
    stages are those of tiles of one row that is not long."""

    num_warps: int
    ctas_per_sm: int
    least: float
    most: float
    most_rows: int
    least_cluster: int = 1
    most_cluster: int = CLUSTERS[-1]
    stages: int = 2
    short_lived: bool = False
    deep: bool = False


def frames(kind: str, problem: NormProblem) -> list[Frame]:
    """Of a "ring", a "gated ring", a "copied ring" that threads fill, rows in "registers", or "any" rows in registers.
    """
    known = problem.quantities, {"kind": kind}
    groups = [each["frames"] for each in limits.read("frames") if limits.value_of(each["for"], *known)]
    return [Frame(**frame) for group in groups for frame in group]


@functools.lru_cache(maxsize=4096)
def candidates(variant: str, problem: NormProblem, device: DeviceSpec) -> tuple[Plan, ...]:
    """The plans of a variant that may be the fastest. Each can run, with registers and shared memory to spare. Empty if
    the variant has none."""
    found: Iterable[Plan | None] = ()
    if broken_rule(variant, problem, 1, device) or variant == "reference":
        return ()
    if not problem.writes_rows and not problem.by_sample:  # no row sum is needed, only a reduction over rows
        found = [column_tile_plan(problem, device) if variant == "multi_wave" else column_ring_plan(problem, device)]
    elif variant == "warp_specialized":
        found = [_warp_specialized(problem, device)]
    elif variant == "multi_wave":
        found = _in_registers("registers", problem, device)
        # Any tile that registers hold reads its row once, which column tiles do not. These have no sums by sample.
        found = found or _in_registers("any", problem, device, good=False)
        found = found or [None if problem.by_sample else column_tile_plan(problem, device)]
    elif variant == "async_copy":
        found = list(rings("copied ring", problem, device))
    elif not are_better_in_registers(problem, device):
        found = list(rings("ring", problem, device))
        if not found and all(plan.kernel != "multi_wave" for plan in candidates("multi_wave", problem, device)):
            # Registers do not hold a row, and no ring has three stages: two stages still read it once.
            found = rings("ring", problem, device, stages=2)
    return tuple(plan for plan in found if plan)


def faulty(variant: str, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """A ring that can run, though it may spill or has one stage only; None if shared memory has no room for one."""
    if variant == "warp_specialized":
        return _warp_specialized(problem, device, good=False)
    kind = "copied ring" if variant == "async_copy" else "ring"
    uncut = [replace(ring, weight_in_smem=False) for ring in _uncut_rings(kind, problem, device)]
    uncut += [replace(ring, num_stages=1) for ring in uncut]
    return next((plan for ring in uncut if (plan := cut(ring, problem, device, good=False))), None)


def rings(kind: str, problem: NormProblem, device: DeviceSpec, stages: int | None = None) -> Iterator[Plan]:
    """Those of the frames of a kind that fit, with other stages if they are named. A weight that does not fit at its
    place, in shared memory or in registers, is at the other one."""
    for ring in _uncut_rings(kind, problem, device):
        ring = replace(ring, num_stages=stages) if stages else ring
        other = replace(ring, weight_in_smem=not ring.weight_in_smem)
        if plan := cut(ring, problem, device) or cut(other, problem, device):
            yield plan


def _uncut_rings(kind: str, problem: NormProblem, device: DeviceSpec) -> Iterator[PipelinedPlan]:
    """Rings of several rows, or of more columns than three stages have room for, have two stages, unless their frames
    are deep. Those of backwards by sample are, unless CTAs share a row. A short row has no cluster unless its frame has
    no other. The weight is in shared memory if a thread has many columns, unless a forward's tile is one row; otherwise
    in registers, as wide rows that a forward holds are, and what gated rings hold."""
    in_registers = kind == "gated ring" or problem.quantities["holds_wide"]
    copied = kind == "copied ring"
    of_kind, clusters = (AsyncCopyPlan, (1,)) if copied else (PipelinedPlan, cluster_sizes(problem, device))
    for frame, cluster in itertools.product(frames(kind, problem), clusters):
        warps, threads = frame.num_warps, 32 * frame.num_warps * cluster
        wide = problem.cols > limits.least_columns_of_cluster or frame.least_cluster > 1
        if not frame.least_cluster <= cluster <= frame.most_cluster or (cluster > 1 and not wide):
            continue
        deep = frame.deep or (problem.by_sample > 0 and cluster == 1 and not problem.rows_in)
        for rows in _tiles(frame, cluster, problem):
            short = rows == 1 and problem.cols <= limits.most_columns_of_two_stages * threads
            stages = frame.stages if short or deep else min(2, frame.stages)
            columns = (rows if cluster == 1 else 1) * problem.cols / threads
            one_row = rows == 1 and problem.is_forward and problem.norm == "layer"
            many = columns > limits.most_columns_with_weight[problem.direction] and not one_row
            in_smem = many and not in_registers
            shape = rows, 0, 0, stages, warps, frame.ctas_per_sm, 0, in_smem, cluster
            yield of_kind(*shape, short_lived=frame.short_lived)


def _in_registers(kind: str, problem: NormProblem, device: DeviceSpec, good: bool = True) -> list[Plan]:
    uncut = (
        MultiWavePlan(rows, 0, 0, frame.num_warps, frame.ctas_per_sm, 0, frame.short_lived)
        for frame in frames(kind, problem)
        for rows in _tiles(frame, 1, problem)
    )
    return [plan for tile in uncut if (plan := cut(tile, problem, device, good))]


def _tiles(frame: Frame, cluster: int, problem: NormProblem) -> list[int]:
    """How many rows a tile may have, so that a thread has as many elements as the frame says. A cluster's tile has one
    row or two."""
    threads, cols = 32 * frame.num_warps * cluster, max(problem.cols, limits.min_chunk)
    least = frame.least / 2 if problem.cols <= limits.narrow and not problem.is_forward else frame.least
    most_rows = min(2, frame.most_rows) if cluster > 1 else frame.most_rows
    return [rows for rows in ROWS if rows <= most_rows and least * threads < rows * cols <= frame.most * threads]


# --- How a row is cut ---


def cut(plan: Plan, problem: NormProblem, device: DeviceSpec, good: bool = True) -> Plan | None:
    """The plan that cuts a row of the problem, and does all else as `plan` does; None if none is within the budgets.
    The plan's kernel must be one that can run the problem. A ring that is not `good` may spill, and threads that hold
    rows need not own columns."""
    if isinstance(plan, PipelinedPlan):
        return _in_chunks(plan, problem, device, good)
    if isinstance(plan, MultiWavePlan):
        return _held(plan, problem, device, good)
    return column_tile_plan(problem, device) if isinstance(plan, ColumnTilePlan) else None


@functools.lru_cache(maxsize=1024)
def _cuts(cols: int, direction: str, rows: int, warps: int, cluster: int) -> list[tuple[int, int, int, int, bool]]:
    """The ways to cut a row for a ring, best first, as (copies, chunk, num_chunks, copy_chunks, tail). A thread has
    columns of one row; in a cluster, of all rows."""
    threads, found = 32 * warps if cluster > 1 else 32 * warps // rows, []
    for chunk, num_chunks in chunkings(-(-cols // cluster), threads, limits.max_ring_chunks[direction]):
        padded, whole = cluster * chunk * num_chunks, cols // (cluster * chunk)
        boxes = chunk // math.gcd(cols, chunk, MAX_BOX_SIDE)
        known = {"num_chunks": num_chunks, "chunk_columns": chunk // threads, "padding": padded / cols}
        known |= {"ends_within_a_chunk": whole < num_chunks, "rows": rows}
        if boxes <= MAX_BOX_SIDE and limits.value_of(limits.good_chunks, known):
            for copy_chunks, tail in ways_to_copy(num_chunks, whole):
                copies = 2 if tail else -(-num_chunks // copy_chunks)
                rank = boxes > limits.many_boxes, copies, padded, num_chunks
                found.append((rank, (copies, chunk, num_chunks, copy_chunks, tail)))
    return [way for _, way in sorted(found)]


def _copied_cuts(problem: NormProblem, threads: int) -> list[tuple[int, int, int, int, bool]]:
    """`_cuts` for a ring that threads fill: by the least padding, and then the fewest chunks. A thread copies at least
    16 bytes of a chunk of x, and not much more, so that few registers hold a chunk, and others are under way."""
    least, most = (size // problem.x_dtype.itemsize * threads for size in limits.copied_bytes)
    cuts = chunkings(problem.cols, least, limits.max_ring_chunks[problem.direction])
    cuts = sorted((chunk * count, count, chunk) for chunk, count in cuts if chunk <= most)
    return [(count, chunk, count, 1, False) for _, count, chunk in cuts]


def _in_chunks(ring: PipelinedPlan, problem: NormProblem, device: DeviceSpec, good: bool) -> Plan | None:
    rows, stages, warps, cluster = ring.rows_per_tile, ring.num_stages, ring.num_warps, ring.cluster
    if problem.sample_divisor and problem.sample_divisor % rows:
        return None
    limit = budget.register_limit(32 * warps * ring.ctas_per_sm, device)
    resources = stages, warps, ring.ctas_per_sm, limit, ring.weight_in_smem, cluster
    in_ring = bool(problem.rows_in) and (stages > 1 or ring.by_threads)  # no tile is ahead in a ring of one stage
    ways = _cuts(problem.cols, problem.direction, rows, warps, cluster)
    ways = [way for way in ways if way[0] <= limits.most_copies]
    if ring.by_threads:
        ways = _copied_cuts(problem, ring.threads_per_row)
    plans = (
        type(ring)(rows, *chunks, *resources, copy_chunks, ring.short_lived, tail, in_ring)
        for _, *chunks, copy_chunks, tail in ways
    )
    return _first_within_budget(plans, problem, device, good)


def _first_within_budget(plans: Iterable[Plan], problem: NormProblem, device: DeviceSpec, good: bool) -> Plan | None:
    """The first ring that fits shared memory, and if it must be `good` does not spill."""
    for plan in plans:
        needed = budget.registers(plan, problem, device) if good else 0
        if needed <= plan.max_registers and budget.fits_shared_memory(plan, problem, device):
            return plan
        if needed > limits.too_many * plan.max_registers:
            return None
    return None


def _held(tile: MultiWavePlan, problem: NormProblem, device: DeviceSpec, good: bool) -> MultiWavePlan | None:
    """Rows in registers, with the least padding, then with forwards' wanted number of elements per load, or the largest
    chunk. Threads load at least 8 bytes at once. In a backward of several rows, each thread has 16 bytes of every row,
    so that one thread adds up each column."""
    rows, warps, threads = tile.rows_per_tile, tile.num_warps, 32 * tile.num_warps
    itemsize, forward = problem.x_dtype.itemsize, problem.is_forward
    if rows * problem.cols > budget.MAX_REGISTERS * threads:
        return None
    owns = good and limits.value_of(limits.owns_columns, problem.quantities, {"rows": rows, "num_warps": warps})
    at_once = 16 // itemsize if problem.tma_aligned else limits.scattered_at_once
    limit = budget.register_limit(threads * (1 if tile.short_lived else tile.ctas_per_sm), device)
    found = [
        (chunk * num_chunks, abs(math.log2(rows * chunk / threads / at_once)) if forward else 0, num_chunks, chunk)
        for chunk, num_chunks in chunkings(problem.cols, limits.min_chunk, limits.max_chunks)
        if rows * chunk * itemsize >= 8 * threads and (not owns or chunk * itemsize >= 16 * threads)
    ]
    for *_, num_chunks, chunk in sorted(found):
        shape = rows, chunk, num_chunks, warps
        needed = budget.registers(MultiWavePlan(*shape, 1, 0, tile.short_lived), problem, device)
        room = min(device.registers_per_sm // needed, device.max_threads_per_sm) // threads
        ctas = min(tile.ctas_per_sm, room) if tile.short_lived else tile.ctas_per_sm
        if needed <= budget.MAX_REGISTERS and 0 < ctas <= room:
            return MultiWavePlan(*shape, ctas, budget.register_limit(threads * ctas, device), tile.short_lived)
        if needed > limits.too_many * limit:
            return None
    return None


# --- Other kernels ---


def _warp_specialized(problem: NormProblem, device: DeviceSpec, good: bool = True) -> WarpSpecializedPlan | None:
    """The first of the groups whose threads have a moderate share of as many rows as possible, with two stages for each
    if they fit. A plan that is not `good` may spill, have one stage, or more copies."""
    tensors, row_bytes = 2 - problem.is_forward, problem.cols * problem.x_dtype.itemsize
    shares = {(*each, rows): rows * row_bytes / (32 * each[1]) for each in limits.groups for rows in reversed(ROWS)}
    shares = {shape: share for shape, share in shares.items() if share <= limits.most_bytes}
    for groups, warps, rows in sorted(shares, key=lambda shape: shares[shape] > limits.moderate_bytes):
        most_copies = limits.most_produced_copies[groups - 1] // tensors
        most_copies = min(most_copies, limits.most_copies if good else limits.max_chunks)
        limit, of_groups = budget.group_register_limit(groups, warps, device), {"num_groups": groups}
        of_groups |= {"cached": problem.is_forward}
        for stages in (2,) if good and groups == 1 else (2 * groups, groups):
            plans = (
                WarpSpecializedPlan(rows, *chunks, stages, warps, 1, limit, in_smem, 1, copy_chunks, **of_groups)
                for copies, *chunks, copy_chunks, tail in _cuts(problem.cols, problem.direction, rows, warps, 1)
                for in_smem in (False, True)
                if copies <= most_copies and not tail
            )
            if plan := _first_within_budget(plans, problem, device, good):
                return _deepened(plan, problem, device)
    return None


def _deepened(plan: WarpSpecializedPlan, problem: NormProblem, device: DeviceSpec) -> WarpSpecializedPlan:
    """The last steps of nvFuser's ladder: two groups keep a tile in registers where the registers suffice, and the
    number of stages doubles as long as they fit. Hopper wants few stages."""
    if device.arch < OLDEST_PUBLISHED_ARCH:
        return plan
    cached = replace(plan, cached=True)
    if plan.num_groups > 1 and budget.registers(cached, problem, device) <= plan.max_registers:
        plan = cached
    while budget.fits_shared_memory(deeper := replace(plan, num_stages=2 * plan.num_stages), problem, device):
        plan = deeper
    return plan


def column_tile_plan(problem: NormProblem, device: DeviceSpec) -> ColumnTilePlan:
    """The plan for rows that do not fit in registers. In its pass over whole rows, each CTA has one row."""
    whole = 1 << max(4, (problem.cols - 1).bit_length())
    chunk, known = min(limits.column_tile, whole), (problem.quantities, vars(device))
    shape = {name: limits.value_of(of, *known) for name, of in limits.column_tiles.items()}
    shape["row_pass_chunk"] = min(shape["row_pass_chunk"], whole)
    plan = ColumnTilePlan(limits.column_tile // chunk, chunk, **shape)
    room = device.smem_per_sm_bytes // (budget.shared_bytes(plan, problem) + budget.RESERVED_SMEM_BYTES)
    return replace(plan, ctas_per_sm=max(1, min(plan.ctas_per_sm, room)))


def column_ring_plan(problem: NormProblem, device: DeviceSpec) -> ColumnRingPlan | None:
    """Of a backward without dx, two CTAs on an SM, by the largest tile for which shared memory has room."""
    ring = limits.column_ring
    resources = ring["chunk"], ring["stages"], ring["warps"], 2, budget.register_limit(64 * ring["warps"], device)
    plans = (ColumnRingPlan(rows, *resources) for rows in ring["rows"])
    return next((plan for plan in plans if budget.fits_shared_memory(plan, problem, device)), None)


# --- Common ---


def are_better_in_registers(problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether threads load rows sooner than TMA copies them. On Blackwell a published rule decides that."""
    return device.arch < OLDEST_PUBLISHED_ARCH and limits.value_of(limits.better_in_registers, problem.quantities)


def cluster_sizes(problem: NormProblem, device: DeviceSpec) -> tuple[int, ...]:
    """Cluster sizes that can start while other kernels hold sm_margin SMs. All CTAs of a cluster start together, in one
    group of SMs (GPC). If others hold SMs in every group, a cluster as large as a group waits for them: only rows that
    are wide for eight CTAs have one of 16."""
    if device.arch not in CLUSTER_ARCHS:
        return (1,)
    most = limits.value_of(limits.largest_cluster, problem.quantities, vars(device))
    return tuple(size for size in CLUSTERS if size <= most)


def ways_to_copy(num_chunks: int, whole_chunks: int) -> Iterator[tuple[int, bool]]:
    """(chunks of a copy, whether the last chunk has a copy of its own). A copy has room for a power of two of chunks,
    except for that before the tail of a row of whole chunks."""
    room = 1 << (whole_chunks - 1).bit_length()
    for exponent in range(room.bit_length() if whole_chunks == num_chunks else 1):
        yield 1 << exponent, False
    if 1 < whole_chunks < num_chunks:
        yield room, True
    elif whole_chunks == num_chunks and room == 2 * (num_chunks - 1) > 2:
        yield num_chunks - 1, True


def chunkings(cols: int, smallest: int, most: int) -> list[tuple[int, int]]:
    """(chunk, num_chunks) that cover cols. chunk is a power of two, at least `smallest`; num_chunks at most `most`."""
    exponents = range((smallest - 1).bit_length(), 1 + max(smallest - 1, cols - 1).bit_length())
    return [(1 << each, -(-cols // (1 << each))) for each in exponents if -(-cols // (1 << each)) <= most]
