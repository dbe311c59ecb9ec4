"""Liger's Triton kernels, by the functions under its autograd Functions."""

from __future__ import annotations

from fusednorm.tools.oracle import Outputs

from ..cases import BenchCase, BenchInputs
from . import packages

NAME = "liger"
ADDS_RESIDUAL = False


def missing() -> str | None:
    return packages.missing("liger_kernel", "liger-kernel")


def prepare(case: BenchCase, inputs: BenchInputs):
    return _layer(case, inputs) if case.norm == "layer" else _rms(case, inputs)


def _layer(case: BenchCase, inputs: BenchInputs):
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    _, needs_dw, needs_db = case.output_mask

    def forward() -> Outputs:
        y, _, mean, rstd, *_ = layer_norm_forward(inputs.x.contiguous(), inputs.weight, inputs.bias, case.resolved_eps)
        return Outputs(y, mean.reshape(case.stats_shape), rstd.reshape(case.stats_shape))

    def backward(ahead: Outputs) -> Outputs:
        x, mean, rstd = inputs.x.reshape(-1, case.cols), ahead.mean.reshape(-1), ahead.rstd.reshape(-1)
        grads = layer_norm_backward(
            inputs.grad_out, x, inputs.weight, inputs.bias, mean, rstd, needs_dw=needs_dw, needs_db=needs_db
        )
        return Outputs(None, None, None, *grads)

    return forward, backward


def _rms(case: BenchCase, inputs: BenchInputs):
    """As Liger's module calls it, with Llama's rounding. It writes dx over dy, and therefore gets a copy of dy."""
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
    from liger_kernel.ops.utils import calculate_settings

    block, num_warps = calculate_settings(case.cols)
    dy = inputs.grad_out.clone()
    mode = 0  # Llama's

    def forward() -> Outputs:
        y, _, rstd, *_ = rms_norm_forward(inputs.x.contiguous(), inputs.weight, case.resolved_eps, 0.0, mode, False)
        return Outputs(y, None, rstd.reshape(case.stats_shape))

    def backward(ahead: Outputs) -> Outputs:
        x, rstd = inputs.x.reshape(-1, case.cols), ahead.rstd.reshape(-1)
        dx, dw = rms_norm_backward(
            dy, x, inputs.weight, rstd, 0.0, mode, block, num_warps, True, False, case.output_mask[1]
        )
        return Outputs(dx=dx, dweight=dw)

    return forward, backward
