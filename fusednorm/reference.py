"""Every op through ATen: for CPU tensors, for tensors without elements, and where no kernel of ours runs.

The formulas are plain tensor code. autograd.py runs them instead of the ops if torch.func, forward-mode AD or a second
derivative must differentiate the inside of an op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from .dtypes import accumulation_dtype
from .forms import PLAIN
from .operands import (
    FORWARD,
    OPS,
    BackwardOperands,
    ForwardOperands,
    Operands,
    Outputs,
    Role,
    call_op,
    in_two,
    operands_of,
    wanted_outputs,
)
from .problem.calls import BackwardCall, ForwardCall
from .problem.outputs import output_dtype, resolve_eps, shape_of, steps_of
from .problem.rows import spread
from .problem.validation import validate

# Rows that ATen adds up by an index in a fixed order: one block of a GPU takes those of a column one after another. Of
# more rows, the bits change from run to run.
MOST_OF_SUM = 3072


@torch.no_grad()
def forward(call: ForwardCall) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd) of a checked call. mean is None for RMSNorm."""
    x, dtype = call.x.tensor, call.problem.acc_dtype
    if call.problem.norm == "rms":
        return forward_formula(ForwardOperands("rms", x, call.normalized_shape, call.weight, call.bias, call.eps))
    # Upcast: ATen returns 16-bit statistics for 16-bit operands, and takes few mixtures of dtypes.
    x, weight, bias = _cast(x, dtype), _cast(call.weight, dtype), _cast(call.bias, dtype)
    y, mean, rstd = torch.native_layer_norm(x, call.normalized_shape, weight, bias, call.eps)
    return _cast(y, call.problem.x_dtype), mean, rstd


