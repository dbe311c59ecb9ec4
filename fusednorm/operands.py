"""The operands of a norm as one value, and the translation between it and the arguments and outputs of the six ops.

RMSNorm's ops have no mean, bias and dbias. Here both norms have the same operands, and the same outputs:
(y, mean, rstd) of a forward, (dx, dweight, dbias) of a backward, with None for what a norm or a call lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, Tensor | None, Tensor | None]


class ForwardOperands(NamedTuple):
    """What layer_norm_fwd (norm "layer") or rms_norm_fwd ("rms") is called with."""

    norm: str
    x: Tensor
    normalized_shape: Sequence[int]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = None
    wants_statistics: bool = True  # whether to write mean and rstd, for a backward

    @property
    def op(self) -> str:
        return f"{self.norm}_norm_fwd"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.weight, self.bias

    @property
    def settings(self) -> tuple:
        """All operands that are no tensors, hashable."""
        return "forward", self.norm, tuple(self.normalized_shape), self.eps, self.wants_statistics

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that an output's values depend on."""
        return self.tensors

    def op_arguments(self) -> tuple[tuple, dict[str, Any]]:
        """(arguments, named arguments) of the op."""
        x, shape, weight, bias = self[1:5]
        parameters = (weight, bias) if self.norm == "layer" else (weight,)
        return (x, shape, *parameters, self.eps), {}


class BackwardOperands(NamedTuple):
    """What a backward op of either norm is called with. mean and bias are None for RMSNorm. output_mask is (dx,
    dweight, dbias) for both norms."""

    norm: str
    grad_out: Tensor
    x: Tensor
    normalized_shape: Sequence[int]
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    output_mask: Sequence[bool]
    residual_grad: Tensor | None = None
    dx_dtype: torch.dtype | None = None
    has_residual: bool = False  # whether the op is the one that takes residual_grad, which may be None all the same

    @property
    def op(self) -> str:
        return f"{self.norm}_norm_bwd" + "_residual" * self.has_residual

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.grad_out, self.x, self.mean, self.rstd, self.weight, self.bias, self.residual_grad

    @property
    def settings(self) -> tuple:
        """All operands that are no tensors, hashable."""
        return "backward", self.norm, tuple(self.normalized_shape), tuple(self.output_mask), self.dx_dtype

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that an output's values depend on; of the bias only the dtype is read."""
        return self.grad_out, self.x, self.mean, self.rstd, self.weight, self.residual_grad

    def op_arguments(self) -> tuple[tuple, dict[str, Any]]:
        """(arguments, named arguments) of the op."""
        layer, mask = self.norm == "layer", tuple(self.output_mask)
        statistics = (self.mean, self.rstd) if layer else (self.rstd,)
        parameters = (self.weight, self.bias) if layer else (self.weight,)
        residual = (self.residual_grad,) if self.has_residual else ()
        arguments = self.grad_out, self.x, self.normalized_shape, *statistics, *parameters, *residual
        return (*arguments, mask if layer else mask[:-1]), {"dx_dtype": self.dx_dtype} if self.has_residual else {}


Operands = ForwardOperands | BackwardOperands
ALL = True, True, True


# Each takes the arguments of an op, with the defaults of its schema (ops.py), and returns the operands.
def _layer_norm_fwd(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    return ForwardOperands("layer", x, normalized_shape, weight, bias, eps)


def _rms_norm_fwd(x, normalized_shape, weight=None, eps=None):
    return ForwardOperands("rms", x, normalized_shape, weight, None, eps)


def _layer_norm_bwd(grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=ALL):
    return BackwardOperands("layer", grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)


def _rms_norm_bwd(grad_out, x, normalized_shape, rstd, weight=None, output_mask=ALL[:2]):
    mask = *output_mask, False
    return BackwardOperands("rms", grad_out, x, normalized_shape, None, rstd, weight, None, mask)


def _layer_norm_bwd_residual(
    grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, residual_grad=None, output_mask=ALL, *,
    dx_dtype=None,
):  # fmt: skip
    operands = _layer_norm_bwd(grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)
    return operands._replace(residual_grad=residual_grad, dx_dtype=dx_dtype, has_residual=True)


def _rms_norm_bwd_residual(
    grad_out, x, normalized_shape, rstd, weight=None, residual_grad=None, output_mask=ALL[:2], *, dx_dtype=None
):
    operands = _rms_norm_bwd(grad_out, x, normalized_shape, rstd, weight, output_mask)
    return operands._replace(residual_grad=residual_grad, dx_dtype=dx_dtype, has_residual=True)


OPERANDS_OF_OP: dict[str, Callable[..., Operands]] = {
    "layer_norm_fwd": _layer_norm_fwd,
    "layer_norm_bwd": _layer_norm_bwd,
    "rms_norm_fwd": _rms_norm_fwd,
    "rms_norm_bwd": _rms_norm_bwd,
    "layer_norm_bwd_residual": _layer_norm_bwd_residual,
    "rms_norm_bwd_residual": _rms_norm_bwd_residual,
}


def as_op(name: str, run: Callable[[Any], Outputs | None]) -> Callable[..., tuple | None]:
    """A function with the op's arguments and outputs that runs `run` on a norm's operands. None stays None."""
    operands_of, outputs_of = OPERANDS_OF_OP[name], _OUTPUTS_OF_OP[name]

    def op(*arguments, **named):
        outputs = run(operands_of(*arguments, **named))
        return outputs if outputs is None else outputs_of(outputs)

    op.__name__ = name
    return op


def call_op(op: Callable[..., tuple], operands: Operands) -> Outputs:
    """The outputs of a norm by its op, or by a function with the op's arguments and outputs."""
    arguments, named = operands.op_arguments()
    outputs = op(*arguments, **named)
    if operands.norm == "layer":
        return tuple(outputs)
    first, second = outputs
    return (first, None, second) if isinstance(operands, ForwardOperands) else (first, second, None)


def _without_mean(outputs: Outputs) -> tuple:
    return outputs[0], outputs[2]


def _without_dbias(outputs: Outputs) -> tuple:
    return outputs[0], outputs[1]


# The outputs that each op has, by functions that Dynamo can trace.
_OUTPUTS_OF_OP: dict[str, Callable[[Outputs], tuple]] = {
    name: tuple if name.startswith("layer") else _without_mean if name.endswith("fwd") else _without_dbias
    for name in OPERANDS_OF_OP
}
