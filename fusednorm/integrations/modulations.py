"""Finds modulated norms (adaLN) in Dynamo's graph, with the sum that they normalize (joining.py).

    h = residual + gate * branch                or residual + branch, or no sum
    y = norm(h) * (1 + scale) + shift           a norm by hand or torch's; with or without shift and casts
    y = residual + gate * norm(h)               or tanh(gate)

or as addcmul. A scale may be viewed as x's rows want it behind 1 + scale, too, and a gate behind tanh.

Inductor computes the gradients of scale, shift and gate, which are sums over the rows of a sample, in kernels of their
own, and reads a row twice forward. The op reads and writes each large tensor once in each direction. Its results are
rounded once, where code in 16 bits rounds at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..operands import FORWARD, OPS, WAYS
from .edits import is_equal
from .joining import Joined, behind_float_casts, has_shape_of, is_float, narrowed_to
from .written import Written, both_orders, kind_of, only_user, terms_of, uncast, uncast_all, value_of, with_number

TANH = torch.tanh, "tanh"


class Modulated(NamedTuple):
    """A norm of `h` with what modulates it, whose result is `y`."""

    norm: Written
    h: Node
    y: Node
    scale: Node
    shift: Node | None
    view: Node | None = None  # of 1 + scale, which has the scale's shape

    def joined(self, of: str = "", **rows: Node) -> Joined:
        """With rows in place of h."""
        op = OPS[f"{self.norm.norm}_norm_{WAYS[FORWARD]}{of}_modulated"]
        tensors = {"weight": self.norm.weight, "bias": self.norm.bias, "scale": self.scale, "shift": self.shift}
        tensors |= rows or {"x": self.h}
        replaced = {self.y: 0} | ({self.h: len(op.outputs) - 1} if rows else {})
        views = {"scale": self.view} if self.view else {}
        return Joined(self.norm, op, self.h, tensors, self.norm.settings, replaced, views)


def find(norm: Written) -> Iterator[Joined]:
    """The ways to join it: first those with the sum. A model may normalize a cast of the sum."""
    found = _modulated(norm, norm.x)
    while found:
        yield from _with_sum(found)
        if (h := uncast(found.h)) is found.h:
            yield found.joined()
            return
        found = _modulated(norm, h)


def find_behind(norm: Written) -> Iterator[Joined]:
    """To join it with a gated residual behind it."""
    x = uncast_all(norm.x)
    user, residual, factor = _multiplied(norm)
    if user is not None and residual is None:
        product, user = user, only_user(user)
        terms = terms_of(user, "add") or []
        residual = terms[terms[0] is product] if product in terms else None
    view = factor if _is_view(factor) else None
    gate = uncast(view.args[0] if view else factor)
    is_tanh = getattr(gate, "target", None) in TANH and bool(gate.args)
    gate, view = (gate.args[0], view) if is_tanh else (uncast(factor), None)
    if not has_shape_of(residual, x) or not is_float(gate) or not _is_modulation(view or gate, x):
        return
    tensors = {"x": x, "residual": uncast(residual), "scale": gate, "weight": norm.weight, "bias": norm.bias}
    settings = norm.settings | {"modulate": "tanh" if is_tanh else "identity"}
    op = OPS[f"{norm.norm}_norm_{WAYS[FORWARD]}_modulated_plus_residual"]
    yield Joined(norm, op, x, tensors, settings, {narrowed_to(user, x): 0}, {"scale": view} if view else {})


def _multiplied(norm: Written) -> tuple[Node | None, Node | None, Node | None]:
    """What multiplies its result, what that adds, and the factor."""
    y = behind_float_casts(norm.y)
    user = only_user(y)
    added, *factors = terms_of(user, "addcmul", 3) or (None, *(terms_of(user, "mul") or ()))
    return (user, added, factors[factors[0] is y]) if y in factors else (None, None, None)


def _modulated(norm: Written, h: Node) -> Modulated | None:
    user, shift, factor = _multiplied(norm)
    view = factor if _is_view(factor) else None
    scale, one = with_number(view.args[0] if view else factor)
    scale, y = scale if view else uncast(scale), user
    if one != 1.0 or not is_float(scale) or not _is_modulation(like := view or scale, h):
        return None
    if shift is None:
        summed = only_user(y)
        terms = terms_of(summed, "add") or []
        if y in terms and has_shape_of(other := terms[terms[0] is y], like):
            y, shift = summed, other
    elif not has_shape_of(shift, like):
        return None
    return Modulated(norm, h, narrowed_to(y, h), scale, shift and uncast(shift), view)


def _with_sum(found: Modulated) -> Iterator[Joined]:
    """With what h is a sum of."""
    total, like = found.h, found.view or found.scale
    while kind_of(total) == "cast" and only_user(total.args[0]) is total:
        total = total.args[0]
    for residual, gate, branch in _gated_sums(total):
        if has_shape_of(gate, like) and all(has_shape_of(each, found.h) for each in (residual, branch)):
            yield found.joined("_of_gated_sum", x=branch, residual=residual, gate=gate)
    terms = [uncast(each) for each in terms_of(total, "add") or ()]
    if terms and all(has_shape_of(each, found.h) for each in terms):
        yield found.joined("_of_sum", x=terms[0], residual=terms[1])


def _gated_sums(total: Node) -> Iterator[tuple[Node, Node, Node]]:
    """The ways to see it as residual + gate * branch."""
    fused = terms_of(total, "addcmul", 3)
    sums = [(fused[0], fused[1:])] if fused else []
    for residual, product in both_orders([uncast(each) for each in terms_of(total, "add") or ()]):
        if only_user(product):
            sums.append((residual, terms_of(product, "mul")))
    for residual, factors in sums:
        for gate, branch in both_orders([uncast(each) for each in factors or ()]):
            yield uncast(residual), gate, branch


def _is_view(node: Any) -> bool:
    """Whether it adds dims of one element to a tensor."""
    if kind_of(node) == "unsqueeze":
        return True
    index = node.args[1] if kind_of(node) == "getitem" else ()
    return isinstance(index, tuple) and bool(index) and all(each in (None, ..., slice(None)) for each in index)


def _is_modulation(node: Any, h: Node) -> bool:
    """Whether it has h's columns, and h's other dims, the first ones whole and the rest 1: then rows that share one are
    next to each other."""
    if not is_float(node) or value_of(node).dim() != value_of(h).dim():
        return False
    *batch, cols = value_of(node).shape
    *whole, width = value_of(h).shape
    ones = [is_equal(size, 1) for size in batch]
    first = next((at for at in range(len(batch)) if all(ones[at:])), len(batch))
    return is_equal(cols, width) and all(map(is_equal, batch[:first], whole))
