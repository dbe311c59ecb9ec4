"""A residual that is wider than x: one backward writes its gradient and x's."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
norms = pytest.mark.parametrize("norm", ["layer", "rms"])


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.outputs = func(*args, **(kwargs or {}))
        self.names = [*getattr(self, "names", ()), func.name()]
        return self.outputs


def given(dtype, residual):
    torch.manual_seed(0)
    tensors = torch.randn(6, 40, dtype=dtype), torch.randn(6, 40, dtype=residual), torch.randn(40, dtype=dtype)
    return [each.requires_grad_() for each in tensors]


def faces(norm):
    cls = fusednorm.AddLayerNorm if norm == "layer" else fusednorm.AddRMSNorm
    return getattr(fusednorm, f"add_{norm}_norm"), lambda x, residual, weight: cls(40, dtype=x.dtype)(x, residual)


@norms
@pytest.mark.parametrize("dtype, residual", [(BF16, FP32), (FP16, FP64), (FP32, FP64)])
def test_no_cast_follows_the_backward_of_a_sum_with_a_wider_residual(norm, dtype, residual):
    for face in faces(norm):
        x, stream, weight = given(dtype, residual)
        with Log() as log:
            y, h = face(x, stream, weight)
            dx, dstream = torch.autograd.grad((y, h), (x, stream), (torch.ones_like(y), torch.randn_like(h)))
        assert (h.dtype, dx.dtype, dstream.dtype) == (residual, dtype, residual)
        assert torch.equal(dx, dstream.to(dtype))
        assert f"fusednorm::{norm}_norm_bwd_of_wide_sum" in log.names
        assert log.names[-1] == f"fusednorm::{norm}_norm_bwd_of_wide_sum"


@norms
@pytest.mark.parametrize("dtype, residual", [(BF16, BF16), (FP32, BF16), (BF16, None)])
def test_one_gradient_serves_a_residual_that_is_not_wider(norm, dtype, residual):
    x, stream, weight = given(dtype, residual or dtype)
    with Log() as log:
        outputs = faces(norm)[0](x, stream if residual else None, weight, residual_dtype=None if residual else FP32)
        torch.autograd.grad(outputs, x, [torch.ones_like(each) for each in outputs])
    assert f"fusednorm::{norm}_norm_bwd_residual" in log.names


@norms
def test_a_gradient_that_nobody_wants_is_not_written(norm):
    for wanted in ("x", "residual"):
        x, stream, weight = given(BF16, FP32)
        (stream if wanted == "x" else x).requires_grad_(False)
        with Log() as log:
            outputs = faces(norm)[0](x, stream, weight)
            torch.autograd.grad(outputs, x if wanted == "x" else stream, [torch.ones_like(each) for each in outputs])
        dx, _, _, dsummand = log.outputs
        assert (dx is None, dsummand is None) == (wanted == "x", wanted != "x")


@norms
def test_the_streams_gradient_alone_is_passed_on_and_cast(norm):
    x, stream, weight = given(BF16, FP32)
    h, grad = faces(norm)[0](x, stream, weight)[1], torch.randn(6, 40)
    dx, dstream = torch.autograd.grad(h, (x, stream), grad)
    assert torch.equal(dstream, grad) and torch.equal(dx, grad.bfloat16())
