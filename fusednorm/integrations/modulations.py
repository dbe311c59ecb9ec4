"""Finds modulated norms (adaLN) in Dynamo's graph, with the sum that they normalize (joining.py).

    h = residual + gate * branch                or residual + branch, or no sum
    y = norm(h) * (1 + scale) + shift           a norm by hand or torch's; with or without shift and casts

Inductor computes the gradients of scale, shift and gate, which are sums over the rows of a sample, in kernels of their
own, and reads a row twice forward. The op reads and writes each large tensor once in each direction. Its results are
rounded once, where code in 16 bits rounds at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Node

from ..operands import FORWARD, OPS, WAYS
from .joining import Joined, behind_float_casts, has_shape_of, is_equal, is_float, narrowed_to
from .written import Written, kind_of, only_user, other_factor, terms_of, uncast, value_of, with_number


class Modulated(NamedTuple):
    """A norm of `h` with what modulates it, whose result is `y`."""

    norm: Written
    h: Node
    y: Node
    scale: Node
    shift: Node | None

    def joined(self, of: str = "", **rows: Node) -> Joined:
        """With rows in place of h."""
        op = OPS[f"{self.norm.norm}_norm_{WAYS[FORWARD]}{of}_modulated"]
        given = {"weight": self.norm.weight, "bias": self.norm.bias, "scale": self.scale, "shift": self.shift}
        tensors = {name: each for name, each in given.items() if each is not None} | (rows or {"x": self.h})
        replaced = {self.y: 0} | ({self.h: len(op.outputs) - 1} if rows else {})
        return Joined(self.norm, op, self.h, tensors, self.norm.settings, replaced)


def find(norm: Written) -> Iterator[Joined]:
    """The ways to join it: first those with the sum. A model may normalize a cast of the sum."""
    found = _modulated(norm, norm.x)
    while found:
        yield from _with_sum(found)
        if (h := uncast(found.h)) is found.h:
            yield found.joined()
            return
        found = _modulated(norm, h)


def _modulated(norm: Written, h: Node) -> Modulated | None:
    y = behind_float_casts(norm.y)
    product = only_user(y)
    scale, one = with_number(other_factor(y, product))
    if one != 1.0 or not _is_modulation(scale := uncast(scale), h):
        return None
    y, shift, summed = product, None, only_user(product)
    terms = terms_of(summed, "add") or []
    if product in terms and has_shape_of(other := terms[terms[0] is product], scale):
        y, shift = summed, uncast(other)
    return Modulated(norm, h, narrowed_to(y, h), scale, shift)


def _with_sum(found: Modulated) -> Iterator[Joined]:
    """With what h is a sum of."""
    total = found.h
    while kind_of(total) == "cast" and only_user(total.args[0]) is total:
        total = total.args[0]
    terms = [uncast(each) for each in terms_of(total, "add") or ()]
    if not terms or not all(has_shape_of(each, found.h) for each in terms):
        return
    for residual, product in (terms, terms[::-1]):
        for gate, branch in _factors(product):
            if has_shape_of(gate, found.scale) and has_shape_of(branch, found.h) and only_user(product):
                yield found.joined("_of_gated_sum", x=branch, residual=residual, gate=gate)
    yield found.joined("_of_sum", x=terms[0], residual=terms[1])


def _factors(product: Node) -> list[tuple[Node, Node]]:
    """The two factors of a product, in both orders."""
    factors = [uncast(each) for each in terms_of(product, "mul") or ()]
    return [(one, other) for one, other in (factors, factors[::-1])] if factors else []


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
