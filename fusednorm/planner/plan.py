"""Plans: everything about a launch that is known at compile time. The row count changes nothing in a plan.

Users ask for a plan by its `variant`. Two variants have two kernels each, for whole rows and for column tiles. `Grid`
alone says how many CTAs a number of rows gets, and with them how many partials.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from . import limits
from .device import DeviceSpec
from .norm_problem import NormProblem

MOST_CTAS = 2**16 - 1  # along the rows, where these are a grid's second dimension
MAX_REGISTERS = 255  # per thread


class Plan:
    """What all plans have. A type of plans has fields for what is not as it stands here."""

    variant: ClassVar[str]
    kernel: ClassVar[str]
    cluster = 1  # CTAs that share a row
    num_groups = 1  # compute groups of a CTA, which sum dw and db each for itself
    by_columns = False  # CTAs own columns, not whole rows
    short_lived = cached = rows_in_ring = added_in_ring = by_threads = False


@dataclass(frozen=True)
class MultiWavePlan(Plan):
    """Rows in registers, in num_chunks chunks of `chunk` columns. Short-lived CTAs (forward only) have one row tile."""

    variant = kernel = "multi_wave"
    rows_per_tile: int
    chunk: int
    num_chunks: int
    num_warps: int
    ctas_per_sm: int  # that fit an SM at max_registers of each thread
    max_registers: int
    short_lived: bool = False


@dataclass(frozen=True)
class ColumnTilePlan(Plan):
    """Rows by column tiles: in two passes where dx (or y) is wanted, in one where a backward wants dw and db only. Of
    two passes the first reads whole rows."""

    variant, kernel, by_columns = "multi_wave", "column_tiles", True
    max_registers = MAX_REGISTERS
    rows_per_tile: int
    chunk: int
    num_warps: int
    ctas_per_sm: int
    row_pass_chunk: int
    row_pass_warps: int


@dataclass(frozen=True)
class ColumnRingPlan(Plan):
    """Column sums through a TMA ring in shared memory, for a backward without dx. A tile has rows_per_tile x chunk
    elements of the gradient, and of x if dw is wanted."""

    variant, kernel, by_columns = "pipelined", "column_ring", True
    rows_per_tile: int
    chunk: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int
    max_registers: int


@dataclass(frozen=True)
class RingPlan(Plan):
    """Row tiles through a TMA ring in shared memory. A tile is num_chunks chunks of `chunk` columns, copy_chunks chunks
    to a copy. With a tail there are two copies: the last chunk, within which the row may end, and all others."""

    rows_per_tile: int
    chunk: int
    num_chunks: int
    num_stages: int
    num_warps: int  # of one compute group
    ctas_per_sm: int
    max_registers: int
    weight_in_smem: bool  # and bias, instead of in registers
    cluster: int = 1  # CTAs that share a row: each has chunk columns of every chunk; they exchange the row's sums
    copy_chunks: int = 1
    # The launch has more CTAs than fit at once, so that faster SMs take more of them. With one stage a CTA has one
    # tile, and other CTAs on the SM overlap its copy.
    short_lived: bool = False
    tail: bool = False

    def box_columns(self, cols: int) -> int:
        """Columns on the innermost side of a TMA box. They divide a row, as the box must, and a chunk."""
        return math.gcd(cols, self.chunk, limits.max_box_side)

    def is_whole(self, cols: int) -> bool:
        """Whether the chunks of all CTAs are exactly a row. Otherwise the columns after the row's end are zeros."""
        return cols == self.cluster * self.num_chunks * self.chunk

    @property
    def num_copies(self) -> int:
        """Copies that bring one tensor's row tile."""
        return 2 if self.tail else -(-self.num_chunks // self.copy_chunks)

    @property
    def threads_per_row(self) -> int:
        """Threads of a CTA among which a row is divided; in a cluster all, for the CTA's part of each row."""
        return 32 * self.num_warps if self.cluster > 1 else 32 * self.num_warps // self.rows_per_tile

    @property
    def warps_per_row(self) -> int:
        """Warps of a CTA among which a row's sum is divided."""
        return self.num_warps if self.cluster > 1 or self.rows_per_tile < self.num_warps else 1


@dataclass(frozen=True)
class PipelinedPlan(RingPlan):
    """A ring that the computing warps fill."""

    variant = kernel = "pipelined"
    rows_in_ring: bool = False  # the row tensors that a form reads beside x come through the ring, too
    added_in_ring: bool = False  # so does a gradient that is added to dx


@dataclass(frozen=True)
class AsyncCopyPlan(PipelinedPlan):
    """A ring that each computing thread fills with the elements that it will read, by asynchronous copies (cp.async),
    which GPUs without TMA have. Each chunk has copies of its own, and a backward refills it by itself."""

    variant = kernel = "async_copy"
    by_threads = True


@dataclass(frozen=True)
class WarpSpecializedPlan(RingPlan):
    """A ring that a producer warp fills, without cluster and tail. Compute groups take its stages in turn, so
    num_stages is a multiple of num_groups. max_registers is what a compute thread has after the producer warp has given
    its own registers away."""

    variant = kernel = "warp_specialized"
    num_groups: int = 1
    cached: bool = False  # a row tile stays in registers, instead of being read from its stage twice


@dataclass(frozen=True)
class ReferencePlan(Plan):
    """ATen's kernel instead of this package's, and the reason."""

    variant = kernel = "reference"
    reason: str


TYPES = MultiWavePlan, ColumnTilePlan, ColumnRingPlan, PipelinedPlan, AsyncCopyPlan, WarpSpecializedPlan  # ours
SELDOM = 2  # fields at the end of a ring's plan
VARIANTS = ("multi_wave", "async_copy", "pipelined", "warp_specialized", "reference")


def text_of(plan: Plan) -> str:
    """A plan in short: its type and the values of its fields, but for zeros at the end, of what most rings lack."""
    values = ",".join(str(int(value)) for value in vars(plan).values())
    for _ in range(SELDOM * isinstance(plan, PipelinedPlan)):
        values = values.removesuffix(",0")
    return f"{type(plan).__name__.removesuffix('Plan')}({values})"


@functools.lru_cache(maxsize=4096)
def from_text(text: str) -> Plan:
    """The plan of a text by text_of. Raises ValueError if there is none."""
    name, _, values = text.removesuffix(")").partition("(")
    numbers = [int(value) for value in values.split(",")]
    for kind in TYPES:
        may_lack = SELDOM * issubclass(kind, PipelinedPlan)
        if kind.__name__ == f"{name}Plan" and 0 <= len(fields(kind)) - len(numbers) <= may_lack:
            pairs = zip(fields(kind), numbers, strict=False)
            return kind(**{field.name: bool(number) if field.type == "bool" else number for field, number in pairs})
    raise ValueError(f"{text} is no plan")


@dataclass(frozen=True)
class Grid:
    """How a plan's number of CTAs, or clusters, along the rows follows from that of rows, as in csrc/program.h."""

    rows_per_tile: int
    at_once: int  # CTAs along the rows that run at the same time
    first_wave: int  # of these, the first of each SM
    rows_of_cta: int  # least rows of a CTA that leaves partials; 0 if their number does not matter
    tiles_of_cta: int  # least row tiles of a short-lived CTA; 0 if CTAs are not short-lived
    tiles_of_sum: int  # most row tiles of a CTA with sums in float32, unless two turns of CTAs would do; 0: any
    least_short_lived: int  # with fewer short-lived CTAs, of a sample, there are as many as run at the same time
    partials_of_cta: int  # rows of the partials: one per CTA, or one per compute group of it
    sample_rows: int = 0  # rows of a sample, which has CTAs of its own; 0: all rows are one sample
    more_ctas: int = 0  # one for each key, and one more: see loads.share_of_key

    def by_key(self, keys: int) -> Grid:
        """The grid where rows are sorted by keys from -1 to `keys`. Each key has CTAs of its own."""
        more = keys + 2
        left = self.at_once - (more if more <= limits.spared_ctas * self.at_once else 0)
        return replace(self, at_once=left, first_wave=min(self.first_wave, left), more_ctas=more)

    def samples(self, rows: int) -> int:
        return rows // self.sample_rows if self.sample_rows else 1

    def ctas(self, rows: int) -> int:
        """Of each sample."""
        samples = self.samples(rows)
        rows, at_once, first_wave = rows // samples, max(1, self.at_once // samples), max(1, self.first_wave // samples)
        tiles, limit = -(-rows // self.rows_per_tile), at_once
        if self.tiles_of_cta:
            short_lived = tiles // self.tiles_of_cta
            limit = min(tiles, short_lived if short_lived >= self.least_short_lived else limit)
            return -(-tiles // -(-tiles // limit))
        if self.rows_of_cta:
            limit = max(first_wave, min(limit, rows // self.rows_of_cta // first_wave * first_wave))
        if self.tiles_of_sum:
            turns = -(-tiles // (limit * self.tiles_of_sum))
            limit *= max(1, min(turns, MOST_CTAS // limit)) if turns > 2 else 1
        return min(tiles, limit) + self.more_ctas

    def partials(self, rows: int) -> int:
        """Of all samples."""
        return self.samples(rows) * self.ctas(rows) * self.partials_of_cta


@functools.lru_cache(maxsize=4096)
def grid_of(plan: Plan, problem: NormProblem, device: DeviceSpec, sample_rows: int = 0) -> Grid:
    """The grid of a plan, for each of the groups of columns. It has as many CTAs as run at once, even if some get a row
    tile fewer than others: fewer CTAs would take as long and load less at a time. With an sm_margin no sum makes it
    larger: CTAs that wait for a place would take the SMs that the margin leaves free. Of short-lived CTAs, all but the
    last get equally many tiles."""
    first_wave, groups = clusters_at_once(plan.cluster, device), problem.form.groups
    at_once, first_wave = max(1, plan.ctas_per_sm * first_wave // groups), max(1, first_wave // groups)
    rows_of_cta = tiles_of_cta = least_short_lived = 0
    if plan.by_columns:
        at_once = max(1, at_once // -(-problem.cols // plan.chunk))
    elif plan.short_lived:
        tiles_of_cta = limits.value_of(limits.tiles_of_short_lived, vars(plan) | {"kernel": plan.kernel})
        least_short_lived = limits.min_waves * at_once if tiles_of_cta > 1 else 0
    elif problem.num_sums:  # the first CTA of each SM may get fewer rows
        narrow = limits.min_narrow_rows if plan.kernel == "multi_wave" and plan.rows_per_tile > 1 else 0
        rows_of_cta = max(limits.min_tiles_of_cta * plan.rows_per_tile, narrow)
        rows_of_cta = limits.min_rows_of_cluster if plan.cluster > 1 else rows_of_cta
    tiles_of_sum = limits.most_tiles_of_sum if problem.wants_float32_sum and not device.sm_margin else 0
    least_work = rows_of_cta, tiles_of_cta, tiles_of_sum, least_short_lived
    return Grid(plan.rows_per_tile, at_once, first_wave, *least_work, plan.num_groups, sample_rows)


def clusters_at_once(cluster: int, device: DeviceSpec) -> int:
    """Clusters of `cluster` CTAs that run at the same time, one CTA on each SM. A cluster keeps to one group of SMs."""
    share, whole = limits.cluster_sms if cluster > 2 else (1, 1)
    return max(1, device.sm_count * share // whole // cluster)


def num_passes(plan: Plan, problem: NormProblem) -> int:
    """How often the kernels read x and dy. A forward's second read of x comes from the cache."""
    return 1 + (plan.kernel == "column_tiles" and problem.writes_rows)


def num_launches(plan: Plan, problem: NormProblem) -> int:
    """Kernel launches of one call. The second of two column-tile passes sums its partials itself. All others use one
    more launch for the sums, if any."""
    return 1 + (problem.num_sums > 0 or (plan.kernel == "column_tiles" and problem.wants_dx))
