"""From a plan and a call to a program, which says what is launched. schedules.py has the launches of each plan, sums.py
those that finish its sums, named.py what forms have beside; tiles.py the compile-time arguments of all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..operands import Outputs, Role
from ..planner import choice, limits
from ..planner.device import DeviceSpec
from ..planner.legality import MAX_RING_ROWS, broken_rule
from ..planner.norm_problem import ALIGNMENT, NormProblem
from ..planner.plan import Plan, ReferencePlan, grid_of
from ..problem.calls import Added, BackwardCall, ForwardCall
from ..problem.validation import require_memory
from ..settings import invariance, margin
from ..settings.forcing import forced_variant
from . import fallback, gpus, launcher, prepared, schedules, segments, sums
from .fallback import BuildFailed, Choice
from .gpus import current
from .named import copies_of_rest, with_named
from .program import MOST_ROWS, Address, Number, OnTensors, Output, Part, Program, Workspace
from .schedules import Call, Written


def run(call: Call, miss: prepared.Miss | None = None) -> tuple[Outputs | None, Program | None]:
    """The outputs of a call, by the first plan whose kernels can all be built and launched. And the program that made
    them, if it is kept for later calls: `miss` says for which. None for both if the planner leaves the call to ATen."""
    problem, device = call.problem, call.x.tensor.device
    require_memory(f"{problem.norm}_norm", call.tensors)
    spec = gpus.spec_of(device)
    while not isinstance((chosen := fallback.choose(problem, call.block_rows or call.rows, spec)).plan, ReferencePlan):
        with current(device):
            try:
                program = program_of(call, chosen, spec)
                outputs, bound = launcher.run(program, call.tensors, call.shape, call.rows)
            except BuildFailed as failed:
                fallback.remember(chosen.plan, problem, spec, str(failed))
                continue
        return outputs, prepared.keep(miss, call, bound) if miss and bound else None
    return None, None


def on_tensors(call: Call, plan: Plan | None = None) -> OnTensors:
    """What a call launches by `plan`, or else by the planner's choice, on the tensors of the call."""
    spec = gpus.spec_of(call.x.tensor.device)
    question = fallback.asked(call.problem, call.block_rows or call.rows, spec)
    program = program_of(call, Choice(plan or choice.choose(*question, forced_variant())), spec)
    return program.on_tensors(call.tensors, call.shape, call.rows)


def program_of(call: Call, chosen: Choice, spec: DeviceSpec) -> Program:
    """What a call launches by a plan. Of its tensors only dtypes, strides and alignment are read."""
    problem, plan = call.problem, chosen.plan
    assert _is_legal(plan.variant, problem, min(call.block_rows or call.rows, MAX_RING_ROWS + 1), spec)
    in_force, rows, blocks = invariance.switch.invariance(), (chosen.rows_above, chosen.most_rows), None
    if ordered := in_force > 0 and problem.direction == "backward" and problem.num_sums > 0:
        spec = spec.of_architecture()  # the number of partials follows from the number of SMs
    build = _forward if isinstance(call, ForwardCall) else _backward
    symbolic = with_addresses(call)
    launches, num_tensors, *parts = build(symbolic, plan, spec)
    launches = with_named(launches, symbolic, first_output=num_tensors)
    if call.block_rows:
        rows, blocks = (in_force, MOST_ROWS), sums.blocks(call, launches, *parts[:2])
    elif ordered:
        rows = chosen.rows_above, min(chosen.most_rows, in_force)
    elif isinstance(call, BackwardCall) and call.many_rows:
        (above, most), fewer = rows, call.many_rows - 1
        rows = (max(above, fewer), most) if call.many_samples else (above, min(most, fewer))
    kept = *rows, margin.sms, in_force
    sizes = call.normalized_shape, problem.form.groups, getattr(call, "width", 0)
    return Program(tuple(launches), num_tensors, *parts, *sizes, *kept, blocks)


def with_addresses(call: Call) -> Call:
    """The call with addresses in place of tensors, if it has these, and Number.ROWS in place of its rows."""
    addresses = map(_address, itertools.count(), call.tensors)
    if isinstance(call, ForwardCall):
        x, weight, bias, *more = addresses
        same = {"weight": weight, "bias": bias}
    else:
        grad_out, x, mean, rstd, weight, bias, residual_grad, *more = addresses
        same = {"mean": mean, "rstd": rstd, "weight": weight, "bias": bias, "residual_grad": residual_grad}
        same["grad_out"] = call.grad_out._replace(tensor=grad_out)
    rest = iter(more)
    added = [each.with_tensor(next(rest)) if each.role.is_tensor else each for each in call.added]
    return call._replace(rows=Number.ROWS, x=call.x._replace(tensor=x), added=tuple(added), **same)


def _address(index: int, tensor: Tensor | Address | None) -> Address | None:
    """What stands for a tensor. Its stride is 1 if the tensor is contiguous: torch allows any stride for one row, but
    later calls may have more."""
    if tensor is None or isinstance(tensor, Address):
        return tensor
    stride = 1 if tensor.ndim != 1 or tensor.is_contiguous() else tensor.stride(0)
    return Address(index, tensor.dtype, tensor.data_ptr() % ALIGNMENT == 0, stride)


