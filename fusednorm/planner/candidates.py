"""candidates(variant, problem, device): the few plans worth considering, all legal and within the budgets.

A Frame makes plans whose chunks are 0. Each is then cut: a row gets the fewest copies, then the least padding, then the
largest chunk. Which candidate is the fastest is not asked here. The frames were chosen from surveys (bench/NOTES.md, "A
survey of plan families").
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
from .plan import AsyncCopyPlan, ColumnRingPlan, ColumnTilePlan, MultiWavePlan, PipelinedPlan, Plan, WarpSpecializedPlan

ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a tile; in a cluster, the first two
CLUSTERS = (1, 2, 4, 8, 16)  # CTAs that share a row too wide for one
# What some kinds of frames make. Those of "registers" and "any" hold rows in registers.
RINGS = dict.fromkeys(("ring", "surveyed ring", "ring of an order"), PipelinedPlan) | {"copied ring": AsyncCopyPlan}
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
        # Any tile that registers hold reads its row once, which column tiles do not.
        found = of_frames("registers", problem, device) or of_frames("any", problem, device, good=False)
        found = found or [column_tile_plan(problem, device)]
    elif variant == "async_copy":
        found = of_frames("copied ring", problem, device)
    elif not are_better_in_registers(problem, device):
        found = of_frames("ring of an order", problem, device) if problem.by_key else ()
        if not (found or problem.by_key and candidates("multi_wave", problem, device)):
            found = of_frames("ring", problem, device)
        if not found and all(plan.kernel != "multi_wave" for plan in candidates("multi_wave", problem, device)):
            # Registers do not hold a row, and no ring has three stages: two stages still read it once.
            found = of_frames("ring", problem, device, num_stages=2)
    return tuple(plan for plan in found if plan)


def faulty(variant: str, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """A ring that can run, though it may spill or has one stage only; None if shared memory has no room for one."""
    if variant == "multi_wave":
        return None
    if variant == "warp_specialized":
        return _warp_specialized(problem, device, good=False)
    asked = "copied ring" if variant == "async_copy" else "ring", problem, device, False
    found = of_frames(*asked, weight_in_smem=False) or of_frames(*asked, weight_in_smem=False, num_stages=1)
    return next(iter(found), None)


def of_frames(kind: str, problem: NormProblem, device: DeviceSpec, good: bool = True, **changes: int) -> list[Plan]:
    """The plans of a kind's frames that fit, with changes of these."""
    found = (fitted(replace(each, **changes), problem, device, good) for each in _uncut(kind, problem, device))
    return [plan for plan in found if plan]


def fitted(plan: Plan, problem: NormProblem, device: DeviceSpec, good: bool = True) -> Plan | None:
    """`cut`, but a ring's weight that does not fit at its place, in shared memory or in registers, is at the other."""
    moved = replace(plan, weight_in_smem=not plan.weight_in_smem) if isinstance(plan, PipelinedPlan) else None
    return cut(plan, problem, device, good) or (moved and cut(moved, problem, device, good))


def _uncut(kind: str, problem: NormProblem, device: DeviceSpec) -> Iterator[Plan]:
    """The plans of a kind's frames, before a row is cut. A short row has no cluster unless its frame has no other."""
    known = problem.quantities, {"kind": kind}
    groups = (each for each in limits.read("frames") if limits.value_of(each["for"], *known))
    frames = (Frame(**frame) for group in groups for frame in group["frames"])
    clusters = cluster_sizes(problem, device) if RINGS.get(kind) is PipelinedPlan else (1,)
    for frame, cluster in itertools.product(frames, clusters):
        wide = problem.cols > limits.least_columns_of_cluster or frame.least_cluster > 1
        if not frame.least_cluster <= cluster <= frame.most_cluster or (cluster > 1 and not wide):
            continue
        for rows in _tiles(frame, cluster, problem):
            shape = {"rows_per_tile": rows, "num_warps": frame.num_warps, "ctas_per_sm": frame.ctas_per_sm}
            shape |= {"chunk": 0, "num_chunks": 0, "max_registers": 0, "short_lived": frame.short_lived}
            if kind in RINGS:
                columns = (rows if cluster == 1 else 1) * problem.cols / (32 * frame.num_warps * cluster)
                known = frame._asdict() | {"kind": kind, "rows": rows, "cluster": cluster, "columns": columns}
                of_ring = {"num_stages": limits.stages_of_ring, "weight_in_smem": limits.weight_in_smem}
                shape |= {name: limits.value_of(each, problem.quantities, known) for name, each in of_ring.items()}
                shape |= {"cluster": cluster, "added_in_ring": RINGS[kind] is PipelinedPlan}
            yield RINGS.get(kind, MultiWavePlan)(**shape)


