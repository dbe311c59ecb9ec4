"""The plans worth considering for a problem: at most MOST_CANDIDATES, all legal, all within the budgets.

A family is what a plan does apart from how a row is cut: its kernel, rows of a tile, warps, CTAs on an SM, CTAs of a
row, stages. The families come from a few frames (warps, CTAs on an SM), and from the elements of a row tile that a
thread should have. Within a family, the row is cut so that it needs the fewest copies, then the least padding, then the
largest chunk. Speed is no matter of this file, beyond what follows from these rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from . import budget
from .candidates import (
    FEW_CHUNKS,
    MAX_CHUNKS,
    MAX_RING_CHUNKS,
    MIN_MULTIWAVE_CHUNK,
    chunkings,
    cluster_sizes,
    ctas_with_room,
    most_boxes,
    ways_to_copy,
)
from .device import DeviceSpec
from .legality import broken_rule
from .norm_problem import NormProblem
from .plan import MAX_BOX_SIDE, MultiWavePlan, PipelinedPlan, Plan

MOST_PADDING = 4 / 3  # columns that the threads of a ring compute on, for each column of the row
MOST_COPIES = 4  # of a tile of one tensor
ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a tile; in a cluster, the first two
SHORT = 128  # columns: such a row is too short for a thread to own columns
NARROW = 512  # columns: a tile of few such rows is small for any number of warps
LEAST_COLUMNS_OF_CLUSTER = 4096  # rows of fewer are short for one CTA
MOST_COLUMNS_WITH_WEIGHT = {"forward": 16, "backward": 32}  # of a thread of a ring that keeps the weight in registers


class Frame(NamedTuple):
    """Warps of a CTA, CTAs on an SM, and the least and most elements of a row tile for a thread."""

    num_warps: int
    ctas_per_sm: int
    least: float
    most: float


RINGS = {
    "forward": (
        Frame(4, 4, 24, 64),
        Frame(4, 3, 24, 64),
        Frame(4, 2, 24, 64),
        Frame(8, 2, 24, 64),
        Frame(8, 1, 24, 64),
    ),
    "backward": (Frame(4, 2, 16, 64), Frame(4, 3, 16, 64), Frame(8, 1, 16, 64), Frame(16, 1, 32, 64)),
}
IN_REGISTERS = {
    "forward": (Frame(4, 4, 12, 32), Frame(4, 5, 12, 32), Frame(8, 2, 12, 32), Frame(16, 1, 12, 32)),
    "backward": (
        Frame(2, 4, 6, 32),
        Frame(2, 8, 6, 16),
        Frame(4, 2, 6, 16),
        Frame(4, 4, 6, 16),
        Frame(8, 1, 6, 16),
        Frame(8, 2, 6, 16),
        Frame(16, 1, 5, 16),
    ),
}
# One row tile for each CTA, and rows whose elements are loaded one by one.
SHORT_LIVED = (Frame(2, 16, 12, 32), Frame(4, 8, 12, 32), Frame(8, 4, 12, 32), Frame(16, 2, 12, 32))
SCATTERED = {
    "forward": (
        Frame(4, 4, 4, 24),
        Frame(4, 5, 4, 24),
        Frame(4, 6, 4, 24),
        Frame(4, 2, 4, 48),
        Frame(8, 2, 4, 24),
        Frame(16, 1, 4, 24),
    ),
    "backward": tuple(frame._replace(least=4, most=max(24, frame.most)) for frame in IN_REGISTERS["backward"]),
}


class Family(NamedTuple):
    """What a plan does, apart from how a row is cut. A multi-wave family has no stages, and no cluster."""

    kernel: str
    rows_per_tile: int
    num_warps: int
    ctas_per_sm: int
    cluster: int = 1
    num_stages: int = 0
    short_lived: bool = False


def family_of(plan: Plan) -> Family | None:
    if plan.kernel == "pipelined":
        return Family(
            plan.kernel,
            plan.rows_per_tile,
            plan.num_warps,
            plan.ctas_per_sm,
            plan.cluster,
            plan.num_stages,
            plan.short_lived,
        )
    if plan.kernel == "multi_wave":
        return Family(plan.kernel, plan.rows_per_tile, plan.num_warps, plan.ctas_per_sm, 1, 0, plan.short_lived)
    return None


def families(problem: NormProblem, device: DeviceSpec) -> Iterator[Family]:
    forward, cols = problem.direction == "forward", problem.cols

    def tiles(frame: Frame, cluster: int = 1) -> list[int]:
        threads = 32 * frame.num_warps * cluster
        least = frame.least / 2 if cols <= NARROW and not forward else frame.least
        return [
            rows
            for rows in (ROWS if cluster == 1 else ROWS[:2])
            if least * threads <= rows * cols <= frame.most * threads
        ]

    if not broken_rule("pipelined", problem, 1, device):
        for frame, cluster in itertools.product(RINGS[problem.direction], cluster_sizes(device)):
            if (cluster > 1 and cols <= LEAST_COLUMNS_OF_CLUSTER) or (frame.num_warps == 16 and cluster < 8):
                continue
            for rows in tiles(frame, cluster):
                for stages in _stages(rows, frame, cluster, problem):
                    short_lived = forward and frame.ctas_per_sm > 1
                    yield Family("pipelined", rows, frame.num_warps, frame.ctas_per_sm, cluster, stages, short_lived)
    in_pieces = cols * problem.x_dtype.itemsize % 32 != 0
    scattered = not problem.tma_aligned or (in_pieces and not forward)
    for frame in (SCATTERED if scattered else IN_REGISTERS)[problem.direction]:
        for rows in tiles(frame):
            yield Family("multi_wave", rows, frame.num_warps, frame.ctas_per_sm)
    if forward and problem.tma_aligned:
        for frame in SHORT_LIVED:
            for rows in tiles(frame) if frame.num_warps < 16 or cols > 8192 else ():
                yield Family("multi_wave", rows, frame.num_warps, frame.ctas_per_sm, short_lived=True)


def _stages(rows: int, frame: Frame, cluster: int, problem: NormProblem) -> tuple[int, ...]:
    """Stages worth considering; none where this frame is for other tiles."""
    if problem.direction == "backward":
        return (2,) if rows > 1 or problem.cols > 56 * 32 * frame.num_warps * cluster else (3,)
    if frame.ctas_per_sm == 3 and (problem.norm == "rms" or rows > 1):
        return ()
    return (1, 2) if problem.norm == "rms" and cluster == 1 else (2,)


def shortlist(problem: NormProblem, device: DeviceSpec) -> tuple[Plan, ...]:
    found = (plan_of(family, problem, device) for family in families(problem, device))
    return tuple(dict.fromkeys(plan for plan in found if plan))


def elements_per_thread(family: Family, cols: int) -> float:
    return family.rows_per_tile * cols / (32 * family.num_warps * family.cluster)


def plan_of(family: Family, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """The plan of a family for a problem; None if none is within the budgets."""
    build = ring_of if family.kernel == "pipelined" else rows_of
    return build(family, problem, device)


def ring_of(family: Family, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    rows, warps, cluster = family.rows_per_tile, family.num_warps, family.cluster
    threads = 32 * warps if cluster > 1 else 32 * warps // rows
    limit = budget.register_limit(32 * warps * family.ctas_per_sm, device)
    found = []
    for chunk, num_chunks in chunkings(-(-problem.cols // cluster), threads, MAX_RING_CHUNKS[problem.direction]):
        padding = cluster * chunk * num_chunks
        boxes = cluster * chunk // math.gcd(problem.cols, chunk, MAX_BOX_SIDE)
        if padding > MOST_PADDING * problem.cols or chunk * num_chunks > 64 * threads:
            continue
        whole = problem.cols // (cluster * chunk)
        least = 4 if rows == 1 and whole < num_chunks else 2
        if boxes > most_boxes(problem, cluster) or num_chunks > FEW_CHUNKS and chunk < least * threads:
            continue
        for copies in ways_to_copy(num_chunks, whole):
            number = 2 if copies.tail else -(-num_chunks // copies.chunks)
            if number <= MOST_COPIES:
                found.append((number, padding, -chunk, num_chunks, copies))
    for _, _, chunk, num_chunks, copies in sorted(found):
        many = -chunk * num_chunks > MOST_COLUMNS_WITH_WEIGHT[problem.direction] * threads
        alone = problem.direction == "forward" and family.ctas_per_sm == 3
        for in_smem in (True, False) if many and not alone else (False, True):
            plan = PipelinedPlan(
                rows,
                -chunk,
                num_chunks,
                family.num_stages,
                warps,
                family.ctas_per_sm,
                limit,
                in_smem,
                cluster,
                copies.chunks,
                family.short_lived,
                copies.tail,
            )
            if budget.registers(plan, problem, device) <= limit and budget.fits_shared_memory(plan, problem, device):
                return plan
    return None


def rows_of(family: Family, problem: NormProblem, device: DeviceSpec) -> MultiWavePlan | None:
    rows, warps, ctas, least = family.rows_per_tile, family.num_warps, family.ctas_per_sm, 8 // problem.x_dtype.itemsize
    threads = 32 * warps
    # In a backward, a thread that has the same columns of all rows of a tile adds up dw and db by itself.
    owns = problem.direction == "backward" and problem.tma_aligned
    owned = 16 // problem.x_dtype.itemsize * threads if owns else 0
    found = [
        (chunk * num_chunks, -chunk, num_chunks)
        for chunk, num_chunks in chunkings(problem.cols, MIN_MULTIWAVE_CHUNK, MAX_CHUNKS)
        if rows * chunk >= least * threads and (rows == 1 or chunk >= owned or problem.cols <= SHORT)
    ]
    for padded, chunk, num_chunks in sorted(found):
        if family.short_lived:
            need = budget.one_tile_registers(rows * padded / threads, problem)
        else:
            need = budget.multiwave_registers(rows, -chunk, num_chunks, warps, problem, device)
        room = ctas_with_room(need, threads, device) if need <= budget.MAX_REGISTERS else 0
        if room and (ctas <= room or family.short_lived):
            ctas = min(ctas, room)
            limit = budget.register_limit(threads * ctas, device)
            return MultiWavePlan(rows, -chunk, num_chunks, warps, ctas, limit, family.short_lived)
    return None
