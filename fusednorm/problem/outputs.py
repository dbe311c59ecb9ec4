"""Shapes, dtypes and numbers that follow from a call's operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from ..dtypes import accumulation_dtype
from ..operands import OWN_OUTPUTS, Derivative, Operands, Output, Role


def output_dtype(operands: Operands, output: Output) -> torch.dtype:
    if output.role is Role.STATISTIC:
        if output.rows:
            (of,) = [each for each in operands.outputs if each.name == output.rows]
            return accumulation_dtype(output_dtype(operands, of))
        return accumulation_dtype(*[each.dtype for each in operands.rows])
    asked = output.dtype and getattr(operands, output.dtype)
    if asked:
        return asked
    dtype, promoted = getattr(operands, output.like).dtype, output.promoted
    if output.promoted_if_rounded and (operands.rounds_x_hat or operands.rounds_steps):
        promoted += output.promoted_if_rounded
    for name in promoted:
        of_output = next((each for each in operands.outputs[OWN_OUTPUTS:] if each.name == name), None)
        other = output_dtype(operands, of_output) if of_output else getattr(getattr(operands, name), "dtype", dtype)
        dtype = torch.promote_types(dtype, other)
    return dtype


def settings_of(operands: Operands, by: Derivative) -> dict[str, Any]:
    """What the backward of a form takes beside tensors."""
    tensors, settings = operands.tensors, {name: getattr(operands, name) for name in by.settings}
    for name, ats in by.dtypes:
        settings[name] = reduce(torch.promote_types, [tensors[at].dtype for at in ats if tensors[at] is not None])
    return settings


class Steps(NamedTuple):
    """The dtypes that the results of a modulated norm's steps have in code of its operands' dtypes."""

    branch: torch.dtype  # gate * x
    u: torch.dtype  # that of the row that is normalized
    factor: torch.dtype  # of u, such as 1 + scale
    product: torch.dtype  # of u and the factor


def steps_of(operands: Operands) -> Steps | None:
    """None if the form does not round its steps."""
    if not operands.form.rounds_steps:
        return None
    gate, scale = operands.gate, operands.scale.dtype
    of_sum = [output_dtype(operands, each) for each in operands.outputs[OWN_OUTPUTS:]]
    row = of_sum[0] if of_sum else operands.x.dtype
    branch = operands.x.dtype if gate is None else torch.promote_types(operands.x.dtype, gate.dtype)
    return Steps(branch, row, scale, torch.promote_types(row, scale))


def resolve_eps(eps: float | None, *dtypes: torch.dtype) -> float:
    """eps as ATen reads it: None means the machine epsilon of the accumulation dtype of row tensors of these dtypes."""
    return torch.finfo(accumulation_dtype(*dtypes)).eps if eps is None else eps


def shape_of(
    role: Role, x: Sequence[int], normalized: Sequence[int], groups: int = 1, width: int = 0, whole: Sequence[bool] = ()
) -> tuple[int, ...]:
    """The shape of a tensor of this role, as outputs have it, beside an x of this shape. `width` are the columns of
    COLUMNS; `whole` says which batch dims a MODULATION has of x's, and not 1."""
    if role is Role.PARAMETER:
        return tuple(normalized)
    batch = x[: len(x) - len(normalized)]
    if role is Role.STATISTIC:
        return (*batch, *(1 for _ in normalized[1:]), groups)
    if role is Role.COLUMNS:
        return (*batch, width)
    if role is Role.INDEX:
        return batch
    if role is Role.MODULATION:
        return (*[size if is_whole else 1 for size, is_whole in zip(batch, whole, strict=False)], *normalized)
    return x