def _tiles(frame: Frame, cluster: int, problem: NormProblem) -> list[int]:
    """How many rows a tile may have, for as many elements of a thread as the frame says. A cluster's has one or two."""
    threads, cols = 32 * frame.num_warps * cluster, max(problem.cols, limits.min_chunk)
    least = frame.least / 2 if problem.cols <= limits.narrow and not problem.is_forward else frame.least
    most_rows = min(2, frame.most_rows) if cluster > 1 else frame.most_rows
    return [rows for rows in ROWS if rows <= most_rows and least * threads < rows * cols <= frame.most * threads]


def cut(plan: Plan, problem: NormProblem, device: DeviceSpec, good: bool = True) -> Plan | None:
    """The plan that cuts a row of the problem, and does all else as `plan` does; None if none is within the budgets.
    The plan's kernel must be one that can run the problem. A ring that is not `good` may spill, and threads that hold
    rows need not own columns."""
    if isinstance(plan, ColumnTilePlan):
        return column_tile_plan(problem, device)
    if isinstance(plan, MultiWavePlan):
        return _held(plan, problem, device, good)
    rows, warps = plan.rows_per_tile, plan.num_warps
    if not isinstance(plan, PipelinedPlan) or problem.ring_divisor % rows:
        return None
    cuts = _cuts(problem.cols, problem.direction, rows, warps, plan.cluster)
    cuts = _copied_cuts(problem, plan.threads_per_row) if plan.by_threads else cuts
    limit = budget.register_limit(32 * warps * plan.ctas_per_sm, device)
    in_ring = len(problem.rows_in) > 0 and (plan.num_stages > 1 or plan.by_threads)  # or else no tile is ahead
    ways = (True, False) if plan.added_in_ring and problem.residual_dtype and plan.num_stages > 1 else (False,)
    kept = {"max_registers": limit, "rows_in_ring": in_ring}
    plans = (replace(plan, **each, **kept, added_in_ring=way) for each in cuts for way in ways)
    plans = (plan for plan in plans if plan.by_threads or plan.num_copies <= limits.most_copies)
    return _first_within_budget(plans, problem, device, good)


