"""Norms of heads on the GPU: from operands to outputs, by one launch, or by two where sums over rows are wanted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..forms import FormSpec
from ..host import fallback, gpus, launcher
from ..host.fallback import BuildFailed
from ..host.gpus import current
from ..host.key import PLAIN_TYPES
from ..host.launch import OLDEST_DEPENDENT_ARCH, partials_tile
from ..host.launcher import Launch
from ..host.program import Address, Bound, OnTensors, Part, Program, Workspace
from ..kernels import finalizer, narrow
from ..kernels.config import Norm, PartsTile
from ..kernels.rowmath import TURN, form_of
from ..planner.device import DeviceSpec
from ..planner.norm_problem import ALIGNMENT
from ..problem import require_memory, resolve_eps
from ..settings import margin
from . import plan as head_plan
from .call import HeadCall, HeadProblem, alike, describe
from .plan import AtenNorm, HeadPlan
from .problem import Heads

KEPT_CALLS = 4096  # if there would be more, all are forgotten


class Repeat(NamedTuple):
    """What calls with one key do: the shapes and dtypes of what they allocate; and each program, with the places of its
    tensors among the operands and, behind these, what is allocated. None stands for an absent tensor."""

    outs: tuple[tuple[torch.Size, torch.dtype], ...]
    programs: tuple[tuple[Bound, tuple[int | None, ...]], ...]


_repeats: dict[tuple, Repeat] = {}


def repeated(heads: Heads, grads: Sequence[Tensor] = (), mask: Sequence[bool] = (), dx: Sequence[Tensor] = ()):
    """What `forward` or `backward` returns, if such a call has run before, without checks; else None."""
    repeat = _repeats.get(_key(heads, grads, mask, dx)) if _repeats else None
    if repeat is None:
        return None
    device = heads.inputs[0].device
    outs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in repeat.outs]
    addresses = [0 if each is None else each.data_ptr() for each in (*_operands(heads, grads, dx), *outs)]
    for bound, places in repeat.programs:
        if bound.launch([0 if at is None else addresses[at] for at in places]) is None:
            return None
    return [*dx, *outs]


def forget() -> None:
    """Drop all repeats."""
    _repeats.clear()


def _operands(heads: Heads, grads: Sequence[Tensor], dx: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return *heads.tensors, heads.cos, heads.sin, *grads, *dx


def _key(heads: Heads, grads: Sequence[Tensor], mask: Sequence[bool], dx: Sequence[Tensor]) -> tuple | None:
    """Everything that checks, plans and builds depend on. None for tensors that are not plain."""
    key: list[Any] = [len(heads.inputs), len(grads), tuple(mask), heads.eps, heads.settings, margin.sms]
    try:
        for each in _operands(heads, grads, dx):
            if each is None:
                key.append(None)
                continue
            address = each.data_ptr()
            if type(each) not in PLAIN_TYPES or each.is_neg() or not address:
                return None
            key += each.shape, each.stride(), each.dtype, each.get_device(), address % ALIGNMENT
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without memory or strides
        return None
    tables_have_grad = heads.cos is not None and (heads.cos.requires_grad or heads.sin.requires_grad)
    return None if tables_have_grad else tuple(key)


def forward(heads: Heads) -> list[Tensor] | None:
    """The outputs. None if the planner leaves a call to ATen."""
    outs = [torch.empty(x.shape, dtype=heads.output_dtype(at), device=x.device) for at, x in enumerate(heads.inputs)]
    return outs if _in_groups(heads, (), (), (), outs, ()) else None


def backward(
    heads: Heads, grads: Sequence[Tensor], mask: Sequence[bool], dx: Sequence[Tensor] = ()
) -> list[Tensor] | None:
    """The gradients that the mask wants, those of the inputs in `dx` if it is given. A gradient more than there are
    inputs is copied to the last of `dx`. None if the planner leaves a call to ATen."""
    count = len(heads.inputs)
    made = [torch.empty(each.shape, dtype=each.dtype, device=each.device)
            if each is not None and want and not (dx and at < count) else None
            for at, (each, want) in enumerate(zip(heads.tensors, mask, strict=True))]  # fmt: skip
    if not _in_groups(heads, grads, mask, dx, dx[:count] or made[:count], made[count:]):
        return None
    return [*dx, *(each for each in made if each is not None)]


def _in_groups(heads: Heads, grads, mask, dx, rows_out, sums) -> bool:
    """Fill the outputs by one launch for each group of alike tensors, and keep it to be repeated. Whether kernels of
    ours did it."""
    count, ran, copy = len(heads.inputs), [], (*grads[len(heads.inputs) :], *dx[len(heads.inputs) :])
    more = [each for each in (rows_out, grads, sums[:count], sums[count:]) if each]
    for at, which in enumerate(alike(heads, *more)):
        done = _group(heads, grads, rows_out, sums, which, () if at else copy)
        if done is None:
            return False
        ran.append(done)
    made = [each for each in (*(() if dx else rows_out), *sums) if each is not None]
    _keep(heads, grads, mask, dx, made, ran)
    return True


def _keep(heads: Heads, grads, mask, dx, made: list[Tensor], ran: list[tuple[Bound | None, Sequence]]) -> None:
    """Keep what ran for calls with the same key, if no tensor was copied and Triton need not launch it."""
    key = _key(heads, grads, mask, dx)
    of = {id(each): at for at, each in enumerate((*_operands(heads, grads, dx), *made)) if each is not None}
    places = [[each if each is None else of.get(id(each), -1) for each in tensors] for _, tensors in ran]
    if key is None or any(bound is None for bound, _ in ran) or any(-1 in each for each in places):
        return
    if len(_repeats) >= KEPT_CALLS:
        _repeats.clear()
    programs = tuple((bound, tuple(each)) for (bound, _), each in zip(ran, places, strict=True))
    _repeats[key] = Repeat(tuple((each.shape, each.dtype) for each in made), programs)


def _group(
    heads: Heads, grads, rows_out, sums, which: list[int], copy: Sequence[Tensor]
) -> tuple[Bound | None, Sequence] | None:
    """The program that ran, and its tensors. None if the planner leaves the call to ATen."""
    count = len(heads.inputs)
    sums = [sums[kind * count + at] for kind in (0, 1) for at in which] if sums else []
    grads = [grads[at] for at in which] if grads else []
    call = describe(heads.some(which), grads, [rows_out[at] for at in which], sums, copy)
    if call is None:
        return None
    device = call.heads.inputs[0].device
    require_memory("head_norm", call.tensors)
    spec = gpus.spec_of(device)
    plan = head_plan.choose(call.problem, spec)
    if isinstance(plan, AtenNorm) or fallback.has_failed(plan, call.problem, spec):
        return None
    try:
        with current(device):
            shape = call.heads.inputs[0].shape
            return launcher.run(program_of(call, plan, spec), call.tensors, shape, call.rows[0])[1], call.tensors
    except BuildFailed as failed:
        fallback.remember(plan, call.problem, spec, str(failed))
        return None


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
    counts = count, len(call.grads), count, count, 2, count, len(call.sums), len(call.copy)
    x, dy, weights, biases, (cos, sin), outs, sums, copy = (list(itertools.islice(given, each)) for each in counts)
    x, dy, weights, biases, outs = map(_tuple, (x, dy, weights, biases, outs))
    first_partial = sum(counts)
    ctas = head_plan.ctas_of(plan, problem, call.rows, spec)
    eps = resolve_eps(call.heads.eps, problem.acc_dtype)
    levels, strides = range(problem.levels), []
    for which in range(len(call.places[0].strides)):
        strides.append(tuple(each.strides[which][level] for level in levels for each in call.places))
    inner = _odd(each.sizes[level] for level in levels[:-1] for each in call.places) or None
    table_strides = strides.pop() if cos else None
    norm, options = _norm(problem), {"maxnreg": plan.max_registers}
    grid = (sum(ctas),)
    if problem.direction == "forward":
        tile = _tile(plan, problem)
        numbers = _odd(call.rows), _odd(ctas), inner
        args = x, weights, biases, cos, sin, outs, *numbers, *strides, table_strides, cols, eps
        launch = Launch(narrow.forward, grid, args, norm, tile, options)
        return Program((launch,), first_partial, (), None, None, (cols,))
    dependent = problem.num_sums > 0 and spec.arch >= OLDEST_DEPENDENT_ARCH
    tile, dx_strides = _tile(plan, problem, dependent), strides[2] if problem.wants_dx else None
    parts = tuple(Part(beside=of * cols) for _ in range(problem.num_sums) for of in ctas)
    partials = [Address(first_partial + at, problem.acc_dtype) for at in range(len(parts))]
    dw, db = _tuple(partials[: count * problem.wants_dw]), _tuple(partials[count * problem.wants_dw :])
    places = inner, *strides[:2], dx_strides, table_strides
    copied, constants = (None,) * 5, {}
    if call.copy_place:
        inner, both = call.copy_place
        copied = tuple(copy), _odd([call.copy[0].numel() // cols]), _odd(inner) or None, *both
        constants = {"copy_tile": _copy_tile(plan, cols, copy[1].dtype.itemsize, len(both[0]))}
    args = x, dy, weights, cos, sin, outs, dw, db, _odd(call.rows), _odd(ctas), *places, *copied, cols, eps
    launches = [Launch(narrow.backward, grid, args, norm, tile, options, constants)]
    for dtype in dict.fromkeys(each.dtype for each in sums):  # of weights and biases: one, or two
        of_it = [at for at, each in enumerate(sums) if each.dtype == dtype]
        last = partials_tile(cols, problem.acc_dtype.itemsize, dependent and 0 in of_it)
        picked = (tuple([some[at] for at in of_it]) for some in (partials, sums, _odd(ctas * problem.num_sums)))
        grid, pdl = (triton.cdiv(cols, last.cols), len(of_it)), {"launch_pdl": True} if last.dependent else {}
        launches.append(Launch(finalizer.finalize_several, grid, (*picked, cols), None, last, pdl))
    workspace = Workspace(problem.acc_dtype, parts) if parts else None
    return Program(tuple(launches), first_partial, (), workspace, None, (cols,))


def _odd(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers as kernels take them in a tuple: see loads.number."""
    return tuple([2 * each + 1 for each in numbers])


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


@functools.cache
def _copy_tile(plan: HeadPlan, cols: int, itemsize: int, levels: int) -> PartsTile:
    """How a backward of this plan copies rows."""
    chunk, width, num_chunks = head_plan.chunks_of(cols, itemsize)
    rows = head_plan.rows_of_tile(32 * plan.num_warps, head_plan.COPIED_BYTES, itemsize, chunk, num_chunks)
    padded = width if width < chunk else 0
    return PartsTile(rows, chunk, num_chunks, plan.num_warps, columns_of_chunk=padded, num_levels=levels)
