"""Turns a plan and tensors into outputs: allocates them, and launches the kernels.

The measurements behind the constants are in bench/NOTES.md, "Evidence behind constants".
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .. import margin, reference
from ..forcing import forced_variant
from ..kernels import column_tiles, finalizer, multiwave, parameter_gradients, pipelined, warp_specialized
from ..kernels.config import ColumnTile, Norm, PartialsTile, RingTile, Tile
from ..kernels.rowmath import AFFINE
from ..planner import budget, heuristics, tile_share
from ..planner.device import OLDEST_TRITON, DeviceSpec
from ..planner.legality import MAX_RING_ROWS, broken_rule
from ..planner.norm_problem import NormProblem
from ..planner.plan import (
    ColumnRingPlan,
    ColumnTilePlan,
    Grid,
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    ReferencePlan,
    RingPlan,
    WarpSpecializedPlan,
    box_columns,
    grid_of,
    is_whole,
    threads_per_row,
)
from ..problem import BackwardCall, ForwardCall, RowView, require_memory
from . import fallback, gpus, launcher, triton_compat
from .fallback import BuildFailed
from .gpus import current
from .launcher import Ctas, Launch, Partials, RowDescriptor, Rows, TileDescriptor

PARTIAL_LOADS = 9  # 16-byte loads that a thread has in flight when it sums partials; more would not fit its registers
# How partials are summed: (largest number of columns, columns summed by one CTA, warps of that CTA). The first entry
# that is large enough applies (bench/NOTES.md, "The second launch").
PARTIALS_PIECES = ((512, 16, 8), (2048, 16, 4), (16384, 32, 4), (math.inf, 128, 4))
# Registers per thread (maxnreg) of a forward by column tiles with elements of 4 bytes or more. Without it, the compiler
# takes too few registers for some widths that are no multiple of 16, and spills.
ROW_PASS_REGISTERS = 64
# Registers per thread (maxnreg) of a backward by column tiles with 16-bit x and a float64 weight. Without it, the
# compiler spills.
COLUMN_PASS_REGISTERS = 128
VECTOR_BYTES = 16  # bytes of one load or store of a thread
OLDEST_DEPENDENT_ARCH = 90  # oldest arch on which a dependent launch may be placed before its predecessor has ended


class WorkspaceSizes(NamedTuple):
    """How large the parts of a backward's workspace are, in elements. csrc/prepared.h has the same rule.

    The parts are the partials of dw, those of db, the row means, and the counters. Each begins at a multiple of 16
    bytes, whatever the row count.
    """

    dtype: torch.dtype
    cols: int
    wants_dw: bool
    wants_db: bool
    means_per_row: int
    counters: int

    def of(self, rows: int, partials: int) -> tuple[int, int, int, int]:
        sums, means = _padded(partials * self.cols), _padded(rows * self.means_per_row)
        return sums * self.wants_dw, sums * self.wants_db, means, self.counters

    def places(self, rows: int, partials: int) -> tuple[int, tuple[int, int, int]]:
        """The number of elements in all, and where the second to fourth part begin, in bytes."""
        dw, db, means, counters = self.of(rows, partials)
        itemsize = self.dtype.itemsize
        return dw + db + means + counters, (dw * itemsize, (dw + db) * itemsize, (dw + db + means) * itemsize)


class Prepared(NamedTuple):
    """A call that is ready to be launched, or was: its launches, and the tensors that they fill."""

    launches: list[Launch]  # none if ATen runs the call
    outputs: tuple  # tensors that the op returns; None for an unwanted one
    grid: Grid | None = None
    workspace: WorkspaceSizes | None = None  # of memory that is needed during the call only
    parts: tuple[Tensor | None, ...] = (None,) * 4  # of the workspace; None for a part of no elements
    margin: int | None = None  # margin.sms when it was planned; None if it was planned for a test


class BackwardBuffers(NamedTuple):
    """The tensors that a backward writes; None for an unwanted one. Kernels take them in this order."""

    dx: Tensor | None
    dw_partial: Tensor | None
    db_partial: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    row_means: Tensor | None
    counters: Tensor | None  # int32, for each column tile the number of CTAs that have summed their rows of it
    announces_end: bool  # whether the kernel signals its end to a dependent launch, which sums the partials


def forward(call: ForwardCall) -> Prepared:
    """What was launched for (y, mean, rstd). mean is None for RMSNorm, and unwanted statistics are None."""
    return _run(call, prepare_forward, reference.forward)


def backward(call: BackwardCall) -> Prepared:
    """What was launched for (dx, dw, db); None for an unwanted gradient."""
    return _run(call, prepare_backward, reference.backward)


def _run(call, prepare: Callable[..., Prepared], by_aten: Callable[..., tuple]) -> Prepared:
    """Run a call by the first plan whose kernels can all be built and launched, or else by ATen."""
    problem, device = call.problem, call.x.tensor.device
    require_memory(f"{problem.norm}_norm", call.tensors)
    planned_under = margin.sms
    spec = gpus.spec_of(device)
    while not isinstance(plan := fallback.choose(problem, call.rows, spec), ReferencePlan):
        with current(device):
            try:
                prepared = prepare(call, plan)
                launcher.hand_over(prepared.launches)
                return prepared._replace(margin=planned_under)
            except BuildFailed as failed:
                fallback.remember(plan, problem, spec, str(failed))
    return Prepared([], by_aten(call))


def prepare_forward(call: ForwardCall, plan: Plan | None = None) -> Prepared:
    """The launches of a forward and the tensors that they will fill, by `plan` or else by the planner's choice."""
    problem, device = call.problem, call.x.tensor.device
    plan, spec = _plan_and_device(call, plan)
    y = torch.empty(call.shape, dtype=problem.x_dtype, device=device)
    rstd = torch.empty(call.stats_shape, dtype=problem.acc_dtype, device=device) if call.wants_statistics else None
    mean = torch.empty_like(rstd) if rstd is not None and problem.norm == "layer" else None
    outputs, call = (y, mean, rstd), call._replace(rows=Rows(call.rows))
    grid = grid_of(plan, problem.cols, spec, leaves_partials=False)
    launches = _FORWARD[type(plan)](plan, call, _norm(problem), outputs, Ctas(grid.ctas(call.rows)))
    return Prepared(launches, outputs, grid)