def _forward(call: ForwardCall, plan: Plan, spec: DeviceSpec) -> tuple:
    """(launches, number of tensors, outputs, workspace, grid)."""
    problem, count = call.problem, len(call.tensors)
    rstd = problem.acc_dtype if call.wants_statistics else None
    dtypes = problem.y_dtype or problem.x_dtype, rstd if problem.norm == "layer" else None, rstd
    outputs, written = _outputs(call, (Role.ROWS, Role.STATISTIC, Role.STATISTIC), dtypes)
    launches = schedules.FORWARD[type(plan)](plan, call, written)
    return launches, count, outputs, None, grid_of(plan, problem, spec, call.sample_rows)


def _backward(call: BackwardCall, plan: Plan, spec: DeviceSpec) -> tuple:
    """(launches, number of tensors, outputs, workspace, grid)."""
    problem, count = call.problem, len(call.tensors)
    assert plan.variant != "pipelined" or problem.wants_dx != (plan.kernel == "column_ring")
    wanted = problem.wants_dx and 0 in problem.stored, problem.wants_dw, problem.wants_db
    dtypes = call.dx_dtype, problem.weight_dtype, problem.bias_dtype
    dtypes = [dtype if wants else None for wants, dtype in zip(wanted, dtypes, strict=True)]
    of_dx = Role.COLUMNS if call.width else Role.ROWS
    outputs, (dx, dw, db) = _outputs(call, (of_dx, Role.PARAMETER, Role.PARAMETER), dtypes)
    wants_sums, two_passes = problem.num_sums > 0, plan.kernel == "column_tiles" and problem.wants_dx
    width = problem.width
    parts = (
        Part(per_partial=width * problem.wants_dw),
        Part(per_partial=width * problem.wants_db),
        Part(per_row=2 * problem.form.groups * two_passes),
        Part(beside=schedules.num_column_tiles(plan, problem) if wants_sums and two_passes else 0, dtype=torch.int32),
        *[Part(per_partial=width)] * len(problem.summed),
    )
    sort = segments.sort_of(call, count + len(outputs) + len(parts)) if problem.by_key else None
    parts += sort.parts if sort else ()
    workspace = Workspace(problem.acc_dtype, parts)
    dw_partial, db_partial, means, counters, *partials = [
        Address(at, part.dtype or workspace.dtype) if any(part[:3]) else None
        for at, part in enumerate(parts, count + len(outputs))
    ]
    sample_sums = [sums.sample_sum(call, *each) for each in zip(partials, problem.summed)]  # noqa: B905  parts of the sort follow
    summed_next = wants_sums and counters is None
    dependent = summed_next and spec.places_dependents
    out = Written(dx, dw_partial, db_partial, dw, db, means, counters, dependent, tuple(sample_sums))
    over_blocks: list[sums.OverBlocks] = []
    if call.block_rows:
        out, over_blocks = sums.of_blocks(call, out, count + len(outputs) + len(parts), workspace.dtype)
        of_blocks = tuple(Part(per_block=sums.padded(each.size)) for each in over_blocks)
        workspace = workspace._replace(parts=parts + of_blocks)
    launches = schedules.BACKWARD[type(plan)](plan, call, out, spec)
    if sort:
        backward = [replace(each, named=each.named | sort.named) for each in launches]
        launches = [*sort.launches, *backward]
        if call.rows_of_sum:  # a table of no rows has no sums
            launches.append(segments.summed(call, plan, out.sums, sort, spec))
    if summed_next and (problem.wants_dw or problem.wants_db or not sort):
        launches.append(sums.finalized(call, out))
    grid = grid_of(plan, problem, spec, call.sample_rows)
    grid = grid.by_key(call.rows_of_sum) if sort else grid
    if call.width and dx:
        launches += copies_of_rest(call, dx, max(1, limits.copying_ctas * spec.sm_count // grid.at_once))
    launches += sums.add_blocks(over_blocks)
    return launches, count, outputs, workspace if wants_sums or two_passes else None, grid


def _outputs(call: Call, roles: Sequence[Role], dtypes: Sequence[torch.dtype | None]) -> tuple[tuple, tuple]:
    """The outputs of a call, and the addresses of the OWN_OUTPUTS. None for a dtype of None."""
    own = zip(roles, dtypes, strict=True)
    addresses = [dtype and Address(at, dtype) for at, dtype in enumerate(dtypes, len(call.tensors))]
    added = [each.value and _added_output(call, each) for each in call.added_outputs]
    return (*[dtype and Output(role, dtype) for role, dtype in own], *added), tuple(addresses)


def _added_output(call: Call, added: Added) -> Output:
    if added.role is Role.TABLE:
        return Output(Role.STRIDED, added.value, shape=(call.rows_of_sum, *call.normalized_shape))
    return Output(added.role, added.value, added.sharing.whole)


@functools.lru_cache(maxsize=4096)
def _is_legal(variant: str, problem: NormProblem, rows: int, spec: DeviceSpec) -> bool:
    return broken_rule(variant, problem, rows, spec) is None
