"""Plans: everything about a launch that is compile-time, and nothing that the row count changes.

Grid, and with it the number of partials, come from plan, rows and device in `num_ctas`, and from nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .device import DeviceSpec
from .norm_problem import NormProblem

# Of fewer row tiles than these, or in a cluster of fewer rows, a CTA's partials cost more than its part of the work is
# worth; where several narrow rows are in its registers, of fewer rows. 1024 x 2055 takes 14.2 us by two tiles of a row
# and 17.5 by four, but 3000 x 508 12.4 us by two tiles of two rows and 11.4 by four; 400 x 8192 13.3 us by two rows for
# each cluster and 14.1 by four (LayerNorm backward).
MIN_TILES_OF_CTA, MIN_ROWS_OF_CLUSTER, MIN_NARROW_ROWS = 2, 2, 8

# Of a short-lived CTA, which loads the parameters while its first tile is on its way; of one in a cluster, which begins
# with waiting for the others, also rows and elements. LayerNorm forward 8192 x 16384 takes 131 us by 2 tiles of 2 rows,
# 134 us by 5; 2048 x 65536 137 us by 5 tiles of a row, 150 us by 2; 4096 x 20480 88 us by 5 tiles of a row, 96 us by 2
# of 2 rows, 10240 elements in all.
MIN_TILES_OF_SHORT_LIVED, MIN_ROWS_IN_CLUSTER, MIN_ELEMENTS_IN_CLUSTER = 2, 5, 12 * 1024
MIN_WAVES = 6  # of fewer, the last would leave too much of the GPU idle

MAX_BOX_SIDE = 256  # elements, of a TMA copy


@dataclass(frozen=True)
class MultiWavePlan:
    """Rows in registers, num_chunks chunks of `chunk` columns each; ctas_per_sm CTAs fit an SM at max_registers a
    thread. Short-lived CTAs, of a forward, have one row tile each."""

    variant: ClassVar[str] = "multi_wave"
    cluster: ClassVar[int] = 1
    rows_per_tile: int
    chunk: int
    num_chunks: int
    num_warps: int
    ctas_per_sm: int
    max_registers: int
    short_lived: bool = False


@dataclass(frozen=True)
class ColumnTilePlan:
    """Rows by column tiles: in two passes where dx (or y) is wanted, in one where a backward wants dw and db only.

    row_pass_chunk and row_pass_warps are those of the pass that reads whole rows."""

    variant: ClassVar[str] = "multi_wave"
    cluster: ClassVar[int] = 1
    rows_per_tile: int
    chunk: int
    num_warps: int
    ctas_per_sm: int
    row_pass_chunk: int
    row_pass_warps: int


@dataclass(frozen=True)
class PipelinedPlan:
    """Row tiles through a TMA ring of num_stages stages in shared memory, filled by the computing warps. A row tile is
    num_chunks chunks of `chunk` columns, which come copy_chunks to a copy; with a tail, the last, within which the row
    may end, comes in a copy of its own and all others in one. weight_in_smem keeps weight (and bias) in shared memory
    instead of registers."""

    variant: ClassVar[str] = "pipelined"
    rows_per_tile: int
    chunk: int
    num_chunks: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int
    max_registers: int
    weight_in_smem: bool
    cluster: int = 1  # CTAs that share a row, chunk columns of every chunk each, and exchange its sums
    copy_chunks: int = 1
    # SMs do not run equally fast, and who is faster gets more of the CTAs where there are more of them than run at
    # once. With one stage each has one tile, and what is copied meanwhile is others'.
    short_lived: bool = False
    tail: bool = False


@dataclass(frozen=True)
class ColumnRingPlan:
    """For a backward without dx, which sums over rows only: tiles of rows_per_tile x chunk elements of the gradient,
    and of x for dw, through a TMA ring of num_stages stages in shared memory."""

    variant: ClassVar[str] = "pipelined"
    cluster: ClassVar[int] = 1
    rows_per_tile: int
    chunk: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int
    max_registers: int


@dataclass(frozen=True)
class WarpSpecializedPlan:
    """The same ring filled by a producer warp and emptied by num_groups compute groups of num_warps warps, which take
    stages in turn (num_stages is a multiple of num_groups) and sum dw and db each for themselves. cached keeps a row
    tile in registers instead of reading its stage twice. max_registers is the compute warps' share once the producer
    has given its own away."""

    variant: ClassVar[str] = "warp_specialized"
    cluster: ClassVar[int] = 1
    tail: ClassVar[bool] = False
    rows_per_tile: int
    chunk: int
    num_chunks: int
    num_stages: int
    num_groups: int
    num_warps: int  # of one group
    ctas_per_sm: int
    max_registers: int
    weight_in_smem: bool
    cached: bool
    copy_chunks: int = 1


@dataclass(frozen=True)
class ReferencePlan:
    """No kernel of this package but ATen's, and why."""

    variant: ClassVar[str] = "reference"
    reason: str


