"""Sums of rows by the number of each, by kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32, guarded_buffers
from segments import CASES, Segments

from fusednorm.host.kernel_devices import kernels_on

pytest.importorskip("triton")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_float64(case: Segments):
    with kernels_on("cpu"), guarded_buffers():
        case.check(case.sums())


def test_rows_are_added_in_their_order_whatever_lies_between_them():
    few, many = Segments(200, 24, 1), Segments(200, 24, 4)
    x, index = few.grads[0], many.index
    ones = index == 2
    with kernels_on("cpu"):
        (alone,) = torch.ops.fusednorm.lookup_backward([x[ones]], index[ones] * 0, 1, dtype=FP32)
        (among,) = torch.ops.fusednorm.lookup_backward([x], index, 4, dtype=FP32)
    torch.testing.assert_close(among[2:3], alone)


def test_a_sum_has_derivatives():
    case = Segments(12, 8, 3, dtypes=(torch.float64,), dtype=torch.float64)
    inside = case.index.clamp(0, 2)
    assert torch.autograd.gradcheck(
        lambda x: torch.ops.fusednorm.lookup_backward([x, x.sin()], inside, 3, dtype=x.dtype),
        case.grads[0].requires_grad_(),
    )


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_opcheck_passes(dtype):
    case = Segments(9, 8, 4, dtypes=(BF16, dtype))
    args = [each.requires_grad_() for each in case.grads], case.index.clamp(0, 3), 4
    torch.library.opcheck(torch.ops.fusednorm.lookup_backward.default, args, {"dtype": dtype})
