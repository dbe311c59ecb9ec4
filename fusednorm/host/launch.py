"""From a plan and a call to a program, which says what is launched.

The measurements behind the constants are in bench/NOTES.md, "Evidence behind constants".
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..forcing import forced_variant
from ..kernels import column_tiles, copies, finalizer, multiwave, parameter_gradients, pipelined, warp_specialized
from ..kernels.config import ColumnTile, Norm, PartialsTile, RingTile, Tile
from ..kernels.rowmath import form_of
from ..operands import OWN_OUTPUTS, Outputs, Role
from ..planner import budget, canonical, choice
from ..planner.device import OLDEST_TRITON, DeviceSpec
from ..planner.legality import MAX_RING_ROWS, broken_rule
from ..planner.norm_problem import ALIGNMENT, NormProblem
from ..planner.plan import (
    ColumnRingPlan,
    ColumnTilePlan,
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
from ..problem import Added, BackwardCall, ForwardCall, RowView, require_memory
from ..settings import invariance, margin
from . import fallback, gpus, launcher, prepared, triton_compat
from .fallback import BuildFailed, Choice
from .gpus import current
from .key import EXTENTS, Extent
from .launcher import Launch
from .program import (
    MOST_ROWS,
    Address,
    Blocks,
    Map,
    Number,
    OnTensors,
    Operand,
    Output,
    Part,
    Program,
    Workspace,
)

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
BLOCKS_TILE = PartialsTile(cols=256, num_loads=8, num_warps=2)  # by which the sums of blocks are added up
COPYING_CTAS = 4  # of an SM, with tiles of so many elements and at most so many columns: 32 elements of a thread
COPIED_ELEMENTS, COPIED_COLUMNS = 8192, 1024
VECTOR_BYTES = 16  # bytes of one load or store of a thread
OLDEST_DEPENDENT_ARCH = 90  # oldest arch on which a dependent launch may be placed before its predecessor has ended

TRITONS_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

Call = ForwardCall | BackwardCall


OF_ALL_SAMPLES = 0  # samples that share a row


class SampleSum(NamedTuple):
    """A sum over the rows of samples."""

    partial: Address
    out: Address
    samples: int  # that share a row of it, one after another


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


def prepare(call: Call, plan: Plan | None = None) -> OnTensors:
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
        spec = canonical.of_architecture(spec)  # the number of partials follows from the number of SMs
    build = _forward if isinstance(call, ForwardCall) else _backward
    symbolic = with_addresses(call)
    launches, num_tensors, *parts = build(symbolic, plan, spec)
    if call.added or call.added_outputs:
        launches = _with_added(launches, symbolic, first_output=num_tensors)
    if call.block_rows:
        rows, blocks = (in_force, MOST_ROWS), _blocks(call, *parts[:2])
    elif ordered:
        rows = chosen.rows_above, min(chosen.most_rows, in_force)
    kept = *rows, margin.sms, in_force
    sizes = call.normalized_shape, problem.form.groups, getattr(call, "width", 0)
    return Program(tuple(launches), num_tensors, *parts, *sizes, *kept, blocks)


def _blocks(call: BackwardCall, outputs: Sequence[Output | None], workspace: Workspace) -> Blocks:
    """All tensors that have rows are packed."""
    rows, width = call.block_rows, call.problem.width
    added = [each for each in call.added if each.role.is_tensor]
    is_of_rows = [True] * 4 + [False] * 2 + [True] + [_has_rows(each, call.sample_rows) for each in added]
    of_tensors = [
        each.numel() * rows // call.rows * each.itemsize if each is not None and has_rows else 0
        for each, has_rows in zip(call.tensors, is_of_rows, strict=True)
    ]
    elements = {Extent.X: rows * width, Extent.COLUMNS: rows * call.width}
    of_outputs = [each.dtype.itemsize * elements.get(each.extent, 0) if each else 0 for each in outputs]
    for at, each in enumerate(call.added_outputs, OWN_OUTPUTS):
        if each.value and each.role is Role.MODULATION and each.sharing.rows:
            of_outputs[at] = each.value.itemsize * width * (rows // each.sharing.rows)
    of_parts = [each.per_block * workspace.dtype.itemsize for each in workspace.parts]
    return Blocks(rows, int(any(of_parts)), (*of_tensors, *of_outputs, *of_parts))


def _has_rows(added: Added, sample_rows: int) -> bool:
    """Whether an operand has rows, and not one for all rows of x."""
    return added.role is not Role.PARAMETER and (not added.is_of_samples or bool(sample_rows))


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


def _with_added(launches: list[Launch], call: Call, first_output: int) -> list[Launch]:
    """The launches with what an op has beside the operands and outputs of the package's ops, absent ones left out.

    Row tensors go to kernels as tuples, in their order: `rows_in` of pointers, `strides_in` of the three numbers of
    each, `rows_out` of pointers; those with a row for each sample as `shared` and `strides_shared`. Of the rest a
    kernel gets what it has parameters for: `{name}_ptr` of a tensor, `{name}_stride` of a statistic, `{name}` of a
    number. Sums over samples are among `Written`. Raises BuildFailed if no kernel takes an operand or an output."""
    named: dict[str, Operand] = {}
    parameters: dict[str, str] = {}  # by what needs them
    for each in call.added:
        name, value = each.name, each.value
        if isinstance(value, RowView):
            parameters[name] = "shared" if each.is_of_samples else "rows_in"
            strides = "strides_shared" if each.is_of_samples else "strides_in"
            named[parameters[name]] = (*named.get(parameters[name], ()), value.tensor)
            named[strides] = (*named.get(strides, ()), *_row_strides(value))
        elif value is not None and each.role is not Role.DTYPE:
            parameters[name] = f"{name}_ptr" if each.role.is_tensor else name
            named[parameters[name]] = value
            named |= {f"{name}_stride": _stride(value)} if each.role is Role.STATISTIC else {}
    for at, each in enumerate(call.added_outputs, first_output + OWN_OUTPUTS):
        if each.value is not None and not each.is_of_samples:
            parameters[each.name] = "rows_out" if each.is_of_rows else f"{each.name}_ptr"
            given = Address(at, each.value)
            named[parameters[each.name]] = (*named.get("rows_out", ()), given) if each.is_of_rows else given
    taken = [{name: named[name] for name in each.kernel.arg_names if name in named} for each in launches]
    missing = [name for name, needed in parameters.items() if not any(needed in each for each in taken)]
    if missing:
        raise BuildFailed(f"{launches[0].kernel.__name__} must have parameters for {', '.join(missing)}, but has none")
    return [replace(each, named=more | each.named) for each, more in zip(launches, taken, strict=True)]


def _with_rest(launches: list[Launch], call: BackwardCall) -> list[Launch]:
    """The launches with what some backwards read: gradients that are added to dx, and the bias."""
    rest: dict[str, Operand] = {"added": call.added_rows} if call.added_rows else {}
    rest |= {} if call.bias is None else {"bias_ptr": call.bias}
    if not rest:
        return launches
    found = []
    for each in launches:
        named = {name: value for name, value in rest.items() if name in each.kernel.arg_names}
        found.append(replace(each, named=named | each.named) if named else each)
    return found


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
    outputs, written = _outputs(call, (Extent.X, Extent.STATISTIC, Extent.STATISTIC), dtypes)
    launches = _FORWARD[type(plan)](plan, call, written)
    grid = grid_of(plan, problem.cols, spec, leaves_partials=False, groups=problem.form.groups)
    return launches, count, outputs, None, grid


def _backward(call: BackwardCall, plan: Plan, spec: DeviceSpec) -> tuple:
    """(launches, number of tensors, outputs, workspace, grid)."""
    problem, count = call.problem, len(call.tensors)
    assert plan.variant != "pipelined" or problem.wants_dx != (plan.kernel == "column_ring")
    wanted = problem.wants_dx and 0 in problem.stored, problem.wants_dw, problem.wants_db
    dtypes = call.dx_dtype, problem.weight_dtype, problem.bias_dtype
    dtypes = [dtype if wants else None for wants, dtype in zip(wanted, dtypes, strict=True)]
    of_dx = Extent.COLUMNS if call.width else Extent.X
    outputs, (dx, dw, db) = _outputs(call, (of_dx, Extent.PARAMETER, Extent.PARAMETER), dtypes)
    sums, two_passes = problem.num_sums > 0, plan.kernel == "column_tiles" and problem.wants_dx
    width = problem.width
    parts = (
        Part(per_partial=width * problem.wants_dw),
        Part(per_partial=width * problem.wants_db),
        Part(per_row=2 * problem.form.groups * two_passes),
        Part(beside=_column_tiles(plan, problem) if sums and two_passes else 0, dtype=torch.int32),
        *[Part(per_partial=width)] * len(problem.summed),
    )
    workspace = Workspace(problem.acc_dtype, parts)
    dw_partial, db_partial, means, counters, *partials = [
        Address(at, part.dtype or workspace.dtype) if any(part[:3]) else None
        for at, part in enumerate(parts, count + len(outputs))
    ]
    sample_sums = [_sample_sum(call, partial, at) for partial, at in zip(partials, problem.summed, strict=True)]
    summed_next = sums and counters is None
    dependent = summed_next and spec.arch >= OLDEST_DEPENDENT_ARCH
    out = Written(dx, dw_partial, db_partial, dw, db, means, counters, dependent, tuple(sample_sums))
    over_blocks: dict[Address, Address] = {}
    if call.block_rows:
        out, over_blocks = _of_blocks(out, count + len(outputs) + len(parts), workspace.dtype)
        workspace = workspace._replace(parts=parts + (Part(per_block=_padded(width)),) * len(over_blocks))
    launches = _with_rest(_BACKWARD[type(plan)](plan, call, out, spec), call)
    if summed_next:
        launches.append((_finalize_samples if problem.by_sample else _finalize)(call, out))
    wants = {"leaves_partials": sums, "float32_sums": problem.wants_float32_sum, "groups": problem.form.groups}
    grid = grid_of(plan, problem.cols, spec, **wants, sample_rows=call.sample_rows)
    if call.width and dx:
        launches += _copies_of_rest(call, dx, max(1, COPYING_CTAS * spec.sm_count // grid.at_once))
    if over_blocks:
        launches.append(_add_blocks(over_blocks, width))
    return launches, count, outputs, workspace if sums or two_passes else None, grid


def _of_blocks(out: Written, first: int, dtype: torch.dtype) -> tuple[Written, dict[Address, Address]]:
    """What a block writes: its sums go to parts of the workspace, the `first` and those behind it. And these parts by
    the outputs that are sums over all blocks."""
    sums_out = [out.dw, out.db, *[each.out for each in out.sums if each.samples == OF_ALL_SAMPLES]]
    parts = {each: Address(at, dtype) for at, each in enumerate(filter(None, sums_out), first)}
    sums = tuple([each._replace(out=parts.get(each.out, each.out)) for each in out.sums])
    return out._replace(dw=parts.get(out.dw), db=parts.get(out.db), sums=sums), parts


def _add_blocks(parts: dict[Address, Address], width: int) -> Launch:
    """The launch that adds up the sums of blocks, with one CTA per piece of each sum."""
    grid = triton.cdiv(width, BLOCKS_TILE.cols), len(parts)
    args = tuple(parts.values()), tuple(parts), Number.PARTIALS, width, _padded(width)
    return Launch(finalizer.add_blocks, grid, args, None, BLOCKS_TILE)


def _padded(width: int) -> int:
    """Elements from the sums of a block to those of the next one, at multiples of 16 bytes."""
    return -(-width // 4) * 4


def _outputs(call: Call, extents: Sequence[Extent], dtypes: Sequence[torch.dtype | None]) -> tuple[tuple, tuple]:
    """The outputs of a call, and the addresses of the OWN_OUTPUTS. None for a dtype of None."""
    own = zip(extents, dtypes, strict=True)
    addresses = [dtype and Address(at, dtype) for at, dtype in enumerate(dtypes, len(call.tensors))]
    added = [each.value and Output(EXTENTS[each.role], each.value, each.sharing.whole) for each in call.added_outputs]
    return (*[dtype and Output(extent, dtype) for extent, dtype in own], *added), tuple(addresses)


def _sample_sum(call: BackwardCall, partial: Address, at: int) -> SampleSum:
    """The one of the form's gradient `at`."""
    output = call.added_outputs[at - 1]
    rows = output.sharing.rows
    address = Address(len(call.tensors) + OWN_OUTPUTS + at - 1, output.value)
    return SampleSum(partial, address, rows // call.sample_rows if rows else OF_ALL_SAMPLES)


def _finalize(call: BackwardCall, out: Written) -> Launch:
    """The launch that sums the partials, with one CTA per piece of dw and of db."""
    problem, norm = call.problem, _norm(call.problem)
    weight = None if norm.form.finish_dw is None else call.weight
    width = problem.width
    tile = partials_tile(width, problem.acc_dtype.itemsize, out.announces_end)
    grid = (triton.cdiv(width, tile.cols) * problem.num_sums,)
    args = (*out[1:5], Number.PARTIALS, width, weight)
    options = {"launch_pdl": True} if tile.dependent else {}
    return Launch(finalizer.finalize, grid, args, norm, tile, options)


def _finalize_samples(call: BackwardCall, out: Written) -> Launch:
    """The launch that sums the partials of samples, with one CTA per sample and piece of each sum."""
    cols, acc = call.problem.cols, call.problem.acc_dtype
    tile = partials_tile(cols, acc.itemsize, out.announces_end)
    of_parameters = [(out.dw_partial, out.dw), (out.db_partial, out.db)]
    sums = [SampleSum(*each, OF_ALL_SAMPLES) for each in of_parameters if all(each)] + list(out.sums)
    grid = Number.SAMPLES, triton.cdiv(cols, tile.cols), len(sums)
    args = (*map(tuple, zip(*sums, strict=True)), Number.CTAS, cols)
    return Launch(finalizer.finalize_samples, grid, args, None, tile, {"launch_pdl": True} if tile.dependent else {})


def _copies_of_rest(call: BackwardCall, dx: Address, times: int) -> list[Launch]:
    """A launch for each run of columns of dx that x and the gate leave, with `times` CTAs for each of the norm's."""
    cols, given = call.problem.width, {each.name: each.value for each in call.added}
    first, last = sorted((given["x_at"], given["gate_at"]))
    runs = (0, 0, first), (first, first + cols, last), (last - cols, last + cols, call.width)
    launches = []
    for source, start, end in runs:  # in rest; in dx, from start to end
        if end > start:
            args = dx, call.rows, start, end - start, call.width - 2 * cols, source
            tile = ColumnTile(*_copied_at_once(end - start), num_warps=8)
            launches.append(Launch(copies.copy_columns, (Number.CTAS, times), args, None, tile))
    return launches


def _copied_at_once(cols: int) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two."""
    chunk = min(COPIED_COLUMNS, triton.next_power_of_2(cols))
    return COPIED_ELEMENTS // chunk, chunk


@functools.cache
def partials_tile(cols: int, itemsize: int, dependent: bool) -> PartialsTile:
    """The tile that sums the partials of `cols` columns. The tile and the number of partials determine the order of the
    additions, so the sums do not depend on the plan, the device or the caller in any other way."""
    piece, num_warps = next(tile for most, *tile in PARTIALS_PIECES if cols <= most)
    return PartialsTile(piece, PARTIAL_LOADS * 4 // itemsize, num_warps, dependent)


def _multiwave_forward(plan: MultiWavePlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    options = {"maxnreg": plan.max_registers}
    args = _forward_args(call, outputs)
    tile = _tile(plan, _log2_divisor(call), call.problem.form.groups)
    return [Launch(multiwave.forward, _grid(call, Number.CTAS), args, _norm(call.problem), tile, options)]


def _column_tile_forward(plan: ColumnTilePlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    """One CTA per row, which passes over the row's column tiles twice."""
    tile = _whole_row_tile(plan, _log2_divisor(call), call.problem.form.groups)
    args = _forward_args(call, outputs)
    options = {"maxnreg": ROW_PASS_REGISTERS} if call.problem.x_dtype.itemsize >= 4 and tile.log2_divisor else {}
    grid = _grid(call, call.rows)
    return [Launch(column_tiles.forward_by_column_tiles, grid, args, _norm(call.problem), tile, options)]


def _pipelined_forward(plan: PipelinedPlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    tile, cols = _ring_tile(plan, call.problem, cluster=plan.cluster), call.problem.cols
    (x, x_tail), named = _ring_maps(plan, call, 1, tile)
    args = (x, x_tail, call.weight, call.bias, *outputs, call.rows, cols, call.eps)
    norm, options = _norm(call.problem), _pipelined_options(plan)
    return [Launch(pipelined.forward, _grid(call, Number.CTAS), args, norm, tile, options, named=named)]


def _multiwave_backward(plan: MultiWavePlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    args = (*_inputs(call), *out[:3], *_sizes(call))
    options = {"maxnreg": plan.max_registers}
    groups = call.problem.form.groups
    tile = _tile(plan, _log2_divisor(call), groups, out.announces_end, makes_again=bool(out.sums))
    grid: tuple[int | Number, ...] = (Number.CTAS,)
    named: dict[str, Operand] = {"sum_partials": tuple([each.partial for each in out.sums])} if out.sums else {}
    if call.sample_rows or (call.problem.by_sample and invariance.switch.invariance() > 0):
        # Without sample_rows the kernel is another build. If sums are ordered, a sample alone has the bits of several.
        grid, named = (Number.SAMPLES, Number.CTAS), named | {"sample_rows": call.sample_rows or call.rows}
    return [Launch(multiwave.backward, _grid(call, *grid), args, _norm(call.problem), tile, options, named=named)]


def _column_tile_backward(plan: ColumnTilePlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    """One launch for the row means if dx is wanted, then one for all outputs by column tiles."""
    problem, inputs, sizes = call.problem, _inputs(call), _sizes(call)
    log2_divisor, launches = _log2_divisor(call), []
    if problem.wants_dx:
        tile = _whole_row_tile(plan, log2_divisor, problem.form.groups)
        num_counters = 0 if out.counters is None else _column_tiles(plan, problem)
        args = (*inputs, out.row_means, out.counters, num_counters, *sizes)
        grid = _grid(call, call.rows)
        launches.append(Launch(column_tiles.backward_row_means, grid, args, _norm(call.problem), tile))
    grid = _grid(call, triton.cdiv(problem.cols, plan.chunk), Number.CTAS)
    tile = _column_tile(plan, log2_divisor, problem.form.groups)
    args = (*inputs, out.row_means, *out[:5], out.counters, *sizes)
    if problem.x_dtype.itemsize == 2 and problem.weight_dtype == torch.float64:
        options = {"maxnreg": COLUMN_PASS_REGISTERS}
    elif triton_compat.installed() == OLDEST_TRITON:
        options = {}  # it keeps to the registers that let all CTAs of an SM be resident; later releases may take more
    else:
        threads = plan.ctas_per_sm * 32 * plan.num_warps
        options = {"maxnreg": budget.register_limit(threads, spec)}
    launches.append(Launch(column_tiles.backward_by_column_tiles, grid, args, _norm(call.problem), tile, options))
    return launches


def _pipelined_backward(plan: PipelinedPlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    tile = _ring_tile(plan, call.problem, cluster=plan.cluster, announces_end=out.announces_end)
    descriptors, named = _ring_maps(plan, call, 2, tile)
    args = (*descriptors, *_inputs(call)[2:], *out[:3], *_ring_sizes(call))
    norm, options = _norm(call.problem), _pipelined_options(plan)
    return [Launch(pipelined.backward, _grid(call, Number.CTAS), args, norm, tile, options, named=named)]


def _ring_maps(
    plan: PipelinedPlan, call: Call, own: int, tile: RingTile
) -> tuple[list[Map | None], dict[str, Operand]]:
    """The maps of the call's first `own` row tensors and of their tails, and the arguments by which those of the form
    come, if they come through the ring."""
    views = list(call.rows_read if plan.rows_in_ring else call.rows_read[:own])
    maps = _row_maps(views, call.problem.cols, tile)
    rows, tails = maps[: len(views)], maps[len(views) :]
    named: dict[str, Operand] = {"rows_in": None, "strides_in": None} if len(views) > own else {}
    named |= {f"desc_{at}": each for at, each in enumerate(rows[own:], 1)}
    named |= {f"tail_desc_{at}": each for at, each in enumerate(tails[own:], 1)}
    return rows[:own] + tails[:own], named


def _column_ring_backward(plan: ColumnRingPlan, call: BackwardCall, out: Written, spec: DeviceSpec) -> list[Launch]:
    """One launch for the partials of dw and db, by column tiles."""
    tile, cols = _column_ring_tile(plan, call.problem), call.problem.cols
    dy = tile_map(call.grad_out, cols, tile)
    x = tile_map(call.x, cols, tile) if call.problem.wants_dw else None
    args = (dy, x, call.mean, call.rstd, *out[1:3], *_ring_sizes(call))
    grid = (triton.cdiv(cols, plan.chunk), Number.CTAS)
    return [
        Launch(parameter_gradients.dw_and_db, grid, args, _norm(call.problem), tile, {"maxnreg": plan.max_registers})
    ]


def _warp_specialized_backward(
    plan: WarpSpecializedPlan, call: BackwardCall, out: Written, spec: DeviceSpec
) -> list[Launch]:
    tile = _warp_specialized_tile(plan, call.problem)
    pointers = (*_inputs(call)[2:], *out[:3])
    present = (call.rstd if pointer is None else pointer for pointer in pointers)  # warp partitions do not take None
    descriptors = _row_maps([call.x, call.grad_out], call.problem.cols, tile)[:2]  # without tails
    args = (*descriptors, *present, *_ring_sizes(call))
    return [
        Launch(
            warp_specialized.backward, (Number.CTAS,), args, _norm(call.problem), tile, _warp_specialized_options(plan)
        )
    ]


def _warp_specialized_forward(plan: WarpSpecializedPlan, call: ForwardCall, outputs: tuple) -> list[Launch]:
    tile = _warp_specialized_tile(plan, call.problem)
    x, _no_tail = _row_maps([call.x], call.problem.cols, tile)
    args = (x, call.weight, call.bias, *outputs, call.rows, call.problem.cols, call.eps)
    return [
        Launch(
            warp_specialized.forward, (Number.CTAS,), args, _norm(call.problem), tile, _warp_specialized_options(plan)
        )
    ]


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


def _grid(call: Call, *sides: int | Number) -> tuple[int | Number, ...]:
    """With a CTA for each group of columns in the place of each CTA, along the third side."""
    groups = call.problem.form.groups
    return sides if groups == 1 else (*(*sides, 1)[:2], groups)


def _column_tiles(plan: Plan, problem: NormProblem) -> int:
    return triton.cdiv(problem.cols, plan.chunk) * problem.form.groups


@functools.lru_cache(maxsize=4096)
def _is_legal(variant: str, problem: NormProblem, rows: int, spec: DeviceSpec) -> bool:
    return broken_rule(variant, problem, rows, spec) is None


def rounds_u(problem: NormProblem) -> bool:
    """Whether a forward rounds u to x's dtype before its gate: u then has the promoted dtype of x, weight and bias,
    which is x's here, or one with all digits."""
    of, form = problem.x_dtype, problem.form
    rounds = problem.is_forward and form.rounds_x_hat and form.finish == "gate" and of.itemsize == 2
    return rounds and {problem.weight_dtype or of, problem.bias_dtype or of} == {of}


@functools.cache
def _norm(problem: NormProblem) -> Norm:
    return Norm(
        form=form_of(problem.form),
        layer=problem.norm == "layer",
        fp64=problem.acc_dtype == torch.float64,
        has_weight=problem.weight_dtype is not None,
        has_bias=problem.reads_bias,
        rounds_u=rounds_u(problem),
        steps=tuple([TRITONS_NAMES[each] for each in problem.steps]),
        wants_dx=problem.wants_dx,
        wants_dw=problem.wants_dw,
        wants_db=problem.wants_db,
        nested_rows=problem.nested_rows,
        rows_in=problem.names_in,
        shared=problem.names_shared,
        stored=problem.stored,
        summed=problem.summed,
    )


@functools.cache
def _tile(
    plan: MultiWavePlan, log2_divisor: int, groups: int, announces_end: bool = False, makes_again: bool = False
) -> Tile:
    shape = plan.rows_per_tile, plan.chunk, plan.num_chunks, plan.num_warps
    return Tile(*shape, log2_divisor, plan.short_lived, announces_end, groups, makes_again)


@functools.cache
def _whole_row_tile(plan: ColumnTilePlan, log2_divisor: int, groups: int) -> Tile:
    return Tile(1, plan.row_pass_chunk, 1, plan.row_pass_warps, log2_divisor, groups=groups)


@functools.cache
def _column_tile(plan: ColumnTilePlan, log2_divisor: int, groups: int) -> Tile:
    return Tile(plan.rows_per_tile, plan.chunk, 1, plan.num_warps, log2_divisor, groups=groups)


def _log2_divisor(call: Call) -> int:
    """log2 of the largest power of two that divides the columns and all row strides, for a portable kernel's tile. 0 if
    16 divides them, because Triton detects that itself."""
    strides = [view.outer_stride | view.inner_stride for view in call.rows_read]
    counts = [each.value for each in call.added if each.role is Role.COUNT]
    sizes = functools.reduce(operator.or_, [*strides, *counts], call.problem.cols)
    return (sizes & -sizes).bit_length() - 1 if sizes % 16 else 0


@functools.cache
def _ring_tile(plan: RingPlan, problem: NormProblem, **more) -> RingTile:
    return RingTile(
        plan.rows_per_tile,
        plan.chunk,
        plan.num_chunks,
        plan.num_warps,
        groups=problem.form.groups,
        num_stages=plan.num_stages,
        copy_chunks=plan.copy_chunks,
        tail=plan.tail,
        box=box_columns(plan, problem.cols),
        vector=min(VECTOR_BYTES // problem.x_dtype.itemsize, plan.chunk // threads_per_row(plan)),
        threads_per_row=threads_per_row(plan),
        whole=is_whole(plan, problem.cols),
        weight_in_smem=plan.weight_in_smem,
        prefetches_statistics=budget.has_registers_to_prefetch(plan, problem),
        in_pairs=budget.widens_in_pairs(plan, problem),
        **more,
    )


@functools.cache
def _column_ring_tile(plan: ColumnRingPlan, problem: NormProblem) -> ColumnTile:
    vector = VECTOR_BYTES // max(problem.x_dtype.itemsize, problem.grad_dtype.itemsize)
    return ColumnTile(plan.rows_per_tile, plan.chunk, plan.num_warps, plan.num_stages, vector=vector)


def _row_maps(views: list[RowView], cols: int, tile: RingTile) -> list[Map | None]:
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


def _ring_sizes(call: BackwardCall) -> tuple:
    return call.rows, call.problem.cols, _stride(call.mean), _stride(call.rstd)


def _forward_args(call: ForwardCall, outputs: tuple) -> tuple:
    sizes = call.rows, call.problem.cols, call.eps, *_row_strides(call.x)
    return (call.x.tensor, call.weight, call.bias, *outputs, *sizes)


def _inputs(call: BackwardCall) -> tuple:
    return call.grad_out.tensor, call.x.tensor, call.mean, call.rstd, call.weight


def _sizes(call: BackwardCall) -> tuple:
    statistics = _stride(call.mean), _stride(call.rstd)
    return call.rows, call.problem.cols, *_row_strides(call.x), *_row_strides(call.grad_out), *statistics


def _row_strides(view: RowView) -> tuple[int, int, int]:
    return view.inner_rows, view.outer_stride, view.inner_stride


def _stride(statistic: Address | None) -> int:
    return 0 if statistic is None else statistic.stride
