"""The C++ host side runs backwards that add a residual's gradient: those of compiled graphs."""

from __future__ import annotations

import functools

import formulas
import pytest
import torch
from cases import BF16, FP16, FP32, FP64, make_case
from norms import OPS, SHAPE, norms, statistics_of
from op_log import OpLog
from test_repeats import ALL, BF16_FP32, assert_launched_as_by_itself
from torch.testing import assert_close

from fusednorm.operands import operands_of
from fusednorm.planner import choice
from fusednorm.planner.device import H200
from fusednorm.planner.plan import MultiWavePlan, PipelinedPlan
from fusednorm.problem.calls import check_backward
from fusednorm.tools.oracle import make_inputs


def residual_of(inputs, dtype=None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(inputs.x.shape, generator=generator).to(dtype or inputs.x.dtype)


def backward_of(case, inputs, residual, mask=ALL, dx_dtype=None, weight_offset=0.0, **changes):
    """(op, operands): the case's backward with a residual's gradient; `changes` replaces tensors by name."""
    given = {"grad_out": inputs.grad_out, "x": inputs.x, "weight": inputs.weight} | changes
    grad_out, x, weight = given.values()
    mean, rstd = statistics_of(case, inputs)
    if case.norm == "layer":
        arguments = grad_out, x, case.normalized_shape, mean, rstd, weight, inputs.bias, residual, mask
    else:
        arguments = grad_out, x, case.normalized_shape, rstd, weight, inputs.bias, residual, mask
    name = f"{case.norm}_norm_bwd_residual"
    settings = {"dx_dtype": dx_dtype, "weight_offset": weight_offset}
    return functools.partial(getattr(OPS, name), *arguments, **settings), operands_of(name, arguments, settings)


def in_float64(operands):
    """(dx, dw, db) of the operands by the formula in float64, rounded to the dtypes of the outputs."""
    *exact, residual = [each if each is None else each.double() for each in operands.tensors]
    exact.insert(2, operands.normalized_shape)
    outputs = formulas.norm_backward(*exact, operands.output_mask, residual, weight_offset=operands.weight_offset)
    dtypes = operands.dx_dtype or operands.x.dtype, operands.weight.dtype, getattr(operands.bias, "dtype", None)
    return [each if each is None else each.to(dtype) for each, dtype in zip(outputs, dtypes, strict=True)]


def assert_right(operands, outputs) -> None:
    for got, want in zip(outputs, in_float64(operands), strict=True):
        assert got is None and want is None or got.dtype == want.dtype
        assert_close(got, want, atol=1e-3, rtol=1e-2 if want is not None and want.dtype == BF16 else 1e-3)


@norms
@pytest.mark.parametrize(
    "plan, shape, dtypes, residual_dtype, dx_dtype",
    [
        (PipelinedPlan, (16, 12288), BF16_FP32, None, None),
        (PipelinedPlan, (16, 12288), BF16_FP32, FP32, FP32),
        (MultiWavePlan, (4, 16, 1000), (BF16, BF16, FP32), None, None),
        (MultiWavePlan, SHAPE, (FP16, FP16, FP16), FP64, FP16),
    ],
    ids=str,
)
def test_the_driver_gets_what_python_would_launch(norm, plan, shape, dtypes, residual_dtype, dx_dtype, gpu):
    case = make_case(norm, shape, dtypes)
    op, _ = backward_of(case, inputs := make_inputs(case), residual_of(inputs, residual_dtype), dx_dtype=dx_dtype)
    op()
    inputs = make_inputs(case, seed=1)
    op, operands = backward_of(case, inputs, residual_of(inputs, residual_dtype), dx_dtype=dx_dtype)
    with gpu.repeating():
        outputs = op()
    assert_right(operands, outputs)
    call = check_backward(operands)
    assert isinstance(choice.choose(call.problem, call.rows, H200), plan)
    assert_launched_as_by_itself(operands, outputs, gpu.launched)


@norms
def test_any_number_of_rows_is_repeated(norm, gpu):
    for rows in (20, 1, 7, 20):
        case = make_case(norm, (rows, 40), (FP32, FP32, FP32))
        inputs = make_inputs(case, seed=rows)
        op, operands = backward_of(case, inputs, residual_of(inputs))
        asked = len(gpu.python_calls)
        assert_right(operands, op())
        if rows != 20:
            assert gpu.python_calls[asked:] == []


@pytest.fixture
def known(gpu):
    """(case, inputs) of a backward with a residual's gradient that the C++ host side repeats from now on."""
    case = make_case("layer", SHAPE, (FP32, FP32, FP32))
    inputs = make_inputs(case)
    op, _ = backward_of(case, inputs, residual_of(inputs))
    op()
    with gpu.repeating():
        op()
    gpu.remembers = False
    return case, inputs


def others(inputs):
    residual = residual_of(inputs)
    yield "residual_grad: none", {"residual": None}
    yield "residual_grad: its dtype", {"residual": residual.bfloat16()}
    yield "residual_grad: its alignment", {"residual": torch.cat([residual.flatten()] * 2)[1:241].view(SHAPE)}
    yield "dx_dtype", {"residual": residual, "dx_dtype": FP64}
    yield "weight_offset", {"residual": residual, "weight_offset": 1.0}
    yield "output_mask", {"residual": residual, "mask": (True, False, True)}


def test_a_call_that_looks_different_in_anything_goes_to_python(known, gpu):
    case, inputs = known
    for name, changes in others(inputs):
        op, operands = backward_of(case, inputs, **changes)
        try:
            with gpu.going_to_python("backward"):
                outputs = op()
        except AssertionError as error:
            raise AssertionError(f"another {name}: {error}") from error
        assert_right(operands, outputs)


def test_what_this_op_knows_is_not_taken_for_the_op_without_a_residual(known, gpu):
    case, inputs = known
    mean, rstd = statistics_of(case, inputs)
    with gpu.going_to_python("backward"):
        OPS.layer_norm_bwd(inputs.grad_out, inputs.x, [40], mean, rstd, inputs.weight, inputs.bias)


def test_rows_that_do_not_lie_side_by_side_are_copied_and_right(gpu):
    case = make_case("rms", SHAPE, (FP32, FP32, FP32))
    inputs = make_inputs(case)
    strided = torch.randn(SHAPE[0], 48)[:, :40]
    for context in (gpu.going_to_python("backward"), gpu.repeating()):
        op, operands = backward_of(case, inputs, strided)
        with context:
            assert_right(operands, op())


def test_where_autograd_records_the_op_is_differentiable_in_the_residuals_gradient(known):
    case, inputs = known
    residual = residual_of(inputs).requires_grad_()
    op, operands = backward_of(case, inputs, residual)
    dx, *_ = op()
    assert_right(operands, (dx.detach(), *_))
    ones = torch.ones_like(dx)
    (got,) = torch.autograd.grad(dx, residual, ones)
    assert_close(got, ones)


def test_dispatch_modes_see_the_op(known):
    op, _ = backward_of(known[0], known[1], residual_of(known[1]))
    with OpLog() as log:
        op()
    assert [name for name in log.names if "fusednorm" in name] == ["fusednorm.layer_norm_bwd_residual.default"]
