"""column_sum on the GPU: from a choice and tensors to outputs, by one launch or two."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from ..host import fallback, gpus, launcher
from ..host.fallback import BuildFailed
from ..host.gpus import current
from ..kernels import column_reduction
from ..kernels.config import COMPILE_OPTIONS, ColumnTile
from ..problem import RowView, require_memory
from . import plan as column_plan
from .plan import VECTOR_BYTES, AtenSum, Choice, PortableSum, RingSum, SumPlan
from .problem import ColumnSumCall, ColumnSumProblem
from .reference import formula

WORKSPACE_ALIGNMENT = 4  # elements; each output's partial sums start at a multiple of 16 bytes


@dataclass
class ColumnLaunch:
    """One kernel, its grid, and its arguments by position and by name."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple
    named: dict[str, Any]

    def keywords(self) -> dict[str, Any]:
        return self.named

    def load(self) -> None:
        """Compile and load the kernel. Raises what Triton raises."""
        if isinstance(self.kernel, JITFunction):
            self.kernel.warmup(*self.args, grid=self.grid, **self.named).run  # noqa: B018  loads it

    def run(self) -> None:
        """Launch on the current stream of the current device, or in the interpreter."""
        self.kernel[self.grid](*self.args, **self.named)


_loaded: set[tuple] = set()  # (plan, problem, device, number of launches) whose kernels are loaded


def column_sum(call: ColumnSumCall, choice: Choice | None = None) -> list[Tensor]:
    """The sums, [cols] each, by `choice`. By default the planner chooses; if that kernel cannot be built, the portable
    kernel runs, then ATen."""
    problem, device = call.problem, call.views[0].tensor.device
    require_memory("column_sum", (view.tensor for view in call.views))
    if choice is not None:
        return _run(call, choice)
    spec = gpus.spec_of(device)
    for kernel in (None, "portable"):
        choice = column_plan.choose(problem, call.rows, spec, kernel)
        if not isinstance(choice.plan, AtenSum) and not fallback.has_failed(choice.plan, problem, spec):
            try:
                return _run(call, choice)
            except BuildFailed as failed:
                fallback.remember(choice.plan, problem, spec, str(failed))
    return formula([view.tensor for view in call.views], problem.total, problem.out_dtype)


def _run(call: ColumnSumCall, choice: Choice) -> list[Tensor]:
    launches, outputs = prepare(call, choice)
    device = call.views[0].tensor.device
    key = choice.plan, call.problem, device, len(launches)
    loaded = key in _loaded
    with current(device):
        launcher.hand_over(launches, loaded)
    if not loaded:
        _loaded.add(key)
    return outputs


def prepare(call: ColumnSumCall, choice: Choice) -> tuple[list[ColumnLaunch], list[Tensor]]:
    """The launches of a choice, which must name a kernel, and the output tensors that they will fill."""
    problem, splits, device = call.problem, choice.num_splits, call.views[0].tensor.device
    outputs = [torch.empty(problem.cols, dtype=problem.out_dtype, device=device) for _ in range(problem.num_outputs)]
    if splits == 1:
        return [_sums(choice.plan, call, outputs, 1)], outputs
    size = triton.cdiv(splits * problem.cols, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    partials = torch.empty((problem.num_outputs, size), dtype=problem.acc_dtype, device=device).unbind()
    views = tuple(RowView(partial, 1, problem.cols, 0) for partial in partials)
    plan = column_plan.finalizer(gpus.spec_of(device))
    finalize = _sums(plan, ColumnSumCall(_finalizer_problem(problem), splits, views), outputs, 1)
    return [_sums(choice.plan, call, partials, splits), finalize], outputs


def _sums(plan: SumPlan, call: ColumnSumCall, outs: list[Tensor] | tuple[Tensor, ...], splits: int) -> ColumnLaunch:
    """The launch that fills `outs` with the sums of `splits` parts of the rows."""
    problem, views = call.problem, call.views
    grid = (triton.cdiv(problem.cols, plan.chunk), splits, problem.num_outputs)
    sizes, constants = (tuple(outs), call.rows, problem.cols), _compile_time(plan, problem)
    if isinstance(plan, RingSum):
        kernel, names = ring_kernel(problem.count)
        descriptors = (_descriptor(view, call.rows, problem.cols, plan) for view in views)
        descriptors = dict(itertools.zip_longest(names, descriptors))
        return ColumnLaunch(kernel, grid, sizes, {**constants, **descriptors})
    pointers, strides = tuple(view.tensor for view in views), tuple(view.outer_stride for view in views)
    return ColumnLaunch(column_reduction.sum_rows, grid, (pointers, strides, *sizes), constants)


@functools.cache
def ring_kernel(count: int) -> tuple[Any, list[str]]:
    """The kernel for `count` tensors, and the names of its descriptor parameters."""
    for kernel in (column_reduction.sum_few_by_tma, column_reduction.sum_many_by_tma):
        names = [name for name in kernel.arg_names if re.fullmatch(r"d\d+", name)]
        if count <= len(names):
            return kernel, names
    raise AssertionError(f"MAX_TENSORS is larger than the {len(names)} that a kernel takes")


@functools.cache
def _compile_time(plan: SumPlan, problem: ColumnSumProblem) -> dict[str, Any]:
    shared = {"total": problem.total, "num_warps": plan.num_warps, "maxnreg": plan.max_registers, **COMPILE_OPTIONS}
    if isinstance(plan, PortableSum):
        tile = ColumnTile(plan.rows_per_tile, plan.chunk, plan.num_warps)
        return {**shared, "fp64": problem.acc_dtype == torch.float64, "tile": tile}
    vector = VECTOR_BYTES // problem.dtype.itemsize
    tile = ColumnTile(
        plan.rows_per_tile, plan.chunk, plan.num_warps, plan.num_stages, plan.group, vector
    )
    return {**shared, "tile": tile, "count": problem.count}


def _descriptor(view: RowView, rows: int, cols: int, plan: RingSum) -> TensorDescriptor:
    box, layout = [plan.rows_per_tile, plan.chunk], _row_major(8 * view.tensor.element_size())
    return TensorDescriptor(view.tensor, [rows, cols], [view.outer_stride, 1], box, layout)


@functools.cache
def _row_major(bits: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(0, bits, 2)


@functools.cache
def _finalizer_problem(problem: ColumnSumProblem) -> ColumnSumProblem:
    """The problem of the second launch, which sums the partial sums."""
    return ColumnSumProblem(problem.num_outputs, problem.cols, problem.acc_dtype, problem.out_dtype)
