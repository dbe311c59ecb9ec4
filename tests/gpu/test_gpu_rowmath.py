"""Parts of the kernels that Triton's interpreter cannot run, such as inline PTX."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from activations import assert_activations_keep_their_digits
from fusednorm.kernels.rowmath import widen

import fusednorm

pytestmark = pytest.mark.gpu


@triton.jit
def widen_all(x_ptr, wide_ptr, in_pairs: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(wide_ptr + at, widen(tl.load(x_ptr + at), in_pairs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_becomes_the_same_float32_in_pairs_as_alone(dtype):
    bits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    alone, in_pairs = (torch.empty(x.shape, device="cuda", dtype=torch.float32) for _ in range(2))
    widen_all[(64,)](x, alone, False)
    widen_all[(64,)](x, in_pairs, True)
    assert torch.equal(in_pairs.isnan(), x.isnan())
    numbers = ~x.isnan()
    for expected in (alone, x.float()):  # compare bits: -0 is not 0
        assert torch.equal(in_pairs[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def test_activations_keep_their_digits_near_zero_and_far_from_it():
    assert_activations_keep_their_digits("cuda")


@pytest.mark.parametrize("cols", [1, 1000, 5120])
def test_equal_gated_elements_have_no_deviations(cols):
    """If the mean's subtraction became part of the product's multiply-add, the product's rounding error would be left,
    which rstd makes 1e6 times as large."""
    x, gate = torch.full((4, cols), 9999.5, device="cuda"), torch.full((4, cols), 0.3, device="cuda")
    x *= torch.tensor([[1.0], [1.1], [1.3], [1e15]], device="cuda")
    y = fusednorm.layer_norm_gated(x, gate, normalized_shape=(cols,), eps=1e-12, norm_before_gate=False)
    assert torch.equal(y, torch.zeros_like(y))
