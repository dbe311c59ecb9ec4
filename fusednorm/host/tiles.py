"""The compile-time arguments of kernels: what is computed (Norm), how the work is cut (a tile), and tensor maps."""

from __future__ import annotations

import functools
import operator

import torch

from ..dtypes import DTYPE_NAMES
from ..kernels.config import ColumnTile, Norm, RingTile, Tile
from ..kernels.rowmath import form_of
from ..operands import Role
from ..planner.budget import VECTOR_BYTES
from ..planner.norm_problem import NormProblem
from ..planner.plan import ColumnRingPlan, ColumnTilePlan, MultiWavePlan, RingPlan
from ..problem.calls import BackwardCall, ForwardCall
from ..problem.rows import RowView
from .derived import of_ring
from .program import Map, Number


def rounds_u(problem: NormProblem) -> bool:
    """Whether a forward rounds u to x's dtype before its gate: u then has the promoted dtype of x, weight and bias,
    which is x's here, or one with all digits."""
    of = problem.x_dtype
    rounds = problem.is_forward and problem.form.rounds_u and of.itemsize == 2
    return rounds and {problem.weight_dtype or of, problem.bias_dtype or of} == {of}


def mixes_halves(p: NormProblem) -> bool:
    """Whether both formats of 16 bits are among what a kernel reads and what it rounds to."""
    own = p.x_dtype, p.y_dtype, p.weight_dtype, p.bias_dtype, *dict(p.beside).values()
    return {torch.float16, torch.bfloat16} <= {*own, *p.rows_in, *p.rows_out, *p.shared, *p.steps}


@functools.cache
def norm_of(problem: NormProblem, folds: bool = False) -> Norm:
    return Norm(
        form=form_of(problem.form),
        layer=problem.norm == "layer",
        fp64=problem.acc_dtype == torch.float64,
        has_weight=problem.weight_dtype is not None,
        has_bias=problem.reads_bias,
        rounds_u=rounds_u(problem),
        steps=tuple([DTYPE_NAMES[each] for each in problem.steps]),
        wants_dx=problem.wants_dx,
        wants_dw=problem.wants_dw,
        wants_db=problem.wants_db,
        nested_rows=problem.nested_rows,
        rows_in=problem.names_in,
        tables=problem.tables,
        shared=problem.names_shared,
        parameters=tuple(dict(problem.beside)),
        stored=problem.stored,
        summed=problem.summed,
        mixes_halves=mixes_halves(problem),
        folds=folds,
    )


@functools.cache
def tile_of(
    plan: MultiWavePlan, log2_divisor: int, groups: int, announces_end: bool = False, makes_again: bool = False
) -> Tile:
    shape = plan.rows_per_tile, plan.chunk, plan.num_chunks, plan.num_warps
    return Tile(*shape, log2_divisor, plan.short_lived, announces_end, groups, makes_again)


@functools.cache
def whole_row_tile(plan: ColumnTilePlan, log2_divisor: int, groups: int) -> Tile:
    return Tile(1, plan.row_pass_chunk, 1, plan.row_pass_warps, log2_divisor, groups=groups)


@functools.cache
def column_tile(plan: ColumnTilePlan, log2_divisor: int, groups: int) -> Tile:
    return Tile(plan.rows_per_tile, plan.chunk, 1, plan.num_warps, log2_divisor, groups=groups)


def log2_divisor(call: ForwardCall | BackwardCall) -> int:
    """log2_divisor_of the columns and all row strides, which the tile of a portable kernel has."""
    strides = [view.outer_stride | view.inner_stride for view in call.rows_read]
    counts = [each.value for each in call.added if each.role is Role.COUNT]
    return log2_divisor_of(functools.reduce(operator.or_, [*strides, *counts], call.problem.cols))


def log2_divisor_of(sizes: int) -> int:
    """log2 of the largest power of two that divides a number, or several whose bits these are. 0 if 16 divides them,
    because Triton detects that itself."""
    return (sizes & -sizes).bit_length() - 1 if sizes % 16 else 0


@functools.cache
def ring_tile(plan: RingPlan, problem: NormProblem, **more) -> RingTile:
    rules = of_ring(plan, problem)
    # Bytes of the widest element that a forward stores. With the columns of one load of a narrower x, each store of a
    # warp would leave half of its sectors of memory to the next one.
    written = problem.large[1] if problem.is_forward else ()
    stored = max(each.itemsize for each in (problem.x_dtype, *written))
    return RingTile(
        plan.rows_per_tile,
        plan.chunk,
        plan.num_chunks,
        plan.num_warps,
        groups=problem.form.groups,
        num_stages=plan.num_stages,
        copy_chunks=plan.copy_chunks,
        tail=plan.tail,
        box=plan.box_columns(problem.cols),
        vector=min(VECTOR_BYTES // stored, plan.chunk // plan.threads_per_row),
        threads_per_row=plan.threads_per_row,
        whole=plan.is_whole(problem.cols),
        weight_in_smem=plan.weight_in_smem,
        prefetches_statistics=rules["prefetches_statistics"],
        reads_once=rules["reads_once"],
        in_pairs=rules["widens_in_pairs"],
        by_threads=plan.by_threads,
        added_in_ring=plan.added_in_ring,
        **more,
    )


@functools.cache
def column_ring_tile(plan: ColumnRingPlan, problem: NormProblem) -> ColumnTile:
    vector = VECTOR_BYTES // max(problem.x_dtype.itemsize, problem.grad_dtype.itemsize)
    return ColumnTile(plan.rows_per_tile, plan.chunk, plan.num_warps, plan.num_stages, vector=vector)


def row_maps(views: list[RowView], cols: int, tile: RingTile) -> list[Map | None]:
    """The maps of the tensors, followed by those of their tails; None for each tail if the tile has none."""
    tails = [_row_map(view, cols, tile, tail=True) if tile.tail else None for view in views]
    return [_row_map(view, cols, tile) for view in views] + tails


def _row_map(view: RowView, cols: int, tile: RingTile, tail: bool = False) -> Map:
    """By which TMA copies row tiles, or with `tail` their tails.

    The tensor is described as [rows, cols / box, box], because no side of a TMA box may exceed 256 elements. For copies
    of several chunks it is [chunks, rows, chunk / box, box], so that each chunk is contiguous in shared memory. Groups
    of columns are a dimension behind the rows.
    """
    chunk, row_stride = tile.cluster * tile.chunk, view.outer_stride  # chunk of all CTAs of the cluster together
    rows = ((Number.ROWS, tile.groups), (row_stride, cols), (tile.rows, 1))  # shape, strides and block of these two
    rows = [each[: 1 + (tile.groups > 1)] for each in rows]
    shape, strides = (*rows[0], cols // tile.box, tile.box), (*rows[1], tile.box, 1)
    block = *rows[2], chunk // tile.box, tile.box
    if tile.copy_chunks > 1 and not tail:
        shape, strides = (cols // chunk, *rows[0], chunk // tile.box, tile.box), (chunk, *strides)
        block = tile.copy_chunks, *block
    return Map(view.tensor, shape, strides, block, tile.cluster)


def tile_map(view: RowView, cols: int, tile: ColumnTile) -> Map:
    """By which TMA copies tiles of rows and columns, described as [rows, cols]."""
    return Map(view.tensor, (Number.ROWS, cols), (view.outer_stride, 1), (tile.rows, tile.chunk))
