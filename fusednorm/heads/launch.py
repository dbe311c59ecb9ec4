"""Norms of heads on the GPU: from operands to outputs, by one launch, or by two where sums over rows are wanted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from ..forms import FormSpec
from ..host import fallback, gpus, launcher, prepared
from ..host.fallback import BuildFailed
from ..host.gpus import current
from ..host.launch import partials_tile
from ..host.launcher import Launch
from ..host.program import Address, OnTensors, Part, Program, Workspace
from ..kernels import finalizer, narrow
from ..kernels.config import Norm, PartsTile
from ..kernels.rowmath import TURN, form_of
from ..planner.device import DeviceSpec
from ..planner.norm_problem import ALIGNMENT
from ..problem import require_memory, resolve_eps
from . import plan as head_plan
from .call import HeadCall, HeadProblem, alike, describe
from .plan import AtenNorm, HeadPlan
from .problem import Heads

OLDEST_DEPENDENT_ARCH = 90  # as in host/launch.py


def forward(heads: Heads) -> list[Tensor] | None:
    """The outputs. None if the planner leaves a call to ATen."""
    outs = [torch.empty(x.shape, dtype=heads.output_dtype(at), device=x.device) for at, x in enumerate(heads.inputs)]
    return outs if _in_groups(heads, None, (), outs) else None


def backward(
    heads: Heads, grads: Sequence[Tensor], mask: Sequence[bool], dx: Sequence[Tensor] | None = None
) -> list[Tensor] | None:
    """The gradients that the mask wants, those of the inputs in `dx` if it is given. None if the planner leaves a call
    to ATen."""
    count = len(heads.inputs)
    outs = [torch.empty(each.shape, dtype=each.dtype, device=each.device) if each is not None and want else None
            for each, want in zip(heads.tensors, mask, strict=True)]  # fmt: skip
    if dx is not None:
        outs[:count] = dx
    if not _in_groups(heads, grads, outs, outs[:count]):
        return None
    return [each for each in outs if each is not None]


def _in_groups(heads: Heads, grads, outs, rows_out) -> bool:
    """Fill the outputs by one launch for each group of alike tensors. Whether kernels of ours did it."""
    count = len(heads.inputs)
    more = [rows_out, *([grads] if grads else []), *(outs[kind * count :][:count] for kind in (1, 2) if outs)]
    return all(_group(heads, grads, outs, rows_out, which) for which in alike(heads, *more))


def _group(heads: Heads, grads, outs, rows_out, which: list[int]) -> bool:
    count = len(heads.inputs)
    sums = [outs[kind * count + at] for kind in (1, 2) for at in which] if outs else []
    call = describe(
        heads.some(which), [grads[at] for at in which] if grads else [], [rows_out[at] for at in which], sums
    )
    if call is None:
        return False
    device = call.heads.inputs[0].device
    require_memory("head_norm", call.tensors)
    spec = gpus.spec_of(device)
    plan = head_plan.choose(call.problem, spec)
    if isinstance(plan, AtenNorm) or fallback.has_failed(plan, call.problem, spec):
        return False
    try:
        _run(call, plan, spec)
    except BuildFailed as failed:
        fallback.remember(plan, call.problem, spec, str(failed))
        return False
    return True


def _run(call: HeadCall, plan: HeadPlan, spec: DeviceSpec) -> None:
    tensors, first = call.tensors, call.heads.inputs[0]
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    ctas = head_plan.ctas_of(plan, call.problem, call.rows, spec)
    alignment = tuple(address % ALIGNMENT == 0 for address in addresses)
    key = "head_norm", plan, call.problem, call.rows, call.places, ctas, call.heads.eps, first.get_device(), alignment
    kind = prepared.kind_of(key)
    bound = kind and (kind.by_shape.get(first.shape) or kind.bind(first.shape))
    if bound and bound.launch(addresses) is not None:
        return
    with current(first.device):
        _, bound = launcher.run(program_of(call, plan, spec), tensors, first.shape, call.rows[0])
    if bound:
        prepared.keep_by(key, first.shape, bound)


def prepare(call: HeadCall, plan: HeadPlan, spec: DeviceSpec) -> OnTensors:
    """What a plan launches on the tensors of the call."""
    return program_of(call, plan, spec).on_tensors(call.tensors, call.heads.inputs[0].shape, call.rows[0])


def program_of(call: HeadCall, plan: HeadPlan, spec: DeviceSpec) -> Program:
    """What a call of this kind launches. Of its tensors only dtypes, strides and alignment are read."""
    problem, count, cols = call.problem, len(call.rows), call.problem.cols
    given = (
        each if each is None else Address(at, each.dtype, each.data_ptr() % ALIGNMENT == 0)
        for at, each in enumerate(call.tensors)
    )
    counts = count, len(call.grads), count, count, 2, count, len(call.sums)
    x, dy, weights, biases, (cos, sin), outs, sums = (list(itertools.islice(given, each)) for each in counts)
    x, dy, weights, biases, outs = map(_tuple, (x, dy, weights, biases, outs))
    first_partial = sum(counts)
    ctas = head_plan.ctas_of(plan, problem, call.rows, spec)
    eps = resolve_eps(call.heads.eps, problem.acc_dtype)
    levels, strides = range(problem.levels), []
    for which in range(len(call.places[0].strides)):
        strides.append(tuple(each.strides[which][level] for level in levels for each in call.places))
    inner = tuple(each.sizes[level] for level in levels[:-1] for each in call.places) or None
    table_strides = strides.pop() if cos else None
    norm, options = _norm(problem), {"maxnreg": plan.max_registers}
    grid = (sum(ctas),)
    if problem.direction == "forward":
        tile = _tile(plan, problem)
        args = x, weights, biases, cos, sin, outs, call.rows, ctas, inner, *strides, table_strides, cols, eps
        return Program((Launch(narrow.forward, grid, args, norm, tile),), first_partial, (), None, None, (cols,))
    dependent = problem.num_sums > 0 and spec.arch >= OLDEST_DEPENDENT_ARCH
    tile, dx_strides = _tile(plan, problem, dependent), strides[2] if problem.wants_dx else None
    parts = tuple(Part(beside=of * cols) for _ in range(problem.num_sums) for of in ctas)
    partials = [Address(first_partial + at, problem.acc_dtype) for at in range(len(parts))]
    dw, db = _tuple(partials[: count * problem.wants_dw]), _tuple(partials[count * problem.wants_dw :])
    places = inner, *strides[:2], dx_strides, table_strides
    args = x, dy, weights, cos, sin, outs, dw, db, call.rows, ctas, *places, cols, eps
    launches = [Launch(narrow.backward, grid, args, norm, tile, options)]
    for dtype in dict.fromkeys(each.dtype for each in sums):  # of weights and biases: one, or two
        of_it = [at for at, each in enumerate(sums) if each.dtype == dtype]
        last = partials_tile(cols, problem.acc_dtype.itemsize, dependent and 0 in of_it)
        picked = (tuple([some[at] for at in of_it]) for some in (partials, sums, ctas * problem.num_sums))
        grid, pdl = (triton.cdiv(cols, last.cols), len(of_it)), {"launch_pdl": True} if last.dependent else {}
        launches.append(Launch(finalizer.finalize_several, grid, (*picked, cols), None, last, pdl))
    workspace = Workspace(problem.acc_dtype, parts) if parts else None
    return Program(tuple(launches), first_partial, (), workspace, None, (cols,))


def _tuple(operands: Sequence[Address | None]) -> tuple | None:
    """As kernels take operands that are all there or all absent."""
    return None if not operands or operands[0] is None else tuple(operands)


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
def _tile(plan: HeadPlan, problem: HeadProblem, announces_end: bool = False) -> PartsTile:
    return PartsTile(
        plan.rows_per_tile,
        plan.chunk,
        plan.num_chunks,
        plan.num_warps,
        announces_end=announces_end,
        columns_of_chunk=plan.width if plan.width < plan.chunk else 0,
        num_parts=problem.count,
        num_levels=problem.levels,
        turned=problem.turned,
        pairs=problem.settings.interleaved,
        per_pair=problem.per_pair,
    )