RingPlan = PipelinedPlan | WarpSpecializedPlan
Plan = MultiWavePlan | ColumnTilePlan | RingPlan | ColumnRingPlan | ReferencePlan
VARIANTS = ("multi_wave", "pipelined", "warp_specialized", "reference")


@dataclass(frozen=True)
class Rejected:
    """Why a variant is not used: the name of the rule it breaks, and a sentence for people."""

    rule: str
    reason: str


def box_columns(plan: RingPlan, cols: int) -> int:
    """Columns on the innermost side of a TMA box, which must divide a row."""
    return math.gcd(cols, plan.chunk, MAX_BOX_SIDE)


def rows_of_a_thread(rows_per_tile: int, cluster: int) -> int:
    """Rows of a ring's tile of which a thread has a part: all in a cluster, else one, and each row has threads of its
    own."""
    return rows_per_tile if cluster > 1 else 1


def has_two_rows_in_cluster(plan: RingPlan) -> bool:
    """Whether its threads have parts of two rows."""
    return rows_of_a_thread(plan.rows_per_tile, plan.cluster) > 1


def threads_of_a_row(plan: RingPlan) -> int:
    """Threads among which a row is divided, or in a cluster a CTA's part of it."""
    return 32 * plan.num_warps * rows_of_a_thread(plan.rows_per_tile, plan.cluster) // plan.rows_per_tile


def warps_of_a_row(plan: RingPlan) -> int:
    """Warps of a CTA among which a row's sum is divided."""
    return plan.num_warps if plan.cluster > 1 or plan.rows_per_tile < plan.num_warps else 1


def columns_of_a_thread(plan: RingPlan) -> float:
    """Of each of its rows, those beyond the last included."""
    return plan.chunk * plan.num_chunks / threads_of_a_row(plan)


def padded_columns(plan: RingPlan) -> int:
    """Of all chunks of a row: those beyond the last column are zeros."""
    return plan.cluster * plan.num_chunks * plan.chunk


def is_whole(plan: RingPlan, cols: int) -> bool:
    """Whether the chunks are exactly a row, so that every thread has as many columns."""
    return cols == padded_columns(plan)


