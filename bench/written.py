"""The forms for those who compare: the public function of each, and the norm that it is as models write it, in torch.

No formula here is the package's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusednorm.forms import FormSpec
from fusednorm.operands import Op, Role

FUNCTIONS = {  # by the suffix of the form's ops, for layer_norm or rms_norm
    "affine": "affine_{}",
    "of_sum": "add_{}",
    "of_wide_sum": "add_{}",
    "plus_residual": "{}_add",
    "modulated_plus_residual": "{}_add",
    "times_gate": "{}_gated",
    "of_gated": "{}_gated",
    **dict.fromkeys(("modulated", "of_sum_modulated", "of_gated_sum_modulated"), "ada_{}"),
}
SETTINGS = {"of_gated": {"norm_before_gate": False}}  # of these functions
Given = dict[str, Any]  # tensors by the names that arguments of the functions have


def rows_of(op: Op) -> list[str]:
    return [slot.name for slot in op.inputs if slot.role is Role.ROWS]


def modulations_of(op: Op) -> list[str]:
    """By the names of the function's arguments, to which the factor of a norm behind a layer is a gate."""
    names = [slot.name for slot in op.inputs if slot.role is Role.MODULATION]
    return ["gate"] if op.form.finish and names else names


def of_op(op: Op, given: Given) -> Given:
    """By the names of the op, to which the gate of a norm behind a layer is a scale."""
    is_scale = op.form.finish and modulations_of(op)
    return {"scale" if name == "gate" and is_scale else name: each for name, each in given.items()}


def as_wide(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def plus(rows: Tensor, other: Tensor | None) -> Tensor:
    return rows if other is None else rows + other


def gated(rows: Tensor, form: FormSpec, of: Given) -> Tensor:
    return rows * ACTIVATIONS[form.activation](as_wide(of["gate"]))


def modulated(rows: Tensor, form: FormSpec, of: Given) -> Tensor:
    return plus(rows * FACTORS[form.modulate](of["scale"] if "scale" in of else of["gate"]), of.get("shift"))


# The steps by the names that forms have for them.
COMBINE = {
    "": lambda x, form, of: x,
    "add": lambda x, form, of: plus(x, of.get("residual")),
    "gate": lambda x, form, of: gated(as_wide(x), form, of),
    "add_gated": lambda x, form, of: plus(x * of["gate"], of.get("residual")),
    "summands": lambda x, form, of: x,
}
FINISH = {
    "": lambda v, form, of: v,
    "add": lambda v, form, of: v + of["residual"],
    "gate": gated,
}
ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
FACTORS = {"one_plus": lambda scale: 1 + scale, "identity": lambda scale: scale, "tanh": torch.tanh}


def normalized(norm: str, h: Tensor, eps: float, groups: int = 1) -> tuple[Tensor, Tensor | None, Tensor]:
    """(x_hat, mean, rstd), the statistics by groups, [..., groups, 1], if there are several."""
    wide = as_wide(h).unflatten(-1, (groups, -1)) if groups > 1 else as_wide(h)
    mean = wide.mean(-1, keepdim=True) if norm == "layer" else None
    centered = wide if mean is None else wide - mean
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    x_hat = centered * rstd
    return x_hat.flatten(-2) if groups > 1 else x_hat, mean, rstd


def finished(x_hat: Tensor, form: FormSpec, of: Given, dtype: torch.dtype) -> Tensor:
    """y before it is rounded, of an x in this dtype."""
    weight, bias = of.get("weight"), of.get("bias")
    u = x_hat.to(dtype).to(x_hat.dtype) if form.rounds_x_hat else x_hat
    u = u if weight is None else u * (form.weight_offset + weight.to(u.dtype))
    u = u if bias is None else u + bias.to(u.dtype)
    if form.finish != "gate":
        u = u.to(dtype)
    elif form.rounds_x_hat:
        for each in (weight, bias):
            dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
        u = u.to(dtype)
    return FINISH[form.finish](modulated(u, form, of) if form.modulate else u, form, of)


def as_written(norm: str, form: FormSpec, given: Given, eps: float) -> tuple[Tensor, ...]:
    """(y,), or (y, h) if the form returns the sum, in the dtypes of the tensors. Modulations broadcast."""
    of = {name: each for name, each in given.items() if each is not None}
    dtype = x_dtype = of["x"].dtype
    if "residual" in of:
        dtype = torch.promote_types(dtype, of["residual"].dtype)
    h = COMBINE[form.combine](of["x"], form, of)
    h = h.to(dtype) if form.rows_out else h
    x_hat, _, _ = normalized(norm, h, eps, form.groups)
    y = finished(x_hat, form, of, x_dtype).to(dtype if form.finish == "add" else x_dtype)
    return (y, h) if form.rows_out else (y,)
