"""column_sum on the GPU: from a choice and tensors to outputs, by one launch or two."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import torch
import triton
from torch import Tensor

from ..host import fallback, gpus, launcher, prepared
from ..host.fallback import BuildFailed
from ..host.gpus import current
from ..host.launcher import Launch
from ..host.program import Address, Number, Output, Part, Program, Workspace
from ..host.tiles import tile_map
from ..kernels import column_reduction
from ..kernels.config import ColumnTile
from ..operands import Role
from ..planner.budget import VECTOR_BYTES
from ..planner.norm_problem import ALIGNMENT
from ..planner.plan import ReferencePlan
from ..problem.rows import RowView
from ..problem.validation import require_memory
from ..settings import invariance
from . import plan as column_plan
from .plan import Choice, PortableSum, RingSum, SumPlan
from .problem import ColumnSumCall, ColumnSumProblem
from .reference import formula


def column_sum(call: ColumnSumCall) -> list[Tensor]:
    """The sums, [cols] each, by the planner's choice. If that kernel cannot be built, the portable kernel runs, then
    ATen."""
    problem = call.problem
    require_memory("column_sum", (view.tensor for view in call.views))
    spec = gpus.spec_of(call.views[0].tensor.device)
    if invariance.switch.invariance() > 0:
        spec = spec.of_architecture()  # the number of splits follows from the number of SMs
    for kernel in (None, "portable"):
        choice = column_plan.choose(problem, call.rows, spec, kernel)
        if not isinstance(choice.plan, ReferencePlan) and not fallback.has_failed(choice.plan, problem, spec):
            try:
                return run(call, choice)
            except BuildFailed as failed:
                fallback.remember(choice.plan, problem, spec, str(failed))
    return formula([view.tensor for view in call.views], problem.total, problem.out_dtype)


def run(call: ColumnSumCall, choice: Choice) -> list[Tensor]:
    """The sums by a choice, which must name a kernel."""
    tensors = [view.tensor for view in call.views]
    addresses = [tensor.data_ptr() for tensor in tensors]
    alignment = None if call.problem.tma_aligned else tuple(address % ALIGNMENT == 0 for address in addresses)
    strides = tuple(view.outer_stride for view in call.views)
    key = "column_sum", choice.plan, choice.num_splits, call.problem, tensors[0].get_device(), strides, alignment
    kind, shape = prepared.kind_of(key), tensors[0].shape
    bound = kind and (kind.by_shape.get(shape) or kind.bind(shape))
    outputs = bound and bound.launch(addresses)
    if outputs is None:
        with current(tensors[0].device):
            outputs, bound = launcher.run(program_of(call, choice), tensors, shape, call.rows)
        if bound:
            prepared.keep_by(key, shape, bound)
    return list(outputs)


def program_of(call: ColumnSumCall, choice: Choice) -> Program:
    """What a call of this kind launches by a choice. Of its tensors only dtypes, strides and alignment are read."""
    problem, splits, count = call.problem, choice.num_splits, len(call.views)
    addresses = (
        Address(at, problem.dtype, view.tensor.data_ptr() % ALIGNMENT == 0) for at, view in enumerate(call.views)
    )
    views = [view._replace(tensor=each) for view, each in zip(call.views, addresses, strict=True)]
    outs = tuple(Address(count + at, problem.out_dtype) for at in range(problem.num_outputs))
    outputs = (Output(Role.PARAMETER, problem.out_dtype),) * len(outs)
    if splits == 1:
        launches, workspace = [_sums(choice.plan, problem, Number.ROWS, views, outs, 1)], None
    else:
        partials = tuple(Address(count + len(outs) + at, problem.acc_dtype) for at in range(len(outs)))
        workspace = Workspace(problem.acc_dtype, (Part(beside=splits * problem.cols),) * len(outs))
        rows_of_partials = [RowView(partial, 1, problem.cols, 0) for partial in partials]
        finalizer = column_plan.finalizer(gpus.spec_of(call.views[0].tensor.device))
        of_partials = ColumnSumProblem(len(outs), problem.cols, problem.acc_dtype, problem.out_dtype)
        launches = [
            _sums(choice.plan, problem, Number.ROWS, views, partials, splits),
            _sums(finalizer, of_partials, splits, rows_of_partials, outs, 1),
        ]
    return Program(tuple(launches), count, outputs, workspace, None, (problem.cols,))


def _sums(
    plan: SumPlan,
    problem: ColumnSumProblem,
    rows: int | Number,
    views: list[RowView],
    outs: tuple[Address, ...],
    splits: int,
) -> Launch:
    """The launch that fills `outs` with the sums of `splits` parts of the rows."""
    grid = (triton.cdiv(problem.cols, plan.chunk), splits, problem.num_outputs)
    tile, constants = _compile_time(plan, problem)
    options = {"maxnreg": plan.max_registers}
    if isinstance(plan, RingSum):
        kernel, names = ring_kernel(problem.count)
        maps = dict(itertools.zip_longest(names, (tile_map(view, problem.cols, tile) for view in views)))
        return Launch(kernel, grid, (outs, rows, problem.cols), None, tile, options, constants, maps)
    pointers, strides = tuple(view.tensor for view in views), tuple(view.outer_stride for view in views)
    operands = pointers, strides, outs, rows, problem.cols
    return Launch(column_reduction.sum_rows, grid, operands, None, tile, options, constants)


@functools.cache
def ring_kernel(count: int) -> tuple[Any, list[str]]:
    """The kernel for `count` tensors, and the names of its descriptor parameters."""
    for kernel in (column_reduction.sum_few_by_tma, column_reduction.sum_many_by_tma):
        names = [name for name in kernel.arg_names if re.fullmatch(r"d\d+", name)]
        if count <= len(names):
            return kernel, names
    raise AssertionError(f"MAX_TENSORS is larger than the {len(names)} that a kernel takes")


@functools.cache
def _compile_time(plan: SumPlan, problem: ColumnSumProblem) -> tuple[ColumnTile, dict[str, Any]]:
    """The tile, and the other compile-time arguments."""
    if isinstance(plan, PortableSum):
        tile = ColumnTile(plan.rows_per_tile, plan.chunk, plan.num_warps)
        return tile, {"total": problem.total, "fp64": problem.acc_dtype == torch.float64}
    vector = VECTOR_BYTES // problem.dtype.itemsize
    tile = ColumnTile(plan.rows_per_tile, plan.chunk, plan.num_warps, plan.num_stages, plan.group, vector)
    return tile, {"total": problem.total, "count": problem.count}
