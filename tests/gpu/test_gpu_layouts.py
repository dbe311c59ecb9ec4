"""The ops on CUDA with strided tensors, masks, all layouts of statistics, and more than 2^31 elements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from calls import assert_case_is_right, run, run_backward, skip_unless_memory
from cases import BF16, FP16, FP32, FP64, LAYOUTS, NORMS, STATISTIC_LAYOUTS, lay_out, make_case, statistic_layouts

from fusednorm.tools.oracle import Inputs, Outputs, assert_outputs_close, make_inputs

pytestmark = pytest.mark.gpu

ROWS_OF_LAYOUT = {"short": (150, 12, 64), "odd": (50, 2, 1023), "wide": (9, 2, 20480)}
LAID_OUT = [
    pytest.param(
        make_case(norm, (LAYOUTS[layout][0], *shape), (BF16, FP32, BF16)), layout, id=f"{norm}-{name}-{layout}"
    )
    for layout, (name, shape) in itertools.product(LAYOUTS, ROWS_OF_LAYOUT.items())
    for norm in (NORMS if name == "short" else ["layer"])
]


@pytest.mark.parametrize("case, layout", LAID_OUT)
def test_rows_are_read_where_they_lie(case, layout):
    inputs = lay_out(make_inputs(case, "cuda"), layout)
    before = [tensor.clone() for tensor in (inputs.x, inputs.grad_out)]
    assert_case_is_right(case, inputs)
    assert torch.equal(inputs.x, before[0]) and torch.equal(inputs.grad_out, before[1])


MASKS = [mask for mask in itertools.product((True, False), repeat=3) if any(mask)]
MASKED = [
    *((make_case("layer", (300, 1024), (BF16, FP32, BF16)), mask) for mask in MASKS),
    *((make_case("rms", (300, 1024), (BF16, FP32, BF16)), mask) for mask in MASKS if not mask[2]),
    *((make_case("layer", (40, 65536), (BF16, FP32, BF16)), mask) for mask in MASKS[::2]),
]


@pytest.mark.parametrize("case, mask", MASKED, ids=str)
def test_masked_outputs_are_none_and_the_others_right(case, mask):
    inputs = make_inputs(case, "cuda")
    forward = run(case, inputs)
    outputs = run_backward(case, inputs, forward.mean, forward.rstd, mask)
    assert [t is not None for t in (outputs.dx, outputs.dweight, outputs.dbias)] == list(mask)
    assert_outputs_close(outputs, case, inputs)


STATISTICS = [
    *(make_case(norm, (300, 2048), (BF16, FP32, BF16)) for norm in NORMS),
    make_case("layer", (300, 65536), (BF16, FP32, BF16)),
]


@pytest.mark.parametrize("case", STATISTICS, ids=str)
def test_statistics_are_read_in_every_layout_and_dtype(case):
    inputs = make_inputs(case, "cuda")
    forward = run(case, inputs)
    for dtype in (FP32, BF16, FP16, FP64):
        mean, rstd = (None if s is None else s.to(dtype) for s in (forward.mean, forward.rstd))
        want = run_backward(case, inputs, None if mean is None else mean.float(), rstd.float())
        means, rstds = ({} if s is None else statistic_layouts(s) for s in (mean, rstd))
        # Every pair of dtype and layout is a build. The two are independent: try all layouts in one dtype, and all
        # dtypes in one layout.
        for of_mean, of_rstd in STATISTIC_LAYOUTS if dtype == FP32 else STATISTIC_LAYOUTS[:1]:
            assert_same_but_for_rounding(run_backward(case, inputs, means.get(of_mean), rstds[of_rstd]), want)


def assert_same_but_for_rounding(got: Outputs, want: Outputs) -> None:
    """The results of two builds differ only by rounding.

    The compiler chooses which multiplications and additions become one fma. A few results then round differently, and
    float32 sums over rows differ by a few roundings.
    """
    for a, b in ((got.dx, want.dx), (got.dweight, want.dweight), (got.dbias, want.dbias)):
        if b is not None:
            assert (a != b).float().mean() < 1e-4 or a.dtype == FP32
            torch.testing.assert_close(a, b, rtol=max(1e-5, 2 * torch.finfo(b.dtype).eps), atol=1e-4)


HUGE = [make_case(norm, (70_000, 32_768), (BF16, FP32, BF16)) for norm in NORMS]


@pytest.mark.parametrize("case", HUGE, ids=str)
def test_tensors_of_more_than_2_to_the_31_elements(case):
    skip_unless_memory(80)
    inputs = make_inputs(case, "cuda")
    outputs = run(case, inputs)
    for start in range(0, case.rows, 7000):
        rows = slice(start, start + 7000)
        part = Inputs(inputs.x[rows], inputs.grad_out[rows], inputs.weight, inputs.bias)
        mean = None if outputs.mean is None else outputs.mean[rows]
        got = Outputs(outputs.y[rows], mean, outputs.rstd[rows], outputs.dx[rows])
        assert_outputs_close(got, replace(case, shape=(7000, case.cols)), part)
    # dw and db are sums over all rows. dy is zero except in some rows, so these rows alone decide the sums.
    boundary = 2**31 // case.cols
    some = torch.cat(
        [
            torch.arange(0, case.rows, 331, device="cuda"),
            torch.arange(boundary - 9, boundary + 9, device="cuda"),
            torch.arange(case.rows - 9, case.rows, device="cuda"),
        ]
    ).unique()
    part = Inputs(inputs.x[some], inputs.grad_out[some], inputs.weight, inputs.bias)
    inputs.grad_out.zero_()
    inputs.grad_out[some] = part.grad_out
    got = run_backward(case, inputs, outputs.mean, outputs.rstd)
    dx = got.dx[some]
    got.dx[some] = 0
    assert not got.dx.any(), "rows without a gradient got one"
    assert_outputs_close(replace(got, dx=dx), replace(case, shape=(len(some), case.cols)), part)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cols", [512, 40_960])
def test_rows_that_lie_more_than_2_to_the_31_elements_apart(norm, cols):
    skip_unless_memory(24)
    case = make_case(norm, (65, 4, cols), (BF16, FP32, BF16))
    inputs = make_inputs(case, "cuda")

    def spread(tensor):
        memory = torch.empty(2**31 + 2**20, dtype=BF16, device="cuda")
        return memory.as_strided((65, 4, cols), (2**25, 2**17, 1)).copy_(tensor)

    assert_case_is_right(case, replace(inputs, x=spread(inputs.x), grad_out=spread(inputs.grad_out)))
