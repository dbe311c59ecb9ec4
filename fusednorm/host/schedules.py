"""The launches that compute a norm by a plan, one builder for each kernel that a plan may name. Sums over rows come
out as partials, which sums.py adds up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from ..kernels import column_tiles, multiwave, parameter_gradients, pipelined, warp_specialized
from ..kernels.config import RingTile
from ..planner import budget
from ..planner.device import DeviceSpec
from ..planner.norm_problem import NormProblem
from ..planner.plan import (
    AsyncCopyPlan,
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    WarpSpecializedPlan,
)
from ..problem.calls import BackwardCall, ForwardCall
from ..problem.rows import RowView
from ..settings import invariance
from . import derived, gpus, tiles
from .launcher import Launch
from .program import Address, Map, Number, Operand

Call = ForwardCall | BackwardCall


class SampleSum(NamedTuple):
    """A sum over the rows of samples."""

    partial: Address
    out: Address
    samples: int  # that share a row of it, one after another; OF_ALL_SAMPLES


OF_ALL_SAMPLES = 0


class Written(NamedTuple):
    """What a backward writes; None for an unwanted one. Kernels take the tensors in this order."""

    dx: Address | None
    dw_partial: Address | None
    db_partial: Address | None
    dw: Address | None
    db: Address | None
    row_means: Address | None
    counters: Address | None  # int32, for each column tile the number of CTAs that have summed their rows of it
    announces_end: bool  # whether the kernel signals its end to a dependent launch, which sums the partials
    sums: tuple[SampleSum, ...]  # those of modulations


def _launch(
    call: Call, kernel: Any, grid: Sequence[int | Number], args: tuple, tile: Any, registers: int | None = None,
    named: dict[str, Operand] | None = None, folds: bool = False, **options: int,
) -> Launch:  # fmt: skip
    """A launch of a kernel whose threads have at most so many registers. Groups of columns have CTAs of their own,
    along the third side of the grid."""
    groups, limit = call.problem.form.groups, {} if registers is None else {"maxnreg": registers}
    sides = tuple(grid) if groups == 1 else (*(*grid, 1)[:2], groups)
    return Launch(kernel, sides, args, tiles.norm_of(call.problem, folds), tile, limit | options, named=named or {})


def _multiwave_forward(plan: MultiWavePlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    args, tile = _forward_args(call, outputs), tiles.tile_of(plan, tiles.log2_divisor(call), call.problem.form.groups)
    grid, named = _of_samples(call)
    folds = _folds(plan, call)
    return [_launch(call, multiwave.forward, grid, args, tile, plan.max_registers, named, folds)]


def _column_tile_forward(plan: ColumnTilePlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    """One CTA per row."""
    tile = tiles.whole_row_tile(plan, tiles.log2_divisor(call), call.problem.form.groups)
    registers = derived.row_pass_registers(call.problem, 1 << tile.log2_divisor)
    args = _forward_args(call, outputs)
    _, named = _of_samples(call)
    return [_launch(call, column_tiles.forward_by_column_tiles, [call.rows], args, tile, registers, named)]


def _pipelined_forward(plan: PipelinedPlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    tile = tiles.ring_tile(plan, call.problem, cluster=plan.cluster)
    (x, x_tail), named = _ring_maps(plan, call, 1, tile)
    args = (x, x_tail, call.weight, call.bias, *outputs, call.rows, call.problem.cols, call.eps)
    grid, of_samples = _of_samples(call)
    return [_in_clusters(plan, call, pipelined.forward, args, tile, named | of_samples, grid)]


def _warp_specialized_forward(plan: WarpSpecializedPlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    tile = _warp_specialized_tile(plan, call.problem)
    x, _no_tail = tiles.row_maps([call.x], call.problem.cols, tile)
    args = (x, call.weight, call.bias, *outputs, call.rows, call.problem.cols, call.eps)
    return [_launch(call, warp_specialized.forward, [Number.CTAS], args, tile, derived.entry_registers(plan))]


def _multiwave_backward(plan: MultiWavePlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    args, groups = (*_inputs(call), *out[:3], *_sizes(call)), call.problem.form.groups
    tile = tiles.tile_of(plan, tiles.log2_divisor(call), groups, out.announces_end, makes_again=bool(out.sums))
    grid, named = _of_samples(call, out.sums)
    folds = _folds(plan, call)
    return [_launch(call, multiwave.backward, grid, args, tile, plan.max_registers, named, folds)]


def _column_tile_backward(plan: ColumnTilePlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    """One launch for the row means if dx is wanted, then one for all outputs by column tiles."""
    problem, inputs, sizes, launches = call.problem, _inputs(call), _sizes(call), []
    of_tile = tiles.log2_divisor(call), problem.form.groups
    if problem.wants_dx:
        num_counters = 0 if out.counters is None else num_column_tiles(plan, problem)
        args = (*inputs, out.row_means, out.counters, num_counters, *sizes)
        tile = tiles.whole_row_tile(plan, *of_tile)
        launches.append(_launch(call, column_tiles.backward_row_means, [call.rows], args, tile))
    grid = triton.cdiv(problem.cols, plan.chunk), Number.CTAS
    args = (*inputs, out.row_means, *out[:5], out.counters, *sizes)
    registers = derived.column_pass_registers(plan, problem, gpus.with_installed_triton(spec))
    tile = tiles.column_tile(plan, *of_tile)
    return [*launches, _launch(call, column_tiles.backward_by_column_tiles, grid, args, tile, registers)]


def num_column_tiles(plan: ColumnTilePlan, problem: NormProblem) -> int:
    return triton.cdiv(problem.cols, plan.chunk) * problem.form.groups


def _pipelined_backward(plan: PipelinedPlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    tile = tiles.ring_tile(plan, call.problem, cluster=plan.cluster, announces_end=out.announces_end)
    maps, named = _ring_maps(plan, call, 2, tile)
    args = (*maps, *_inputs(call)[2:], *out[:3], *_ring_sizes(call))
    grid, of_samples = _of_samples(call, out.sums)
    return [_in_clusters(plan, call, pipelined.backward, args, tile, named | of_samples, grid)]


def _column_ring_backward(plan: ColumnRingPlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    """One launch for the partials of dw and db, by column tiles."""
    tile, cols = tiles.column_ring_tile(plan, call.problem), call.problem.cols
    dy = tiles.tile_map(call.grad_out, cols, tile)
    x = tiles.tile_map(call.x, cols, tile) if call.problem.wants_dw else None
    args = (dy, x, call.mean, call.rstd, *out[1:3], *_ring_sizes(call))
    grid = triton.cdiv(cols, plan.chunk), Number.CTAS
    return [_launch(call, parameter_gradients.dw_and_db, grid, args, tile, plan.max_registers)]


def _warp_specialized_backward(
    plan: WarpSpecializedPlan, call: BackwardCall, out: Written, spec: DeviceSpec
) -> list[Launch]:
    tile = _warp_specialized_tile(plan, call.problem)
    pointers = (*_inputs(call)[2:], *out[:3])
    present = (call.rstd if pointer is None else pointer for pointer in pointers)  # warp partitions do not take None
    maps = tiles.row_maps([call.x, call.grad_out], call.problem.cols, tile)[:2]  # without tails
    args = (*maps, *present, *_ring_sizes(call))
    return [_launch(call, warp_specialized.backward, [Number.CTAS], args, tile, derived.entry_registers(plan))]


FORWARD = {
    MultiWavePlan: _multiwave_forward,
    ColumnTilePlan: _column_tile_forward,
    PipelinedPlan: _pipelined_forward,
    AsyncCopyPlan: _pipelined_forward,
    WarpSpecializedPlan: _warp_specialized_forward,
}
BACKWARD = {
    MultiWavePlan: _multiwave_backward,
    ColumnTilePlan: _column_tile_backward,
    PipelinedPlan: _pipelined_backward,
    AsyncCopyPlan: _pipelined_backward,
    ColumnRingPlan: _column_ring_backward,
    WarpSpecializedPlan: _warp_specialized_backward,
}


def _folds(plan: MultiWavePlan | PipelinedPlan, call: Call) -> bool:
    return budget.computed(plan, call.problem) is not call.problem


def _in_clusters(
    plan: PipelinedPlan, call: Call, kernel: Any, args: tuple, tile: RingTile, named: dict, grid: list[int | Number]
) -> Launch:
    folds = _folds(plan, call)
    return _launch(call, kernel, grid, args, tile, plan.max_registers, named, folds, num_ctas=plan.cluster)


def _of_samples(call: Call, sums: tuple[SampleSum, ...] = ()) -> tuple[list[int | Number], dict[str, Operand]]:
    """The grid of a call and its arguments for modulations and their sums, which each sample of rows has for itself."""
    named: dict[str, Operand] = {"sum_partials": tuple([each.partial for each in sums])} if sums else {}
    if call.problem.by_key:
        return [Number.CTAS], named
    if call.sample_rows or (call.problem.by_sample and invariance.switch.invariance() > 0):
        # Without sample_rows the kernel is another build. If sums are ordered, a sample alone has the bits of several.
        return [Number.SAMPLES, Number.CTAS], named | {"sample_rows": call.sample_rows or call.rows}
    return [Number.CTAS], named


def _ring_maps(
    plan: PipelinedPlan, call: Call, own: int, tile: RingTile
) -> tuple[list[Map | Address | None], dict[str, Operand]]:
    """The maps of the call's first `own` row tensors and of their tails, and the arguments by which those of the form
    come, if they come through the ring. Where threads copy, tensors are in place of maps, with the strides of their
    rows as an argument."""
    of_form = [each.value for each in call.added if isinstance(each.value, RowView) and not each.is_of_samples]
    views = [*call.rows_read[:own], *(of_form if plan.rows_in_ring else ())]
    named: dict[str, Operand] = {"rows_in": None, "strides_in": None} if len(views) > own else {}
    if plan.added_in_ring:
        views += [RowView(each, 1, call.problem.width, 0) for each in call.added_rows]
        named["added"] = None
    if plan.by_threads:
        maps = [view.tensor for view in views] + [None] * len(views)
        named["strides"] = tuple([view.outer_stride for view in views])
    else:
        maps = tiles.row_maps(views, call.problem.cols, tile)
    rows, tails = maps[: len(views)], maps[len(views) :]
    named |= {f"desc_{at}": each for at, each in enumerate(rows[own:], 1)}
    named |= {f"tail_desc_{at}": each for at, each in enumerate(tails[own:], 1)}
    return rows[:own] + tails[:own], named


def _warp_specialized_tile(plan: WarpSpecializedPlan, problem: NormProblem) -> RingTile:
    groups = {"num_groups": plan.num_groups, "cached": plan.cached, "group_registers": plan.max_registers}
    return tiles.ring_tile(plan, problem, **groups)


def _forward_args(call: ForwardCall, outputs: tuple) -> tuple:
    sizes = call.rows, call.problem.cols, call.eps, *row_strides(call.x)
    return (call.x.tensor, call.weight, call.bias, *outputs, *sizes)


def _inputs(call: BackwardCall) -> tuple:
    return call.grad_out.tensor, call.x.tensor, call.mean, call.rstd, call.weight


def _sizes(call: BackwardCall) -> tuple:
    statistics = stride_of(call.mean), stride_of(call.rstd)
    return call.rows, call.problem.cols, *row_strides(call.x), *row_strides(call.grad_out), *statistics


def _ring_sizes(call: BackwardCall) -> tuple:
    return call.rows, call.problem.cols, stride_of(call.mean), stride_of(call.rstd)


def row_strides(view: RowView) -> tuple[int, int, int]:
    return view.inner_rows, view.outer_stride, view.inner_stride


def stride_of(statistic: Address | None) -> int:
    return 0 if statistic is None else statistic.stride