def num_copies(plan: RingPlan) -> int:
    """Copies of each tensor that make a row tile."""
    return 2 if plan.tail else -(-plan.num_chunks // plan.copy_chunks)


def num_ctas(plan: Plan, rows: int, cols: int, device: DeviceSpec, leaves_partials: bool = True) -> int:
    """The grid along the rows: CTAs, or clusters of them, of which none is idle. As many as run at once, even if some
    then have a row tile less than others: fewer would be done as soon, but load less at a time (16384 x 2055 takes 55.0
    us and 56.3, LayerNorm forward). Not so where they leave partials of few tiles. Short-lived ones have as many tiles
    each, but for the last (2048 x 8192: 19.0 us, 19.6 by as many as run at once)."""
    tiles = -(-rows // plan.rows_per_tile)
    first_wave, at_once = clusters_at_once(plan.cluster, device), ctas_at_once(plan, device)
    if isinstance(plan, (ColumnTilePlan, ColumnRingPlan)):
        limit = max(1, at_once // -(-cols // plan.chunk))
    elif isinstance(plan, PipelinedPlan) and plan.short_lived:
        many = tiles // tiles_of_short_lived(plan)
        limit = many if many >= MIN_WAVES * at_once or plan.num_stages == 1 else at_once
    elif isinstance(plan, MultiWavePlan) and plan.short_lived:
        limit = tiles
    elif leaves_partials:
        limit = max(first_wave, min(at_once, rows // least_rows_of_cta(plan) // first_wave * first_wave))
    else:
        limit = at_once
    if isinstance(plan, PipelinedPlan) and plan.short_lived:
        return -(-tiles // -(-tiles // min(tiles, limit)))
    return min(tiles, limit)


def least_rows_of_cta(plan: Plan) -> int:
    """Rows for each CTA, or cluster, of which there are more than one wave."""
    if plan.cluster > 1:
        return MIN_ROWS_OF_CLUSTER
    narrow = isinstance(plan, MultiWavePlan) and plan.rows_per_tile > 1
    return max(MIN_TILES_OF_CTA * plan.rows_per_tile, MIN_NARROW_ROWS * narrow)


def tiles_of_short_lived(plan: PipelinedPlan) -> int:
    """Row tiles for each short-lived CTA, at least."""
    if plan.num_stages == 1:
        return 1
    if plan.cluster == 1:
        return MIN_TILES_OF_SHORT_LIVED
    elements = plan.rows_per_tile * plan.chunk * plan.num_chunks
    few_rows, few_elements = MIN_ROWS_IN_CLUSTER // plan.rows_per_tile, -(-MIN_ELEMENTS_IN_CLUSTER // elements)
    return max(MIN_TILES_OF_SHORT_LIVED, few_rows, few_elements)


def clusters_at_once(cluster: int, device: DeviceSpec) -> int:
    """How many clusters of so many CTAs, one on each SM, run at the same time. A cluster keeps to a group of SMs (GPC),
    which clusters of 4 and 8 do not fill: on 120 of an H200's 132 SMs they are 5 to 20% faster than on all (bfloat16
    backward of 16384 and 32768 columns, 2026-11-20)."""
    usable = device.sm_count if cluster <= 2 else device.sm_count * 10 // 11
    return max(1, usable // cluster)


def ctas_at_once(plan: Plan, device: DeviceSpec) -> int:
    """How many of a plan's CTAs, or clusters, run at the same time."""
    return plan.ctas_per_sm * clusters_at_once(plan.cluster, device)


def rows_at_once(plan: Plan, device: DeviceSpec) -> int:
    """Rows of one tile for each of these."""
    return plan.rows_per_tile * ctas_at_once(plan, device)


def num_passes(plan: Plan, problem: NormProblem) -> int | None:
    """How often the kernels read x and dy; a forward finds x in the cache the second time. None: ATen's kernels."""
    if isinstance(plan, ReferencePlan):
        return None
    return 2 if isinstance(plan, ColumnTilePlan) and (problem.direction == "forward" or problem.wants_dx) else 1


def num_launches(plan: Plan, problem: NormProblem) -> int | None:
    """Of one call. The second of two passes sums its partials itself, all others leave that to a launch of its own."""
    if isinstance(plan, ReferencePlan):
        return None
    if isinstance(plan, ColumnTilePlan) and problem.wants_dx:
        return 2
    return 1 + (problem.num_sums > 0)


def num_partials(plan: Plan, ctas: int) -> int:
    """Rows of the dw and db partials: one for each CTA along the rows, or for each of its compute groups."""
    return ctas * plan.num_groups if isinstance(plan, WarpSpecializedPlan) else ctas
