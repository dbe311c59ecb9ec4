"""What holds exactly, or by a bound that does not grow with the rows, in Triton's interpreter: rows of equal elements,
rows whose squares overflow, sums of one sign."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import FP32, FP64, make_case
from equal_rows import assert_exact, equal_rows
from test_multiwave import SMALL_GPU, run, run_backward, run_forward

from fusednorm.host import gpus
from fusednorm.planner import limits
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan
from fusednorm.tools.oracle import make_inputs

PLANS = {
    "rows in registers": lambda cols: MultiWavePlan(4, 1 << (cols // 2).bit_length(), 1 + (cols > 1), 4, 2, 128),
    "column tiles": lambda cols: ColumnTilePlan(2, 64, 4, 2, 256, 4),
}
EQUAL = [(FP32, 3), (FP64, 100)]  # products of 16 bits are exact here: the simulated GPU, which fuses, has their rows


@pytest.fixture(autouse=True)
def plans_for_a_small_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "spec_of", lambda device: SMALL_GPU)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype, cols", EQUAL, ids=str)
def test_equal_elements_are_normalized_exactly(plan, dtype, cols):
    case = make_case("layer", (3, cols), (dtype,) * 3)
    inputs = equal_rows(case)
    assert_exact(run(case, inputs, *2 * [plan(case.shape[1])]), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_thousand_float32_numbers_that_all_are_100000_1_are_exact(plan):
    case = make_case("layer", (2, 1000), (FP32,) * 3)
    inputs = replace(equal_rows(case), x=torch.full(case.shape, 100000.1))
    assert_exact(run(case, inputs, *2 * [plan(case.shape[1])]), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_rstd_of_a_row_whose_mean_is_10000_standard_deviations_loses_no_digits(plan):
    case = make_case("layer", (3, 1000), (FP32,) * 3)
    inputs = replace(make_inputs(case), x=1e4 + torch.randn(case.shape, generator=torch.Generator().manual_seed(0)))
    _, _, rstd = run_forward(case, inputs, plan(case.shape[1]))
    variance = inputs.x.double().var(1, correction=0, keepdim=True) + case.eps
    assert (rstd * variance.sqrt() - 1).abs().max() < 5e-7


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_layer_norm_of_a_row_whose_squares_overflow_is_nan_and_that_of_the_others_is_not(plan):
    case = make_case("layer", (3, 100), (FP32, None, FP32))
    inputs = make_inputs(case)
    inputs.x[1] *= 1e30
    y, mean, rstd = run_forward(case, inputs, plan(100))
    assert y[1].isnan().all() and rstd[1].isnan()
    assert y[[0, 2]].isfinite().all() and rstd[[0, 2]].isfinite().all() and mean.isfinite().all()


def test_a_sum_of_one_sign_loses_no_digits_to_the_number_of_rows(monkeypatch):
    """One CTA at a time runs. One that has all rows is off by 3.8e-6 of the sum."""
    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(SMALL_GPU, sm_count=1))
    rows = 400
    case = make_case("layer", (rows, 2), (FP32,) * 3)
    inputs = make_inputs(case)
    inputs.x.copy_(torch.tensor([-1.0, 1.0]))
    inputs.grad_out.fill_(0.3)
    _, dw, db = run_backward(case, inputs, torch.zeros(rows), torch.ones(rows), MultiWavePlan(1, 2, 1, 1, 1, 128))
    exact = rows * inputs.grad_out[0].double()
    for sums, want in ((db, exact), (dw, exact * inputs.x[0])):
        assert (sums / want - 1).abs().max() < limits.most_tiles_of_sum * 2**-26
