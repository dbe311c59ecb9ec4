"""The backward with a residual gradient: every schedule rounds dx + residual once."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, FP32, FP64, NORMS

import fusednorm
from fusednorm.tools.oracle import Case, make_inputs

pytestmark = pytest.mark.gpu

# (rows, cols, forced variant): a ring, rows over a cluster, several rows and chunks of columns, narrow rows in
# registers, an odd width, column tiles.
SHAPES = [
    (517, 4096, None),
    (300, 16384, None),
    (300, 5120, None),
    (1031, 128, None),
    (517, 1001, None),
    (40, 40000, "multi_wave"),
    (517, 2048, "multi_wave"),
    (517, 2048, "warp_specialized"),
]
DTYPES = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, BF16), (FP64, FP64)]  # of x, of the residual gradient


CASES = [  # the norms in turn; dx has x's dtype by default
    (NORMS[(at + which) % 2], shape, dtypes, dx_dtype)
    for at, shape in enumerate(SHAPES)
    for which, dtypes in enumerate(DTYPES)
    for dx_dtype in (None, BF16 if dtypes[0] == FP32 else FP32)
]


@pytest.mark.parametrize("norm, shape, dtypes, dx_dtype", CASES, ids=str)
def test_dx_is_rounded_once_after_the_residual_gradient_is_added(norm, shape, dtypes, dx_dtype):
    rows, cols, variant = shape
    x_dtype, residual_dtype = dtypes
    case = Case(norm, (rows, cols), 1, x_dtype, x_dtype, x_dtype if norm == "layer" else None)
    inputs = make_inputs(case, "cuda")
    residual = torch.randn(rows, cols, device="cuda").to(residual_dtype)
    exact = FP64 if x_dtype == FP64 else FP32
    with fusednorm.force(variant):
        plain = backward(case, inputs, None, exact)
        got = backward(case, inputs, residual, dx_dtype)
    wanted_dtype = dx_dtype or x_dtype
    want = (plain[0] + residual.to(exact)).to(wanted_dtype)
    assert got[0].dtype == wanted_dtype
    # The compiler may use other fmas here, which changes the sum by an ulp of the larger summand.
    ulp = max(torch.finfo(wanted_dtype).eps, torch.finfo(exact).eps)
    torch.testing.assert_close(got[0].to(exact), want.to(exact), rtol=2 * ulp, atol=8 * torch.finfo(exact).eps)
    for a, b in zip(got[1:], plain[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(b.dtype).eps, atol=1e-4)


def backward(case, inputs, residual, dx_dtype):
    shape = case.normalized_shape
    if case.norm == "layer":
        _, mean, rstd = torch.ops.fusednorm.layer_norm_fwd(inputs.x, shape, inputs.weight, inputs.bias, 1e-5)
        operands = (inputs.grad_out, inputs.x, shape, mean, rstd, inputs.weight, inputs.bias, residual)
        return torch.ops.fusednorm.layer_norm_bwd_residual(*operands, dx_dtype=dx_dtype)
    _, rstd = torch.ops.fusednorm.rms_norm_fwd(inputs.x, shape, inputs.weight, 1e-5)
    operands = (inputs.grad_out, inputs.x, shape, rstd, inputs.weight, None, residual)
    return torch.ops.fusednorm.rms_norm_bwd_residual(*operands, dx_dtype=dx_dtype)[:2]


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=str)  # of x, of the residual
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_behind_a_layer_and_the_next_one_have_their_gradients(norm, dtypes):
    of_x, of_residual = dtypes
    shapes = ((517, 2048), of_x), ((517, 2048), of_residual), ((2048,), of_x), ((2048,), of_x)
    given = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape, dtype in shapes]
    wide = [each.detach().double().requires_grad_() for each in given]
    function = getattr(fusednorm, f"{norm}_norm_add_{norm}_norm")
    found, exact = ([*(outputs := function(*each, eps=1e-6)), *torch.autograd.grad(
        outputs, each, [torch.ones_like(of) for of in outputs])] for each in (given, wide))  # fmt: skip
    for ours, right in zip(found, exact, strict=True):
        atol = 8 * torch.finfo(of_x).eps * right.abs().max().item()
        torch.testing.assert_close(ours.double(), right, rtol=4 * torch.finfo(of_x).eps, atol=atol)
