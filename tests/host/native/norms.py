"""Calls of norms on CPU tensors, which stand in for CUDA tensors: ours, torch's own, and float64 gradients."""

from __future__ import annotations

import alone
import pytest
import torch
import torch.nn.functional as F
from cases import FP32, FP64
from torch.testing import assert_close

from fusednorm.tools.oracle import Outputs, assert_outputs_close

OPS = torch.ops.fusednorm


SHAPE = (6, 40)


EPS = 1e-5


norms = pytest.mark.parametrize("norm", ["layer", "rms"])


def forward_of(case, inputs, **changes):
    """(op, arguments) of the case's forward; `changes` replaces operands by name."""
    given = {"x": inputs.x, "shape": case.normalized_shape, "weight": inputs.weight, "bias": inputs.bias}
    x, shape, weight, bias, eps = (given | {"eps": case.eps} | changes).values()
    if case.norm == "layer":
        return OPS.layer_norm_fwd, (x, shape, weight, bias, EPS if eps is None else eps)
    return OPS.rms_norm_fwd, (x, shape, weight, eps)


def backward_of(case, inputs, mask=(True, True, True), **changes):
    """(op, arguments) of the case's backward; `changes` replaces operands by name."""
    given = {"grad_out": inputs.grad_out, "x": inputs.x, "shape": case.normalized_shape}
    known = {"mean", "rstd"} <= changes.keys()
    given |= dict(zip(("mean", "rstd"), (None, None) if known else statistics_of(case, inputs), strict=True))
    given |= {"weight": inputs.weight, "bias": inputs.bias} | changes
    grad_out, x, shape, mean, rstd, weight, bias = given.values()
    if case.norm == "layer":
        return OPS.layer_norm_bwd, (grad_out, x, shape, mean, rstd, weight, bias, mask)
    return OPS.rms_norm_bwd, (grad_out, x, shape, rstd, weight, mask[:2])


def statistics_of(case, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, rstd), computed in float64 and rounded to the statistics' dtype; mean is 0 for RMSNorm."""
    x = inputs.x.double().reshape(case.rows, case.cols)
    mean = x.mean(1) if case.norm == "layer" else torch.zeros(case.rows, dtype=FP64)
    rstd = torch.rsqrt((x - mean[:, None]).square().mean(1) + case.resolved_eps)
    return mean.to(case.acc_dtype), rstd.to(case.acc_dtype)


def assert_right(case, inputs, outputs, mask=None):
    """Checks the outputs of a forward, or of a backward if a mask is given."""
    if mask is None:
        y, *mean, rstd = outputs
        return assert_outputs_close(Outputs(y, *(mean or [None]), rstd), case, inputs)
    dx, dw, db = (*outputs, None)[:3]
    wanted = mask[0], mask[1] and inputs.weight is not None, mask[2] and inputs.bias is not None
    assert [each is not None for each in (dx, dw, db)] == list(wanted)
    assert_outputs_close(Outputs(dx=dx, dweight=dw, dbias=db), case, inputs)


def right_y(inputs):
    return F.layer_norm(inputs.x, (40,), inputs.weight, inputs.bias, EPS)


def layer_norm(inputs, **changes):
    operands = {"x": inputs.x, "weight": inputs.weight, "bias": inputs.bias} | changes
    return OPS.layer_norm_fwd(operands["x"], [40], operands["weight"], operands["bias"], EPS)[0]


class Wrapped(torch.Tensor):
    """A tensor that wraps another and counts the ops on it."""

    ops: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        cls.ops.append(str(op))
        args = [each.inner if isinstance(each, cls) else each for each in args]
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, op(*args, **(kwargs or {})))


def operands(norm, present="wb", requires_grad="xwb", dtype=FP32, seed=0, shape=SHAPE):
    """[x, weight, bias]. `present` and `requires_grad` name them by "x", "w" and "b"; x is always present."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": shape, "w": shape[-1:], "b": shape[-1:]}
    tensors = {name: torch.randn(size, dtype=dtype, generator=generator) for name, size in shapes.items()}
    present = f"x{present}" if norm == "layer" else f"x{present}".replace("b", "")
    return [tensors[name].requires_grad_(name in requires_grad) if name in present else None for name in "xwb"]


def ours(norm, x, weight, bias=None):
    """(y, mean, rstd) by our op; RMSNorm has no mean."""
    if norm == "layer":
        return OPS.layer_norm_fwd(x, x.shape[-1:], weight, bias, EPS)
    return OPS.rms_norm_fwd(x, x.shape[-1:], weight, EPS)


def stock(norm, x, weight, bias=None):
    """The same by torch's own functions."""
    mean = x.mean(-1, keepdim=True) if norm == "layer" else torch.zeros_like(x[..., :1])
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + EPS)
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS), mean, rstd
    return F.rms_norm(x, x.shape[-1:], weight, EPS), rstd


def exact_grads(norm, tensors, gradient):
    """`gradient(outputs, leaves)` of torch's own norm in float64; the leaves are the tensors that require grad."""
    exact = [None if each is None else each.detach().double().requires_grad_(each.requires_grad) for each in tensors]
    return gradient(stock(norm, *exact), [each for each in exact if each is not None and each.requires_grad])


def assert_grads_close(got, want):
    assert_close(got, tuple(each.float() for each in want), atol=1e-4, rtol=1e-4)


def y_alone(norm, x, weight, bias=None, eps=EPS):
    if norm == "layer":
        return alone.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return alone.rms_norm(x, (x.shape[-1],), weight, eps)