def prepare_backward(call: BackwardCall, plan: Plan | None = None) -> Prepared:
    """The launches of a backward and the tensors that they will fill, by `plan` or else by the planner's choice."""
    problem, device = call.problem, call.x.tensor.device
    plan, spec = _plan_and_device(call, plan)
    assert plan.variant != "pipelined" or problem.wants_dx != (plan.kernel == "column_ring")
    sums, call = problem.num_sums > 0, call._replace(rows=Rows(call.rows))
    grid = grid_of(plan, problem.cols, spec, leaves_partials=sums, float32_sums=problem.wants_float32_sum)
    ctas, partials = Ctas(grid.ctas(call.rows)), Partials(grid.partials(call.rows))
    dx = torch.empty(call.shape, dtype=call.dx_dtype, device=device) if problem.wants_dx else None
    dw, db = (
        torch.empty(call.normalized_shape, dtype=dtype, device=device) if wanted else None
        for wanted, dtype in ((problem.wants_dw, problem.weight_dtype), (problem.wants_db, problem.bias_dtype))
    )
    two_passes = plan.kernel == "column_tiles" and problem.wants_dx
    num_counters = triton.cdiv(problem.cols, plan.chunk) if sums and two_passes else 0
    wanted = problem.wants_dw, problem.wants_db
    sizes = WorkspaceSizes(problem.acc_dtype, problem.cols, *wanted, 2 * two_passes, num_counters)
    dw_partial, db_partial, means, counters = parts = _workspace(sizes, call.rows, partials, device)
    summed_next = sums and counters is None
    dependent = summed_next and spec.arch >= OLDEST_DEPENDENT_ARCH
    buffers = BackwardBuffers(dx, dw_partial, db_partial, dw, db, means, counters, dependent)
    launches = _BACKWARD[type(plan)](plan, call, _norm(problem), buffers, ctas)
    if summed_next:
        launches.append(_finalize(problem, buffers, partials))
    return Prepared(launches, (dx, dw, db), grid, sizes if any(part is not None for part in parts) else None, parts)


def _plan_and_device(call: ForwardCall | BackwardCall, plan: Plan | None) -> tuple[Plan, DeviceSpec]:
    spec = gpus.spec_of(call.x.tensor.device)
    plan = plan or heuristics.choose(call.problem, call.rows, spec, forced_variant())
    assert _is_legal(plan.variant, call.problem, min(call.rows, MAX_RING_ROWS + 1), spec)
    return plan, spec


def _finalize(problem: NormProblem, buffers: BackwardBuffers, num_partials: Partials) -> Launch:
    """The launch that sums the partials, with one CTA per piece of dw and of db."""
    tile = partials_tile(problem.cols, problem.acc_dtype.itemsize, buffers.announces_end)
    grid = (triton.cdiv(problem.cols, tile.cols) * problem.num_sums,)
    args = (*buffers[1:5], num_partials, problem.cols, None)  # AFFINE needs no weight to finish dw
    options = {"launch_pdl": True} if tile.dependent else {}
    return Launch(finalizer.finalize, grid, args, _norm(problem), tile, options)