@functools.lru_cache(maxsize=1024)
def _cuts(cols: int, direction: str, rows: int, warps: int, cluster: int) -> list[dict[str, int]]:
    """The ways to cut a row for a ring, as fields of its plan, best first. A thread has columns of one row; in a
    cluster, of all rows."""
    threads, found = 32 * warps if cluster > 1 else 32 * warps // rows, []
    for chunk, num_chunks in chunkings(-(-cols // cluster), threads, limits.max_ring_chunks[direction]):
        padded, whole = cluster * chunk * num_chunks, cols // (cluster * chunk)
        boxes = chunk // math.gcd(cols, chunk, limits.max_box_side)
        known = {"num_chunks": num_chunks, "chunk_columns": chunk // threads, "padding": padded / cols}
        known |= {"ends_within_a_chunk": whole < num_chunks, "rows": rows}
        if boxes <= limits.max_box_side and limits.value_of(limits.good_chunks, known):
            for copy_chunks, tail in ways_to_copy(num_chunks, whole):
                copies = 2 if tail else -(-num_chunks // copy_chunks)
                found.append((boxes > limits.many_boxes, copies, padded, num_chunks, chunk, copy_chunks, tail))
    names = "num_chunks", "chunk", "copy_chunks", "tail"
    return [dict(zip(names, way, strict=True)) for _, _, _, *way in sorted(found)]


def _copied_cuts(problem: NormProblem, threads: int) -> list[dict[str, int]]:
    """`_cuts` for a ring that threads fill: by the least padding, and then the fewest chunks. A thread copies few bytes
    of a chunk, so that few registers hold one, and others are under way."""
    least, most = (size // problem.x_dtype.itemsize * threads for size in limits.copied_bytes)
    cuts = chunkings(problem.cols, least, limits.max_ring_chunks[problem.direction])
    cuts = sorted((chunk * count, count, chunk) for chunk, count in cuts if chunk <= most)
    return [{"chunk": chunk, "num_chunks": count} for _, count, chunk in cuts]


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
    """Rows in registers, with the least padding, then a forward's wanted elements per load, or the largest chunk."""
    rows, warps, threads = tile.rows_per_tile, tile.num_warps, 32 * tile.num_warps
    itemsize, ctas = problem.x_dtype.itemsize, 1 if tile.short_lived else tile.ctas_per_sm
    if rows * problem.cols > budget.MAX_REGISTERS * threads or threads * ctas > device.max_threads_per_sm:
        return None
    owns = good and limits.value_of(limits.owns_columns, problem.quantities, {"rows": rows, "num_warps": warps})
    at_once = 16 // itemsize if problem.tma_aligned else limits.scattered_at_once
    limit = budget.register_limit(threads * ctas, device)
    found = sorted(
        (chunk * num_chunks, problem.is_forward and abs(math.log2(rows * chunk / threads / at_once)), num_chunks, chunk)
        for chunk, num_chunks in chunkings(problem.cols, limits.min_chunk, limits.max_chunks)
        if rows * chunk * itemsize >= 8 * threads and (not owns or problem.owns_columns(chunk, warps))
    )
    plans = (MultiWavePlan(rows, chunk, count, warps, ctas, limit, tile.short_lived) for *_, count, chunk in found)
    plan = _first_within_budget(plans, problem, device, True)
    if plan and plan.short_lived:  # as many CTAs as there are registers for
        room = min(device.registers_per_sm // budget.registers(plan, problem, device), device.max_threads_per_sm)
        ctas = room // threads if problem.tables else min(tile.ctas_per_sm, room // threads)
        plan = replace(plan, ctas_per_sm=ctas, max_registers=budget.register_limit(threads * ctas, device))
    return plan if plan and plan.ctas_per_sm >= limits.value_of(limits.least_ctas, problem.quantities) else None


def _warp_specialized(problem: NormProblem, device: DeviceSpec, good: bool = True) -> WarpSpecializedPlan | None:
    """The first of the groups whose threads have a moderate share of as many rows as possible, with two stages for each
    if they fit. A plan that is not `good` may spill, have one stage, or more copies."""
    row_bytes = problem.cols * problem.x_dtype.itemsize
    shares = {(*each, rows): rows * row_bytes / (32 * each[1]) for each in limits.groups for rows in reversed(ROWS)}
    shares = {shape: share for shape, share in shares.items() if share <= limits.most_bytes}
    for groups, warps, rows in sorted(shares, key=lambda shape: shares[shape] > limits.moderate_bytes):
        most_copies = limits.most_produced_copies[groups - 1] // (2 - problem.is_forward)
        most_copies = min(most_copies, limits.most_copies if good else limits.max_chunks)
        shape = {"rows_per_tile": rows, "num_warps": warps, "num_groups": groups, "cached": problem.is_forward}
        shape |= {"ctas_per_sm": 1, "max_registers": budget.group_register_limit(groups, warps, device)}
        for stages in (2,) if good and groups == 1 else (2 * groups, groups):
            ways = itertools.product(_cuts(problem.cols, problem.direction, rows, warps, 1), (False, True))
            plans = (WarpSpecializedPlan(**shape, **way, num_stages=stages, weight_in_smem=at) for way, at in ways)
            plans = (plan for plan in plans if plan.num_copies <= most_copies and not plan.tail)
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


def column_tile_plan(problem: NormProblem, device: DeviceSpec) -> ColumnTilePlan | None:
    """The plan for rows that do not fit in registers. In its pass over whole rows, each CTA has one row."""
    if not limits.value_of(limits.goes_by_columns, problem.quantities):
        return None
    known = problem.quantities, vars(device) | {"whole": 1 << max(4, (problem.cols - 1).bit_length())}
    plan = ColumnTilePlan(**{name: limits.value_of(each, *known) for name, each in limits.column_tiles.items()})
    room = device.smem_per_sm_bytes // (budget.shared_bytes(plan, problem) + budget.RESERVED_SMEM_BYTES)
    return replace(plan, ctas_per_sm=max(1, min(plan.ctas_per_sm, room)))


def column_ring_plan(problem: NormProblem, device: DeviceSpec) -> ColumnRingPlan | None:
    """Of a backward without dx, by the largest tile for which shared memory has room."""
    ring = limits.column_ring
    limit = budget.register_limit(32 * ring["num_warps"] * ring["ctas_per_sm"], device)
    plans = (ColumnRingPlan(**ring, rows_per_tile=rows, max_registers=limit) for rows in limits.rows_of_column_ring)
    return next((plan for plan in plans if budget.fits_shared_memory(plan, problem, device)), None)


def are_better_in_registers(problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether threads load rows sooner than TMA copies them. On Blackwell a published rule decides that."""
    return device.arch < OLDEST_PUBLISHED_ARCH and limits.value_of(limits.better_in_registers, problem.quantities)


def cluster_sizes(problem: NormProblem, device: DeviceSpec) -> tuple[int, ...]:
    """Those that can start while other kernels hold sm_margin SMs: a cluster starts as one, in one group of SMs."""
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
