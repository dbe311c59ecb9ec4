"""fusednorm.tools.oracle accepts right outputs, and rejects each kind of error that it must find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusednorm.tools import oracle
from fusednorm.tools.oracle import (
    Case,
    Inputs,
    Outputs,
    assert_outputs_close,
    exact,
    make_inputs,
    relative_error,
    stock,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LAYER = Case("layer", (64, 96), x_dtype=BF16, weight_dtype=BF16, bias_dtype=BF16)
RMS = replace(LAYER, norm="rms", bias_dtype=None)
NAMES = ("y", "mean", "rstd", "dx", "dweight", "dbias")


def composite(case: Case, inputs: Inputs) -> Outputs:
    """A second correct implementation: `stock` alone would only be measured by itself."""
    acc, rows, cols = case.acc_dtype, case.rows, case.cols
    x, dy = inputs.x.to(acc).reshape(rows, cols), inputs.grad_out.to(acc).reshape(rows, cols)
    weight = torch.ones(cols, dtype=acc) if inputs.weight is None else inputs.weight.to(acc).reshape(cols)
    mean = x.mean(1, keepdim=True) if case.norm == "layer" else None
    deviation = x if mean is None else x - mean
    rstd = torch.rsqrt(deviation.square().mean(1, keepdim=True) + case.resolved_eps)
    x_hat, wdy = deviation * rstd, dy * weight
    y = x_hat * weight if inputs.bias is None else x_hat * weight + inputs.bias.to(acc).reshape(cols)
    dx = wdy - x_hat * (wdy * x_hat).mean(1, keepdim=True)
    dx = (dx if mean is None else dx - wdy.mean(1, keepdim=True)) * rstd
    columns = {"dweight": (dy * x_hat, inputs.weight), "dbias": (dy, inputs.bias)}
    sums = {n: t.sum(0).to(p.dtype).reshape(p.shape) for n, (t, p) in columns.items() if p is not None}
    y, dx = (t.to(case.x_dtype).reshape(case.shape) for t in (y, dx))
    mean, rstd = (None if t is None else t.reshape(case.stats_shape) for t in (mean, rstd))
    return Outputs(y, mean, rstd, dx, **sums)


def spoil(outputs: Outputs, name: str, change) -> Outputs:
    tensor = getattr(outputs, name).clone()
    return replace(outputs, **{name: change(tensor)})


def set_at(index, value=None):
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = tensor[index] * 1.05 if value is None else value
        return tensor

    return change


SHAPES = [(216, 1), (216, 2), (216, 3), (216, 32), (64, 1987), (4, 16384), (2, 3, 5, 7), (4096, 8)]
DTYPES = [  # of x, the parameters and grad_out
    (BF16, BF16, BF16),
    (BF16, FP32, BF16),
    (FP16, FP16, FP16),
    (FP32, FP32, FP32),
    (FP32, BF16, FP16),
    (FP64, FP64, FP64),
    (FP32, None, FP32),
]


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(d).removeprefix("torch.") for d in dtypes))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_honest_implementations_pass(norm, shape, dtypes):
    x, param, grad = dtypes
    bias = param if norm == "layer" else None
    case = Case(norm, shape, 2 if len(shape) == 4 else 1, x, param, bias, grad)
    inputs = make_inputs(case)
    assert_outputs_close(composite(case, inputs), case, inputs)
    assert_outputs_close(stock(case, inputs), case, inputs)


@pytest.mark.parametrize("case", [LAYER, replace(LAYER, x_dtype=FP32), RMS], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_element_is_found_in_every_output(case, name):
    inputs = make_inputs(case)
    right = composite(case, inputs)
    if getattr(right, name) is None:
        pytest.skip(f"{case.norm} has no {name}")
    largest = getattr(right, name).abs().argmax()
    index = tuple(torch.unravel_index(largest, getattr(right, name).shape))
    with pytest.raises(AssertionError, match=f"{name} has an element beyond its bound"):
        assert_outputs_close(spoil(right, name, set_at(index)), case, inputs)


@pytest.mark.parametrize("name", ["y", "dx"])
@pytest.mark.parametrize("index", [(37,), (slice(None), 41)], ids=["row", "column"])
def test_one_wrong_row_or_column_among_thousands_is_found(name, index):
    case = replace(RMS, shape=(2048, 64))
    inputs = make_inputs(case)
    with pytest.raises(AssertionError, match=f"{name} has an element beyond its bound"):
        assert_outputs_close(spoil(composite(case, inputs), name, set_at(index)), case, inputs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
def test_zeros_and_garbage_are_found(name, value):
    inputs = make_inputs(LAYER)
    with pytest.raises(AssertionError, match=name):
        assert_outputs_close(spoil(composite(LAYER, inputs), name, set_at(..., value)), LAYER, inputs)


def test_faults_are_found_by_python_that_leaves_out_assert_statements():
    optimized = {"__name__": oracle.__name__, "__package__": oracle.__package__}
    exec(compile(Path(oracle.__file__).read_text(), oracle.__file__, "exec", optimize=1), optimized)
    inputs = make_inputs(LAYER)
    right, transposed = composite(LAYER, inputs), lambda y: y.mT.contiguous().mT
    for change in (lambda y: y.float(), lambda y: y[1:], transposed, lambda y: y * 2, torch.zeros_like):
        with pytest.raises(AssertionError, match="y "):
            optimized["assert_outputs_close"](spoil(right, "y", change), LAYER, inputs)


def test_a_row_left_out_of_a_column_sum_is_found():
    case = replace(LAYER, shape=(4096, 32), weight_dtype=FP32, bias_dtype=FP32)
    inputs = make_inputs(case)
    right = composite(case, inputs)
    short = right.dbias - inputs.grad_out[-1].float()
    with pytest.raises(AssertionError, match="dbias has an element beyond its bound"):
        assert_outputs_close(replace(right, dbias=short), case, inputs)


def test_column_sums_kept_in_16_bits_are_found():
    case = replace(LAYER, shape=(4096, 32))
    inputs = make_inputs(case)
    rounded = inputs.grad_out.view(64, 64, 32).float().sum(1).bfloat16().float().sum(0).bfloat16()
    with pytest.raises(AssertionError, match="dbias has an element beyond its bound"):
        assert_outputs_close(Outputs(dbias=rounded), case, inputs)


def test_a_small_error_everywhere_fails_as_a_whole_where_every_element_is_within_its_bound():
    case = replace(LAYER, x_dtype=FP32, weight_dtype=FP32, bias_dtype=FP32)
    inputs = make_inputs(case)
    right = composite(case, inputs)
    with pytest.raises(AssertionError, match="y has L2 error"):
        assert_outputs_close(replace(right, y=right.y * (1 + 8 * torch.finfo(FP32).eps)), case, inputs)


def test_statistics_of_a_row_far_from_zero_must_be_those_of_two_passes():
    case = replace(LAYER, x_dtype=FP32)
    drawn = make_inputs(case)
    inputs = replace(drawn, x=drawn.x + 1e4)
    right = composite(case, inputs)
    assert_outputs_close(right, case, inputs)
    one_pass = torch.rsqrt(inputs.x.square().mean(1, keepdim=True) - inputs.x.mean(1, keepdim=True).square() + case.eps)
    with pytest.raises(AssertionError, match="rstd"):
        assert_outputs_close(replace(right, rstd=one_pass), case, inputs)


def test_dtype_shape_contiguity_and_absence_are_held():
    inputs = make_inputs(RMS)
    right = composite(RMS, inputs)
    wrong = {
        "y must be torch.bfloat16": replace(right, y=right.y.float()),
        "rstd must be torch.float32": replace(right, rstd=right.rstd.bfloat16()),
        r"rstd must be \(64, 1\)": replace(right, rstd=right.rstd.flatten()),
        "dx must be contiguous": replace(right, dx=right.dx.t().contiguous().t()),
        "mean must be None": replace(right, mean=right.rstd),
    }
    for message, outputs in wrong.items():
        with pytest.raises(AssertionError, match=message):
            assert_outputs_close(outputs, RMS, inputs)


def test_nan_is_right_where_the_oracle_says_nan():
    case = replace(RMS, eps=-100.0)
    inputs = make_inputs(case)
    assert exact(case, inputs).y.isnan().all()
    assert_outputs_close(composite(case, inputs), case, inputs)


def test_oracle_leaves_inputs_alone_and_is_computed_once():
    inputs = make_inputs(LAYER)
    before = inputs.x.clone()
    assert exact(LAYER, inputs) is exact(LAYER, inputs)
    assert torch.equal(inputs.x, before) and not inputs.x.requires_grad
    assert exact(LAYER, replace(inputs, x=inputs.x * 2)) is not exact(LAYER, inputs)


def test_inputs_follow_the_seed_and_the_case():
    case = Case("layer", (3, 4, 5), 2, BF16, FP32, None, FP16, eps=None)
    inputs, again, other = make_inputs(case), make_inputs(case), make_inputs(case, seed=1)
    assert torch.equal(inputs.x, again.x) and not torch.equal(inputs.x, other.x)
    assert (inputs.x.dtype, inputs.weight.dtype, inputs.bias, inputs.grad_out.dtype) == (BF16, FP32, None, FP16)
    assert inputs.weight.shape == case.normalized_shape == (4, 5)
    assert (case.stats_shape, case.rows, case.cols) == ((3, 1, 1), 3, 20)
    assert str(case) == "layer-3x4x5-bf16-w_fp32-b_none-dy_fp16-last2-eps_None"


def test_relative_error_is_zero_for_equal_and_one_for_absent():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0
    assert relative_error(torch.zeros(4), ones) == 1
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0
