"""What ops of forms must return, in float64: the norm as models write it, and its gradients by autograd."""

from __future__ import annotations

import math

import torch
from cases import EPS, FP64
from torch import Tensor

from bench.written import COMBINE, Given, finished, normalized
from fusednorm.operands import BACKWARD, Operands, Role
from fusednorm.problem.rows import spread

VALUES = Role.ROWS, Role.PARAMETER, Role.MODULATION, Role.TABLE, Role.PACKED_ROWS
Outputs = dict[str, Tensor]  # by name, without those that are absent


def in_float64(operands: Operands) -> Given:
    values = {slot.name: getattr(operands, slot.name) for slot in operands.slots if slot.role in VALUES}
    return {name: each.detach().double() for name, each in values.items() if each is not None}


def by_row(operands: Operands, given: Given) -> Given:
    """With modulations that broadcast, and of tables the rows that the index names."""
    roles, found, index = {slot.name: slot.role for slot in operands.slots}, dict(given), operands.row_index
    for name, each in given.items():
        if roles[name] is Role.MODULATION:
            found[name] = spread(each, operands.x.dim(), len(operands.normalized_shape))
        elif roles[name] is Role.TABLE:
            found[name] = each[index.long()]
    return found


def forward(operands: Operands) -> Outputs:
    """Only a sum and x_hat are rounded on the way, and u before a gate, if the form does so."""
    form, x, of = operands.form, operands.x, by_row(operands, in_float64(operands))
    h = COMBINE[form.combine](of["x"], form, of)
    found = {}
    if form.rows_out:
        residual = x if operands.residual is None else operands.residual
        stored = h.to(operands.residual_dtype or torch.promote_types(x.dtype, residual.dtype)).double()
        found["new_residual"], h = stored, stored if form.rounds_sum else h
    x_hat, mean, rstd = normalized(operands.norm, h, operands.eps, form.groups)
    parameters = {"weight": operands.weight, "bias": operands.bias}
    y = finished(x_hat, form, of | parameters, x.dtype if form.rounds_x_hat else FP64)
    found |= {"y": y.double(), "mean": mean, "rstd": rstd}
    found = {name: each for name, each in found.items() if each is not None}
    return {name: each.flatten(-2) if each.dim() > h.dim() else each for name, each in found.items()}  # groups


def backward(operands: Operands, added: Tensor | None = None) -> Outputs:
    """All gradients. One may be added to that of the row that is normalized."""
    leaves = {name: each.requires_grad_() for name, each in in_float64(operands).items()}
    dy, of_stream = (leaves.pop(name, None) for name in ("grad_out", "residual_grad"))
    form, of = operands.form, by_row(operands, leaves)
    h = COMBINE[form.combine](of["x"], form, of)
    if operands.branch is not None:  # is in h: what is added is zero, with the derivatives
        branch = of["gate"] * of["branch"]
        h = h + branch - branch.detach()
    y = finished(normalized(operands.norm, h, EPS, form.groups)[0], form, of, FP64)
    added = of_stream if added is None else added.double()
    outputs, grads = ((y,), (dy,)) if added is None else ((y, h), (dy, added))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    found = {f"d{name}": each for name, each in zip(leaves, gradients, strict=True) if each is not None}
    return found | {"dsummand": found["dx"]}


def rounded_once(epsilon: float, terms: int) -> tuple[float, float]:
    """rtol and atol of an output of this dtype. Each of its elements is a sum over so many rows."""
    return epsilon + 2e-6, 5e-5


def summed(epsilon: float, terms: int) -> tuple[float, float]:
    """Errors of sums over many rows grow."""
    return epsilon + 2e-6, max(epsilon / 8, 2e-5) * 2 * math.sqrt(terms)


def assert_near(operands: Operands, outputs: tuple[Tensor | None, ...], exact: Outputs, bounds=rounded_once) -> None:
    """Each wanted output is near the exact one, and no other is there."""
    wanted = getattr(operands, "output_mask", [True] * len(outputs))
    for each, got, is_wanted in zip(operands.outputs, outputs, wanted, strict=True):
        want = exact.get(each.name) if is_wanted else None
        assert (got is None) == (want is None), each.name
        if got is None:
            continue
        assert got.shape == want.shape and got.is_contiguous(), each.name
        if operands.direction == BACKWARD:
            asked = getattr(operands, each.dtype) if each.dtype else None
            assert got.dtype == (asked or getattr(operands, each.like).dtype), each.name
        rtol, atol = bounds(torch.finfo(got.dtype).eps, max(1, operands.x.numel() // got.numel()))
        if each.role is Role.STATISTIC:
            rtol, atol = 1e-5, 1e-6
        say = lambda text, name=each.name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol, msg=say)