@functools.cache
def partials_tile(cols: int, itemsize: int, dependent: bool) -> PartialsTile:
    """The tile that sums the partials of `cols` columns. The tile and the number of partials determine the order of the
    additions, so the sums do not depend on the plan, the device or the caller in any other way."""
    piece, num_warps = next(tile for most, *tile in PARTIALS_PIECES if cols <= most)
    return PartialsTile(piece, PARTIAL_LOADS * 4 // itemsize, num_warps, dependent)


def _multiwave_forward(plan: MultiWavePlan, call: ForwardCall, norm: Norm, outputs: tuple, ctas: int) -> list[Launch]:
    options = {"maxnreg": plan.max_registers}
    args = _forward_args(call, outputs)
    tile = _tile(plan, _log2_divisor(call.x, cols=call.problem.cols))
    return [Launch(multiwave.forward, (ctas,), args, norm, tile, options)]


def _column_tile_forward(
    plan: ColumnTilePlan, call: ForwardCall, norm: Norm, outputs: tuple, ctas: int
) -> list[Launch]:
    """One CTA per row, which passes over the row's column tiles twice."""
    tile = _whole_row_tile(plan, _log2_divisor(call.x, cols=call.problem.cols))
    args = _forward_args(call, outputs)
    options = {"maxnreg": ROW_PASS_REGISTERS} if call.problem.x_dtype.itemsize >= 4 and tile.log2_divisor else {}
    return [Launch(column_tiles.forward_by_column_tiles, (call.rows,), args, norm, tile, options)]


def _pipelined_forward(plan: PipelinedPlan, call: ForwardCall, norm: Norm, outputs: tuple, ctas: int) -> list[Launch]:
    tile, cols = _ring_tile(plan, call.problem, cluster=plan.cluster), call.problem.cols
    x = _descriptors([call.x], call.rows, cols, tile)
    args = (*x, call.weight, call.bias, *outputs, call.rows, cols, call.eps)
    return [Launch(pipelined.forward, (ctas,), args, norm, tile, _pipelined_options(plan))]


def _multiwave_backward(
    plan: MultiWavePlan, call: BackwardCall, norm: Norm, buffers: BackwardBuffers, ctas: int
) -> list[Launch]:
    args = (*_inputs(call), *buffers[:3], *_sizes(call))
    options = {"maxnreg": plan.max_registers}
    tile = _tile(plan, _log2_divisor(call.x, call.grad_out, cols=call.problem.cols), buffers.announces_end)
    return [Launch(multiwave.backward, (ctas,), args, norm, tile, options)]


def _column_tile_backward(
    plan: ColumnTilePlan, call: BackwardCall, norm: Norm, buffers: BackwardBuffers, ctas: int
) -> list[Launch]:
    """One launch for the row means if dx is wanted, then one for all outputs by column tiles."""
    problem, inputs, sizes = call.problem, _inputs(call), _sizes(call)
    log2_divisor, launches = _log2_divisor(call.x, call.grad_out, cols=problem.cols), []
    if problem.wants_dx:
        tile = _whole_row_tile(plan, log2_divisor)
        num_counters = 0 if buffers.counters is None else triton.cdiv(problem.cols, plan.chunk)
        args = (*inputs[:-1], buffers.row_means, buffers.counters, num_counters, *sizes)
        launches.append(Launch(column_tiles.backward_row_means, (call.rows,), args, norm, tile))
    grid = (triton.cdiv(problem.cols, plan.chunk), ctas)
    tile = _column_tile(plan, log2_divisor)
    args = (*inputs, buffers.row_means, *buffers[:5], buffers.counters, *sizes)
    if problem.x_dtype.itemsize == 2 and problem.weight_dtype == torch.float64:
        options = {"maxnreg": COLUMN_PASS_REGISTERS}
    elif triton_compat.installed() == OLDEST_TRITON:
        options = {}  # it keeps to the registers that let all CTAs of an SM be resident; later releases may take more
    else:
        threads = plan.ctas_per_sm * 32 * plan.num_warps
        options = {"maxnreg": budget.register_limit(threads, gpus.spec_of(call.x.tensor.device))}
    launches.append(Launch(column_tiles.backward_by_column_tiles, grid, args, norm, tile, options))
    return launches


def _pipelined_backward(
    plan: PipelinedPlan, call: BackwardCall, norm: Norm, buffers: BackwardBuffers, ctas: int
) -> list[Launch]:
    tile = _ring_tile(plan, call.problem, cluster=plan.cluster, announces_end=buffers.announces_end)
    descriptors = _descriptors([call.x, call.grad_out], call.rows, call.problem.cols, tile)
    args = (*descriptors, *_inputs(call)[2:], *buffers[:3], *_ring_sizes(call))
    return [Launch(pipelined.backward, (ctas,), args, norm, tile, _pipelined_options(plan))]


def _column_ring_backward(
    plan: ColumnRingPlan, call: BackwardCall, norm: Norm, buffers: BackwardBuffers, ctas: int
) -> list[Launch]:
    """One launch for the partials of dw and db, by column tiles."""
    tile, cols = _column_ring_tile(plan, call.problem), call.problem.cols
    dy = TileDescriptor(call.grad_out, call.rows, cols, tile)
    x = TileDescriptor(call.x, call.rows, cols, tile) if norm.wants_dw else None
    args = (dy, x, call.mean, call.rstd, *buffers[1:3], *_ring_sizes(call))
    grid = (triton.cdiv(cols, plan.chunk), ctas)
    return [Launch(parameter_gradients.dw_and_db, grid, args, norm, tile, {"maxnreg": plan.max_registers})]


def _warp_specialized_backward(
    plan: WarpSpecializedPlan, call: BackwardCall, norm: Norm, buffers: BackwardBuffers, ctas: int
) -> list[Launch]:
    tile = _warp_specialized_tile(plan, call.problem)
    pointers = (*_inputs(call)[2:], *buffers[:3])
    present = (call.rstd if pointer is None else pointer for pointer in pointers)  # warp partitions do not take None
    descriptors = _descriptors([call.x, call.grad_out], call.rows, call.problem.cols, tile)[:2]  # without tails
    args = (*descriptors, *present, *_ring_sizes(call))
    return [Launch(warp_specialized.backward, (ctas,), args, norm, tile, _warp_specialized_options(plan))]


def _warp_specialized_forward(
    plan: WarpSpecializedPlan, call: ForwardCall, norm: Norm, outputs: tuple, ctas: int
) -> list[Launch]:
    tile = _warp_specialized_tile(plan, call.problem)
    x, _no_tail = _descriptors([call.x], call.rows, call.problem.cols, tile)
    args = (x, call.weight, call.bias, *outputs, call.rows, call.problem.cols, call.eps)
    return [Launch(warp_specialized.forward, (ctas,), args, norm, tile, _warp_specialized_options(plan))]


def _warp_specialized_tile(plan: WarpSpecializedPlan, problem: NormProblem) -> RingTile:
    groups = {"num_groups": plan.num_groups, "cached": plan.cached, "group_registers": plan.max_registers}
    return _ring_tile(plan, problem, **groups)


def _warp_specialized_options(plan: WarpSpecializedPlan) -> dict[str, int]:
    return {"maxnreg": budget.entry_registers(plan)}


def _pipelined_options(plan: PipelinedPlan) -> dict[str, int]:
    return {"maxnreg": plan.max_registers, "num_ctas": plan.cluster}


_FORWARD = {
    MultiWavePlan: _multiwave_forward,
    ColumnTilePlan: _column_tile_forward,
    PipelinedPlan: _pipelined_forward,
    WarpSpecializedPlan: _warp_specialized_forward,
}
_BACKWARD = {
    MultiWavePlan: _multiwave_backward,
    ColumnTilePlan: _column_tile_backward,
    PipelinedPlan: _pipelined_backward,
    ColumnRingPlan: _column_ring_backward,
    WarpSpecializedPlan: _warp_specialized_backward,
}


@functools.lru_cache(maxsize=4096)
def _is_legal(variant: str, problem: NormProblem, rows: int, spec: DeviceSpec) -> bool:
    return broken_rule(variant, problem, rows, spec) is None


@functools.cache
def _norm(problem: NormProblem) -> Norm:
    return Norm(
        form=AFFINE,
        layer=problem.norm == "layer",
        fp64=problem.acc_dtype == torch.float64,
        has_weight=problem.weight_dtype is not None,
        has_bias=problem.direction == "forward" and problem.bias_dtype is not None,
        wants_dx=problem.wants_dx,
        wants_dw=problem.wants_dw,
        wants_db=problem.wants_db,
        has_residual=problem.residual_dtype is not None,
        nested_rows=problem.nested_rows,
    )


@functools.cache
def _tile(plan: MultiWavePlan, log2_divisor: int, announces_end: bool = False) -> Tile:
    shape = plan.rows_per_tile, plan.chunk, plan.num_chunks, plan.num_warps
    return Tile(*shape, log2_divisor, plan.short_lived, announces_end)


@functools.cache
def _whole_row_tile(plan: ColumnTilePlan, log2_divisor: int) -> Tile:
    return Tile(1, plan.row_pass_chunk, 1, plan.row_pass_warps, log2_divisor=log2_divisor)


@functools.cache
def _column_tile(plan: ColumnTilePlan, log2_divisor: int) -> Tile:
    return Tile(plan.rows_per_tile, plan.chunk, 1, plan.num_warps, log2_divisor=log2_divisor)


def _log2_divisor(*views: RowView, cols: int) -> int:
    """log2 of the largest power of two that divides the columns and all row strides, for a portable kernel's tile. 0 if
    16 divides them, because Triton detects that itself."""
    sizes = functools.reduce(operator.or_, (view.outer_stride | view.inner_stride for view in views), cols)
    return (sizes & -sizes).bit_length() - 1 if sizes % 16 else 0


@functools.cache
def _ring_tile(plan: RingPlan, problem: NormProblem, **more) -> RingTile:
    return RingTile(
        plan.rows_per_tile,
        plan.chunk,
        plan.num_chunks,
        plan.num_warps,
        num_stages=plan.num_stages,
        copy_chunks=plan.copy_chunks,
        tail=plan.tail,
        box=box_columns(plan, problem.cols),
        vector=min(VECTOR_BYTES // problem.x_dtype.itemsize, plan.chunk // threads_per_row(plan)),
        threads_per_row=threads_per_row(plan),
        whole=is_whole(plan, problem.cols),
        weight_in_smem=plan.weight_in_smem,
        prefetches_statistics=budget.has_registers_to_prefetch(plan, problem),
        in_pairs=tile_share.widens_in_pairs(plan, problem),
        **more,
    )


@functools.cache
def _column_ring_tile(plan: ColumnRingPlan, problem: NormProblem) -> ColumnTile:
    vector = VECTOR_BYTES // max(problem.x_dtype.itemsize, problem.grad_dtype.itemsize)
    return ColumnTile(plan.rows_per_tile, plan.chunk, plan.num_warps, plan.num_stages, vector=vector)


def _descriptors(views: list[RowView], rows: int, cols: int, tile: RingTile) -> list[RowDescriptor | None]:
    """The descriptors of the tensors, followed by those of their tails; None for each tail if the tile has none."""
    tails = [RowDescriptor(view, rows, cols, tile, tail=True) if tile.tail else None for view in views]
    return [RowDescriptor(view, rows, cols, tile) for view in views] + tails


def _ring_sizes(call: BackwardCall) -> tuple:
    return call.rows, call.problem.cols, _stride(call.mean), _stride(call.rstd)


def _forward_args(call: ForwardCall, outputs: tuple) -> tuple:
    sizes = call.rows, call.problem.cols, call.eps, *_row_strides(call.x)
    return (call.x.tensor, call.weight, call.bias, *outputs, *sizes)


def _inputs(call: BackwardCall) -> tuple:
    return call.grad_out.tensor, call.x.tensor, call.mean, call.rstd, call.weight, call.residual_grad


def _sizes(call: BackwardCall) -> tuple:
    statistics = _stride(call.mean), _stride(call.rstd)
    return call.rows, call.problem.cols, *_row_strides(call.x), *_row_strides(call.grad_out), *statistics


def _row_strides(view: RowView) -> tuple[int, int, int]:
    return view.inner_rows, view.outer_stride, view.inner_stride


def _stride(statistic: Tensor | None) -> int:
    """1 for contiguous ones: a single element may have any stride, which is wrong for a prepared call's others."""
    if statistic is None:
        return 0
    return 1 if statistic.is_contiguous() else statistic.stride(0)


def _workspace(workspace: WorkspaceSizes, rows: int, partials: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """The parts of a new workspace, as views of one allocation. A part of no elements is None."""
    sizes = workspace.of(rows, partials)
    if not any(sizes):
        return None, None, None, None
    memory = torch.empty(sum(sizes), dtype=workspace.dtype, device=device)
    *parts, counters = (part if part.numel() else None for part in memory.split(sizes))
    return *parts, None if counters is None else counters.view(torch.int32)


def _padded(elements: int) -> int:
    """As many elements, or a few more that end at a multiple of 16 bytes."""
    return -(-elements // 4) * 4
