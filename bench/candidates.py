"""What is timed: each candidate is a forward and a backward on the same tensors, and may refuse a case by raising.

A further implementation is one more entry of CANDIDATES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import fusednorm  # noqa: F401  registers the ops
from fusednorm.testing import Case, Inputs, Outputs

Forward = Callable[[Case, Inputs], Outputs]
Backward = Callable[[Case, Inputs, Outputs], Outputs]  # the third argument holds the forward's mean and rstd


@dataclass(frozen=True)
class Candidate:
    """Both return fresh outputs and hold no state, so that they can be captured in a CUDA graph."""

    name: str
    forward: Forward
    backward: Backward

    def outputs(self, case: Case, inputs: Inputs) -> Outputs:
        """Forward and backward together, for comparing with the oracle."""
        ahead = self.forward(case, inputs)
        back = self.backward(case, inputs, ahead)
        return Outputs(ahead.y, ahead.mean, ahead.rstd, back.dx, back.dweight, back.dbias)


def floor_call(direction: str, inputs: Inputs) -> Callable[[], object]:
    """The stream kernel with the same traffic: forward 1 read 1 write, backward 2 reads 1 write of rows x cols."""
    out = torch.empty_like(inputs.x)
    if direction == "forward":
        return lambda: torch.neg(inputs.x, out=out)
    return lambda: torch.add(inputs.grad_out, inputs.x, out=out)


def floor_bytes(direction: str, case: Case) -> int:
    """Bytes of the large tensors, which is what `floor_call` moves; parameters and statistics are left out."""
    return {"forward": 2, "backward": 3}[direction] * case.rows * case.cols * case.x_dtype.itemsize


def _forward_by(layer_norm, rms_norm) -> Forward:
    def forward(case: Case, inputs: Inputs) -> Outputs:
        shape = case.normalized_shape
        if case.norm == "layer":
            return Outputs(*layer_norm(inputs.x, shape, inputs.weight, inputs.bias, case.resolved_eps))
        y, rstd = rms_norm(inputs.x, shape, inputs.weight, case.resolved_eps)
        return Outputs(y, None, rstd)

    return forward


def _backward_by(layer_norm, rms_norm) -> Backward:
    def backward(case: Case, inputs: Inputs, ahead: Outputs) -> Outputs:
        shape, dy, x, weight, bias = case.normalized_shape, inputs.grad_out, inputs.x, inputs.weight, inputs.bias
        wants_dw = weight is not None
        if case.norm == "layer":
            mask = [True, wants_dw, bias is not None]
            return Outputs(None, None, None, *layer_norm(dy, x, shape, ahead.mean, ahead.rstd, weight, bias, mask))
        return Outputs(None, None, None, *rms_norm(dy, x, shape, ahead.rstd, weight, [True, wants_dw]))

    return backward


def _candidate(name: str, layer_fwd, layer_bwd, rms_fwd, rms_bwd) -> Candidate:
    return Candidate(name, _forward_by(layer_fwd, rms_fwd), _backward_by(layer_bwd, rms_bwd))


# Our ops take ATen's arguments at ATen's positions, so both are the same two functions.
_ATEN, _OURS = torch.ops.aten, torch.ops.fusednorm
CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        _candidate(
            "aten",
            _ATEN.native_layer_norm,
            _ATEN.native_layer_norm_backward,
            _ATEN._fused_rms_norm,
            _ATEN._fused_rms_norm_backward,
        ),
        _candidate("fusednorm", _OURS.layer_norm_fwd, _OURS.layer_norm_bwd, _OURS.rms_norm_fwd, _OURS.rms_norm_bwd),
    )
}
