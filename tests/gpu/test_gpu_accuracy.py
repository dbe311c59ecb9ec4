"""The ops on CUDA against float64 autograd: widths, row counts and dtypes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from calls import assert_case_is_right, run, run_backward, skip_unless_memory
from cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    MIXED_DTYPES,
    NORMS,
    SAME_DTYPES,
    TROUBLED_ROWS,
    TROUBLED_WIDTHS,
    make_case,
    rotate,
)
from equal_rows import assert_exact, equal_rows

import fusednorm
from fusednorm.planner.plan import VARIANTS
from fusednorm.tools.oracle import Case, Inputs, make_inputs

pytestmark = pytest.mark.gpu

TROUBLED = [  # in every dtype, the norms in turn
    make_case(NORMS[(at + which) % 2], (TROUBLED_ROWS, cols), mix)
    for at, cols in enumerate(TROUBLED_WIDTHS)
    for which, mix in enumerate(SAME_DTYPES)
]

BATCHES = (16, 512, 2048, 8192)
HIDDEN_SIZES = (768, 1280, 1792, 2304, 2816, 3584, 4352, 5376, 6400, 7680, 9216, 11264, 13312, 15872, 18432, 20480)
WIDE_HIDDEN_SIZES = (25600, 32768, 36864, 49152)
BENCHMARKED = [
    *rotate(zip(itertools.cycle(BATCHES), HIDDEN_SIZES, strict=False), SAME_DTYPES[:3]),
    *rotate(zip((2048, 512, 16), WIDE_HIDDEN_SIZES, strict=False), SAME_DTYPES[:3]),
    *rotate([(16384, 1024), (16384, 4096), (16384, 36864), (8192, 73728)], [(BF16, BF16, BF16)]),
]

# Shapes from models on which automatic choices of schedules have failed.
MODELS = [
    make_case("rms", (1, 4096, 3072)),
    make_case("rms", (1, 4096, 3072), (BF16, FP32, BF16)),
    make_case("layer", (147456, 128)),
    *(make_case(norm, (14, 2048, 2048)) for norm in NORMS),
    make_case("layer", (1, 16384, 2560), (FP16, FP16, FP16)),
]

WIDEST = [make_case(norm, (37, 262144), mix) for norm, mix in itertools.product(NORMS, SAME_DTYPES)]

MIXED = [
    make_case(NORMS[(at + which) % 2], (300, cols), mix)
    for at, cols in enumerate((1000, 1536))
    for which, mix in enumerate(MIXED_DTYPES)
]

ODD = [
    make_case("layer", (513, 1), (BF16, FP32, BF16)),
    make_case("rms", (513, 2), (FP16, FP16, FP16)),
    make_case("layer", (5, 3, 7, 11), (BF16, FP32, BF16), normalized_ndim=2),
    make_case("layer", (1, 6, 1, 640), (BF16, FP32, BF16), normalized_ndim=2),
    make_case("rms", (6, 1, 1, 640), (FP32, FP32, FP32), normalized_ndim=3),
    make_case("layer", (640,), (FP32, FP32, FP32)),
    Case("layer", (300, 1536), x_dtype=BF16, weight_dtype=FP32),
    Case("layer", (300, 1536), x_dtype=BF16, bias_dtype=FP32),
    Case("rms", (300, 1536), x_dtype=BF16, weight_dtype=BF16, eps=None),
    Case("rms", (300, 1536), x_dtype=FP64, weight_dtype=FP64, eps=None),
    Case("layer", (300, 1536), x_dtype=FP32, weight_dtype=FP32, bias_dtype=FP32, eps=0.0),
    Case("layer", (300, 1536), x_dtype=FP64, weight_dtype=FP64, bias_dtype=FP64, eps=1e-12),
]


@pytest.mark.parametrize("case", TROUBLED, ids=str)
def test_widths_that_broke_others(case):
    assert_case_is_right(case)


@pytest.mark.parametrize("case", BENCHMARKED, ids=str)
def test_benchmarked_sizes(case):
    skip_unless_memory(1 + 20 * 8 * case.rows * case.cols / 2**30)  # the oracle and its bounds are in fp64
    assert_case_is_right(case)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_sizes_of_models(case):
    assert_case_is_right(case)


@pytest.mark.parametrize("case", WIDEST, ids=str)
def test_rows_too_wide_for_registers(case):
    assert_case_is_right(case)


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_mixed_dtypes(case):
    assert_case_is_right(case)


@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_shapes_and_parameters(case):
    assert_case_is_right(case)


# Few rows and many may run different kernels.
RAGGED_FEW, RAGGED_MANY = (
    [
        make_case(norm, (rows, cols), (BF16, FP32, BF16))
        for cols, norm in itertools.product((128, 1024, 1023, 5120, 16384, 65536), NORMS)
    ]
    for rows in (1, 4099)
)


@pytest.mark.parametrize("case", RAGGED_FEW, ids=str)
def test_few_rows_that_divide_nothing(case, sm_count):
    for rows in (1, 2, sm_count - 1, sm_count, sm_count + 1, 1009):
        assert_case_is_right(replace(case, shape=(rows, case.cols)))


@pytest.mark.parametrize("case", RAGGED_MANY, ids=str)
def test_many_rows_that_divide_nothing(case, sm_count):
    for rows in (16 * sm_count, 16 * sm_count + 1, 17 * sm_count - 1, 4099):
        assert_case_is_right(replace(case, shape=(rows, case.cols)))


FAR = [make_case("layer", (500, cols), (FP32, FP32, FP32)) for cols in (768, 1000, 5120, 100_000)]


@pytest.mark.parametrize("case", FAR, ids=str)
def test_layer_norm_of_rows_far_from_zero_stays_accurate(case):
    inputs = make_inputs(case, "cuda")
    assert_case_is_right(case, replace(inputs, x=inputs.x / 1.5 + 1e4))


EDGES = [make_case(norm, (64, cols), (FP32, FP32, FP32)) for cols, norm in itertools.product((512, 65536), NORMS)]


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_constant_and_zero_rows_have_finite_gradients(case):
    inputs = make_inputs(case, "cuda")
    inputs.x[1], inputs.x[3] = 0.0, 0.75
    assert_case_is_right(case, inputs)


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_a_nan_stays_in_its_row_and_in_the_column_sums(case):
    inputs = make_inputs(case, "cuda")
    clean = run(case, inputs)
    inputs.x[4, 7] = float("nan")
    spoilt = run(case, inputs)
    others = torch.arange(64, device="cuda") != 4
    for name in ("y", "dx", "rstd"):
        got, want = getattr(spoilt, name), getattr(clean, name)
        assert got[4].isnan().all() and torch.equal(got[others], want[others]), name
    assert spoilt.dweight.isnan().all()


EQUAL = [
    (cols, dtype, variant)
    for at, cols in enumerate((1, 3, 768, 1000, 4096, 12288, 65536))
    for which, variant in enumerate(VARIANTS[:-1])
    for dtype in (FP32, (BF16, FP16)[(at + which) % 2])
]


@pytest.mark.parametrize("cols, dtype, variant", EQUAL, ids=str)
def test_equal_elements_are_normalized_exactly(cols, dtype, variant):
    case = make_case("layer", (300, cols), (dtype,) * 3)
    inputs = equal_rows(case, "cuda")
    with fusednorm.force(variant):
        assert_exact(run(case, inputs), case, inputs)


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True)], ids=("all", "no dx"))
def test_sums_of_one_sign_are_right_however_many_rows_there_are(mask):
    rows, cols = 262144, 2048
    skip_unless_memory(8)
    case = make_case("layer", (rows, cols), (FP32, FP32, FP32))
    x = torch.tensor([-1.0, 1.0], device="cuda").repeat(rows, cols // 2)
    ones, zeros = torch.ones(cols, device="cuda"), torch.zeros(cols, device="cuda")
    inputs = Inputs(x, torch.full_like(x, 0.1), ones, zeros)
    statistics = torch.zeros(rows, 1, device="cuda"), torch.ones(rows, 1, device="cuda")
    outputs = run_backward(case, inputs, *statistics, mask)
    exact = rows * inputs.grad_out[0].double()
    for sums in (outputs.dbias, outputs.dweight * x[0]):
        assert (sums / exact - 1).abs().max() < 2e-6
