"""Instructions do what PTX says, and an unknown instruction is an error that names its line."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from simulator import arithmetic
from simulator.ptx import PtxError
from simulator.small import nans, run

# %r0: the number of the lane; %d0: the address of the lane's element of the first tensor.
LANE = "mov.u32 %r0, %tid.x; mul.wide.u32 %d9, %r0, 4; add.s64 %d0, %d0, %d9;"


def test_fma_rounds_once():
    a, b = (np.random.default_rng(n).standard_normal(20_000).astype(np.float32) for n in (1, 2))
    c = -(a * b) * (1 + 2.0**-11 * np.random.default_rng(3).integers(-2, 3, 20_000)).astype(np.float32)
    a[:2], b[:2], c[:2] = 1 + 2.0**-12, 1 + 2.0**-12, (2.0**-60, -(2.0**-60))  # almost ties
    got = arithmetic.fma(a, b, c.astype(np.float32))
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [value, np.nextafter(value, np.float32(np.inf)), np.nextafter(value, np.float32(-np.inf))]
        errors = [abs(Fraction(float(each)) - exact) for each in near]
        assert errors[0] == min(errors), (x, y, z)


@pytest.mark.parametrize("pair, dtype", [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_fma_of_16_bits_rounds_once(pair, dtype):
    """The product is a tie, and the summand is lost in float32."""
    tie, small = 1 + torch.finfo(dtype).eps, torch.tensor([2.0**-24, -(2.0**-24)])
    data = torch.stack([torch.full((2,), tie), torch.full((2,), 1.5), small, torch.zeros(2)]).to(dtype)
    loads = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];"
    run(f"{loads} fma.rn.{pair} %r4, %r1, %r2, %r3; st.global.b32 [%d0+12], %r4;", data, threads=32)
    assert data[3].tolist() == [1.5 + 2 * (tie - 1), 1.5 + (tie - 1)]


def test_bfloat16_is_rounded_to_nearest_even():
    values = torch.cat([torch.randn(1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e-40, float("inf"), -0.0])])
    got = arithmetic.to_bf16(values.numpy())
    assert torch.equal(torch.from_numpy(got).view(torch.bfloat16), values.bfloat16())
    above_a_tie = np.array([1 + 2**-8 + 2**-40, -(1 + 2**-8 + 2**-40), 1e-60, -1e-60])  # of float64
    assert arithmetic.from_bf16(arithmetic.to_bf16(above_a_tie)).tolist() == [1 + 2**-7, -1 - 2**-7, 0, 0]
    assert np.isnan(arithmetic.from_bf16(arithmetic.to_bf16(np.array([np.nan], np.float32))))


@pytest.mark.parametrize(
    "code, wanted",
    {
        "add.s32 %r1, %r0, -5;": lambda n: n - 5,
        "mad.lo.s32 %r1, %r0, %r0, 7;": lambda n: n * n + 7,
        "shl.b32 %r1, %r0, 27;": lambda n: n << 27,
        "sub.s32 %r2, %r0, 16; shr.s32 %r1, %r2, 2;": lambda n: (n - 16) >> 2,
        "shr.u32 %r1, %r0, 40;": lambda n: 0,
        "sub.s32 %r2, %r0, 16; div.s32 %r1, %r2, 3;": lambda n: int((n - 16) / 3),
        "bfe.u32 %r1, %r0, 1, 3;": lambda n: (n >> 1) & 7,
        "bfe.s32 %r1, %r0, 0, 2;": lambda n: (n & 3) - 4 * ((n & 3) > 1),
        "not.b32 %r1, %r0;": lambda n: ~n,
        "setp.lt.u32 %p1, %r0, 9; selp.b32 %r1, 3, %r0, %p1;": lambda n: 3 if n < 9 else n,
        "setp.lt.u32 %p1, %r0, 9; setp.gt.and.u32 %p2, %r0, 3, %p1; selp.b32 %r1, 1, 0, %p2;": lambda n: 3 < n < 9,
        "mov.b32 %r1, 5; setp.lt.u32 %p1, %r0, 9; @!%p1 mov.b32 %r1, %r0;": lambda n: n if n >= 9 else 5,
        "mov.b32 {%h1, %h2}, %r0; mov.b32 %r1, {%h2, %h1};": lambda n: n << 16,
        "cvt.u16.u32 %h1, %r0; cvt.u32.u16 %r1, %h1;": lambda n: n,
        "sub.s32 %r2, %r0, 16; cvt.u16.u32 %h1, %r2; mul.wide.s16 %r1, %h1, 3000;": lambda n: 3000 * (n - 16),
        "sub.s32 %r2, %r0, 16; mul.hi.s32 %r1, %r2, 0x70000000;": lambda n: (n - 16) * 0x70000000 >> 32,
        "mul.hi.u32 %r1, %r0, 0xf0000000;": lambda n: n * 0xF0000000 >> 32,
        "cvt.u16.u32 %h1, %r0; mul.wide.u16 %r1, %h1, 60000;": lambda n: 60000 * n,
        "mov.b32 %r2, 0x11223344; prmt.b32 %r1, %r0, %r2, 0x7601U;": lambda n: 0x11220000 | (n << 8),
        "mov.b32 %r2, 0x11F23344; prmt.b32 %r1, %r2, 0, 0xA980U;": lambda n: 0xFF000044 - (1 << 32),
        "shfl.sync.bfly.b32 %r1, %r0, 5, 31, -1;": lambda n: n ^ 5,
        "shfl.sync.down.b32 %r1, %r0, 3, 31, -1;": lambda n: n + 3 if n < 29 else n,
        "shfl.sync.idx.b32 %r1, %r0, 2, 6175, -1;": lambda n: (n & 24) | 2,  # segments of 8
        "redux.sync.add.s32 %r1, %r0, -1;": lambda n: 496,
        "sub.s32 %r2, %r0, 7; redux.sync.min.s32 %r1, %r2, -1;": lambda n: -7,
        "sub.s32 %r2, %r0, 7; redux.sync.max.u32 %r1, %r2, -1;": lambda n: -1,
        "setp.eq.u32 %p1, %r0, 0; mov.b32 %r1, 0;\nLOOP:\nadd.s32 %r1, %r1, 2; setp.lt.u32 %p1, %r1, %r0;\n"
        "@%p1 bra LOOP;": lambda n: max(2, n + n % 2),  # the lanes diverge and join again
    }.items(),
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_integers_are_what_ptx_says(code, wanted):
    out = torch.zeros(32, dtype=torch.int32)
    run(f"{LANE}\n{code}\nst.global.b32 [%d0], %r1;", out)
    assert out.tolist() == torch.tensor([wanted(n) for n in range(32)]).to(torch.int32).tolist()


def test_pairs_of_floats_are_added_each_for_itself():
    out = nans(64)
    code = """mov.u32 %r0, %tid.x; mul.wide.u32 %d9, %r0, 8; add.s64 %d0, %d0, %d9; cvt.rn.f32.s32 %r1, %r0;
mov.b64 %d1, {%r1, 0f40000000}; fma.rn.f32x2 %d2, %d1, %d1, %d1; st.global.b64 [%d0], %d2;"""
    run(code, out)
    wanted = [[n * n + n, 6.0] for n in range(32)]
    assert out.reshape(32, 2).tolist() == wanted


@pytest.mark.parametrize("code", ["add.sat.s32 %r1, %r0, 1;", "frob.b32 %r1, %r0;", "ld.global.v3.b32 %r1, [%d0];"])
def test_an_unknown_instruction_or_modifier_is_an_error_with_its_line(code):
    with pytest.raises(PtxError, match=rf"{code[:8]}.*small.py:1"):
        run(f"\n{code}", nans(32))
