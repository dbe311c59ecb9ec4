"""Norms of heads on the GPU: from operands to outputs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from ..forms import FormSpec
from ..host import fallback, gpus, launcher, prepared
from ..host.fallback import BuildFailed
from ..host.gpus import current
from ..host.launcher import Launch
from ..host.program import Address, Bound, Output, Part, Program, Workspace
from ..host.sums import options_of, partials_tile
from ..kernels import finalizer, narrow, narrow_async
from ..kernels.config import Norm, PartsTile
from ..kernels.rowmath import TURN, form_of
from ..operands import Operands, Outputs, Role
from ..planner import limits
from ..planner.device import DeviceSpec
from ..planner.plan import ReferencePlan
from ..problem.outputs import resolve_eps
from ..problem.validation import require_memory
from ..settings import invariance, margin
from . import blocks
from . import plan as head_plan
from .call import VECTOR, HeadCall, HeadProblem, Rows, apart, calls_of, in_place, joined, outputs_of
from .plan import HeadPlan, Planned, plans_of
from .problem import Heads, heads_of, packing_of


def run(operands: Operands, miss: prepared.Miss | None = None) -> tuple[Outputs | None, Program | None]:
    """The outputs of a checked call, and the program if it is kept. None for both if the planner leaves the call to
    ATen."""
    heads, in_force = heads_of(operands), invariance.switch.invariance()
    if not all(x.numel() for x in heads.inputs):
        return None, None
    if in_force > 0 and len(pieces := blocks.of(operands, in_force)) > 1:
        return blocks.added_up(operands, [prepared.run(each, run)[0] for each in pieces]), None
    if in_force and packing_of(operands) and heads.cols % VECTOR:  # no row of a copy would begin at a vector
        outputs, _ = prepared.run(apart(operands), run)
        return outputs and joined(operands, outputs), None
    readable, _ = in_place(operands)
    if readable is not operands:
        return prepared.run(readable, run)[0], None
    outputs, bound = _first(operands, heads)
    return outputs, prepared.keep_of(miss, operands.x.shape, bound) if miss and bound else None


def _first(operands: Operands, heads: Heads) -> tuple[Outputs | None, Bound | None]:
    """The outputs of a call that has no program yet, and the program, if later calls can repeat it."""
    x = heads.inputs[0]
    require_memory(operands.op, operands.tensors)
    spec = gpus.spec_of(x.device)
    tried = plans_of(calls_of(operands), spec)
    if not tried or any(isinstance(plan, ReferencePlan) for _, plan in tried):
        return None, None
    try:
        with current(x.device):
            return launcher.run(program_of(operands, tried, spec), operands.tensors, x.shape, 1)
    except BuildFailed as failed:
        give_way(tried, spec, failed)
        return None, None


def give_way(planned: Planned, spec: DeviceSpec, failed: BuildFailed) -> None:
    """ATen runs later calls of these plans, because a kernel cannot be built."""
    for call, plan in planned:
        fallback.remember(plan, *head_plan.asked(call.problem, spec), str(failed))


def program_of(operands: Operands, planned: Planned, spec: DeviceSpec) -> Program:
    """What a call launches. Of its tensors only dtypes, shapes, strides and alignment are read."""
    outputs = tuple(each and Output(Role.STRIDED, each[1], shape=tuple(each[0])) for each in outputs_of(operands))
    launches, parts, in_force = [], [], invariance.switch.invariance()
    for call, plan in planned:
        first = len(operands.tensors) + len(outputs) + len(parts)
        ordered = in_force > 0 and call.problem.num_sums > 0  # the number of partials follows from the number of SMs
        more, of_it = launches_of(call, plan, spec.of_architecture() if ordered else spec, first)
        launches += more
        parts += of_it
    workspace = Workspace(torch.float32, tuple(parts)) if parts else None
    shape, kept = (heads_of(operands).cols,), {"sm_margin": margin.sms, "invariance": in_force}
    return Program(tuple(launches), len(operands.tensors), outputs, workspace, None, shape, **kept)


def launches_of(
    call: HeadCall, plan: HeadPlan, spec: DeviceSpec, first_partial: int
) -> tuple[list[Launch], list[Part]]:
    """The launches, and the parts of the workspace that they need. The first part has the address `first_partial`."""
    problem, count, cols = call.problem, call.problem.count, call.problem.cols
    if plan.kernel == "narrow_async" and not isinstance(narrow.backward, triton.JITFunction):  # interpreted without PTX
        problem = replace(problem, at_vectors=False)
        plan = head_plan.choose(*head_plan.asked(problem, spec))
    *lists, _ = zip(*call.sides, strict=True)
    x, weights, biases, dy, outs, *of_parameters = map(_addresses, lists)
    cos, sin = (each if each is None else each.address for each in (call.heads.cos, call.heads.sin))
    sums = [each for some in of_parameters if some for each in some]
    ctas = head_plan.ctas_of(plan, problem, call.rows, spec)
    eps = resolve_eps(call.heads.eps, problem.acc_dtype)
    levels, strides = range(problem.levels), []
    for which in range(len(call.places[0].strides)):
        strides.append(tuple(each.strides[which][level] for level in levels for each in call.places))
    inner = sizes_of(call.places)
    table_strides = strides.pop() if cos else None
    norm, options = _norm(problem), {"maxnreg": plan.max_registers}
    grid = (sum(ctas),)
    if problem.direction == "forward":
        tile = _tile(plan, problem, one_tile=not spec.sm_margin)
        # Mixed, so that memory is read once for the rows of a cos and sin.
        share = share_of_others(ctas) if cos and count > 1 else None
        numbers = _odd(call.rows), _odd(ctas), share, inner
        args = x, weights, biases, cos, sin, outs, *numbers, *strides, table_strides, eps
        launch = Launch(narrow.forward, grid, args, norm, tile, options, {"cols": cols})
        return [launch], []
    dependent = problem.num_sums > 0 and spec.places_dependents
    tile, dx_strides = _tile(plan, problem, announces_end=dependent), strides[2] if problem.wants_dx else None
    acc_dtype = problem.acc_dtype
    size = problem.columns * (acc_dtype.itemsize // torch.float32.itemsize)
    parts = [Part(beside=of * size, dtype=acc_dtype) for _ in range(problem.num_sums) for of in ctas]
    partials = [Address(first_partial + at, acc_dtype) for at in range(len(parts))]
    num_dw = count * problem.wants_dw
    dw, db = tuple(partials[:num_dw]) or None, tuple(partials[num_dw:]) or None
    places = inner, *strides[:2], dx_strides, table_strides
    copied, constants = (None,) * 5, {"cols": cols}
    if call.copy_place:
        (_, both), copy = call.copy_place, tuple(each.address for each in call.copy)
        copied = copy, _odd([call.copy[0].numel() // cols]), sizes_of([call.copy_place]), *both
        constants["copy_tile"] = _copy_tile(plan, cols, copy[1].dtype.itemsize, len(both[0]))
    args = x, dy, weights, cos, sin, outs, dw, db, _odd(call.rows), _odd(ctas), *places, *copied, eps
    kernel = narrow.backward if plan.kernel == "narrow" else narrow_async.backward
    launches = [Launch(kernel, grid, args, norm, tile, options, constants)]
    for dtype in dict.fromkeys(each.dtype for each in sums):  # of weights and biases: one, or two
        of_it = [at for at, each in enumerate(sums) if each.dtype == dtype]
        last = partials_tile(problem.columns, acc_dtype.itemsize, dependent and 0 in of_it)
        picked = (tuple([some[at] for at in of_it]) for some in (partials, sums, _odd(ctas * problem.num_sums)))
        grid = triton.cdiv(problem.columns, last.cols), len(of_it)
        operands, options = (*picked, problem.columns), options_of(last, problem.columns, acc_dtype, dtype)
        launches.append(Launch(finalizer.finalize_several, grid, operands, None, last, options))
    return launches, parts


def sizes_of(places: Sequence[Rows]) -> tuple[int, ...] | None:
    """How many rows each level but the outermost has, for tensors whose rows lie there, as kernels divide by it. For
    each level, from the innermost on: the sizes, then reciprocals, then shifts. Of reciprocal r and shift s,
    `(2 * n * r) >> (32 + s)` is n // size for each n below 2^30 (Granlund, Montgomery, "Division by invariant integers
    using multiplication", 1994). r has 32 bits, of which the first and the last are 1: as an int32 it is negative, and
    odd as `_odd` wants it."""
    found = []
    for sizes in zip(*[each.sizes[::-1] for each in places], strict=True):
        shifts = [(size - 1).bit_length() for size in sizes]
        pairs = zip(sizes, shifts, strict=True)
        reciprocals = [(-(-(2 ** (31 + shift)) // size) | 1) - 2**32 for size, shift in pairs]
        found += [*_odd(sizes), *reciprocals, *_odd(shifts)]
    return tuple(found) or None


def share_of_others(ctas: Sequence[int]) -> int:
    """Which share of the CTAs is not the first tensor's, as narrow.part_of_grid takes it. It is odd, as `_odd` says."""
    return -(-(sum(ctas[1:]) << 31) // sum(ctas)) | 1


def _odd(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers as kernels take them in a tuple: see loads.number."""
    return tuple([2 * each + 1 for each in numbers])


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[Address, ...] | None:
    """As kernels take operands that are all there or all absent."""
    return None if tensors[0] is None else tuple([each.address for each in tensors])


@functools.cache
def _norm(problem: HeadProblem) -> Norm:
    settings, backward = problem.settings, problem.direction == "backward"
    form = form_of(FormSpec(weight_offset=settings.weight_offset, rounds_x_hat=settings.rounds_x_hat))
    if problem.turned:
        form = replace(form, **{"turn_u" if settings.norm_first else "turn_h": TURN[settings.interleaved]})
    return Norm(
        form=form,
        layer=settings.layer,
        fp64=problem.acc_dtype == torch.float64,
        has_weight=problem.weight_dtype is not None,
        has_bias=not backward and problem.bias_dtype is not None,
        wants_dx=problem.wants_dx,
        wants_dw=problem.wants_dw,
        wants_db=problem.wants_db,
    )


@functools.cache
def _tile(plan: HeadPlan, problem: HeadProblem, **more: bool) -> PartsTile:
    rows, halves = plan.rows_per_tile // plan.adjacent, all(each.itemsize == 2 for each in problem.table_dtypes)
    return PartsTile(
        rows,
        plan.chunk,
        plan.num_chunks,
        plan.num_warps,
        **more,
        columns_of_chunk=plan.width if plan.width < plan.chunk else 0,
        together=problem.together,
        adjacent=plan.adjacent,
        vectors=problem.at_vectors and halves and plan.chunk >= 8 and rows * plan.chunk >= 8 * 32 * plan.num_warps,
        num_parts=problem.count,
        num_levels=problem.levels,
        turned=problem.turned,
        pairs=problem.settings.interleaved,
        per_pair=problem.per_pair,
        # Triton's interpreter knows no PTX. A thread has one element of parameters that are one column.
        in_pairs=plan.chunk > 1 and isinstance(narrow.forward, triton.JITFunction),
    )


@functools.cache
def _copy_tile(plan: HeadPlan, cols: int, itemsize: int, levels: int) -> PartsTile:
    """How a backward of this plan copies rows."""
    chunk, width, num_chunks = head_plan.chunks_of(cols, itemsize)
    rows = head_plan.rows_of_tile(32 * plan.num_warps, limits.head_bytes["copied"], itemsize, chunk, num_chunks)
    padded = width if width < chunk else 0
    return PartsTile(rows, chunk, num_chunks, plan.num_warps, columns_of_chunk=padded, num_levels=levels)
