"""torch.compile of ATen's ops: the same forward and backward that autograd would give it to compile."""

from __future__ import annotations

import torch

from fusednorm.tools.oracle import Outputs

from ..cases import BenchCase, BenchInputs

NAME = "inductor"
ADDS_RESIDUAL = True


def missing() -> str | None:
    return None


def prepare(case: BenchCase, inputs: BenchInputs, options: dict | None = None):
    """One graph for each direction, of static shapes. options are Inductor's."""
    compiled = torch.compile(dynamic=False, fullgraph=True, options=options)
    x, dy, weight, bias, shape, eps = (
        inputs.x, inputs.grad_out, inputs.weight, inputs.bias, case.normalized_shape, case.resolved_eps,
    )  # fmt: skip
    mask, aten, residual = case.output_mask, torch.ops.aten, inputs.residual_grad

    @compiled
    def layer_forward(x, weight, bias):
        return aten.native_layer_norm(x, shape, weight, bias, eps)

    @compiled
    def layer_backward(dy, x, mean, rstd, weight, bias, residual):
        return with_residual(aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask), residual)

    @compiled
    def rms_forward(x, weight):
        return aten._fused_rms_norm(x, shape, weight, eps)

    @compiled
    def rms_backward(dy, x, rstd, weight, residual):
        return with_residual(aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, mask[:2]), residual)

    def forward() -> Outputs:
        if case.norm == "layer":
            return Outputs(*layer_forward(x, weight, bias))
        y, rstd = rms_forward(x, weight)
        return Outputs(y, None, rstd)

    def backward(ahead: Outputs) -> Outputs:
        if case.norm == "layer":
            return Outputs(None, None, None, *layer_backward(dy, x, ahead.mean, ahead.rstd, weight, bias, residual))
        return Outputs(None, None, None, *rms_backward(dy, x, ahead.rstd, weight, residual))

    return forward, backward


def with_residual(grads, residual):
    """The gradients of a norm, with the residual's added to dx."""
    dx, *others = grads
    return grads if residual is None else ((dx + residual).to(dx.dtype), *others)


def forget() -> None:
    """Drop compiled code: all cases share the same code objects, and Dynamo compiles each at most 8 times."""
    torch.compiler.reset()
