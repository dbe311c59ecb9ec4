"""Parts of the kernels that Triton's interpreter cannot run, such as inline PTX."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from fusednorm.kernels.rowmath import widen

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