@torch.no_grad()
def backward(call: BackwardCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of a checked call. A gradient that the call does not want is None."""
    problem, shape = call.problem, call.normalized_shape
    grad_out, x, mask = call.grad_out.tensor, call.x.tensor, (problem.wants_dx, problem.wants_dw, problem.wants_db)
    bias = x.new_empty(shape, dtype=problem.bias_dtype) if problem.wants_db else None  # only its dtype is read
    if problem.norm == "rms":  # ATen has no such kernel for CPU tensors
        tensors = (grad_out, x, shape, None, call.rstd, call.weight, bias)
        return backward_formula(
            BackwardOperands("rms", *tensors, mask, call.residual_grad, call.dx_dtype, suffix="_residual")
        )
    operands = (grad_out, x, call.mean, call.rstd, call.weight)
    # Upcast: for 16-bit x, ATen accumulates dweight and dbias in 16 bits. ATen reads mean and rstd as if they were
    # contiguous.
    grad_out, x, mean, rstd, weight = (t if t is None else t.to(problem.acc_dtype).contiguous() for t in operands)
    bias = _cast(bias, problem.acc_dtype)
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(grad_out, x, shape, mean, rstd, weight, bias, mask)
    if call.residual_grad is not None:
        dx = dx + _cast(call.residual_grad, problem.acc_dtype)
    return _cast(dx, call.dx_dtype), _cast(dw, problem.weight_dtype), _cast(db, problem.bias_dtype)


@torch.no_grad()
def run(operands: Operands, call: ForwardCall | BackwardCall | None = None) -> Outputs:
    """The outputs: by ATen's kernels if these compute the op and it was checked (`call`), else by its formula."""
    if call is None or call.problem.form != PLAIN or call.problem.y_dtype or call.added:
        return formula(operands)
    return forward(call) if isinstance(call, ForwardCall) else backward(call)


def formula(operands: Operands) -> Outputs:
    """The outputs, as plain tensor code. Checks the operands."""
    validate(operands)
    if operands.width:
        return packed_formula(operands)
    if operands.groups > 1:
        return _joined(operands, formula_of_group(by_group(operands)))
    return formula_of_group(operands)


def packed_formula(operands: Operands) -> Outputs:
    """Of x and a gate that are columns of one tensor: with the gradient of this tensor as dx."""
    wants, name, cols = operands.output_mask, operands.op.removesuffix("_packed"), operands.x.shape[-1]
    given = {slot.name: getattr(operands, slot.name) for slot in OPS[name].arguments if slot.role is not Role.MASK}
    dx, dweight, dbias, dgate = formula(operands_of(name, (), given | {"output_mask": [*wants, wants[0]]}))
    if dx is None:
        return dx, dweight, dbias
    rest = operands.rest
    if rest is None:
        rest = dx.new_zeros(*dx.shape[:-1], operands.width - 2 * cols)
    first, last = sorted((operands.x_at, operands.gate_at))
    before, between, behind = rest.to(dx.dtype).split([first, last - first - cols, operands.width - last - cols], -1)
    both = (dx, dgate.to(dx.dtype))[:: 1 if first == operands.x_at else -1]
    return torch.cat([before, both[0], between, both[1], behind], -1), dweight, dbias


def by_group(operands: Operands) -> Operands:
    """The operands with groups as rows of their own: x is [*batch, groups, cols], and parameters are [groups, cols]."""
    groups, ndim = operands.groups, len(operands.normalized_shape)
    if groups == 1:
        return operands
    width, batch = math.prod(operands.normalized_shape), operands.x.shape[: operands.x.dim() - ndim]
    row = groups, width // groups
    shapes = {Role.PARAMETER: row, Role.STATISTIC: (*batch, groups, 1)}
    found = {
        slot.name: value.reshape(shapes.get(slot.role, (*batch, *row)))
        for slot in operands.slots
        if slot.role.is_tensor and slot.role is not Role.COLUMNS and (value := getattr(operands, slot.name)) is not None
    }
    return operands._replace(normalized_shape=row[1:], groups=1, **found)


def _joined(operands: Operands, outputs: Outputs) -> Outputs:
    """Outputs of groups as those of the operands."""
    given = operands.x.shape, operands.normalized_shape, operands.groups
    pairs = zip(operands.outputs, outputs, strict=True)
    return tuple(v if v is None else v.reshape(shape_of(each.role, *given)) for each, v in pairs)


def formula_of_group(operands: Operands) -> Outputs:
    """`formula` of checked operands without groups. Parameters may have dims of x before the normalized ones."""
    own = FORMULAS.get(operands.op)
    if own:
        return call_op(own, operands)
    if operands.form.again:
        return in_two(operands, formula_of_group)
    return forward_formula(operands) if operands.direction == FORWARD else backward_formula(operands)


def forward_formula(operands: Operands) -> Outputs:
    """(y, mean, rstd, ...) of a forward op, by the steps of its form, in the op's dtypes and shapes. mean is None for
    RMSNorm. Derivatives do not see the roundings between the steps."""
    x, form, dims = operands.x, operands.form, _normalized_dims(operands.normalized_shape)
    dtype = accumulation_dtype(*[each.dtype for each in operands.rows])
    y_dtype, _, _, *dtypes = [output_dtype(operands, each) for each in operands.outputs]
    h = COMBINE[form.combine](x.to(dtype), operands)
    added = [h.to(each).contiguous() for each in dtypes]
    h = rounded(h, dtypes[0]) if added and form.rounds_sum else h
    x_hat, mean, rstd = normalized(h, dims, operands.norm == "layer", operands.eps)
    x_hat = rounded(x_hat, x.dtype) if form.rounds_x_hat else x_hat
    u = affine(x_hat, operands.weight, operands.bias, form.weight_offset)
    if form.rounds_u:
        present = [each.dtype for each in (operands.weight, operands.bias) if each is not None]
        promoted = reduce(torch.promote_types, present, x.dtype)
        u = rounded(u, promoted) if promoted.itemsize == 2 else u
    y = FINISH[form.finish](_modulated(u, operands) if form.modulate else u, operands)
    return y.to(y_dtype).contiguous(), mean, rstd, *added


Normalized = tuple[Tensor, Tensor | None, Tensor]  # x_hat, mean (None for RMSNorm), rstd, all of one dtype


def normalized(h: Tensor, dims: tuple[int, ...], layer: bool, eps: float | None) -> Normalized:
    """Rows of these dims of h."""
    centered, mean = h, None
    if layer:
        mean = h.mean(dims, keepdim=True)
        mean = mean + (h - mean).mean(dims, keepdim=True)  # takes away its rounding error: large equal h give y = 0
        centered = h - mean
    rstd = torch.rsqrt(centered.square().mean(dims, keepdim=True) + resolve_eps(eps, h.dtype))
    return centered * rstd, mean, rstd


def _normalized_by(h: Tensor, normalized_shape: Sequence[int], mean: Tensor | None, rstd: Tensor) -> Normalized:
    """The same from the rows' statistics, of any shape and dtype."""
    shape = shape_of(Role.STATISTIC, h.shape, normalized_shape)
    mean, rstd = (each if each is None else each.reshape(shape).to(h.dtype) for each in (mean, rstd))
    return (h if mean is None else h - mean) * rstd, mean, rstd


def silu(z: Tensor) -> tuple[Tensor, Tensor]:
    s, slope = sigmoid(z)
    return z * s, s + z * slope


def sigmoid(z: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(z)
    return s, s * (1 - s)


def _activated(operands: Operands, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative."""
    return ACTIVATIONS[operands.form.activation](operands.gate.to(dtype))


def _times_gate(rows: Tensor, operands: Operands) -> Tensor:
    """rows * act(gate)"""
    dtype = accumulation_dtype(rows.dtype, operands.gate.dtype)
    return rows.to(dtype) * _activated(operands, dtype)[0]


def _gated(x: Tensor, operands: Operands) -> Tensor:
    """gate * x, in x's dtype."""
    product, steps = x * _spread(operands.gate, operands).to(x.dtype), steps_of(operands)
    return rounded(product, steps.branch) if steps else product


def _modulated(u: Tensor, operands: Operands) -> Tensor:
    """u * factor(scale) + shift, in u's dtype."""
    shift, steps = operands.shift, steps_of(operands)
    factor, _ = FACTORS[operands.form.modulate](_spread(operands.scale, operands).to(u.dtype))
    if steps:
        u, factor = rounded(u, steps.u), rounded(factor, steps.factor)
    v = u * factor
    v = rounded(v, steps.product) if steps else v
    return v if shift is None else v + _spread(shift, operands).to(v.dtype)


def _spread(modulation: Tensor, operands: Operands) -> Tensor:
    if operands.row_index is not None:
        index, is_there = _rows_of_table(modulation, operands)
        table = modulation if modulation.shape[0] else modulation.new_zeros(1, *modulation.shape[1:])
        rows = F.embedding(index, table.flatten(1))
        return torch.where(is_there, rows, float("nan")).reshape(operands.x.shape)
    return spread(modulation, operands.x.dim(), len(operands.normalized_shape))


def _rows_of_table(table: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
    """Which row of the table each row of x has, and whether it has one, [..., 1]; the first row in place of none."""
    index = operands.row_index
    is_there = (index >= 0) & (index < table.shape[0])
    return torch.where(is_there, index, 0), is_there[..., None]


def _plus(rows: Tensor, residual: Tensor | None) -> Tensor:
    """The sum as a new tensor, in rows' dtype."""
    return rows.clone() if residual is None else rows + residual.to(rows.dtype)


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a dtype, which the gradient is not: the difference of a number and its rounded value is exact."""
    difference = (rows.to(dtype).to(rows.dtype) - rows).detach()
    return rows + torch.where(rows.isinf(), 0.0, difference)


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None = None, offset: float = 0.0) -> Tensor:
    """x_hat * (offset + weight) + bias, in x_hat's dtype."""
    if weight is not None:
        x_hat = x_hat * (weight.to(x_hat.dtype) + offset if offset else weight.to(x_hat.dtype))
    return x_hat if bias is None else x_hat + bias.to(x_hat.dtype)


def backward_formula(operands: Operands) -> Outputs:
    """The gradients of a backward op, by the steps of its form, in the op's dtypes and shapes.

    All tensors are independent arguments: a derivative of this formula with respect to x treats mean and rstd as
    constants, and the formula's derivatives with respect to mean and rstd carry the rest.
    """
    form, x, weight, shape = operands.form, operands.x, operands.weight, operands.normalized_shape
    wants = dict(zip([each.name for each in operands.outputs], wanted_outputs(operands), strict=True))
    gate, factor = operands.gate if form.activates else None, None
    dtype = accumulation_dtype(*[each.dtype for each in (x, gate, operands.branch) if each is not None])
    h, dy, found = _row_of(operands).to(dtype), operands.grad_out.to(dtype), {}
    x_hat, *_ = of = _normalized_by(h, shape, operands.mean, operands.rstd)
    if form.modulate:
        factor, slope = FACTORS[form.modulate](_spread(operands.scale, operands).to(dtype))
    elif form.finish:
        factor, slope = FACTORS_OF_FINISH[form.finish](operands, dtype)
    du = dy if factor is None else dy * factor
    beside_dh = "dweight", "dbias", "dscale", "dshift", *(["dgate"] if form.finish else [])
    if any(wanted for name, wanted in wants.items() if name not in beside_dh):
        g = affine(du, weight, offset=form.weight_offset)
        dh = input_gradient(g, of, _normalized_dims(shape), operands.residual_grad)
        found |= _of_row(dh, operands)
    if wants["dweight"]:
        found["dweight"] = _sum_rows(du * x_hat, weight)
    if wants.get("dbias"):
        found["dbias"] = _sum_rows(du, operands.bias)
    if wants.get("dscale") or (wants.get("dgate") and form.finish):
        of_factor = dy * affine(x_hat, weight, operands.bias, form.weight_offset)
        if form.finish:
            found["dgate"] = of_factor * slope
        else:
            found["dscale"] = _sum_sharers(of_factor * slope, operands.scale, operands)
    if wants.get("dshift"):
        found["dshift"] = _sum_sharers(dy, operands.shift, operands)
    return _in_dtypes(found, wants.values(), operands)


def _of_row(dh: Tensor, operands: Operands) -> dict[str, Tensor]:
    """What the gradient of a row that is normalized adds to those of what it was made of, by name of the outputs."""
    return OF_ROW[(operands.form or PLAIN).combine](dh, operands)


def _of_sum(dh: Tensor, operands: Operands) -> dict[str, Tensor]:
    if operands.branch is None:
        return {"dx": dh}
    of_gate = _sum_sharers(dh * operands.branch.to(dh.dtype), operands.gate, operands)
    return {"dx": dh, "dbranch": dh * _spread(operands.gate, operands).to(dh.dtype), "dgate": of_gate}


def _of_gated(dh: Tensor, operands: Operands) -> dict[str, Tensor]:
    factor, slope = _activated(operands, dh.dtype)
    return {"dx": dh * factor, "dgate": dh * operands.x.to(dh.dtype) * slope}


def _in_dtypes(found: dict[str, Tensor], wanted: Iterable[bool], operands: Operands) -> Outputs:
    """The wanted outputs of those that were found, contiguous."""
    return tuple(
        found[each.name].to(output_dtype(operands, each)).contiguous() if want and each.name in found else None
        for each, want in zip(operands.outputs, wanted, strict=True)
    )


def input_gradient(g: Tensor, of: Normalized, dims: tuple[int, ...], residual_grad: Tensor | None = None) -> Tensor:
    """dx from the gradient of x_hat, with a residual's gradient, in g's dtype."""
    x_hat, mean, rstd = of
    inner = g - x_hat * (g * x_hat).mean(dims, keepdim=True)
    if mean is not None:
        inner = inner - g.mean(dims, keepdim=True)
    dx = inner * rstd
    return dx if residual_grad is None else dx + residual_grad.to(g.dtype)


def _sum_sharers(rows: Tensor, modulation: Tensor, operands: Operands) -> Tensor:
    """The sum over the rows that share a modulation, in its shape: a new tensor."""
    if operands.row_index is not None:
        index, is_there = _rows_of_table(modulation, operands)
        flat = index.numel(), math.prod(operands.normalized_shape)
        of_rows = torch.where(is_there.reshape(-1, 1), rows.reshape(flat), 0)
        # Of no columns or no rows of the table, ATen's kernel reads or writes memory that is not there.
        if not (of_rows.numel() and modulation.shape[0]):
            return of_rows.new_zeros(modulation.shape)
        parts = zip(of_rows.split(MOST_OF_SUM), index.flatten().split(MOST_OF_SUM), strict=True)
        sums = [torch.ops.aten.embedding_dense_backward(*each, modulation.shape[0], -1, False) for each in parts]
        return sum(sums[1:], sums[0]).reshape(modulation.shape)
    return rows[None].sum_to_size(_spread(modulation, operands).shape).reshape(modulation.shape)


def statistics_gradients(operands: Operands, grad_mean: Tensor | None, grad_rstd: Tensor | None) -> Outputs:
    """What the gradients of mean and rstd (None if absent) add to the outputs of a backward; None where nothing."""
    given, operands = operands, by_group(operands)
    h, mean, rstd = _row_of(operands), operands.mean, operands.rstd
    if given is not operands:
        grad_mean, grad_rstd = (g if g is None else g.reshape(rstd.shape) for g in (grad_mean, grad_rstd))
    dtype, cols = accumulation_dtype(h.dtype), math.prod(operands.normalized_shape)
    dh = torch.zeros_like(h, dtype=dtype)
    if grad_mean is not None:
        dh = dh + grad_mean / cols
    if grad_rstd is not None:
        centered = h.to(dtype) if mean is None else h.to(dtype) - mean
        dh = dh - grad_rstd * rstd.pow(3) * centered / cols
    made = _in_dtypes(_of_row(dh, operands), operands.output_mask, operands)
    return made if given is operands else _joined(given, made)


def _row_of(operands: Operands) -> Tensor:
    """The row that is normalized, from what a backward has of it: x, which may be a sum, or x and a gate."""
    return COMBINE[(operands.form or PLAIN).combine](operands.x, operands)


def statistics_of(operands: Operands, eps: float | None) -> tuple[Tensor | None, Tensor]:
    """(mean, rstd) of the row that a backward's operands are of, as its forward returned them. Their dtype says which
    eps None is: the forward may have had a row of float64 beside x that its backward lacks."""
    groups, eps = by_group(operands), resolve_eps(eps, operands.rstd.dtype)
    found = forward_formula(ForwardOperands(groups.norm, _row_of(groups), groups.normalized_shape, eps=eps))[1:3]
    return tuple(each if each is None else each.reshape(operands.rstd.shape) for each in found)


def _sum_rows(rows: Tensor, parameter: Tensor) -> Tensor:
    """The sum over the dims before a parameter's: a new tensor even if there are none."""
    return rows[None].sum_to_size(parameter.shape)


def _normalized_dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


# The steps of forms, by their names: (x or v, operands) -> the next rows.
COMBINE: dict[str, Callable[[Tensor, Operands], Tensor]] = {
    "": lambda x, of: x,
    "add": lambda x, of: _plus(x, of.residual),
    "gate": _times_gate,
    "add_gated": lambda x, of: _plus(_gated(x, of), of.residual),
    "summands": lambda x, of: x,
}
FINISH: dict[str, Callable[[Tensor, Operands], Tensor]] = {
    "": lambda v, of: v,
    "add": lambda v, of: _plus(v, of.residual),
    "gate": _times_gate,
}
FACTORS_OF_FINISH = {"gate": _activated}  # (operands, dtype) -> what v is multiplied by, and its derivative
# Of backwards: (dh, operands) -> the gradients of what h was made of, by name of the outputs.
OF_ROW: dict[str, Callable[[Tensor, Operands], dict[str, Tensor]]] = {
    "": _of_sum,
    "gate": _of_gated,
    "summands": lambda dh, of: {"dx": dh, "dsummand": dh.clone()},
}
# What a gate or a scale becomes, and its derivative.
ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}
FACTORS = {
    "one_plus": lambda scale: (1 + scale, 1),
    "identity": lambda scale: (scale, 1),
    "tanh": lambda scale: (scale.tanh(), 1 - scale.tanh().square()),
}
FORMULAS: dict[str, Callable[..., tuple]] = {}  # of the arguments of ops from outside the package
