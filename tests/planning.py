"""Problems and devices for the tests of the planner."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis
import torch

from fusednorm.forms import FormSpec
from fusednorm.host.gpus import with_installed_triton
from fusednorm.planner.device import A100, B200, GB10, GB300, H200, RTX_3090, RTX_4090, RTX_5090
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.tools.explanation import DTYPES

ARCHITECTURES = {spec.arch: with_installed_triton(spec) for spec in (A100, H200, B200, GB300, RTX_5090)}
# Devices whose resources lie between those above, or equal them: only long commands try them, not the tests.
BETWEEN = {spec.arch: with_installed_triton(spec) for spec in (RTX_3090, RTX_4090, GB10)}
EVERY_ARCHITECTURE = dict(sorted((ARCHITECTURES | BETWEEN).items()))


OF_FORM = "form", "rows_in", "names_in", "rows_out", "stored", "y_dtype", "nested_rows"  # fields of a problem


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


def make_sum(norm="layer", cols=4096, dtype="bf16", residual="", finish="", **steps) -> NormProblem:
    """A forward with a residual of dtype `residual` (an empty one: that of x), which is added to x, and the sum is an
    output; or else (finish="add") to y."""
    form = FormSpec(combine="" if finish else "add", finish=finish, **steps)
    rows = (DTYPES[residual or dtype],)
    of_form = {"form": form, "rows_in": rows, "names_in": ("residual",), "rows_out": rows[: form.rows_out]}
    return make_problem(norm, cols, dtype, direction="forward", **of_form)


def make_modulated(norm="layer", cols=4096, dtype="bf16", modulation="", **steps) -> NormProblem:
    """A forward without parameters, with a scale and a shift for each sample, of dtype `modulation` (an empty one: that
    of x)."""
    form, rows = FormSpec(modulate="one_plus", **steps), (DTYPES[modulation or dtype],) * 2
    of_form = {"form": form, "rows_in": rows, "names_in": ("scale", "shift"), "nested_rows": True}
    return make_problem(norm, cols, dtype, "none", direction="forward", **of_form)


def make_gated(norm="rms", cols=128, dtype="bf16", gate="", direction="backward", after=True, **changes) -> NormProblem:
    """A norm that is multiplied by a gate after it, or else before."""
    form = FormSpec(finish="gate") if after else FormSpec(combine="gate")
    rows, backward = (DTYPES[gate or dtype],), direction == "backward"
    of_form = {"form": form, "rows_in": rows, "names_in": ("gate",)}
    of_form |= {"rows_out": rows, "stored": (0, 1)} if backward else {}
    return make_problem(norm, cols, dtype, direction=direction, **of_form | changes)


def meta_call(problem: NormProblem, rows: int = 4096, device: str = "meta"):
    """A call, on meta tensors or those of another device, whose problem is `problem` (contiguous rows)."""
    from fusednorm.operands import BackwardOperands, ForwardOperands, Role
    from fusednorm.problem import Added, RowView, check_backward, check_forward

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
    pairs = zip(problem.names_in, problem.rows_in, strict=True)
    tensors = [(name, meta((rows, *shape), dtype)) for name, dtype in pairs]
    read = [Added(name, Role.ROWS, RowView(tensor, 1, problem.cols, 0)) for name, tensor in tensors]
    written = [Added(f"out_{at}", Role.ROWS, dtype) for at, dtype in enumerate(problem.rows_out)]
    of_form = {name: getattr(problem, name) for name in OF_FORM}
    call = call._replace(
        problem=replace(call.problem, **of_form), added=tuple(read), added_outputs=tuple(written),
        **{"bias": bias} if problem.direction == "backward" and problem.reads_bias else {},
    )  # fmt: skip
    assert call.problem == problem
    return call


def sweep(widths, dtypes=("bf16", "fp32", "fp64"), weights=("",)):
    """Problems of each width, norm, direction and dtype."""
    for cols, norm, direction, dtype, weight in itertools.product(
        widths, ("layer", "rms"), ("backward", "forward"), dtypes, weights
    ):
        yield make_problem(norm, cols, dtype, weight, direction)
