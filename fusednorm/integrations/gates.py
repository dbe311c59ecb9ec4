"""Finds norms with a gate of x's shape in Dynamo's graph (joining.py).

    y = norm(x) * act(gate)                     Qwen3-Next, Kimi-Linear
    y = norm(x * act(gate))                     Mamba2; also by groups of columns: a view before the norm and behind it

The norm is one by hand or torch's. Inductor makes the sums over rows in a kernel of their own,
which computes the gate's activation again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.nn import functional as F

from ..functional import gated_op
from ..operands import OPS
from .joining import Joined, behind_float_casts, has_shape_of, narrowed_to
from .written import (
    VIEWS,
    Written,
    both_orders,
    kind_of,
    only_user,
    other_factor,
    rest,
    terms_of,
    uncast,
    uncast_all,
    value_of,
)

ACTIVATIONS = {F.silu: "silu", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", "sigmoid": "sigmoid"}


def find(norm: Written) -> Iterator[Joined]:
    x = uncast_all(norm.x)
    y = behind_float_casts(norm.y)
    product = only_user(y)
    if gate := _activated(other_factor(y, product), x):
        yield _joined(norm, norm, True, x, narrowed_to(product, x), gate)
    inner, x_hat, groups = _of_groups(norm)
    for factor, other in both_orders(terms_of(inner, "mul")):
        x = uncast(factor)
        if gate := isinstance(x, Node) and _activated(other, x):
            whole = rest(norm._replace(x=x, y=x_hat, weight=None)) if norm.x_hat else norm
            if whole:
                yield _joined(norm, whole, False, x, narrowed_to(whole.y, x), gate, groups)


def _joined(
    norm: Written, of_x: Written, norm_before_gate: bool, x: Node, y: Node, gate: tuple[Node, str], groups: int = 1
) -> Joined:
    """of_x: the norm as that of x."""
    tensors = {"x": x, "gate": gate[0], "weight": of_x.weight, "bias": of_x.bias}
    settings = of_x.settings | {"activation": gate[1], "groups": groups}
    return Joined(norm, OPS[gated_op(norm.norm, norm_before_gate)], x, tensors, settings, {y: 0})


def _activated(node: Node | None, x: Node) -> tuple[Node, str] | None:
    """(gate, activation) if the node is an activation of a tensor of x's shape."""
    node = node and uncast(node)
    activation = ACTIVATIONS.get(getattr(node, "target", None))
    if not activation or not node.args or not has_shape_of(gate := uncast(node.args[0]), x):
        return None
    return gate, activation


def _of_groups(norm: Written) -> tuple[Node, Node, int]:
    """What is normalized, x_hat, and the number of groups of columns. Views that split and join groups are skipped."""
    inner, x_hat = norm.x, norm.x_hat or norm.y
    behind = only_user(x_hat)
    if kind_of(inner) not in VIEWS or kind_of(behind) not in VIEWS:
        return inner, x_hat, 1
    whole, (*_, count, size) = inner.args[0], value_of(inner).shape
    is_one_dim_less = value_of(whole).dim() == value_of(inner).dim() - 1 and has_shape_of(behind, whole)
    are_groups = is_one_dim_less and isinstance(count, int) and value_of(whole).shape[-1] == count * size
    return (whole, behind, count) if are_groups else (inner, x_hat, 1)
