"""Problems and devices for the tests of the planner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis
import torch

from fusednorm.dtypes import DTYPES, accumulation_dtype
from fusednorm.host.gpus import with_installed_triton
from fusednorm.operands import OPS, WAYS, BackwardOperands, ForwardOperands, Role, operands_of
from fusednorm.planner.device import A100, B200, GB10, GB300, H200, RTX_3090, RTX_4090, RTX_5090, DeviceSpec
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import Plan, grid_of
from fusednorm.problem.calls import Added, check, check_backward, check_forward
from fusednorm.problem.rows import RowView, Sharing

ARCHITECTURES = {spec.arch: with_installed_triton(spec) for spec in (A100, H200, B200, GB300, RTX_5090)}
# Devices whose resources lie between those above, or equal them: only long commands try them, not the tests.
BETWEEN = {spec.arch: with_installed_triton(spec) for spec in (RTX_3090, RTX_4090, GB10)}
EVERY_ARCHITECTURE = dict(sorted((ARCHITECTURES | BETWEEN).items()))


# Fields of a problem.
OF_FORM = "form", "rows_in", "names_in", "tables", "rows_out", "stored", "y_dtype", "nested_rows", "beside"
OF_SAMPLES = "by_key", "by_sample", "sample_divisor", "shared", "names_shared", "summed", "sums_out", "scattered"
SAMPLE_ROWS = 1024


def given(*strategies):
    """hypothesis.given without a limit of time: the first plan of a problem takes tens of milliseconds."""
    return lambda test: hypothesis.settings(deadline=None)(hypothesis.given(*strategies)(test))


def make_problem(
    norm="layer", cols=4096, dtype="bf16", weight="", direction="backward", grad="", **changes
) -> NormProblem:
    """A problem with contiguous rows and every gradient wanted.

    `weight` is the dtype of weight and bias, "none" if there are neither. An empty `weight` or `grad` stands for the
    dtype of x.
    """
    backward, layer = direction == "backward", norm == "layer"
    x_dtype = DTYPES[dtype]
    weight_dtype = None if weight == "none" else DTYPES[weight or dtype]
    grad_dtype = DTYPES[grad or dtype] if backward else None
    fields = {
        "wants_dx": backward,
        "wants_dw": backward and weight_dtype is not None,
        "wants_db": backward and layer and weight_dtype is not None,
        "tma_aligned": all(cols * each.itemsize % 16 == 0 for each in (x_dtype, grad_dtype or x_dtype)),
    }
    bias_dtype = weight_dtype if layer else None
    return NormProblem(norm, direction, cols, x_dtype, weight_dtype, bias_dtype, grad_dtype, **fields | changes)


def make_form(
    op: str, cols: int, dtype: str, weight="", other="", modulation="", by_sample=True, is_stream=False, **settings
) -> NormProblem:
    """The problem of an op of a form with contiguous rows, all of one sample, and every gradient wanted. `other` is the
    dtype of a residual or a gate, an empty one that of x. A backward may get the gradient of a stream. Settings may
    name tensors that are absent."""
    sizes, x_dtype = (1, SAMPLE_ROWS), DTYPES[dtype]
    weight_dtype = None if weight == "none" else DTYPES[weight or dtype]
    found: dict[str, Any] = {"normalized_shape": (cols,), "eps": 1e-5, "y_dtype": x_dtype}
    kinds = {
        Role.ROWS: ((*sizes, cols), x_dtype),
        Role.PACKED_ROWS: ((*sizes, cols), x_dtype if is_stream else None),
        Role.PARAMETER: ((cols,), weight_dtype),
        Role.STATISTIC: ((*sizes, 1), accumulation_dtype(x_dtype)),
        Role.MODULATION: ((1, 1 if by_sample else SAMPLE_ROWS, cols), DTYPES[modulation or dtype]),
    }
    for slot in OPS[op].inputs:
        shape, kind = kinds.get(slot.role, ((), None))
        if slot.name in ("residual", "gate") and slot.role is Role.ROWS:
            kind = DTYPES[other or dtype]
        if kind and not (slot.name.endswith("bias") and OPS[op].norm == "rms"):
            found[slot.name] = torch.empty(shape, dtype=kind, device="meta")
    return check(operands_of(op, (), found | settings)).problem


def make_sum(norm="layer", cols=4096, dtype="bf16", residual="", finish="", **steps) -> NormProblem:
    """A forward with a residual of dtype `residual` (an empty one: that of x), which is added to x, and the sum is an
    output; or else (finish="add") to y."""
    op = f"{norm}_norm_fwd_{'plus_residual' if finish else 'of_sum'}"
    return make_form(op, cols, dtype, other=residual, **steps)


def make_again(norm="layer", cols=4096, dtype="bf16", weight="", residual="", **settings) -> NormProblem:
    """The forward of a norm behind a layer and the next one."""
    return make_form(f"{norm}_norm_fwd_plus_residual_norm", cols, dtype, weight, residual, **settings)


def make_modulated(
    norm="layer", cols=4096, dtype="bf16", modulation="", direction="forward", by_sample=True
) -> NormProblem:
    """A norm without parameters, with a scale and a shift for each sample, or else (a backward) for each row, of dtype
    `modulation` (an empty one: that of x)."""
    op, absent = f"{norm}_norm_{WAYS[direction]}_modulated", {"branch": None, "gate": None}
    return make_form(op, cols, dtype, "none", modulation=modulation, by_sample=by_sample, **absent)


def make_gated_sum(
    norm="layer", cols=4096, dtype="bf16", modulation="", by_sample=True, weight="none", **changes
) -> NormProblem:
    """The backward of a norm of residual + gate * x with a scale, a shift and a gate for each sample, or else for each
    row, and the gradient of the sum."""
    of = {"modulation": modulation, "by_sample": by_sample, "is_stream": True}
    return replace(make_form(f"{norm}_norm_bwd_modulated", cols, dtype, weight, **of), **changes)


def make_gated(norm="rms", cols=128, dtype="bf16", gate="", direction="backward", after=True, **changes) -> NormProblem:
    """A norm that is multiplied by a gate after it, or else before."""
    op = f"{norm}_norm_{WAYS[direction]}_{'times_gate' if after else 'of_gated'}"
    return replace(make_form(op, cols, dtype, other=gate), **changes)


def meta_call(problem: NormProblem, rows: int = 4096, device: str = "meta"):
    """A call, on meta tensors or those of another device, whose problem is `problem` (contiguous rows)."""
    def meta(shape, dtype):
        return None if dtype is None else torch.empty(shape, dtype=dtype, device=device)

    shape = (problem.cols,)
    x, weight, bias = (
        meta((rows, *shape), problem.x_dtype),
        meta(shape, problem.weight_dtype),
        meta(shape, problem.bias_dtype),
    )
    if problem.direction == "forward":
        call = check_forward(ForwardOperands(problem.norm, x, shape, weight, bias, 1e-5))
    else:
        grad, rstd = meta((rows, *shape), problem.grad_dtype), meta((rows,), problem.acc_dtype)
        mean = rstd if problem.norm == "layer" else None
        mask = (problem.wants_dx, problem.wants_dw, problem.wants_db)
        residual = meta((rows, *shape), problem.residual_dtype)
        call = check_backward(BackwardOperands(problem.norm, grad, x, shape, mean, rstd, weight, bias, mask, residual))
    of_rows, of_samples = (Role.ROWS, Sharing()), (Role.MODULATION, Sharing(SAMPLE_ROWS, (True,), 1))
    of_samples = (Role.TABLE, Sharing(0)) if problem.by_key else of_samples

    def read(name: str, dtype: torch.dtype, kind: tuple[Role, Sharing]) -> Added:
        is_table = name in problem.tables or (problem.by_key and name in problem.names_shared)
        view = RowView(meta((rows, *shape), dtype), 1, problem.cols, 0, rows if is_table else None)
        return Added(name, kind[0], view, kind[1])

    added = [read(*each, of_rows) for each in zip(problem.names_in, problem.rows_in, strict=True)]
    added += [Added("row_index", Role.INDEX, meta((rows,), torch.int64))] if problem.tables or problem.by_key else []
    added += [read(*each, of_samples) for each in zip(problem.names_shared, problem.shared, strict=True)]
    added += [Added(name, Role.PARAMETER, meta(shape, dtype)) for name, dtype in problem.beside]
    forward = problem.direction == "forward"
    stored = range(1, 1 + len(problem.rows_out)) if forward else [at for at in problem.stored if at]
    kinds = {at: (dtype, of_rows) for at, dtype in zip(stored, problem.rows_out, strict=True)}
    kinds |= {at: (dtype, of_samples) for at, dtype in zip(problem.summed, problem.sums_out, strict=True)}
    written = [kinds.get(at, (None, of_rows)) for at in range(1, 1 + max(kinds, default=0))]
    outputs = [Added(f"out_{at}", role, dtype, sharing) for at, (dtype, (role, sharing)) in enumerate(written)]
    statistics = ("next_mean", "next_rstd")[problem.norm == "rms" :] if problem.form.again else ()
    outputs += [Added(name, Role.STATISTIC, problem.acc_dtype) for name in statistics]
    of_form = {name: getattr(problem, name) for name in OF_FORM + OF_SAMPLES}
    call = call._replace(
        problem=replace(call.problem, **of_form), added=tuple(added), added_outputs=tuple(outputs),
        **{"bias": bias} if problem.direction == "backward" and problem.reads_bias else {},
        **{"sample_rows": SAMPLE_ROWS} if (problem.shared or problem.by_sample) and not problem.by_key else {},
    )  # fmt: skip
    assert call.problem == problem
    return call


def num_ctas(plan: Plan, rows: int, cols: int, device: DeviceSpec, float32_sums: bool = False) -> int:
    """Along the rows, of a backward by this plan."""
    return grid_of(plan, make_problem(cols=cols, weight="fp32" if float32_sums else ""), device).ctas(rows)


def sweep(widths, dtypes=("bf16", "fp32", "fp64"), weights=("",)):
    """Problems of each width, norm, direction and dtype."""
    for cols, norm, direction, dtype, weight in itertools.product(
        widths, ("layer", "rms"), ("backward", "forward"), dtypes, weights
    ):
        yield make_problem(norm, cols, dtype, weight, direction)
